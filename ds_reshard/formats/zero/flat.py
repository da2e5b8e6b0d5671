"""DeepSpeed's flat buffers: parameters one after another, cut over ranks; arithmetic over names, shapes and sizes.

Stages 1 and 2 and BF16_Optimizer pad a param group at the end to a multiple of 2 * ranks elements and cut it into equal
partitions (`nccl_start_alignment_factor`, deepspeed/runtime/zero/stage_1_and_2.py and bf16_optimizer.py, 0.19.8).
Stage 3 cuts each parameter on its own into pieces of ceil(numel / ranks), which lie one after another in a sub-group
(runtime/zero/partition_parameters.py, stage3.py). At stage 0 each rank has all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import prod
from typing import NamedTuple, TypeVar

from ds_reshard.model.facts import Scalar
from ds_reshard.model.layout import Cut, Holder, Placement, Replica, TensorKey, placement_of_parts
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box, Part, Shape

Item = TypeVar("Item")
_FACTOR = 2


class Rule(Enum):
    """How ranks cut a flat buffer: as one row of elements, each parameter on its own, or not at all."""

    FLAT = "flat"
    EACH = "each"
    REPLICATED = "replicated"


RULES = {"zero": Rule.FLAT, "bf16": Rule.FLAT, "zero3": Rule.EACH}
"""The rule of each optimizer wrapper that cuts; all others replicate."""


@dataclass(frozen=True, kw_only=True)  # not slotted: sizes are computed once
class FlatBuffer:
    """Parameters that lie one after another in an optimizer's memory or files, and the ranks that share them.

    `shapes` are the parameters in order, or the shards of them that lie here; `gaps[i]` elements follow parameter i
    (`parameter_alignment`). `number` is the buffer's place in its optimizer, `group` its param group. Rank i of `ranks`
    is shard `first + i * step` of the family of files or ranks: those with the same experts may be every second one.
    `kinds` are the element types of the masters and states that follow the parameters, `scalars` the states that the
    optimizer keeps once for the whole buffer.
    """

    shapes: Mapping[str, Shape]
    rule: Rule
    ranks: int
    number: int = 0
    group: int = 0
    gaps: Sequence[int] | None = None
    kinds: Mapping[str, ElementType] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    first: int = 0
    step: int = 1

    @cached_property
    def numel(self) -> int:
        """Elements of all of it, gaps included and without the padding at its end."""
        return sum(map(prod, self.shapes.values())) + sum(self.gaps or ())

    @cached_property
    def partition_numel(self) -> int:
        """Elements that each rank has, padding included."""
        if self.rule is Rule.EACH:
            return sum(slice_numel(shape, self.ranks) for shape in self.shapes.values())
        if self.rule is Rule.REPLICATED:
            return self.numel
        return -(-self.numel // (_FACTOR * self.ranks)) * _FACTOR

    def used_numel(self, rank: int) -> int:
        """Elements of a rank's partition that are before the padding at the end of the buffer."""
        size = self.partition_numel
        return min(size, max(0, self.numel - rank * size)) if self.rule is Rule.FLAT else size

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        """How each parameter is cut."""
        at, chunk = 0, max(1, self.partition_numel)
        for name, shape, gap in zip(self.shapes, self.shapes.values(), self.gaps or _no_gaps(self.shapes), strict=True):
            if self.rule is Rule.EACH:
                own = slice_numel(shape, self.ranks)
                yield name, Cut(chunk=max(1, own), origin=at, first=self.first, step=self.step)
                at += own
            else:
                yield name, Cut(chunk=chunk, phase=at, first=self.first, step=self.step)
                at += prod(shape) + gap

    def placements(self, family: str, kinds: Mapping[str, ElementType] | None = None) -> Iterator[Placement]:
        """Where each parameter's masters and states lie, in the buffers `fp32/0`, `exp_avg/0`, ... of each shard."""
        cuts, replicated = list(self.cuts()), self.rule is Rule.REPLICATED
        boxes = [Box.whole(shape) for shape in self.shapes.values()]
        for kind, dtype in (self.kinds if kinds is None else kinds).items():
            buffer = f"{kind}/{self.number}"
            for (name, cut), box in zip(cuts, boxes, strict=True):
                yield Placement(TensorKey(name, kind), box.size, dtype, family, buffer, cut, box, replicated)

    def momentum_offsets(self) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Each parameter with (rank, offset) for every rank whose partition overlaps it.

        At stages 1 and 2 such a rank keeps Muon's momentum of the whole parameter, at that offset of a buffer without
        gaps (`get_partition_info`, `_muon_momentum_buffer`, runtime/zero/stage_1_and_2.py, 0.19.8). A parameter without
        elements belongs to the rank whose partition has its position, or to none behind the last partition.
        """
        chunk, ends = max(1, self.partition_numel), [0] * self.ranks
        for name, cut in self.cuts():
            numel = prod(self.shapes[name])
            ranks = range(cut.phase // chunk, min(self.ranks, 1 + max(cut.phase, cut.phase + numel - 1) // chunk))
            yield name, [(rank, ends[rank]) for rank in ranks]
            for rank in ranks:
                ends[rank] += numel

    def momentum_numel(self, rank: int) -> int:
        """Elements of the parameters that a rank's partition overlaps."""
        held = self.momentum_offsets()
        return sum(prod(self.shapes[name]) for name, places in held if any(other == rank for other, _ in places))

    def momentum_placements(self, family: str, kinds: Mapping[str, ElementType]) -> Iterator[Placement]:
        """Where states of whole parameters lie: a copy on each rank whose partition overlaps the parameter."""
        for name, places in self.momentum_offsets():
            box = Box.whole(self.shapes[name])
            for rank, at in places:
                cut = Cut(chunk=max(1, box.numel), origin=at, first=rank)
                for kind, dtype in kinds.items():
                    yield Placement(TensorKey(name, kind), box.size, dtype, family, f"{kind}/{self.number}", cut, box)


