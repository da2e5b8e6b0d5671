"""Regions: spans of an n-dimensional box of a logical tensor. There is no other region type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from operator import add, mul
from typing import NamedTuple

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """An axis-aligned part of a logical tensor: `offset[i] <= index[i] < offset[i] + size[i]`."""

    offset: tuple[int, ...]
    size: Shape
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.size) or min((*self.offset, *self.size, 0)) < 0:
            raise ValueError(f"not a box: offset {self.offset}, size {self.size}")
        object.__setattr__(self, "numel", prod(self.size))

    def intersects(self, other: Box) -> bool:
        """True if the boxes share an element."""
        return all(
            max(a, b) < min(a + s, b + t)
            for a, s, b, t in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )

    @classmethod
    @lru_cache(maxsize=1 << 12)
    def whole(cls, shape: Shape) -> Box:
        """Return the box of a whole tensor; tensors of one shape share the object."""
        return cls(offset=(0,) * len(shape), size=tuple(shape))

    @classmethod
    def along(cls, shape: Shape, dim: int, first: int, size: int) -> Box:
        """Return the box of indices [first, first + size) along `dim`, and of all indices along the others."""
        offset = tuple(first if axis == dim else 0 for axis in range(len(shape)))
        return cls(offset=offset, size=(*shape[:dim], size, *shape[dim + 1 :]))

    @classmethod
    def chunk(cls, shape: Shape, dim: int, number: int, count: int) -> Box:
        """Return chunk `number` of `count` along `dim`, as torch.chunk cuts: ceil(n / count) rows, the last fewer."""
        rows = -(-shape[dim] // count)
        first, stop = (min(shape[dim], index * rows) for index in (number, number + 1))
        return cls.along(shape, dim, first, stop - first)


class Axis(NamedTuple):
    """An axis along which a box is stored: `size` indices, `step` rows apart along dimension `dim` of the box."""

    dim: int
    size: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Elements [start, stop) of `box` in storage order; the box is in the whole tensor's coordinates.

    A ZeRO partition is a span of the whole tensor's box; a tensor-parallel shard is its own box with the
    full span. Storage of a region is contiguous: element `start` comes first. It is row-major, or has the axes
    `axes`, the outermost first, if a map transposes the tensor.
    """

    box: Box
    start: int
    stop: int
    axes: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.box.numel:
            raise ValueError(f"span [{self.start}, {self.stop}) leaves a box of {self.box.numel} elements")

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def extent(self, axis: int) -> tuple[int, int]:
        """Return the smallest half-open interval of indices along an axis that contains all elements of the region."""
        offset, size = self.box.offset[axis], self.box.size[axis]
        if self.start == self.stop:
            return offset, offset
        inner = prod(self.box.size[axis + 1 :])
        first, last = self.start // inner, (self.stop - 1) // inner
        if first // size != last // size:
            return offset, offset + size
        return offset + first % size, offset + last % size + 1


class Rows(NamedTuple):
    """`times` runs of equal length at equal distances: so many elements apart in a first place and in a second."""

    times: int
    first_step: int
    second_step: int


class Run(NamedTuple):
    """`numel` elements that lie together in two regions; the offsets count from the first element of each region.

    With `rows` (at most two, the outer ones first) there are `numel` elements in each row. Of a transposed tensor the
    elements of a row lie together in the second region, and `spread` elements apart in the first.
    """

    first_offset: int
    second_offset: int
    numel: int
    rows: tuple[Rows, ...] = ()
    spread: int = 1

    @property
    def total(self) -> int:
        """The number of elements in all rows."""
        return self.numel * prod(row.times for row in self.rows)

    def each(self) -> Iterator[Run]:
        """Yield the runs of all rows one by one, without rows."""
        if not self.rows:
            yield self
            return
        (times, first, second), rows = self.rows[0], self.rows[1:]
        for number in range(times):
            yield from Run(
                self.first_offset + number * first, self.second_offset + number * second, self.numel, rows, self.spread
            ).each()


