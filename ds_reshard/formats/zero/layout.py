"""The placement rules of ZeRO, as layouts: pure arithmetic over names, shapes and the data-parallel size.

Flat groups (stages 1 and 2, BF16_Optimizer): the parameters of a group in the order of `param_shapes`, one
after another (with gaps under `parameter_alignment`), padded at the end to a multiple of 2 * dp elements
and cut into dp equal partitions (`nccl_start_alignment_factor`, deepspeed/runtime/zero/stage_1_and_2.py
and bf16_optimizer.py, 0.19.8). Stage 3: each parameter is cut on its own into dp pieces of
ceil(numel / dp), which lie one after another in the sub-group (runtime/zero/partition_parameters.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from ds_reshard.model.layout import Cut, Placement, TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box

Shape = tuple[int, ...]
ALIGNMENT_FACTOR = 2


def partition_numel(numel: int, dp: int) -> int:
    """Elements per rank of a flat group of `numel` elements, padding included."""
    return -(-numel // (ALIGNMENT_FACTOR * dp)) * ALIGNMENT_FACTOR


def flat_offsets(shapes: Mapping[str, Shape], gaps: Sequence[int] | None) -> tuple[dict[str, int], int]:
    """Each parameter's offset in its flat group, and the group's elements without the final padding.

    `gaps[i]` elements follow parameter i (`param_alignment_paddings`).
    """
    offsets, at = {}, 0
    for i, (name, shape) in enumerate(shapes.items()):
        offsets[name] = at
        at += prod(shape) + (gaps[i] if gaps else 0)
    return offsets, at


def flat_numel(shapes: Mapping[str, Shape], gaps: Sequence[int] | None) -> int:
    """Elements of a flat group, its gaps with them and the final padding without."""
    return sum(map(prod, shapes.values())) + sum(gaps or ())


def flat_group(
    shapes: Mapping[str, Shape],
    gaps: Sequence[int] | None,
    dp: int,
    kinds: Mapping[str, ElementType],
    *,
    number: int,
    family: str,
) -> Iterator[Placement]:
    """Placements of one flat group's tensors, for every kind (`fp32`, `exp_avg`, ...) and its type."""
    offsets, total = flat_offsets(shapes, gaps)
    chunk = max(1, partition_numel(total, dp))
    cuts = {name: Cut(chunk=chunk, phase=offset) for name, offset in offsets.items()}
    yield from _of_kinds(shapes, cuts, kinds, number=number, family=family)


def whole_members(
    shapes: Mapping[str, Shape], gaps: Sequence[int] | None, dp: int
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Each parameter of a flat group with the ranks whose partitions have a part of it, and where each keeps it whole.

    A rank keeps its own one after another, without gaps (`get_partition_info`, `_muon_momentum_buffer`,
    runtime/zero/stage_1_and_2.py, 0.19.8). One without elements is where its neighbours meet, behind the last in none.
    """
    offsets, total = flat_offsets(shapes, gaps)
    chunk, ends = max(1, partition_numel(total, dp)), [0] * dp
    for name, offset in offsets.items():
        numel = prod(shapes[name])
        ranks = range(offset // chunk, min(dp, 1 + max(offset, offset + numel - 1) // chunk))
        yield name, [(rank, ends[rank]) for rank in ranks]
        for rank in ranks:
            ends[rank] += numel


def whole_numel(shapes: Mapping[str, Shape], gaps: Sequence[int] | None, dp: int, rank: int) -> int:
    """Elements of the parameters of which a rank's partition has a part."""
    held = whole_members(shapes, gaps, dp)
    return sum(prod(shapes[name]) for name, places in held if any(other == rank for other, _ in places))


def whole_group(
    shapes: Mapping[str, Shape],
    gaps: Sequence[int] | None,
    dp: int,
    kinds: Mapping[str, ElementType],
    *,
    number: int,
    family: str,
) -> Iterator[Placement]:
    """Placements of a flat group's states that lie as `whole_members` says: a copy on each rank that has a part."""
    for name, places in whole_members(shapes, gaps, dp):
        shape, box = shapes[name], Box.whole(shapes[name])
        for copy, (rank, at) in enumerate(places):
            cut = Cut(chunk=max(1, box.numel), origin=at, first=rank)
            for kind, dtype in kinds.items():
                yield Placement(TensorKey(name, kind, copy), shape, dtype, family, f"{kind}/{number}", cut, box)


def chunk_numel(shape: Shape, dp: int) -> int:
    """Elements per rank of a stage-3 parameter, padding included."""
    return -(-prod(shape) // dp)


def sub_group(
    shapes: Mapping[str, Shape], dp: int, kinds: Mapping[str, ElementType], *, number: int, family: str
) -> Iterator[Placement]:
    """Placements of one stage-3 sub-group's tensors."""
    cuts, at = {}, 0
    for name, shape in shapes.items():
        chunk = chunk_numel(shape, dp)
        cuts[name] = Cut(chunk=max(1, chunk), origin=at)
        at += chunk
    yield from _of_kinds(shapes, cuts, kinds, number=number, family=family)


def _of_kinds(
    shapes: Mapping[str, Shape], cuts: Mapping[str, Cut], kinds: Mapping[str, ElementType], *, number: int, family: str
) -> Iterator[Placement]:
    """A parameter's states of every kind are cut alike: their placements share what says how."""
    boxes = {name: Box.whole(shape) for name, shape in shapes.items()}
    for kind, dtype in kinds.items():
        buffer = f"{kind}/{number}"
        for name, shape in shapes.items():
            yield Placement(TensorKey(name, kind), shape, dtype, family, buffer, cuts[name], boxes[name])


def sub_group_numel(shapes: Mapping[str, Shape], dp: int) -> int:
    """Elements per rank of a stage-3 sub-group."""
    return sum(chunk_numel(shape, dp) for shape in shapes.values())


def whole(name: str, kind: str, shape: Shape, dtype: ElementType, *, family: str, buffer: str) -> Placement:
    """A tensor that every shard of the family has whole."""
    cut = Cut(chunk=max(1, prod(shape)))
    return Placement(TensorKey(name, kind), shape, dtype, family, buffer, cut, Box.whole(shape), replicated=True)


def sliced(name: str, shape: Shape, dtype: ElementType, dp: int, *, family: str, buffer: str) -> Placement:
    """A weight in a buffer of its own, cut into dp pieces of ceil(numel / dp)."""
    cut = Cut(chunk=max(1, chunk_numel(shape, dp)))
    return Placement(TensorKey(name, "weight"), shape, dtype, family, buffer, cut, Box.whole(shape))


def alone(origin: Placement, shard: int, *, family: str, buffer: str) -> Placement:
    """The whole tensor in a buffer of its own, which one shard of the family has."""
    numel = max(1, prod(origin.shape))
    cut = Cut(chunk=numel, phase=shard * numel)
    key = TensorKey(origin.key.name, origin.key.kind)
    return Placement(key, origin.shape, origin.dtype, family, buffer, cut, Box.whole(origin.shape))


def by_key(placements: Iterable[Placement]) -> dict[TensorKey, Placement]:
    return {placement.key: placement for placement in placements}
