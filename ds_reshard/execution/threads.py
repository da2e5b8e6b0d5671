"""The host executor: threads that read with positioned reads straight into the targets."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_reshard.containers.crc import crc32
from ds_reshard.errors import CheckpointDamaged, Fault, ReadFailed
from ds_reshard.execution.interfaces import Outcome, Saw, Slice, Target
from ds_reshard.model.index import Record
from ds_reshard.planning.plan import Copy, Plan, cut_checks, cut_copies


class OpenFiles:
    """File descriptors by path, each closed when its last reader is done; `paths` names one for each reader."""

    def __init__(self, paths: Iterable[str], outcome: Outcome) -> None:
        self._left = Counter(paths)
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()
        self._outcome = outcome

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def acquire(self, path: str) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY)
                self._outcome.files_opened += 1
            return self._open[path]

    def release(self, path: str) -> None:
        with self._lock:
            self._left[path] -= 1
            if not self._left[path] and path in self._open:
                os.close(self._open.pop(path))


def read_failed(path: str, error: OSError) -> Fault:
    """What the operating system said when it could not read."""
    return ReadFailed.fault(
        path, f"cannot read: {error.strerror or error}", mend="check the file system, then load again"
    )


def ended_early(path: str, byte_offset: int, nbytes: int, end: int) -> Fault:
    """A file that ends at `end`, before the `nbytes` bytes at `byte_offset` that it had when it was opened."""
    return CheckpointDamaged.fault(
        path,
        "the file ended while it was read: it was truncated after it was opened",
        f"{nbytes} bytes at {byte_offset}",
        f"end of file at {end}",
        mend="restore the file, then load again",
    )


# Large enough that a system call costs nothing, small enough that the checksum finds the bytes in cache.
_CHUNK_NBYTES = 2 << 20
_VECTORS = 256


class _Batch(NamedTuple):
    """Reads that lie together in one record: one vectored system call fills all of them."""

    record: Record
    byte_offset: int
    nbytes: int
    copies: tuple[Copy, ...]


class ThreadExecutor:
    """Reads with `threads` threads; scratch memory (casts, devices, checks) within `memory_nbytes`.

    `saw` is called with copies and the bytes of each as they were read, from the thread that read them.
    """

    def __init__(self, *, threads: int, memory_nbytes: int, checksum: bool, saw: Saw | None = None) -> None:
        self.threads = threads
        self.checksum = checksum
        self.saw = saw
        self.chunk_nbytes = max(4096, min(_CHUNK_NBYTES, memory_nbytes // threads))

    def execute(self, plan: Plan, targets: Mapping[str, Target]) -> Outcome:
        outcome = Outcome()
        for fill in plan.fills:
            targets[fill.buffer].zero(fill.element_offset, fill.numel)
        batches = list(self._batches(plan))
        files = OpenFiles((batch.record.path for batch in batches), outcome)
        work = _Work(targets=targets, outcome=outcome, files=files, executor=self)
        left = iter(batches)  # next() of a list's iterator is atomic: each thread takes the next batch
        with files, ThreadPoolExecutor(self.threads, thread_name_prefix="ds-reshard") as pool:
            for done in [pool.submit(work.run_all, left) for _ in range(min(self.threads, len(batches)))]:
                done.result()
        return outcome

    def _batches(self, plan: Plan) -> Iterator[_Batch]:
        pending: list[Copy] = []
        size = 0
        for copy in cut_copies(plan.copies, self.chunk_nbytes):
            joins = (
                pending
                and pending[-1].record == copy.record
                and pending[-1].byte_offset + pending[-1].nbytes == copy.byte_offset
                and size + copy.nbytes <= self.chunk_nbytes
                and len(pending) < _VECTORS
            )
            if pending and not joins:
                yield _Batch(pending[0].record, pending[0].byte_offset, size, tuple(pending))
                pending, size = [], 0
            pending.append(copy)
            size += copy.nbytes
        if pending:
            yield _Batch(pending[0].record, pending[0].byte_offset, size, tuple(pending))
        if self.checksum:
            for check in cut_checks(plan.checks, self.chunk_nbytes):
                yield _Batch(*check, copies=())


@dataclass(slots=True, kw_only=True)
class _Work:
    """One execution: what the threads share."""

    targets: Mapping[str, Target]
    outcome: Outcome
    files: OpenFiles
    executor: ThreadExecutor
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _scratch: threading.local = field(default_factory=threading.local)

    def run_all(self, batches: Iterator[_Batch]) -> None:
        """Run batches until none is left; the iterator is shared with the other threads."""
        for batch in batches:
            path = batch.record.path
            try:
                self._move(batch, self.files.acquire(path))
            except OSError as error:
                self._fault(read_failed(path, error))
            finally:
                self.files.release(path)

    def _move(self, batch: _Batch, fd: int) -> None:
        views, staged = self._views(batch)
        calls = self._read(fd, views, batch)
        if calls is None:
            return
        crc = 0
        if self.executor.checksum:
            for view in views:
                crc = crc32(view, crc)
        if self.executor.saw is not None and batch.copies:
            self.executor.saw(batch.copies, views)
        for copy, view in staged:
            self.targets[copy.buffer].store(copy.element_offset, view, copy.dtype)
        with self._lock:
            self.outcome.bytes_read += batch.nbytes
            self.outcome.read_calls += calls
            if self.executor.checksum:
                self.outcome.slices.setdefault(batch.record, []).append(
                    Slice(byte_offset=batch.byte_offset - batch.record.byte_offset, nbytes=batch.nbytes, crc32=crc)
                )

    def _views(self, batch: _Batch) -> tuple[list[memoryview], list[tuple[Copy, memoryview]]]:
        """Where the batch's bytes go: targets in place where possible, scratch memory otherwise."""
        if not batch.copies:
            return [self._scratch_memory()[: batch.nbytes]], []
        views: list[memoryview] = []
        staged: list[tuple[Copy, memoryview]] = []
        used = 0
        for copy in batch.copies:
            target = self.targets[copy.buffer]
            view = target.view(copy.element_offset, copy.numel, copy.dtype)
            if view is None:
                view = self._scratch_memory()[used : used + copy.nbytes]
                used += copy.nbytes
                staged.append((copy, view))
            views.append(view)
        return views, staged

    def _scratch_memory(self) -> memoryview:
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = memoryview(bytearray(max(self.executor.chunk_nbytes, 16)))
        memory: memoryview = self._scratch.memory
        return memory

    def _read(self, fd: int, views: list[memoryview], batch: _Batch) -> int | None:
        """Fill the views; the number of system calls, or None after a fault was noted."""
        left, offset, calls = list(views), batch.byte_offset, 0
        while left:
            got = os.preadv(fd, left, offset)
            calls += 1
            if got == 0:
                self._fault(ended_early(batch.record.path, batch.byte_offset, batch.nbytes, offset))
                return None
            offset += got
            while left and got >= len(left[0]):
                got -= len(left[0])
                left.pop(0)
            if left and got:
                left[0] = left[0][got:]
        return calls

    def _fault(self, fault: Fault) -> None:
        with self._lock:
            self.outcome.faults.append(fault)
