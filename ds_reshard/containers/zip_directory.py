"""The zip format of torch.save: where each member lies, with every claim of the file checked against the file.

PKWARE's APPNOTE.TXT 6.3.10: sections 4.3.7 (local header), 4.3.9 (descriptor), 4.3.12 (directory), 4.3.14 to 4.3.16
(end records) and 4.5.3 (64-bit sizes). torch's writer is miniz (caffe2/serialize/inline_container.cc, torch 2.13). Only
what it writes is accepted: members stored, not encrypted, below one root; no comment, nothing before or between.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.errors import CheckpointDamaged, UnsafePickle

ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
LOCAL = struct.Struct("<4sHHHHHIIIHH")
END = struct.Struct("<4sHHHHIIH")
END64_LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQHHIIQQQQ")
_ENTRY_IN_USE = struct.Struct("<8xHH4xIIIHHHH2xII")  # what opening an archive needs of an entry
WIDE = 0xFFFFFFFF
"""Stands in a field of 32 bits whose value is among the 64-bit sizes."""

# pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2): how torch.save began before 1.6.
LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."

_TAIL_NBYTES = 2 << 10
# A descriptor follows the bytes (bit 3), names are UTF-8 (bit 11): all that torch's writer sets.
_DESCRIBED, KNOWN_FLAGS = 0x0008, 0x0808
_WIDE_KIND = 1  # of an extra field
IS_FOLDER = 0x10
"""The attribute of a member that torch's reader, miniz, gives no bytes of, and no error."""
WINDOW_NBYTES = 64 << 10
# Torch writes the 64-bit sizes (28 bytes) and then padding, of which the first 4 bytes are read.
EXTRA_NBYTES = 64
_ALIGNMENT, _DESCRIPTORS = 64, (0, 16, 24)
_PAGE_NBYTES = 4 << 10
_MANY = 64  # members, from which on columns are faster than a loop


class ArchiveMember(NamedTuple):
    """A file inside an archive: its name below the root, and where its bytes lie.

    `crc32` is what the directory records, in the entry at `entry_offset`; None when the writer recorded none.
    """

    name: str
    header_offset: int
    byte_offset: int
    nbytes: int
    crc32: int | None
    entry_offset: int


class DirectoryPlace(NamedTuple):
    """`entries` entries in the bytes [byte_offset, byte_offset + nbytes)."""

    entries: int
    byte_offset: int
    nbytes: int


class _Entry(NamedTuple):
    """One line of the directory, at `entry_offset`: the member's whole name, also as its bytes, and what is said."""

    name: str
    raw: bytes
    header_offset: int
    nbytes: int
    crc32: int
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
    directory = file.read(place.byte_offset, place.nbytes)
    if place.entries >= _MANY and not file.far:
        from ds_reshard.containers.zip_columns import read_at_once

        if (read := read_at_once(file, place, directory)) is not None:
            return read
    entries = _entries(file.path, place, directory)
    if not entries:
        raise CheckpointDamaged(f"{file.path}: the zip file is empty")
    root = entries[0].name.split("/")[0]
    bare = not any(entry.crc32 for entry in entries)  # as torch.serialization.set_crc32_options(False) writes them
    found: dict[str, ArchiveMember] = {}
    offsets = list(_data_offsets(file, entries, place.byte_offset))
    for entry, byte_offset in zip(entries, offsets, strict=True):
        folder, slash, name = entry.name.partition("/")
        if folder != root or not slash:
            raise CheckpointDamaged(f"{file.path}: {entry.name!r} lies outside the archive's one folder {root!r}")
        if name in found:
            what = f"{file.path}: {entry.name!r} is in the zip directory twice"
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


# -- where the directory lies ------------------------------------------------------------------------------------------


def find_directory(file: PositionedFile) -> DirectoryPlace:
    """Where the directory lies, checked to end where its end records begin.

    Reads the last 2 KiB. Raises CheckpointDamaged, naming what the file is when it is no zip file.
    """
    if file.nbytes == 0:
        raise CheckpointDamaged(f"{file.path}: the file is empty: the writer was interrupted, or the disk was full")
    head = file.read(0, min(file.nbytes, 512))
    if not head.startswith(b"PK\x03\x04"):
        raise CheckpointDamaged(f"{file.path}: not a file of torch.save: {_what_it_is(head)}")
    tail_offset = max(0, file.nbytes - _TAIL_NBYTES)
    tail = file.read(tail_offset, file.nbytes - tail_offset)
    at = len(tail) - END.size
    if at < 0 or tail[at : at + 4] != b"PK\x05\x06":
        raise CheckpointDamaged(
            f"{file.path}: the zip file does not end with its directory: it was cut short, or bytes were added "
            f"(file size {file.nbytes})"
        )
    _, disk, first_disk, *narrow, comment = END.unpack_from(tail, at)
    here, entries, nbytes, byte_offset = narrow
    fits = not (disk or first_disk or comment)
    locator_at = at - END64_LOCATOR.size
    if locator_at >= 0 and tail[locator_at : locator_at + 4] == b"PK\x06\x07":
        _, disk, wide_offset, disks = END64_LOCATOR.unpack_from(tail, locator_at)
        at = locator_at - END64.size
        if disk or disks > 1 or at < 0 or wide_offset != tail_offset + at or tail[at : at + 4] != b"PK\x06\x06":
            raise CheckpointDamaged(f"{file.path}: the zip file's 64-bit end record is not where its locator says")
        _, nbytes_after, _, _, disk, first_disk, *wide = END64.unpack_from(tail, at)
        here, entries, nbytes, byte_offset = wide
        unset = (0xFFFF, 0xFFFF, WIDE, WIDE)
        agree = all(value in said for value, *said in zip(narrow, unset, wide, strict=True))
        fits = fits and agree and nbytes_after == END64.size - 12 and not (disk or first_disk)
    if not fits or here != entries:
        raise CheckpointDamaged(f"{file.path}: the zip file's end records are not those that torch.save writes")
    if byte_offset + nbytes != tail_offset + at:
        raise CheckpointDamaged(
            f"{file.path}: the zip directory should end at byte {tail_offset + at}, and declares to end at "
            f"{byte_offset + nbytes}"
        )
    return DirectoryPlace(entries, byte_offset, nbytes)


