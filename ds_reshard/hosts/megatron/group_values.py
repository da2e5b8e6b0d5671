"""The values of a param group: what this run gave, what the checkpoint has, and which a policy takes; fresh moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.execution.states import Samples
from ds_reshard.hosts.megatron.groups import BOUNDS, OF_SCHEDULE, bounds
from ds_reshard.hosts.megatron.live import Group, Optimizer, TorchOptimizer, as_number, leaves, live_groups
from ds_reshard.resume.megatron import mismatch
from ds_reshard.resume.policy import ResumePolicy, hyperparameter_faults

_REMEMBERED = "_ds_reshard_groups"
_LOADED = "_ds_reshard_loaded"
_CHANGING = ("params", "lr", "weight_decay", "step")
_OF_WEIGHT_DECAY = ("start_wd", "end_wd", "weight_decay")
ENGINE_WIDE = ("clip_grad", "loss_scale", "weight_decay")
"""Hyper-parameters that are not, or not only, values of a param group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """Of one optimizer, by live group: what this run built, what the last checkpoint had, what was left in place.

    `saved` is None where the checkpoint's groups could not be read.
    """

    run: tuple[Group, ...]
    saved: tuple[Group, ...] | None
    used: tuple[Group, ...]


def run_groups(optimizer: Optimizer) -> tuple[Group, ...]:
    """What this run gave each group, also when an earlier load has put the checkpoint's values in place.

    What has been changed since that load counts as given by this run.
    """
    now = tuple(_values(group) for group in live_groups(optimizer))
    earlier = remembered(optimizer)
    if earlier is None or [_lasting(group) for group in now] != [_lasting(group) for group in earlier.used]:
        return now
    return earlier.run


def remembered(optimizer: Optimizer) -> Remembered | None:
    found = getattr(optimizer, _REMEMBERED, None)
    return found if isinstance(found, Remembered) else None


def remember(optimizer: Optimizer, run: Sequence[Group], saved: Sequence[Group] | None) -> None:
    """Note what a load has met and left, on the optimizer itself, so that it ends with it."""
    used = tuple(_values(group) for group in live_groups(optimizer))
    kept = None if saved is None else tuple(_values(group) for group in saved)
    setattr(optimizer, _REMEMBERED, Remembered(run=tuple(run), saved=kept, used=used))


def restore_groups(optimizer: Optimizer, saved: Sequence[Group] | None) -> None:
    """Give each group this run's values again, as an earlier load may have replaced them; notes `saved` beside them."""
    run = run_groups(optimizer)
    for group, mine in zip(live_groups(optimizer), run, strict=True):
        _copy(mine, group, [name for name in mine if name not in _CHANGING])
    remember(optimizer, run, saved)


def note_loaded(optimizer: Optimizer, loaded: bool) -> None:
    """Note on an optimizer whether its state is a checkpoint's, until its next step, and samples of its moments."""
    samples = Samples()
    for inner in _with_inside(optimizer) if loaded else ():
        for param, entry in inner.state.items():
            for kind in entry.keys() - set(_MASTERS):
                samples.take(inner, param, kind, entry[kind])
    setattr(optimizer, _LOADED, (_steps(optimizer), samples) if loaded else None)


def is_loaded(optimizer: Optimizer) -> bool:
    """Whether a checkpoint's state was put into an optimizer, and it has not stepped since."""
    steps, _ = getattr(optimizer, _LOADED, None) or (None, None)
    return steps is not None and steps == _steps(optimizer)


def changed_moments(optimizer: Optimizer) -> list[str]:
    """The kinds of moments of a loaded optimizer that are not what the checkpoint's state had put there."""
    _, samples = getattr(optimizer, _LOADED, None) or (None, Samples())
    return samples.differing() if is_loaded(optimizer) else []


def _steps(optimizer: Optimizer) -> list[object]:
    assert optimizer.optimizer is not None
    first = next(iter(optimizer.optimizer.state.values()), {})
    return [as_number(held.get("step")) for held in (*live_groups(optimizer), first)]


