"""Synthetic ZeRO-2 checkpoints, in torch's own words: parameters are joined, padded and cut as DeepSpeed 0.19.8 does.

Written without ds_reshard, so that its rules for places are not checked against themselves;
tests/hosts/tools/test_builder.py holds the files beside those of real DeepSpeed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Shape = tuple[int, ...]
TAG = "global_step3"


@dataclass(frozen=True)
class Built:
    """What a synthetic run trains; values are drawn from `seed`."""

    groups: tuple[tuple[tuple[str, Shape], ...], ...]
    frozen: tuple[tuple[str, Shape], ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    dp: int = 2
    seed: int = 0
    config: dict[str, Any] = field(default_factory=lambda: {"bf16": {"enabled": True}})


def values(built: Built) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor by (name, kind): masters, states, and weights that are their cast."""
    made = torch.Generator().manual_seed(built.seed)
    held = {}
    for group in built.groups:
        for name, shape in group:
            held[name, "fp32"] = torch.randn(shape, generator=made)
            held[name, "weight"] = held[name, "fp32"].to(torch.bfloat16)
            for state in built.states:
                held[name, state] = torch.rand(shape, generator=made)
    for name, shape in built.frozen:
        held[name, "weight"] = torch.randn(shape, generator=made).to(torch.bfloat16)
    return held


def write(built: Built, folder: Path, held: dict[tuple[str, str], torch.Tensor] | None = None) -> Path:
    """The files that a run at ZeRO-2 on `dp` ranks saves."""
    held, place = held or values(built), folder / TAG
    place.mkdir(parents=True)
    torch.save(_model(built, held), place / "mp_rank_00_model_states.pt")
    for rank in range(built.dp):
        torch.save(_optimizer(built, held, rank), place / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text(TAG)
    return folder


def _model(built: Built, held: dict[tuple[str, str], torch.Tensor]) -> dict[str, Any]:
    module = OrderedDict((name, value) for (name, kind), value in held.items() if kind == "weight")
    for alias, name in built.tied:
        module[alias] = module[name]
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(shape)) for n, shape in group) for group in built.groups],
        "frozen_param_shapes": OrderedDict((name, torch.Size(shape)) for name, shape in built.frozen),
        "shared_params": dict(built.tied),
        "frozen_param_fragments": OrderedDict((name, module[name]) for name, _ in built.frozen),
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 3,
        "global_samples": 36,
        "dp_world_size": built.dp,
        "mp_world_size": 1,
        "ds_config": built.config,
        "ds_version": "0.19.8",
    }


def _flat(parts: list[torch.Tensor], dp: int) -> tuple[torch.Tensor, int]:
    """Joined, padded at the end to a multiple of 2 * dp; with the elements that are not padding."""
    joined = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.zeros(0)
    used = joined.numel()
    return torch.nn.functional.pad(joined, (0, -used % (2 * dp))), used


def _optimizer(built: Built, held: dict[tuple[str, str], torch.Tensor], rank: int) -> dict[str, Any]:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    masters, paddings, slices, state, groups = [], [], [], {}, []
    for number, group in enumerate(built.groups):
        flat, used = _flat([held[name, "fp32"] for name, _ in group], built.dp)
        size = flat.numel() // built.dp
        stop = max(0, min(size, used - rank * size))
        masters.append(flat[rank * size : rank * size + stop].clone().requires_grad_())
        paddings.append(size - stop)
        held_state: dict[str, Any] = {"step": torch.tensor(3.0)}
        for kind in built.states:
            held_state[kind] = _flat([held[name, kind] for name, _ in group], built.dp)[0].chunk(built.dp)[rank].clone()
        state[number] = held_state
        at, addresses = 0, OrderedDict()
        for name, _ in group:
            numel = held[name, "fp32"].numel()
            first, last = max(at, rank * size), min(at + numel, (rank + 1) * size)
            if first < last:
                addresses[name] = fragment_address(numel=last - first, start=first - rank * size)
            at += numel
        slices.append(addresses)
        groups.append({"lr": 0.1 / (1 + number), "weight_decay": 0.0, "params": [number]})
    entries = {
        "loss_scaler": LossScaler(1.0),
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 1.0,
        "base_optimizer_state": {"state": state, "param_groups": groups},
        "single_partition_of_fp32_groups": masters,
        "zero_stage": ZeroStageEnum(2),
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(group) for group in built.groups],
        "partition_count": [built.dp] * len(built.groups),
        "ds_version": "0.19.8",
        "param_slice_mappings": slices,
    }
    return {"optimizer_state_dict": entries, "ds_config": built.config, "ds_version": "0.19.8"}
