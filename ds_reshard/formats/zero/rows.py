"""The files of all tensor-parallel ranks as one checkpoint, whose tensors are whole.

Each tensor-parallel rank has model and optimizer files of its own: one column of the grid each, of a pipeline one for
each stage. What they have divided lies in the parts that `tensor_parallel` knows; what they have not, each has a copy
of, and that of the first counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

from ds_reshard.errors import (
    CheckpointDamaged,
    Fault,
    ReshardError,
    UnsupportedLayout,
    damaged,
    faults_of,
    raise_faults,
)
from ds_reshard.formats.zero.checkpoint import Grid, Row, ZeroCheckpoint, facts_of, kinds_of, layout_of, open_row
from ds_reshard.formats.zero.flat import by_key
from ds_reshard.formats.zero.model_states import ModelStates, read_model_states, section
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates
from ds_reshard.formats.zero.pipeline import owned
from ds_reshard.formats.zero.shards import compare_heads
from ds_reshard.formats.zero.stage0 import Named, all_named, alone, with_order
from ds_reshard.formats.zero.tensor_parallel import (
    Division,
    Evidence,
    Misfit,
    affine_maps,
    divisions,
    replicated,
    shard_shapes,
)
from ds_reshard.model.facts import canonical
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey, check_cover, in_parts
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Box, Shape

_RULE = '"ds_reshard": {"reshard": {"tensor_parallel": [%s]}}'
_RULES = 12
_TO_A_TOOL = "; to a tool, --rules FILE with that list"
_SHARED = "; where ranks share parts of it, as GPTBigCode's keys and values: load it with the sizes that were saved"


def _rule(name: str, **said: object) -> str:
    return json.dumps({"parameters": re.escape(name), **said})


def padding_rules(sizes: Mapping[str, int]) -> str:
    """The line of a run's JSON that says how many rows of parameters are a vocabulary's, and no padding."""
    return _RULE % ", ".join(_rule(name, vocabulary=size) for name, size in sizes.items())


def open_rows(listing: Listing, grid: Grid, row: Row, *, optimizer: bool) -> ZeroCheckpoint:
    """Read the heads of all tensor-parallel ranks' files; raises every structural fault that they show."""
    subject = f"checkpoint {listing.folder}"
    parts = _parts(listing, grid, row, optimizer=optimizer)
    models = [part.model for part in parts]
    raise_faults(_unread(grid, models), subject=subject)
    shapes, faults = _shapes(models)
    raise_faults(faults, subject=subject)
    found, unknown = _found(models, shapes, row)
    faults = unknown_faults(unknown, models[0].path)
    faults += [fault for name, division in found.items() for fault in uncovered(name, division, shapes[name])]
    raise_faults(faults, subject=subject)
    optims = [part.optim for part in parts if part.optim is not None]
    raise_faults(_unlike(listing, models, optims), subject=subject)
    model = _together(models, found)
    count = grid.dp if listing.partitioned_model else 1
    shards = {family: grid.tp * of_one for family, of_one in parts[0].layout.shards.items()}
    listing = replace(
        listing,
        model={n * count + at: part.listing.model[at] for n, part in enumerate(parts) for at in range(count)},
        optim={n * grid.dp + at: name for n, part in enumerate(parts) for at, name in part.listing.optim.items()},
    )
    columns = [
        replace(column, begin=number * grid.dp, number=number)
        for number, part in enumerate(parts)
        for column in part.columns
    ]
    facts = facts_of(model.param_shapes or (), optims[0]) if optims else None
    parameters = parameters_of(models[0], shapes)
    stride = max(part.copy_stride for part in parts)
    return ZeroCheckpoint(
        listing=listing,
        model=model,
        optim=optims[0] if optims else None,
        layout=layout_of(listing, _joined(parts, found, stride), shards),
        facts=owned(facts, parts[0].columns) if facts is not None else None,
        grid=grid,
        columns=tuple(columns),
        stages=parts[0].stages,
        copies=tuple(beside for part in parts for beside in part.copies),
        late=frozenset().union(*(part.late for part in parts)),
        rows=tuple(models),
        divided={name: division for name, division in found.items() if name in parameters},
        copy_stride=stride,
    )


def rows_with_order(checkpoint: ZeroCheckpoint, name: Callable[[ZeroCheckpoint], Named]) -> Named:
    """A checkpoint of stage 0 with the optimizers of all rows named, as `name` names that of one.

    The extents are those of each model file. What is wrong with any row is raised, and where rows say different things.
    """
    rows = [replace(alone(checkpoint, model), stages=(), rows=()) for model in checkpoint.rows]
    named = all_named(
        [partial(name, row) for row in rows],
        lambda part, first: _facts_said(part) == _facts_said(first),
        first="tensor-parallel rank",
        folder=checkpoint.listing.folder,
    )
    first = named[0][0]
    joined = by_key(_joined([part for part, _ in named], checkpoint.divided, checkpoint.copy_stride))
    layout = Layout({**checkpoint.layout.placements, **joined}, checkpoint.layout.shards)
    extents = {rank: of_one for rank, (_, of_one) in enumerate(named)}
    return replace(checkpoint, layout=layout, facts=first.facts, masters_in_module=first.masters_in_module), extents


