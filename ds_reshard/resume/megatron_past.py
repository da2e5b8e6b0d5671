"""What a checkpoint of Megatron-LM says of its schedule, and the curves that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr

from ds_reshard.resume.json_schedule import Unknown
from ds_reshard.resume.megatron_schedule import Schedule
from ds_reshard.resume.past import same, shown
from ds_reshard.resume.schedule import MegatronRate, MegatronWeightDecay

Bounds = tuple[float, float]
"""The highest and the lowest learning rate of a param group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPast:
    """`groups` are the saved param groups, None where the files hold none that can be read; `arguments` are the
    saving run's, as far as they are known.
    """

    where: str
    schedule: Schedule
    groups: tuple[Mapping[str, object], ...] | None
    arguments: Mapping[str, object]

    @property
    def position(self) -> int:
        return self.schedule.position

    def bounds(self) -> tuple[Bounds, ...] | Unknown:
        """Those of each group; a group without bounds of its own has the schedule's (`get_lr`)."""
        if self.groups is None:
            return Unknown(reason=f"{self.where} holds no param groups that can be read")
        found = []
        for group in self.groups:
            high, low = (group.get(name, self.schedule.values[name]) for name in ("max_lr", "min_lr"))
            if not isinstance(high, (int, float)) or not isinstance(low, (int, float)):
                return Unknown(
                    reason=f"{self.where}: a param group has the bounds {repr(high)} and {repr(low)}, no numbers"
                )
            found.append((float(high), float(low)))
        return tuple(found)

    def rates(self) -> tuple[MegatronRate, ...] | Unknown:
        """The saved schedule of each group, if the saved rates are those that it gives at the position."""
        bounds = self.bounds()
        made = bounds if isinstance(bounds, Unknown) else rates_of(self.schedule, bounds)
        if isinstance(made, Unknown) or self.groups is None:
            return made if isinstance(made, Unknown) else Unknown(reason="no param groups")
        if not _knows_beginning(self.schedule):
            return Unknown(reason="the warm-up goes on, and the checkpoint does not hold the rate that it began with")
        saved = [group.get("lr") for group in self.groups]
        held = [float(rate) for rate in saved if isinstance(rate, (int, float))]
        given = [rate.rate(self.position) for rate in made]
        if len(held) == len(saved) and not all(map(same, given, held)):
            return Unknown(
                reason=f"the saved rates ({shown(held)}) are not those of the saved schedule at position "
                f"{self.position} ({shown(given)}): the script set them",
                contradicted=True,
            )
        return made


def rates_of(schedule: Schedule, bounds: tuple[Bounds, ...]) -> tuple[MegatronRate, ...] | Unknown:
    """One rate for each pair of bounds; Unknown for a schedule that Megatron would refuse."""
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
        return tuple(MegatronRate(max_lr=high, min_lr=low, **made) for high, low in bounds)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        return Unknown(reason=f"Megatron refuses this schedule: {error}")


def weight_decay_of(schedule: Schedule, position: int) -> float | None:
    """The weight decay at a position, before a group's multiplier; None where the checkpoint does not tell it."""
    names = {"start": "start_wd", "stop": "end_wd", "increase": "wd_incr_steps", "style": "wd_incr_style"}
    try:
        made = MegatronWeightDecay(**{name: schedule.values[theirs] for name, theirs in names.items()})  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError):
        return None
    return made.weight_decay(position)


def _knows_beginning(schedule: Schedule) -> bool:
    """Whether the rate at which a warm-up began is known, or it is over."""
    warmup = schedule.values["lr_warmup_steps"]
    return "init_lr" in schedule.values or not isinstance(warmup, (int, float)) or schedule.position > warmup
