"""The headers of a ZeRO checkpoint's files, read column by column, as one layout of whole tensors.

A column is the files of one tensor-parallel rank of one stage. Each of its flat buffers has parameters under names, and
in shapes, that are those of its ranks alone: each gets its name in the whole model, its place among the shards of all
columns, and the parts of the whole tensor that it is. What several columns have of one tensor is then put together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    Fault,
    UnsupportedLayout,
    collected,
    damaged,
    fail,
    raise_faults,
)
from ds_reshard.formats.zero.autoep import of_other_ranks, unfit_counts
from ds_reshard.formats.zero.checkpoint import (
    MODEL,
    OPTIM,
    Grid,
    GridColumn,
    Row,
    ZeroCheckpoint,
    autoep_sizes,
    is_placeholder,
    kinds_of,
)
from ds_reshard.formats.zero.flat import RULES, FlatBuffer, Placed, by_key, merged, sliced, whole
from ds_reshard.formats.zero.model_states import ModelStates, positive, read_model_states
from ds_reshard.formats.zero.modules import (
    Module,
    experts_held,
    not_of_a_pipeline,
    of_layers,
    read_layers,
    renumbered,
    stage_copies,
    with_autoep,
    with_experts,
    with_shapes,
)
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates, Partition, read_optim_states, with_wholes
from ds_reshard.formats.zero.shards import compare_heads
from ds_reshard.formats.zero.tensor_parallel import (
    Division,
    Evidence,
    Misfit,
    affine_maps,
    divisions,
    evidence_of,
    replicated,
    shard_shapes,
    uncovered,
    unknown_faults,
    vocabularies,
)
from ds_reshard.formats.zero.universal import read_universal
from ds_reshard.model.content import SCHEDULER, join_states
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, canonical
from ds_reshard.model.layout import Layout, Placement, TensorKey
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Shape
from ds_reshard.model.rules import active_rules


def open_checkpoint(listing: Listing, *, optimizer: bool, row: Row | None = None) -> ZeroCheckpoint:
    """Read what all shards share. `optimizer=False` leaves the optimizer files unopened below stage 3.

    A universal folder is read likewise: its files below `zero` stand for the optimizer files. `row` says whose shards
    are read of tensors that tensor-parallel ranks have divided; without it all are, by the rules that a tool was given.

    Raises every structural fault that the listing and the first files of all columns show: missing shards, wrong
    sizes, unknown layouts.
    """
    faults = list(listing.faults)
    found = None
    if not faults:
        with collected(faults):
            found = read_checkpoint(listing, row or Row(rules=active_rules()), faults, optimizer=optimizer)
    raise_faults(list(dict.fromkeys(faults)), subject=f"checkpoint {listing.folder}")
    assert found is not None
    return found


def read_checkpoint(
    listing: Listing, row: Row, faults: list[Fault], *, optimizer: bool, readable: Collection[str] | None = None
) -> ZeroCheckpoint | None:
    """The checkpoint as far as it can be put together, and what is wrong; None where nothing can.

    If `readable` says which files are, it is put together of those alone, where each column has one.
    """
    whole, listing = listing, listing.with_files(readable) if readable is not None else listing
    heads = {number: _first(files.model) for number, files in listing.columns.items() if files.model}
    if not heads:
        faults += [_no_model(whole)] if not whole.model else []
        return None
    model = listing.read(heads[row.rank if row.rank in heads else min(heads)], read_model_states)
    grid = read_grid(listing, model)
    row = row._replace(size=row.size or grid.tp)
    # BF16_Optimizer divides its masters at stage 0 of a PipelineModule, and the model file then says no shapes
    divided = model.param_shapes is not None or bool(listing.layers and any(c.optim for c in listing.columns.values()))
    sharded = (optimizer or listing.partitioned_model) and not listing.universal and divided
    every = not (listing.experts or autoep_sizes(model.entries)) and (
        grid.tp != row.size or (listing.universal and grid.tp > 1) or _cut_otherwise(listing, row, heads, model)
    )
    faults += grid_faults(whole, grid, grid.tp if every else row.size, optimizer=sharded)
    faults += _unread_experts(listing, grid, model)
    columns = [listing.column(number) for number in range(grid.tp * grid.pp)]
    sharded = sharded and all(column.optim for column in columns)
    if (faults and readable is None) or not all(column.model for column in columns):
        return None
    ranks: list[_Rank] = []
    known = len(faults)
    for number in range(grid.tp) if every else [row.rank]:
        with collected(faults):
            head = model if number == row.rank else listing.read(heads[number], read_model_states)
            one = row._replace(size=grid.tp if every else row.size, rank=number)
            ranks += _read_rank(listing, grid, one, head, faults, optimizer=sharded)
    if len(faults) > known:
        return None
    found = _whole(listing, row, ranks, faults) if every else _alone(ranks[0])
    if found is not None and listing.universal and (optimizer or listing.partitioned_model):
        with collected(faults):
            return _with_states(found)
    return found


def _with_states(checkpoint: ZeroCheckpoint) -> ZeroCheckpoint:
    """With the masters and states of a universal checkpoint, which are whole whatever the sizes."""
    listing, layout = checkpoint.listing, checkpoint.layout
    universal = read_universal(listing, checkpoint.model, checkpoint.stages)
    families = {placement.family: 1 for placement in universal.placements}
    placements = [*layout.placements.values(), *universal.placements]
    return replace(
        checkpoint,
        listing=replace(listing, nbytes={**listing.nbytes, **universal.nbytes}),
        layout=_layout(listing, placements, {**layout.shards, **families}),
        facts=universal.facts,
        universal=universal,
    )


class _Rank(NamedTuple):
    """What the files of one tensor-parallel rank hold, all stages together.

    `shards` are the numbers of files by family; `stages` are empty without a PipelineModule.
    """

    listing: Listing
    grid: Grid
    model: ModelStates
    module: Module
    stages: tuple[ModelStates, ...]
    columns: tuple[GridColumn, ...]
    optim: OptimStates | None
    shards: Mapping[str, int]

    def placed(self) -> Iterator[Placed]:
        """Where all tensors of this rank lie."""
        dealt = self.module.dealt
        yield from map(Placed, weights(self.model, self.listing))
        yield from self.module.placed
        for column in self.columns:
            for one in column.placements():
                own, stage = dealt.get(one.key.name), column.copies.get(one.key.name, 0)
                parts = None if own is None else own.parts(column.number)
                yield Placed(one if own is None else one._replace(shape=own.shape), parts, stage)


def _read_rank(
    listing: Listing, grid: Grid, row: Row, head: ModelStates, faults: list[Fault], *, optimizer: bool
) -> list[_Rank]:
    """What one tensor-parallel rank has saved, if nothing is wrong with it; `head` is its first model file."""
    wrong: list[Fault] = []
    listing, numbers = listing.column(row.rank), [grid.column(stage, row.rank) for stage in range(grid.pp)]
    piped, stages, copies = grid.pp > 1 or bool(listing.layers), [head], [dict[str, int]()]
    for number in numbers[1:]:
        with collected(wrong):
            stages.append(listing.read(_first(listing.column(number).model), read_model_states))
    module = Module(head.module, head.objects)
    with collected(wrong):
        if piped and not wrong:
            layers = read_layers(listing, row.rank)
            if optimizer and head.param_shapes is None:
                stages = [
                    with_shapes(listing.column(number), stage, layers, row.ties)
                    for number, stage in zip(numbers, stages, strict=True)
                ]
            wrong += not_of_a_pipeline(listing, grid, stages)
            copies = stage_copies(stages, wrong)
            module = of_layers(listing, row, layers, stages, wrong, optimizer=optimizer)
        elif autoep_sizes(head.entries):
            module = with_autoep(listing, head, wrong)
            grid = grid._replace(ep=max((len(one.layer.ranks) for one in module.dealt.values()), default=1))
        elif listing.experts:
            module = with_experts(listing, head, grid.dp, wrong)
            grid = grid._replace(ep=len(listing.places) or 1)
    columns: list[list[GridColumn]] = []
    for number, stage in enumerate(stages if optimizer and not wrong else ()):
        with collected(wrong):
            family = f"{OPTIM} of stage {number}" if piped else OPTIM
            own = _columns(listing.column(numbers[number]), grid, stage, module, family, wrong)
            columns.append([replace(column, copies=copies[number]) for column in own])
    optims = [column.first for of_stage in columns for column in of_stage[:1]]
    wrong += compare_heads(stages, optims, listing.folder, states=False) if piped else ()
    faults += wrong
    if wrong:
        return []
    groups = [one or {} for stage in stages for one in stage.param_shapes or ()]
    shapes = [{n: module.dealt[n].shape if n in module.dealt else s for n, s in one.items()} for one in groups]
    shapes, optim = _as_one_optimizer(columns, module) if columns else (shapes, None)
    if listing.experts and optim is not None and not module.dealt:
        grid = grid._replace(ep=max(grid.dp // count for count in optim.counts))
    parts = [len(one.members) for one in optims] or [len(stage.param_shapes or ()) for stage in stages]
    several = piped or bool(listing.experts or module.dealt)
    model = _model(stages, module, shapes, parts, wrong) if several else head
    faults += wrong
    every = tuple(column for of_stage in columns for column in of_stage)
    shards = {MODEL: model.dp if listing.partitioned_model else 1, **module.shards}
    for column in every:
        shards[column.family] = max(shards.get(column.family, 0), column.begin + column.dp)
    return [_Rank(listing, grid, model, module, tuple(stages) if piped else (), every, optim, shards)]


def _first(files: Mapping[int, str]) -> str:
    return files[min(files)]


def _columns(
    listing: Listing, grid: Grid, model: ModelStates, module: Module, family: str, faults: list[Fault]
) -> list[GridColumn]:
    """The columns of optimizer files beside a model file: of the dense parameters, and of each group of experts."""
    first = listing.read(_first(listing.optim), read_optim_states)
    groups, wrong, dealt = model.param_shapes or (), unmatched(model, first), module.dealt
    if not wrong and dealt:
        wrong += unfit_counts(first, groups, dealt, grid.dp, grid.ep)
    elif not wrong and listing.experts:
        what = "flat buffer {} is divided among a number of ranks that does not fit"
        counts = [(number, count) for number, count in enumerate(first.counts) if grid.dp % count]
        wrong += [damaged(first.path, what.format(number), f"{grid.dp}", f"{count}") for number, count in counts]
    faults += wrong
    if wrong:  # the buffers are not those of the model file
        return []
    every, totals = [*range(len(groups))], experts_held(module.tensors, 1)
    shares = [(1, False, every)]
    if dealt and (grid.ep > 1 or not all(one.layer.in_order for one in dealt.values())):
        of_experts = [number for number in every if not dealt.keys().isdisjoint(groups[number])]
        shares = [(1, False, [n for n in every if n not in of_experts]), (grid.ep, True, of_experts)]
    elif listing.experts and not dealt:
        counts_of = {count: [n for n in every if first.counts[n] == count] for count in first.counts}
        shares = [(grid.dp // count, count < grid.dp, own) for count, own in counts_of.items()]
    if grid.tp == 1 and not (listing.experts or listing.layers or grid.pp > 1):
        first = with_wholes(first)
    found: list[GridColumn] = []
    for ep, apart, numbers in shares:
        for place in range(ep):
            ranks = ranks_of_place(place, grid._replace(ep=ep), model)
            head = first if not ranks[0] else listing.read(listing.optim[ranks[0]], read_optim_states)
            more = [*_uneven(model, head), *(of_other_ranks(head, numbers, ranks) if dealt and apart else ())]
            faults += more
            begin = {prefix: place * total // ep for prefix, total in totals.items()}
            shapes = {
                number: {
                    renumbered(name, begin): dealt[name].shard(place) if name in dealt else shape
                    for name, shape in groups[number].items()
                }
                for number in numbers
            }
            of = f"{family} of experts" + ("" if dealt else f" {place} of {ep}") if apart else family
            at = place * len(ranks) if dealt else 0
            files = tuple(listing.optim.get(rank, "") for rank in ranks)
            buffers = flat_buffers(head, shapes, len(files), at) if not more else ()
            found.append(GridColumn(family=of, files=files, buffers=buffers, first=head, begin=at, number=place))
    return found


def ranks_of_place(place: int, grid: Grid, model: ModelStates) -> list[int]:
    """The data-parallel ranks of one place in the expert-parallel groups, which have the same experts.

    No file says a rank's place: it is rank % ep, or rank // (dp / ep) under `use_data_before_expert_parallelism`
    (`_create_expert_and_data_parallel`, utils/groups.py, 0.19.8). The ranks of one place divide the parameters of their
    experts among them, apart from those that every rank has (`_configure_moe_settings`, stage_1_and_2.py).
    """
    share, swapped = grid.dp // grid.ep, bool(model.config.get("use_data_before_expert_parallelism"))
    return [rank for rank in range(grid.dp) if (rank // share if swapped else rank % grid.ep) == place]


def flat_buffers(
    optim: OptimStates, shapes: Mapping[int, Mapping[str, Shape]], ranks: int, begin: int = 0
) -> tuple[FlatBuffer, ...]:
    """The flat buffers with these numbers and parameters, which `ranks` data-parallel ranks share."""
    groups = {number: group for group, members in enumerate(optim.members) for number in members}
    return tuple(
        FlatBuffer(
            shapes=of_buffer,
            rule=RULES[optim.kind],
            ranks=ranks,
            number=number,
            group=groups[number],
            gaps=optim.partitions[number].alignment,
            kinds=kinds_of(optim.partitions[number]),
            scalars=optim.partitions[number].scalars,
            first=begin,
        )
        for number, of_buffer in shapes.items()
    )


def _as_one_optimizer(
    stages: Sequence[Sequence[GridColumn]], module: Module
) -> tuple[list[dict[str, Shape]], OptimStates]:
    """The first files of all columns as one optimizer file: its buffers and param groups, one stage after another.

    A buffer of experts is listed once for each expert-parallel rank, always in the same param group. With AutoEP each
    parameter has all experts, and its buffer is listed once.
    """
    first, dealt = stages[0][0].first, module.dealt
    shapes: list[dict[str, Shape]] = []
    partitions: list[Partition] = []
    counts: list[int] = []
    members: list[tuple[int, ...]] = []
    groups = [column.first.groups for (column, *_) in stages]
    for columns in stages:
        places: dict[int, list[int]] = {}
        own = [(buffer, column) for column in columns for buffer in column.buffers if not (dealt and column.number)]
        for buffer, column in sorted(own, key=lambda one: one[0].number):
            places.setdefault(buffer.number, []).append(len(partitions))
            partitions.append(column.first.partitions[buffer.number])
            counts.append(column.first.counts[buffer.number])
            shapes.append({n: dealt[n].shape if n in dealt else s for n, s in buffer.shapes.items()})
        members += (tuple(at for number in of for at in places[number]) for of in columns[0].first.members)
    return shapes, replace(
        first,
        partitions=tuple(partitions),
        counts=tuple(counts),
        groups=tuple(group for of in groups for group in of or ()) if None not in groups else None,
        members=tuple(members),
    )


def _model(
    stages: Sequence[ModelStates],
    module: Module,
    shapes: Sequence[dict[str, Shape]],
    groups: Sequence[int],
    faults: list[Fault],
) -> ModelStates:
    """The model files of all stages as one file, with the param groups of each stage."""
    first, entries = stages[0], dict(stages[0].entries)
    states = [stage.entries.get(SCHEDULER) for stage in stages]
    dicts = [state for state in states if isinstance(state, dict)]
    if len(stages) > 1 and len(dicts) == len(states):
        entries[SCHEDULER], differing = join_states(dicts, groups)
        what = "another stage's scheduler has another {}"
        faults += [damaged(first.path, what.format(key), "one", "two") for key in differing]
    return replace(
        first,
        entries={**entries, "module": {**module.tensors, **module.objects}},
        module=module.tensors,
        objects=module.objects,
        buffer_names=frozenset(name for stage in stages for name in stage.buffer_names),
        param_shapes=tuple(shapes) if first.param_shapes is not None else None,
        frozen_shapes={name: shape for stage in stages for name, shape in stage.frozen_shapes.items()},
        shared={name: owner for stage in stages for name, owner in stage.shared.items()},
    )


def _alone(rank: _Rank) -> ZeroCheckpoint:
    """The checkpoint of one tensor-parallel rank. If there are several ranks, its tensors are that rank's shards."""
    momenta = any(partition.whole_kinds for column in rank.columns for partition in column.first.partitions)
    several = momenta or rank.stages or rank.module.dealt  # else each tensor lies once, and there is nothing to merge
    placements = merged(rank.placed()) if several else (one.placement for one in rank.placed())
    return ZeroCheckpoint(
        listing=rank.listing,
        model=rank.model,
        optim=rank.optim,
        layout=_layout(rank.listing, placements, rank.shards),
        facts=facts_of(rank.model.param_shapes or (), rank.optim) if rank.optim is not None else None,
        grid=rank.grid,
        columns=rank.columns,
        stages=rank.stages,
        copies=(rank.module.copies,) if rank.stages else (),
        late=rank.module.late,
    )


