"""The learning rates of a run of Megatron-LM that has not started, from a checkpoint and the run's own flags.

As in `coming`: the checkpoint's own schedule continued, this run without a flag about the schedule, and this run with
--override-opt-param-scheduler. Positions count samples, and an update is a batch further than the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ds_reshard.resume.coming import (
    CHECKPOINT,
    HOST,
    OVERRIDE,
    ComingRun,
    Drawn,
    asked_curve,
    curves_of,
    length_of,
    sampled,
)
from ds_reshard.resume.json_schedule import Unknown
from ds_reshard.resume.megatron_past import Bounds, MegatronPast, rates_of, weight_decay_of
from ds_reshard.resume.megatron_run import SUBJECT, MegatronRun
from ds_reshard.resume.megatron_schedule import EXTRA, differences


def coming_run(past: MegatronPast, run: MegatronRun, *, steps: int | None = None) -> ComingRun:
    """The curves of the run that resumes `past`, for its first `steps` updates; without `steps`, to the end.

    "No flag" is left out where the flags say what becomes of the schedule.
    """
    made: dict[str, Drawn | Unknown] = {CHECKPOINT: _drawn(past.rates()), OVERRIDE: _overridden(past, run)}
    if run.policy.scheduler == "host":
        made = {CHECKPOINT: made[CHECKPOINT], HOST: _without_flag(past, run), OVERRIDE: made[OVERRIDE]}
    length = steps if steps is not None else length_of(made.values(), past.position, stride=run.batch)
    positions = sampled(past.position, length, stride=run.batch)
    groups, curves = curves_of(made, positions, len(past.groups) if past.groups else 1)
    return ComingRun(
        checkpoint=past.where,
        config=SUBJECT,
        position=past.position,
        positions=positions,
        groups=groups,
        curves=curves,
        notes=tuple(_notes(past, run)),
    )


def _drawn(rates: object) -> Drawn | Unknown:
    return rates if isinstance(rates, Unknown) else Drawn(schedules=rates)  # type: ignore[arg-type]


def _overridden(past: MegatronPast, run: MegatronRun) -> Drawn | Unknown:
    bounds = _this_runs(past, run)
    return bounds if isinstance(bounds, Unknown) else _drawn(rates_of(run.schedule, bounds))


def _without_flag(past: MegatronPast, run: MegatronRun) -> Drawn | Unknown:
    """Both schedules are the same, or the load is refused."""
    differing = differences(past.schedule, run.schedule, without=[field.name for field in EXTRA])
    if differing:
        told = "; ".join(f"{fault.where}: {fault.expected}, {fault.found}" for fault in differing)
        return Unknown(reason=f"the load is refused: {told}")
    bounds, saved = _this_runs(past, run), past.bounds()
    if isinstance(bounds, Unknown):
        return bounds
    if bounds != saved:
        return Unknown(reason="a param group has other bounds than were saved: Megatron-LM 0.19 refuses that")
    return _drawn(rates_of(run.schedule, bounds))


def _this_runs(past: MegatronPast, run: MegatronRun) -> tuple[Bounds, ...] | Unknown:
    """This run's bounds for each saved group: the schedule's, or those of --decoupled-lr for a group that had them."""
    saved = past.bounds()
    if isinstance(saved, Unknown) or past.groups is None:
        return saved
    own = [_is_own(past, group, bounds) for group, bounds in zip(past.groups, saved, strict=True)]
    if run.decoupled is not None and not any(own):
        return Unknown(reason="the load is refused: the run that saved had no group with a --decoupled-lr")
    if any(own) and past.arguments.get("use_mup"):
        return Unknown(reason="the rates of hidden matrices follow from the model's width (--use-mup)")
    decoupled = past.arguments.get("decoupled_lr")
    if any(own) and (
        run.decoupled is None or {high for (high, _), mine in zip(saved, own, strict=True) if mine} != {decoupled}
    ):
        return Unknown(
            reason="param groups were saved with rates of their own: this run's are the script's, or those of "
            "--decoupled-lr where the saving run had one"
        )
    return tuple(run.decoupled if mine and run.decoupled is not None else run.bounds for mine in own)


def _is_own(past: MegatronPast, group: Mapping[str, object], bounds: Bounds) -> bool:
    """Whether a group does not follow the schedule's bounds; old checkpoints do not say it in a word."""
    told, values = group.get("default_config"), past.schedule.values
    return told is False or (told is None and bounds != (values["max_lr"], values["min_lr"]))


def _notes(past: MegatronPast, run: MegatronRun) -> Iterator[str]:
    yield f"positions count samples; an update is {run.batch} of them"
    if run.grows:
        yield "with --rampup-batch-size the first updates are less; the rate at a position is the same"
    if run.unread:
        yield f"{run.unread} flags that have nothing to do with the schedule were not read"
    before, now = (weight_decay_of(one, past.position) for one in (past.schedule, run.schedule))
    told = f"{_shown(before)} by the checkpoint, {_shown(now)} by this run"
    yield f"weight decay of the first update, where it applies: {told}"
    yield asked_curve(run.policy, f"{SUBJECT} ask for")


def _shown(value: float | None) -> str:
    return "not known" if value is None else f"{value:.6g}"
