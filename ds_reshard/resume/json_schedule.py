"""The `scheduler` and `optimizer` sections of a DeepSpeed JSON as schedules.

Parameters and defaults from deepspeed/runtime/lr_schedules.py (0.19.8); where an older release means something else by
the same JSON, `older` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ds_reshard.errors import ConfigError, Fault, raise_faults
from ds_reshard.resume.schedule import Constant, OneCycle, RangeTest, Schedule, Warmup, WarmupCosine, WarmupDecay

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
_LISTS = frozenset(
    {
        "warmup_min_lr",
        "warmup_max_lr",
        "cycle_min_lr",
        "cycle_max_lr",
        "lr_range_test_min_lr",
        "cycle_min_mom",
        "cycle_max_mom",
    }
)
_COUNTS = frozenset({"warmup_num_steps", "lr_range_test_step_size"})
_OTHER = frozenset({"warmup_type", "cycle_momentum", "lr_range_test_staircase"})
_LEAST = {"cycle_first_step_size": 1e-3, "cycle_second_step_size": 0.0, "decay_step_size": 0.0, "decay_lr_rate": 0.0}
# Optimizers that do not give each param group the one lr (deepspeed/runtime/engine.py, 0.19.8,
# `_configure_basic_optimizer`): Muon splits the groups in two, mup's scale the rate by the shape.
_OWN_RATES = frozenset({"muon", "muadam", "muadamw", "musgd"})
_OPTIONAL = frozenset({"warmup_max_lr", "cycle_second_step_size", "cycle_second_stair_count"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Why a learning rate cannot be known from the files; `contradicted` where these are not what the JSON says."""

    reason: str
    contradicted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A `scheduler` section: the type, its parameters as they are written, and where they are written."""

    where: str
    kind: str
    params: Mapping[str, object]

    @property
    def needs_rates(self) -> bool:
        """Whether the schedule is built from the rates that the optimizer was given."""
        return self.kind == "WarmupCosineLR" or (self.kind == "WarmupLR" and self.params.get("warmup_max_lr") is None)


def read_section(config: Mapping[str, object], *, where: str) -> Section | None:
    """The scheduler that a DeepSpeed JSON names, None where it names none; ConfigError where it is malformed."""
    section = config.get("scheduler")
    if section is None or (isinstance(section, Mapping) and section.get("type") is None):
        return None
    place = f"{where}: scheduler"
    if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
        raise_faults(
            [_fault(place, "is not a section with a type", 'an object with "type" and "params"', section)],
            subject="learning rate",
        )
        raise AssertionError
    params = section.get("params")
    if not isinstance(params, Mapping):
        raise_faults(
            [_fault(f"{place}.params", "is not there, and DeepSpeed needs it", "an object", params)],
            subject="learning rate",
        )
        raise AssertionError
    found = Section(where=place, kind=str(section["type"]), params=dict(params))
    if found.kind in _DEFAULTS:
        raise_faults(_faults(found), subject="learning rate")
    return found


def _faults(section: Section) -> list[Fault]:
    """Everything that DeepSpeed's own constructor would refuse."""
    known = _DEFAULTS[section.kind]
    faults = []
    for name, value in section.params.items():
        if name not in known:
            where = f"{section.where}.params.{name}"
            faults.append(_fault(where, f"is no parameter of {section.kind}", f"one of {', '.join(known)}", name))
        elif value != "auto" and not _fits(name, value):
            expected = "a list of numbers, or a number" if name in _LISTS else "a number"
            expected = "a positive whole number" if name in _COUNTS else expected
            faults.append(_fault(f"{section.where}.params.{name}", "has a wrong value", expected, value))
    for name, default in known.items():
        if default is _REQUIRED and name not in section.params:
            what = f"is not there, and {section.kind} needs it"
            faults.append(_fault(f"{section.where}.params.{name}", what, "a number", "nothing"))
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


def given_rate(config: Mapping[str, object], *, where: str) -> float | Unknown:
    """The learning rate of the `optimizer` section, for every param group that has none of its own."""
    section = config.get("optimizer")
    if not isinstance(section, Mapping):
        return Unknown(reason=f"{where} has no optimizer section: the script builds the optimizer and gives its lr")
    kind = str(section.get("type")).lower()
    if kind in _OWN_RATES:
        return Unknown(reason=f"{where}: optimizer {section.get('type')} gives its param groups rates of their own")
    params = section.get("params")
    lr = params.get("lr") if isinstance(params, Mapping) else None
    if lr == "auto":
        return Unknown(reason=f'{where}: optimizer.params.lr is "auto", which the trainer fills in when it starts')
    if lr is None:
        return Unknown(reason=f"{where}: optimizer.params has no lr: the optimizer's own default is used")
    if not _is_number(lr):
        raise_faults(
            [_fault(f"{where}: optimizer.params.lr", "has a wrong value", "a number", lr)], subject="learning rate"
        )
    return float(str(lr))


