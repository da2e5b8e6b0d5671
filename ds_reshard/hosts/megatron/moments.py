"""Moments and step counts made as they were before the first step; masters are left alone."""

from __future__ import annotations

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.hosts.megatron.live import Optimizer, leaves, live_groups
from ds_reshard.resume.policy import ResumePolicy

_MASTERS = ("master_param",)
"""States that are weights: where Transformer Engine's FusedAdam keeps masters (`--use-precision-aware-optimizer`)."""


def masters_faults(optimizer: object, policy: ResumePolicy) -> list[Fault]:
    """A fault where masters cannot be kept without the moments: the optimizer keeps copies of both elsewhere."""
    if policy.optimizer != "masters" or not any(
        hasattr(part.optimizer, "sub_optimizers") for part in leaves(optimizer)
    ):
        return []
    what = "is not supported with --optimizer-cpu-offload, whose optimizers keep copies of the states"
    mend = "leave out one of --load-masters-only and --optimizer-cpu-offload"
    return [UnsupportedLayout.fault("--load-masters-only", what, mend=mend)]


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