def row_with_order(checkpoint: ZeroCheckpoint, order: Sequence[Mapping[str, Shape]]) -> Named:
    """What one tensor-parallel rank has saved, with the optimizer named; the shapes are those of its own shards."""
    module, path = checkpoint.model.module, checkpoint.model.path
    lacking = [name for group in order for name in group if name not in module]
    faults = [damaged(path, f"lacks {name}", "a parameter of this run", "nothing") for name in lacking]
    raise_faults(faults, subject=f"checkpoint {checkpoint.listing.folder}")
    return with_order(checkpoint, [{name: module[name].shape for name in group} for group in order])


def _facts_said(part: ZeroCheckpoint) -> str:
    facts = part.facts
    assert facts is not None
    groups = [(group.members, canonical(dict(group.hyperparameters or {}))) for group in facts.groups]
    scalars = {name: {key: canonical(value) for key, value in said.items()} for name, said in facts.scalars.items()}
    return repr((groups, sorted(scalars.items()), sorted(part.layout.placements)))


def _parts(listing: Listing, grid: Grid, row: Row, *, optimizer: bool) -> list[ZeroCheckpoint]:
    """What each tensor-parallel rank has saved; raises what is wrong with the files of any."""
    parts: list[ZeroCheckpoint] = []
    faults: list[Fault] = []
    for rank in range(grid.tp):
        place = row._replace(size=grid.tp, rank=rank)
        try:
            model = listing.read(listing.column(rank).model[0], read_model_states)
            parts.append(open_row(listing, grid, place, model, optimizer=optimizer))
        except ReshardError as error:
            faults += faults_of(error)
    raise_faults(faults, subject=f"checkpoint {listing.folder}")
    return parts


def _found(
    models: Sequence[ModelStates], shapes: Mapping[str, Sequence[Shape]], row: Row
) -> tuple[dict[str, Division], dict[str, Misfit]]:
    """How each tensor was divided, given the shapes of its shards, and of which it is not known."""
    parameters = parameters_of(models[0], shapes)
    whole: dict[str, Division] = {}
    if len(models) == 1:
        padded = vocabularies(models[0], parameters, row)
        plain = {name: held for name, held in parameters.items() if name not in padded and not _ruled(name, row)}
        whole = {name: replicated(held, "whole") for name, held in plain.items()}
    divided = {name: held for name, held in parameters.items() if name not in whole}
    evidence = evidence_of(models[0])._replace(whole=row.whole, live=row.live)
    found, unknown = divisions(divided, evidence, row.rules)
    found |= whole
    buffers = {name: held for name, held in shapes.items() if name in models[0].buffer_names}
    found |= {name: _buffer(name, held, row) for name, held in buffers.items() if len(set(held)) == 1}
    unknown |= {
        name: Misfit("it is a buffer of another shape on each rank", "one shape", ", ".join(map(str, held)))
        for name, held in buffers.items()
        if len(set(held)) > 1
    }
    found |= {name: found[owner] for name, owner in models[0].shared.items() if owner in found and name in shapes}
    return found, unknown


def evidence_of(model: ModelStates) -> Evidence:
    """What a model file says of how ranks divide parameters."""
    info = model.entries.get("universal_checkpoint_info")
    size = section(model.config, "tensor_parallel").get("autotp_size")
    return Evidence(info if isinstance(info, dict) else {}, autotp=isinstance(size, int) and size > 1)


def vocabularies(
    model: ModelStates, shards: Mapping[str, Sequence[Shape]], row: Row, *, info: Mapping[str, object] | None = None
) -> dict[str, Division]:
    """The parameters whose last rows are padding, as rules, `info` or else the model file say."""
    evidence = evidence_of(model) if info is None else Evidence(info)
    if "original_vocab_size" not in evidence.info and not any(rule.vocabulary for rule in row.rules):
        return {}
    found, _ = divisions(shards, evidence, row.rules)
    return {name: division for name, division in found.items() if division.vocabulary}


def padded_otherwise(saved: ModelStates, row: Row) -> bool:
    """Whether a run has other rows of a vocabulary than as many ranks have saved: then its ends are others, too."""
    shapes = {**{name: one.shape for name, one in saved.module.items() if prod(one.shape)}, **saved.trainable}
    other = {
        name: [shapes[name]] * row.size
        for name, own in row.held.items()
        if own != shapes.get(name, own) and 0 not in own
    }
    return bool(other) and bool(vocabularies(saved, other, row))


