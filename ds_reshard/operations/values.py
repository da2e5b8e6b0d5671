"""Tensors of any size in spans of bounded memory, and their values looked at: what no run would have saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ds_reshard.errors import CheckpointDamaged, Fault, raise_faults
from ds_reshard.execution.buffers import TensorTarget, torch_dtype
from ds_reshard.execution.checksums import Ledger
from ds_reshard.execution.deviation import as_bits, same_bits, shown
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.index import Extent, Index, extent_of
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Box, Region, Run
from ds_reshard.operations.archives import read_records
from ds_reshard.operations.options import Reading
from ds_reshard.planning.copies import Copy, coalesce
from ds_reshard.planning.plan import Plan, copy_of

# Small enough that values are still in a cache when they are looked at.
_UNIT_NBYTES = 16 << 20
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One tensor that can be read in spans; `locate(start, stop)` yields runs of a span and the buffers they are in.

    `identity` is equal for two columns of the same bytes.
    """

    dtype: ElementType
    shape: tuple[int, ...]
    locate: Callable[[int, int], Iterator[tuple[Extent, Run]]]
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

    def locate(start: int, stop: int) -> Iterator[tuple[Extent, Run]]:
        for _, extent, run in index.runs(key, Region(box=box, start=start, stop=stop)):
            yield extent, run
        raise_faults(index.faults, subject="reading tensors")

    identity: object = key
    if placement.replicated and placement.numel:
        identity = (index.open(placement.family, 0).get(placement.buffer), placement.cut)
    return Column(dtype=placement.dtype, shape=placement.shape, locate=locate, identity=identity)


def stored(tensor: TensorRecord) -> Column:
    """A row-major tensor of one file, which no layout names."""
    extent = extent_of(tensor)

    def locate(start: int, stop: int) -> Iterator[tuple[Extent, Run]]:
        yield extent, Run(0, start, stop - start)

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


