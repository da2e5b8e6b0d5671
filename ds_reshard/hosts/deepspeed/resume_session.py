"""One load under a resume policy: refused before, applied after, reported.

Everything that a policy asks and that this engine or this checkpoint cannot give is found before anything changes.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ds_reshard.errors import ConfigError, Fault, ReshardError, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.hooks import Call
from ds_reshard.hosts.deepspeed import resume_values
from ds_reshard.hosts.deepspeed.entries import MEND, Request
from ds_reshard.hosts.deepspeed.external_schedulers import (
    Pairs,
    code_faults,
    compared,
    continuation_faults,
    fault,
    mismatches,
    position_alone,
    rate_fault,
    reduced,
    refused,
    take_given,
)
from ds_reshard.hosts.deepspeed.find_checkpoint import Aside, latest_tag, tag_files
from ds_reshard.hosts.deepspeed.live import live_kind, refuse_use, restore_use
from ds_reshard.hosts.deepspeed.move import states_left
from ds_reshard.hosts.deepspeed.prepare import SavedGroups
from ds_reshard.hosts.deepspeed.resume_values import (
    WAITING,
    Own,
    Saved,
    base_rates,
    given,
    own_values,
    read_saved,
    report,
    saved_of,
    saved_values,
)
from ds_reshard.hosts.deepspeed.settings import Settings, parse_settings
from ds_reshard.operations.ranks import Steps, agree, attempt, rank
from ds_reshard.resume import policy_sources, schedulers
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.report import publish, say_applied, unwritable
from ds_reshard.resume.schedulers import DEEPSPEED, PLATEAU, UNKNOWN, position_of

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


logger = logging.getLogger("ds_reshard")

Result = tuple[object, object]


def policy_of(engine: DeepSpeedEngine, settings: Settings, *, module_only: bool) -> ResumePolicy:
    """The policy of this process and of this engine's JSON.

    The default one for what is no resume: `load_module_only`, and engines without an optimizer (a reference model).
    """
    policy = policy_sources.asked_policy(settings.resume)
    if module_only or live_kind(engine) == "none":
        return ResumePolicy(report=policy.report)
    if not settings.enabled and not policy.is_default:
        fault = ConfigError.fault(
            "ds_reshard.enabled",
            "is false, and a resume policy was asked for: it cannot be applied",
            mend='set "enabled": true, or leave out the resume policy',
        )
        raise_faults([fault], subject="DeepSpeed config")
    return policy


LEFT_TO_DEEPSPEED = "no tensor was proved: DeepSpeed loaded it"


class Resume:
    """What the policy makes of the caller's `request`; `request` is then what the load itself is asked for.

    `proof` says how many tensors were proved, None where nobody asked for it.
    """

    def __init__(self, engine: DeepSpeedEngine, policy: ResumePolicy, request: Request, *, prove: bool) -> None:
        self.policy = policy
        self.asked = request
        self.request = resume_values.narrowed(request, policy)
        self.proof = LEFT_TO_DEEPSPEED if prove else None
        self._engine = engine
        self._saved: Saved | None = None
        self._beside: resume_values.Beside | None = None
        self._subject = f"loading {request.load_dir}"
        self._before: tuple[int, int, int | None] = (0, 0, None)
        if not request.module_only:
            resume_values.own_values(engine)
            position = position_of(engine.lr_scheduler) if engine.lr_scheduler is not None else None
            self._before = engine.global_steps, engine.global_samples, position

    def refuse(self) -> None:
        """Raise what cannot be done of the policy with this engine, whatever the checkpoint."""
        if not self.policy.is_default:
            raise_faults(refusals(self._engine, self.asked, self.policy), subject=self._subject)

    def _refuse_place(self) -> None:
        """Raise where the report of a load has no place on this machine; where a load is foreseen, it is another."""
        import torch.distributed as dist

        if dist.is_initialized() and rank() == 0 and not self.asked.module_only:
            raise_faults(unwritable(self.policy.report), subject=self._subject)

    def without_files(self, aside: Aside | None) -> None:
        """The load is DeepSpeed's, of tensors that are not read here: raise what then cannot be done.

        `aside` is what the model file says beside them.
        """
        self._refuse_place()
        if self.policy.is_default:
            return
        unread = {
            "scheduler": self.policy.scheduler in ("checkpoint", "strict"),
            "optimizer": self.policy.optimizer != "load" or self.policy.finetune,
        }
        faults = [
            UnsupportedLayout.fault(
                self.asked.load_dir,
                f"is of a kind that is left to DeepSpeed (pipeline, experts, tensor parallel): {name} "
                f'"{"finetune" if self.policy.finetune else getattr(self.policy, name)}" cannot be applied to it',
                mend="convert or save it as a plain ZeRO checkpoint, or leave that out of the resume policy",
            )
            for name, present in unread.items()
            if present
        ]
        aside = aside or Aside()
        raise_faults(faults or aside.faults, subject=self._subject)
        if aside.entries is not None:
            settings, stage = parse_settings(self._engine._config._param_dict), self._engine.zero_optimization_stage()
            self._saved = saved_of(aside.entries, settings, where=aside.folder, stage=int(stage), scheduler=True)

    def read(self, checkpoint: ZeroCheckpoint, groups: SavedGroups, settings: Settings) -> None:
        """Read the checkpoint's facts, and raise what it cannot give of what the policy asks for."""
        self._refuse_place()
        engine, policy = self._engine, self.policy
        wants = engine.lr_scheduler is not None or policy.scheduler in ("checkpoint", "strict")
        saved, _, cause = attempt(lambda: read_saved(checkpoint, groups, settings, scheduler=wants))
        self._saved = saved
        if policy.is_default:
            return  # the facts are for the report alone; what is wrong with them, the load itself will say
        if saved is None:
            assert cause is not None
            raise cause
        raise_faults(checkpoint_faults(engine, saved, policy), subject=self._subject)

    def after_deepspeed(self, result: Result) -> Result:
        """Apply the policy to the engine that DeepSpeed has loaded; its own result. Collective."""
        if self.proof == LEFT_TO_DEEPSPEED and rank() == 0:
            logger.warning("%s: %s", self._subject, self.proof)
        steps = Steps()
        if not self.policy.is_default and result[0] is not None and not self.asked.module_only:
            refuse_use(self._engine, f"the resume policy was not applied after {self._subject}")
            self.apply(steps)
            restore_use(self._engine)
        elif result[0] is not None and not self.asked.module_only:
            self.note()
        return result

    def apply(self, steps: Steps) -> None:
        """Apply the policy to the engine that was loaded, once all ranks' steps have gone well. Collective."""
        before = resume_values.own_values(self._engine).last if not self.asked.module_only else None
        steps.take(self._apply, subject=self._subject)
        try:
            steps.agree()
        except ReshardError:
            if not self.asked.module_only:
                resume_values.loaded(self._engine, before)
            raise

    def _apply(self) -> None:
        if self.asked.module_only:
            return
        if not self.policy.is_default:
            resume_values.apply(self._engine, self._saved or self._from_engine(), self.policy)
        self.note()
        if not self.policy.is_default:
            self._beside = take_given(self._engine)

    def note(self) -> None:
        request, iteration = replace(self.request, custom_load_fn=None), self._engine.global_steps
        saved = self._saved or self._from_engine()
        last = resume_values.Last(
            policy=self.policy, saved=saved, request=request, iteration=iteration, before=self._before, proof=self.proof
        )
        resume_values.loaded(self._engine, last)

    def report(self, result: Result) -> Result:
        """Publish the report of a load that has ended; the load's own result. Collective where a file was asked for."""
        if result[0] is None or self.asked.module_only:
            return result
        policy_sources.note_applied(self.policy)
        _, faults, cause = attempt(self._report) if rank() == 0 else (None, [], None)
        if self.policy.report is not None:
            agree(faults, subject=f"resume report {self.policy.report}", cause=cause)
        elif faults:
            logger.error("no resume report: %s", "; ".join(fault.line() for fault in faults))
        return result

    def _report(self) -> None:
        last = resume_values.own_values(self._engine).last
        assert last is not None, "the load has noted it"
        resume_values.loaded(self._engine, replace(last, left=states_left(self._engine, last)))
        made = report(self._engine, resume_values.own_values(self._engine), self._beside)
        logger.info("%s", made)
        for warning in made.warnings:
            logger.warning("%s", warning)
        waiting = "; a scheduler beside the engine sets it anew with its state" if WAITING in made.warnings else ""
        say_applied(made, self.policy, reserve=waiting)
        publish(made, path=self.policy.report)

    def _from_engine(self) -> Saved:
        """What the engine shows after DeepSpeed's own load of files that are not read here."""
        engine = self._engine
        scheduler = engine.lr_scheduler
        position = position_of(scheduler) if scheduler is not None else None
        state = {"last_epoch": position} if position is not None else None
        return Saved(
            where=self.asked.load_dir,
            stage=int(engine.zero_optimization_stage()),
            dp=int(engine.loaded_checkpoint_dp_world_size or engine.seq_dp_world_size),
            scheduler=state,
            iteration=engine.global_steps,
            samples=engine.global_samples,
            skipped=engine.skipped_steps,
        )


