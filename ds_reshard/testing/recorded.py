"""Files of known bytes, with the records that describe them, and targets that note how they are written to."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from ds_reshard.containers.crc import crc32
from ds_reshard.errors import Fault
from ds_reshard.execution.checksums import combine, partial_sums, settle
from ds_reshard.execution.ports import Outcome, Target
from ds_reshard.model.codec import ElementType
from ds_reshard.model.index import Record

_LEAD = b"before the record"  # records begin at an odd offset: nothing may count on alignment in the file


def write_record(folder: str, name: str, data: bytes) -> Record:
    """A new file in `folder` that holds `data` as one record, between bytes that belong to none."""
    path = os.path.join(folder, name)
    with open(path, "xb") as file:
        file.write(_LEAD + data + b"after it")
    return Record(path=path, byte_offset=len(_LEAD), nbytes=len(data), crc32=crc32(data))


def checksum_faults(outcomes: Iterable[Outcome]) -> list[Fault]:
    """What the ranks of one run find when they combine what they read.

    AssertionError where slices do not tile their record exactly: bytes were read twice or left out.
    """
    pending, faults = [], []
    for outcome in outcomes:
        left, found = settle(partial_sums(outcome))
        pending.append(left)
        faults += found
    combined, again = combine(pending)
    assert not again, f"these records were not read exactly once: {sorted(again)}"
    return faults + combined


def open_files() -> int | None:
    """How many file descriptors this process has open; None where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


class StoredTarget:
    """A target that offers no view, as a device's memory does, and keeps the scratch memory that it was given."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._given: dict[int, memoryview] = {}

    @property
    def scratch_nbytes(self) -> int:
        """The sizes of all buffers that bytes were ever stored from, together."""
        return sum(given.nbytes for given in self._given.values())

    def view(self, element_offset: int, numel: int, dtype: ElementType) -> memoryview | None:
        return None

    def store(self, element_offset: int, data: memoryview, dtype: ElementType) -> None:
        with self._lock:
            self._given[id(data.obj)] = memoryview(data.obj)
        self._target.store(element_offset, data, dtype)

    def zero(self, element_offset: int, numel: int) -> None:
        self._target.zero(element_offset, numel)
