"""A file read at positions: errors of the system told apart from damage, and bytes counted."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ds_reshard.containers.remote import Object, is_url
from ds_reshard.errors import TRY_AGAIN, CheckpointDamaged, CheckpointNotFound, ReadFailed

Opened = int | Object
"""A descriptor, or a file of a store."""
_KEPT_NBYTES = 8 << 10
"""Of a beginning and of an end: an archive is opened by them."""


def opened(path: str) -> Opened:
    """A file to be read in bulk. Raises OSError."""
    return Object(path) if is_url(path) else os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def read_into(file: Opened, views: Sequence[memoryview], offset: int) -> int:
    """Fill views, one behind the other, from an offset on; how many bytes were read, 0 at the end. Raises OSError."""
    if isinstance(file, int):
        return os.preadv(file, views, offset)
    data, at = memoryview(file.fetch(offset, offset + sum(map(len, views)))), 0
    for view in views:
        part = data[at : at + len(view)]
        view[: len(part)] = part
        at += len(part)
    return at


def close(file: Opened) -> None:
    if isinstance(file, int):
        os.close(file)


class PositionedFile:
    """An open file of `nbytes` bytes, or a `part` of one. Close it.

    `part` is the offset and the number of the bytes that are meant; positions then count from its beginning. `whole`
    says that no part is, `far` that a read costs a request.
    Raises CheckpointNotFound, ReadFailed or, when the path is not a regular file or ends before the part does,
    CheckpointDamaged.
    """

    far = False
    whole = False
    _descriptor = -1

    def __init__(self, path: str, part: tuple[int, int] | None = None) -> None:
        self.path = path
        self.whole = part is None
        self._object: Object | None = None
        self._kept: dict[int, bytes] = {}
        try:
            nbytes = self._open(path, part)
        except (FileNotFoundError, NotADirectoryError) as error:
            late = f"; {TRY_AGAIN}" if is_url(path) else ""
            raise CheckpointNotFound(f"{path}: there is no such file{late}") from error
        except (OSError, ValueError) as error:
            self.close()
            raise ReadFailed(f"{path}: cannot be opened: {error}") from error
        self._start, self.nbytes = part if part is not None else (0, nbytes)
        if self._start < 0 or self.nbytes < 0 or self._start + self.nbytes > nbytes:
            self.close()
            raise CheckpointDamaged(
                f"{path}: {self.nbytes} bytes at {self._start} are meant to be there; it ends at {nbytes}"
            )

    def _open(self, path: str, part: tuple[int, int] | None) -> int:
        """Open the file; its bytes."""
        if is_url(path):
            self.far, self._object = True, Object(path, part)
            return self._object.nbytes
        # Non-blocking, because opening a named pipe would otherwise wait for its other end for ever.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointDamaged(f"{path}: not a regular file")
        return status.st_size

    def read(self, byte_offset: int, nbytes: int) -> bytes:
        """Exactly the bytes [byte_offset, byte_offset + nbytes); the first 8 KiB and the last are read once.

        Raises ReadFailed when the system reports an error, CheckpointDamaged when the file ends first.
        """
        stop, last = byte_offset + nbytes, max(0, self.nbytes - _KEPT_NBYTES)
        if not 0 <= byte_offset <= stop <= self.nbytes:
            raise CheckpointDamaged(
                f"{self.path}: {nbytes} bytes at {byte_offset} are meant to be there; it ends at {self.nbytes}"
            )
        if not self.far:
            if stop <= _KEPT_NBYTES:
                return self._window(0)[byte_offset:stop]
            if byte_offset >= last:
                return self._window(last)[byte_offset - last : stop - last]
        return self._exactly(byte_offset, nbytes)

    def _window(self, byte_offset: int) -> bytes:
        if byte_offset not in self._kept:
            self._kept[byte_offset] = self._exactly(byte_offset, min(_KEPT_NBYTES, self.nbytes - byte_offset))
        return self._kept[byte_offset]

    def _exactly(self, byte_offset: int, nbytes: int) -> bytes:
        parts: list[bytes] = []
        while nbytes:
            part = self._some(byte_offset, min(nbytes, 1 << 30))
            if not part:
                raise CheckpointDamaged(
                    f"{self.path}: the file ends at byte {byte_offset}, {nbytes} bytes early: it shrank while open"
                )
            parts.append(part)
            byte_offset += len(part)
            nbytes -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def announce(self, offsets: Iterable[int], nbytes: int) -> None:
        """Say that so many bytes will be read at each of these offsets: the system may fetch them all at once."""
        if self._descriptor >= 0 and hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # it is no more than advice
                for offset in offsets:
                    if offset < self.nbytes:  # what a directory says may be any number
                        os.posix_fadvise(self._descriptor, self._start + offset, nbytes, os.POSIX_FADV_WILLNEED)

    def read_all(self) -> bytes:
        """Every byte. ReadFailed where there are more than the file system has said, which may remember an old size."""
        data = self._exactly(0, self.nbytes)
        if self.whole and self._descriptor >= 0 and self._some(self.nbytes, 1):
            raise ReadFailed(
                f"{self.path}: holds more than the {self.nbytes} bytes that the file system said; try again"
            )
        return data

    def _some(self, byte_offset: int, nbytes: int) -> bytes:
        """At most so many bytes from there; none at the end. Raises ReadFailed."""
        at = self._start + byte_offset
        try:
            return (
                os.pread(self._descriptor, nbytes, at) if self._object is None else self._object.read(at, at + nbytes)
            )
        except OSError as error:
            raise ReadFailed(f"{self.path}: {nbytes} bytes at {byte_offset} cannot be read: {error}") from error

    def close(self) -> None:
        self._kept = {}
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> PositionedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class PositionedBytes(PositionedFile):
    """Bytes in memory, read as a file is; `path` names the file that they were taken from."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.nbytes = len(data)
        self._kept = {}
        self._data = data

    def _exactly(self, byte_offset: int, nbytes: int) -> bytes:
        return self._data[byte_offset : byte_offset + nbytes]


class PositionedView(PositionedFile):
    """A part of an open file, read through it."""

    def __init__(self, file: PositionedFile, byte_offset: int, nbytes: int) -> None:
        self.path = file.path
        self.far = file.far
        self.nbytes = nbytes
        self._kept = {}
        self._file = file
        self._at = byte_offset

    def _exactly(self, byte_offset: int, nbytes: int) -> bytes:
        return self._file.read(self._at + byte_offset, nbytes)
