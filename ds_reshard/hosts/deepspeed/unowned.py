"""The seam of schedulers that the engine does not load: `load_state_dict` of torch's and DeepSpeed's classes.

What a policy decided at the engine's load would be undone when such a scheduler is given its saved state. So the state
is taken as the policy says: this run's schedule at the position that the state has, or at its beginning; the saved one
with its rates; or a comparison.

Rung 2 of the ladder (a method on a class): neither torch nor DeepSpeed announces a state. A call inside another, and
each call inside `engine.load_checkpoint`, is left as it is.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ds_reshard.errors import raise_faults
from ds_reshard.hosts.deepspeed import resume
from ds_reshard.hosts.deepspeed.beginnings import beginning_of, given, owns
from ds_reshard.hosts.deepspeed.states import state_faults
from ds_reshard.resume import schedulers

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

_THREAD = threading.local()


@contextmanager
def as_it_is() -> Iterator[None]:
    """States that schedulers are given inside are applied as they are."""
    before = getattr(_THREAD, "inside", False)
    _THREAD.inside = True
    try:
        yield
    finally:
        _THREAD.inside = before


def load_state_dict(scheduler: object, original: Callable[[], object], state: object) -> object:
    """Give a scheduler a state, as the policy of its engine's last load says. Not collective; no rank differs."""
    if getattr(_THREAD, "inside", False):
        return original()
    with as_it_is():
        beginning_of(scheduler)
        engine = resume.engine_of(scheduler)
        if engine is None or not isinstance(state, Mapping) or not _applies(engine, scheduler):
            return original()
        last = resume.own_values(engine).last
        assert last is not None
        faults = state_faults(scheduler, beginning_of(scheduler), state, last.policy)
        raise_faults(faults, subject=f"loading {last.saved.where}")
        return _take(engine, scheduler, state, original)


def take_given(engine: DeepSpeedEngine) -> None:
    """After a load: do the same with the states that schedulers were given before it."""
    for scheduler in given(engine):
        state: Mapping[str, object] = scheduler.state_dict()  # type: ignore[attr-defined]
        _take(engine, scheduler, copy.deepcopy(state), lambda: None)


def _applies(engine: DeepSpeedEngine, scheduler: object) -> bool:
    """Whether a state is one to resume from: what comes after steps that followed such a state is the run's own."""
    last = resume.own_values(engine).last
    if last is None or last.policy.is_default:
        return False
    if owns(engine, scheduler) and (scheduler is not engine.lr_scheduler or not last.policy.places_schedule):
        return False
    return engine.global_steps == last.iteration or scheduler not in last.placed


def _take(
    engine: DeepSpeedEngine, scheduler: object, state: Mapping[str, object], original: Callable[[], object]
) -> object:
    own, groups, begun = resume.own_values(engine), resume.live_groups(engine), beginning_of(scheduler)
    assert own.last is not None
    policy, saved = own.last.policy, own.last.saved
    names = (resume.SCHEDULED - {"weight_decay"}) | schedulers.cycled(scheduler)
    position, result = schedulers.position_in(state), None
    if policy.places_schedule:
        if own.scheduled:
            schedulers.set_groups(groups, own.groups, names)
        schedulers.set_groups(groups, begun.groups, names)
        begun.place(scheduler, position if position is not None and policy.keeps_position else 0)
    else:
        result = original()
        if policy.scheduler in ("checkpoint", "strict"):
            schedulers.set_groups(groups, [saved.groups.get(n, {}) for n in range(len(groups))], names)
            schedulers.write_rates(scheduler)
    schedulers.set_groups(groups, own.groups, policy.hyperparameters)
    own.last.placed.add(scheduler)
    own.last.report(resume.Beside(scheduler=scheduler, saved_position=position))
    return result
