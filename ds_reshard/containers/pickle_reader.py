"""Reads pickles as inert values, one of them or all of any file; nothing that they name is imported or called.

`read_pickle` sees every name and call in a pickle. `scan_file` finds every pickle by its content: what would act if a
framework, or Python, loaded the file. What a loader makes of a file is decided by its first bytes
(torch/serialization.py `_is_zipfile`, `_legacy_load`, 2.13; numpy/lib/_npyio_impl.py `load`, 2.4): a zip file, a tar
file, an array of numpy, and else a pickle, or several.
"""

from __future__ import annotations

import io
import os
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ds_reshard.containers import digests
from ds_reshard.containers.pickle_engine import UNKNOWN, Persistent, Reading, Reduce
from ds_reshard.containers.pickle_rules import UNSAFE, PickleRules, acts, fault_of, rules_in_force
from ds_reshard.containers.pickle_tokens import PickleLimits
from ds_reshard.containers.positioned import PositionedBytes, PositionedFile, PositionedView
from ds_reshard.containers.zip_directory import END, END64, LEGACY_MAGIC, find_directory
from ds_reshard.errors import CheckpointDamaged, Fault, ReshardError, UnsafePickle, faults_of, raise_faults
from ds_reshard.model.nesting import out_of_bounds
from ds_reshard.model.records import GlobalName, ObjectRecord

DEFAULT_LIMITS = PickleLimits()


def keep_as_record(function: GlobalName, args: tuple[object, ...]) -> object:
    """The hook of a reader that gives no call a meaning: each becomes an ObjectRecord."""
    return NotImplemented


def read_pickle(
    data: bytes,
    *,
    where: str,
    persistent: Persistent,
    member: str = "",
    limits: PickleLimits = DEFAULT_LIMITS,
    reduce: Reduce = keep_as_record,
    rules: PickleRules | None = None,
) -> object:
    """The value that `data` pickles, made of plain containers and records; nothing named in it is imported.

    A class or function becomes a GlobalName; calling one gives what `reduce` returns for it and its
    arguments, or an ObjectRecord when `reduce` returns NotImplemented. Plain values that pickle writes as
    calls (OrderedDict, set, bytes, complex, range, slice, torch.Size as a tuple) become themselves.
    `persistent` turns a persistent id into a value. Linear in the size of the pickle, without recursion.

    Raises UnsafePickle with a fault for each name that `rules` (by default those in force) do not allow as it is used,
    whether or not its result is kept; TrustRequired where all of them may be trusted. CheckpointDamaged for everything
    else that is wrong, with `where`, the `member` of the file, and the byte offset of the instruction.
    """
    rules = rules_in_force() if rules is None else rules
    place = f"{where}: {member}" if member else where
    if len(data) > limits.nbytes:
        raise CheckpointDamaged(f"{place}: a pickle of {len(data)} bytes; at most {limits.nbytes} are read")
    reading = Reading(data, persistent, reduce, limits, rules)
    error = reading.damage(place)
    if error is None and data[reading.stopped_at :].strip(b"\0"):
        error = CheckpointDamaged(
            f"{place}: byte {reading.stopped_at}: {len(data) - reading.stopped_at} bytes follow the end of the pickle"
        )
    if error is None:
        excess = out_of_bounds(reading.result, depth=limits.depth, parts=limits.parts + limits.expansion * len(data))
        if excess is not None:
            error = CheckpointDamaged(f"{place}: the pickle's value {excess}")
    faults = found_in(reading, where, member)
    if faults:
        raise_faults([*faults, *(faults_of(error) if error is not None else ())], subject="reading a checkpoint")
    if error is not None:
        raise error
    if not member:
        rules.note(where)
        if (found := digests.asked()) is not None:
            found[where] = digests.digest(data)
    return reading.result


