"""Moments and step counts made as they were before the first step; masters are left alone."""

from __future__ import annotations

from ds_reshard.hosts.megatron.live import Optimizer, live_groups

_MASTERS = ("master_param",)
"""States that are weights: where Transformer Engine's FusedAdam keeps masters (`--use-precision-aware-optimizer`)."""


def fresh_moments(optimizer: Optimizer) -> None:
    """Zero every state of an optimizer but its masters, and its step counts, in place.

    That is what an optimizer has before its first step: of Adam's moments and step, and of momentum without
    dampening, which is the only kind that Megatron builds, a zero and nothing are the same.
    """
    assert optimizer.optimizer is not None
    for entry in optimizer.optimizer.state.values():
        for name, value in list(entry.items()):
            if name in _MASTERS:
                continue
            if hasattr(value, "zero_"):
                value.zero_()
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                entry[name] = 0
    for group in live_groups(optimizer):
        step = group.get("step")
        if hasattr(step, "zero_"):
            step.zero_()
        elif step is not None:
            group["step"] = 0
