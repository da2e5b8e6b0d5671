"""Hugging Face's Trainer: nothing in a checkpoint that it resumes from runs code, and no resume flag is dropped.

Importing this loads neither transformers nor torch. Rung 2 of the ladder (a method on a class): `Trainer.train` is the
one place before weights, optimizer, scheduler and random states are unpickled (trainer.py, 5.23.0). What is loaded
under another layout, and the resume policy, are the affair of the hooks of DeepSpeed and accelerate below it; without
DeepSpeed, or without those hooks, there is none, and the policy is refused. Random states are the Trainer's own.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from ds_reshard import hosts
from ds_reshard.containers import folders
from ds_reshard.containers.pickle_rules import ALLOW_ALL, in_force, trust_in
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.formats.zero.names import OPTIMIZER_FILES
from ds_reshard.hooks import Call, HostHooks, Patch, Seam
from ds_reshard.operations.pickles import refuse_unsafe_folder
from ds_reshard.operations.ranks import attempt, run_on_all
from ds_reshard.resume.policy_sources import no_resume, policy_beside, refuse_unapplied
from ds_reshard.resume.schedulers import refuse_unseen

if TYPE_CHECKING:
    from transformers import Trainer


logger = logging.getLogger("ds_reshard")

STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"
"""The Trainer writes it and never reads it (trainer.py, 4.30 to 5.23): a class of the script's own harms nothing."""


def train(call: Call) -> object:
    older = call.arguments.get("kwargs", {}).get("model_path")  # the argument's name before it was renamed, in 4.x
    trainer = call["self"]
    folder = _folder(trainer, call["resume_from_checkpoint"] or older)
    if folder is not None:  # of `True` where there is none the Trainer tells
        refuse_unsafe_checkpoint(trainer, folder)
        refuse_policy(_config(trainer))
        warn_of_counters(trainer, folder)
        attempt(lambda: warn_of_data(trainer, folder))  # advice, which no odd Trainer or file is to fail by
    return call()


def load_rng_state(call: Call) -> object:
    return None if policy_beside(_config(call["self"]) or {}).finetune else call()


def load_best_model(call: Call) -> object:
    with no_resume():
        return call()


def load_schedule(call: Call) -> object:
    if call["checkpoint"] is not None:
        refuse_unseen_schedule(call["self"])
        begin_states(call["self"], os.fspath(call["checkpoint"]))
    return call()


def begin_states(trainer: Trainer, folder: str) -> None:
    """Of FSDP1's sharded states, where the Trainer loads them: its own copy of accelerate's function may be unhooked.

    It loads none where there is no schedule beside them (`_load_optimizer_and_scheduler` of trainer.py, 5.24.0).
    """
    from transformers.trainer import SCHEDULER_NAME

    from ds_reshard import hosts

    if os.path.isdir(os.path.join(folder, "optimizer_0")) and os.path.isfile(os.path.join(folder, SCHEDULER_NAME)):
        hosts.begin_states(getattr(trainer.accelerator.state, "fsdp_plugin", None), trainer.optimizer)


def _config(trainer: Trainer) -> Mapping[str, object] | None:
    """The DeepSpeed JSON of a Trainer, None where it trains without DeepSpeed."""
    state = getattr(getattr(trainer, "accelerator", None), "state", None)
    return cast(
        "Mapping[str, object] | None", getattr(getattr(state, "deepspeed_plugin", None), "deepspeed_config", None)
    )


def refuse_policy(config: Mapping[str, object] | None) -> None:
    """Raise on every rank where a resume policy was asked for that nobody would apply. Collective.

    `config` is the DeepSpeed JSON. ConfigError without one; HookError where the hooks of DeepSpeed are not on.
    """

    def refuse() -> None:
        if config is None:
            refuse_unapplied("this Trainer")
        else:
            hosts.insist(policy_beside(config))

    run_on_all(refuse, subject="Trainer.train")


def warn_of_counters(trainer: Trainer, wanted: str) -> None:
    """Say on rank 0 that the Trainer counts on where a policy begins its iteration anew: no flag reaches its state."""
    policy = policy_beside(_config(trainer) or {})
    if not policy.keeps_iteration and trainer.is_world_process_zero():
        flags = ", ".join(policy.asked[key] for key in ("finetune", "iteration") if key in policy.asked)
        what = "%s: the Trainer goes on with the steps and at the place in the data that trainer_state.json of %s tells"
        logger.warning(f"{what}; max_steps and num_train_epochs count from its beginning", flags, wanted)


