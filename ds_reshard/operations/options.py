"""How an offline tool works, and what it did."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, TypedDict, TypeVar

from ds_reshard.errors import ConfigError
from ds_reshard.model.target import DTYPES, WEIGHTS, ConversionRequest
from ds_reshard.operations.formats import FORMATS as TABLE
from ds_reshard.operations.formats import WRITERS

FORMATS = tuple(WRITERS)
MOST_RANKS = 1 << 17
"""More than any run has: a conversion makes files for each, and a plan of each."""
THREADS = min(4, os.cpu_count() or 1)
Progress = Callable[[int, int], None]
"""Is told the bytes that are written, or read, so far, and in all."""


class TargetOptions(TypedDict, total=False):
    """The keywords of `convert` and of `plan`, beside `to`; OPTIONS says which formats have which."""

    dp: int | None
    tp: int | None
    pp: int | None
    ep: int | None
    zero_stage: int | None
    like: str | None
    sub_group_size: int | None
    dtype: str | None
    names: str | None


class TargetOption(NamedTuple):
    """A keyword of `convert` and `plan` that only some formats have, and a flag of the command line.

    Its value is one of `choices`, a number from 1 on (`metavar` N), text, or with `is_switch` true or false.
    """

    name: str
    formats: tuple[str, ...]
    help: str
    metavar: str = "N"
    choices: tuple[str | int, ...] = ()
    is_switch: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def refuse(self, asked: ConversionRequest) -> None:
        """Raise ConfigError if the format has no such option, or does not take its value."""
        value: object = getattr(asked, self.name)
        if value is None or value is False:
            return
        if asked.to not in self.formats:
            what = f"{asked.to} has no such option; leave it out, or --to {' | '.join(self.formats)}"
            if self.name == "dp":
                what = f"--to {asked.to} writes whole tensors, which are loaded at any size; leave it out"
            raise ConfigError(f"{self.flag}: {what}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.flag} {value}: takes {' | '.join(map(str, self.choices))}")


_SIZED = tuple(to for to in FORMATS if any(to in one.sized for one in TABLE))
_RANKED = ("zero1", "zero2", "zero3", "bf16", "nanotron", "megatron-torch")
"""The formats whose files are of ranks along several axes."""
OPTIONS = (
    TargetOption("dp", _SIZED, "data-parallel size, else the saving run's"),
    TargetOption("sub_group_size", ("zero3",), "the coming run's, else the saving run's"),
    TargetOption("dtype", WEIGHTS, "of the weights, else as they were trained", choices=DTYPES),
    TargetOption("tp", _RANKED, "tensor-parallel size"),
    TargetOption("pp", _RANKED, "pipeline-parallel size"),
    TargetOption(
        "ep",
        ("zero1", "zero2", "bf16", "megatron", "megatron-torch"),
        "expert-parallel size, else 1; of megatron from 1 to more or back",
    ),
    TargetOption("repair", ("megatron",), "put back states that Megatron-LM has saved shifted", is_switch=True),
    TargetOption("zero_stage", ("nanotron",), "of the optimizer, else the saving run's", choices=(0, 1)),
    TargetOption(
        "like",
        (*_RANKED, "megatron"),
        "a checkpoint of the coming run, whose sizes, stages, parts and experts are taken",
        metavar="DIR",
    ),
)


def refuse(asked: ConversionRequest) -> None:
    """Raise ConfigError for a format that is none, or an argument that it has not."""
    if asked.to not in FORMATS:
        raise ConfigError(f"{asked.to!r} is no format: --to {' | '.join(FORMATS)}")
    for option in OPTIONS:
        option.refuse(asked)
    ranks = prod(size or 1 for size in (asked.dp, asked.tp, asked.pp))
    if ranks > MOST_RANKS:
        raise ConfigError(
            f"--dp: {ranks} ranks, each with files of its own, are more than a run has; correct the number"
        )


T = TypeVar("T", bound="_Work")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """How a tool works: `memory_nbytes` bounds its buffers.

    Copies of this process, made by fork, read or write large files; `processes` is their number, and they share the
    threads and the memory. Leave it at 1 in a process that runs threads of its own. With `ranks` every rank of the
    process group calls the tool and does a part; all are given the whole answer.
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
