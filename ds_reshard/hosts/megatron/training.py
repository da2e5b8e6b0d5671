"""The seams of `megatron.training`: arguments, `load_checkpoint`, the look at what it has read, and data loaders.

Rung 3 of the ladder: module functions, as Megatron publishes no extension points around them (0.18.2 and 0.19.2).

* `arguments.parse_args` is what every entry point of every version ends in. Its `extra_args_provider` is Megatron's
  extension point, but only the entry script may give one.
* `checkpointing.load_checkpoint` is called by `setup_model_and_optimizer` under the name that `training.py` has
  imported. A method lower down sees neither iteration nor samples. Its first three parameters have not changed from
  0.12 to 0.19.2. Optimizers and scheduler are loaded through their own seams (`parts`), inside.
* `checkpointing._load_base_checkpoint` is given what was read here, or what it has read is looked at before anything
  of this run changes. For `torch_dist` Megatron calls it twice: first for what all ranks share, and only then for
  tensors, into the live weights. Whatever is refused is refused in the first call.
* `training.build_train_valid_test_data_loaders`: Megatron takes an iteration above 0 with no consumed samples for a
  checkpoint from before it counted them, and counts iteration x batch size instead. So setting the samples to 0 is
  not enough.
"""

from __future__ import annotations

import logging
import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, cast

from ds_reshard.containers.remote import is_url
from ds_reshard.containers.torch_zip import digest_of
from ds_reshard.errors import (
    ConfigError,
    Fault,
    FingerprintMismatch,
    InternalError,
    ModelMismatch,
    ReshardError,
    ScheduleMismatch,
    UnsupportedLayout,
    faults_of,
    raise_faults,
    without_secrets,
)
from ds_reshard.execution.states import CHANGED
from ds_reshard.formats.megatron.checkpoint import TRACKER, find_iteration, saved_groups
from ds_reshard.formats.megatron.torch_format import is_torch_format
from ds_reshard.hooks import Call
from ds_reshard.hosts.megatron.direct import STATES, vocabulary_faults
from ds_reshard.hosts.megatron.group_values import (
    changed_moments,
    fresh_moments,
    group_differences,
    is_loaded,
    note_loaded,
    policy_faults,
    run_groups,
)
from ds_reshard.hosts.megatron.groups import states_of
from ds_reshard.hosts.megatron.live import Found, Load, Scheduler, as_number, current, leaves, with_saved
from ds_reshard.hosts.megatron.load import MegatronLoad
from ds_reshard.hosts.megatron.parts import (
    LATE,
    POSITION,
    compares_bounds,
    matched_groups,
    schedule_faults,
    without_optimizer,
)
from ds_reshard.hosts.megatron.pickles import refuse_iteration
from ds_reshard.hosts.megatron.pieces import other_masters
from ds_reshard.hosts.megatron.report import publish_training
from ds_reshard.hosts.megatron.topology import missing_file, release_faults
from ds_reshard.hosts.megatron.weights import other_tensors, other_weights, own_file
from ds_reshard.operations.load import load as run_load
from ds_reshard.operations.ranks import agree, agree_files, attempt, gather_faults, rank
from ds_reshard.operations.watching import phase, watched
from ds_reshard.resume import policy_sources
from ds_reshard.resume.megatron import extra_values, read_schedule
from ds_reshard.resume.policy import Given, ResumePolicy
from ds_reshard.resume.policy_sources import FLAGS, add_arguments, given
from ds_reshard.resume.report import because

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("ds_reshard")

Result = tuple[int, object]
_SAMPLES = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")


def load_checkpoint(call: Call) -> Result:
    """Load a checkpoint as the resume policy says; iteration and floating-point operations so far.

    What can be read here is loaded straight from the files (`load`). Every rank calls it. A load
    without optimizer and scheduler, or from another argument than `--load`, brings in another model's weights (a
    teacher, a reference, a dense model to be upcycled) and is left to Megatron, the policy waiting for the load that it
    is about. Raises ConfigError for a policy that contradicts the arguments, and what the seams inside raise.
    """
    optimizer, scheduler = call["optimizer"], call["opt_param_scheduler"]
    if (optimizer is None and scheduler is None) or call["load_arg"] != "load":
        result: Result = call()
        return result
    arguments = _arguments()
    policy, where = policy_of(arguments), getattr(arguments, "load", None)
    load = Load(policy=policy, optimizer=optimizer, scheduler=scheduler, where=str(where), models=call["ddp_model"])
    load.before = _counted(arguments, scheduler)
    before = {name: getattr(arguments, name) for name in _TOLD if hasattr(arguments, name)}
    announced = [*policy_faults(optimizer, policy), *announced_faults(policy, arguments)]
    tell_megatron(policy, arguments)
    with watched("megatron", str(where) if where else None):
        try:
            return run_load(MegatronLoad(load, arguments, announced, lambda: _install(load, call, arguments)))
        except BaseException:
            vars(arguments).update(before)  # of a load that was none, for a script that goes on
            raise


