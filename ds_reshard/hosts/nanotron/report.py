"""The resume report of a load into nanotron: for each value the checkpoint's, this run's, the one used, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

from ds_reshard.formats.nanotron.metadata import Metadata
from ds_reshard.formats.nanotron.names import NanotronListing, Topology
from ds_reshard.hosts.nanotron.batch import BATCH, batch_of_run, unknown_batch
from ds_reshard.hosts.nanotron.current import Group, Load, recall
from ds_reshard.hosts.nanotron.live import Live
from ds_reshard.hosts.nanotron.saved_schedule import SavedRates
from ds_reshard.resume.report import ResumeReport, Row, batch_size_warning, because, publish

logger = logging.getLogger("ds_reshard")
_OF_GROUP = ("weight_decay", "betas", "eps", "momentum")


class Placed(Protocol):
    """A scheduler after a load."""

    base_lrs: list[float]
    last_epoch: int
    _last_lr: list[float]


def optimizer(
    load: Load, live: Live, listing: NanotronListing, metadata: Metadata | None, saved: Sequence[Group] | None
) -> None:
    """What became of the optimizer; published at once in a loop of the user's own."""
    load.rows += [*_layout(load, live, listing, metadata), *_states(load), *_groups(load, live, saved)]
    now = batch_of_run(load, live.dp)
    if metadata is not None and now is not None:
        load.warnings += batch_size_warning(metadata.global_batch_size, now.size)
    load.warnings += unknown_batch(load, live.dp, metadata)
    _own(load)


def schedule(load: Load, scheduler: Placed, saved: SavedRates | None, before: Sequence[float]) -> None:
    """What became of the schedule; `before` are the base rates that this run built it with."""
    why = because(load.policy, "schedule")
    then = saved.position if saved is not None else None
    load.rows.append(
        Row(
            name="position",
            checkpoint=then,
            this_run=0,
            used=scheduler.last_epoch,
            because=because(load.policy, "position"),
        )
    )
    if saved is not None and load.policy.keeps_position and saved.iteration not in (None, saved.position):
        load.warnings.append(
            f"the scheduler was saved at step {saved.position} and the checkpoint at iteration {saved.iteration}: the "
            f"learning rates go on from step {saved.position}; nanotron alone makes one step too many at each resume"
        )
    bases = saved.bases if saved is not None and saved.bases else [None] * len(before)
    for number, (base, run, used) in enumerate(zip(bases, before, scheduler.base_lrs, strict=True)):
        load.rows.append(Row(name=f"group {number} initial lr", checkpoint=base, this_run=run, used=used, because=why))
        if run != used and load.policy.scheduler == "host":
            load.warnings.append(
                f"group {number}: the initial learning rate is {used}, the checkpoint's; this run's {run} is not used: "
                "add --override-opt-param-scheduler to use it"
            )
    last = saved.last if saved is not None and saved.last else [None] * len(before)
    for number, (rate, used) in enumerate(zip(last, scheduler._last_lr, strict=True)):
        load.rows.append(Row(name=f"group {number} lr", checkpoint=rate, this_run=None, used=used, because=why))
    _own(load)


def random_states(load: Load, used: str, why: str) -> None:
    load.rows.append(Row(name="random states", checkpoint=None, this_run=None, used=used, because=why))


def counters(load: Load) -> None:
    """The trainer's counters once it has started, and how they came about."""
    metadata = getattr(load.trainer, "metadata", None)
    for name, attribute, what in (
        ("iteration", "last_train_step", "iteration"),
        ("consumed samples", "consumed_train_samples", "dataloader"),
    ):
        used = getattr(metadata, attribute, None)
        why = because(load.policy, "iteration" if not load.policy.keeps_iteration else what)
        load.rows.append(Row(name=name, checkpoint=None, this_run=0, used=used, because=why))


def published(load: Load) -> None:
    """Log once and publish on rank 0; other ranks do nothing."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    made = ResumeReport(
        host="nanotron", checkpoint=load.where, rows=tuple(load.rows), warnings=tuple(dict.fromkeys(load.warnings))
    )
    publish(made, path=load.policy.report)
    for warning in made.warnings:
        logger.warning("%s", warning)
    logger.info("%s", made)


def _own(load: Load) -> None:
    if load.trainer is None:
        published(load)


def _layout(load: Load, live: Live, listing: NanotronListing, metadata: Metadata | None) -> Iterator[Row]:
    saved = listing.topology
    for name in ("pp", "tp"):
        now = getattr(live.topology, name)
        yield Row(name=name, checkpoint=getattr(saved, name, None), this_run=now, used=now, because="host")
    yield Row(
        name="dp",
        checkpoint=metadata.dp if metadata is not None else None,
        this_run=live.dp,
        used=live.dp,
        because="host",
    )
    stage = _stage(live.topology)
    yield Row(
        name="zero stage",
        checkpoint=_stage(saved) if saved is not None else None,
        this_run=stage,
        used=stage,
        because="host",
    )
    batch = batch_of_run(load, live.dp)
    if batch is not None:
        then = metadata.global_batch_size if metadata is not None else None
        why = because(load.policy, "schedule", BATCH)
        yield Row(name="global batch size", checkpoint=then, this_run=batch.size, used=batch.size, because=why)


def _stage(topology: Topology) -> int:
    return int(topology.dp is not None)


def _states(load: Load) -> Iterator[Row]:
    policy, why = load.policy, because(load.policy, "optimizer")
    masters = "from the checkpoint" if policy.loads_masters else "from the loaded weights"
    moments = "from the checkpoint" if policy.loads_moments else "zero"
    yield Row(name="fp32 masters", checkpoint=None, this_run=None, used=masters, because=why)
    yield Row(name="moments and step", checkpoint=None, this_run=None, used=moments, because=why)


def _groups(load: Load, live: Live, saved: Sequence[Group] | None) -> Iterator[Row]:
    memory = recall(live.base)
    assert memory is not None, "load_optimizer has remembered it"
    groups = live.base.param_groups
    for number, (run, used) in enumerate(zip(memory.run, groups, strict=True)):
        then = saved[number] if saved is not None else {}
        for name in dict.fromkeys((*_OF_GROUP, *load.policy.hyperparameters)):
            if name in used:
                what = "schedule" if name == "weight_decay" and not load.policy.takes(name) else name
                yield Row(
                    name=f"group {number} {name}",
                    checkpoint=then.get(name),
                    this_run=run.get(name),
                    used=used[name],
                    because=because(load.policy, what, name),
                )
