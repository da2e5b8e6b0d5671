"""The seams of `DistributedTrainer`, in whose `__init__` nanotron resumes, of its counters and its random states.

Rung 2 of the ladder (a method on a class): the trainer has no hook between building its random states and its first
step, and restores none of those that it saved (trainer.py, commit 2411b02). nanotron pickles classes of its own
(random.py) and reads them with `torch.load`, which refuses these from torch 2.6 on: they are read without running
anything that the file names.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast

from ds_reshard.containers import folders
from ds_reshard.containers.revive import Builder, ReviveChild, revive
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointNotFound, ReshardError, fail
from ds_reshard.execution.buffers import read_tensor
from ds_reshard.hooks import Call
from ds_reshard.hosts.nanotron.live import Optimizer, ParallelContext, place_of
from ds_reshard.hosts.nanotron.load import IN_FORCE, Load, config_of, current, same_policy
from ds_reshard.hosts.nanotron.optimizer import report_unloaded
from ds_reshard.hosts.nanotron.source import folder_of, foreign_of, meta_of
from ds_reshard.model.context_value import context_value
from ds_reshard.model.records import GlobalName, ObjectRecord
from ds_reshard.operations.ranks import gather, run_on_all
from ds_reshard.operations.watching import Watched, phase, watched
from ds_reshard.resume.policy_sources import asked_policy
from ds_reshard.resume.report import because

if TYPE_CHECKING:
    from torch import Tensor


class Trainer(Protocol):
    """`DistributedTrainer` once it has started."""

    parallel_context: ParallelContext
    optimizer: Optimizer
    random_states: object


def initialise(call: Call) -> None:
    """Start the trainer as the policy in force says; collective where it resumes."""
    with watched("nanotron", None) as seen:
        _initialise(call, seen)
        seen.say()


def _initialise(call: Call, seen: Watched) -> None:
    trainer = call["self"]
    load = Load(policy=asked_policy(), trainer=trainer)
    try:
        with context_value(IN_FORCE, load), phase("start"):
            call()
    finally:
        folder = getattr(trainer, "init_checkpoint_path", None)
        seen.checkpoint = folder_of(folder) if folder is not None else None
    if folder is None:
        return
    load.where = folder_of(folder)
    same_policy(load.policy, cast(Trainer, trainer).parallel_context.world_pg, subject=f"loading {load.where}")
    if config_of(load, "checkpoints.load_optimizer") is False:
        report_unloaded(load, cast(Trainer, trainer).optimizer, cast(Trainer, trainer).parallel_context)
    metadata = getattr(trainer, "metadata", None)
    for name, attribute, what in (
        ("iteration", "last_train_step", "iteration"),
        ("consumed samples", "consumed_train_samples", "dataloader"),
    ):
        why = because(load.policy, what if load.policy.keeps_iteration else "iteration")
        load.row(name, getattr(metadata, attribute, None), why, run=0)
    used, why = _random_states(load, cast(Trainer, trainer))
    load.row("random states", used, why)
    load.publish()


def _random_states(load: Load, trainer: Trainer) -> tuple[str, str]:
    """Restore the random states as asked: whose they are, and why."""
    policy, world = load.policy, trainer.parallel_context.world_pg
    if not policy.rng or policy.finetune:
        return "of this run", because(policy, "rng")
    if config_of(load, "checkpoints.load_lr_scheduler") is False:  # with which nanotron begins at step 0
        return "of this run", "checkpoints.load_lr_scheduler"
    path = file_of(trainer.parallel_context, load.where)
    if not all(gather(folders.is_file(path), world)):
        load.warnings.append(
            f"random states are of this run: {load.where}/random has none of these {world.size()} ranks"
        )
        return "of this run", "host"
    found = run_on_all(lambda: read_random_states(path), world, subject=f"loading {load.where}")
    run_on_all(lambda: restore(trainer.random_states, found, path), world, subject=f"loading {load.where}")
    left = all(gather(_go_on(trainer.random_states, found), world))
    return "from the checkpoint" if left else "of this run", "host"


def _go_on(live: object, found: object) -> bool:
    """Whether torch's generators of this rank go on as those that were saved."""
    mine, read = cast("dict[str, RandomState]", live), cast("dict[str, RandomState]", found)
    return all(name in mine and bool((mine[name].torch_cpu == one.torch_cpu).all()) for name, one in read.items())