ENGINE_VALUES = ("clip_grad", "loss_scale")
# What decides which states an optimizer has or how it computes, and what schedulers keep in the groups.
NOT_HYPERPARAMETERS = frozenset(
    {
        "amsgrad",
        "capturable",
        "differentiable",
        "foreach",
        "fused",
        "initial_lr",
        "max_lr",
        "min_lr",
        "swa_lr",
        "max_momentum",
        "base_momentum",
        "maximize",
        "decoupled_weight_decay",
    }
)


def refusals(engine: DeepSpeedEngine, request: Request, policy: ResumePolicy) -> list[Fault]:
    """What this engine cannot do of a policy, whatever the checkpoint."""
    return [
        *_against_arguments(engine, request, policy),
        *_about_the_schedule(engine, policy),
        *_about_hyperparameters(engine, policy),
    ]


def _against_arguments(engine: DeepSpeedEngine, request: Request, policy: ResumePolicy) -> list[Fault]:
    """Where the policy contradicts the arguments of `load_checkpoint`, the configuration or the engine's own past."""
    own = own_values(engine)
    faults: list[Fault] = []
    own_scheduler = engine.lr_scheduler is not None  # Lightning never asks for the state of one: it steps its own
    if policy.scheduler in ("override", "checkpoint", "strict") and not request.scheduler and own_scheduler:
        faults.append(
            fault(
                "load_checkpoint(load_lr_scheduler_states=False)",
                f'contradicts scheduler "{policy.scheduler}": one leaves the schedule out, the other asks for it',
                'leave out load_lr_scheduler_states=False, or ask for scheduler "reset" (--no-load-lr-state)',
            )
        )
    if not request.optimizer and (policy.optimizer == "masters" or policy.scheduler in ("checkpoint", "strict")):
        asked_for = "masters" if policy.optimizer == "masters" else f'scheduler "{policy.scheduler}"'
        faults.append(
            fault(
                "load_checkpoint(load_optimizer_states=False)",
                f"contradicts {asked_for}, which is in the optimizer's files",
                "leave out load_optimizer_states=False, or that part of the resume policy",
            )
        )
    if policy.optimizer == "masters" and not engine.zero_load_from_fp32_weights():
        what = "makes masters from the 16-bit weights, and --load-masters-only asks for the saved ones"
        mend = 'set "load_from_fp32_weights": true, or use --no-load-optim'
        faults.append(fault("zero_optimization.load_from_fp32_weights: false", what, mend))
    if not policy.loads_moments and (own.begun or own.last is not None or engine.global_steps > 0):
        what = "has taken steps or loaded before: its moments are not fresh, and are not made so"
        faults.append(fault("the running engine", what, "build the engine anew for a load without moments"))
    if policy.dataloader == "reset" and own.sampler is None and not policy_sources.adopted("dataloader"):
        what = "DeepSpeed stores a data position for curriculum learning alone: there is nothing to reset"
        faults.append(fault("dataloader", what, "leave out --reset-dataloader; the script starts its own data anew"))
    if not policy.rng and not policy.finetune and not policy_sources.adopted("rng"):
        what = "DeepSpeed's checkpoints hold no random states: there is nothing to leave out"
        mend = "leave out --no-load-rng; those that the script or accelerate restores may be set anew after the load"
        faults.append(fault("rng", what, mend))
    return faults


