"""Bytes on their way to files: what lies together in a file is put together in memory, and written at once.

Partitions of many ranks come in small pieces, of which a system call costs more than the bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping

import torch

from ds_reshard.errors import InternalError
from ds_reshard.execution.buffers import memory_of, torch_dtype
from ds_reshard.execution.files import FileTarget
from ds_reshard.execution.ports import Outcome, Saw
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.codec import ElementType
from ds_reshard.planning.budget import window_nbytes
from ds_reshard.planning.plan import Copy, Plan

_LARGE_NBYTES = 256 << 10
_ALIGNMENT = 16


class StagingExecutor:
    """Fills files window by window: as much of them as half of `memory_nbytes` holds, read by a ThreadExecutor.

    Where the pieces are large on an average they are written as they are read, from memory that is still in cache.
    """

    def __init__(self, *, threads: int, memory_nbytes: int, saw: Saw) -> None:
        self._window_nbytes = window_nbytes(memory_nbytes)
        self._inner = ThreadExecutor(threads=threads, memory_nbytes=memory_nbytes // 2, checksum=True, saw=saw)

    def execute(self, plan: Plan, targets: Mapping[str, FileTarget]) -> Outcome:
        """Carry out the plan, or what comes before the first window with a fault."""
        if plan.nbytes >= len(plan.copies) * _LARGE_NBYTES:
            return self._inner.execute(plan, targets)
        outcome = self._inner.execute(Plan(copies=(), fills=plan.fills, checks=plan.checks), targets)
        memory = memoryview(bytearray(self._window_nbytes))
        for copies in _windows(plan.copies, self._window_nbytes):
            staged = _staged(copies, targets, memory)
            ordered = sorted(copies, key=lambda copy: (copy.record.path, copy.byte_offset))
            outcome.add(self._inner.execute(Plan(copies=tuple(ordered)), staged))
            if outcome.faults:
                break
            for target in staged.values():
                target.write()
        return outcome


def _windows(copies: Iterable[Copy], nbytes: int) -> Iterator[list[Copy]]:
    """The copies in the order of their targets, in parts that fill at most `nbytes`; those that cross are cut."""
    copies = tuple(copies)
    order = {buffer: number for number, buffer in enumerate(dict.fromkeys(copy.buffer for copy in copies))}
    window: list[Copy] = []
    left = nbytes
    for copy in sorted(copies, key=lambda copy: (order[copy.buffer], copy.element_offset)):
        size = copy.target_dtype.itemsize
        while _room(copy) > left:
            if fits := max(0, left - _ALIGNMENT) // size:
                window.append(copy._replace(numel=fits))
                copy = copy._replace(
                    byte_offset=copy.byte_offset + fits * copy.dtype.itemsize,
                    element_offset=copy.element_offset + fits,
                    numel=copy.numel - fits,
                )
            yield window
            window, left = [], nbytes
        window.append(copy)
        left -= _room(copy)
    if window:
        yield window


def _room(copy: Copy) -> int:
    """What a copy takes of a window at most."""
    return copy.numel * copy.target_dtype.itemsize + _ALIGNMENT


class _Staged:
    """Elements of a file's buffer that are in memory until `write`."""

    def __init__(self, target: FileTarget) -> None:
        self._target = target
        self._starts: list[int] = []
        self._memories: list[memoryview] = []

    def add(self, element_offset: int, memory: memoryview) -> None:
        """Take `memory` for the elements from `element_offset` on, which lie behind all others."""
        self._starts.append(element_offset)
        self._memories.append(memory)

    def view(self, element_offset: int, numel: int, dtype: ElementType) -> memoryview | None:
        return self._memory(element_offset, numel) if dtype is self._target.dtype else None

    def store(self, element_offset: int, data: memoryview, dtype: ElementType) -> None:
        values = torch.frombuffer(data, dtype=torch_dtype(dtype)).to(torch_dtype(self._target.dtype))
        self._memory(element_offset, values.numel())[:] = memory_of(values)

    def zero(self, element_offset: int, numel: int) -> None:
        raise InternalError("a window is filled by copies alone")

    def _memory(self, element_offset: int, numel: int) -> memoryview:
        at = bisect_right(self._starts, element_offset) - 1
        size = self._target.dtype.itemsize
        begin = (element_offset - self._starts[at]) * size
        found = self._memories[at][begin : begin + numel * size]
        if at < 0 or len(found) != numel * size:
            raise InternalError(f"elements [{element_offset}, {element_offset + numel}) are in no window")
        return found

    def write(self) -> None:
        """Write all elements to the file, those that lie together at once."""
        for start, memory in zip(self._starts, self._memories, strict=True):
            self._target.store(start, memory, self._target.dtype)


def _staged(copies: Iterable[Copy], targets: Mapping[str, FileTarget], memory: memoryview) -> dict[str, _Staged]:
    """Targets for the copies of one window, in their order: each run of elements has a part of `memory`."""
    runs: list[tuple[str, int, int, int]] = []
    at = 0
    for copy in copies:
        size = copy.numel * copy.target_dtype.itemsize
        if runs and runs[-1][0] == copy.buffer and runs[-1][2] == copy.element_offset:
            buffer, start, _, begin = runs.pop()
        else:
            at = -(-at // _ALIGNMENT) * _ALIGNMENT
            buffer, start, begin = copy.buffer, copy.element_offset, at
        at += size
        runs.append((buffer, start, copy.element_offset + copy.numel, begin))
    staged: dict[str, _Staged] = {}
    for buffer, start, stop, begin in runs:
        if buffer not in staged:
            staged[buffer] = _Staged(targets[buffer])
        staged[buffer].add(start, memory[begin : begin + (stop - start) * targets[buffer].dtype.itemsize])
    return staged