def found_in(reading: Reading, where: str, member: str) -> list[Fault]:
    """The faults of all findings of a reading, and of the pickles in bytes that it hands to a loader of pickles."""
    faults: list[Fault] = []
    if reading.findings and not (reading.rules.everything and not reading.refused):
        faults += [fault_of(finding, where, member) for finding in reading.findings.values()]
    if reading.nested and not reading.rules.everything:
        for nested, (byte, surely) in reading.nested.items():
            inner = f"{member}, byte {byte}: bytes" if member else f"byte {byte}: bytes"
            faults += scan_bytes(nested, where, inner, reading.rules, strict=surely)
    return faults


# -- every pickle of any file ------------------------------------------------------------------------------------------

_ZIP, _TAR, _NUMPY = b"PK\x03\x04", b"ustar", b"\x93NUMPY"
_LEGACY_PICKLES = 5  # torch.save before 1.6 wrote so many, then storages
# Frameworks unpickle what is called so: what cannot be read of it cannot be told to be harmless.
_NAMED = (".pkl", ".pickle", ".pt", ".pth", ".metadata", ".distcp")
_MOST_PICKLES = 10_000
_WINDOW = 64 << 10
_LONG_TEXT = 1 << 20
_GUESSED = 4 << 20  # of the instructions of a pickle in a file that nothing says is one
_ANEW = 8  # so often may those be read anew, behind long texts
_IMPORTABLE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_DEPTH = 8
_INFLATED = 64 << 20


@dataclass(slots=True, kw_only=True)
class Scanned:
    """How many pickles were found, and all that is wrong with them."""

    pickles: int = 0
    faults: list[Fault] = field(default_factory=list)

    @property
    def unread(self) -> int:
        """How many files could not be read to their end, so that something may stand behind."""
        return len({fault.where for fault in self.faults if fault.error not in UNSAFE})

    def add(self, other: Scanned) -> None:
        self.pickles += other.pickles
        self.faults += other.faults


def scan_file(path: str, rules: PickleRules, parts: Iterable[tuple[int, int]] = (), *, whole: bool = True) -> Scanned:
    """All pickles of a file, whatever it is; nothing in them is run. A file that holds none gives none.

    `parts` are the offsets and sizes of what its directory says lies in it (torch.distributed.checkpoint), each of
    which is looked at by itself, beside the `whole` or alone.
    """
    found = Scanned()
    try:
        with PositionedFile(path) as file:
            if whole:
                found.add(scan_source(file, "", rules, strict=path.endswith(_NAMED)))
            known = set(_archives(file) or ()) if whole else set()
            for offset, nbytes in parts:
                if (offset, nbytes) in known:
                    continue
                if min(offset, nbytes) < 0 or offset + nbytes > file.nbytes:
                    what = f"{nbytes} bytes at {offset} are meant to be there; it ends at {file.nbytes}"
                    found.faults.append(_fault(path, what))
                    continue
                view = PositionedView(file, offset, nbytes)
                found.add(scan_source(view, f"{nbytes} bytes at {offset}", rules, strict=True))
    except ReshardError as error:
        found.faults += faults_of(error)
    return found


def scan_bytes(data: bytes, where: str, member: str, rules: PickleRules, *, strict: bool = False) -> list[Fault]:
    """The faults of bytes that a loader may open as a file; `member` names the place in the file `where`.

    With `strict` it surely does, and what is no pickle after all is a fault.
    """
    if member.count(": bytes") > _DEPTH:
        return [_fault(where, f"{member}: pickles lie in each other more than {_DEPTH} deep")]
    return scan_source(PositionedBytes(where, data), member, rules, strict=strict).faults


def scan_source(file: PositionedFile, member: str, rules: PickleRules, *, strict: bool) -> Scanned:
    """As `scan_file`, of an open file. With `strict`, what is no pickle after all is a fault."""
    head = file.read(0, min(file.nbytes, 512))
    if head.startswith(_ZIP):
        return _zip(file, member, rules)
    if head[257:262] == _TAR or (type(file) is PositionedFile and _is_tar(file)):
        found = _tar(file, member)
        found.add(_pickles(file, 0, member, rules, strict=False))  # of which the names in it may be instructions
        return found
    if head.startswith(_NUMPY):
        return _array(file, head, member, rules)
    if file.whole and file.path.endswith(".safetensors") and head[8:9] == b"{":
        return Scanned()
    return _pickles(file, 0, member, rules, strict=strict)


