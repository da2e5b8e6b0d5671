"""The experts of AutoEP, which DeepSpeed deals out to the ranks of expert-parallel groups itself.

Those of a layer are one parameter each of w1, w2 and w3, cut along its first dimension. The model file says which
experts each expert-parallel rank has, in order (`ds_autoep_layers`, runtime/engine.py; `expert_placement`,
checkpoint/autoep_affine.py, 0.19.8): any order, other numbers on each rank, and an expert on several, whose copies must
be equal. DeepSpeed's engine deals them out in order, the same number to each. Each expert's weights have a file of
their own, one whoever has a copy; at stage 3 there are none, and optimizer files hold masters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ds_reshard.errors import Fault, UnsupportedLayout, damaged, fail, raise_faults
from ds_reshard.formats.zero.checkpoint import (
    AUTOEP,
    MODEL,
    OPTIM,
    Grid,
    GridColumn,
    ZeroCheckpoint,
    facts_of,
    flat_buffers,
    layout_of,
    unmatched,
    weights,
)
from ds_reshard.formats.zero.experts import missing_experts, ranks_of_place, unread
from ds_reshard.formats.zero.model_states import ModelStates, positive, read_entries
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.optim_states import PARTITION_GROUPS, OptimStates, read_optim_states
from ds_reshard.model.content import WEIGHT
from ds_reshard.model.facts import OptimizerFacts, describe
from ds_reshard.model.layout import Cut, Placement, TensorKey, in_parts, tiled
from ds_reshard.model.records import ElementType, TensorRecord, new_tensor
from ds_reshard.model.region import Box, Part, Shape

EXPERT_FILES = "experts of layer "
"""Begins the family of the files of a layer's experts: a shard each, by its number among all."""
_PARAMETERS = ("w1", "w2", "w3")
_RESTORE = "restore all files of one save, or load another tag"


def open_autoep(listing: Listing, grid: Grid, model: ModelStates, *, optimizer: bool) -> ZeroCheckpoint:
    """Read the heads of all ranks' files; raises every structural fault that they show."""
    subject = f"checkpoint {listing.folder}"
    raise_faults(unread(listing, grid), subject=subject)
    if not listing.partitioned_model:
        raise_faults(missing_experts(listing, model), subject=subject)
    layers = _layers(model)
    dealt, dtypes = _dealt(listing, model, layers)
    shapes = tuple(
        {n: dealt[n].shape if n in dealt else s for n, s in group.items()} for group in (model.param_shapes or ())
    )
    optim: OptimStates | None = None
    facts: OptimizerFacts | None = None
    columns: tuple[GridColumn, ...] = ()
    grid = grid._replace(ep=len(layers[0].ranks))
    if optimizer:
        optim = listing.read(listing.optim[0], read_optim_states)
        raise_faults(unmatched(model, optim), subject=subject)
        columns = _columns(listing, grid, model, optim, dealt)
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
    """A layer, and the experts of each expert-parallel rank, in the order in which its parameters have them."""

    number: int
    prefix: str
    total: int
    ranks: tuple[tuple[int, ...], ...]

    @property
    def names(self) -> list[str]:
        return [f"{self.prefix}.{part}" for part in _PARAMETERS]

    @property
    def in_order(self) -> bool:
        return self.ranks == _in_order(self.total, len(self.ranks))

    def copies(self) -> Iterator[list[int]]:
        """The rank that has each expert: of the first copies, of the second, and so on.

        An expert without another copy is the first again: each list tells of all experts.
        """
        holders: list[list[int]] = [[] for _ in range(self.total)]
        for rank, experts in enumerate(self.ranks):
            for expert in experts:
                holders[expert].append(rank)
        for copy in range(max(map(len, holders))):
            yield [own[copy] if copy < len(own) else own[0] for own in holders]


class _Dealt(NamedTuple):
    """A parameter of all experts of a layer."""

    shape: Shape
    layer: _Layer

    def shard(self, rank: int) -> Shape:
        return (len(self.layer.ranks[rank]), *self.shape[1:])

    def parts(self, homes: Sequence[int]) -> list[tuple[Part, ...]]:
        """What to take from each rank's shard, where `homes` says which rank's copy of each expert to take."""
        return [
            expert_parts(self.shape, [(at, one) for at, one in enumerate(experts) if homes[one] == rank])
            for rank, experts in enumerate(self.layer.ranks)
        ]


