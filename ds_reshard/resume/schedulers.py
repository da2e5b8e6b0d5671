"""Learning-rate schedulers of every kind seen alike: their position, what configures them, and how to place one.

A *position* is the number of steps that a scheduler has taken. After N steps a torch scheduler
(torch/optim/lr_scheduler.py, 2.13) has `last_epoch` N, and one of DeepSpeed (deepspeed/runtime/lr_schedules.py,
0.19.8) has `last_batch_iteration` N - 1. Megatron's `OptimizerParamScheduler` counts in `num_steps` whatever it is
stepped by. Schedulers are recognised by these attributes, not by their classes; no framework is imported.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from math import inf, isclose
from types import SimpleNamespace

from ds_reshard.errors import ConfigError, Fault, UnsupportedLayout, raise_faults
from ds_reshard.model.context_value import context_value

DEEPSPEED, TORCH, COUNTED, PLATEAU, UNKNOWN = "deepspeed", "torch", "counted", "plateau", "unknown"

# Their learning rate is a function of the position alone, so they can be put there in one step.
_CLOSED = ("LambdaLR", "OneCycleLR", "CyclicLR")
# What a torch scheduler's state says of where it is, rather than of what it is.
_WHERE = {"last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "_schedulers"}
_WHERE |= {"optimizer"}  # of a live one
_WHERE |= {"T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"}
_WHERE |= {"verbose", "default_min_lr"}  # which some releases of torch have and others not; neither changes a rate

ENGINE, ACCELERATE = "engine", "accelerate"
CLOCKS = (ENGINE, ACCELERATE)
"""Who counts the steps of a schedule. DeepSpeed's engine steps its own once an update (deepspeed/runtime/engine.py,
0.19.8, `_take_model_step`). accelerate steps a torch scheduler `num_processes` times an update
(accelerate/scheduler.py, 1.15.0, `AcceleratedScheduler.step`). The same schedule is
another curve on the other clock."""
UPDATES, BATCHES = "updates", "batches"
UNITS = (UPDATES, BATCHES)
"""What the lengths of a schedule on accelerate's clock are multiples of, and so what its position means under another
number of processes. "updates": the script multiplies its lengths by the number of processes, and as many updates have
gone by. "batches": it counts the batches of all processes, whose count goes on as it is."""
PLACE = "ds_reshard.accelerate"

_ELSEWHERE: ContextVar[bool] = ContextVar("positions are translated elsewhere", default=False)
_ASKED: list[str] = []


def counted_elsewhere() -> AbstractContextManager[None]:
    """States that are given inside have been looked at by who gives them, for a count of other processes."""
    return context_value(_ELSEWHERE, True)


def is_counted_elsewhere() -> bool:
    """Whether this thread is inside `counted_elsewhere`."""
    return _ELSEWHERE.get()


def ask_unit(unit: str | None) -> None:
    """Note the unit for runs that have no DeepSpeed JSON."""
    _ASKED[:] = [unit] if unit is not None else []


def asked_unit() -> str | None:
    """The unit that was asked for outside of a DeepSpeed JSON."""
    return _ASKED[0] if _ASKED else None


def kind_of(scheduler: object) -> str:
    """Which of the kinds above a live scheduler is."""
    if any(cls.__name__ == "ReduceLROnPlateau" for cls in type(scheduler).__mro__):
        return PLATEAU
    if hasattr(scheduler, "last_batch_iteration"):
        return DEEPSPEED
    if hasattr(scheduler, "step") and (hasattr(scheduler, "last_epoch") or _parts(vars(scheduler))):
        return TORCH
    if hasattr(scheduler, "num_steps") and "increment" in inspect.signature(getattr(scheduler, "step", int)).parameters:
        return COUNTED
    return UNKNOWN


def position_in(state: Mapping[str, object]) -> int | None:
    """The position that a saved or live state dict has, None where it has none."""
    for name, shift in (("last_batch_iteration", 1), ("last_epoch", 0), ("num_steps", 0)):
        found = state.get(name)
        if isinstance(found, int) and not isinstance(found, bool):
            return max(0, found + shift)
    parts = _parts(state)
    first = parts[0] if parts else {}
    return position_in(first if isinstance(first, Mapping) else vars(first)) if parts else None


def _parts(state: Mapping[str, object]) -> Sequence[object]:
    """The schedulers inside one (SequentialLR, ChainedScheduler), or their states; a chain's position is theirs."""
    parts = state.get("_schedulers")
    return parts if isinstance(parts, (list, tuple)) else ()