def _about_the_schedule(engine: DeepSpeedEngine, policy: ResumePolicy) -> list[Fault]:
    own, scheduler = own_values(engine), engine.lr_scheduler
    faults: list[Fault] = []
    if scheduler is not None and policy.places_schedule:
        if schedulers.kind_of(scheduler) in (PLATEAU, UNKNOWN):
            if policy.scheduler == "override":
                faults.append(fault("lr_scheduler", schedulers.refusal(scheduler), "see above", "UnsupportedLayout"))
        elif own.begun or (own.scheduler is not None and own.scheduler.position):
            faults.append(
                fault(
                    "lr_scheduler",
                    "had taken steps before the first load, so the beginning of this run's schedule is gone",
                    "call load_checkpoint before the first step, with a scheduler at its beginning",
                )
            )
    for other in given(engine):
        faults += refused(engine, other, other.state_dict(), policy)  # type: ignore[attr-defined]
    if policy.takes("lr") and (scheduler is not None or own.scheduled) and policy.scheduler != "override":
        faults.append(rate_fault())
    return faults


def _about_hyperparameters(engine: DeepSpeedEngine, policy: ResumePolicy) -> list[Fault]:
    own = own_values(engine)
    faults: list[Fault] = []
    known = ({name for group in own.groups for name in group} | set(ENGINE_VALUES)) - NOT_HYPERPARAMETERS
    for name in policy.hyperparameters:
        if name not in known:
            faults.append(
                fault(
                    f"hyperparameters: {name}",
                    "is no hyper-parameter of this run's optimizer or engine",
                    f"name some of {', '.join(sorted(known - {'lr'}))}",
                )
            )
    if policy.takes("loss_scale") and own.loss_scaler is None:
        faults.append(fault("hyperparameters: loss_scale", "this engine scales no loss", "leave loss_scale out"))
    return faults


