"""Plan: the copies, fills and checks that give one rank's buffers the state of a checkpoint.

The target layout is matched with an index; copies are ordered by file and offset, and joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from ds_reshard.model.columns import NUMBER, Column, Cuts, Families, Family, Pieces
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.index import ZERO_FILE, Extent, Index, Record
from ds_reshard.model.layout import Layout, Placement, TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Region, Rows, Run
from ds_reshard.planning.copies import Copies, Copy, Numbers, Types


class Fill(NamedTuple):
    """Elements [element_offset, element_offset + numel) of a buffer that belong to no tensor, and are set to zero."""

    buffer: str
    element_offset: int
    numel: int


class Check(NamedTuple):
    """Bytes of a record that no copy needs, and that are read only for the record's checksum."""

    record: Record
    byte_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of one rank. Copies and checks are ordered by file and offset."""

    copies: Sequence[Copy]
    fills: tuple[Fill, ...] = ()
    checks: tuple[Check, ...] = ()

    @property
    def nbytes(self) -> int:
        """The number of bytes that the plan reads from files."""
        return Copies.of(self.copies).nbytes + sum(c.nbytes for c in self.checks)

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the checkpoint that are read."""
        return tuple(sorted((Copies.of(self.copies).paths | {c.record.path for c in self.checks}) - {ZERO_FILE}))

    def merge(self, other: Plan) -> Plan:
        """Return both plans as one; they fill different buffers."""
        copies = Copies.of(self.copies).merge(Copies.of(other.copies)).in_order()
        checks = sorted({*self.checks, *other.checks}, key=lambda check: (check.record.path, check.byte_offset))
        return Plan(copies=copies, fills=(*self.fills, *other.fills), checks=tuple(checks))


_WINDOW_NBYTES = 16 << 20


