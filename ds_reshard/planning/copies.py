"""The copies of a plan as columns: one entry of integers per copy, or per set of copies at equal distances.

A checkpoint of many ranks and tensors has millions of copies (a tensor that is cut along an inner axis has one per
row). As objects they would take more time and memory than the bytes; objects are made only where people look.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple, TypeVar, overload

import numpy
from numpy.typing import NDArray

from ds_reshard.model.columns import Column
from ds_reshard.model.index import Record
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Rows

T = TypeVar("T")


class Copy(NamedTuple):
    """A copy of `numel` elements (of each row, if there are `rows`) from a file to a buffer of the rank.

    `byte_offset` counts from the start of the file, `element_offset` from the start of the buffer. Elements are cast
    as torch casts if their types differ. There are at most two `rows`, the outer ones first; their first step counts
    elements in the file, the second in the buffer. The elements of a row lie together in the file, and `spread`
    elements apart in the buffer: 1 unless a map transposes the tensor.
    """

    record: Record
    byte_offset: int
    numel: int
    dtype: ElementType
    buffer: str
    element_offset: int
    target_dtype: ElementType
    rows: tuple[Rows, ...] = ()
    spread: int = 1

    @property
    def path(self) -> str:
        return self.record.path

    @property
    def nbytes(self) -> int:
        """Bytes read from the file."""
        return self.numel * self.dtype.itemsize * prod(row.times for row in self.rows)

    def part(self, first: int, numel: int) -> Copy:
        """Return the copy of elements [at, at + numel) of this one, which has no rows."""
        if numel == self.numel:
            return self
        return self._replace(
            byte_offset=self.byte_offset + first * self.dtype.itemsize,
            element_offset=self.element_offset + first * self.spread,
            numel=numel,
        )

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row in the file."""
        return self.numel * self.dtype.itemsize

    @property
    def step_nbytes(self) -> int:
        """Bytes from the beginning of a row to that of the next; of a copy with one level of rows."""
        return self.rows[0].first_step * self.dtype.itemsize

    @property
    def window_nbytes(self) -> int:
        """Bytes from the beginning of the first row to the end of the last; of a copy with one level of rows."""
        return (self.rows[0].times - 1) * self.step_nbytes + self.row_nbytes

    @property
    def reads_gaps(self) -> bool:
        """True if its rows lie so near each other that the bytes between them are read along."""
        return self.step_nbytes - self.row_nbytes <= BETWEEN_NBYTES

    def row_parts(self, capacity_nbytes: int) -> Iterator[Copy]:
        """Yield copies of as many rows as a buffer of `capacity_nbytes` holds, with the gaps if they are read."""
        ((times, _, target_step),), row, step = self.rows, self.row_nbytes, self.step_nbytes
        most = (capacity_nbytes - row) // step + 1 if self.reads_gaps else capacity_nbytes // row
        for first in range(0, times, most):
            yield self._replace(
                byte_offset=self.byte_offset + first * step,
                element_offset=self.element_offset + first * target_step,
                rows=(self.rows[0]._replace(times=min(most, times - first)),),
            )


BETWEEN_NBYTES = 16 << 10
"""Bytes that nobody wants are read along with those around them if a system call of its own would cost more."""
RECORD, BYTE_OFFSET, NUMEL, TYPES, BUFFER, ELEMENT_OFFSET = range(6)
ROWS, ROW_BYTES, ROW_ELEMENTS, PLANES, PLANE_BYTES, PLANE_ELEMENTS, SPREAD = range(6, 13)
_WIDTH = 13
_PORTION = 1 << 16
"""The number of entries that are made into objects, or expanded into runs, at once."""

Types = tuple[ElementType, ElementType]
"""Element types, in the file and in the buffer."""


