"""The host executor: threads that read with positioned reads straight into the targets."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from ds_reshard.containers.crc import crc32, crc32_of_rows
from ds_reshard.containers.folders import Identity, identity
from ds_reshard.containers.positioned import Opened, close, opened, read_into
from ds_reshard.containers.ranges import AT_ONCE
from ds_reshard.containers.remote import CHANGED, changed, is_url
from ds_reshard.errors import CheckpointDamaged, Fault
from ds_reshard.execution.interfaces import Outcome, Saw, Slice, Strides, Target, ended_early, read_failed
from ds_reshard.model.index import Record
from ds_reshard.model.records import ElementType
from ds_reshard.planning.copies import (
    BETWEEN_NBYTES,
    BUFFER,
    BYTE_OFFSET,
    ELEMENT_OFFSET,
    NUMEL,
    RECORD,
    ROW_BYTES,
    ROWS,
    SPREAD,
    TYPES,
    Copies,
    Copy,
)
from ds_reshard.planning.plan import Plan, cut_checks


class OpenFiles:
    """File descriptors by path, each closed when its last reader is done; `paths` names one for each reader."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._left = Counter(paths)
        self._open: dict[str, Opened] = {}
        self._opening: dict[str, threading.Lock] = {path: threading.Lock() for path in self._left}
        self._lock = threading.Lock()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._open.values():
            close(file)
        self._open.clear()

    def acquire(self, path: str) -> Opened:
        with self._opening[path]:  # files are opened side by side: by a store each takes a request
            if path not in self._open:
                self._open[path] = opened(path)
            return self._open[path]

    def release(self, path: str) -> None:
        with self._lock:
            self._left[path] -= 1
            if not self._left[path] and path in self._open:
                close(self._open.pop(path))


# Large enough that a system call costs nothing, small enough that the checksum finds the bytes in cache.
_CHUNK_NBYTES = 2 << 20
_VECTORS = 512  # with what lies between them less than the 1024 that Linux takes (IOV_MAX)
_LARGE_ROW_NBYTES = 8 << 10
_WASTED = 0.03
"""Of a store larger gaps are read along too, as long as all of them are no more than such a part of what is wanted."""


class _Batch(NamedTuple):
    """Copies of one record, in the order of its bytes, that one thread reads; or, without copies, bytes to check."""

    record: Record
    byte_offset: int
    nbytes: int
    copies: Copies | None
    between_nbytes: int = BETWEEN_NBYTES


