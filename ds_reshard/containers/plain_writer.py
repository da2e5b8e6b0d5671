"""A file whose bytes are all known: the text files of a checkpoint, written with the same care as the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ds_reshard.containers.torch_zip_writer import Member
from ds_reshard.model.records import StorageRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPlan:
    """A file of `data`; it has no storages."""

    data: bytes
    storages: Mapping[str, StorageRecord] = field(default_factory=dict)
    places: Mapping[str, Member] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def parts(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """All bytes, each with its offset."""
        yield 0, self.data
