"""The resume policy on a DeepSpeed engine: checked before a load, applied after it, and reported.

A load restores no more than the policy allows. Afterwards this run's values, noted before its first load, are written
back if the policy says so, and each scheduler is moved to its position (`resume/scheduler_policy.py` has the table).

There are four seams on methods of classes (rung 2 of the ladder). `load_state_dict` of torch's and DeepSpeed's
schedulers: a scheduler that the engine does not know may get its saved state after the engine's load, which would undo
the policy. `load_state_dict` of DeepSpeed's optimizers, which a script may call without `load_checkpoint`. And
`_take_model_step` and `save_checkpoint` of the engine.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import logging
import os
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ds_reshard.errors import ConfigError, Fault, FingerprintMismatch, UnsupportedLayout, raise_faults
from ds_reshard.execution.states import CHANGED, Samples, has_moments
from ds_reshard.formats.zero.checkpoint import AnyCheckpoint, sequence_ranks
from ds_reshard.hooks import Call
from ds_reshard.hooks.installation import REGISTRY
from ds_reshard.hosts.deepspeed.engine import (
    forget_states,
    keeps_unknown_states,
    live_groups,
    live_kind,
    refuse_use,
    restore_use,
    scale_name,
)
from ds_reshard.hosts.deepspeed.entries import Request, load_sampler, revived
from ds_reshard.hosts.deepspeed.find_checkpoint import Aside, latest_tag, tag_files
from ds_reshard.hosts.deepspeed.move import KEPT, states_left
from ds_reshard.hosts.deepspeed.prepare import SavedGroups
from ds_reshard.hosts.deepspeed.settings import Settings, parse_settings
from ds_reshard.model.content import MASTER, WEIGHT
from ds_reshard.model.context_value import context_value
from ds_reshard.operations.ranks import Steps, agree, attempt, raise_caused, rank
from ds_reshard.operations.watching import under_way
from ds_reshard.resume import policy_sources, schedulers
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.report import (
    ANEW,
    FROM_CHECKPOINT,
    MASTERS,
    MOMENTS,
    ResumeReport,
    Row,
    batch_size_warning,
    because,
    publish,
    rate_warning,
    say_applied,
    unwritable,
)
from ds_reshard.resume.scheduler_policy import BOUNDS, SCHEDULED, SavedValues, ScheduleResume
from ds_reshard.resume.schedulers import DEEPSPEED, Beginning, innermost, position_in, position_of, set_groups

if TYPE_CHECKING:
    from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("ds_reshard")

Result = tuple[object, object]
Value = TypeVar("Value")


class SchedulerMap(MutableMapping[object, Value]):
    """A weak map from schedulers to values, by identity: a script's class may have no hash, or its own equality."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[object], Value]] = {}

    def __getitem__(self, scheduler: object) -> Value:
        return self._items[id(scheduler)][1]

    def __setitem__(self, scheduler: object, value: Value) -> None:
        items, key = self._items, id(scheduler)
        items[key] = weakref.ref(scheduler, lambda _: items.pop(key, None)), value

    def __delitem__(self, scheduler: object) -> None:
        del self._items[id(scheduler)]

    def __iter__(self) -> Iterator[object]:
        alive = (ref() for ref, _ in list(self._items.values()))
        return (scheduler for scheduler in alive if scheduler is not None)

    def __len__(self) -> int:
        return len(self._items)


def policy_of(kind: str, settings: Settings, *, module_only: bool) -> ResumePolicy:
    """Return the resume policy of this process and of an engine's JSON; `kind` names the optimizer's wrapper.

    It is the default policy for loads that are no resume: `load_module_only`, and engines without an optimizer.
    """
    policy = policy_sources.asked_policy(settings.resume)
    if module_only or kind == "none":
        return ResumePolicy(report=policy.report)
    if not settings.enabled and not policy.is_default:
        what = "is false, and a resume policy was asked for: it cannot be applied"
        fault = ConfigError.fault(
            "ds_reshard.enabled", what, mend='set "enabled": true, or leave out the resume policy'
        )
        raise_faults([fault], subject="DeepSpeed config")
    return policy


class RunValues:
    """This run's own values, as they were before its first load, and the last load.

    `groups` are the param groups without their parameters; `stepped` is true if the engine had trained before, so that
    the scheduler's initial state is unknown. `sampler` is the state of a curriculum's data sampler, `random_ltd` that
    of the random-LTD schedule, which follows the iteration.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        optimizer, sampler = engine.optimizer, _sampler(engine)
        random_ltd = getattr(engine, "random_ltd_scheduler", None)
        hyperparameters = (
            {name: value for name, value in group.items() if name not in ("params", "step")}
            for group in live_groups(engine)
        )
        self.groups = list(map(copy.deepcopy, hyperparameters))
        self.clip_grad: object = getattr(optimizer, "clip_grad", None)
        self.loss_scaler: object = copy.deepcopy(getattr(optimizer, scale_name(optimizer) or "loss_scaler", None))
        self.stepped: bool = engine.global_steps > 0
        self.sampler: object = copy.deepcopy(sampler.state_dict()) if sampler is not None else None
        self.random_ltd: object = copy.deepcopy(random_ltd.state_dict()) if random_ltd is not None else None
        self.last: Resume | None = None


_VALUES: weakref.WeakKeyDictionary[DeepSpeedEngine, RunValues] = weakref.WeakKeyDictionary()
_BEGINNINGS: SchedulerMap[Beginning] = SchedulerMap()
_GIVEN: SchedulerMap[None] = SchedulerMap()
"""The schedulers that scripts gave a position, of engines that had loaded nothing."""


def run_values(engine: DeepSpeedEngine) -> RunValues:
    """Return this run's values as they were at the first call."""
    if engine not in _VALUES:
        if engine.lr_scheduler is not None:
            beginning_of(engine.lr_scheduler)
        _VALUES[engine] = RunValues(engine)
    return _VALUES[engine]


