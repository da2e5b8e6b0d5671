"""Every call that changes a file or a folder, but for reports and events of a load: tests end the process at each.

Raises WriteFailed, with what the system said and what mends it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence

from ds_reshard.containers import remote
from ds_reshard.errors import WriteFailed

_VECTORS = 256  # of at least 1024 that Linux takes (IOV_MAX)
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def _named(path: str, what: str, mend: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        first = "free space there" if error.errno in _FULL else "check the file system and its permissions"
        mend = mend or f"{first}, then run again with --resume"
        if isinstance(error, FileNotFoundError) and remote.is_url(path):  # it makes folders by itself, and no bucket
            mend = "create the bucket, or correct its name"
        raise WriteFailed.of(path, f"{what}: {error.strerror or error}", mend=mend) from error


def create(path: str, nbytes: int) -> None:
    """Make a new file of that size, whose bytes are not written yet."""
    with _named(path, "cannot be created"), open(path, "wb") as file:
        file.truncate(nbytes)


def write_new(path: str, parts: Sequence[bytes | memoryview]) -> None:
    """Make a file of these bytes, one part after another."""
    with _named(path, "cannot be written"), open(path, "wb", buffering=0) as file:
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            done = os.writev(file.fileno(), left[:_VECTORS])
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]


def write_at(path: str, data: bytes | memoryview, byte_offset: int) -> None:
    """Write all of `data` at a position of a file that is there."""
    with _named(path, "cannot be written"):
        fd = os.open(path, os.O_WRONLY)
        try:
            left = memoryview(data)
            while left:
                done = os.pwrite(fd, left, byte_offset)
                left, byte_offset = left[done:], byte_offset + done
        finally:
            os.close(fd)


def sync(path: str) -> None:
    """Bring a file's bytes, or a folder's names, to the disk."""
    with _named(path, "cannot be brought to the disk"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def sync_folders(path: str) -> None:
    """Bring the names in a folder, and in all below it, to the disk."""

    def unlisted(error: OSError) -> None:
        raise error

    with _named(path, "cannot be listed"):
        found = [folder for folder, _, _ in os.walk(path, onerror=unlisted)]
    for folder in found:
        sync(folder)


def write_whole(path: str, data: bytes, *, beside: str, synced: bool = True) -> None:
    """Replace a small file at once: written in the folder `beside`, renamed; a crash may empty one not `synced`."""
    part = os.path.join(beside, f"{os.urandom(8).hex()}.part")
    write_new(part, [data])
    if synced:
        sync(part)
    rename(part, path)


def write_named(path: str, data: bytes, *, mend: str) -> None:
    """Make or replace a file that a user has named, whole or not at all; nothing else is left of it.

    A link stays one, and a device or a pipe is written to. Its mode is that of any new file.
    """
    with _named(path, "cannot be written", mend):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(path).st_mode):
                with open(path, "wb") as there:
                    there.write(data)
                return
        part = os.path.join(os.path.dirname(os.path.realpath(path)), f"{os.urandom(8).hex()}.part")
        try:
            with open(part, "xb") as file:
                file.write(data)
            os.replace(part, os.path.realpath(path))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise


def rename(source: str, target: str) -> None:
    with _named(target, "cannot be renamed to"):
        os.rename(source, target)


def make_folder(path: str, *, mend: str = "") -> None:
    with _named(path, "cannot be created", mend):
        os.makedirs(path, exist_ok=True)


def remove(path: str) -> None:
    """Remove a folder or a file, and all that is in it."""
    with _named(path, "cannot be removed"):
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)


def lock(path: str) -> int | None:
    """Hold a file of this name, made where there is none, alone; None where another process does. Close it."""
    with _named(path, "cannot be locked"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # NFS locks what can be written to
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(fd).st_ino == os.stat(path).st_ino  # else who held it has removed it by now
        except (BlockingIOError, FileNotFoundError):
            held = False
        except OSError:
            os.close(fd)
            raise
    if not held:
        os.close(fd)
    return fd if held else None


# -- by URL ------------------------------------------------------------------------------------------------------------


_SPOOL, _HELD = "ds-reshard-spool-", "lock"


@contextlib.contextmanager
def spool() -> Iterator[str]:
    """A folder in TMPDIR for files that are to be sent; those of processes that were killed are removed."""
    within = tempfile.gettempdir()
    for name in os.listdir(within):
        if name.startswith(_SPOOL):
            with contextlib.suppress(WriteFailed, FileNotFoundError):  # another process removes it at this moment
                _remove_left(os.path.join(within, name))
    held = None
    while held is None:  # until no other process has taken it for one that was left
        with _named(within, "takes no folder"):
            folder = tempfile.mkdtemp(prefix=_SPOOL)
        try:
            held = lock(os.path.join(folder, _HELD))
        except WriteFailed:
            if os.path.isdir(folder):
                raise
    try:
        yield folder
    finally:
        remove(folder)
        os.close(held)


def _remove_left(folder: str) -> None:
    found = os.lstat(folder)  # anybody may put a link there, which leads to a folder of this user
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    held = lock(os.path.join(folder, _HELD))
    if held is not None:
        remove(folder)
        os.close(held)


def send(path: str, url: str) -> remote.Status:
    """Write a file of a store as a local one is, whole or not at all; what it is then."""
    with _named(url, "cannot be written"):
        return remote.send(url, path)


def put(url: str, data: bytes, *, new: bool = False) -> bool:
    """Write a small file of a store; False with `new` where there is one already, as far as the store can tell."""
    with _named(url, "cannot be written"):
        try:
            remote.put(url, data, new=new)
        except FileExistsError:
            return False
    return True


def remove_below(url: str, names: Iterable[str]) -> None:
    """Remove files of a store, by their paths from a folder, and what was begun to be sent below it."""
    with _named(url, "cannot be removed"):
        remote.remove(f"{url}/{name}" for name in names)
        remote.abort(url)
