"""What was read of a file, in any order and for any purpose: each byte once, and all of it checked."""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard.execution.checksums import Ledger
from ds_reshard.execution.interfaces import Outcome, Slice
from ds_reshard.model.index import Record

CONTENT = bytes(range(251)) * 4


def _record(path: Path) -> Record:
    path.write_bytes(CONTENT)
    return Record(path=str(path), byte_offset=0, nbytes=len(CONTENT), crc32=zlib.crc32(CONTENT))


def _read(record: Record, start: int, stop: int) -> Outcome:
    data = Path(record.path).read_bytes()[record.byte_offset + start : record.byte_offset + stop]
    part = Slice(byte_offset=start, nbytes=stop - start, crc32=zlib.crc32(data))
    return Outcome(slices={record: [part]}, bytes_read=stop - start)


@settings(max_examples=60)
@given(cuts=st.sets(st.integers(1, len(CONTENT) - 1), max_size=8), picked=st.randoms())
def test_what_is_missing_completes_what_was_read(tmp_path_factory, cuts: set[int], picked) -> None:  # type: ignore[no-untyped-def]
    """Some pieces are read first; the rest is what is missing, and both together are the whole."""
    record = _record(tmp_path_factory.mktemp("ledger") / "file")
    edges = [0, *sorted(cuts), len(CONTENT)]
    pieces = list(itertools.pairwise(edges))
    first = [piece for piece in pieces if picked.random() < 0.5]
    ledger = Ledger()
    for start, stop in first:
        ledger.add(_read(record, start, stop))
    missing = list(ledger.missing(record))
    for check in missing:
        ledger.add(_read(record, check.byte_offset, check.byte_offset + check.nbytes))
    assert (ledger.bytes_read, ledger.mismatches()) == (len(CONTENT), [])
    assert ledger.crc32_of([record], len(CONTENT)) == zlib.crc32(CONTENT)
    assert sum(check.nbytes for check in missing) == len(CONTENT) - sum(stop - start for start, stop in first)


def test_pieces_that_overlap_are_no_mismatch(tmp_path: Path) -> None:
    """A record whose pieces cannot be combined is read again, for its own checksum and for the file's."""
    record = _record(tmp_path / "file")
    ledger = Ledger()
    ledger.add(_read(record, 0, 700))
    ledger.add(_read(record, 300, len(CONTENT)))
    assert ledger.mismatches() == []
    assert ledger.crc32_of([record], len(CONTENT)) == zlib.crc32(CONTENT)
