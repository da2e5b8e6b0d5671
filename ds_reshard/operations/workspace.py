"""An output that is there whole or not at all, and its manifest: written beside it, in a folder that is renamed.

OUT.ds-reshard/conversion.json   what is being made, of what; another conversion is refused there
OUT.ds-reshard/lock              held while a process works there
OUT.ds-reshard/done/FILE.json    what is known of a finished file: --resume goes on behind these
OUT.ds-reshard/out/              the output
OUT.ds-reshard/old/              with --force, what had the name before, for a moment
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping

from ds_reshard.containers import folders
from ds_reshard.containers.crc import crc32
from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.remote import is_url
from ds_reshard.errors import CheckpointNotFound, ConfigError, Fault, ReshardError, WriteFailed, raise_faults
from ds_reshard.execution import disk

MANIFEST = "ds_reshard.json"
_MOST_NBYTES = 256 << 20


def manifest_text(content: Mapping[str, object]) -> str:
    """The manifest as it is written, with a checksum of its own."""
    return json.dumps({**content, "crc32": _checksum(content)}, sort_keys=True, indent=1)


def read_manifest(path: str) -> Mapping[str, object] | None:
    """The manifest of an output, None where there is none. Raises ValueError where it is not what was written."""
    try:
        with PositionedFile(path) as file:
            if file.nbytes > _MOST_NBYTES:
                raise ValueError(f"it has {file.nbytes} bytes, and at most {_MOST_NBYTES} are read")
            manifest = json.loads(file.read(0, file.nbytes))
    except CheckpointNotFound:
        return None
    except (ReshardError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(manifest, dict):
        raise ValueError("it holds no object")
    expected = manifest.pop("crc32", None)
    found = _checksum(manifest)
    if expected != found:
        said = f"{expected!r} was written" if expected is not None else "none was written: its own entry is damaged"
        raise ValueError(f"its checksum is {found}, and {said}")
    return manifest


def _checksum(content: Mapping[str, object]) -> str:
    return f"{crc32(json.dumps(content, sort_keys=True).encode('utf-8')):08x}"


SUFFIX = ".ds-reshard"


class Workspace:
    """The folder in which one output is made; `conversion` is what it is made of, as JSON."""

    def __init__(self, out: str, conversion: Mapping[str, object], *, force: bool) -> None:
        self.target = os.path.abspath(out)
        self.folder = self.target + SUFFIX
        self.out = os.path.join(self.folder, "out")
        self._done = os.path.join(self.folder, "done")
        self._old = os.path.join(self.folder, "old")
        self._conversion = json.dumps(conversion, sort_keys=True, indent=1)
        self._force = force

    @contextlib.contextmanager
    def open(self, *, resume: bool, shared: bool) -> Iterator[bool]:
        """Work there, alone unless `shared`; yields whether the output is there already, made of the same.

        A folder that another conversion has left is an error with `resume` or `shared`, and cleared otherwise.
        """
        left = folders.is_folder(self.folder) and not folders.exists(self.out)
        if (shared or left) and self.is_done():
            self._clear()
            yield True
            return
        self._refuse_existing()
        disk.make_folder(self.folder)
        with self._lock(shared):
            if folders.is_folder(self._old) and not folders.exists(self.target, follow=False):
                disk.rename(self._old, self.target)
            for name in list(folders.entries(self.folder)) if not (resume or shared) else ():
                disk.remove(os.path.join(self.folder, name))
            self._claim()
            yield False

    def is_done(self) -> bool:
        """Whether the output is there, made of the same: by another process, or by one that could not clean up."""
        return bool(_conversion_of(os.path.join(self.target, MANIFEST)) == json.loads(self._conversion))

    def _refuse_existing(self) -> None:
        if folders.exists(self.target, follow=False) and not self._force:
            fault = ConfigError.fault(
                self.target,
                "is there already",
                mend="name another folder, or add --force: it is then replaced when all of the new one is there",
            )
            raise_faults([fault], subject="converting")

    @contextlib.contextmanager
    def _lock(self, shared: bool) -> Iterator[None]:
        with folders.named(self.folder, "cannot be opened"):
            fd = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise ConfigError(
                f"{self.folder}: another process works there; wait for it, or give every process its --shard I/N"
            ) from None
        try:
            yield
        finally:
            os.close(fd)

    def _claim(self) -> None:
        """Note what is made here, or find that it is the same."""
        path = os.path.join(self.folder, "conversion.json")
        if folders.exists(path):
            found = folders.read_small(path).decode("utf-8", errors="replace")
            if found != self._conversion:
                fault = ConfigError.fault(
                    self.folder,
                    "was left by another conversion, or of files that have changed since",
                    mend="run it without --resume and --shard: it is then cleared; or remove it",
                )
                raise_faults([fault], subject="converting")
        else:
            disk.write_whole(path, self._conversion.encode("utf-8"), beside=self.folder)
        disk.make_folder(self._done)
        disk.make_folder(self.out)

    def path(self, name: str) -> str:
        """Where a file of the output is written; its folder is made."""
        path = os.path.join(self.out, name)
        disk.make_folder(os.path.dirname(path))
        return path

    def note(self, unit: str, known: Mapping[str, object]) -> None:
        """Note that the files of a unit are finished and on the disk; a note that a crash takes costs their writing."""
        data = json.dumps(known, sort_keys=True).encode("utf-8")
        told = b"%08x" % crc32(data) + data
        disk.write_whole(self._note(unit), told, beside=self.folder, synced=False)

    def noted(self, unit: str) -> Mapping[str, object] | None:
        """What is known of a finished unit, None for one that is not."""
        try:
            told = folders.read_small(self._note(unit))
        except CheckpointNotFound:
            return None
        if told[:8] != b"%08x" % crc32(told[8:]):  # its name reached the disk before its bytes
            return None
        known = json.loads(told[8:])
        assert isinstance(known, dict)
        return known

    def forget(self) -> None:
        """Forget which units are finished: --resume writes all of them anew."""
        disk.remove(self._done)

    def _note(self, unit: str) -> str:
        return os.path.join(self._done, f"{unit}.json")

    def commit(self, manifest: Mapping[str, object], pointers: Mapping[str, str]) -> None:
        """Write the manifest, then the files that name a tag, then let the output take its name.

        Of several processes that come here at once, each may be the one that does it.
        """
        text = manifest_text({**manifest, "conversion": json.loads(self._conversion)})
        try:
            for name, content in {MANIFEST: text, **pointers}.items():
                disk.write_whole(os.path.join(self.out, name), content.encode("utf-8"), beside=self.folder)
            disk.sync_folders(self.out)
            if folders.exists(self.target, follow=False) and not self.is_done():
                disk.rename(self.target, self._old)
            disk.rename(self.out, self.target)
            disk.sync(os.path.dirname(self.target))
        except WriteFailed:
            if not self.is_done():
                raise
        self._clear()

    def _clear(self) -> None:
        with contextlib.suppress(WriteFailed):  # another process is at it, or the next run does it
            disk.remove(self.folder)


def _conversion_of(path: str) -> object:
    try:
        manifest = read_manifest(path)
    except ValueError:
        return None
    return manifest.get("conversion") if manifest is not None else None


def refuse_places(source: str, out: str, needed_nbytes: int) -> None:
    """Raise where the output cannot be: inside the source or around it, on another file system, or too large."""
    if is_url(out):
        what, mend = "is a URL, and files are written to a local folder", "name a local folder, and copy it there"
        raise_faults([_place(out, what, mend)], subject="converting")
    source, target = os.path.realpath(source), os.path.realpath(out)
    parent = os.path.dirname(os.path.abspath(out))
    faults = []
    if target == source or target.startswith(source + os.sep) or source.startswith(target + os.sep):
        faults.append(_place(out, f"lies in the source {source}, or holds it", "name a folder apart from it"))
    if not folders.is_folder(parent):
        faults.append(_place(parent, "does not exist", f"mkdir -p {parent}"))
    elif folders.is_folder(target) and folders.device(target) != folders.device(parent):
        what = "is a file system of its own: what is written beside it cannot take its name"
        faults.append(_place(out, what, f"name a folder in it: {os.path.join(out, 'converted')}"))
    elif (free := folders.free_nbytes(parent)) < needed_nbytes:
        what = f"has {free} bytes free, and the output needs {needed_nbytes}"
        faults.append(_place(parent, what, "free space there, or name a folder elsewhere"))
    raise_faults(faults, subject="converting")


def _place(where: str, what: str, mend: str) -> Fault:
    return ConfigError.fault(where, what, mend=mend)
