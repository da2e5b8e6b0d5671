"""The files of a mixture of experts, as one checkpoint in which each expert has its number of all.

Each expert has a model file of its own, whose entries count experts through all ranks. Optimizer files count those of
their rank, from 0: the ranks of one place in the expert-parallel groups have the same experts, and divide what is
theirs among them, apart from the parameters that every rank has (`_configure_moe_settings`, 0.19.8,
runtime/zero/stage_1_and_2.py). No file says a rank's place: it is rank % ep, or rank // (dp / ep) under
`use_data_before_expert_parallelism` (`_create_expert_and_data_parallel`, utils/groups.py).

An expert of `deepspeed.moe` has parameters of its own; for those of AutoEP see `autoep`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ds_reshard.errors import (
    CheckpointDamaged,
    Fault,
    ReshardError,
    UnsupportedLayout,
    damaged,
    fail,
    faults_of,
    raise_faults,
)
from ds_reshard.formats.zero.checkpoint import (
    MODEL,
    OPTIM,
    Grid,
    GridColumn,
    ZeroCheckpoint,
    facts_of,
    flat_buffers,
    layout_of,
    uneven,
    unmatched,
    weights,
)
from ds_reshard.formats.zero.model_states import ModelStates, read_entries
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates, Partition, read_optim_states
from ds_reshard.formats.zero.stage0 import Named, all_named, alone, param_groups, torch_optimizer, with_order
from ds_reshard.model.facts import OptimizerFacts, canonical
from ds_reshard.model.layout import Layout, Placement
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Shape

_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)([0-9]+)(\..*)", re.DOTALL)


def expert_of(name: str) -> tuple[str, int, str] | None:
    """What is before an expert's number in the name of one of its tensors, the number, and what is behind it."""
    match = _EXPERT.fullmatch(name) if "deepspeed_experts" in name else None
    return (match[1], int(match[2]), match[3]) if match else None


def renumbered(name: str, first: Mapping[str, int]) -> str:
    """The name with its expert's number among all, where `first` says a layer's first on this rank."""
    found = expert_of(name)
    return f"{found[0]}{first.get(found[0], 0) + found[1]}{found[2]}" if found is not None else name


