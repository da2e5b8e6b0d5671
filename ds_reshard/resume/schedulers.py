"""Learning-rate schedulers of every kind seen alike: their position, what configures them, and how to place one.

A *position* is the number of steps that a scheduler has taken. After N steps a torch scheduler
(torch/optim/lr_scheduler.py, 2.13) has `last_epoch` N, and one of DeepSpeed (deepspeed/runtime/lr_schedules.py,
0.19.8) has `last_batch_iteration` N - 1. Megatron's `OptimizerParamScheduler` counts in `num_steps` whatever it is
stepped by. Schedulers are recognised by these attributes, not by their classes; no framework is imported.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterable, Mapping, MutableMapping, Sequence

from ds_reshard.errors import UnsupportedLayout

DEEPSPEED, TORCH, COUNTED, PLATEAU, UNKNOWN = "deepspeed", "torch", "counted", "plateau", "unknown"

# Their learning rate is a function of the position alone, so they can be put there in one step.
_CLOSED = ("LambdaLR", "OneCycleLR", "CyclicLR")
# What a torch scheduler's state says of where it is, rather than of what it is.
_WHERE = frozenset(
    {
        "last_epoch",
        "_step_count",
        "_last_lr",
        "_get_lr_called_within_step",
        "_is_initial",
        "T_cur",
        "T_i",
        "_schedulers",
    }
)


def kind_of(scheduler: object) -> str:
    """Which of the kinds above a live scheduler is."""
    if any(cls.__name__ == "ReduceLROnPlateau" for cls in type(scheduler).__mro__):
        return PLATEAU
    if hasattr(scheduler, "last_batch_iteration"):
        return DEEPSPEED
    if hasattr(scheduler, "last_epoch") and hasattr(scheduler, "step"):
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
    return None


def position_of(scheduler: object) -> int | None:
    return position_in(vars(scheduler))


def configuration(scheduler: object) -> dict[str, object]:
    """What configures a scheduler: its attributes without the optimizer, its position and the last rates."""
    if kind_of(scheduler) == TORCH:
        found = {name: value for name, value in vars(scheduler).items() if name not in _WHERE and name != "optimizer"}
        for number, inner in enumerate(getattr(scheduler, "_schedulers", ())):
            found |= {f"schedulers[{number}].{name}": value for name, value in configuration(inner).items()}
        return {name: value for name, value in found.items() if not _is_code(value)}
    where = {"optimizer", "last_batch_iteration", "_last_lr", "num_steps"}
    return {n: v for n, v in vars(scheduler).items() if n not in where and not _is_code(v)}


def saved_configuration(state: Mapping[str, object]) -> dict[str, object]:
    """The same of a torch scheduler's state dict."""
    found = {name: value for name, value in state.items() if name not in _WHERE}
    inner = state.get("_schedulers")
    for number, one in enumerate(inner if isinstance(inner, (list, tuple)) else ()):
        if isinstance(one, Mapping):
            found |= {f"schedulers[{number}].{name}": value for name, value in saved_configuration(one).items()}
    return {name: value for name, value in found.items() if not _is_code(value)}


def has_code(scheduler: object) -> bool:
    """Whether a function of this run's script decides the rates, which no state dict holds (LambdaLR)."""
    inner = getattr(scheduler, "_schedulers", ())
    return hasattr(scheduler, "lr_lambdas") or any(has_code(one) for one in inner)


def cycled(scheduler: object) -> frozenset[str]:
    """The hyper-parameters besides rates that a scheduler writes into the groups (OneCycleLR, CyclicLR, OneCycle)."""
    if getattr(scheduler, "cycle_momentum", False):
        return frozenset({"betas", "momentum", "max_momentum", "base_momentum"})
    inner = (cycled(one) for one in getattr(scheduler, "_schedulers", ()))
    return frozenset().union(*inner)


def _is_code(value: object) -> bool:
    """Functions, and the lists of None that stand for them in a state dict: no part of what can be compared."""
    if isinstance(value, (list, tuple)) and value:
        return all(item is None or _is_code(item) for item in value)
    return callable(value)


class Beginning:
    """A scheduler as it was when its run began, to be put at any position of its own schedule."""

    def __init__(self, scheduler: object) -> None:
        self.kind = kind_of(scheduler)
        state: dict[str, object] = getattr(scheduler, "state_dict", dict)()
        self._state: object = copy.deepcopy(state)

    @property
    def position(self) -> int:
        """How far the scheduler had run when it was noted: 0 for one that was just built."""
        return (position_in(self._state) if isinstance(self._state, Mapping) else None) or 0

    def place(self, scheduler: object, position: int) -> None:
        """Put `scheduler` where `position` of its own steps would have brought it, and its rates into the groups.

        The groups must hold the values that they had at the beginning. Schedules that are a function of the
        position are set; the others are replayed step by step, so that rounding is the uninterrupted run's.
        """
        if self.kind in (PLATEAU, UNKNOWN):
            raise UnsupportedLayout(refusal(scheduler))
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

    def _place_torch(self, scheduler: object, position: int) -> None:
        scheduler.load_state_dict(copy.deepcopy(self._state))  # type: ignore[attr-defined]
        steps = position
        if position and type(scheduler).__name__ in _CLOSED and type(scheduler).__module__.startswith("torch."):
            scheduler.last_epoch, scheduler._step_count = position - 1, position  # type: ignore[attr-defined]
            steps = 1
        for _ in range(steps):
            scheduler.step()  # type: ignore[attr-defined]


