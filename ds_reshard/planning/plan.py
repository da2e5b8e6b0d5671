"""Plan: the copies, fills and checks that bring one rank's buffers to the state that a checkpoint holds.

What a rank wants is matched with what an index has; copies are ordered by file and offset, joined, and cut to a budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ds_reshard.model.gc_pause import uncollected
from ds_reshard.model.index import Extent, Index, Record
from ds_reshard.model.layout import Layout, Piece, Placement, TensorKey
from ds_reshard.model.records import ElementType


class Copy(NamedTuple):
    """`numel` elements from a file to a buffer of the rank.

    `byte_offset` counts from the start of the file, `element_offset` from the start of the buffer;
    source and target elements may differ in type (they are then cast as torch casts).
    """

    record: Record
    byte_offset: int
    numel: int
    dtype: ElementType
    buffer: str
    element_offset: int
    target_dtype: ElementType

    @property
    def path(self) -> str:
        return self.record.path

    @property
    def nbytes(self) -> int:
        """Bytes read from the file."""
        return self.numel * self.dtype.itemsize

    def part(self, at: int, numel: int) -> Copy:
        """The copy of its elements [at, at + numel) alone."""
        if numel == self.numel:
            return self
        return self._replace(
            byte_offset=self.byte_offset + at * self.dtype.itemsize,
            element_offset=self.element_offset + at,
            numel=numel,
        )


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

    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...] = ()
    checks: tuple[Check, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that the plan reads from files."""
        return sum(c.nbytes for c in self.copies) + sum(c.nbytes for c in self.checks)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted({c.record.path for c in self.copies} | {c.record.path for c in self.checks}))

    def to_json(self) -> dict[str, object]:
        """The plan as plain JSON values."""

        def rows(items: Sequence[Copy | Fill | Check]) -> list[dict[str, object]]:
            return [{name: _plain(value) for name, value in item._asdict().items()} for item in items]

        return {"copies": rows(self.copies), "fills": rows(self.fills), "checks": rows(self.checks)}


def _plain(value: object) -> object:
    if isinstance(value, Record):
        return value._asdict()
    return value.label if isinstance(value, ElementType) else value


_WINDOW_NBYTES = 8 << 20