def _whole(listing: Listing, row: Row, ranks: Sequence[_Rank], faults: list[Fault]) -> ZeroCheckpoint | None:
    """The files of all tensor-parallel ranks as one checkpoint of whole tensors.

    What they have divided lies in the parts that `tensor_parallel` knows; what they have not, each has a copy of, and
    that of the first counts.
    """
    models, optims = [rank.model for rank in ranks], [rank.optim for rank in ranks if rank.optim is not None]
    faults += _strided(ranks[0].grid, models)
    shapes = _shapes(models, faults)
    if faults:
        return None
    found, unknown = _found(models, shapes, row)
    faults += unknown_faults(unknown, models[0].path)
    faults += [fault for name, division in found.items() for fault in uncovered(name, division, shapes[name])]
    faults += _unlike(listing, models, optims)
    if faults:
        return None
    model, grid, dp = _whole_model(models, found), ranks[0].grid, ranks[0].grid.dp
    placed = of_ranks([rank.placed() for rank in ranks], ranks[0].shards, found)
    count = dp if listing.partitioned_model else 1
    listing = replace(
        listing,
        model={n * count + at: rank.listing.model[at] for n, rank in enumerate(ranks) for at in range(count)},
        optim={n * dp + at: name for n, rank in enumerate(ranks) for at, name in rank.listing.optim.items()},
    )
    columns = [replace(column, begin=n * dp, number=n) for n, rank in enumerate(ranks) for column in rank.columns]
    shards = {family: len(ranks) * of_one for family, of_one in ranks[0].shards.items()}
    return ZeroCheckpoint(
        listing=listing,
        model=model,
        optim=optims[0] if optims else None,
        layout=_layout(listing, merged(placed), shards),
        facts=facts_of(model.param_shapes or (), optims[0]) if optims else None,
        grid=grid,
        columns=tuple(columns),
        stages=ranks[0].stages,
        copies=tuple(rank.module.copies for rank in ranks) if ranks[0].stages else (),
        late=frozenset().union(*(rank.module.late for rank in ranks)),
        rows=tuple(models),
        divided={name: found[name] for name in parameters_of(models[0], shapes)},
    )


