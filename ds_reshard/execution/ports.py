"""What an executor is, and what it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ds_reshard.errors import Fault
from ds_reshard.model.codec import ElementType
from ds_reshard.model.index import Record
from ds_reshard.planning.plan import Plan


class Target(Protocol):
    """A flat buffer of the rank that bytes are moved into; offsets and lengths count elements."""

    def view(self, element_offset: int, numel: int, dtype: ElementType) -> memoryview | None:
        """Writable bytes of these elements; None when they must be stored through `store` instead
        (memory of another device, another element type, not contiguous)."""

    def store(self, element_offset: int, data: memoryview, dtype: ElementType) -> None:
        """Write elements of `dtype`, cast to the buffer's own type as torch casts."""

    def zero(self, element_offset: int, numel: int) -> None:
        """Write zeros."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Slice:
    """Bytes of a record that were read, and their crc32; `byte_offset` counts from the record's start."""

    byte_offset: int
    nbytes: int
    crc32: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one rank read. `faults` are I/O errors: the targets are then not to be trusted."""

    slices: dict[Record, list[Slice]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    bytes_read: int = 0
    read_calls: int = 0
    files_opened: int = 0


class Executor(Protocol):
    """Carries out a plan: every copy, fill and check once; returns when all bytes are in place.

    Faults are collected, not raised, so that a rank which cannot read its bytes still takes part in the
    collective that follows. Scratch memory stays within the budget that the executor was made with.
    """

    def execute(self, plan: Plan, targets: Mapping[str, Target]) -> Outcome: ...
