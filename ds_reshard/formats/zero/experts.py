"""The files of a mixture of experts, as one checkpoint in which each expert has its number of all.

Each expert has a model file of its own, whose entries count experts through all ranks. Optimizer files count those of
their rank, from 0: the ranks of one place in the expert-parallel groups have the same experts, and divide what is
theirs among them, apart from the parameters that every rank has (`_configure_moe_settings`, 0.19.8,
runtime/zero/stage_1_and_2.py). No file says a rank's place: it is rank % ep, or rank // (dp / ep) under
`use_data_before_expert_parallelism` (`_create_expert_and_data_parallel`, utils/groups.py).

An expert of `deepspeed.moe` has parameters of its own. Of AutoEP those of a layer's experts are one parameter each, cut
along its first dimension, which the model file describes (`ds_autoep_layers`, runtime/engine.py); at stage 3 there are
no files of experts, and optimizer files hold masters.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

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
    AUTOEP,
    MODEL,
    OPTIM,
    Grid,
    GridColumn,
    Shape,
    ZeroCheckpoint,
    autoep_sizes,
    facts_of,
    layout_of,
    uneven,
    unmatched,
    weights,
)
from ds_reshard.formats.zero.model_states import ModelStates, positive, read_entries
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import PARTITION_GROUPS, OptimStates, Partition, read_optim_states
from ds_reshard.formats.zero.stage0 import (
    Named,
    all_named,
    alone,
    facts_together,
    param_groups,
    torch_optimizer,
    with_order,
)
from ds_reshard.formats.zero.tensor_parallel import Division, Evidence, divided, divisions
from ds_reshard.model.content import WEIGHT
from ds_reshard.model.facts import OptimizerFacts, canonical, describe
from ds_reshard.model.index import Extent
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey, in_parts, tiled
from ds_reshard.model.records import ElementType, TensorRecord, new_tensor
from ds_reshard.model.region import Box

EXPERT_FILES = "experts of layer "
"""Begins the family of the files of a layer's experts, of AutoEP: a shard each, by its number among all."""
_OF_AUTOEP = ("w1", "w2", "w3")
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
    raise_faults(_unread(listing, grid), subject=subject)
    if autoep_sizes(model.entries):
        return _open_autoep(listing, grid, model, optimizer=optimizer)
    raise_faults(_missing(listing, model), subject=subject)
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


def places_with_order(checkpoint: ZeroCheckpoint, order: Sequence[Mapping[str, Shape]]) -> Named:
    """A checkpoint of stage 0 with the optimizers of expert-parallel ranks named, as `with_order` names that of one.

    `order` is that of a rank of this run; other ranks, of either run, have the same parameters of other experts. What
    every rank has is the first's. What is wrong with any optimizer is raised, and where two say different things.
    """
    ep, listing = checkpoint.grid.ep, checkpoint.listing
    raise_faults(_several_sizes(checkpoint), subject=f"checkpoint {listing.folder}")
    orders = [[_at_place(shapes, place, checkpoint) for shapes in order] for place in range(ep)]
    parts = all_named(
        [partial(with_order, alone(checkpoint, _of_place(checkpoint, n)), own) for n, own in enumerate(orders)],
        lambda part, first: _groups_said(part) == _groups_said(first),
        first="expert-parallel rank",
        folder=listing.folder,
    )
    extents: dict[str, Extent] = {}
    placements: dict[TensorKey, Placement] = {}
    for place, (part, of_one) in enumerate(parts):
        extents |= {f"{place}: {buffer}": extent for buffer, extent in of_one.items()}
        for key, placement in part.layout.placements.items():
            placements.setdefault(key, placement._replace(buffer=f"{place}: {placement.buffer}"))
    layout = Layout({**checkpoint.layout.placements, **placements}, checkpoint.layout.shards)
    facts, first = facts_together([part for part, _ in parts]), parts[0][0]
    return replace(checkpoint, layout=layout, facts=facts, masters_in_module=first.masters_in_module), {0: extents}


def _of_place(checkpoint: ZeroCheckpoint, place: int) -> ModelStates:
    """The model file with the optimizer of one expert-parallel rank, as if that were in it."""
    listing, model = checkpoint.listing, checkpoint.model
    name = listing.places[place]
    entries = {**model.entries, **listing.read(name, read_entries)}
    return replace(model, path=listing.path(name), entries=entries)