def _install(load: Load, call: Call, arguments: Namespace) -> Result:
    """Load what all ranks have agreed on, straight from the files or by Megatron, and what the policy says of it."""
    optimizer = load.optimizer
    for part in leaves(optimizer):
        note_loaded(part, False)
    with phase("load"):
        iteration, operations = call() if load.taken is None else load.taken.load(call, arguments)
    if load.found is None:
        if not load.policy.is_default:
            logger.warning(
                "%s holds no checkpoint: the resume flags had nothing to act on", without_secrets(load.where)
            )
        return iteration, operations
    if not load.policy.loads_masters:
        without_optimizer(load)
    if load.policy.optimizer == "masters":
        for part in leaves(optimizer):
            fresh_moments(part)
    iteration = _counters(load, arguments, iteration)
    _verify(load)
    agree(_changed(load), subject=f"loading {load.where}")
    agree(_foreign_masters(load, arguments), subject=LATE)
    publish_training(load, arguments, iteration)
    return iteration, operations


def _counted(arguments: Namespace, scheduler: Scheduler | None) -> dict[str, int]:
    """This run's counters from before a load, by the names of their rows in the report."""
    names = {"iteration": "iteration", "consumed samples": "consumed_train_samples"}
    counted = {row: getattr(arguments, name, None) or 0 for row, name in names.items()}
    return counted | ({POSITION: scheduler.num_steps} if scheduler is not None else {})


_TOLD = ("no_load_optim", "finetune", "no_load_rng")


def tell_megatron(policy: ResumePolicy, arguments: Namespace) -> None:
    """Megatron's own flags for what it does itself, as if they had been given to it."""
    if policy.optimizer == "skip":
        arguments.no_load_optim = True
    if policy.finetune:
        arguments.finetune = True
    if not policy.rng:
        arguments.no_load_rng = True


def announced_faults(policy: ResumePolicy, arguments: Namespace) -> list[Fault]:
    """What the policy and Megatron's arguments say that cannot be, before anything is read."""
    gone, mend = "is no flag any more", "leave it out: what can be read here is read straight from its files"
    faults = [ConfigError.fault(_ALWAYS, gone, mend=mend)] * bool(getattr(arguments, "ds_reshard_always", False))
    if getattr(arguments, "ckpt_step", None) == 0:
        what = "is no step to Megatron-LM, which would load the iteration that the tracker file names"
        faults.append(ConfigError.fault("--ckpt-step 0", what, mend="leave it out, or give an iteration above 0"))
    return faults + announced_format_faults(policy, arguments) + _contradictions(policy, arguments)


def _contradictions(policy: ResumePolicy, arguments: Namespace) -> list[Fault]:
    """Arguments of Megatron under which a reset would not do what it says."""
    pairs = []
    if policy.iteration == "reset" and getattr(arguments, "override_ckpt_iteration", None) is not None:
        pairs.append(("--reset-iteration", "--override-ckpt-iteration", "both say which iteration it is"))
    by_samples = {
        "rampup_batch_size": "the batch size grows with the samples that are set to 0",
        "step_batch_size_schedule": "the batch size follows the samples that are set to 0",
        "phase_transition_iterations": "the place in a phase is found from the iteration, which is kept",
    }
    for name, why in by_samples.items():
        if policy.dataloader == "reset" and policy.iteration == "load" and getattr(arguments, name, None):
            pairs.append(("--reset-dataloader", "--" + name.replace("_", "-"), why))
    if policy.dataloader == "reset" and getattr(arguments, "dataloader_type", None) == "external":
        why = "an external data loader keeps its own place, which Megatron does not know"
        pairs.append(("--reset-dataloader", "--dataloader-type external", why))
    return [
        ConfigError.fault(
            f"{one} with {other}", f"contradict each other: {why}", mend=f"leave out one of {one} and {other}"
        )
        for one, other, why in pairs
    ]


