"""The resume report of a load into Megatron: for each value the checkpoint's, this run's, the one used, and why."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ds_reshard.execution.states import OTHERS
from ds_reshard.hooks import Call
from ds_reshard.hosts.megatron import parts
from ds_reshard.hosts.megatron.group_values import changed_moments, is_fresh, is_loaded, remembered
from ds_reshard.hosts.megatron.groups import BOUNDS, OF_SCHEDULE
from ds_reshard.hosts.megatron.live import Group, Load, Optimizer, Scheduler, as_number, leaves, live_groups
from ds_reshard.hosts.megatron.parts import POSITION, live_schedule, run_schedule
from ds_reshard.hosts.megatron.pieces import has_finer_masters, masters_are_weights
from ds_reshard.operations.ranks import rank
from ds_reshard.resume.megatron import FIELDS, Schedule
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.policy_sources import note_applied
from ds_reshard.resume.report import (
    EQUAL_TO_WEIGHTS,
    ResumeReport,
    Row,
    batch_size_warning,
    because,
    publish_or_log,
    say_applied,
)

logger = logging.getLogger("ds_reshard")

_OF_GROUP = ("lr", "max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "weight_decay", "betas", "eps", "momentum")
_OF_SCHEDULE = tuple(name for name in FIELDS if name not in BOUNDS)
_FROM_CHECKPOINT, _FROM_WEIGHTS, _ZERO = "from the checkpoint", "from the loaded weights", "zero"
OTHER_GRID = "other model-parallel sizes than were saved"
_KEPT, _OWN, _NONE = "as before this load", "of this run", "none on this rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Whose the masters, the moments and the random states of this rank are."""

    masters: str
    moments: str
    random: bool = False


def foreseen(policy: ResumePolicy) -> Left:
    """What a load that is still to come leaves by a policy."""
    return Left(
        masters=_FROM_CHECKPOINT if policy.loads_masters else _FROM_WEIGHTS,
        moments=_FROM_CHECKPOINT if policy.loads_moments else _ZERO,
        random=True,
    )


def measured(load: Load) -> Left:
    """What a load has left: of the optimizers and generators as they are now, and not of the policy."""
    parts = leaves(load.optimizer)
    return Left(
        masters="; ".join(dict.fromkeys(map(_masters, parts))) or _NONE,
        moments="; ".join(dict.fromkeys(map(_moments, parts))) or _NONE,
        random=_goes_on(load.random),
    )


def _moments(part: Optimizer) -> str:
    if is_fresh(part):
        return _ZERO
    if changed_moments(part):
        return OTHERS
    return _FROM_CHECKPOINT if is_loaded(part) else _KEPT


def _masters(part: Optimizer) -> str:
    same = masters_are_weights(part)
    if is_loaded(part):
        return EQUAL_TO_WEIGHTS if same and has_finer_masters(part) else _FROM_CHECKPOINT
    return _FROM_WEIGHTS if same else _KEPT


def _goes_on(states: object) -> bool:
    """Whether torch's generator is now as it was when these were saved."""
    import torch

    listed, now = states if isinstance(states, list) else [states], torch.get_rng_state()
    held = [one.get("torch_rng_state") for one in listed if isinstance(one, Mapping)]
    return any(isinstance(one, torch.Tensor) and torch.equal(one.cpu(), now) for one in held)


def publish_training(load: Load, arguments: Namespace, iteration: int) -> None:
    """Make, log once and publish the report of a `load_checkpoint` on rank 0; other ranks do nothing."""
    if load.found is not None:
        note_applied(load.policy)
        if rank() == 0:
            _publish(load, training_report(load, arguments, iteration, measured(load)))


def training_report(load: Load, arguments: Namespace, iteration: int, left: Left) -> ResumeReport:
    assert load.found is not None
    rows = [*_counters(load, arguments, iteration), *_schedule(load), *_groups(load), *_rest(load, arguments, left)]
    size = _of(load.found.arguments, "global_batch_size")
    warnings = batch_size_warning(size if isinstance(size, int) else None, arguments.global_batch_size)
    return _report(load, rows, (*load.warnings, *warnings))


def load_scheduler(call: Call) -> None:
    """A scheduler's `load_state_dict`, and its report."""
    _publish_part(parts.load_scheduler(call["self"], lambda state: call(state_dict=state), call["state_dict"]))


def load_optimizer(call: Call) -> None:
    """An optimizer's `load_state_dict`, and its report."""
    _publish_part(parts.load_optimizer(call["self"], lambda state: call(state_dict=state), call["state_dict"]))


def load_parameter_state(call: Call) -> object:
    """A distributed optimizer's `load_parameter_state_from_dp_zero`, and the report once more."""
    answer, load = parts.load_parameter_state(call["self"], call)
    _publish_part(load)
    return answer


def _publish_part(load: Load | None) -> None:
    """The same for one `load_state_dict` in a loop of the user's own, which has no iteration and no samples."""
    if load is not None and load.own_loop:
        note_applied(load.policy)
        if rank() == 0:
            rows = [*_schedule(load), *_groups(load), *_states(load, measured(load))]
            _publish(load, _report(load, rows, tuple(load.warnings)))


def _report(load: Load, rows: list[Row], warnings: tuple[str, ...]) -> ResumeReport:
    ignored = [*_ignored(load)] if load.policy.scheduler == "host" else []
    return ResumeReport(host="megatron", checkpoint=load.where, rows=tuple(rows), warnings=(*warnings, *ignored))


