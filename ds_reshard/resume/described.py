"""DeepSpeed's schedulers as a DeepSpeed JSON describes them: their state dicts hold the position alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from ds_reshard.resume.schedulers import configuration


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
