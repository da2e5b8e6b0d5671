"""The members of a file of torch.save, by columns: every claim of its directory and local headers is checked.

Accepted are members that are stored, not encrypted, below one root; no comment, nothing before or between.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.zip_directory import ENTRY, LOCAL, WIDE, ArchiveMember, DirectoryPlace, find_directory
from ds_reshard.errors import CheckpointDamaged, UnsafePickle

_SIZES = [("crc", "<u4"), ("packed", "<u4"), ("nbytes", "<u4"), ("name", "<u2"), ("extra", "<u2")]
_REPEATED = [("flags", "<u2"), ("method", "<u2"), ("time", "<u4"), *_SIZES]  # of an entry, in the local header
_BEHIND = [("comment", "<u2"), ("disk", "<u2"), ("inner", "<u2"), ("attributes", "<u4"), ("header", "<u4")]
_ENTRY_ROW = numpy.dtype([("signature", "<u4"), ("versions", "<u4"), *_REPEATED, *_BEHIND])
_LOCAL_ROW = numpy.dtype([("signature", "<u4"), ("version", "<u2"), *_REPEATED])
_SHORT = numpy.dtype([("nbytes", "<u2")])
_LENGTHS = struct.Struct("<4s24xHHH")  # of an entry: its signature, the lengths of its name, extra field and comment
_LOCAL_SIGNATURE = int.from_bytes(b"PK\x03\x04", "little")
# A descriptor follows the bytes (bit 3), names are UTF-8 (bit 11): all that torch's writer sets.
_UNKNOWN_FLAGS = numpy.uint16(0xFFFF & ~0x0808)
_WIDE_KIND = 1  # of an extra field
_IS_FOLDER = 0x10  # the attribute of a member that torch's reader, miniz, gives no bytes of, and no error
# Torch writes the 64-bit sizes (28 bytes) and then padding, of which the first 4 bytes are read.
_EXTRA_NBYTES = 64
_ALIGNMENT, _NEAR_NBYTES = 64, 1024
_TOGETHER = 4096
"""So many headers are read at once, with what lies between those that are near each other."""
_Column = NDArray[numpy.int64]
_Rows = NDArray[numpy.void]


class _Members(NamedTuple):
    """Columns of members in the order of their bytes: whole names, entries of the directory, and where these lie.

    A local header with its name lies in the bytes [start, stop).
    """

    raw: list[bytes]
    entry: _Rows
    entry_offset: _Column
    start: _Column
    stop: _Column
    nbytes: _Column


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
    members = _members(file.path, place, file.read(place.byte_offset, place.nbytes))
    byte_offset = _data_offsets(file, members, place.byte_offset)
    root, names = _names(file.path, members.raw)
    crc = members.entry["crc"]
    # None was written where torch.serialization.set_crc32_options(False) was in force.
    checksums: Iterable[int | None] = crc.tolist() if crc.any() else repeat(None)
    columns = (one.tolist() for one in (members.start, byte_offset, members.nbytes))
    return root, dict(
        zip(names, map(ArchiveMember, names, *columns, checksums, members.entry_offset.tolist()), strict=True)
    )


# -- the directory -----------------------------------------------------------------------------------------------------


def _members(path: str, place: DirectoryPlace, directory: bytes) -> _Members:
    """What the directory says: each member is stored, and lies before the directory, apart from the others."""
    at = numpy.array(list(_entry_offsets(path, place, directory)), numpy.int64)
    if not len(at):
        raise CheckpointDamaged(f"{path}: the zip file is empty")
    entry = _rows(directory, at, _ENTRY_ROW)
    nbytes, packed, start = (entry[field].astype(numpy.int64) for field in ("nbytes", "packed", "header"))
    for row in numpy.flatnonzero((nbytes == WIDE) | (packed == WIDE) | (start == WIDE)).tolist():
        name_stop = int(at[row]) + ENTRY.size + int(entry["name"][row])
        raw, extra = directory[at[row] + ENTRY.size : name_stop], directory[name_stop:][: entry["extra"][row]]
        wide = _wide_fields(path, raw, extra, [int(column[row]) for column in (nbytes, packed, start)])
        if max(wide) > place.byte_offset:
            raise _damaged(path, raw, _cut_short(wide[0], wide[2], place))
        nbytes[row], packed[row], start[row] = wide
    order = numpy.argsort(start, kind="stable")
    entry = entry[order]
    at, nbytes, packed, start = (column[order] for column in (at, nbytes, packed, start))
    raws = _slices(directory, at + ENTRY.size, at + ENTRY.size + entry["name"])
    members = _Members(raws, entry, at + place.byte_offset, start, start + LOCAL.size + entry["name"], nbytes)
    ends = members.stop + nbytes
    _check(
        path,
        raws,
        *_stored(entry),
        (
            entry["attributes"] & _IS_FOLDER != 0,
            lambda _: "has the attribute of a folder, of which torch reads no bytes",
        ),
        (
            (packed != nbytes) | (entry["disk"] != 0),
            lambda row: f"takes {packed[row]} bytes for {nbytes[row]} of content, and is not stored",
        ),
        _inside_another(start, ends),
        (ends > place.byte_offset, lambda row: _cut_short(int(nbytes[row]), int(start[row]), place)),
    )
    return members


def _entry_offsets(path: str, place: DirectoryPlace, directory: bytes) -> Iterator[int]:
    at = 0
    for number in range(place.entries):
        said = _LENGTHS.unpack_from(directory, at) if at + ENTRY.size <= len(directory) else (b"",)
        if said[0] != b"PK\x01\x02":
            raise CheckpointDamaged(f"{path}: the zip directory has {number} entries, and declares {place.entries}")
        yield at
        at += ENTRY.size + sum(said[1:])
        if at > len(directory):
            raise CheckpointDamaged(f"{path}: entry {number} of the zip directory leaves it")
    if at != len(directory):
        raise CheckpointDamaged(f"{path}: {len(directory) - at} bytes follow the last entry of the zip directory")


def _wide_fields(path: str, raw: bytes, extra: bytes, fields: list[int]) -> list[int]:
    """`fields` (content, stored size, header offset) with those that did not fit taken from the 64-bit extra."""
    wanted, at = fields.count(WIDE), 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        at += 4 + nbytes
        if kind == _WIDE_KIND and nbytes >= 8 * wanted and at <= len(extra):
            values = iter(struct.unpack_from(f"<{wanted}Q", extra, at - nbytes))
            return [next(values) if value == WIDE else value for value in fields]
    raise _damaged(path, raw, "lacks the 64-bit sizes that its entry refers to")


def _names(path: str, raws: list[bytes]) -> tuple[str, list[str]]:
    """The root folder's name, and the names below it."""
    names = []
    for raw in raws:
        try:
            names.append(raw.decode("utf-8"))
        except UnicodeDecodeError:
            raise CheckpointDamaged(f"{path}: a name in the zip directory is not UTF-8: {raw[:80]!r}") from None
    if _is_strange("/\n/".join(names)):
        name = next(filter(_is_strange, names))
        raise CheckpointDamaged(f"{path}: {name[:200]!r} is not the name of a member that torch.save writes")
    root = names[0].split("/")[0]
    if outside := [name for name in names if not name.startswith(f"{root}/")]:
        raise CheckpointDamaged(f"{path}: {outside[0]!r} lies outside the archive's one folder {root!r}")
    if len(set(names)) < len(names):
        twice = [name for name, count in Counter(names).items() if count > 1]
        what = f"{path}: {twice[0]!r} is in the zip directory twice"
        if any(name.endswith(".pkl") for name in twice):
            raise UnsafePickle(f"{what}: readers may take either; nothing was run")
        raise CheckpointDamaged(what)
    return root, [name[len(root) + 1 :] for name in names]