def position_of(scheduler: object) -> int | None:
    return position_in(vars(scheduler))


def configuration(scheduler: object) -> dict[str, object]:
    """What configures a scheduler: its attributes without the optimizer, its position and the last rates."""
    if kind_of(scheduler) in (TORCH, PLATEAU):
        return saved_configuration(vars(scheduler))
    where = {"optimizer", "last_batch_iteration", "_last_lr", "num_steps"}
    return {n: v for n, v in vars(scheduler).items() if n not in where and not _is_code(v)}


def saved_configuration(state: Mapping[str, object]) -> dict[str, object]:
    """The same of a torch scheduler's state dict."""
    found = {name: value for name, value in state.items() if name not in _WHERE and not _is_code(value)}
    for number, part in enumerate(_parts(state)):
        inner = saved_configuration(part) if isinstance(part, Mapping) else configuration(part)
        found |= {f"schedulers[{number}].{name}": value for name, value in inner.items()}
    return found


def has_code(scheduler: object) -> bool:
    """Whether a function of this run's script decides the rates, which no state dict holds (LambdaLR)."""
    inner = getattr(scheduler, "_schedulers", ())
    own = hasattr(scheduler, "lr_lambdas") or getattr(scheduler, "_scale_fn_custom", None) is not None
    return own or any(has_code(one) for one in inner)


def cycled(scheduler: object) -> frozenset[str]:
    """The hyper-parameters besides rates that a scheduler writes into the groups (OneCycleLR, CyclicLR, OneCycle)."""
    if getattr(scheduler, "cycle_momentum", False):
        return frozenset({"betas", "momentum", "max_momentum", "base_momentum"})
    inner = (cycled(one) for one in getattr(scheduler, "_schedulers", ()))
    return frozenset().union(*inner)


def kept_in_groups(scheduler: object) -> frozenset[str]:
    """What configures a torch scheduler but is in its optimizer's param groups, not in its own state."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    return cycled(scheduler) | ({name for group in groups for name in group} & {"max_lr", "min_lr", "swa_lr"})


def _is_code(value: object) -> bool:
    """Functions, and the lists of None that stand for them in a state dict: no part of what can be compared."""
    if isinstance(value, (list, tuple)) and value:
        return all(item is None or _is_code(item) for item in value)
    return callable(value)


def innermost(wrapper: object) -> object:
    """The torch optimizer below any number of wrappers, which all call what they wrap `optimizer`."""
    inner = getattr(wrapper, "optimizer", None)
    while inner is not None and inner is not wrapper:
        wrapper, inner = inner, getattr(inner, "optimizer", None)
    return wrapper


class Beginning:
    """A scheduler as it was when its run began, to be put at any position of its own schedule.

    `groups` are the rates, and the momentum that it cycles, which it had given to each param group by then.
    """

    def __init__(self, scheduler: object) -> None:
        self.kind = kind_of(scheduler)
        self._state: dict[str, object] = copy.deepcopy(getattr(scheduler, "state_dict", dict)())
        self.groups = copy.deepcopy(_rates(scheduler))

    @property
    def position(self) -> int:
        """How far the scheduler had run when it was noted: 0 for one that was just built."""
        return position_in(self._state) or 0

    @property
    def configuration(self) -> dict[str, object]:
        """What configured it then, as its state dict tells it."""
        return saved_configuration(self._state)

    def place(self, scheduler: object, position: int) -> None:
        """Put `scheduler` where `position` of its own steps would have brought it, and its rates into the groups.

        The groups must hold the values that they had at the beginning. Schedules that are a function of the
        position are set; the others are replayed step by step, so that rounding is the uninterrupted run's.
        """
        if self.kind in (PLATEAU, UNKNOWN):
            if position:
                raise_faults([unplaceable(scheduler)], subject="schedule")
            scheduler.load_state_dict(copy.deepcopy(self._state))  # type: ignore[attr-defined]
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.kind == DEEPSPEED:
                scheduler.load_state_dict(copy.deepcopy(self._state))  # type: ignore[attr-defined]
                if position:
                    scheduler.step(position - 1)  # type: ignore[attr-defined]
            elif self.kind == COUNTED:
                scheduler.num_steps = 0  # type: ignore[attr-defined]
                scheduler.step(increment=position)  # type: ignore[attr-defined]
            else:
                self._place_torch(scheduler, position)

    def state_at(self, scheduler: object, position: int, bases: Sequence[float] | None) -> dict[str, object]:
        """The state of `scheduler`, as this run configures it, at `position`, from other base rates where given.

        Computed on a copy with an optimizer of its own: neither `scheduler` nor its param groups change.
        """
        groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in scheduler.optimizer.param_groups  # type: ignore[attr-defined]
        ]
        begun, state = self.groups, copy.deepcopy(self._state)
        if bases is not None and (own := base_lrs_in(state)) and list(own) != list(bases):
            ratios = [new / old if old else 1.0 for new, old in zip(bases, own, strict=True)]
            begun = [
                {name: value * ratio for name, value in group.items() if isinstance(value, float)}
                for group, ratio in zip(begun, ratios, strict=True)
            ]
            _set_bases(state, list(bases))
        set_groups(groups, begun, ("lr", "initial_lr"))
        made = _apart(scheduler, SimpleNamespace(param_groups=groups, step=None))
        moved = copy.copy(self)
        moved._state = state
        moved.place(made, position)
        return made.state_dict()  # type: ignore[attr-defined,no-any-return]

    def _place_torch(self, scheduler: object, position: int) -> None:
        scheduler.load_state_dict(copy.deepcopy(self._state))  # type: ignore[attr-defined]
        steps = position
        if position and type(scheduler).__name__ in _CLOSED and type(scheduler).__module__.startswith("torch."):
            scheduler.last_epoch, scheduler._step_count = position - 1, position  # type: ignore[attr-defined]
            steps = 1
        for _ in range(steps):
            scheduler.step()  # type: ignore[attr-defined]


def _apart(scheduler: object, optimizer: object) -> object:
    """A shallow copy that steps another optimizer: its functions may hold the script's objects, and are shared."""
    made = copy.copy(scheduler)
    made.optimizer = optimizer  # type: ignore[attr-defined]
    if hasattr(made, "_schedulers"):
        made._schedulers = [_apart(part, optimizer) for part in made._schedulers]
    return made