def load_meta(call: Call) -> object:
    """nanotron's metadata, with counters of 0 where the policy begins the iteration or the data anew.

    `CheckpointMetadata`, `TrainingMetadata` and its stages are dataclasses (serialize/metadata.py); the check of the
    second one wants the samples of all stages to add up.
    """
    load, context = current(), cast(ParallelContext, call["parallel_context"])
    world, folder = context.world_pg, folder_of(call["root_folder"])
    foreign, policy = foreign_of(load, folder, world), load.policy
    if foreign is None:
        meta = call()
    else:
        meta = run_on_all(lambda: meta_of(load, foreign, context), world, subject=f"loading {folder}")
    if policy.keeps_iteration and policy.dataloader == "load":
        return meta
    metas = meta.metas
    none = {"consumed_train_samples": 0, "consumed_tokens_per_dataset_folder": {}}
    stages = [replace(stage, **none) for stage in metas.data_stages]
    changed: dict[str, object] = {"consumed_train_samples": 0, "consumed_tokens_total": 0, "data_stages": stages}
    if not policy.keeps_iteration:
        changed |= {"last_train_step": 0, "last_stage_idx": 0}
    return replace(meta, metas=replace(metas, **changed))


_FIELDS = ("random", "numpy", "torch_cpu", "torch_cuda")


class RandomState(Protocol):
    """`RandomState` of random.py."""

    random: tuple[object, ...]
    numpy: tuple[object, ...]
    torch_cpu: Tensor
    torch_cuda: Tensor | None


def file_of(context: ParallelContext, folder: str) -> str:
    """`save_random_states` of serialize/random.py: the file of this rank's place, which has no context rank in it."""
    topology, rank = place_of(context, zero=True)
    name = f"tp-{rank.tp}-of-{topology.tp}_dp-{rank.dp}-of-{topology.dp}_pp-{rank.pp}-of-{topology.pp}.pt"
    return os.path.join(folder, "random", name)


def load_random_states(call: Call) -> object:
    """nanotron's `RandomStates` of this rank, checked; the states of the process are left as they are.

    Raises CheckpointNotFound where the checkpoint has none of this rank's place.
    """
    context = cast(ParallelContext, call["parallel_context"])
    path = file_of(context, folder_of(call["root_folder"]))
    if not folders.is_file(path):
        what = "does not exist: random states are of the ranks that were saved, and fit no other number of them"
        raise CheckpointNotFound.of(path, what, mend="--no-load-rng, or the topology that was saved")
    return read_random_states(path)


def read_random_states(path: str) -> object:
    """The states of one file; CheckpointDamaged where they are none that this process could take."""
    from nanotron import random as nanotrons

    def states(record: ObjectRecord | GlobalName, child: ReviveChild) -> object:
        held = _state(record).get("_dict")
        found = child(held)
        if not isinstance(found, dict):
            raise TypeError("RandomStates holds no dict")
        return nanotrons.RandomStates(found)

    def state(record: ObjectRecord | GlobalName, child: ReviveChild) -> object:
        held = _state(record)
        return nanotrons.RandomState(**{name: child(held[name]) for name in _FIELDS})

    builders: dict[str, Builder] = {"nanotron.random.RandomStates": states, "nanotron.random.RandomState": state}
    with open_archive(path) as archive:
        top = archive.load()
    found = revive(top, builders=builders, tensor=read_tensor, where=path)
    if not isinstance(found, nanotrons.RandomStates):
        raise fail(path, "holds no random states", "RandomStates of nanotron", type(found).__name__)
    for name, one in found.items():
        _check(path, name, one)
    return found


def restore(live: object, found: object, path: str) -> None:
    """Put what was read into the `RandomStates` that the model's modules share; CheckpointDamaged for other names."""
    mine, read = cast("dict[str, object]", live), cast("dict[str, object]", found)
    if set(mine) != set(read):
        what = "holds the random states of other names than this run has"
        raise fail(path, what, str(sorted(mine)), str(sorted(read)))
    mine.update(read)


def _state(record: ObjectRecord | GlobalName) -> Mapping[object, object]:
    held = record.state if isinstance(record, ObjectRecord) else None
    if not isinstance(held, dict):
        raise TypeError("holds no state")
    return held


def _check(path: str, name: str, one: RandomState) -> None:
    """Give the states to generators of their own: what these take the process takes."""
    import numpy
    import torch

    try:
        random.Random().setstate(one.random)
        numpy.random.RandomState().set_state(one.numpy)  # type: ignore[arg-type]
        torch.Generator().set_state(one.torch_cpu)
        if torch.cuda.is_available() != (one.torch_cuda is not None):
            raise ValueError("a state of CUDA is on one side only")
        if one.torch_cuda is not None:
            torch.Generator("cuda").set_state(one.torch_cuda)
    except ReshardError:
        raise
    except Exception as error:
        what = f"{name} is no state that this process can take ({str(error)[:120]})"
        raise fail(path, what, "random, numpy, torch", "others") from error