def _is_strange(name: str) -> bool:
    """Whether it, or one of several with a slash between each and its end of line, is no name of torch's."""
    return any(part in f"/{name}/" for part in ("//", "/./", "/../", "\0", "\\"))


_Check = tuple[NDArray[numpy.bool_], Callable[[int], str]]
"""The rows that fail it, and what is then said of a row."""


def _check(path: str, raws: list[bytes], *checks: _Check) -> None:
    """Raise what the first row that fails a check is refused for."""
    failed = [(int(fails.argmax()), number) for number, (fails, _) in enumerate(checks) if fails.any()]
    if failed:
        row, number = min(failed)
        raise _damaged(path, raws[row], checks[number][1](row))


def _damaged(path: str, raw: bytes, what: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"{path}: {raw.decode('utf-8', 'replace')[:200]!r} {what}")


def _stored(said: _Rows) -> tuple[_Check, ...]:
    """Checks of what entries and local headers both say."""
    flags, method, unpack = said["flags"], said["method"], "torch.save stores. Unpack it and zip it with: zip -0"
    return (
        (flags & 0x2041 != 0, lambda _: "is encrypted; torch.save encrypts nothing"),
        (method != 0, lambda row: f"is compressed (method {method[row]}); {unpack}"),
        (flags & _UNKNOWN_FLAGS != 0, lambda row: f"has zip flags 0x{flags[row]:04x}, which torch.save does not set"),
    )


def _inside_another(start: _Column, ends: _Column) -> _Check:
    fails = numpy.append(False, start[1:] < ends[:-1])
    return fails, lambda row: f"begins at byte {start[row]}, inside another member"


