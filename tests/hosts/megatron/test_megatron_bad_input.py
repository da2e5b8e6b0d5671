"""A checkpoint that contradicts itself, or that nothing proves: one named error, whoever reads it, and nothing changes.

Each is looked at twice: by a conversion, which writes nothing, and by `--load` on two ranks under another topology,
which refuse alike and leave model and optimizer as they were.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from damages import changed_chunks, changed_common, changed_number, changed_text, same_bytes
from saved_worlds import DISTRIBUTED, EXPERTS_WHOLE, GATED, PP, TIED, TP, Saved

import ds_reshard.operations as tools
from ds_reshard import errors
from ds_reshard.operations.source import find_listing, open_checkpoint

MODELS = {"gated tp2 pp2": GATED, "tied pp2": TIED, "experts ep2": GATED + EXPERTS_WHOLE}
BUCKET = "optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"


@dataclass(frozen=True)
class Case:
    """What is done to a copy of an iteration, given the folders of all worlds; and what is said of it."""

    world: str
    form: str
    damage: Callable[[Path, Saved], object]
    error: str
    said: str


def _iteration(folder: Path) -> Path:
    (step,) = folder.glob("iter_*")
    return step


def _nothing_proves(step: Path, saved: Saved) -> None:
    """Norms of a layer that are the same bits, in layers of which the order is inferred: either would fit."""
    layer = "decoder.layers"
    same_bytes(
        step, f"{layer}.mlp.linear_fc1.layer_norm_weight", f"{layer}.self_attention.linear_qkv.layer_norm_weight"
    )
    changed_common(step, changed_text("local", "transformer_engine"))


def _of_pipeline(step: Path, saved: Saved) -> None:
    """`mp_rank_00_001` is the second stage of two, or the second half of the experts."""
    name = "mp_rank_00_001"
    shutil.rmtree(step / name)
    shutil.copytree(_iteration(saved("gated pp2 vp2", "torch")) / name, step / name)


def _copy_differs(step: Path, saved: Saved) -> None:
    """A bit of a moment of a tensor that each tensor-parallel rank has whole."""
    state: Any = open_checkpoint(find_listing(str(step), None)).state  # type: ignore[attr-defined]
    extent = state.extents[-1]["decoder.final_layernorm.weight[exp_avg]"]
    with open(extent.path, "r+b") as file:
        file.seek(extent.byte_offset)
        (byte,) = file.read(1)
        file.seek(extent.byte_offset)
        file.write(bytes([byte ^ 1]))


def _other_moments(step: Path, saved: Saved) -> None:
    """`distrib_optim.pt` of one save beside the weights of another; by the rule each tensor has values of its own."""
    files = [step / f"mp_rank_0{rank}_000" / "distrib_optim.pt" for rank in range(2)]
    shutil.copy(files[1], files[0])


CASES = {
    "nothing proves a slot, and two orders fit": Case(
        "experts ep2", "buckets", _nothing_proves, "UnsupportedLayout", "nothing proves whose states are whose"
    ),
    "arguments contradict the tensors": Case(
        "gated tp2 pp2",
        "buckets",
        lambda step, _: changed_common(step, changed_number("padded_vocab_size", 112, 113)),
        "CheckpointDamaged",
        "args.padded_vocab_size",
    ),
    "arguments contradict the layers": Case(
        "gated tp2 pp2",
        "model_space",
        lambda step, _: changed_common(step, changed_number("num_layers", 4, 5)),
        "CheckpointDamaged",
        "args.num_layers",
    ),
    "a sharding type of a later release": Case(
        "gated tp2 pp2",
        "model_space",
        lambda step, _: changed_common(step, changed_text("fully_reshardable", "entirely_reshardable")),
        "UnsupportedLayout",
        "entirely_reshardable",
    ),
    "a sharding type of an earlier release": Case(
        "gated tp2 pp2",
        "model_space",
        lambda step, _: changed_common(step, changed_text("fully_reshardable", "fully_sharded_bucket_space")),
        "UnsupportedLayout",
        "core 0.14",
    ),
    "a hole in a bucket": Case(
        "gated tp2 pp2",
        "buckets",
        lambda step, _: changed_chunks(step, BUCKET, lambda chunks: chunks.pop(1)),
        "CheckpointDamaged",
        "impossible chunks",
    ),
    "pieces of a bucket that overlap": Case(
        "gated tp2 pp2",
        "buckets",
        lambda step, _: changed_chunks(step, BUCKET, lambda chunks: chunks.append(chunks[1])),
        "CheckpointDamaged",
        "impossible chunks",
    ),
    "a tensor-parallel folder is missing": Case(
        "gated tp2 pp2", "torch", lambda step, _: shutil.rmtree(step / "mp_rank_01_001"), "CheckpointNotFound", "01_001"
    ),
    "a stage is missing": Case(
        "tied pp2", "torch", lambda step, _: shutil.rmtree(step / "mp_rank_00_001"), "CheckpointNotFound", "00_001"
    ),
    "a folder of experts is missing": Case(
        "experts ep2", "torch", lambda step, _: shutil.rmtree(step / "mp_rank_00_001"), "CheckpointNotFound", "00_001"
    ),
    "a stage where experts belong": Case("experts ep2", "torch", _of_pipeline, "CheckpointDamaged", "mp_rank_00_001"),
    "moments of another save": Case("gated tp2 pp2", "torch", _other_moments, "CheckpointDamaged", "not the cast"),
    "copies that differ": Case(
        "gated tp2 pp2", "torch", _copy_differs, "CheckpointDamaged", "not the same on each rank"
    ),
}


@pytest.fixture(params=CASES)
def damaged(request: pytest.FixtureRequest, saved: Saved, tmp_path: Path) -> tuple[Case, Path]:
    case = CASES[request.param]
    copy = Path(shutil.copytree(saved(case.world, case.form), tmp_path / "copy"))
    case.damage(_iteration(copy), saved)
    return case, copy


def test_it_is_refused_everywhere(damaged: tuple[Case, Path], releases: Any, tmp_path: Path) -> None:
    case, folder = damaged
    with pytest.raises(getattr(errors, case.error), match=case.said):
        tools.convert(str(folder), str(tmp_path / "out"), to="megatron")
    assert not (tmp_path / "out").exists()
    arguments = f"{DISTRIBUTED}{MODELS[case.world]}--load {folder}"
    told = releases["0.19.2"].run("load_jobs:refused", ranks=2, arguments=arguments)
    assert len({one["message"] for one in told}) == 1 and case.said in told[0]["message"]
    assert [(one["refused"], one["changed"]) for one in told] == [(case.error, [])] * 2


@pytest.mark.parametrize("file", ["model_optim_rng.pt", "distrib_optim.pt"])
def test_a_file_that_one_rank_alone_would_miss(saved: Saved, releases: Any, file: str, tmp_path: Path) -> None:
    """Under the saved topology Megatron ends that rank as if all were well, or stops late; the others wait for it."""
    copy = tmp_path / "copy"
    shutil.copytree(saved("gated tp2 pp2", "torch"), copy)
    (_iteration(copy) / "mp_rank_01_001" / file).unlink()
    job = {"arguments": f"{DISTRIBUTED}{GATED}{TP}{PP} --load {copy}"}
    told = releases["0.19.2"].run("load_jobs:refused", ranks=4, **job)
    assert {(one["refused"], tuple(one["changed"])) for one in told} == {("CheckpointNotFound", ())}
    assert len({one["message"] for one in told}) == 1 and f"mp_rank_01_001/{file}: is missing" in told[0]["message"]
