"""Every byte that is read is checked, without reading any twice: slices combine to the record's crc32.

crc32 combines algebraically: the crc of a whole is the exclusive or of the crcs of its consecutive slices,
each shifted by the number of bytes behind it (zlib's crc32_combine, Mark Adler). So a rank reduces all
that it read of a record to one number, and ranks exclusive-or theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_reshard.containers.crc import crc32, shift
from ds_reshard.containers.positioned import close, opened, read_into
from ds_reshard.errors import ChecksumMismatch, Fault
from ds_reshard.execution.interfaces import Outcome, Slice, read_failed
from ds_reshard.model.index import Record

if TYPE_CHECKING:
    from ds_reshard.planning.plan import Check

_CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSum:
    """What one rank read of a record: the combined crc of its slices, and the byte spans they cover.

    Spans are half-open, count from the record's start, are in order, and adjacent ones are joined.
    """

    record: Record
    crc32: int
    spans: tuple[tuple[int, int], ...]


def partial_sums(outcome: Outcome) -> list[PartialSum]:
    """One sum per record that the rank read, identical slices counted once."""
    sums = []
    for record, slices in outcome.slices.items():
        if record.crc32 is None:
            continue
        total = 0
        parts = set(slices)
        for byte_offset, nbytes, crc in parts:
            total ^= shift(crc, record.nbytes - byte_offset - nbytes)
        spans = _joined((part.byte_offset, part.byte_offset + part.nbytes) for part in parts)
        sums.append(PartialSum(record=record, crc32=total, spans=spans))
    return sums


def _joined(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans in order, those that touch joined; spans that overlap stay apart, and so never tile a record."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def _whole(record: Record, spans: Iterable[tuple[int, int]]) -> bool:
    return _joined(spans) == ((0, record.nbytes),)


def settle(sums: Iterable[PartialSum]) -> tuple[list[PartialSum], list[Fault]]:
    """The sums that need other ranks' parts, and the faults of the records that were read whole."""
    open_sums, faults = [], []
    for item in sums:
        if not _whole(item.record, item.spans):
            open_sums.append(item)
        elif item.crc32 != item.record.crc32:
            faults.append(mismatch(item.record, item.crc32))
    return open_sums, faults


def combine(by_rank: Iterable[Iterable[PartialSum]]) -> tuple[list[Fault], dict[Record, int]]:
    """Combine all ranks' open sums.

    Returns the faults, and the records that slices did not tile exactly (two ranks read the same bytes,
    or a rank failed), with the rank that should read the record again whole to be sure.
    """
    totals: dict[Record, tuple[int, list[tuple[int, int]], int]] = {}
    for rank, sums in enumerate(by_rank):
        for item in sums:
            crc, spans, first = totals.get(item.record, (0, [], rank))
            totals[item.record] = (crc ^ item.crc32, [*spans, *item.spans], first)
    faults, again = [], {}
    for record, (crc, spans, rank) in totals.items():
        if not _whole(record, spans):
            again[record] = rank
        elif crc != record.crc32:
            faults.append(mismatch(record, crc))
    return faults, again


def verify(outcome: Outcome) -> list[Fault]:
    """The faults of all records that one process read, with nobody to combine sums with.

    Records that were not read whole, each byte once, are read again.
    """
    pending, faults = settle(partial_sums(outcome))
    combined, again = combine([pending])
    return [*faults, *combined, *read_again(again)]


def read_again(records: Iterable[Record]) -> list[Fault]:
    """Check whole records from their files; used where slices could not be combined."""
    faults = []
    for record in records:
        try:
            crc, left = crc32_on_disk(record)
        except OSError as error:
            faults.append(read_failed(record.path, error))
            continue
        if crc != record.crc32 or left:
            faults.append(mismatch(record, crc))
    return faults


def crc32_on_disk(record: Record) -> tuple[int, int]:
    """The crc32 of a record's bytes, and how many of them the file does not have. Raises OSError."""
    file, memory = opened(record.path), memoryview(bytearray(min(record.nbytes, _CHUNK_NBYTES)))
    try:
        crc, left = 0, record.nbytes
        while left:
            got = read_into(file, [memory[: min(left, _CHUNK_NBYTES)]], record.byte_offset + record.nbytes - left)
            if not got:
                break
            crc, left = crc32(memory[:got], crc), left - got
    finally:
        close(file)
    return crc, left


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


class Ledger:
    """Slices of records as they are read, in any order; `faults` are those of reading."""

    def __init__(self) -> None:
        self._read = Outcome()

    @property
    def read(self) -> Outcome:
        """What was read, to be noted in another ledger."""
        return self._read

    @property
    def bytes_read(self) -> int:
        return self._read.bytes_read

    @property
    def faults(self) -> list[Fault]:
        return self._read.faults

    @property
    def records(self) -> list[Record]:
        """The records of which something was read."""
        return list(self._read.slices)

    def note(self, outcome: Outcome) -> None:
        self._read.add(outcome)

    def missing(self, record: Record) -> Iterator[Check]:
        """What is still to be read of a record for its checksum."""
        from ds_reshard.planning.plan import Check  # which needs numpy

        at = 0
        for part in sorted(self._read.slices.get(record, ())):
            if part.byte_offset > at:
                yield Check(record=record, byte_offset=record.byte_offset + at, nbytes=part.byte_offset - at)
            at = max(at, part.byte_offset + part.nbytes)
        if at < record.nbytes:
            yield Check(record=record, byte_offset=record.byte_offset + at, nbytes=record.nbytes - at)

    def crc32_of(self, records: Iterable[Record], nbytes: int) -> int:
        """The crc32 of the first `nbytes` bytes of a file, whose records lie end to end and were read.

        A record whose slices overlap is read again. Raises OSError.
        """
        total = 0
        for record in records:
            parts = set(self._read.slices.get(record, ()))
            if sum(part.nbytes for part in parts) != record.nbytes:
                parts = {Slice(byte_offset=0, nbytes=record.nbytes, crc32=crc32_on_disk(record)[0])}
            for part in parts:
                total ^= shift(part.crc32, nbytes - record.byte_offset - part.byte_offset - part.nbytes)
        return total

    def mismatches(self) -> list[Fault]:
        """The records whose bytes are not those that were written."""
        return verify(self._read)
