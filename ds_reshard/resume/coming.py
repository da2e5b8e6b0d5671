"""The learning rates of a run that has not started: what a checkpoint and this run's DeepSpeed JSON make of them.

Three curves: the checkpoint's own schedule continued, this run without a flag (what DeepSpeed does: the checkpoint's
rate for the first step, then this run's schedule), and this run with --override-opt-param-scheduler. A curve that
the files cannot tell is not drawn, and says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ds_reshard.resume.json_schedule import SOURCE, Section, Unknown, given_rate, older, read_section, schedules_of
from ds_reshard.resume.past import Past, base_rates, same, saved_section, scripts_own, shown
from ds_reshard.resume.policy import ResumePolicy, combine, from_json
from ds_reshard.resume.schedule import Constant, Schedule

CHECKPOINT, HOST, OVERRIDE = "checkpoint", "no flag", "override"
TITLES = {
    CHECKPOINT: "the checkpoint's own schedule, continued",
    HOST: "this run, no flag",
    OVERRIDE: "this run, --override-opt-param-scheduler",
}
_POINTS = 2000
_LEAST, _USUAL, _MOST = 20, 1000, 10_000_000


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
        curves = {
            curve.name: {"title": curve.title, "unknown": curve.unknown, "rates": [list(one) for one in curve.rates]}
            for curve in self.curves
        }
        return {
            "checkpoint": self.checkpoint,
            "config": self.config,
            "position": self.position,
            "positions": list(self.positions),
            "groups": [list(one) for one in self.groups],
            "curves": curves,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A schedule of each param group, and the rates of the first step where those are others."""

    schedules: tuple[Schedule, ...]
    first: tuple[float, ...] | None = None

    def rates(self, group: int, positions: Sequence[int]) -> tuple[float, ...]:
        made = tuple(self.schedules[group].rate(position) for position in positions)
        return made if self.first is None else (self.first[group], *made[1:])


def coming_run(
    past: Past, config: Mapping[str, object], *, where: str, steps: int | None = None, version: str | None = None
) -> ComingRun:
    """The curves of a run that resumes `past` with `config`, for its first `steps` steps.

    Without `steps`: to the end of the schedule that ends last, 1,000 steps where none ends ahead. `version` is the
    DeepSpeed that will run, None if not known. Raises ConfigError for a JSON that DeepSpeed would refuse.
    """
    section = read_section(config, where=where)
    rate = given_rate(config, where=where)
    count = _group_count(past, section)
    made = {
        CHECKPOINT: _continued(past, count),
        HOST: _without_flag(past, section, rate, count),
        OVERRIDE: _overridden(past, section, rate, count),
    }
    length = steps if steps is not None else length_of(made.values(), past.position)
    last = past.position + length - 1
    sections = {CHECKPOINT: saved_section(past), HOST: section, OVERRIDE: section}
    for name, drawn in made.items():
        found = sections[name]
        for release in (past.version, version) if name == CHECKPOINT else (version,):
            why = older(found if isinstance(found, Section) else None, release, first=past.position, last=last)
            if why is not None and isinstance(drawn, Drawn):
                made[name] = Unknown(reason=why)
    positions = sampled(past.position, length)
    groups, curves = curves_of(made, positions, count)
    return ComingRun(
        checkpoint=past.where,
        config=where,
        position=past.position,
        positions=positions,
        groups=groups,
        curves=curves,
        notes=(*_notes(config, where, version), *_doubts(made[CHECKPOINT])),
    )


def curves_of(
    made: Mapping[str, Drawn | Unknown], positions: Sequence[int], count: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[Curve, ...]]:
    """The param groups that share their curves, and each curve by these."""
    every = [_curve(name, drawn, positions, count) for name, drawn in made.items()]
    groups = _alike(every, count)
    return groups, tuple(
        replace(curve, rates=tuple(curve.rates[g[0]] for g in groups if curve.rates)) for curve in every
    )


def _continued(past: Past, count: int) -> Drawn | Unknown:
    """The saved schedule, if the saved rates are those that it gives at the position."""
    foreign = scripts_own(past, "the checkpoint was saved with")
    if foreign is not None:
        return Unknown(reason=foreign)
    if past.scheduler is None:
        if past.rates is None:
            return Unknown(reason=f"{past.where} holds no param groups, and no scheduler")
        return Drawn(schedules=tuple(Constant(lr=rate) for rate in past.rates))
    section = saved_section(past)
    if section is None and past.config_path is not None:
        kept = f"of its DeepSpeed JSON the checkpoint keeps the path, {past.config_path}"
        return Unknown(reason=f"{kept}, and not what it said: it keeps that where the script passes a dict")
    if section is None:
        return Unknown(reason="the checkpoint was saved with a scheduler that the DeepSpeed JSON in it does not name")
    if isinstance(section, Unknown):
        return section
    drawable = schedules_of(section, [0.0] * count, count)
    if isinstance(drawable, Unknown):
        return drawable
    rates = base_rates(past, section, count)
    if isinstance(rates, Unknown):
        return rates
    schedules = schedules_of(section, rates, count)
    if isinstance(schedules, Unknown):
        return schedules
    if past.rates is not None:
        given = [schedule.rate(past.position) for schedule in schedules]
        if not all(map(same, given, past.rates)):
            return Unknown(
                reason=f"the saved rates ({shown(past.rates)}) are not those of the saved {section.kind} at position "
                f"{past.position} ({shown(given)}): the script set them, or passed a scheduler of its own",
                contradicted=True,
            )
    return Drawn(schedules=schedules, first=past.rates)