def read_spans(
    rows: Sequence[tuple[Column, ...]],
    ledger: Ledger | None = None,
    *,
    threads: int = 1,
    memory_nbytes: int = 64 << 20,
    told: Callable[[int], None] | None = None,
) -> Iterator[Span]:
    """Yield every element of rows of columns, in order; the columns of a row have one number of elements.

    What was read is noted in `ledger`, and `told` is called with the bytes so far. Raises ReadFailed or
    CheckpointDamaged where bytes cannot be read.
    """
    ledger = Ledger() if ledger is None else ledger
    executor = ThreadExecutor(threads=threads, memory_nbytes=memory_nbytes, checksum=True)
    memory = torch.empty(0, dtype=torch.uint8)  # the same for every unit: pages that were touched cost nothing
    for unit in _units(rows, min(_UNIT_NBYTES, memory_nbytes // 2)):  # as much again for what is computed of values
        copies: list[Copy] = []
        targets: dict[str, TensorTarget] = {}
        spans, used = [], 0
        sizes = [(stop - start) * column.dtype.itemsize for row, start, stop in unit for column in rows[row]]
        if memory.numel() < (nbytes := sum(map(_aligned, sizes))):
            memory = torch.empty(nbytes, dtype=torch.uint8)
        for row, start, stop in unit:
            values = []
            for number, column in enumerate(rows[row]):
                buffer = f"{row}/{number}/{start}"
                nbytes = (stop - start) * column.dtype.itemsize
                values.append(memory[used : used + nbytes].view(torch_dtype(column.dtype)))
                used += _aligned(nbytes)
                targets[buffer] = TensorTarget(values[-1])
                for extent, run in column.locate(start, stop):
                    copies.append(copy_of(extent, run, buffer, 0, column.dtype))
            spans.append(Span(row=row, start=start, stop=stop, values=tuple(values)))
        outcome = executor.execute(Plan(copies=coalesce(copies)), targets)
        ledger.add(outcome)
        raise_faults(outcome.faults, subject="reading tensors")
        if told is not None:
            told(ledger.bytes_read)
        yield from spans


def _units(rows: Sequence[tuple[Column, ...]], unit_nbytes: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield lists of row, start and stop, whose elements are read together."""
    unit: list[tuple[int, int, int]] = []
    nbytes = 0
    for row, columns in enumerate(rows):
        each = sum(column.dtype.itemsize for column in columns)
        at, numel = 0, columns[0].numel
        while at < numel:
            take = min(numel - at, max(1, (unit_nbytes - nbytes) // each))
            unit.append((row, at, at + take))
            at, nbytes = at + take, nbytes + take * each
            if nbytes + each > unit_nbytes:
                yield unit
                unit, nbytes = [], 0
    if unit:
        yield unit


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def largest_values(index: Index, keys: Sequence[TensorKey], reading: Reading) -> dict[TensorKey, float]:
    """Return the largest absolute value of each tensor: NaN if it has a NaN.

    The records that hold them are read whole. Raises ReadFailed or CheckpointDamaged if one is not what was written.
    """
    found, ledger = dict.fromkeys(keys, 0.0), Ledger()
    rows = [(logical(index, key),) for key in keys]
    for span in read_spans(rows, ledger, threads=reading.threads, memory_nbytes=reading.memory_nbytes):
        (values,) = span.values
        if not values.is_complex():
            values = values.double()
        largest, before = float(values.abs().max()), found[keys[span.row]]
        found[keys[span.row]] = before if math.isnan(before) or before > largest else largest
    subject = "reading padding"
    read_records(sorted(ledger.slices), ledger, reading, progress=None, subject=subject)
    raise_faults([*ledger.faults, *ledger.mismatches()], subject=subject)
    return found


# Means of squares, and sums of them: of Adam and its kin, Adagrad, RMSprop and Adadelta.
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta"})
_MEND = "load another tag: what is saved goes on from there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A tensor to be looked at, and beside it one that it is compared with: `beside` says how.

    "cast": the 16-bit weight of these masters; "tied": the other name of the same parameter.
    """

    key: TensorKey
    columns: tuple[Column, ...]
    beside: str = ""
    buffer: bool = False


@dataclass(slots=True, kw_only=True)
class _Bad:
    count: int
    first: int
    value: str


def rows_of(source: Checkpoint) -> list[Row]:
    """Every tensor of a checkpoint, its bytes once; masters and their weights side by side."""
    index, layout = source.index, source.index.layout
    columns = {key: logical(index, key) for key, placement in layout.placements.items() if placement.numel}
    rows: list[Row] = []
    masters = {key: TensorKey(name=key.name, kind="weight") for key in columns if key.kind == "fp32"}
    beside = {
        key: columns[weight]
        for key, weight in masters.items()
        if weight in columns and columns[weight].shape == columns[key].shape
    }
    seen = {column.identity for column in beside.values()}
    for key, column in columns.items():
        owner = TensorKey(name=source.shared.get(key.name, key.name), kind=key.kind)
        if column.identity in seen:
            continue
        seen.add(column.identity)
        if key in beside:
            rows.append(Row(key=key, columns=(column, beside[key]), beside="cast"))
        elif owner != key and owner in columns and columns[owner].identity != column.identity:
            rows.append(Row(key=key, columns=(column, columns[owner]), beside="tied"))
        else:
            rows.append(Row(key=key, columns=(column,), buffer=key.name in source.buffer_names))
    for key, tensor in source.unnamed_tensors():
        if tensor.numel and tensor.contiguous:
            rows.append(Row(key=key, columns=(stored(tensor),)))
    return rows


Bad = dict[tuple[int, int, str], _Bad]
"""What is wrong with a column of a row, by the numbers of both."""


class Values:
    """What was found in the spans of `rows`, which are looked at in any order."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self.bad: Bad = {}

    def look(self, span: Span) -> None:
        row = self._rows[span.row]
        for column, values in enumerate(span.values):
            if values.dtype.is_floating_point or values.dtype.is_complex:
                wide = values.float() if values.element_size() == 1 else values
                if not bool(torch.isfinite(wide.sum())):
                    self._note(span, column, "is not finite", ~torch.isfinite(wide))
                if row.key.kind in _SQUARES and not column and not bool(wide.min() >= 0):
                    self._note(span, column, "is below zero", wide < 0)
        if row.beside == "cast":
            master, weight = span.values
            cast = master.to(weight.dtype)
            if not same_bits(cast, weight):
                self._note(span, 1, "differs", (cast != weight) & ~(cast.isnan() & weight.isnan()))
        elif row.beside == "tied":
            one, other = span.values
            if one.dtype != other.dtype:
                self._note(span, 1, "differs", torch.ones(one.numel(), dtype=torch.bool))
            elif not same_bits(one, other):
                self._note(span, 1, "differs", (as_bits(one) != as_bits(other)).any(-1))

    def _note(self, span: Span, column: int, what: str, where: torch.Tensor) -> None:
        count = int(where.sum())
        if not count:
            return
        first = int(where.nonzero()[0])
        if (span.row, column, what) not in self.bad:
            value = shown(span.values[column][first])
            self.bad[span.row, column, what] = _Bad(count=0, first=span.start + first, value=value)
        self.bad[span.row, column, what].count += count

    def faults(self) -> tuple[list[Fault], list[str]]:
        """All that was found, and what is told but is no fault."""
        faults, notes = [], []
        uncast = []
        for (number, column, what), bad in sorted(self.bad.items(), key=lambda item: item[0]):
            row = self._rows[number]
            if what == "differs" and row.beside == "cast":
                uncast.append(self._uncast(row, bad))
                continue
            kind = "weight" if column and row.beside == "cast" else row.key.kind
            fault = _fault(f"{row.key.name}[{kind}]", row.columns[column], bad, what, tied=row.beside == "tied")
            if row.buffer:
                notes.append(f"{fault.line()}: a buffer, which may be meant so")
            else:
                faults.append(fault)
        compared = sum(row.beside == "cast" for row in self._rows)
        if uncast and len(uncast) == compared:
            notes.append(
                f"none of the {compared} weights is the cast of its fp32 master, as after every step of a run: they "
                "were edited or averaged, or are of another step; a resume with the hooks refuses them"
            )
            uncast = []
        return [*faults, *uncast], notes

    def _uncast(self, row: Row, bad: _Bad) -> Fault:
        return CheckpointDamaged.fault(
            f"{row.key.name}[weight]",
            f"{bad.count} of {row.columns[1].numel} elements are not the cast of their fp32 masters, as those of "
            "other weights are",
            "the cast of the master",
            _at(row.columns[1], bad),
            mend="restore all files of one save, or load another tag",
        )


def _fault(where: str, column: Column, bad: _Bad, what: str, *, tied: bool) -> Fault:
    said = {
        "is not finite": ("are not finite", "numbers"),
        "is below zero": ("are below zero, where squares are summed up", "zero or more"),
        "differs": ("differ from those of the parameter that it is tied to", "the same bits"),
    }
    text, expected = said[what]
    return CheckpointDamaged.fault(
        where,
        f"{bad.count} of {column.numel} elements {text}",
        expected,
        _at(column, bad),
        mend="restore the model file from a copy: which of the two is right, no file says" if tied else _MEND,
    )


def _at(column: Column, bad: _Bad) -> str:
    return f"{bad.value} at {list(index_of(bad.first, column.shape))}"


def index_of(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index in each dimension of a row-major tensor's element."""
    index: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))
