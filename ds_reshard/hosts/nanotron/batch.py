"""The global batch size of the saving run and of this one: what an iteration, and a step of the schedule, counts.

Micro batch x accumulation x dp, in samples (`global_batch_size` of trainer.py, commit 2411b02). nanotron compares them
nowhere: another one moves the learning rates against the samples without a word.
"""

from __future__ import annotations

from ds_reshard.errors import Fault, ScheduleMismatch
from ds_reshard.formats.nanotron.metadata import Metadata
from ds_reshard.formats.nanotron.names import CONFIG
from ds_reshard.formats.nanotron.run_config import Batch
from ds_reshard.hosts.nanotron.current import Load, config_of

BATCH = "global_batch_size"
"""What `--override-optim-hparams` calls it."""


def batch_of_run(load: Load, dp: int) -> Batch | None:
    """This run's; None in a loop of the user's own, which has no configuration."""
    sizes = [config_of(load, f"tokens.{name}") for name in ("micro_batch_size", "batch_accumulation_per_replica")]
    micro, accumulation = (size if isinstance(size, int) else None for size in sizes)
    if micro is None or accumulation is None:
        return None
    return Batch(micro=micro, accumulation=accumulation, dp=dp)


def other_batch(load: Load, dp: int, metadata: Metadata | None) -> list[Fault]:
    """A fault where the sizes differ, unless the policy takes this run's, or this run's schedule."""
    saved, now, policy = metadata.batch if metadata is not None else None, batch_of_run(load, dp), load.policy
    if saved is None or now is None or saved.size == now.size or policy.schedule_is_this_runs or policy.takes(BATCH):
        return []
    same = saved.at(dp)
    keep = f"tokens: {same}, or " if same is not None else ""
    return [
        ScheduleMismatch.fault(
            "global batch size",
            "is not the saving run's, in steps of which the learning rates and the iteration count",
            f"{saved.size} samples: {_product(saved)}, of {CONFIG}",
            f"{now.size}: {_product(now)}",
            mend=f"{keep}--override-optim-hparams {BATCH} where this one is wanted, with the saved schedule, or "
            "--override-opt-param-scheduler with this run's",
        )
    ]


def unknown_batch(load: Load, dp: int, metadata: Metadata | None) -> tuple[str, ...]:
    """A warning where this run's cannot be compared, as the checkpoint tells none."""
    now = batch_of_run(load, dp)
    told = metadata is not None and metadata.batch is not None
    if now is None or told or load.policy.schedule_is_this_runs or load.policy.takes(BATCH):
        return ()
    return (f"{CONFIG} of the checkpoint tells no global batch size: this run's {now.size} is not compared with it",)


def _product(batch: Batch) -> str:
    return f"micro batch {batch.micro} x accumulation {batch.accumulation} x dp {batch.dp}"
