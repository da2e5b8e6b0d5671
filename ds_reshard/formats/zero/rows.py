"""The files of all tensor-parallel ranks as one checkpoint, whose tensors are whole.

Each tensor-parallel rank has model and optimizer files of its own: one column of the grid each. What they have divided
lies in the parts that `tensor_parallel` knows; what they have not, each has a copy of, and that of the first counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import (
    MODEL,
    OPTIM,
    Grid,
    GridColumn,
    Row,
    Shape,
    ZeroCheckpoint,
    facts_of,
    kinds_of,
    layout_of,
    read_column,
)
from ds_reshard.formats.zero.layout import chunk_numel, flat_offsets, partition_numel
from ds_reshard.formats.zero.model_states import ModelStates, read_model_states
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates, Partition
from ds_reshard.formats.zero.shards import compare_heads
from ds_reshard.formats.zero.tensor_parallel import Division, Misfit, divisions, replicated
from ds_reshard.model.facts import canonical
from ds_reshard.model.layout import Cut, Placement, TensorKey, check_cover
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Box

_RULE = '"ds_reshard": {"reshard": {"tensor_parallel": [%s]}}'
_TO_A_TOOL = "; to a tool, --rules FILE with that list"


def _rule(name: str, **said: object) -> str:
    return json.dumps({"parameters": re.escape(name), **said})


class Place(NamedTuple):
    """Where a tensor-parallel rank's shard of a tensor begins: a flat group has a phase, a sub-group an origin."""

    chunk: int
    phase: int
    origin: int
    first: int


def open_rows(listing: Listing, grid: Grid, row: Row, *, optimizer: bool) -> ZeroCheckpoint:
    """Read the heads of all tensor-parallel ranks' files; raises every structural fault that they show."""
    subject = f"checkpoint {listing.folder}"
    models = [listing.read(listing.column(number).model[0], read_model_states) for number in range(grid.tp)]
    raise_faults(_unread(listing, grid, models), subject=subject)
    shapes, faults = _shapes(models)
    raise_faults(faults, subject=subject)
    known = {name for model in models for name in model.trainable}
    shared = models[0].shared
    parameters = {n: held for n, held in shapes.items() if n not in models[0].buffer_names and n not in shared}
    info = models[0].entries.get("universal_checkpoint_info")
    whole = (
        {} if grid.tp > 1 else {n: replicated(held, "whole") for n, held in parameters.items() if not _ruled(n, row)}
    )
    divided = {name: held for name, held in parameters.items() if name not in whole}
    found, unknown = divisions(divided, info if isinstance(info, dict) else {}, row.rules)
    found |= whole
    buffers = {name: held for name, held in shapes.items() if name in models[0].buffer_names}
    found |= {name: _buffer(name, held, row) for name, held in buffers.items() if len(set(held)) == 1}
    unknown |= {
        name: Misfit("it is a buffer of another shape on each rank", "one shape", ", ".join(map(str, held)))
        for name, held in buffers.items()
        if len(set(held)) > 1
    }
    found |= {name: found[owner] for name, owner in shared.items() if owner in found and name in shapes}
    faults = [unknown_fault(name, misfit, models[0].path) for name, misfit in unknown.items()]
    faults += [fault for name, division in found.items() for fault in uncovered(name, division, shapes[name])]
    raise_faults(faults, subject=subject)
    columns = [
        replace(read_column(listing.column(number), model), begin=number * grid.dp, number=number)
        for number, model in enumerate(models)
        if optimizer
    ]
    optims = [column.first for column in columns]
    raise_faults(_unlike(listing, models, optims), subject=subject)
    placements = [*_weights(listing, grid, models, found, known)]
    for at in range(len(optims[0].partitions) if optims else 0):
        placements += _group(columns, found, at)
    model = _together(models, found, known)
    files_of = [listing.column(number) for number in range(grid.tp)]
    count = grid.dp if listing.partitioned_model else 1
    listing = replace(
        listing,
        model={n * count + rank: files.model[rank] for n, files in enumerate(files_of) for rank in range(count)},
        optim={n * grid.dp + rank: name for n, files in enumerate(files_of) for rank, name in files.optim.items()},
    )
    shards = {MODEL: grid.tp * count, **({OPTIM: grid.tp * grid.dp} if columns else {})}
    return ZeroCheckpoint(
        listing=listing,
        model=model,
        optim=optims[0] if optims else None,
        layout=layout_of(listing, placements, shards),
        facts=facts_of(model.param_shapes or (), optims[0]) if optims else None,
        grid=grid,
        columns=tuple(columns),
        rows=tuple(models),
        divided={name: division for name, division in found.items() if name in parameters},
    )


