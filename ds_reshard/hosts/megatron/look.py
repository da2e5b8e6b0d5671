"""The seam of `_load_base_checkpoint`: what was read is looked at before anything of this run changes.

Rung 3 of the ladder (a module function that `load_checkpoint` looks up when it calls it, training/
checkpointing.py, 0.18.2 and 0.19.2). Above it nothing has been read; below it the weights have been replaced.
For `torch_dist` Megatron calls it twice, first for what all ranks share, and only then for tensors: groups of
sharding type `dp_reshardable` come with the second call, when weights have been read in place already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath

from ds_reshard.errors import Fault, raise_faults
from ds_reshard.hosts.megatron.current import Found, Load, current
from ds_reshard.hosts.megatron.live import Group, Scheduler, saved_groups, with_saved
from ds_reshard.hosts.megatron.optimizers import compares_bounds, matched_groups
from ds_reshard.hosts.megatron.schedule import CHECKPOINT, absent_schedule, extra_values, read_schedule
from ds_reshard.hosts.megatron.scheduler import schedule_faults
from ds_reshard.hosts.megatron.settle import group_differences, run_groups
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.report import because

_NOT_BY_GROUPS = ("TORCH_DCP", "FSDP_DTENSOR")
"""Types of checkpoint whose optimizer state does not come through the optimizers' `load_state_dict`."""

Base = tuple[object, str, bool, object]
"""What `_load_base_checkpoint` returns: state, name, whether it is a release, and `CheckpointType`."""


def load_base_checkpoint(original: Callable[[], Base], arguments: object) -> Base:
    """Read as Megatron does, and refuse here what the policy in force cannot make of it.

    Every rank calls it; `arguments` are Megatron's, which it changes where it falls back to a pretrained
    checkpoint. Raises ScheduleMismatch, ParamGroupMismatch, ConfigError or UnsupportedLayout.
    """
    result = original()
    load = current()
    state, name, release, kind = result
    if load is None or not isinstance(state, Mapping):
        return result
    if getattr(arguments, "finetune", False) and not load.policy.finetune:
        load.another_model = True
        load.policy = ResumePolicy(finetune=True, rng=load.policy.rng, report=load.policy.report)
    load.where = _folder(name)
    load.found = _found(load, state, load.where, release)
    raise_faults([*_refusals(load, kind), *_faults(load, load.found, state)], subject=f"resuming from {load.where}")
    return result


def _folder(name: str) -> str:
    """The folder of a checkpoint: for `torch`, where each rank names its own file, the same on all of them."""
    path = PurePath(name)
    return str(next((one for one in (path, *path.parents) if one.name.startswith(("iter_", "release"))), path))


def _found(load: Load, state: Mapping[str, object], name: str, release: bool) -> Found:
    arguments = state.get("args")
    scheduler = state.get("opt_param_scheduler", state.get("lr_scheduler"))
    iteration = state.get("iteration", state.get("total_iters"))
    wanted = load.scheduler is not None and scheduler is not None and _reads_schedule(load.policy)
    schedule = read_schedule(scheduler, where=name, extra=extra_values(arguments)) if wanted else None
    parts = with_saved(load.optimizer, state.get("optimizer"))
    return Found(
        name=name,
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


def _refusals(load: Load, kind: object) -> list[Fault]:
    """What no checkpoint of this kind can be made to do."""
    policy, where, faults = load.policy, load.where, []
    by_groups = policy.scheduler != "host" or policy.optimizer == "masters" or policy.hyperparameters
    if getattr(kind, "name", "") in _NOT_BY_GROUPS and by_groups:
        what = "is of a format in which schedule, masters and hyper-parameters cannot be chosen"
        mend = "save it with --ckpt-format torch_dist, or leave these flags out"
        faults.append(
            Fault(
                error="UnsupportedLayout",
                where=where,
                what=what,
                found=f"{getattr(kind, 'name', '')}",
                mend=mend,
                expected="torch or torch_dist",
            )
        )
    if load.found is not None and load.found.release and (policy.optimizer == "masters" or policy.scheduler != "host"):
        what = "is a release: weights alone, with no optimizer, schedule or position to resume"
        faults.append(
            Fault(error="ConfigError", where=where, what=what, mend="add --finetune and leave out the others")
        )
    return faults


def _faults(load: Load, found: Found, state: Mapping[str, object]) -> list[Fault]:
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
    skipped = policy.optimizer == "skip" and policy.scheduler not in ("checkpoint", "strict")
    if load.optimizer is None or skipped:
        return faults
    bounds = policy.scheduler == "strict" or (policy.scheduler == "host" and compares_bounds())
    for part, saved in with_saved(load.optimizer, state.get("optimizer")):
        if saved_groups(saved) is None:
            continue
        wrong, ordered, _ = matched_groups(part, saved, load.where)
        faults += wrong
        if not wrong and bounds and not policy.schedule_is_this_runs:
            faults += group_differences(run_groups(part), ordered, policy=policy, said=faults)
    return faults


def _scheduler(load: Load) -> Scheduler:
    assert load.scheduler is not None, "a schedule is read for a scheduler alone"
    scheduler: Scheduler = load.scheduler  # type: ignore[assignment]
    return scheduler


def inferred_groups(load: Load, run: tuple[Group, ...], schedule: Mapping[str, object]) -> list[Group]:
    """The saved bounds of groups whose entries were not read: those of the saved schedule, where that is certain.

    Raises ParamGroupMismatch for a group with bounds of its own, which the saved schedule does not tell.
    """
    assert load.found is not None and load.found.schedule is not None
    saved, groups, faults = load.found.schedule.values, [], []
    for index, group in enumerate(run):
        values = dict(group)
        for name in ("max_lr", "min_lr"):
            if name in group and group[name] != schedule[name]:
                what = f"has a {name} of its own, which lies with the optimizer's state in this checkpoint"
                mend = f"leave out one of --no-load-optim and {CHECKPOINT}"
                where = f"{load.where}: param group {index}"
                faults.append(Fault(error="ParamGroupMismatch", where=where, what=what, mend=mend))
            elif name in group:
                values[name] = saved[name]
        groups.append(values)
    raise_faults(faults, subject="resuming the schedule")
    return groups