def _what_it_is(head: bytes) -> str:
    if head.startswith(LEGACY_MAGIC) or head[257:262] == b"ustar":
        return "legacy torch.save format: re-save with torch.save(torch.load(f), f)"
    if head.startswith(b"\x80"):
        return "a bare pickle"
    if head.lstrip()[:1] == b"<":
        return "an HTML or XML page, such as a server's error message"
    if head.startswith(b"version https://"):
        return "a Git LFS pointer: run: git lfs pull"
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")):
        return "a compressed file: decompress it"
    if head[8:9] == b"{":
        return "a safetensors file, perhaps"
    if not head.strip(b"\0"):
        return "zeros: its blocks were never written"
    return f"it begins with {head[:8]!r}"


# -- the directory -----------------------------------------------------------------------------------------------------


def _entries(path: str, place: DirectoryPlace, directory: bytes) -> list[_Entry]:
    """The lines of the directory in the order of their members' bytes; each member is stored, and of a sane name."""
    found: list[_Entry] = []
    at = 0
    for number in range(place.entries):
        if at + ENTRY.size > len(directory) or directory[at : at + 4] != b"PK\x01\x02":
            raise CheckpointDamaged(f"{path}: the zip directory has {number} entries, and declares {place.entries}")
        fields = _ENTRY_IN_USE.unpack_from(directory, at)
        flags, method, crc, packed, nbytes, name_nbytes, extra_nbytes, comment_nbytes, disk, attributes, header = fields
        entry_offset, name_at = place.byte_offset + at, at + ENTRY.size
        extra_at = name_at + name_nbytes
        at = extra_at + extra_nbytes + comment_nbytes
        if at > len(directory):
            raise CheckpointDamaged(f"{path}: entry {number} of the zip directory leaves it")
        raw = directory[name_at:extra_at]
        name = _decoded(path, raw)
        _check_stored(path, name, flags, method)
        if attributes & IS_FOLDER:
            raise CheckpointDamaged(f"{path}: {name!r} has the attribute of a folder, of which torch reads no bytes")
        extra = directory[extra_at : extra_at + extra_nbytes]
        nbytes, packed, header = _wide_fields(path, name, extra, [nbytes, packed, header])
        if packed != nbytes or disk:
            raise CheckpointDamaged(f"{path}: {name!r} takes {packed} bytes for {nbytes} of content, and is not stored")
        found.append(_Entry(name, raw, header, nbytes, crc, entry_offset))
    if at != len(directory):
        raise CheckpointDamaged(f"{path}: {len(directory) - at} bytes follow the last entry of the zip directory")
    return sorted(found, key=lambda entry: entry.header_offset)


_NO_NAMES = frozenset({"", ".", ".."})


def _decoded(path: str, raw: bytes) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointDamaged(f"{path}: a name in the zip directory is not UTF-8: {raw[:80]!r}") from None
    if "\0" in name or "\\" in name or not _NO_NAMES.isdisjoint(name.split("/")):
        raise CheckpointDamaged(f"{path}: {name[:200]!r} is not the name of a member that torch.save writes")
    return name


def _check_stored(path: str, name: str, flags: int, method: int) -> None:
    if not method and flags in (0, _DESCRIBED, KNOWN_FLAGS):
        return
    if flags & 0x2041:
        raise CheckpointDamaged(f"{path}: {name!r} is encrypted; torch.save encrypts nothing")
    if method:
        raise CheckpointDamaged(
            f"{path}: {name!r} is compressed (method {method}); torch.save stores. Unpack it and zip it with: zip -0"
        )
    if flags & ~KNOWN_FLAGS:
        raise CheckpointDamaged(f"{path}: {name!r} has zip flags 0x{flags:04x}, which torch.save does not set")