def _set_bases(state: MutableMapping[str, object], bases: list[float]) -> None:
    if "base_lrs" in state:
        state["base_lrs"] = list(bases)
    for part in _parts(state):
        _set_bases(part, bases)  # type: ignore[arg-type]


def unit_of(
    scheduler: object, begun: Beginning, state: Mapping[str, object], then: int, now: int
) -> tuple[str | None, str]:
    """In which of UNITS a schedule on accelerate's clock counts, and why; None where neither can be shown.

    `state` was saved by a run that took `then` steps an update, and this run takes `now`. Lengths that are the same,
    or in the ratio of these, tell it; else the position at which this run's schedule gives the saved rates.
    """
    unit = unit_of_lengths(scheduler, begun, state, then, now)
    if unit is not None:
        return unit, "by its lengths"
    position = position_in(state) or 0
    saved = state.get("_last_lr")
    if not isinstance(saved, list) or own_loader(scheduler) or begun.position:
        return None, ""

    def rates(position: int) -> object:
        return begun.state_at(scheduler, position, base_lrs_in(state))["_last_lr"]

    def gives(position: int) -> bool:
        found = rates(position)
        assert isinstance(found, list)
        return len(found) == len(saved) and all(map(functools.partial(isclose, abs_tol=1e-18), found, saved))

    try:
        moved = position * now // then
        given = {UPDATES: gives(moved), BATCHES: gives(position)}
        if all(given.values()) and type(scheduler).__name__ in _CLOSED:
            ahead = [now << exponent for exponent in range(24)]
            if all(rates(position + steps) == rates(moved + steps) for steps in ahead):
                return BATCHES, "its rates are the same from both positions on"
    except (TypeError, ValueError, KeyError, AttributeError):  # a position past the end, or functions of the script's
        return None, ""
    shown = [unit for unit, equal in given.items() if equal]
    return (shown[0], "it gives the saved rates there") if len(shown) == 1 else (None, "")


def may_be_multiplied(scheduler: object, processes: object) -> bool:
    """Whether the lengths of a torch schedule may have been multiplied by `processes`: all of them are multiples.

    Those of transformers' schedules are arguments of a partial. A function that hides them may be anything.
    """
    found = {n: v for n, v in configuration(scheduler).items() if not n.endswith(_RATES_OR_DERIVED)}
    lengths = [number for number in _numbers(found) if number > 1 and number % 1 == 0]
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        for function in getattr(part, "lr_lambdas", ()):
            given = getattr(function, "keywords", {}).items()
            lengths += [number for name, number in given if name.startswith("num_") and name.endswith("_steps")]
    return isinstance(processes, int) and not any(isinstance(n, (int, float)) and n % processes for n in lengths)


