"""A torch archive whose every byte has its place before the first is written: bytes may come in any order.

The layout of torch's own writer (caffe2/serialize/inline_container.cc, torch 2.13): stored members below one root,
their bytes at multiples of 64, the padding in an extra field "FB"; 64-bit sizes where they are needed (PKWARE's
APPNOTE.TXT 6.3.10, 4.5.3). Sizes and checksums stand in the local headers too, so no descriptors follow the bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ds_reshard.containers.crc import crc32
from ds_reshard.containers.pickle_writer import write_pickle
from ds_reshard.model.records import StorageRecord

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_WIDE, _WIDE_COUNT = 0xFFFFFFFF, 0xFFFF
_UTF8 = 0x0800
_ALIGNMENT = 64
_MADE_BY, _NEEDS, _NEEDS_WIDE = 20, 20, 45


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A file of the archive: where its header and its bytes lie; `data` is None for a storage, which comes later."""

    name: str
    header_offset: int
    byte_offset: int
    nbytes: int
    data: bytes | None = None

    def header(self, crc: int) -> bytes:
        """The local header, with what pads it to the first byte."""
        name = self.name.encode("utf-8")
        wide = _wide_extra((self.nbytes, self.nbytes)) if self.nbytes >= _WIDE else b""
        padding = self.byte_offset - self.header_offset - _LOCAL.size - len(name) - len(wide) - 4
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        size = min(self.nbytes, _WIDE)
        needs = _NEEDS_WIDE if wide else _NEEDS
        fixed = _LOCAL.pack(b"PK\x03\x04", needs, _UTF8, 0, 0, 0, crc, size, size, len(name), len(extra))
        return fixed + name + extra

    def entry(self, crc: int) -> bytes:
        """The line of the directory."""
        name = self.name.encode("utf-8")
        fields = (self.nbytes, self.nbytes, self.header_offset)
        wide = _wide_extra(tuple(value for value in fields if value >= _WIDE))
        needs = _NEEDS_WIDE if wide else _NEEDS
        packed, nbytes, offset = (min(value, _WIDE) for value in fields)
        sizes = (packed, nbytes, len(name), len(wide), 0, 0, 0, 0, offset)
        return _ENTRY.pack(b"PK\x01\x02", _MADE_BY, needs, _UTF8, 0, 0, 0, crc, *sizes) + name + wide


def _wide_extra(values: tuple[int, ...]) -> bytes:
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivePlan:
    """One archive to be written.

    `storages` are the storages that `value` refers to, by the key of their member, in the order of their first use;
    `places` gives the member of each.
    """

    members: tuple[Member, ...]
    storages: Mapping[str, StorageRecord]
    nbytes: int

    @property
    def places(self) -> dict[str, Member]:
        return {member.name.rpartition("/")[2]: member for member in self.members if member.data is None}

    def parts(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """All bytes but those of the storages, each with its offset; `checksums` are the storages' crc32 by key."""
        entries = []
        for member in self.members:
            crc = crc32(member.data) if member.data is not None else checksums[member.name.rpartition("/")[2]]
            yield member.header_offset, member.header(crc) + (member.data or b"")
            entries.append(member.entry(crc))
        directory = b"".join(entries)
        yield self._directory_offset, directory + _end(len(entries), len(directory), self._directory_offset)

    @property
    def _directory_offset(self) -> int:
        last = self.members[-1]
        return last.byte_offset + last.nbytes


def plan_archive(root: str, value: object) -> ArchivePlan:
    """Where everything lies in the archive that holds `value`, a tree of plain values and records.

    Storages are told apart by path, place and key: tensors that share one share its bytes in the new file too.
    """
    keys: dict[tuple[str, int, str], str] = {}
    storages: dict[str, StorageRecord] = {}

    def key_of(storage: StorageRecord) -> str:
        key = keys.setdefault((storage.path, storage.byte_offset, storage.key), str(len(keys)))
        storages[key] = storage
        return key

    pickle = write_pickle(value, key_of)
    identity = str(int.from_bytes(hashlib.sha256(pickle).digest(), "big"))[:40]
    before = {"data.pkl": pickle, ".format_version": b"1", ".storage_alignment": b"64", "byteorder": b"little"}
    after = {"version": b"3\n", ".data/serialization_id": identity.encode("ascii")}
    contents: dict[str, bytes | None] = {**before, **{f"data/{key}": None for key in storages}, **after}
    members, at = [], 0
    for name, data in contents.items():
        nbytes = len(data) if data is not None else storages[name.removeprefix("data/")].nbytes
        full = f"{root}/{name}"
        least = at + _LOCAL.size + len(full.encode("utf-8")) + 4 + (20 if nbytes >= _WIDE else 0)
        start = -(-least // _ALIGNMENT) * _ALIGNMENT
        members.append(Member(name=full, header_offset=at, byte_offset=start, nbytes=nbytes, data=data))
        at = start + nbytes
    plan = ArchivePlan(members=tuple(members), storages=storages, nbytes=0)
    return ArchivePlan(members=plan.members, storages=storages, nbytes=at + _directory_nbytes(plan.members, at))


def _directory_nbytes(members: tuple[Member, ...], offset: int) -> int:
    directory = sum(len(member.entry(0)) for member in members)
    return directory + len(_end(len(members), directory, offset))


def _end(entries: int, nbytes: int, offset: int) -> bytes:
    """The end records; the 64-bit ones where a number does not fit."""
    count = min(entries, _WIDE_COUNT)
    narrow = _END.pack(b"PK\x05\x06", 0, 0, count, count, min(nbytes, _WIDE), min(offset, _WIDE), 0)
    if entries < _WIDE_COUNT and nbytes < _WIDE and offset < _WIDE:
        return narrow
    wide = _END64.pack(b"PK\x06\x06", _END64.size - 12, _MADE_BY, _NEEDS_WIDE, 0, 0, entries, entries, nbytes, offset)
    return wide + _END64_LOCATOR.pack(b"PK\x06\x07", 0, offset + nbytes, 1) + narrow
