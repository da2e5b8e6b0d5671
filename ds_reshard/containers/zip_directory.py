"""The directory of a torch archive, with every claim in it checked against the file.

The format is PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.7 (local header), 4.3.12 (directory) and 4.5.3
(64-bit sizes). Only what torch.save writes is accepted: stored, not encrypted, one root folder.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.zip_end import DirectoryPlace, find_directory
from ds_reshard.errors import CheckpointDamaged, UnsafePickle

_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_WIDE = 0xFFFFFFFF
# Sizes follow the bytes (bit 3), names are UTF-8 (bit 11): all that torch's writer sets.
_KNOWN_FLAGS = 0x0808
_WINDOW_NBYTES = 64 << 10
# Torch writes the 64-bit sizes (28 bytes) and then padding, of which the first 4 bytes are read.
_EXTRA_NBYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveMember:
    """A file inside an archive: its name below the root, and where its bytes lie.

    `crc32` is what the directory records, in the entry at `entry_offset`; None when the writer recorded none.
    """

    name: str
    header_offset: int
    byte_offset: int
    nbytes: int
    crc32: int | None
    entry_offset: int


def read_members(file: PositionedFile, max_directory_nbytes: int) -> tuple[str, dict[str, ArchiveMember]]:
    """The root folder's name and every member by its name below the root, in the order of their bytes.

    Reads the directory and the local headers, no member's bytes beyond those between near headers.
    Raises CheckpointDamaged: members lie inside the file, apart from each other and from the directory;
    names are relative, unique and agree with the local headers.
    """
    place = find_directory(file)
    if place.nbytes > max_directory_nbytes:
        raise CheckpointDamaged(
            f"{file.path}: a zip directory of {place.nbytes} bytes; at most {max_directory_nbytes} are read"
        )
    if place.byte_offset >= place.tail_offset:
        start = place.byte_offset - place.tail_offset
        directory = place.tail[start : start + place.nbytes]
    else:
        directory = file.read(place.byte_offset, place.nbytes)
    entries = sorted(_entries(file.path, directory, place), key=lambda entry: entry.header_offset)
    if not entries:
        raise CheckpointDamaged(f"{file.path}: the zip file is empty")
    offsets = _placed(file, entries, place.byte_offset)
    return _by_name(file.path, entries, offsets)


class _Entry(NamedTuple):
    """One line of the directory: the member's whole name, and what is said of it."""

    name: str
    header_offset: int
    nbytes: int
    crc32: int
    entry_offset: int


def _entries(path: str, directory: bytes, place: DirectoryPlace) -> Iterator[_Entry]:
    at = 0
    for number in range(place.entries):
        if at + _ENTRY.size > len(directory) or directory[at : at + 4] != b"PK\x01\x02":
            raise CheckpointDamaged(f"{path}: the zip directory has {number} entries, and declares {place.entries}")
        (
            _,
            _,
            _,
            flags,
            method,
            _,
            _,
            crc,
            packed,
            nbytes,
            name_nbytes,
            extra_nbytes,
            comment_nbytes,
            disk,
            _,
            _,
            header,
        ) = _ENTRY.unpack_from(directory, at)
        entry_offset = place.byte_offset + at
        name_at = at + _ENTRY.size
        extra_at = name_at + name_nbytes
        at = extra_at + extra_nbytes + comment_nbytes
        if at > len(directory):
            raise CheckpointDamaged(f"{path}: entry {number} of the zip directory leaves it")
        name = _decoded(path, directory[name_at:extra_at])
        _check_stored(path, name, flags, method)
        nbytes, packed, header = wide_fields(
            path, name, directory[extra_at : extra_at + extra_nbytes], [nbytes, packed, header]
        )
        if packed != nbytes or disk:
            raise CheckpointDamaged(f"{path}: {name!r} takes {packed} bytes for {nbytes} of content, and is not stored")
        yield _Entry(name, header, nbytes, crc, entry_offset)
    if at != len(directory):
        raise CheckpointDamaged(f"{path}: {len(directory) - at} bytes follow the last entry of the zip directory")


def _decoded(path: str, raw: bytes) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointDamaged(f"{path}: a name in the zip directory is not UTF-8: {raw[:80]!r}") from None
    if "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise CheckpointDamaged(f"{path}: {name[:200]!r} is not the name of a member that torch.save writes")
    return name


def _check_stored(path: str, name: str, flags: int, method: int) -> None:
    if flags & 0x2041:
        raise CheckpointDamaged(f"{path}: {name!r} is encrypted; torch.save encrypts nothing")
    if method:
        raise CheckpointDamaged(
            f"{path}: {name!r} is compressed (method {method}); torch.save stores. Unpack it and zip it with: zip -0"
        )
    if flags & ~_KNOWN_FLAGS:
        raise CheckpointDamaged(f"{path}: {name!r} has zip flags 0x{flags:04x}, which torch.save does not set")


