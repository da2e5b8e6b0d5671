"""The schedule of a live scheduler, as values that are compared with saved ones and put back."""

from __future__ import annotations

from collections.abc import Iterable

from ds_reshard.hosts.megatron.live import Scheduler
from ds_reshard.resume.megatron_schedule import EXTRA, FIELDS, Schedule


def live_schedule(scheduler: Scheduler) -> Schedule:
    """The schedule that a scheduler has at this moment."""
    names = [field.name for field in (*FIELDS, *EXTRA)]
    return Schedule(values={name: getattr(scheduler, name) for name in names}, position=scheduler.num_steps)


def put_schedule(scheduler: Scheduler, schedule: Schedule, names: Iterable[str] | None = None) -> None:
    """Give a scheduler these values (all that are known, or `names`); its position is left alone."""
    for name in schedule.values if names is None else names:
        if name in schedule.values:
            setattr(scheduler, name, schedule.values[name])