def schedules_of(section: Section | None, rates: Sequence[float], groups: int) -> tuple[Schedule, ...] | Unknown:
    """The schedule of each param group; `rates` are those that the optimizer was given, empty if not known."""
    if section is None:
        return tuple(Constant(lr=rate) for rate in rates)
    if section.kind not in _BUILD:
        return Unknown(
            reason=f"{section.where} names {section.kind}: only DeepSpeed's own are drawn ({', '.join(_BUILD)})"
        )
    automatic = sorted(name for name, value in section.params.items() if value == "auto")
    if automatic:
        filled = "which the trainer fills in when it starts"
        return Unknown(reason=f'{section.where}: {", ".join(automatic)} is "auto", {filled}')
    if section.params.get("last_batch_iteration", -1) != -1:
        return Unknown(reason=f"{section.where}: last_batch_iteration is set: a schedule that begins in the middle")
    lists = {name: value for name, value in section.params.items() if isinstance(value, (list, tuple))}
    for name, values in lists.items():
        if len(values) != groups:
            reason = f"{section.where}: {name} has {len(values)} values, and there are {groups} param groups"
            return Unknown(reason=reason)
    params = {**_DEFAULTS[section.kind], **section.params}
    return tuple(
        _BUILD[section.kind](
            {name: value[number] if name in lists else value for name, value in params.items()},  # type: ignore[index]
            rates[number] if section.needs_rates else 0.0,
        )
        for number in range(groups)
    )


def older(section: Section | None, version: str | None, *, first: int, last: int) -> str | None:
    """Why a DeepSpeed before 0.19.8 computes another rate between these positions; None where it does not."""
    release = _release(version)
    if section is None or release is None or release >= _release(SOURCE):  # type: ignore[operator]
        return None
    params, kind = section.params, section.kind
    stairs = any(params.get(f"cycle_{half}_stair_count") for half in ("first", "second"))
    lists = any(isinstance(value, (list, tuple)) for value in params.values())
    total = params.get("total_num_steps")
    why = {
        "WarmupLR": "takes its maximum from elsewhere where warmup_max_lr is not given" if section.needs_rates else "",
        "OneCycle": "has no stairs and no lists for param groups" if stairs or lists else "",
        "WarmupCosineLR": "does not stop at total_num_steps" if _is_number(total) and last > float(str(total)) else "",
    }.get(kind, "")
    if not why and first == 0 and release < (0, 15):
        why = "sets no rate before the first step"
    return f"{section.where} is {kind}, which in DeepSpeed {version} {why}" if why else None


def _release(version: str | None) -> tuple[int, ...] | None:
    """The leading numbers of a version, None where it has none."""
    parts = (version or "").split("+")[0].split(".")[:3]
    return tuple(map(int, parts)) if len(parts) == 3 and all(part.isdigit() for part in parts) else None


def _number(value: object) -> float:
    assert isinstance(value, (int, float))
    return value


def _count(value: object) -> int:
    assert isinstance(value, int)
    return value


def _one_cycle(p: Mapping[str, object], base: float) -> Schedule:
    first, second = p["cycle_first_step_size"], p["cycle_second_step_size"]
    stairs, back = p["cycle_first_stair_count"], p["cycle_second_stair_count"]
    return OneCycle(
        min_lr=_number(p["cycle_min_lr"]),
        max_lr=_number(p["cycle_max_lr"]),
        first=float(_number(first)),
        second=float(_number(first if second is None else second)),
        first_stairs=_number(stairs),
        second_stairs=_number(stairs if back is None else back),
        decay_size=_number(p["decay_step_size"]),
        decay_rate=_number(p["decay_lr_rate"]),
    )


_BUILD: dict[str, Callable[[Mapping[str, object], float], Schedule]] = {
    "WarmupLR": lambda p, base: Warmup(
        min_lr=_number(p["warmup_min_lr"]),
        max_lr=base if p["warmup_max_lr"] is None else _number(p["warmup_max_lr"]),
        warmup_steps=_count(p["warmup_num_steps"]),
        kind=str(p["warmup_type"]),
    ),
    "WarmupDecayLR": lambda p, base: WarmupDecay(
        min_lr=_number(p["warmup_min_lr"]),
        max_lr=_number(p["warmup_max_lr"]),
        kind=str(p["warmup_type"]),
        warmup_steps=_count(p["warmup_num_steps"]),
        total_steps=_number(p["total_num_steps"]),
    ),
    "WarmupCosineLR": lambda p, base: WarmupCosine(
        base_lr=base,
        warmup_steps=_count(p["warmup_num_steps"]),
        total_steps=_number(p["total_num_steps"]),
        min_ratio=_number(p["warmup_min_ratio"]),
        end_ratio=_number(p["cos_min_ratio"]),
        kind=str(p["warmup_type"]),
    ),
    "OneCycle": _one_cycle,
    "LRRangeTest": lambda p, base: RangeTest(
        min_lr=_number(p["lr_range_test_min_lr"]),
        step_size=_count(p["lr_range_test_step_size"]),
        step_rate=_number(p["lr_range_test_step_rate"]),
        staircase=bool(p["lr_range_test_staircase"]),
    ),
}


def _fault(where: str, what: str, expected: str, found: object) -> Fault:
    shown = found if found == "nothing" else repr(found)[:60]
    return ConfigError.fault(where, what, expected, str(shown), mend=f"correct {where}")