def cut_otherwise(saved: ModelStates, row: Row) -> bool:
    """Whether a run's affine maps are others than those of the checkpoint, of which `saved` is the first rank's file.

    Where that has none of a parameter, as before DeepSpeed 0.19.6: whether the first rank's shard has another shape, or
    its patterns place other elements in shards of these shapes.
    """
    evidence = evidence_of(saved)._replace(whole=row.whole)
    maps = affine_maps(evidence.info)
    shapes = {**{name: one.shape for name, one in saved.module.items() if prod(one.shape)}, **saved.trainable}
    held = {f"^{re.escape(name)}$": name for name in shapes}
    unmapped: dict[str, list[Shape]] = {}
    for pattern, said in row.maps.items():
        if pattern in maps:
            if canonical(maps[pattern]) != canonical(said):
                return True
        elif pattern in held:
            unmapped[held[str(pattern)]] = shard_shapes(said)
    if any(shards[:1] != [shapes[name]] for name, shards in unmapped.items()):
        return True
    now, _ = divisions(unmapped, Evidence({"affine_map": {"version": 1, "params": row.maps}}), ())
    then, _ = divisions(unmapped, evidence, row.rules)
    return any(then[name].ranks != now[name].ranks for name in then.keys() & now.keys())


def parameters_of(model: ModelStates, shapes: Mapping[str, Sequence[Shape]]) -> dict[str, Sequence[Shape]]:
    """The tensors that are neither buffers nor another name of a parameter."""
    apart = {*model.buffer_names, *model.shared}
    return {name: held for name, held in shapes.items() if name not in apart}


def _unread(grid: Grid, models: Sequence[ModelStates]) -> Iterator[Fault]:
    mend = f"load it in a run with tensor-parallel size {grid.tp}"
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
    trained = [model.trainable.keys() for model in models]
    for name in dict.fromkeys(name for own in trained for name in own):
        for model, own, shape in zip(models, trained, shapes[name], strict=False):
            if name not in own and 0 not in shape:
                what = f"has {name} frozen, which other tensor-parallel ranks have trained"
                faults.append(CheckpointDamaged.fault(model.path, what, "trained on all ranks", f"{list(shape)}"))
    return shapes, faults


def _ruled(name: str, row: Row) -> bool:
    return any(re.fullmatch(rule.parameters, name) for rule in row.rules)


def _buffer(name: str, held: Sequence[Shape], row: Row) -> Division:
    """A buffer, of which every rank has a copy; whose counts a rule may say."""
    said = [rule.owner for rule in row.rules if rule.replicated and re.fullmatch(rule.parameters, name)]
    return replicated(held, "buffer", owner=said[0] if said else None)


def unknown_faults(unknown: Mapping[str, Misfit], path: str) -> list[Fault]:
    """Why parameters cannot be made whole, and the rules that would say how, with what is usual for the truth."""
    rules = [_rule(name, dim=0) for name, misfit in unknown.items() if not misfit.mend]
    shown = ", ".join(rules[:_RULES]) + (", ..." if len(rules) > _RULES else "")
    mend = f"say how {'each' if len(rules) > 1 else 'it'} is cut: {_RULE % shown}{_TO_A_TOOL}"
    return [
        UnsupportedLayout.fault(f"{path}: {name}", misfit.what, misfit.expected, misfit.found, mend=misfit.mend or mend)
        for name, misfit in unknown.items()
    ]


def replica_fault(key: TensorKey, found: str) -> Fault:
    """That a rank's copy of what is not divided is not the first rank's."""
    what = f"is not divided, and tensor-parallel rank {key.copy} has other values than rank 0, whose copy counts"
    rule = json.dumps({"parameters": re.escape(key.name), "replicated": True, "owner": 0})
    mend = "restore all files of one save; or resume with the tensor-parallel size that was saved; or say whose copy "
    mend += (
        f'counts: "ds_reshard": {{"reshard": {{"tensor_parallel": [{rule}]}}}}; to a tool, --rules FILE with that list'
    )
    return CheckpointDamaged.fault(f"tensor {key}", what, "the same bytes", found, mend=mend)


def copy_fault(checkpoint: ZeroCheckpoint, key: TensorKey, found: str) -> Fault:
    """That ranks which should hold the same values of a tensor do not; `key` has the number of the copy."""
    if checkpoint.rows:
        return replica_fault(key._replace(copy=checkpoint.copy_of(key)[0]), found)
    if checkpoint.of_autoep:
        what = "has experts on several expert-parallel ranks, whose copies are not the same"
        mend = "restore all files of one save, or load another tag"
        return CheckpointDamaged.fault(f"tensor {key._replace(copy=0)}", what, "the same bytes", found, mend=mend)
    return whole_fault(key, found)


