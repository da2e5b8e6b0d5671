"""What a universal checkpoint does not hold of what this run's optimizer needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.hosts.deepspeed.live import LiveOptimizer

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

# Optimizers of torch, DeepSpeed and apex that keep exp_avg, exp_avg_sq and step, and nothing else (without amsgrad).
_ADAM = frozenset({"Adam", "AdamW", "RAdam", "FusedAdam", "DeepSpeedCPUAdam", "FusedLamb"})
_HOMES = frozenset({"torch", "deepspeed", "apex"})


def state_faults(engine: DeepSpeedEngine, live: LiveOptimizer, checkpoint: ZeroCheckpoint) -> Iterator[Fault]:
    """States that are missing from a universal checkpoint, or may be: ds_to_universal drops them without a word.

    Where its files do not tell what the saved optimizer kept, this run's optimizer must be one that is known to keep
    no more than is there.
    """
    universal = checkpoint.universal
    if universal is None:
        return
    yield from universal.incomplete
    if universal.common.kept is not None:
        return
    path, optimizer = universal.common.path, type(getattr(engine.optimizer, "optimizer", engine.optimizer))
    if optimizer.__name__ not in _ADAM or optimizer.__module__.partition(".")[0] not in _HOMES:
        what = f"does not say which states the saved optimizer kept, and {optimizer.__name__} may keep others"
        yield _lost(path, what, "exp_avg, exp_avg_sq and step, which are all that ds_to_universal takes along")
        return
    if any(group.get("amsgrad") for group in universal.common.groups):
        yield _lost(path, "belongs to an optimizer with amsgrad", "max_exp_avg_sq beside exp_avg_sq")
    facts = universal.facts
    counted = {name for group in facts.groups if "step" in (group.hyperparameters or {}) for name in group.members}
    lacking = [
        name
        for number in range(len(live.groups))
        for name in live.members(number)
        if name not in counted and name in facts.scalars and "step" not in facts.scalars[name]
    ]
    if lacking and not universal.incomplete:
        yield _lost(path, f"says no step of {', '.join(lacking[:8])}", "a step, or step.pt beside each parameter")


def _lost(path: str, what: str, expected: str) -> Fault:
    return UnsupportedLayout.fault(
        path,
        what,
        expected,
        "none",
        mend="load the ZeRO checkpoint that it was made from, or pass load_optimizer_states=False",
    )
