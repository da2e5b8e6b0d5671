"""Copies of a plan as chunks that are read into one buffer each, and dealt out from there to the places they are for.

A chunk is bytes of files in a buffer of bounded size. It is dealt out by as few tensor operations as the pattern of its
rows allows: rows at equal distances (the rows of a tensor-parallel shard, interleaved heads) are one strided copy, and
rows without a pattern go by an index that is made where the tensors lie. No operation is made for a row of its own,
unless the row is a large part of the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod

import torch

from ds_reshard.execution.buffers import torch_dtype
from ds_reshard.model.index import Record
from ds_reshard.model.records import ElementType
from ds_reshard.planning.copies import Copy

_ALIGNMENT = 16  # of the widest element type, complex128
ROW_NBYTES = 24
"""Room that a chunk keeps behind its bytes for each copy: three int64 that say where its elements come from and go."""


Named = Callable[[Copy], str]
"""Says of which tensors the elements of a copy are, for whoever reads of a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Copies of one type that follow each other in a record: they are read together, to `position` of a chunk.

    A copy with rows is alone. Its rows lie in the chunk as they do in the file if the gaps are read, else end to end.
    """

    position: int
    copies: list[Copy]

    @property
    def window(self) -> bool:
        """True if it is one copy whose rows are read with the gaps between them."""
        return bool(self.copies[0].rows) and self.copies[0].reads_gaps

    @property
    def record(self) -> Record:
        return self.copies[0].record

    @property
    def byte_offset(self) -> int:
        return self.copies[0].byte_offset

    @property
    def wanted_nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the chunk."""
        last = self.copies[-1]
        return last.window_nbytes if self.window else last.byte_offset + last.nbytes - self.byte_offset

    def continues_with(self, copy: Copy) -> bool:
        """Whether the copy may be the next; bytes of another type might not be aligned there."""
        last = self.copies[-1]
        if last.rows or copy.rows:
            return False
        return (
            last.record == copy.record
            and last.byte_offset + last.nbytes == copy.byte_offset
            and last.dtype is copy.dtype
        )

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield the file offset, the chunk position and the bytes of each row; all copies without rows are one row."""
        if not self.copies[0].rows:
            yield self.byte_offset, self.position, self.nbytes
            return
        copy = self.copies[0]
        nbytes, step = copy.row_nbytes, copy.step_nbytes
        place_step = step if self.window else nbytes
        for number in range(copy.rows[0].times):
            yield self.byte_offset + number * step, self.position + number * place_step, nbytes

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


def chunks_of_rows(copies: Iterable[Copy], capacity_nbytes: int, named: Named | None = None) -> Iterator[Chunk]:
    """Yield chunks of one copy each, with as many of its rows as fit; a row must fit. The copies have rows."""
    for copy in copies:
        for part in copy.row_parts(capacity_nbytes):
            run = Run(position=0, copies=[part])
            yield Chunk(runs=(run,), nbytes=run.nbytes, named=named)


def chunks(copies: Iterable[Copy], capacity_nbytes: int, named: Named | None = None) -> Iterator[Chunk]:
    """Copies without rows, in order, cut so that each chunk with a row of its table for each stays within the capacity.

    ValueError for a capacity that one element and its row do not fit in.
    """
    if capacity_nbytes < 2 * _ALIGNMENT + ROW_NBYTES:
        raise ValueError(f"no element fits in {capacity_nbytes} bytes beside its row")
    runs: list[Run] = []
    rows = stop = 0
    for copy in copies:
        at = 0
        while at < copy.numel:
            joins = bool(runs) and runs[-1].continues_with(copy)
            start = stop if joins else -(-stop // _ALIGNMENT) * _ALIGNMENT
            room = capacity_nbytes - start - _ALIGNMENT - (rows + 1) * ROW_NBYTES
            numel = min(copy.numel - at, room // copy.dtype.itemsize)
            if numel < 1:
                yield Chunk(runs=tuple(runs), nbytes=stop, named=named)
                runs, rows, stop = [], 0, 0
                continue
            part = copy.part(at, numel)
            if joins:
                runs[-1].copies.append(part)
            else:
                runs.append(Run(position=start, copies=[part]))
            at, rows, stop = at + numel, rows + 1, start + part.nbytes
    if runs:
        yield Chunk(runs=tuple(runs), nbytes=stop, named=named)


_FEW = 8
_LARGE_SHARE = 16
_DIMENSIONS = 3
INDEX_NUMEL = 1 << 20
"""Elements that one index names at most: it needs 32 bytes of scratch memory for each."""
_UNITS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True, slots=True)
class Block:
    """Elements at regular places of a source and of a target: a box of `sizes`, rows last; steps count elements."""

    source: int
    target: int
    sizes: tuple[int, ...]
    source_steps: tuple[int, ...]
    target_steps: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def rows(self) -> list[tuple[int, int]]:
        """Where each row begins, in the source and in the target."""
        found = [(self.source, self.target)]
        for size, here, there in zip(self.sizes[:-1], self.source_steps, self.target_steps, strict=False):
            found = [(source + i * here, target + i * there) for source, target in found for i in range(size)]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Rows [first, last) of a table, which one index of `numel` units deals out."""

    first: int
    last: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """What goes from a chunk to one buffer: blocks that are copied one by one, and portions of the table's rows.

    Blocks count elements; rows count units of `unit_nbytes`, of one element or, where none is cast, of several.
    """

    buffer: str
    dtype: ElementType
    blocks: tuple[Block, ...]
    portions: tuple[Portion, ...]
    unit_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scattering:
    """How a chunk is dealt out. `table` has three lists of one length: sources, targets, lengths."""

    scatters: tuple[Scatter, ...]
    table: tuple[list[int], list[int], list[int]]


