"""Read the headers of a ZeRO checkpoint's files, column by column, into one layout of whole tensors.

A column is the files of one tensor-parallel rank of one pipeline stage. Its files name parameters, and give shapes, as
that rank sees them. The reader finds each parameter's name in the whole model, its shard's number among the shards of
all columns, and the parts of the whole tensor that the shard holds. Then it merges all shards of each tensor.
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
from ds_reshard.formats.zero.autoep import partition_count_faults, partition_rank_faults
from ds_reshard.formats.zero.checkpoint import (
    MODEL,
    OPTIM,
    Grid,
    GridColumn,
    TpRank,
    ZeroCheckpoint,
    autoep_sizes,
    is_placeholder,
    kinds_of,
)
from ds_reshard.formats.zero.flat import RULES, FlatBuffer, Shard, by_key, merge_shards, sliced_weight, whole_placement
from ds_reshard.formats.zero.model_states import ModelStates, positive, read_model_states
from ds_reshard.formats.zero.modules import (
    Module,
    add_shapes,
    experts_per_rank,
    module_of_layers,
    pipeline_faults,
    read_layers,
    renumber_expert,
    stage_copies,
    with_autoep,
    with_experts,
)
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates, Partition, read_optim_states, with_full_param_states
from ds_reshard.formats.zero.shards import compare_heads
from ds_reshard.formats.zero.tensor_parallel import (
    SplitEvidence,
    TensorSplit,
    UnknownSplit,
    affine_maps,
    coverage_faults,
    evidence_of,
    find_splits,
    matching_rules,
    replicated_split,
    shapes_in_affine_map,
    unknown_split_faults,
    vocabulary_splits,
)
from ds_reshard.formats.zero.universal import read_universal
from ds_reshard.model.content import SCHEDULER, join_states
from ds_reshard.model.facts import GroupFacts, OptimizerFacts, Scalar, canonical
from ds_reshard.model.layout import Layout, Placement, TensorKey
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Shape
from ds_reshard.model.rules import active_rules


def open_checkpoint(listing: Listing, *, optimizer: bool, tp: TpRank | None = None) -> ZeroCheckpoint:
    """Return the checkpoint of a listing: layout, facts and headers, without tensor data.

    `optimizer=False` leaves optimizer files (in a universal folder those below `zero`) unopened below stage 3. `tp` is
    the tensor-parallel rank whose shards are read; without it all ranks' shards are merged, by a tool's rules.

    Raises every structural fault that the listing and first files show: missing shards, wrong sizes, unknown layouts.
    """
    faults = list(listing.faults)
    checkpoint = None
    if not faults:
        with collected(faults):
            checkpoint = read_checkpoint(listing, tp or TpRank(rules=active_rules()), faults, optimizer=optimizer)
    raise_faults(list(dict.fromkeys(faults)), subject=f"checkpoint {listing.folder}")
    assert checkpoint is not None
    return checkpoint


def read_checkpoint(
    listing: Listing, tp: TpRank, faults: list[Fault], *, optimizer: bool, readable: Collection[str] | None = None
) -> ZeroCheckpoint | None:
    """Return the checkpoint as far as its files allow, and add to `faults`; None if it cannot be assembled.

    If `readable` is given, only the files that it names are used, and every column must have one.
    """
    all_files, listing = listing, listing.with_files(readable) if readable is not None else listing
    first_models = {number: _first_file(files.model) for number, files in listing.columns.items() if files.model}
    if not first_models:
        faults += [_no_model_fault(all_files)] if not all_files.model else []
        return None
    model = listing.read(first_models[tp.rank if tp.rank in first_models else min(first_models)], read_model_states)
    grid = read_grid(listing, model)
    tp = tp._replace(size=tp.size or grid.tp)
    # BF16_Optimizer cuts its masters at stage 0 of a PipelineModule too, where the model file lists no shapes
    has_flat = model.param_shapes is not None or bool(listing.layers and any(c.optim for c in listing.columns.values()))
    with_optimizer = (optimizer or listing.partitioned_model) and not listing.universal and has_flat
    all_ranks = not (listing.experts or autoep_sizes(model.entries)) and (
        grid.tp != tp.size or (listing.universal and grid.tp > 1) or _splits_differ(listing, tp, first_models, model)
    )
    faults += grid_faults(all_files, grid, grid.tp if all_ranks else tp.size, optimizer=with_optimizer)
    faults += _unsupported_expert_faults(listing, grid, model)
    columns = [listing.column(number) for number in range(grid.tp * grid.pp)]
    with_optimizer = with_optimizer and all(column.optim for column in columns)
    if (faults and readable is None) or not all(column.model for column in columns):
        return None
    ranks: list[_RankFiles] = []
    fault_count = len(faults)
    for number in range(grid.tp) if all_ranks else [tp.rank]:
        with collected(faults):
            head = model if number == tp.rank else listing.read(first_models[number], read_model_states)
            tp_of_rank = tp._replace(size=grid.tp if all_ranks else tp.size, rank=number)
            ranks += _read_rank(listing, grid, tp_of_rank, head, faults, optimizer=with_optimizer)
    if len(faults) > fault_count:
        return None
    if all_ranks:
        checkpoint = _merge_tp(listing, tp, ranks, faults)
    else:  # if there are several ranks, the tensors are this rank's shards
        has_momentum = any(p.full_param_kinds for column in ranks[0].columns for p in column.head.partitions)
        has_replicas = has_momentum or ranks[0].stages or ranks[0].module.autoep  # else each tensor lies once
        shards = ranks[0].placements()
        checkpoint = _checkpoint(ranks[0], merge_shards(shards) if has_replicas else (one.placement for one in shards))
    if checkpoint is not None and listing.universal and (optimizer or listing.partitioned_model):
        with collected(faults):
            return _with_universal_states(checkpoint)
    return checkpoint


def _with_universal_states(checkpoint: ZeroCheckpoint) -> ZeroCheckpoint:
    """Add the masters and states of a universal checkpoint's files, which are whole at any parallel size."""
    listing, layout = checkpoint.listing, checkpoint.layout
    states, facts, placements = read_universal(listing, checkpoint.model, checkpoint.stages)
    shards = {**layout.shards, **{placement.family: 1 for placement in placements}}
    return replace(
        checkpoint,
        listing=replace(listing, nbytes={**listing.nbytes, **states.nbytes}),
        layout=_layout(listing, [*layout.placements.values(), *placements], shards),
        facts=facts,
        optim=states,
    )