def of_ranks(
    ranks: Sequence[Iterable[Placed]], shards: Mapping[str, int], found: Mapping[str, Division]
) -> Iterator[Placed]:
    """What tensor-parallel ranks hold, each a number of `shards` of each family, as parts of whole tensors.

    A shard without elements may be in no file; where one with elements is in none, as weights of ZeRO stage 3, neither
    is the whole.
    """
    held: dict[tuple[TensorKey, int], dict[int, Placement]] = {}
    for rank, placed in enumerate(ranks):
        for one, _, stage in placed:
            cut = one.cut._replace(first=one.cut.first + rank * shards[one.family])
            held.setdefault((one.key, stage), {})[rank] = one._replace(cut=cut)
    for (key, stage), own in held.items():
        shape, parts, owner = found[key.name].shape, found[key.name].ranks, found[key.name].owner
        if all(rank in own or not one for rank, one in enumerate(parts)):
            counts = own if owner is None else {owner: own[owner]}
            yield from (Placed(one._replace(shape=shape), parts[rank], stage) for rank, one in counts.items())


def _found(
    models: Sequence[ModelStates], shapes: Mapping[str, Sequence[Shape]], row: Row
) -> tuple[dict[str, Division], dict[str, Misfit]]:
    """How each tensor was divided, told by the shapes of its shards, and the tensors for which nothing tells it."""
    parameters = parameters_of(models[0], shapes)
    whole: dict[str, Division] = {}
    if len(models) == 1:
        padded = vocabularies(models[0], parameters, row.rules)
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


