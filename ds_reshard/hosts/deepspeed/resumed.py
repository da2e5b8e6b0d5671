"""One load under a resume policy: refused before, applied after, reported. Every method is collective."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ds_reshard.errors import ConfigError, ReshardError, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.hosts.deepspeed import refuse, resume
from ds_reshard.hosts.deepspeed.entries import Request
from ds_reshard.hosts.deepspeed.live import LiveOptimizer, live_kind
from ds_reshard.hosts.deepspeed.look import Aside
from ds_reshard.hosts.deepspeed.resume_report import report
from ds_reshard.hosts.deepspeed.saved import Saved, read_saved, saved_of
from ds_reshard.hosts.deepspeed.settings import Settings, parse_settings
from ds_reshard.hosts.deepspeed.unowned import take_given
from ds_reshard.hosts.deepspeed.usable import refuse_use, restore_use
from ds_reshard.operations.ranks import Steps, agree, attempt, rank
from ds_reshard.resume import asked
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.report import publish
from ds_reshard.resume.schedulers import position_of

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

logger = logging.getLogger("ds_reshard")

Result = tuple[object, object]


def policy_of(engine: DeepSpeedEngine, settings: Settings, *, module_only: bool) -> ResumePolicy:
    """The policy of this process and of this engine's JSON.

    The default one for what is no resume: `load_module_only`, and engines without an optimizer (a reference model).
    """
    policy = asked.asked_policy(settings.resume)
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
        self.request = resume.narrowed(request, policy)
        self.proof = LEFT_TO_DEEPSPEED if prove else None
        self._engine = engine
        self._saved: Saved | None = None
        self._beside: resume.Beside | None = None
        self._subject = f"loading {request.load_dir}"
        if not request.module_only:
            resume.own_values(engine)

    def refuse(self) -> None:
        """Raise what cannot be done of the policy with this engine, whatever the checkpoint."""
        if not self.policy.is_default:
            raise_faults(refuse.refusals(self._engine, self.asked, self.policy), subject=self._subject)

    def without_files(self, aside: Aside | None) -> None:
        """The load is DeepSpeed's, of tensors that are not read here: raise what then cannot be done.

        `aside` is what the model file says beside them.
        """
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

    def read(self, live: LiveOptimizer | None, checkpoint: ZeroCheckpoint, settings: Settings) -> None:
        """Read the checkpoint's facts, and raise what it cannot give of what the policy asks for."""
        engine, policy = self._engine, self.policy
        wants = engine.lr_scheduler is not None or policy.scheduler in ("checkpoint", "strict")
        saved, _, cause = attempt(lambda: read_saved(engine, live, checkpoint, settings, scheduler=wants))
        self._saved = saved
        if policy.is_default:
            return  # the facts are for the report alone; what is wrong with them, the load itself will say
        if saved is None:
            assert cause is not None
            raise cause
        raise_faults(refuse.checkpoint_faults(engine, saved, policy), subject=self._subject)

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
            self._note()
        return result

    def apply(self, steps: Steps) -> None:
        """Apply the policy to the engine that was loaded, once all ranks' steps have gone well. Collective."""
        before = resume.own_values(self._engine).last if not self.asked.module_only else None
        steps.take(self._apply, subject=self._subject)
        try:
            steps.agree()
        except ReshardError:
            if not self.asked.module_only:
                resume.loaded(self._engine, before)
            raise

    def _apply(self) -> None:
        if self.asked.module_only:
            return
        if not self.policy.is_default:
            resume.apply(self._engine, self._saved or self._from_engine(), self.policy)
        self._note()
        if not self.policy.is_default:
            self._beside = take_given(self._engine)

    def _note(self) -> None:
        request, iteration = replace(self.request, custom_load_fn=None), self._engine.global_steps
        saved = self._saved or self._from_engine()
        last = resume.Last(policy=self.policy, saved=saved, request=request, iteration=iteration, proof=self.proof)
        resume.loaded(self._engine, last)

    def report(self, result: Result) -> Result:
        """Publish the report of a load that has ended; the load's own result. Collective where a file was asked for."""
        if result[0] is None or self.asked.module_only:
            return result
        _, faults, cause = attempt(self._report) if rank() == 0 else (None, [], None)
        if self.policy.report is not None:
            agree(faults, subject=f"resume report {self.policy.report}", cause=cause)
        elif faults:
            logger.error("no resume report: %s", "; ".join(fault.line() for fault in faults))
        return result

    def _report(self) -> None:
        made = report(self._engine, resume.own_values(self._engine), self._beside)
        logger.info("%s", made)
        for warning in made.warnings:
            logger.warning("%s", warning)
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
            dp=int(engine.loaded_checkpoint_dp_world_size or engine.dp_world_size),
            scheduler=state,
            iteration=engine.global_steps,
            samples=engine.global_samples,
            skipped=engine.skipped_steps,
        )
