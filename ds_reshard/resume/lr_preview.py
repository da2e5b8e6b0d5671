"""The learning rates of a run that has not started: what a checkpoint and this run's DeepSpeed JSON make of them.

Three curves: the checkpoint's own schedule continued, this run without a flag (what DeepSpeed does: the checkpoint's
rate for the first step, then this run's schedule), and this run with --override-opt-param-scheduler. A curve that
the files cannot tell is not drawn, and says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from ds_reshard.errors import ConfigError
from ds_reshard.resume.policy import ResumePolicy, combine, from_json
from ds_reshard.resume.schedule import (
    SOURCE,
    Schedule,
    Section,
    Unknown,
    constant,
    given_rate,
    older,
    read_section,
    schedules_of,
)
from ds_reshard.resume.schedulers import shortest_decimal

CHECKPOINT, HOST, OVERRIDE = "checkpoint", "no flag", "override"
TITLES = {
    CHECKPOINT: "the checkpoint's own schedule, continued",
    HOST: "this run, no flag",
    OVERRIDE: "this run, --override-opt-param-scheduler",
}
_OF_THIS_RUN = "this run's is not in its JSON if, as the checkpoint's, it is"
_SAVED_JSON = "the saved DeepSpeed JSON"
_POINTS = 2000
_LEAST, _USUAL, _MOST = 20, 1000, 10_000_000
# A name in the state of torch's schedulers (torch/optim/lr_scheduler.py, 2.13) that tells which one it is.
SCRIPT_SCHEDULERS = {
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Rates of each param group, one for each position of the run; none where `unknown` says why."""

    name: str
    rates: tuple[tuple[float, ...], ...] = ()
    unknown: str | None = None

    @property
    def title(self) -> str:
        return TITLES[self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComingRun:
    """The curves at `positions`: all of the coming steps, or 2,000 of them, the first two and the last included.

    `groups` lists the param groups that share a curve: `rates[i]` of each curve is that of every group in
    `groups[i]`. The update at position p is the (p + 1)-th of the schedule. `notes` say what the curves rest on.
    """

    checkpoint: str
    config: str
    position: int
    positions: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    curves: tuple[Curve, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        told = {one.name: {"title": one.title, "unknown": one.unknown, "rates": one.rates} for one in self.curves}
        return {**asdict(self), "curves": told}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A schedule of each param group, and the rates of the first step where those are others."""

    schedules: tuple[Schedule, ...]
    first: tuple[float, ...] | None = None

    def rates(self, group: int, positions: Sequence[int]) -> tuple[float, ...]:
        made = tuple(self.schedules[group].rate(position) for position in positions)
        return made if self.first is None else (self.first[group], *made[1:])


_T = TypeVar("_T")


def attempt(make: Callable[[], _T]) -> _T | Unknown:
    """What `make` gives, or why it cannot be known."""
    try:
        return make()
    except Unknown as unknown:
        return unknown


def _known(value: _T | Unknown) -> _T:
    if isinstance(value, Unknown):
        raise value
    return value


def coming_run(
    past: Past, config: Mapping[str, object], *, where: str, steps: int | None = None, version: str | None = None
) -> ComingRun:
    """The curves of a run that resumes `past` with `config`, for its first `steps` steps.

    Without `steps`: to the end of the schedule that ends last, 1,000 steps where none ends ahead. `version` is the
    DeepSpeed that will run, None if not known. Raises ConfigError for a JSON that DeepSpeed would refuse.
    """
    section, saved = read_section(config, where=where), _saved_section(past)
    rate = attempt(lambda: given_rate(config, where=where))
    count = _group_count(past, section)
    made = {
        CHECKPOINT: attempt(lambda: _continued(past, count)),
        HOST: attempt(lambda: _without_flag(past, section, rate, count)),
        OVERRIDE: attempt(lambda: _this_runs(past, section, rate, count)),
    }
    length = steps if steps is not None else length_of(made.values(), past.position)
    last = past.position + length - 1
    for name, release in ((CHECKPOINT, past.version), (CHECKPOINT, version), (HOST, version), (OVERRIDE, version)):
        found = saved if name == CHECKPOINT else section
        why = older(found if isinstance(found, Section) else None, release, first=past.position, last=last)
        if why is not None and isinstance(made[name], Drawn):
            made[name] = Unknown(why)
    return drawn_run(
        made,
        sampled(past.position, length),
        count,
        checkpoint=past.where,
        config=where,
        position=past.position,
        notes=_notes(config, where, version, made[CHECKPOINT]),
    )


def drawn_run(
    made: Mapping[str, Drawn | Unknown],
    positions: tuple[int, ...],
    count: int,
    *,
    checkpoint: str,
    config: str,
    position: int,
    notes: Sequence[str],
) -> ComingRun:
    """The curves of `count` param groups at these positions; those that have the same rates in every curve together."""
    rates = {
        name: [one.rates(group, positions) for group in range(count)]
        for name, one in made.items()
        if isinstance(one, Drawn)
    }
    together: dict[tuple[tuple[float, ...], ...], list[int]] = {}
    for group in range(count):
        together.setdefault(tuple(of_curve[group] for of_curve in rates.values()), []).append(group)
    groups = tuple(map(tuple, together.values()))
    curves = tuple(
        Curve(name=name, unknown=one.reason)
        if isinstance(one, Unknown)
        else Curve(name=name, rates=tuple(rates[name][numbers[0]] for numbers in groups))
        for name, one in made.items()
    )
    return ComingRun(
        checkpoint=checkpoint,
        config=config,
        position=position,
        positions=positions,
        groups=groups,
        curves=curves,
        notes=tuple(notes),
    )


def _continued(past: Past, count: int) -> Drawn:
    """The saved schedule, if the saved rates are those that it gives at the position."""
    _refuse_scripts_own(past, "the checkpoint was saved with")
    if past.scheduler is None:
        if past.rates is None:
            raise Unknown(f"{past.where} holds no param groups, and no scheduler")
        return Drawn(schedules=tuple(map(constant, past.rates)))
    section = _known(_saved_section(past))
    if section is None and past.config_path is not None:
        kept = f"of its DeepSpeed JSON the checkpoint keeps the path, {past.config_path}"
        raise Unknown(f"{kept}, and not what it said: it keeps that where the script passes a dict")
    if section is None:
        raise Unknown("the checkpoint was saved with a scheduler that the DeepSpeed JSON in it does not name")
    schedules = schedules_of(section, _base_rates(past, section, count), count)
    refuse_other_rates(schedules, past.position, past.rates, f"{section.kind}", ", or passed a scheduler of its own")
    return Drawn(schedules=schedules, first=past.rates)


def refuse_other_rates(
    schedules: Sequence[Schedule], position: int, saved: Sequence[float] | None, kind: str, or_else: str = ""
) -> None:
    """Raise Unknown where a schedule does not give the saved rates; they are compared as far as fp32 goes.

    A rate may have been kept as a tensor.
    """
    given = [schedule.rate(position) for schedule in schedules]
    if saved is not None and not all(
        math.isclose(one, other, rel_tol=2.0**-23) for one, other in zip(given, saved, strict=False)
    ):
        raise Unknown(
            f"the saved rates ({_shown(saved)}) are not those of the saved {kind} at position {position} "
            f"({_shown(given)}): the script set them{or_else}",
            contradicted=True,
        )


def _base_rates(past: Past, section: Section, count: int) -> tuple[float, ...]:
    """The rates that the saved schedule was built from: the JSON's, or the shortest decimals that give the saved."""
    schedules_of(section, [0.0] * count, count)  # what cannot be drawn at all says so first
    if not section.needs_rates:
        return ()
    told = attempt(lambda: given_rate(past.config or {}, where=_SAVED_JSON))
    if past.rates is None:
        return (_known(told),) * count

    def base(group: int, saved: float) -> float | None:
        def at(rate: float) -> float:
            return schedules_of(section, [rate] * count, count)[group].rate(past.position)

        if at(1.0) == at(0.0):  # the position tells nothing
            return told if isinstance(told, float) and count == 1 else None
        if isinstance(told, float) and math.isclose(at(told), saved, rel_tol=2.0**-23):
            return told
        return shortest_decimal(at, saved)

    found = [base(group, saved) for group, saved in enumerate(past.rates)]
    if None in found:
        raise Unknown(f"{section.kind} was built from the optimizer's rates, which the files do not tell")
    return tuple(rate for rate in found if rate is not None)


def _saved_section(past: Past) -> Section | Unknown | None:
    """What the saving run's JSON says of its scheduler; a malformed one cannot be what was run."""
    try:
        return read_section(past.config or {}, where=_SAVED_JSON)
    except ConfigError as error:
        return Unknown(error.faults[0].line())


def _refuse_scripts_own(past: Past, how: str) -> None:
    """Raise Unknown where a scheduler that the script built drove the saved run: its curve is in no file."""
    names = past.scheduler
    if names is None and past.outside:
        raise Unknown(f"{how} a scheduler that the script built and steps itself: DeepSpeed's files hold nothing of it")
    if names is None:
        return
    if "last_batch_iteration" in names:
        if past.config is not None and _saved_section(past) is None:
            raise Unknown(f"{how} a scheduler of DeepSpeed's that the script built: the saved JSON names none")
        return
    kind = next((kind for mark, kind in SCRIPT_SCHEDULERS.items() if mark in names), None)
    what = f"{kind}: the function is not in the file" if kind == "LambdaLR" else f"{kind} is not drawn"
    if kind is None:
        what = f"its state has {', '.join(names[:8]) or 'no names'}"
    raise Unknown(f"{how} a scheduler that the script built ({what})")


def _without_flag(past: Past, section: Section | None, rate: float | Unknown, count: int) -> Drawn:
    """The rates of the loaded param groups until the scheduler steps for the first time."""
    if section is not None:
        schedules_of(section, [0.0] * count, count)
    _refuse_scripts_own(past, _OF_THIS_RUN)
    if past.rates is None:
        raise Unknown(f"{past.where} holds no param groups, so the rate of the first step is the script's")
    if section is None:
        return Drawn(schedules=tuple(map(constant, past.rates)))
    if past.scheduler is None:
        raise Unknown(
            "the load fails: this run has a scheduler, and the checkpoint holds the state of none; "
            "--override-opt-param-scheduler loads it"
        )
    return replace(_this_runs(past, section, rate, count), first=past.rates)


def _this_runs(past: Past, section: Section | None, rate: float | Unknown, count: int) -> Drawn:
    """This run's schedule as its JSON gives it: one rate for all param groups, if it needs the optimizer's."""
    if section is not None:
        schedules_of(section, [0.0] * count, count)  # what cannot be drawn at all says so first
    _refuse_scripts_own(past, _OF_THIS_RUN)
    rates: list[float] = []
    if section is None or section.needs_rates:
        rates = [_known(rate)] * count
        if len(set(past.rates or ())) > 1:
            raise Unknown(
                f"the param groups were saved with rates of their own ({_shown(past.rates or ())}): the script gives "
                "them, and this run's are not in its JSON"
            )
    return Drawn(schedules=schedules_of(section, rates, count))


def _group_count(past: Past, section: Section | None) -> int:
    if past.rates is not None:
        return len(past.rates)
    sections = (section, _saved_section(past))
    lists = [v for s in sections if isinstance(s, Section) for v in s.params.values() if isinstance(v, (list, tuple))]
    return max(map(len, lists), default=1)


def length_of(made: Iterable[Drawn | Unknown], position: int, *, stride: int = 1) -> int:
    """How many updates are drawn: to the end of the schedule that ends last, each `stride` positions further."""
    ends = [schedule.end for drawn in made if isinstance(drawn, Drawn) for schedule in drawn.schedules]
    ahead = [math.ceil((end - position) / stride) for end in ends if end is not None and end > position]
    if None in ends or not ahead:
        ahead.append(_USUAL)
    return min(max(*ahead, _LEAST) + 1, _MOST)


def sampled(first: int, steps: int, *, stride: int = 1) -> tuple[int, ...]:
    """The positions of `steps` updates, or of 2,000 of them."""
    if steps <= _POINTS:
        return tuple(range(first, first + steps * stride, stride))
    spread = {round(number * (steps - 1) / (_POINTS - 2)) for number in range(_POINTS - 1)}
    return tuple(first + update * stride for update in sorted({1, *spread}))


HOOKS_NEEDED = (
    "the resume section of the JSON acts only in a run with the hooks (import ds_reshard.auto in its script, or "
    "python -m ds_reshard.run before it): DeepSpeed alone passes over it without a word"
)


def _notes(config: Mapping[str, object], where: str, version: str | None, continued: Drawn | Unknown) -> list[str]:
    notes = [
        "read from the JSON alone: a scheduler, or a rate for a param group, that the script itself passes wins over "
        "it and is not seen here"
    ]
    if version != SOURCE:
        here = "which one will run is not known" if version is None else f"DeepSpeed {version} is installed here"
        notes.append(f"the formulas are those of DeepSpeed {SOURCE}; {here}")
    ours = config.get("ds_reshard")
    resume = ours.get("resume") if isinstance(ours, Mapping) else None
    if resume is not None:
        policy = combine([from_json(resume, place=f"{where}: ds_reshard.resume")])
        notes.append(asked_curve(policy, "the resume section of this JSON asks for"))
        notes.append(HOOKS_NEEDED)
    if isinstance(continued, Unknown) and continued.contradicted:
        notes.append(
            "beware: the checkpoint's rates are not those of its own JSON. If the script passed a scheduler of its own "
            "then, and does so now, this run's curves are wrong"
        )
    return notes


def asked_curve(policy: ResumePolicy, place: str) -> str:
    """Which curve a place, in words such as "the flags ask for", means by its policy."""
    curve = {"host": HOST, "override": OVERRIDE, "checkpoint": CHECKPOINT}.get(policy.scheduler)
    plain = policy.keeps_position and policy.loads_moments and not policy.takes("lr")
    if curve is not None and plain:
        return f'{place}: {TITLES[curve]} ("scheduler": "{policy.scheduler}")'
    return f"{place} what no curve shows: see docs/resume.md for what it does"


def _shown(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in rates)
