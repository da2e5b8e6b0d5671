"""The learning-rate schedules that a DeepSpeed JSON can name, as functions of the position.

*Position* is the number of steps that the scheduler has taken; `rate(position)` is the rate that the optimizer's
next update then uses. A scheduler of DeepSpeed that has taken N steps has `last_batch_iteration` N - 1, written b
below. Parameters, defaults and formulas are those of deepspeed/runtime/lr_schedules.py (0.19.8). Operations are in
the order of the source, so that results are equal to the last bit. DeepSpeed need not be installed. Where an older
release means something else by the same JSON, `older` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ds_reshard.errors import ConfigError, Fault, error_of, raise_faults

SOURCE = "0.19.8"
"""The release of DeepSpeed that the formulas were read from."""

_REQUIRED = object()
_WARMUP: dict[str, object] = {"warmup_num_steps": 1000, "warmup_type": "log", "last_batch_iteration": -1}
_DEFAULTS: dict[str, dict[str, object]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, **_WARMUP},
    "WarmupDecayLR": {"total_num_steps": _REQUIRED, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, **_WARMUP},
    "WarmupCosineLR": {"total_num_steps": _REQUIRED, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, **_WARMUP},
    "OneCycle": {
        "cycle_min_lr": _REQUIRED,
        "cycle_max_lr": _REQUIRED,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
        "last_batch_iteration": -1,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
        "last_batch_iteration": -1,
    },
}
# Parameters that may be a list with one value for each param group.
_LISTS = {"warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr"}
_LISTS |= {"cycle_min_mom", "cycle_max_mom"}
_COUNTS = frozenset({"warmup_num_steps", "lr_range_test_step_size"})
_OTHER = frozenset({"warmup_type", "cycle_momentum", "lr_range_test_staircase"})
_LEAST = {"cycle_first_step_size": 1e-3, "cycle_second_step_size": 0.0, "decay_step_size": 0.0, "decay_lr_rate": 0.0}
_OPTIONAL = frozenset({"warmup_max_lr", "cycle_second_step_size", "cycle_second_stair_count"})
# Optimizers that do not give each param group the one lr (deepspeed/runtime/engine.py, 0.19.8,
# `_configure_basic_optimizer`): Muon splits the groups in two, mup's scale the rate by the shape.
_OWN_RATES = frozenset({"muon", "muadam", "muadamw", "musgd"})


class Unknown(Exception):
    """Why a learning rate cannot be known from the files; `contradicted` where these are not what the JSON says.

    It never leaves this room: a curve that it ends is not drawn, and shows the reason.
    """

    def __init__(self, reason: str, *, contradicted: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.contradicted = reason, contradicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A learning rate for every position; `end` is the position from which it stays, None where it never does."""

    rate: Callable[[int], float]
    end: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A `scheduler` section: the type, its parameters as they are written, and where they are written."""

    where: str
    kind: str
    params: Mapping[str, object]

    @property
    def needs_rates(self) -> bool:
        """Whether the schedule is built from the rates that the optimizer was given."""
        if self.kind not in ("WarmupLR", "WarmupDecayLR"):
            return self.kind == "WarmupCosineLR"
        return {**_DEFAULTS[self.kind], **self.params}["warmup_max_lr"] is None


def read_section(config: Mapping[str, object], *, where: str) -> Section | None:
    """The scheduler that a DeepSpeed JSON names, None where it names none; ConfigError where it is malformed."""
    section, where = config.get("scheduler"), f"{where}: scheduler"
    held = section if isinstance(section, Mapping) else {}
    kind, params = held.get("type"), held.get("params")
    if section is None or (isinstance(section, Mapping) and kind is None):
        return None
    faults: list[Fault] = []
    if not isinstance(kind, str):
        faults = [_fault(where, "is not a section with a type", 'an object with "type" and "params"', section)]
    elif not isinstance(params, Mapping):
        faults = [_fault(f"{where}.params", "is not there, and DeepSpeed needs it", "an object", params)]
    elif kind in _DEFAULTS:
        faults = _parameter_faults(f"{where}.params", kind, params)
    raise_faults(faults, subject="learning rate")
    return Section(where=where, kind=str(kind), params=dict(cast(Mapping[str, object], params)))


def _parameter_faults(where: str, kind: str, params: Mapping[str, object]) -> list[Fault]:
    """Everything that DeepSpeed's own constructor would refuse."""
    known = _DEFAULTS[kind]
    faults = []
    for name, value in params.items():
        if name not in known:
            faults.append(_fault(f"{where}.{name}", f"is no parameter of {kind}", f"one of {', '.join(known)}", name))
        elif value != "auto" and not _fits(name, value):
            expected = "a list of numbers, or a number" if name in _LISTS else "a number"
            expected = "a positive whole number" if name in _COUNTS else expected
            faults.append(_fault(f"{where}.{name}", "has a wrong value", expected, value))
    for name, default in known.items():
        if default is _REQUIRED and name not in params:
            faults.append(_fault(f"{where}.{name}", f"is not there, and {kind} needs it", "a number", "nothing"))
    return faults