def begins_marked(head: bytes) -> bool:
    """Whether bytes begin as files of torch.save and pickles of protocol 2 and later do."""
    return head[:4] == _ZIP or (head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"))


# -- pickles, one after the other --------------------------------------------------------------------------------------


def _pickles(file: PositionedFile, at: int, member: str, rules: PickleRules, *, strict: bool) -> Scanned:
    """Read the pickles that follow each other from a position on.

    Any bytes may begin like a pickle, so an error usually means that there is none. It is a fault if a pickle must be
    there (`strict`, and the first five of a file of torch.save), if a limit was reached, if Python might have read on,
    or if something was found behind the mark of a pickle. Without the mark only calls and other actions count.
    """
    found = Scanned()
    marked = begins_marked(file.read(at, min(4, file.nbytes - at)))
    legacy = file.read(at, min(len(LEGACY_MAGIC), file.nbytes - at)) == LEGACY_MAGIC
    while at < file.nbytes and not (legacy and found.pickles == _LEGACY_PICKLES):
        must = legacy or (strict and not found.pickles)
        reading, error, after = _run(file, at, rules, strict=must)
        place = f"{member}, pickle {found.pickles + 1}".removeprefix(", ") if found.pickles else member
        told = must or reading.over_limit or reading.astray or (marked and reading.findings)
        if error is not None and not (told or _would_act(reading)):
            return found
        found.faults += found_in(reading, file.path, place)
        if error is not None:
            found.faults += faults_of(error) if told else ()
            return found
        found.pickles += 1
        if found.pickles == _MOST_PICKLES:
            found.faults.append(_fault(file.path, _prefix(member, f"more than {_MOST_PICKLES} pickles are not read")))
            return found
        at = after
    return found


def _would_act(reading: Reading) -> bool:
    """Whether something was called that Python could import, or the machine's own was named: its import may act."""
    found = [finding for finding in reading.findings.values() if _IMPORTABLE.fullmatch(finding.name)]
    return any(finding.called or acts(finding.name) for finding in found)


def _run(
    file: PositionedFile, at: int, rules: PickleRules, *, strict: bool
) -> tuple[Reading, ReshardError | None, int]:
    """Read the pickle at a position, in as much of the file as it takes, and where it ends in the file.

    Of what may be none, long texts are left out: `head` is what was read before one, with a text of no bytes for it.
    """
    most = DEFAULT_LIMITS.nbytes if strict else _GUESSED
    head, place, window = b"", at, _WINDOW
    left_out: list[tuple[int, int]] = []
    spent = 0
    while True:
        nbytes = min(window, file.nbytes - place, max(0, most - len(head)))
        spent += len(head) + nbytes
        reading = Reading(head + file.read(place, nbytes), _opaque, keep_as_record, DEFAULT_LIMITS, rules)
        error = reading.damage(file.path)
        behind = place - len(head)  # what leads from a position in the machine's bytes to that in the file
        lacks = reading.lacks
        ends = place + nbytes == file.nbytes or (lacks and behind + lacks.start + lacks.nbytes > file.nbytes)
        if error is not None and reading.cut_short and not ends:
            if not strict and spent > _ANEW * _GUESSED + (place - at) // _ANEW:
                reading.over_limit = True
                what = "a pickle that has long texts behind so many instructions is not read to its end"
                return reading, CheckpointDamaged(f"{file.path}: {what}"), behind + reading.stopped_at
            if not strict and lacks and lacks.nbytes > _LONG_TEXT and not reading.in_frame:
                width = lacks.start - reading.stopped_at - 1
                head = reading.data[: lacks.start - width] + bytes(width)
                place, window = behind + lacks.start + lacks.nbytes, _WINDOW
                left_out.append((len(head), place - at - len(head)))
                continue
            if len(head) + nbytes < most:
                window *= 8
                continue
            reading.over_limit = True
            error = CheckpointDamaged(f"{file.path}: a pickle of more than {most} bytes is not read")
        if left_out and b"" in reading.nested:
            return _run(file, at, rules, strict=True)  # a text that was left out is what a loader opens
        for key, finding in reading.findings.items() if left_out else ():
            moved = max((shift for start, shift in left_out if finding.byte >= start), default=0)
            reading.findings[key] = replace(finding, byte=finding.byte + moved)
        return reading, error, behind + reading.stopped_at


def _opaque(identity: object) -> object:
    return ObjectRecord(callable=UNKNOWN)


# -- zip files ---------------------------------------------------------------------------------------------------------


def _zip(file: PositionedFile, member: str, rules: PickleRules) -> Scanned:
    """An archive of torch.save, or several in one file; any other zip file by its members."""
    found = Scanned()
    archives = _archives(file)
    if archives and archives[-1][0] and not (file.whole and file.path.endswith(".distcp")):
        what = f"{len(archives)} zip files lie in it, the last at {archives[-1][0]}: readers may find different members"
        mend = "do not load this file elsewhere either: ask whoever wrote it"
        found.faults.append(UnsafePickle.fault(file.path, _prefix(member, what), mend=mend))
    for offset, nbytes in archives or [(0, file.nbytes)]:
        found.add(_archive(PositionedView(file, offset, nbytes), offset, member, rules))
    return found


def _archive(file: PositionedFile, start: int, member: str, rules: PickleRules) -> Scanned:
    from ds_reshard.containers.torch_zip import TorchArchive  # which reads pickles

    found = Scanned()
    try:
        archive = TorchArchive(file, start)
    except ReshardError as error:
        found.add(_members(file, member, rules, error))
        return found
    if "data.pkl" not in archive.members:
        found.faults.append(_fault(file.path, f"{_prefix(member, 'data.pkl')} is missing: no file of torch.save"))
    for name in archive.pickles:
        try:
            archive.load(name, rules=rules)
        except ReshardError as error:
            faults = faults_of(error)
            found.faults += [_at(fault, member) for fault in faults]
            found.pickles += all(fault.error in UNSAFE for fault in faults)
        else:
            found.pickles += 1
    return found


def _members(file: PositionedFile, member: str, rules: PickleRules, error: ReshardError) -> Scanned:
    """The members of a zip file that is none of torch.save's, by Python's own list of them; also of a damaged one.

    One that torch might open all the same is a fault, whatever was found in it, and so is one of which torch's reader
    would find another list.
    """
    found = Scanned()
    try:
        find_directory(file)
    except ReshardError as misplaced:
        found.faults += faults_of(misplaced)
    try:
        entries = zipfile.ZipFile(io.BufferedReader(_Raw(file))).infolist()
    except Exception:  # zipfile raises what the bytes make it raise
        found.faults += faults_of(error)
        return found
    inflated = packed = 0
    for entry in entries:
        packed += entry.compress_size
        if packed > file.nbytes:
            what = (
                f"{_prefix(member, entry.filename)}: the members of a zip file lie over each other, or beyond its end"
            )
            found.faults.append(_fault(file.path, what))
            break
        try:
            data = _content(file, entry)
        except (ReshardError, struct.error, zlib.error):
            found.faults.append(_fault(file.path, f"{_prefix(member, entry.filename)} cannot be read"))
            continue
        inflated += len(data)
        if inflated > _INFLATED:
            what = f"{_prefix(member, entry.filename)}: more than {_INFLATED >> 20} MiB of such members are not read"
            found.faults.append(_fault(file.path, what))
            return found
        inner = PositionedBytes(file.path, data)
        inside = _prefix(member, f"{entry.filename}: bytes")
        if inside.count(": bytes") <= _DEPTH:
            found.add(scan_source(inner, inside, rules, strict=entry.filename.endswith((".pkl", ".pickle"))))
    if any(os.path.basename(entry.filename) in ("data.pkl", "constants.pkl") for entry in entries):
        found.faults += faults_of(error)
    return found


def _content(file: PositionedFile, entry: zipfile.ZipInfo) -> bytes:
    """A member's bytes, whatever its flags and checksum say."""
    header = struct.unpack("<4sHHHHHIIIHH", file.read(entry.header_offset, 30))
    at = entry.header_offset + 30 + header[9] + header[10]
    raw = file.read(at, min(entry.compress_size, file.nbytes - at, _INFLATED + 1))
    if entry.compress_type != zipfile.ZIP_DEFLATED:
        return raw
    return zlib.decompressobj(-15).decompress(raw, _INFLATED + 1)


def _archives(file: PositionedFile) -> list[tuple[int, int]] | None:
    """The offsets and sizes of the zip files that follow each other in a file without a gap; None where none do."""
    parts: list[tuple[int, int]] = []
    stop = file.nbytes
    while stop > 0:
        size = min(stop, END.size + 20 + END64.size)
        tail = file.read(stop - size, size)
        at = len(tail) - END.size
        if at < 0 or tail[at : at + 4] != b"PK\x05\x06":
            return None
        *_, nbytes, offset, comment = END.unpack_from(tail, at)
        ends = at
        if at >= 20 + END64.size and tail[at - 20 : at - 16] == b"PK\x06\x07":
            ends = at - 20 - END64.size
            if tail[ends : ends + 4] != b"PK\x06\x06":
                return None
            *_, nbytes, offset = END64.unpack_from(tail, ends)
        start = stop - size + ends - nbytes - offset
        if comment or start < 0 or start >= stop:
            return None
        parts.append((start, stop - start))
        stop = start
    return parts[::-1]


class _Raw(io.RawIOBase):
    """A positioned file as one that Python's zipfile reads."""

    def __init__(self, file: PositionedFile) -> None:
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._file.nbytes)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        nbytes = max(0, min(len(view), self._file.nbytes - self._at))
        view[:nbytes] = self._file.read(self._at, nbytes)
        self._at += nbytes
        return nbytes


