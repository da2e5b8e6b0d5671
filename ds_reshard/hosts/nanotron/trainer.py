"""The seam of `DistributedTrainer.__init__`, in which nanotron resumes: what its parts did becomes one report.

Rung 2 of the ladder (a method on a class): the trainer has no hook between building its random states and its first
step, and restores none of those that it saved (trainer.py, commit 2411b02).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol, cast

from ds_reshard.hosts.nanotron import report
from ds_reshard.hosts.nanotron.agree import same_policy, together
from ds_reshard.hosts.nanotron.current import Load, config_of, in_force
from ds_reshard.hosts.nanotron.live import ParallelContext
from ds_reshard.hosts.nanotron.random_states import file_of, read_random_states, restore
from ds_reshard.operations.ranks import gather
from ds_reshard.resume.asked import asked_policy


class Trainer(Protocol):
    """`DistributedTrainer` once it has started."""

    parallel_context: ParallelContext
    random_states: object


def initialise(trainer: object, original: Callable[[], object]) -> None:
    """Start the trainer as the policy in force says; collective where it resumes."""
    load = Load(policy=asked_policy(), trainer=trainer)
    with in_force(load):
        original()
    folder = getattr(trainer, "init_checkpoint_path", None)
    if folder is None:
        return
    load.where = os.fspath(folder)
    same_policy(load.policy, cast(Trainer, trainer).parallel_context.world_pg, subject=f"loading {load.where}")
    report.counters(load)
    _random_states(load)
    report.published(load)


def _random_states(load: Load) -> None:
    trainer, policy = cast(Trainer, load.trainer), load.policy
    context = trainer.parallel_context
    if not policy.rng or policy.finetune:
        report.random_states(load, "of this run", "--finetune" if policy.finetune else "--no-load-rng")
        return
    if config_of(load, "checkpoints.load_lr_scheduler") is False:  # with which nanotron begins at step 0
        report.random_states(load, "of this run", "checkpoints.load_lr_scheduler")
        return
    path = file_of(context, load.where)
    if not all(gather(os.path.exists(path), context.world_pg)):
        load.warnings.append(
            f"random states are of this run: {load.where}/random has none of these {context.world_pg.size()} ranks"
        )
        report.random_states(load, "of this run", "host")
        return
    world = context.world_pg
    found = together(lambda: read_random_states(path), world, subject=f"loading {load.where}")
    together(lambda: restore(trainer.random_states, found, path), world, subject=f"loading {load.where}")
    report.random_states(load, "from the checkpoint", "host")
