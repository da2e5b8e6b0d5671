"""Files as targets: their storages are filled in any order, each byte checksummed as it is written.

Partitions of many ranks come in small pieces, of which a system call costs more than the bytes. So what lies together
in a file is put together in memory, and written at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch

from ds_reshard.containers.crc import crc32
from ds_reshard.containers.torch_zip_writer import Member
from ds_reshard.errors import InternalError
from ds_reshard.execution import disk
from ds_reshard.execution.buffers import casts_alike, memory_of, scatter, torch_dtype
from ds_reshard.execution.checksums import is_whole, partial_sums
from ds_reshard.execution.interfaces import Outcome, Saw, Slice, Strides
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.index import Record
from ds_reshard.model.records import ElementType
from ds_reshard.planning.copies import Copies
from ds_reshard.planning.plan import Fill, Plan, window_nbytes

_ZEROS = memoryview(bytes(1 << 20))
_CAST_NBYTES = 2 << 20  # at once, as what they are cast to is in memory too; no less than is read at once


class FileTarget:
    """A run of a file as a flat buffer of elements; bytes are cast, written at their place and checksummed."""

    def __init__(self, file: ArchiveFile, record: Record, dtype: ElementType) -> None:
        self._file = file
        self._record = record
        self.dtype = dtype
        self._slices: list[Slice] = []

    def view(self, element_offset: int, numel: int, dtype: ElementType) -> None:
        """None: bytes of a file have no memory of their own."""
        return None

    def store(self, element_offset: int, data: memoryview, dtype: ElementType) -> None:
        if dtype is self.dtype:
            self._write(element_offset, data)
            return
        for at in range(0, len(data), _CAST_NBYTES):
            values = torch.frombuffer(data[at : at + _CAST_NBYTES], dtype=torch_dtype(dtype))
            self._write(element_offset + at // dtype.itemsize, memory_of(values.to(torch_dtype(self.dtype))))

    def scatter(self, element_offset: int, data: memoryview, dtype: ElementType, strides: Strides) -> None:
        raise InternalError("elements that lie apart in a file are put together in memory first")

    def zero(self, element_offset: int, numel: int) -> None:
        size = self.dtype.itemsize
        per_write = len(_ZEROS) // size
        for at in range(element_offset, element_offset + numel, per_write):
            self._write(at, _ZEROS[: min(per_write, element_offset + numel - at) * size])

    def _write(self, element_offset: int, data: memoryview) -> None:
        at = element_offset * self.dtype.itemsize
        if at < 0 or at + len(data) > self._record.nbytes:
            raise InternalError(f"{self._record.path}: bytes [{at}, {at + len(data)}) of {self._record.nbytes}")
        part = Slice(byte_offset=at, nbytes=len(data), crc32=crc32(data))
        if not (part.nbytes == self._record.nbytes and self._file.write_whole(data, part.crc32)):
            self._file.write(self._record.byte_offset + at, data)
        self._slices.append(part)

    def checksum(self) -> int:
        """The crc32 of all that was written; InternalError unless that is each byte once."""
        written = partial_sums(Outcome(slices={self._record: self._slices}))
        once = sum(part.nbytes for part in self._slices) == self._record.nbytes
        if not once or (self._record.nbytes and not is_whole(self._record, written[0].spans)):
            raise InternalError(f"{self._record.path}: not every byte was written once: {written[0].spans}")
        return written[0].crc32


class FilePlan(Protocol):
    """A file whose every byte has its place: those of its storages, by key, and all others as `parts`."""

    @property
    def nbytes(self) -> int: ...

    @property
    def places(self) -> Mapping[str, Member]: ...

    def parts(self, checksums: Mapping[str, int]) -> Iterable[tuple[int, bytes]]: ...


class ArchiveFile:
    """A file being written at `path`: made with its first bytes, and `finish`ed when every storage is full."""

    def __init__(self, path: str, plan: FilePlan) -> None:
        self.path = path
        self._plan = plan
        self._places = plan.places
        self._targets: dict[str, FileTarget] = {}
        self._made = False
        self._crc32: int | None = None

    @property
    def nbytes(self) -> int:
        return self._plan.nbytes

    def target(self, key: str, dtype: ElementType) -> FileTarget:
        """The storage of that key, as elements of `dtype`."""
        place = self._places[key]
        record = Record(path=self.path, byte_offset=place.byte_offset, nbytes=place.nbytes, crc32=0)
        self._targets[key] = FileTarget(self, record, dtype)
        return self._targets[key]

    def write(self, byte_offset: int, data: memoryview) -> None:
        """Write bytes of a storage."""
        if not self._made:
            disk.create(self.path, self._plan.nbytes)
            self._made = True
        disk.write_at(self.path, data, byte_offset)

    def write_whole(self, data: memoryview, crc: int) -> bool:
        """Write the file at once where `data` is all of its one storage; whether it did."""
        if self._made or len(self._places) != 1:
            return False
        ((key, place),) = self._places.items()
        self._write_parts([*self._plan.parts({key: crc}), (place.byte_offset, data)])
        return True

    def _write_parts(self, parts: Iterable[tuple[int, bytes | memoryview]]) -> None:
        ordered = [data for _, data in sorted(parts, key=lambda part: part[0])]
        if sum(map(len, ordered)) != self.nbytes:
            raise InternalError(f"{self.path}: parts of {sum(map(len, ordered))} bytes, of {self.nbytes}")
        disk.write_new(self.path, ordered)
        self._made, self._crc32 = True, 0
        for data in ordered:
            self._crc32 = crc32(data, self._crc32)

    def finish(self) -> int:
        """Write headers and directory, where that was not done; the crc32 of the whole file."""
        sums = {key: target.checksum() for key, target in self._targets.items()}
        if not self._made:
            self._write_parts(self._plan.parts(sums))
        if self._crc32 is not None:
            return self._crc32
        slices = [
            Slice(byte_offset=place.byte_offset, nbytes=place.nbytes, crc32=sums[key])
            for key, place in self._places.items()
            if key in sums
        ]
        for at, data in _joined(self._plan.parts(sums)):
            disk.write_at(self.path, data, at)
            slices.append(Slice(byte_offset=at, nbytes=len(data), crc32=crc32(data)))
        whole = Record(path=self.path, byte_offset=0, nbytes=self._plan.nbytes, crc32=0)
        return partial_sums(Outcome(slices={whole: slices}))[0].crc32


def _joined(parts: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """The same bytes, parts that follow each other in one."""
    together: list[bytes] = []
    first = end = 0
    for at, data in parts:
        if together and at != end:
            yield first, b"".join(together)
            together = []
        if not together:
            first = at
        together.append(data)
        end = at + len(data)
    if together:
        yield first, b"".join(together)


_LARGE_NBYTES = 256 << 10
_ALIGNMENT = 16


class StagingExecutor:
    """Fills files window by window: as much of them as half of `memory_nbytes` holds, read by a ThreadExecutor.

    Where the pieces are large on an average they are written as they are read, from memory that is still in cache.
    What is cast waits there in the type that it has in the source, where it may be cast many pieces at a time.
    That files stay what they were is looked at by the caller.
    """

    def __init__(self, *, threads: int, memory_nbytes: int, saw: Saw) -> None:
        self._window_nbytes = window_nbytes(memory_nbytes)
        self._inner = ThreadExecutor(
            threads=threads, memory_nbytes=memory_nbytes // 2, checksum=True, saw=saw, looks=True
        )

    def execute(self, plan: Plan, targets: Mapping[str, FileTarget]) -> Outcome:
        """Carry out the plan, or what comes before the first window with a fault."""
        copies = Copies.of(plan.copies)
        if not copies.any_spread and copies.nbytes >= copies.number_of_runs * _LARGE_NBYTES:
            return self._inner.execute(plan, targets)
        outcome = self._inner.execute(Plan(copies=(), fills=plan.fills, checks=plan.checks), targets)
        of_buffer = copies.by_buffer()
        dtypes = {buffer: _waiting_as(of_buffer[buffer], targets[buffer].dtype) for buffer in of_buffer}
        spans = list(_spans(of_buffer, plan.fills))
        needed = sum((stop - start) * dtypes[buffer].itemsize + _ALIGNMENT for buffer, start, stop in spans)
        memory = memoryview(bytearray(min(self._window_nbytes, needed)))
        for window in _windows(spans, dtypes, self._window_nbytes):
            staged = _staged(window, targets, dtypes, memory)
            parts = [of_buffer[buffer].clip(start, stop) for buffer, start, stop in window]
            outcome.add(self._inner.execute(Plan(copies=Copies.concatenate(parts).in_order()), staged))
            if outcome.faults:
                break
            for target in staged.values():
                target.write()
        return outcome


_Span = tuple[str, int, int]
"""Elements [start, stop) of a buffer."""


def _waiting_as(copies: Copies, dtype: ElementType) -> ElementType:
    """The type in which elements of a buffer of `dtype` wait: that of the source, if it is one, cast alike anywhere."""
    first, *others = {source for source, _ in copies.types_used}
    return dtype if others or not casts_alike(first, dtype) else first


def _spans(copies: Mapping[str, Copies], fills: Iterable[Fill]) -> Iterator[_Span]:
    """What copies fill of each buffer; InternalError unless copies and fills cover it, each element once."""
    filled: dict[str, list[tuple[int, int]]] = {}
    for fill in fills:
        filled.setdefault(fill.buffer, []).append((fill.element_offset, fill.element_offset + fill.numel))
    for buffer, of_buffer in copies.items():
        start, stop = of_buffer.extent()
        spans, at = [], start
        for first, last in (*sorted(filled.get(buffer, ())), (stop, stop)):
            if at < min(first, stop):
                spans.append((buffer, at, min(first, stop)))
            at = max(at, last)
        if sum(last - first for _, first, last in spans) != of_buffer.numel:
            raise InternalError(f"{buffer}: {of_buffer.numel} elements are copied to {spans[:4]}")
        yield from spans


def _windows(spans: Iterable[_Span], dtypes: Mapping[str, ElementType], nbytes: int) -> Iterator[list[_Span]]:
    """The spans in parts that take at most `nbytes`; those that cross are cut."""
    window: list[_Span] = []
    left = nbytes
    for buffer, start, stop in spans:
        size = dtypes[buffer].itemsize
        while start < stop:
            fits = min(stop - start, (left - _ALIGNMENT) // size)
            if fits > 0:
                window.append((buffer, start, start + fits))
                start, left = start + fits, left - fits * size - _ALIGNMENT
            if start < stop:
                yield window
                window, left = [], nbytes
    if window:
        yield window


class _Staged:
    """Elements of a file's buffer that are in memory, as `dtype`, until `write`."""

    def __init__(self, target: FileTarget, dtype: ElementType) -> None:
        self._target = target
        self._dtype = dtype
        self._starts: list[int] = []
        self._memories: list[memoryview] = []

    def add(self, element_offset: int, memory: memoryview) -> None:
        """Take `memory` for the elements from `element_offset` on, which lie behind all others."""
        self._starts.append(element_offset)
        self._memories.append(memory)

    def view(self, element_offset: int, numel: int, dtype: ElementType) -> memoryview | None:
        return self._memory(element_offset, numel) if dtype is self._dtype else None

    def store(self, element_offset: int, data: memoryview, dtype: ElementType) -> None:
        values = torch.frombuffer(data, dtype=torch_dtype(dtype)).to(torch_dtype(self._dtype))
        self._memory(element_offset, values.numel())[:] = memory_of(values)

    def scatter(self, element_offset: int, data: memoryview, dtype: ElementType, strides: Strides) -> None:
        values = torch.frombuffer(data, dtype=torch_dtype(dtype))
        ends = element_offset, element_offset + strides.reach(values.numel()) - 1
        together = len({bisect_right(self._starts, end) for end in ends}) == 1
        each = values.numel() if together else strides.numel  # rows of two tensors may be as far apart as those of one
        for at in range(0, values.numel(), each):
            memory = self._memory(element_offset + at // strides.numel * strides.step, strides.reach(each))
            scatter(torch.frombuffer(memory, dtype=torch_dtype(self._dtype)), values[at : at + each], strides)

    def zero(self, element_offset: int, numel: int) -> None:
        raise InternalError("a window is filled by copies alone")

    def _memory(self, element_offset: int, numel: int) -> memoryview:
        at = bisect_right(self._starts, element_offset) - 1
        size = self._dtype.itemsize
        begin = (element_offset - self._starts[at]) * size
        found = self._memories[at][begin : begin + numel * size]
        if at < 0 or len(found) != numel * size:
            raise InternalError(f"elements [{element_offset}, {element_offset + numel}) are in no window")
        return found

    def write(self) -> None:
        """Write all elements to the file, those that lie together at once."""
        for start, memory in zip(self._starts, self._memories, strict=True):
            self._target.store(start, memory, self._dtype)


def _staged(
    window: Iterable[_Span], targets: Mapping[str, FileTarget], dtypes: Mapping[str, ElementType], memory: memoryview
) -> dict[str, _Staged]:
    """Targets for the spans of one window: each has a part of `memory`."""
    staged: dict[str, _Staged] = {}
    at = 0
    for buffer, start, stop in window:
        nbytes = (stop - start) * dtypes[buffer].itemsize
        if buffer not in staged:
            staged[buffer] = _Staged(targets[buffer], dtypes[buffer])
        staged[buffer].add(start, memory[at : at + nbytes])
        at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return staged
