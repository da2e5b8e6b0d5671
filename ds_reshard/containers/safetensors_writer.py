"""A safetensors file whose every byte has its place before the first is written.

Eight bytes with the length of a JSON header, the header, padded with spaces to a multiple of eight, and the tensors
without gaps, in the header's order (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ds_reshard.containers.torch_zip_writer import Member
from ds_reshard.errors import UnsupportedLayout
from ds_reshard.model.codec import ElementType
from ds_reshard.model.records import StorageRecord, TensorRecord

DTYPES = {
    ElementType.FLOAT64: "F64",
    ElementType.FLOAT32: "F32",
    ElementType.FLOAT16: "F16",
    ElementType.BFLOAT16: "BF16",
    ElementType.FLOAT8_E4M3FN: "F8_E4M3",
    ElementType.FLOAT8_E5M2: "F8_E5M2",
    ElementType.INT64: "I64",
    ElementType.INT32: "I32",
    ElementType.INT16: "I16",
    ElementType.INT8: "I8",
    ElementType.UINT8: "U8",
    ElementType.UINT16: "U16",
    ElementType.UINT32: "U32",
    ElementType.UINT64: "U64",
    ElementType.BOOL: "BOOL",
}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsPlan:
    """One file to be written: its header, and the place of each storage, by key."""

    header: bytes
    storages: Mapping[str, StorageRecord]
    places: Mapping[str, Member]
    nbytes: int

    def parts(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """All bytes but those of the storages, each with its offset; the format has no checksums."""
        yield 0, self.header


def plan_safetensors(tensors: Mapping[str, TensorRecord], metadata: Mapping[str, str]) -> SafetensorsPlan:
    """Where everything lies in a file of these tensors, each row-major and alone in its storage.

    Raises UnsupportedLayout for an element type that the format has not.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise UnsupportedLayout(f"{name}: safetensors has no {tensor.dtype.label}; --to torch has")
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    places, start = {}, len(header)
    for name, tensor in tensors.items():
        key = tensor.storage.key
        places[key] = Member(name=name, header_offset=start, byte_offset=start, nbytes=tensor.nbytes)
        start += tensor.nbytes
    storages = {tensor.storage.key: tensor.storage for tensor in tensors.values()}
    return SafetensorsPlan(header=header, storages=storages, places=places, nbytes=start)
