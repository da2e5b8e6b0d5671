"""The directory of a file of torch.save that has many members, read by columns instead of in a loop.

What is checked is what `zip_directory` checks of each member, which tells what is wrong where anything is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import repeat

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.zip_directory import (
    ENTRY,
    EXTRA_NBYTES,
    IS_FOLDER,
    KNOWN_FLAGS,
    LOCAL,
    WIDE,
    WINDOW_NBYTES,
    ArchiveMember,
    DirectoryPlace,
    apart,
)

_SIZES = [("crc", "<u4"), ("packed", "<u4"), ("nbytes", "<u4"), ("name", "<u2"), ("extra", "<u2")]
_REPEATED = [("flags", "<u2"), ("method", "<u2"), ("time", "<u4"), *_SIZES]  # of an entry, in the header
_BEHIND = [("comment", "<u2"), ("disk", "<u2"), ("inner", "<u2"), ("attributes", "<u4"), ("header", "<u4")]
_ENTRY_ROW = np.dtype([*_REPEATED, *_BEHIND])
"""What stands in an entry behind the signature and two versions, of 8 bytes."""
_LOCAL_ROW = np.dtype([("signature", "<u4"), ("version", "<u2"), *_REPEATED])
_SHORT = np.dtype([("nbytes", "<u2")])
_LOCAL_SIGNATURE = int.from_bytes(b"PK\x03\x04", "little")
_ENTRY_SIGNATURE = b"PK\x01\x02"
_TOGETHER = 4096
"""So many headers are read, with what lies between those that are near each other."""
_PLAIN = re.compile(rb"[\n!-\[\]-~]*")  # visible ASCII, and no backslash
_Column = np.ndarray[tuple[int], np.dtype[np.int64]]
_Rows = np.ndarray[tuple[int], np.dtype[np.void]]
_NO_NAME = re.compile(rb"(?:^|[/\n])\.{0,2}(?:[/\n]|$)")


def read_at_once(
    file: PositionedFile, place: DirectoryPlace, directory: bytes
) -> tuple[str, dict[str, ArchiveMember]] | None:
    """What `read_members` gives, by columns; None where a check of it fails, or there is what is allowed but rare."""
    count = place.entries
    if count * ENTRY.size > len(directory) or directory.count(_ENTRY_SIGNATURE) != count:
        return None
    at = np.fromiter((one.start() for one in re.finditer(_ENTRY_SIGNATURE, directory)), np.int64, count)
    if at[0] or at[-1] + ENTRY.size > len(directory):
        return None
    entry = _rows(directory, at + 8, _ENTRY_ROW)
    start, nbytes, name_nbytes = (entry[field].astype(np.int64) for field in ("header", "nbytes", "name"))
    stop = start + LOCAL.size + name_nbytes
    right = (
        ((entry["flags"] & ~np.uint16(KNOWN_FLAGS) | entry["method"] | entry["disk"]) == 0)
        & (entry["attributes"] & IS_FOLDER == 0)
        & (entry["packed"] == nbytes)
        & (nbytes != WIDE)
        & (start != WIDE)
        & ((entry["extra"] | entry["comment"]) == 0)
        & (at + ENTRY.size + name_nbytes == np.append(at[1:], len(directory)))
        & (stop + nbytes <= np.append(start[1:], place.byte_offset))  # also: each begins behind the one before it
    )
    if not right.all():
        return None
    raw = _slices(directory, at + ENTRY.size, name_nbytes)
    text = b"\n".join(raw)
    if text.count(b"\n") >= len(raw) or not _PLAIN.fullmatch(text) or _NO_NAME.search(text):
        return None
    root = raw[0].split(b"/")[0].decode()
    _, *names = f"\n{text.decode()}".split(f"\n{root}/")
    if len(names) != len(raw) or len(set(names)) != len(raw):
        return None
    parts = []
    for first in range(0, count, _TOGETHER):
        part = slice(first, first + _TOGETHER)
        offsets = _data_offsets(file, place.byte_offset, entry[part], start[part], stop[part], b"".join(raw[part]))
        if offsets is None:
            return None
        parts.append(offsets)
    byte_offset = np.concatenate(parts)
    if (byte_offset + nbytes > np.append(start[1:], place.byte_offset)).any():
        return None
    crc: Iterable[int | None] = entry["crc"].tolist() if entry["crc"].any() else repeat(None)
    columns = [one.tolist() for one in (start, byte_offset, nbytes, at + place.byte_offset)]
    members = map(ArchiveMember, names, *columns[:3], crc, columns[3])
    return root, dict(zip(names, members, strict=True))


def _data_offsets(
    file: PositionedFile, directory_offset: int, entry: _Rows, start: _Column, stop: _Column, names: bytes
) -> _Column | None:
    """The offset of each member's bytes, whose header lies in [start, stop) and before its extra field."""
    file.announce(apart(start.tolist()), LOCAL.size + EXTRA_NBYTES)
    header_stop = np.minimum(stop + EXTRA_NBYTES, directory_offset)
    far = np.append(True, start[1:] > header_stop[:-1] + 1024)
    block = start - np.maximum.accumulate(np.where(far, start, 0))
    far[1:] |= np.diff(block // WINDOW_NBYTES) != 0
    (first,) = np.nonzero(far)
    last = np.append(first[1:], len(start)) - 1
    windows = [file.read(a, b - a) for a, b in zip(start[first].tolist(), header_stop[last].tolist(), strict=True)]
    before = np.cumsum([0, *map(len, windows[:-1])])
    shift = (start[first] - before)[np.cumsum(far) - 1]  # from the file to the windows, one behind another
    held, at, extra_at, end = b"".join(windows), start - shift, stop - shift, header_stop - shift
    header = _rows(held, at, _LOCAL_ROW)
    right = (header["signature"] == _LOCAL_SIGNATURE) & (header["name"] == entry["name"])
    right &= ((header["flags"] & ~np.uint16(KNOWN_FLAGS)) | header["method"]) == 0
    for field in ("packed", "nbytes"):
        right &= np.isin(header[field], (0, WIDE)) | (header[field] == entry["nbytes"])
    right &= (header["crc"] == 0) | (header["crc"] == entry["crc"])
    if not right.all() or b"".join(_slices(held, at + LOCAL.size, extra_at - at - LOCAL.size)) != names:
        return None
    extra_stop, field_at = extra_at + header["extra"], extra_at.copy()
    for _ in range(2):  # 64-bit sizes, and padding
        (more,) = np.nonzero((field_at < extra_stop) & (field_at + 4 <= end))
        field_at[more] += 4 + _rows(held, field_at[more] + 2, _SHORT)["nbytes"].astype(np.int64)
    return stop + header["extra"] if (field_at == extra_stop).all() else None


def _rows(data: bytes, at: _Column, row: np.dtype[np.void]) -> _Rows:
    """Records that begin at these bytes."""
    return sliding_window_view(np.frombuffer(data, np.uint8), row.itemsize)[at].view(row)[:, 0]


def _slices(data: bytes, at: _Column, nbytes: _Column) -> list[bytes]:
    return [data[start:stop] for start, stop in zip(at.tolist(), (at + nbytes).tolist(), strict=True)]