def _counters(load: Load, arguments: Namespace, iteration: int) -> int:
    """Iteration and samples as the policy says; the iteration that training goes on from."""
    policy = load.policy
    if policy.iteration == "reset" or policy.dataloader == "reset" or policy.finetune:
        for name in _SAMPLES:
            if hasattr(arguments, name):
                setattr(arguments, name, 0)
    if not policy.keeps_iteration:
        from megatron.core.num_microbatches_calculator import update_num_microbatches

        update_num_microbatches(consumed_samples=0)
    if policy.iteration == "reset":
        load.warnings.append(
            "the iteration starts from 0 again: saves into the same folder will replace those of the earlier run"
        )
        return 0
    asked = getattr(arguments, "override_ckpt_iteration", None)
    if asked is None or arguments.finetune or (load.found is not None and load.found.release):
        return iteration
    return cast(int, asked)  # for `torch` with the distributed optimizer Megatron reads it from the tracker file again


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


def _changed(load: Load) -> list[Fault]:
    """A fault where the optimizers of this rank no longer hold the moments that the load had put there."""
    kinds = sorted({kind for part in leaves(load.optimizer) for kind in changed_moments(part)})
    what = f"{', '.join(kinds)} in the optimizer of rank {rank()} have changed since they were loaded"
    return [FingerprintMismatch.fault(load.where, what, mend=CHANGED)] if kinds else []


def _foreign_masters(load: Load, arguments: Namespace) -> list[Fault]:
    """A fault where Megatron has loaded masters that are not those of the weights on this rank.

    Flat buffers, and the numbered states of format `torch`, have no names: if the saved run trained other parameters of
    the same sizes, Megatron gives each the states of another. Weights of fp8 are no casts.
    """
    if not load.unread or any(getattr(arguments, name, None) for name in ("fp8", "fp4")):
        return []
    from megatron.core.utils import unwrap_model

    models = cast("list[torch.nn.Module]", unwrap_model(load.models))
    names = {id(param): name for model in models for name, param in model.named_parameters()}
    other = [
        names.get(id(param), "") for part in leaves(load.optimizer) if is_loaded(part) for param in other_masters(part)
    ]
    what = f"the masters of {len(other)} parameters of rank {rank()} are not those of its weights"
    return [ModelMismatch.fault(load.where, what, found=", ".join(other[:8]), mend=STATES)] if other else []


_BY_NAME = ("GLOBAL", "LOCAL")
"""Types of checkpoint whose states are read into the live ones, by the name of the parameter."""

Base = tuple[object, str | Sequence[object], bool, object]
"""What `_load_base_checkpoint` returns: state, name, whether it is a release, and `CheckpointType`.

The name of a local checkpoint is iteration, rank and session (`CkptID`, nvidia_resiliency_ext 0.6.0).
"""