def _fits(name: str, value: object) -> bool:
    if name in _COUNTS:
        return isinstance(value, int) and not isinstance(value, bool) and value > 0
    if name in _OTHER:
        return isinstance(value, str if name == "warmup_type" else bool)
    if name in _LISTS and isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_number, value))
    if value is None:
        return name in _OPTIONAL
    return _is_number(value) and float(str(value)) >= _LEAST.get(name, -math.inf)


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**53
    return isinstance(value, float) and math.isfinite(value)


def _fault(where: str, what: str, expected: str, found: object) -> Fault:
    shown = found if found == "nothing" else repr(found)[:60]
    return ConfigError.fault(where, what, expected, str(shown), mend=f"correct {where}")


def given_rate(config: Mapping[str, object], *, where: str) -> float:
    """The learning rate of the `optimizer` section, for every param group that has none of its own.

    Raises Unknown where the section does not tell it, ConfigError where it is no number.
    """
    section = config.get("optimizer")
    if not isinstance(section, Mapping):
        raise Unknown(f"{where} has no optimizer section: the script builds the optimizer and gives its lr")
    if str(section.get("type")).lower() in _OWN_RATES:
        raise Unknown(f"{where}: optimizer {section.get('type')} gives its param groups rates of their own")
    params = section.get("params")
    lr = params.get("lr") if isinstance(params, Mapping) else None
    if lr == "auto":
        raise Unknown(f'{where}: optimizer.params.lr is "auto", which the trainer fills in when it starts')
    if lr is None:
        raise Unknown(f"{where}: optimizer.params has no lr: the optimizer's own default is used")
    if not _is_number(lr):
        fault = _fault(f"{where}: optimizer.params.lr", "has a wrong value", "a number", lr)
        raise error_of([fault], subject="learning rate")
    return float(str(lr))


def schedules_of(section: Section | None, rates: Sequence[float], groups: int) -> tuple[Schedule, ...]:
    """The schedule of each param group; `rates` are those that the optimizer was given, empty if not known.

    Raises Unknown for a section that names another scheduler than DeepSpeed's own, or leaves values open.
    """
    if section is None:
        return tuple(constant(rate) for rate in rates)
    where, given = section.where, section.params
    if section.kind not in _BUILD:
        raise Unknown(f"{where} names {section.kind}: only DeepSpeed's own are drawn ({', '.join(_BUILD)})")
    automatic = sorted(name for name, value in given.items() if value == "auto")
    if automatic:
        raise Unknown(f'{where}: {", ".join(automatic)} is "auto", which the trainer fills in when it starts')
    if given.get("last_batch_iteration", -1) != -1:
        raise Unknown(f"{where}: last_batch_iteration is set: a schedule that begins in the middle")
    lists = {name: value for name, value in given.items() if isinstance(value, (list, tuple))}
    for name, values in lists.items():
        if len(values) != groups:
            raise Unknown(f"{where}: {name} has {len(values)} values, and there are {groups} param groups")
    build, made = _BUILD[section.kind], []
    for group in range(groups):
        of_group = {name: values[group] for name, values in lists.items()}
        params = {**_DEFAULTS[section.kind], **given, **of_group}
        made.append(build(cast("Mapping[str, float]", params), rates[group] if section.needs_rates else 0.0))
    return tuple(made)


def constant(lr: float) -> Schedule:
    """No scheduler: the rate that the optimizer was given."""
    return Schedule(rate=lambda position: lr, end=0)


def _warming(params: Mapping[str, float]) -> tuple[int, Callable[[int], float]]:
    """W, which is at least 2, and g, the part of the warm-up that is behind at b while b < W.

    g is b / W ("linear") or ln(b + 1) / ln(W) (any other `warmup_type`).
    """
    steps = max(2, int(params["warmup_num_steps"]))
    if str(params["warmup_type"]) == "linear":
        return steps, lambda b: b / steps
    return steps, lambda b: 1.0 / math.log(steps) * math.log(b + 1)


def _warmup(params: Mapping[str, float], base: float) -> Schedule:
    """`WarmupLR` and `WarmupDecayLR`: min + (max - min) g(b), and min before the first step.

    From b = W the first has g = 1, the second g = max(0, (T - b) / max(1, T - W)) with T the total steps.
    """
    low = params["warmup_min_lr"]
    high = params["warmup_max_lr"] if _is_number(params["warmup_max_lr"]) else base
    steps, warming = _warming(params)
    total = params.get("total_num_steps")

    def factor(b: int) -> float:
        if b < steps:
            return warming(b)
        return 1.0 if total is None else max(0.0, float(total - b) / float(max(1.0, total - steps)))

    return Schedule(
        rate=lambda position: low if position == 0 else low + ((high - low) * factor(position - 1)),
        end=max(math.ceil(total or 0), steps) + 1,
    )


