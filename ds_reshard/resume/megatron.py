"""Megatron-LM's schedule: as it is saved, as the flags of a run make it, and as a curve of learning rates.

Steps are counted in samples by `megatron.training` (`get_optimizer_param_scheduler`, training.py, 0.18.2), so a
changed global batch size changes them although the number of iterations is the same.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr
from typing import NoReturn

from ds_reshard.errors import ConfigError, Fault, ScheduleMismatch, UnsupportedLayout, error_of, raise_faults
from ds_reshard.resume import lr_preview
from ds_reshard.resume.lr_preview import ComingRun, Drawn, attempt, refuse_other_rates
from ds_reshard.resume.policy import ResumePolicy, combine
from ds_reshard.resume.policy_sources import define, given
from ds_reshard.resume.schedule import Schedule as Curve
from ds_reshard.resume.schedule import Unknown

OVERRIDE = "--override-opt-param-scheduler"
CHECKPOINT = "--use-checkpoint-opt-param-scheduler"
WEIGHT_DECAY = ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")
SUBJECT = "the flags after --"

FIELDS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "--lr-warmup-iters, -samples, -fraction",
    "lr_decay_steps": "--lr-decay-iters, --train-iters",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--weight-decay, --start-weight-decay",
    "end_wd": "--weight-decay, --end-weight-decay",
    "wd_incr_steps": "--train-iters, --train-samples",
    "wd_incr_style": "--weight-decay-incr-style",
}
"""What `state_dict` holds beside the position, in its order, and the flags that each value comes from
(core/optimizer_param_scheduler.py, 0.16.1 to 0.19.2)."""

EXTRA = {
    "init_lr": "--lr-warmup-init",
    "wsd_decay_steps": "--lr-wsd-decay-iters, -samples",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
}
"""What shapes the curve and is not saved with it: known where the checkpoint holds its run's arguments."""

_OLDER = {
    "max_lr": ("start_lr",),
    "lr_warmup_steps": ("warmup_iter", "warmup_steps"),
    "lr_decay_steps": ("end_iter", "decay_steps"),
    "lr_decay_style": ("decay_style",),
}
"""Names of values in older checkpoints."""

Bounds = tuple[float, float]
"""The highest and the lowest learning rate of a param group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Values by attribute name, and how far it has run, in the scheduler's steps."""

    values: Mapping[str, object]
    position: int


def read_schedule(state: object, *, where: str, extra: Mapping[str, object] | None = None) -> Schedule:
    """A saved scheduler state, old names included; UnsupportedLayout for the state of another scheduler class."""
    held = state if isinstance(state, Mapping) else {}
    values: dict[str, object] = {}
    absent = []
    for field in FIELDS:
        name = next((name for name in (*_OLDER.get(field, ()), field) if name in held), None)
        if name is not None:
            values[field] = held[name]
        elif field not in WEIGHT_DECAY:  # states older than weight-decay schedules have none of these
            absent.append(field)
    position = next((held[name] for name in ("num_iters", "num_steps") if name in held), None)
    if not absent and isinstance(position, int):
        return Schedule(values={**values, **(extra or {})}, position=position)
    names = ", ".join(sorted(map(str, held))) if isinstance(state, Mapping) else type(state).__name__
    fault = UnsupportedLayout.fault(
        where,
        "the scheduler state is not one of OptimizerParamScheduler",
        ", ".join([*absent, "num_steps"]),
        names or "nothing",
        mend="add --no-load-lr-state for this run's schedule from its beginning",
    )
    raise error_of([fault], subject="loading the schedule")


