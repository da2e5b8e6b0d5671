"""The positions of schedules on accelerate's clock, in a run with another number of processes.

accelerate steps a scheduler once for each process (`AcceleratedScheduler.step` in accelerate/scheduler.py, 1.15.0), so
the position in `scheduler.bin` counts steps of that many. What it means to another number depends on the script: one
that multiplies its lengths by the number of processes means updates, one that takes them from the length of a data
loader means batches. `unit_of` finds out which; `"accelerate": {"position": ...}` says it.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from ds_reshard.errors import UnsupportedLayout, raise_faults
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.schedulers import (
    BATCHES,
    DEEPSPEED,
    TORCH,
    UPDATES,
    Beginning,
    asked_unit,
    base_lrs_in,
    beyond,
    counted_elsewhere,
    has_code,
    kind_of,
    position_in,
    unit_in,
    unit_of,
    unit_of_lengths,
)

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.scheduler import AcceleratedScheduler
    from torch.optim.lr_scheduler import LRScheduler

    from ds_reshard.hosts.accelerate.state import Tracked

logger = logging.getLogger("ds_reshard")

_KEY = '"accelerate": {"position": "%s"}'
_BEGINNINGS: weakref.WeakKeyDictionary[LRScheduler, Beginning] = weakref.WeakKeyDictionary()
"""Schedulers as the first load that moved them found them, for a run that goes back to its checkpoint."""


@contextmanager
def translated(
    accelerator: Accelerator, then: int | None, mine: Tracked | None, policy: ResumePolicy
) -> Iterator[None]:
    """While accelerate loads, give schedulers their states at the positions of this run's number of processes.

    `then` is how many steps an update had in the saving run, None where that is unknown. `mine` is what was prepared,
    with its beginning, which may no longer be now. Not collective; no rank differs.
    """
    from accelerate.scheduler import AcceleratedScheduler

    wrappers = []
    for wrapper in accelerator._schedulers if policy.keeps_position else ():
        if (
            then is None
            or not isinstance(wrapper, AcceleratedScheduler)
            or type(wrapper).__name__ == "DeepSpeedSchedulerWrapper"
        ):
            continue
        now = 1 if wrapper.split_batches else accelerator.num_processes
        if wrapper.step_with_optimizer and now != then and kind_of(wrapper.scheduler) in (TORCH, DEEPSPEED):
            noted = mine.beginning if mine is not None and mine.scheduler is wrapper.scheduler else None
            start = noted or _BEGINNINGS.get(wrapper.scheduler) or Beginning(wrapper.scheduler)
            _BEGINNINGS[wrapper.scheduler] = start
            wrapper.load_state_dict = functools.partial(_take, accelerator, wrapper, start, policy, (then, now))
            wrappers.append(wrapper)
    try:
        with counted_elsewhere() if then is not None else nullcontext():
            yield
    finally:
        for wrapper in wrappers:
            vars(wrapper).pop("load_state_dict", None)


def warn_of_micro_batches(accelerator: Accelerator) -> None:
    """Warn on rank 0 if a schedule that the script steps with each micro batch counted others for each update.

    Adam's own count tells the updates; no file tells the accumulation, so one step for each update tells nothing.
    """
    from accelerate.scheduler import AcceleratedScheduler

    now = accelerator.gradient_accumulation_steps
    for wrapper in accelerator._schedulers if accelerator.is_main_process else ():
        if not isinstance(wrapper, AcceleratedScheduler) or wrapper.step_with_optimizer:
            continue
        steps = [float(state.get("step", 0)) for one in wrapper.optimizers for state in one.state.values()]
        position, updates = position_in(wrapper.scheduler.state_dict()) or 0, int(max(steps, default=0))
        then, rest = divmod(position, updates) if updates else (0, 0)
        if then > 1 and not rest and then != now:
            logger.warning(
                "%s: the saved position %d counts micro batches, %d for each of %d updates, and an update of this run "
                "has %d: give the scheduler the state that it was built with, but with last_epoch %d",
                *(type(wrapper.scheduler).__name__, position, then, updates, now, updates * now),
            )


def _take(
    accelerator: Accelerator,
    wrapper: AcceleratedScheduler,
    begun: Beginning,
    policy: ResumePolicy,
    steps: tuple[int, int],
    state: Mapping[str, object],
) -> None:
    """Give a scheduler its state, at the position that it has by the steps an update of both runs."""
    scheduler, name, (then, now) = wrapper.scheduler, type(wrapper.scheduler).__name__, steps
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    unit, why = unit_in(plugin.deepspeed_config) if plugin is not None else asked_unit(), "as was asked"
    if unit is None:
        unit, why = unit_of(scheduler, begun, state, then, now)
    position = position_in(state) or 0
    moved = position * now // then
    say: Callable[..., None] = logger.warning if accelerator.is_main_process else logger.debug
    if unit == UPDATES:
        if policy.scheduler == "strict":
            scheduler.load_state_dict(state)  # which compares what was saved
        if policy.scheduler == "checkpoint":
            _insist_on_lengths(scheduler, begun, state, steps, line=_line(accelerator, BATCHES))
        given = _moved(
            scheduler, begun, state, moved, policy, mend=f"load before the first step, or {_line(accelerator, BATCHES)}"
        )
        scheduler.load_state_dict(given)
        what = "%s: the saved position %d counts %d steps per update, but this run takes %d, so it goes on at %d (%s)"
        say(what, name, position, then, now, moved, why)
        return
    scheduler.load_state_dict(state)
    if unit == BATCHES:
        logger.info("%s goes on at position %d, which counts batches: %s", name, position, why)
    elif position:
        say(
            "%s goes on at position %d, which counts the steps of %d processes, and this run has %d: that is another "
            "update (%d would be the saved one) if the script multiplies its lengths by the number of processes; then "
            "%s, else %s",
            *(name, position, then, now, moved, _line(accelerator, UPDATES), _KEY % BATCHES),
        )


def _line(accelerator: Accelerator, unit: str) -> str:
    """What to write, and where, so that positions count `unit`."""
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return 'write {"ds_reshard": {%s}} in the DeepSpeed JSON' % (_KEY % unit)
    return "write {%s} in DS_RESHARD_SETTINGS" % (_KEY % unit)


def _insist_on_lengths(
    scheduler: object, begun: Beginning, state: Mapping[str, object], steps: tuple[int, int], *, line: str
) -> None:
    """Raise UnsupportedLayout where this run's schedule, moved, would not be the checkpoint's, which is asked for."""
    # OneCycleLR's phases end at other parts of the whole; what has functions is refused when it is given its state.
    scaled = unit_of_lengths(scheduler, begun, state, *steps) == UPDATES and "_schedule_phases" not in state
    if has_code(scheduler) or scaled:
        return
    what = f"{type(scheduler).__name__} has other lengths in this run than the checkpoint's by the number of processes"
    mend = f"use --override-opt-param-scheduler for this run's, or {line}"
    raise_faults([UnsupportedLayout.fault("scheduler.bin", what, mend=mend)], subject="load_state")


def _moved(
    scheduler: object, begun: Beginning, state: Mapping[str, object], position: int, policy: ResumePolicy, *, mend: str
) -> Mapping[str, object]:
    """Return the state of this run's scheduler at `position`.

    It has the checkpoint's base rates, unless the policy overrides them with this run's. Raises UnsupportedLayout if
    the scheduler ends before `position`, or if it took steps before the load; `mend` is the advice for the latter.
    """
    where, name = "the schedule in scheduler.bin", type(scheduler).__name__
    raise_faults(beyond(scheduler, position), subject=where)
    if policy.scheduler == "override":
        return {"last_epoch": position}
    if begun.position:
        what = f"{name} had taken steps before this load: its beginning, from which it is put at a position, is gone"
        raise_faults([UnsupportedLayout.fault(where, what, mend=mend)], subject="load_state")
    return begun.state_at(scheduler, position, base_lrs_in(state))
