"""The seam of schedulers that the engine does not load: `load_state_dict` of torch's and DeepSpeed's classes.

What a policy decided at the engine's load would be undone when such a scheduler is given its saved state. So the state
is taken as the policy says: this run's schedule at the position that the state has, or at its beginning; the saved one
with its rates; or a comparison.

Rung 2 of the ladder (a method on a class): neither torch nor DeepSpeed announces a state. A call inside another, and
each call inside `engine.load_checkpoint`, is left as it is.

Below: what the state of a scheduler cannot give of what a policy asks for, and every difference from this run's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ds_reshard.errors import Fault, ScheduleMismatch, UnsupportedLayout
from ds_reshard.hooks import Call
from ds_reshard.hosts.deepspeed import resume_values
from ds_reshard.hosts.deepspeed.entries import MEND
from ds_reshard.hosts.deepspeed.resume_values import amend, as_it_is, beginning_of, given, left_as_they_are, owns
from ds_reshard.operations.ranks import attempt, raise_caused
from ds_reshard.resume import schedulers
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.schedulers import DEEPSPEED, PLATEAU, TORCH, UNKNOWN, Beginning

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def load_state_dict(call: Call) -> object:
    """Give a scheduler a state, as the policy of its engine's last load says. Not collective; no rank differs."""
    if left_as_they_are():
        return call()
    scheduler, *arguments = call.passed.values()
    state = next(iter(arguments), None)
    with as_it_is():
        _, faults, cause = attempt(lambda: beginning_of(scheduler))
        engine = resume_values.engine_of(scheduler)
        if engine is None or not isinstance(state, Mapping):
            return call()
        if not _applies(engine, scheduler):
            result = call()
            resume_values.warn_of_count(engine, scheduler, state)
            return result
        last = resume_values.own_values(engine).last
        assert last is not None
        faults = faults or refused(engine, scheduler, state, last.policy)
        raise_caused(faults, subject=f"loading {last.saved.where}", cause=cause)
        result, beside = _take(engine, scheduler, state, call)
        amend(engine, resume_values.own_values(engine), beside)
        return result


def refused(
    engine: DeepSpeedEngine, scheduler: object, state: Mapping[str, object], policy: ResumePolicy
) -> list[Fault]:
    """What a policy cannot do with a state that a scheduler is given."""
    others = [one for one in (*given(engine), engine.lr_scheduler) if one is not None and one is not scheduler]
    if others and policy.places_schedule:
        names = ", ".join(type(one).__name__ for one in (scheduler, *others))
        what = f"several schedulers ({names}) share one optimizer: they cannot be put at a position one by one"
        return [_unsupported("lr_scheduler", what, "put them into one SequentialLR or ChainedScheduler")]
    begun, own = beginning_of(scheduler), resume_values.own_values(engine)
    if policy.places_schedule and not policy.schedule_is_this_runs and begun.kind == TORCH and not own.scheduled:
        built = f"{type(scheduler).__name__} was built on the checkpoint's rates, as they are loaded"
        mend = "build it before load_checkpoint, or add --no-load-lr-state"
        return [fault("lr_scheduler", f"{built}, and is to begin anew", mend)]
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


def take_model_step(call: Call) -> None:
    """Take one update; a TypeError of the scheduler's own is raised, of which DeepSpeed says nothing.

    The seam of `DeepSpeedEngine._take_model_step`. DeepSpeed steps the scheduler, and where that raises TypeError of
    any origin calls `step(train_batch_size)` in its place (deepspeed/runtime/engine.py, 0.14.5 to 0.19.8): a schedule
    whose own function fails goes on at that position. Rung 2: there is no extension point between the optimizer's step
    and the scheduler's.
    """
    engine: DeepSpeedEngine = call["self"]
    scheduler = engine.lr_scheduler
    if scheduler is None:
        call()
        return
    engine.lr_scheduler = _Unmasked(scheduler)
    try:
        call()
    finally:
        engine.lr_scheduler = scheduler


Pairs = dict[str, tuple[object, object]]

_HAND_OVER = "hand the scheduler to deepspeed.initialize"


def state_faults(scheduler: object, begun: Beginning, state: Mapping[str, object], policy: ResumePolicy) -> list[Fault]:
    """What a policy cannot do with the state that a scheduler beside the engine is given."""
    where = f"the state of {type(scheduler).__name__}"
    if policy.places_schedule:
        return _unplaceable(scheduler, begun, state, policy, where)
    if policy.scheduler in ("checkpoint", "strict") and begun.kind == DEEPSPEED:
        return [position_alone(where)]
    if policy.scheduler == "checkpoint":
        return continuation_faults(scheduler, state, where) or _unread(scheduler, policy, where)
    if policy.scheduler == "strict":
        return code_faults(scheduler, where) or mismatches(_pairs(begun, state))
    if policy.takes("lr"):
        return [rate_fault()]
    return []