def _unread(listing: Listing, grid: Grid, models: Sequence[ModelStates]) -> Iterator[Fault]:
    mend = f"load it in a run with tensor-parallel size {grid.tp}"
    if models[0].param_shapes is None:
        what = "holds optimizers that name no parameter (ZeRO stage 0), one for each tensor-parallel rank"
        yield UnsupportedLayout.fault(listing.folder, what, "ZeRO stage 1 to 3", "stage 0", mend=mend)
    for model in models:
        for name, tensor in model.module.items():
            if not tensor.contiguous:
                what = f"holds {name}, which is not row-major"
                yield UnsupportedLayout.fault(model.path, what, "contiguous tensors", str(tensor.stride), mend=mend)


def _shapes(models: Sequence[ModelStates]) -> tuple[dict[str, list[Shape]], list[Fault]]:
    """The shapes of each tensor's shards by rank; one that has no elements does not say that it is trained."""
    names = dict.fromkeys(name for model in models for name in (*model.trainable, *model.frozen_shapes, *model.module))
    said: list[dict[str, Shape]] = [
        {**{name: one.shape for name, one in model.module.items()}, **model.frozen_shapes, **model.trainable}
        for model in models
    ]
    faults: list[Fault] = []
    shapes: dict[str, list[Shape]] = {}
    for name in names:
        held: list[Shape] = []
        for model, shapes_of in zip(models, said, strict=True):
            owner = models[0].shared.get(name, name)  # the first rank's file alone says it
            if owner in shapes_of and name in shapes_of:
                held.append(shapes_of[owner])
                continue
            what = f"lacks {name}, which the files of other tensor-parallel ranks have"
            mend = "restore all files of one save, or load another tag"
            faults.append(CheckpointDamaged.fault(model.path, what, "the same names", "nothing", mend=mend))
        shapes[name] = held
    trained = {name for model in models for name in model.trainable}
    for name in trained:
        for model, shape in zip(models, shapes[name], strict=False):
            if name not in model.trainable and 0 not in shape:
                what = f"has {name} frozen, which other tensor-parallel ranks have trained"
                faults.append(CheckpointDamaged.fault(model.path, what, "trained on all ranks", f"{list(shape)}"))
    return shapes, faults


def _ruled(name: str, row: Row) -> bool:
    return any(re.fullmatch(rule.parameters, name) for rule in row.rules)


def _buffer(name: str, held: Sequence[Shape], row: Row) -> Division:
    """A buffer, of which every rank has a copy; whose counts a rule may say."""
    said = [rule.owner for rule in row.rules if rule.replicated and re.fullmatch(rule.parameters, name)]
    return replicated(held, "buffer", owner=said[0] if said else None)


def unknown_fault(name: str, misfit: Misfit, path: str) -> Fault:
    """Why a parameter cannot be made whole, and the rule that would say how."""
    mend = f"say how it is cut: {_RULE % _rule(name, dim=0)}{_TO_A_TOOL}"
    return UnsupportedLayout.fault(f"{path}: {name}", misfit.what, misfit.expected, misfit.found, mend=mend)


def replica_fault(key: TensorKey, found: str) -> Fault:
    """That a rank's copy of what is not divided is not the first rank's."""
    what = f"is not divided, and tensor-parallel rank {key.copy} has other values than rank 0, whose copy counts"
    rule = json.dumps({"parameters": re.escape(key.name), "replicated": True, "owner": 0})
    mend = "restore all files of one save; or resume with the tensor-parallel size that was saved; or say whose copy "
    mend += (
        f'counts: "ds_reshard": {{"reshard": {{"tensor_parallel": [{rule}]}}}}; to a tool, --rules FILE with that list'
    )
    return CheckpointDamaged.fault(f"tensor {key}", what, "the same bytes", found, mend=mend)


