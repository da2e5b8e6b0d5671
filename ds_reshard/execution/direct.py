"""Bytes that go from a file straight to a device, past the memory of the host (GPUDirect Storage).

Only bytes that nobody wants to see on the host can go that way: a checksum is taken there.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Protocol

import torch

_TRIED = 4


class DirectFiles(Protocol):
    """Reads files into the memory of a device, from several threads; close it when they have ended."""

    def read(self, path: str, into: torch.Tensor, byte_offset: int) -> int:
        """Fill `into`, of one byte an element, and return how many bytes there were.

        Raises OSError, RuntimeError, TypeError or ValueError where it cannot.
        """

    def close(self) -> None: ...


class CuFile(Protocol):
    """What is used of kvikio's class of that name."""

    def raw_read(self, buf: torch.Tensor, size: int, file_offset: int) -> int: ...

    def close(self) -> None: ...


class KvikioFiles:
    """Files that kvikio opens; each thread keeps the one open that it has read last.

    `raw_read` reads in the thread that calls it; `read` goes through a pool, of one thread by default
    (python/kvikio/kvikio/cufile.py, kvikio 26.10).
    """

    def __init__(self, opening: Callable[[str], CuFile]) -> None:
        self._opening = opening
        self._held: dict[int, tuple[str, CuFile]] = {}

    def read(self, path: str, into: torch.Tensor, byte_offset: int) -> int:
        thread = threading.get_ident()
        held = self._held.get(thread)
        if held is None or held[0] != path:
            if held is not None:
                del self._held[thread]
                held[1].close()
            held = self._held[thread] = path, self._opening(path)
        return held[1].raw_read(into, into.nbytes, byte_offset)

    def close(self) -> None:
        held, self._held = self._held, {}
        for _, file in held.values():
            file.close()


def kvikio_files() -> KvikioFiles | None:
    """Reading by kvikio, where it can be imported."""
    try:
        return KvikioFiles(importlib.import_module("kvikio").CuFile)
    except (ImportError, OSError, RuntimeError):  # not there, or without libraries that it needs
        return None


class Ways:
    """Which way the next chunk goes: both by turns until each has brought some, then the one that was faster.

    For a chunk that goes through host memory the time of reading counts; the copy to the device is made beside it.
    """

    def __init__(self, direct: bool) -> None:
        self._open = direct
        self._turn = False
        self._seen: dict[bool, list[tuple[int, float]]] = {True: [], False: []}
        self._lock = threading.Lock()

    def next(self) -> bool:
        """Whether the next chunk goes straight to the device."""
        with self._lock:
            if not self._open:
                return False
            self._turn = not self._turn
            if min(map(len, self._seen.values())) < _TRIED:
                return self._turn
            return self._rate(True) > self._rate(False)

    def took(self, direct: bool, nbytes: int, seconds: float) -> None:
        with self._lock:
            if len(self._seen[direct]) < _TRIED:
                self._seen[direct].append((nbytes, seconds))

    def give_up(self) -> None:
        """Send everything through host memory from now on."""
        with self._lock:
            self._open = False

    def _rate(self, direct: bool) -> float:
        seen = self._seen[direct]
        return sum(nbytes for nbytes, _ in seen) / max(sum(seconds for _, seconds in seen), 1e-9)