# A rate, and what OneCycleLR makes of its `total_steps` (torch/optim/lr_scheduler.py, 2.13).
_RATES_OR_DERIVED = ("base_lrs", "_schedule_phases")


def unit_of_lengths(
    scheduler: object, begun: Beginning, state: Mapping[str, object], then: int, now: int
) -> str | None:
    """The same by the lengths alone; None where a function has them, or a state that does not tell."""
    if begun.kind != TORCH or has_code(scheduler):
        return None
    theirs, ours = (
        _numbers({name: value for name, value in found.items() if not name.endswith(_RATES_OR_DERIVED)})
        for found in (saved_configuration(state), begun.configuration)
    )
    if theirs and theirs == ours:
        return BATCHES
    scaled = len(theirs) == len(ours) and all(a in (b, b * then / now) for a, b in zip(theirs, ours, strict=True))
    return UPDATES if theirs and scaled else None


def _numbers(value: object) -> list[float]:
    """Every number in nested values, in the order of their names; the keys of a Counter (`milestones`) too."""
    if isinstance(value, Mapping):
        keys = sorted(value, key=repr)
        return [number for key in keys for number in (*_numbers(key), *_numbers(value[key]))]
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in _numbers(item)]
    return [float(value)] if isinstance(value, (int, float)) else []


def _rates(scheduler: object) -> list[dict[str, object]]:
    """The rate, and the base rate where it has one, that a scheduler gave to each group of its optimizer.

    DeepSpeed's OneCycle begins with the least momentum, and steps on from the greatest (lr_schedules.py, 0.19.8).
    """
    found: dict[str, object] = {
        "lr": getattr(scheduler, "_last_lr", None),
        "initial_lr": base_lrs_in(vars(_beginner(scheduler))),
    }
    if kind_of(scheduler) == DEEPSPEED and cycled(scheduler):
        found["betas"] = getattr(scheduler, "min_moms", None)
    lists = {name: rates for name, rates in found.items() if isinstance(rates, (list, tuple))}
    return [{name: rates[n] for name, rates in lists.items()} for n in range(min(map(len, lists.values()), default=0))]


def _beginner(scheduler: object) -> object:
    """The part of a scheduler that has written the groups' base rates: each takes those that are there, but OneCycleLR.

    That computes them from its maximum, and reads them in the groups at each step (torch/optim/lr_scheduler.py, 2.13).
    """
    inner = (_beginner(part) for part in getattr(scheduler, "_schedulers", ()))
    return next((part for part in inner if _is_one_cycle(part)), scheduler)


def _is_one_cycle(scheduler: object) -> bool:
    return any(cls.__name__ == "OneCycleLR" for cls in type(scheduler).__mro__)


def base_lrs_in(state: Mapping[str, object]) -> Sequence[float] | None:
    """The base rate of each group that a torch scheduler, or the first one inside it, has in its state."""
    found, parts = state.get("base_lrs"), _parts(state)
    if isinstance(found, (list, tuple)):
        return found
    first = parts[0] if parts else {}
    return base_lrs_in(first if isinstance(first, Mapping) else vars(first)) if parts else None


def reduces_to(state: Mapping[str, object], first: Sequence[float], rates: Sequence[float]) -> bool:
    """Whether ReduceLROnPlateau, configured as its `state` says, gets from the first rates to these.

    The rule of its `_reduce_lr` (torch/optim/lr_scheduler.py, 2.13), any number of times.
    """
    factor, eps, least = (state.get(name) for name in ("factor", "eps", "min_lrs"))
    if not isinstance(least, (list, tuple)) or factor is None or eps is None or len(first) != len(rates):
        return False
    now, last = list(first), list[float]()
    while now != list(rates) and now != last:
        last = now
        lower = [max(rate * float(str(factor)), float(bound)) for rate, bound in zip(last, least, strict=True)]
        now = [new if old - new > float(str(eps)) else old for old, new in zip(last, lower, strict=True)]
    return now == list(rates)


