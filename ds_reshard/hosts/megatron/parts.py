"""The seams of `load_state_dict` of Megatron's scheduler and optimizers: each part is loaded as the policy says.

Rung 2 of the ladder (methods on classes), as Megatron publishes no extension point here.

* `OptimizerParamScheduler.load_state_dict` adds the saved position to the present one, computes weight decay before
  it has loaded it, and knows nothing of the bounds in the param groups, which are what counts
  (core/optimizer_param_scheduler.py:223 and :384 of 0.16.1, the same in 0.18.2 and 0.19.2).
* The optimizers match groups inside their methods by `param_group_identifier_keys`, which the modules look up when
  they are called (core/optimizer/optimizer.py and distrib_optimizer.py, 0.16.1 to 0.19.2). Here the groups are
  matched first, brought into the order of the live ones, and identified to Megatron by their position. States and
  fp32 masters are loaded by Megatron.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ds_reshard.errors import Fault, raise_faults
from ds_reshard.formats.megatron.checkpoint import saved_groups
from ds_reshard.hooks import Call
from ds_reshard.hosts.megatron.group_values import (
    fresh_moments,
    group_differences,
    is_loaded,
    note_loaded,
    place_steps,
    policy_faults,
    remember,
    remembered,
    restore_groups,
    run_groups,
    settle,
    settle_remembered,
    steps_differ,
)
from ds_reshard.hosts.megatron.groups import OF_SCHEDULE, Shapes, match_groups
from ds_reshard.hosts.megatron.live import (
    Group,
    Load,
    Optimizer,
    Scheduler,
    State,
    current,
    is_building,
    leaves,
    live_groups,
)
from ds_reshard.hosts.megatron.pieces import is_mixed
from ds_reshard.resume.megatron import EXTRA, FIELDS, WEIGHT_DECAY, Schedule, differences, read_schedule
from ds_reshard.resume.policy import Given, ResumePolicy
from ds_reshard.resume.policy_sources import asked_policy

if TYPE_CHECKING:
    import torch


def live_schedule(scheduler: Scheduler) -> Schedule:
    """The schedule that a scheduler has at this moment."""
    return Schedule(values={name: getattr(scheduler, name) for name in (*FIELDS, *EXTRA)}, position=scheduler.num_steps)


def put_schedule(scheduler: Scheduler, schedule: Schedule, names: Iterable[str] | None = None) -> None:
    """Give a scheduler these values (all that are known, or `names`); its position is left alone."""
    for name in schedule.values if names is None else names:
        if name in schedule.values:
            setattr(scheduler, name, schedule.values[name])


POSITION = "position (samples)"
_REMEMBERED = "_ds_reshard_schedule"
_OF_OPTIMIZER = "_ds_reshard_scheduler"
_ASKED_CHECKPOINT = "_ds_reshard_asked_checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What this run built a scheduler with, and what the last load left in it."""

    run: Schedule
    used: Schedule


def build_scheduler(call: Call) -> None:
    """A scheduler's `__init__`."""
    call()
    note_built(call["self"], call.passed)


def note_built(scheduler: Scheduler, passed: Mapping[str, object]) -> None:
    """Note on the optimizer which scheduler was built for it: the optimizer may be loaded first.

    `passed` is what the caller gave the constructor. Its default for `use_checkpoint_opt_param_scheduler` is True, so
    the attribute alone does not say that anybody asked for that.
    """
    setattr(scheduler, _ASKED_CHECKPOINT, bool(passed.get("use_checkpoint_opt_param_scheduler")))
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
    load = current() or _own_load(scheduler.optimizer, scheduler, scheduler)
    policy, run, before = load.policy, run_schedule(scheduler), live_schedule(scheduler)
    if load.own_loop:
        load.before = {POSITION: before.position}
    if policy.schedule_is_this_runs and not policy.keeps_position:
        restart_schedule(scheduler, policy)
        return load
    saved = load.found.schedule if load.found is not None else None
    if saved is None:  # not looked at before: a loop of one's own, or nothing but the position is taken
        saved = read_schedule(state_dict, where=load.where)
        raise_faults(schedule_faults(scheduler, saved, policy), subject="resuming the schedule")
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
    _take_effect(scheduler, run, policy)
    return load