def refusal(scheduler: object) -> str:
    """Why a scheduler cannot be put at a position, with what to do instead."""
    name = type(scheduler).__name__
    if kind_of(scheduler) == PLATEAU:
        return (
            f"scheduler {name}: its learning rate depends on the metrics it was given, which no checkpoint holds, so "
            "this run's cannot be put at the checkpoint's position; use --use-checkpoint-opt-param-scheduler to go on "
            "with the checkpoint's, or --no-load-lr-state to start this run's anew"
        )
    return (
        f"scheduler {name}: has none of last_epoch, last_batch_iteration or num_steps, so nothing is known of its "
        "position; use a torch, DeepSpeed or Megatron scheduler, or --no-load-lr-state"
    )


def needs_rates(scheduler: object, params: Mapping[str, object]) -> bool:
    """Whether what configures one of DeepSpeed's schedulers depends on the rates of the groups it is built for."""
    one, other = (configuration(_with_rate(scheduler, params, rate)) for rate in (1.0, 2.0))
    return one != other


def base_rates(
    scheduler: object, params: Mapping[str, object], rates: Sequence[float], position: int
) -> list[float] | None:
    """The rates that groups had when one of DeepSpeed's schedulers was built, from what they are at a position.

    Schedules are affine in the base rate. The shortest decimal that gives the very rate at that position is taken:
    that is how a person wrote it. None where the position says nothing (a factor of 0) or no number does.
    """
    found = []
    for number, rate in enumerate(rates):
        zero, one = (_rate_at(scheduler, params, base, position, number) for base in (0.0, 1.0))
        if one == zero:
            return None
        about = (rate - zero) / (one - zero)
        written = (float(f"{about:.{digits}g}") for digits in range(1, 18))
        exact = next((b for b in written if _rate_at(scheduler, params, b, position, number) == rate), None)
        if exact is None:
            return None
        found.append(exact)
    return found


def describes(
    scheduler: object, params: Mapping[str, object], built_for: Sequence[float], position: int, rates: Sequence[float]
) -> bool:
    """Whether a scheduler of this class with these parameters has, at a position, the rates that were saved."""
    groups = zip(scheduler.optimizer.param_groups, built_for, strict=True)  # type: ignore[attr-defined]
    made = like(scheduler, params, [{**group, "lr": rate} for group, rate in groups])
    if position:
        made.step(position - 1)  # type: ignore[attr-defined]
    return [float(group["lr"]) for group in made.optimizer.param_groups] == list(rates)  # type: ignore[attr-defined]


def _with_rate(scheduler: object, params: Mapping[str, object], rate: float) -> object:
    groups = scheduler.optimizer.param_groups  # type: ignore[attr-defined]
    return like(scheduler, params, [{**group, "lr": rate} for group in groups])


def _rate_at(scheduler: object, params: Mapping[str, object], base: float, position: int, group: int) -> float:
    made = _with_rate(scheduler, params, base)
    if position:
        made.step(position - 1)  # type: ignore[attr-defined]
    return float(made.optimizer.param_groups[group]["lr"])  # type: ignore[attr-defined]


def adopt_configuration(
    scheduler: object, params: Mapping[str, object], groups: Sequence[Mapping[str, object]]
) -> None:
    """Give one of DeepSpeed's schedulers the configuration that `params` of the JSON describe.

    `groups` are the param groups that it is built for (WarmupLR without a maximum and WarmupCosineLR take their
    rates): they are copied, not changed.
    """
    made = like(scheduler, params, groups)
    for name, value in vars(made).items():
        if name not in ("optimizer", "last_batch_iteration", "_last_lr"):
            setattr(scheduler, name, value)


def like(scheduler: object, params: Mapping[str, object], groups: Sequence[Mapping[str, object]]) -> object:
    """A scheduler of the same class with other parameters, bound to copies of the groups."""
    optimizer = type(scheduler.optimizer)  # type: ignore[attr-defined]
    stand_in = object.__new__(optimizer)
    vars(stand_in).update(vars(scheduler.optimizer))  # type: ignore[attr-defined]
    stand_in.param_groups = [copy.deepcopy({n: v for n, v in group.items() if n != "params"}) for group in groups]
    return type(scheduler)(stand_in, **params)  # type: ignore[call-arg]


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
        set_groups(groups, [{"lr": rate} for rate in scheduler._last_lr], ("lr",))  # type: ignore[attr-defined]
        rates = getattr(scheduler, "base_lrs", None)
        if rates is not None:
            set_groups(groups, [{"initial_lr": rate} for rate in rates], ("initial_lr",))
