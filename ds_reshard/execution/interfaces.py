"""What an executor is, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from ds_reshard.errors import CheckpointDamaged, Fault, ReadFailed
from ds_reshard.model.index import Record
from ds_reshard.model.records import ElementType

if TYPE_CHECKING:
    from ds_reshard.planning.copies import Copy
    from ds_reshard.planning.plan import Plan

Saw: TypeAlias = "Callable[[Sequence[Copy], Sequence[memoryview]], None]"
"""Takes copies that were read, and the bytes of each."""


class Strides(NamedTuple):
    """How rows of `numel` elements lie in a buffer: `step` elements apart, their elements `spread` elements apart."""

    numel: int
    step: int
    spread: int

    def reach(self, numel: int) -> int:
        """Return the number of elements of the buffer from the first to the last of `numel` elements."""
        return (numel // self.numel - 1) * self.step + (self.numel - 1) * self.spread + 1


class Target(Protocol):
    """A flat buffer of the rank that bytes are moved into; offsets and lengths count elements."""

    def view(self, element_offset: int, numel: int, dtype: ElementType) -> memoryview | None:
        """Writable bytes of these elements; None when they must be stored through `store` instead
        (memory of another device, another element type, not contiguous)."""

    def store(self, element_offset: int, data: memoryview, dtype: ElementType) -> None:
        """Write elements of `dtype`, cast to the buffer's own type as torch casts."""

    def scatter(self, element_offset: int, data: memoryview, dtype: ElementType, strides: Strides) -> None:
        """Write rows of elements that lie apart in the buffer, as `store` writes those that lie together."""

    def zero(self, element_offset: int, numel: int) -> None:
        """Write zeros."""


class Slice(NamedTuple):
    """Bytes of a record that were read, and their crc32; `byte_offset` counts from the record's start.

    With `times`, that many rows of `nbytes` bytes, each `step` bytes behind the row before it. `crc32` is then the
    exclusive or of what each row contributes to the crc32 of all bytes up to the end of the last row.
    """

    byte_offset: int
    nbytes: int
    crc32: int
    times: int = 1
    step: int = 0

    @property
    def end(self) -> int:
        """The byte behind the last row."""
        return self.byte_offset + (self.times - 1) * self.step + self.nbytes


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one rank read. `faults` are I/O errors: the targets are then not to be trusted.

    `bytes_read` are those that the plan names; the few that were read along between them are not counted.
    """

    slices: dict[Record, list[Slice]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    bytes_read: int = 0

    def add(self, other: Outcome) -> None:
        """Count what another execution has read as well."""
        for record, slices in other.slices.items():
            self.slices.setdefault(record, []).extend(slices)
        self.faults += other.faults
        self.bytes_read += other.bytes_read


class Executor(Protocol):
    """Carries out a plan: every copy, fill and check once; returns when all bytes are in place.

    Faults are collected, not raised, so that a rank which cannot read its bytes still takes part in the
    collective that follows. Scratch memory stays within the budget that the executor was made with.
    """

    @property
    def nbytes_read(self) -> int:
        """How much was read so far; another thread may ask."""

    def execute(self, plan: Plan, targets: Mapping[str, Target]) -> Outcome: ...


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
