"""Plan: the copies, fills and checks that bring one rank's buffers to the state that a checkpoint holds.

What a rank wants is matched with what an index has; copies are ordered by file and offset, joined, and cut to a budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from ds_reshard.model.columns import NUMBER, Column, Cuts, Families, Family, Pieces
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.index import Extent, Index, Record
from ds_reshard.model.layout import Layout, Placement, TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Region, Rows, Run
from ds_reshard.planning.copies import Copies, Copy, Numbers, Types


class Fill(NamedTuple):
    """Elements [element_offset, element_offset + numel) of a buffer that no tensor covers: zeroed."""

    buffer: str
    element_offset: int
    numel: int


class Check(NamedTuple):
    """Bytes that nobody wants, in a record that is otherwise read: read only for the record's checksum."""

    record: Record
    byte_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One rank's work. Copies and checks are ordered by file and offset."""

    copies: Sequence[Copy]
    fills: tuple[Fill, ...] = ()
    checks: tuple[Check, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that the plan reads from files."""
        return Copies.of(self.copies).nbytes + sum(c.nbytes for c in self.checks)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted(Copies.of(self.copies).paths | {c.record.path for c in self.checks}))

    def merge(self, other: Plan) -> Plan:
        """Both plans as one; they fill different buffers."""
        copies = Copies.of(self.copies).merge(Copies.of(other.copies)).in_order()
        checks = sorted({*self.checks, *other.checks}, key=lambda check: (check.record.path, check.byte_offset))
        return Plan(copies=copies, fills=(*self.fills, *other.fills), checks=tuple(checks))


_WINDOW_NBYTES = 16 << 20


def window_nbytes(memory_nbytes: int) -> int:
    """How much of a file is put together in memory at once: at most half of what there is, the other half reads."""
    return max(4096, min(_WINDOW_NBYTES, memory_nbytes // 2))


def cut_checks(checks: Iterable[Check], chunk_nbytes: int) -> Iterator[Check]:
    """The same checks in pieces of at most `chunk_nbytes` bytes."""
    for check in checks:
        for at in range(0, check.nbytes, chunk_nbytes):
            yield check._replace(byte_offset=check.byte_offset + at, nbytes=min(chunk_nbytes, check.nbytes - at))


def copies_of(
    source: Index, key: TensorKey, wanted: Region, *, buffer: str, element_offset: int, dtype: ElementType
) -> Iterator[Copy]:
    """What fills `buffer`, from `element_offset` on, with the elements of a region of a tensor of the source."""
    for _, extent, run in source.runs(key, wanted):
        yield _copy(extent, run, buffer, element_offset, dtype)


def _copy(extent: Extent, run: Run, buffer: str, element_offset: int, dtype: ElementType) -> Copy:
    byte_offset = extent.byte_offset + run.second_offset * extent.dtype.itemsize
    rows = tuple(Rows(row.times, row.second_step, row.first_step) for row in run.rows)
    return Copy(
        extent.record, byte_offset, run.numel, extent.dtype, buffer, element_offset + run.first_offset, dtype, rows
    )


_Shard = tuple[str, int]
"""A shard of a family."""


class Planner:
    """Plans for any rank of a target layout, from what an index has.

    `wants` maps each target tensor to the source tensor that it is read from; a source tensor serves
    one target tensor. Those `elsewhere` are read by ranks that have another target layout, gaps behind them too.
    Shards are opened through `source`, whose `faults` the caller looks at afterwards.
    """

    @gc_disabled()
    def __init__(
        self,
        source: Index,
        target: Layout,
        wants: Mapping[TensorKey, TensorKey],
        *,
        elsewhere: frozenset[TensorKey] = frozenset(),
    ) -> None:
        self._source = source
        self._gaps = _Gaps(source, target, wants, elsewhere)
        self.matches = match_tensors(source, target, wants)

    @gc_disabled()
    def plan(self, rank: int, *, sizes: Mapping[str, int]) -> Plan:
        """The plan that fills `rank`'s buffers of the target layout.

        `sizes` gives the elements of each fresh buffer of this rank: what no tensor covers there is zeroed. Cost is
        linear in the tensors of the layout, by arithmetic on columns, and in the shards that this rank touches.
        """
        work = _PlanBuilder(self._source)
        spans: dict[str, list[tuple[int, int]]] = {buffer: [] for buffer in sizes}
        for match in self.matches:
            held = match.pieces_of(rank)
            if match.cuts is not None:
                work.add_same_boxes(held, match)
            else:
                work.add_each(held, match)
            numbers = match.family.buffer[held.member].tolist()
            lengths = (held.stop - held.start).tolist()
            for number, at, numel in zip(numbers, held.element_offset.tolist(), lengths, strict=True):
                if match.family.buffers[number] in spans:
                    spans[match.family.buffers[number]].append((at, numel))
        fills = [fill for buffer, numel in sizes.items() for fill in _uncovered(buffer, numel, spans[buffer])]
        checks = self._gaps.read_by(rank, work.touched)
        return Plan(copies=work.copies(), fills=tuple(fills), checks=tuple(checks))


class Match:
    """Wanted tensors of one family of the target: numbers of its members, and where the source has each.

    Where all lie in one box on both sides (`alike`) `cuts` are those of the source; `buffer` then says in which of the
    families and buffers of the source each lies, by number.
    """

    def __init__(self, family: Family, found: Sequence[tuple[int, Placement]], *, alike: bool) -> None:
        self.family = family
        self.origins = [origin for _, origin in found]
        self.cuts: Cuts | None = None
        self._place = numpy.full(len(family.members), -1, dtype=numpy.int64)
        self._place[[member for member, _ in found]] = numpy.arange(len(found))
        if alike:
            buffers = Numbers[tuple[str, str]]()
            numbers = [buffers[one.family, one.buffer] for one in self.origins]
            self.cuts, self.buffer = Cuts(self.origins), numpy.array(numbers, dtype=numpy.int64)

    def pieces_of(self, rank: int) -> Pieces:
        """What a rank holds of these tensors."""
        held = self.family.cuts.pieces_of(rank)
        return held.take(self._place[held.member] >= 0)

    def locate(self, held: Pieces) -> tuple[Pieces, Column]:
        """Where the source has what a rank holds, of tensors that lie in one box: pieces, and the origin of each.

        The members of the pieces are numbers of those that are held.
        """
        assert self.cuts is not None
        origin = self._place[held.member]
        pieces = self.cuts.take(origin).locate(held.start, held.stop)
        return pieces, origin[pieces.member]

    def each(self, held: Pieces) -> Iterator[tuple[Placement, Placement, Region, int]]:
        """Of what a rank holds, one by one: the tensor, its origin, the region, and the first element in the buffer."""
        columns = (held.member, self._place[held.member], held.start, held.stop, held.element_offset)
        for number, place, start, stop, at in zip(*(column.tolist() for column in columns), strict=True):
            member = self.family.members[number]
            yield member, self.origins[place], Region(box=member.box, start=start, stop=stop), at

    def extents(self, pieces: Pieces, origin: Column) -> tuple[list[tuple[Placement, int]], Column]:
        """The buffers that pieces lie in, each by a tensor in it and its shard; and of each piece its number."""
        place = pieces.shard * (int(self.buffer.max(initial=0)) + 1) + self.buffer[origin]
        _, first, number = numpy.unique(place, return_index=True, return_inverse=True)
        origins = (self.origins[at] for at in origin[first].tolist())
        return list(zip(origins, pieces.shard[first].tolist(), strict=True)), number


def match_tensors(source: Index, target: Layout, wants: Mapping[TensorKey, TensorKey]) -> list[Match]:
    """The tensors of a target that are wanted, each matched with where the source has it."""
    families, made = Families(target), list[Match]()
    for name in dict.fromkeys(target[key].family for key in wants):
        alike: list[tuple[int, Placement]] = []
        others: list[tuple[int, Placement]] = []
        for number, member in enumerate(families[name].members):
            origin = wants.get(member.key)
            if origin is not None:
                placed = source.layout[origin]
                same = not placed.tiles and (placed.box is member.box or placed.box == member.box)
                (alike if same else others).append((number, placed))
        made += [Match(families[name], found, alike=found is alike) for found in (alike, others) if found]
    return made


_TYPES = list(ElementType)
_PAIRS: list[Types] = [(dtype, into) for dtype in _TYPES for into in _TYPES]


class _PlanBuilder:
    """One plan while it is made."""

    def __init__(self, source: Index) -> None:
        self._source = source
        self._records = Numbers[Record]()
        self._buffers = Numbers[str]()
        self._tables: list[Column] = []
        self._others: list[Copy] = []
        self.touched: dict[Record, set[_Shard]] = {}

    def add_same_boxes(self, held: Pieces, match: Match) -> None:
        """Plan what a rank holds of tensors that both sides cut as they like, all at once."""
        pieces, origin = match.locate(held)
        places, extent = match.extents(pieces, origin)
        found = numpy.array([self._extent(*place) for place in places], dtype=numpy.int64).reshape(-1, 4).T
        record, byte_offset, dtype, itemsize = found[:, extent]
        member = held.member[pieces.member]
        numbers = numpy.array([self._buffers[buffer] for buffer in match.family.buffers], dtype=numpy.int64)
        ones, zeros = numpy.ones_like(record), numpy.zeros_like(record)
        columns = (
            record,
            byte_offset + pieces.element_offset * itemsize,
            pieces.stop - pieces.start,
            dtype * len(_TYPES) + match.family.dtype[member],
            numbers[match.family.buffer[member]],
            held.element_offset[pieces.member] + pieces.start - held.start[pieces.member],
            *(ones, zeros, zeros) * 2,
        )
        self._tables.append(numpy.stack(columns)[:, record >= 0])

    def _extent(self, origin: Placement, shard: int) -> tuple[int, int, int, int]:
        """The buffer of a tensor in a shard: numbers of its record and type, first byte, bytes of an element."""
        extent = self._source.extent(origin, shard)
        if extent is None:
            return -1, 0, 0, 1
        self.touched.setdefault(extent.record, set()).add((origin.family, shard))
        return self._records[extent.record], extent.byte_offset, NUMBER[extent.dtype], extent.dtype.itemsize

    def add_each(self, held: Pieces, match: Match) -> None:
        """Plan tensors whose boxes differ, or of which one side has several."""
        for member, origin, region, at in match.each(held):
            for shard, extent, run in self._source.runs(origin.key, region):
                self.touched.setdefault(extent.record, set()).add((origin.family, shard))
                self._others.append(_copy(extent, run, member.buffer, at, member.dtype))

    def copies(self) -> Copies:
        found = Copies.of(self._others)
        if self._tables:
            together = numpy.concatenate(self._tables, axis=1)
            alike = Copies(together, list(self._records), list(self._buffers), _PAIRS)
            found = alike.merge(found) if self._others else alike
        return found.in_order().joined()


def _uncovered(buffer: str, numel: int, spans: Iterable[tuple[int, int]]) -> Iterable[Fill]:
    at = 0
    for offset, length in sorted(spans):
        if offset > at:
            yield Fill(buffer=buffer, element_offset=at, numel=offset - at)
        at = max(at, offset + length)
    if at < numel:
        yield Fill(buffer=buffer, element_offset=at, numel=numel - at)


class _Gap(NamedTuple):
    """Bytes that are in no wanted tensor; every rank that touches the record reads them where `reader` is None."""

    reader: int | None
    check: Check


class _Gaps:
    """Bytes of the source's records that are in no wanted tensor, each with the target rank that reads it.

    A gap (padding, a tensor that nobody asked for) is read for its record's checksum, by the rank that owns the wanted
    element before it, or after it at the record's start, so that over all ranks each byte is read once. Where the
    neighbour is replicated, every rank reads the record whole, gaps too. What is found is kept for the next plan.
    """

    def __init__(
        self, source: Index, target: Layout, wants: Mapping[TensorKey, TensorKey], elsewhere: frozenset[TensorKey]
    ) -> None:
        self._source = source
        self._target = target
        self._elsewhere = elsewhere
        self._families = Families(source.layout)
        self._wanted_by = {source_key: target_key for target_key, source_key in wants.items()}
        self._wanted: dict[str, NDArray[numpy.bool_]] = {}
        self._names: dict[str, int] = {}
        self._found: dict[tuple[Record, frozenset[_Shard]], list[_Gap]] = {}

    def read_by(self, rank: int, touched: Mapping[Record, Iterable[_Shard]]) -> list[Check]:
        """The gaps that `rank` reads of the records it touches, each given with the shards that hold it."""
        holders = {record: frozenset(shards) for record, shards in touched.items()}
        self._find({record: shards for record, shards in holders.items() if (record, shards) not in self._found})
        found = (gap for held in holders.items() for gap in self._found[held])
        return sorted(
            (gap.check for gap in found if gap.reader in (None, rank)),
            key=lambda check: (check.record.path, check.byte_offset),
        )

    def _find(self, holders: Mapping[Record, frozenset[_Shard]]) -> None:
        """Find the gaps of some records; most have none, which is seen for all of them at once."""
        numbers = {record: number for number, record in enumerate(holders)}
        shards = sorted({at for shards in holders.values() for at in shards})
        nothing = numpy.empty((7, 0), dtype=numpy.int64)
        uses = numpy.concatenate([nothing, *(self._uses(*at, numbers) for at in shards)], axis=1)
        uses = uses[:, numpy.lexsort((uses[2], uses[1], uses[0]))]
        of, begin, end = uses[:3]
        ends = numpy.searchsorted(of, numpy.arange(len(holders)), side="right").tolist()
        apart = numpy.flatnonzero(begin[1:] != end[:-1]) + 1
        broken = set(of[apart][of[apart] == of[apart - 1]].tolist())
        first = 0
        for number, ((record, held), last) in enumerate(zip(holders.items(), ends, strict=True)):
            tiled = last > first and number not in broken and begin[first] == record.byte_offset
            if tiled and end[last - 1] == record.byte_offset + record.nbytes:
                self._found[record, held] = []
            else:
                self._found[record, held] = list(self._of_record(record, uses[1:, first:last].T.tolist()))
            first = last

    def _uses(self, family: str, shard: int, numbers: Mapping[Record, int]) -> Column:
        """What a shard holds of wanted tensors, in columns: number of the record, first byte, last, and what it is."""
        of_source, opened = self._families[family], self._source.open(family, shard)
        if family not in self._wanted:
            wanted = [one.key in self._wanted_by or one.key in self._elsewhere for one in of_source.members]
            self._wanted[family] = numpy.array(wanted, dtype=bool)
        extents = [opened.get(buffer) for buffer in of_source.buffers]
        found = [
            (numbers[one.record], one.byte_offset, one.dtype.itemsize)
            if one is not None and one.record in numbers
            else (-1, 0, 0)
            for one in extents
        ]
        pieces = of_source.cuts.pieces_of(shard)
        pieces = pieces.take(self._wanted[family][pieces.member])
        places = numpy.array(found, dtype=numpy.int64).reshape(-1, 3).T
        record, byte_offset, itemsize = places[:, of_source.buffer[pieces.member]]
        begin = byte_offset + pieces.element_offset * itemsize
        end = begin + (pieces.stop - pieces.start) * itemsize
        number = numpy.full_like(begin, self._names.setdefault(family, len(self._names)))
        uses = numpy.stack((record, begin, end, number, pieces.member, pieces.start, pieces.stop))
        return uses[:, record >= 0]

    def _of_record(self, record: Record, uses: Sequence[Sequence[int]]) -> Iterator[_Gap]:
        """The gaps beside the uses of one record, which come in the order of their bytes."""
        at, stop = record.byte_offset, record.byte_offset + record.nbytes
        reader = self._reader(uses[0][2:], first=True) if uses and uses[0][0] > at else None
        for number, (begin, end, *use) in enumerate(uses):
            if begin > at:
                yield _Gap(reader, Check(record=record, byte_offset=at, nbytes=begin - at))
            if end > at:
                at = end
                follows = uses[number + 1][0] if number + 1 < len(uses) else stop
                reader = self._reader(use, first=False) if follows > at else None
        if at < stop:
            yield _Gap(reader, Check(record=record, byte_offset=at, nbytes=stop - at))

    def _reader(self, use: Sequence[int], *, first: bool) -> int | None:
        """The target rank that reads the first or last element of a use; None when every rank does, -1 when none here.

        Where the boxes differ, or there are several, ownership is not arithmetic: rank 0 stands in (it may then read
        a gap that another rank reads as well; the combined checksum notices, and the record is read again whole).
        """
        family, member, start, stop = use
        origin = self._families[list(self._names)[family]].members[member]
        if origin.key not in self._wanted_by:
            return -1
        wanted = self._target[self._wanted_by[origin.key]]
        if wanted.replicated:
            return None
        if wanted.box != origin.box or wanted.tiles:
            return 0
        element = start if first else stop - 1
        return next(iter(wanted.cut.pieces(element, element + 1))).shard
