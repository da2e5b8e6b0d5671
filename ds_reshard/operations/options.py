"""How an offline tool works, and what it did."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ds_reshard.errors import ConfigError
from ds_reshard.formats.zero.target import FORMATS as ZERO_FORMATS
from ds_reshard.formats.zero.weights_target import DTYPES, WEIGHTS

UNIVERSAL = "universal"
NANOTRON = "nanotron"
FSDP = "fsdp"
DCP, ACCELERATE = "dcp", "accelerate"
FORMATS = (*ZERO_FORMATS, UNIVERSAL, *WEIGHTS, DCP, ACCELERATE, NANOTRON, FSDP)
THREADS = min(4, os.cpu_count() or 1)
Progress = Callable[[int, int], None]
"""Is told the bytes that are written, or read, so far, and in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a conversion is to write; None is as it was saved.

    `tp`, `pp`, `zero_stage` and `like`, a checkpoint that shows how the coming run arranges its model, are of nanotron;
    `names` is the path of a map of parameters' names, between nanotron and DeepSpeed.
    """

    to: str
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    zero_stage: int | None = None
    like: str | None = None
    sub_group_size: int | None = None
    dtype: str | None = None
    names: str | None = None

    def refuse(self) -> None:
        """Raise ConfigError for a format that is none, or an argument that it has not."""
        if self.to not in FORMATS:
            raise ConfigError(f"{self.to!r} is no format: --to {' | '.join(FORMATS)}")
        if self.dp is not None and self.to == UNIVERSAL:
            raise ConfigError("--dp: a universal checkpoint is loaded at any size; leave it out")
        if self.dp is not None and self.to in WEIGHTS:
            raise ConfigError(f"--dp: --to {self.to} writes whole tensors; leave it out")
        if self.dtype is not None and (self.to not in WEIGHTS or self.dtype not in DTYPES):
            raise ConfigError(f"--dtype {self.dtype}: takes {' | '.join(DTYPES)}, with --to {' | '.join(WEIGHTS)}")
        if self.sub_group_size is not None and self.to != "zero3":
            raise ConfigError(f"--sub-group-size: {self.to} has no sub-groups; leave it out, or --to zero3")
        nanotron = {"--tp": self.tp, "--pp": self.pp, "--zero-stage": self.zero_stage, "--like": self.like}
        given = [name for name, value in nanotron.items() if value is not None]
        if given and self.to != NANOTRON:
            raise ConfigError(f"{', '.join(given)}: {self.to} has no such size; leave it out, or --to {NANOTRON}")
        if self.zero_stage not in (None, 0, 1):
            raise ConfigError(f"--zero-stage {self.zero_stage}: nanotron has the stages 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a conversion works: `memory_nbytes` bounds its buffers, `shard` is (number, of how many)."""

    threads: int = THREADS
    memory_nbytes: int = 256 << 20
    shard: tuple[int, int] = (0, 1)
    resume: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a conversion did: `complete` is false where other shards of it are still to be written.

    `notes` is what could not be carried over as it was, or is to be minded in the coming run.
    """

    out: str
    files: int
    bytes_read: int
    bytes_written: int
    complete: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a tool reads that writes nothing: `memory_nbytes` bounds its buffers.

    `device` is where values are computed, "auto", "cpu" or "cuda"; "auto" is the host.
    """

    threads: int = THREADS
    memory_nbytes: int = 256 << 20
    device: str = "auto"


def refuse_memory(threads: int, memory_nbytes: int) -> None:
    """Raise ConfigError for memory that is too little for the threads."""
    if memory_nbytes < threads << 20:
        mend = f"--memory {threads}, or --threads {max(1, memory_nbytes >> 20)}"
        raise ConfigError(f"--memory: {memory_nbytes >> 20} MiB is too little for {threads} threads; {mend}")
