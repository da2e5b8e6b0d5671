"""Open files that threads share, and what is said of a file that cannot be read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from ds_reshard.errors import CheckpointDamaged, Fault, ReadFailed
from ds_reshard.execution.ports import Outcome


class OpenFiles:
    """File descriptors by path, each closed when its last reader is done; `paths` names one for each reader."""

    def __init__(self, paths: Iterable[str], outcome: Outcome) -> None:
        self._left: dict[str, int] = {}
        for path in paths:
            self._left[path] = self._left.get(path, 0) + 1
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()
        self._outcome = outcome

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def acquire(self, path: str) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY)
                self._outcome.files_opened += 1
            return self._open[path]

    def release(self, path: str) -> None:
        with self._lock:
            self._left[path] -= 1
            if not self._left[path] and path in self._open:
                os.close(self._open.pop(path))


def read_at(fd: int, view: memoryview, byte_offset: int) -> tuple[int, int]:
    """Fill the view from the file, or as much as it has; the bytes and the calls. Raises OSError."""
    done = calls = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], byte_offset + done)
        calls += 1
        if not got:
            break
        done += got
    return done, calls


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
