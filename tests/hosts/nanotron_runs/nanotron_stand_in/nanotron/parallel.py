"""Synthetic: process groups, and parameters that say which part of the whole they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class SlicesPair:
    local_slices: tuple[slice, ...]
    global_slices: tuple[slice, ...]


@dataclass
class ShardedInfo:
    local_global_slices_pairs: tuple[SlicesPair, ...]
    unsharded_shape: tuple[int, ...]


class NanotronParameter(torch.nn.Parameter):
    info: ShardedInfo | None = None

    @property
    def is_sharded(self) -> bool:
        return self.info is not None

    def get_sharded_info(self) -> ShardedInfo | None:
        return self.info


class ParallelContext:
    """The groups of one rank; all ranks make all groups, in one order."""

    def __init__(self, *, pp: int, dp: int, tp: int, cp: int = 1, exp: int = 1) -> None:
        self.expert_parallel_size = exp
        ranks = torch.arange(dist.get_world_size()).reshape(pp, dp, cp, tp)
        self.world_pg = self._mine([ranks.flatten()])
        self.pp_pg = self._mine(ranks.permute(1, 2, 3, 0).reshape(-1, pp))
        self.dp_pg = self._mine(ranks.permute(0, 2, 3, 1).reshape(-1, dp))
        self.dp_cp_pg = self._mine(ranks.permute(0, 3, 1, 2).reshape(-1, dp * cp)) if cp > 1 else self.dp_pg
        self.tp_pg = self._mine(ranks.reshape(-1, tp))
        self.cp_pg = self._mine(ranks.permute(0, 1, 3, 2).reshape(-1, cp))
        self.ep_pg = self._mine(ranks.reshape(-1, 1))

    @staticmethod
    def _mine(groups: Any) -> Any:
        made = [dist.new_group([int(rank) for rank in group]) for group in groups]
        return next(group for group in made if dist.get_rank(group) >= 0)