def last_position(scheduler: object) -> float:
    """The greatest position that a scheduler has: OneCycleLR raises ValueError behind its `total_steps`."""
    if _is_one_cycle(scheduler):
        return int(scheduler.total_steps)  # type: ignore[attr-defined]
    parts, milestones = getattr(scheduler, "_schedulers", ()), getattr(scheduler, "_milestones", ())
    begins = [0, *milestones] if milestones else [0] * len(parts)
    ends = [*milestones, inf] if milestones else [inf] * len(parts)
    last = [(begin + last_position(part), end) for part, begin, end in zip(parts, begins, ends, strict=True)]
    return min((found for found, end in last if found < end - 1), default=inf)


def beyond(scheduler: object, position: int) -> list[Fault]:
    """A fault where a scheduler of this run ends before the position from which it is to go on."""
    last = last_position(scheduler)
    if position <= last:
        return []
    what = f"{type(scheduler).__name__} ends after {last} steps, and the checkpoint is at {position}"
    mend = f"give OneCycleLR a total_steps of more than {position}, or use --no-load-lr-state"
    return [UnsupportedLayout.fault("lr_scheduler", what, mend=mend)]


def unplaceable(scheduler: object, where: str = "lr_scheduler") -> Fault:
    """A scheduler that cannot be put at a position of this run's schedule."""
    name = type(scheduler).__name__
    what = f"{name} has none of last_epoch, last_batch_iteration or num_steps, so nothing is known of its position"
    mend = "use a scheduler of torch, DeepSpeed or Megatron-LM, or --no-load-lr-state"
    if kind_of(scheduler) == PLATEAU:
        what = f"the learning rate of {name} depends on the metrics that it was given, which no checkpoint holds"
        mend = "use --use-checkpoint-opt-param-scheduler to go on with the checkpoint's schedule, or --no-load-lr-state"
    return UnsupportedLayout.fault(where, f"{what}: it cannot be put at the checkpoint's position", mend=mend)


def own_loader(scheduler: object) -> str | None:
    """The class, neither torch's nor DeepSpeed's, whose `load_state_dict` a scheduler has; None where it is theirs."""
    home = next((cls for cls in type(scheduler).__mro__ if "load_state_dict" in vars(cls)), object)
    return None if home.__module__.partition(".")[0] in ("torch", "deepspeed", "builtins") else home.__name__


def refuse_unseen(scheduler: object) -> None:
    """Raise UnsupportedLayout where a state is taken with the rates in it, past a policy that wants this run's."""
    name = own_loader(scheduler)
    if name is not None:
        what = f"{name} takes its state by a load_state_dict of its own, and rates with it: the policy would be dropped"
        mend = "use a scheduler of torch or DeepSpeed, or leave the resume policy out"
        raise UnsupportedLayout.of("lr_scheduler", what, mend=mend)


def set_groups(
    groups: Sequence[MutableMapping[str, object]], values: Sequence[Mapping[str, object]], names: Iterable[str]
) -> None:
    """Write values into param groups, by position; a value that is a tensor is filled."""
    for group, given in zip(groups, values, strict=True):
        for name in names:
            if name not in given:
                continue
            if name in group and hasattr(group[name], "fill_"):
                group[name].fill_(given[name])  # type: ignore[attr-defined]
            else:
                group[name] = copy.deepcopy(given[name])


def write_rates(scheduler: object) -> None:
    """Write the rates of a scheduler's present position into its groups, as its last step did."""
    groups = scheduler.optimizer.param_groups  # type: ignore[attr-defined]
    kind = kind_of(scheduler)
    if kind == DEEPSPEED:
        if scheduler.last_batch_iteration >= 0:  # type: ignore[attr-defined]
            scheduler.step(scheduler.last_batch_iteration)  # type: ignore[attr-defined]
    elif kind == COUNTED:
        scheduler.step(increment=0)  # type: ignore[attr-defined]
    else:
        set_groups(groups, _rates(scheduler), ("lr", "initial_lr"))


