"""The values of a checkpoint's tensors looked at: what no run would have saved."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_reshard.errors import CheckpointDamaged, Fault
from ds_reshard.execution.deviation import as_bits, same_bits, shown
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.layout import TensorKey
from ds_reshard.operations.spans import Column, Span, logical, stored

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
    for key, tensor in source.unnamed():
        if tensor.numel and tensor.contiguous:
            rows.append(Row(key=key, columns=(stored(tensor),)))
    return rows


class Values:
    """What was found in the spans of `rows`, which are looked at in any order."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self._bad: dict[tuple[int, str], _Bad] = {}

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
        bad = self._bad.get((span.row, f"{column} {what}"))
        if bad is None:
            value = shown(span.values[column][first])
            bad = self._bad[span.row, f"{column} {what}"] = _Bad(count=0, first=span.start + first, value=value)
        bad.count += count

    def faults(self) -> tuple[list[Fault], list[str]]:
        """All that was found, and what is told but is no fault."""
        faults, notes = [], []
        uncast = []
        for (number, what), bad in sorted(self._bad.items()):
            row = self._rows[number]
            column, what = int(what[0]), what[2:]
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
