"""Hand what was read to DeepSpeed's own restore: it adopts the tensors and links what hangs on them.

Every `load_state_dict` here is DeepSpeed's: `DeepSpeedZeroOptimizer`, `BF16_Optimizer` (whose second
positional argument differs: always keywords), `DeepSpeedZeroOptimizer_Stage3`; at stage 0 the wrapped torch
optimizer's. Masters that were read in place are handed back as saved: torch sees that source and
destination are one tensor and copies nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_reshard.hosts.deepspeed.live import LiveOptimizer

if TYPE_CHECKING:
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerValues:
    """What the optimizer takes over, built and checked before a byte moved.

    `groups` are the hyper-parameters per param group (None keeps the live ones), `scalars` the scalar
    states per flat buffer; `loss_scaler`, `clip_grad` and so on are in `extras` where the checkpoint has
    them. `step` is the elastic format's one step.
    """

    groups: Mapping[int, Mapping[str, object]]
    scalars: Mapping[int, Mapping[str, object]]
    extras: Mapping[str, object]
    step: object


def adopt(
    engine: DeepSpeedEngine, live: LiveOptimizer, values: OptimizerValues, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Make the optimizer's state what was read. `tensors` holds the fresh buffers by name."""
    state: dict[int, dict[str, object]] = {}
    for number, buffer in enumerate(live.buffers):
        found = {
            name.split("/")[0]: tensor
            for name, tensor in tensors.items()
            if name.endswith(f"/{number}") and not name.startswith(("fp32/", "weight/", "module/", "frozen/"))
        }
        if live.replicated and live.kind != "fused":
            found = {kind: tensor.view(buffer.fp32.shape) for kind, tensor in found.items()}
        state[number] = {**values.scalars.get(number, {}), **found}
    base: dict[str, object] = {
        "state": {n: s for n, s in state.items() if s},
        "param_groups": _param_groups(live, values),
    }
    if live.replicated:
        _adopt_stage0(engine, values, base)
    else:
        _adopt_partitioned(engine, live, values, base)


def _param_groups(live: LiveOptimizer, values: OptimizerValues) -> list[dict[str, object]]:
    groups: list[dict[str, object]] = []
    for number, group in enumerate(live.groups):
        hyper = values.groups.get(number)
        if hyper is None:
            hyper = {key: value for key, value in group.items() if key != "params"}
            if values.step is not None:
                hyper["step"] = values.step
        groups.append({**hyper, "params": [n for n, buffer in enumerate(live.buffers) if buffer.group == number]})
    return groups


def _adopt_partitioned(
    engine: DeepSpeedEngine, live: LiveOptimizer, values: OptimizerValues, base: Mapping[str, object]
) -> None:
    import deepspeed

    optimizer = engine.optimizer
    masters = [buffer.fp32 for buffer in live.buffers]
    kept = {
        name: values.extras.get(name, getattr(optimizer, name))
        for name in ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
        if name in values.extras or hasattr(optimizer, name)
    }
    if live.kind == "zero3":
        kept.pop("clip_grad", None)
        optimizer._clear_fp32_optimizer_param_groups()  # a fresh torch Adagrad has its groups filled already
        mine = {
            **kept,
            "zero_stage": live.stage,
            "partition_count": live.dp,
            "optimizer_state_dict": base,
            "fp32_flat_groups": masters,
        }
    else:
        mine = {
            **kept,
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": masters,
            "ds_version": deepspeed.__version__,
        }
        if hasattr(optimizer, "groups_padding"):
            mine["group_paddings"] = optimizer.groups_padding
        if hasattr(optimizer, "round_robin_bit16_padding"):
            mine["param_alignment_paddings"] = optimizer.round_robin_bit16_padding
    everyone: list[object] = [None] * live.dp
    everyone[live.rank] = mine
    arguments = {
        "state_dict_list": everyone,
        "load_optimizer_states": True,
        "load_from_fp32_weights": True,
        "checkpoint_folder": None,
        "load_serial": None,
        "param_shapes": None,
    }
    accepted = inspect.signature(optimizer.load_state_dict).parameters
    optimizer.load_state_dict(**{name: value for name, value in arguments.items() if name in accepted})


def _adopt_stage0(engine: DeepSpeedEngine, values: OptimizerValues, base: dict[str, object]) -> None:
    """The wrapped torch optimizer takes its state; loss scale and clipping keep this run's values.

    A torch optimizer's groups list frozen parameters too, so indices are renumbered over all of them.
    """
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    numbers: dict[int, int] = {}
    groups, at, number = [], 0, 0
    saved = base["param_groups"]
    assert isinstance(saved, list)
    states = base["state"]
    assert isinstance(states, dict)
    for group, hyper in zip(inner.param_groups, saved, strict=True):
        indices = []
        for param in group["params"]:
            if param.requires_grad:
                numbers[number] = at
                number += 1
            indices.append(at)
            at += 1
        groups.append({**hyper, "params": indices})
    inner.load_state_dict({"state": {numbers[n]: state for n, state in states.items()}, "param_groups": groups})
    if "clip_grad" in values.extras and hasattr(optimizer, "clip_grad"):
        optimizer.clip_grad = values.extras["clip_grad"]