def uncovered(name: str, division: Division, shapes: Sequence[Shape]) -> Iterator[Fault]:
    """Where parts do not lie in their shards, or do not make the whole."""
    mend = f"say how it is cut: {_RULE % _rule(name, dim=0)}"
    for parts, shape in zip(division.ranks, shapes, strict=True):
        if any(part.at < 0 or part.at + part.box.numel > prod(shape) for part in parts):
            what = "is said to have parts that leave its shard"
            yield UnsupportedLayout.fault(f"parameter {name}", what, f"{prod(shape)} elements", "more", mend=mend)
            return
    if division.replicated:
        return
    try:
        check_cover([part.box for parts in division.ranks for part in parts], division.shape)
    except ValueError as error:
        what = "is said to have parts that do not make the whole"
        yield UnsupportedLayout.fault(f"parameter {name}", what, f"{list(division.shape)}", str(error), mend=mend)


def _unlike(listing: Listing, models: Sequence[ModelStates], optims: Sequence[OptimStates]) -> list[Fault]:
    """Where the files of two ranks are not of one save, or do not divide the same parameters alike."""
    faults = compare_heads(models, optims, listing.folder, states=True)
    mend = "load it with the tensor-parallel size that was saved"
    home: dict[str, int] = {}
    for model in models:
        own = model.param_shapes or ()
        moved = [n for at, group in enumerate(own) for n in group if home.setdefault(n, at) != at]
        if moved or len(own) != len(models[0].param_shapes or ()):
            what = "has its parameters in other flat buffers than the first tensor-parallel rank"
            yours = f"{len(models[0].param_shapes or ())} buffers of the same parameters"
            found = f"{len(own)}, {', '.join(moved[:4]) or 'the same'}"
            faults.append(UnsupportedLayout.fault(model.path, what, yours, found, mend=mend))
    first = optims[0] if optims else None
    for optim in optims[1:]:
        assert first is not None
        if _kept(optim) != _kept(first):
            what = "keeps other states, steps or param groups than the first tensor-parallel rank"
            faults.append(UnsupportedLayout.fault(optim.path, what, "the same", "others", mend=mend))
    return faults


def _kept(optim: OptimStates) -> str:
    partitions = [
        (sorted((kind, str(dtype)) for kind, dtype in kinds_of(one).items()), sorted(one.unfollowed))
        for one in optim.partitions
    ]
    values = [{key: canonical(value) for key, value in sorted(one.scalars.items())} for one in optim.partitions]
    groups = [canonical(dict(group)) for group in optim.groups or ()]
    return repr((optim.kind, optim.stage, optim.members, partitions, values, groups))


def _weights(
    listing: Listing, grid: Grid, models: Sequence[ModelStates], found: Mapping[str, Division], known: set[str]
) -> Iterator[Placement]:
    """Where the model files have tensors: whole shards, or at stage 3 frozen ones in pieces."""
    files = grid.dp if listing.partitioned_model else 1
    for name, division in found.items():
        records = [model.module.get(name) for model in models]
        whole = [one for one in records if one is not None and (one.numel or not prod(division.shape))]
        partial = listing.partitioned_model and name not in models[0].buffer_names
        fragments = [model.frozen_fragments.get(name) for model in models]
        if partial and name not in known and name in models[0].frozen_shapes:
            shapes = [model.frozen_shapes[name] for model in models]
            dtype = next((one.dtype for one in fragments if one is not None), None)
            places = [Place(chunk_numel(s, grid.dp), 0, 0, n * files) for n, s in enumerate(shapes)]
            if dtype is not None:
                yield from _placed(name, "weight", dtype, division, places, MODEL, f"frozen/{name}")
        elif not partial and whole:
            places = [
                Place(0 if one is None else one.numel, 0, 0, number * files) for number, one in enumerate(records)
            ]
            yield from _placed(name, "weight", whole[0].dtype, division, places, MODEL, f"module/{name}")