def as_saved(
    scheduler: object, params: Mapping[str, object], rates: Sequence[float], position: int, *, first: bool
) -> object | None:
    """One of DeepSpeed's schedulers as the JSON's `params` configure it, at a position, on an optimizer of its own.

    WarmupLR without a maximum and WarmupCosineLR are built from the learning rates of the param groups: if `first`,
    these are `rates`, else those from which the schedule gives `rates` at the position. None if that cannot be told:
    for want of rates, or as the position says nothing (a factor of 0), or as no number gives the very rate.
    """
    groups = scheduler.optimizer.param_groups  # type: ignore[attr-defined]

    def built(bases: Sequence[float]) -> object:
        optimizer = object.__new__(type(scheduler.optimizer))  # type: ignore[attr-defined]
        vars(optimizer).update(vars(scheduler.optimizer))  # type: ignore[attr-defined]
        kept = ({name: value for name, value in group.items() if name != "params"} for group in groups)
        optimizer.param_groups = [{**copy.deepcopy(group), "lr": lr} for group, lr in zip(kept, bases, strict=True)]
        made = type(scheduler)(optimizer, **params)  # type: ignore[call-arg]
        if position:
            made.step(position - 1)  # type: ignore[attr-defined]
        return made

    def base(group: int, rate: float) -> float | None:
        def at(base: float) -> float:
            return float(built([base] * len(groups)).optimizer.param_groups[group]["lr"])  # type: ignore[attr-defined]

        return shortest_decimal(at, rate)

    one, other = (configuration(built([rate] * len(groups))) for rate in (1.0, 2.0))
    if one == other:
        return built([0.0] * len(groups))
    found = rates if first else [base(group, rate) for group, rate in enumerate(rates)]
    bases = [rate for rate in found if rate is not None]
    return built(bases) if len(bases) == len(groups) else None


def shortest_decimal(at: Callable[[float], float], rate: float) -> float | None:
    """The base rate from which a schedule gives this very `rate` at a position, `at` being affine in the base rate.

    Of those that do the shortest decimal is taken: that is how a person wrote it. None where there is none.
    """
    zero, one = at(0.0), at(1.0)
    if one == zero:
        return None
    about = (rate - zero) / (one - zero)
    written = (float(f"{about:.{digits}g}") for digits in range(1, 18))
    return next((base for base in written if at(base) == rate), None)


def adopt_configuration(scheduler: object, other: object) -> None:
    """Configure one of DeepSpeed's schedulers as another of its class is; a method of the other becomes its own.

    LRRangeTest keeps the method that counts its steps (`interval_fn`, runtime/lr_schedules.py, 0.19.8).
    """
    for name, value in vars(other).items():
        if name not in ("optimizer", "last_batch_iteration", "_last_lr"):
            own = inspect.ismethod(value) and value.__self__ is other
            setattr(scheduler, name, getattr(scheduler, value.__name__) if own else value)


_KEYS = {"clock": CLOCKS, "position": UNITS}


def unit_faults(section: object) -> list[Fault]:
    """What is wrong with `"accelerate": ...` outside of a DeepSpeed JSON, where no engine has a clock."""
    if isinstance(section, Mapping) and "clock" in section:
        mend = 'write "accelerate": {"position": "updates"} there, and the clock in the DeepSpeed JSON'
        return [ConfigError.fault("accelerate.clock", "is no setting of this place", "position", mend=mend)]
    return clock_faults(section)


def clock_faults(section: object) -> list[Fault]:
    """What is wrong with the value of `"ds_reshard": {"accelerate": ...}`."""
    wrong: list[tuple[str, str, str, object]] = []
    if not isinstance(section, Mapping):
        wrong.append((PLACE, "has a value that is not allowed", "an object", section))
    else:
        names = ", ".join(_KEYS)
        wrong += [(f"{PLACE}.{key}", "is not a setting", names, key) for key in section if key not in _KEYS]
        for key, allowed in _KEYS.items():
            if section.get(key) not in (None, *allowed):
                wanted = " or ".join(f'"{value}"' for value in allowed)
                wrong.append((f"{PLACE}.{key}", "has a value that is not allowed", wanted, section[key]))
    mend = f'write "ds_reshard": {{"accelerate": {{"clock": "{ENGINE}"}}}} in the DeepSpeed JSON'
    return [ConfigError.fault(where, what, wanted, repr(found), mend=mend) for where, what, wanted, found in wrong]


def clock_in(config: Mapping[str, object]) -> str | None:
    """The clock that a DeepSpeed JSON asks for, None where it asks for none; ConfigError for anything else."""
    return _said(config, "clock")


def unit_in(config: Mapping[str, object]) -> str | None:
    """The same of the unit in which a schedule counts."""
    return _said(config, "position")


def _said(config: Mapping[str, object], key: str) -> str | None:
    section = config.get("ds_reshard")
    asked = section.get("accelerate", {}) if isinstance(section, Mapping) else {}
    raise_faults(clock_faults(asked), subject="DeepSpeed config")
    said = asked.get(key)
    return said if isinstance(said, str) else None