def _sampler(engine: DeepSpeedEngine) -> DeepSpeedDataSampler | None:
    """Return the data sampler of curriculum learning, the only data position that DeepSpeed saves; None without it."""
    loader = engine.training_dataloader
    sampler: DeepSpeedDataSampler | None = getattr(loader, "data_sampler", None)
    return sampler if loader is not None and engine.curriculum_learning_enabled() else None


def beginning_of(scheduler: object) -> Beginning:
    """Return the initial state of a scheduler; the first call must come before the scheduler loads a state."""
    if scheduler not in _BEGINNINGS:
        _BEGINNINGS[scheduler] = Beginning(scheduler)
    return _BEGINNINGS[scheduler]


def external_schedulers(engine: DeepSpeedEngine) -> list[object]:
    """Return the schedulers that have loaded a state and step the engine's optimizer, but are not the engine's own.

    Hugging Face's Trainer, accelerate and many scripts keep schedulers that the engine does not know, and load their
    state before or after `engine.load_checkpoint` (transformers/trainer.py, `_load_optimizer_and_scheduler`;
    accelerate/checkpointing.py, `load_accelerator_state`).
    """
    optimizer = innermost(engine.optimizer)
    return [one for one in list(_BEGINNINGS) if innermost(one) is optimizer and not _contains(engine.lr_scheduler, one)]


def _contains(scheduler: object, part: object) -> bool:
    """True if `part` is the scheduler itself, or one of the schedulers inside it."""
    return part is scheduler or any(_contains(inner, part) for inner in getattr(scheduler, "_schedulers", ()))


def _schedule_resume(
    engine: DeepSpeedEngine, policy: ResumePolicy, saved: SavedValues | None, external: object = None
) -> ScheduleResume:
    """Return the resume of the engine's scheduler, or of an `external` one, whose state is in `saved`."""
    this_run, scheduler = run_values(engine), engine.lr_scheduler if external is None else external
    other_schedulers = (*external_schedulers(engine), engine.lr_scheduler) if external is not None else ()
    return ScheduleResume(
        policy=policy,
        scheduler=scheduler,
        beginning=beginning_of(scheduler) if scheduler is not None else None,
        own_groups=this_run.groups,
        saved=saved,
        external=external is not None,
        others=[one for one in other_schedulers if one is not None and one is not external],
        by_script=engine.client_lr_scheduler is not None,
        stepped=this_run.stepped and external is None,
    )


def _external_state(scheduler: object, state: Mapping[str, object] | None = None) -> SavedValues:
    """Return the saved values of an external scheduler: `state`, or the state that it loaded before."""
    state = copy.deepcopy(scheduler.state_dict()) if state is None else state  # type: ignore[attr-defined]
    return SavedValues(where=f"the state of {type(scheduler).__name__}", scheduler=state)


def restrict(request: Request, policy: ResumePolicy) -> Request:
    """Return the request reduced to what a policy allows: never more than the caller's arguments ask for."""
    return replace(
        request,
        optimizer=request.optimizer and policy.loads_masters,
        moments=policy.loads_moments,
        replaced=frozenset(policy.hyperparameters) | (SCHEDULED if policy.schedule_is_this_runs else frozenset()),
        module_only=request.module_only or policy.finetune,
        scheduler=request.scheduler and policy.keeps_position and policy.scheduler != "override",
    )


LEFT_TO_DEEPSPEED = "no tensor was proved: DeepSpeed loaded it"


