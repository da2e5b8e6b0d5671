"""The resume report of a DeepSpeed load."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ds_reshard.hooks.installation import REGISTRY
from ds_reshard.hosts.deepspeed.entries import Request
from ds_reshard.hosts.deepspeed.resume import SCHEDULED, Beside, Own, live_groups
from ds_reshard.hosts.deepspeed.saved import Saved
from ds_reshard.operations.ranks import attempt, rank
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.report import ResumeReport, Row, batch_size_warning, because, publish
from ds_reshard.resume.schedulers import position_of

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("ds_reshard")

_UNREAD = (
    "weight decay, and rates that the scheduler does not hold, are those of the saved DeepSpeed JSON or this run's: "
    "the optimizer's files, which say what was used, were not opened"
)
_WAITING = (
    "a scheduler that the engine does not own has not been given its state: until it is, its position is that of its "
    "beginning, and the resume policy takes the state that it is given"
)
_COUNTS_BATCHES = (
    "the scheduler's position ({position}) counts batches of all {dp} ranks, {updates} updates, as accelerate steps: "
    "under another data-parallel size the same position is another update"
)
_UNHOOKED = (
    "the hooks are not installed, so a scheduler that the engine does not own takes its saved state as it is, whatever "
    "the resume policy says: import ds_reshard.auto, or hand the scheduler to deepspeed.initialize"
)
_SHOWN = ("lr", "min_lr", "weight_decay", "betas", "eps", "momentum")


def report(engine: DeepSpeedEngine, own: Own, beside: Beside | None) -> ResumeReport:
    """Rows for iteration, schedule, each param group, optimizer, data, layout and batch size, as they are now."""
    assert own.last is not None
    saved, policy, request = own.last.saved, own.last.policy, own.last.request
    batch = engine.train_batch_size()
    rows = [
        Row(
            name="iteration",
            checkpoint=saved.iteration,
            this_run=0,
            used=engine.global_steps,
            because=because(policy, "iteration"),
        ),
        Row(
            name="samples",
            checkpoint=saved.samples,
            this_run=0,
            used=engine.global_samples,
            because=because(policy, "iteration"),
        ),
        _position(engine, saved, policy, beside),
        *_groups(engine, own, saved, policy),
        Row(
            name="clip_grad",
            checkpoint=saved.clip_grad,
            this_run=own.clip_grad,
            used=getattr(engine.optimizer, "clip_grad", engine.gradient_clipping()),
            because=because(policy, "clip_grad"),
        ),
        *_optimizer(saved, policy, request),
        Row(name="rng", checkpoint=None, this_run="this run", used="this run", because="DeepSpeed stores none"),
        Row(
            name="data",
            checkpoint=None,
            this_run="from its start",
            used="from its start" if policy.dataloader == "reset" else "the script's own",
            because=because(policy, "dataloader"),
        ),
        Row(
            name="stage and dp",
            checkpoint=(saved.stage, saved.dp),
            this_run=(int(engine.zero_optimization_stage()), engine.seq_dp_world_size),
            used=(int(engine.zero_optimization_stage()), engine.seq_dp_world_size),
            because="this run",
        ),
        Row(
            name="global batch size", checkpoint=saved.train_batch_size, this_run=batch, used=batch, because="this run"
        ),
        *_found("fingerprints", own.last.proof, '"verify": "fingerprint"'),
    ]
    warnings = batch_size_warning(saved.train_batch_size, batch)
    if not policy.keeps_iteration and not policy.finetune:
        warnings += ("the iteration starts again at 0: later saves may overwrite earlier tags of the same folder",)
    if engine.lr_scheduler is None and own.scheduled and beside is None and not policy.is_default:
        warnings += (_WAITING,)
    warnings += _counted(engine, saved, beside)
    if REGISTRY.active("deepspeed") is None and (policy.scheduler != "host" or policy.places_schedule):
        warnings += (_UNHOOKED,)
    if policy.scheduler == "checkpoint" and not policy.loads_masters and not saved.groups:
        warnings += (_UNREAD,)
    return ResumeReport(host="deepspeed", checkpoint=saved.where, rows=tuple(rows), warnings=warnings)


def _found(name: str, used: str | None, why: str) -> Iterator[Row]:
    if used is not None:
        yield Row(name=name, checkpoint=None, this_run=None, used=used, because=why)


def _counted(engine: DeepSpeedEngine, saved: Saved, beside: Beside | None) -> tuple[str, ...]:
    """A warning where a position counts the batches of a number of ranks that is not this run's."""
    updates = (saved.iteration or 0) - saved.skipped
    if beside is None or not updates or saved.dp in (1, engine.seq_dp_world_size):
        return ()
    if beside.saved_position != updates * saved.dp:
        return ()
    return (_COUNTS_BATCHES.format(position=beside.saved_position, updates=updates, dp=saved.dp),)


def amend(engine: DeepSpeedEngine, own: Own, beside: Beside) -> None:
    """Rank 0: report anew, as a scheduler beside the engine has taken a state. Not collective, and never raises."""
    if rank() != 0 or own.last is None:
        return
    path = own.last.policy.report
    made, faults, _ = attempt(lambda: report(engine, own, beside))
    if made is not None:
        _, faults, _ = attempt(lambda: publish(made, path=path))
        rates = [row.used for row in made.rows if row.name.endswith(": lr")]
        position = made["schedule position"].used
        logger.info("%s took its state: position %s, lr %s", type(beside.scheduler).__name__, position, rates)
        for warning in _counted(engine, own.last.saved, beside):
            logger.warning("%s", warning)
    for fault in faults:
        logger.error("no resume report: %s", fault.line())


def _position(engine: DeepSpeedEngine, saved: Saved, policy: ResumePolicy, beside: Beside | None) -> Row:
    scheduler = engine.lr_scheduler if beside is None else beside.scheduler
    theirs = (saved.position if saved.scheduler is not None else None) if beside is None else beside.saved_position
    used = position_of(scheduler) if scheduler is not None else None
    return Row(
        name="schedule position",
        checkpoint=theirs,
        this_run=0 if scheduler is not None else None,
        used=used,
        because=because(policy, "position"),
    )


def _groups(engine: DeepSpeedEngine, own: Own, saved: Saved, policy: ResumePolicy) -> Iterator[Row]:
    for number, (group, mine) in enumerate(zip(live_groups(engine), own.groups, strict=True)):
        theirs: Mapping[str, object] = saved.groups.get(number, {})
        for name in _SHOWN:
            if name in group:
                yield Row(
                    name=f"group {number}: {name}",
                    checkpoint=theirs.get(name),
                    this_run=mine.get(name),
                    used=group[name],
                    because=because(policy, "schedule" if name in SCHEDULED else "", name),
                )


def _optimizer(saved: Saved, policy: ResumePolicy, request: Request) -> Iterator[Row]:
    loaded = {"fp32 masters": request.load_optimizer, "moments": request.load_optimizer and request.moments}
    for name, present in loaded.items():
        anew = "from the loaded weights" if name == "fp32 masters" else "anew"
        why = because(policy, "optimizer")
        if not present and why == "host":
            why = "arguments of load_checkpoint"
        yield Row(name=name, checkpoint="saved", this_run=anew, used="checkpoint" if present else anew, because=why)
