"""The zip format of torch.save: its records, and where a file's directory lies.

PKWARE's APPNOTE.TXT 6.3.10: sections 4.3.7 (local header), 4.3.9 (descriptor), 4.3.12 (directory), 4.3.14 to 4.3.16
(end records) and 4.5.3 (64-bit sizes). torch's writer is miniz (caffe2/serialize/inline_container.cc, torch 2.13). Only
what it writes is accepted.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.errors import CheckpointDamaged

ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
LOCAL = struct.Struct("<4sHHHHHIIIHH")
END = struct.Struct("<4sHHHHIIH")
END64_LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQHHIIQQQQ")
WIDE = 0xFFFFFFFF
"""Stands in a field of 32 bits whose value is among the 64-bit sizes."""

# pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2): how torch.save began before 1.6.
LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."

_TAIL_NBYTES = 2 << 10


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