def scattering(
    runs: Iterable[Run], chunk_nbytes: int, targets: Mapping[str, torch.Tensor], index_numel: int
) -> Scattering:
    """The operations that deal a chunk of that size out into flat tensors.

    An index names at most `index_numel` units, or one row; nothing else depends on it, the table neither.
    """
    groups: dict[tuple[str, ElementType], list[Block]] = {}
    for run in runs:
        for copy, at in run.placed():
            groups.setdefault((copy.buffer, copy.dtype), []).append(_block(copy, at))
    table: tuple[list[int], list[int], list[int]] = ([], [], [])
    scatters = []
    for (buffer, dtype), group in groups.items():
        blocks = group
        for _ in range(_DIMENSIONS - 1):
            blocks = joined(blocks)
        small_numel = chunk_nbytes // (_LARGE_SHARE * dtype.itemsize) if len(blocks) > _FEW else 0
        small = [block for block in blocks if block.numel < small_numel]
        unit, first = _unit(small, targets[buffer], dtype), len(table[0])
        for block in small:
            for row in block.rows():
                for column, value in zip(table, (*row, block.sizes[-1]), strict=True):
                    column.append(value * dtype.itemsize // unit)
        large = tuple(block for block in blocks if block.numel >= small_numel)
        portions = tuple(_portions(table[2], first, index_numel))
        scatters.append(Scatter(buffer=buffer, dtype=dtype, blocks=large, portions=portions, unit_nbytes=unit))
    return Scattering(scatters=tuple(scatters), table=table)


def _block(copy: Copy, at: int) -> Block:
    """Return the block of a copy whose bytes begin at byte `at` of a chunk."""
    first = at // copy.dtype.itemsize
    if not copy.rows:
        return Block(first, copy.element_offset, (copy.numel,), (1,), (1,))
    ((times, file_step, target_step),) = copy.rows
    step = file_step if copy.reads_gaps else copy.numel
    return Block(first, copy.element_offset, (times, copy.numel), (step, 1), (target_step, 1))


def _unit(blocks: Iterable[Block], target: torch.Tensor, dtype: ElementType) -> int:
    """The widest bytes that all of the blocks consist of, there and here: one element where elements are cast."""
    if target.dtype != torch_dtype(dtype):
        return dtype.itemsize
    common = target.storage_offset()
    for block in blocks:
        common = gcd(common, block.source, block.target, block.sizes[-1])
        common = gcd(common, *block.source_steps[:-1], *block.target_steps[:-1])
    return next(unit for unit in _UNITS if common * dtype.itemsize % unit == 0)


def joined(blocks: Iterable[Block]) -> list[Block]:
    """Blocks of one form that follow each other at equal distances, as one block of a dimension more."""
    found: list[list[Block]] = []
    for block in blocks:
        if found and _follows(found[-1], block):
            found[-1].append(block)
        else:
            found.append([block])
    return [_stacked(alike) for alike in found]


def _follows(alike: list[Block], block: Block) -> bool:
    last = alike[-1]
    if (last.sizes, last.source_steps, last.target_steps) != (block.sizes, block.source_steps, block.target_steps):
        return False
    steps = _steps(last, block)
    return _steps(*alike[:2]) == steps if len(alike) > 1 else min(steps) > 0


def _steps(first: Block, second: Block) -> tuple[int, int]:
    return second.source - first.source, second.target - first.target


def _stacked(alike: list[Block]) -> Block:
    if len(alike) == 1:
        return alike[0]
    first = alike[0]
    source_step, target_step = _steps(first, alike[1])
    return Block(
        source=first.source,
        target=first.target,
        sizes=(len(alike), *first.sizes),
        source_steps=(source_step, *first.source_steps),
        target_steps=(target_step, *first.target_steps),
    )


def straight(how: Scattering, targets: Mapping[str, torch.Tensor]) -> bool:
    """Whether a chunk is dealt out by plain copies alone, as pinned memory can be: nothing is cast, or goes by rows."""
    return all(
        not scatter.portions
        and targets[scatter.buffer].dtype == torch_dtype(scatter.dtype)
        and all(len(block.sizes) == 1 for block in scatter.blocks)
        for scatter in how.scatters
    )


def deal(chunk: torch.Tensor, how: Scattering, table: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> None:
    """Put the bytes of a chunk into flat tensors; `table` is the scattering's own, where the chunk lies.

    Elements of one type keep their bits; others are cast as torch casts. Pinned memory is not waited for.
    """
    for scatter in how.scatters:
        target = targets[scatter.buffer]
        for block in scatter.blocks:
            _by_steps(chunk, block, target, scatter.dtype)
        for portion in scatter.portions:
            _by_index(chunk, table[:, portion.first : portion.last], portion.numel, target, scatter)


def _by_steps(chunk: torch.Tensor, block: Block, target: torch.Tensor, dtype: ElementType) -> None:
    """One strided copy, of the widest units that the block consists of."""
    if target.dtype != torch_dtype(dtype):
        source, place, wide = chunk.view(torch_dtype(dtype)), target, 1
    else:
        unit = _unit([block], target, dtype)
        source, place, wide = _as_units(chunk, unit), _as_units(target, unit), unit // dtype.itemsize
    sizes = (*block.sizes[:-1], block.sizes[-1] // wide)
    into, out_of = (
        tensor.as_strided(sizes, (*(step // wide for step in steps[:-1]), 1), tensor.storage_offset() + first // wide)
        for tensor, steps, first in (
            (place, block.target_steps, block.target),
            (source, block.source_steps, block.source),
        )
    )
    into.copy_(out_of, non_blocking=True)


def _as_units(tensor: torch.Tensor, unit_nbytes: int) -> torch.Tensor:
    """A flat tensor as units of a type that every operation takes; what is left at its end is cut off."""
    flat = tensor.view(torch.uint8)
    return flat[: len(flat) // unit_nbytes * unit_nbytes].view(_UNITS[unit_nbytes])


def _portions(lengths: list[int], first: int, index_numel: int) -> Iterator[Portion]:
    """The rows from `first` on."""
    begin, numel = first, 0
    for row in range(first, len(lengths)):
        if numel and numel + lengths[row] > index_numel:
            yield Portion(first=begin, last=row, numel=numel)
            begin, numel = row, 0
        numel += lengths[row]
    if begin < len(lengths):
        yield Portion(first=begin, last=len(lengths), numel=numel)


def _by_index(chunk: torch.Tensor, rows: torch.Tensor, numel: int, target: torch.Tensor, scatter: Scatter) -> None:
    """Rows of `numel` units in all. Their number is given, so that a device is not waited for."""
    sources, places, lengths = rows
    row = torch.repeat_interleave(torch.arange(lengths.numel(), device=chunk.device), lengths, output_size=numel)
    inside = torch.arange(numel, device=chunk.device) - (lengths.cumsum(0) - lengths)[row]
    values = _as_units(chunk, scatter.unit_nbytes).index_select(0, sources[row] + inside)
    unit, dtype = scatter.unit_nbytes, torch_dtype(scatter.dtype)
    if target.dtype != dtype:
        values = values.view(dtype).to(target.dtype)
        unit = values.element_size()
    _as_units(target, unit).index_copy_(0, places[row] + inside, _as_units(values, unit))
