"""The bytes of an archive that are in no member: each has one value that fits, or no meaning at all.

torch's writer (caffe2/serialize/inline_container.cc over miniz, torch 2.13) repeats in a member's local header what
its directory entry says, pads the header with "Z" in an extra field "FB", and lets a descriptor with checksum and
sizes follow the bytes (PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.7, 4.3.9, 4.3.12). No reader looks at all of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.zip_directory import wide_fields
from ds_reshard.containers.zip_end import find_directory
from ds_reshard.errors import CheckpointDamaged, Fault

_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_WIDE = 0xFFFFFFFF
_DESCRIBED = 0x0008
_WIDE_KIND, _PADDING_KIND = 1, 0x4246
# What torch's writer (0x031e, 45), this package's (20, 45) and Python's zipfile (45) put there.
_VERSIONS = (20, 45, 0x031E)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A line of the directory; `alike` is what one writer gives all of its members alike."""

    name: bytes
    alike: tuple[int, ...]
    repeated: tuple[int, ...]
    crc32: int
    nbytes: int
    header_offset: int
    kinds: frozenset[int]
    comment_nbytes: int


def frame_faults(path: str, part: tuple[int, int] | None = None) -> Iterator[Fault]:
    """What is wrong between the members of an archive that can be opened: bytes that nobody would have written so.

    `part` is the offset and number of bytes of an archive inside a file.
    """
    file = PositionedFile(path, part)
    try:
        place = find_directory(file)
        entries = list(_entries(path, file.read(place.byte_offset, place.nbytes), place.entries))
        entries.sort(key=lambda entry: entry.header_offset)
        for entry, after in zip(entries, [*entries[1:], None], strict=True):
            stop = after.header_offset if after is not None else place.byte_offset
            for what in _member(file, entry, entries[0], stop):
                yield CheckpointDamaged.fault(
                    path,
                    f"{entry.name.decode('utf-8', 'replace')!r} {what}",
                    mend="the members' own bytes may be whole: restore the file from a copy, or save it anew",
                )
        narrow = (min(place.entries, 0xFFFF), min(place.nbytes, _WIDE), min(place.byte_offset, _WIDE))
        if not _end_fits(
            file.read(place.byte_offset + place.nbytes, file.nbytes - place.byte_offset - place.nbytes), narrow
        ):
            yield CheckpointDamaged.fault(
                path, "has an end record that no writer makes", mend="restore the file from a copy, or save it anew"
            )
    finally:
        file.close()


def _entries(path: str, directory: bytes, count: int) -> Iterator[_Entry]:
    at = 0
    for _ in range(count):
        (
            _,
            made_by,
            needs,
            flags,
            method,
            time,
            date,
            crc,
            packed,
            nbytes,
            name_nbytes,
            extra_nbytes,
            comment_nbytes,
            disk,
            internal,
            external,
            header,
        ) = _ENTRY.unpack_from(directory, at)
        start = at + _ENTRY.size
        fields = directory[start + name_nbytes : start + name_nbytes + extra_nbytes]
        name = directory[start : start + name_nbytes]
        sizes = wide_fields(path, name.decode("utf-8"), fields, [nbytes, packed, header])
        yield _Entry(
            name=name,
            alike=(made_by, disk, internal, external),
            repeated=(needs, flags, method, time, date),
            crc32=crc,
            nbytes=sizes[0],
            header_offset=sizes[2],
            kinds=frozenset(kind for kind, _ in _fields(fields)),
            comment_nbytes=comment_nbytes,
        )
        at = start + name_nbytes + extra_nbytes + comment_nbytes


def _fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """The extra fields: the number that says what each is, and its bytes."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        yield kind, extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes


def _member(file: PositionedFile, entry: _Entry, first: _Entry, stop: int) -> Iterator[str]:
    """What is wrong with one member's entry, header and descriptor, which ends where the next member begins."""
    if entry.alike != first.alike or entry.comment_nbytes:
        yield "has a directory entry unlike those of the other members"
    fixed = file.read(entry.header_offset, _LOCAL.size)
    _, needs, flags, method, time, date, crc, packed, nbytes, name_nbytes, extra_nbytes = _LOCAL.unpack(fixed)
    if (needs, flags, method, time, date) != entry.repeated:
        yield "has a header that does not repeat its directory entry"
    described = bool(flags & _DESCRIBED)
    sizes = {0, _WIDE} if described else {min(entry.nbytes, _WIDE)}
    if crc != (0 if described else entry.crc32) or not {packed, nbytes} <= sizes or packed != nbytes:
        yield "has another size or checksum in its header than in the directory"
    extra_at = entry.header_offset + _LOCAL.size + name_nbytes
    for kind, content in _fields(file.read(extra_at, extra_nbytes)):
        if kind == _PADDING_KIND:
            if content.strip(b"Z"):
                yield "has padding that is not what torch pads with"
        elif kind == _WIDE_KIND:
            values = (value for (value,) in struct.iter_unpack("<Q", content[: len(content) // 8 * 8]))
            if len(content) % 8 or any(value not in (0, entry.nbytes, entry.header_offset) for value in values):
                yield "has other 64-bit sizes in its header than in the directory"
        elif kind not in entry.kinds:
            yield "has a field in its header that its directory entry does not have"
    data_stop = extra_at + extra_nbytes + entry.nbytes
    after = file.read(data_stop, min(stop - data_stop, 64))
    narrow, wide = (
        struct.pack(f"<4sI{code * 2}", b"PK\x07\x08", entry.crc32, *[entry.nbytes & limit] * 2)
        for code, limit in (("I", _WIDE), ("Q", 2**64 - 1))
    )
    if stop - data_stop != len(after) or after not in ((narrow, wide) if described else (b"",)):
        yield "is followed by bytes that do not belong there, or by a size or checksum other than the directory's"
    if not entry.nbytes and entry.crc32:
        yield "has no bytes, and a checksum of some"


def _end_fits(end: bytes, narrow: tuple[int, int, int]) -> bool:
    """Whether the fields of the end records that no reader uses are as they are written."""
    if len(end) == 22:
        return True
    made_by, needs = struct.unpack_from("<HH", end, 12)
    disks = struct.unpack_from("<I", end, 56 + 16)[0]
    values = struct.unpack_from("<HII", end, len(end) - 22 + 10)
    fits = (value in (expected, 0xFFFF, _WIDE) for value, expected in zip(values, narrow, strict=True))
    return made_by in _VERSIONS and needs in _VERSIONS and disks == 1 and all(fits)