def window_nbytes(memory_nbytes: int) -> int:
    """How much of a file is put together in memory at once: at most half of what there is, the other half reads."""
    return max(4096, min(_WINDOW_NBYTES, memory_nbytes // 2))


def cut_copies(copies: Iterable[Copy], chunk_nbytes: int) -> Iterator[Copy]:
    """The same copies in pieces of at most `chunk_nbytes` bytes of source (at least one element)."""
    for copy in copies:
        if 0 < copy.nbytes <= chunk_nbytes:
            yield copy
            continue
        step = max(1, chunk_nbytes // copy.dtype.itemsize)
        for at in range(0, copy.numel, step):
            yield copy.part(at, min(step, copy.numel - at))


def cut_checks(checks: Iterable[Check], chunk_nbytes: int) -> Iterator[Check]:
    """The same checks in pieces of at most `chunk_nbytes` bytes."""
    for check in checks:
        for at in range(0, check.nbytes, chunk_nbytes):
            yield check._replace(byte_offset=check.byte_offset + at, nbytes=min(chunk_nbytes, check.nbytes - at))


def coalesce(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    """The same copies, ordered by (file, offset), adjacent ones joined into one."""
    joined: list[Copy] = []
    for copy in sorted(copies, key=lambda c: (c.record.path, c.byte_offset, c.buffer, c.element_offset)):
        last = joined[-1] if joined else None
        if last is not None and _continues(last, copy):
            joined[-1] = last._replace(numel=last.numel + copy.numel)
        else:
            joined.append(copy)
    return tuple(joined)


def _continues(last: Copy, copy: Copy) -> bool:
    return (
        last.element_offset + last.numel == copy.element_offset
        and last.byte_offset + last.nbytes == copy.byte_offset
        and last.buffer == copy.buffer
        and last.record == copy.record
        and (last.dtype, last.target_dtype) == (copy.dtype, copy.target_dtype)
    )


@uncollected()
def plan_rank(
    source: Index,
    target: Layout,
    rank: int,
    wants: Mapping[TensorKey, TensorKey],
    *,
    sizes: Mapping[str, int],
    gaps: Gaps | None = None,
) -> Plan:
    """The plan that fills `rank`'s buffers of the target layout.

    `wants` maps each target tensor to the source tensor that it is read from; a source tensor serves
    one target tensor. `sizes` gives the elements of each fresh buffer of this rank: what no tensor covers
    there is zeroed. `gaps` is kept between the plans of several ranks for the same wants. Shards are opened through
    `source`, whose `faults` the caller looks at afterwards. Cost is linear in the tensors of the shards that this rank
    touches.
    """
    copies: list[Copy] = []
    covered: dict[str, list[tuple[int, int]]] = {buffer: [] for buffer in sizes}
    touched: dict[Record, set[_Shard]] = {}
    for placement, piece in wanted_pieces(target, rank, wants):
        source_key = wants[placement.key]
        family = source.layout[source_key].family
        if placement.buffer in covered:
            covered[placement.buffer].append((piece.element_offset, piece.stop - piece.start))
        for at, fragment in source.locate(source_key, placement.region(piece)):
            record, byte_offset, dtype, numel = fragment.extent
            touched.setdefault(record, set()).add((family, fragment.shard))
            element_offset = piece.element_offset + at
            copies.append(Copy(record, byte_offset, numel, dtype, placement.buffer, element_offset, placement.dtype))
    fills = [fill for buffer, numel in sizes.items() for fill in _uncovered(buffer, numel, covered[buffer])]
    checks = (gaps or Gaps(source, target, wants)).read_by(rank, touched)
    return Plan(copies=coalesce(copies), fills=tuple(fills), checks=tuple(checks))


def wanted_pieces(target: Layout, rank: int, wants: Mapping[TensorKey, TensorKey]) -> Iterator[tuple[Placement, Piece]]:
    """What `rank` holds of the target tensors in `wants`, buffer by buffer."""
    for family, buffer in dict.fromkeys((target[key].family, target[key].buffer) for key in wants):
        for placement, piece in target.pieces(family, buffer, rank):
            if placement.key in wants:
                yield placement, piece


def _uncovered(buffer: str, numel: int, spans: Iterable[tuple[int, int]]) -> Iterable[Fill]:
    at = 0
    for offset, length in sorted(spans):
        if offset > at:
            yield Fill(buffer=buffer, element_offset=at, numel=offset - at)
        at = max(at, offset + length)
    if at < numel:
        yield Fill(buffer=buffer, element_offset=at, numel=numel - at)


_Shard = tuple[str, int]
"""A shard of a family."""

_Use = tuple[Placement, Piece]
"""A wanted piece of a tensor of the source."""


@dataclass(slots=True, kw_only=True)
class _Uses:
    """Bytes [begin, end) of a file that hold wanted pieces one after another, by the first and the last of them."""

    begin: int
    end: int
    first: _Use
    last: _Use


class _Gap(NamedTuple):
    """Bytes that are in no wanted tensor; every rank that touches the record reads them where `reader` is None."""

    reader: int | None
    check: Check


class Gaps:
    """Bytes of the source's records that are in no wanted tensor, each with the target rank that reads it.

    A gap (padding, a tensor that nobody asked for) is read for its record's checksum, by the rank that owns the wanted
    element before it, or after it at the record's start, so that over all ranks each byte is read once. Where the
    neighbour is replicated, every rank reads the record whole, gaps too. What is found is kept for the next plan.
    """

    def __init__(self, source: Index, target: Layout, wants: Mapping[TensorKey, TensorKey]) -> None:
        self._source = source
        self._target = target
        self._wanted_by = {source_key: target_key for target_key, source_key in wants.items()}
        self._found: dict[tuple[Record, frozenset[_Shard]], list[_Gap]] = {}

    def read_by(self, rank: int, touched: Mapping[Record, Iterable[_Shard]]) -> list[Check]:
        """The gaps that `rank` reads of the records it touches, each given with the shards that hold it."""
        holders = {(record, frozenset(shards)) for record, shards in touched.items()}
        uses: dict[Record, list[_Uses]] = {record: [] for record, shards in holders - self._found.keys()}
        for family, shard in sorted({at for record, shards in holders if record in uses for at in shards}):
            self._add(family, shard, uses)
        for record, shards in holders:
            if record in uses:
                ordered = sorted(uses[record], key=lambda together: (together.begin, together.end))
                self._found[record, shards] = list(self._gaps(record, ordered))
        found = (gap for held in holders for gap in self._found[held])
        return sorted(
            (gap.check for gap in found if gap.reader in (None, rank)),
            key=lambda check: (check.record.path, check.byte_offset),
        )

    def _add(self, family: str, shard: int, uses: Mapping[Record, list[_Uses]]) -> None:
        """Add the wanted bytes of one shard to those of the records in `uses`."""
        for buffer, extent in self._source.open(family, shard).items():
            found, itemsize = uses.get(extent.record), extent.dtype.itemsize
            if found is None:
                continue
            last: _Uses | None = None
            for use in self._source.layout.pieces(family, buffer, shard):
                origin, (_, start, stop, element_offset) = use
                if origin.key not in self._wanted_by:
                    continue
                begin = extent.byte_offset + element_offset * itemsize
                end = begin + (stop - start) * itemsize
                if last is not None and last.end == begin:
                    last.end, last.last = end, use
                else:
                    last = _Uses(begin=begin, end=end, first=use, last=use)
                    found.append(last)

    def _gaps(self, record: Record, uses: Sequence[_Uses]) -> Iterator[_Gap]:
        at, stop = record.byte_offset, record.byte_offset + record.nbytes
        reader = self._reader(uses[0].first, first=True) if uses and uses[0].begin > at else None
        for number, together in enumerate(uses):
            if together.begin > at:
                yield _Gap(reader, Check(record=record, byte_offset=at, nbytes=together.begin - at))
            if together.end > at:
                at = together.end
                follows = uses[number + 1].begin if number + 1 < len(uses) else stop
                reader = self._reader(together.last, first=False) if follows > at else None
        if at < stop:
            yield _Gap(reader, Check(record=record, byte_offset=at, nbytes=stop - at))

    def _reader(self, use: _Use, *, first: bool) -> int | None:
        """The target rank that reads the first or last element of a use; None when every rank does.

        Where the boxes differ, or there are several, ownership is not arithmetic: rank 0 stands in (it may then read
        a gap that another rank reads as well; the combined checksum notices, and the record is read again whole).
        """
        origin, piece = use
        wanted = self._target[self._wanted_by[origin.key]]
        if wanted.replicated:
            return None
        if wanted.box != origin.box or wanted.tiles:
            return 0
        element = piece.start if first else piece.stop - 1
        return next(iter(wanted.cut.pieces(element, element + 1))).shard


def extents_overlap(extents: Mapping[str, Extent]) -> list[tuple[str, str]]:
    """Pairs of buffers of one shard whose bytes overlap; a well-formed shard has none."""
    spans = sorted((e.path, e.byte_offset, e.byte_offset + e.nbytes, name) for name, e in extents.items() if e.numel)
    found = []
    for before, after in pairwise(spans):
        if before[0] == after[0] and before[2] > after[1]:
            found.append((before[3], after[3]))
    return found