class Resume:
    """One load under a policy, and its record afterwards; nothing here keeps the engine alive.

    `request` is the load as the policy allows it, `proof` tells how many tensors were proved, None if no proof was
    asked for. `before` has iteration, samples and scheduler position just before the load. `given` samples the states
    that the optimizer is given. After the load, `saved` has the checkpoint's values, `iteration` is the new iteration,
    `states` tells where masters and moments came from, and `external` maps the external schedulers that have loaded a
    state since to their positions.
    """

    def __init__(self, engine: DeepSpeedEngine, policy: ResumePolicy, request: Request, settings: Settings) -> None:
        self.policy, self.request = policy, restrict(request, policy)
        self.proof = LEFT_TO_DEEPSPEED if settings.prove else None
        self.saved: SavedValues | None = None
        self.iteration = 0
        self.states: Mapping[str, str] | None = None
        self.checks, self.given = settings.checksum, Samples()
        self.external: SchedulerMap[int | None] = SchedulerMap()
        self.before: tuple[int, int, int | None] = (0, 0, None)
        self._passed_over = ""  # the flags that a load of the weights alone does not apply
        if request.module_only and live_kind(engine) != "none" and policy.is_default:
            asked = policy_sources.asked_policy(settings.resume)
            self._passed_over = "" if asked.is_default else ", ".join(asked.asked.values())
        without_moments = settings.enabled and not self.request.load_moments
        stateful = without_moments and live_kind(engine) not in ("none", "offload")
        self._stepped = stateful and bool(engine.global_steps or run_values(engine).last)
        self.had_moments = self._stepped and has_moments(engine.optimizer, steps=True)
        self._engine_ref, self._arguments, self._subject = weakref.ref(engine), request, f"loading {request.load_dir}"
        if not request.module_only:
            run_values(engine)
            position = position_of(engine.lr_scheduler) if engine.lr_scheduler is not None else None
            self.before = engine.global_steps, engine.global_samples, position

    @property
    def _engine(self) -> DeepSpeedEngine:
        engine = self._engine_ref()
        assert engine is not None, "who loads holds the engine"
        return engine

    def check_policy(self) -> None:
        """Raise if this engine cannot apply the policy, or load without moments, whatever the checkpoint."""
        engine, policy = self._engine, self.policy
        if self._stepped and keeps_unknown_states(engine):
            where = f"the optimizer {type(innermost(engine.optimizer)).__name__}"
            what = "has taken steps, and keeps more of them than a load without moments is known to undo"
            mend = "build the engine anew for a load without moments"
            raise_faults([ConfigError.fault(where, what, mend=mend)], subject=self._subject)
        if policy.is_default:
            return
        faults = _argument_faults(engine, self._arguments, policy) + _schedule_resume(engine, policy, None).faults()
        for other in external_schedulers(engine):
            faults += _schedule_resume(engine, policy, _external_state(other), other).faults()
        raise_faults(faults, subject=self._subject)

    def _check_report_path(self) -> None:
        """Raise if the report cannot be written on this machine; preflight runs on another one."""
        import torch.distributed as dist

        if dist.is_initialized() and rank() == 0 and not self._arguments.module_only:
            raise_faults(unwritable(self.policy.report), subject=self._subject)

    def check_unread_load(self, aside: Aside | None) -> None:
        """Raise if the policy cannot be applied to a checkpoint that only DeepSpeed reads.

        `aside` has the other entries of its model file.
        """
        self._check_report_path()
        policy, aside = self.policy, aside or Aside()
        if policy.is_default:
            return
        unable = [f'scheduler "{policy.scheduler}"'] if policy.scheduler in ("checkpoint", "strict") else []
        unable += [f'optimizer "{policy.optimizer}"'] if policy.optimizer != "load" else []
        unable += ["finetune"] if policy.finetune else []
        what = "is loaded by DeepSpeed itself (pipeline, experts, tensor parallel), so {} cannot be applied to it"
        mend = "convert or save it as a plain ZeRO checkpoint, or leave that out of the resume policy"
        where = self._arguments.load_dir
        faults = [UnsupportedLayout.fault(where, what.format(name), mend=mend) for name in unable]
        raise_faults(faults or aside.faults, subject=self._subject)
        if aside.entries is not None:
            settings, stage = parse_settings(self._engine._config._param_dict), self._engine.zero_optimization_stage()
            self.saved = _saved_values(aside.entries, settings, where=aside.folder, stage=int(stage), scheduler=True)

    def read(self, checkpoint: AnyCheckpoint, groups: SavedGroups, settings: Settings) -> None:
        """Read the checkpoint's saved values, and raise if the policy needs values that it does not have."""
        self._check_report_path()
        engine, policy = self._engine, self.policy
        with_scheduler = engine.lr_scheduler is not None or policy.scheduler in ("checkpoint", "strict")
        self.saved, _, cause = attempt(lambda: read_saved(checkpoint, groups, settings, scheduler=with_scheduler))
        if policy.is_default:
            return  # the values are only needed for the report; the load itself raises their faults
        if cause is not None:
            raise cause
        raise_faults(_schedule_resume(engine, policy, self.saved).faults(), subject=self._subject)

    def after_deepspeed(self, result: Result) -> Result:
        """Apply the policy to the engine that DeepSpeed has loaded; return DeepSpeed's result. Collective."""
        if self.proof == LEFT_TO_DEEPSPEED and rank() == 0:
            logger.warning("%s: %s", self._subject, self.proof)
        if result[0] is not None and self._stepped:
            forget_states(self._engine)
        if result[0] is None or self._arguments.module_only:
            return result
        if self.policy.is_default:
            self._apply()
            run_values(self._engine).last = self
            _, faults, _ = attempt(self._refuse_others)
            for fault in faults:
                logger.error("%s", fault.line())
        else:
            refuse_use(self._engine, f"the resume policy was not applied after {self._subject}")
            self.apply(Steps())
            restore_use(self._engine)
        return result

    def apply(self, steps: Steps) -> None:
        """Apply the policy to the loaded engine; raise if a step of any rank has failed. Collective."""
        if self._stepped:
            steps.take(lambda: forget_states(self._engine), subject=self._subject)
        if not self._arguments.module_only:
            steps.take(self._apply, subject=self._subject)
            steps.take(self._refuse_others, subject=self._subject)
        steps.agree()
        if not self._arguments.module_only:
            run_values(self._engine).last = self

    def _refuse_others(self) -> None:
        """Raise FingerprintMismatch if this rank's optimizer no longer holds the states that the load gave it."""
        if self.checks and (kinds := self.given.differing()):
            what = f"{', '.join(kinds)} in the optimizer of rank {rank()} have changed since they were loaded"
            mend = f'{CHANGED}; if it is to, load once with "reshard": {{"verify": "off"}}'
            fault = FingerprintMismatch.fault(self._arguments.load_dir, what, mend=mend)
            raise_faults([fault], subject=self._subject)

    def _apply(self) -> None:
        engine, policy = self._engine, self.policy
        if self.saved is None:  # DeepSpeed has loaded files that are not read here: take the engine's values
            position = position_of(engine.lr_scheduler) if engine.lr_scheduler is not None else None
            self.saved = SavedValues(
                where=self._arguments.load_dir,
                stage=int(engine.zero_optimization_stage()),
                dp=int(engine.loaded_checkpoint_dp_world_size or engine.seq_dp_world_size),
                scheduler={"last_epoch": position} if position is not None else None,
                iteration=engine.global_steps,
                samples=engine.global_samples,
                skipped=engine.skipped_steps,
            )
        if not policy.is_default:
            apply(engine, self.saved, policy)
        self.iteration = engine.global_steps
        self.request, self._arguments = (replace(one, custom_load_fn=None) for one in (self.request, self._arguments))
        for scheduler in external_schedulers(engine) if not policy.is_default else ():  # loaded a state before the load
            self.apply_external(engine, _schedule_resume(engine, policy, _external_state(scheduler), scheduler))

    def apply_external(self, engine: DeepSpeedEngine, schedule: ScheduleResume) -> None:
        """Apply the policy to an external scheduler that loads its state."""
        groups = live_groups(engine)
        assert self.saved is not None and schedule.saved is not None
        schedule.apply(groups, self.saved.group_values(len(groups)))
        set_groups(groups, schedule.own_groups, self.policy.hyperparameters)
        self.note_external(schedule.scheduler, schedule.saved.scheduler or {})

    def note_external(self, scheduler: object, state: Mapping[str, object]) -> None:
        """Note the position in the state that an external scheduler has loaded; the latest one comes last."""
        self.external.pop(scheduler, None)
        self.external[scheduler] = position_in(state)

    def report(self, result: Result) -> Result:
        """Publish the report of a finished load; return the load's result. Collective if there is a report file."""
        if result[0] is None or self._arguments.module_only:
            if result[0] is not None and self.had_moments and rank() == 0:
                logger.warning("%s: %s", self._subject, _WITHOUT_MOMENTS.format(_BEGIN_ANEW))
            if self._passed_over and rank() == 0:
                text = "%s: weights alone were loaded (load_module_only=True): this load does not apply %s"
                logger.warning(text, self._subject, self._passed_over)
            return result
        policy_sources.note_applied(self.policy)
        _, faults, cause = attempt(self.publish) if rank() == 0 else (None, [], None)
        if self.policy.report is not None:
            agree(faults, subject=f"resume report {self.policy.report}", cause=cause)
        elif faults:
            logger.error("no resume report: %s", "; ".join(fault.line() for fault in faults))
        return result

    def publish(self, scheduler: object = None) -> None:
        """Publish the report of the load on rank 0, or publish it again after external `scheduler` loaded a state."""
        assert self.saved is not None, "the load has set it"
        if scheduler is None:
            self.states = states_left(self._engine, self.request, self.saved, self.given)
        table = report(self._engine)
        if scheduler is None:
            logger.info("%s", table)
        else:
            rates = [row.used for row in table.rows if row.name.endswith(": lr")]
            position = table["schedule position"].used
            logger.info("%s took its state: position %s, lr %s", type(scheduler).__name__, position, rates)
        for warning in table.warnings if scheduler is None else _batch_count_warnings(self._engine, self):
            logger.warning("%s", warning)
        waiting = "; an external scheduler sets it when it loads its state" if AWAITS_STATE in table.warnings else ""
        say_applied(table, self.policy, reserve=waiting)
        publish(table, path=self.policy.report)