def wide_fields(path: str, name: str, extra: bytes, fields: list[int]) -> list[int]:
    """`fields` (content, stored size, header offset) with those that did not fit taken from the 64-bit extra."""
    if _WIDE not in fields:
        return fields
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wanted = fields.count(_WIDE)
            if nbytes < 8 * wanted or at + 4 + nbytes > len(extra):
                break
            values = iter(struct.unpack_from(f"<{wanted}Q", extra, at + 4))
            return [next(values) if value == _WIDE else value for value in fields]
        at += 4 + nbytes
    raise CheckpointDamaged(f"{path}: {name!r} lacks the 64-bit sizes that its entry refers to")


def _placed(file: PositionedFile, members: Sequence[_Entry], directory_offset: int) -> list[int]:
    """The offset of each member's bytes, from their local headers; near headers are read together."""
    placed: list[int] = []
    free_from, window, window_offset = 0, b"", 0
    for i, member in enumerate(members):
        start, stop = member.header_offset, member.header_offset + _LOCAL.size + len(member.name.encode())
        if start < free_from:
            raise CheckpointDamaged(f"{file.path}: {member.name!r} begins at byte {start}, inside another member")
        if stop + member.nbytes > directory_offset:
            raise CheckpointDamaged(
                f"{file.path}: {member.name!r} declares {member.nbytes} bytes at {start}; its directory is at "
                f"{directory_offset}: the file was cut short or is damaged"
            )
        header_stop = min(stop + _EXTRA_NBYTES, directory_offset)
        if not (window_offset <= start and header_stop <= window_offset + len(window)):
            window_offset = start
            window = file.read(start, _window_stop(members, i, directory_offset) - start)
        header = window[start - window_offset : header_stop - window_offset]
        byte_offset = stop + _extra_nbytes(file.path, member, header)
        free_from = byte_offset + member.nbytes
        if free_from > directory_offset:
            raise CheckpointDamaged(f"{file.path}: {member.name!r} runs into the zip directory")
        placed.append(byte_offset)
    return placed


def _window_stop(members: Sequence[_Entry], first: int, directory_offset: int) -> int:
    """Where to stop reading so that headers close to the first are in the same read."""
    start = members[first].header_offset
    stop = start
    for member in members[first:]:
        header_stop = member.header_offset + _LOCAL.size + len(member.name.encode()) + _EXTRA_NBYTES
        if stop > start and (member.header_offset > stop + 1024 or header_stop > start + _WINDOW_NBYTES):
            break
        stop = header_stop
    return min(stop, directory_offset)


def _extra_nbytes(path: str, member: _Entry, header: bytes) -> int:
    """The length of the extra field in a local header, which must agree with the directory's entry."""
    signature, _, flags, method, _, _, crc, packed, nbytes, name_nbytes, extra_nbytes = _LOCAL.unpack_from(header)
    extra_at = _LOCAL.size + len(member.name.encode())
    name = header[_LOCAL.size : extra_at]
    if signature != b"PK\x03\x04" or name_nbytes != len(name) or name != member.name.encode():
        raise CheckpointDamaged(
            f"{path}: the header at byte {member.header_offset} is not that of {member.name!r}, as the directory says"
        )
    _check_stored(path, member.name, flags, method)
    if any(size not in (0, _WIDE, member.nbytes) for size in (packed, nbytes)) or crc not in (0, member.crc32):
        raise CheckpointDamaged(
            f"{path}: {member.name!r} has another size or checksum in its header than in the directory"
        )
    at, extra_stop = extra_at, extra_at + int(extra_nbytes)
    while at < extra_stop and at + 4 <= len(header):
        at += 4 + int.from_bytes(header[at + 2 : at + 4], "little")
    if at != extra_stop:
        raise CheckpointDamaged(
            f"{path}: {member.name!r} has a header whose extra field has another length than declared"
        )
    return extra_stop - extra_at


def _by_name(path: str, entries: Sequence[_Entry], offsets: Sequence[int]) -> tuple[str, dict[str, ArchiveMember]]:
    root = entries[0].name.split("/")[0]
    bare = not any(entry.crc32 for entry in entries)  # as torch.serialization.set_crc32_options(False) writes them
    found: dict[str, ArchiveMember] = {}
    for entry, byte_offset in zip(entries, offsets, strict=True):
        folder, slash, name = entry.name.partition("/")
        if folder != root or not slash:
            raise CheckpointDamaged(f"{path}: {entry.name!r} lies outside the archive's one folder {root!r}")
        if name in found:
            what = f"{path}: {entry.name!r} is in the zip directory twice"
            if name.endswith(".pkl"):
                raise UnsafePickle(f"{what}: readers may take either; nothing was run")
            raise CheckpointDamaged(what)
        found[name] = ArchiveMember(
            name=name,
            header_offset=entry.header_offset,
            byte_offset=byte_offset,
            nbytes=entry.nbytes,
            crc32=None if bare else entry.crc32,
            entry_offset=entry.entry_offset,
        )
    return root, found