def _without_flag(past: Past, section: Section | None, rate: float | Unknown, count: int) -> Drawn | Unknown:
    """The rates of the loaded param groups until the scheduler steps for the first time."""
    foreign = scripts_own(past, "this run's is not in its JSON if, as the checkpoint's, it is")
    if foreign is not None:
        return Unknown(reason=foreign)
    if past.rates is None:
        return Unknown(reason=f"{past.where} holds no param groups, so the rate of the first step is the script's")
    if section is None:
        return Drawn(schedules=tuple(Constant(lr=rate) for rate in past.rates))
    if past.scheduler is None:
        return Unknown(
            reason="the load fails: this run has a scheduler, and the checkpoint holds the state of none; "
            "--override-opt-param-scheduler loads it"
        )
    drawn = _this_runs(past, section, rate, count)
    return drawn if isinstance(drawn, Unknown) else replace(drawn, first=past.rates)


def _overridden(past: Past, section: Section | None, rate: float | Unknown, count: int) -> Drawn | Unknown:
    foreign = scripts_own(past, "this run's is not in its JSON if, as the checkpoint's, it is")
    if foreign is not None:
        return Unknown(reason=foreign)
    return _this_runs(past, section, rate, count)


def _this_runs(past: Past, section: Section | None, rate: float | Unknown, count: int) -> Drawn | Unknown:
    """This run's schedule as its JSON gives it: one rate for all param groups, if it needs the optimizer's."""
    if section is None or section.needs_rates:
        if isinstance(rate, Unknown):
            return rate
        if len(set(past.rates or ())) > 1:
            return Unknown(
                reason=f"the param groups were saved with rates of their own ({shown(past.rates or ())}): the script "
                "gives them, and this run's are not in its JSON"
            )
    schedules = schedules_of(section, [rate] * count if isinstance(rate, float) else [], count)
    return schedules if isinstance(schedules, Unknown) else Drawn(schedules=schedules)


def _group_count(past: Past, section: Section | None) -> int:
    if past.rates is not None:
        return len(past.rates)
    sections = (section, saved_section(past))
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


def _curve(name: str, drawn: Drawn | Unknown, positions: Sequence[int], count: int) -> Curve:
    if isinstance(drawn, Unknown):
        return Curve(name=name, unknown=drawn.reason)
    return Curve(name=name, rates=tuple(drawn.rates(group, positions) for group in range(count)))


def _alike(curves: Sequence[Curve], count: int) -> tuple[tuple[int, ...], ...]:
    """Param groups that have the same rates in every curve, together."""
    together: dict[tuple[tuple[float, ...], ...], list[int]] = {}
    for group in range(count):
        key = tuple(curve.rates[group] for curve in curves if curve.rates)
        together.setdefault(key, []).append(group)
    return tuple(map(tuple, together.values()))


def _doubts(continued: Drawn | Unknown) -> Iterator[str]:
    if isinstance(continued, Unknown) and continued.contradicted:
        yield (
            "beware: the checkpoint's rates are not those of its own JSON. If the script passed a scheduler of its own "
            "then, and does so now, this run's curves are wrong"
        )


def _notes(config: Mapping[str, object], where: str, version: str | None) -> Iterator[str]:
    yield (
        "read from the JSON alone: a scheduler, or a rate for a param group, that the script itself passes wins over "
        "it and is not seen here"
    )
    if version != SOURCE:
        here = "no DeepSpeed is installed here" if version is None else f"DeepSpeed {version} is installed here"
        yield f"the formulas are those of DeepSpeed {SOURCE}; {here}"
    ours = config.get("ds_reshard")
    resume = ours.get("resume") if isinstance(ours, Mapping) else None
    if resume is not None:
        policy = combine([from_json(resume, place=f"{where}: ds_reshard.resume")])
        yield asked_curve(policy, "the resume section of this JSON asks for")


def asked_curve(policy: ResumePolicy, place: str) -> str:
    """Which curve a place, in words such as "the flags ask for", means by its policy."""
    curve = {"host": HOST, "override": OVERRIDE, "checkpoint": CHECKPOINT}.get(policy.scheduler)
    plain = policy.keeps_position and policy.loads_moments and not policy.takes("lr")
    if curve is not None and plain:
        return f'{place}: {TITLES[curve]} ("scheduler": "{policy.scheduler}")'
    return f"{place} what no curve shows: see docs/resume.md for what it does"