def _at_place(shapes: Mapping[str, Shape], place: int, checkpoint: ZeroCheckpoint) -> dict[str, Shape]:
    """A param group as a rank of the saving run had it: its experts of a layer where this run's stand, by number."""
    counts = experts_held(checkpoint.model.module, checkpoint.grid.ep)
    made: dict[str, Shape] = {}
    again: list[str] = []
    for prefix, block in itertools.groupby(shapes, lambda name: (expert_of(name) or ("",))[0]):
        names = list(block)
        if not prefix:
            made |= {name: shapes[name] for name in names}
            again += names
            continue
        tails = {of[2]: shapes[name] for name in names if (of := expert_of(name)) is not None}
        numbers = sorted({of[1] for name in names if (of := expert_of(name)) is not None})
        again += [f"{prefix}{number}{tail}" for number in numbers for tail in tails]
        held = counts.get(prefix, 0)
        for number in range(place * held, (place + 1) * held):
            made |= {f"{prefix}{number}{tail}": shape for tail, shape in tails.items()}
    if again != list(shapes):
        what = "are in another order than one after another, or not all trained alike: no file names their states"
        mend = f"build the param groups so, or load with expert-parallel size {checkpoint.grid.ep}"
        raise_faults([UnsupportedLayout.fault("this run's experts", what, mend=mend)], subject="matching experts")
    return made


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


def _several_sizes(checkpoint: ZeroCheckpoint) -> Iterator[Fault]:
    """Layers of several expert-parallel sizes, which the names that DeepSpeed gives param groups tell."""
    names = {str(group.get("name")) for group in _saved_groups(checkpoint) if group.get("moe")}
    if len(names) > 1:
        what = "holds layers of several expert-parallel sizes at ZeRO stage 0, or their param groups in another order"
        mend = "load it with these sizes and groups, each run started with one PYTHONHASHSEED"
        found = ", ".join(sorted(names))
        yield UnsupportedLayout.fault(checkpoint.listing.folder, what, "experts of one size", found, mend=mend)


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
        for key, value in listing.read(name, read_entries).items():
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
            columns.append(GridColumn(family=family, files=files, shapes=shapes, first=head))
            for number in own:
                numbers.setdefault(number, []).append(len(partitions))
                partitions.append(head.partitions[number])
                named.append(shapes[number])
    members = tuple(tuple(at for number in of_group for at in numbers[number]) for of_group in first.members)
    counts = tuple(column.dp for column in columns for _ in column.shapes)
    together = replace(first, partitions=tuple(partitions), counts=counts, members=members)
    return tuple(named), tuple(columns), together


def _open_autoep(listing: Listing, grid: Grid, model: ModelStates, *, optimizer: bool) -> ZeroCheckpoint:
    """The same of parameters that all experts of a layer share."""
    subject = f"checkpoint {listing.folder}"
    if not listing.partitioned_model:
        raise_faults(_missing(listing, model), subject=subject)
    layers = _layers(model)
    dealt, dtypes = _dealt(listing, model, layers)
    shapes = tuple(
        {n: dealt[n].shape if n in dealt else s for n, s in group.items()} for group in (model.param_shapes or ())
    )
    optim: OptimStates | None = None
    facts: OptimizerFacts | None = None
    columns: tuple[GridColumn, ...] = ()
    grid = grid._replace(ep=layers[0].ep)
    if optimizer:
        optim = listing.read(listing.optim[0], read_optim_states)
        raise_faults(unmatched(model, optim), subject=subject)
        columns = _autoep_columns(listing, grid, model, optim, dealt)
        facts = facts_of(shapes, optim)
    stand_in = {name: new_tensor("", (0,), dtypes[name]) for name in dealt}
    module = {**model.module, **stand_in}
    entries = {**model.entries, "module": {**module, **model.objects}}
    model = replace(model, param_shapes=shapes, module=module, entries=entries)
    placements: list[Placement] = [*weights(model, listing), *_of_expert_files(listing, layers, dealt, dtypes)]
    placements += [
        at for column in columns if not column.number for at in column.placements() if at.key.name not in dealt
    ]
    placements += _of_places(columns, dealt)
    shards = {MODEL: model.dp if listing.partitioned_model else 1, **{column.family: grid.dp for column in columns}}
    if not listing.partitioned_model:
        shards |= {f"{EXPERT_FILES}{layer.number}": layer.total for layer in layers}
    layout = layout_of(listing, placements, shards)
    return ZeroCheckpoint(
        listing=listing, model=model, optim=optim, layout=layout, facts=facts, grid=grid, columns=columns
    )


class _Layer(NamedTuple):
    """What the model file says of a layer of AutoEP."""

    number: int
    prefix: str
    total: int
    ep: int
    said: Mapping[str, object]

    @property
    def names(self) -> list[str]:
        return [f"{self.prefix}.{part}" for part in _OF_AUTOEP]


