"""Files of torch.save whose tensors are holes: real headers, directories and pickles, zeros that take no disk.

Zip layout and pickles are those of torch.save (`torch.load` reads them), 64-bit sizes and offsets where the file needs
them; every tensor is zeros, with the checksum that zeros of that length have.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ds_reshard.containers.crc import crc32, repeated

Shape = tuple[int, ...]
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_WIDE = 0xFFFFFFFF
_STORAGES = {torch.float32: torch.FloatStorage, torch.bfloat16: torch.BFloat16Storage}


@dataclass(frozen=True)
class Hole:
    """A tensor of zeros, to be written as a hole."""

    shape: Shape
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class _Storage:
    """Stands for the storage of a hole in the pickle."""

    def __init__(self, key: str, hole: Hole) -> None:
        self.key = key
        self.hole = hole


class _Pickler(pickle.Pickler):
    """Pickles holes as torch pickles tensors: `_rebuild_tensor_v2` of a storage named by a persistent id."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.holes: list[Hole] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Hole):
            return NotImplemented
        storage = _Storage(str(len(self.holes)), value)
        self.holes.append(value)
        strides = tuple(prod(value.shape[i + 1 :]) for i in range(len(value.shape)))
        return torch._utils._rebuild_tensor_v2, (storage, 0, value.shape, strides, False, OrderedDict())

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        return "storage", _STORAGES[value.hole.dtype], value.key, "cpu", value.hole.numel


@dataclass(frozen=True)
class SparseArchive:
    """A file that is to be written: what is not zeros in it, and its bytes; `stem` is its name without `.pt`."""

    stem: str
    parts: Sequence[tuple[int, bytes]]
    nbytes: int

    def renamed(self, stem: str) -> SparseArchive:
        """The same content under another name of the same length."""
        assert len(stem) == len(self.stem)
        old, new = f"{self.stem}/".encode(), f"{stem}/".encode()
        return SparseArchive(stem, [(at, data.replace(old, new)) for at, data in self.parts], self.nbytes)

    def write(self, folder: Path) -> None:
        with (folder / f"{self.stem}.pt").open("wb") as file:
            file.truncate(self.nbytes)
            for at, data in self.parts:
                file.seek(at)
                file.write(data)


def sparse_archive(stem: str, value: object) -> SparseArchive:
    """`value` as torch.save would write it, its Holes as holes."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    texts = [("data.pkl", stream.getvalue()), (".format_version", b"1"), ("byteorder", b"little")]
    members = [(name, data, len(data), crc32(data)) for name, data in texts]
    members += [(f"data/{i}", b"", h.nbytes, repeated(b"\0", h.nbytes)) for i, h in enumerate(pickler.holes)]
    members.append(("version", b"3\n", 2, crc32(b"3\n")))
    directory, parts, at = bytearray(), [], 0
    together, began = bytearray(), 0
    for name, data, nbytes, crc in members:
        full, header = f"{stem}/{name}".encode(), at
        wide = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= _WIDE else b""
        gap = -(header + _LOCAL.size + len(full) + len(wide) + 4) % 64  # torch aligns every record to 64 bytes
        extra = wide + struct.pack("<2sH", b"FB", gap) + b"Z" * gap
        size = min(nbytes, _WIDE)
        together += _LOCAL.pack(b"PK\x03\x04", 0, 0, 0, 0, 0, crc, size, size, len(full), len(extra))
        together += full + extra + data
        at = began + len(together)
        if nbytes > len(data):
            parts.append((began, bytes(together)))
            at += nbytes - len(data)
            together, began = bytearray(), at
        directory += _entry(full, nbytes, header, crc)
    parts.append((began, bytes(together) + bytes(directory) + _end(len(members), len(directory), at)))
    return SparseArchive(stem, parts, began + len(parts[-1][1]))


def write_sparse(path: Path, value: object) -> None:
    """Write `value` as torch.save would, its Holes as holes."""
    sparse_archive(path.stem, value).write(path.parent)


def _entry(full: bytes, nbytes: int, header: int, crc: int) -> bytes:
    """A member's line in the directory, with the 64-bit numbers that do not fit it."""
    wide = ([nbytes, nbytes] if nbytes >= _WIDE else []) + ([header] if header >= _WIDE else [])
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size = min(nbytes, _WIDE)
    sizes = (crc, size, size, len(full), len(extra), 0, 0, 0, 0, min(header, _WIDE))
    return _ENTRY.pack(b"PK\x01\x02", 0, 0, 0, 0, 0, 0, *sizes) + full + extra


def _end(members: int, nbytes: int, start: int) -> bytes:
    """The end of an archive whose directory of `nbytes` bytes begins at `start`."""
    wide = b""
    if start >= _WIDE or members >= 0xFFFF:
        wide = _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, members, members, nbytes, start)
        wide += _LOCATOR.pack(b"PK\x06\x07", 0, start + nbytes, 1)
    count = min(members, 0xFFFF)
    return wide + _END.pack(b"PK\x05\x06", 0, 0, count, count, nbytes, min(start, _WIDE), 0)