def warn_of_data(trainer: Trainer, folder: str) -> None:
    """Say on rank 0 that an update has other samples than in the saving run: the Trainer counts updates in its data.

    It passes over `global_step` updates of this run's batches (`_inner_training_loop` of trainer.py, 4.30 to 5.24), and
    its state tells neither the number of processes nor the accumulation: the files of random states and the arguments
    do. With split_batches a batch is that of all processes. Nothing is said where the files are not there, or where
    processes share samples.
    """
    arguments = trainer.args
    if not trainer.is_world_process_zero() or getattr(trainer.accelerator, "parallelism_config", None) is not None:
        return
    found = _saved_update(folder)
    processes = 1 if trainer.accelerator.split_batches else arguments.world_size
    now = arguments.train_batch_size * arguments.gradient_accumulation_steps * processes
    if found is None or found[1] == now or arguments.ignore_data_skip:
        return
    steps, then = found
    logger.warning(
        "%s counts %d updates of %d samples, and an update of this run has %d: the Trainer goes on at sample %d of its "
        "data, and not at %d, and each epoch has another number of updates; keep it (per_device_train_batch_size x "
        "gradient_accumulation_steps x processes = %d), or set ignore_data_skip, and change rate and max_steps",
        *(os.path.join(folder, STATE), steps, then, now, steps * now, steps * then, then),
    )


def _saved_update(folder: str) -> tuple[int, int] | None:
    """The updates that a Trainer had made when it saved, and the samples of each; None where no file tells."""
    names = folders.names(folder)
    processes = sum(bool(re.fullmatch(r"rng_state(_\d+)?\.pth", name)) for name in names)
    state = folders.read_json(os.path.join(folder, STATE)) if STATE in names else None
    if not processes or not isinstance(state, Mapping) or ARGUMENTS not in names:
        return None
    with in_force(ALLOW_ALL), open_archive(os.path.join(folder, ARGUMENTS)) as archive:  # as records: nothing runs
        saved = getattr(archive.load(), "state", None)
    told = state.get("global_step"), state.get("train_batch_size"), (saved or {}).get("gradient_accumulation_steps")
    if not all(isinstance(one, int) for one in told):
        return None
    steps, batch, accumulation = cast("tuple[int, int, int]", told)
    config = getattr((saved or {}).get("accelerator_config"), "state", None)
    split = isinstance(config, Mapping) and bool(config.get("split_batches"))
    return steps, batch * accumulation * (1 if split else processes)


def refuse_unseen_schedule(trainer: Trainer) -> None:
    """Raise UnsupportedLayout on every rank where a scheduler beside DeepSpeed's engine drops the policy. Collective.

    Of all that the Trainer builds that is GreedyLR, which is no scheduler of torch (optimization.py, 5.23).
    """
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DeepSpeedSchedulerWrapper

    scheduler, config = trainer.lr_scheduler, _config(trainer)
    if config is None or isinstance(scheduler, DeepSpeedSchedulerWrapper) or not policy_beside(config).places_schedule:
        return
    inner = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
    run_on_all(functools.partial(refuse_unseen, inner), subject="Trainer.train")


def _folder(trainer: Trainer, wanted: object) -> str | None:
    """The folder that a Trainer resumes from: the last of its checkpoints for `True`; None where it begins anew."""
    from transformers.trainer_utils import get_last_checkpoint

    if wanted is True:
        wanted = get_last_checkpoint(cast(str, trainer.args.output_dir))
    return os.fspath(wanted) if wanted else None  # type: ignore[call-overload]


def refuse_unsafe_checkpoint(trainer: Trainer, folder: str) -> None:
    """Raise UnsafePickle on every rank where anything below the checkpoint's folder acts. Collective."""
    config = getattr(getattr(trainer.args, "hf_deepspeed_config", None), "config", None)
    alone = isinstance(config, Mapping) and not policy_beside(config).loads_masters
    unread = [ARGUMENTS, *([OPTIMIZER_FILES] if alone else [])]
    refuse_unsafe_folder(folder, trust=trust_in(config), unread=unread)


HOOKS = HostHooks(
    host="transformers",
    distribution="transformers",
    versions=">=4.30,<6",
    tested=("5.23.0", "5.24.0"),
    patches=(
        Patch(
            target="transformers.trainer:Trainer.train",
            wrapper=Seam(f"{__name__}:train"),
            signature=("resume_from_checkpoint",),
            summary="refuses a checkpoint that would run code when it is unpickled, before it is, and dropped flags",
        ),
        Patch(
            target="transformers.trainer:Trainer._load_best_model",
            wrapper=Seam(f"{__name__}:load_best_model"),
            signature=(),
            summary="applies no flag to the best checkpoint, which is loaded when training has ended",
        ),
        Patch(
            target="transformers.trainer:Trainer._load_rng_state",
            wrapper=Seam(f"{__name__}:load_rng_state"),
            signature=("checkpoint",),
            summary="leaves the saved random states out under --finetune",
        ),
        Patch(
            target="transformers.trainer:Trainer._load_optimizer_and_scheduler",
            wrapper=Seam(f"{__name__}:load_schedule"),
            signature=("checkpoint",),
            summary="refuses a scheduler that would take the checkpoint's rates, whatever the resume policy says",
        ),
    ),
)
