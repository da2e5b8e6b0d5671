"""`convert`: a checkpoint written anew under another format and data-parallel size, without the framework."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace

from ds_reshard.containers import folders
from ds_reshard.errors import CheckpointDamaged, Fault, InternalError, ReadFailed, raise_faults
from ds_reshard.execution import disk
from ds_reshard.execution.checksums import PartialSum, combine, partial_sums, read_again, settle
from ds_reshard.execution.files import ArchiveFile, FileTarget, StagingExecutor
from ds_reshard.execution.fingerprint import Fingerprint, Witness
from ds_reshard.formats.zero.tensor_parallel import rules_given
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.content import WEIGHT
from ds_reshard.model.index import Record
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.target import Asked, Target, Unit
from ds_reshard.operations.options import Conversion, Options, Progress, refuse, refuse_memory
from ds_reshard.operations.processes import Parts, in_copies
from ds_reshard.operations.proof import prove, repaired
from ds_reshard.operations.source import Found, find_listing, open_checkpoint
from ds_reshard.operations.units import FilePlan, Units, archive_of, buffer_of, target_of
from ds_reshard.operations.workspace import Workspace, refuse_places
from ds_reshard.planning.copies import Copy
from ds_reshard.version import VERSION

_LEAST_NBYTES = 64 << 20  # to write, for a process of its own
_COPY_NBYTES, _TENSOR_NBYTES = 16 << 20, 8 << 10  # that a process of its own takes, with what it knows of each tensor
_SYNCING = 8  # units at once: waiting for a disk costs no core, and a journal takes several files at one stroke


def convert_listing(
    found: Found, path: str, out: str, *, asked: Asked, options: Options, progress: Progress | None
) -> Conversion:
    """Write the checkpoint `found` in `path`, into the folder `out`, as `asked` says.

    One pass: what is read is written and checked against the checksums of its files, in buffers of
    `options.memory_nbytes`. `out` is there when all of it is on the disk, and not before.
    """
    refuse(asked)
    refuse_memory(options.threads, options.memory_nbytes)
    like = find_listing(asked.like, None).folder if asked.like is not None else None
    before, shown = _seen(found.folder), _seen(like)
    source = repaired(open_checkpoint(found)) if asked.repair else open_checkpoint(found)
    target = target_of(source, asked)
    prove(source, {origin.name for origin in target.wants.values() if origin.kind != WEIGHT})
    needed = _nbytes(target)
    refuse_places(path, out, needed)
    what = {
        "ds_reshard": VERSION,
        "source": {name: list(before.get(name, ())[:2]) for name in sorted(source.files)},
        "tag": found.listing.tag,
        **asdict(asked),
        **({"rules": repr(rules_given())} if rules_given() else {}),
        "dp": source.dp if asked.dp is None else asked.dp,
        **target.basis,
    }
    workspace = Workspace(out, what, force=options.force)
    number, shards = options.shard
    with workspace.open(resume=options.resume, shared=shards > 1) as finished:
        if finished:
            return Conversion(out=out, files=0, bytes_read=0, bytes_written=0, complete=True, notes=target.notes)
        work = _Work(source, target, workspace, options, progress, needed)
        units = target.units[number::shards]
        held = _COPY_NBYTES + len(target.layout.placements) * _TENSOR_NBYTES
        copies = min(options.processes, len(units), needed // _LEAST_NBYTES, options.memory_nbytes // held)
        parts = Parts(units, copied=copies > 1)
        try:
            if copies > 1:
                in_copies(copies, lambda tell: work.copy(copies, tell).write(parts), work.add)
            else:
                work.write(parts)
            changed = [*_changed(source.folder, source.files, before), *_changed(like, shown, shown)]
            raise_faults(changed, subject=f"converting {source.folder}")
            complete = work.finish()
        except CheckpointDamaged:
            workspace.forget()  # what was finished may be made of the damage
            raise
        if not complete and shards == 1:
            raise ReadFailed(f"{workspace.folder}: what was noted of finished files cannot be read; add --resume")
    return Conversion(
        out=out,
        files=work.files,
        bytes_read=work.bytes_read,
        bytes_written=work.bytes_written,
        complete=complete,
        notes=target.notes,
    )


def _nbytes(target: Target) -> int:
    """About how many bytes the output takes: the files of the units of one family differ by little."""
    total = 0
    for family in target.layout.shards:
        units = [unit for unit in target.units if unit.family == family]
        first = units[0].files if units else ()
        total += len(units) * sum(archive_of(file).nbytes for file in first)
    return total


def _seen(folder: str | None) -> dict[str, folders.Identity]:
    if folder is None:
        return {}
    folders.renew(folder)
    return folders.identities_below(folder)


def _changed(folder: str | None, names: Iterable[str], before: Mapping[str, folders.Identity]) -> Iterator[Fault]:
    """Files that were written anew while they were read: without checksums nothing else tells it."""
    now = _seen(folder)
    for name in sorted(name for name in names if now.get(name) != before.get(name)):
        mend = "let the save end, then convert again with --force"
        yield CheckpointDamaged.fault(name, "has changed while it was read", mend=mend)


class _Stopped(Exception):
    """Another unit has failed, or the user has had enough."""


_Done = tuple[int, int, int]
"""What was done: files, bytes read, bytes written."""


class _Work:
    """One process's share of a conversion."""

    def __init__(
        self,
        source: Checkpoint,
        target: Target,
        workspace: Workspace,
        options: Options,
        progress: Progress | None,
        needed: int,
    ) -> None:
        self.files = self.bytes_read = self.bytes_written = 0
        self._source = source
        self._target = target
        self._workspace = workspace
        self._progress = progress
        self._needed = needed
        self._units = Units(source, target)
        self._options = options
        self._tell: Callable[[_Done], None] = self.add
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._synced: list[Future[None]] = []
        self._room = threading.Semaphore(4 * _SYNCING)

    def copy(self, copies: int, tell: Callable[[_Done], None]) -> _Work:
        """This work in one of several copies of the process, with a share of threads and memory."""
        threads, memory_nbytes = max(1, self._options.threads // copies), self._options.memory_nbytes // copies
        self._options = replace(self._options, threads=threads, memory_nbytes=memory_nbytes)
        self._tell = tell
        return self

    def add(self, done: _Done) -> None:
        """Count what was done, here or in a copy of this process."""
        self.files += done[0]
        self.bytes_read += done[1]
        self.bytes_written += done[2]
        if self._progress is not None:
            self._progress(self.bytes_written, self._needed)

    def write(self, parts: Parts[Unit]) -> None:
        """Write units side by side, each by a share of the threads: a file takes one writer at a time.

        While those that are written are brought to the disk, others are written.
        """
        at_once = max(1, min(self._options.threads, len(parts)))

        def write_all() -> None:
            for unit in parts.left():
                if self._stopping.is_set():
                    raise _Stopped
                self._write(unit, at_once)

        with ThreadPoolExecutor(_SYNCING) as syncing, ThreadPoolExecutor(at_once) as pool:
            self._syncing = syncing
            jobs = [pool.submit(self._or_stop, write_all) for _ in range(at_once)]
            try:
                wait(jobs, return_when=FIRST_EXCEPTION)
            except BaseException:
                self._stopping.set()
                raise
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        for job in (*jobs, *self._synced):
            error = None if job.cancelled() else job.exception()
            if error is not None and not isinstance(error, _Stopped):
                raise error

    def _or_stop(self, work: Callable[..., None], *given: object) -> None:
        """Do it; an error ends the others' work as well."""
        try:
            work(*given)
        except BaseException:
            self._stopping.set()
            raise

    def _write(self, unit: Unit, at_once: int) -> None:
        """Write a unit's files, unless that was done before, and have them synced and noted."""
        if self._workspace.noted(unit.name) is not None:
            return
        subject = f"converting {self._source.folder}"
        archives = [archive_of(file) for file in unit.files]
        made, targets = self._files(unit, archives)
        witness = Witness(self._source.index, self._units.wanted(unit.family), unit.shard)

        def saw(copies: Sequence[Copy], views: Sequence[memoryview]) -> None:
            if self._stopping.is_set():
                raise _Stopped
            witness.saw(copies, views)

        executor = StagingExecutor(
            threads=self._options.threads // at_once, memory_nbytes=self._options.memory_nbytes // at_once, saw=saw
        )
        outcome = executor.execute(self._units.plan(unit, archives), targets)
        raise_faults(outcome.faults, subject=subject)
        pending, faults = settle(partial_sums(outcome))
        raise_faults(faults, subject=subject)
        files = {name: {"nbytes": file.nbytes, "crc32": f"{file.finish():08x}"} for name, file in made.items()}
        prints = [
            [key.name, key.kind, key.copy, found.value, found.nbytes]
            for key, found in ((key, witness.sums[key]) for key in witness.sums)
        ]
        sums = [asdict(item) for item in pending]
        known = {"files": files, "family": unit.family, "sums": sums, "tensors": prints}
        self._room.acquire()
        paths = [file.path for file in made.values()]
        self._synced.append(self._syncing.submit(self._or_stop, self._sync, unit, paths, known))
        with self._lock:
            self._tell((len(files), outcome.bytes_read, sum(archive.nbytes for archive in archives)))

    def _files(self, unit: Unit, archives: Sequence[FilePlan]) -> tuple[dict[str, ArchiveFile], dict[str, FileTarget]]:
        """A unit's files by their names, and the targets in them by buffers; what is no tensor is written."""
        files: dict[str, ArchiveFile] = {}
        targets: dict[str, FileTarget] = {}
        for number, (file, archive) in enumerate(zip(unit.files, archives, strict=True)):
            name = os.path.join(self._target.folder, file.name)
            files[name] = ArchiveFile(self._workspace.path(name), archive)
            for key, storage in archive.storages.items():
                dtype = ElementType.UINT8 if storage.path else storage.dtype
                targets[buffer_of(storage, number, key)] = files[name].target(key, dtype)
            for buffer, data in file.data.items():
                targets[buffer].store(0, memoryview(data), targets[buffer].dtype)
        return files, targets

    def _sync(self, unit: Unit, paths: Sequence[str], known: Mapping[str, object]) -> None:
        """Bring a unit's files to the disk, and note them."""
        try:
            for path in paths:
                disk.sync(path)
            self._workspace.note(unit.name, known)
        finally:
            self._room.release()

    def finish(self) -> bool:
        """Where all units are written: check what their sums say together, and give the output its name."""
        notes = [note for unit in self._target.units if (note := self._workspace.noted(unit.name)) is not None]
        if len(notes) < len(self._target.units):
            return self._workspace.is_done()
        subject = f"converting {self._source.folder}"
        for family in self._target.layout.shards:
            faults, again = combine([_sums(note) for note in notes if note["family"] == family])
            raise_faults(faults or read_again(again), subject=subject)
        files = {name: known for note in notes for name, known in note["files"].items()}  # type: ignore[attr-defined]
        manifest = {"format": 1, "files": files, "tensors": self._tensors(notes)}
        self._workspace.commit(manifest, self._target.pointers)
        return True

    def _tensors(self, notes: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """Every tensor with its fingerprint, added up from those of the units; InternalError where a part lacks."""
        sums: dict[TensorKey, Fingerprint] = {}
        for note in notes:
            for name, kind, copy, value, nbytes in note["tensors"]:  # type: ignore[attr-defined]
                key = TensorKey(name=name, kind=kind, copy=copy)
                sums[key] = sums.get(key, Fingerprint()) + Fingerprint(value=value, nbytes=nbytes)
        told: list[dict[str, object]] = []
        for key, placement in sorted(self._target.layout.placements.items()):
            found = sums.get(key, Fingerprint())
            if found.nbytes != placement.numel * placement.dtype.itemsize:
                raise InternalError(f"{key}: {found.nbytes} bytes were moved, of {placement.numel} elements")
            if key.copy:
                continue
            told.append(
                {
                    "name": key.name,
                    "kind": key.kind,
                    "dtype": placement.dtype.label,
                    "shape": list(placement.shape),
                    "fingerprint": str(found),
                }
            )
        return told


def _sums(note: Mapping[str, object]) -> Iterator[PartialSum]:
    sums = note["sums"]
    assert isinstance(sums, list)
    for item in sums:
        spans = tuple((start, stop) for start, stop in item["spans"])
        yield PartialSum(record=Record(*item["record"]), crc32=item["crc32"], spans=spans)