def load_base_checkpoint(call: Call) -> Base:
    """Read as Megatron does, and refuse here what the policy in force cannot make of it.

    Every rank calls it; Megatron changes its arguments where it falls back to a pretrained checkpoint. Raises
    UnsafePickle before anything is read, ScheduleMismatch, ParamGroupMismatch, ModelMismatch, ConfigError or
    UnsupportedLayout.
    """
    load, load_dir, arguments = current(), call["load_dir"], call["args"]
    result: Base
    if load is not None and load.taken is not None:
        result = load.taken.answer()
    elif load is None and is_url(str(load_dir)):
        what = "is a URL, and only the checkpoint that a run resumes is read by URL: no arguments, and no other model"
        raise UnsupportedLayout.of(str(load_dir), what, mend="copy it to a local folder, and give that")
    else:
        asked = call.arguments.get("sharded_state_dict")
        if load is not None and load.found is not None and isinstance(asked, Mapping):
            strictness = str(getattr(arguments, "dist_ckpt_strictness", ""))
            raise_faults(other_tensors(load, asked, strictness), subject=f"resuming from {load.where}")
        if load is not None:
            raise_faults(gather_faults(_own_file(load_dir, arguments)), subject=f"resuming from {load_dir}")
        with refuse_iteration(load_dir, getattr(arguments, "ckpt_step", None), load):
            result = call()
    state, name, release, kind = result
    if load is None or not isinstance(state, Mapping):
        return result
    if getattr(arguments, "finetune", False) and not load.policy.finetune:
        load.another_model, asked = True, {"finetune": "--pretrained-checkpoint"}
        load.policy = ResumePolicy(finetune=True, rng=load.policy.rng, report=load.policy.report, asked=asked)
    load.random = state.get("rng_state")
    read = load.found is not None  # this is the second call, which has read the tensors
    load.where = _folder(name) if isinstance(name, str) else f"the local checkpoint of iteration {name[0]}"
    form = getattr(kind, "name", "")
    load.read_in_place = load.taken is not None or form in _BY_NAME
    legacy = form == "LEGACY" and load.taken is None
    try:
        first = bool(call.arguments.get("rank0"))
        faults = look(load, state, release, form, arguments, first=first)
        faults += other_weights(load, state) if legacy and not first else ()
    except ReshardError as error:
        faults = faults_of(error)
    subject = LATE if read and load.read_in_place else f"resuming from {load.where}"
    raise_faults(gather_faults(faults), subject=subject)
    if isinstance(name, str) and legacy:
        # several ranks read one file each, which nobody else opens; None where it is none of today's torch.save
        own, _, _ = attempt(lambda: {name.removeprefix(f"{load_dir}/"): digest_of(name)})
        agree_files(own or {}, subject=subject)
    return result


def _own_file(load_dir: str, arguments: object) -> list[Fault]:
    """What this rank has not of a checkpoint of format `torch`: others that have theirs would wait for it."""
    step = getattr(arguments, "ckpt_step", None)
    folder, _, _ = attempt(lambda: find_iteration(load_dir, str(step) if step else None))
    number = PurePath(folder or "").name.removeprefix("iter_")
    if folder is None or not number.isdecimal() or not is_torch_format(folder):
        return []  # Megatron tells what is not there
    return missing_file(own_file(folder))


def look(
    load: Load, state: Mapping[str, object], release: bool, form: str, arguments: object, *, first: bool = False
) -> list[Fault]:
    """Note what was found in a checkpoint of this `CheckpointType`, and say what of it cannot be resumed as asked.

    `first` is whether it is the first rank's, of which in format `torch` other ranks' param groups say nothing.
    """
    policy, optimizer, legacy = load.policy, load.optimizer, form == "LEGACY"
    groups = states_of(optimizer, load.groups) if load.groups else state.get("optimizer")
    load.found = _found(load, state, release)
    faults = [] if load.another_model else format_faults(load.where, form.lower(), policy)
    if form == "GLOBAL" and load.taken is None:
        runs = getattr(load.found.arguments, "__dict__", {}), vars(arguments)
        faults += vocabulary_faults(load, runs, load.where)
    if release:
        step = None if load.another_model else getattr(arguments, "ckpt_step", None)
        faults += release_faults(load.where, policy, step)
        if not faults and policy.loads_masters:
            asked = {**policy.asked, "optimizer": "a release has none"}
            load.policy = replace(policy, optimizer="skip", asked=asked)
        return faults
    faults += _lacking(load, state, form, arguments)
    if not policy.finetune:
        differing = _schedule_faults(load, load.found)
        faults += differing
        others = first and legacy and load.taken is None
        if optimizer is not None and _reads_groups(policy) and not others:
            apart = legacy and bool(getattr(arguments, "use_layer_wise_distributed_optimizer", False))
            faults += _group_faults(load, groups, differing, alone=apart)
    return faults