def _cut_otherwise(listing: Listing, row: Row, heads: Mapping[int, str], model: ModelStates) -> bool:
    """Whether a run cuts parameters, or pads vocabularies, otherwise than as many ranks have saved them; alike on each.

    So each asks the file of the first; `model` is that of this rank, which may be it.
    """
    if not (row.maps or row.held):
        return False
    first = heads[min(heads)]
    saved = model if model.path == listing.path(first) else listing.read(first, read_model_states)
    return _vocabulary_padding_differs(saved, row) or (bool(row.maps) and _mapped_otherwise(saved, row))


def _vocabulary_padding_differs(saved: ModelStates, row: Row) -> bool:
    """Whether the run pads its vocabulary to another size than the checkpoint: then ranks hold other rows of it."""
    shapes = {**{name: one.shape for name, one in saved.module.items() if prod(one.shape)}, **saved.trainable}
    other = {
        name: [shapes[name]] * row.size
        for name, own in row.held.items()
        if own != shapes.get(name, own) and 0 not in own
    }
    return bool(other) and bool(vocabularies(saved, other, row.rules))


def _mapped_otherwise(saved: ModelStates, row: Row) -> bool:
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


def _strided(grid: Grid, models: Sequence[ModelStates]) -> Iterator[Fault]:
    mend = f"load it in a run with tensor-parallel size {grid.tp}"
    for model in models:
        for name, tensor in model.module.items():
            if not tensor.contiguous:
                what = f"holds {name}, which is not row-major"
                yield UnsupportedLayout.fault(model.path, what, "contiguous tensors", str(tensor.stride), mend=mend)