def _warmup_cosine(params: Mapping[str, float], base: float) -> Schedule:
    """`WarmupCosineLR`: the optimizer's own rate times a ratio, and 0 before the first step.

    The ratio is r + (1 - r) g(b) while b < W, with r the ratio of the beginning; then c + (1 - c) (1 + cos(pi p)) / 2,
    at least 0, with p = min(1, (b - W + 1) / max(1, T - W)) and c the ratio of the end. Releases before 0.19.8 do not
    stop at p = 1.
    """
    first, last, total = params["warmup_min_ratio"], params["cos_min_ratio"], params["total_num_steps"]
    steps, warming = _warming(params)

    def ratio(b: int) -> float:
        if b < steps:
            return first + warming(b) * (1.0 - first)
        progress = min(1.0, (b - steps + 1) / max(1, total - steps))
        return max(0.0, last + (1.0 - last) * ((1 + math.cos(math.pi * progress)) / 2))

    return Schedule(
        rate=lambda position: 0.0 if position == 0 else base * ratio(position - 1), end=max(math.ceil(total), steps + 1)
    )


def _one_cycle(params: Mapping[str, float], base: float) -> Schedule:
    """`OneCycle`: from min to max in `first` steps and back in `second`, then min / (1 + decay_rate d / decay_size).

    In the cycle, at position n of length S = first + second: x = n / S - floor(n / S), and the share of the way up is
    x / (first / S) up to there, then (x - 1) / (first / S - 1). With stairs it is floor(share * stairs) / stairs, taken
    from n itself (since 0.19.8). d = n - S. Without a decay size or rate the rate stays at min.
    """
    low, high = params["cycle_min_lr"], params["cycle_max_lr"]
    size, decay = params["decay_step_size"], params["decay_lr_rate"]
    up, first = params["cycle_first_stair_count"], float(params["cycle_first_step_size"])
    back, second = params["cycle_second_stair_count"], params["cycle_second_step_size"]
    back = back if _is_number(back) else up
    second = float(second) if _is_number(second) else first
    total = first + second
    flat = math.isclose(size, 0) or math.isclose(decay, 0)

    def share(position: int) -> float:
        turn = first / total
        x = 1.0 + position / total - math.floor(1 + position / total)
        part, stairs = (x / turn, up) if x <= turn else ((x - 1) / (turn - 1), back)
        if stairs <= 0:
            return part
        within = position % total
        if within <= first:
            return math.floor(within * stairs / first) / stairs
        return math.floor((total - within) * stairs / second) / stairs

    def rate(position: int) -> float:
        if position - 1 < total:
            return low + (high - low) * share(position)
        return low if flat else low / (1 + decay * ((position - 1 - total + 1) / size))

    return Schedule(rate=rate, end=math.ceil(total) + 1 if flat else None)


def _range_test(params: Mapping[str, float], base: float) -> Schedule:
    """`LRRangeTest`: min (1 + r n / size) at position n, with the whole part of n / size in a staircase."""
    low, size = params["lr_range_test_min_lr"], params["lr_range_test_step_size"]
    rate, whole = params["lr_range_test_step_rate"], bool(params["lr_range_test_staircase"])

    def at(position: int) -> float:
        interval = float(position) / size
        return low * (1 + rate * (math.floor(interval) if whole else interval))

    return Schedule(rate=at, end=None)


_BUILD: dict[str, Callable[[Mapping[str, float], float], Schedule]] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup,
    "WarmupCosineLR": _warmup_cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}


def older(section: Section | None, version: str | None, *, first: int, last: int) -> str | None:
    """Why a DeepSpeed before 0.19.8 computes another rate between these positions; None where it does not."""
    release = _release(version)
    if section is None or release is None or release >= (0, 19, 8):
        return None
    params, kind, why = section.params, section.kind, ""
    total = params.get("total_num_steps")
    if kind in ("WarmupLR", "WarmupDecayLR") and section.needs_rates:
        why = "takes its maximum from elsewhere where warmup_max_lr is not given"
    elif kind == "OneCycle" and (
        any(params.get(f"cycle_{half}_stair_count") for half in ("first", "second"))
        or any(isinstance(value, (list, tuple)) for value in params.values())
    ):
        why = "has no stairs and no lists for param groups"
    elif kind == "WarmupCosineLR" and _is_number(total) and last > float(str(total)):
        why = "does not stop at total_num_steps"
    elif first == 0 and release < (0, 15):
        why = "sets no rate before the first step"
    return f"{section.where} is {kind}, which in DeepSpeed {version} {why}" if why else None


def _release(version: str | None) -> tuple[int, ...] | None:
    """The leading numbers of a version, None where it has none."""
    parts = (version or "").split("+")[0].split(".")[:3]
    return tuple(map(int, parts)) if len(parts) == 3 and all(part.isdigit() for part in parts) else None