# -- others ------------------------------------------------------------------------------------------------------------


def _is_tar(file: PositionedFile) -> bool:
    """As torch asks: a tar file that is not compressed, of any age."""
    try:
        tarfile.open(fileobj=io.BufferedReader(_Raw(file)), mode="r:").close()
    except Exception:  # tarfile raises what the bytes make it raise
        return False
    return True


def _tar(file: PositionedFile, member: str) -> Scanned:
    """A tar file, which torch.load unpacks and reads pickles of, where it has what torch.save once put there."""
    found = Scanned()
    try:
        with tarfile.open(fileobj=io.BufferedReader(_Raw(file)), mode="r:") as archive:
            names = {name.removeprefix("./") for name in archive.getnames()}
    except Exception:  # as of zipfile
        names = {"pickle"}
    if names & {"pickle", "storages", "tensors"}:
        what = "is a tar file as torch.save wrote before version 0.2: what is in it was not looked at"
        found.faults.append(_fault(file.path, _prefix(member, what).strip()))
    return found


def _array(file: PositionedFile, head: bytes, member: str, rules: PickleRules) -> Scanned:
    """An array of numpy: of objects, it is a pickle behind a header (numpy/lib/_format_impl.py, 2.4)."""
    wide = head[6:7] != b"\1"
    nbytes = int.from_bytes(head[8:12] if wide else head[8:10], "little")
    at = (12 if wide else 10) + nbytes
    header = file.read(0, min(at, file.nbytes, 1 << 20))
    return _pickles(file, min(at, file.nbytes), member, rules, strict=b"O" in header[10:].partition(b",")[0])


def _prefix(member: str, name: str) -> str:
    return f"{member}: {name}" if member and name else member or name


def _at(fault: Fault, member: str) -> Fault:
    return replace(fault, what=f"{member}: {fault.what}") if member else fault


def _fault(path: str, what: str) -> Fault:
    return CheckpointDamaged.fault(path, what, mend="restore the file from a copy, or leave it unloaded")