_NOT_HYPERPARAMETERS = (
    *("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize", "decoupled_weight_decay"),
    *(*BOUNDS, "max_momentum", "base_momentum"),
)
"""Keys of param groups that choose an optimizer's states or its arithmetic, or that belong to schedulers."""


def _argument_faults(engine: DeepSpeedEngine, request: Request, policy: ResumePolicy) -> list[Fault]:
    """Return faults if the policy contradicts the arguments of `load_checkpoint`, the JSON, or the engine's history."""
    this_run, problems, requested = run_values(engine), list[tuple[str, str, str]](), f'scheduler "{policy.scheduler}"'
    in_files, masters = policy.scheduler in ("checkpoint", "strict"), policy.optimizer == "masters"
    # Lightning never loads the engine's scheduler: its engine has none, as Lightning steps its own
    if (in_files or policy.scheduler == "override") and not request.scheduler and engine.lr_scheduler is not None:
        what = f"contradicts {requested}: one leaves the schedule out, the other asks for it"
        mend = 'leave out load_lr_scheduler_states=False, or ask for scheduler "reset" (--no-load-lr-state)'
        problems.append(("load_checkpoint(load_lr_scheduler_states=False)", what, mend))
    if not request.optimizer and (masters or in_files):
        what = f"contradicts {'masters' if masters else requested}, which is in the optimizer's files"
        mend = "leave out load_optimizer_states=False, or that part of the resume policy"
        problems.append(("load_checkpoint(load_optimizer_states=False)", what, mend))
    if masters and not engine.zero_load_from_fp32_weights():
        what = "makes masters from the 16-bit weights, and --load-masters-only asks for the saved ones"
        mend = 'set "load_from_fp32_weights": true, or use --no-load-optim'
        problems.append(("zero_optimization.load_from_fp32_weights: false", what, mend))
    if policy.dataloader == "reset" and this_run.sampler is None and not policy_sources.adopted("dataloader"):
        what = "DeepSpeed stores a data position for curriculum learning alone: there is nothing to reset"
        problems.append(("dataloader", what, "leave out --reset-dataloader; the script starts its own data anew"))
    if not policy.rng and not policy.finetune and not policy_sources.adopted("rng"):
        what = "DeepSpeed's checkpoints hold no random states: there is nothing to leave out"
        mend = "leave out --no-load-rng; those that the script or accelerate restores may be set anew after the load"
        problems.append(("rng", what, mend))
    settable = {name for group in this_run.groups for name in group}.difference(_NOT_HYPERPARAMETERS)
    settable |= {"clip_grad", "loss_scale"}
    what, mend = "is no hyper-parameter of this run's optimizer or engine", ", ".join(sorted(settable - {"lr"}))
    problems += [
        (f"hyperparameters: {name}", what, f"name some of {mend}")
        for name in policy.hyperparameters
        if name not in settable
    ]
    if policy.takes("loss_scale") and this_run.loss_scaler is None:
        problems.append(("hyperparameters: loss_scale", "this engine scales no loss", "leave loss_scale out"))
    return [ConfigError.fault(where, what, mend=mend) for where, what, mend in problems]