def restart_schedule(scheduler: Scheduler, policy: ResumePolicy) -> None:
    """Put this run's schedule at its beginning."""
    run = run_schedule(scheduler)
    put_schedule(scheduler, run)
    scheduler.num_steps = 0
    _take_effect(scheduler, run, policy)


def _take_effect(scheduler: Scheduler, run: Schedule, policy: ResumePolicy) -> None:
    """Bring the rates of the scheduler's param groups up to date, and remember what this run built."""
    for part in leaves(scheduler.optimizer):
        settle_remembered(part, policy)
    _note_scheduler(scheduler)
    scheduler.step(0)
    setattr(scheduler, _REMEMBERED, Remembered(run=run, used=live_schedule(scheduler)))


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


def schedule_faults(scheduler: Scheduler, saved: Schedule, policy: ResumePolicy) -> list[Fault]:
    """What differs, where the policy or Megatron's own default wants both sides equal."""
    lenient = scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler
    if policy.schedule_is_this_runs or policy.scheduler == "checkpoint" or (policy.scheduler == "host" and lenient):
        return []
    left_out = set(EXTRA) if policy.scheduler == "host" else set()
    if policy.takes("weight_decay"):
        left_out.update(WEIGHT_DECAY)
    return differences(saved, run_schedule(scheduler), without=left_out)


def _own_load(optimizer: Optimizer, scheduler: Scheduler | None, built: Scheduler | None) -> Load:
    """A load of a loop of the user's own; a scheduler that was `built` to override asks for that.

    `use_checkpoint_opt_param_scheduler` is True by default, so it is no policy that could contradict another.
    """
    asked = []
    if getattr(built, "override_opt_param_scheduler", False):
        spelled = {"scheduler": "override_opt_param_scheduler=True"}
        asked = [Given(place="OptimizerParamScheduler", values={"scheduler": "override"}, spelled=spelled)]
    return Load(policy=asked_policy(*asked), optimizer=optimizer, scheduler=scheduler, own_loop=True)


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


_POSITION = "_ds_reshard_position"
_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
LATE = "resuming, but late: the model has the checkpoint's weights already, so end this process"
"""Only where groups could not be read beforehand does Megatron bring them this late."""
_HOLDERS = ("optimizer", "optimizer_state_dict")


def load_optimizer(optimizer: Optimizer, original: Callable[[object], object], state_dict: object) -> Load | None:
    """Load one optimizer as the policy in force says; its groups are unchanged where matching or comparing raises.

    Every rank calls it for its own part. Afterwards each live group has its own saved group's values, but for
    those that the policy takes from this run, and Megatron has loaded states and masters as it does. Raises
    ParamGroupMismatch where groups cannot be matched without a guess, ScheduleMismatch where bounds differ and
    must not. Returns the load, or None where this was none: no parameters here, or an optimizer that allocates
    its state by loading its own.
    """
    saved = saved_groups(state_dict)
    sharded_by_fsdp = getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False)
    if getattr(optimizer, "optimizer", None) is None or saved is None or sharded_by_fsdp:
        original(state_dict)
        if getattr(optimizer, "optimizer", None) is not None and not is_building():
            note_loaded(optimizer, True)
        return None
    if is_building():
        _put(optimizer, original, state_dict, saved, None)
        return None
    load = current() or _own_load(optimizer, None, scheduler_of(optimizer))
    policy, run = load.policy, run_groups(optimizer)
    if load.own_loop:
        raise_faults(policy_faults(optimizer, policy), subject="resuming the optimizer")
    faults, saved, order = matched_groups(optimizer, state_dict, load)
    scheduler = scheduler_of(optimizer)
    takes_saved = load.own_loop and getattr(scheduler, _ASKED_CHECKPOINT, False)
    compares = policy.scheduler == "host" and compares_bounds() and not takes_saved
    if not faults and (policy.scheduler == "strict" or compares):
        differ = group_differences(run, saved, policy=policy)
        faults = [] if policy.schedule_is_this_runs else differ
    raise_faults(faults, subject="resuming the optimizer" if load.own_loop else LATE)
    if load.own_loop and not policy.loads_masters:
        _leave_out(optimizer, saved)
        return load
    resolved = [dict(group) for group in saved]
    for group, mine, kept in zip(resolved, run, saved, strict=True):
        settle(group, mine, kept, policy)
    scaler = getattr(optimizer, "grad_scaler", None)
    scale = scaler.state_dict() if scaler is not None and policy.takes("loss_scale") else None
    _put(optimizer, original, state_dict, resolved, order)
    if scaler is not None and scale is not None:
        scaler.load_state_dict(scale)
    note_loaded(optimizer, True)
    remember(optimizer, run, saved)
    if scheduler is not None and hasattr(scheduler, _REMEMBERED):  # it was loaded, so it knows the position
        scheduler.step(0)
    if load.own_loop and policy.optimizer == "masters":
        fresh_moments(optimizer)
    return load