def checkpoint_faults(engine: DeepSpeedEngine, saved: Saved, policy: ResumePolicy) -> list[Fault]:
    """What the checkpoint cannot give of what a policy asks for, and under "strict" every difference."""
    own, scheduler = own_values(engine), engine.lr_scheduler
    if policy.scheduler == "checkpoint":
        return _continuation_faults(engine, saved, policy)
    if policy.scheduler == "strict":
        return _incomparable(engine, saved) or _differences(own, scheduler, saved)
    if scheduler is not None and policy.scheduler == "override" and policy.keeps_position:
        return schedulers.beyond(scheduler, saved.position)
    return []


def _continuation_faults(engine: DeepSpeedEngine, saved: Saved, policy: ResumePolicy) -> list[Fault]:
    scheduler = engine.lr_scheduler
    groups = own_values(engine).groups
    if not policy.loads_masters and saved_values(saved, len(groups)) is None:
        why = "the optimizer's files, which hold what each param group had, are not opened"
        if scheduler is None:
            return [_unknown_rates(saved, why)]
    if scheduler is None and saved.scheduler is None:
        return []
    if scheduler is None or saved.scheduler is None:
        without, has = ("this run", "the checkpoint") if scheduler is None else ("the checkpoint", "this run")
        return [fault(saved.where, f'{without} has no scheduler and {has} has one: "checkpoint" needs both', MEND)]
    if schedulers.kind_of(scheduler) == DEEPSPEED:
        return _undescribed(engine, scheduler, saved)
    faults = continuation_faults(scheduler, saved.scheduler, saved.where)
    if not faults and not policy.loads_masters and len(saved.groups) < len(groups):
        return _unread(groups, scheduler, saved)
    return faults