class Copies(Sequence[Copy]):
    """Copies as a table: `table[:, i]` is copy i; the constants above name the columns.

    Records, buffers and types are indices into the lists beside the table. Steps of rows and of planes (rows of rows)
    count bytes in the file and elements in the buffer. All numbers are exact, as files have fewer than 2**63 bytes.
    """

    def __init__(
        self, table: Column, records: Sequence[Record], buffers: Sequence[str], types: Sequence[Types]
    ) -> None:
        self.table = table
        self.records = records
        self.buffers = buffers
        self.types = types

    @classmethod
    def of(cls, copies: Iterable[Copy]) -> Copies:
        """Return the same copies as columns."""
        if isinstance(copies, Copies):
            return copies
        records, buffers, types = Numbers[Record](), Numbers[str](), Numbers[Types]()
        rows = [
            (
                records[copy.record],
                copy.byte_offset,
                copy.numel,
                types[copy.dtype, copy.target_dtype],
                buffers[copy.buffer],
                copy.element_offset,
                *_steps(copy.rows[-1:], copy.dtype.itemsize),
                *_steps(copy.rows[:-1], copy.dtype.itemsize),
                copy.spread,
            )
            for copy in copies
        ]
        table = numpy.array(rows, dtype=numpy.int64).reshape(len(rows), _WIDTH).T
        return cls(table, list(records), list(buffers), list(types))

    def __len__(self) -> int:
        return int(self.table.shape[1])

    @overload
    def __getitem__(self, index: int) -> Copy: ...
    @overload
    def __getitem__(self, index: slice) -> Copies: ...
    def __getitem__(self, index: int | slice) -> Copy | Copies:
        if isinstance(index, slice):
            return self.take(index)
        return next(iter(self.take(slice(index, index + 1 or None))))

    def __iter__(self) -> Iterator[Copy]:
        for first in range(0, len(self), _PORTION):
            for row in self.table[:, first : first + _PORTION].T.tolist():
                yield self._copy(row)

    def _copy(self, row: Sequence[int]) -> Copy:
        """Return an entry of the table as an object; its steps are (count, bytes, elements) of rows, then of planes."""
        record, byte_offset, numel, types, buffer, element_offset, *steps, spread = row
        dtype, target_dtype = self.types[types]
        rows: tuple[Rows, ...] = ()
        if steps[0] > 1 or steps[3] > 1:
            both = (Rows(times, nbytes // dtype.itemsize, numel) for times, nbytes, numel in (steps[3:], steps[:3]))
            rows = tuple(each for each in both if each.times > 1)
        return Copy(
            self.records[record],
            byte_offset,
            numel,
            dtype,
            self.buffers[buffer],
            element_offset,
            target_dtype,
            rows,
            spread,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def take(self, which: slice | Column | NDArray[numpy.bool_]) -> Copies:
        """Return the chosen copies."""
        return Copies(self.table[:, which], self.records, self.buffers, self.types)

    @property
    def itemsizes(self) -> Column:
        """The size of an element in the file, in bytes, for each copy."""
        sizes = [dtype.itemsize for dtype, _ in self.types]
        each: Column = numpy.array(sizes or [1], dtype=numpy.int64)[self.table[TYPES]]
        return each

    def nbytes_each(self) -> Column:
        """Return the number of bytes that each copy reads."""
        table = self.table
        each: Column = table[NUMEL] * self.itemsizes * table[ROWS] * table[PLANES]
        return each

    @property
    def nbytes(self) -> int:
        """The number of bytes that all copies read."""
        return total(self.nbytes_each())

    @property
    def paths(self) -> set[str]:
        return {record.path for record in self.records_used}

    @property
    def records_used(self) -> list[Record]:
        return [self.records[number] for number in _used(self.table[RECORD])]

    @property
    def types_used(self) -> list[Types]:
        return [self.types[number] for number in _used(self.table[TYPES])]

    def nbytes_of_paths(self) -> dict[str, int]:
        """Return the number of bytes that are read from each file."""
        by_path, nbytes = dict[str, int](), numpy.zeros(len(self.records), dtype=numpy.int64)
        numpy.add.at(nbytes, self.table[RECORD], self.nbytes_each())
        for number in _used(self.table[RECORD]):
            path = self.records[number].path
            by_path[path] = by_path.get(path, 0) + int(nbytes[number])
        return by_path

    @property
    def any_spread(self) -> bool:
        """True if the elements of a copy lie apart in the buffer."""
        return int(self.table[SPREAD].max(initial=1)) > 1

    @property
    def number_of_runs(self) -> int:
        return total(self.table[ROWS] * self.table[PLANES])

    @property
    def numel(self) -> int:
        """The number of elements of all copies."""
        return total(self.table[NUMEL] * self.table[ROWS] * self.table[PLANES])

    def by_buffer(self) -> dict[str, Copies]:
        """Return the copies into each buffer, ordered by their offset there."""
        ordered = self.take(numpy.lexsort((self.table[ELEMENT_OFFSET], self.table[BUFFER])))
        numbers, starts = numpy.unique(ordered.table[BUFFER], return_index=True)
        ends = [*starts[1:].tolist(), len(self)][: len(starts)]
        return {
            self.buffers[number]: ordered[start:end]
            for number, start, end in zip(numbers.tolist(), starts.tolist(), ends, strict=True)
        }

    @classmethod
    def concatenate(cls, parts: Sequence[Copies]) -> Copies:
        """Concatenate copies that share their lists of records, buffers and types."""
        if len(parts) == 1:
            return parts[0]
        tables = numpy.concatenate([part.table for part in parts], axis=1)
        return cls(tables, parts[0].records, parts[0].buffers, parts[0].types)

    def merge(self, others: Copies) -> Copies:
        """Return these copies followed by others, whose lists are merged with these."""
        records, buffers, types = Numbers[Record](), Numbers[str](), Numbers[Types]()
        tables = []
        for part in (self, others):
            table = part.table.copy()
            for column, numbers in (
                (RECORD, [records[record] for record in part.records]),
                (BUFFER, [buffers[buffer] for buffer in part.buffers]),
                (TYPES, [types[pair] for pair in part.types]),
            ):
                if len(part):
                    table[column] = numpy.array(numbers, dtype=numpy.int64)[table[column]]
            tables.append(table)
        return Copies(numpy.concatenate(tables, axis=1), list(records), list(buffers), list(types))

    def extent(self) -> tuple[int, int]:
        """Return the half-open range of elements that copies into one buffer fill."""
        table = self.table
        steps = (table[ROWS] - 1) * table[ROW_ELEMENTS] + (table[PLANES] - 1) * table[PLANE_ELEMENTS]
        return int(table[ELEMENT_OFFSET].min()), int((table[ELEMENT_OFFSET] + steps + _reach(table)).max())

    def clip(self, start: int, stop: int) -> Copies:
        """Return the parts that fill elements [start, stop) of the one buffer of all copies, which are in its order."""
        table = self.table
        if not len(self) or int((table[ROWS] * table[PLANES] * table[SPREAD]).max()) > 1:
            return self._rows_within(start, stop)
        last = int(numpy.searchsorted(table[ELEMENT_OFFSET], stop))
        first = max(0, int(numpy.searchsorted(table[ELEMENT_OFFSET], start, side="right")) - 1)
        overlapping = table[:, first:last].copy()
        return Copies(overlapping, self.records, self.buffers, self.types)._clipped(start, stop)

    def _clipped(self, start: int, stop: int) -> Copies:
        """Clip copies without rows to elements [start, stop) of their buffer."""
        clipped = self.table.copy()
        offset, spread = self.table[ELEMENT_OFFSET], self.table[SPREAD]
        skipped = numpy.maximum(0, -((offset - start) // spread))
        clipped[NUMEL] = numpy.minimum(clipped[NUMEL], -((offset - stop) // spread)) - skipped
        clipped[ELEMENT_OFFSET] += skipped * spread
        clipped[BYTE_OFFSET] += skipped * self.itemsizes
        return Copies(clipped[:, clipped[NUMEL] > 0], self.records, self.buffers, self.types)

    def _rows_within(self, start: int, stop: int) -> Copies:
        """Clip copies with rows, whose steps are positive: keep the rows inside, and cut the rows at both edges."""
        table = self.planes_apart().table
        numel, step, offset = _reach(table), numpy.maximum(1, table[ROW_ELEMENTS]), table[ELEMENT_OFFSET]
        # The range of rows that overlap [start, stop), and of rows that lie inside it.
        overlapping = numpy.clip(-((offset + numel - 1 - start) // step), 0, None), -((offset - stop) // step)
        inside = numpy.clip(-((offset - start) // step), 0, None), (stop - numel - offset) // step + 1
        first, last = overlapping[0], numpy.minimum(overlapping[1], table[ROWS])
        inner_first = numpy.minimum(inside[0], last)
        inner_last = numpy.maximum(inner_first, numpy.minimum(inside[1], table[ROWS]))
        parts = []
        for begin, end in ((first, inner_first), (inner_first, inner_last), (inner_last, last)):
            rows_of_part = table.copy()
            rows_of_part[BYTE_OFFSET] += begin * table[ROW_BYTES]
            rows_of_part[ELEMENT_OFFSET] += begin * table[ROW_ELEMENTS]
            rows_of_part[ROWS] = end - begin
            some_left = rows_of_part[:, rows_of_part[ROWS] > 0]
            parts.append(Copies(some_left, self.records, self.buffers, self.types))
        edges = [run._clipped(start, stop) for part in (parts[0], parts[2]) for run in part.runs()]
        return Copies.concatenate([parts[1], *edges])

    def planes_apart(self) -> Copies:
        """Return the copies with a copy for each plane."""
        planes = self.table[PLANES]
        copy_number = numpy.repeat(numpy.arange(len(self)), planes)
        plane = numpy.arange(len(copy_number)) - (numpy.cumsum(planes) - planes)[copy_number]
        expanded = self.table[:, copy_number]
        expanded[BYTE_OFFSET] += plane * expanded[PLANE_BYTES]
        expanded[ELEMENT_OFFSET] += plane * expanded[PLANE_ELEMENTS]
        expanded[PLANES:SPREAD] = numpy.array(_ALONE, dtype=numpy.int64)[:, None]
        return Copies(expanded, self.records, self.buffers, self.types)

    def in_order(self) -> Copies:
        """Return the copies ordered by file and offset, then by buffer and offset."""
        table = self.table
        paths = _ranks([record.path for record in self.records], table[RECORD])
        buffers = _ranks(self.buffers, table[BUFFER])
        return self.take(numpy.lexsort((table[ELEMENT_OFFSET], buffers, table[BYTE_OFFSET], paths)))

    def joined(self) -> Copies:
        """Join each copy with the one before it if it continues that one in file and buffer."""
        table = self.table
        if len(self) < 2:
            return self
        alike = [RECORD, BUFFER, TYPES, SPREAD]
        same_target = (table[alike, 1:] == table[alike, :-1]).all(axis=0)
        single = table[ROWS] * table[PLANES] == 1
        ends = table[BYTE_OFFSET] + table[NUMEL] * self.itemsizes
        continues = same_target & single[1:] & single[:-1] & (table[BYTE_OFFSET][1:] == ends[:-1])
        continues &= table[ELEMENT_OFFSET][1:] == (table[ELEMENT_OFFSET] + table[NUMEL] * table[SPREAD])[:-1]
        first = numpy.flatnonzero(numpy.concatenate(([True], ~continues)))
        numel = numpy.add.reduceat(table[NUMEL], first)
        joined = table[:, first]
        joined[NUMEL] = numel
        return Copies(joined, self.records, self.buffers, self.types)

    def runs(self) -> Iterator[Copies]:
        """Yield the same copies without rows, in portions, so that rows are expanded only as needed."""
        table = self.table
        each = table[ROWS] * table[PLANES]
        if not len(self) or int(each.max()) == 1:
            yield self
            return
        ends = numpy.cumsum(each)
        first = 0
        while first < len(self):
            begin = int(ends[first]) - int(each[first])
            stop = max(first + 1, int(numpy.searchsorted(ends, begin + _PORTION, side="right")))
            for offset in range(0, int(ends[stop - 1]) - begin, _PORTION):
                yield self._runs(first, stop, offset, min(offset + _PORTION, int(ends[stop - 1]) - begin))
            first = stop

    def _runs(self, first: int, stop: int, begin: int, end: int) -> Copies:
        """Return runs [begin, end) of copies [first, stop), counted through all their rows."""
        table = self.table[:, first:stop]
        ends = numpy.cumsum(table[ROWS] * table[PLANES])
        numbers = numpy.arange(begin, end, dtype=numpy.int64)
        copy_number = numpy.searchsorted(ends, numbers, side="right")
        plane, row = numpy.divmod(numbers - (ends - table[ROWS] * table[PLANES])[copy_number], table[ROWS][copy_number])
        expanded = table[:, copy_number]
        expanded[BYTE_OFFSET] += plane * expanded[PLANE_BYTES] + row * expanded[ROW_BYTES]
        expanded[ELEMENT_OFFSET] += plane * expanded[PLANE_ELEMENTS] + row * expanded[ROW_ELEMENTS]
        expanded[ROWS:SPREAD] = numpy.array(_ALONE * 2, dtype=numpy.int64)[:, None]
        return Copies(expanded, self.records, self.buffers, self.types)

    def cut(self, chunk_nbytes: int) -> Copies:
        """Split copies without rows into pieces of at most `chunk_nbytes` bytes (at least one element)."""
        table = self.table
        step = numpy.maximum(1, chunk_nbytes // self.itemsizes)
        pieces = -(-table[NUMEL] // step)
        if not len(self) or bool((pieces == 1).all()):
            return self
        copy_number = numpy.repeat(numpy.arange(len(self)), pieces)
        number = numpy.arange(len(copy_number)) - numpy.repeat(numpy.cumsum(pieces) - pieces, pieces)
        pieces_table, offset = table[:, copy_number], number * step[copy_number]
        pieces_table[BYTE_OFFSET] += offset * self.itemsizes[copy_number]
        pieces_table[ELEMENT_OFFSET] += offset * table[SPREAD][copy_number]
        pieces_table[NUMEL] = numpy.minimum(step[copy_number], pieces_table[NUMEL] - offset)
        return Copies(pieces_table, self.records, self.buffers, self.types)


_ALONE = (1, 0, 0)


def _reach(table: Column) -> Column:
    """Return the number of elements of the buffer from the first one of each row to its last one."""
    reach: Column = (table[NUMEL] - 1) * table[SPREAD] + 1
    return reach


def _steps(rows: Sequence[Rows], itemsize: int) -> tuple[int, int, int]:
    return (rows[0].times, rows[0].first_step * itemsize, rows[0].second_step) if rows else _ALONE


def _used(numbers: Column) -> list[int]:
    """Return the numbers that occur, in order; they are small."""
    used: list[int] = numpy.flatnonzero(numpy.bincount(numbers)).tolist()
    return used


def _ranks(names: Sequence[str], numbers: Column) -> Column:
    """Return for each number of a name the rank of the name in the alphabetical order of all used names."""
    used, inverse = numpy.unique(numbers, return_inverse=True)
    used_names = [names[number] for number in used.tolist()]
    rank_by_name = {name: order for order, name in enumerate(sorted(set(used_names)))}
    return numpy.array([rank_by_name[name] for name in used_names], dtype=numpy.int64)[inverse]


def total(values: Column) -> int:
    """Return the exact sum, which may exceed 64 bits."""
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())


class Numbers(dict[T, int]):
    """A number for each value, assigned on first use."""

    def __missing__(self, value: T) -> int:
        self[value] = len(self)
        return self[value]


def coalesce(copies: Iterable[Copy]) -> Copies:
    """Return the same copies ordered by file and offset, adjacent ones joined."""
    return Copies.of(copies).in_order().joined()