def extra_values(arguments: object) -> dict[str, object]:
    """The values of `EXTRA` that a saved run's arguments give, as `get_optimizer_param_scheduler` makes them."""
    if not hasattr(arguments, "lr_warmup_init"):
        return {}

    def get(name: str) -> object:
        return getattr(arguments, name, None)

    decay = get("lr_wsd_decay_samples")
    if get("train_iters") and get("train_samples") is None:
        iterations, batch = get("lr_wsd_decay_iters"), get("global_batch_size")
        decay = None if iterations is None or batch is None else iterations * batch  # type: ignore[operator]
    return {
        "init_lr": arguments.lr_warmup_init,
        "lr_wsd_decay_style": get("lr_wsd_decay_style"),
        "wsd_decay_steps": decay,
    }


def differences(saved: Schedule, run: Schedule, *, without: Iterable[str] = ()) -> list[Fault]:
    """A ScheduleMismatch fault for every value that both have and that differs."""
    left_out = set(without)
    return [
        mismatch(name, value, run.values[name])
        for name, value in saved.values.items()
        if name in run.values and name not in left_out and value != run.values[name]
    ]


def mismatch(name: str, saved: object, now: object, *, of: str = "") -> Fault:
    """One value (`of` a param group) that differs, with the flags that would accept either side."""
    flags = {**FIELDS, **EXTRA}.get(name)
    old, new = ("none" if value is None else str(value) for value in (saved, now))
    return ScheduleMismatch.fault(
        f"{of}{name}" + (f" (from {flags})" if flags else ""),
        "differs from the checkpoint's",
        f"{old} as in the checkpoint",
        f"{new} in this run",
        mend=f"add {OVERRIDE} for this run's values, or {CHECKPOINT} for the checkpoint's",
    )


def learning_rate(
    *,
    max_lr: float,
    decay: int,
    min_lr: float = 0.0,
    init_lr: float = 0.0,
    warmup: int = 0,
    style: str = "linear",
    wsd_decay: int | None = None,
    wsd_style: str = "exponential",
) -> Curve:
    """`OptimizerParamScheduler.get_lr` (megatron/core/optimizer_param_scheduler.py, the same in 0.16.1 and 0.19.2).

    Positions count what the scheduler is stepped by: samples. With n the position, W warm-up and D decay:

    * init + (max - init) n / W while n <= W and W > 0; then max if constant; min where n > D;
    * inverse-square-root: max sqrt(max(W, 1)) / sqrt(max(n, 1)), at least min;
    * else min + k (max - min), with q = (n - W) / (D - W): linear k = 1 - q; cosine k = (cos(pi q) + 1) / 2; WSD
      k = 1 up to D - A, then with w = (n - (D - A)) / A: linear 1 - w, cosine (cos(pi w) + 1) / 2, exponential
      2 * 0.5 ** w - 1, minus_sqrt 1 - sqrt(w).

    Operations are in the order of the source, so that results are equal to the last bit. Raises ValueError for what
    Megatron refuses.
    """
    if style not in _STYLES or wsd_style not in _WSD_STYLES:
        raise ValueError(f"unknown decay style {style!r}, or {wsd_style!r} of WSD")
    if not 0 <= warmup < decay or (style == "WSD" and not wsd_decay):
        raise ValueError("warm-up ends before decay does, and WSD needs the length of its decay")

    def share(position: int) -> float:
        done, kind = float(position - warmup) / float(decay - warmup), style
        if style == "WSD" and wsd_decay:
            begin = decay - wsd_decay
            if position <= begin:
                return 1.0
            done, kind = float(position - begin) / float(wsd_decay), wsd_style
        if kind == "linear":
            return 1.0 - done
        if kind == "cosine":
            return 0.5 * (math.cos(math.pi * done) + 1.0)
        return (2.0 * math.pow(0.5, done)) - 1.0 if kind == "exponential" else 1.0 - math.sqrt(done)

    def rate(position: int) -> float:
        if warmup > 0 and position <= warmup:
            return init_lr + ((max_lr - init_lr) * float(position) / float(warmup))
        if style == "constant":
            return max_lr
        if position > decay:
            return min_lr
        if style == "inverse-square-root":
            return max(min_lr, float(max_lr * max(warmup, 1) ** 0.5 / (max(position, 1) ** 0.5)))
        return min_lr + share(position) * (max_lr - min_lr)

    return Curve(rate=rate, end=warmup if style == "constant" else decay + 1)


