"""An output by URL, whole or refused: a store renames nothing, so files are sent under their own names, and marked.

OUT/FOLDER/ds_reshard.unfinished    there from before the first file until all are: readers refuse what lies beside it
OUT.ds-reshard/conversion.json      what is being made, of what; another conversion is refused there
OUT.ds-reshard/files.json           the names of all files that will be below OUT: no other is ever removed
OUT.ds-reshard/locks/I-of-N         written anew every few seconds while a process works there, at part I of N
OUT.ds-reshard/done/FILE.json       what is known of files that were sent: --resume goes on behind these

The manifest comes after all files, then the file that names a tag, and at last the mark goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ds_reshard.containers import folders, remote
from ds_reshard.containers.ranges import AT_ONCE
from ds_reshard.containers.remote import UNFINISHED
from ds_reshard.errors import ConfigError, ReshardError, WriteFailed, error_of, raise_faults
from ds_reshard.execution import disk
from ds_reshard.operations.workspace import (
    CONVERSION,
    LOCKS,
    MANIFEST,
    Part,
    Workspace,
    known_in,
    lock_name,
    manifest_text,
    parsed,
)

_FILES, _DONE = "files.json", "done"
_BEAT_S = 5.0
_STILL_BEATS = 3  # that a lock may miss while its holder lives


class StoreWorkspace(Workspace):
    """`names` are the files that the output will have, `folder` is where they lie in it."""

    def __init__(self, out: str, conversion: Mapping[str, object], *, names: Sequence[str], folder: str) -> None:
        super().__init__(out, conversion, force=False)
        self.target = out.rstrip("/")
        self.folder = f"{self.target}.ds-reshard"
        self._mark = os.path.join(folder, UNFINISHED)
        self._names = (*names, MANIFEST, self._mark)
        self._known: dict[str, Mapping[str, object]] = {}
        self._sent: dict[str, object] = {}
        self._spool = ""
        self._lost = threading.Event()

    @contextlib.contextmanager
    def open(self, *, resume: bool, part: Part) -> Iterator[bool]:
        """As of a folder, but what is there is never replaced: no store does that at one stroke."""
        kept = resume or part[1] > 1
        with self.joined():  # first, so that what a killed process left here goes, even if nothing else is to be done
            state, there = self._below(self.folder), self._below(self.target)
            self._refuse_foreign(state)
            if (kept or state) and self.is_done():
                self._clear()
                yield True
                return
            ours = self._ours(state)
            if strange := sorted(there.keys() - ours):
                what = f"is there already: {', '.join(strange[:4])}"
                mend = "name another URL, or remove it: nothing is replaced in a store"
                raise error_of([ConfigError.fault(self.target, what, mend=mend)], subject="converting")
            with self._lock(part):
                if not kept:
                    self._begin_anew(state, ours & there.keys())
                elif part[1] == 1:  # else others may be sending at this moment
                    disk.remove_below(self.target, ())
                self._claim()
                yield False

    def _begin_anew(self, state: Mapping[str, object], ours: set[str]) -> None:
        """Remove what is there, so that whatever is left of it is refused by readers, and gone on with by --resume.

        So what is known of files goes before them, a mark after them, and their names when none is there.
        """
        notes = {name for name in state if name.startswith(f"{_DONE}/")}
        disk.remove_below(self.folder, notes)
        marks = {name for name in ours if os.path.basename(name) == UNFINISHED}
        disk.remove_below(self.target, ours - marks)
        disk.remove_below(self.target, marks)
        disk.remove_below(self.folder, [name for name in {*state} - notes if not name.startswith(f"{LOCKS}/")])

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        with disk.spool() as self._spool:
            yield

    def room(self, nbytes: int) -> int:
        """As many as TMPDIR has room for; ConfigError where that is none."""
        within = tempfile.gettempdir()
        free = folders.free_nbytes(within)
        if free < nbytes:
            what = f"has {free} bytes free, and files are made there before they are sent: of {nbytes} bytes together"
            mend = "free space there, or export TMPDIR=a folder elsewhere"
            raise error_of([ConfigError.fault(within, what, mend=mend)], subject="converting")
        return free // max(1, nbytes)

    def is_done(self) -> bool:
        with folders.named(self.target, "cannot be looked at"):
            manifest = remote.read_anew(f"{self.target}/{MANIFEST}")
        if manifest is None or self._is_marked():
            return False
        with contextlib.suppress(ValueError):
            return bool(parsed(manifest).get("conversion") == json.loads(self.made_of))
        return False

    def _is_marked(self) -> bool:
        with folders.named(self.target, "cannot be looked at"):
            return remote.read_anew(f"{self.target}/{self._mark}") is not None

    def _below(self, url: str) -> dict[str, remote.Status]:
        with folders.named(url, "cannot be listed"):
            return remote.below(url)

    def _read(self, name: str) -> bytes | None:
        with folders.named(f"{self.folder}/{name}", "cannot be read"):
            return remote.read_anew(f"{self.folder}/{name}")

    def _ours(self, state: Mapping[str, object]) -> set[str]:
        """The names that a conversion, this or an earlier one, has said that it would write."""
        said = self._read(_FILES) if _FILES in state else None
        try:
            names = json.loads(said) if said is not None else []
        except ValueError:
            names = []
        return set(map(str, names)) if isinstance(names, list) else set()

    def _claim(self) -> None:
        found = self._read(CONVERSION)
        if found is not None:
            self._refuse_other(found)
        for name, text in ((_FILES, json.dumps(sorted(self._names))), (CONVERSION, self.made_of)):
            disk.put(f"{self.folder}/{name}", text.encode("utf-8"))
        disk.put(f"{self.target}/{self._mark}", b"its files are being sent: what is here is a part\n")

    # -- one process at a time -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _lock(self, part: Part) -> Iterator[None]:
        """Hold an object, by writing it anew: others see whether it changes, and compare no clocks."""
        name = lock_name(part)
        before = self._held_by_others(part)
        if before:
            time.sleep(_STILL_BEATS * _BEAT_S)
            now = self._held_by_others(part)
            if any(now[one] != before.get(one) for one in now):
                self._refuse_beside(part)
            disk.remove_below(f"{self.folder}/{LOCKS}", now)
        owner = os.urandom(8).hex()
        url = f"{self.folder}/{LOCKS}/{name}"
        if not disk.put(url, f"{owner} 0".encode(), new=True) or self._held_by_others(part).keys() - {name}:
            self._refuse_beside(part)
        ended = threading.Event()
        beating = threading.Thread(target=self._beat, args=(url, owner, ended), name="ds-reshard-lock", daemon=True)
        beating.start()
        try:
            yield
        finally:
            ended.set()
            beating.join()
            if not self._lost.is_set():
                with contextlib.suppress(WriteFailed):  # it is seen to be still
                    disk.remove_below(f"{self.folder}/{LOCKS}", [name])

    def _held_by_others(self, part: Part) -> dict[str, bytes | None]:
        """What this process may not work beside: locks of the same part, and of another number of parts."""
        names = self._below(f"{self.folder}/{LOCKS}")
        mine = [name for name in names if name == lock_name(part) or not name.endswith(f"-of-{part[1]}")]
        return {name: self._read(f"{LOCKS}/{name}") for name in mine}

    def _beat(self, url: str, owner: str, ended: threading.Event) -> None:
        beats = 0
        while not ended.wait(_BEAT_S):
            beats += 1
            with contextlib.suppress(ReshardError, OSError):  # a store that does not answer now may at the next beat
                found = remote.read_anew(url)
                if found is not None and not found.startswith(owner.encode()):
                    self._lost.set()
                    return
                disk.put(url, f"{owner} {beats}".encode())

    def _refuse_lost(self) -> None:
        if self._lost.is_set():
            what, mend = "another process has taken it over while this one did not answer", "let that one end"
            raise error_of([WriteFailed.fault(self.folder, what, mend=mend)], subject="converting")

    # -- files and notes -----------------------------------------------------------------------------------------------

    def path(self, name: str) -> str:
        """Where a file is made, before it is sent."""
        path = os.path.join(self._spool, name)
        disk.make_folder(os.path.dirname(path))
        return path

    def keep(self, paths: Mapping[str, str]) -> Mapping[str, object]:
        """Send the files; what the store calls this state of each is to be noted."""
        self._refuse_lost()
        sent = {}
        for name, path in paths.items():
            sent[name] = disk.send(path, f"{self.target}/{name}").version
            disk.remove(path)
        return {"sent": sent}

    def note(self, unit: str, known: Mapping[str, object]) -> None:
        self._refuse_lost()
        disk.put(f"{self.folder}/{_DONE}/{unit}.json", manifest_text(known, indent=None).encode())

    def noted(self, unit: str) -> Mapping[str, object] | None:
        told = self._read(f"{_DONE}/{unit}.json")
        return known_in(told) if told is not None else None

    def _finished(self, units: Sequence[str]) -> dict[str, Mapping[str, object]]:
        """What is known of the finished ones; a note that was read once is not asked for again."""
        there = self._below(f"{self.folder}/{_DONE}")
        fresh = [unit for unit in units if f"{unit}.json" in there and unit not in self._known]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            read = zip(fresh, pool.map(self.noted, fresh), strict=True)
            self._known |= {unit: known for unit, known in read if known is not None}
        return {unit: self._known[unit] for unit in units if unit in self._known}

    def left(self, units: Sequence[str]) -> list[str]:
        found = self._finished(units)
        return [unit for unit in units if unit not in found]

    def notes(self, units: Sequence[str]) -> list[Mapping[str, object]]:
        found = list(self._finished(units).values())
        for known in found:
            sent = known.get("sent")
            self._sent |= sent if isinstance(sent, dict) else {}
        return found

    def forget(self) -> None:
        self._known.clear()
        disk.remove_below(f"{self.folder}/{_DONE}", self._below(f"{self.folder}/{_DONE}"))

    def commit(self, manifest: Mapping[str, object], pointers: Mapping[str, str]) -> None:
        """Where all files are there as they were sent: the manifest, the files that name a tag; the mark goes."""
        self._refuse_lost()
        there = self._below(self.target)
        mend = "run it again without --resume"
        raise_faults(
            [
                WriteFailed.fault(f"{self.target}/{name}", "is not what was sent: another has written there", mend=mend)
                for name, version in self._sent.items()
                if name not in there or there[name].version != version
            ],
            subject="converting",
        )
        text = manifest_text({**manifest, "conversion": json.loads(self.made_of)})
        for name, content in {MANIFEST: text, **pointers}.items():
            disk.put(f"{self.target}/{name}", content.encode("utf-8"))
        disk.remove_below(self.target, [self._mark])
        if self._is_marked():
            what, mend = "is there still, and the store said that it is not", "run it again with --resume"
            raise error_of([WriteFailed.fault(f"{self.target}/{self._mark}", what, mend=mend)], subject="converting")
        folders.renew(self.target)
        self._clear()

    def _clear(self) -> None:
        with contextlib.suppress(WriteFailed):  # the next run does it
            disk.remove_below(self.folder, self._below(self.folder))
