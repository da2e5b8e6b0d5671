"""A content of another framework as a nanotron checkpoint that is arranged as one that a run of nanotron has saved.

How parameters are cut, in which stage and order they are trained, and with which schedule and data, is that run's.
Tensors, steps, hyper-parameters and the position are the content's. nanotron trains with torch's AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ds_reshard.errors import Fault, ModelMismatch, UnsupportedLayout
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.nanotron.content import METADATA
from ds_reshard.formats.nanotron.hyperparameters import Hyperparameters
from ds_reshard.formats.nanotron.optimizer_file import MASTER, OptimizerFile
from ds_reshard.formats.nanotron.position import position_of
from ds_reshard.formats.nanotron.scheduler import SavedScheduler
from ds_reshard.model.codec import ElementType
from ds_reshard.model.content import BASE, LAST, SCHEDULER, WEIGHT, Content
from ds_reshard.model.facts import OptimizerFacts, Scalar, ScalarTensor, as_scalar, describe, number_of
from ds_reshard.model.layout import TensorKey

_KINDS = "fp32, exp_avg, exp_avg_sq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """What came of it: the checkpoint where nothing is wrong, the tensors it takes, and what there is to tell."""

    checkpoint: NanotronCheckpoint | None
    origins: Mapping[TensorKey, TensorKey]
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]


def adopt(content: Content, like: NanotronCheckpoint) -> Adoption:
    """Every fault at once: an optimizer that is not there, and what `like` has otherwise.

    That is parameters, shapes, types, states, steps and param groups.
    """
    faults = list(_parameters(content, like))
    if content.facts is None:
        mend = "--to safetensors or torch, for the weights"
        what = "holds no optimizer"
        faults.append(UnsupportedLayout.fault(content.folder, what, "param groups and states", mend=mend))
        return Adoption(checkpoint=None, origins={}, faults=tuple(faults), notes=())
    faults += _optimizer(content, like)
    scalars, wrong = _scalars(content, like)
    metas, lost = position_of(content, like.metadata)
    groups = Hyperparameters(content)
    stages = tuple(
        replace(stage, groups=tuple(groups.group(stage.path, group) for group in stage.groups)) for stage in like.stages
    )
    faults += [*wrong, *lost, *groups.faults]
    if faults:
        return Adoption(checkpoint=None, origins={}, faults=tuple(faults), notes=())
    listing = like.listing
    random = [name for name in listing.nbytes if name.startswith("random/")]
    checkpoint = replace(
        like,
        metadata=replace(like.metadata, entries={**like.metadata.entries, "metas": metas}),
        stages=stages,
        listing=replace(listing, nbytes={name: size for name, size in listing.nbytes.items() if name not in random}),
        schedulers=tuple(_scheduler(content, groups, *pair) for pair in zip(like.schedulers, stages, strict=False)),
        facts=OptimizerFacts(groups=(), scalars=scalars),
    )
    notes = (*_notes(content, like), *groups.notes)
    return Adoption(checkpoint=checkpoint, origins=_origins(content, like), faults=(), notes=notes)


def _origins(content: Content, like: NanotronCheckpoint) -> dict[TensorKey, TensorKey]:
    """Where each tensor is read from: a weight that has no master beside it in nanotron is the master."""
    masters = any(stage.has_masters for stage in like.stages)
    found = {key: held.origin for key, held in content.tensors.items()}
    for key in content.tensors:
        master = TensorKey(name=key.name, kind=MASTER)
        if key.kind == WEIGHT and not masters and master in found:
            found[key] = found[master]
    return found


def _parameters(content: Content, like: NanotronCheckpoint) -> Iterator[Fault]:
    """Names, shapes and types that differ; a weight that is its own master is cast to the type of the coming run."""
    weights = content.weights
    for name in sorted(set(weights) - set(like.parameters)):
        yield _mismatch(name, "is in the source and not in --like", like.folder, "its name there: --names map.json")
    for name in sorted(set(like.parameters) - set(weights)):
        yield _mismatch(
            name,
            "is in --like, and no parameter of the source has that name",
            content.folder,
            "the name that it has in the source: --names map.json",
        )
    for name in sorted(set(like.parameters) & set(weights)):
        parameter, held = like.parameters[name], weights[name]
        if parameter.shape != held.shape:
            what = f"is of shape {list(held.shape)} in the source and {list(parameter.shape)} in --like"
            yield _mismatch(
                name, what, like.folder, "name a checkpoint of the same model: tensors are not cut or fused"
            )
        elif parameter.dtype is not held.dtype and held is not content.trained.get(name, {}).get(MASTER):
            what = f"is {held.dtype.label} in the source and {parameter.dtype.label} in --like"
            yield _mismatch(name, what, like.folder, "name a checkpoint of a run that trains in the same type")


def _mismatch(name: str, what: str, found: str, mend: str) -> Fault:
    return ModelMismatch.fault(name, what, found=found, mend=mend)


def _optimizer(content: Content, like: NanotronCheckpoint) -> Iterator[Fault]:
    """Parameters that one side trains alone, and states that it has otherwise."""
    states: dict[str, Mapping[str, ElementType]] = {}
    for stage in reversed(like.stages):
        states |= {name: {kind: t.dtype for kind, t in kinds.items()} for name, kinds in stage.states.items()}
    trained = content.trained
    for name in sorted((set(states) ^ set(trained)) & set(content.weights) & set(like.parameters)):
        side = "--like" if name in states else "the source"
        yield _mismatch(name, f"is trained in {side} alone", like.folder, "name a checkpoint of a run that trains it")
    for name in sorted(set(states) & set(trained)):
        held = {kind: one.dtype for kind, one in trained[name].items()}
        if MASTER not in states[name] and content.weights[name].dtype is ElementType.FLOAT32:
            held.pop(MASTER, None)  # the weight is the master
        yield from _states(name, held, states[name], like.folder)


def _states(
    name: str, found: Mapping[str, ElementType], wanted: Mapping[str, ElementType], folder: str
) -> Iterator[Fault]:
    if dict(found) != dict(wanted):
        one, other = (
            ", ".join(f"{kind} {dtype.label}" for kind, dtype in sorted(side.items())) for side in (found, wanted)
        )
        mend = (
            f"name a checkpoint of a run that keeps the same: of AdamW {_KINDS}, masters with accumulate_grad_in_fp32"
        )
        yield UnsupportedLayout.fault(
            name, f"has other optimizer states than in --like {folder}", other, one, mend=mend
        )


def _scalars(content: Content, like: NanotronCheckpoint) -> tuple[dict[str, dict[str, Scalar]], list[Fault]]:
    """Steps as the tensors that nanotron saves; what is one value for a parameter and no step has no place."""
    assert content.facts is not None
    shown = like.facts.scalars if like.facts is not None else {}
    made: dict[str, dict[str, Scalar]] = {}
    faults: list[Fault] = []
    for name in sorted(set(shown) & set(content.trained)):
        said = {kind: value for kind, value in content.facts.scalars.get(name, {}).items() if value is not None}
        if set(said) != set(shown[name]):
            faults.append(_counters(name, ", ".join(sorted(shown[name])), ", ".join(sorted(said)) or "none"))
            continue
        made[name] = {}
        for kind, value in said.items():
            wanted, number = shown[name][kind], number_of(value)
            kept: Scalar = value
            if isinstance(wanted, ScalarTensor) and number is not None:
                kept = as_scalar(number, wanted)
            if type(kept) is not type(wanted):
                faults.append(_counters(name, describe(wanted), describe(value)))
            made[name][kind] = kept
    return made, faults


def _counters(name: str, expected: str, found: str) -> Fault:
    return UnsupportedLayout.fault(
        name,
        "has other counters than a parameter of nanotron's AdamW",
        expected,
        found,
        mend="resume it with DeepSpeed",
    )


def _scheduler(
    content: Content, groups: Hyperparameters, saved: SavedScheduler, stage: OptimizerFile
) -> SavedScheduler:
    """The schedule of `like` at the content's position, with the rates of the content."""
    kept = content.schedule.counters if content.schedule is not None else {}
    position = kept.get("last_epoch", content.steps)
    entries: dict[str, object] = {**saved.entries, "last_epoch": position}
    entries["_step_count"] = kept.get("_step_count", (content.steps or 0) + 1)
    bases = saved.entries[BASE]
    assert isinstance(bases, list)
    entries[BASE] = [groups.base(group.members, base) for group, base in zip(stage.groups, bases, strict=True)]
    entries[LAST] = [group.hyperparameters["lr"] for group in stage.groups]
    return replace(saved, entries=entries)


def _notes(content: Content, like: NanotronCheckpoint) -> Iterator[str]:
    left = [name for name in content.own if name != METADATA]
    if left:
        yield f"left out, as nanotron has no place for them: {', '.join(left)}"
    if content.schedule is None and SCHEDULER in content.entries:
        yield (
            f"the scheduler's own state is left out: the schedule is that of --like, at step {content.steps}, as "
            "config.yaml has it"
        )
    elif like.schedulers:
        yield f"the schedule is that of --like, as config.yaml has it, at step {content.steps}"
    if not like.schedulers:
        yield "no scheduler is written, as --like has none"
    wanted = like.metadata.global_batch_size
    if content.batch_size != wanted:
        known = content.batch_size if content.batch_size is not None else "an unknown number of"
        yield f"the saving run's global batch was {known} samples, and that of config.yaml is {wanted}"
    if METADATA not in content.own:
        yield f"the data goes on after sample {content.samples} of the one data stage of --like"