def _extra_fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """The extra fields that are there whole: the number that says what each is, and its bytes."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        start, at = at + 4, at + 4 + nbytes
        if at <= len(extra):
            yield kind, extra[start:at]


def _wide_fields(path: str, name: str, extra: bytes, fields: list[int]) -> list[int]:
    """`fields` (content, stored size, header offset) with those that did not fit taken from the 64-bit extra."""
    if WIDE not in fields:
        return fields
    wanted = fields.count(WIDE)
    content = next((content for kind, content in _extra_fields(extra) if kind == _WIDE_KIND), b"")
    if len(content) < 8 * wanted:
        raise CheckpointDamaged(f"{path}: {name!r} lacks the 64-bit sizes that its entry refers to")
    values = iter(struct.unpack_from(f"<{wanted}Q", content))
    return [next(values) if value == WIDE else value for value in fields]


# -- the local headers -------------------------------------------------------------------------------------------------


def _data_offsets(file: PositionedFile, members: Sequence[_Entry], directory_offset: int) -> Iterator[int]:
    """The offset of each member's bytes, from their local headers; near headers are read together.

    Of a file that is far away those are left out which lie among tensors: see `_before_what_follows`.
    """
    file.announce(apart(member.header_offset for member in members), LOCAL.size + EXTRA_NBYTES)
    free_from, window, window_offset = 0, b"", 0
    for i, member in enumerate(members):
        start, stop = member.header_offset, member.header_offset + LOCAL.size + len(member.raw)
        if start < free_from:
            raise CheckpointDamaged(f"{file.path}: {member.name!r} begins at byte {start}, inside another member")
        if stop + member.nbytes > directory_offset:
            raise CheckpointDamaged(
                f"{file.path}: {member.name!r} declares {member.nbytes} bytes at {start}; its directory is at "
                f"{directory_offset}: the file was cut short or is damaged"
            )
        header_stop = min(stop + EXTRA_NBYTES, directory_offset)
        if file.far and (placed := _before_what_follows(members, i, directory_offset)) is not None:
            free_from = placed + member.nbytes
            yield placed
            continue
        if not (window_offset <= start and header_stop <= window_offset + len(window)):
            window_offset = start
            window = file.read(start, _window_stop(members, i, directory_offset) - start)
        header = window[start - window_offset : header_stop - window_offset]
        byte_offset = stop + _extra_nbytes(file.path, member, header)
        free_from = byte_offset + member.nbytes
        if free_from > directory_offset:
            raise CheckpointDamaged(f"{file.path}: {member.name!r} runs into the zip directory")
        yield byte_offset


def apart(offsets: Iterable[int]) -> Iterator[int]:
    """Those that lie a page or more behind the one before them."""
    last = -_PAGE_NBYTES
    for offset in offsets:
        if offset - last >= _PAGE_NBYTES:
            last = offset
            yield offset


def _before_what_follows(members: Sequence[_Entry], at: int, directory_offset: int) -> int | None:
    """The offset of a tensor's bytes, by where the next member begins; None where the header has to tell it.

    torch's writer aligns these bytes to 64, lets a descriptor of 16 bytes follow, or of 24 where sizes are of 64 bits,
    or none, and then the next header. The bytes' own checksum tells whether they are these.
    """
    member = members[at]
    if "/data/" not in member.name or not member.crc32 or not member.nbytes:
        return None
    following = members[at + 1].header_offset if at + 1 < len(members) else directory_offset
    before = member.header_offset + LOCAL.size + len(member.raw)
    for behind in _DESCRIPTORS:
        byte_offset = following - behind - member.nbytes
        if byte_offset % _ALIGNMENT == 0 and before <= byte_offset < before + EXTRA_NBYTES + 2 * _ALIGNMENT:
            return byte_offset
    return None


def _window_stop(members: Sequence[_Entry], first: int, directory_offset: int) -> int:
    """Where to stop reading so that headers close to the first are in the same read."""
    start = stop = members[first].header_offset
    for number in range(first, len(members)):
        member = members[number]
        header_stop = member.header_offset + LOCAL.size + len(member.raw) + EXTRA_NBYTES
        if stop > start and (member.header_offset > stop + 1024 or header_stop > start + WINDOW_NBYTES):
            break
        stop = header_stop
    return min(stop, directory_offset)


def _extra_nbytes(path: str, member: _Entry, header: bytes) -> int:
    """The length of the extra field in a local header, which must agree with the directory's entry."""
    signature, _, flags, method, _, _, crc, packed, nbytes, name_nbytes, extra_nbytes = LOCAL.unpack_from(header)
    extra_at = LOCAL.size + len(member.raw)
    name = header[LOCAL.size : extra_at]
    if signature != b"PK\x03\x04" or name_nbytes != len(name) or name != member.raw:
        raise CheckpointDamaged(
            f"{path}: the header at byte {member.header_offset} is not that of {member.name!r}, as the directory says"
        )
    _check_stored(path, member.name, flags, method)
    sizes = (0, WIDE, member.nbytes)
    if packed not in sizes or nbytes not in sizes or crc not in (0, member.crc32):
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
