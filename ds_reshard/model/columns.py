"""The cuts of many tensors as columns: the pieces of all tensors in a shard, or the shards of many ranges, at once."""

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
    """Pieces of tensors as columns: row i describes piece i.

    `member` is the index of the piece's tensor in the `Cuts`; the other columns are the fields of `Piece`.
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
    """The cuts of some placements as columns.

    Raises UnsupportedLayout for 2**62 elements or more, so that a sum of two numbers never overflows.
    """

    def __init__(self, members: Sequence[Placement]) -> None:
        *cuts, wide, step = zip(*(member.cut for member in members), strict=True) if members else ((),) * 6
        columns = (  # box, replicated, and the fields of Cut in their order
            [member.box.numel for member in members],
            [member.replicated for member in members],
            *cuts,
            [_NO_WIDE if number is None else number for number in wide],
            step,
        )
        if members and max(map(max, columns)) >= 1 << 62:
            raise _too_large()
        self._columns = numpy.array(columns, dtype=numpy.int64)

    def check(self, shards: int) -> None:
        """Raise UnsupportedLayout if element numbers overflow when all `shards` chunks are put in a row."""
        widest = int(self._columns[2].max(initial=0)) * (shards + 1)
        if widest + int(self._columns[3].max(initial=0)) >= 1 << 62:
            raise _too_large()

    def take(self, which: Column) -> Cuts:
        """Return the cuts of the members with these indices, in that order."""
        taken = Cuts(())
        taken._columns = self._columns[:, which]
        return taken

    def pieces_of(self, shard: int) -> Pieces:
        """Return the pieces in a shard: one for each member of which the shard holds any element."""
        numel, replicated, _, _, _, first, _, step = self._columns
        number, remainder = numpy.divmod(numpy.where(replicated > 0, 0, shard) - first, step)
        begin, end = self._begin(number), self._begin(number + 1)
        start, stop = numpy.maximum(0, begin), numpy.minimum(numel, end)
        pieces = Pieces(
            member=numpy.arange(len(numel)),
            shard=number * step + first,
            start=start,
            stop=stop,
            element_offset=start - begin + self._columns[4],
        )
        return pieces.take((number >= 0) & (remainder == 0) & (start < stop))

    def locate(self, start: Column, stop: Column) -> Pieces:
        """Return the pieces that elements [start[i], stop[i]) of member i consist of, in order; no range is empty."""
        begin = self._number(start)
        count = self._number(stop - 1) - begin + 1
        member = numpy.repeat(numpy.arange(len(count)), count)
        number = begin[member] + numpy.arange(len(member)) - (numpy.cumsum(count) - count)[member]
        cuts = self.take(member)
        first, step, begins, ends = *cuts._columns[[5, 7]], cuts._begin(number), cuts._begin(number + 1)
        start, stop = numpy.maximum(start[member], begins), numpy.minimum(stop[member], ends)
        return Pieces(member, number * step + first, start, stop, start - begins + cuts._columns[4])

    def _begin(self, number: Column) -> Column:
        """Return the first element of chunk `number` of each member; it may lie outside of the member."""
        _, _, chunk, phase, _, _, wide, _ = self._columns
        missing = numpy.where(wide == _NO_WIDE, 0, numpy.maximum(0, number - wide))
        begin: Column = number * chunk - missing - phase
        return begin

    def _number(self, element: Column) -> Column:
        """Return the number of the chunk that contains `element` of each member."""
        _, _, chunk, phase, _, _, wide, _ = self._columns
        position = element + phase
        is_narrow = (wide != _NO_WIDE) & (position >= wide * chunk)
        narrow_number = wide + (position - wide * chunk) // numpy.maximum(1, chunk - 1)
        number: Column = numpy.where(is_narrow, narrow_number, position // chunk)
        return number


def _too_large() -> UnsupportedLayout:
    return UnsupportedLayout(
        "tensors or shards of 2**62 elements or more: no checkpoint has them, so its shapes are damaged; restore it "
        "from a copy, or load another tag"
    )


class Family:
    """All boxes of one family of a layout: `members[i]` lies in `buffers[buffer[i]]`, and is cut as `cuts` says.

    `dtype[i]` is the index of the member's type in ElementType.
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
    """The families of a layout by name, each made on first use."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout

    def __missing__(self, family: str) -> Family:
        self[family] = Family(self._layout, family)
        return self[family]
