"""The optimizer takes over what was read, by DeepSpeed's own `load_state_dict`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ds_reshard.formats.zero.flat import FlatBuffer
from ds_reshard.hosts.deepspeed.engine import Optimizer, inner_of, live_groups, masters_of
from ds_reshard.hosts.deepspeed.entries import OptimizerValues

if TYPE_CHECKING:
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine


_NO_STATES = ("fp32", "weight", "module", "frozen")


def adopt(
    engine: DeepSpeedEngine, live: Optimizer, values: OptimizerValues, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Make the optimizer's state what was read. `tensors` holds the fresh buffers by name.

    DeepSpeed's own `load_state_dict` adopts the tensors and links what hangs on them: of `DeepSpeedZeroOptimizer`,
    `BF16_Optimizer` (whose second positional argument differs: always keywords), `DeepSpeedZeroOptimizer_Stage3`; at
    stage 0 of the wrapped torch optimizer. Masters that were read in place are handed back as saved: torch sees that
    source and destination are one tensor and copies nothing.
    """
    state: dict[int, dict[str, object]] = {}
    states: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, of = name.partition("/")
        if kind not in _NO_STATES:
            states.setdefault(int(of), {})[kind] = tensor
    masters = masters_of(engine)
    for number, held in enumerate(masters):
        found = states.get(number, {})
        if live.replicated and live.kind != "fused":
            found = {kind: tensor.view(held.shape) for kind, tensor in found.items()}
        state[number] = {**values.scalars.get(number, {}), **found}
    base: dict[str, object] = {
        "state": {n: s for n, s in state.items() if s},
        "param_groups": group_values(live_groups(engine), live.buffers, values),
    }
    with _as_read(inner_of(engine), masters, state):
        if live.replicated:
            _adopt_stage0(engine, values, base)
        else:
            _adopt_partitioned(engine, live, values, base, masters)


@contextmanager
def _as_read(
    inner: torch.optim.Optimizer, masters: Sequence[torch.Tensor], state: Mapping[int, Mapping[str, object]]
) -> Iterator[None]:
    """Inside, an optimizer gets states that are no fractions, and fp32 states of 16-bit masters that it keeps, as read.

    torch casts the states that it loads to the type of their parameter (`_process_value_according_to_param_policy`,
    optim/optimizer.py, 2.13), DeepSpeedCPUAdam's as well (`fp32_optimizer_states`, ops/adam/cpu_adam.py, 0.19.8).
    """
    import torch

    wide = any(held.element_size() < 4 for held in masters)
    wide = wide and getattr(inner, "fp32_optimizer_states", False)
    kept = [
        (number, kind, read)
        for number, own in state.items()
        for kind, read in own.items()
        if kind != "step" and isinstance(read, torch.Tensor) and (wide or not read.is_floating_point())
    ]

    def put_back(optimizer: torch.optim.Optimizer) -> None:
        for number, kind, read in kept:
            held = optimizer.state[masters[number]]
            held[kind] = read.to(held[kind].device)

    if not kept:
        yield
        return
    handle = inner.register_load_state_dict_post_hook(put_back)
    try:
        yield
    finally:
        handle.remove()


_KEPT_APART = ("params", "step", "initial_lr")


def group_values(
    running: Sequence[Mapping[str, object]], buffers: Sequence[FlatBuffer], values: OptimizerValues
) -> list[dict[str, object]]:
    """The param groups as the optimizer takes them over: what was saved, and else what it has."""
    groups: list[dict[str, object]] = []
    for number, group in enumerate(running):
        hyper = values.groups.get(number)
        if hyper is None:
            hyper = {key: value for key, value in group.items() if key != "params"}
            if values.step is not None:
                hyper["step"] = values.step
        # what this run's optimizer needs and the saved one had not: FusedAdam's bias_correction, where AdamW was saved
        hyper = {**{key: value for key, value in group.items() if key not in _KEPT_APART}, **hyper}
        if group.get("moe"):
            hyper = {**hyper, "name": group["name"]}  # says how many ranks share the experts of this run
        groups.append({**hyper, "params": [n for n, buffer in enumerate(buffers) if buffer.group == number]})
    return groups


def _adopt_partitioned(
    engine: DeepSpeedEngine,
    live: Optimizer,
    values: OptimizerValues,
    base: Mapping[str, object],
    masters: Sequence[torch.Tensor],
) -> None:
    import deepspeed

    optimizer = engine.optimizer
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
            "fp32_flat_groups": list(masters),
        }
    else:
        mine = {
            **kept,
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": list(masters),
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
    """The wrapped torch optimizer takes its state.

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
    for name in ("clip_grad", "loss_scale_config"):
        if name in values.extras and hasattr(optimizer, name):
            setattr(optimizer, name, values.extras[name])
