"""What a checkpoint says of its learning-rate schedule, and what can be concluded from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_reshard.errors import ConfigError
from ds_reshard.resume.json_schedule import Section, Unknown, given_rate, read_section, schedules_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a checkpoint says of its schedule.

    `position` counts the steps that the scheduler had taken (without one, the updates that were made); `rates` are
    those of each param group, None where the files hold none; `scheduler` the names in the scheduler's saved state,
    None where there was no scheduler; `config` the DeepSpeed JSON of the saving run, None where it was not kept, and
    `config_path` where it was, if that is all that was kept; `outside` whether the param groups bear the mark of a
    scheduler that DeepSpeed did not own (`initial_lr`, torch/optim/lr_scheduler.py, 2.13, `LRScheduler.__init__`).
    """

    where: str
    version: str
    position: int
    rates: tuple[float, ...] | None
    scheduler: tuple[str, ...] | None
    config: Mapping[str, object] | None
    config_path: str | None = None
    outside: bool = False


def base_rates(past: Past, section: Section, count: int) -> tuple[float, ...] | Unknown:
    """The rates that the saved schedule was built from: the JSON's, or the shortest decimals that give the saved."""
    if not section.needs_rates:
        return ()
    told = given_rate(past.config or {}, where="the saved DeepSpeed JSON")
    if past.rates is None:
        return told if isinstance(told, Unknown) else (told,) * count
    found = []
    for group, rate in enumerate(past.rates):
        base = _base_rate(section, told, rate, past.position, group=group, count=count)
        if base is None:
            return Unknown(reason=f"{section.kind} was built from the optimizer's rates, which the files do not tell")
        found.append(base)
    return tuple(found)


def _base_rate(
    section: Section, told: float | Unknown, saved: float, position: int, *, group: int, count: int
) -> float | None:
    """A schedule is affine in its base rate, so the saved rate tells it: the JSON's, or the shortest decimal."""

    def at(base: float) -> float | None:
        made = schedules_of(section, [base] * count, count)
        return None if isinstance(made, Unknown) else made[group].rate(position)

    zero, one = at(0.0), at(1.0)
    if zero is None or one is None or one == zero:
        return told if isinstance(told, float) and count == 1 else None
    if isinstance(told, float) and same(at(told) or 0.0, saved):
        return told
    about = (saved - zero) / (one - zero)
    written = (float(f"{about:.{digits}g}") for digits in range(1, 18))
    return next((base for base in written if at(base) == saved), None)


def saved_section(past: Past) -> Section | Unknown | None:
    """What the saving run's JSON says of its scheduler; a malformed one cannot be what was run."""
    try:
        return read_section(past.config or {}, where="the saved DeepSpeed JSON")
    except ConfigError as error:
        return Unknown(reason=error.faults[0].line())


def scripts_own(past: Past, how: str) -> str | None:
    """Words for a scheduler that the script built, None where DeepSpeed built it or there is none."""
    if past.scheduler is None and past.outside:
        return f"{how} a scheduler that the script built and steps itself: DeepSpeed's files hold nothing of it"
    if past.scheduler is None:
        return None
    if "last_batch_iteration" in past.scheduler:
        named = past.config is None or saved_section(past) is not None
        return None if named else f"{how} a scheduler of DeepSpeed's that the script built: the saved JSON names none"
    names = past.scheduler
    kind = next((kind for mark, kind in _MARKS.items() if mark in names), None)
    what = f"{kind}: the function is not in the file" if kind == "LambdaLR" else f"{kind or 'its kind'} is not drawn"
    return f"{how} a scheduler that the script built ({what}; its state has {', '.join(names[:8]) or 'no names'})"


def same(one: float, other: float) -> bool:
    """Equal as far as fp32 goes: a rate may have been kept as a tensor."""
    return math.isclose(one, other, rel_tol=2.0**-23)


def shown(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in rates)


# A name in the state of torch's schedulers (torch/optim/lr_scheduler.py, 2.13) that tells which one it is.
_MARKS = {
    "lr_lambdas": "LambdaLR",
    "_schedulers": "SequentialLR",
    "T_0": "CosineAnnealingWarmRestarts",
    "T_max": "CosineAnnealingLR",
    "milestones": "MultiStepLR",
    "step_size": "StepLR",
    "total_steps": "OneCycleLR",
    "num_bad_epochs": "ReduceLROnPlateau",
    "start_factor": "LinearLR",
    "num_steps": "OptimizerParamScheduler",
}
