"""Is the run laid out as the checkpoint is, and is it the same model?"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ds_reshard.errors import Fault, ModelMismatch, ParamGroupMismatch
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint, is_placeholder
from ds_reshard.hosts.deepspeed.live import LiveOptimizer, Shape, live_kind, param_shape
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, canonical, describe

if TYPE_CHECKING:
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine


def same_layout(engine: DeepSpeedEngine, live: LiveOptimizer | None, checkpoint: ZeroCheckpoint) -> bool:
    """Whether DeepSpeed itself loads this checkpoint into this engine, rightly.

    That takes the same stage, wrapper, data-parallel size, file prefix, order of parameters in every
    flat buffer (round-robin), gaps (parameter alignment), sub-groups and param groups; and no elastic
    optimizer state, which DeepSpeed loads at no size. Two stage-0 runs are alike at any size.
    """
    if live is None or live.stage == 0:
        return checkpoint.stage == 0 and live_kind(engine) == _stage0_kind(checkpoint)
    optim = checkpoint.optim
    if optim is None or optim.elastic or checkpoint.dp != live.dp:
        return False
    if (checkpoint.kind, checkpoint.stage) != (live.kind, live.stage):
        return False
    if (checkpoint.listing.optim_prefix == "bf16_") != bool(engine.bfloat16_enabled()):
        return False
    saved_groups = checkpoint.model.param_shapes or ()
    if [list(s.items()) for s in saved_groups] != [list(b.shapes.items()) for b in live.buffers]:
        return False
    for buffer, partition in zip(live.buffers, optim.partitions, strict=True):
        if _gaps(buffer.gaps) != _gaps(partition.alignment):
            return False
    facts = checkpoint.facts
    assert facts is not None
    return [list(g.members) for g in facts.groups] == [live.members(g) for g in range(len(live.groups))]


def _stage0_kind(checkpoint: ZeroCheckpoint) -> str:
    """Which wrapper wrote a stage-0 optimizer: DeepSpeed loads each into its own kind alone."""
    saved = checkpoint.model.entries.get("optimizer")
    if not isinstance(saved, dict):
        return "none"
    marks = {"fp32_groups_flat": "fused", "fp32_groups": "unfused"}
    return next((kind for mark, kind in marks.items() if mark in saved), "torch")


def _gaps(gaps: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return gaps if gaps and any(gaps) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """The model of the run: full shapes of trainable, frozen and all state-dict entries."""

    trainable: dict[str, Shape]
    frozen: dict[str, Shape]
    buffers: dict[str, Shape]
    keys: frozenset[str]


def live_model(engine: DeepSpeedEngine, live: LiveOptimizer | None) -> LiveModel:
    """Names and shapes of the engine's module; the state dict is not gathered."""
    named = dict(engine.module.named_parameters())
    shapes = {name: param_shape(param) for name, param in named.items()}
    if live is not None:
        owned = {name for buffer in live.buffers for name in buffer.shapes}
        owned |= {name for name, param in named.items() if param.requires_grad and not prod(shapes[name])}
    else:
        owned = {name for name, param in named.items() if param.requires_grad}
    entries: Mapping[str, torch.Tensor] = engine.module.state_dict(keep_vars=True)
    parameters = {id(param) for param in named.values()}
    return LiveModel(
        trainable={name: shape for name, shape in shapes.items() if name in owned},
        frozen={name: shape for name, shape in shapes.items() if name not in owned},
        buffers={
            name: tuple(value.shape)
            for name, value in entries.items()
            if hasattr(value, "shape") and id(value) not in parameters
        },
        keys=frozenset(entries),
    )