def _shapes(models: Sequence[ModelStates], faults: list[Fault]) -> dict[str, list[Shape]]:
    """The shapes of each tensor's shards by rank. A rank lists no shard without elements as trained."""
    names = dict.fromkeys(name for model in models for name in (*model.trainable, *model.frozen_shapes, *model.module))
    said: list[dict[str, Shape]] = [
        {**{name: one.shape for name, one in model.module.items()}, **model.frozen_shapes, **model.trainable}
        for model in models
    ]
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
    return shapes


def _ruled(name: str, row: Row) -> bool:
    return any(re.fullmatch(rule.parameters, name) for rule in row.rules)


def _buffer(name: str, held: Sequence[Shape], row: Row) -> Division:
    """The division of a buffer: every rank has a copy, and a rule may say whose copy counts."""
    said = [rule.owner for rule in row.rules if rule.replicated and re.fullmatch(rule.parameters, name)]
    return replicated(held, "buffer", owner=said[0] if said else None)


def _unlike(listing: Listing, models: Sequence[ModelStates], optims: Sequence[OptimStates]) -> list[Fault]:
    """A fault for each rank whose files belong to another save, or divide other parameters, than the first rank's."""
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
    """The number of the flat buffer that holds each parameter. Copies on several stages are counted apart."""
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


