"""The seam of schedulers that the engine does not load: `load_state_dict` of torch's and DeepSpeed's classes.

What a policy decided at the engine's load would be undone when such a scheduler is given its saved state. So the state
is taken as the policy says: this run's schedule at the position that the state has, or at its beginning; the saved one
with its rates; or a comparison.

Rung 2 of the ladder (a method on a class): neither torch nor DeepSpeed announces a state. A call inside another, and
each call inside `engine.load_checkpoint`, is left as it is.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ds_reshard.errors import Fault
from ds_reshard.hosts.deepspeed import resume_values
from ds_reshard.hosts.deepspeed.resume_values import amend, beginning_of, given, owns
from ds_reshard.hosts.deepspeed.scheduler_faults import late_fault, shared_fault, state_faults
from ds_reshard.operations.ranks import attempt, raise_caused
from ds_reshard.resume import schedulers
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.schedulers import TORCH

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
        _, faults, cause = attempt(lambda: beginning_of(scheduler))
        engine = resume_values.engine_of(scheduler)
        if engine is None or not isinstance(state, Mapping) or not _applies(engine, scheduler):
            return original()
        last = resume_values.own_values(engine).last
        assert last is not None
        faults = faults or refused(engine, scheduler, state, last.policy)
        raise_caused(faults, subject=f"loading {last.saved.where}", cause=cause)
        result, beside = _take(engine, scheduler, state, original)
        amend(engine, resume_values.own_values(engine), beside)
        return result


def refused(
    engine: DeepSpeedEngine, scheduler: object, state: Mapping[str, object], policy: ResumePolicy
) -> list[Fault]:
    """What a policy cannot do with a state that a scheduler is given."""
    others = [one for one in (*given(engine), engine.lr_scheduler) if one is not None and one is not scheduler]
    if others and policy.places_schedule:
        return [shared_fault(scheduler, others)]
    begun, own = beginning_of(scheduler), resume_values.own_values(engine)
    if policy.places_schedule and not policy.schedule_is_this_runs and begun.kind == TORCH and not own.scheduled:
        return [late_fault(scheduler)]
    return state_faults(scheduler, begun, state, policy)


def take_given(engine: DeepSpeedEngine) -> resume_values.Beside | None:
    """After a load: do the same with the state that a scheduler was given before it."""
    beside = None
    for scheduler in given(engine):
        state: Mapping[str, object] = scheduler.state_dict()  # type: ignore[attr-defined]
        _, beside = _take(engine, scheduler, copy.deepcopy(state), lambda: None)
    return beside


def _applies(engine: DeepSpeedEngine, scheduler: object) -> bool:
    """Whether a state is one to resume from: what comes after steps that followed such a state is the run's own."""
    last = resume_values.own_values(engine).last
    if last is None or last.policy.is_default:
        return False
    if owns(engine, scheduler) and (scheduler is not engine.lr_scheduler or not last.policy.places_schedule):
        return False
    return engine.global_steps == last.iteration or scheduler not in last.placed


def _take(
    engine: DeepSpeedEngine, scheduler: object, state: Mapping[str, object], original: Callable[[], object]
) -> tuple[object, resume_values.Beside]:
    own, groups, begun = resume_values.own_values(engine), resume_values.live_groups(engine), beginning_of(scheduler)
    assert own.last is not None
    policy, saved = own.last.policy, own.last.saved
    names = (resume_values.SCHEDULED - {"weight_decay"}) | schedulers.cycled(scheduler)
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
    return result, resume_values.Beside(scheduler=scheduler, saved_position=position)


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
    """Take one update; a TypeError of the scheduler's own is raised, of which DeepSpeed says nothing.

    The seam of `DeepSpeedEngine._take_model_step`. DeepSpeed steps the scheduler, and where that raises TypeError of
    any origin calls `step(train_batch_size)` in its place (deepspeed/runtime/engine.py, 0.14.5 to 0.19.8): a schedule
    whose own function fails goes on at that position. Rung 2: there is no extension point between the optimizer's step
    and the scheduler's.
    """
    scheduler = engine.lr_scheduler
    if scheduler is None:
        original()
        return
    engine.lr_scheduler = _Unmasked(scheduler)
    try:
        original()
    finally:
        engine.lr_scheduler = scheduler
