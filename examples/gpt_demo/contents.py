"""What an engine holds, read from the optimizer's own flat partitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from gpt_demo.layouts import Contents


def read_contents(engine: Any) -> Contents:
    """A copy of everything that training depends on. Collective."""
    contents = Contents()
    partitions = _stage3_partitions if hasattr(engine.optimizer, "fp16_partitioned_groups_flat") else _flat_partitions
    for name, first, share, master, state in partitions(engine):
        contents.pieces[name, "fp32"] = first, master.detach()[share].clone()
        for kind, value in state.items():
            whole = value.detach().reshape(1).clone() if value.dim() == 0 else None
            contents.pieces[name, kind] = (first, value[share].clone()) if whole is None else (-1, whole)
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, enabled=hasattr(params[0], "ds_id")):
        for name, param in engine.module.named_parameters():
            contents.pieces[name, "weight"] = 0, param.detach().flatten().clone()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.optimizer.param_groups]
    contents.facts = {
        "param groups": groups,
        "schedule": engine.lr_scheduler.state_dict(),
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
    }
    return contents


Partition = tuple[str, int, slice, torch.Tensor, dict[str, torch.Tensor]]


def _flat_partitions(engine: Any) -> Iterator[Partition]:
    """Stages 1 and 2: a param group is one flat tensor, cut into equal parts, whatever the parameters' edges."""
    optimizer, rank = engine.optimizer, dist.get_rank()
    flats = optimizer.single_partition_of_fp32_groups
    offsets = optimizer.round_robin_bit16_offsets
    for params, starts, flat in zip(optimizer.round_robin_bit16_groups, offsets, flats, strict=True):
        low, high = rank * flat.numel(), (rank + 1) * flat.numel()
        for param, start in zip(params, starts, strict=False):
            begin, end = max(start, low), min(start + param.numel(), high)
            if begin < end:
                share = slice(begin - low, end - low)
                yield engine.param_names[param], begin - start, share, flat, optimizer.optimizer.state[flat]


def _stage3_partitions(engine: Any) -> Iterator[Partition]:
    """Stage 3: each parameter is cut on its own; its parts lie one after another."""
    optimizer, rank, ranks = engine.optimizer, dist.get_rank(), dist.get_world_size()
    flats = optimizer.fp32_partitioned_groups_flat
    for params, flat in zip(optimizer.fp16_groups, flats, strict=True):
        at = 0
        for param in params:
            numel = -(-param.ds_numel // ranks)
            begin, end = min(rank * numel, param.ds_numel), min((rank + 1) * numel, param.ds_numel)
            if begin < end:
                share = slice(at, at + end - begin)
                yield engine.param_names[param], begin, share, flat, optimizer.optimizer.state[flat]
            at += numel
