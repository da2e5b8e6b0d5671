"""Every record of every file of a folder, to be read and compared with the checksums that its archive has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import Fault, ReshardError, faults_of
from ds_reshard.execution.checksums import Ledger
from ds_reshard.execution.interfaces import Outcome
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.index import Record
from ds_reshard.operations.options import Progress, Reading
from ds_reshard.operations.runner import Told, in_shares
from ds_reshard.planning.plan import Check, Plan

_RUN_NBYTES = 128 << 20
_ARCHIVE_MAGIC = b"PK\x03\x04"


@dataclass(slots=True, kw_only=True)
class CheckedFile:
    """A file of the folder: its records by the names of their members, and the runs between them.

    A file that is no archive, or cannot be opened as one, has no members and one run.
    """

    name: str
    path: str
    nbytes: int
    members: dict[Record, str] = field(default_factory=dict)
    between: list[Record] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def open_file(folder: str, name: str, archives: Sequence[tuple[int, int]] | None = None) -> CheckedFile:
    """Read an archive's directory and headers; what is wrong with them is in the file's `faults`.

    `archives` are the offsets and sizes of those that lie in one file, None where the file is one or none.
    """
    path = f"{folder}/{name}"
    file = CheckedFile(name=name, path=path, nbytes=0)
    try:
        with PositionedFile(path) as opened:
            file.nbytes = opened.nbytes
            archive_like = opened.read(0, min(4, opened.nbytes)) == _ARCHIVE_MAGIC or name.endswith(".pt")
        if archives is not None:
            for part in archives:
                _open_members(file, part)
        elif archive_like:
            _open_members(file, None)
    except ReshardError as error:
        file.faults += faults_of(error)
    at = 0
    for record in file.members:
        file.between += [_run(path, at, record.byte_offset - at)] if record.byte_offset > at else []
        at = record.byte_offset + record.nbytes
    file.between += [_run(path, at, file.nbytes - at)] if file.nbytes > at else []
    return file


def _open_members(file: CheckedFile, part: tuple[int, int] | None) -> None:
    with open_archive(file.path, part=part) as archive:
        for name, member in archive.members.items():
            record = Record(path=file.path, byte_offset=member.byte_offset, nbytes=member.nbytes, crc32=member.crc32)
            file.members[record] = name


def _run(path: str, byte_offset: int, nbytes: int) -> Record:
    return Record(path=path, byte_offset=byte_offset, nbytes=nbytes, crc32=None)


def read_records(
    records: Sequence[Record], ledger: Ledger, reading: Reading, *, progress: Progress | None, subject: str
) -> None:
    """Read what the ledger does not have of these records, in their order; faults of reading are noted there.

    Collective with `reading.ranks`. `progress` is told what the ledger has read before, too.
    """
    checks = [part for record in records for check in ledger.missing(record) for part in _parts(check)]
    sizes, before = [check.nbytes for check in checks], ledger.bytes_read
    total = before + sum(sizes)

    def read(mine: list[int], own: Reading, told: Told) -> Outcome:
        executor = ThreadExecutor(threads=own.threads, memory_nbytes=own.memory_nbytes, checksum=True)
        outcome = Outcome()
        for run in _runs(checks[item] for item in mine):
            outcome.add(executor.execute(Plan(copies=(), checks=tuple(run)), {}))
            if told is not None:
                told(outcome.bytes_read)
        return outcome

    tell = (lambda nbytes, _: progress(before + nbytes, total)) if progress is not None else None
    for outcome in in_shares(read, sizes, reading, progress=tell, subject=subject):
        ledger.add(outcome)


def _parts(check: Check) -> Iterator[Check]:
    for at in range(0, check.nbytes, _RUN_NBYTES):
        nbytes = min(_RUN_NBYTES, check.nbytes - at)
        yield Check(record=check.record, byte_offset=check.byte_offset + at, nbytes=nbytes)


def _runs(checks: Iterable[Check]) -> Iterator[list[Check]]:
    """The checks in lists of about _RUN_NBYTES: after each the progress is told."""
    run: list[Check] = []
    nbytes = 0
    for check in checks:
        run.append(check)
        nbytes += check.nbytes
        if nbytes >= _RUN_NBYTES:
            yield run
            run, nbytes = [], 0
    if run:
        yield run