def experts_held(names: Iterable[str], ep: int) -> dict[str, int]:
    """How many experts of each layer, by what is before their numbers, each of `ep` ranks has: as the names count."""
    totals: dict[str, int] = {}
    for of in map(expert_of, names):
        if of is not None:
            totals[of[0]] = max(totals.get(of[0], 0), of[1] + 1)
    return {prefix: total // ep for prefix, total in totals.items()}


def as_one_place(zero: ZeroCheckpoint) -> ZeroCheckpoint:
    """The checkpoint with param groups as one expert-parallel rank has them: layer by layer, expert by expert."""
    if not zero.listing.experts or zero.facts is None:
        return zero
    groups = tuple(replace(group, members=tuple(by_number(group.members))) for group in zero.facts.groups)
    return replace(zero, facts=replace(zero.facts, groups=groups))


def by_number(names: Iterable[str]) -> list[str]:
    """The parameters of experts by layer, as these come first, and number; what is none of an expert's before them."""
    names, layers = list(names), dict[str, int]()
    places = []
    for name in names:
        of = expert_of(name)
        places.append((-1, 0) if of is None else (layers.setdefault(of[0], len(layers)), of[1]))
    return [name for _, name in sorted(zip(places, names, strict=True), key=lambda pair: pair[0])]


def open_experts(listing: Listing, grid: Grid, model: ModelStates, *, optimizer: bool) -> ZeroCheckpoint:
    """Read the heads of all ranks' files; raises every structural fault that they show."""
    subject = f"checkpoint {listing.folder}"
    raise_faults(unread(listing, grid), subject=subject)
    raise_faults(missing_experts(listing, model), subject=subject)
    module = {**model.module, **_experts(listing)}
    if listing.places:
        raise_faults(_missing_places(listing, grid, model), subject=subject)
        raise_faults(_unlike_places(listing) if optimizer else (), subject=subject)
        grid = grid._replace(ep=len(listing.places))
    optim: OptimStates | None = None
    facts: OptimizerFacts | None = None
    columns: tuple[GridColumn, ...] = ()
    if optimizer:
        first = listing.read(listing.optim[0], read_optim_states)
        raise_faults(unmatched(model, first), subject=subject)
        shapes, columns, optim = _columns(listing, grid, model, first, module)
        grid = grid._replace(ep=max(grid.dp // count for count in first.counts))
        model = replace(model, param_shapes=shapes)
        facts = facts_of(shapes, optim)
    entries = {**model.entries, "module": {**module, **model.objects}}
    model = replace(model, module=module, entries=entries)
    placements: list[Placement] = [*weights(model, listing)]
    for column in columns:
        placements += column.placements()
    shards = {MODEL: 1, **{column.family: column.dp for column in columns}}
    layout = layout_of(listing, placements, shards)
    return ZeroCheckpoint(
        listing=listing, model=model, optim=optim, layout=layout, facts=facts, grid=grid, columns=columns
    )


def unread(listing: Listing, grid: Grid) -> Iterator[Fault]:
    if grid.tp * grid.pp > 1 or listing.layers:
        what, mend = "has experts beside tensor or pipeline parallelism", "load it with the sizes it was saved with"
        yield UnsupportedLayout.fault(listing.folder, what, "tp=1, pp=1", str(grid), mend=mend)
    if listing.universal:
        what, mend = "is a universal checkpoint of a mixture of experts", 'set "load_universal": true'
        yield UnsupportedLayout.fault(listing.folder, what, "a ZeRO checkpoint", "universal", mend=mend)


def missing_experts(listing: Listing, model: ModelStates) -> Iterator[Fault]:
    """Expert files that the saving run must have written and the folder has not."""
    said = model.entries.get("num_experts")
    counts = said if isinstance(said, list | tuple) else [said]
    wanted = {
        (layer, expert) for layer, count in enumerate(counts) if isinstance(count, int) for expert in range(count)
    }
    absent = sorted(wanted - set(listing.experts))
    if absent:
        shown = ", ".join(f"layer {layer} expert {expert}" for layer, expert in absent[:8])
        what = f"files of experts are missing: {shown}{', ...' if len(absent) > 8 else ''}"
        found = f"{len(wanted) - len(absent)}"
        mend = "restore the files, or load another tag"
        yield CheckpointDamaged.fault(listing.folder, what, f"{len(wanted)} files", found, mend=mend)
    further = sorted(set(listing.experts) - wanted)
    if further:
        layer, expert = further[0]
        what, found = "holds files of experts that the saving run had not", f"layer {layer} expert {expert}"
        mend = "move the files of the other save out of the folder"
        yield CheckpointDamaged.fault(listing.folder, what, f"{len(wanted)} files", found, mend=mend)


def _missing_places(listing: Listing, grid: Grid, model: ModelStates) -> Iterator[Fault]:
    """Optimizers of stage 0 that expert-parallel ranks have not saved, or of more ranks than can be."""
    count = 1 + max(listing.places)
    absent = sorted(set(range(count)) - set(listing.places))
    said = model.entries.get("num_experts")
    totals = [total for total in (said if isinstance(said, list | tuple) else [said]) if isinstance(total, int)]
    if absent or grid.dp % count or any(total % count for total in totals):
        what, mend = "optimizers of expert-parallel ranks are missing", "restore the files, or load another tag"
        found = f"expp_rank_{', '.join(map(str, sorted(listing.places)))} of {grid.dp} ranks and {totals} experts"
        expected = "one for each rank of a size that divides both"
        yield CheckpointDamaged.fault(listing.folder, what, expected, found, mend=mend)


def _unlike_places(listing: Listing) -> Iterator[Fault]:
    """Files of these optimizers that are damaged, or another rank's by the name within."""
    for name in listing.places.values():
        try:
            listing.read(name, read_entries)
        except ReshardError as error:
            yield from faults_of(error)


def place_with_order(
    checkpoint: ZeroCheckpoint, order: Sequence[Mapping[str, Shape]], ep_rank: int, first: Mapping[str, int]
) -> Named:
    """A checkpoint of stage 0 with the optimizer of one expert-parallel rank named, as `with_order` names that of one.

    `order` is that of the rank, and `first` says by layer the number of its first expert. What every rank has is read
    from the first one's file, as all ranks of the run share it. Raises where that says something else beside the
    tensors.
    """
    local = {prefix: -number for prefix, number in first.items()}
    of_first = [{renumbered(name, local): shape for name, shape in shapes.items()} for shapes in order]
    (head, shared), (own, extents) = all_named(
        [
            partial(with_order, alone(checkpoint, _of_place(checkpoint, 0)), of_first),
            partial(with_order, alone(checkpoint, _of_place(checkpoint, ep_rank)), order),
        ],
        lambda part, head: _groups_said(part) == _groups_said(head),
        first="expert-parallel rank",
        folder=checkpoint.listing.folder,
    )
    placements = dict(checkpoint.layout.placements)
    for key, placement in own.layout.placements.items():
        of_first_rank = head.layout.placements.get(key) if expert_of(key.name) is None else None
        placements[key] = of_first_rank or placement._replace(buffer=f"{ep_rank}: {placement.buffer}")
    extents = {**shared, **{f"{ep_rank}: {buffer}": extent for buffer, extent in extents.items()}}
    layout = Layout(placements, checkpoint.layout.shards)
    return replace(checkpoint, layout=layout, facts=own.facts, masters_in_module=own.masters_in_module), {0: extents}


def _of_place(checkpoint: ZeroCheckpoint, place: int) -> ModelStates:
    """The model file with the optimizer of one expert-parallel rank, as if that were in it."""
    listing, model = checkpoint.listing, checkpoint.model
    name = listing.places[place]
    entries = {**model.entries, **listing.read(name, read_entries)}
    return replace(model, path=listing.path(name), entries=entries)


def same_places(checkpoint: ZeroCheckpoint, sizes: set[int], groups: Sequence[Mapping[str, object]] | None) -> bool:
    """Whether a run of these expert-parallel sizes and param groups has the optimizers of stage 0 as they were saved.

    DeepSpeed orders groups of several sizes by hashes, which Python draws anew for each process.
    """
    if max(sizes, default=1) != checkpoint.grid.ep:
        return False
    return groups is None or _outline(groups) == _outline(_saved_groups(checkpoint))


def _outline(groups: Iterable[Mapping[str, object]]) -> list[tuple[object, int]]:
    """The name that DeepSpeed has given each param group, and how many parameters it has."""
    sized = ((group.get("name"), group.get("params")) for group in groups)
    return [(name, len(params) if isinstance(params, list) else 0) for name, params in sized]


def _saved_groups(checkpoint: ZeroCheckpoint) -> list[Mapping[str, object]]:
    return param_groups(torch_optimizer(_of_place(checkpoint, 0)))


def _groups_said(part: ZeroCheckpoint) -> str:
    """What an optimizer says beside the tensors: hyper-parameters of each group, and what is alike of its members."""
    facts = part.facts
    assert facts is not None
    said = []
    for group in facts.groups:
        scalars = {canonical(dict(facts.scalars.get(name, {}))) for name in group.members}
        said.append((canonical(dict(group.hyperparameters or {})), sorted(scalars)))
    return repr(said)


def _experts(listing: Listing) -> dict[str, TensorRecord]:
    """The weights of all experts, whose files name them by their numbers among all."""
    found: dict[str, TensorRecord] = {}
    for (_, expert), name in sorted(listing.experts.items()):
        path = listing.path(name)
        for key, value in listing.know(name, read_entries).items():
            of = expert_of(key)
            if of is None or of[1] != expert or key in found or not isinstance(value, TensorRecord):
                raise fail(
                    path, "is not a file of this expert", f"weights of expert {expert}, in no other file", f"{key!r}"
                )
            found[key] = value
    return found


def _columns(
    listing: Listing, grid: Grid, model: ModelStates, first: OptimStates, experts: Iterable[str]
) -> tuple[tuple[dict[str, Shape], ...], tuple[GridColumn, ...], OptimStates]:
    """The flat buffers of all ranks by their names in the model: shapes, where they lie, and what all say together.

    A buffer of experts is one for each place in the expert-parallel groups, all of one param group. `experts` are the
    names of all weights, as a rank's flat buffers do not have those that it does not train.
    """
    groups = model.param_shapes or ()
    faults = [
        damaged(
            first.path,
            f"flat buffer {number} is divided among a number of ranks that does not fit",
            f"{grid.dp}",
            f"{count}",
        )
        for number, count in enumerate(first.counts)
        if grid.dp % count
    ]
    raise_faults(faults, subject=f"checkpoint {listing.folder}")
    totals = experts_held(experts, 1)
    named: list[dict[str, Shape]] = []
    partitions: list[Partition] = []
    columns: list[GridColumn] = []
    numbers: dict[int, list[int]] = {}
    for count in dict.fromkeys(first.counts):
        ep = grid.dp // count
        own = [number for number, of in enumerate(first.counts) if of == count]
        for place in range(ep):
            ranks = ranks_of_place(place, grid._replace(ep=ep), model)
            head = first if not ranks[0] else listing.read(listing.optim[ranks[0]], read_optim_states)
            raise_faults(uneven(model, head), subject=f"checkpoint {listing.folder}")
            begin = {prefix: place * total // ep for prefix, total in totals.items()}
            shapes = {n: {renumbered(name, begin): s for name, s in groups[n].items()} for n in own}
            family = OPTIM if ep == 1 else f"{OPTIM} of experts {place} of {ep}"
            files = tuple(listing.optim[rank] for rank in ranks)
            buffers = flat_buffers(head, shapes, count)
            columns.append(GridColumn(family=family, files=files, buffers=buffers, first=head))
            for number in own:
                numbers.setdefault(number, []).append(len(partitions))
                partitions.append(head.partitions[number])
                named.append(shapes[number])
    members = tuple(tuple(at for number in of_group for at in numbers[number]) for of_group in first.members)
    counts = tuple(column.dp for column in columns for _ in column.buffers)
    together = replace(first, partitions=tuple(partitions), counts=counts, members=members)
    return tuple(named), tuple(columns), together


def ranks_of_place(place: int, grid: Grid, model: ModelStates) -> list[int]:
    """The data-parallel ranks of one place in the expert-parallel groups, which have the same experts."""
    share, swapped = grid.dp // grid.ep, bool(model.config.get("use_data_before_expert_parallelism"))
    return [rank for rank in range(grid.dp) if (rank // share if swapped else rank % grid.ep) == place]
