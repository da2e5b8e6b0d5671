"""What lies in a folder, and in small files: what the system refuses to tell is an error, never an absence.

`os.path.isfile` says no where a stat fails, whatever the reason: on a network file system that has a bad moment, an
optimizer's files would be taken for files that were never written.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from typing import TypeGuard

from ds_reshard.containers import remote
from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.errors import ReadFailed, ReshardError, fail

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


@contextlib.contextmanager
def named(path: str, what: str) -> Iterator[None]:
    """An error of the system as a ReadFailed of `path`."""
    try:
        yield
    except OSError as error:
        mend = "check the file system and its permissions"
        raise ReadFailed.of(path, f"{what}: {error.strerror or error}", mend=mend) from error


def _status(path: str, follow: bool = True) -> os.stat_result | None:
    """None where nothing has the name."""
    with named(path, "cannot be looked at"):
        try:
            return _remote(remote.status(path)) if remote.is_url(path) else os.stat(path, follow_symlinks=follow)
        except ValueError:  # a null byte is in no name
            return None
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise


def _remote(found: remote.Status | None) -> os.stat_result | None:
    """What a store says of a name, as the system would."""
    if found is None:
        return None
    mode = stat.S_IFDIR if found.nbytes is None else stat.S_IFREG
    return os.stat_result((mode, found.version, 0, 1, 0, 0, found.nbytes or 0, 0, 0, 0))


def renew(folder: str) -> None:
    """Believe nothing that was heard before of a folder by URL, and list it; who looks there then is told of errors."""
    if remote.is_url(folder):
        remote.forget(folder)
        with contextlib.suppress(OSError, ReshardError):
            remote.listing(folder)


def is_file(path: str) -> bool:
    return _regular(_status(path))


def nbytes(path: str) -> int | None:
    """Of a file; None where there is none."""
    status = _status(path)
    return status.st_size if _regular(status) else None


def is_folder(path: str) -> bool:
    status = _status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def exists(path: str, *, follow: bool = True) -> bool:
    """Whether something has the name; without `follow` a link that leads nowhere has it."""
    return _status(path, follow) is not None


def device(path: str) -> int:
    """The file system that a file or folder lies on."""
    with named(path, "cannot be looked at"):
        return os.stat(path).st_dev


def free_nbytes(folder: str) -> int:
    with named(folder, "does not tell its free space"):
        return shutil.disk_usage(folder).free


def entries(folder: str) -> dict[str, int | None]:
    """What lies in a folder, sorted: the bytes of a file, None of anything else. Nothing where there is no folder."""
    return {name: status.st_size if _regular(status) else None for name, status in _scan(folder)}


def names(folder: str) -> list[str]:
    """The names of what lies in a folder, sorted, without a look at any of it. None where there is no folder."""
    if remote.is_url(folder):
        with named(folder, "cannot be listed"):
            return list(remote.listing(folder))
    with named(folder, "cannot be listed"):
        try:
            with os.scandir(folder) as scan:
                return sorted(entry.name for entry in scan)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return []


def files(folder: str) -> dict[str, int]:
    """The bytes of each file in a folder, sorted by name."""
    return {name: status.st_size for name, status in _scan(folder) if _regular(status)}


def files_below(folder: str) -> dict[str, int]:
    """The bytes of each file below a folder, by its path from there, sorted; each folder once, links followed."""
    return {name: identity[0] for name, identity in identities_below(folder).items()}


Identity = tuple[int, int, int]
"""What tells a file from another of its name: its size, when it was written to, its number on its disk."""


def identity(path: str) -> Identity:
    """Of one file. Raises OSError, also where there is none."""
    status = _remote(remote.status(path)) if remote.is_url(path) else os.stat(path)
    if status is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return status.st_size, status.st_mtime_ns, status.st_ino


def identities_below(folder: str) -> dict[str, Identity]:
    """As `files_below`."""
    if remote.is_url(folder):
        with named(folder, "cannot be listed"):
            told = {name: _remote(one) for name, one in remote.tree(folder).items()}
        return {name: (one.st_size, one.st_mtime_ns, one.st_ino) for name, one in sorted(told.items()) if one}
    found, waiting, root = {}, [""], _status(folder)
    seen = {(root.st_dev, root.st_ino)} if root is not None else set()
    while waiting:
        at = waiting.pop()
        for name, status in _scan(os.path.join(folder, at)):
            below = os.path.join(at, name)
            if _regular(status):
                found[below] = (status.st_size, status.st_mtime_ns, status.st_ino)
            elif status is not None and (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                waiting.append(below)
    return dict(sorted(found.items()))


def _regular(status: os.stat_result | None) -> TypeGuard[os.stat_result]:
    return status is not None and stat.S_ISREG(status.st_mode)


def _scan(folder: str) -> list[tuple[str, os.stat_result | None]]:
    """What lies in a folder, sorted; None of links that lead nowhere."""
    if remote.is_url(folder):
        with named(folder, "cannot be listed"):
            return [(name, _remote(one)) for name, one in remote.listing(folder).items()]
    return [(name, _status(os.path.join(folder, name))) for name in names(folder)]


def read_small(path: str, most: int | None = None) -> bytes:
    """A file's bytes, at most that many. Raises what PositionedFile raises: CheckpointNotFound where there is none."""
    with PositionedFile(path) as file:
        return file.read_all() if most is None or most >= file.nbytes else file.read(0, most)


def read_text(path: str) -> str:
    """Raises as `read_small`, and CheckpointDamaged where the file is no UTF-8."""
    try:
        return read_small(path).decode("utf-8")
    except ValueError as error:
        raise fail(path, "is no text", "UTF-8", str(error)[:80]) from error


def read_json(path: str, most: int | None = None) -> object:
    """Raises as `read_small`, and ValueError where the file is no JSON."""
    try:
        return json.loads(read_small(path, most))
    except RecursionError as error:
        raise ValueError(str(error)) from error