def _unread(groups: Sequence[Mapping[str, object]], scheduler: object, saved: Saved) -> list[Fault]:
    """Where the optimizer's files are not opened: what a torch scheduler keeps there, and a JSON that it belies."""
    kept = schedulers.kept_in_groups(scheduler)
    if kept:
        what = f"{type(scheduler).__name__} keeps {', '.join(sorted(kept))} in the optimizer's files, left unopened"
        return [_unknown_rates(saved, what)]
    rates, params = schedulers.base_lrs_in(saved.scheduler or {}), saved.optimizer_params
    if len(groups) == 1 and rates and "lr" in params and rates[0] != params["lr"]:
        what = "the saved DeepSpeed JSON does not describe the optimizer that ran, and its own files are not opened"
        return [
            UnsupportedLayout.fault(
                saved.where,
                what,
                f"lr {rates[0]!r}, as the scheduler",
                f"lr {params['lr']!r}",
                mend="load the optimizer, or use --override-opt-param-scheduler",
            )
        ]
    return []


def _undescribed(engine: DeepSpeedEngine, scheduler: object, saved: Saved) -> list[Fault]:
    """Where the saved JSON does not describe the scheduler of DeepSpeed that ran: it stores its position alone.

    A JSON may lie: the script built the scheduler, or the run resumed another one's schedule. So the rates that it
    gives at the saved position are compared with the saved ones, where those were read.
    """
    name, params = saved.scheduler_section
    mend = "use --override-opt-param-scheduler with the values of the saving run, or --no-load-lr-state"
    what = "a scheduler of DeepSpeed stores its position alone, and what configured it is not in the saved JSON"
    count = len(own_values(engine).groups)
    if engine.client_lr_scheduler is not None or name != type(scheduler).__name__ or params is None:
        found = name or "none"
        return [
            UnsupportedLayout.fault(
                saved.where,
                what,
                f"{type(scheduler).__name__} in the saved and in this run's DeepSpeed JSON",
                found,
                mend=mend,
            )
        ]
    built_for = [0.0] * count
    if schedulers.needs_rates(scheduler, params):
        bases = base_rates(scheduler, saved, params, count)
        if bases is None:
            return [_unknown_rates(saved, f"{name} was built from the optimizer's learning rates")]
        built_for = bases
    rates = [float(str(saved.groups[n]["lr"])) for n in range(count) if n in saved.groups]
    if len(rates) == count and schedulers.rates_at(scheduler, params, built_for, saved.position) != rates:
        return [
            fault(saved.where, f"{what}: {name} there gives other rates than were saved", mend, "UnsupportedLayout")
        ]
    return []


def _unknown_rates(saved: Saved, why: str) -> Fault:
    return UnsupportedLayout.fault(
        saved.where,
        f'scheduler "checkpoint" needs the rates and weight decay of the saving run: {why}',
        "one param group, described in the saved DeepSpeed JSON",
        "several param groups, or an optimizer that the script built",
        mend="use --override-opt-param-scheduler with the learning rate of the saving run, or load the optimizer",
    )


def _incomparable(engine: DeepSpeedEngine, saved: Saved) -> list[Fault]:
    """What "strict" cannot compare, and so must not pass."""
    own, scheduler = own_values(engine), engine.lr_scheduler
    mend = "load the optimizer, or say with another flag whose schedule is right"
    if any(number not in saved.groups for number in range(len(own.groups))):
        where = "the optimizer's files, which are not opened, or differ within a param group of this run"
        what = f"rates and weight decay cannot be compared: they are in {where}"
        return [fault(saved.where, what, mend, "UnsupportedLayout")]
    if scheduler is not None and schedulers.has_code(scheduler):
        return code_faults(scheduler, saved.where)
    if scheduler is not None and saved.scheduler is not None and schedulers.kind_of(scheduler) == DEEPSPEED:
        name, params = saved.scheduler_section
        if engine.client_lr_scheduler is not None or name is None:
            return [position_alone(saved.where)]
        return _undescribed(engine, scheduler, saved) if name == type(scheduler).__name__ and params else []
    return []


