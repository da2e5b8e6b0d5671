"""Copies of a plan as chunks: what is read into one buffer of bounded size, brought to a device and dealt out there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ds_reshard.model.index import Record
from ds_reshard.planning.plan import Copy

_ALIGNMENT = 16  # of the widest element type, complex128
ROW_NBYTES = 24
"""Room that a chunk keeps behind its bytes for each copy: three int64 that say where its elements come from and go."""


Named = Callable[[Copy], str]
"""Says of which tensors the elements of a copy are, for whoever reads of a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Bytes of a record that are read together, to `position` of the chunk; their copies, in order, fill them."""

    record: Record
    byte_offset: int
    nbytes: int
    position: int
    copies: tuple[Copy, ...]

    def placed(self) -> Iterator[tuple[Copy, int]]:
        """Each copy with its place in the chunk, in bytes."""
        at = self.position
        for copy in self.copies:
            yield copy, at
            at += copy.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Runs that lie one behind the other in `nbytes` bytes, each aligned for its elements."""

    runs: tuple[Run, ...]
    nbytes: int
    named: Named | None = None

    def described(self) -> str:
        """Which elements of which buffers, and of which tensors, it fills; the first of many."""
        copies = [copy for run in self.runs for copy in run.copies]
        named = [
            f"{copy.buffer} elements [{copy.element_offset}, {copy.element_offset + copy.numel})"
            + (f" ({self.named(copy)})" if self.named is not None else "")
            for copy in copies[:4]
        ]
        return ", ".join(named) + (f" and {len(copies) - 4} more" if len(copies) > 4 else "")


def chunks(copies: Iterable[Copy], capacity_nbytes: int, named: Named | None = None) -> Iterator[Chunk]:
    """The same copies, in order, cut so that each chunk with the rows of its copies stays within the capacity.

    ValueError for a capacity that one element and its row do not fit in.
    """
    if capacity_nbytes < 2 * _ALIGNMENT + ROW_NBYTES:
        raise ValueError(f"no element fits in {capacity_nbytes} bytes beside its row")
    filling = _Filling(capacity_nbytes, named)
    for copy in copies:
        at = 0
        while at < copy.numel:
            numel = min(copy.numel - at, filling.room(copy) // copy.dtype.itemsize)
            if numel < 1:
                yield filling.take()
                continue
            filling.add(_part(copy, at, numel))
            at += numel
    if filling.rows:
        yield filling.take()


def _part(copy: Copy, at: int, numel: int) -> Copy:
    if numel == copy.numel:
        return copy
    return copy._replace(
        byte_offset=copy.byte_offset + at * copy.dtype.itemsize, element_offset=copy.element_offset + at, numel=numel
    )


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


@dataclass(slots=True)
class _Filling:
    capacity_nbytes: int
    named: Named | None
    runs: list[Run] = field(default_factory=list)
    open_run: list[Copy] = field(default_factory=list)
    start: int = 0
    stop: int = 0
    rows: int = 0

    def room(self, copy: Copy) -> int:
        """Bytes of the copy that still fit, with its row."""
        start = self.stop if self._continues(copy) else _aligned(self.stop)
        return self.capacity_nbytes - start - _ALIGNMENT - (self.rows + 1) * ROW_NBYTES

    def add(self, copy: Copy) -> None:
        if not self._continues(copy):
            self._close_run()
            self.start = self.stop = _aligned(self.stop)
        self.open_run.append(copy)
        self.stop += copy.nbytes
        self.rows += 1

    def take(self) -> Chunk:
        """All that was added, as a chunk; nothing is left."""
        self._close_run()
        made = Chunk(runs=tuple(self.runs), nbytes=self.stop, named=self.named)
        self.runs, self.start, self.stop, self.rows = [], 0, 0, 0
        return made

    def _continues(self, copy: Copy) -> bool:
        """Whether it follows the last copy in the file; bytes of another type might not be aligned there."""
        if not self.open_run:
            return False
        last = self.open_run[-1]
        return (
            last.record == copy.record
            and last.byte_offset + last.nbytes == copy.byte_offset
            and last.dtype is copy.dtype
        )

    def _close_run(self) -> None:
        if self.open_run:
            first = self.open_run[0]
            self.runs.append(
                Run(
                    record=first.record,
                    byte_offset=first.byte_offset,
                    nbytes=self.stop - self.start,
                    position=self.start,
                    copies=tuple(self.open_run),
                )
            )
            self.open_run = []
