"""An output that is there whole or not at all, and its manifest: written beside it, in a folder that is renamed.

OUT.ds-reshard/conversion.json   what is being made, of what; another conversion is refused there
OUT.ds-reshard/locks/I-of-N      held while a process works there, at part I of N
OUT.ds-reshard/done/FILE.json    what is known of a finished file: --resume goes on behind these
OUT.ds-reshard/out/              the output
OUT.ds-reshard/old/              with --force, what had the name before, for a moment
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ds_reshard.containers import folders
from ds_reshard.containers.crc import crc32
from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.remote import file_on_the_way, is_url
from ds_reshard.errors import CheckpointNotFound, ConfigError, Fault, ReshardError, WriteFailed, error_of, raise_faults
from ds_reshard.execution import disk

MANIFEST = "ds_reshard.json"
_MOST_NBYTES = 256 << 20


def manifest_text(content: Mapping[str, object], *, indent: int | None = 1) -> str:
    """The manifest, or without `indent` the note of a unit, as it is written, with a checksum of its own."""
    return json.dumps({**content, "crc32": _checksum(content)}, sort_keys=True, indent=indent)


def read_manifest(path: str) -> Mapping[str, object] | None:
    """The manifest of an output, None where there is none. Raises ValueError where it is not what was written."""
    try:
        with PositionedFile(path) as file:
            if file.nbytes > _MOST_NBYTES:
                raise ValueError(f"it has {file.nbytes} bytes, and at most {_MOST_NBYTES} are read")
            text = file.read(0, file.nbytes)
    except CheckpointNotFound:
        return None
    except ReshardError as error:
        raise ValueError(str(error)) from error
    return parsed(text)


def parsed(text: bytes) -> Mapping[str, object]:
    """What `manifest_text` made. Raises ValueError for anything else."""
    try:
        manifest = json.loads(text)
    except RecursionError as error:
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
LOCKS, CONVERSION = "locks", "conversion.json"
_MADE = re.compile(r"(locks|done|out|old)(/|$)|(conversion|files)\.json$|[0-9a-f]{16}\.part$|\.nfs")
"""What lies in such a folder; .nfs is what a file that is removed while it is open has for a name on NFS."""
_ANOTHER = "name another folder, or add --force: it is then replaced when all of the new one is there"
_MEANWHILE = "give what has come there meanwhile another name, or add --force; then run again with --resume"
Part = tuple[int, int]
"""A part of the work, counted from 0, and the number of parts; (0, 1) is all of it."""


class Workspace:
    """The folder in which one output is made; `conversion` is what it is made of, as JSON."""

    def __init__(self, out: str, conversion: Mapping[str, object], *, force: bool) -> None:
        self.target = out if is_url(out) else os.path.abspath(out)
        self.folder = self.target + SUFFIX
        self.out = os.path.join(self.folder, "out")
        self._done = os.path.join(self.folder, "done")
        self._old = os.path.join(self.folder, "old")
        self.made_of = json.dumps(conversion, sort_keys=True, indent=1)
        self._force = force

    @contextlib.contextmanager
    def open(self, *, resume: bool, part: Part) -> Iterator[bool]:
        """Do that part of the work, beside other parts alone; yields whether the output is there, made of the same.

        A folder that another conversion has left is an error with `resume` or several parts, and cleared otherwise.
        One that no conversion has made is an error always: it is somebody's own, perhaps a checkpoint.
        """
        self._refuse_foreign(folders.names(self.folder))
        kept = resume or part[1] > 1
        left = folders.is_folder(self.folder) and not folders.exists(self.out)
        if (kept or left) and self.is_done():
            self._clear()
            yield True
            return
        self._refuse_existing()
        disk.make_folder(os.path.join(self.folder, LOCKS))
        with self._lock(part):
            if folders.is_folder(self._old) and not folders.exists(self.target, follow=False):
                disk.rename(self._old, self.target)
            for name in list(folders.entries(self.folder)) if not kept else ():
                if name != LOCKS:
                    disk.remove(os.path.join(self.folder, name))
            self._claim()
            yield False

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Write there what another process has opened."""
        yield

    def room(self, nbytes: int) -> int:
        """How many units of so many bytes may be made that are not kept yet."""
        return 1 << 20

    def is_done(self) -> bool:
        """Whether the output is there, made of the same: by another process, or by one that could not clean up."""
        return bool(_conversion_of(os.path.join(self.target, MANIFEST)) == json.loads(self.made_of))

    def _refuse_foreign(self, names: Iterable[str]) -> None:
        """Raise where the folder has what no conversion puts there: all of it would be removed."""
        if strange := [name for name in names if not _MADE.match(name)]:
            what = f"is where this output is made, and holds what no conversion has put there: {', '.join(strange[:4])}"
            mend = "name another OUT, or give that folder another name"
            raise error_of([ConfigError.fault(self.folder, what, mend=mend)], subject="converting")

    def _refuse_existing(self, mend: str = _ANOTHER) -> None:
        if folders.exists(self.target, follow=False) and not self._force:
            raise error_of([ConfigError.fault(self.target, "is there already", mend=mend)], subject="converting")

    @contextlib.contextmanager
    def _lock(self, part: Part) -> Iterator[None]:
        """Hold the part, where nobody does, nor any of another number of parts: that is another job's."""
        locks = os.path.join(self.folder, LOCKS)
        held = disk.lock(os.path.join(locks, lock_name(part)))
        try:
            others = [name for name in folders.entries(locks) if not name.endswith(f"-of-{part[1]}")]
            if held is None or any(self._is_held(os.path.join(locks, name)) for name in others):
                self._refuse_beside(part)
            yield
        finally:
            if held is not None:
                os.close(held)

    def _is_held(self, path: str) -> bool:
        found = disk.lock(path)
        if found is not None:
            os.close(found)
        return found is None

    def _refuse_beside(self, part: Part) -> None:
        what = "another process works there" + (f" at part {lock_name(part)}" if part[1] > 1 else "")
        mend = "wait for it, or end it; processes that share the work are each given their own --shard I/N"
        raise error_of([ConfigError.fault(self.folder, what, mend=mend)], subject="converting")

    def _claim(self) -> None:
        """Note what is made here, or find that it is the same."""
        path = os.path.join(self.folder, CONVERSION)
        if folders.exists(path):
            self._refuse_other(folders.read_small(path))
        else:
            disk.write_whole(path, self.made_of.encode("utf-8"), beside=self.folder)
        disk.make_folder(self._done)
        disk.make_folder(self.out)

    def _refuse_other(self, found: bytes) -> None:
        if found != self.made_of.encode("utf-8"):
            what = "was left by another conversion, or of files that have changed since"
            mend = "run it without --resume and --shard: it is then cleared; or remove it"
            raise error_of([ConfigError.fault(self.folder, what, mend=mend)], subject="converting")

    def path(self, name: str) -> str:
        """Where a file of the output is written; its folder is made."""
        path = os.path.join(self.out, name)
        disk.make_folder(os.path.dirname(path))
        return path

    def keep(self, paths: Mapping[str, str]) -> Mapping[str, object]:
        """Bring files that are finished to where they last, by their names; what is to be noted of them beside."""
        for path in paths.values():
            disk.sync(path)
        return {}

    def note(self, unit: str, known: Mapping[str, object]) -> None:
        """Note that the files of a unit are finished and on the disk; a note that a crash takes costs their writing."""
        text = manifest_text(known, indent=None).encode("utf-8")
        disk.write_whole(self._note(unit), text, beside=self.folder, synced=False)

    def noted(self, unit: str) -> Mapping[str, object] | None:
        """What is known of a finished unit, None for one that is not, or whose files a power cut has taken."""
        try:
            known = known_in(folders.read_small(self._note(unit)))
        except CheckpointNotFound:
            return None
        return known if known is not None and self._has(known) else None

    def _has(self, known: Mapping[str, object]) -> bool:
        """Whether the files of a note are there, and as long as they were."""
        files = known.get("files")
        assert isinstance(files, dict)
        return all(folders.nbytes(os.path.join(self.out, name)) == one["nbytes"] for name, one in files.items())

    def left(self, units: Sequence[str]) -> list[str]:
        """Those that are not finished."""
        return [unit for unit in units if self.noted(unit) is None]

    def notes(self, units: Sequence[str]) -> list[Mapping[str, object]]:
        """What is known of the finished ones."""
        return [known for unit in units if (known := self.noted(unit)) is not None]

    def forget(self) -> None:
        """Forget which units are finished: --resume writes all of them anew."""
        disk.remove(self._done)

    def _note(self, unit: str) -> str:
        return os.path.join(self._done, f"{unit}.json")

    def commit(self, manifest: Mapping[str, object], pointers: Mapping[str, str]) -> None:
        """Write the manifest, then the files that name a tag, then let the output take its name.

        Of several processes that come here at once, each may be the one that does it.
        """
        text = manifest_text({**manifest, "conversion": json.loads(self.made_of)})
        try:
            for name, content in {MANIFEST: text, **pointers}.items():
                disk.write_whole(os.path.join(self.out, name), content.encode("utf-8"), beside=self.folder)
            disk.sync_folders(self.out)
            if folders.exists(self.target, follow=False) and not self.is_done():
                self._refuse_existing(_MEANWHILE)
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


