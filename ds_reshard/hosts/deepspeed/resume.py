"""The resume policy on a DeepSpeed engine: what is loaded, and what this run's values replace.

The load itself, DeepSpeed's own or the direct one, is asked for no more than the policy wants; afterwards this
run's values, noted before its first load, are written back where the policy says so, and the scheduler is put
where it belongs. Everything that can be refused is refused before.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ds_reshard.hosts.deepspeed.beginnings import beginning_of
from ds_reshard.hosts.deepspeed.entries import Request
from ds_reshard.hosts.deepspeed.saved import Saved
from ds_reshard.resume import described, schedulers
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.schedulers import DEEPSPEED, UNKNOWN, Beginning, innermost, set_groups

if TYPE_CHECKING:
    from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
    from deepspeed.runtime.engine import DeepSpeedEngine

# Of a param group, what a schedule decides. `initial_lr` is where torch's schedulers keep a group's own rate.
SCHEDULED = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "weight_decay"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A scheduler beside the engine, and the position that its saved state had."""

    scheduler: object
    saved_position: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """The last load of an engine: its policy, what the checkpoint said, what was asked for, the iteration that it left.

    `proof` says how many tensors were proved, and `shared` what ranks passed on to each other, None where nobody asked
    for it. `placed` are the schedulers beside the engine that have taken a state since. Nothing here holds the engine.
    """

    policy: ResumePolicy
    saved: Saved
    request: Request
    iteration: int
    proof: str | None = None
    shared: str | None = None
    placed: weakref.WeakSet[object] = field(default_factory=weakref.WeakSet)


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """This run's own values, as they were before its first load, and the last load.

    `groups` are the param groups' values but the parameters; `begun` says that the engine had stepped before,
    so that the scheduler's beginning is not known. `sampler` is the state of a curriculum's data sampler.
    """

    groups: tuple[dict[str, object], ...]
    clip_grad: object
    loss_scaler: object
    scheduler: Beginning | None
    begun: bool
    sampler: object
    last: Last | None = None

    @property
    def scheduled(self) -> bool:
        """Whether a torch scheduler was built on this run's groups: it keeps each group's own rate there."""
        return any("initial_lr" in group for group in self.groups)


_OWN: weakref.WeakKeyDictionary[DeepSpeedEngine, Own] = weakref.WeakKeyDictionary()


def own_values(engine: DeepSpeedEngine) -> Own:
    """This run's values, noted when an engine is first asked for them."""
    if engine not in _OWN:
        scheduler = engine.lr_scheduler
        _OWN[engine] = Own(
            groups=tuple(
                copy.deepcopy({name: value for name, value in group.items() if name not in ("params", "step")})
                for group in live_groups(engine)
            ),
            clip_grad=getattr(engine.optimizer, "clip_grad", None),
            loss_scaler=copy.deepcopy(getattr(engine.optimizer, "loss_scaler", None)),
            scheduler=beginning_of(scheduler) if scheduler is not None else None,
            begun=engine.global_steps > 0,
            sampler=copy.deepcopy(sampler.state_dict()) if (sampler := _sampler(engine)) is not None else None,
        )
    return _OWN[engine]


def loaded(engine: DeepSpeedEngine, last: Last | None) -> None:
    """Note the last load that has ended."""
    _OWN[engine] = replace(own_values(engine), last=last)


def engine_of(scheduler: object) -> DeepSpeedEngine | None:
    """The engine that has loaded before and steps the optimizer of a scheduler."""
    optimizer = innermost(scheduler)
    return next((engine for engine in _OWN if innermost(engine.optimizer) is optimizer), None)


def live_groups(engine: DeepSpeedEngine) -> list[dict[str, object]]:
    """The live param groups of the torch optimizer inside the engine's."""
    optimizer = getattr(engine, "optimizer", None)
    inner = getattr(optimizer, "optimizer", optimizer)
    groups: list[dict[str, object]] = getattr(inner, "param_groups", [])
    return groups


def _sampler(engine: DeepSpeedEngine) -> DeepSpeedDataSampler | None:
    """The data sampler of curriculum learning, the only data position that DeepSpeed stores."""
    loader = engine.training_dataloader
    sampler: DeepSpeedDataSampler | None = getattr(loader, "data_sampler", None)
    return sampler if loader is not None and engine.curriculum_learning_enabled() else None