def whole_fault(key: TensorKey, found: str) -> Fault:
    """That ranks which have parts of one parameter keep different states of the whole of it."""
    what = f"is kept whole by each rank that has a part of the parameter, and copy {key.copy + 1} is not the first"
    mend = "restore all files of one save; or resume with the layout that was saved"
    where = f"tensor {key._replace(copy=0)}"
    return CheckpointDamaged.fault(where, what, "the same bytes", found, mend=mend)


def uncovered(name: str, division: Division, shapes: Sequence[Shape]) -> Iterator[Fault]:
    """Where parts do not lie in their shards, or do not make the whole."""
    mend = f"say how it is cut: {_RULE % _rule(name, dim=0)}{_TO_A_TOOL}{_SHARED}"
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
    home: dict[tuple[str, int], int] = {}
    for model in models:
        own = model.param_shapes or ()
        moved = [name for (name, copy), at in _homes(own).items() if home.setdefault((name, copy), at) != at]
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


def _homes(groups: Sequence[Mapping[str, Shape]]) -> dict[tuple[str, int], int]:
    """The flat buffer of each parameter; of one that several stages have a copy of, of each copy."""
    found: dict[tuple[str, int], int] = {}
    seen: dict[str, int] = {}
    for at, group in enumerate(groups):
        for name in group:
            found[name, seen.setdefault(name, 0)] = at
            seen[name] += 1
    return found


def _kept(optim: OptimStates) -> str:
    partitions = [
        (sorted((kind, str(dtype)) for kind, dtype in kinds_of(one).items()), sorted(one.unfollowed))
        for one in optim.partitions
    ]
    values = [{key: canonical(value) for key, value in sorted(one.scalars.items())} for one in optim.partitions]
    groups = [canonical(dict(group)) for group in optim.groups or ()]
    return repr((optim.kind, optim.stage, optim.members, partitions, values, groups))


def _joined(parts: Sequence[ZeroCheckpoint], found: Mapping[str, Division], stride: int) -> Iterator[Placement]:
    """Where whole tensors lie: a tile for each part of a shard; of what is not divided a placement for each copy.

    A shard without elements may be in no file; where one with elements is in none, as weights of ZeRO stage 3, neither
    is the whole.
    """
    held: dict[TensorKey, list[Placement | None]] = {}
    for number, part in enumerate(parts):
        for key, placement in part.layout.placements.items():
            held.setdefault(key, [None] * len(parts))[number] = placement
    for key, shards in held.items():
        division = found[key.name]
        if any(own is None and holds for own, holds in zip(shards, division.ranks, strict=True)):
            continue
        first = next(own for own in shards if own is not None)
        whole = first._replace(shape=division.shape, box=Box.whole(division.shape), replicated=False, cut=Cut(chunk=1))
        moved = [
            own and own.cut._replace(first=own.cut.first + number * parts[number].layout.shards[own.family])
            for number, own in enumerate(shards)
        ]
        if division.replicated:
            for rank, cut in enumerate(moved):
                if cut is not None and division.owner in (None, rank):
                    copy = key.copy + (rank * stride if division.owner is None else 0)
                    yield whole._replace(key=key._replace(copy=copy), cut=cut)
            continue
        cuts = zip(moved, division.ranks, strict=True)
        yield in_parts(whole, ((cut, own) for cut, own in cuts if cut is not None))


def in_order(held: Sequence[Collection[str]]) -> list[str]:
    """The parameters of a flat buffer in the order of all ranks; some lack those of which they have no element."""
    order = list(held[0])
    for own in held[1:]:
        known, before, behind = set(order), "", dict[str, list[str]]()
        for name in own if known != set(own) else ():
            if name in known:
                before = name
            else:
                behind.setdefault(before, []).append(name)
        order = [*behind.get("", ()), *(name for one in order for name in (one, *behind.get(one, ())))]
    return order


def _together(models: Sequence[ModelStates], found: Mapping[str, Division]) -> ModelStates:
    """What the model files of all ranks say, of whole tensors; what is divided is in the module as a placeholder."""
    first, known = models[0], {name for model in models for name in model.trainable}
    module: dict[str, TensorRecord] = {}
    for name in first.module:
        cut, record = not found[name].replicated, models[found[name].owner or 0].module[name]
        module[name] = replace(record, shape=(0,), stride=(1,)) if cut else record
    buffers_of = zip(*(model.param_shapes or () for model in models), strict=True)
    groups = tuple({name: found[name].shape for name in in_order(held)} for held in buffers_of)
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
        param_shapes=groups if first.param_shapes is not None else None,
        frozen_shapes=frozen,
        frozen_fragments={},
    )
