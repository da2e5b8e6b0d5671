"""How an offline tool works, and what it did."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

from ds_reshard.errors import ConfigError
from ds_reshard.model.target import DTYPES, WEIGHTS, ConversionRequest
from ds_reshard.operations.formats import FORMATS as TABLE
from ds_reshard.operations.formats import WRITERS

FORMATS = tuple(WRITERS)
MOST_RANKS = 1 << 17
"""More than any run has: a conversion makes files for each, and a plan of each."""
THREADS = min(4, os.cpu_count() or 1)
_RANKED = ("zero1", "zero2", "zero3", "bf16", "nanotron", "megatron-torch")
"""The formats whose files are of ranks along several axes."""
Progress = Callable[[int, int], None]
"""Is told the bytes that are written, or read, so far, and in all."""


def refuse(asked: ConversionRequest) -> None:
    """Raise ConfigError for a format that is none, or an argument that it has not."""
    if asked.to not in FORMATS:
        raise ConfigError(f"{asked.to!r} is no format: --to {' | '.join(FORMATS)}")
    if asked.dp is not None and not any(asked.to in one.sized for one in TABLE):
        raise ConfigError(f"--dp: --to {asked.to} writes whole tensors, which are loaded at any size; leave it out")
    ranks = prod(size or 1 for size in (asked.dp, asked.tp, asked.pp))
    if ranks > MOST_RANKS:
        raise ConfigError(
            f"--dp: {ranks} ranks, each with files of its own, are more than a run has; correct the number"
        )
    if asked.dtype is not None and (asked.to not in WEIGHTS or asked.dtype not in DTYPES):
        raise ConfigError(f"--dtype {asked.dtype}: takes {' | '.join(DTYPES)}, with --to {' | '.join(WEIGHTS)}")
    if asked.sub_group_size is not None and asked.to != "zero3":
        raise ConfigError(f"--sub-group-size: {asked.to} has no sub-groups; leave it out, or --to zero3")
    for name, (value, formats) in _of_formats(asked).items():
        if value is not None and asked.to not in formats:
            raise ConfigError(f"{name}: {asked.to} has no such option; leave it out, or --to {' | '.join(formats)}")
    if asked.zero_stage not in (None, 0, 1):
        raise ConfigError(f"--zero-stage {asked.zero_stage}: nanotron has the stages 0 and 1")


def _of_formats(asked: ConversionRequest) -> dict[str, tuple[object, tuple[str, ...]]]:
    """The arguments that few formats have, with these."""
    return {
        "--tp": (asked.tp, _RANKED),
        "--pp": (asked.pp, _RANKED),
        "--ep": (asked.ep, ("zero1", "zero2", "bf16", "megatron", "megatron-torch")),
        "--repair": (asked.repair or None, ("megatron",)),
        "--zero-stage": (asked.zero_stage, ("nanotron",)),
        "--like": (asked.like, (*_RANKED, "megatron")),
    }


T = TypeVar("T", bound="_Work")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """How a tool works: `memory_nbytes` bounds its buffers.

    What is large is read or written by `processes` copies of this process, made by fork, which share threads and
    memory; leave it at one in a process that runs threads of its own. With `ranks` every rank of the process group
    calls the tool and does a part; all are given the whole answer.
    """

    threads: int = THREADS
    processes: int = 1
    memory_nbytes: int = 256 << 20
    ranks: bool = False

    def divided(self: T, copies: int) -> T:
        """Return the same for one of several copies of the process, with its share of threads and memory."""
        threads, memory_nbytes = max(1, self.threads // copies), self.memory_nbytes // copies
        return replace(self, threads=threads, memory_nbytes=memory_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(_Work):
    """How a conversion works: `shard` is (number, of how many)."""

    shard: tuple[int, int] = (0, 1)
    resume: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(_Work):
    """How a tool reads that writes nothing; `device` is where values are computed: "auto" (the host), "cpu", "cuda"."""

    device: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a conversion did: `complete` is false where other shards of it are still to be written.

    `notes` is what could not be carried over as it was, or is to be minded in the coming run. `written_by_rank` has the
    part of each rank of `bytes_written`.
    """

    out: str
    files: int
    bytes_read: int
    bytes_written: int
    complete: bool
    notes: tuple[str, ...] = ()
    written_by_rank: tuple[int, ...] = ()


def refuse_memory(threads: int, memory_nbytes: int) -> None:
    """Raise ConfigError for memory that is too little for the threads."""
    if memory_nbytes < threads << 20:
        mend = f"--memory {threads}, or --threads {max(1, memory_nbytes >> 20)}"
        raise ConfigError(f"--memory: {memory_nbytes >> 20} MiB is too little for {threads} threads; {mend}")
