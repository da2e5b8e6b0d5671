"""Plan: the copies, fills and checks that bring one rank's buffers to the state that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_reshard.model.codec import ElementType
from ds_reshard.model.index import Record


class Copy(NamedTuple):
    """`numel` elements from a file to a buffer of the rank.

    `byte_offset` counts from the start of the file, `element_offset` from the start of the buffer;
    source and target elements may differ in type (they are then cast as torch casts).
    """

    record: Record
    byte_offset: int
    numel: int
    dtype: ElementType
    buffer: str
    element_offset: int
    target_dtype: ElementType

    @property
    def path(self) -> str:
        return self.record.path

    @property
    def nbytes(self) -> int:
        """Bytes read from the file."""
        return self.numel * self.dtype.itemsize


class Fill(NamedTuple):
    """Elements [element_offset, element_offset + numel) of a buffer that no tensor covers: zeroed."""

    buffer: str
    element_offset: int
    numel: int


class Check(NamedTuple):
    """Bytes that nobody wants, in a record that is otherwise read: read only for the record's checksum."""

    record: Record
    byte_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One rank's work. Copies and checks are ordered by file and offset."""

    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...] = ()
    checks: tuple[Check, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that the plan reads from files."""
        return sum(c.nbytes for c in self.copies) + sum(c.nbytes for c in self.checks)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted({c.record.path for c in self.copies} | {c.record.path for c in self.checks}))

    def to_json(self) -> dict[str, object]:
        """The plan as plain JSON values."""

        def rows(items: Sequence[Copy | Fill | Check]) -> list[dict[str, object]]:
            return [{name: _plain(value) for name, value in item._asdict().items()} for item in items]

        return {"copies": rows(self.copies), "fills": rows(self.fills), "checks": rows(self.checks)}


def _plain(value: object) -> object:
    if isinstance(value, Record):
        return value._asdict()
    return value.label if isinstance(value, ElementType) else value