def _layers(model: ModelStates) -> list[_Layer]:
    said, found, faults = model.entries.get(AUTOEP), list[_Layer](), list[Fault]()
    for number, one in enumerate(said if isinstance(said, list) else [said]):
        prefix = one.get("expert_key_prefix") if isinstance(one, dict) else None
        if not isinstance(one, dict) or not isinstance(prefix, str):
            raise fail(model.path, f"entry {AUTOEP!r} is malformed", "a layer's experts", describe(one))
        total, ep = (positive(model.path, key, one.get(key)) for key in ("num_experts", "ep_size"))
        found.append(_Layer(number, prefix, total, ep, one))
        faults += _misplaced(model.path, found[-1])
    if len({layer.ep for layer in found}) > 1 or any(layer.total % layer.ep for layer in found):
        sizes = ", ".join(f"{layer.total} over {layer.ep}" for layer in found)
        faults.append(damaged(model.path, "deals out experts of layers unevenly", "one size that divides them", sizes))
    raise_faults(faults, subject="reading a checkpoint")
    return found


def _misplaced(path: str, layer: _Layer) -> Iterator[Fault]:
    """Where experts are said to lie otherwise than in order over the ranks, as files of experts count them."""
    placement = layer.said.get("expert_placement")
    ranks = placement.get("ranks") if isinstance(placement, dict) else None
    if placement is None:
        return  # of a release that does not say it
    held = {one.get("rank"): one.get("experts") for one in ranks or () if isinstance(one, dict)}
    own = layer.total // layer.ep
    if held == {rank: list(range(rank * own, (rank + 1) * own)) for rank in range(layer.ep)}:
        return
    numbers = [number for experts in held.values() for number in (experts if isinstance(experts, list) else [experts])]
    every = set(map(str, numbers)) == set(map(str, range(layer.total)))
    where, found = f"{path}: {layer.prefix}", "; ".join(f"{rank}: {experts}" for rank, experts in held.items())
    if every:
        what = "deals its experts out in another order than by rank, or one to several ranks"
        mend = "load it with the sizes it was saved with"
        yield UnsupportedLayout.fault(where, what, f"{own} a rank, in order", found, mend=mend)
    else:
        yield damaged(where, "says of some experts no rank", f"each of {layer.total}", found)


