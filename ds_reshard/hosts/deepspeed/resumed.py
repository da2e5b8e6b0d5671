"""One load under a resume policy: refused before, applied after, reported. Every method is collective."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ds_reshard.errors import ConfigError, UnsupportedLayout, raise_faults
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
from ds_reshard.operations.ranks import agree, attempt, broadcast, rank
from ds_reshard.resume import policy_sources
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
    """What the policy makes of the caller's `request`; `request` is then what the load itself is asked for."""

    def __init__(self, engine: DeepSpeedEngine, policy: ResumePolicy, request: Request) -> None:
        self.policy = policy
        self.asked = request
        self.request = resume.narrowed(request, policy)
        self.proof: str | None = None
        self._engine = engine
        self._saved: Saved | None = None
        self._beside: resume.Beside | None = None
        self._subject = f"loading {request.load_dir}"
        if not request.module_only:
            resume.own_values(engine)

    def refuse(self) -> None:
        """Raise what cannot be done of the policy with this engine, whatever the checkpoint."""
        if self.policy.is_default:
            return
        found, faults, cause = attempt(lambda: refuse.refusals(self._engine, self.asked, self.policy))
        agree([*faults, *(found or [])], subject=self._subject, cause=cause)

    def without_files(self, look: Callable[[], Aside]) -> None:
        """The load is DeepSpeed's, of tensors that are not read here: raise what then cannot be done.

        `look` tells rank 0 what the model file says beside them.
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
        agree(faults, subject=self._subject)
        aside = broadcast(look() if rank() == 0 else Aside())
        saved, faults, cause = attempt(lambda: self._aside(aside))
        self._saved = saved
        agree([*aside.faults, *faults] if rank() == 0 else faults, subject=self._subject, cause=cause)

    def _aside(self, aside: Aside) -> Saved | None:
        engine, settings = self._engine, parse_settings(self._engine._config._param_dict)
        if aside.entries is None:
            return None
        return saved_of(
            aside.entries, settings, where=aside.folder, stage=int(engine.zero_optimization_stage()), scheduler=True
        )

    def read(self, live: LiveOptimizer | None, checkpoint: ZeroCheckpoint, settings: Settings) -> None:
        """Read the checkpoint's facts, and raise what it cannot give of what the policy asks for."""
        engine, policy = self._engine, self.policy
        wants = engine.lr_scheduler is not None or policy.scheduler in ("checkpoint", "strict")
        saved, faults, cause = attempt(lambda: read_saved(engine, live, checkpoint, settings, scheduler=wants))
        self._saved = saved
        if policy.is_default:
            return  # the facts are for the report alone; what is wrong with them, the load itself will say
        if saved is not None:
            found, more, failed = attempt(lambda: refuse.checkpoint_faults(engine, saved, policy))
            faults, cause = faults + more + (found or []), cause or failed
        agree(faults, subject=self._subject, cause=cause)

    def finish(self, result: Result) -> Result:
        """Apply the policy to the engine that was loaded, and publish the report; the load's own result."""
        if self.proof == LEFT_TO_DEEPSPEED and rank() == 0:
            logger.warning("%s: %s", self._subject, self.proof)
        if result[0] is None or self.asked.module_only:
            return result
        engine, policy = self._engine, self.policy
        saved = self._saved or self._from_engine()
        if policy.is_default:
            resume.loaded(engine, self._last(saved))
        else:
            refuse_use(engine, f"the resume policy was not applied after {self._subject}")
            _, faults, cause = attempt(lambda: self._apply(saved))
            agree(faults, subject=self._subject, cause=cause)
            restore_use(engine)
        _, faults, cause = attempt(self._report) if rank() == 0 else (None, [], None)
        if policy.report is not None:
            agree(faults, subject=f"resume report {policy.report}", cause=cause)
        elif faults:
            logger.error("no resume report: %s", "; ".join(fault.line() for fault in faults))
        return result

    def _apply(self, saved: Saved) -> None:
        resume.apply(self._engine, saved, self.policy)
        resume.loaded(self._engine, self._last(saved))
        self._beside = take_given(self._engine)

    def _last(self, saved: Saved) -> resume.Last:
        request, iteration = replace(self.request, custom_load_fn=None), self._engine.global_steps
        return resume.Last(policy=self.policy, saved=saved, request=request, iteration=iteration, proof=self.proof)

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
