"""`verify`: every file of a checkpoint compared with what it says of itself, and its tensors' values looked at."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ds_reshard.containers import folders
from ds_reshard.containers.pickle_rules import UNSAFE
from ds_reshard.containers.remote import is_url, without_end
from ds_reshard.errors import CheckpointDamaged, ConfigError, Fault, ReshardError, faults_of
from ds_reshard.execution.checksums import Ledger, altered
from ds_reshard.execution.cuda import offline_device
from ds_reshard.execution.interfaces import Outcome
from ds_reshard.model.checkpoint import Checkpoint, SavedListing
from ds_reshard.model.index import Record
from ds_reshard.model.reports import Verification
from ds_reshard.operations.archives import CheckedFile, open_file, read_records
from ds_reshard.operations.options import Progress, Reading
from ds_reshard.operations.pickles import scan_files, siblings, untold
from ds_reshard.operations.proof import repeated, unproved
from ds_reshard.operations.runner import Told, in_shares
from ds_reshard.operations.source import Found, open_checkpoint
from ds_reshard.operations.values import Bad, Values, read_spans, rows_of
from ds_reshard.operations.workspace import MANIFEST, read_manifest


def verify_listing(found: Found, path: str, *, deep: bool, reading: Reading, progress: Progress | None) -> Verification:
    """Everything that is wrong with the checkpoint `found`; reads each byte of its folder once, pickles again.

    `path` is the folder that was given: the pickles of the files beside the checkpoint's folder are searched as well.
    """
    started = time.monotonic()
    if not deep and reading.device == "cuda":
        raise ConfigError("--device cuda: without --deep nothing is computed there; add --deep, or leave it out")
    offline_device(reading.device)
    survey, listing = found.format.survey(found.listing), found.listing
    # A record whose checksum is wrong is found below, with all others, and so is what acts in a pickle.
    told = (*survey.faults, *survey.further)
    faults = [fault for fault in told if fault.error not in ("ChecksumMismatch", *UNSAFE)]
    inside = listing.archives() if isinstance(listing, SavedListing) else {}
    files = [open_file(listing.folder, name, inside.get(name)) for name in folders.files_below(listing.folder)]
    manifest, ledger = _Manifest(listing.folder, files), Ledger()
    wanted: list[Record] = []  # every record, and of files that the manifest knows also what lies between
    for file in files:
        records = [*file.members, *(file.between if file.name in manifest.known else ())]
        wanted += sorted(records, key=lambda record: record.byte_offset)
    notes: list[str] = []
    tensors = 0
    holders: dict[Record, list[str]] = {}
    source = None if survey.faults else _opened(found, faults)
    if source is not None:
        holders = _holders(source)
        notes += source.notes
        if deep:
            total = sum(record.nbytes for record in wanted)
            tensors = _look(source, ledger, faults, notes, reading=reading, progress=progress, total=total)
    elif deep:
        notes.append("the values of the tensors were not looked at: first mend the faults of the files")
    read_records(wanted, ledger, reading, progress=progress, subject="verifying")
    scanned = scan_files(siblings(path, listing.folder))
    faults = [fault for fault in faults if fault.error not in UNSAFE]
    faults += [*_mismatches(files, ledger, holders), *manifest.faults(ledger)]
    for file in files:
        faults += file.faults
    faults += untold(scanned.faults, faults)
    unchecked = sum(record.crc32 is None for file in files for record in file.members)
    return Verification(
        folder=listing.folder,
        files=len(files),
        unchecked=unchecked,
        tensors=tensors,
        records=sum(len(file.members) for file in files) - unchecked,
        bytes_read=ledger.bytes_read,
        seconds=time.monotonic() - started,
        faults=tuple(_distinct(faults)),
        notes=(*notes, *_notes(files, unchecked, manifest)),
        pickles=scanned.pickles,
        pickles_unread=scanned.unread,
    )


def _opened(found: Found, faults: list[Fault]) -> Checkpoint | None:
    """The checkpoint opened whole, None where it cannot be; why not is then among the faults."""
    try:
        source = open_checkpoint(found)
        faults += unproved(source) or repeated(source)
        return source
    except ReshardError as error:
        faults += faults_of(error)
        return None


def _distinct(faults: Sequence[Fault]) -> list[Fault]:
    """Each fault once, in order: a file that cannot be opened was tried for more than one purpose."""
    kept = {(fault.where, fault.what): fault for fault in reversed(faults)}
    return sorted(kept.values(), key=lambda fault: (fault.where, fault.what, fault.found))


def _holders(source: Checkpoint) -> dict[Record, list[str]]:
    """The flat buffers and weights that lie in each record."""
    found: dict[Record, list[str]] = {}
    for family, shard in source.index.opened:
        for buffer, extent in source.index.open(family, shard).items():
            found.setdefault(extent.record, []).append(buffer)
    return found


def _look(
    source: Checkpoint,
    ledger: Ledger,
    faults: list[Fault],
    notes: list[str],
    *,
    reading: Reading,
    progress: Progress | None,
    total: int,
) -> int:
    """Look at the values of all tensors, as far as they can be read; how many they are."""
    rows, device = rows_of(source), offline_device(reading.device)
    sizes = [sum(column.nbytes for column in row.columns) for row in rows]

    def look(mine: list[int], own: Reading, told: Told) -> tuple[Outcome, Bad, list[Fault]]:
        part, found, wanted = Ledger(), Values(rows), [rows[row].columns for row in mine]
        try:
            for span in read_spans(wanted, part, threads=own.threads, memory_nbytes=own.memory_nbytes, told=told):
                found.look(replace(span, row=mine[span.row]).on(device))
        except ReshardError as error:
            return part, found.bad, faults_of(error)
        return part, found.bad, []

    tell = (lambda done, _: progress(done, total)) if progress is not None else None
    values, subject = Values(rows), f"verifying {source.folder}"
    for read, bad, failed in in_shares(look, sizes, reading, progress=tell, subject=subject):
        ledger.add(read)
        values.bad |= bad
        faults += failed
    wrong, told = values.faults()
    known = {fault.where for fault in faults}
    faults += [fault for fault in wrong if fault.where not in known]
    notes += told
    return sum(len(row.columns) for row in rows)


def _mismatches(files: Sequence[CheckedFile], ledger: Ledger, holders: Mapping[Record, list[str]]) -> Iterator[Fault]:
    """Records that are not what was written, by the names of their members and what lies in them."""
    names = {}
    for file in files:
        for record, name in file.members.items():
            held = ", ".join(holders.get(record, [])[:3])
            names[record.path, altered(record)] = f"record {name!r}{f' ({held})' if held else ''}"
    yield from ledger.faults
    for fault in ledger.mismatches():
        name = names.get((fault.where, fault.what), "")
        yield replace(fault, what=f"{name}: {fault.what}" if name else fault.what)


class _Manifest:
    """What `ds_reshard.json` in the folder, or beside the tag, says of its files.

    `known` are those, by their names in the folder.
    """

    def __init__(self, folder: str, files: Sequence[CheckedFile]) -> None:
        self._files = {file.name: file for file in files}
        self._folder = folder
        self.known: dict[str, dict[str, object]] = {}
        self._wrong = ""
        own = self._files.pop(MANIFEST, None) is not None
        for self._path, prefix in [(os.path.join(folder, MANIFEST), "")] if own else _beside(folder):
            try:
                manifest = read_manifest(self._path)
                listed = manifest.get("files", {}) if manifest is not None else {}
                if not isinstance(listed, dict) or not all(isinstance(known, dict) for known in listed.values()):
                    raise ValueError("it lists no files")
            except ValueError as error:
                self._wrong = str(error)
                return
            if known := {name.removeprefix(prefix): one for name, one in listed.items() if name.startswith(prefix)}:
                self.known = known
                return

    def faults(self, ledger: Ledger) -> Iterator[Fault]:
        """Files that are missing, additional or changed; of those of the right size, every byte was read."""
        if self._wrong:
            yield CheckpointDamaged.fault(
                self._path,
                f"is not what was written: {self._wrong}",
                mend="convert the checkpoint again, or restore the file from a copy",
            )
        if not self.known:
            return
        for name, known in sorted(self.known.items()):
            file = self._files.get(name)
            nbytes = f"{file.nbytes} bytes" if file is not None else "no file"
            if nbytes != f"{known.get('nbytes')} bytes":
                yield self._fault(name, "is not as the manifest lists it", f"{known.get('nbytes')} bytes", nbytes)
            elif file is not None:
                found = f"{ledger.crc32_of((*file.members, *file.between), file.nbytes):08x}"
                if found != known.get("crc32"):
                    yield self._fault(name, "is not as the manifest lists it", f"crc32 {known.get('crc32')}", found)
        for name in sorted(set(self._files) - set(self.known)):
            yield self._fault(name, "is not in the manifest", "no such file", f"{self._files[name].nbytes} bytes")

    def _fault(self, name: str, what: str, expected: str, found: str) -> Fault:
        return CheckpointDamaged.fault(
            f"{self._folder}/{name}",
            what,
            expected,
            found,
            mend="convert the checkpoint again, or restore the folder from a copy",
        )


def _beside(folder: str) -> Iterator[tuple[str, str]]:
    """The manifests that may speak of a tag, and what its files begin with there: by its name, and by its place."""
    places = (without_end(folder),) if is_url(folder) else (os.path.abspath(folder), os.path.realpath(folder))
    for place in dict.fromkeys(places):
        yield os.path.join(os.path.dirname(place), MANIFEST), f"{os.path.basename(place)}/"


def _notes(files: Sequence[CheckedFile], unchecked: int, manifest: _Manifest) -> Iterator[str]:
    bare = [file.name for file in files if not file.members and not file.faults and file.name not in manifest.known]
    if unchecked:
        yield f"{unchecked} records carry no checksum: they were saved with torch's crc32 off"
    if bare:
        shown = ", ".join(bare[:4]) + (", ..." if len(bare) > 4 else "")
        yield f"{len(bare)} files carry no checksums and were not looked at: {shown}"
