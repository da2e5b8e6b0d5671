"""The arithmetic of DeepSpeed's flat buffers: parameters one after another, cut over ranks.

Stages 1 and 2 and BF16_Optimizer pad a param group at the end to a multiple of 2 * ranks elements and cut it into equal
partitions (`nccl_start_alignment_factor`, deepspeed/runtime/zero/stage_1_and_2.py and bf16_optimizer.py, 0.19.8). Stage
3 cuts each parameter on its own into pieces of ceil(numel / ranks), which lie one after another in a sub-group
(runtime/zero/partition_parameters.py, stage3.py). At stage 0 each rank has the whole buffer.
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
    """How ranks cut a flat buffer: FLAT as one row of elements, EACH parameter by itself, or not at all."""

    FLAT = "flat"
    EACH = "each"
    REPLICATED = "replicated"


RULES = {"zero": Rule.FLAT, "bf16": Rule.FLAT, "zero3": Rule.EACH}
"""The rule of each optimizer wrapper that cuts its buffers; all others replicate them."""


@dataclass(frozen=True, kw_only=True)  # not slotted: sizes are computed once
class FlatBuffer:
    """Parameters that lie one after another in an optimizer's memory or files, and the ranks that share them.

    `shapes` are the parameters, or their shards, in order; `gaps[i]` elements follow parameter i
    (`parameter_alignment`). `number` is the buffer's index in its optimizer, `group` its param group. Rank i of `ranks`
    is shard `first + i * step` of the family of files or ranks; the ranks with the same experts may be every second
    one. `kinds` are the element types of masters and of states shaped like the parameters, `scalars` the states that
    the optimizer keeps once for the whole buffer.
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
        """Return the elements of the whole buffer, including gaps, without the padding at its end."""
        return sum(map(prod, self.shapes.values())) + sum(self.gaps or ())

    @cached_property
    def partition_numel(self) -> int:
        """Return the elements that each rank has, including padding."""
        if self.rule is Rule.EACH:
            return sum(slice_numel(shape, self.ranks) for shape in self.shapes.values())
        if self.rule is Rule.REPLICATED:
            return self.numel
        return -(-self.numel // (_FACTOR * self.ranks)) * _FACTOR

    def used_numel(self, rank: int) -> int:
        """Return the elements of a rank's partition that lie before the padding at the buffer's end."""
        size = self.partition_numel
        return min(size, max(0, self.numel - rank * size)) if self.rule is Rule.FLAT else size

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        """Yield each parameter's name and how ranks cut it."""
        offset, chunk = 0, max(1, self.partition_numel)
        gaps = self.gaps or [0] * len(self.shapes)
        for name, shape, gap in zip(self.shapes, self.shapes.values(), gaps, strict=True):
            if self.rule is Rule.EACH:
                share = slice_numel(shape, self.ranks)
                yield name, Cut(chunk=max(1, share), origin=offset, first=self.first, step=self.step)
                offset += share
            else:
                yield name, Cut(chunk=chunk, phase=offset, first=self.first, step=self.step)
                offset += prod(shape) + gap

    def placements(self, family: str, kinds: Mapping[str, ElementType] | None = None) -> Iterator[Placement]:
        """Yield where each parameter's masters and states lie, in buffers `fp32/0`, `exp_avg/0`, ... of each shard."""
        cuts, replicated = list(self.cuts()), self.rule is Rule.REPLICATED
        boxes = [Box.whole(shape) for shape in self.shapes.values()]
        for kind, dtype in (self.kinds if kinds is None else kinds).items():
            buffer = f"{kind}/{self.number}"
            for (name, cut), box in zip(cuts, boxes, strict=True):
                yield Placement(TensorKey(name, kind), box.size, dtype, family, buffer, cut, box, replicated)

    def momentum_offsets(self) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Yield each parameter with (rank, offset) for every rank whose partition overlaps it.

        At stages 1 and 2 such a rank keeps Muon's momentum of the whole parameter, at that offset of a buffer without
        gaps (`get_partition_info`, `_muon_momentum_buffer`, runtime/zero/stage_1_and_2.py, 0.19.8). An empty parameter
        belongs to the rank whose partition has its position, or to none after the last partition.
        """
        chunk, ends = max(1, self.partition_numel), [0] * self.ranks
        for name, cut in self.cuts():
            numel = prod(self.shapes[name])
            ranks = range(cut.phase // chunk, min(self.ranks, 1 + max(cut.phase, cut.phase + numel - 1) // chunk))
            yield name, [(rank, ends[rank]) for rank in ranks]
            for rank in ranks:
                ends[rank] += numel

    def momentum_numel(self, rank: int) -> int:
        """Return the elements of all parameters that a rank's partition overlaps."""
        offsets = self.momentum_offsets()
        return sum(prod(self.shapes[name]) for name, ranks in offsets if any(other == rank for other, _ in ranks))

    def momentum_placements(self, family: str, kinds: Mapping[str, ElementType]) -> Iterator[Placement]:
        """Yield where states of whole parameters lie: one copy on each rank whose partition overlaps the parameter."""
        for name, rank_offsets in self.momentum_offsets():
            box = Box.whole(self.shapes[name])
            for rank, offset in rank_offsets:
                cut = Cut(chunk=max(1, box.numel), origin=offset, first=rank)
                for kind, dtype in kinds.items():
                    yield Placement(TensorKey(name, kind), box.size, dtype, family, f"{kind}/{self.number}", cut, box)


def arrange_buffers(
    groups: Iterable[Mapping[str, Shape]],
    rule: Rule,
    ranks: Sequence[int],
    *,
    sub_group_numel: int | None = None,
    round_robin: bool = False,
    alignment: int = 1,
) -> list[FlatBuffer]:
    """Return the flat buffers that DeepSpeed makes of param groups; `ranks` has the number of ranks of each group.

    An empty group has no buffer. Stage 3 ends a sub-group after the parameter with which each rank's share reaches
    `sub_group_numel` (`_create_fp16_sub_groups`, runtime/zero/stage3.py). `round_robin` is the JSON's
    `round_robin_gradients`, `alignment` the multiple, in elements, at which `parameter_alignment` starts parameters.
    """
    buffers: list[FlatBuffer] = []
    for group, (shapes, count) in enumerate(zip(groups, ranks, strict=True)):
        order = dict(round_robin_order(list(shapes.items()), count)) if round_robin else dict(shapes)
        for part in _sub_groups(order, count, sub_group_numel) if rule is Rule.EACH else [order] if order else []:
            gaps = _gaps(part, alignment) if alignment > 1 else None
            buffers.append(FlatBuffer(shapes=part, rule=rule, ranks=count, number=len(buffers), group=group, gaps=gaps))
    return buffers


def slice_numel(shape: Shape, ranks: int) -> int:
    """Return the elements of a stage-3 parameter that each rank has, including padding."""
    return -(-prod(shape) // ranks)


def _sub_groups(shapes: Mapping[str, Shape], ranks: int, max_numel: int | None) -> Iterator[dict[str, Shape]]:
    members: dict[str, Shape] = {}
    numel = 0
    for name, shape in shapes.items():
        members[name] = shape
        numel += slice_numel(shape, ranks)
        if max_numel is not None and numel >= max_numel:
            yield members
            members, numel = {}, 0
    if members:
        yield members


def _gaps(shapes: Mapping[str, Shape], alignment: int) -> list[int]:
    """Return the elements after each parameter, none after the last (`runtime/zero/stage_1_and_2.py`)."""
    offset, gaps = 0, list[int]()
    for shape in shapes.values():
        offset += prod(shape)
        gaps.append(-offset % alignment)
        offset += gaps[-1]
    return [*gaps[:-1], 0]


def round_robin_order(items: Sequence[Item], ranks: int) -> list[Item]:
    """Return the items in the order of `round_robin_gradients` (`_round_robin_reorder`, stage_1_and_2.py)."""
    return [item for rank in range(min(ranks, len(items))) for item in items[rank::ranks]]


def undo_round_robin(items: Sequence[Item], ranks: int) -> list[Item]:
    """Return the items in the order from which `round_robin_order` makes the given one."""
    original = list(items)
    for index, item in zip(round_robin_order(range(len(items)), ranks), items, strict=True):
        original[index] = item
    return original


def whole_placement(name: str, kind: str, shape: Shape, dtype: ElementType, *, family: str, buffer: str) -> Placement:
    """Return the placement of a tensor that every shard of the family has whole."""
    cut = Cut(chunk=max(1, prod(shape)))
    return Placement(TensorKey(name, kind), shape, dtype, family, buffer, cut, Box.whole(shape), replicated=True)


def sliced_weight(name: str, shape: Shape, dtype: ElementType, ranks: int, *, family: str, buffer: str) -> Placement:
    """Return the placement of a weight in a buffer by itself, cut into pieces of ceil(numel / ranks)."""
    cut = Cut(chunk=max(1, slice_numel(shape, ranks)))
    return Placement(TensorKey(name, "weight"), shape, dtype, family, buffer, cut, Box.whole(shape))


def one_shard_placement(key: TensorKey, shape: Shape, dtype: ElementType, shard: int, *, family: str) -> Placement:
    """Return the placement of a whole tensor in a buffer by itself, which one shard of the family has."""
    numel = max(1, prod(shape))
    cut = Cut(chunk=numel, phase=shard * numel)
    return Placement(key, shape, dtype, family, f"{key.kind}/{key.name}", cut, Box.whole(shape))


class Shard(NamedTuple):
    """Where a shard of a tensor lies, and the parts of the tensor that it holds; None if it is whole.

    `stage` is the index of its pipeline stage among the stages that have the tensor.
    """

    placement: Placement
    parts: tuple[Part, ...] | None = None
    stage: int = 0


def merge_shards(placements: Iterable[Shard]) -> Iterator[Placement]:
    """Join the shards of all ranks into whole tensors with replicas.

    The same tensor on another stage is a replica. Within a stage, equal parts are replicas and different parts are
    tiles; a part that only one rank has belongs to every replica. A tensor that the first stage lacks is left out.
    """
    shards: dict[TensorKey, list[Shard]] = {}
    for shard in placements:
        shards.setdefault(shard.placement.key, []).append(shard)
    for of_tensor in shards.values():
        first, stages = of_tensor[0], dict[int, list[Shard]]()
        if len(of_tensor) == 1 and first.parts is None and not first.stage:  # as most tensors lie
            yield first.placement
            continue
        for shard in of_tensor:
            stages.setdefault(shard.stage, []).append(shard)
        (holder, placement), *others = (
            Replica(Holder(stage, rank), tensor)
            for stage, of_stage in sorted(stages.items())
            for rank, tensor in enumerate(_whole_replicas(of_stage))
        )
        if holder == Holder():
            yield placement._replace(replicas=tuple(others))


def _whole_replicas(shards: Sequence[Shard]) -> Iterator[Placement]:
    """Yield one whole tensor for each replica: replica n has each part from its n-th holder, or from its first."""
    if shards[0].parts is None:
        yield from (shard.placement for shard in shards)
        return
    holders: dict[Box, list[tuple[Cut, Part]]] = {}
    for placement, parts, _ in shards:
        for part in parts or ():
            holders.setdefault(part.box, []).append((placement.cut, part))
    first = shards[0].placement
    whole = first._replace(box=Box.whole(first.shape), replicated=False, cut=Cut(chunk=1))
    for number in range(max(map(len, holders.values()), default=1)):
        parts_of_replica = (copies[number if number < len(copies) else 0] for copies in holders.values())
        yield placement_of_parts(whole, ((cut, (part,)) for cut, part in parts_of_replica))


def by_key(placements: Iterable[Placement]) -> dict[TensorKey, Placement]:
    return {placement.key: placement for placement in placements}