def known_in(told: bytes) -> Mapping[str, object] | None:
    """What a note says; None where its name reached the disk before its bytes."""
    try:
        return parsed(told)
    except ValueError:
        return None


def lock_name(part: Part) -> str:
    return f"{part[0]}-of-{part[1]}"


def _conversion_of(path: str) -> object:
    try:
        manifest = read_manifest(path)
    except ValueError:
        return None
    return manifest.get("conversion") if manifest is not None else None


def refuse_places(source: str, out: str, needed_nbytes: int) -> None:
    """Raise where the output cannot be: inside the source or around it, on another file system, or too large."""
    source, target = map(_resolved, (source, out))
    parent = os.path.dirname(os.path.abspath(out))
    made = target + SUFFIX if is_url(out) else os.path.realpath(os.path.abspath(out) + SUFFIX)
    faults = []
    if source.startswith(made + os.sep):
        faults.append(
            _place(made, f"is cleared, and holds the source {source}", "name another OUT, or move the source")
        )
    if target == source or target.startswith(source + os.sep) or source.startswith(target + os.sep):
        faults.append(_place(out, f"lies in the source {source}, or holds it", "name a folder apart from it"))
    if is_url(out) and not is_url(target):
        faults.append(_place(out, "is a folder of this machine", f"give its path, which is not a URL: {target}"))
    elif is_url(out):
        with folders.named(out, "cannot be looked at"):
            file = file_on_the_way(out)
        if file is not None:
            faults.append(_place(file, "is a file: the output is a folder", "name a URL where no file is"))
    elif not folders.is_folder(parent):
        faults.append(_place(parent, "does not exist", f"mkdir -p {shlex.quote(parent)}"))
    elif folders.is_folder(target) and folders.device(target) != folders.device(parent):
        what = "is a file system of its own: what is written beside it cannot take its name"
        faults.append(_place(out, what, f"name a folder in it: {os.path.join(out, 'converted')}"))
    elif (free := folders.free_nbytes(parent)) < needed_nbytes:
        what = f"has {free} bytes free, and the output needs {needed_nbytes}"
        faults.append(_place(parent, what, "free space there, or name a folder elsewhere"))
    raise_faults(faults, subject="converting")


def _resolved(path: str) -> str:
    """A place as each name of it is told; of a URL that names a folder of this machine (fsspec's local) the folder."""
    scheme, _, rest = path.partition("://")
    on_disk = rest if scheme in ("file", "local") else path
    return path.rstrip("/") if is_url(on_disk) else os.path.realpath(on_disk)


def _place(where: str, what: str, mend: str) -> Fault:
    return ConfigError.fault(where, what, mend=mend)
