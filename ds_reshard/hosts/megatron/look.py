"""The seam of `_load_base_checkpoint`: what was read is looked at before anything of this run changes.

Rung 3 of the ladder (a module function that `load_checkpoint` looks up when it calls it, training/
checkpointing.py, 0.18.2 and 0.19.2). Above it nothing has been read; below it the weights have been replaced.
For `torch_dist` Megatron calls it twice, first for what all ranks share, and only then for tensors, into the live
weights: whatever is refused is refused in the first call, also about groups that lie among the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath

from ds_reshard.errors import Fault, ReshardError, UnsupportedLayout, faults_of, raise_faults
from ds_reshard.formats.megatron.groups import saved_groups
from ds_reshard.hosts.megatron.current import Found, Load, current
from ds_reshard.hosts.megatron.live import Scheduler, with_saved
from ds_reshard.hosts.megatron.optimizers import LATE, compares_bounds, matched_groups
from ds_reshard.hosts.megatron.pickles import refuse_iteration
from ds_reshard.hosts.megatron.refusals import format_faults, release_faults, step_faults
from ds_reshard.hosts.megatron.scheduler import schedule_faults
from ds_reshard.hosts.megatron.settle import group_differences, run_groups
from ds_reshard.hosts.megatron.sharded_groups import with_sharded_groups
from ds_reshard.operations.ranks import of_all
from ds_reshard.resume.megatron_schedule import absent_schedule, extra_values, read_schedule
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.report import because

_BY_NAME = ("GLOBAL", "LOCAL")
"""Types of checkpoint whose states are read into the live ones, by the name of the parameter."""

Base = tuple[object, str, bool, object]
"""What `_load_base_checkpoint` returns: state, name, whether it is a release, and `CheckpointType`."""


def load_base_checkpoint(original: Callable[[], Base], load_dir: str, arguments: object) -> Base:
    """Read as Megatron does, and refuse here what the policy in force cannot make of it.

    Every rank calls it; `arguments` are Megatron's, which it changes where it falls back to a pretrained
    checkpoint. Raises UnsafePickle before anything is read, ScheduleMismatch, ParamGroupMismatch, ConfigError or
    UnsupportedLayout.
    """
    load = current()
    with refuse_iteration(load_dir, getattr(arguments, "ckpt_step", None), load):
        result = original()
    state, name, release, kind = result
    if load is None or not isinstance(state, Mapping):
        return result
    if getattr(arguments, "finetune", False) and not load.policy.finetune:
        load.another_model = True
        load.policy = ResumePolicy(finetune=True, rng=load.policy.rng, report=load.policy.report)
    read = load.found is not None  # this is the second call, which has read the tensors
    load.where = _folder(name)
    load.read_in_place = getattr(kind, "name", "") in _BY_NAME
    try:
        faults = _look(load, state, release, kind, arguments)
    except ReshardError as error:
        faults = faults_of(error)
    subject = LATE if read and load.read_in_place else f"resuming from {load.where}"
    raise_faults(of_all(faults), subject=subject)
    return result


def _look(load: Load, state: Mapping[str, object], release: bool, kind: object, arguments: object) -> list[Fault]:
    """Note what was found, and say what of it cannot be resumed as asked."""
    saved = state.get("optimizer")
    if load.read_in_place and not release and load.optimizer is not None and _reads_groups(load.policy):
        saved = with_sharded_groups(load.optimizer, saved, load.where)
    load.found = _found(load, state, saved, release)
    return [*_refusals(load, kind, release, arguments), *_faults(load, load.found, saved)]


def _folder(name: str) -> str:
    """The folder of a checkpoint: for `torch`, where each rank names its own file, the same on all of them."""
    path = PurePath(name)
    return str(next((one for one in (path, *path.parents) if one.name.startswith(("iter_", "release"))), path))


def _reads_groups(policy: ResumePolicy) -> bool:
    """Whether saved groups are matched with the live ones, or tell the bounds of a schedule that is taken alone."""
    return not policy.finetune and (policy.optimizer != "skip" or policy.scheduler in ("checkpoint", "strict"))


def _found(load: Load, state: Mapping[str, object], saved: object, release: bool) -> Found:
    arguments = state.get("args")
    scheduler = state.get("opt_param_scheduler", state.get("lr_scheduler"))
    iteration = state.get("iteration", state.get("total_iters"))
    wanted = load.scheduler is not None and scheduler is not None and _reads_schedule(load.policy)
    schedule = read_schedule(scheduler, where=load.where, extra=extra_values(arguments)) if wanted else None
    parts = with_saved(load.optimizer, saved)
    return Found(
        name=load.where,
        release=release,
        iteration=iteration if isinstance(iteration, int) else None,
        arguments=arguments,
        schedule=schedule,
        scheduler_state=scheduler,
        groups=tuple(saved_groups(part) for _, part in parts),
    )


def _reads_schedule(policy: ResumePolicy) -> bool:
    """Whether anything is taken from, or compared with, the saved schedule."""
    return (
        policy.keeps_position or policy.scheduler == "strict" or (policy.loads_moments and policy.scheduler == "host")
    )


def _refusals(load: Load, kind: object, release: bool, arguments: object) -> list[Fault]:
    """What no checkpoint of this kind can be made to do."""
    name = getattr(kind, "name", "")
    faults = [] if load.another_model else format_faults(load.where, name.lower(), load.policy)
    if release:
        faults += release_faults(load.where, load.policy)
    elif name == "LEGACY" and load.optimizer is not None and load.policy.loads_masters:
        faults += step_faults(load.where, arguments)
    return faults


def _faults(load: Load, found: Found, state: object) -> list[Fault]:
    """What differs that must not, and what is not there."""
    policy = load.policy
    if found.release or policy.finetune:
        return []
    faults: list[Fault] = []
    wants_schedule = policy.scheduler in ("checkpoint", "strict") or (
        policy.scheduler == "override" and policy.keeps_position
    )
    if load.scheduler is not None and found.scheduler_state is None and wants_schedule:
        faults.append(absent_schedule(load.where, because(policy, "schedule")))
    if found.schedule is not None and (policy.optimizer != "skip" or policy.scheduler == "strict"):
        faults += schedule_faults(_scheduler(load), found.schedule, load)
    if load.optimizer is None or not _reads_groups(policy):
        return faults
    bounds = policy.scheduler == "strict" or (policy.scheduler == "host" and compares_bounds())
    for part, saved in with_saved(load.optimizer, state):
        if saved_groups(saved) is None:
            faults += _unread(load)
            continue
        wrong, ordered, _ = matched_groups(part, saved, load)
        faults += wrong
        if not wrong and bounds and not policy.schedule_is_this_runs:
            faults += group_differences(run_groups(part), ordered, policy=policy, said=faults)
    return faults


def _unread(load: Load) -> list[Fault]:
    """Groups that are not there, or cannot be read before the tensors, where nothing else brings them in time."""
    policy = load.policy
    if policy.scheduler != "strict" and (policy.optimizer != "skip" or policy.scheduler != "checkpoint"):
        return []
    what = f"its param groups cannot be read, and {because(policy, 'schedule')} needs their learning rates"
    mend = f"leave out {because(policy, 'schedule')}"
    return [UnsupportedLayout.fault(load.where, what, mend=mend)]


def _scheduler(load: Load) -> Scheduler:
    assert load.scheduler is not None, "a schedule is read for a scheduler alone"
    scheduler: Scheduler = load.scheduler  # type: ignore[assignment]
    return scheduler