def _group(columns: Sequence[GridColumn], found: Mapping[str, Division], number: int) -> Iterator[Placement]:
    """Where one flat buffer of all ranks has masters and states."""
    places: dict[str, list[Place | None]] = {}
    for column in columns:
        for name, place in _flat(column, number):
            places.setdefault(name, [None] * len(columns))[column.number] = place
    partition: Partition = columns[0].first.partitions[number]
    for kind, dtype in kinds_of(partition).items():
        for name, held in places.items():
            own = [place or Place(0, 0, 0, 0) for place in held]
            yield from _placed(name, kind, dtype, found[name], own, OPTIM, f"{kind}/{number}")


def _flat(column: GridColumn, number: int) -> Iterator[tuple[str, Place]]:
    shapes, dp = column.shapes[number], column.dp
    if column.first.kind == "zero3":
        at = 0
        for name, shape in shapes.items():
            chunk = chunk_numel(shape, dp)
            yield name, Place(chunk, 0, at, column.begin)
            at += chunk
        return
    offsets, total = flat_offsets(shapes, column.first.partitions[number].alignment)
    chunk = partition_numel(total, dp)
    for name, offset in offsets.items():
        yield name, Place(chunk, offset, 0, column.begin)


def _placed(
    name: str, kind: str, dtype: ElementType, division: Division, places: Sequence[Place], family: str, buffer: str
) -> Iterator[Placement]:
    """The tensor with a tile for each part; of a replicated one, a placement for each copy, or of the owner's alone."""
    box = Box.whole(division.shape)
    whole = Placement(TensorKey(name, kind), division.shape, dtype, family, buffer, Cut(chunk=1), box)
    tiles: list[Placement] = []
    for rank, (place, parts) in enumerate(zip(places, division.ranks, strict=True)):
        chunk, phase, origin, first = place
        if division.replicated:
            cut = Cut(chunk=max(1, chunk), phase=phase, origin=origin, first=first)
            if division.owner in (None, rank):
                yield whole._replace(key=TensorKey(name, kind, rank if division.owner is None else 0), cut=cut)
            continue
        for part in parts:
            cut = Cut(chunk=max(1, chunk), phase=phase + part.at, origin=origin, first=first)
            tiles.append(whole._replace(cut=cut, box=part.box))
    if len(tiles) == 1:
        yield tiles[0]
    elif not division.replicated:
        yield whole._replace(tiles=tuple(tiles))


def in_order(held: Sequence[Collection[str]]) -> list[str]:
    """The parameters of a flat buffer in the order of all ranks; some lack those of which they have no element."""
    order = list(held[0])
    for own in held[1:]:
        at, known = 0, set(order)
        for name in own if known != set(own) else ():
            if name not in known:
                order.insert(at, name)
            at = order.index(name) + 1
    return order


def _together(models: Sequence[ModelStates], found: Mapping[str, Division], known: set[str]) -> ModelStates:
    """What the model files of all ranks say, of whole tensors; what is divided is in the module as a placeholder."""
    first = models[0]
    module: dict[str, TensorRecord] = {}
    for name in first.module:
        cut, record = not found[name].replicated, models[found[name].owner or 0].module[name]
        module[name] = replace(record, shape=(0,), stride=(1,)) if cut else record
    buffers_of = zip(*(model.param_shapes or () for model in models), strict=True)
    groups = [{name: found[name].shape for name in in_order(held)} for held in buffers_of]
    buffers = frozenset(name for model in models for name in model.buffer_names)
    frozen = {
        name: division.shape
        for name, division in found.items()
        if first.shared.get(name, name) not in known and name not in buffers and name not in first.shared
    }
    return replace(
        first,
        entries={**first.entries, "module": {**module, **first.objects}},
        module=module,
        buffer_names=buffers,
        param_shapes=tuple(groups),
        frozen_shapes=frozen,
        frozen_fragments={},
    )
