"""Synthetic nanotron checkpoints, in torch's own words: tensors are cut and files named as nanotron does (2411b02).

Written without ds_reshard and without nanotron, so that its rules for places are not checked against themselves;
`make test-nanotron SRC=path` holds these files beside those of a real checkout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Shape = tuple[int, ...]
STEP, LR, PEAK = 7, 2.5e-4, 3e-4


@dataclass(frozen=True)
class Param:
    """One parameter: the pipeline stages (of two) that train it, the dimension that is cut, and its chunks."""

    name: str
    shape: Shape
    stages: tuple[int, ...]
    split: int | None = None
    chunks: tuple[int, ...] | None = None


MODEL = (
    Param("emb.pp_block.weight", (16, 6), (0, 1), split=0),  # tied: the last stage has it too
    Param("blocks.0.pp_block.qkv.weight", (16, 6), (0,), split=0, chunks=(8, 4, 4)),
    Param("blocks.0.pp_block.out.weight", (6, 8), (0,), split=1),
    Param("blocks.0.pp_block.mix.weight", (3, 12), (0,), split=1, chunks=(8, 4)),
    Param("blocks.0.pp_block.tiny", (1,), (0,)),
    Param("blocks.0.pp_block.ln.weight", (6,), (0,)),
    Param("blocks.1.pp_block.qkv.weight", (16, 6), (1,), split=0, chunks=(8, 4, 4)),
    Param("blocks.1.pp_block.odd.weight", (5, 3), (1,)),
    Param("norm.pp_block.weight", (7,), (1,)),
)


@dataclass(frozen=True)
class Run:
    """The run that is said to have saved it."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 1
    masters: bool = True
    version: str = "1.5"
    model: tuple[Param, ...] = MODEL
    numpy_text: bool = False
    old_scheduler: bool = False
    scheduler_dp: bool = False
    seed: int = 0
    cp: int = 1
    exp: int = 1

    def params(self, pp: int) -> list[Param]:
        """Those of one pipeline rank, in the order of its module."""
        own = [param for param in self.model if self.pp == 1 or pp in param.stages]
        return (
            own
            if self.pp == 1 or pp == 0
            else [p for p in own if len(p.stages) == 1] + [p for p in own if len(p.stages) > 1]
        )

    def home(self, param: Param) -> int:
        return param.stages[0] if self.pp > 1 else 0


