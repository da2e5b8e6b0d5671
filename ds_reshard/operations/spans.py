"""Logical tensors read span by span, so that memory is bounded whatever their sizes; each byte once, and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ds_reshard.errors import raise_faults
from ds_reshard.execution.buffers import TensorTarget, fresh, torch_dtype
from ds_reshard.execution.checksums import Ledger
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.codec import ElementType
from ds_reshard.model.index import Extent, Index, extent_of
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Box, Region
from ds_reshard.operations.options import Progress
from ds_reshard.planning.plan import Copy, Plan, coalesce

# Small enough that values are still in a cache when they are looked at.
_UNIT_NBYTES = 16 << 20
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One tensor that can be read in spans; `locate(start, stop)` yields offsets in the span and where its bytes are.

    `identity` is equal for two columns of the same bytes.
    """

    dtype: ElementType
    shape: tuple[int, ...]
    locate: Callable[[int, int], Iterator[tuple[int, Extent]]]
    identity: object

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def logical(index: Index, key: TensorKey) -> Column:
    """A logical tensor, wherever its pieces lie."""
    placement = index.layout[key]
    box = Box.whole(placement.shape)

    def locate(start: int, stop: int) -> Iterator[tuple[int, Extent]]:
        for at, fragment in index.locate(key, Region(box=box, start=start, stop=stop)):
            yield at, fragment.extent
        raise_faults(index.faults, subject="reading tensors")

    identity: object = key
    if placement.replicated and placement.numel:
        identity = (index.open(placement.family, 0).get(placement.buffer), placement.cut)
    return Column(dtype=placement.dtype, shape=placement.shape, locate=locate, identity=identity)


def stored(tensor: TensorRecord) -> Column:
    """A row-major tensor of one file, which no layout names."""
    extent = extent_of(tensor)

    def locate(start: int, stop: int) -> Iterator[tuple[int, Extent]]:
        byte_offset = extent.byte_offset + start * extent.dtype.itemsize
        yield 0, Extent(record=extent.record, byte_offset=byte_offset, dtype=extent.dtype, numel=stop - start)

    return Column(dtype=tensor.dtype, shape=tensor.shape, locate=locate, identity=(extent, tensor.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Elements [start, stop) of each column of row `row`; `values` hold until the next span is asked for."""

    row: int
    start: int
    stop: int
    values: tuple[torch.Tensor, ...]

    def on(self, device: torch.device | None) -> Span:
        """The same with its values on a device; as it is for None."""
        return self if device is None else replace(self, values=tuple(values.to(device) for values in self.values))


class SpanReader:
    """Reads rows of columns of one number of elements each; what was read is noted in `ledger`."""

    def __init__(
        self, ledger: Ledger, *, threads: int, memory_nbytes: int, progress: Progress | None, total: int
    ) -> None:
        self._ledger = ledger
        self._executor = ThreadExecutor(threads=threads, memory_nbytes=memory_nbytes, checksum=True)
        # As much again is left for what is computed of the values.
        self._unit_nbytes = min(_UNIT_NBYTES, memory_nbytes // 2)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._progress = progress
        self._total = total

    def read(self, rows: Sequence[tuple[Column, ...]]) -> Iterator[Span]:
        """Every element of every row, in order; raises ReadFailed or CheckpointDamaged where bytes cannot be read."""
        unit: list[tuple[int, int, int]] = []
        nbytes = 0
        for row, columns in enumerate(rows):
            each = sum(column.dtype.itemsize for column in columns)
            at, numel = 0, columns[0].numel
            while at < numel:
                take = min(numel - at, max(1, (self._unit_nbytes - nbytes) // each))
                unit.append((row, at, at + take))
                at, nbytes = at + take, nbytes + take * each
                if nbytes + each > self._unit_nbytes:
                    yield from self._fill(rows, unit)
                    unit, nbytes = [], 0
        yield from self._fill(rows, unit)

    def _room(self, nbytes: int) -> torch.Tensor:
        """The same memory for every unit: pages that were touched before cost nothing."""
        if self._memory.numel() < nbytes:
            self._memory = fresh(nbytes, torch.uint8, "cpu")
        return self._memory

    def _fill(self, rows: Sequence[tuple[Column, ...]], unit: list[tuple[int, int, int]]) -> Iterator[Span]:
        copies: list[Copy] = []
        targets: dict[str, TensorTarget] = {}
        spans = []
        used = 0
        sizes = [(stop - start) * column.dtype.itemsize for row, start, stop in unit for column in rows[row]]
        memory = self._room(sum(map(_aligned, sizes)))
        for row, start, stop in unit:
            values = []
            for number, column in enumerate(rows[row]):
                buffer = f"{row}/{number}/{start}"
                nbytes = (stop - start) * column.dtype.itemsize
                values.append(memory[used : used + nbytes].view(torch_dtype(column.dtype)))
                used += _aligned(nbytes)
                targets[buffer] = TensorTarget(values[-1])
                copies += _copies(column, start, stop, buffer)
            spans.append(Span(row=row, start=start, stop=stop, values=tuple(values)))
        outcome = self._executor.execute(Plan(copies=coalesce(copies)), targets)
        self._ledger.note(outcome)
        raise_faults(outcome.faults, subject="reading tensors")
        if self._progress is not None:
            self._progress(self._ledger.bytes_read, self._total)
        yield from spans


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _copies(column: Column, start: int, stop: int, buffer: str) -> Iterator[Copy]:
    for at, extent in column.locate(start, stop):
        yield Copy(
            record=extent.record,
            byte_offset=extent.byte_offset,
            numel=extent.numel,
            dtype=extent.dtype,
            buffer=buffer,
            element_offset=at,
            target_dtype=column.dtype,
        )