class ThreadExecutor:
    """Reads with `threads` threads; scratch memory (casts, devices, checks) within `memory_nbytes`.

    `saw` is called with copies and the bytes of each as they were read, from the thread that read them. `nbytes_read`
    grows as it reads. Files of a store that are not what they were when they were listed are faults, unless the caller
    `looks` for these.
    """

    def __init__(
        self, *, threads: int, memory_nbytes: int, checksum: bool, saw: Saw | None = None, looks: bool = False
    ) -> None:
        self.threads = threads
        self.memory_nbytes = memory_nbytes
        self.checksum = checksum
        self.saw = saw
        self._looks = looks
        self.nbytes_read = 0
        self.chunk_nbytes = max(4096, min(_CHUNK_NBYTES, memory_nbytes // threads))

    def execute(self, plan: Plan, targets: Mapping[str, Target]) -> Outcome:
        outcome = Outcome()
        for fill in plan.fills:
            targets[fill.buffer].zero(fill.element_offset, fill.numel)
        records = {*Copies.of(plan.copies).records_used, *(one.record for one in plan.checks)}
        remote = {record.path for record in records if is_url(record.path)}
        before = Seen(() if self._looks else records)
        room = self.memory_nbytes // (2 * self.chunk_nbytes)  # what was asked for is in memory twice
        threads = max(self.threads, min(AT_ONCE // 2, room)) if remote else self.threads
        with ThreadPoolExecutor(threads, thread_name_prefix="ds-reshard") as pool:
            for batches in self._batches(plan, targets, remote=bool(remote)):
                files = OpenFiles(batch.record.path for batch in batches)
                work = _Work(targets=targets, outcome=outcome, files=files, executor=self)
                left = iter(batches)  # next() of a list's iterator is atomic: each thread takes the next batch
                jobs: list[Future[None]] = []
                with files:
                    try:
                        jobs += (pool.submit(work.run_all, left) for _ in range(min(threads, len(batches))))
                        wait(jobs, return_when=FIRST_EXCEPTION)
                    finally:  # of an interruption, or an error, too: no thread takes another, or reads a closed file
                        deque(left, maxlen=0)
                        wait(jobs)
                for done in jobs:
                    done.result()
        outcome.faults += before.changed_faults()
        return outcome

    def _batches(self, plan: Plan, targets: Mapping[str, Target], *, remote: bool) -> Iterator[Sequence[_Batch | Copy]]:
        """The batches of a plan, a list for each portion of its runs: what many rows are is not kept all at once."""
        copies = Copies.of(plan.copies)
        if not remote and self.saw is None:
            by_rows = self._by_rows(copies, targets)
            rows = copies.take(by_rows).planes_apart()
            yield [part for copy in rows for part in copy.row_parts(self.chunk_nbytes)]
            copies = copies.take(~by_rows)
        spread = copies.table[SPREAD] > 1
        yield from self._runs(copies.take(~spread), remote=remote)
        if spread.any():
            yield from self._runs(copies.take(spread), remote=remote)
        if self.checksum and plan.checks:
            yield [_Batch(*check, copies=None) for check in cut_checks(plan.checks, self.chunk_nbytes)]

    def _by_rows(self, copies: Copies, targets: Mapping[str, Target]) -> NDArray[numpy.bool_]:
        """Return a mask of the copies with rows that fit a chunk and go to host memory without a cast.

        Large rows with nothing between them are read straight to their places, many in one call.
        """
        table, several = copies.table, len(copies.types)
        nbytes = table[NUMEL] * copies.itemsizes
        rows: NDArray[numpy.bool_] = (table[ROWS] > 1) & (table[SPREAD] == 1)
        rows &= (nbytes <= self.chunk_nbytes) & ((table[ROW_BYTES] != nbytes) | (nbytes < _LARGE_ROW_NBYTES))
        pairs, which = numpy.unique(table[BUFFER] * several + table[TYPES], return_inverse=True)
        in_place = [
            targets[copies.buffers[pair // several]].view(0, 0, copies.types[pair % several][0]) is not None
            for pair in (pairs.tolist() if rows.any() else ())
        ]
        if in_place:
            rows &= numpy.array(in_place, dtype=bool)[which]
        return rows

    def _runs(self, part: Copies, *, remote: bool) -> Iterator[list[_Batch]]:
        """Yield lists of batches for copies, each row of which is a run by itself."""
        for runs in part.runs():
            found: list[_Batch] = []
            copies = runs.cut(self.chunk_nbytes)
            record, byte_offset, nbytes = copies.table[RECORD], copies.table[BYTE_OFFSET], copies.nbytes_each()
            ends = byte_offset + nbytes
            between = numpy.append(0, byte_offset[1:] - ends[:-1])
            apart, near = record[1:] != record[:-1], BETWEEN_NBYTES
            if remote:  # each request by a thread of its own
                near = self._near(between[1:][~apart], int(nbytes.sum()))
                apart = apart | (between[1:] > near)
            taken = numpy.cumsum(nbytes + numpy.where(between <= near, numpy.maximum(between, 0), 0))
            changes = [*(numpy.flatnonzero(apart) + 1).tolist(), len(copies)]
            first = 0
            for change in changes:
                while first < change:
                    room = int(taken[first]) - int(nbytes[first]) + self.chunk_nbytes
                    stop = int(numpy.searchsorted(taken[first : min(change, first + _VECTORS)], room, side="right"))
                    last = first + max(1, stop)
                    of = copies.records[int(record[first])]
                    wanted = int(nbytes[first:last].sum())
                    found.append(_Batch(of, int(byte_offset[first]), wanted, copies[first:last], near))
                    first = last
            yield found

    def _near(self, between: NDArray[numpy.int64], nbytes: int) -> int:
        """Gaps of up to so many bytes are read along: a request costs a store's latency."""
        gaps = numpy.sort(between[(between > 0) & (between <= self.chunk_nbytes // 2)])
        fitting = int(numpy.searchsorted(numpy.cumsum(gaps), _WASTED * nbytes, side="right"))
        if fitting < len(gaps):  # of gaps that are as wide as each other all are read along, or none
            fitting = int(numpy.searchsorted(gaps, gaps[fitting]))
        return max(BETWEEN_NBYTES, int(gaps[fitting - 1]) if fitting else 0)


class Seen:
    """Files before they are read: those of a store, as they were listed, and those whose bytes no checksum proves."""

    def __init__(self, records: Collection[Record]) -> None:
        self._urls = {record.path for record in records if is_url(record.path)}
        unproved = {record.path for record in records if record.crc32 is None} - self._urls
        self._here = {path: _identity(path) for path in sorted(unproved)}

    def changed_faults(self) -> list[Fault]:
        """A fault for each file that was written to since, or that another has taken the place of."""
        found = {path: CHANGED for path, seen in self._here.items() if _identity(path) not in (seen, None)}
        try:
            found |= changed(self._urls)
        except OSError as error:
            return [read_failed(min(self._urls), error)]
        mend = "let the save end, then try again"
        return [CheckpointDamaged.fault(path, what, mend=mend) for path, what in found.items()]


def _identity(path: str) -> Identity | None:
    """None where there is no such file: whoever opens it is told."""
    with contextlib.suppress(OSError):
        return identity(path)
    return None


@dataclass(slots=True, kw_only=True)
class _Work:
    """One execution: what the threads share."""

    targets: Mapping[str, Target]
    outcome: Outcome
    files: OpenFiles
    executor: ThreadExecutor
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _scratch: threading.local = field(default_factory=threading.local)

    def run_all(self, batches: Iterator[_Batch | Copy]) -> None:
        """Run batches until none is left; the iterator is shared with the other threads."""
        for batch in batches:
            path = batch.record.path
            try:
                file = self.files.acquire(path)
                if isinstance(batch, Copy):
                    self._move_rows(batch, file)
                elif batch.copies is not None and batch.copies.any_spread:
                    self._move_spread(batch, batch.copies, file)
                else:
                    self._move(batch, file)
            except OSError as error:
                self._fault(read_failed(path, error))
            finally:
                self.files.release(path)

    def _move(self, batch: _Batch, fd: Opened) -> None:
        offsets, views, staged = self._views(batch)
        if not self._read(fd, offsets, views, batch):
            return
        slices = list(_slices(batch.record, offsets, views)) if self.executor.checksum else []
        if self.executor.saw is not None and batch.copies is not None:
            self.executor.saw(batch.copies, views)
        for target, element_offset, view, dtype in staged:
            target.store(element_offset, view, dtype)
        self._note(batch.record, batch.nbytes, slices)

    def _move_spread(self, batch: _Batch, copies: Copies, fd: Opened) -> None:
        """Read copies that are spread in their targets into scratch memory, together, and scatter them from there."""
        table, nbytes = copies.table, copies.nbytes_each()
        stops = numpy.cumsum(nbytes)
        apart = numpy.append(True, table[BYTE_OFFSET, 1:] != (table[BYTE_OFFSET] + nbytes)[:-1])
        memory, edges = self._scratch_memory(), [0, *stops.tolist()]
        offsets = table[BYTE_OFFSET, apart].tolist()
        views = [memory[a:b] for a, b in pairwise([*(stops - nbytes)[apart].tolist(), edges[-1]])]
        if not self._read(fd, offsets, views, batch):
            return
        slices = list(_slices(batch.record, offsets, views)) if self.executor.checksum else []
        if self.executor.saw is not None:
            self.executor.saw(copies, [memory[a:b] for a, b in pairwise(edges)])
        columns = table[[BUFFER, TYPES, NUMEL, SPREAD, ELEMENT_OFFSET]].T.tolist()
        for first, last, step in _alike(columns):
            buffer, types, numel, spread, element_offset = columns[first]
            data, strides = memory[edges[first] : edges[last]], Strides(numel, step, spread)
            self.targets[copies.buffers[buffer]].scatter(element_offset, data, copies.types[types][0], strides)
        self._note(batch.record, batch.nbytes, slices)

    def _note(self, record: Record, nbytes: int, slices: Iterable[Slice]) -> None:
        with self._lock:
            self.outcome.bytes_read += nbytes
            self.executor.nbytes_read += nbytes
            if self.executor.checksum:
                self.outcome.slices.setdefault(record, []).extend(slices)

    def _move_rows(self, copy: Copy, fd: Opened) -> None:
        """Read the rows of a copy into its target: with the gaps, through scratch memory, or row by row."""
        ((times, _, target_step),), nbytes, file_step = copy.rows, copy.row_nbytes, copy.step_nbytes
        step, numel = target_step * copy.dtype.itemsize, (times - 1) * target_step + copy.numel
        memory = self.targets[copy.buffer].view(copy.element_offset, numel, copy.dtype)
        assert memory is not None
        places = [memory[at : at + nbytes] for at in range(0, times * step, step)]
        if copy.reads_gaps:
            window = self._scratch_memory()[: copy.window_nbytes]
            if not self._read_together(fd, copy.byte_offset, [window], copy):
                return
            _strided(memory, times, nbytes, step)[:] = _strided(window, times, nbytes, file_step)
        else:
            offset = copy.byte_offset
            for place in places:
                got = read_into(fd, [place], offset)
                if got < nbytes and not self._read_together(fd, offset + got, [place[got:]], copy):
                    return
                offset += file_step
        slices = []
        if self.executor.checksum:
            at, crc = copy.byte_offset - copy.record.byte_offset, crc32_of_rows(places, file_step)
            slices.append(Slice(at, nbytes, crc, times, file_step))
        self._note(copy.record, copy.nbytes, slices)

    def _views(
        self, batch: _Batch
    ) -> tuple[list[int], list[memoryview], list[tuple[Target, int, memoryview, ElementType]]]:
        """Where the bytes of each copy begin in the file, and where they go: in place where that can be, else scratch.

        What is in scratch memory is stored afterwards, as elements of a type, at an offset of a target.
        """
        if batch.copies is None:
            return [batch.byte_offset], [self._scratch_memory()[: batch.nbytes]], []
        copies, views, used = batch.copies, [], 0
        staged: list[tuple[Target, int, memoryview, ElementType]] = []
        columns = copies.table[[BUFFER, ELEMENT_OFFSET, NUMEL, TYPES]].T.tolist()
        for buffer, element_offset, numel, types in columns:
            target, dtype = self.targets[copies.buffers[buffer]], copies.types[types][0]
            view = target.view(element_offset, numel, dtype)
            if view is None:
                nbytes = numel * dtype.itemsize
                view = self._scratch_memory()[used : used + nbytes]
                used += nbytes
                staged.append((target, element_offset, view, dtype))
            views.append(view)
        return copies.table[BYTE_OFFSET].tolist(), views, staged

    def _scratch_memory(self) -> memoryview:
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = memoryview(bytearray(max(self.executor.chunk_nbytes, 16)))
        memory: memoryview = self._scratch.memory
        return memory

    def _read(self, fd: Opened, offsets: Sequence[int], views: Sequence[memoryview], batch: _Batch) -> bool:
        """Fill the views; False after a fault was noted.

        A few bytes that nobody wants between two views are read with them, into scratch memory behind all that is used.
        """
        first = 0
        together: list[memoryview] = []
        scratch, end = self._scratch_memory(), offsets[0]
        for number, (at, view) in enumerate(zip(offsets, views, strict=True)):
            between, end = at - end, at + len(view)
            if 0 < between <= batch.between_nbytes:
                together.append(scratch[-between:])
            elif between:
                if not self._read_together(fd, offsets[first], together, batch):
                    return False
                first, together = number, []
            together.append(view)
        return self._read_together(fd, offsets[first], together, batch)

    def _read_together(self, fd: Opened, offset: int, views: list[memoryview], batch: _Batch | Copy) -> bool:
        while views:
            got = read_into(fd, views, offset)
            if got == 0:
                self._fault(ended_early(batch.record.path, batch.byte_offset, batch.nbytes, offset))
                return False
            offset += got
            number = 0
            while number < len(views) and got >= len(views[number]):
                got -= len(views[number])
                number += 1
            views = views[number:]
            if views and got:
                views[0] = views[0][got:]
        return True

    def _fault(self, fault: Fault) -> None:
        with self._lock:
            self.outcome.faults.append(fault)


def _strided(memory: memoryview, times: int, nbytes: int, step: int) -> NDArray[numpy.uint8]:
    """Return rows of `nbytes` bytes, `step` bytes apart, as an array of shape (times, nbytes)."""
    flat = numpy.frombuffer(memory, dtype=numpy.uint8)
    return numpy.lib.stride_tricks.as_strided(flat, (times, nbytes), (step, 1))


def _alike(rows: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of rows that are equal but for their last number, which grows by equal steps, with the step."""
    first = 0
    while first < len(rows):
        last, step = first + 1, 0
        while last < len(rows) and rows[last][:-1] == rows[first][:-1]:
            between = rows[last][-1] - rows[last - 1][-1]
            if between <= 0 or between != (step or between):
                break
            last, step = last + 1, between
        yield first, last, step
        first = last


def _slices(record: Record, offsets: Sequence[int], views: Sequence[memoryview]) -> Iterator[Slice]:
    """What was read, with its checksums: views that follow each other in the file are one slice."""
    begin = record.byte_offset
    first = end = offsets[0]
    crc = 0
    for at, view in zip(offsets, views, strict=True):
        if at != end:
            yield Slice(first - begin, end - first, crc)
            first, crc = at, 0
        crc = crc32(view, crc)
        end = at + len(view)
    yield Slice(first - begin, end - first, crc)
