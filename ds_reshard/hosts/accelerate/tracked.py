"""The scheduler that each accelerator has prepared, and the clock that steps it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ds_reshard.resume.clock import ENGINE
from ds_reshard.resume.schedulers import UNKNOWN, Beginning, kind_of

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """`steps` is how many steps the scheduler takes an update, None where the script alone decides.

    `groups` are the param groups' values, and `beginning` the scheduler's, before the first update. `began` is the
    number of updates of the engine after which the schedule began, other than 0 where a resume has begun it anew.
    """

    scheduler: object
    wrapper: object
    clock: str
    steps: int | None
    groups: tuple[Mapping[str, object], ...]
    beginning: Beginning | None
    began: int = 0


_TRACKED: weakref.WeakKeyDictionary[Accelerator, Tracked] = weakref.WeakKeyDictionary()


def track(accelerator: Accelerator, wrapper: object, *, clock: str, by_script: bool) -> None:
    """Note what was prepared; accelerate's own clock steps once for each process unless batches are split."""
    scheduler = wrapper.scheduler  # type: ignore[attr-defined]
    steps = 1 if clock == ENGINE or accelerator.split_batches else accelerator.num_processes
    _TRACKED[accelerator] = Tracked(
        scheduler=scheduler,
        wrapper=wrapper,
        clock=clock,
        steps=None if by_script or (clock != ENGINE and not accelerator.step_scheduler_with_optimizer) else steps,
        groups=tuple(
            copy.deepcopy({name: value for name, value in group.items() if name != "params"})
            for group in scheduler.optimizer.param_groups
        ),
        beginning=Beginning(scheduler) if kind_of(scheduler) != UNKNOWN else None,
    )


def began(accelerator: Accelerator, updates: int) -> None:
    """Note after how many updates of the engine the schedule began."""
    _TRACKED[accelerator] = replace(_TRACKED[accelerator], began=updates)


def tracked(accelerator: Accelerator) -> Tracked | None:
    """What was prepared last, unless `free_memory` has let go of it since."""
    mine = _TRACKED.get(accelerator)
    return mine if mine is not None and any(one is mine.wrapper for one in accelerator._schedulers) else None