def _leave_out(optimizer: Optimizer, saved: Sequence[Group] | None) -> None:
    """Masters of the weights, moments of zeros and this run's groups, whatever was in place or has been read there."""
    if is_mixed(optimizer):
        optimizer.reload_model_params()
    restore_groups(optimizer, saved)
    note_loaded(optimizer, False)
    fresh_moments(optimizer)


def without_optimizer(load: Load) -> None:
    """Reset param groups, moments and, unless its position is kept, the schedule: Megatron resets the masters alone."""
    matched = {id(part): saved for part, saved in load.matched}
    for part in leaves(load.optimizer):
        restore_groups(part, matched.get(id(part)))
        fresh_moments(part)
    if load.scheduler is None:
        return
    scheduler = cast(Scheduler, load.scheduler)
    if not load.policy.keeps_position:
        restart_schedule(scheduler, load.policy)
        return
    assert load.found is not None and isinstance(load.found.scheduler_state, dict), "refused when it was looked at"
    scheduler.load_state_dict(load.found.scheduler_state)


def load_parameter_state(optimizer: Optimizer, original: Callable[[], object]) -> tuple[object, Load | None]:
    """The rest of a distributed optimizer's state, which comes after `load_state_dict` and overwrites fresh moments."""
    answer = original()
    if optimizer.optimizer is not None and is_loaded(optimizer):
        note_loaded(optimizer, True)
    if current() is not None or optimizer.optimizer is None:
        return answer, None
    load = _own_load(optimizer, None, scheduler_of(optimizer))
    if not load.policy.loads_masters:
        found = remembered(optimizer)
        _leave_out(optimizer, found.saved if found is not None else None)
    elif not load.policy.loads_moments:
        fresh_moments(optimizer)
    return answer, load


def matched_groups(
    optimizer: Optimizer, state: object, load: Load
) -> tuple[list[Fault], list[Group], tuple[int, ...] | None]:
    """Faults, or the saved groups in the order of the live ones, each with the `params` that its live group loads.

    Last the index of each among the saved groups, or None where parameters are numbered as the live ones. Bounds
    of a saved group that may be another one's are left out.
    """
    live, saved = live_groups(optimizer), saved_groups(state) or []
    own = load.read_in_place or _names_live_parameters(optimizer, state)
    matched = match_groups(
        live,
        saved,
        where=load.where,
        policy=load.policy,
        live_shapes=[tuple(tuple(one.shape) for one in cast("Sequence[torch.Tensor]", g["params"])) for g in live],
        saved_shapes=None if own else _saved_shapes(state, saved),
        moves_states=load.policy.loads_masters and not own and _holds_states(state),
    )
    if matched.faults:
        return list(matched.faults), [], None
    several = steps_differ(optimizer, _saved_states(state), saved, load.where)
    if several and load.policy.loads_moments:
        return several, [], None
    ordered = [
        {name: value for name, value in saved[index].items() if not (unknown and name in OF_SCHEDULE)}
        for index, unknown in ((index, mine in matched.bounds_unknown) for mine, index in enumerate(matched.order))
    ]
    if own:  # `torch_dist`: entry i names the parameters of live group i, whichever group its values are of
        for group, entry in zip(ordered, saved, strict=True):
            if "params" in entry:
                group["params"] = entry["params"]
    return [], ordered, None if own else matched.order


def _holds_states(state: object) -> bool:
    """Whether states or masters lie in the state by group, and not beside it by parameter."""
    assert isinstance(state, Mapping)
    return bool(_saved_states(state)) or any(state.get(name) for name in _MASTERS)