def weight_decay(*, start: float, stop: float, increase: int = 0, style: str = "constant") -> Callable[[int], float]:
    """`OptimizerParamScheduler.get_wd`, to be multiplied by the group's `wd_mult`.

    start + k (end - start) with q = n / I while n <= I, then end: linear k = q; cosine k = (cos(pi (1 - q)) + 1) / 2.
    Raises ValueError for what Megatron refuses.
    """
    if style not in _INCREASES:
        raise ValueError(f"unknown increment style {style!r}")
    if style == "constant" and start != stop:
        raise ValueError("a constant weight decay ends as it starts")
    if increase < 0 or (style != "constant" and not increase):
        raise ValueError("a weight decay that changes needs the length of its increase")

    def at(position: int) -> float:
        if position > increase or style == "constant":
            return stop
        done = float(position) / float(increase)
        share = done if style == "linear" else 0.5 * (math.cos(math.pi * (1 - done)) + 1.0)
        return start + share * (stop - start)

    return at


def rates_of(schedule: Schedule, bounds: Sequence[Bounds]) -> tuple[Curve, ...]:
    """One curve for each pair of bounds; raises Unknown for a schedule that Megatron would refuse."""
    values = schedule.values
    made = {
        "init_lr": values.get("init_lr", 0.0),
        "warmup": values["lr_warmup_steps"],
        "decay": values["lr_decay_steps"],
        "style": values["lr_decay_style"],
        "wsd_decay": values.get("wsd_decay_steps"),
        "wsd_style": values.get("lr_wsd_decay_style") or "exponential",
    }
    try:
        return tuple(learning_rate(max_lr=high, min_lr=low, **made) for high, low in bounds)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise Unknown(f"Megatron refuses this schedule: {error}") from None


def weight_decay_of(schedule: Schedule, position: int) -> float | None:
    """The weight decay at a position, before a group's multiplier; None where the checkpoint does not tell it."""
    try:
        start, stop, increase, style = (schedule.values[name] for name in WEIGHT_DECAY)
        return weight_decay(start=start, stop=stop, increase=increase, style=style)(position)  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPast:
    """What a checkpoint of Megatron-LM says of its schedule.

    `groups` are the saved param groups, None where the files hold none that can be read; `arguments` are the saving
    run's, as far as they are known.
    """

    where: str
    schedule: Schedule
    groups: tuple[Mapping[str, object], ...] | None
    arguments: Mapping[str, object]

    def bounds(self) -> tuple[Bounds, ...]:
        """Those of each group; a group without bounds of its own has the schedule's (`get_lr`). Raises Unknown."""
        if self.groups is None:
            raise Unknown(f"{self.where} holds no param groups that can be read")
        found = []
        for group in self.groups:
            high, low = (group.get(name, self.schedule.values[name]) for name in ("max_lr", "min_lr"))
            if not isinstance(high, (int, float)) or not isinstance(low, (int, float)):
                raise Unknown(f"{self.where}: a param group has the bounds {repr(high)} and {repr(low)}, no numbers")
            found.append((float(high), float(low)))
        return tuple(found)

    def continued(self) -> Drawn:
        """The saved schedule of each group, if the saved rates are those that it gives at the position."""
        made = rates_of(self.schedule, self.bounds())
        values, position = self.schedule.values, self.schedule.position
        warmup = values["lr_warmup_steps"]
        if "init_lr" not in values and isinstance(warmup, (int, float)) and position <= warmup:
            raise Unknown("the warm-up goes on, and the checkpoint does not hold the rate that it began with")
        saved = [group.get("lr") for group in self.groups or ()]
        held = [float(rate) for rate in saved if isinstance(rate, (int, float))]
        refuse_other_rates(made, position, held if len(held) == len(saved) else None, "schedule")
        return Drawn(schedules=made)


