"""Which rank trains what in a nanotron checkpoint that is to be written: stages, param groups and shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_reshard.errors import Fault, ModelMismatch, UnsupportedLayout, raise_faults
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.nanotron.names import Topology
from ds_reshard.formats.nanotron.optimizer_file import SavedGroup
from ds_reshard.formats.nanotron.parameters import Parameter
from ds_reshard.formats.nanotron.slices import SlicesPair, split_of, tiles_of
from ds_reshard.model.records import ElementType, new_tensor

_LIKE = "name a checkpoint that a run of that topology has saved: --like DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What was asked for; None is as it was saved, or as in the checkpoint `like`."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    zero_stage: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A param group of the target: the stage of the source and its number there."""

    stage: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one pipeline rank of the target trains, in the order of its module."""

    groups: tuple[tuple[Origin, SavedGroup], ...]

    @property
    def names(self) -> list[str]:
        return [name for _, group in self.groups for name in group.members]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """The target's topology, its stages, and how each parameter is cut there."""

    topology: Topology
    dp: int
    stages: tuple[Stage, ...]
    parameters: Mapping[str, Parameter]
    homes: Mapping[str, int]


def arrange(source: NanotronCheckpoint, wanted: Wanted, like: NanotronCheckpoint | None) -> Arrangement:
    """Raises UnsupportedLayout, with every reason, where the source does not tell how the target is arranged."""
    subject = f"converting {source.folder} to nanotron"
    topology, dp = _topology(source, wanted, like)
    faults = list(_lacking(source)) + (list(_unlike(source, like, topology)) if like is not None else [])
    raise_faults(faults, subject=subject)
    stages = _like_stages(source, like) if like is not None else _stages(source, topology.pp)
    parameters: dict[str, Parameter] = {}
    for name, parameter in source.parameters.items():
        try:
            parameters[name] = _cut(parameter, like.parameters[name] if like is not None else None, topology.tp)
        except ValueError as error:
            faults.append(_unsupported(name, str(error), f"tp {topology.tp}", _LIKE))
    if stages is None:
        found = f"pp {source.topology.pp}, and pp {topology.pp} is asked for"
        what = "which stage of another pipeline trains what, no file says"
        faults.append(_unsupported(source.folder, what, found, _LIKE))
    raise_faults(faults, subject=subject)
    assert stages is not None
    homes = _homes(source if like is None else like, stages, topology.pp)
    return Arrangement(topology=topology, dp=dp, stages=stages, parameters=parameters, homes=homes)


def _topology(source: NanotronCheckpoint, wanted: Wanted, like: NanotronCheckpoint | None) -> tuple[Topology, int]:
    default = like if like is not None else source
    cut = default.topology.dp is not None if wanted.zero_stage is None else wanted.zero_stage > 0
    dp = wanted.dp or default.metadata.dp
    pp, tp = wanted.pp or default.topology.pp, wanted.tp or default.topology.tp
    return Topology(pp=pp, tp=tp, dp=dp if cut else None, exp=1), dp


def _lacking(source: NanotronCheckpoint) -> Iterator[Fault]:
    if not source.stages:
        yield _unsupported(source.folder, "holds no optimizer", "none", "load its weights with nanotron as they are")
    for stage in source.stages:
        stateless = sum(group.stateless for group in stage.groups)
        if stateless:
            what = "has parameters in its param groups that have no state, and so no name: they were frozen"
            mend = "save it with zero_stage 1, which leaves frozen parameters out of the groups"
            yield _unsupported(stage.path, what, f"{stateless} of them", mend)


def _unlike(source: NanotronCheckpoint, like: NanotronCheckpoint, topology: Topology) -> Iterator[Fault]:
    """In what the checkpoint that shows the arrangement is of another model, or of another topology than asked for."""
    if (like.topology.pp, like.topology.tp) != (topology.pp, topology.tp):
        found = f"pp {like.topology.pp}, tp {like.topology.tp}"
        yield _unsupported(like.folder, "is of another topology than asked for", found, "leave out --pp and --tp")
    trained = [{name for stage in side.stages for name in stage.states} for side in (source, like)]
    for name in sorted(trained[0] ^ trained[1] | (set(source.parameters) ^ set(like.parameters))):
        yield _model(name, "is trained, or held, by one of the two checkpoints alone", like)
    for name in sorted(set(source.parameters) & set(like.parameters)):
        one, other = source.parameters[name], like.parameters[name]
        if one.shape != other.shape or one.sharded != other.sharded:
            yield _model(name, f"is of shape {list(one.shape)} here and {list(other.shape)} there", like)
        if one.dtype is not other.dtype:
            yield _model(name, f"is {one.dtype.label} here and {other.dtype.label} there", like)
    for name in sorted(trained[0] & trained[1]):
        here, there = kinds_of(source, name), kinds_of(like, name)
        if here != there:
            yield _model(name, f"has the states {_said(here)} here and {_said(there)} there", like)


