"""What a conversion would read and write, as plain values that can be drawn, printed or written as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """The files of one target rank (or of one part of a universal checkpoint), which are written together.

    `reads` gives the bytes that are read from each source file, headers apart.
    """

    family: str
    shard: int
    files: tuple[str, ...]
    bytes_written: int
    reads: Mapping[str, int]

    @property
    def name(self) -> str:
        return f"{self.family} {self.shard}"

    @property
    def bytes_read(self) -> int:
        return sum(self.reads.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """All of it, or the part `shard` (number, of how many).

    `sources` are the source's files with their sizes, in the order of their families and ranks.
    `buffer_nbytes` is the most that the buffers of a conversion with these threads take at once; `seconds` the time
    to read and write at `bandwidth` bytes per second. `metadata_nbytes` were read to make the plan, None where the
    system does not count it.
    """

    folder: str
    to: str
    dp: int
    sources: Mapping[str, int]
    units: tuple[UnitPlan, ...]
    buffer_nbytes: int
    bandwidth: float
    shard: tuple[int, int] = (0, 1)
    metadata_nbytes: int | None = None

    @property
    def bytes_read(self) -> int:
        return sum(unit.bytes_read for unit in self.units)

    @property
    def bytes_written(self) -> int:
        return sum(unit.bytes_written for unit in self.units)

    @property
    def seconds(self) -> float:
        return (self.bytes_read + self.bytes_written) / self.bandwidth

    def to_json(self) -> dict[str, object]:
        """The same as JSON values."""
        units = [
            {**asdict(unit), "bytes_read": unit.bytes_read, "files_opened": len(unit.reads)} for unit in self.units
        ]
        return {
            "folder": self.folder,
            "to": self.to,
            "dp": self.dp,
            "shard": list(self.shard),
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "files_written": sum(len(unit.files) for unit in self.units),
            "buffer_nbytes": self.buffer_nbytes,
            "bandwidth": self.bandwidth,
            "seconds": self.seconds,
            "metadata_nbytes": self.metadata_nbytes,
            "sources": dict(self.sources),
            "units": units,
        }
