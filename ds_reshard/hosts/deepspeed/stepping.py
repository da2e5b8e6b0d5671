"""The seam of `DeepSpeedEngine._take_model_step`: an error inside a scheduler is not taken for a missing argument.

DeepSpeed steps the scheduler, and where that raises TypeError of any origin calls `step(train_batch_size)` in its
place (deepspeed/runtime/engine.py, 0.14.5 to 0.19.8): a schedule whose own function fails goes on at that position.
Rung 2: there is no extension point between the optimizer's step and the scheduler's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


class _Unmasked:
    """Stands for a scheduler during one update: raises its TypeError again where DeepSpeed would go on."""

    def __init__(self, scheduler: object) -> None:
        self.scheduler = scheduler
        self.error: TypeError | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.scheduler, name)

    def step(self, *args: object, **kwargs: object) -> None:
        if self.error is not None:
            raise self.error
        step: Callable[..., object] = self.scheduler.step  # type: ignore[attr-defined]
        try:
            step(*args, **kwargs)
        except TypeError as error:
            if _fits(step, args, kwargs):
                self.error = error
            raise


def _fits(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def take_model_step(engine: DeepSpeedEngine, original: Callable[[], object]) -> None:
    """Take one update; a TypeError of the scheduler's own is raised, of which DeepSpeed says nothing."""
    scheduler = engine.lr_scheduler
    if scheduler is None:
        original()
        return
    engine.lr_scheduler = _Unmasked(scheduler)
    try:
        original()
    finally:
        engine.lr_scheduler = scheduler