def expert_parts(shape: Shape, experts: Iterable[tuple[int, int]]) -> tuple[Part, ...]:
    """Experts of a parameter, each given behind its place in a shard: a part for each run of them."""
    runs: list[tuple[int, int, int]] = []
    for at, expert in experts:
        first_at, first, count = runs[-1] if runs else (-1, -1, 0)
        if count and (at, expert) == (first_at + count, first + count):
            runs[-1] = (first_at, first, count + 1)
        else:
            runs.append((at, expert, 1))
    numel = prod(shape[1:])
    return tuple(Part(Box.along(shape, 0, first, count), at * numel) for at, first, count in runs)


def _in_order(total: int, ep: int) -> tuple[tuple[int, ...], ...]:
    own = total // ep
    return tuple(tuple(range(rank * own, (rank + 1) * own)) for rank in range(ep))


def _layers(model: ModelStates) -> list[_Layer]:
    said, found, faults = model.entries.get(AUTOEP), list[_Layer](), list[Fault]()
    for number, one in enumerate(said if isinstance(said, list) else [said]):
        prefix = one.get("expert_key_prefix") if isinstance(one, dict) else None
        if not isinstance(one, dict) or not isinstance(prefix, str):
            raise fail(model.path, f"entry {AUTOEP!r} is malformed", "a layer's experts", describe(one))
        total, ep = (positive(model.path, key, one.get(key)) for key in ("num_experts", "ep_size"))
        placement = one.get("expert_placement")
        if placement is None:  # of a release that does not say it
            if total % ep:
                what = "deals out experts of layers unevenly"
                faults.append(damaged(model.path, what, "one size that divides them", f"{total} over {ep}"))
            ranks = _in_order(total, ep)
        else:
            ranks, wrong = _placed(f"{model.path}: {prefix}", placement, total, ep)
            faults += wrong
        found.append(_Layer(number, prefix, total, ranks))
    if len({len(layer.ranks) for layer in found}) > 1:
        sizes = ", ".join(f"{layer.total} over {len(layer.ranks)}" for layer in found)
        faults.append(damaged(model.path, "deals out experts of layers to other numbers of ranks", "one", sizes))
    raise_faults(faults, subject="reading a checkpoint")
    return found


def _placed(where: str, said: object, total: int, ep: int) -> tuple[tuple[tuple[int, ...], ...], list[Fault]]:
    """The experts of each rank by a placement descriptor, and what is wrong with it."""
    even = _in_order(total, ep)
    version = said.get("version") if isinstance(said, dict) else None
    if version != 1:
        what, mend = "places its experts as another DeepSpeed describes it", "load it with the sizes it was saved with"
        return even, [UnsupportedLayout.fault(where, what, "version 1", describe(version), mend=mend)]
    assert isinstance(said, dict)
    ranks = said.get("ranks")
    held = {one.get("rank"): one.get("experts") for one in ranks or () if isinstance(one, dict)}
    found = "; ".join(f"{rank}: {experts}" for rank, experts in held.items())[:200]
    ranked = [held.get(rank) for rank in range(ep)]
    lists = [one for one in ranked if isinstance(one, list)]
    if not isinstance(ranks, list) or len(ranks) != ep or len(lists) != ep:
        return even, [damaged(where, "says of some ranks no experts", f"lists of {ep} ranks", found)]
    if any(type(one) is not int or not 0 <= one < total for own in lists for one in own) or any(
        len(set(own)) != len(own) for own in lists
    ):
        return even, [damaged(where, "deals out experts that it has not, or twice to one rank", f"{total}", found)]
    if {one for own in lists for one in own} != set(range(total)):
        return even, [damaged(where, "says of some experts no rank", f"each of {total}", found)]
    return tuple(map(tuple, lists)), []