_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
_WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
_INCREASES = ("constant", "linear", "cosine")
_FLOATS = {
    "lr": None,
    "min_lr": 0.0,
    "lr_warmup_fraction": None,
    "lr_warmup_init": 0.0,
    "decoupled_lr": None,
    "decoupled_min_lr": None,
    "weight_decay": 0.01,
    "start_weight_decay": None,
    "end_weight_decay": None,
}
_WHOLE = {
    "train_iters": None,
    "train_samples": None,
    "global_batch_size": None,
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_samples": None,
    "ckpt_step": None,
}
_WORDS = {
    "lr_decay_style": ("linear", _STYLES),
    "lr_wsd_decay_style": ("exponential", _WSD_STYLES),
    "weight_decay_incr_style": ("constant", _INCREASES),
}
UNDRAWN = {
    "yaml_cfg": "its values are in a YAML file",
    "step_batch_size_schedule": "the batch size, in which the schedule counts, follows the samples",
    "use_mup": "the rates of hidden matrices follow from the model's width",
}
"""Flags under which the schedule is not in the flags alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRun:
    """`bounds` are those of groups that follow the schedule, `decoupled` those of embeddings with a rate of their own.

    `batch` is the number of samples of an iteration, `grows` whether it begins with less; `unread` counts the flags
    that have nothing to do with the schedule.
    """

    schedule: Schedule
    bounds: Bounds
    decoupled: Bounds | None
    batch: int
    grows: bool
    policy: ResumePolicy
    tag: str | None
    unread: int


def read_run(words: Sequence[str], *, batch: int | None = None) -> MegatronRun:
    """A command line of `megatron.training`, or only what shapes the schedule; ConfigError names what is wrong.

    The schedule is what `get_optimizer_param_scheduler` (training.py) makes of it, checked as by `validate_args`
    (arguments.py): the same in 0.18.2 and 0.19.2. `batch` is what that has made of the samples of an iteration, where
    Megatron was asked; no curve is drawn then, and what hinders one is no fault.
    """
    parser = _parser()
    dests, _ = define(parser)
    parsed, rest = parser.parse_known_args(list(words))
    parsed.global_batch_size = parsed.global_batch_size if batch is None else batch
    raise_faults([*_misspelled(parser, rest), *_run_faults(parsed, drawn=batch is None)], subject=SUBJECT)
    decoupled = None
    if parsed.decoupled_lr is not None:
        low = parsed.decoupled_min_lr if parsed.decoupled_min_lr is not None else parsed.min_lr
        decoupled = (parsed.decoupled_lr, low)
    return MegatronRun(
        schedule=_schedule(parsed),
        bounds=(parsed.lr, parsed.min_lr),
        decoupled=decoupled,
        batch=parsed.global_batch_size,
        grows=parsed.rampup_batch_size is not None,
        policy=combine([given(parsed, dests, place=SUBJECT)]),
        tag=str(parsed.ckpt_step) if parsed.ckpt_step else None,
        unread=sum(word.startswith("--") for word in rest),
    )


class FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError.of(SUBJECT, message, mend="write them as for Megatron-LM")


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(add_help=False, allow_abbrev=False)
    for name, default in _FLOATS.items():
        parser.add_argument(_flag(name), type=float, default=default)
    for name, whole in _WHOLE.items():
        parser.add_argument(_flag(name), type=int, default=whole)
    for name, (usual, choices) in _WORDS.items():
        parser.add_argument(_flag(name), default=usual, choices=choices)
    for name in ("yaml_cfg", "step_batch_size_schedule"):
        parser.add_argument(_flag(name))
    parser.add_argument("--use-mup", action="store_true", default=None)
    parser.add_argument("--rampup-batch-size", nargs="*")
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _schedule(parsed: argparse.Namespace) -> Schedule:
    if parsed.train_iters:
        unit, length, batch = "iters", parsed.train_iters, parsed.global_batch_size
    else:
        unit, length, batch = "samples", parsed.train_samples, 1
    decay, warmup, wsd = (getattr(parsed, f"lr_{name}_{unit}") for name in ("decay", "warmup", "wsd_decay"))
    decay = (decay if decay is not None else length) * batch
    constant = parsed.weight_decay_incr_style == "constant"
    values = {
        "max_lr": parsed.lr,
        "min_lr": parsed.min_lr,
        "lr_warmup_steps": warmup * batch if parsed.lr_warmup_fraction is None else parsed.lr_warmup_fraction * decay,
        "lr_decay_steps": decay,
        "lr_decay_style": parsed.lr_decay_style,
        "start_wd": parsed.weight_decay if constant else parsed.start_weight_decay,
        "end_wd": parsed.weight_decay if constant else parsed.end_weight_decay,
        "wd_incr_steps": length * batch,
        "wd_incr_style": parsed.weight_decay_incr_style,
        "init_lr": parsed.lr_warmup_init,
        "wsd_decay_steps": wsd * batch if wsd is not None else None,
        "lr_wsd_decay_style": parsed.lr_wsd_decay_style,
    }
    return Schedule(values=values, position=0)


def _run_faults(parsed: argparse.Namespace, *, drawn: bool) -> list[Fault]:
    """What Megatron refuses, and what the flags do not tell."""
    wrong = [
        (_flag(name), f"is given, and {why}: its curve is not drawn", "start the run with --resume-report FILE")
        for name, why in UNDRAWN.items()
        if drawn and getattr(parsed, name) is not None
    ]
    if parsed.lr is None:
        wrong.append(("--lr", "is missing", "add --lr RATE"))
    elif not 0 <= parsed.min_lr <= parsed.lr or parsed.lr_warmup_init > parsed.lr:
        wrong.append(("--min-lr, --lr-warmup-init", "are above --lr or below 0", "give them as for Megatron-LM"))
    if bool(parsed.train_iters) == bool(parsed.train_samples):
        wrong.append(("--train-iters, --train-samples", "just one of them is needed", "add --train-iters N"))
    if not parsed.global_batch_size or parsed.global_batch_size < 1:
        mend = "add --global-batch-size N: the schedule counts samples"
        wrong.append(("--global-batch-size", "is missing or below 1", mend))
    others = "samples" if parsed.train_iters else "iters"
    unfit = [f"lr_decay_{others}", f"lr_warmup_{others}"]
    if parsed.lr_warmup_fraction is not None:
        unfit += ["lr_warmup_iters", "lr_warmup_samples"]
    for flag in dict.fromkeys(_flag(name) for name in unfit if getattr(parsed, name)):
        wrong.append((flag, "does not go with --train-* or --lr-warmup-fraction as they are", f"leave out {flag}"))
    ends = [parsed.start_weight_decay is not None, parsed.end_weight_decay is not None]
    if ends != [parsed.weight_decay_incr_style != "constant"] * 2:
        where = "--start-weight-decay, --end-weight-decay"
        wrong.append((where, "go with --weight-decay-incr-style linear or cosine", "give all three or none"))
    return [ConfigError.fault(where, what, mend=mend) for where, what, mend in wrong]


def _misspelled(parser: argparse.ArgumentParser, rest: Sequence[str]) -> list[Fault]:
    """Flags that are almost one that shapes the schedule: Megatron takes no abbreviations either."""
    known = list(parser._option_string_actions)
    faults = []
    for word in rest:
        name = word.partition("=")[0]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.9) if name.startswith("--") else []
        near = near or [one for one in known if name.startswith("--lr") and one.startswith(name)][:1]
        if near:
            faults.append(ConfigError.fault(name, "is no flag of Megatron-LM's", mend=f"write {near[0]}"))
    return faults


def coming_run(past: MegatronPast, run: MegatronRun, *, steps: int | None = None) -> ComingRun:
    """The curves of the run that resumes `past`, for its first `steps` updates; without `steps`, to the end.

    As in `lr_preview`; positions count samples, and an update is a batch further than the one before. "No flag" is
    left out where the flags say what becomes of the schedule.
    """
    made = {lr_preview.CHECKPOINT: attempt(past.continued)}
    if run.policy.scheduler == "host":
        made[lr_preview.HOST] = attempt(lambda: _without_flag(past, run))
    made[lr_preview.OVERRIDE] = attempt(lambda: Drawn(schedules=rates_of(run.schedule, _this_runs(past, run))))
    position = past.schedule.position
    length = steps if steps is not None else lr_preview.length_of(made.values(), position, stride=run.batch)
    return lr_preview.drawn_run(
        made,
        lr_preview.sampled(position, length, stride=run.batch),
        len(past.groups) if past.groups else 1,
        checkpoint=past.where,
        config=SUBJECT,
        position=position,
        notes=_notes(past, run),
    )


def _without_flag(past: MegatronPast, run: MegatronRun) -> Drawn:
    """Both schedules are the same, or the load is refused."""
    differing = differences(past.schedule, run.schedule, without=EXTRA)
    if differing:
        told = "; ".join(f"{fault.where}: {fault.expected}, {fault.found}" for fault in differing)
        raise Unknown(f"the load is refused: {told}")
    bounds = _this_runs(past, run)
    if bounds != past.bounds():
        raise Unknown("a param group has other bounds than were saved: Megatron-LM 0.19 refuses that")
    return Drawn(schedules=rates_of(run.schedule, bounds))


def _this_runs(past: MegatronPast, run: MegatronRun) -> tuple[Bounds, ...]:
    """This run's bounds for each saved group: the schedule's, or those of --decoupled-lr for a group that had them."""
    saved = past.bounds()
    own = [_is_own(past, group, bounds) for group, bounds in zip(past.groups or (), saved, strict=True)]
    if run.decoupled is not None and not any(own):
        raise Unknown("the load is refused: the run that saved had no group with a --decoupled-lr")
    if any(own) and past.arguments.get("use_mup"):
        raise Unknown("the rates of hidden matrices follow from the model's width (--use-mup)")
    highest = {high for (high, _), mine in zip(saved, own, strict=True) if mine}
    if any(own) and (run.decoupled is None or highest != {past.arguments.get("decoupled_lr")}):
        raise Unknown(
            "param groups were saved with rates of their own: this run's are the script's, or those of "
            "--decoupled-lr where the saving run had one"
        )
    return tuple(run.decoupled if mine and run.decoupled is not None else run.bounds for mine in own)


def _is_own(past: MegatronPast, group: Mapping[str, object], bounds: Bounds) -> bool:
    """Whether a group does not follow the schedule's bounds; old checkpoints do not say it in a word."""
    told, values = group.get("default_config"), past.schedule.values
    return told is False or (told is None and bounds != (values["max_lr"], values["min_lr"]))


def _notes(past: MegatronPast, run: MegatronRun) -> list[str]:
    notes = [f"positions count samples; an update is {run.batch} of them"]
    if run.grows:
        notes.append("with --rampup-batch-size the first updates are less; the rate at a position is the same")
    if run.unread:
        notes.append(f"{run.unread} flags that have nothing to do with the schedule were not read")
    decays = (weight_decay_of(one, past.schedule.position) for one in (past.schedule, run.schedule))
    before, now = ("not known" if decay is None else f"{decay:.6g}" for decay in decays)
    notes.append(f"weight decay of the first update, where it applies: {before} by the checkpoint, {now} by this run")
    return [*notes, lr_preview.asked_curve(run.policy, f"{SUBJECT} ask for")]