def _unplaceable(
    scheduler: object, begun: Beginning, state: Mapping[str, object], policy: ResumePolicy, where: str
) -> list[Fault]:
    name = schedulers.own_loader(scheduler)
    if name is not None:
        what = f"{name}.load_state_dict is the script's: it may take more from the state than the position"
        return [_unsupported(where, what, _HAND_OVER)]
    if begun.position:
        what = "comes when the scheduler has taken steps, so the beginning of this run's schedule is gone"
        return [fault(where, what, "give it its state before the first step")]
    if policy.keeps_position and (begun.kind in (PLATEAU, UNKNOWN) or schedulers.position_in(state) is None):
        return [_unsupported(where, schedulers.refusal(scheduler), "see above")]
    if policy.keeps_position and schedulers.follows_metric(state):
        what = f"counts the metrics that another scheduler was given, and no updates: {type(scheduler).__name__} "
        what += "cannot be put at its position"
        return [_unsupported(where, what, "use --no-load-lr-state for this run's schedule from its beginning")]
    return schedulers.beyond(scheduler, schedulers.position_in(state) or 0) if policy.keeps_position else []


def _unread(scheduler: object, policy: ResumePolicy, where: str) -> list[Fault]:
    """What a scheduler keeps in the param groups comes with the optimizer, and not with its own state."""
    kept = schedulers.kept_in_groups(scheduler)
    if policy.loads_masters or not kept:
        return []
    what = f"{type(scheduler).__name__} keeps {', '.join(sorted(kept))} in the optimizer, which is not loaded"
    return [_unsupported(where, what, "load the optimizer, or use --override-opt-param-scheduler")]


def continuation_faults(scheduler: object, state: Mapping[str, object], where: str) -> list[Fault]:
    """Why a torch scheduler of this run cannot go on from a saved state."""
    if schedulers.has_code(scheduler):
        what = f"the function that gives {type(scheduler).__name__} its rates is this run's: no checkpoint holds it"
        return [_unsupported(where, what, MEND)]
    live = set(schedulers.configuration(scheduler))
    if schedulers.position_in(state) is None or live != set(schedulers.saved_configuration(state)):
        return [
            UnsupportedLayout.fault(
                where,
                "holds the state of another kind of scheduler",
                f"the state of {type(scheduler).__name__}",
                ", ".join(sorted(state)) or "nothing",
                mend=MEND,
            )
        ]
    return []


def code_faults(scheduler: object, where: str) -> list[Fault]:
    """Where a function decides the rates: it cannot be compared."""
    if not schedulers.has_code(scheduler):
        return []
    what = f"the function that gives {type(scheduler).__name__} its rates is in no checkpoint: it cannot be compared"
    return [_unsupported(where, what, "say with another flag whose schedule is right")]


def rate_fault() -> Fault:
    what, mend = "the learning rate belongs to this run's scheduler", "use --override-opt-param-scheduler"
    return fault("hyperparameters: lr", what, f"{mend} (scheduler: override)")


def position_alone(where: str) -> Fault:
    """A scheduler of DeepSpeed that the script builds: no JSON describes it."""
    what = (
        "a scheduler of DeepSpeed stores its position alone, and the script built it: its configuration is in no file"
    )
    return _unsupported(where, what, "name the scheduler in the DeepSpeed JSON, or use --override-opt-param-scheduler")


def _pairs(begun: Beginning, state: Mapping[str, object]) -> Pairs:
    pairs = compared(schedulers.saved_configuration(state), begun.configuration)
    if begun.kind == PLATEAU:
        rates = state.get("_last_lr")
        pairs |= reduced(state, [group["lr"] for group in begun.groups], rates if isinstance(rates, list) else [])
    return pairs


def compared(theirs: Mapping[str, object], ours: Mapping[str, object]) -> Pairs:
    return {f"scheduler: {name}": (theirs.get(name), ours.get(name)) for name in sorted({*theirs, *ours})}


def reduced(state: Mapping[str, object], first: Sequence[object], rates: Sequence[object]) -> Pairs:
    """The saved rates of ReduceLROnPlateau beside those it began with, unless reductions lead from these to those."""
    begun, saved = ([float(str(rate)) for rate in some] for some in (first, rates))
    known = {"factor", "eps", "min_lrs"} <= set(state) and len(begun) == len(saved)
    return {} if known and schedulers.reduces_to(state, begun, saved) else {"scheduler: rates": (saved, begun)}


def mismatches(pairs: Pairs) -> list[Fault]:
    """A fault for every pair of saved and own value that differs."""
    return [
        ScheduleMismatch.fault(
            where,
            "differs, and the schedule was asked to be strict",
            f"{theirs!r} in the checkpoint (kept with --use-checkpoint-opt-param-scheduler)",
            f"{mine!r} in this run (used with --override-opt-param-scheduler)",
            mend="make this run's configuration the checkpoint's, or say whose values are right with one of the flags",
        )
        for where, (theirs, mine) in pairs.items()
        if not _equal(theirs, mine)
    ]


def _equal(one: object, other: object) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return set(one) == set(other) and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other)


def _unsupported(where: str, what: str, mend: str) -> Fault:
    return fault(where, what, mend, "UnsupportedLayout")


def fault(where: str, what: str, mend: str, error: str = "ConfigError") -> Fault:
    return Fault(error=error, where=where, what=what, mend=mend)
