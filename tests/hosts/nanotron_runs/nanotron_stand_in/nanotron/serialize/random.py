"""Synthetic: a rank's random states in a file of torch, which torch itself refuses to read from 2.6 on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _path(context: Any, root_folder: Path) -> Path:
    groups = {"tp": context.tp_pg, "dp": context.dp_pg, "pp": context.pp_pg}
    name = "_".join(f"{axis}-{dist.get_rank(group)}-of-{group.size()}" for axis, group in groups.items())
    return root_folder / "random" / f"{name}.pt"


def save_random_states(random_states: Any, parallel_context: Any, root_folder: Path) -> None:
    path = _path(parallel_context, root_folder)
    path.parent.mkdir(exist_ok=True, parents=True)
    torch.save(random_states, path)


def load_random_states(parallel_context: Any, root_folder: Path) -> Any:
    return torch.load(_path(parallel_context, root_folder))
