"""Every call of this process on files below a folder, in `os` and as `open`: numbered, and made to fail one at a time.

A call is told by its kind, its path and how many of that kind the path has had: the same in each run, whatever threads
do meanwhile. Names that are drawn by chance, of files that are written to be renamed, are told alike.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import re
import signal
import stat
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ds_reshard.errors import ReshardError

DEATH = "death"
_READ = ("EIO", "ESTALE", "short", "ended", "flipped", "replaced")
_WRITE = ("ENOSPC", "EIO", "short", DEATH)
_CHANGE = ("ENOSPC", "EIO", "EACCES", DEATH)
FAULTS = {
    "open": ("EACCES", "EIO", "ESTALE", "ENOENT"),
    "read": _READ,
    "stat": ("EIO", "ESTALE", "old"),
    "list": ("EIO", "ESTALE", "late"),
    "create": _CHANGE,
    "write": _WRITE,
    "truncate": _CHANGE,
    "fsync": ("EIO", "ENOSPC", DEATH),
    "rename": _CHANGE,
    "mkdir": _CHANGE,
    "remove": ("EIO", "EACCES", DEATH),
}
"""What may befall a call of each kind.

On a network file system a name may be late: it is in no listing yet, or in one and cannot be opened; and what is
remembered of a file may be old: its size is that of before. A process that dies where it reads leaves what it
leaves at its next change.
"""

_KINDS = {
    "stat": ("stat", "lstat", "fstat", "access"),
    "list": ("listdir", "scandir"),
    "read": ("read", "readv", "pread", "preadv"),
    "write": ("write", "writev", "pwrite", "pwritev"),
    "truncate": ("truncate", "ftruncate"),
    "fsync": ("fsync", "fdatasync"),
    "rename": ("rename", "replace", "link", "symlink"),
    "mkdir": ("mkdir",),
    "remove": ("unlink", "remove", "rmdir"),
    "open": ("open",),
}
_CREATES = os.O_CREAT | os.O_WRONLY | os.O_RDWR | os.O_TRUNC
_CHANCE = re.compile(r"[0-9a-f]{16}(?=\.part$)")
_OS = {name: getattr(os, name) for names in _KINDS.values() for name in names}
_OPEN = builtins.open


class Step(NamedTuple):
    """One call: the `number`-th of its kind on this path."""

    kind: str
    path: str
    number: int


class Calls:
    """The calls on files below `folder`; `fault` befalls the one that is `at`, and later ones like it if it `lasts`."""

    def __init__(
        self,
        folder: str,
        at: Step | None = None,
        fault: str = "",
        signal_number: int = signal.SIGKILL,
        *,
        lasts: bool = False,
    ) -> None:
        self.lasts = lasts
        self.folder, self.at, self.fault, self.signal = os.path.realpath(folder), at, fault, signal_number
        self.steps: list[Step] = []
        self.befallen = False
        self._count: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        for kind, names in _KINDS.items():
            for name in names:
                setattr(os, name, self._wrapped(kind, _OS[name]))
        builtins.open = io.open = self._opened
        try:
            yield
        finally:
            for name, function in _OS.items():
                setattr(os, name, function)
            builtins.open = io.open = _OPEN

    def _place(self, given: Any, dir_fd: int | None) -> str | None:
        """The path below the folder that a call names, None of others."""
        if isinstance(given, int):
            with contextlib.suppress(OSError):
                given = os.readlink(f"/proc/self/fd/{given}")
        if isinstance(given, int | bytes):
            return None
        path = os.fspath(given)
        if dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        path = os.path.abspath(path)
        if path != self.folder and not path.startswith(self.folder + os.sep):
            return None
        return _CHANCE.sub("CHANCE", os.path.relpath(path, self.folder))

    def _befalls(self, kind: str, path: str) -> bool:
        with self._lock:
            self._count[kind, path] += 1
            step = Step(kind, path, self._count[kind, path])
            self.steps.append(step)
            self.befallen |= step == self.at
            like = self.at is not None and self.befallen and step[:2] == self.at[:2]
        return step == self.at or (self.lasts and like)

    def _wrapped(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            names = given[1] if kind == "rename" else given[0] if given else "."
            place = self._place(names, named.get("dir_fd", named.get("src_dir_fd")))
            what = "create" if kind == "open" and given[1] & _CREATES else kind
            if place is None or not self._befalls(what, place):
                return function(*given, **named)
            if self.fault == DEATH:
                os.kill(os.getpid(), self.signal)
            if self.fault.startswith("E"):
                code = getattr(errno, self.fault)
                raise OSError(code, os.strerror(code), str(given[0]))
            return _changed(self.fault, function, *given)

        return called

    def _opened(self, file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, *more: Any) -> Any:
        """As open() does, by calls of `os`."""
        if self._place(file, None) is None or isinstance(file, int):
            return _OPEN(file, mode, buffering, encoding, *more)
        return _through_os(file, mode, buffering, encoding)


def ended(action: Callable[[], object]) -> str:
    """What became of it: "done", or the error's class and text, and of an error not of the package where it was."""
    try:
        action()
    except ReshardError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"unnamed {type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
    return "done"