def settle(group: Group, run: Group, saved: Group | None, policy: ResumePolicy) -> None:
    """Give a group the values that the policy takes from this run or from the checkpoint; others are left alone."""
    if policy.schedule_is_this_runs:
        _copy(run, group, OF_SCHEDULE)
    elif saved is not None:
        _copy(saved, group, BOUNDS)
    if policy.takes("weight_decay"):
        _copy(run, group, _OF_WEIGHT_DECAY)
    _copy(run, group, [name for name in policy.hyperparameters if name not in ENGINE_WIDE])


def settle_remembered(optimizer: Optimizer, policy: ResumePolicy) -> None:
    """Once more for an optimizer that was loaded before its scheduler was, which may have asked for more."""
    found = remembered(optimizer)
    if found is None or (policy.scheduler == "host" and not policy.schedule_is_this_runs):
        return
    groups = live_groups(optimizer)
    saved: Sequence[Group | None] = found.saved if found.saved is not None else [None] * len(groups)
    for group, run, kept in zip(groups, found.run, saved, strict=True):
        settle(group, run, kept, policy)
    remember(optimizer, found.run, found.saved)


def group_differences(
    run: Sequence[Group], saved: Sequence[Group], *, policy: ResumePolicy, said: Iterable[Fault] = ()
) -> list[Fault]:
    """A ScheduleMismatch fault for every bound of a group that differs; not what `said` (the schedule's) says."""
    known = {(fault.expected, fault.found) for fault in said}
    left_out = _OF_WEIGHT_DECAY if policy.takes("weight_decay") else ()
    faults = [
        mismatch(name, old, new, of=f"param group {index}: ")
        for index, (mine, theirs) in enumerate(zip(run, saved, strict=True))
        for name, old, new in zip(BOUNDS, bounds(theirs), bounds(mine), strict=True)
        if old != new and name not in left_out
    ]
    return [fault for fault in faults if (fault.expected, fault.found) not in known]


def policy_faults(optimizer: object, policy: ResumePolicy) -> list[Fault]:
    """A fault for each hyper-parameter that this run has no value of, and if masters cannot be kept without moments."""
    parts = leaves(optimizer)
    known = {*ENGINE_WIDE, *(name for part in parts for group in live_groups(part) for name in group)}
    known -= {"params", "step", "default_config"}
    if all(getattr(part, "grad_scaler", None) is None for part in parts):
        known.discard("loss_scale")
    if not any(map(live_groups, parts)):  # no parameters on this rank; the others say what there is
        known.update(policy.hyperparameters)
    faults = hyperparameter_faults(policy, known, of_schedule=("lr", "max_lr", "min_lr"))
    if policy.optimizer == "masters" and any(hasattr(part.optimizer, "sub_optimizers") for part in parts):
        what = "is not supported with --optimizer-cpu-offload, whose optimizers keep copies of the states"
        mend = "leave out one of --load-masters-only and --optimizer-cpu-offload"
        faults.append(UnsupportedLayout.fault("--load-masters-only", what, mend=mend))
    return faults


def _values(group: Group) -> Group:
    return {name: value for name, value in group.items() if name != "params"}


def _lasting(group: Group) -> Group:
    return {name: as_number(value) for name, value in group.items() if name not in _CHANGING}


def _copy(source: Group, target: Group, names: Iterable[str]) -> None:
    for name in names:
        if name in source:
            target[name] = source[name]
        else:
            target.pop(name, None)


_MASTERS = ("master_param",)
"""States that are weights: where Transformer Engine's FusedAdam keeps masters (`--use-precision-aware-optimizer`)."""


def fresh_moments(optimizer: Optimizer) -> None:
    """Zero every state of an optimizer but its masters, and its step counts, in place.

    That is what an optimizer has before its first step: of Adam's moments and step, and of momentum without
    dampening, which is the only kind that Megatron builds, a zero and nothing are the same.
    """
    loaded = is_loaded(optimizer)
    for holder, name, value in _counted(optimizer):
        if hasattr(value, "zero_"):
            value.zero_()
        else:
            holder[name] = 0
    note_loaded(optimizer, loaded)