def _dealt(
    listing: Listing, model: ModelStates, layers: Sequence[_Layer]
) -> tuple[dict[str, _Dealt], dict[str, ElementType]]:
    """How each parameter of experts is cut, and the type of its weights: as the files of first experts have them."""
    dealt, dtypes, faults = dict[str, _Dealt](), dict[str, ElementType](), list[Fault]()
    types = [tensor.dtype for tensor in model.module.values()]
    for layer in layers:
        files = expert_file(listing, layer.number, 0) if not listing.partitioned_model else {}
        for name in layer.names:
            of_file, local = files.get(name), model.trainable.get(name)
            tail = of_file.shape if of_file is not None else local[1:] if local is not None else None
            own = (len(layer.ranks[0]), *(tail or ()))
            if tail is None or local not in (None, own):
                expected, found = str(list(own)), str(local and list(local))
                faults.append(damaged(model.path, f"has {name} of another shape than its experts", expected, found))
                continue
            dealt[name] = _Dealt((layer.total, *tail), layer)
            dtypes[name] = of_file.dtype if of_file is not None else types[0]
    raise_faults(faults, subject=f"checkpoint {listing.folder}")
    return dealt, dtypes


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
    listing: Listing, layers: Sequence[_Layer], dealt: Mapping[str, _Dealt], dtypes: Mapping[str, ElementType]
) -> Iterator[Placement]:
    """Where the weights of all experts lie, in files of their own."""
    for layer in layers if not listing.partitioned_model else ():
        family = f"{EXPERT_FILES}{layer.number}"
        for name in layer.names:
            shape = dealt[name].shape
            boxes = [Box.along(shape, 0, expert, 1) for expert in range(layer.total)]
            tiles = [(expert, 0, box) for expert, box in enumerate(boxes)]
            yield tiled(TensorKey(name, WEIGHT), shape, dtypes[name], tiles, family=family, buffer=name)


def _columns(
    listing: Listing, grid: Grid, model: ModelStates, first: OptimStates, dealt: Mapping[str, _Dealt]
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
    if grid.ep == 1 and all(one.layer.in_order for one in dealt.values()):
        buffers = flat_buffers(first, dict(enumerate(groups)), grid.dp)
        return (GridColumn(family=OPTIM, files=files, buffers=buffers, first=first),)
    dense = {number: group for number, group in enumerate(groups) if not of_experts[number]}
    apart = [number for number in of_experts if of_experts[number]]
    columns = [GridColumn(family=OPTIM, files=files, buffers=flat_buffers(first, dense, grid.dp), first=first)]
    for place in range(grid.ep):
        ranks = ranks_of_place(place, grid, model)
        head = first if not ranks[0] else listing.read(listing.optim[ranks[0]], read_optim_states)
        faults += [*unmatched(model, head), *_of_other_ranks(head, apart, ranks)]
        experts = {number: {name: dealt[name].shard(place) for name in groups[number]} for number in apart}
        files = tuple(listing.optim[rank] for rank in ranks)
        family, begin = f"{OPTIM} of experts", place * share
        buffers = flat_buffers(head, experts, share)
        columns.append(GridColumn(family=family, files=files, buffers=buffers, first=head, begin=begin, number=place))
    raise_faults(faults, subject=f"checkpoint {listing.folder}")
    return tuple(columns)


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


def _of_places(columns: Sequence[GridColumn], dealt: Mapping[str, _Dealt]) -> Iterator[Placement]:
    """Where masters and states of experts lie: a tile for each run of experts of a rank.

    Of an expert on several ranks the first one's counts; others' are in copies of the whole, which are to be equal.
    """
    held: dict[TensorKey, list[tuple[GridColumn, Placement]]] = {}
    for column in columns:
        for placement in column.placements():
            if placement.key.name in dealt:
                held.setdefault(placement.key, []).append((column, placement))
    taken = {name: [one.parts(homes) for homes in one.layer.copies()] for name, one in dealt.items()}
    for key, places in held.items():
        shape, (_, first) = dealt[key.name].shape, places[0]
        every = first._replace(shape=shape, box=Box.whole(shape), cut=Cut(chunk=1))
        cuts = [at.cut._replace(first=at.cut.first + column.begin) for column, at in places]
        for copy, parts in enumerate(taken[key.name]):
            yield in_parts(every._replace(key=key._replace(copy=copy)), zip(cuts, parts, strict=True))