def narrowed(request: Request, policy: ResumePolicy) -> Request:
    """The load that a policy asks for: never more than the caller's arguments, which keep their meaning."""
    return replace(
        request,
        optimizer=request.optimizer and policy.loads_masters,
        moments=policy.loads_moments,
        replaced=frozenset(policy.hyperparameters) | (SCHEDULED if policy.schedule_is_this_runs else frozenset()),
        module_only=request.module_only or policy.finetune,
        scheduler=request.scheduler and policy.keeps_position and policy.scheduler != "override",
    )


def apply(engine: DeepSpeedEngine, saved: Saved, policy: ResumePolicy) -> None:
    """After a load: this run's values where the policy wants them, and the schedule where it belongs.

    Not collective; the same on every rank.
    """
    own, groups, scheduler = own_values(engine), live_groups(engine), engine.lr_scheduler
    if policy.schedule_is_this_runs:
        _own_schedule(groups, own, SCHEDULED)
    if policy.takes("clip_grad"):
        engine.optimizer.clip_grad = own.clip_grad if own.clip_grad is not None else engine.gradient_clipping()
    if policy.takes("loss_scale"):
        engine.optimizer.loss_scaler = copy.deepcopy(own.loss_scaler)
    if not policy.keeps_iteration:
        engine.global_steps = engine.global_samples = engine.skipped_steps = 0
    sampler = _sampler(engine)
    if sampler is not None and (policy.dataloader == "reset" or policy.finetune):
        sampler.load_state_dict(copy.deepcopy(own.sampler))
    if policy.scheduler == "checkpoint":
        _continue(scheduler, saved, policy, groups)
    elif policy.places_schedule and scheduler is not None:
        _place(scheduler, own, saved.position if policy.keeps_position else 0, groups)
    elif policy.places_schedule and own.scheduled:
        _own_schedule(groups, own, SCHEDULED - {"weight_decay"})
    set_groups(groups, own.groups, policy.hyperparameters)


def _own_schedule(groups: list[dict[str, object]], own: Own, names: Iterable[str]) -> None:
    """This run's values of these names; bounds that this run has not are taken out, or a later scheduler uses them."""
    set_groups(groups, own.groups, names)
    for group, mine in zip(groups, own.groups, strict=True):
        for name in (set(names) - {"lr", "weight_decay"}) - set(mine):
            group.pop(name, None)


def _place(scheduler: object, own: Own, position: int, groups: list[dict[str, object]]) -> None:
    """This run's scheduler at a position; one of an unknown kind has not been loaded, so it is at its beginning."""
    assert own.scheduler is not None
    _own_schedule(groups, own, SCHEDULED - {"weight_decay"})
    if own.scheduler.kind == UNKNOWN:
        return
    set_groups(groups, own.groups, schedulers.cycled(scheduler))
    own.scheduler.place(scheduler, position)


def _continue(scheduler: object, saved: Saved, policy: ResumePolicy, groups: list[dict[str, object]]) -> None:
    """The checkpoint's schedule: what configures it, and with a skipped optimizer the rates that it gives.

    Where the optimizer was loaded the groups have the checkpoint's rates and weight decay already.
    """
    values = saved_values(saved, len(groups))
    if not policy.loads_masters and values is not None:
        set_groups(groups, values, SCHEDULED | schedulers.cycled(scheduler))
    if scheduler is None:
        return
    if schedulers.kind_of(scheduler) == DEEPSPEED:
        _, params = saved.scheduler_section
        assert params is not None
        rates = base_rates(scheduler, saved, params, len(groups))
        built_for = [{**group, "lr": rate} for group, rate in zip(groups, rates, strict=True)] if rates else groups
        described.adopt_configuration(scheduler, params, built_for)
    if not policy.loads_masters:
        schedulers.write_rates(scheduler)


def saved_values(saved: Saved, count: int) -> list[Mapping[str, object]] | None:
    """Saved rate and weight decay of each live group; None where the files that were read do not say.

    The saved JSON speaks for a single group alone: with several, each may have had its own.
    """
    if all(number in saved.groups for number in range(count)):
        return [saved.groups[number] for number in range(count)]
    if count == 1 and "lr" in saved.optimizer_params:
        return [saved.optimizer_params]
    return None


def base_rates(scheduler: object, saved: Saved, params: Mapping[str, object], count: int) -> list[float] | None:
    """The rates that the saved scheduler was built from: the JSON's for one group, else what its rates imply."""
    if not described.needs_rates(scheduler, params):
        return None
    if not saved.groups and count == 1 and "lr" in saved.optimizer_params:
        return [float(str(saved.optimizer_params["lr"]))]
    values = saved_values(saved, count)
    if values is None:
        return None
    return described.base_rates(scheduler, params, [float(str(v["lr"])) for v in values], saved.position)
