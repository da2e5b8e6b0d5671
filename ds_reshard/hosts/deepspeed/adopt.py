"""The optimizer takes over what was read, by DeepSpeed's own `load_state_dict`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ds_reshard.hosts.deepspeed.entries import SCALE, OptimizerValues
from ds_reshard.hosts.deepspeed.live import LiveOptimizer

if TYPE_CHECKING:
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine


_NO_STATES = ("fp32", "weight", "module", "frozen")


def adopt(
    engine: DeepSpeedEngine, live: LiveOptimizer, values: OptimizerValues, tensors: Mapping[str, torch.Tensor]
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
    for number, buffer in enumerate(live.buffers):
        found = states.get(number, {})
        if live.replicated and live.kind != "fused":
            found = {kind: tensor.view(buffer.fp32.shape) for kind, tensor in found.items()}
        state[number] = {**values.scalars.get(number, {}), **found}
    base: dict[str, object] = {
        "state": {n: s for n, s in state.items() if s},
        "param_groups": group_values(live, values),
    }
    with _as_read(getattr(engine.optimizer, "optimizer", engine.optimizer), live, state):
        if live.replicated:
            _adopt_stage0(engine, values, base)
        else:
            _adopt_partitioned(engine, live, values, base)


@contextmanager
def _as_read(
    inner: torch.optim.Optimizer, live: LiveOptimizer, state: Mapping[int, Mapping[str, object]]
) -> Iterator[None]:
    """Inside, an optimizer gets states that are no fractions, and fp32 states of 16-bit masters that it keeps, as read.

    torch casts the states that it loads to the type of their parameter (`_process_value_according_to_param_policy`,
    optim/optimizer.py, 2.13), DeepSpeedCPUAdam's as well (`fp32_optimizer_states`, ops/adam/cpu_adam.py, 0.19.8).
    """
    import torch

    wide = any(buffer.fp32.element_size() < 4 for buffer in live.buffers)
    wide = wide and getattr(inner, "fp32_optimizer_states", False)
    kept = [
        (number, kind, read)
        for number, own in state.items()
        for kind, read in own.items()
        if kind != "step" and isinstance(read, torch.Tensor) and (wide or not read.is_floating_point())
    ]

    def put_back(optimizer: torch.optim.Optimizer) -> None:
        for number, kind, read in kept:
            held = optimizer.state[live.buffers[number].fp32]
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


def group_values(live: LiveOptimizer, values: OptimizerValues) -> list[dict[str, object]]:
    groups: list[dict[str, object]] = []
    for number, group in enumerate(live.groups):
        hyper = values.groups.get(number)
        if hyper is None:
            hyper = {key: value for key, value in group.items() if key != "params"}
            if values.step is not None:
                hyper["step"] = values.step
        # what this run's optimizer needs and the saved one had not: FusedAdam's bias_correction, where AdamW was saved
        hyper = {**{key: value for key, value in group.items() if key not in _KEPT_APART}, **hyper}
        if group.get("moe"):
            hyper = {**hyper, "name": group["name"]}  # says how many ranks share the experts of this run
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
    for name in ("clip_grad", "loss_scale_config", *SCALE):
        if name in values.extras and hasattr(optimizer, name):
            setattr(optimizer, name, values.extras[name])