def values(run: Run) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor by (name, kind), whole."""
    made = torch.Generator().manual_seed(run.seed)
    held = {}
    for param in run.model:
        master = torch.randn(param.shape, generator=made)
        held[param.name, "weight"] = master.to(torch.bfloat16) if run.masters else master
        if run.masters:
            held[param.name, "fp32"] = master
        held[param.name, "exp_avg"] = torch.randn(param.shape, generator=made)
        held[param.name, "exp_avg_sq"] = torch.rand(param.shape, generator=made)
    return held


def local(tensor: torch.Tensor, param: Param, tp: int, rank: int) -> torch.Tensor:
    """What a tensor-parallel rank has of it."""
    if param.split is None:
        return tensor
    parts = tensor.split(param.chunks, param.split) if param.chunks else [tensor]
    return torch.cat([part.chunk(tp, param.split)[rank] for part in parts], param.split).contiguous()


def dp_slices(numel: int, dp: int) -> list[tuple[int, int]]:
    """The elements of each data-parallel rank: ceil(numel / dp), one less for the last ones."""
    sizes = [-(-numel // dp)] * dp
    for rank in range(dp - (sizes[0] * dp - numel), dp):
        sizes[rank] -= 1
    edges = [sum(sizes[:rank]) for rank in range(dp + 1)]
    return list(pairwise(edges))


def write(run: Run, folder: Path, held: dict[tuple[str, str], torch.Tensor] | None = None) -> Path:
    """The folder that was given as `checkpoints_path`, with one checkpoint in it."""
    held, place = held or values(run), folder / str(STEP)
    place.mkdir(parents=True)
    for param in run.model:
        _weights(run, param, held[param.name, "weight"], place)
    (place / "optimizer").mkdir()
    (place / "lr_scheduler").mkdir()
    for pp in range(run.pp):
        for tp in range(run.tp):
            for dp in range(run.dp) if run.zero else (0,):
                ranks = _ranks(run, pp, dp, tp)
                for exp in range(run.exp):
                    name = f"optimizer/optimizer_{ranks}.pt".replace("exp-0", f"exp-{exp}")
                    torch.save(_optimizer(run, held, pp, tp, dp), place / name)
                if not run.old_scheduler and (run.scheduler_dp or not dp):
                    ranks = _ranks(run, pp, dp, tp, named=run.scheduler_dp)
                    torch.save(_scheduler(len(run.params(pp))), place / f"lr_scheduler/lr_scheduler_{ranks}.pt")
    if run.old_scheduler:
        torch.save(_scheduler(len(run.params(0))), place / "lr_scheduler/lr_scheduler.pt")
    write_texts(run, place)
    (folder / "latest.txt").write_text(str(STEP))
    return folder


def _ranks(run: Run, pp: int, dp: int, tp: int, *, named: bool = True) -> str:
    """Schedulers are named without the data-parallel rank, but in 2024, when `is_zero` was passed as True."""
    middle = f"_dp-{dp}-of-{run.dp}" if run.zero and named else ""
    return f"pp-{pp}-of-{run.pp}{middle}_tp-{tp}-of-{run.tp}_exp-0-of-{run.exp}"


def _weights(run: Run, param: Param, tensor: torch.Tensor, place: Path) -> None:
    *folders, leaf = param.name.split(".")
    at = place.joinpath("model", *folders)
    at.mkdir(parents=True, exist_ok=True)
    if param.split is None:
        save_file({"data": tensor.contiguous()}, at / f"model_{leaf}.safetensors", metadata={})
        return
    for tp in range(run.tp):
        name = f"model_{leaf}_pp-rank-{run.home(param)}-of-{run.pp}_tp-rank-{tp}-of-{run.tp}.safetensors"
        save_file({"data": local(tensor, param, run.tp, tp)}, at / name, metadata=metadata(run, param, tp))


def metadata(run: Run, param: Param, tp: int) -> dict[str, str]:
    """`TensorMetadata.to_str_dict` of a shard."""
    assert param.split is not None
    axes, at, pairs = range(len(param.shape)), 0, []
    for chunk in param.chunks or (param.shape[param.split],):
        part = chunk // run.tp
        own = f"{at // run.tp},{at // run.tp + part},None" if param.chunks else "None,None,None"
        whole = f"{at + tp * part},{at + (tp + 1) * part},None"
        sides = (own, whole)
        pairs.append(
            "#".join("|".join(side if axis == param.split else "None,None,None" for axis in axes) for side in sides)
        )
        at += chunk
    sizes = [
        f"np.int64({n})" if run.numpy_text and axis == param.split else str(n) for axis, n in enumerate(param.shape)
    ]
    shape = f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
    return {"version": run.version, "local_global_slices_pairs": ";".join(pairs), "unsharded_shape": shape}


def _optimizer(run: Run, held: dict[tuple[str, str], torch.Tensor], pp: int, tp: int, dp: int) -> dict[str, Any]:
    """`optimizer.state_dict()` of one rank: one param group a parameter, empty where the rank has no part."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    names: dict[int, str] = {}
    groups, masters = [], {}
    for param in run.params(pp):

        def part(kind: str, param: Param = param) -> torch.Tensor:
            whole = local(held[param.name, kind], param, run.tp, tp)
            if not run.zero:
                return whole.clone()
            start, stop = dp_slices(whole.numel(), run.dp)[dp]
            return whole.reshape(-1)[start:stop].clone()

        number = len(names)
        group: dict[str, Any] = {
            "lr": LR,
            "initial_lr": PEAK,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.01,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": True,
        }
        groups.append({**group, "params": []})
        if part("exp_avg").numel():
            groups[-1]["params"] = [number]
            names[number] = param.name
            state[number] = {
                "step": torch.tensor(float(STEP)),
                "exp_avg": part("exp_avg"),
                "exp_avg_sq": part("exp_avg_sq"),
            }
            if run.masters:
                masters[param.name] = part("fp32")
    saved: dict[str, Any] = {"state": state, "param_groups": groups, "names": names}
    if run.masters:
        flat = torch.cat([torch.empty(0), *(master.reshape(-1) for master in masters.values())])
        edges = torch.tensor([0, *(master.numel() for master in masters.values())]).cumsum(0).tolist()
        saved["gradient_accumulator"] = {
            name: flat[a:b].view(masters[name].shape) for name, a, b in zip(masters, edges[:-1], edges[1:], strict=True)
        }
    return saved