def apply(engine: DeepSpeedEngine, saved: SavedValues, policy: ResumePolicy) -> None:
    """Write this run's values back after a load if the policy says so, and move the scheduler to its position.

    Not collective; the same on every rank.
    """
    this_run, groups, optimizer = run_values(engine), live_groups(engine), engine.optimizer
    if policy.takes("clip_grad"):
        optimizer.clip_grad = this_run.clip_grad if this_run.clip_grad is not None else engine.gradient_clipping()
    if policy.takes("loss_scale"):
        setattr(optimizer, scale_name(optimizer) or "loss_scaler", copy.deepcopy(this_run.loss_scaler))
    if not policy.keeps_iteration:
        engine.global_steps = engine.global_samples = engine.skipped_steps = 0
        if (random_ltd := getattr(engine, "random_ltd_scheduler", None)) is not None:
            random_ltd.load_state_dict(this_run.random_ltd)
    sampler = _sampler(engine)
    if sampler is not None and (policy.dataloader == "reset" or policy.finetune):
        load_sampler(sampler, copy.deepcopy(this_run.sampler))
    _schedule_resume(engine, policy, saved).apply(groups, saved.group_values(len(groups)))
    set_groups(groups, this_run.groups, policy.hyperparameters)


def read_saved(checkpoint: AnyCheckpoint, groups: SavedGroups, settings: Settings, *, scheduler: bool) -> SavedValues:
    """Return the saved values, of no tensor; `scheduler` adds the scheduler's state, whose classes may need `trust`."""
    values: dict[int, Mapping[str, object]] = {}
    # the model file of stage 0 may contain the optimizer, as records
    if checkpoint.stage or isinstance(checkpoint.model.entries.get("optimizer"), Mapping):
        for number, (group, differing) in groups.matched.items():
            if not differing:
                revived_group = revived(dict(group), trusted=settings.trust, where=f"param group {number}")
                assert isinstance(revived_group, dict)
                values[number] = revived_group
    saved = _saved_values(
        checkpoint.model.entries,
        settings,
        where=checkpoint.listing.folder,
        stage=checkpoint.displayed_stage,
        scheduler=scheduler,
    )
    clip_grad = checkpoint.optimizer_entries.get("clip_grad")
    return replace(saved, groups=values, clip_grad=clip_grad, states=_saved_states(checkpoint))


def _saved_values(
    entries: Mapping[str, object], settings: Settings, *, where: str, stage: int | str, scheduler: bool
) -> SavedValues:
    """Return the saved values in the entries of a model file."""
    names = ("ds_config", "lr_scheduler") if scheduler else ("ds_config",)
    rebuilt = {name: revived(entries.get(name), trusted=settings.trust, where=name) for name in names}
    state, config = (
        one if isinstance(one := rebuilt.get(name), Mapping) else None for name in ("lr_scheduler", names[0])
    )
    numbers = {name: value for name, value in entries.items() if isinstance(value, int) and not isinstance(value, bool)}
    dp = numbers.get("dp_world_size") or 1
    return SavedValues(
        where=where,
        stage=stage,
        dp=dp,
        sp=gcd(dp, sequence_ranks(entries)),
        scheduler=state,
        config=config or {},
        iteration=numbers.get("global_steps"),
        samples=numbers.get("global_samples"),
        skipped=numbers.get("skipped_steps") or 0,
    )


def _saved_states(checkpoint: AnyCheckpoint) -> dict[str, str]:
    """Return "saved" for masters and moments in the checkpoint; "not opened" for both if its files were not read."""
    kinds = {key.kind for key in checkpoint.layout.placements} - {WEIGHT}
    if kinds:
        present = {MASTERS: MASTER in kinds, MOMENTS: bool(kinds - {MASTER})}
        return {name: "saved" for name in present if present[name]}
    listing, inside = checkpoint.listing, checkpoint.model.entries.get("optimizer")
    unopened = listing.universal or inside is not None or any(one.optim for one in listing.columns.values())
    unopened = unopened or any(name.startswith("optimizer.") for name in listing.nbytes)  # of plain PyTorch
    return dict.fromkeys(ANEW, "not opened") if unopened else {}


_SEAM_OFF: ContextVar[bool] = ContextVar("states of schedulers are taken as they are", default=False)


def scheduler_seam_off() -> AbstractContextManager[None]:
    """Inside the block, schedulers load states without the resume policy."""
    return context_value(_SEAM_OFF, True)