def window_nbytes(memory_nbytes: int) -> int:
    """Return the size of a window of a file in memory: at most half of the memory, as reading needs the other half."""
    return max(4096, min(_WINDOW_NBYTES, memory_nbytes // 2))


def cut_checks(checks: Iterable[Check], chunk_nbytes: int) -> Iterator[Check]:
    """Yield the same checks in pieces of at most `chunk_nbytes` bytes."""
    for check in checks:
        for offset in range(0, check.nbytes, chunk_nbytes):
            nbytes = min(chunk_nbytes, check.nbytes - offset)
            yield check._replace(byte_offset=check.byte_offset + offset, nbytes=nbytes)


def copies_of(
    source: Index, key: TensorKey, wanted: Region, *, buffer: str, element_offset: int, dtype: ElementType
) -> Iterator[Copy]:
    """Yield the copies of a region of a source tensor into `buffer`, from `element_offset` on."""
    for _, extent, run in source.runs(key, wanted):
        yield copy_of(extent, run, buffer, element_offset, dtype)


def copy_of(extent: Extent, run: Run, buffer: str, element_offset: int, dtype: ElementType) -> Copy:
    """Return the copy of a run of `extent` into `buffer`, where the region of the run begins at `element_offset`."""
    byte_offset = extent.byte_offset + run.second_offset * extent.dtype.itemsize
    rows = tuple(Rows(row.times, row.second_step, row.first_step) for row in run.rows)
    return Copy(
        extent.record,
        byte_offset,
        run.numel,
        extent.dtype,
        buffer,
        element_offset + run.first_offset,
        dtype,
        rows,
        run.spread,
    )


_Shard = tuple[str, int]
"""(family, shard)"""


class Planner:
    """Makes the plan of any rank of a target layout, from an index of the source.

    `wants` maps each target tensor to its source tensor; no source tensor serves two. Tensors in `elsewhere` are read
    by other ranks, whose target layout differs; those ranks also read the gaps after them. Shards are opened through
    `source`; the caller raises its `faults` afterwards.
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
        """Return the plan that fills `rank`'s buffers of the target layout.

        `sizes` has the number of elements of each new buffer of this rank; its elements outside of all tensors are
        zeroed. The cost is linear in the tensors of the layout, by arithmetic on columns, and in the shards read.
        """
        builder = _PlanBuilder(self._source)
        spans: dict[str, list[tuple[int, int]]] = {buffer: [] for buffer in sizes}
        for match in self.matches:
            owned = match.pieces_of(rank)
            if match.cuts is not None:
                builder.add_same_boxes(owned, match)
            else:
                builder.add_each(owned, match)
            numbers = match.family.buffer[owned.member].tolist()
            lengths = (owned.stop - owned.start).tolist()
            for number, offset, numel in zip(numbers, owned.element_offset.tolist(), lengths, strict=True):
                if match.family.buffers[number] in spans:
                    spans[match.family.buffers[number]].append((offset, numel))
        fills = [fill for buffer, numel in sizes.items() for fill in _uncovered(buffer, numel, spans[buffer])]
        checks = self._gaps.read_by(rank, builder.touched)
        return Plan(copies=builder.copies(), fills=tuple(fills), checks=tuple(checks))


class Match:
    """Tensors of one family of the target, matched with their placements in the source.

    `found` pairs the index of a member of the family with its source placement. If all lie in the same box on both
    sides (`alike`), `cuts` are their cuts in the source, and `buffer` numbers the source buffer of each.
    """

    def __init__(self, family: Family, matched_members: Sequence[tuple[int, Placement]], *, same_boxes: bool) -> None:
        self.family = family
        self.origins = [origin for _, origin in matched_members]
        self.cuts: Cuts | None = None
        self._place = numpy.full(len(family.members), -1, dtype=numpy.int64)
        self._place[[member for member, _ in matched_members]] = numpy.arange(len(matched_members))
        if same_boxes:
            buffers = Numbers[tuple[str, str]]()
            numbers = [buffers[origin.family, origin.buffer] for origin in self.origins]
            self.cuts, self.buffer = Cuts(self.origins), numpy.array(numbers, dtype=numpy.int64)

    def pieces_of(self, rank: int) -> Pieces:
        """Return the pieces that a rank holds of these tensors."""
        owned = self.family.cuts.pieces_of(rank)
        return owned.take(self._place[owned.member] >= 0)

    def locate(self, owned: Pieces) -> tuple[Pieces, Column]:
        """Return the source pieces of the pieces `owned` by a rank, and the index in `origins` of each.

        The tensors lie in the same box on both sides; `member` of a source piece is the index of its piece in `owned`.
        """
        assert self.cuts is not None
        origin = self._place[owned.member]
        pieces = self.cuts.take(origin).locate(owned.start, owned.stop)
        return pieces, origin[pieces.member]

    def each(self, owned: Pieces) -> Iterator[tuple[Placement, Placement, Region, int]]:
        """Yield for each held piece the tensor, its source placement, the region, and the offset in the buffer."""
        columns = (owned.member, self._place[owned.member], owned.start, owned.stop, owned.element_offset)
        for number, origin, start, stop, element_offset in zip(*(column.tolist() for column in columns), strict=True):
            member = self.family.members[number]
            yield member, self.origins[origin], Region(box=member.box, start=start, stop=stop), element_offset

    def extents(self, pieces: Pieces, origin: Column) -> tuple[list[tuple[Placement, int]], Column]:
        """Return the source buffers of pieces, as (a placement in it, shard), and the index of each piece's buffer."""
        buffer_key = pieces.shard * (int(self.buffer.max(initial=0)) + 1) + self.buffer[origin]
        _, first, number = numpy.unique(buffer_key, return_index=True, return_inverse=True)
        origins = (self.origins[index] for index in origin[first].tolist())
        return list(zip(origins, pieces.shard[first].tolist(), strict=True)), number


def match_tensors(source: Index, target: Layout, wants: Mapping[TensorKey, TensorKey]) -> list[Match]:
    """Match the tensors of a target that are keys of `wants` with their placements in the source."""
    families, matches = Families(target), list[Match]()
    for name in dict.fromkeys(target[key].family for key in wants):
        same_boxes: list[tuple[int, Placement]] = []
        others: list[tuple[int, Placement]] = []
        for number, member in enumerate(families[name].members):
            origin = wants.get(member.key)
            if origin is not None:
                placement = source.layout[origin]
                in_same_box = not (placement.tiles or placement.axes) and placement.box == member.box
                (same_boxes if in_same_box else others).append((number, placement))
        kinds = (same_boxes, others)
        matches += [Match(families[name], pairs, same_boxes=pairs is same_boxes) for pairs in kinds if pairs]
    return matches


_TYPES = list(ElementType)
_PAIRS: list[Types] = [(dtype, into) for dtype in _TYPES for into in _TYPES]


class _PlanBuilder:
    """Collects the copies of one plan; `touched` are the shards that hold each record that is read."""

    def __init__(self, source: Index) -> None:
        self._source = source
        self._records = Numbers[Record]()
        self._buffers = Numbers[str]()
        self._tables: list[Column] = []
        self._others: list[Copy] = []
        self.touched: dict[Record, set[_Shard]] = {}

    def add_same_boxes(self, owned: Pieces, match: Match) -> None:
        """Add the copies of all pieces `owned` by a rank, whose tensors lie in the same box on both sides, at once."""
        pieces, origin = match.locate(owned)
        buffers, extent = match.extents(pieces, origin)
        extents = numpy.array([self._extent(*buffer_key) for buffer_key in buffers], dtype=numpy.int64).reshape(-1, 4).T
        record, byte_offset, dtype, itemsize = extents[:, extent]
        member = owned.member[pieces.member]
        numbers = numpy.array([self._buffers[buffer] for buffer in match.family.buffers], dtype=numpy.int64)
        ones, zeros = numpy.ones_like(record), numpy.zeros_like(record)
        columns = (
            record,
            byte_offset + pieces.element_offset * itemsize,
            pieces.stop - pieces.start,
            dtype * len(_TYPES) + match.family.dtype[member],
            numbers[match.family.buffer[member]],
            owned.element_offset[pieces.member] + pieces.start - owned.start[pieces.member],
            *(ones, zeros, zeros) * 2,
            ones,
        )
        self._tables.append(numpy.stack(columns)[:, record >= 0])

    def _extent(self, origin: Placement, shard: int) -> tuple[int, int, int, int]:
        """Return record number (-1 if none), byte offset, type number and itemsize of a tensor's buffer in a shard."""
        extent = self._source.extent(origin, shard)
        if extent is None:
            return -1, 0, 0, 1
        self.touched.setdefault(extent.record, set()).add((origin.family, shard))
        return self._records[extent.record], extent.byte_offset, NUMBER[extent.dtype], extent.dtype.itemsize

    def add_each(self, owned: Pieces, match: Match) -> None:
        """Add copies piece by piece, for tensors whose boxes differ, or that lie in several boxes on one side."""
        for member, origin, region, element_offset in match.each(owned):
            for shard, extent, run in self._source.runs(origin.key, region):
                self.touched.setdefault(extent.record, set()).add(shard)
                self._others.append(copy_of(extent, run, member.buffer, element_offset, member.dtype))

    def copies(self) -> Copies:
        copies = Copies.of(self._others)
        if self._tables:
            table = numpy.concatenate(self._tables, axis=1)
            in_columns = Copies(table, list(self._records), list(self._buffers), _PAIRS)
            copies = in_columns.merge(copies) if self._others else in_columns
        return copies.in_order().joined()


def _uncovered(buffer: str, numel: int, spans: Iterable[tuple[int, int]]) -> Iterable[Fill]:
    """Yield fills of a buffer's elements outside of `spans`: (offset, length) of the tensors in it."""
    position = 0
    for offset, length in sorted(spans):
        if offset > position:
            yield Fill(buffer=buffer, element_offset=position, numel=offset - position)
        position = max(position, offset + length)
    if position < numel:
        yield Fill(buffer=buffer, element_offset=position, numel=numel - position)


class _Gap(NamedTuple):
    """Bytes of a record outside of all wanted tensors; `reader` None means every rank that reads the record."""

    reader: int | None
    check: Check


class _Gaps:
    """The gaps of the source's records: bytes outside of all wanted tensors, and the target rank that reads each.

    A gap (padding, an unwanted tensor) is read for its record's checksum, by the rank that owns the wanted element
    before it (or after it, at the record's start), so that each byte is read once over all ranks. If that neighbour is
    replicated, every rank reads the whole record. Results are kept for the next plan.
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
        self._family_numbers: dict[str, int] = {}
        self._gaps_of: dict[tuple[Record, frozenset[_Shard]], list[_Gap]] = {}

    def read_by(self, rank: int, touched: Mapping[Record, Iterable[_Shard]]) -> list[Check]:
        """Return the gaps that `rank` reads; `touched` are its records, with the shards that hold them."""
        holders = {record: frozenset(shards) for record, shards in touched.items()}
        self._find({record: shards for record, shards in holders.items() if (record, shards) not in self._gaps_of})
        gaps = (gap for record_and_shards in holders.items() for gap in self._gaps_of[record_and_shards])
        return sorted(
            (gap.check for gap in gaps if gap.reader in (None, rank)),
            key=lambda check: (check.record.path, check.byte_offset),
        )

    def _find(self, holders: Mapping[Record, frozenset[_Shard]]) -> None:
        """Find and keep the gaps of some records; those without gaps (most) are recognised all at once."""
        numbers = {record: number for number, record in enumerate(holders)}
        shards = sorted({shard_key for shards in holders.values() for shard_key in shards})
        nothing = numpy.empty((7, 0), dtype=numpy.int64)
        uses = numpy.concatenate([nothing, *(self._uses(*shard_key, numbers) for shard_key in shards)], axis=1)
        uses = uses[:, numpy.lexsort((uses[2], uses[1], uses[0]))]
        record_number, begin, end = uses[:3]
        ends = numpy.searchsorted(record_number, numpy.arange(len(holders)), side="right").tolist()
        breaks = numpy.flatnonzero(begin[1:] != end[:-1]) + 1
        broken = set(record_number[breaks][record_number[breaks] == record_number[breaks - 1]].tolist())
        first = 0
        for number, ((record, shard_set), last) in enumerate(zip(holders.items(), ends, strict=True)):
            covered = last > first and number not in broken and begin[first] == record.byte_offset
            if covered and end[last - 1] == record.byte_offset + record.nbytes:
                self._gaps_of[record, shard_set] = []
            else:
                self._gaps_of[record, shard_set] = list(self._of_record(record, uses[1:, first:last].T.tolist()))
            first = last

    def _uses(self, family: str, shard: int, numbers: Mapping[Record, int]) -> Column:
        """Return a shard's pieces of wanted tensors as columns: record, begin, end, family, member, start, stop."""
        source_family, opened = self._families[family], self._source.open(family, shard)
        if family not in self._wanted:
            is_wanted = [one.key in self._wanted_by or one.key in self._elsewhere for one in source_family.members]
            self._wanted[family] = numpy.array(is_wanted, dtype=bool)
        extents = [opened.get(buffer) for buffer in source_family.buffers]
        locations = [
            (numbers[extent.record], extent.byte_offset, extent.dtype.itemsize)
            if extent is not None and extent.record in numbers
            else (-1, 0, 0)
            for extent in extents
        ]
        pieces = source_family.cuts.pieces_of(shard)
        pieces = pieces.take(self._wanted[family][pieces.member])
        columns = numpy.array(locations, dtype=numpy.int64).reshape(-1, 3).T
        record, byte_offset, itemsize = columns[:, source_family.buffer[pieces.member]]
        begin = byte_offset + pieces.element_offset * itemsize
        end = begin + (pieces.stop - pieces.start) * itemsize
        number = numpy.full_like(begin, self._family_numbers.setdefault(family, len(self._family_numbers)))
        uses = numpy.stack((record, begin, end, number, pieces.member, pieces.start, pieces.stop))
        return uses[:, record >= 0]

    def _of_record(self, record: Record, uses: Sequence[Sequence[int]]) -> Iterator[_Gap]:
        """Yield the gaps between the `uses` of one record: its wanted pieces in the order of their bytes."""
        position, stop = record.byte_offset, record.byte_offset + record.nbytes
        reader = self._reader(uses[0][2:], first=True) if uses and uses[0][0] > position else None
        for number, (begin, end, *piece) in enumerate(uses):
            if begin > position:
                yield _Gap(reader, Check(record=record, byte_offset=position, nbytes=begin - position))
            if end > position:
                position = end
                follows = uses[number + 1][0] if number + 1 < len(uses) else stop
                reader = self._reader(piece, first=False) if follows > position else None
        if position < stop:
            yield _Gap(reader, Check(record=record, byte_offset=position, nbytes=stop - position))

    def _reader(self, piece: Sequence[int], *, first: bool) -> int | None:
        """Return the rank that reads the first (or last) element of a piece: None if all do, -1 if one of another plan.

        If boxes differ, or there are several, the owner is not computed: rank 0 stands in. It may then read a gap that
        another rank reads too; the combined checksum shows this, and the record is read again as a whole.
        """
        family, member, start, stop = piece
        origin = self._families[list(self._family_numbers)[family]].members[member]
        if origin.key not in self._wanted_by:
            return -1
        placement = self._target[self._wanted_by[origin.key]]
        if placement.replicated:
            return None
        if placement.box != origin.box or placement.tiles or origin.axes:
            return 0
        element = start if first else stop - 1
        return next(iter(placement.cut.pieces(element, element + 1))).shard
