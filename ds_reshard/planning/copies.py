"""Copies of a plan as columns: a row of integers for each, or for each family of them that lie at equal distances.

A checkpoint of many ranks and tensors has millions of copies, and a tensor that is cut along an inner axis one for
every row: as objects they would take more time and memory than the bytes. Objects are made where people look.
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
    """`numel` elements from a file to a buffer of the rank; with `rows`, as many for each row.

    `byte_offset` counts from the start of the file, `element_offset` from the start of the buffer;
    source and target elements may differ in type (they are then cast as torch casts). `rows` are at most two, the
    outer ones first; their steps count elements, the first of the file and the second of the buffer.
    """

    record: Record
    byte_offset: int
    numel: int
    dtype: ElementType
    buffer: str
    element_offset: int
    target_dtype: ElementType
    rows: tuple[Rows, ...] = ()

    @property
    def path(self) -> str:
        return self.record.path

    @property
    def nbytes(self) -> int:
        """Bytes read from the file."""
        return self.numel * self.dtype.itemsize * prod(row.times for row in self.rows)

    def part(self, at: int, numel: int) -> Copy:
        """Of a copy without rows, that of its elements [at, at + numel) alone."""
        if numel == self.numel:
            return self
        return self._replace(
            byte_offset=self.byte_offset + at * self.dtype.itemsize,
            element_offset=self.element_offset + at,
            numel=numel,
        )


RECORD, BYTE_OFFSET, NUMEL, TYPES, BUFFER, ELEMENT_OFFSET = range(6)
ROWS, ROW_BYTES, ROW_ELEMENTS, PLANES, PLANE_BYTES, PLANE_ELEMENTS = range(6, 12)
_WIDTH = 12
_PORTION = 1 << 16
"""How many rows of a table are made into objects, or are taken apart, at once."""

Types = tuple[ElementType, ElementType]
"""Element types, in the file and in the buffer."""


class Copies(Sequence[Copy]):
    """Copies, `table[column, i]` saying of number i what it is; the columns are named above.

    Records, buffers and types are numbers of those that are listed; steps of rows and of planes (rows of rows) count
    bytes in the file and elements in the buffer. All are exact: files are smaller than 2**63 bytes.
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
        """The same copies as columns."""
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
            )
            for copy in copies
        ]
        table = numpy.array(rows, dtype=numpy.int64).reshape(len(rows), _WIDTH).T
        return cls(table, list(records), list(buffers), list(types))

    def __len__(self) -> int:
        return int(self.table.shape[1])

    @overload
    def __getitem__(self, at: int) -> Copy: ...
    @overload
    def __getitem__(self, at: slice) -> Copies: ...
    def __getitem__(self, at: int | slice) -> Copy | Copies:
        if isinstance(at, slice):
            return self.take(at)
        return next(iter(self.take(slice(at, at + 1 or None))))

    def __iter__(self) -> Iterator[Copy]:
        for first in range(0, len(self), _PORTION):
            for row in self.table[:, first : first + _PORTION].T.tolist():
                yield self._copy(row)

    def _copy(self, row: Sequence[int]) -> Copy:
        record, byte_offset, numel, types, buffer, element_offset, *steps = row
        dtype, target_dtype = self.types[types]
        rows: tuple[Rows, ...] = ()
        if steps[0] > 1 or steps[3] > 1:
            found = (Rows(times, nbytes // dtype.itemsize, there) for times, nbytes, there in (steps[3:], steps[:3]))
            rows = tuple(row for row in found if row.times > 1)
        return Copy(
            self.records[record], byte_offset, numel, dtype, self.buffers[buffer], element_offset, target_dtype, rows
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def take(self, which: slice | Column | NDArray[numpy.bool_]) -> Copies:
        """Some of them."""
        return Copies(self.table[:, which], self.records, self.buffers, self.types)

    @property
    def itemsizes(self) -> Column:
        """Bytes of an element of each, in the file."""
        sizes = [dtype.itemsize for dtype, _ in self.types]
        each: Column = numpy.array(sizes or [1], dtype=numpy.int64)[self.table[TYPES]]
        return each

    def nbytes_each(self) -> Column:
        """Bytes that each reads."""
        table = self.table
        each: Column = table[NUMEL] * self.itemsizes * table[ROWS] * table[PLANES]
        return each

    @property
    def nbytes(self) -> int:
        """Bytes that all of them read."""
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
        """Bytes that are read of each file."""
        found, nbytes = dict[str, int](), numpy.zeros(len(self.records), dtype=numpy.int64)
        numpy.add.at(nbytes, self.table[RECORD], self.nbytes_each())
        for number in _used(self.table[RECORD]):
            path = self.records[number].path
            found[path] = found.get(path, 0) + int(nbytes[number])
        return found

    @property
    def number_of_runs(self) -> int:
        return total(self.table[ROWS] * self.table[PLANES])

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return total(self.table[NUMEL] * self.table[ROWS] * self.table[PLANES])

    def by_buffer(self) -> dict[str, Copies]:
        """Those of each buffer, in the order in which it fills."""
        ordered = self.take(numpy.lexsort((self.table[ELEMENT_OFFSET], self.table[BUFFER])))
        numbers, starts = numpy.unique(ordered.table[BUFFER], return_index=True)
        ends = [*starts[1:].tolist(), len(self)][: len(starts)]
        return {
            self.buffers[number]: ordered[start:end]
            for number, start, end in zip(numbers.tolist(), starts.tolist(), ends, strict=True)
        }

    @classmethod
    def concatenate(cls, parts: Sequence[Copies]) -> Copies:
        """Copies that have records, buffers and types in common."""
        if len(parts) == 1:
            return parts[0]
        tables = numpy.concatenate([part.table for part in parts], axis=1)
        return cls(tables, parts[0].records, parts[0].buffers, parts[0].types)

    def merge(self, others: Copies) -> Copies:
        """These copies, and others behind them."""
        records, buffers, types = Numbers[Record](), Numbers[str](), Numbers[Types]()
        tables = []
        for part in (self, others):
            made = part.table.copy()
            for column, numbers in (
                (RECORD, [records[record] for record in part.records]),
                (BUFFER, [buffers[buffer] for buffer in part.buffers]),
                (TYPES, [types[pair] for pair in part.types]),
            ):
                if len(part):
                    made[column] = numpy.array(numbers, dtype=numpy.int64)[made[column]]
            tables.append(made)
        return Copies(numpy.concatenate(tables, axis=1), list(records), list(buffers), list(types))

    def extent(self) -> tuple[int, int]:
        """The first element of a buffer that they fill, and the one behind the last."""
        table = self.table
        steps = (table[ROWS] - 1) * table[ROW_ELEMENTS] + (table[PLANES] - 1) * table[PLANE_ELEMENTS]
        return int(table[ELEMENT_OFFSET].min()), int((table[ELEMENT_OFFSET] + steps + table[NUMEL]).max())

    def clip(self, start: int, stop: int) -> Copies:
        """Of copies into one buffer, ordered by their place there, what fills its elements [start, stop)."""
        table = self.table
        if not len(self) or int((table[ROWS] * table[PLANES]).max()) > 1:
            return self._rows_within(start, stop)
        last = int(numpy.searchsorted(table[ELEMENT_OFFSET], stop))
        first = max(0, int(numpy.searchsorted(table[ELEMENT_OFFSET], start, side="right")) - 1)
        made = table[:, first:last].copy()
        return Copies(made, self.records, self.buffers, self.types)._clipped(start, stop)

    def _clipped(self, start: int, stop: int) -> Copies:
        """Of copies without rows, that of what they fill of [start, stop)."""
        made = self.table.copy()
        begin = numpy.maximum(made[ELEMENT_OFFSET], start)
        skipped = begin - made[ELEMENT_OFFSET]
        made[NUMEL] = numpy.minimum(made[ELEMENT_OFFSET] + made[NUMEL], stop) - begin
        made[ELEMENT_OFFSET] = begin
        made[BYTE_OFFSET] += skipped * self.itemsizes
        return Copies(made[:, made[NUMEL] > 0], self.records, self.buffers, self.types)

    def _rows_within(self, start: int, stop: int) -> Copies:
        """The same of copies with rows, whose steps are positive: whole rows, and what is cut off of two others."""
        table = self._planes_apart().table
        numel, step, at = table[NUMEL], numpy.maximum(1, table[ROW_ELEMENTS]), table[ELEMENT_OFFSET]
        # Rows that end behind `start` or begin before `stop`, and those that do so whole.
        some = numpy.clip(-((at + numel - 1 - start) // step), 0, None), -((at - stop) // step)
        whole = numpy.clip(-((at - start) // step), 0, None), (stop - numel - at) // step + 1
        first, last = some[0], numpy.minimum(some[1], table[ROWS])
        inner_first = numpy.minimum(whole[0], last)
        inner_last = numpy.maximum(inner_first, numpy.minimum(whole[1], table[ROWS]))
        parts = []
        for begin, end in ((first, inner_first), (inner_first, inner_last), (inner_last, last)):
            made = table.copy()
            made[BYTE_OFFSET] += begin * table[ROW_BYTES]
            made[ELEMENT_OFFSET] += begin * table[ROW_ELEMENTS]
            made[ROWS] = end - begin
            some_left = made[:, made[ROWS] > 0]
            parts.append(Copies(some_left, self.records, self.buffers, self.types))
        edges = [run._clipped(start, stop) for part in (parts[0], parts[2]) for run in part.runs()]
        return Copies.concatenate([parts[1], *edges])

    def _planes_apart(self) -> Copies:
        planes = self.table[PLANES]
        which = numpy.repeat(numpy.arange(len(self)), planes)
        plane = numpy.arange(len(which)) - (numpy.cumsum(planes) - planes)[which]
        made = self.table[:, which]
        made[BYTE_OFFSET] += plane * made[PLANE_BYTES]
        made[ELEMENT_OFFSET] += plane * made[PLANE_ELEMENTS]
        made[PLANES:] = numpy.array(_ALONE, dtype=numpy.int64)[:, None]
        return Copies(made, self.records, self.buffers, self.types)

    def in_order(self) -> Copies:
        """Ordered by file and offset, then by buffer and offset."""
        table = self.table
        paths = _ranks([record.path for record in self.records], table[RECORD])
        buffers = _ranks(self.buffers, table[BUFFER])
        return self.take(numpy.lexsort((table[ELEMENT_OFFSET], buffers, table[BYTE_OFFSET], paths)))

    def joined(self) -> Copies:
        """Those that continue the one before them joined with it."""
        table = self.table
        if len(self) < 2:
            return self
        same = (table[[RECORD, BUFFER, TYPES], 1:] == table[[RECORD, BUFFER, TYPES], :-1]).all(axis=0)
        plain = table[ROWS] * table[PLANES] == 1
        after = table[BYTE_OFFSET] + table[NUMEL] * self.itemsizes
        continues = same & plain[1:] & plain[:-1] & (table[BYTE_OFFSET][1:] == after[:-1])
        continues &= table[ELEMENT_OFFSET][1:] == (table[ELEMENT_OFFSET] + table[NUMEL])[:-1]
        first = numpy.flatnonzero(numpy.concatenate(([True], ~continues)))
        numel = numpy.add.reduceat(table[NUMEL], first)
        made = table[:, first]
        made[NUMEL] = numel
        return Copies(made, self.records, self.buffers, self.types)

    def runs(self) -> Iterator[Copies]:
        """The same without rows, a portion at a time: what has many rows is taken apart as it is needed."""
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
            for at in range(0, int(ends[stop - 1]) - begin, _PORTION):
                yield self._runs(first, stop, at, min(at + _PORTION, int(ends[stop - 1]) - begin))
            first = stop

    def _runs(self, first: int, stop: int, begin: int, end: int) -> Copies:
        """Of the copies [first, stop), the runs [begin, end)."""
        table = self.table[:, first:stop]
        ends = numpy.cumsum(table[ROWS] * table[PLANES])
        numbers = numpy.arange(begin, end, dtype=numpy.int64)
        which = numpy.searchsorted(ends, numbers, side="right")
        plane, row = numpy.divmod(numbers - (ends - table[ROWS] * table[PLANES])[which], table[ROWS][which])
        made = table[:, which]
        made[BYTE_OFFSET] += plane * made[PLANE_BYTES] + row * made[ROW_BYTES]
        made[ELEMENT_OFFSET] += plane * made[PLANE_ELEMENTS] + row * made[ROW_ELEMENTS]
        made[ROWS:] = numpy.array(_ALONE * 2, dtype=numpy.int64)[:, None]
        return Copies(made, self.records, self.buffers, self.types)

    def cut(self, chunk_nbytes: int) -> Copies:
        """Of copies without rows, the same in pieces of at most `chunk_nbytes` bytes (at least one element)."""
        table = self.table
        step = numpy.maximum(1, chunk_nbytes // self.itemsizes)
        pieces = -(-table[NUMEL] // step)
        if not len(self) or bool((pieces == 1).all()):
            return self
        which = numpy.repeat(numpy.arange(len(self)), pieces)
        number = numpy.arange(len(which)) - numpy.repeat(numpy.cumsum(pieces) - pieces, pieces)
        made, at = table[:, which], number * step[which]
        made[BYTE_OFFSET] += at * self.itemsizes[which]
        made[ELEMENT_OFFSET] += at
        made[NUMEL] = numpy.minimum(step[which], made[NUMEL] - at)
        return Copies(made, self.records, self.buffers, self.types)


_ALONE = (1, 0, 0)


def _steps(rows: Sequence[Rows], itemsize: int) -> tuple[int, int, int]:
    return (rows[0].times, rows[0].first_step * itemsize, rows[0].second_step) if rows else _ALONE


def _used(numbers: Column) -> list[int]:
    """The numbers that occur, in order; they are small."""
    used: list[int] = numpy.flatnonzero(numpy.bincount(numbers)).tolist()
    return used


def _ranks(names: Sequence[str], numbers: Column) -> Column:
    """For each number of a name its place among all names that are used, in order."""
    used, which = numpy.unique(numbers, return_inverse=True)
    named = [names[number] for number in used.tolist()]
    places = {name: place for place, name in enumerate(sorted(set(named)))}
    return numpy.array([places[name] for name in named], dtype=numpy.int64)[which]


def total(values: Column) -> int:
    """Their exact sum, which may be larger than each can be."""
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())


class Numbers(dict[T, int]):
    """A number for each value, in the order in which they were first asked for."""

    def __missing__(self, value: T) -> int:
        self[value] = len(self)
        return self[value]


def coalesce(copies: Iterable[Copy]) -> Copies:
    """The same copies, ordered by (file, offset), adjacent ones joined into one."""
    return Copies.of(copies).in_order().joined()