def load_state_dict(call: Call) -> object:
    """Load a scheduler's state under the policy of its engine's last load. Not collective; the same on every rank.

    A call inside another one, or inside `engine.load_checkpoint`, is not changed.
    """
    if _SEAM_OFF.get():
        return call()
    scheduler, state = (*call.passed.values(), None)[:2]
    with scheduler_seam_off():
        _, faults, cause = attempt(lambda: beginning_of(scheduler))
        engine = next((one for one in _VALUES if innermost(one.optimizer) is innermost(scheduler)), None)
        last = run_values(engine).last if engine is not None else None
        if engine is None or last is None or last.saved is None or not isinstance(state, Mapping):
            if last is None and isinstance(state, Mapping) and position_in(state) != 0:
                _GIVEN[scheduler] = None
            return call()
        default, fresh = last.policy.is_default, engine.global_steps == last.iteration
        is_part = scheduler is not engine.lr_scheduler and _contains(engine.lr_scheduler, scheduler)
        loaded = is_part or (scheduler is engine.lr_scheduler and not last.policy.places_schedule)
        # a scheduler that has loaded its state, in an engine that has trained since, goes back to a state of this run
        if default or loaded or not (fresh or scheduler not in last.external):
            result = call()
            if rank() == 0 and default and fresh and scheduler is not engine.lr_scheduler:
                last.note_external(scheduler, state)
                for warning in _batch_count_warnings(engine, last):
                    logger.warning("%s", warning)
            return result
        raise_caused(faults, subject=f"loading {last.saved.where}", cause=cause)
        schedule = _schedule_resume(engine, last.policy, _external_state(scheduler, state), scheduler)
        raise_faults(schedule.faults(), subject=f"loading {last.saved.where}")
        result = None if last.policy.places_schedule else call()
        last.apply_external(engine, schedule)
        _, faults, _ = attempt(lambda: last.publish(scheduler)) if rank() == 0 else (None, [], None)
        for fault in faults:
            logger.error("no resume report: %s", fault.line())
        return result


_USE_ENGINE = "save by engine.save_checkpoint, and load by engine.load_checkpoint"


def load_optimizer_state(call: Call) -> object:
    """Load the state of an engine's optimizer; raise if this would drop a policy, or if the number of ranks differs.

    Not collective: all ranks have the same policy, and shards of one save. Inside `load_checkpoint` the load itself
    checks both. DeepSpeed silently takes as much of a shard as fits (`_get_padded_tensor`, stage_1_and_2.py, 0.19.8).
    """
    if under_way():
        return call()
    optimizer, states = list(call.passed.values())[:2]
    refuse_policy(optimizer, asked_policy=policy_sources.asked_policy())
    reads = call.passed.get("load_optimizer_states", True) or call.passed.get("load_from_fp32_weights", False)
    shards = list(
        states.values() if isinstance(states, Mapping) else states if isinstance(states, list | tuple) else ()
    )
    if not reads or getattr(optimizer, "elastic_checkpoint", False):  # it merges any number of shards
        shards = []
    live = _partition_counts(getattr(optimizer, "partition_count", None))
    for shard in shards:
        saved = _partition_counts(shard.get("partition_count")) if isinstance(shard, Mapping) else ()
        if live and saved and saved != live:
            where, what = f"{type(optimizer).__name__}.load_state_dict", "is given shards of another number of ranks"
            raise UnsupportedLayout.of(where, what, f"{max(live)} ranks", f"{max(saved)}", mend=_USE_ENGINE)
    return call()


