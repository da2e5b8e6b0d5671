"""Schedulers as they were before anybody gave them a state, and which of them share an engine's optimizer.

Hugging Face's Trainer and accelerate, and many scripts, keep schedulers that the engine does not know, and give them
their state before or after `engine.load_checkpoint` (transformers/trainer.py, `_load_optimizer_and_scheduler`;
accelerate/checkpointing.py, `load_accelerator_state`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ds_reshard.resume.schedulers import Beginning, innermost

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

_BEGUN: weakref.WeakKeyDictionary[object, Beginning] = weakref.WeakKeyDictionary()


def beginning_of(scheduler: object) -> Beginning:
    """The scheduler as it was when it was first asked for here, which is before its first state."""
    if scheduler not in _BEGUN:
        _BEGUN[scheduler] = Beginning(scheduler)
    return _BEGUN[scheduler]


def given(engine: DeepSpeedEngine) -> list[object]:
    """The schedulers on the engine's optimizer that somebody gave a state, but for the engine's own."""
    return [
        scheduler
        for scheduler in list(_BEGUN)
        if innermost(engine.optimizer) is innermost(scheduler) and not owns(engine, scheduler)
    ]


def owns(engine: DeepSpeedEngine, scheduler: object) -> bool:
    """Whether a scheduler is the engine's own, or inside it."""
    return any(scheduler is part for part in _with_parts(engine.lr_scheduler))


def _with_parts(scheduler: object) -> list[object]:
    return [scheduler, *(part for inner in getattr(scheduler, "_schedulers", ()) for part in _with_parts(inner))]
