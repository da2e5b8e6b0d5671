"""How an offline tool works, and what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds_reshard.errors import ConfigError
from ds_reshard.formats.zero.target import FORMATS as ZERO_FORMATS
from ds_reshard.formats.zero.weights_target import WEIGHTS

UNIVERSAL = "universal"
FORMATS = (*ZERO_FORMATS, UNIVERSAL, *WEIGHTS)
Progress = Callable[[int, int], None]
"""Is told the bytes that are written, or read, so far, and in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a conversion works: `memory_nbytes` bounds its buffers, `shard` is (number, of how many)."""

    threads: int = 4
    memory_nbytes: int = 256 << 20
    shard: tuple[int, int] = (0, 1)
    resume: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a conversion did: `complete` is false where other shards of it are still to be written."""

    out: str
    files: int
    bytes_read: int
    bytes_written: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a tool reads that writes nothing: `memory_nbytes` bounds its buffers."""

    threads: int = 4
    memory_nbytes: int = 256 << 20


def refuse_memory(threads: int, memory_nbytes: int) -> None:
    """Raise ConfigError for memory that is too little for the threads."""
    if memory_nbytes < threads << 20:
        mend = f"--memory {threads}, or --threads {max(1, memory_nbytes >> 20)}"
        raise ConfigError(f"--memory: {memory_nbytes >> 20} MiB is too little for {threads} threads; {mend}")