def refuse_policy(optimizer: object, *, asked_policy: ResumePolicy | None = None) -> bool:
    """Raise ConfigError if a script restores an optimizer without the engine's load although a resume policy is set.

    Return True if the optimizer, or an optimizer that wraps it, belongs to an engine; otherwise `asked_policy` is the
    policy. Nothing is raised if the engine has trained since it was built or since its last load: the script then goes
    back to an earlier state, which is not a resume.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    # an optimizer has no reference to its engine
    engines = (one for one in gc.get_objects() if issubclass(type(one), DeepSpeedEngine))
    inner = innermost(optimizer)
    engine = next((one for one in engines if innermost(getattr(one, "optimizer", None)) is inner), None)
    last = _VALUES[engine].last if engine is not None and engine in _VALUES else None
    if engine is not None and engine.global_steps != (last.iteration if last is not None else 0):
        return True
    policy = asked_policy or ResumePolicy()
    if engine is not None:
        policy = last.policy if last is not None else _policy_of(engine)
    if not policy.is_default:
        what = f"cannot be applied: the script gives {type(optimizer).__name__} its state past engine.load_checkpoint"
        raise ConfigError.of(", ".join(policy.asked.values()), what, mend=f"{_USE_ENGINE}; or leave it out")
    return engine is not None


def _policy_of(engine: DeepSpeedEngine) -> ResumePolicy:
    return policy_of(live_kind(engine), parse_settings(engine._config._param_dict), module_only=False)


def _refuse_given(engine: DeepSpeedEngine) -> None:
    """Raise ConfigError if a script restored a scheduler but loaded no checkpoint, so the policy was not applied."""
    last, optimizer = _VALUES[engine].last if engine in _VALUES else None, innermost(engine.optimizer)
    given = [one for one in list(_GIVEN) if innermost(one) is optimizer] if last is None else []
    policy = _policy_of(engine) if given else ResumePolicy()
    if not policy.is_default:
        what = f"cannot be applied: the script has given {type(given[0]).__name__} its state, and has loaded nothing"
        mend = f"{_USE_ENGINE}, before the first update; or leave it out"
        raise ConfigError.of(", ".join(policy.asked.values()), what, mend=mend)


def _partition_counts(partitions: object) -> tuple[int, ...]:
    """Return how many ranks share each flat buffer: one number per buffer at stages 1 and 2, one for all at stage 3."""
    counts = partitions if isinstance(partitions, list | tuple) else [partitions]
    return tuple(one for one in counts if isinstance(one, int))


class _StepGuard:
    """Wraps a scheduler during one update, to raise its TypeError again when DeepSpeed calls `step` a second time."""

    def __init__(self, scheduler: object) -> None:
        self._scheduler = scheduler
        self._raised: TypeError | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._scheduler, name)

    def step(self, *args: object, **kwargs: object) -> None:
        """Step the scheduler; remember a TypeError that its own code raises."""
        if self._raised is not None:
            raise self._raised
        step = self._scheduler.step  # type: ignore[attr-defined]
        try:
            step(*args, **kwargs)
        except TypeError as error:
            with contextlib.suppress(TypeError, ValueError):  # arguments that do not fit are DeepSpeed's to change
                inspect.signature(step).bind(*args, **kwargs)
                self._raised = error
            raise


def take_model_step(call: Call) -> None:
    """Take one update, and raise a TypeError of the scheduler, which DeepSpeed would hide.

    If stepping the scheduler raises any TypeError, DeepSpeed calls `step(train_batch_size)` instead
    (`_take_model_step`, deepspeed/runtime/engine.py, 0.14.5 to 0.19.8): a schedule whose function fails would jump to
    that position. There is no extension point between the optimizer's step and the scheduler's.
    """
    engine: DeepSpeedEngine = call["self"]
    scheduler = engine.lr_scheduler
    if not engine.global_steps:
        _refuse_given(engine)
    if scheduler is None:
        call()
        return
    engine.lr_scheduler = _StepGuard(scheduler)
    try:
        call()
    finally:
        engine.lr_scheduler = scheduler


Files = frozenset[tuple[str, int, int]]
"""The files of a folder by name, size and time; they identify a folder that was renamed, or is found by `latest`."""

_SAVES: weakref.WeakKeyDictionary[DeepSpeedEngine, set[Files]] = weakref.WeakKeyDictionary()


def save_checkpoint(call: Call) -> object:
    """Save as DeepSpeed does; rank 0 notes the written files if there is a resume policy."""

    def note(engine: DeepSpeedEngine, tag: object) -> None:
        policy = _policy_of(engine)
        files = _files(
            Path(str(call["save_dir"]), str(tag if tag is not None else f"global_step{engine.global_steps}"))
        )
        if not policy.is_default and files:
            _SAVES.setdefault(engine, set()).add(files)

    result = call()
    if rank() == 0:
        attempt(lambda: note(call["self"], call["tag"]))
    return result


def was_saved_by(engine: DeepSpeedEngine, load_dir: str, tag: object, *, universal: bool) -> bool:
    """True if this engine wrote the files of a tag, or of the latest one. For rank 0.

    Loading such a checkpoint (the best one, at the end) is no resume, unless another run has overwritten it.
    """
    tag = tag if tag is not None else latest_tag(load_dir, *tag_files(universal=universal))
    is_own = tag is not None and any(saved <= _files(Path(load_dir, str(tag))) for saved in _SAVES.get(engine, ()))
    if is_own:
        logger.info("%s holds what this run has saved: it is loaded as it is, without the resume policy", load_dir)
    return is_own


def _files(folder: Path) -> Files:
    if not folder.is_dir():
        return frozenset()
    with os.scandir(folder) as entries:
        files = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    return frozenset((name, status.st_size, status.st_mtime_ns) for name, status in files)


_OPTIMIZER_UNREAD = (
    "weight decay, and learning rates that the scheduler does not store, were taken from the saved DeepSpeed JSON or "
    "from this run, because the optimizer's files were not opened"
)
AWAITS_STATE = (
    "a scheduler that the engine does not own has not been given its state yet and is at its initial position; the "
    "resume policy will be applied when the script loads the scheduler's state"
)
_COUNTS_BATCHES = (
    "the scheduler's position ({position}) counts batches of all {then} ranks, {updates} updates, as accelerate steps: "
    "under another data-parallel size the same position is another update; where the script's lengths are multiples of "
    "the number of ranks, give the scheduler its state with last_epoch {moved}"
)
_COUNTS_MICRO_BATCHES = (
    "the scheduler's position ({position}) counts micro batches, {then} for each of {updates} updates, and an update "
    "of this run has {now}, so the same position is a different update; if the script steps the scheduler with each "
    "micro batch, give the scheduler the state that it was built with, but with last_epoch {moved}"
)
_WITHOUT_MOMENTS = (
    "weights were loaded without optimizer states into a run that has stepped: its moments and step counts, which are "
    "not of these weights, {}"
)
_BEGIN_ANEW, _STAY = "begin anew", 'stay; to begin them anew, leave out "enabled": false, or build the engine anew'
UNHOOKED = (
    "the hooks are not installed, so a scheduler that the engine does not own takes its saved state as it is, whatever "
    "the resume policy says: import ds_reshard.auto, or hand the scheduler to deepspeed.initialize"
)


def report(engine: DeepSpeedEngine) -> ResumeReport:
    """Return the report of the last load: iteration, schedule, param groups, optimizer, data, layout and batch size."""
    this_run = run_values(engine)
    last = this_run.last
    assert last is not None and last.saved is not None
    saved, policy = last.saved, last.policy
    rows = tuple(Row.of(*values) for values in _rows(engine, last, saved))
    warnings = [*batch_size_warning(saved.batch[0], engine.train_batch_size()), *_unused_rate_warnings(engine, policy)]
    if not policy.keeps_iteration and not policy.finetune:
        warnings.append("the iteration starts again at 0: later saves may overwrite earlier tags of the same folder")
    scheduled = _schedule_resume(engine, policy, saved).scheduled
    if engine.lr_scheduler is None and scheduled and not last.external and not policy.is_default:
        warnings.append(AWAITS_STATE)
    warnings += _batch_count_warnings(engine, last)
    if REGISTRY.active("deepspeed") is None and (policy.scheduler != "host" or policy.places_schedule):
        warnings.append(UNHOOKED)
    if policy.scheduler == "checkpoint" and not policy.loads_masters and not saved.groups:
        warnings.append(_OPTIMIZER_UNREAD)
    if last.had_moments or (last.states is not None and last.states[MOMENTS] == KEPT):
        warnings.append(_WITHOUT_MOMENTS.format(_BEGIN_ANEW if last.had_moments else _STAY))
    return ResumeReport(host="deepspeed", checkpoint=saved.where, rows=rows, warnings=tuple(warnings))


def _rows(
    engine: DeepSpeedEngine, last: Resume, saved: SavedValues
) -> Iterator[tuple[str, object, object, object, str]]:
    """Yield the rows of the report: name, value in the checkpoint, value of this run, value used, and why."""
    policy, this_run = last.policy, run_values(engine)
    iteration, samples, before = last.before
    yield "iteration", saved.iteration, iteration, engine.global_steps, because(policy, "iteration")
    yield "samples", saved.samples, samples, engine.global_samples, because(policy, "iteration")
    scheduler, position = engine.lr_scheduler, saved.position if saved.scheduler is not None else None
    if last.external:
        scheduler, position = list(last.external.items())[-1]
        before = beginning_of(scheduler).position
    used = position_of(scheduler) if scheduler is not None else None
    yield "schedule position", position, before, used, because(policy, "position")
    for number, (group, own_group) in enumerate(zip(live_groups(engine), this_run.groups, strict=True)):
        saved_group = saved.groups.get(number, {})
        for name in ("lr", "min_lr", "weight_decay", "betas", "eps", "momentum"):
            if name in group:
                why = because(policy, "schedule" if name in SCHEDULED else "", name)
                yield f"group {number}: {name}", saved_group.get(name), own_group.get(name), group[name], why
    clip = getattr(engine.optimizer, "clip_grad", engine.gradient_clipping())
    yield "clip_grad", saved.clip_grad, this_run.clip_grad, clip, because(policy, "clip_grad")
    for name, is_loaded in {MASTERS: last.request.load_optimizer, MOMENTS: last.request.load_moments}.items():
        why = because(policy, "optimizer")
        why = "arguments of load_checkpoint" if not is_loaded and why == "host" else why
        expected = FROM_CHECKPOINT if is_loaded and saved.has(name) else ANEW[name]
        used_states = last.states[name] if last.states is not None else expected
        yield name, (saved.states or {}).get(name), ANEW[name], used_states, why
    random = ("this run", "--finetune") if policy.finetune else ("the script's own", "DeepSpeed stores none")
    yield "rng", None, "this run", *random
    data = "from its start" if policy.dataloader == "reset" else "the script's own"
    yield "data", None, "from its start", data, because(policy, "dataloader")
    new_layout = int(engine.zero_optimization_stage()), engine.seq_dp_world_size
    yield "stage and dp", (saved.stage, saved.dp), new_layout, new_layout, "this run"
    total, steps = saved.batch
    alone = engine.seq_dp_world_size == engine.dp_world_size  # else ranks share a micro batch, and none is implied
    accumulation, batch = engine.gradient_accumulation_steps(), engine.train_batch_size()
    yield "accumulation", steps if alone else None, accumulation, accumulation, "this run"
    yield "global batch size", total, batch, batch, "this run"
    if last.proof is not None:
        yield "fingerprints", None, None, last.proof, '"verify": "fingerprint"'


def _unused_rate_warnings(engine: DeepSpeedEngine, policy: ResumePolicy) -> Iterator[str]:
    """Yield a warning for each param group whose rate of this run is lost although no policy asked for that.

    A scheduler of DeepSpeed sets this run's rates from the second update on; torch's schedulers start at `initial_lr`.
    """
    groups, scheduler = live_groups(engine), engine.lr_scheduler
    if policy.scheduler != "host":
        return
    if any(schedulers.kind_of(one) == DEEPSPEED for one in (scheduler, *external_schedulers(engine))):
        has_stepped = schedulers.kind_of(scheduler) == DEEPSPEED and scheduler.last_batch_iteration >= 0
        for number, (group, rate) in enumerate(
            zip(groups, map(float, scheduler.get_lr() if has_stepped else ()), strict=False)
        ):
            if group.get("lr") != rate:
                yield rate_warning(number, rate, group.get("lr"), when=" by the first update")
        return
    for number, (group, own_group) in enumerate(zip(groups, run_values(engine).groups, strict=True)):
        name = "initial_lr" if "initial_lr" in own_group else "lr"
        if group.get(name) != own_group.get(name):
            yield rate_warning(number, own_group.get(name), group.get(name))


def _batch_count_warnings(engine: DeepSpeedEngine, last: Resume) -> list[str]:
    """Return warnings if an external scheduler's position counts batches, and an update of this run has more or fewer.

    The position may count the batches of all ranks, or the micro batches of one rank.
    """
    assert last.saved is not None
    saved, updates = last.saved, (last.saved.iteration or 0) - last.saved.skipped
    position = list(last.external.values())[-1] if last.external else None
    if not updates or schedulers.is_counted_elsewhere():
        return []
    counts = [
        (_COUNTS_BATCHES, saved.dp, engine.seq_dp_world_size),
        (_COUNTS_MICRO_BATCHES, saved.batch[1] or 1, engine.gradient_accumulation_steps()),
    ]
    return [
        text.format(position=position, updates=updates, then=then, now=now, moved=updates * now)
        for text, then, now in counts
        if then not in (1, now) and position == updates * then
    ]