def _lacking(load: Load, state: Mapping[str, object], kind: str, arguments: object) -> Iterator[Fault]:
    """What was asked for and is not in a checkpoint: Megatron loads another, or stops when weights have changed.

    Where Megatron reads random states of a torch_dist checkpoint that has none, it goes on; of format `torch` it ends
    the process, and says that all went well (`load_checkpoint`, 0.18.2 and 0.19.2).
    """
    policy, where, step = load.policy, load.where, getattr(arguments, "ckpt_step", None)
    saved = load.found.arguments if load.found is not None else None
    other = step and not where.endswith(f"iter_{step:07d}") and state.get("iteration") != step
    if other and getattr(arguments, "non_persistent_ckpt_type", None):
        what = f"is non-persistent and no older than --ckpt-step {step}: Megatron-LM would load it all the same"
        yield ConfigError.fault(where, what, mend="leave out one of --ckpt-step and --non-persistent-ckpt-type")
    if policy.finetune:
        return
    if policy.optimizer != "skip" and getattr(saved, "no_save_optim", False) and load.taken is None:
        what = "was saved with --no-save-optim: it has no state of an optimizer, and no schedule"
        yield UnsupportedLayout.fault(where, what, mend="add --no-load-optim")
    anew = load.taken is not None and load.taken.draws_anew
    random = "rng_state" in state or "random_rng_state" in state or anew
    if kind == "LEGACY" and not random and not getattr(arguments, "no_load_rng", False):
        what = "was saved with --no-save-rng: it has no random states"
        yield UnsupportedLayout.fault(where, what, mend="add --no-load-rng")
    kinds = [str(getattr(one, "optimizer", None) or "").removeprefix("dist_") for one in (saved, arguments)]
    if policy.loads_moments and all(kinds) and kinds[0] != kinds[1]:
        what, mend = "is another than in the saving run", "build the optimizer that was saved, or add --no-load-optim"
        yield ModelMismatch.fault("--optimizer", what, *kinds, mend=mend)


def _folder(name: str) -> str:
    """The folder of a checkpoint: for `torch`, where each rank names its own file, the same on all of them."""
    if is_url(name):
        return name
    path = PurePath(name)
    return str(next((one for one in (path, *path.parents) if one.name.startswith(("iter_", "release"))), path))


def _reads_groups(policy: ResumePolicy) -> bool:
    """Whether saved groups are matched with the live ones, or tell the bounds of a schedule that is taken alone."""
    return not policy.finetune and (policy.optimizer != "skip" or policy.scheduler in ("checkpoint", "strict"))


def _found(load: Load, state: Mapping[str, object], release: bool) -> Found:
    policy, arguments = load.policy, state.get("args")
    scheduler = state.get("opt_param_scheduler", state.get("lr_scheduler"))
    iteration = state.get("iteration", state.get("total_iters"))
    schedule = None
    compared = policy.scheduler == "strict" or (policy.loads_moments and policy.scheduler == "host")
    if load.scheduler is not None and scheduler is not None and (policy.keeps_position or compared):
        schedule = read_schedule(scheduler, where=load.where, extra=extra_values(arguments))
    return Found(
        release=release,
        iteration=iteration if isinstance(iteration, int) else None,
        arguments=arguments,
        schedule=schedule,
        scheduler_state=scheduler,
    )


def _schedule_faults(load: Load, found: Found) -> list[Fault]:
    """What differs of the schedule that must not; a fault where there is none and one is needed."""
    policy = load.policy
    if load.scheduler is None:
        return []
    wanted = policy.scheduler in ("checkpoint", "strict") or (policy.scheduler == "override" and policy.keeps_position)
    if found.scheduler_state is None and wanted:
        asked = because(policy, "schedule")
        what = f"has no scheduler state, which {asked} takes the position from"
        mend = f"leave out {asked}, or add --no-load-lr-state for this run's schedule from its beginning"
        return [ScheduleMismatch.fault(load.where, what, mend=mend)]
    if found.schedule is None or (policy.optimizer == "skip" and policy.scheduler != "strict"):
        return []
    return schedule_faults(cast(Scheduler, load.scheduler), found.schedule, policy)


def _group_faults(load: Load, state: object, said: list[Fault], *, alone: bool) -> list[Fault]:
    """What differs of the param groups that must not, but for what is `said` of the schedule; notes the pairs.

    Groups may be absent, or come only with the tensors. That is a fault where nothing else brings them in time. They
    count `alone` where the states beside them are those of the first data-parallel rank: of format `torch` a layer-wise
    optimizer reads each rank's own from `layer_wise_optimizer_N.pt` (`load_checkpoint`, 0.18.2 and 0.19.2).
    """
    policy, faults = load.policy, []
    bounds = policy.scheduler == "strict" or (policy.scheduler == "host" and compares_bounds())
    load.matched = []
    for part, saved in with_saved(load.optimizer, state):
        groups = saved_groups(saved)
        if groups is None:
            if policy.scheduler == "strict" or (policy.optimizer == "skip" and policy.scheduler == "checkpoint"):
                asked = because(policy, "schedule")
                what = f"its param groups cannot be read, and {asked} needs their learning rates"
                faults.append(UnsupportedLayout.fault(load.where, what, mend=f"leave out {asked}"))
            continue
        wrong, ordered, _ = matched_groups(part, {"param_groups": groups} if alone else saved, load)
        faults += wrong
        if wrong:
            continue
        load.matched.append((part, ordered))
        if bounds and not policy.schedule_is_this_runs:
            faults += group_differences(run_groups(part), ordered, policy=policy, said=[*said, *faults])
    return faults


