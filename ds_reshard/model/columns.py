"""The cuts of many tensors as columns: what a shard holds of each, and which shards hold a part, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from ds_reshard.errors import UnsupportedLayout
from ds_reshard.model.layout import Layout, Placement
from ds_reshard.model.records import ElementType

Column = NDArray[numpy.int64]


class Pieces(NamedTuple):
    """Pieces of tensors: element i of each column is of piece i.

    `member` is the number of its tensor among those that were asked about; the others are as in `Piece`.
    """

    member: Column
    shard: Column
    start: Column
    stop: Column
    element_offset: Column

    def take(self, which: NDArray[numpy.bool_]) -> Pieces:
        return Pieces(*(column[which] for column in self))


_NO_WIDE = -1
NUMBER = {dtype: number for number, dtype in enumerate(ElementType)}


class Cuts:
    """The cuts of some placements, as columns.

    Numbers of elements are below 2**62 (UnsupportedLayout): a sum of two is then exact.
    """

    def __init__(self, members: Sequence[Placement]) -> None:
        *cuts, wide, step = zip(*(one.cut for one in members), strict=True) if members else ((),) * 6
        columns = (
            [one.box.numel for one in members],
            [one.replicated for one in members],
            *cuts,
            [_NO_WIDE if number is None else number for number in wide],
            step,
        )
        if members and max(map(max, columns)) >= 1 << 62:
            raise _too_large()
        self._columns = numpy.array(columns, dtype=numpy.int64)

    def check(self, shards: int) -> None:
        """UnsupportedLayout where chunks of so many shards together have numbers that do not fit."""
        widest = int(self._columns[2].max(initial=0)) * (shards + 1)
        if widest + int(self._columns[3].max(initial=0)) >= 1 << 62:
            raise _too_large()

    def take(self, which: Column) -> Cuts:
        """Those of some members, in that order."""
        taken = Cuts(())
        taken._columns = self._columns[:, which]
        return taken

    def pieces_of(self, shard: int) -> Pieces:
        """What a shard holds: a piece of each member that it holds any of."""
        numel, replicated, _, _, _, first, _, step = self._columns
        number, beside = numpy.divmod(numpy.where(replicated > 0, 0, shard) - first, step)
        begin, end = self._begin(number), self._begin(number + 1)
        start, stop = numpy.maximum(0, begin), numpy.minimum(numel, end)
        pieces = Pieces(
            member=numpy.arange(len(numel)),
            shard=number * step + first,
            start=start,
            stop=stop,
            element_offset=start - begin + self._columns[4],
        )
        return pieces.take((number >= 0) & (beside == 0) & (start < stop))

    def locate(self, start: Column, stop: Column) -> Pieces:
        """The pieces of elements [start[i], stop[i]) of member i, in order; each has one element at least."""
        begin = self._number(start)
        count = self._number(stop - 1) - begin + 1
        member = numpy.repeat(numpy.arange(len(count)), count)
        number = begin[member] + numpy.arange(len(member)) - (numpy.cumsum(count) - count)[member]
        of_each = self.take(member)
        first, step, here, after = *of_each._columns[[5, 7]], of_each._begin(number), of_each._begin(number + 1)
        start, stop = numpy.maximum(start[member], here), numpy.minimum(stop[member], after)
        return Pieces(member, number * step + first, start, stop, start - here + of_each._columns[4])

    def _begin(self, number: Column) -> Column:
        """The element with which chunk `number` of each member begins; it may lie outside of it."""
        _, _, chunk, phase, _, _, wide, _ = self._columns
        narrow = numpy.where(wide == _NO_WIDE, 0, numpy.maximum(0, number - wide))
        begin: Column = number * chunk - narrow - phase
        return begin

    def _number(self, element: Column) -> Column:
        """The number of the chunk that an element of each member lies in."""
        _, _, chunk, phase, _, _, wide, _ = self._columns
        at = element + phase
        narrow = (wide != _NO_WIDE) & (at >= wide * chunk)
        behind = wide + (at - wide * chunk) // numpy.maximum(1, chunk - 1)
        number: Column = numpy.where(narrow, behind, at // chunk)
        return number


def _too_large() -> UnsupportedLayout:
    return UnsupportedLayout(
        "tensors or shards of 2**62 elements or more: no checkpoint has them, so its shapes are damaged; restore it "
        "from a copy, or load another tag"
    )


class Family:
    """All boxes of one family of a layout: `members[i]` lies in `buffers[buffer[i]]`, cut as `cuts` says.

    `dtype[i]` is the number of its type among all element types.
    """

    def __init__(self, layout: Layout, family: str) -> None:
        self.name = family
        self.buffers = layout.buffers(family)
        by_buffer = [layout.in_buffer(family, buffer) for buffer in self.buffers]
        self.members = [member for members in by_buffer for member in members]
        self.dtype = numpy.array([NUMBER[member.dtype] for member in self.members], dtype=numpy.int64)
        self.buffer = numpy.repeat(numpy.arange(len(by_buffer)), [len(members) for members in by_buffer])
        self.cuts = Cuts(self.members)
        self.cuts.check(layout.shards.get(family, 1))


class Families(dict[str, Family]):
    """The families of a layout, each made when it is first asked for."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout

    def __missing__(self, family: str) -> Family:
        self[family] = Family(self._layout, family)
        return self[family]