def _publish(load: Load, report: ResumeReport) -> None:
    logger.info("%s", report)
    say_applied(report, load.policy)
    publish_or_log(report, load.policy.report)


def _counters(load: Load, arguments: Namespace, iteration: int) -> Iterator[Row]:
    found, policy = load.found, load.policy
    assert found is not None
    why = because(policy, "iteration")
    yield Row.of("iteration", found.iteration, load.before.get("iteration", 0), iteration, why)
    saved, before = _of(found.arguments, "consumed_train_samples"), load.before.get("consumed samples", 0)
    why = why if policy.iteration == "reset" or policy.finetune else because(policy, "dataloader")
    yield Row.of("consumed samples", saved, before, arguments.consumed_train_samples, why)
    yield Row.of("data", f"sample {saved}", f"sample {before}", f"sample {arguments.consumed_train_samples}", why)


def _schedule(load: Load) -> Iterator[Row]:
    """The position and the values of the schedule; where none was read the checkpoint's are not known."""
    if load.scheduler is None:
        return
    scheduler: Scheduler = load.scheduler  # type: ignore[assignment]
    saved: Schedule | None = load.found.schedule if load.found is not None else None
    run, used = run_schedule(scheduler), live_schedule(scheduler)
    position = saved.position if saved is not None else None
    why = because(load.policy, "position")
    yield Row.of(POSITION, position, load.before.get(POSITION, 0), used.position, why)
    values: Mapping[str, object] = saved.values if saved is not None else {}
    for name in _OF_SCHEDULE:
        why = because(load.policy, "schedule")
        yield Row.of(name, values.get(name), run.values[name], used.values[name], why)


def _groups(load: Load) -> Iterator[Row]:
    index = 0
    for part in leaves(load.optimizer):
        known = remembered(part)
        groups = live_groups(part)
        run = known.run if known is not None else groups
        saved = known.saved if known is not None and known.saved is not None else [{} for _ in groups]
        for group, mine, theirs in zip(groups, run, saved, strict=True):
            yield from _group(load, f"group {index}", group, mine, theirs)
            index += 1


def _group(load: Load, label: str, used: Group, run: Group, saved: Group) -> Iterator[Row]:
    for name in _OF_GROUP:
        values = [as_number(group.get(name)) for group in (saved, run, used)]
        if any(value is not None for value in values):
            why = because(load.policy, "schedule" if name in OF_SCHEDULE else name, name)
            yield Row.of(f"{label} {name}", values[0], values[1], values[2], why)


def _states(load: Load, left: Left) -> Iterator[Row]:
    policy, parts = load.policy, leaves(load.optimizer)
    kinds = ", ".join(dict.fromkeys(type(part).__name__ for part in parts))
    why = because(policy, "optimizer")
    yield Row.of("optimizer", None, kinds, kinds, why)
    yield Row.of("fp32 masters", None, None, left.masters, why)
    yield Row.of("moments and step", None, None, left.moments, why)
    for part in parts:
        scaler = getattr(part, "grad_scaler", None)
        if scaler is not None:
            why = because(policy, "optimizer", "loss_scale")
            yield Row.of("loss scale", None, None, as_number(scaler.scale), why)


def _rest(load: Load, arguments: Namespace, left: Left) -> Iterator[Row]:
    """Yield the rows of optimizer states, clipping, tensors, random states and sizes."""
    found, policy = load.found, load.policy
    assert found is not None
    yield from _states(load, left)
    config = next((part.config for part in leaves(load.optimizer)), None)
    clip = getattr(config, "clip_grad", getattr(arguments, "clip_grad", None))
    why = because(policy, "clip_grad", "clip_grad") if policy.takes("clip_grad") else "host"
    yield Row.of("clip_grad", _of(found.arguments, "clip_grad"), clip, clip, why)
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    same = all(_of(found.arguments, name) in (None, getattr(arguments, name, None)) for name in sizes)
    there = not found.release and not _of(found.arguments, "no_save_rng")
    kept = policy.rng and not policy.finetune and there and not arguments.no_load_rng and same
    why = because(policy, "rng")
    why = why if there or why != "host" else "none were saved"
    if load.unread or load.taken is not None:
        yield Row.of(
            "tensors read by", None, None, "Megatron-LM" if load.unread else "ds_reshard", load.unread or "host"
        )
    if load.taken is not None:
        kept = kept and load.taken.random is not None
        why = why if kept or why != "host" or load.taken.same_grid else OTHER_GRID
    yield Row.of("random states", None, None, _FROM_CHECKPOINT if kept and left.random else _OWN, why)
    for name, label in (("data_parallel_size", "data parallel size"), ("global_batch_size", "global batch size")):
        now = getattr(arguments, name, None)
        yield Row.of(label, _of(found.arguments, name), now, now, "host")


def _ignored(load: Load) -> Iterator[str]:
    """A warning for each bound that Megatron takes from the checkpoint although this run gives another."""
    index = 0
    for part in leaves(load.optimizer):
        known = remembered(part)
        for run, used in zip(known.run, live_groups(part), strict=True) if known is not None else ():
            for name in BOUNDS:
                if run.get(name) != used.get(name):
                    yield (
                        f"group {index}: {name} is {used.get(name)}, the checkpoint's; this run's {run.get(name)} is "
                        "not used: add --override-opt-param-scheduler to use it"
                    )
            index += 1


def _of(arguments: object, name: str) -> object:
    return getattr(arguments, name, None)