def overlap(first: Region, second: Region) -> Iterator[Run]:
    """Yield the elements that both regions hold as runs, ordered by their offset in `first`.

    Regions of one box, or of boxes that differ only along the first axis, overlap in at most one run, found in constant
    time. Other regions are cut into boxes (at most 2 * ndim - 1 each), which are intersected. Two boxes share one run
    with rows, a row being the elements that lie together in both; they share several if they differ along more than
    three axes. Runs that follow each other in both storages are joined. Only the second region may have `axes`.
    """
    assert not first.axes
    if second.axes:
        yield from sorted(_transposed(first, second))
        return
    if first.box.offset[1:] == second.box.offset[1:] and first.box.size[1:] == second.box.size[1:]:
        row = prod(first.box.size[1:])
        first_begin, second_begin = (sum(region.box.offset[:1]) * row + region.start for region in (first, second))
        start, stop = max(first_begin, second_begin), min(first_begin + first.numel, second_begin + second.numel)
        if start < stop:
            yield Run(first_offset=start - first_begin, second_offset=start - second_begin, numel=stop - start)
        return
    pending: Run | None = None
    for run in sorted(_different_boxes(first, second)):
        if (
            pending is not None
            and not (pending.rows or run.rows)
            and pending.first_offset + pending.numel == run.first_offset
            and pending.second_offset + pending.numel == run.second_offset
        ):
            pending = pending._replace(numel=pending.numel + run.numel)
            continue
        if pending is not None:
            yield pending
        pending = run
    if pending is not None:
        yield pending


def box_region(shape: Shape, box: Box) -> Region:
    """Return a box as a region: a span of the whole tensor if its elements lie together there, else of the box.

    A shard by rows then shares one run with a partition of the flat tensor, whatever the number of its rows.
    """
    lead = next((axis for axis, size in enumerate(box.size) if size != 1), len(shape))
    if box.size[lead + 1 :] != shape[lead + 1 :]:
        return Region(box=box, start=0, stop=box.numel)
    start = 0
    for size, offset in zip(shape, box.offset, strict=True):
        start = start * size + offset
    return Region(box=Box.whole(shape), start=start, stop=start + box.numel)


class Part(NamedTuple):
    """A box of a whole tensor that lies row-major in a shard of it, from element `element_offset` of the shard on."""

    box: Box
    element_offset: int


def parts_of(whole: Box, inside: Box, shard: Shape) -> Iterator[Part]:
    """Yield the parts of box `whole` of a tensor that lie together in a shard of shape `shard`, there the box `inside`.

    That is one part, or one for each index along the axes before the last one along which the shard is larger.
    """
    last = max((axis for axis, size in enumerate(shard) if size != inside.size[axis]), default=0)
    steps = [prod(shard[axis + 1 :]) for axis in range(len(shard))]
    first, size = sum(map(mul, inside.offset, steps)), (*(1,) * last, *whole.size[last:])
    for index in product(*map(range, whole.size[:last])) if whole.numel else ():
        offset = (*map(add, whole.offset, index), *whole.offset[last:])
        yield Part(Box(offset=offset, size=size), first + sum(map(mul, index, steps)))


def regions_of(shape: Shape, parts: Sequence[Part], start: int, stop: int) -> Iterator[tuple[Region, int]]:
    """Yield elements [start, stop) of a shard that consists of `parts` as regions of a tensor of this shape.

    Each region comes with the offset of its first element from `start`.
    """
    for box, offset in parts:
        first, last = max(offset, start), min(offset + box.numel, stop)
        if first < last:
            is_whole = last - first == box.numel
            yield (
                box_region(shape, box) if is_whole else Region(box=box, start=first - offset, stop=last - offset),
                first - start,
            )


def boxes(region: Region) -> Iterator[Box]:
    """Cut a region into at most 2 * ndim - 1 boxes, in storage order, each contiguous in storage."""
    for offset, size in cut_span(region.box.size, region.start, region.stop):
        yield Box(offset=tuple(a + b for a, b in zip(region.box.offset, offset, strict=True)), size=size)