def arranged(
    groups: Iterable[Mapping[str, Shape]],
    rule: Rule,
    ranks: Sequence[int],
    *,
    sub_group_numel: int | None = None,
    round_robin: bool = False,
    alignment: int = 1,
) -> list[FlatBuffer]:
    """The flat buffers that DeepSpeed makes of param groups, each shared by its number of `ranks`.

    A group without parameters has none. Stage 3 ends a sub-group after the parameter with which each rank's share of it
    reaches `sub_group_numel` (`_create_fp16_sub_groups`, runtime/zero/stage3.py). `round_robin` is the JSON's
    `round_robin_gradients`, `alignment` the multiple, in elements, at which `parameter_alignment` lets each parameter
    begin.
    """
    made: list[FlatBuffer] = []
    for group, (shapes, count) in enumerate(zip(groups, ranks, strict=True)):
        order = dict(in_turn(list(shapes.items()), count)) if round_robin else dict(shapes)
        for part in _sub_groups(order, count, sub_group_numel) if rule is Rule.EACH else [order] if order else []:
            gaps = _gaps(part, alignment) if alignment > 1 else None
            made.append(FlatBuffer(shapes=part, rule=rule, ranks=count, number=len(made), group=group, gaps=gaps))
    return made


def slice_numel(shape: Shape, ranks: int) -> int:
    """Elements of a stage-3 parameter that each rank has, padding included."""
    return -(-prod(shape) // ranks)


def _sub_groups(shapes: Mapping[str, Shape], ranks: int, most: int | None) -> Iterator[dict[str, Shape]]:
    part: dict[str, Shape] = {}
    numel = 0
    for name, shape in shapes.items():
        part[name] = shape
        numel += slice_numel(shape, ranks)
        if most is not None and numel >= most:
            yield part
            part, numel = {}, 0
    if part:
        yield part


def _no_gaps(shapes: Mapping[str, Shape]) -> Sequence[int]:
    return [0] * len(shapes)


def _gaps(shapes: Mapping[str, Shape], alignment: int) -> list[int]:
    """Elements after each parameter, none after the last (`runtime/zero/stage_1_and_2.py`)."""
    at, found = 0, list[int]()
    for shape in shapes.values():
        at += prod(shape)
        found.append(-at % alignment)
        at += found[-1]
    return [*found[:-1], 0]


def in_turn(items: Sequence[Item], ranks: int) -> list[Item]:
    """The order in which `round_robin_gradients` deals out parameters (`_round_robin_reorder`, stage_1_and_2.py)."""
    return [item for rank in range(min(ranks, len(items))) for item in items[rank::ranks]]


def turned_back(items: Sequence[Item], ranks: int) -> list[Item]:
    """The order of which `in_turn` makes this one."""
    found = list(items)
    for place, item in zip(in_turn(range(len(items)), ranks), items, strict=True):
        found[place] = item
    return found


def whole(name: str, kind: str, shape: Shape, dtype: ElementType, *, family: str, buffer: str) -> Placement:
    """A tensor that every shard of the family has whole."""
    cut = Cut(chunk=max(1, prod(shape)))
    return Placement(TensorKey(name, kind), shape, dtype, family, buffer, cut, Box.whole(shape), replicated=True)


def sliced(name: str, shape: Shape, dtype: ElementType, ranks: int, *, family: str, buffer: str) -> Placement:
    """A weight in a buffer of its own, cut into pieces of ceil(numel / ranks)."""
    cut = Cut(chunk=max(1, slice_numel(shape, ranks)))
    return Placement(TensorKey(name, "weight"), shape, dtype, family, buffer, cut, Box.whole(shape))


def in_one_shard(key: TensorKey, shape: Shape, dtype: ElementType, shard: int, *, family: str) -> Placement:
    """The whole tensor in a buffer of its own, which one shard of the family has."""
    numel = max(1, prod(shape))
    cut = Cut(chunk=numel, phase=shard * numel)
    return Placement(key, shape, dtype, family, f"{key.kind}/{key.name}", cut, Box.whole(shape))


class Placed(NamedTuple):
    """Where a shard of a tensor lies, and the parts of the tensor that it is; None of one that is whole.

    `stage` is the number of its pipeline stage among those that have the tensor.
    """

    placement: Placement
    parts: tuple[Part, ...] | None = None
    stage: int = 0


def merged(placed: Iterable[Placed]) -> Iterator[Placement]:
    """Whole tensors, joined from the shards of any number of ranks, with their replicas.

    The same tensor on another stage is a replica. Within a stage, equal parts are replicas and different parts are
    tiles; a part that only one rank has belongs to every replica. A tensor that the first stage lacks is left out.
    """
    shards: dict[TensorKey, list[Placed]] = {}
    for one in placed:
        shards.setdefault(one.placement.key, []).append(one)
    for own in shards.values():
        first, stages = own[0], dict[int, list[Placed]]()
        if len(own) == 1 and first.parts is None and not first.stage:  # as most tensors lie
            yield first.placement
            continue
        for one in own:
            stages.setdefault(one.stage, []).append(one)
        (holder, placement), *others = (
            Replica(Holder(stage, rank), whole)
            for stage, of_stage in sorted(stages.items())
            for rank, whole in enumerate(_whole_replicas(of_stage))
        )
        if holder == Holder():
            yield placement._replace(replicas=tuple(others))


def _whole_replicas(shards: Sequence[Placed]) -> Iterator[Placement]:
    """Whole tensors, one for each replica: the n-th takes each part from its n-th holder, or from the first."""
    if shards[0].parts is None:
        yield from (one.placement for one in shards)
        return
    holders: dict[Box, list[tuple[Cut, Part]]] = {}
    for placement, parts, _ in shards:
        for part in parts or ():
            holders.setdefault(part.box, []).append((placement.cut, part))
    first = shards[0].placement
    whole = first._replace(box=Box.whole(first.shape), replicated=False, cut=Cut(chunk=1))
    for number in range(max(map(len, holders.values()), default=1)):
        taken = (of[number if number < len(of) else 0] for of in holders.values())
        yield placement_of_parts(whole, ((cut, (part,)) for cut, part in taken))


def by_key(placements: Iterable[Placement]) -> dict[TensorKey, Placement]:
    return {placement.key: placement for placement in placements}
