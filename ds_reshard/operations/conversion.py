"""`convert`: a checkpoint written anew under another format and data-parallel size, without the framework."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from typing import NamedTuple

from ds_reshard.containers import folders
from ds_reshard.containers.crc import crc32
from ds_reshard.containers.remote import PART_NBYTES, is_url
from ds_reshard.errors import (
    CheckpointDamaged,
    Fault,
    InternalError,
    ReadFailed,
    UnsupportedLayout,
    error_of,
    raise_faults,
)
from ds_reshard.execution.checksums import PartialSum, Span, combine, partial_sums, read_again, settle
from ds_reshard.execution.files import ArchiveFile, FileTarget, StagingExecutor
from ds_reshard.execution.fingerprint import Fingerprint, Witness
from ds_reshard.model.checkpoint import Checkpoint
from ds_reshard.model.content import WEIGHT
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.index import Record
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.rules import active_rules
from ds_reshard.model.target import ConversionRequest, Target, Unit
from ds_reshard.operations.options import Conversion, Options, Progress, Reading, refuse, refuse_memory
from ds_reshard.operations.proof import prove, repaired
from ds_reshard.operations.ranks import rank, world_size
from ds_reshard.operations.runner import COPY_NBYTES, Parts, dealt, in_copies, in_ranks, showing, stopping
from ds_reshard.operations.source import Found, find_listing, open_checkpoint, open_weights
from ds_reshard.operations.store_workspace import StoreWorkspace
from ds_reshard.operations.units import FilePlan, Units, archive_of, buffer_of, target_of
from ds_reshard.operations.values import largest_values
from ds_reshard.operations.workspace import Workspace, refuse_places
from ds_reshard.planning.copies import Copy
from ds_reshard.version import VERSION

_LEAST_NBYTES = 64 << 20  # to write, for a process of its own
_TENSOR_NBYTES = 8 << 10  # that a process of its own takes with what it knows of each tensor
_SYNCING = 8  # units at once: waiting for a disk costs no core, and a journal takes several files at one stroke
_SENDING = 16  # units at once, where memory has room for two parts of each


def convert_listing(
    found: Found, path: str, out: str, *, asked: ConversionRequest, options: Options, progress: Progress | None
) -> Conversion:
    """Write the checkpoint `found` in `path`, into the folder `out`, as `asked` says.

    One pass: what is read is written and checked against the checksums of its files, in buffers of
    `options.memory_nbytes`. `out` is there when all of it is on the disk, and not before.
    """
    refuse(asked)
    refuse_memory(options.threads, options.memory_nbytes)
    like = find_listing(asked.like, None).folder if asked.like is not None else None
    before, shown = _seen(found.folder), _seen(like)
    source = open_weights(found) if asked.weights_only and not asked.repair else open_checkpoint(found)
    source = repaired(source) if asked.repair else source
    target = target_of(source, asked)
    used = {origin.name for origin in target.sources.values() if origin.kind != WEIGHT}
    prove(source, used if target.source_layout is None else None)
    planned, sizes = _planned(target)
    raise_faults(_unnamed(target), subject=f"converting {source.folder}")
    refuse_places(path, out, sum(sizes.values()))
    told = 3 if is_url(path) else 2  # the number of a file on a disk may be another when that is mounted again
    what = {
        "ds_reshard": VERSION,
        "source": {name: list(before.get(name, ())[:told]) for name in sorted(source.files)},
        "tag": found.listing.tag,
        **asdict(asked),
        **({"rules": repr(active_rules())} if active_rules() else {}),
        "dp": source.dp if asked.dp is None else asked.dp,
        **target.basis,
    }
    subject = f"converting {source.folder}"
    work = _Work(source, target, _workspace(out, what, target, options), options, sizes, planned)

    def write() -> _Done:
        work.write_all(units, progress)
        raise_faults([*_changed(source.folder, source.files, before), *_changed(like, shown, shown)], subject=subject)
        return work.done

    with contextlib.ExitStack() as stack:
        begun = in_ranks(lambda: work.begin(stack), ranks=options.ranks, subject=subject)
        if begun[0].finished:
            return Conversion(out=out, files=0, bytes_read=0, bytes_written=0, complete=True, notes=target.notes)
        units = work.dealt(begun)
        try:
            done = in_ranks(write, ranks=options.ranks, subject=subject)
            notes = in_ranks(work.finish, ranks=options.ranks, subject=subject)[0]
        except CheckpointDamaged:
            work.forget()  # what was finished may be made of the damage
            raise
    return Conversion(
        out=out,
        files=sum(one.files for one in done),
        bytes_read=sum(one.bytes_read for one in done),
        bytes_written=sum(one.bytes_written for one in done),
        complete=notes is not None,
        notes=target.notes if notes is None else notes,
        written_by_rank=tuple(one.bytes_written for one in done),
    )


def _unnamed(target: Target) -> Iterator[Fault]:
    """Tags that no file can name: frameworks read it as UTF-8."""
    for file, text in target.pointers.items():
        if text != text.encode("utf-8", "replace").decode("utf-8"):
            mend = "give the source's folder a name of letters that have codes"
            yield UnsupportedLayout.fault(file, "would name a tag that is no UTF-8", found=repr(text), mend=mend)


@gc_disabled()
def _planned(target: Target) -> tuple[dict[str, list[FilePlan]], dict[str, int]]:
    """The archives of the first unit of each family, and about how many bytes each unit takes: as many as that."""
    planned: dict[str, list[FilePlan]] = {}
    of_family: dict[str, int] = {}
    for unit in target.units:
        if unit.family not in of_family:
            planned[unit.name] = [archive_of(file) for file in unit.files]
            of_family[unit.family] = sum(archive.nbytes for archive in planned[unit.name])
    return planned, {unit.name: of_family[unit.family] for unit in target.units}


def _workspace(out: str, what: Mapping[str, object], target: Target, options: Options) -> Workspace:
    if not is_url(out):
        return Workspace(out, what, force=options.force)
    names = [os.path.join(target.folder, file.name) for unit in target.units for file in unit.files]
    return StoreWorkspace(out, what, names=[*names, *target.pointers], folder=target.folder)


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


class _Done(NamedTuple):
    """What was done."""

    files: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def plus(self, other: _Done) -> _Done:
        return _Done(*(one + more for one, more in zip(self, other, strict=True)))


class _Begun(NamedTuple):
    """What a rank knows before it writes; whether all is finished, and which units are left, the first knows."""

    made_of: str
    finished: bool
    left: list[str]


class _Work:
    """One process's share of a conversion, or one rank's; the first of several opens the workspace and ends it."""

    def __init__(
        self,
        source: Checkpoint,
        target: Target,
        workspace: Workspace,
        options: Options,
        sizes: Mapping[str, int],
        planned: dict[str, list[FilePlan]],
    ) -> None:
        self.done = _Done()
        self._source = source
        self._target = target
        self._workspace = workspace
        self._sizes, self._planned = sizes, planned
        self._units = Units(source, target)
        self._sends = isinstance(workspace, StoreWorkspace)
        self._options = options
        if self._sends:  # what is sent has the other half
            self._options = replace(options, memory_nbytes=options.memory_nbytes // 2)
        self._subject = f"converting {source.folder}"
        self._ranks = options.ranks and world_size() > 1
        self._is_first = not self._ranks or rank() == 0
        self._progress: Progress | None = None
        self._tell: Callable[[_Done], None] = self.add
        self._lock = threading.Lock()
        self._stopping = stopping(ranks=self._ranks)
        self._synced: list[Future[None]] = []

    def begin(self, stack: contextlib.ExitStack) -> _Begun:
        """Open the workspace, until the stack is left."""
        workspace, options = self._workspace, self._options
        workspace.room(max(self._sizes.values()))
        if not self._is_first:
            stack.enter_context(workspace.joined())
            return _Begun(workspace.made_of, False, [])
        finished = stack.enter_context(workspace.open(resume=options.resume, part=options.shard))
        return _Begun(workspace.made_of, finished, [] if finished else workspace.left(list(self._sizes)))

    def dealt(self, begun: Sequence[_Begun]) -> list[Unit]:
        """The units that are written here, of those that are left: each rank has about as many bytes."""
        if others := [str(number) for number, one in enumerate(begun) if one.made_of != begun[0].made_of]:
            what = "is not the same for every rank: it changes, or the ranks see different files"
            mend = "let the save end, and put it where every rank reads it under this path"
            found = f"other sizes or times on rank {', '.join(others)}"
            fault = CheckpointDamaged.fault(self._source.folder, what, "the files of rank 0", found, mend=mend)
            raise error_of([fault], subject=self._subject)
        left, (number, shards) = set(begun[0].left), self._options.shard
        units = [unit for unit in self._target.units[number::shards] if unit.name in left and not self._is_last(unit)]
        self._total = sum(self._sizes[unit.name] for unit in units)
        if not self._ranks:
            return units
        return [units[item] for item in dealt([self._sizes[unit.name] for unit in units], (rank(), world_size()))]

    def _is_last(self, unit: Unit) -> bool:
        """Whether it is written when all others are there: small files, without which other readers see nothing."""
        return self._sends and any(file.container == "plain" for file in unit.files)

    def copy(self, copies: int, tell: Callable[[_Done], None]) -> _Work:
        """This work in one of several copies of the process, with a share of threads and memory."""
        self._options = self._options.divided(copies)
        self._tell = tell
        return self

    def add(self, done: _Done) -> None:
        """Count what was done, here or in a copy of this process."""
        self.done = self.done.plus(done)
        if self._progress is not None:
            self._progress(self.done.bytes_written, self._total)

    def write_all(self, units: Sequence[Unit], progress: Progress | None) -> None:
        """Write the units, where they are large by copies of this process."""
        held = COPY_NBYTES + len(self._target.layout.placements) * _TENSOR_NBYTES
        most = (len(units), sum(self._sizes[unit.name] for unit in units) // _LEAST_NBYTES)
        copies = min(self._options.processes, *most, self._options.memory_nbytes // held)
        parts = Parts(units, copied=copies > 1)
        with showing(progress, ranks=self._ranks) as self._progress:
            if copies > 1:
                in_copies(copies, lambda _, tell: self.copy(copies, tell).write(parts, copies), self.add)
            else:
                self.write(parts)

    def write(self, parts: Parts[Unit], copies: int = 1) -> None:
        """Write units side by side, each by a share of the threads: a file takes one writer at a time.

        While those that are written are brought to the disk, or sent, others are written.
        """
        at_once = max(1, min(self._options.threads, len(parts)))
        keeping = _SYNCING
        if self._sends:
            keeping = max(1, min(_SENDING, self._options.memory_nbytes // (2 * PART_NBYTES)))
        most = self._workspace.room(max(self._sizes.values())) // copies
        self._room = threading.Semaphore(max(1, min(at_once + 4 * keeping, most)))

        def write_all() -> None:
            for unit in parts.left():
                if self._stopping.is_set():
                    raise _Stopped
                self._room.acquire()
                try:
                    self._write(unit, at_once)
                except BaseException:
                    self._room.release()  # nobody keeps this unit, and others may be waiting for room
                    raise

        with ThreadPoolExecutor(keeping) as syncing, ThreadPoolExecutor(at_once) as pool:
            self._syncing, jobs = syncing, list[Future[None]]()
            try:
                jobs += (pool.submit(self._or_stop, write_all) for _ in range(at_once))
                wait(jobs, return_when=FIRST_EXCEPTION)
                wait(self._synced)  # here, where an interruption is heard
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
        """Write a unit's files, and have them brought where they last, and noted."""
        archives = self._planned.pop(unit.name, None) or [archive_of(file) for file in unit.files]
        made, targets = self._files(unit, archives)
        witness = Witness(self._units.index, self._units.wanted(unit.family), unit.shard)

        def saw(copies: Sequence[Copy], views: Sequence[memoryview]) -> None:
            if self._stopping.is_set():
                raise _Stopped
            witness.saw(copies, views)

        executor = StagingExecutor(
            threads=self._options.threads // at_once, memory_nbytes=self._options.memory_nbytes // at_once, saw=saw
        )
        outcome = executor.execute(self._units.plan(unit, archives), targets)
        raise_faults(outcome.faults, subject=self._subject)
        pending, faults = settle(partial_sums(outcome))
        raise_faults(faults, subject=self._subject)
        files = {name: {"nbytes": file.nbytes, "crc32": f"{file.finish():08x}"} for name, file in made.items()}
        prints = [[*key, witness.sums[key].value, witness.sums[key].nbytes] for key in witness.sums]
        sums = [asdict(item) for item in pending]
        known = {"files": files, "family": unit.family, "sums": sums, "tensors": prints}
        paths = {name: file.path for name, file in made.items()}
        done = _Done(len(files), outcome.bytes_read, sum(archive.nbytes for archive in archives))
        self._synced.append(self._syncing.submit(self._or_stop, self._keep, unit, paths, known, done))

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

    def _keep(self, unit: Unit, paths: Mapping[str, str], known: Mapping[str, object], done: _Done) -> None:
        """Bring a unit's files to the disk, or send them, and note them."""
        try:
            if self._sends and self._stopping.is_set():  # the files that wait to be sent may be many, and large
                raise _Stopped
            self._workspace.note(unit.name, {**known, **self._workspace.keep(paths)})
        finally:
            self._room.release()
        with self._lock:
            self._tell(done)

    def forget(self) -> None:
        """Have everything written anew."""
        if self._is_first:
            self._workspace.forget()

    @gc_disabled()
    def finish(self) -> tuple[str, ...] | None:
        """Where all units are written: check what their sums say together, and give the output its name.

        Return the notes of the target; None if units are left that another part writes.
        """
        if not self._is_first:
            return ()
        names = [unit.name for unit in self._target.units]
        if last := [unit for unit in self._target.units if self._is_last(unit)]:
            left = set(self._workspace.left(names))
            if left - {unit.name for unit in last}:
                return self._left_to_others()
            self.write(Parts([unit for unit in last if unit.name in left], copied=False))
        notes = self._workspace.notes(names)
        if len(notes) < len(names):
            return self._left_to_others()
        for family in self._target.layout.shards:
            sums = [item for note in notes if note["family"] == family for item in _sums(note)]
            faults, again = combine([sums])
            raise_faults(faults or read_again(sums, again), subject=self._subject)
        told = tuple(self._measured())
        files = {name: known for note in notes for name, known in note["files"].items()}  # type: ignore[attr-defined]
        for name, text in self._target.pointers.items() if not self._target.folder else ():  # else beside the tag
            data = text.encode("utf-8")
            files[name] = {"nbytes": len(data), "crc32": f"{crc32(data):08x}"}
        manifest = {"format": 1, "files": files, "tensors": self._tensors(notes)}
        self._workspace.commit(manifest, self._target.pointers)
        return told

    def _measured(self) -> Iterator[str]:
        """Yield the notes of the target, with the largest value of the elements that a map leaves out."""
        reading = Reading(threads=self._options.threads, memory_nbytes=self._options.memory_nbytes)
        for note in self._target.notes:
            if keys := self._target.padding.get(note):
                largest = largest_values(self._units.index, keys, reading).items()
                shown = ", ".join(f"{key.kind} {value:.2g}".replace("nan", "NaN") for key, value in largest)
                note = f"{note} (largest: {shown})"
            yield note

    def _left_to_others(self) -> tuple[str, ...] | None:
        """Return the notes if another part has ended the work, None if not; ReadFailed if there is no other part."""
        if self._workspace.is_done():
            return self._target.notes
        if self._options.shard[1] == 1:
            where = self._workspace.folder
            raise ReadFailed(f"{where}: what was noted of finished files cannot be read; add --resume")
        return None

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
        spans = tuple(Span(*span) for span in item["spans"])
        yield PartialSum(record=Record(*item["record"]), crc32=item["crc32"], spans=spans)
