"""Synthetic: optimizer and scheduler files, their names and what goes wrong with them as at commit 2411b02."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanotron.optim import ZeroDistributedOptimizer


def _name(kind: str, context: Any, is_zero: Any) -> str:
    ranks = {"pp": context.pp_pg, "dp": context.dp_pg, "tp": context.tp_pg}
    if is_zero is not True:
        del ranks["dp"]
    places = "_".join(f"{axis}-{dist.get_rank(group)}-of-{group.size()}" for axis, group in ranks.items())
    return f"{kind}_{places}_exp-0-of-{context.expert_parallel_size}.pt"


def optimizer_filename(parallel_context: Any, is_zero: bool) -> str:
    return _name("optimizer", parallel_context, is_zero)


def lr_scheduler_filename(parallel_context: Any, is_zero: bool) -> str:
    return _name("lr_scheduler", parallel_context, is_zero)


def save_lr_scheduler(lr_scheduler: Any, is_zero: Any, parallel_context: Any, root_folder: Path) -> None:
    if not is_zero and dist.get_rank(parallel_context.dp_cp_pg) > 0:
        return
    folder = root_folder / "lr_scheduler"
    folder.mkdir(exist_ok=True, parents=True)
    torch.save(lr_scheduler.state_dict(), folder / lr_scheduler_filename(parallel_context, is_zero))


def state_dict_to_device(state_dict: dict[str, Any], device: str) -> None:
    assert state_dict["state"][0]["exp_avg"].device.type == "cpu"


def load_optimizer(
    optimizer: Any,
    parallel_context: Any,
    root_folder: Path,
    map_location: Any = None,
    param_shard_metadata: Any = None,
    model: Any = None,
) -> None:
    zero = optimizer.inherit_from(ZeroDistributedOptimizer)
    path = root_folder / "optimizer" / optimizer_filename(parallel_context, is_zero=zero)
    optimizer.load_state_dict(torch.load(path, map_location=map_location), map_location=map_location)


def load_lr_scheduler(lr_scheduler: Any, is_zero: Any, parallel_context: Any, root_folder: Path) -> None:
    name = lr_scheduler_filename(parallel_context, is_zero)
    lr_scheduler.load_state_dict(torch.load(root_folder / "lr_scheduler" / name))
    lr_scheduler._initial_step()