def _cut_short(nbytes: int, start: int, place: DirectoryPlace) -> str:
    where = f"declares {nbytes} bytes at {start}; its directory is at {place.byte_offset}"
    return f"{where}: the file was cut short or is damaged"


# -- the local headers -------------------------------------------------------------------------------------------------


def _data_offsets(file: PositionedFile, members: _Members, directory_offset: int) -> _Column:
    """The offset of each member's bytes, from their local headers.

    Of a file that is far away those are left out which lie among tensors: see `_before_what_follows`.
    """
    found = numpy.zeros_like(members.start)
    if file.far:
        found = _before_what_follows(members, directory_offset)
    left = numpy.flatnonzero(found == 0)
    for first in range(0, len(left), _TOGETHER):
        rows = left[first : first + _TOGETHER]
        raws, columns = [members.raw[row] for row in rows.tolist()], (column[rows] for column in members[2:])
        found[rows] = _behind_headers(file, _Members(raws, members.entry[rows], *columns), directory_offset)
    ends = found + members.nbytes
    into = ends > directory_offset, lambda _: "runs into the zip directory"
    _check(file.path, members.raw, into, _inside_another(members.start, ends))
    return found


def _before_what_follows(members: _Members, directory_offset: int) -> _Column:
    """The offset of each tensor's bytes, by where the next member begins; 0 where the header has to tell it.

    torch's writer aligns these bytes to 64, lets a descriptor of 16 bytes follow, or of 24 where sizes are of 64 bits,
    or none, and then the next header. The bytes' own checksum tells whether they are these.
    """
    found, stop, nbytes = numpy.zeros_like(members.start), members.stop, members.nbytes
    tensors = numpy.array([b"/data/" in raw for raw in members.raw]) & (members.entry["crc"] != 0) & (nbytes != 0)
    for behind in (24, 16, 0):
        at = numpy.append(members.start[1:], directory_offset) - behind - nbytes
        fits = tensors & (at % _ALIGNMENT == 0) & (stop <= at) & (at < stop + _EXTRA_NBYTES + 2 * _ALIGNMENT)
        found[fits] = at[fits]
    return found


def _behind_headers(file: PositionedFile, members: _Members, directory_offset: int) -> _Column:
    """The offset of the bytes behind each local header, which must agree with the directory's entry.

    Headers that are near each other are read together.
    """
    raws, entry, _, start, stop, nbytes = members
    header_stop = numpy.minimum(stop + _EXTRA_NBYTES, directory_offset)
    far = numpy.append(True, start[1:] > header_stop[:-1] + _NEAR_NBYTES)
    spans = list(zip(start[far].tolist(), header_stop[numpy.append(far[1:], True)].tolist(), strict=True))
    file.announce(spans)
    windows = [file.read(first, last - first) for first, last in spans]
    before = numpy.cumsum([0, *map(len, windows[:-1])])
    shift = (start[far] - before)[numpy.cumsum(far) - 1]  # from the file to the windows, one behind another
    data, at, extra_at, end = b"".join(windows), start - shift, stop - shift, header_stop - shift
    header = _rows(data, at, _LOCAL_ROW)
    named = zip(_slices(data, at + LOCAL.size, extra_at), raws, strict=True)
    another = numpy.array([one != other for one, other in named])
    another |= (header["signature"] != _LOCAL_SIGNATURE) | (header["name"] != entry["name"])
    differs = (header["crc"] != 0) & (header["crc"] != entry["crc"])
    for field in ("packed", "nbytes"):
        differs |= (header[field] != 0) & (header[field] != WIDE) & (header[field] != nbytes)
    extra_stop, field_at = extra_at + header["extra"], extra_at.copy()
    while (more := numpy.flatnonzero((field_at < extra_stop) & (field_at + 4 <= end))).size:
        field_at[more] += 4 + _rows(data, field_at[more] + 2, _SHORT)["nbytes"].astype(numpy.int64)
    _check(
        file.path,
        raws,
        (another, lambda row: f"has a header at byte {start[row]} that is not that of this member"),
        *_stored(header),
        (differs, lambda _: "has another size or checksum in its header than in the directory"),
        (field_at != extra_stop, lambda _: "has a header whose extra field has another length than declared"),
    )
    found: _Column = stop + header["extra"]
    return found


def _rows(data: bytes, at: _Column, row: numpy.dtype[numpy.void]) -> _Rows:
    """Records that begin at these bytes."""
    every: _Rows = numpy.ndarray(len(data) - row.itemsize + 1, row, data, strides=1)  # from each byte on
    return every[at]


def _slices(data: bytes, start: _Column, stop: _Column) -> list[bytes]:
    return [data[one:other] for one, other in zip(start.tolist(), stop.tolist(), strict=True)]
