"""The seam of `load_checkpoint`: what a resume of Megatron's training takes from a checkpoint.

Rung 3 of the ladder: a module function of `megatron.training.checkpointing`, which `setup_model_and_optimizer`
calls under the name that `training.py` has imported; Megatron publishes no extension point around it, and a
method lower down sees neither iteration nor samples. Its first three parameters have not changed from 0.12 to
0.19.2. Optimizers and scheduler are loaded through their own seams, inside.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from typing import cast

from ds_reshard.errors import ConfigError, Fault, InternalError, raise_faults
from ds_reshard.hosts.megatron.arguments import policy_of
from ds_reshard.hosts.megatron.current import Load, in_force
from ds_reshard.hosts.megatron.live import Scheduler, as_number, leaves
from ds_reshard.hosts.megatron.moments import fresh_moments, masters_faults
from ds_reshard.hosts.megatron.optimizers import matched_groups
from ds_reshard.hosts.megatron.refusals import announced_format_faults
from ds_reshard.hosts.megatron.report import publish_training
from ds_reshard.hosts.megatron.settle import hyperparameter_faults, remember, run_groups
from ds_reshard.resume.policy import ResumePolicy

logger = logging.getLogger("ds_reshard")

Result = tuple[int, object]
_SAMPLES = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")


def load_checkpoint(
    original: Callable[[], Result], arguments: Namespace, *, optimizer: object, scheduler: object, load_arg: str
) -> Result:
    """Load a checkpoint as the resume policy says; iteration and floating-point operations so far.

    Every rank calls it, and `arguments` are Megatron's own. A load without optimizer and scheduler, or from
    another argument than `--load`, brings in another model's weights (a teacher, a reference, a dense model to
    be upcycled) and is left to Megatron, the policy waiting for the load that it is about. Raises ConfigError
    for a policy that contradicts the arguments, and what the seams inside raise.
    """
    if (optimizer is None and scheduler is None) or load_arg != "load":
        return original()
    policy = policy_of(arguments)
    load = Load(policy=policy, optimizer=optimizer, scheduler=scheduler, where=str(getattr(arguments, "load", None)))
    faults = [*hyperparameter_faults(optimizer, policy), *masters_faults(optimizer, policy)]
    faults += announced_format_faults(policy, arguments)
    raise_faults([*faults, *_contradictions(policy, arguments)], subject="resume policy")
    _tell_megatron(policy, arguments)
    with in_force(load):
        iteration, operations = original()
        if load.found is None:
            if not policy.is_default:
                logger.warning("%s holds no checkpoint: the resume flags had nothing to act on", load.where)
            return iteration, operations
        if policy.optimizer == "skip" and load.policy.keeps_position and scheduler is not None:
            _schedule_alone(load)
    if load.policy.optimizer == "masters":
        for part in leaves(optimizer):
            fresh_moments(part)
    iteration = _counters(load, arguments, iteration)
    _verify(load)
    publish_training(load, arguments, iteration)
    return iteration, operations


def _tell_megatron(policy: ResumePolicy, arguments: Namespace) -> None:
    """Megatron's own flags for what it does itself, as if they had been given to it."""
    if policy.optimizer == "skip":
        arguments.no_load_optim = True
    if policy.finetune:
        arguments.finetune = True
    if not policy.rng:
        arguments.no_load_rng = True


def _contradictions(policy: ResumePolicy, arguments: Namespace) -> list[Fault]:
    """Arguments of Megatron under which a reset would not do what it says."""
    faults = []
    if policy.iteration == "reset" and getattr(arguments, "override_ckpt_iteration", None) is not None:
        faults.append(
            _contradiction("--reset-iteration", "--override-ckpt-iteration", "both say which iteration it is")
        )
    by_samples = {
        "rampup_batch_size": "the batch size grows with the samples that are set to 0",
        "step_batch_size_schedule": "the batch size follows the samples that are set to 0",
        "phase_transition_iterations": "the place in a phase is found from the iteration, which is kept",
    }
    for name, why in by_samples.items():
        if policy.dataloader == "reset" and policy.iteration == "load" and getattr(arguments, name, None):
            faults.append(_contradiction("--reset-dataloader", "--" + name.replace("_", "-"), why))
    if policy.dataloader == "reset" and getattr(arguments, "dataloader_type", None) == "external":
        why = "an external data loader keeps its own place, which Megatron does not know"
        faults.append(_contradiction("--reset-dataloader", "--dataloader-type external", why))
    return faults


def _contradiction(one: str, other: str, why: str) -> Fault:
    what = f"contradict each other: {why}"
    return ConfigError.fault(f"{one} with {other}", what, mend=f"leave out one of {one} and {other}")


def _schedule_alone(load: Load) -> None:
    """The schedule for an optimizer that was not loaded, which Megatron leaves out together with it."""
    found, scheduler = load.found, cast(Scheduler, load.scheduler)
    assert found is not None
    takes_bounds = load.policy.scheduler == "checkpoint"
    for part, groups in zip(leaves(load.optimizer), found.groups, strict=True) if takes_bounds else ():
        faults, ordered, _ = matched_groups(part, {"param_groups": groups}, load)
        assert not faults, "groups that cannot be matched were refused when they were looked at"
        remember(part, run_groups(part), ordered)
    assert isinstance(found.scheduler_state, dict), "its absence was refused when it was looked at"
    scheduler.load_state_dict(found.scheduler_state)


def _counters(load: Load, arguments: Namespace, iteration: int) -> int:
    """Iteration and samples as the policy says; the iteration that training goes on from."""
    policy = load.policy
    if policy.iteration == "reset" or policy.dataloader == "reset":
        for name in _SAMPLES:
            if hasattr(arguments, name):
                setattr(arguments, name, 0)
    if policy.iteration == "reset":
        from megatron.core.num_microbatches_calculator import update_num_microbatches

        update_num_microbatches(consumed_samples=0)
        load.warnings.append(
            "the iteration starts from 0 again: saves into the same folder will replace those of the earlier run"
        )
        return 0
    return iteration


def _verify(load: Load) -> None:
    """The values that the next step uses are those of the schedule: anything else would train on silently wrong."""
    if load.scheduler is None:
        return
    scheduler = cast(Scheduler, load.scheduler)
    for index, group in enumerate(scheduler.optimizer.param_groups):
        wanted = scheduler.get_lr(group), scheduler.get_wd(group) * cast(float, group.get("wd_mult", 1.0))
        found = cast(float, as_number(group["lr"])), cast(float, as_number(group["weight_decay"]))
        if any(abs(a - b) > 1e-6 * abs(b) for a, b in zip(found, wanted, strict=True)):
            raise InternalError(
                f"{load.where}: param group {index} has lr and weight decay {found} after the load, its schedule says "
                f"{wanted}; report this with the resume flags that were given"
            )
