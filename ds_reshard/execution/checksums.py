"""Every byte that is read is checked, without reading any twice: slices combine to the record's crc32.

crc32 combines algebraically: the crc of a whole is the exclusive or of the crcs of its consecutive slices,
each shifted by the number of bytes behind it (zlib's crc32_combine, Mark Adler). So a rank reduces all
that it read of a record to one number, and ranks exclusive-or theirs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import xor
from typing import TYPE_CHECKING, NamedTuple

from ds_reshard.containers.crc import crc32, shift
from ds_reshard.containers.positioned import close, opened, read_into
from ds_reshard.errors import CheckpointDamaged, ChecksumMismatch, Fault
from ds_reshard.execution.interfaces import Outcome, Slice, read_failed
from ds_reshard.model.index import Record

if TYPE_CHECKING:
    from ds_reshard.planning.plan import Check

_CHUNK_NBYTES = 1 << 20

SEEN_BY_ALL = "load from a folder that every rank sees (with node-local storage: copy all files to each node)"


class Span(NamedTuple):
    """Bytes [start, stop) of a record, counted from its start.

    With `times`, that many rows of as many bytes, each `step` bytes behind the row before it.
    """

    start: int
    stop: int
    times: int = 1
    step: int = 0

    def rows(self) -> Iterator[tuple[int, int]]:
        """Each row as bytes [start, stop)."""
        for at in range(self.times):
            yield self.start + at * self.step, self.stop + at * self.step

    def continues(self, other: Span) -> bool:
        """True if the rows of `other` go on with these."""
        alike = (self.step, self.stop - self.start) == (other.step, other.stop - other.start)
        return alike and self.step > 0 and other.start == self.start + self.times * self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSum:
    """What one rank read of a record: the combined crc of its slices, and the spans of bytes that they cover.

    Spans are in order, and adjacent ones are joined.
    """

    record: Record
    crc32: int
    spans: tuple[Span, ...]


def partial_sums(outcome: Outcome) -> list[PartialSum]:
    """One sum per record that the rank read, identical slices counted once."""
    sums = []
    for record, slices in outcome.slices.items():
        if record.crc32 is None:
            continue
        total = 0
        parts = set(slices)
        for part in parts:
            total ^= shift(part.crc32, record.nbytes - part.end)
        spans = _joined(map(_span, parts))
        sums.append(PartialSum(record=record, crc32=total, spans=spans))
    return sums


def _span(part: Slice) -> Span:
    several = (part.times, part.step) if part.times > 1 else ()
    return Span(part.byte_offset, part.byte_offset + part.nbytes, *several)


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Spans in order, those that touch joined; spans that overlap stay apart, and so never tile a record."""
    joined: list[Span] = []
    for span in sorted(spans):
        last = joined[-1] if joined else None
        if last is not None and last.continues(span):
            joined[-1] = last._replace(times=last.times + span.times)
        elif last is not None and last.times == span.times == 1 and last.stop == span.start:
            joined[-1] = Span(last.start, span.stop)
        elif span.start < span.stop:
            joined.append(span)
    return tuple(joined)


def is_whole(record: Record, spans: Iterable[Span]) -> bool:
    """True if each byte of the record is in one span; False for a record without bytes."""
    joined = _joined(spans)
    if not any(span.times > 1 for span in joined):
        return joined == (Span(0, record.nbytes),)
    import numpy  # only where there are rows, which may be many

    begins = [span.start + span.step * numpy.arange(span.times) for span in joined]
    starts = numpy.concatenate(begins)
    stops = numpy.concatenate([begin + (span.stop - span.start) for begin, span in zip(begins, joined, strict=True)])
    order = numpy.argsort(starts)
    starts, stops = starts[order], stops[order]
    return starts[0] == 0 and stops[-1] == record.nbytes and bool((starts[1:] == stops[:-1]).all())


def settle(sums: Iterable[PartialSum]) -> tuple[list[PartialSum], list[Fault]]:
    """The sums that need other ranks' parts, and the faults of the records that were read whole."""
    open_sums, faults = [], []
    for item in sums:
        if not is_whole(item.record, item.spans):
            open_sums.append(item)
        elif item.crc32 != item.record.crc32:
            faults.append(mismatch(item.record, item.crc32))
    return open_sums, faults


def combine(by_rank: Iterable[Iterable[PartialSum]]) -> tuple[list[Fault], set[Record]]:
    """Combine all ranks' open sums; what several have read alike counts once.

    Returns the faults, and the records that slices did not tile exactly (two ranks read some of the same bytes, or a
    rank failed): every rank that has read some of these reads them again, to be sure: see `read_again`.
    """
    totals: dict[Record, set[PartialSum]] = {}
    seen: dict[tuple[str, int, int], int | None] = {}
    for sums in by_rank:
        for item in sums:
            totals.setdefault(item.record, set()).add(item)
    faults, again = [], set()
    for record, parts in totals.items():
        recorded = seen.setdefault(record[:3], record.crc32)
        if recorded != record.crc32:
            faults.append(_other_files(record, recorded))
        crc = reduce(xor, (part.crc32 for part in parts))
        if not is_whole(record, (span for part in parts for span in part.spans)):
            again.add(record)
        elif crc != record.crc32:
            faults.append(mismatch(record, crc))
    return faults, again