def cut_span(size: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut elements [start, stop) of an array into boxes, as (offset, size), in storage order."""
    if start >= stop:
        return
    if not size:
        yield (), ()
        return
    if len(size) == 1:
        yield (start,), (stop - start,)
        return
    row = prod(size[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from _nested(first, size[1:], head, tail)
        return
    if head:
        yield from _nested(first, size[1:], head, row)
        first += 1
    if first < last:
        yield (first, *(0,) * (len(size) - 1)), (last - first, *size[1:])
    if tail:
        yield from _nested(last, size[1:], 0, tail)


def _nested(index: int, size: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    for offset, extent in cut_span(size, start, stop):
        yield (index, *offset), (1, *extent)


def _different_boxes(first: Region, second: Region) -> Iterator[Run]:
    """Yield the runs that regions of different boxes share, in no order, not joined."""
    others = list(boxes(second))
    for box in boxes(first):
        for other in others:
            low = tuple(max(a, b) for a, b in zip(box.offset, other.offset, strict=True))
            high = tuple(
                min(a + s, b + t) for a, s, b, t in zip(box.offset, box.size, other.offset, other.size, strict=True)
            )
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            axis = _row_axis(first.box, second.box, low, high)
            yield from _in_rows(
                Run(
                    first_offset=_position(first.box, low) - first.start,
                    second_offset=_position(second.box, low) - second.start,
                    numel=prod(b - a for a, b in zip(low[axis:], high[axis:], strict=True)),
                ),
                [
                    Rows(b - a, prod(first.box.size[i + 1 :]), prod(second.box.size[i + 1 :]))
                    for i, (a, b) in enumerate(zip(low[:axis], high[:axis], strict=True))
                    if b - a > 1
                ],
            )


def _transposed(first: Region, second: Region) -> Iterator[Run]:
    """Yield the runs that a region shares with one that has axes, in no order.

    Both are cut into ranges of indices along the axes. Two of these share elements at equal distances in both storages.
    """
    sizes = tuple(axis.size for axis in second.axes)
    row_steps = [prod(first.box.size[dim + 1 :]) for dim in range(len(first.box.size))]
    steps = [axis.step * row_steps[axis.dim] for axis in second.axes]
    stored_steps = [prod(sizes[number + 1 :]) for number in range(len(sizes))]
    begin = sum((b - a) * step for a, b, step in zip(first.box.offset, second.box.offset, row_steps, strict=True))
    stored = [_ranges(*held) for held in cut_span(sizes, second.start, second.stop)]
    for wanted, held in product(_indices(first, second), stored):
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, held, strict=True)]
        if any(a >= b for a, b in both):
            continue
        axes = zip(both, steps, stored_steps, strict=True)
        rows = [Rows(b - a, step, stored_step) for (a, b), step, stored_step in axes if b - a > 1]
        last = rows.pop() if rows and rows[-1].second_step == 1 else Rows(1, 1, 1)
        while rows and rows[-1][1:] == (last.times * last.first_step, last.times):
            last = last._replace(times=rows.pop().times * last.times)
        run = Run(
            first_offset=begin - first.start + sum(a * step for (a, _), step in zip(both, steps, strict=True)),
            second_offset=sum(a * step for (a, _), step in zip(both, stored_steps, strict=True)) - second.start,
            numel=last.times,
            spread=last.first_step,
        )
        yield from _in_rows(run, rows)


def _indices(first: Region, second: Region) -> Iterator[list[tuple[int, int]]]:
    """Yield the indices that `first` has along the axes of `second`: a half-open range for each axis, box by box."""
    axes = second.axes
    order = sorted(range(len(axes)), key=lambda number: (axes[number].dim, -axes[number].step))
    sizes = [tuple(axes[n].size for n in order if axes[n].dim == dim) for dim in range(len(first.box.size))]
    for box in boxes(first):
        ends = zip(box.offset, box.size, second.box.offset, second.box.size, strict=True)
        inside = [(max(0, a - b), min(a + size - b, most)) for a, size, b, most in ends]
        for cut in product(*(cut_span(of_dim, *part) for of_dim, part in zip(sizes, inside, strict=True))):
            ranges = [one for held in cut for one in _ranges(*held)]
            yield [one for _, one in sorted(zip(order, ranges, strict=True))]


def _ranges(offset: Shape, size: Shape) -> list[tuple[int, int]]:
    return [(a, a + b) for a, b in zip(offset, size, strict=True)]


def _in_rows(run: Run, axes: list[Rows]) -> Iterator[Run]:
    """Yield the run with a row per index of these axes; axes at equal distances are joined, two remain as rows."""
    rows: list[Rows] = []
    for inner in reversed(axes):
        last = rows[-1] if rows else None
        if last is not None and inner[1:] == (last.times * last.first_step, last.times * last.second_step):
            rows[-1] = last._replace(times=inner.times * last.times)
        else:
            rows.append(inner)
    outer, inner_rows = rows[:1:-1], tuple(reversed(rows[:2]))
    for part in run._replace(rows=tuple(outer)).each():
        yield part._replace(rows=inner_rows)


def _row_axis(first: Box, second: Box, low: Shape, high: Shape) -> int:
    """Return the first axis from which [low, high) is contiguous in both boxes: it fills both on all later axes."""
    axis = max(0, len(low) - 1)
    while axis and (low[axis], high[axis] - low[axis]) == (first.offset[axis], first.size[axis]) == (
        second.offset[axis],
        second.size[axis],
    ):
        axis -= 1
    return axis


def _position(box: Box, index: Shape) -> int:
    position = 0
    for i, offset, size in zip(index, box.offset, box.size, strict=True):
        position = position * size + (i - offset)
    return position