def _scheduler(groups: int) -> dict[str, Any]:
    """`LambdaLR.state_dict()` with nanotron's partials, of which torch keeps an empty dict."""
    return {
        "base_lrs": [PEAK] * groups,
        "last_epoch": STEP,
        "_step_count": STEP + 1,
        "_last_lr": [LR] * groups,
        "lr_lambdas": [{} for _ in range(groups)],
    }


def write_texts(run: Run, place: Path, step: int = STEP) -> None:
    """What lies beside the tensors of a checkpoint after so many steps."""
    kind = (
        "ZeroDistributedOptimizer"
        if run.zero
        else "OptimizerFromGradientAccumulator"
        if run.masters
        else "NamedOptimizer"
    )
    sizes = {"tp_size": run.tp, "dp_size": run.dp, "pp_size": run.pp, "expert_parallel_size": run.exp}
    config: dict[str, Any] = {
        "type": kind,
        "parallelism": {key: str(size) for key, size in sizes.items()},
        "configs": {},
    }
    if run.zero:
        offsets, shapes = {}, {}
        for param in run.params(0):  # world rank 0 knows its own stage alone
            shape = local(torch.empty(param.shape), param, run.tp, 0).shape
            edges = dp_slices(shape.numel(), run.dp)
            offsets[param.name] = {str(r): [str(a), str(b)] for r, (a, b) in enumerate(edges) if a < b}
            shapes[param.name] = [str(size) for size in shape]
        config["configs"] = {"param_name_to_dp_rank_offsets": offsets, "orig_param_shapes": shapes}
    (place / "optimizer/optimizer_config.json").write_text(json.dumps(config))
    stages = [
        {
            "name": "stable",
            "start_training_step": 1,
            "consumed_train_samples": 8 * step,
            "sequence_length": 16,
            "consumed_tokens_per_dataset_folder": {"d": 8 * step * 16},
        }
    ]
    metas = {
        "consumed_train_samples": 8 * step,
        "last_train_step": step,
        "consumed_tokens_total": 8 * step * 16,
        "last_stage_idx": 0,
        "data_stages": stages,
    }
    meta = {"version": run.version, "tp": run.tp, "dp": run.dp, "cp": run.cp, "custom_metas": None, "metas": metas}
    (place / "checkpoint_metadata.json").write_text(json.dumps(meta, indent=2, sort_keys=True))
    (place / "model_config.json").write_text(json.dumps({"hidden_size": 6}))
    (place / "config.yaml").write_text(CONFIG.format(run=run, zero=run.zero, batch=8 // run.dp))


CONFIG = """\
checkpoints:
  checkpoint_interval: 1
general:
  run: synthetic
optimizer:
  accumulate_grad_in_fp32: {run.masters}
  learning_rate_scheduler:
    learning_rate: 0.0003
  zero_stage: {zero}
parallelism:
  dp: {run.dp}
  expert_parallel_size: {run.exp}
  pp: {run.pp}
  tp: {run.tp}
  tp_mode: REDUCE_SCATTER
tokens:
  batch_accumulation_per_replica: {batch}
  micro_batch_size: 1
  sequence_length: 16
"""

RUNS = {
    "one rank": Run(),
    "dp 2": Run(dp=2),
    "dp 3, numpy's spelling": Run(dp=3, numpy_text=True),
    "tp 2, whole states": Run(tp=2, zero=0),
    "dp 2 tp 2": Run(dp=2, tp=2),
    "dp 2 tp 2, fp32": Run(dp=2, tp=2, masters=False),
    "pp 2": Run(pp=2, dp=2),
    "pp 2 tp 2 dp 3": Run(pp=2, tp=2, dp=3),
    "pp 2 tp 2, whole states, fp32": Run(pp=2, tp=2, zero=0, masters=False),
    "of 2024, schedulers by dp": Run(dp=2, version="1.4", scheduler_dp=True),
    "of 2024, one scheduler": Run(tp=2, zero=0, version="1.2", old_scheduler=True),
}


def again(run: Run, **changes: Any) -> Run:
    """The same model and values under another topology."""
    return replace(run, **changes)
