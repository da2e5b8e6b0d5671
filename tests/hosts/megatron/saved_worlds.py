"""Models under a topology, their state saved in several formats: each world is run once a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from releases import CORE, EVERY, OLDEST

GATED = (
    "--swiglu --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights --disable-bias-linear"
    " --normalization RMSNorm --position-embedding-type rope --no-rope-fusion "
)
DISTRIBUTED = "--bf16 --use-distributed-optimizer "
TIED = GATED.replace("--untie-embeddings-and-output-weights ", "")
TP, PP = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 "


@dataclass(frozen=True)
class World:
    """A model under a topology, its state saved in several formats by one run."""

    release: str
    ranks: int
    arguments: str
    formats: tuple[str, ...]


EXPERTS_WHOLE = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type allgather --moe-ffn-hidden-size 24 "
EXPERTS = EXPERTS_WHOLE + "--expert-model-parallel-size 2 "
ETP = "--expert-tensor-parallel-size 1 "
WIDTH_20 = "--hidden-size 20 --ffn-hidden-size 28 "
MANY_BUCKETS = f"{WIDTH_20}--overlap-grad-reduce --ddp-bucket-size 1000 "
ALL = ("model_space", "buckets", "torch")
WORLDS = {
    "biases tp2 dp2": World("0.18.2", 4, DISTRIBUTED + TP, ALL),
    "biases tp2 pp2": World("0.19.2", 4, DISTRIBUTED + TP + PP, ALL),
    "gated tp2 pp2": World("0.19.2", 4, DISTRIBUTED + GATED + TP + PP, ALL),
    "gated pp2 vp2": World("0.19.2", 2, DISTRIBUTED + GATED + PP + "--num-layers-per-virtual-pipeline-stage 1 ", ALL),
    "tied pp2": World("0.19.2", 2, DISTRIBUTED + TIED + PP, ALL),
    "experts ep2": World("0.19.2", 2, DISTRIBUTED + GATED + EXPERTS, ALL),
    "experts tp2 pp2": World("0.19.2", 4, DISTRIBUTED + GATED + EXPERTS_WHOLE + TP + PP, ("buckets", "torch")),
    "experts tp2 etp1": World("0.18.2", 2, DISTRIBUTED + GATED + EXPERTS_WHOLE + TP + ETP, ("buckets", "torch")),
    "experts tp2 ep2": World("0.19.2", 4, DISTRIBUTED + GATED + EXPERTS + TP, ("buckets", "torch")),
    "experts ep2 pp2": World("0.18.2", 4, DISTRIBUTED + GATED + EXPERTS + PP, ("buckets", "torch")),
    "many buckets dp2": World("0.18.2", 2, DISTRIBUTED + MANY_BUCKETS, ALL),
    "tied tp2, bf16 without the distributed optimizer": World("0.18.2", 2, "--bf16 " + TP, ("plain", "torch")),
    "experts ep2, bf16 without the distributed optimizer": World("0.19.2", 2, "--bf16 " + GATED + EXPERTS, ("plain",)),
    "gated fp32": World("0.18.2", 1, GATED, ("plain", "torch")),
}
WORLDS |= {f"gated tp2 dp2 by {release}": World(release, 4, DISTRIBUTED + GATED + TP, ALL) for release in OLDEST}
BY_CORE = {
    f"gated tp2 by {release}": World(release, 2 if release == "0.16.1" else 4, DISTRIBUTED + GATED + TP, forms)
    for release, forms in CORE.items()
}
"""By core alone; those of releases that are only read with two data-parallel ranks, which cut fragments."""
WORLDS |= BY_CORE
FIRST = PP + "--decoder-first-pipeline-num-layers 1 "
COUNTED = PP + "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
VP3 = COUNTED + "--num-layers-per-virtual-pipeline-stage 1 "
CP3 = "--context-parallel-size 3 --seq-length 12 --max-position-embeddings 12 "
if EVERY:
    WORLDS |= {
        "tied pp2, one layer first": World("0.19.2", 2, DISTRIBUTED + TIED + FIRST, ALL),
        "gated pp2 vp3, stages without a layer": World("0.18.2", 2, DISTRIBUTED + GATED + VP3, ALL),
        "gated cp3": World("0.19.2", 3, DISTRIBUTED + GATED + CP3, ALL),
    }
WIDTH_128 = "--hidden-size 128 --ffn-hidden-size 256 --overlap-grad-reduce --ddp-bucket-size 100000 "
FAST = "--ddp-pad-buckets-for-high-nccl-busbw "
SHIFTED = {
    "many buckets dp2": WORLDS["many buckets dp2"],
    "tied pp2, width 20": World("0.19.2", 2, DISTRIBUTED + WIDTH_20 + PP, ("model_space",)),
    "tied tp2 pp2, width 20": World("0.18.2", 4, DISTRIBUTED + WIDTH_20 + PP + TP, ("model_space",)),
    "many buckets tp2 dp2": World("0.19.2", 4, DISTRIBUTED + MANY_BUCKETS + TP, ("model_space",)),
    "width 128 dp3": World("0.19.2", 3, DISTRIBUTED + GATED + WIDTH_128 + "--global-batch-size 6 ", ("model_space",)),
    "width 128 dp2, busbw": World("0.18.2", 2, DISTRIBUTED + GATED + WIDTH_128 + FAST, ("model_space",)),
}
"""What Megatron-LM itself saves wrong as `model_space`."""
FLAGS: dict[str, dict[str, Any]] = {
    "model_space": {"ckpt_format": "torch_dist", "dist_ckpt_optim_fully_reshardable": True},
    "buckets": {"ckpt_format": "torch_dist", "dist_ckpt_optim_fully_reshardable": False},
    "fragments": {"ckpt_format": "torch_dist"},
    "plain": {"ckpt_format": "torch_dist"},
    "torch": {"ckpt_format": "torch"},
}
Saved = Callable[[str, str], Path]
"""The folder of `--save` of a world and a format."""


def saved_by(releases: Any, scratch: Path) -> Saved:
    folders: dict[str, Path] = {}

    def folder(name: str, wanted: str) -> Path:
        world = {**SHIFTED, **WORLDS}[name]
        if name not in folders:
            made = scratch / f"world{len(folders)}"
            saves = [{"save": str(made / one), **FLAGS[one]} for one in world.formats]
            job = {"arguments": world.arguments, "saves": saves}
            function = "core_saves:save" if world.release in CORE else "format_jobs:save"
            releases[world.release].run(function, ranks=world.ranks, **job)
            folders[name] = made
        return folders[name] / wanted

    return folder
