"""What a checkpoint says of its schedule, hyper-parameters and counters, beside this run's engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.stage0 import with_order
from ds_reshard.hosts.deepspeed.compare import match_groups
from ds_reshard.hosts.deepspeed.live import LiveOptimizer
from ds_reshard.hosts.deepspeed.revival import revived
from ds_reshard.hosts.deepspeed.settings import Settings
from ds_reshard.resume.schedulers import position_in

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The typed facts of a checkpoint that a resume policy and its report need.

    `groups` maps a live param group to the saved hyper-parameters that belong to it: without groups whose members
    were saved with different ones, and empty where the optimizer files are not read. `scheduler` is the saved state
    dict; `config` the DeepSpeed JSON of the saving run.
    """

    where: str
    stage: int
    dp: int
    groups: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    scheduler: Mapping[str, object] | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    iteration: int | None = None
    samples: int | None = None
    skipped: int = 0
    clip_grad: object = None

    @property
    def position(self) -> int:
        """How far the schedule had run; without a scheduler, the updates that were made."""
        found = position_in(self.scheduler) if self.scheduler is not None else None
        return found if found is not None else max(0, (self.iteration or 0) - self.skipped)

    @property
    def scheduler_section(self) -> tuple[str | None, Mapping[str, object] | None]:
        """Type and parameters of the scheduler in the saving run's JSON, None for what is not there."""
        section = self.config.get("scheduler")
        if not isinstance(section, Mapping):
            return None, None
        kind, params = section.get("type"), section.get("params", {})
        return (str(kind) if kind else None), (params if isinstance(params, Mapping) else None)

    @property
    def optimizer_params(self) -> Mapping[str, object]:
        """Parameters of the optimizer in the saving run's JSON; empty where a script built it."""
        section = self.config.get("optimizer")
        params = section.get("params") if isinstance(section, Mapping) else None
        return params if isinstance(params, Mapping) else {}

    @property
    def train_batch_size(self) -> int | None:
        """The global batch size of the saving run as its JSON gives or implies it."""
        given = self.config.get("train_batch_size")
        if isinstance(given, int):
            return given
        micro = self.config.get("train_micro_batch_size_per_gpu")
        steps = self.config.get("gradient_accumulation_steps", 1)
        return micro * steps * self.dp if isinstance(micro, int) and isinstance(steps, int) else None


def read_saved(
    engine: DeepSpeedEngine,
    live: LiveOptimizer | None,
    checkpoint: ZeroCheckpoint,
    settings: Settings,
    *,
    scheduler: bool,
) -> Saved:
    """Read these facts; no tensor is read. `scheduler` asks for the scheduler's state, which may need `trust`."""
    return saved_of(
        checkpoint.model.entries,
        settings,
        where=checkpoint.listing.folder,
        stage=checkpoint.stage,
        groups=_groups(live, checkpoint, settings) if live is not None else {},
        clip_grad=checkpoint.optimizer_entries.get("clip_grad"),
        scheduler=scheduler,
    )


def saved_of(
    entries: Mapping[str, object],
    settings: Settings,
    *,
    where: str,
    stage: int,
    scheduler: bool,
    groups: Mapping[int, Mapping[str, object]] | None = None,
    clip_grad: object = None,
) -> Saved:
    """The facts in the entries of a model file, with what the optimizer's files add."""
    state = revived(entries.get("lr_scheduler"), trusted=settings.trust, where="lr_scheduler") if scheduler else None
    config = (
        revived(entries.get("ds_config"), trusted=settings.trust, where="ds_config") if "ds_config" in entries else {}
    )
    return Saved(
        where=where,
        stage=stage,
        dp=_whole(entries.get("dp_world_size")) or 1,
        groups=groups or {},
        scheduler=state if isinstance(state, Mapping) else None,
        config=config if isinstance(config, Mapping) else {},
        iteration=_whole(entries.get("global_steps")),
        samples=_whole(entries.get("global_samples")),
        skipped=_whole(entries.get("skipped_steps")) or 0,
        clip_grad=clip_grad,
    )


def _groups(live: LiveOptimizer, checkpoint: ZeroCheckpoint, settings: Settings) -> dict[int, Mapping[str, object]]:
    if checkpoint.stage == 0 and isinstance(checkpoint.model.entries.get("optimizer"), Mapping):
        checkpoint, _ = with_order(checkpoint, live.order)
    if checkpoint.facts is None:
        return {}
    made: dict[int, Mapping[str, object]] = {}
    for number in range(len(live.groups)):
        groups, faults = match_groups({number: live.members(number)}, checkpoint.facts)
        saved = groups.get(number)
        if saved is None or faults:
            continue
        values = revived(dict(saved), trusted=settings.trust, where=f"param group {number}")
        assert isinstance(values, dict)
        made[number] = values
    return made


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
