"""Which part of a parameter a tensor-parallel shard holds: nanotron's SlicesPairs, as boxes in storage order.

The texts are those of `SlicesPair.__str__` and `TensorMetadata.to_str_dict` (parallel/parameters.py,
serialize/metadata.py, commit 2411b02): pair;pair, local#global, one slice a dimension with | between, start,stop,step
with None for what is not said. With numpy 2 sizes read "np.int64(16)".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from ds_reshard.model.region import Box

Shape = tuple[int, ...]
Slice = tuple[int | None, int | None]
_NUMPY = re.compile(r"np\.int\d*\((\d+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesPair:
    """Elements of a shard and of the whole parameter that are the same; (None, None) is a whole dimension."""

    local: tuple[Slice, ...]
    whole: tuple[Slice, ...]

    def __str__(self) -> str:
        return "#".join("|".join(f"{start},{stop},None" for start, stop in side) for side in (self.local, self.whole))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A box of the parameter whose elements lie together in a shard, from `element_offset` on."""

    box: Box
    element_offset: int


def parse_shape(text: str) -> Shape:
    """A shape as nanotron writes it; ValueError for anything else."""
    plain = _NUMPY.sub(r"\1", text).strip()
    if not (plain.startswith("(") and plain.endswith(")")):
        raise ValueError(f"{text!r} is no shape")
    return tuple(int(size) for size in plain[1:-1].split(",") if size.strip())


def parse_pairs(text: str) -> tuple[SlicesPair, ...]:
    """`local_global_slices_pairs`; ValueError where it is not of that grammar, or has a step."""
    pairs = []
    for pair in _NUMPY.sub(r"\1", text).split(";"):
        local, whole = (tuple(map(_slice, side.split("|"))) for side in pair.split("#"))
        if len(local) != len(whole):
            raise ValueError(f"{pair!r} has sides of different dimensions")
        pairs.append(SlicesPair(local=local, whole=whole))
    return tuple(pairs)


def _slice(text: str) -> Slice:
    start, stop, step = (None if word == "None" else int(word) for word in text.split(","))
    if step not in (None, 1):
        raise ValueError(f"{text!r} has a step")
    return start, stop


def tiles_of(pairs: Sequence[SlicesPair], local: Shape, whole: Shape) -> list[Tile]:
    """The boxes that a shard of shape `local` holds of a parameter of shape `whole`, in the order of its storage.

    Raises ValueError unless the pairs cover the shard, each element once, and lie inside the parameter.
    """
    tiles: list[Tile] = []
    for pair in pairs if prod(local) else ():
        inner, outer = _box(pair.local, local), _box(pair.whole, whole)
        if inner.size != outer.size:
            raise ValueError(f"{pair} pairs {inner.size} with {outer.size} elements")
        tiles += _in_rows(inner, outer, local)
    tiles.sort(key=lambda tile: tile.element_offset)
    at = 0
    for tile in tiles:
        if tile.element_offset != at:
            raise ValueError(f"element {at} of the shard is in no pair, or in two")
        at += tile.box.numel
    if at != prod(local):
        raise ValueError(f"element {at} of the shard is in no pair")
    return tiles


def _box(slices: Sequence[Slice], shape: Shape) -> Box:
    if len(slices) != len(shape):
        raise ValueError(f"{len(slices)} slices, for a tensor of shape {list(shape)}")
    edges = [(start or 0, stop if stop is not None else n) for (start, stop), n in zip(slices, shape, strict=True)]
    if any(not 0 <= start <= stop <= n for (start, stop), n in zip(edges, shape, strict=True)):
        raise ValueError(f"slices {edges} leave a tensor of shape {list(shape)}")
    return Box(offset=tuple(start for start, _ in edges), size=tuple(stop - start for start, stop in edges))


def _in_rows(inner: Box, outer: Box, local: Shape) -> Iterator[Tile]:
    """The parts of `outer` that lie together in the shard: all of it where only the first dimension is cut."""
    cut = [axis for axis in range(len(local)) if inner.size[axis] != local[axis]]
    last = cut[-1] if cut else 0
    for index in product(*(range(size) for size in inner.size[:last])):
        size = (*(1 for _ in index), *inner.size[last:])
        first = tuple(at + i for at, i in zip(inner.offset, (*index, *(0 for _ in inner.size[last:])), strict=True))
        offset = tuple(at + i for at, i in zip(outer.offset, (*index, *(0 for _ in inner.size[last:])), strict=True))
        element_offset = sum(i * prod(local[axis + 1 :]) for axis, i in enumerate(first))
        if prod(size):
            yield Tile(box=Box(offset=offset, size=size), element_offset=element_offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a parameter is cut at any tensor-parallel size: along `axis`, inside each of its `chunks`.

    `plain` where nanotron was given no contiguous chunks: local slices then say nothing.
    """

    axis: int
    chunks: tuple[int, ...]
    plain: bool

    def pairs(self, ndim: int, rank: int, size: int) -> tuple[SlicesPair, ...]:
        """What `create_sharded_parameter_from_config` (parallel/sharded_parameters.py) gives a rank.

        Raises ValueError where a chunk cannot be cut into equal parts.
        """
        found, at = [], 0
        for chunk in self.chunks:
            if chunk % size:
                raise ValueError(f"{chunk} elements along dimension {self.axis} are no multiple of {size}")
            part = chunk // size
            local: Slice = (None, None) if self.plain else (at // size, at // size + part)
            whole: Slice = (at + rank * part, at + (rank + 1) * part)
            found.append(
                SlicesPair(
                    local=tuple(local if axis == self.axis else (None, None) for axis in range(ndim)),
                    whole=tuple(whole if axis == self.axis else (None, None) for axis in range(ndim)),
                )
            )
            at += chunk
        return tuple(found)

    def local_shape(self, shape: Shape, size: int) -> Shape:
        return tuple(n // size if axis == self.axis else n for axis, n in enumerate(shape))


def split_of(ranks: Sequence[Sequence[SlicesPair]], shape: Shape) -> Split | None:
    """The rule behind the pairs of all ranks, None where they are of another rule than nanotron's own."""
    axes = {axis for pairs in ranks for pair in pairs for axis, of in enumerate(pair.whole) if of != (None, None)}
    if len(axes) != 1 or len({len(pairs) for pairs in ranks}) != 1:
        return None
    (axis,) = axes
    chunks = tuple(
        sum((pairs[number].whole[axis][1] or 0) - (pairs[number].whole[axis][0] or 0) for pairs in ranks)
        for number in range(len(ranks[0]))
    )
    plain = all(of == (None, None) for pairs in ranks for pair in pairs for of in pair.local)
    split = Split(axis=axis, chunks=chunks, plain=plain)
    try:
        same = all(split.pairs(len(shape), rank, len(ranks)) == tuple(pairs) for rank, pairs in enumerate(ranks))
    except ValueError:
        return None
    return split if same and sum(chunks) == shape[axis] else None


def dp_cut(numel: int, dp: int) -> tuple[int, int]:
    """(elements of the first ranks, how many ranks those are): all others hold one less.

    `_partition_parameters` of optim/zero.py: ceil(numel / dp), and one less for the last ranks.
    """
    chunk = max(1, -(-numel // dp))
    return chunk, dp - (chunk * dp - numel)