def _dealt(
    listing: Listing, model: ModelStates, layers: Sequence[_Layer]
) -> tuple[dict[str, Division], dict[str, ElementType]]:
    """How each parameter of experts is cut, and the type of its weights: as the files of first experts have them."""
    dealt, dtypes, faults = dict[str, Division](), dict[str, ElementType](), list[Fault]()
    types = [tensor.dtype for tensor in model.module.values()]
    for layer in layers:
        files = expert_file(listing, layer.number, 0) if not listing.partitioned_model else {}
        for name in layer.names:
            of_file, local = files.get(name), model.trainable.get(name)
            tail = of_file.shape if of_file is not None else local[1:] if local is not None else None
            own = (layer.total // layer.ep, *(tail or ()))
            if tail is None or local not in (None, own):
                expected, found = str(list(own)), str(local and list(local))
                faults.append(damaged(model.path, f"has {name} of another shape than its experts", expected, found))
                continue
            even = divided((layer.total, *tail), 0, [[own[0]] * layer.ep], "experts")
            faults += _other_map(model.path, name, layer, even)
            dealt[name], dtypes[name] = even, of_file.dtype if of_file is not None else types[0]
    raise_faults(faults, subject=f"checkpoint {listing.folder}")
    return dealt, dtypes


def _other_map(path: str, name: str, layer: _Layer, even: Division) -> Iterator[Fault]:
    """Where the affine map of a parameter says anything else than the placement of its experts."""
    maps = layer.said.get("affine_maps")
    params = maps.get("params") if isinstance(maps, dict) else None
    if not isinstance(params, dict) or name not in params:
        return
    info = {"affine_map": {"version": 1, "params": {re.escape(name): params[name]}}}
    local = (layer.total // layer.ep, *even.shape[1:])
    found, unknown = divisions({name: [local] * layer.ep}, Evidence(info), ())
    if name in unknown:
        yield damaged(f"{path}: {name}", unknown[name].what, unknown[name].expected, unknown[name].found)
    elif (found[name].shape, found[name].ranks) != (even.shape, even.ranks) and layer.ep > 1:
        what = "has an affine map that places experts otherwise than in order over the ranks"
        yield damaged(f"{path}: {name}", what, f"{local[0]} of {layer.total} experts on each rank", "others")


def expert_file(listing: Listing, layer: int, expert: int) -> dict[str, TensorRecord]:
    """The weights of one expert of AutoEP, by the names of the parameters that they are slices of."""
    name = listing.experts[layer, expert]
    found: dict[str, TensorRecord] = {}
    for key, value in listing.read(name, read_entries).items():
        parameter, _, number = key.rpartition(".")
        if number != str(expert) or not isinstance(value, TensorRecord) or not value.contiguous:
            expected = f"weights of expert {expert}"
            raise fail(listing.path(name), "is not a file of this expert", expected, f"{key!r}")
        found[parameter] = value
    return found


def _of_expert_files(
    listing: Listing, layers: Sequence[_Layer], dealt: Mapping[str, Division], dtypes: Mapping[str, ElementType]
) -> Iterator[Placement]:
    """Where the weights of all experts lie, in files of their own."""
    for layer in layers if not listing.partitioned_model else ():
        family = f"{EXPERT_FILES}{layer.number}"
        for name in layer.names:
            shape = dealt[name].shape
            boxes = [Box.along(shape, 0, expert, 1) for expert in range(layer.total)]
            tiles = [(expert, 0, box) for expert, box in enumerate(boxes)]
            yield tiled(TensorKey(name, WEIGHT), shape, dtypes[name], tiles, family=family, buffer=name)


def _autoep_columns(
    listing: Listing, grid: Grid, model: ModelStates, first: OptimStates, dealt: Mapping[str, Division]
) -> tuple[GridColumn, ...]:
    """The optimizer files: a column of what every rank has, and one for each place of experts, where there are some."""
    groups, of_experts, share = model.param_shapes or (), dict[int, bool](), grid.dp // grid.ep
    faults: list[Fault] = []
    for number, group in enumerate(groups):
        own = {name in dealt for name in group}
        of_experts[number] = True in own
        expected = share if True in own else grid.dp
        if len(own) > 1 or first.counts[number] != expected:
            what, found = f"flat buffer {number} is divided among other ranks than its parameters", first.counts[number]
            faults.append(
                damaged(first.path, what, f"{expected}", f"{found}" if len(own) < 2 else "experts and others")
            )
    raise_faults(faults, subject=f"checkpoint {listing.folder}")
    files = tuple(listing.optim[rank] for rank in range(grid.dp))
    if grid.ep == 1:
        return (GridColumn(family=OPTIM, files=files, shapes=dict(enumerate(groups)), first=first),)
    dense = {number: group for number, group in enumerate(groups) if not of_experts[number]}
    experts = {number: group for number, group in enumerate(groups) if of_experts[number]}
    columns = [GridColumn(family=OPTIM, files=files, shapes=dense, first=first)]
    for place in range(grid.ep):
        ranks = ranks_of_place(place, grid, model)
        head = first if not ranks[0] else listing.read(listing.optim[ranks[0]], read_optim_states)
        faults += [*unmatched(model, head), *_of_other_ranks(head, experts, ranks)]
        files = tuple(listing.optim[rank] for rank in ranks)
        family, begin = f"{OPTIM} of experts", place * share
        columns.append(GridColumn(family=family, files=files, shapes=experts, first=head, begin=begin, number=place))
    raise_faults(faults, subject=f"checkpoint {listing.folder}")
    return tuple(columns)


def ranks_of_place(place: int, grid: Grid, model: ModelStates) -> list[int]:
    """The data-parallel ranks of one place in the expert-parallel groups, which have the same experts."""
    share, swapped = grid.dp // grid.ep, bool(model.config.get("use_data_before_expert_parallelism"))
    return [rank for rank in range(grid.dp) if (rank // share if swapped else rank % grid.ep) == place]


def _of_other_ranks(head: OptimStates, numbers: Iterable[int], ranks: list[int]) -> Iterator[Fault]:
    """Where a file of stage 3 says that other ranks share its experts."""
    said = head.entries.get(PARTITION_GROUPS)
    if not isinstance(said, list):
        return
    for number in numbers:
        found = said[number].get("partition_ranks")
        if found != ranks:
            what = f"shares the experts of flat buffer {number} among other ranks than its place in their groups says"
            yield damaged(head.path, what, str(ranks), describe(found))


def _of_places(columns: Sequence[GridColumn], dealt: Mapping[str, Division]) -> Iterator[Placement]:
    """Where masters and states of experts lie: a tile for each place."""
    held: dict[TensorKey, list[tuple[GridColumn, Placement]]] = {}
    for column in columns:
        for placement in column.placements():
            if placement.key.name in dealt:
                held.setdefault(placement.key, []).append((column, placement))
    for key, places in held.items():
        division, (_, first) = dealt[key.name], places[0]
        every = first._replace(shape=division.shape, box=Box.whole(division.shape), cut=Cut(chunk=1))
        cuts = (at.cut._replace(first=at.cut.first + column.begin) for column, at in places)
        yield in_parts(every, zip(cuts, division.ranks, strict=True))