def _said(kinds: Mapping[str, ElementType]) -> str:
    return ", ".join(f"{kind} {dtype.label}" for kind, dtype in sorted(kinds.items()))


def _model(name: str, what: str, like: NanotronCheckpoint) -> Fault:
    mend = "name a checkpoint of the same model, trained in the same types, with or without fp32 masters as here"
    return ModelMismatch.fault(name, what, found=f"--like {like.folder}", mend=mend)


def _unsupported(where: str, what: str, found: str, mend: str) -> Fault:
    return UnsupportedLayout.fault(where, what, found=found, mend=mend)


def _saved(source: NanotronCheckpoint) -> Iterator[tuple[Origin, SavedGroup]]:
    for pp, stage in enumerate(source.stages):
        for number, group in enumerate(stage.groups):
            yield Origin(stage=pp, number=number), group


def _stages(source: NanotronCheckpoint, pp: int) -> tuple[Stage, ...] | None:
    """The stages as they were saved, or joined into one: nanotron gives its blocks to the stages in their order.

    (`build_model` in models/base.py.) A tied parameter is then trained where its first stage had it.
    """
    if pp == source.topology.pp:
        return tuple(
            Stage(groups=tuple((origin, group) for origin, group in _saved(source) if origin.stage == number))
            for number in range(pp)
        )
    if pp != 1 or any(len(group.members) > 1 for _, group in _saved(source)):
        return None
    seen: set[str] = set()
    kept = []
    for origin, group in _saved(source):
        if not seen.intersection(group.members):
            kept.append((origin, group))
            seen.update(group.members)
    return (Stage(groups=tuple(kept)),)


def _like_stages(source: NanotronCheckpoint, like: NanotronCheckpoint) -> tuple[Stage, ...] | None:
    """The groups of `like`, each with the hyper-parameters that the source has of its members."""
    homes = {name: (origin, group) for origin, group in reversed(list(_saved(source))) for name in group.members}
    empty = next(((origin, group) for origin, group in _saved(source) if not group.members), None)
    stages = []
    for stage in like.stages:
        groups = []
        for group in stage.groups:
            found = {homes[name][0]: homes[name] for name in group.members} or ({empty[0]: empty} if empty else {})
            if len(found) != 1:
                return None
            origin, saved = next(iter(found.values()))
            groups.append((origin, SavedGroup(members=group.members, hyperparameters=saved.hyperparameters)))
        stages.append(Stage(groups=tuple(groups)))
    return tuple(stages)


def _cut(parameter: Parameter, like: Parameter | None, tp: int) -> Parameter:
    """The parameter's shards at a tensor-parallel size; ValueError where no file says how it is cut."""
    pairs: Sequence[tuple[SlicesPair, ...]]
    if not parameter.sharded:
        pairs, shapes = (), {0: parameter.shape}
    elif like is not None:
        pairs, shapes = like.pairs, {rank: tensor.shape for rank, tensor in like.files.items()}
    elif tp == len(parameter.files):
        pairs, shapes = parameter.pairs, {rank: tensor.shape for rank, tensor in parameter.files.items()}
    else:
        split = split_of(parameter.pairs, parameter.shape)
        if split is None:
            raise ValueError("is cut by another rule than nanotron's equal parts of chunks")
        pairs = tuple(split.pairs(len(parameter.shape), rank, tp) for rank in range(tp))
        shapes = dict.fromkeys(range(tp), split.local_shape(parameter.shape, tp))
    buffer = weight_buffer(parameter.name)
    return Parameter(
        name=parameter.name,
        shape=parameter.shape,
        dtype=parameter.dtype,
        pairs=tuple(pairs),
        files={rank: new_tensor(buffer, shape, parameter.dtype) for rank, shape in shapes.items()},
        tiles=tuple(tuple(tiles_of(of, shapes[rank], parameter.shape)) for rank, of in enumerate(pairs)),
    )


def weight_buffer(name: str) -> str:
    return f"weight/{name}"


def _homes(shown: NanotronCheckpoint, stages: Sequence[Stage], pp: int) -> dict[str, int]:
    """The pipeline rank that writes each weight: the first that trains it; of a frozen one, that which wrote it."""
    homes = {name: number for number, stage in reversed(list(enumerate(stages))) for name in stage.names}
    for name in shown.parameters:
        homes.setdefault(name, shown.listing.weight_stages.get(name, 0) if pp > 1 else 0)
    return homes


def kinds_of(source: NanotronCheckpoint, name: str) -> dict[str, ElementType]:
    """The states of a parameter with their types, in the order of the source's file."""
    stage = source.stages[source.stages_of(name)[0]]
    return {kind: tensor.dtype for kind, tensor in stage.states[name].items()}