def _differences(own: Own, scheduler: object, saved: Saved) -> list[Fault]:
    """Every field of schedule, learning rate and weight decay that differs.

    Where a torch scheduler beside the engine keeps each group's own rate (`initial_lr`) in both runs, that is compared
    here, and its schedule when it is given its state.
    """
    pairs: Pairs = {}
    for number, group in enumerate(own.groups):
        hyper = saved.groups.get(number)
        if hyper is not None:
            kept = {"initial_lr", "max_lr", "min_lr", "swa_lr"} & set(group) & set(hyper)
            both = kept | (
                {"weight_decay"} if scheduler is not None or "initial_lr" in kept else {"lr", "weight_decay"}
            )
            pairs |= {f"param group {number}: {name}": (hyper.get(name), group.get(name)) for name in sorted(both)}
    ours = type(scheduler).__name__ if scheduler is not None else "none"
    theirs, params = saved.scheduler_section if saved.scheduler is not None else ("none", None)
    if scheduler is None or saved.scheduler is None:
        pairs["scheduler"] = (theirs or "a scheduler", ours)
    elif schedulers.kind_of(scheduler) == DEEPSPEED:
        pairs["scheduler"] = (theirs, ours)
        if theirs == ours and params is not None:
            rates = base_rates(scheduler, saved, params, len(own.groups)) or [0.0] * len(own.groups)
            built_for = [{**group, "lr": rate} for group, rate in zip(own.groups, rates, strict=True)]
            other = schedulers.configuration(schedulers.like(scheduler, params, built_for))
            pairs |= compared(other, schedulers.configuration(scheduler))
    else:
        pairs |= compared(schedulers.saved_configuration(saved.scheduler), schedulers.configuration(scheduler))
        if schedulers.kind_of(scheduler) == PLATEAU:
            rates_now = [saved.groups.get(number, {}).get("lr") for number in range(len(own.groups))]
            pairs |= reduced(saved.scheduler, [group["lr"] for group in own.groups], rates_now)
    return mismatches(pairs)


Prints = frozenset[tuple[str, int, int]]

_SAVED: weakref.WeakKeyDictionary[DeepSpeedEngine, set[Prints]] = weakref.WeakKeyDictionary()


def save_checkpoint(call: Call) -> object:
    """Save as DeepSpeed does; rank 0 notes what was written, where a resume policy was asked for."""
    result = call()
    if rank() == 0:
        attempt(lambda: _note(call["self"], str(call["save_dir"]), call["tag"]))
    return result


def _note(engine: DeepSpeedEngine, save_dir: str, tag: object) -> None:
    folder = Path(save_dir, str(tag) if tag is not None else f"global_step{engine.global_steps}")
    settings = parse_settings(engine._config._param_dict)
    if not policy_of(engine, settings, module_only=False).is_default and (seen := _prints(folder)):
        _SAVED.setdefault(engine, set()).add(seen)


def saved_by(engine: DeepSpeedEngine, load_dir: str, tag: object, *, universal: bool) -> bool:
    """Rank 0: whether the files of a tag, or of the latest one, are those that this engine wrote.

    To load such a checkpoint again (the best one, at the end) is no resume. Files are known by name, size and time, so
    that a folder that was renamed, or reached through `latest`, is known, and a tag that somebody else wrote again is
    not.
    """
    tag = tag if tag is not None else latest_tag(load_dir, *tag_files(universal=universal))
    if tag is None:
        return False
    seen = _prints(Path(load_dir, str(tag)))
    own = any(noted <= seen for noted in _SAVED.get(engine, ()))
    if own:
        logger.info("%s holds what this run has saved: it is loaded as it is, without the resume policy", load_dir)
    return own


def _prints(folder: Path) -> Prints:
    if not folder.is_dir():
        return frozenset()
    with os.scandir(folder) as scan:
        found = [(entry.name, entry.stat()) for entry in scan if entry.is_file()]
    return frozenset((name, status.st_size, status.st_mtime_ns) for name, status in found)
