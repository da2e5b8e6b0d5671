"""A schedule as Megatron-LM saves it: read, compared with another, named for the user.

Steps are counted in samples by `megatron.training` (`get_optimizer_param_scheduler`, training.py, 0.18.2), so a
changed global batch size changes them although the number of iterations is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ds_reshard.errors import Fault, ScheduleMismatch, UnsupportedLayout, raise_faults

OVERRIDE = "--override-opt-param-scheduler"
CHECKPOINT = "--use-checkpoint-opt-param-scheduler"
WEIGHT_DECAY = ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A value of the schedule: its attribute, its names in older checkpoints, the flags that it comes from."""

    name: str
    older: tuple[str, ...] = ()
    flags: str


FIELDS = (
    Field(name="max_lr", older=("start_lr",), flags="--lr"),
    Field(name="min_lr", flags="--min-lr"),
    Field(
        name="lr_warmup_steps", older=("warmup_iter", "warmup_steps"), flags="--lr-warmup-iters, -samples, -fraction"
    ),
    Field(name="lr_decay_steps", older=("end_iter", "decay_steps"), flags="--lr-decay-iters, --train-iters"),
    Field(name="lr_decay_style", older=("decay_style",), flags="--lr-decay-style"),
    Field(name="start_wd", flags="--weight-decay, --start-weight-decay"),
    Field(name="end_wd", flags="--weight-decay, --end-weight-decay"),
    Field(name="wd_incr_steps", flags="--train-iters, --train-samples"),
    Field(name="wd_incr_style", flags="--weight-decay-incr-style"),
)
"""What `state_dict` holds beside the position, in its order (core/optimizer_param_scheduler.py, 0.16.1 to 0.19.2)."""

EXTRA = (
    Field(name="init_lr", flags="--lr-warmup-init"),
    Field(name="wsd_decay_steps", flags="--lr-wsd-decay-iters, -samples"),
    Field(name="lr_wsd_decay_style", flags="--lr-wsd-decay-style"),
)
"""What shapes the curve and is not saved with it: known where the checkpoint holds its run's arguments."""

_FLAGS = {field.name: field.flags for field in (*FIELDS, *EXTRA)}
_POSITION = ("num_iters", "num_steps")


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
        name = next((name for name in (*field.older, field.name) if name in held), None)
        if name is not None:
            values[field.name] = held[name]
        elif field.name not in WEIGHT_DECAY:  # states older than weight-decay schedules have none of these
            absent.append(field.name)
    position = next((held[name] for name in _POSITION if name in held), None)
    if absent or not isinstance(position, int):
        raise_faults([_foreign(where, state, absent)], subject="loading the schedule")
    assert isinstance(position, int)
    return Schedule(values={**values, **(extra or {})}, position=position)


def extra_values(arguments: object) -> dict[str, object]:
    """The values of `EXTRA` that a saved run's arguments give, as `get_optimizer_param_scheduler` makes them."""
    if not hasattr(arguments, "lr_warmup_init"):
        return {}
    found: dict[str, object] = {
        "init_lr": arguments.lr_warmup_init,
        "lr_wsd_decay_style": getattr(arguments, "lr_wsd_decay_style", None),
    }
    iterations, samples = (
        getattr(arguments, "lr_wsd_decay_iters", None),
        getattr(arguments, "lr_wsd_decay_samples", None),
    )
    if getattr(arguments, "train_iters", None) and getattr(arguments, "train_samples", None) is None:
        batch = getattr(arguments, "global_batch_size", None)
        found["wsd_decay_steps"] = None if iterations is None or batch is None else iterations * batch
    else:
        found["wsd_decay_steps"] = samples
    return found


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
    origin = f" (from {_FLAGS[name]})" if name in _FLAGS else ""
    return ScheduleMismatch.fault(
        f"{of}{name}{origin}",
        "differs from the checkpoint's",
        f"{_shown(saved)} as in the checkpoint",
        f"{_shown(now)} in this run",
        mend=f"add {OVERRIDE} for this run's values, or {CHECKPOINT} for the checkpoint's",
    )


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def absent_schedule(where: str, asked: str) -> Fault:
    """The checkpoint has no scheduler state, and `asked` needs it."""
    return ScheduleMismatch.fault(
        where,
        f"has no scheduler state, which {asked} takes the position from",
        mend=f"leave out {asked}, or add --no-load-lr-state for this run's schedule from its beginning",
    )


def _foreign(where: str, state: object, absent: list[str]) -> Fault:
    held = ", ".join(sorted(str(key) for key in state)) if isinstance(state, Mapping) else type(state).__name__
    return UnsupportedLayout.fault(
        where,
        "the scheduler state is not one of OptimizerParamScheduler",
        ", ".join([*absent, "num_steps"] if absent else ["num_steps"]),
        held or "nothing",
        mend="add --no-load-lr-state for this run's schedule from its beginning",
    )