def compares_bounds() -> bool:
    """Whether this Megatron counts learning rates among what identifies a group, and so refuses changed ones."""
    from megatron.core.optimizer import optimizer

    return "max_lr" in optimizer.param_group_identifier_keys


def _put(
    optimizer: Optimizer,
    original: Callable[[object], object],
    state_dict: object,
    groups: Sequence[Group],
    order: Sequence[int] | None,
) -> None:
    """Megatron's own method, given the groups in live order; the state that it was given is not changed."""
    with _by_position(optimizer, groups) as marked:
        original(_with_groups(optimizer, state_dict, marked, order))


@contextmanager
def _by_position(optimizer: Optimizer, groups: Sequence[Group]) -> Iterator[list[Group]]:
    """While inside, live groups and `groups` are identified to Megatron by their position and nothing else."""
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer import optimizer as plain

    modules = (plain, distrib_optimizer)
    keys = [module.param_group_identifier_keys for module in modules]
    marked = [{**group, _POSITION: index} for index, group in enumerate(groups)]
    try:
        for index, group in enumerate(live_groups(optimizer)):
            group[_POSITION] = index
        for module in modules:
            module.param_group_identifier_keys = (_POSITION,)
        yield marked
    finally:
        for module, key in zip(modules, keys, strict=True):
            module.param_group_identifier_keys = key
        inner = optimizer.optimizer
        for holder in (inner, *getattr(inner, "sub_optimizers", ())):
            for group in getattr(holder, "param_groups", ()):
                group.pop(_POSITION, None)


def _with_groups(
    optimizer: Optimizer, state_dict: object, groups: list[Group], order: Sequence[int] | None
) -> dict[str, object]:
    """A copy of a state, as deep as its groups lie, that has these groups instead; masters move with their group."""
    assert isinstance(state_dict, Mapping), "saved_groups() has found groups in it"
    state = held = dict(state_dict)
    if not isinstance(state.get("param_groups"), list):
        holder = next(name for name in _HOLDERS if isinstance(state.get(name), Mapping))
        state[holder] = held = dict(cast(Mapping[str, object], state[holder]))
    placed = place_steps(optimizer, _saved_states(state_dict), groups)
    held |= {"param_groups": groups} | ({"state": placed} if "state" in held else {})
    for name in _MASTERS if order is not None else ():
        masters = state.get(name)
        if isinstance(masters, list) and order is not None:
            state[name] = [masters[index] for index in order]
    return state


def _saved_shapes(state: object, groups: Sequence[Group]) -> list[Shapes] | None:
    """The shapes of each saved group's parameters, from their moments; None where the state does not say."""
    held = _saved_states(state)
    shapes = []
    for group in groups:
        names = group.get("params")
        if not isinstance(names, list):
            return None
        of_group = [_shape(held.get(name)) for name in names]
        if any(shape is None for shape in of_group):
            return None
        shapes.append(tuple(shape for shape in of_group if shape is not None))
    return shapes


def _saved_states(state: object) -> Mapping[object, object]:
    assert isinstance(state, Mapping)
    for holder in (state, *(state.get(name) for name in _HOLDERS)):
        if isinstance(holder, Mapping) and "param_groups" in holder:
            found = holder.get("state")
            return found if isinstance(found, Mapping) else {}
    return {}


def _shape(entry: object) -> tuple[int, ...] | None:
    tensors = entry.values() if isinstance(entry, Mapping) else ()
    return next((tuple(value.shape) for value in tensors if len(getattr(value, "shape", ()))), None)


def _names_live_parameters(optimizer: Optimizer, state: object) -> bool:
    """Whether the state was read in place, so that its parameters are numbered as the live ones.

    `sharded_state_dict` (core/optimizer/optimizer.py) hands out the live states to be read into, and the live
    numbering with them; a state that `torch.load` made shares no memory with the optimizer.
    """
    assert optimizer.optimizer is not None
    return not _places(optimizer.optimizer.state).isdisjoint(_places(_saved_states(state)))


def _places(states: Mapping[object, object]) -> set[int]:
    """Where the tensors of states begin in memory, those of one value left out."""
    return {
        value.data_ptr()
        for entry in states.values()
        for value in (entry.values() if isinstance(entry, Mapping) else ())
        if hasattr(value, "data_ptr") and len(getattr(value, "shape", ()))
    }