_OTHER_FORMATS = ("torch_dcp", "fsdp_dtensor")
"""Formats whose optimizer state does not come through the optimizers' `load_state_dict`."""


def format_faults(where: str, name: str, policy: ResumePolicy) -> list[Fault]:
    """A fault for what was asked of a format in which it cannot be chosen.

    `torch_dcp` is read into the live moments even where Megatron's flags leave the optimizer out
    (`load_checkpoint`, training/checkpointing.py, 0.18.2 and 0.19.2).
    """
    asked = policy.scheduler != "host" or policy.optimizer == "masters" or bool(policy.hyperparameters)
    if name == "torch_dcp":
        asked = asked or not policy.loads_moments
    if name not in _OTHER_FORMATS or not asked:
        return []
    what = f"is of format {name}, in which schedule, masters, moments and hyper-parameters cannot be chosen"
    mend = "save it with --ckpt-format torch_dist, or leave these flags out"
    return [UnsupportedLayout.fault(where, what, "torch or torch_dist", name, mend=mend)]


def announced_format_faults(policy: ResumePolicy, arguments: Namespace) -> list[Fault]:
    """The same before anything is read, which these formats are into the live tensors."""
    folder = getattr(arguments, "load", None)
    if getattr(arguments, "auto_detect_ckpt_format", False) or folder is None:
        return []
    if not os.path.isfile(os.path.join(folder, TRACKER)):
        return []
    return format_faults(folder, getattr(arguments, "ckpt_format", ""), policy)


_ALWAYS = "--ds-reshard-always"


def parse_args(call: Call) -> Namespace:
    """Megatron's arguments, its own flags and those of the script adopted, and the resume flags that it has not.

    What was given is this process's policy from here on; what a YAML file says instead of the command line is met
    by `policy_of`. Raises ConfigError for flags that contradict each other or another place.
    """

    provider = call["extra_args_provider"]

    def with_resume_flags(parser: ArgumentParser) -> ArgumentParser:
        given = add_arguments(provider(parser) if provider is not None else parser)
        if _ALWAYS not in given._option_string_actions:
            given.add_argument(_ALWAYS, action="store_true", help=SUPPRESS)
        return given

    arguments: Namespace = call(extra_args_provider=with_resume_flags)
    return arguments


def policy_of(arguments: Namespace) -> ResumePolicy:
    """What every place has asked for, and what a program has set in Megatron's arguments since they were parsed.

    Megatron itself sets `finetune` when it falls back to `--pretrained-checkpoint`: nobody has asked for that.
    """
    set_now = given(arguments, _DESTS)
    if getattr(arguments, "pretrained_checkpoint", None) is not None and not policy_sources.asked_policy().finetune:
        values = {key: value for key, value in set_now.values.items() if key != "finetune"}
        set_now = Given(place=set_now.place, values=values, spelled=set_now.spelled)
    return policy_sources.asked_policy(set_now)


_DESTS = {flag.dest: flag for flag in FLAGS}


def _arguments() -> Namespace:
    from megatron.training import get_args

    return cast(Namespace, get_args())


def build_data_loaders(call: Call) -> object:
    """Build Megatron's data loaders, at the start of the data if the policy resets it and the load has done so.

    Megatron would take a position from the iteration if no samples are consumed, so it sees iteration 0 meanwhile.
    """
    arguments = _arguments()
    iteration = arguments.iteration
    if iteration == 0 or arguments.consumed_train_samples != 0 or policy_of(arguments).dataloader != "reset":
        return call()
    arguments.iteration = 0
    try:
        return call()
    finally:
        arguments.iteration = iteration
