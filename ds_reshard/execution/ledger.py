"""What was read of each record: each byte once, all of it checked, whatever it was read for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ds_reshard.containers.crc import shift
from ds_reshard.errors import Fault
from ds_reshard.execution.checksums import combine, crc32_on_disk, partial_sums, read_again, settle
from ds_reshard.execution.ports import Outcome, Slice
from ds_reshard.model.index import Record
from ds_reshard.planning.plan import Check


class Ledger:
    """Slices of records as they are read, in any order; `faults` are those of reading."""

    def __init__(self) -> None:
        self._read = Outcome()

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
        self._read.bytes_read += outcome.bytes_read
        self._read.faults += outcome.faults
        for record, slices in outcome.slices.items():
            self._read.slices.setdefault(record, []).extend(slices)

    def missing(self, record: Record) -> Iterator[Check]:
        """What is still to be read of a record for its checksum."""
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
        """The records whose bytes are not those that were written; what was not read whole once is read again."""
        pending, faults = settle(partial_sums(self._read))
        combined, again = combine([pending])
        return [*faults, *combined, *read_again(again)]
