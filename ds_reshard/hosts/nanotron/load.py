"""One load into nanotron: what was asked of it, what its seams tell each other, and the resume report that they write.

An iteration, and a step of the schedule, counts a global batch: micro batch x accumulation x dp, in samples
(`global_batch_size` of trainer.py, commit 2411b02). nanotron compares the saving run's and this one's nowhere: another
one moves the learning rates against the samples without a word.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ds_reshard.errors import ConfigError, Fault, ScheduleMismatch, raise_faults
from ds_reshard.formats.nanotron.metadata import Batch
from ds_reshard.formats.nanotron.names import CONFIG
from ds_reshard.operations.ranks import gather, rank
from ds_reshard.resume.policy import ResumePolicy, policy_differences
from ds_reshard.resume.policy_sources import asked_policy, note_applied
from ds_reshard.resume.report import ResumeReport, Row, publish_or_log, say_applied, unwritable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ds_reshard.hosts.nanotron.source import Source

logger = logging.getLogger("ds_reshard")
Group = dict[str, object]
BATCH = "global_batch_size"
"""What `--override-optim-hparams` calls it."""
_MEMORY = "_ds_reshard_nanotron"


def same_policy(policy: ResumePolicy, world: ProcessGroup, *, subject: str) -> None:
    """Refuse what ranks were not asked for alike: they would part ways; and a report without a place. Collective."""
    told = gather((policy, unwritable(policy.report) if rank() == 0 else []), world)
    faults = [fault for _, found in told for fault in found]
    raise_faults([*policy_differences([one for one, _ in told]), *faults], subject=subject)


@dataclass(slots=True, kw_only=True)
class Load:
    """One start of nanotron's trainer, or one call in a loop of the user's own, where `trainer` is None.

    `source` is the checkpoint that it loads, once a seam has looked for it.
    """

    policy: ResumePolicy
    trainer: object | None = None
    where: str = "checkpoint"
    rows: list[Row] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    source: Source | None = None

    def row(self, name: str, used: object, why: str, *, saved: object = None, run: object = None) -> None:
        """Note a value for the report: the checkpoint's, this run's, the one used, and why."""
        self.rows.append(Row.of(name, saved, run, used, why))

    def warn(self, text: str) -> None:
        """Warn in the report; at once where the trainer starts without a checkpoint to resume, and makes no report."""
        if self.trainer is None or getattr(self.trainer, "init_checkpoint_path", None) is not None:
            self.warnings.append(text)
        elif rank() == 0:
            logger.warning("%s", text)

    def publish(self) -> None:
        """Note on every rank that the policy was applied; on rank 0 log the report once and publish it."""
        note_applied(self.policy)
        if rank() != 0:
            return
        warnings = tuple(dict.fromkeys(self.warnings))
        report = ResumeReport(host="nanotron", checkpoint=self.where, rows=tuple(self.rows), warnings=warnings)
        publish_or_log(report, self.policy.report)
        for warning in warnings:
            logger.warning("%s", warning)
        say_applied(report, self.policy)
        logger.info("%s", report)


IN_FORCE: ContextVar[Load | None] = ContextVar("ds_reshard_nanotron_load", default=None)


def current() -> Load:
    """The start of the trainer that is going on in this thread, else a load of its own."""
    return IN_FORCE.get() or Load(policy=asked_policy())


@dataclass(slots=True, kw_only=True)
class Memory:
    """What is known of a torch optimizer inside nanotron's: it ends with the optimizer, and is in no checkpoint.

    `outer` is nanotron's own, `run` the values that this run gave each param group, `schedule` the arguments and the
    number of steps that its scheduler was built for, with `lambdas`. `decayed` says that a load has put the saved rate
    of that moment where nanotron's scheduler looks for the initial one.
    """

    outer: object
    run: tuple[Group, ...]
    lambdas: tuple[Callable[[int], float], ...] | None = None
    decayed: bool = False
    schedule: tuple[object, int] | None = None


def remember(outer: object) -> Memory:
    """The memory of an optimizer, begun with the values that its groups have now."""
    base = outer.get_base_optimizer()  # type: ignore[attr-defined]
    found = recall(base)
    if found is None:
        found = Memory(outer=outer, run=tuple(copy.deepcopy(list(values_of(base.param_groups)))))
        setattr(base, _MEMORY, found)
    return found


def recall(base: object) -> Memory | None:
    """The memory of a torch optimizer, None where no seam has met it."""
    found = getattr(base, _MEMORY, None)
    return found if isinstance(found, Memory) else None


def values_of(groups: Sequence[Mapping[str, object]]) -> Iterator[Group]:
    for group in groups:
        yield {name: value for name, value in group.items() if name != "params"}


def config_of(load: Load, path: str) -> object:
    """A value of the trainer's configuration by its dotted name, None where there is none."""
    value: object = getattr(load.trainer, "config", None)
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def refuse_contradiction(load: Load) -> None:
    """A schedule, or masters, that were asked for and that the trainer is told not to load."""
    if load.trainer is None or getattr(load.trainer, "init_checkpoint_path", None) is None:
        return
    faults = []
    for key, values, switch in (
        ("scheduler", ("override", "checkpoint", "strict"), "load_lr_scheduler"),
        ("optimizer", ("masters",), "load_optimizer"),
    ):
        asked, where = getattr(load.policy, key), f"checkpoints.{switch}"
        if asked in values and config_of(load, where) is False:
            expected, mend = f"true, for {key} {asked!r}", f"{where}: true, or leave out the flag"
            faults.append(ConfigError.fault(where, "contradicts the resume policy", expected, "false", mend=mend))
    raise_faults(faults, subject="resume policy")


def batch_of_run(load: Load, dp: int) -> Batch | None:
    """This run's; None in a loop of the user's own, which has no configuration."""
    sizes = [config_of(load, f"tokens.{name}") for name in ("micro_batch_size", "batch_accumulation_per_replica")]
    micro, accumulation = (size if isinstance(size, int) else None for size in sizes)
    if micro is None or accumulation is None:
        return None
    return Batch(micro=micro, accumulation=accumulation, dp=dp)


def other_batch(load: Load, dp: int, saved: Batch | int | None) -> list[Fault]:
    """A fault where the sizes differ, unless the policy takes this run's, or this run's schedule.

    The saved size alone is what another format tells.
    """
    now, policy = batch_of_run(load, dp), load.policy
    size = saved.size if isinstance(saved, Batch) else saved
    if size is None or now is None or size == now.size or policy.schedule_is_this_runs or policy.takes(BATCH):
        return []
    same = saved.at(dp) if isinstance(saved, Batch) else None
    keep = f"tokens: {same}, or " if same is not None else ""
    return [
        ScheduleMismatch.fault(
            "global batch size",
            "differs from the saving run's, and learning rates and iterations are counted in updates of that size",
            f"{size} samples" + (f": {_product(saved)}, of {CONFIG}" if isinstance(saved, Batch) else ""),
            f"{now.size}: {_product(now)}",
            mend=f"{keep}--override-optim-hparams {BATCH} to use this run's batch size with the saved schedule, or "
            "--override-opt-param-scheduler to use it with this run's schedule",
        )
    ]


def _product(batch: Batch) -> str:
    return f"micro batch {batch.micro} x accumulation {batch.accumulation} x dp {batch.dp}"