def _other_files(record: Record, recorded: int | None) -> Fault:
    """Ranks read files of one name that hold other bytes, each as it was written."""
    what = f"ranks see different files of this name: bytes [{record.byte_offset}, {record.byte_offset + record.nbytes})"
    checksums = (f"{crc:08x}" if crc is not None else "none" for crc in (recorded, record.crc32))
    expected, found = (f"a recorded crc32 of {crc}" for crc in checksums)
    return CheckpointDamaged.fault(record.path, what, expected, found, mend=SEEN_BY_ALL)


def verify(outcome: Outcome) -> list[Fault]:
    """The faults of all records that one process read, with nobody to combine sums with.

    Records that were not read whole, each byte once, are read again.
    """
    pending, faults = settle(partial_sums(outcome))
    combined, again = combine([pending])
    return [*faults, *combined, *read_again(pending, again)]


def read_again(sums: Iterable[PartialSum], records: Container[Record]) -> list[Fault]:
    """Compare those of the `records` of which there are sums with their files; and the sums with what is there.

    So a record whose sums do not combine is judged, and each part of it that was read: where several were, one may
    be right and another not.
    """
    by_record: dict[Record, list[PartialSum]] = {}
    for item in sums:
        if item.record in records:
            by_record.setdefault(item.record, []).append(item)
    return [fault for record, parts in by_record.items() for fault in _compared(record, parts)]


def compare_records(records: Iterable[Record]) -> list[Fault]:
    """Compare whole records with their files."""
    return [fault for record in records for fault in _compared(record, ())]


def _compared(record: Record, sums: Iterable[PartialSum]) -> Iterator[Fault]:
    edges = sorted({0, record.nbytes, *(edge for item in sums for row in _rows(item.spans) for edge in row)})
    before, total, lacking = {0: 0}, 0, 0
    try:
        for stop, (crc, left) in zip(edges[1:], _crc32s(record, edges), strict=True):
            total ^= shift(crc, record.nbytes - stop)
            before[stop] = total
            lacking += left
    except OSError as error:
        yield read_failed(record.path, error)
        return
    if total != record.crc32 or lacking:
        yield mismatch(record, total)
        return
    for item in sums:
        there = reduce(xor, (before[start] ^ before[stop] for start, stop in _rows(item.spans)), 0)
        if there != item.crc32:
            stop = record.byte_offset + record.nbytes
            what = f"bytes [{record.byte_offset}, {stop}) were read otherwise than they are"
            mend = "try again; where it comes again, test the memory of this machine and its way to the disk"
            yield ChecksumMismatch.fault(record.path, what, f"crc32 {there:08x}", f"{item.crc32:08x}", mend=mend)


def _rows(spans: Iterable[Span]) -> Iterator[tuple[int, int]]:
    return (row for span in spans for row in span.rows())


def _crc32s(record: Record, edges: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The crc32 of a record's bytes between each two edges, and how many of them its file lacks. Raises OSError."""
    memory = memoryview(bytearray(min(record.nbytes, _CHUNK_NBYTES)))
    file = opened(record.path)
    try:
        for start, stop in pairwise(edges):
            crc = 0
            while start < stop and (got := read_into(file, [memory[: stop - start]], record.byte_offset + start)):
                crc, start = crc32(memory[:got], crc), start + got
            yield crc, stop - start
    finally:
        close(file)


def altered(record: Record) -> str:
    """What a fault says of a record that has another checksum."""
    return f"bytes [{record.byte_offset}, {record.byte_offset + record.nbytes}) are not what was written"


def mismatch(record: Record, crc: int) -> Fault:
    """A record's bytes have the checksum `crc`, which is not the one that was written."""
    return ChecksumMismatch.fault(
        record.path,
        altered(record),
        f"crc32 {record.crc32:08x}",
        f"{crc:08x}",
        mend="restore the file from a copy, or load an older tag; the file on disk is damaged",
    )


class Ledger(Outcome):
    """All that was read, in any order, and what its records' checksums say of it; `faults` are those of reading."""

    def missing(self, record: Record) -> Iterator[Check]:
        """What is still to be read of a record for its checksum."""
        from ds_reshard.planning.plan import Check  # which needs numpy

        at, parts = 0, self.slices.get(record, ())
        for start, stop in sorted(_rows(map(_span, parts))):
            if start > at:
                yield Check(record=record, byte_offset=record.byte_offset + at, nbytes=start - at)
            at = max(at, stop)
        if at < record.nbytes:
            yield Check(record=record, byte_offset=record.byte_offset + at, nbytes=record.nbytes - at)

    def crc32_of(self, records: Iterable[Record], nbytes: int) -> int:
        """The crc32 of the first `nbytes` bytes of a file, whose records lie end to end and were read.

        A record whose slices overlap is read again. Raises OSError.
        """
        total = 0
        for record in records:
            parts = set(self.slices.get(record, ()))
            if sum(part.nbytes * part.times for part in parts) != record.nbytes:
                ((crc, _),) = _crc32s(record, (0, record.nbytes))
                parts = {Slice(byte_offset=0, nbytes=record.nbytes, crc32=crc)}
            for part in parts:
                total ^= shift(part.crc32, nbytes - record.byte_offset - part.end)
        return total

    def mismatches(self) -> list[Fault]:
        """The records whose bytes are not those that were written."""
        return verify(self)