def files(folder: str | Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def left_open(folder: str) -> list[str]:
    """The files below a folder that this process has open."""
    targets = (os.path.realpath(link) for link in _OS["scandir"]("/proc/self/fd"))
    return [target for target in targets if target.startswith(folder)]


def _through_os(file: Any, mode: str, buffering: int, encoding: str | None) -> Any:
    raw = _Raw(file, mode)
    if "b" in mode and not buffering:
        return raw
    both = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw) if raw.writes else io.BufferedReader(raw)
    return both if "b" in mode else io.TextIOWrapper(both, encoding=encoding)


_FLAGS = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "x": os.O_CREAT | os.O_EXCL, "a": os.O_CREAT | os.O_APPEND}


class _Raw(io.RawIOBase):
    """A file whose calls are those of `os`."""

    def __init__(self, path: Any, mode: str) -> None:
        letter = mode.strip("bt+")
        self.writes, self.reads = letter != "r" or "+" in mode, letter == "r" or "+" in mode
        access = os.O_RDWR if "+" in mode else os.O_WRONLY if self.writes else os.O_RDONLY
        self._fd = -1
        self._fd = os.open(path, _FLAGS[letter] | access | os.O_CLOEXEC, 0o666)
        self.name = path

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return self.reads

    def writable(self) -> bool:
        return self.writes

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return os.readv(self._fd, [buffer])

    def write(self, data: Any) -> int:
        return os.write(self._fd, data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return os.lseek(self._fd, offset, whence)

    def truncate(self, size: int | None = None) -> int:
        size = os.lseek(self._fd, 0, os.SEEK_CUR) if size is None else size
        os.ftruncate(self._fd, size)
        return size

    def close(self) -> None:
        if not self.closed and self._fd >= 0:
            os.close(self._fd)
        super().close()


def _changed(fault: str, function: Callable[..., Any], fd: int, *given: Any) -> Any:
    """A call that reads or writes, with what befalls it; `given` is as function(fd, *given)."""
    name = function.__name__
    if fault == "old":
        return _old(function(fd, *given))
    if fault == "late":
        return _Late(function(fd, *given))
    if fault == "ended":
        return b"" if name in ("read", "pread") else 0
    if fault == "replaced":
        _replace(os.readlink(f"/proc/self/fd/{fd}"))
        return function(fd, *given)
    if fault == "short":
        what, *rest = given
        if isinstance(what, int):
            return function(fd, max(1, what // 2), *rest)
        if isinstance(what, list):
            first = memoryview(what[0]).cast("B")
            return function(fd, [first[: max(1, len(first) // 2)]], *rest)
        data = memoryview(what).cast("B")
        return function(fd, data[: max(1, len(data) // 2)], *rest)
    assert fault == "flipped", fault
    found = function(fd, *given)
    if isinstance(found, bytes):
        data, at = bytearray(found), len(found) // 2
        data[at : at + 1] = bytes(byte ^ 16 for byte in data[at : at + 1])
        return bytes(data)
    buffers, at = [memoryview(buffer).cast("B") for buffer in given[0]], found // 2
    for buffer in buffers:
        if at < len(buffer):
            if found:
                buffer[at] ^= 16
            break
        at -= len(buffer)
    return found


def _old(status: Any) -> Any:
    """A file of half the size, written to a second before."""
    if isinstance(status, bool) or not stat.S_ISREG(status.st_mode):
        return status
    values, named = list(status), {key: getattr(status, key) for key in dir(status) if key.startswith("st_")}
    values[stat.ST_SIZE] //= 2
    return os.stat_result(values, {**named, "st_mtime_ns": named["st_mtime_ns"] - 10**9})


class _Late(Iterator[Any]):
    """A listing without its last name, as scandir and listdir give it."""

    def __init__(self, found: Any) -> None:
        self._names = iter(sorted(found, key=lambda entry: getattr(entry, "name", entry))[:-1])

    def __next__(self) -> Any:
        return next(self._names)

    def __enter__(self) -> Iterator[Any]:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        pass


def _replace(path: str) -> None:
    """Another file takes the name: as long, and other in each byte."""
    with _OPEN(path, "rb") as file, _OPEN(path + ".other", "wb") as other:
        other.write(file.read().translate(bytes(255 - byte for byte in range(256))))
    _OS["replace"](path + ".other", path)
