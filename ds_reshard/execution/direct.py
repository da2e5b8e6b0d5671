"""Bytes that go from a file straight to a device, past the memory of the host (GPUDirect Storage).

Only bytes that nobody wants to see on the host can go that way: a checksum is taken there. So the first chunks are read
both ways before the device is relied on: they must be the same, and come sooner.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ds_reshard.execution.buffers import memory_of
from ds_reshard.execution.chunks import Chunk
from ds_reshard.execution.reading import read_at

_TRIED = 4


class DirectFiles(Protocol):
    """Reads files into the memory of a device, from several threads; close it when they have ended."""

    @property
    def files_opened(self) -> int: ...

    def read(self, path: str, into: torch.Tensor, byte_offset: int) -> int:
        """Fill `into`, of one byte an element, and return how many bytes there were; any Exception where it cannot."""

    def close(self) -> None: ...


class CuFile(Protocol):
    """What is used of kvikio's class of that name."""

    def raw_read(self, buf: torch.Tensor, size: int, file_offset: int) -> int: ...

    def close(self) -> None: ...


class KvikioFiles:
    """Files that kvikio opens; each thread keeps the one open that it has read last.

    `raw_read` reads in the thread that calls it, and in the device's context that this thread has; `read` goes through
    a pool, of one thread by default (python/kvikio/kvikio/cufile.py and cpp/src/file_handle.cpp, kvikio 26.10).
    """

    def __init__(self, opening: Callable[[str], CuFile]) -> None:
        self._opening = opening
        self._held: dict[int, tuple[str, CuFile]] = {}
        self.files_opened = 0

    def read(self, path: str, into: torch.Tensor, byte_offset: int) -> int:
        thread = threading.get_ident()
        held = self._held.get(thread)
        if held is None or held[0] != path:
            if held is not None:
                del self._held[thread]
                held[1].close()
            elif into.is_cuda:
                torch.cuda.current_stream(into.device).synchronize()  # gives a new thread its context
            held = self._held[thread] = path, self._opening(path)
            self.files_opened += 1
        return held[1].raw_read(into, into.nbytes, byte_offset)

    def close(self) -> None:
        held, self._held = self._held, {}
        for _, file in held.values():
            file.close()


def kvikio_files() -> KvikioFiles | None:
    """Reading by kvikio, where it can be imported."""
    try:
        return KvikioFiles(importlib.import_module("kvikio").CuFile)
    except Exception:  # not there, or without libraries that it needs, which it says in several ways
        return None


def read_chunk(files: DirectFiles, chunk: Chunk, scratch: torch.Tensor) -> bool:
    """Fill the places of a chunk's runs in the device's memory; whether all of it could be read."""
    try:
        return all(
            files.read(run.record.path, scratch[run.position : run.position + run.nbytes], run.byte_offset)
            == run.nbytes
            for run in chunk.runs
        )
    except Exception:  # whatever it is, the host reads the chunk, and says what is wrong with the file
        return False


def is_better(files: DirectFiles, work: Sequence[Chunk], pinned: torch.Tensor, scratch: torch.Tensor) -> bool:
    """Read the first chunks both ways, by turns which first: whether the device has the same bytes, and sooner."""
    spent = {True: 0.0, False: 0.0}
    for number, chunk in enumerate(work[:_TRIED]):
        for direct in (number % 2 == 0, number % 2 == 1):
            began = time.perf_counter()
            if not (read_chunk(files, chunk, scratch) if direct else _read_here(chunk, memory_of(pinned))):
                return False
            spent[direct] += time.perf_counter() - began
        for run in chunk.runs:
            part = slice(run.position, run.position + run.nbytes)
            if not torch.equal(scratch[part].cpu(), pinned[part]):
                return False
    return spent[True] < spent[False]


def _read_here(chunk: Chunk, memory: memoryview) -> bool:
    for run in chunk.runs:
        try:
            fd = os.open(run.record.path, os.O_RDONLY)
            try:
                got, _ = read_at(fd, memory[run.position : run.position + run.nbytes], run.byte_offset)
            finally:
                os.close(fd)
        except OSError:
            return False
        if got < run.nbytes:
            return False
    return True
