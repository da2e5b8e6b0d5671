"""The files of a mixture of experts (`deepspeed.moe`), as one checkpoint in which each expert has its number of all.

Each expert has a model file of its own, whose entries count experts through all ranks. Optimizer files count those of
their rank, from 0: the ranks of one place in the expert-parallel groups have the same experts, and divide what is
theirs among them, apart from the parameters that every rank has (`_configure_moe_settings`, 0.19.8,
runtime/zero/stage_1_and_2.py). No file says a rank's place: it is rank % ep, or rank // (dp / ep) under
`use_data_before_expert_parallelism` (`_create_expert_and_data_parallel`, utils/groups.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, damaged, fail, raise_faults
from ds_reshard.formats.zero.checkpoint import (
    MODEL,
    OPTIM,
    Grid,
    GridColumn,
    Shape,
    ZeroCheckpoint,
    facts_of,
    layout_of,
    unmatched,
    weights,
)
from ds_reshard.formats.zero.model_states import ModelStates, read_entries
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import OptimStates, Partition, read_optim_states
from ds_reshard.model.facts import OptimizerFacts
from ds_reshard.model.layout import Placement
from ds_reshard.model.records import TensorRecord

_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)([0-9]+)(\..*)", re.DOTALL)


def expert_of(name: str) -> tuple[str, int, str] | None:
    """What is before an expert's number in the name of one of its tensors, the number, and what is behind it."""
    match = _EXPERT.fullmatch(name) if "deepspeed_experts" in name else None
    return (match[1], int(match[2]), match[3]) if match else None


def renumbered(name: str, first: Mapping[str, int]) -> str:
    """The name with its expert's number among all, where `first` says a layer's first on this rank."""
    found = expert_of(name)
    return f"{found[0]}{first.get(found[0], 0) + found[1]}{found[2]}" if found is not None else name


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
    raise_faults(_unread(listing, grid), subject=subject)
    raise_faults(_missing(listing, model), subject=subject)
    module = {**model.module, **_experts(listing)}
    optim: OptimStates | None = None
    facts: OptimizerFacts | None = None
    columns: tuple[GridColumn, ...] = ()
    if optimizer:
        first = listing.read(listing.optim[0], read_optim_states)
        raise_faults(unmatched(model, first), subject=subject)
        shapes, columns, optim = _columns(listing, grid, model, first)
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


def _unread(listing: Listing, grid: Grid) -> Iterator[Fault]:
    if grid.tp * grid.pp > 1 or listing.layers:
        what, mend = "has experts beside tensor or pipeline parallelism", "load it with the sizes it was saved with"
        yield UnsupportedLayout.fault(listing.folder, what, "tp=1, pp=1", str(grid), mend=mend)
    if listing.universal:
        what, mend = "is a universal checkpoint of a mixture of experts", 'set "load_universal": true'
        yield UnsupportedLayout.fault(listing.folder, what, "a ZeRO checkpoint", "universal", mend=mend)


def _missing(listing: Listing, model: ModelStates) -> Iterator[Fault]:
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


def _experts(listing: Listing) -> dict[str, TensorRecord]:
    """The weights of all experts, whose files name them by their numbers among all."""
    found: dict[str, TensorRecord] = {}
    for (_, expert), name in sorted(listing.experts.items()):
        path = listing.path(name)
        for key, value in listing.read(name, read_entries).items():
            of = expert_of(key)
            if of is None or of[1] != expert or key in found or not isinstance(value, TensorRecord):
                raise fail(
                    path, "is not a file of this expert", f"weights of expert {expert}, in no other file", f"{key!r}"
                )
            found[key] = value
    return found


def _columns(
    listing: Listing, grid: Grid, model: ModelStates, first: OptimStates
) -> tuple[tuple[dict[str, Shape], ...], tuple[GridColumn, ...], OptimStates]:
    """The flat buffers of all ranks by their names in the model: shapes, where they lie, and what all say together.

    A buffer of experts is one for each place in the expert-parallel groups, all of one param group.
    """
    groups, swapped = model.param_shapes or (), bool(model.config.get("use_data_before_expert_parallelism"))
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
    local = _local_numbers(groups)
    named: list[dict[str, Shape]] = []
    partitions: list[Partition] = []
    columns: list[GridColumn] = []
    numbers: dict[int, list[int]] = {}
    for count in dict.fromkeys(first.counts):
        ep = grid.dp // count
        own = [number for number, of in enumerate(first.counts) if of == count]
        for place in range(ep):
            ranks = [r for r in range(grid.dp) if (r // count if swapped else r % ep) == place]
            head = first if not ranks[0] else listing.read(listing.optim[ranks[0]], read_optim_states)
            raise_faults(unmatched(model, head), subject=f"checkpoint {listing.folder}")
            begin = {prefix: place * number for prefix, number in local.items()} if ep > 1 else {}
            shapes = {n: {renumbered(name, begin): s for name, s in groups[n].items()} for n in own}
            family = OPTIM if ep == 1 else f"{OPTIM} of experts {place} of {ep}"
            files = tuple(listing.optim[rank] for rank in ranks)
            columns.append(GridColumn(family=family, files=files, shapes=shapes, first=head))
            for number in own:
                numbers.setdefault(number, []).append(len(partitions))
                partitions.append(head.partitions[number])
                named.append(shapes[number])
    members = tuple(tuple(at for number in of_group for at in numbers[number]) for of_group in first.members)
    counts = tuple(column.dp for column in columns for _ in column.shapes)
    together = replace(first, partitions=tuple(partitions), counts=counts, members=members)
    return tuple(named), tuple(columns), together


def _local_numbers(groups: Sequence[Mapping[str, Shape]]) -> dict[str, int]:
    """How many experts of each layer a rank has."""
    found: dict[str, int] = {}
    for of in (expert_of(name) for group in groups for name in group):
        if of is not None:
            found[of[0]] = max(found.get(of[0], 0), of[1] + 1)
    return found