class _RankFiles(NamedTuple):
    """The headers of all files of one tensor-parallel rank, all stages together.

    `shards` counts the files of each family; `stages` are the stages' model files, empty without a PipelineModule.
    """

    listing: Listing
    grid: Grid
    model: ModelStates
    module: Module
    stages: tuple[ModelStates, ...]
    columns: tuple[GridColumn, ...]
    optim: OptimStates | None
    shards: Mapping[str, int]

    def placements(self) -> Iterator[Shard]:
        """Yield where each tensor of this rank lies."""
        autoep = self.module.autoep
        yield from map(Shard, weights(self.model, self.listing))
        yield from self.module.placements
        for column in self.columns:
            for placement in column.placements():
                group, stage = autoep.get(placement.key.name), column.copies.get(placement.key.name, 0)
                parts = None if group is None else group.parts(column.number)
                yield Shard(placement if group is None else placement._replace(shape=group.shape), parts, stage)


def _read_rank(
    listing: Listing, grid: Grid, tp: TpRank, head: ModelStates, faults: list[Fault], *, optimizer: bool
) -> list[_RankFiles]:
    """Return one tensor-parallel rank's headers in a list, empty if it has faults; `head` is its first model file."""
    rank_faults: list[Fault] = []
    listing, numbers = listing.column(tp.rank), [grid.column(stage, tp.rank) for stage in range(grid.pp)]
    is_pipeline, stages, copies = grid.pp > 1 or bool(listing.layers), [head], [dict[str, int]()]
    for number in numbers[1:]:
        with collected(rank_faults):
            stages.append(listing.read(_first_file(listing.column(number).model), read_model_states))
    module = Module(head.module, head.objects)
    with collected(rank_faults):
        if is_pipeline and not rank_faults:
            layers = read_layers(listing, tp.rank)
            if optimizer and head.param_shapes is None:
                stages = [
                    add_shapes(listing.column(number), stage, layers, tp.ties)
                    for number, stage in zip(numbers, stages, strict=True)
                ]
            rank_faults += pipeline_faults(listing, grid, stages)
            copies = stage_copies(stages, rank_faults)
            module = module_of_layers(listing, tp, layers, stages, rank_faults, optimizer=optimizer)
        elif autoep_sizes(head.entries):
            module = with_autoep(listing, head, rank_faults)
            grid = grid._replace(ep=max((len(group.layer.by_rank) for group in module.autoep.values()), default=1))
        elif listing.experts:
            module = with_experts(listing, head, grid.dp, rank_faults)
            grid = grid._replace(ep=len(listing.ep_optim) or 1)
    columns: list[list[GridColumn]] = []
    for number, stage in enumerate(stages if optimizer and not rank_faults else ()):
        with collected(rank_faults):
            family = f"{OPTIM} of stage {number}" if is_pipeline else OPTIM
            of_stage = _optimizer_columns(listing.column(numbers[number]), grid, stage, module, family, rank_faults)
            columns.append([replace(column, copies=copies[number]) for column in of_stage])
    first_optims = [column.head for stage_columns in columns for column in stage_columns[:1]]
    rank_faults += compare_heads(stages, first_optims, listing.folder, states=False) if is_pipeline else ()
    faults += rank_faults
    if rank_faults:
        return []
    groups = [group or {} for stage in stages for group in stage.param_shapes or ()]
    shapes = [{n: module.autoep[n].shape if n in module.autoep else s for n, s in group.items()} for group in groups]
    shapes, optim = _merge_optimizers(columns, module) if columns else (shapes, None)
    if listing.experts and optim is not None and not module.autoep:
        grid = grid._replace(ep=max(grid.dp // count for count in optim.counts))
    group_counts = [len(group.members) for group in first_optims] or [len(stage.param_shapes or ()) for stage in stages]
    many_files = is_pipeline or bool(listing.experts or module.autoep)
    model = _merge_models(stages, module, shapes, group_counts, rank_faults) if many_files else head
    faults += rank_faults
    all_columns = tuple(column for stage_columns in columns for column in stage_columns)
    shards = {MODEL: model.dp if listing.partitioned_model else 1, **module.shards}
    for column in all_columns:
        shards[column.family] = max(shards.get(column.family, 0), column.begin + column.dp)
    return [_RankFiles(listing, grid, model, module, tuple(stages) if is_pipeline else (), all_columns, optim, shards)]


def _first_file(files: Mapping[int, str]) -> str:
    return files[min(files)]


def _optimizer_columns(
    listing: Listing, grid: Grid, model: ModelStates, module: Module, family: str, faults: list[Fault]
) -> list[GridColumn]:
    """Return the columns of optimizer files of one model file: dense parameters, and each ep rank's experts."""
    optim = listing.read(_first_file(listing.optim), read_optim_states)
    groups, errors, autoep = model.param_shapes or (), buffer_mismatch_faults(model, optim), module.autoep
    if not errors and autoep:
        errors += partition_count_faults(optim, groups, autoep, grid.dp, grid.ep)
    elif not errors and listing.experts:
        what = "the number of ranks that share flat buffer {} does not divide the data-parallel size"
        counts = [(number, count) for number, count in enumerate(optim.counts) if grid.dp % count]
        errors += [damaged(optim.path, what.format(number), f"{grid.dp}", f"{count}") for number, count in counts]
    faults += errors
    if errors:  # the buffers are not those of the model file
        return []
    indices, expert_counts = [*range(len(groups))], experts_per_rank(module.tensors, 1)
    column_sets = [(1, False, indices)]
    if autoep and (grid.ep > 1 or not all(one.layer.in_order for one in autoep.values())):
        expert_ids = [number for number in indices if not autoep.keys().isdisjoint(groups[number])]
        column_sets = [(1, False, [n for n in indices if n not in expert_ids]), (grid.ep, True, expert_ids)]
    elif listing.experts and not autoep:
        by_count = {count: [n for n in indices if optim.counts[n] == count] for count in optim.counts}
        column_sets = [(grid.dp // count, count < grid.dp, numbers) for count, numbers in by_count.items()]
    if grid.tp == 1 and not (listing.experts or listing.layers or grid.pp > 1):
        optim = with_full_param_states(optim)
    columns: list[GridColumn] = []
    for ep, is_expert, numbers in column_sets:
        for ep_rank in range(ep):
            ranks = data_ranks_of(ep_rank, grid._replace(ep=ep), model)
            head = optim if not ranks[0] else listing.read(listing.optim[ranks[0]], read_optim_states)
            head_faults = [
                *_frozen_faults(model, head),
                *(partition_rank_faults(head, numbers, ranks) if autoep and is_expert else ()),
            ]
            faults += head_faults
            first_expert = {prefix: ep_rank * total // ep for prefix, total in expert_counts.items()}
            shapes = {
                number: {
                    renumber_expert(name, first_expert): autoep[name].shard(ep_rank) if name in autoep else shape
                    for name, shape in groups[number].items()
                }
                for number in numbers
            }
            label = f"{family} of experts" + ("" if autoep else f" {ep_rank} of {ep}") if is_expert else family
            first_shard = ep_rank * len(ranks) if autoep else 0
            files = tuple(listing.optim.get(rank, "") for rank in ranks)
            buffers = flat_buffers(head, shapes, len(files), first_shard) if not head_faults else ()
            columns.append(
                GridColumn(family=label, files=files, buffers=buffers, head=head, begin=first_shard, number=ep_rank)
            )
    return columns


def data_ranks_of(ep_rank: int, grid: Grid, model: ModelStates) -> list[int]:
    """Return the data-parallel ranks that have expert-parallel rank `ep_rank`, and so the same experts.

    No file says a rank's `ep_rank`: it is rank % ep, or rank // (dp / ep) under `use_data_before_expert_parallelism`
    (`_create_expert_and_data_parallel`, utils/groups.py, 0.19.8). Ranks of one `ep_rank` cut the parameters of their
    experts among them, in other flat buffers than what every rank has (`_configure_moe_settings`, stage_1_and_2.py).
    """
    per_ep_rank, data_first = grid.dp // grid.ep, bool(model.config.get("use_data_before_expert_parallelism"))
    return [rank for rank in range(grid.dp) if (rank // per_ep_rank if data_first else rank % grid.ep) == ep_rank]


def flat_buffers(
    optim: OptimStates, shapes: Mapping[int, Mapping[str, Shape]], ranks: int, first_shard: int = 0
) -> tuple[FlatBuffer, ...]:
    """Return the flat buffers with the numbers and parameters of `shapes`, each cut over `ranks` data ranks."""
    group_by_number = {number: group for group, members in enumerate(optim.members) for number in members}
    return tuple(
        FlatBuffer(
            shapes=shapes_of_buffer,
            rule=RULES[optim.kind],
            ranks=ranks,
            number=number,
            group=group_by_number[number],
            gaps=optim.partitions[number].alignment,
            kinds=kinds_of(optim.partitions[number]),
            scalars=optim.partitions[number].scalars,
            first=first_shard,
        )
        for number, shapes_of_buffer in shapes.items()
    )


def _merge_optimizers(
    stages: Sequence[Sequence[GridColumn]], module: Module
) -> tuple[list[dict[str, Shape]], OptimStates]:
    """Merge the first files of all columns into one optimizer file; return it behind the shapes of each of its buffers.

    Buffers and param groups follow one another stage by stage. A buffer of experts is listed once for each
    expert-parallel rank, in one param group. An AutoEP parameter has all experts, and its buffer is listed once.
    """
    first, autoep = stages[0][0].head, module.autoep
    shapes: list[dict[str, Shape]] = []
    partitions: list[Partition] = []
    counts: list[int] = []
    members: list[tuple[int, ...]] = []
    groups = [column.head.groups for (column, *_) in stages]
    for columns in stages:
        positions: dict[int, list[int]] = {}
        pairs = [(buffer, column) for column in columns for buffer in column.buffers if not (autoep and column.number)]
        for buffer, column in sorted(pairs, key=lambda one: one[0].number):
            positions.setdefault(buffer.number, []).append(len(partitions))
            partitions.append(column.head.partitions[buffer.number])
            counts.append(column.head.counts[buffer.number])
            shapes.append({n: autoep[n].shape if n in autoep else s for n, s in buffer.shapes.items()})
        members += (tuple(at for number in of for at in positions[number]) for of in columns[0].head.members)
    return shapes, replace(
        first,
        partitions=tuple(partitions),
        counts=tuple(counts),
        groups=tuple(group for of in groups for group in of or ()) if None not in groups else None,
        members=tuple(members),
    )


def _merge_models(
    stages: Sequence[ModelStates],
    module: Module,
    shapes: Sequence[dict[str, Shape]],
    group_counts: Sequence[int],
    faults: list[Fault],
) -> ModelStates:
    """Merge the model files of all stages into one; `group_counts` is the number of param groups of each stage."""
    first, entries = stages[0], dict(stages[0].entries)
    schedulers = [stage.entries.get(SCHEDULER) for stage in stages]
    scheduler_dicts = [state for state in schedulers if isinstance(state, dict)]
    if len(stages) > 1 and len(scheduler_dicts) == len(schedulers):
        entries[SCHEDULER], differing = join_states(scheduler_dicts, group_counts)
        what = "the schedulers of two stages have different values of {}"
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


def _checkpoint(rank: _RankFiles, placements: Iterable[Placement]) -> ZeroCheckpoint:
    return ZeroCheckpoint(
        listing=rank.listing,
        model=rank.model,
        optim=rank.optim,
        layout=_layout(rank.listing, placements, rank.shards),
        facts=optimizer_facts(rank.model.param_shapes or (), rank.optim) if rank.optim is not None else None,
        grid=rank.grid,
        columns=rank.columns,
        stages=rank.stages,
        copies=(rank.module.copies,) if rank.stages else (),
        later_stage_weights=rank.module.later_stage_weights,
    )


def _merge_tp(listing: Listing, tp: TpRank, ranks: Sequence[_RankFiles], faults: list[Fault]) -> ZeroCheckpoint | None:
    """Merge the files of all tensor-parallel ranks into one checkpoint of whole tensors; None if there are faults.

    A split tensor lies in the parts that `tensor_parallel` finds. All ranks have a copy of any other: the first counts.
    """
    models, optims = [rank.model for rank in ranks], [rank.optim for rank in ranks if rank.optim is not None]
    faults += _strided_faults(ranks[0].grid, models)
    shapes = _shapes_by_rank(models, faults)
    if faults:
        return None
    splits, unknown_splits = _splits(models, shapes, tp)
    faults += unknown_split_faults(unknown_splits, models[0].path)
    faults += [fault for name, division in splits.items() for fault in coverage_faults(name, division, shapes[name])]
    faults += _rank_faults(listing, models, optims)
    if faults:
        return None
    model, dp = _merge_tp_models(models, splits), ranks[0].grid.dp
    placements = parts_of_ranks([rank.placements() for rank in ranks], ranks[0].shards, splits)
    files = dp if listing.partitioned_model else 1
    listing = replace(
        listing,
        model={n * files + i: rank.listing.model[i] for n, rank in enumerate(ranks) for i in range(files)},
        optim={n * dp + i: name for n, rank in enumerate(ranks) for i, name in rank.listing.optim.items()},
    )
    columns = [replace(column, begin=n * dp, number=n) for n, rank in enumerate(ranks) for column in rank.columns]
    shards = {family: len(ranks) * files_of_one for family, files_of_one in ranks[0].shards.items()}
    merged = ranks[0]._replace(listing=listing, model=model, columns=tuple(columns), shards=shards)
    return replace(
        _checkpoint(merged, merge_shards(placements)),
        copies=tuple(rank.module.copies for rank in ranks) if ranks[0].stages else (),
        later_stage_weights=frozenset().union(*(rank.module.later_stage_weights for rank in ranks)),
        tp_models=tuple(models),
        splits={name: splits[name] for name in parameter_shapes(models[0], shapes)},
    )


def parts_of_ranks(
    ranks: Sequence[Iterable[Shard]], shards: Mapping[str, int], splits: Mapping[str, TensorSplit]
) -> Iterator[Shard]:
    """Yield all tensor-parallel ranks' shards as parts of whole tensors. `shards` counts one rank's files by family.

    Empty shards may be missing. If one with elements is missing, as weights of ZeRO stage 3 are, so is the tensor.
    """
    placements: dict[tuple[TensorKey, int], dict[int, Placement]] = {}
    for rank, placed in enumerate(ranks):
        for placement, _, stage in placed:
            cut = placement.cut._replace(first=placement.cut.first + rank * shards[placement.family])
            placements.setdefault((placement.key, stage), {})[rank] = placement._replace(cut=cut)
    for (key, stage), by_rank in placements.items():
        shape, parts, owner = splits[key.name].shape, splits[key.name].parts_by_rank, splits[key.name].owner
        if all(rank in by_rank or not parts_of_rank for rank, parts_of_rank in enumerate(parts)):
            counted = by_rank if owner is None else {owner: by_rank[owner]}
            for rank, placement in counted.items():
                yield Shard(placement._replace(shape=shape), parts[rank], stage)


def _splits(
    models: Sequence[ModelStates], shapes: Mapping[str, Sequence[Shape]], tp: TpRank
) -> tuple[dict[str, TensorSplit], dict[str, UnknownSplit]]:
    """Return how each tensor is split, and why the others' splits are unknown."""
    parameters = parameter_shapes(models[0], shapes)
    unsplit: dict[str, TensorSplit] = {}
    if len(models) == 1:
        padded = vocabulary_splits(models[0], parameters, tp.rules)
        unsplit = {
            name: replicated_split(shards, "whole")
            for name, shards in parameters.items()
            if name not in padded and not matching_rules(name, tp.rules)
        }
    sharded = {name: shards for name, shards in parameters.items() if name not in unsplit}
    evidence = evidence_of(models[0])._replace(whole_shapes=tp.whole_shapes, live_rules=tp.live_rules)
    splits, unknown_splits = find_splits(sharded, evidence, tp.rules)
    splits |= unsplit
    buffers = {name: shards for name, shards in shapes.items() if name in models[0].buffer_names}
    for name, shards in buffers.items():  # every rank has a copy; a rule may say whose counts
        owners = [rule.owner for rule in matching_rules(name, tp.rules) if rule.replicated]
        if len(set(shards)) == 1:
            splits[name] = replicated_split(shards, "buffer", owner=owners[0] if owners else None)
        else:
            what, found = "it is a buffer whose shape differs between ranks", ", ".join(map(str, shards))
            unknown_splits[name] = UnknownSplit(what, "one shape", found)
    splits |= {name: splits[owner] for name, owner in models[0].shared.items() if owner in splits and name in shapes}
    return splits, unknown_splits


def _splits_differ(listing: Listing, tp: TpRank, heads: Mapping[int, str], model: ModelStates) -> bool:
    """True if the run splits parameters, or pads vocabularies, otherwise than the checkpoint; the same on every rank.

    So each rank asks the first rank's model file. `model` is the file of rank `tp`, which may be that one.
    """
    if not (tp.affine_maps or tp.shard_shapes):
        return False
    first_file = heads[min(heads)]
    saved = model if model.path == listing.path(first_file) else listing.read(first_file, read_model_states)
    shapes = {**{name: tensor.shape for name, tensor in saved.module.items() if prod(tensor.shape)}, **saved.trainable}
    other_shapes = {
        name: [shapes[name]] * tp.size
        for name, shape in tp.shard_shapes.items()
        if shape != shapes.get(name, shape) and 0 not in shape
    }  # of a vocabulary that the run pads to another size, ranks have other rows
    padding_differs = bool(other_shapes) and bool(vocabulary_splits(saved, other_shapes, tp.rules))
    return padding_differs or (bool(tp.affine_maps) and _affine_maps_differ(saved, shapes, tp))


def _affine_maps_differ(saved: ModelStates, shapes: Mapping[str, Shape], tp: TpRank) -> bool:
    """True if the run's affine maps differ from the checkpoint's; `saved` is the first rank's model file.

    The checkpoint may have no map of a parameter (before DeepSpeed 0.19.6). Then true if the first rank's shard has
    another shape than in the run's map, or the saved patterns put other elements into shards of the run's shapes.
    """
    evidence = evidence_of(saved)._replace(whole_shapes=tp.whole_shapes)
    saved_maps = affine_maps(evidence.info)
    name_by_pattern = {f"^{re.escape(name)}$": name for name in shapes}
    unmapped: dict[str, list[Shape]] = {}
    for pattern, run_map in tp.affine_maps.items():
        if pattern in saved_maps:
            if canonical(saved_maps[pattern]) != canonical(run_map):
                return True
        elif pattern in name_by_pattern:
            unmapped[name_by_pattern[str(pattern)]] = shapes_in_affine_map(run_map)
    if any(shards[:1] != [shapes[name]] for name, shards in unmapped.items()):
        return True
    new, _ = find_splits(unmapped, SplitEvidence({"affine_map": {"version": 1, "params": tp.affine_maps}}), ())
    old, _ = find_splits(unmapped, evidence, tp.rules)
    return any(old[name].parts_by_rank != new[name].parts_by_rank for name in old.keys() & new.keys())


def parameter_shapes(model: ModelStates, shapes: Mapping[str, Sequence[Shape]]) -> dict[str, Sequence[Shape]]:
    """Leave out buffers and second names of parameters."""
    others = {*model.buffer_names, *model.shared}
    return {name: shards for name, shards in shapes.items() if name not in others}


def _strided_faults(grid: Grid, models: Sequence[ModelStates]) -> Iterator[Fault]:
    mend = f"load it in a run with tensor-parallel size {grid.tp}"
    for model in models:
        for name, tensor in model.module.items():
            if not tensor.contiguous:
                what = f"holds {name}, which is not row-major"
                yield UnsupportedLayout.fault(model.path, what, "contiguous tensors", str(tensor.stride), mend=mend)


def _shapes_by_rank(models: Sequence[ModelStates], faults: list[Fault]) -> dict[str, list[Shape]]:
    """Return the shapes of each tensor's shards by rank. A rank lists no empty shard as trained."""
    names = dict.fromkeys(name for model in models for name in (*model.trainable, *model.frozen_shapes, *model.module))
    shapes_of_models: list[dict[str, Shape]] = [
        {**{name: tensor.shape for name, tensor in model.module.items()}, **model.frozen_shapes, **model.trainable}
        for model in models
    ]
    shapes: dict[str, list[Shape]] = {}
    for name in names:
        shards: list[Shape] = []
        for model, shapes_of in zip(models, shapes_of_models, strict=True):
            owner = models[0].shared.get(name, name)  # only the first rank's file lists shared parameters
            if owner in shapes_of and name in shapes_of:
                shards.append(shapes_of[owner])
                continue
            what = f"lacks {name}, which the files of other tensor-parallel ranks have"
            mend = "restore all files of one save, or load another tag"
            faults.append(CheckpointDamaged.fault(model.path, what, "the same names", "nothing", mend=mend))
        shapes[name] = shards
    trained_by_rank = [model.trainable.keys() for model in models]
    for name in dict.fromkeys(name for trained_names in trained_by_rank for name in trained_names):
        for model, trained_names, shape in zip(models, trained_by_rank, shapes[name], strict=False):
            if name not in trained_names and 0 not in shape:
                what = f"has {name} as a frozen parameter, which other tensor-parallel ranks have trained"
                faults.append(CheckpointDamaged.fault(model.path, what, "trained on all ranks", f"{list(shape)}"))
    return shapes


def _rank_faults(listing: Listing, models: Sequence[ModelStates], optims: Sequence[OptimStates]) -> list[Fault]:
    """Return a fault for each rank whose files are of another save than the first's, or group parameters otherwise."""
    faults = compare_heads(models, optims, listing.folder, states=True)
    mend = "load it with the tensor-parallel size that was saved"
    seen: dict[str, list[int]] = {}
    for model in models:
        groups, numbers = model.param_shapes or (), dict[str, list[int]]()  # several stages may have a parameter
        for number, name in ((number, name) for number, group in enumerate(groups) for name in group):
            numbers.setdefault(name, []).append(number)
        moved = [name for name, buffers in numbers.items() if seen.setdefault(name, buffers) != buffers]
        if moved or len(groups) != len(models[0].param_shapes or ()):
            what = "has its parameters in other flat buffers than the first tensor-parallel rank"
            expected = f"{len(models[0].param_shapes or ())} buffers of the same parameters"
            found = f"{len(groups)}, {', '.join(moved[:4]) or 'the same'}"
            faults.append(UnsupportedLayout.fault(model.path, what, expected, found, mend=mend))
    first = optims[0] if optims else None
    for optim in optims[1:]:
        assert first is not None
        if _optimizer_text(optim) != _optimizer_text(first):
            what = "has other optimizer states, steps or param groups than the first tensor-parallel rank"
            faults.append(UnsupportedLayout.fault(optim.path, what, "the same", "others", mend=mend))
    return faults


def _optimizer_text(optim: OptimStates) -> str:
    """Return everything that the optimizer files of all tensor-parallel ranks have in common, as text to compare."""
    partitions = [
        (sorted((kind, str(dtype)) for kind, dtype in kinds_of(part).items()), sorted(part.unreshardable))
        for part in optim.partitions
    ]
    values = [{key: canonical(value) for key, value in sorted(part.scalars.items())} for part in optim.partitions]
    groups = [canonical(dict(group)) for group in optim.groups or ()]
    return repr((optim.kind, optim.stage, optim.members, partitions, values, groups))


def merge_orders(lists: Sequence[Collection[str]]) -> list[str]:
    """Merge all ranks' lists of a flat buffer's parameters: a rank omits those of which it has no element."""
    order = list(lists[0])
    for names in lists[1:]:
        known, last_known, after = set(order), "", dict[str, list[str]]()
        for name in names if known != set(names) else ():
            if name in known:
                last_known = name
            else:
                after.setdefault(last_known, []).append(name)
        order = [*after.get("", ()), *(name for earlier in order for name in (earlier, *after.get(earlier, ())))]
    return order


def _merge_tp_models(models: Sequence[ModelStates], splits: Mapping[str, TensorSplit]) -> ModelStates:
    """Merge all ranks' model files into one with whole shapes; the module has a placeholder for each split tensor."""
    first, trained = models[0], {name for model in models for name in model.trainable}
    module: dict[str, TensorRecord] = {}
    for name in first.module:
        is_split, record = not splits[name].replicated, models[splits[name].owner or 0].module[name]
        module[name] = replace(record, shape=(0,), stride=(1,)) if is_split else record
    buffers_of = zip(*(model.param_shapes or () for model in models), strict=True)
    groups = tuple({name: splits[name].shape for name in merge_orders(of_buffer)} for of_buffer in buffers_of)
    buffers = frozenset(name for model in models for name in model.buffer_names)
    frozen = {
        name: split.shape
        for name, split in splits.items()
        if first.shared.get(name, name) not in trained and name not in buffers and name not in first.shared
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


def _no_model_fault(listing: Listing) -> Fault:
    return CheckpointNotFound.fault(
        listing.folder,
        "holds no DeepSpeed model file",
        "mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt",
        ", ".join(sorted(listing.nbytes)[:6]) or "no files",
        mend="give the folder that save_checkpoint was given, and its tag",
    )


def read_grid(listing: Listing, model: ModelStates) -> Grid:
    """Return the sizes of the saving run, from its model files.

    `checkpoint_parallel_dimensions` is newer than 0.18.9; before it the names of the layers' files tell tp. If there is
    one model-parallel rank, tp=1 and pp=1: under sequence parallelism (Ulysses) DeepSpeed 0.19.8 writes that size as
    `tp_degree` (`_checkpoint_parallel_metadata`, runtime/engine.py), though each rank has whole parameters.
    """
    model_ranks = positive(model.path, "mp_world_size", model.entries.get("mp_world_size", 1))
    saved_sizes = model.entries.get("checkpoint_parallel_dimensions")
    if isinstance(saved_sizes, dict) and model_ranks > 1:  # with one, tp_degree may count ranks that share a sequence
        pp, tp = (positive(model.path, name, saved_sizes.get(name)) for name in ("pp_degree", "tp_degree"))
    else:
        tp = len({rank for _, rank in listing.layers}) or model_ranks
        pp = max(1, model_ranks // tp)
    if pp * tp != model_ranks:
        sizes = f"tp={tp}, pp={pp}"
        raise fail(model.path, "has sizes that contradict each other", f"{model_ranks} model-parallel ranks", sizes)
    return Grid(dp=model.dp, tp=tp, pp=pp)


def _unsupported_expert_faults(listing: Listing, grid: Grid, model: ModelStates) -> Iterator[Fault]:
    """Refuse experts together with other parallelism, or in universal files."""
    sizes, mend = autoep_sizes(model.entries), "load it with the sizes it was saved with"
    if sizes and (grid.tp * grid.pp > 1 or listing.universal or model.param_shapes is None):
        what = "has AutoEP experts together with tensor or pipeline parallelism, at ZeRO stage 0, or in universal files"
        expected, found = "stage 1 to 3, tp=1, pp=1", f"{grid}, ep={', '.join(map(str, sorted(sizes)))}"
        yield UnsupportedLayout.fault(listing.folder, what, expected, found, mend=mend)
    elif (sizes or listing.experts) and grid.pp == 1 and not listing.layers:
        if grid.tp > 1:
            what = "has experts together with tensor or pipeline parallelism"
            yield UnsupportedLayout.fault(listing.folder, what, "tp=1, pp=1", str(grid), mend=mend)
        if listing.universal:
            what, mend = "is a universal checkpoint of a mixture of experts", 'set "load_universal": true'
            yield UnsupportedLayout.fault(listing.folder, what, "a ZeRO checkpoint", "universal", mend=mend)


def grid_faults(listing: Listing, grid: Grid, tp: int, *, optimizer: bool) -> Iterator[Fault]:
    """Yield faults for files of another grid, for missing files, and for a tensor-parallel size other than `tp`."""
    if grid.tp != tp:
        what = "was saved with another tensor-parallel size" if tp > 1 else "was saved with tensor parallelism"
        expected = f"tensor-parallel size {tp}"
        mend = f"load it in a run with import ds_reshard.auto and tensor-parallel size {grid.tp}"
        yield UnsupportedLayout.fault(listing.folder, what, expected, str(grid), mend=mend)
    other_columns = sorted(set(listing.columns) - set(range(grid.tp * grid.pp)))
    if other_columns:
        what, expected = "holds files of another grid", f"mp_rank_00 to mp_rank_{grid.tp * grid.pp - 1:02d} ({grid})"
        found = f"mp_rank_{other_columns[0]:02d}"
        yield CheckpointDamaged.fault(
            listing.folder, what, expected, found, mend="move the files of the other save out of the folder"
        )
    for number in range(grid.tp * grid.pp):
        suffix = f" of mp_rank_{number:02d}" if grid.tp * grid.pp > 1 else ""
        yield from missing_file_faults(listing.column(number), grid.dp, optimizer=optimizer, column_name=suffix)


class Sizes(NamedTuple):
    """The data- and model-parallel sizes of a saving run, and its expert-parallel sizes, empty without experts."""

    dp: int
    mp: int
    ep: frozenset[int] = frozenset()


def saved_sizes(listing: Listing) -> Sizes | None:
    """Return the sizes in the first model file, or None if it has none.

    Reads the pickle alone and checks nothing: for checkpoints that this format refuses.
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
    of_stage_0 = {max(listing.ep_optim, default=0) + 1} - {1}
    return Sizes(dp=numbers[0], mp=numbers[1], ep=autoep_sizes(top) | of_stage_0)


_WITHOUT_OPTIMIZER = ", or pass --no-load-optim, or load_optimizer_states=False (DeepSpeed 0.17 and 0.18.4 save no "
_WITHOUT_OPTIMIZER += "optimizer files of a bf16 run that it wraps as FP16_UnfusedOptimizer)"


def missing_file_faults(listing: Listing, dp: int, *, optimizer: bool, column_name: str = "") -> Iterator[Fault]:
    """Yield faults for the missing and empty files of a column of `dp` ranks; messages call it `column_name`."""
    families = [(listing.model, "model_states", dp if listing.partitioned_model else 1)]
    if optimizer:
        families.append((listing.optim, "optim_states", dp))
    for files, what, count in families:
        absent = [rank for rank in range(count) if rank not in files]
        others_have_some = any(getattr(column, what.partition("_")[0]) for column in listing.columns.values())
        if absent:
            skip = "" if listing.partitioned_model else _WITHOUT_OPTIMIZER  # at stage 3 they hold the weights
            yield CheckpointDamaged.fault(
                listing.folder,
                f"{what} files{column_name} of data-parallel ranks {_ranks_text(absent)} are missing",
                f"{count} files (the saving run had dp={dp})",
                f"{count - len(absent)}",
                mend="restore the missing files, or load another tag"
                if len(absent) < count or others_have_some
                else f"load another tag{skip}",
            )
        for rank in range(count):
            if rank in files and listing.nbytes[files[rank]] == 0:
                yield damaged(listing.path(files[rank]), "is empty", "a torch zip file", "0 bytes")


def _ranks_text(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return shown if len(ranks) <= 16 else f"{shown}, ... ({len(ranks)} in all)"


def weights(model: ModelStates, listing: Listing) -> Iterator[Placement]:
    """Yield where the weights of a model file lie, and at stage 3 the frozen parameters' fragments."""
    trainable = model.trainable
    for name, tensor in model.module.items():
        shape = trainable.get(name) or model.frozen_shapes.get(name) or tensor.shape
        shape = trainable.get(model.shared.get(name, name), shape)
        if is_placeholder(tensor, shape) or not tensor.contiguous:
            continue
        yield whole_placement(name, "weight", tensor.shape, tensor.dtype, family=MODEL, buffer=f"module/{name}")
    if listing.partitioned_model:
        for name, shape in model.frozen_shapes.items():
            fragment = model.frozen_fragments.get(name)
            if fragment is not None and prod(shape) != 0:
                yield sliced_weight(name, shape, fragment.dtype, model.dp, family=MODEL, buffer=f"frozen/{name}")


def buffer_mismatch_faults(model: ModelStates, optim: OptimStates) -> list[Fault]:
    """Return the first difference between the optimizer's flat buffers and those of the model file, or nothing."""
    groups, what = model.param_shapes or (), "flat buffers do not match the model file"
    if len(groups) != len(optim.partitions):
        return [damaged(optim.path, what, f"{len(groups)}", f"{len(optim.partitions)}")]
    what = "alignment gaps do not match the parameters"
    for shapes, partition in zip(groups, optim.partitions, strict=True):
        if partition.alignment is not None and len(partition.alignment) != len(shapes):
            return [damaged(optim.path, what, f"{len(shapes)}", f"{len(partition.alignment)}")]
    return []


def _frozen_faults(model: ModelStates, optim: OptimStates) -> list[Fault]:
    """Refuse ranks whose experts train other parameters than rank 0, whose model file alone lists them."""
    what = "has other parameters than rank 0: ranks have frozen different numbers of experts, or two saves are mixed"
    mend = "freeze as many experts on each rank, pass --no-load-optim, or load_optimizer_states=False, "
    mend += "or load as saved without ds_reshard"
    faults = buffer_mismatch_faults(model, optim)
    return [UnsupportedLayout.fault(optim.path, what, one.expected, one.found, mend=mend) for one in faults]


def optimizer_facts(shapes: Sequence[Mapping[str, Shape]], optim: OptimStates) -> OptimizerFacts:
    """Return the optimizer's param groups and step counters. If a parameter is in several buffers, the first counts."""
    scalars: dict[str, Mapping[str, Scalar]] = {}
    for group, partition in zip(shapes, optim.partitions, strict=True):
        for name in group:
            scalars.setdefault(name, partition.scalars)
    groups, listed = list[GroupFacts](), set[str]()
    for number, members in enumerate(optim.members):
        names = [name for i in members for name in shapes[i] if name not in listed]
        listed.update(names)
        hyperparameters = optim.groups[number] if optim.groups is not None else None
        groups.append(GroupFacts(members=tuple(names), hyperparameters=hyperparameters))
    return OptimizerFacts(groups=tuple(groups), scalars=scalars)