def in_order(held: Sequence[Collection[str]]) -> list[str]:
    """The parameters of a flat buffer, merged from the lists of all ranks: a rank omits those it has no element of."""
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


def _whole_model(models: Sequence[ModelStates], found: Mapping[str, Division]) -> ModelStates:
    """The model files of all ranks as one, with whole shapes. The module has a placeholder for each divided tensor."""
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


def _layout(listing: Listing, placements: Iterable[Placement], shards: Mapping[str, int]) -> Layout:
    try:
        return Layout(by_key(placements), shards)
    except ValueError as error:
        raise fail(listing.folder, f"declares an impossible layout: {error}", "disjoint tensors", "overlap") from error


def _no_model(listing: Listing) -> Fault:
    return CheckpointNotFound.fault(
        listing.folder,
        "holds no DeepSpeed model file",
        "mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt",
        ", ".join(sorted(listing.nbytes)[:6]) or "no files",
        mend="give the folder that save_checkpoint was given, and its tag",
    )


def read_grid(listing: Listing, model: ModelStates) -> Grid:
    """The sizes of the saving run, as its model files say them.

    `checkpoint_parallel_dimensions` is newer than 0.18.9: before it the names of the layers' files tell tp. One
    model-parallel rank has tp=1 and pp=1: under sequence parallelism (Ulysses) DeepSpeed 0.19.8 writes its size as
    `tp_degree` (`_checkpoint_parallel_metadata`, runtime/engine.py), though each rank has whole parameters.
    """
    columns = positive(model.path, "mp_world_size", model.entries.get("mp_world_size", 1))
    said = model.entries.get("checkpoint_parallel_dimensions")
    if isinstance(said, dict) and columns > 1:  # else an mpu may have told the ranks that share a sequence as tp
        pp, tp = (positive(model.path, name, said.get(name)) for name in ("pp_degree", "tp_degree"))
    else:
        tp = len({rank for _, rank in listing.layers}) or columns
        pp = max(1, columns // tp)
    if pp * tp != columns:
        sizes = f"tp={tp}, pp={pp}"
        raise fail(model.path, "names sizes that do not fit each other", f"{columns} model-parallel ranks", sizes)
    return Grid(dp=model.dp, tp=tp, pp=pp)


def _unread_experts(listing: Listing, grid: Grid, model: ModelStates) -> Iterator[Fault]:
    """Refuses experts in combination with other parallelism, or with files, that are not read."""
    sizes, mend = autoep_sizes(model.entries), "load it with the sizes it was saved with"
    if sizes and (grid.tp * grid.pp > 1 or listing.universal or model.param_shapes is None):
        what = "has experts of AutoEP beside tensor or pipeline parallelism, at ZeRO stage 0, or in universal files"
        expected, found = "stage 1 to 3, tp=1, pp=1", f"{grid}, ep={', '.join(map(str, sorted(sizes)))}"
        yield UnsupportedLayout.fault(listing.folder, what, expected, found, mend=mend)
    elif (sizes or listing.experts) and grid.pp == 1 and not listing.layers:
        if grid.tp > 1:
            what = "has experts beside tensor or pipeline parallelism"
            yield UnsupportedLayout.fault(listing.folder, what, "tp=1, pp=1", str(grid), mend=mend)
        if listing.universal:
            what, mend = "is a universal checkpoint of a mixture of experts", 'set "load_universal": true'
            yield UnsupportedLayout.fault(listing.folder, what, "a ZeRO checkpoint", "universal", mend=mend)


def grid_faults(listing: Listing, grid: Grid, tp: int, *, optimizer: bool) -> Iterator[Fault]:
    """Faults for files of another grid, for missing files, and for another tensor-parallel size than `tp`."""
    if grid.tp != tp:
        what = "was saved with tensor parallelism of another size" if tp > 1 else "saved with tensor parallelism"
        expected = f"tensor-parallel size {tp}"
        mend = f"load it in a run with import ds_reshard.auto and tensor-parallel size {grid.tp}"
        yield UnsupportedLayout.fault(listing.folder, what, expected, str(grid), mend=mend)
    foreign = sorted(set(listing.columns) - set(range(grid.tp * grid.pp)))
    if foreign:
        what, expected = "holds files of another grid", f"mp_rank_00 to mp_rank_{grid.tp * grid.pp - 1:02d} ({grid})"
        found = f"mp_rank_{foreign[0]:02d}"
        yield CheckpointDamaged.fault(
            listing.folder, what, expected, found, mend="move the files of the other save out of the folder"
        )
    for number in range(grid.tp * grid.pp):
        of = f" of mp_rank_{number:02d}" if grid.tp * grid.pp > 1 else ""
        yield from missing(listing.column(number), grid.dp, optimizer=optimizer, of=of)


class Sizes(NamedTuple):
    """The data- and model-parallel sizes of a saving run, and the expert-parallel sizes where DeepSpeed cut experts."""

    dp: int
    mp: int
    ep: frozenset[int] = frozenset()


_OF_EXPERTS = re.compile(r"expp_rank_([0-9]+)_mp_rank_[0-9]+_optim_states\.pt")
"""The optimizer's states of one expert-parallel rank at stage 0 (`_get_optimizer_ckpt_name`, runtime/engine.py)."""


def saved_sizes(listing: Listing) -> Sizes | None:
    """The sizes in the first model file, or None if it has none.

    Reads the pickle alone and judges nothing: for checkpoints that this format refuses.
    """
    name = listing.model.get(0)
    if name is None:
        return None
    with open_archive(listing.path(name)) as archive:
        top = archive.load()
    sizes = [top.get(key) for key in ("dp_world_size", "mp_world_size")] if isinstance(top, dict) else []
    numbers = [size for size in sizes if isinstance(size, int)]
    if not isinstance(top, dict) or len(numbers) < 2:
        return None
    ranks = {int(match[1]) for match in map(_OF_EXPERTS.fullmatch, listing.nbytes) if match is not None} - {0}
    return Sizes(dp=numbers[0], mp=numbers[1], ep=autoep_sizes(top) | {rank + 1 for rank in sorted(ranks)[-1:]})


def missing(listing: Listing, dp: int, *, optimizer: bool, of: str = "") -> Iterator[Fault]:
    """Faults for the files of a column of `dp` ranks that are missing or empty."""
    families = [(listing.model, "model_states", dp if listing.partitioned_model else 1)]
    if optimizer:
        families.append((listing.optim, "optim_states", dp))
    for files, what, count in families:
        absent = [rank for rank in range(count) if rank not in files]
        others = any(getattr(column, what.partition("_")[0]) for column in listing.columns.values())
        if absent:
            yield CheckpointDamaged.fault(
                listing.folder,
                f"{what} files{of} of data-parallel ranks {_ranges(absent)} are missing",
                f"{count} files (the saving run had dp={dp})",
                f"{count - len(absent)}",
                mend="restore the missing files, or load another tag"
                if len(absent) < count or others
                else "load another tag, or pass --no-load-optim, or load_optimizer_states=False (DeepSpeed 0.17 and "
                "0.18.4 save no optimizer files of a bf16 run that it wraps as FP16_UnfusedOptimizer)",
            )
        for rank in range(count):
            if rank in files and listing.nbytes[files[rank]] == 0:
                yield damaged(listing.path(files[rank]), "is empty", "a torch zip file", "0 bytes")


def _ranges(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return shown if len(ranks) <= 16 else f"{shown}, ... ({len(ranks)} in all)"


def weights(model: ModelStates, listing: Listing) -> Iterator[Placement]:
    trainable = model.trainable
    for name, tensor in model.module.items():
        shape = trainable.get(name) or model.frozen_shapes.get(name) or tensor.shape
        shape = trainable.get(model.shared.get(name, name), shape)
        if is_placeholder(tensor, shape) or not tensor.contiguous:
            continue
        yield whole(name, "weight", tensor.shape, tensor.dtype, family=MODEL, buffer=f"module/{name}")
    if listing.partitioned_model:
        for name, shape in model.frozen_shapes.items():
            fragment = model.frozen_fragments.get(name)
            if fragment is not None and prod(shape) != 0:
                yield sliced(name, shape, fragment.dtype, model.dp, family=MODEL, buffer=f"frozen/{name}")


def unmatched(model: ModelStates, optim: OptimStates) -> list[Fault]:
    """The first difference between the optimizer's flat buffers and those of the model file, or nothing."""
    groups, what = model.param_shapes or (), "flat buffers do not match the model file"
    if len(groups) != len(optim.partitions):
        return [damaged(optim.path, what, f"{len(groups)}", f"{len(optim.partitions)}")]
    what = "alignment gaps do not match the parameters"
    for shapes, partition in zip(groups, optim.partitions, strict=True):
        if partition.alignment is not None and len(partition.alignment) != len(shapes):
            return [damaged(optim.path, what, f"{len(shapes)}", f"{len(partition.alignment)}")]
    return []


def _uneven(model: ModelStates, optim: OptimStates) -> list[Fault]:
    """A refusal if ranks with other experts train other parameters than rank 0, whose model file lists them for all."""
    what = "has other parameters than rank 0: ranks have frozen different numbers of experts, or two saves are mixed"
    mend = "freeze as many experts on each rank, pass --no-load-optim, or load_optimizer_states=False, "
    mend += "or load as saved without ds_reshard"
    faults = unmatched(model, optim)
    return [UnsupportedLayout.fault(optim.path, what, one.expected, one.found, mend=mend) for one in faults]


def facts_of(shapes: Sequence[Mapping[str, Shape]], optim: OptimStates) -> OptimizerFacts:
    """Param groups and step counters of the optimizer. For a parameter in several buffers the first buffer counts."""
    scalars: dict[str, Mapping[str, Scalar]] = {}
    for group, partition in zip(shapes, optim.partitions, strict=True):
        for name in group:
            scalars.setdefault(name, partition.scalars)
    groups, seen = list[GroupFacts](), set[str]()
    for g, members in enumerate(optim.members):
        names = [name for i in members for name in shapes[i] if name not in seen]
        seen.update(names)
        hyperparameters = optim.groups[g] if optim.groups is not None else None
        groups.append(GroupFacts(members=tuple(names), hyperparameters=hyperparameters))
    return OptimizerFacts(groups=tuple(groups), scalars=scalars)