def model_faults(model: LiveModel, checkpoint: ZeroCheckpoint, *, optimizer: bool, strict: bool) -> Iterator[Fault]:
    """All differences between the model and the checkpoint that this load cannot accept."""
    saved = checkpoint.model
    shapes = saved_shapes(checkpoint)
    wanted = {**model.trainable, **model.frozen, **model.buffers}
    for name, shape in wanted.items():
        if name in shapes and shapes[name] != shape and not (prod(shape) == 0 == prod(shapes[name])):
            mend = "build the model with the shapes that were saved"
            yield _mismatch(name, "has another shape", str(list(shape)), str(list(shapes[name])), mend)
    if strict:
        for name in sorted(model.keys - set(saved.module) - set(saved.objects)):
            yield _mismatch(name, "is missing from the checkpoint", "an entry", "none")
        for name in sorted((set(saved.module) | set(saved.objects)) - model.keys):
            yield _mismatch(name, "is in the checkpoint but not in the model", "no entry", "an entry")
    if optimizer and saved.param_shapes is None:
        saved_names = set(saved.module) - saved.buffer_names
        mend = "a stage-0 optimizer names nothing and is matched by order: build the model that was saved"
        for name in sorted(set(model.trainable) - saved_names):
            if not strict:
                yield _mismatch(name, "is missing from the checkpoint", "an entry", "none", mend)
        for name in sorted(saved_names - model.keys):
            if not strict:
                yield _mismatch(name, "is in the checkpoint but not in the model", "no entry", "an entry", mend)
    if optimizer and saved.param_shapes is not None:
        live = {name for name, shape in model.trainable.items() if prod(shape)}
        trained = {name for name, shape in saved.trainable.items() if prod(shape)}
        mend = "train the same parameters, or pass load_optimizer_states=False"
        for name in sorted(live - trained):
            if strict and name not in saved.module:
                continue
            found = "frozen" if name in shapes else "absent"
            yield _mismatch(name, "is trained by this run but not by the saved one", "optimizer state", found, mend)
        for name in sorted(trained - live):
            if strict and name not in model.keys:
                continue
            yield _mismatch(
                name, "was trained by the saved run but not by this one", "trainable", "frozen or absent", mend
            )


def saved_shapes(checkpoint: ZeroCheckpoint) -> dict[str, Shape]:
    """Full shapes of everything the checkpoint names, placeholders of stage 3 resolved."""
    saved = checkpoint.model
    shapes = {**saved.frozen_shapes, **saved.trainable}
    for name, tensor in saved.module.items():
        known = shapes.get(saved.shared.get(name, name))
        if known is None or not is_placeholder(tensor, known):
            shapes[name] = tensor.shape
        else:
            shapes[name] = known
    return shapes


def _mismatch(name: str, what: str, expected: str, found: str, mend: str = "") -> Fault:
    return ModelMismatch.fault(
        f"parameter {name}",
        what,
        expected,
        found,
        mend=mend or "build the model that was saved, or pass load_module_strict=False for weights only",
    )


def match_groups(
    live: Mapping[int, list[str]], facts: OptimizerFacts, replaced: Collection[str] = ()
) -> tuple[dict[int, Mapping[str, object]], list[Fault]]:
    """For each live param group (number to member names), the saved hyper-parameters that it inherits.

    A group inherits from the saved group that holds all its members; where they come from several,
    those must agree in every hyper-parameter, but for those that are `replaced` after the load. Groups
    without members, and elastic checkpoints, which store none, inherit nothing.
    """
    home = {name: group for group in facts.groups for name in group.members}
    inherited: dict[int, Mapping[str, object]] = {}
    faults: list[Fault] = []
    for number, members in live.items():
        sources: dict[int, GroupFacts] = {id(home[name]): home[name] for name in members if name in home}
        groups = list(sources.values())
        if not groups or groups[0].hyperparameters is None:
            continue
        inherited[number] = groups[0].hyperparameters
        for other in groups[1:]:
            faults += _disagreements(number, members, groups[0], other, replaced)
    return inherited, faults


def _disagreements(
    number: int, members: list[str], one: GroupFacts, other: GroupFacts, replaced: Collection[str]
) -> list[Fault]:
    first, second = one.hyperparameters or {}, other.hyperparameters or {}
    names = [next(n for n in members if n in set(group.members)) for group in (one, other)]
    return [
        ParamGroupMismatch.fault(
            f"param group {number}",
            f"its members were saved with different values of {key!r}",
            f"{describe(first.get(key))} (as {names[0]})",
            f"{describe(second.get(key))} (as {names[1]})",
            mend="build the optimizer with the param groups that were saved, or pass load_optimizer_states=False",
        )
        for key in sorted({*first, *second} - set(replaced))
        if canonical(first.get(key)) != canonical(second.get(key))
    ]


def match_scalars(where: str, members: list[str], facts: OptimizerFacts) -> tuple[Mapping[str, Scalar], list[Fault]]:
    """The scalar states that one flat buffer takes over; its members must agree."""
    first = facts.scalars.get(members[0], {}) if members else {}
    faults = []
    for name in members:
        scalars = facts.scalars.get(name, {})
        for key in sorted({*first, *scalars}):
            if canonical(first.get(key)) != canonical(scalars.get(key)):
                faults.append(
                    ParamGroupMismatch.fault(
                        where,
                        f"its members were saved with different values of state {key!r}",
                        f"{describe(first.get(key))} (as {members[0]})",
                        f"{describe(scalars.get(key))} (as {name})",
                        mend="build the optimizer with the param groups that were saved",
                    )
                )
    return first, faults