def is_fresh(optimizer: Optimizer) -> bool:
    """Whether no moment and no step count of an optimizer on this rank is other than zero."""
    held = (value for _, _, value in _counted(optimizer))
    return not any(
        bool(getattr(value, "to_local", lambda one=value: one)().any()) if hasattr(value, "any") else value
        for value in held
    )


def _counted(optimizer: Optimizer) -> Iterator[tuple[dict[str, object], str, object]]:
    """Every moment and step count, with where it lies; an optimizer with others inside keeps copies there."""
    for one in _with_inside(optimizer):
        entries = [(entry, name) for entry in one.state.values() for name in entry if name not in _MASTERS]
        for holder, name in (*entries, *((group, "step") for group in one.param_groups if "step" in group)):
            value = holder[name]
            if hasattr(value, "zero_") or (isinstance(value, int | float) and not isinstance(value, bool)):
                yield holder, name, value


def _with_inside(optimizer: Optimizer) -> Iterator[TorchOptimizer]:
    assert optimizer.optimizer is not None, "leaves() leaves out what has no torch optimizer"
    yield from (optimizer.optimizer, *getattr(optimizer.optimizer, "sub_optimizers", ()))


def place_steps(optimizer: Optimizer, states: Mapping[object, object], groups: Sequence[Group]) -> dict[object, object]:
    """The saved states with Adam's step where the live optimizer counts it; `groups`, those to be loaded, have it, too.

    torch's own Adam counts in each state, a fused one in the param group, in whole numbers. Megatron moves it from none
    to the other, and bias correction begins anew (`load_state_dict`, core/optimizer/optimizer.py, 0.16.1 to 0.19.2).
    """
    import torch

    placed, kind = dict(states), _counts(optimizer)
    for group in groups if kind is not None else ():
        held = _members(states, group)
        told = _told(states, held)
        if kind == "state" and not told and held and group.get("step") is not None:
            step = float(cast(float, as_number(group.pop("step"))))
            placed |= {number: {**one, "step": torch.tensor(step)} for number, one in held.items()}
        elif kind == "group" and told:
            group.setdefault("step", told[0])
            bare = {number: {name: one[name] for name in one if name != "step"} for number, one in held.items()}
            placed |= bare
        if kind == "group" and isinstance(group.get("step"), float):
            group["step"] = int(cast(float, group["step"]))
    if kind == "group":
        placed.pop("common_step", None)
    return placed


def steps_differ(
    optimizer: Optimizer, states: Mapping[object, object], groups: Sequence[Group], where: str
) -> list[Fault]:
    """A fault where parameters of one group are at several steps, of which a fused Adam counts one."""
    if _counts(optimizer) != "group":
        return []
    apart = [_told(states, _members(states, group)) for group in groups if group.get("step") is None]
    what = "its parameters are at several steps, and this run's optimizer counts one of a param group"
    mend = "load it with torch's own Adam, which saved it, or add --no-load-optim"
    return [UnsupportedLayout.fault(where, what, "one step", str(told), mend=mend) for told in apart if len(told) > 1]


def _counts(optimizer: Optimizer) -> str | None:
    """Where an Adam counts its steps, torch's or one of the fused ones of Apex and Transformer Engine; else None."""
    import torch

    inner: object = optimizer.optimizer
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        return "state"
    return "group" if any(kind.__name__ == "FusedAdam" for kind in type(inner).__mro__) else None


def _members(states: Mapping[object, object], group: Group) -> dict[object, Mapping[str, object]]:
    """The saved states of a group's parameters, by their numbers."""
    numbers = group.get("params")
    found = {number: states.get(number) for number in numbers} if isinstance(numbers, list) else {}
    return {number: one for number, one in found.items() if isinstance(one, Mapping)}


def _told(states: Mapping[object, object], held: Mapping[object, Mapping[str, object]]) -> list[float]:
    """The steps that these states tell, of their own or all in common, each once."""
    steps = [states.get("common_step"), *(one.get("step") for one in held.values())]
    return sorted({float(cast(float, as_number(step))) for step in steps if step is not None})
