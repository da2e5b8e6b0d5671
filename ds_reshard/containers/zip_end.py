"""Where a zip file's directory lies: its end records, and what a file is that has none.

The format is PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.14 to 4.3.16; torch's writer is miniz
(caffe2/serialize/inline_container.cc), which writes no archive comment and nothing before or between.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.errors import CheckpointDamaged

_END = struct.Struct("<4sHHHHIIH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_TAIL_NBYTES = 4 << 10

# pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2): how torch.save began before 1.6.
_LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryPlace:
    """`entries` entries in the bytes [byte_offset, byte_offset + nbytes); `tail` is the end of the file."""

    entries: int
    byte_offset: int
    nbytes: int
    tail_offset: int
    tail: bytes


def find_directory(file: PositionedFile) -> DirectoryPlace:
    """Where the directory lies, checked to end where its end records begin.

    Reads the last 4 KiB. Raises CheckpointDamaged, naming what the file is when it is no zip file.
    """
    if file.nbytes == 0:
        raise CheckpointDamaged(f"{file.path}: the file is empty: the writer was interrupted, or the disk was full")
    head = file.read(0, min(file.nbytes, 512))
    if not head.startswith(b"PK\x03\x04"):
        raise CheckpointDamaged(f"{file.path}: not a file of torch.save: {_what_it_is(head)}")
    tail_offset = max(0, file.nbytes - _TAIL_NBYTES)
    tail = file.read(tail_offset, file.nbytes - tail_offset)
    at = len(tail) - _END.size
    if at < 0 or tail[at : at + 4] != b"PK\x05\x06":
        raise CheckpointDamaged(
            f"{file.path}: the zip file does not end with its directory: it was cut short, or bytes were added "
            f"(file size {file.nbytes})"
        )
    _, disk, first_disk, here, entries, nbytes, byte_offset, comment = _END.unpack_from(tail, at)
    stop = tail_offset + at
    locator_at = at - _END64_LOCATOR.size
    if locator_at >= 0 and tail[locator_at : locator_at + 4] == b"PK\x06\x07":
        wide = _wide_end(file, tail, tail_offset, locator_at)
        narrow = (here, entries, nbytes, byte_offset)
        for value, wide_value, unset in zip(narrow, wide[:4], (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF), strict=True):
            if value not in (unset, wide_value):
                raise CheckpointDamaged(f"{file.path}: the two end records of the zip file disagree")
        here, entries, nbytes, byte_offset, stop = wide
    if disk or first_disk or comment or here != entries:
        raise CheckpointDamaged(f"{file.path}: the zip file's end record is not one that torch.save writes")
    if byte_offset + nbytes != stop:
        raise CheckpointDamaged(
            f"{file.path}: the zip directory should end at byte {stop}, and declares to end at {byte_offset + nbytes}"
        )
    return DirectoryPlace(entries=entries, byte_offset=byte_offset, nbytes=nbytes, tail_offset=tail_offset, tail=tail)


def _wide_end(file: PositionedFile, tail: bytes, tail_offset: int, locator_at: int) -> tuple[int, int, int, int, int]:
    """Entries on this disk, entries, nbytes, byte offset of the directory, and where its end record begins."""
    _, disk, wide_offset, disks = _END64_LOCATOR.unpack_from(tail, locator_at)
    at = locator_at - _END64.size
    if disk or disks > 1 or at < 0 or wide_offset != tail_offset + at or tail[at : at + 4] != b"PK\x06\x06":
        raise CheckpointDamaged(f"{file.path}: the zip file's 64-bit end record is not where its locator says")
    _, nbytes_after, _, _, this_disk, first_disk, here, entries, nbytes, byte_offset = _END64.unpack_from(tail, at)
    if nbytes_after != _END64.size - 12 or this_disk or first_disk:
        raise CheckpointDamaged(f"{file.path}: the zip file's 64-bit end record is not one that torch.save writes")
    return here, entries, nbytes, byte_offset, wide_offset


def _what_it_is(head: bytes) -> str:
    if head.startswith(_LEGACY_MAGIC) or head[257:262] == b"ustar":
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
