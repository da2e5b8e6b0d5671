"""The seam of `OptimizerParamScheduler.load_state_dict`: the schedule and its position.

Rung 2 of the ladder (a method on a class): Megatron publishes no extension point here, and its own method adds
the saved position to the present one, computes weight decay before it has loaded it, and knows nothing of the
bounds in the param groups, which are what counts (core/optimizer_param_scheduler.py:223 and :384 of 0.16.1, the
same in 0.18.2 and 0.19.2).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ds_reshard.errors import Fault, raise_faults
from ds_reshard.hosts.megatron.current import Load, current
from ds_reshard.hosts.megatron.live import Scheduler, State, leaves
from ds_reshard.hosts.megatron.schedule import live_schedule, put_schedule
from ds_reshard.hosts.megatron.settle import settle_remembered
from ds_reshard.resume.asked import asked_policy
from ds_reshard.resume.megatron_schedule import EXTRA, WEIGHT_DECAY, Schedule, differences, extra_values, read_schedule
from ds_reshard.resume.policy import Given, ResumePolicy

_REMEMBERED = "_ds_reshard_schedule"
_OF_OPTIMIZER = "_ds_reshard_scheduler"
_ASKED_CHECKPOINT = "_ds_reshard_asked_checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What this run built a scheduler with, and what the last load left in it."""

    run: Schedule
    used: Schedule


def note_built(scheduler: Scheduler, arguments: Mapping[str, object]) -> None:
    """Note on the optimizer which scheduler was built for it: the optimizer may be loaded first.

    `arguments` are what the caller gave the constructor. Its default for `use_checkpoint_opt_param_scheduler` is
    True, so the attribute alone does not say that anybody asked for that.
    """
    asked = bool(arguments.get("use_checkpoint_opt_param_scheduler"))
    setattr(scheduler, _ASKED_CHECKPOINT, asked)
    _note_scheduler(scheduler)


def _note_scheduler(scheduler: Scheduler) -> None:
    for part in leaves(scheduler.optimizer):
        setattr(part, _OF_OPTIMIZER, weakref.ref(scheduler))


def load_scheduler(scheduler: Scheduler, original: Callable[[State], object], state_dict: State) -> Load:
    """Load a schedule as the policy in force says; the scheduler is unchanged where this raises.

    Every rank calls it with the same state. The position is set, not added to, and learning rates and weight
    decay of the optimizer's groups are right when this returns. Raises ScheduleMismatch with every value that
    differs, UnsupportedLayout for another class's state, ConfigError where the scheduler was built with one
    request and the policy is another. Returns the load that it was part of.
    """
    load = current() or own_load(scheduler)
    policy, run, before = load.policy, run_schedule(scheduler), live_schedule(scheduler)
    if policy.schedule_is_this_runs and not policy.keeps_position:
        put_schedule(scheduler, run)
        scheduler.num_steps = 0
    else:
        arguments = load.found.arguments if load.found is not None else None
        saved = read_schedule(state_dict, where=load.where, extra=extra_values(arguments))
        raise_faults(schedule_faults(scheduler, saved, load), subject="resuming the schedule")
        try:
            put_schedule(scheduler, run)
            _by_megatron(scheduler, original, state_dict, policy)
            if policy.scheduler == "checkpoint":
                put_schedule(scheduler, saved)
            elif policy.schedule_is_this_runs:
                put_schedule(scheduler, run)
            if policy.takes("weight_decay"):
                put_schedule(scheduler, run, WEIGHT_DECAY)
            scheduler.num_steps = saved.position if policy.keeps_position else 0
        except BaseException:
            put_schedule(scheduler, before)
            scheduler.num_steps = before.position
            raise
    for part in leaves(scheduler.optimizer):
        settle_remembered(part, policy)
    _note_scheduler(scheduler)
    scheduler.step(0)
    setattr(scheduler, _REMEMBERED, Remembered(run=run, used=live_schedule(scheduler)))
    return load


def run_schedule(scheduler: Scheduler) -> Schedule:
    """What this run built the scheduler with, also when an earlier load has put the checkpoint's values in place."""
    now, earlier = live_schedule(scheduler), getattr(scheduler, _REMEMBERED, None)
    if isinstance(earlier, Remembered) and now.values == earlier.used.values:
        return earlier.run
    return now


def scheduler_of(part: object) -> Scheduler | None:
    """The scheduler that was last built, or loaded, for an optimizer."""
    found = getattr(part, _OF_OPTIMIZER, None)
    return found() if found is not None else None


def loaded_scheduler_of(part: object) -> Scheduler | None:
    """The same if it has been loaded, so that it knows the position of the optimizer's groups."""
    found = scheduler_of(part)
    return found if hasattr(found, _REMEMBERED) else None


def asked_checkpoint(scheduler: Scheduler | None) -> bool:
    """Whether a scheduler was built with `use_checkpoint_opt_param_scheduler=True` in so many words."""
    return bool(getattr(scheduler, _ASKED_CHECKPOINT, False))


def schedule_faults(scheduler: Scheduler, saved: Schedule, load: Load) -> list[Fault]:
    """What differs, where the policy or Megatron's own default wants both sides equal."""
    policy = load.policy
    lenient = scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler
    if policy.schedule_is_this_runs or policy.scheduler == "checkpoint" or (policy.scheduler == "host" and lenient):
        return []
    left_out = {field.name for field in EXTRA} if policy.scheduler == "host" else set()
    if policy.takes("weight_decay"):
        left_out.update(WEIGHT_DECAY)
    return differences(saved, run_schedule(scheduler), without=left_out)


def own_load(scheduler: Scheduler) -> Load:
    """A load of a loop of the user's own; a scheduler that was built to override asks for that."""
    return Load(
        policy=asked_policy(*given_by(scheduler)), optimizer=scheduler.optimizer, scheduler=scheduler, own_loop=True
    )


def given_by(scheduler: object) -> tuple[Given, ...]:
    """What the arguments that a scheduler was built with ask for; the other one is Megatron's default, so not asked."""
    if not getattr(scheduler, "override_opt_param_scheduler", False):
        return ()
    return (
        Given(
            place="OptimizerParamScheduler",
            values={"scheduler": "override"},
            spelled={"scheduler": "override_opt_param_scheduler=True"},
        ),
    )


def _by_megatron(
    scheduler: Scheduler, original: Callable[[State], object], state_dict: State, policy: ResumePolicy
) -> None:
    """Megatron's own method with the two switches as the policy has them, from position 0."""
    asked = scheduler.override_opt_param_scheduler, scheduler.use_checkpoint_opt_param_scheduler
    if policy.scheduler != "host" or policy.schedule_is_this_runs:
        scheduler.override_opt_param_scheduler = policy.schedule_is_this_runs
        scheduler.use_checkpoint_opt_param_scheduler = not policy.schedule_is_this_runs
    elif policy.takes("weight_decay"):
        scheduler.use_checkpoint_opt_param_scheduler = True  # what else differs has been refused above
    scheduler.num_steps = 0
    try:
        original(state_dict)
    finally:
        scheduler.override_opt_param_scheduler, scheduler.use_checkpoint_opt_param_scheduler = asked
