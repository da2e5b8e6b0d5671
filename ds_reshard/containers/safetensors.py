"""A safetensors file whose every byte has its place before the first is written.

Eight bytes with the length of a JSON header, the header, padded with spaces to a multiple of eight, and the tensors
without gaps, in the header's order (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.torch_zip_writer import Member, PlainPlan
from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType, TensorRecord, new_tensor

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


def plan_safetensors(tensors: Mapping[str, TensorRecord], metadata: Mapping[str, str]) -> PlainPlan:
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
    return PlainPlan(data=header, storages=storages, places=places)


_FILE_NBYTES = 5 * 10**9


def shards(nbytes: Mapping[TensorKey, int]) -> dict[str, list[TensorKey]]:
    """The tensors of each file, of at most 5 GB, under the names that transformers gives (modeling_utils.py, 5.23)."""
    parts: list[list[TensorKey]] = [[]]
    filled = 0
    for key, size in nbytes.items():
        if parts[-1] and filled + size > _FILE_NBYTES:
            parts.append([])
            filled = 0
        parts[-1].append(key)
        filled += size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{n:05d}-of-{len(parts):05d}.safetensors": part for n, part in enumerate(parts, start=1)}


def shard_index(files: Mapping[str, list[TensorKey]], nbytes: Mapping[TensorKey, int]) -> dict[str, str]:
    """The index of several files, by its name; none for one."""
    located = {key.name: name for name, keys in files.items() for key in keys}
    index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": dict(sorted(located.items()))}
    return {"model.safetensors.index.json": json.dumps(index, indent=2) + "\n"} if len(files) > 1 else {}


def unwritable(names: Iterable[str]) -> Iterator[Fault]:
    """Names of tensors with which no reader opens a safetensors file."""
    for name in names:
        if name == "__metadata__" or name.encode("utf-8", "ignore").decode() != name:
            what = "is a name that no tensor of a safetensors file can have: no text, or the file's own entry"
            yield UnsupportedLayout.fault(repr(name), what, mend="--to torch or dcp, or --names with another one")


_LENGTH = struct.Struct("<Q")
_HEADER_NBYTES = 100_000_000  # MAX_HEADER_SIZE of safetensors (src/tensor.rs, 0.5)
_TYPES = {label: dtype for dtype, label in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """The tensors of a file, each in a storage of its own without checksum, and the text entries beside them."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorRecord]


def read_header(path: str) -> SafetensorsHeader:
    """Read a file's header. Raises CheckpointNotFound, ReadFailed, CheckpointDamaged or UnsupportedLayout."""
    with PositionedFile(path) as file:
        if file.nbytes < _LENGTH.size:
            raise CheckpointDamaged(f"{path}: {file.nbytes} bytes: no safetensors file, which begins with eight")
        (length,) = _LENGTH.unpack(file.read(0, _LENGTH.size))
        if length > min(_HEADER_NBYTES, file.nbytes - _LENGTH.size):
            raise CheckpointDamaged(f"{path}: a header of {length} bytes is declared, in a file of {file.nbytes}")
        header = _parsed(path, file.read(_LENGTH.size, length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointDamaged(f"{path}: the header's metadata is not text by name")
    start = _LENGTH.size + length
    tensors = {name: _tensor(path, name, entry, start) for name, entry in header.items()}
    _check_places(path, tensors, start, file.nbytes)
    return SafetensorsHeader(metadata=metadata, tensors=tensors)


def _parsed(path: str, data: bytes) -> dict[str, object]:
    try:
        header = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path}: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointDamaged(f"{path}: the header holds no object")
    return header


def _tensor(path: str, name: str, entry: object, start: int) -> TensorRecord:
    known = entry if isinstance(entry, dict) else {}
    shape, offsets = _numbers(known.get("shape")), _numbers(known.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or not isinstance(known.get("dtype"), str):
        raise CheckpointDamaged(f"{path}: tensor {name!r} has no type, shape and data_offsets")
    dtype = _TYPES.get(known["dtype"])
    if dtype is None:
        raise UnsupportedLayout(f"{path}: tensor {name!r} is of type {known['dtype']!r}, which is not known here")
    nbytes = offsets[1] - offsets[0]
    if nbytes != prod(shape) * dtype.itemsize:
        raise CheckpointDamaged(
            f"{path}: tensor {name!r} of shape {list(shape)} has {nbytes} bytes, in {known['dtype']}"
        )
    made = new_tensor(name, shape, dtype)
    return replace(made, storage=replace(made.storage, path=path, byte_offset=start + offsets[0]))


def _numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        return None
    return tuple(value)


def _check_places(path: str, tensors: Mapping[str, TensorRecord], start: int, nbytes: int) -> None:
    """Tensors lie end to end, from the header to the end of the file."""
    at = start
    for tensor in sorted((t.storage for t in tensors.values()), key=lambda storage: storage.byte_offset):
        if tensor.byte_offset != at:
            raise CheckpointDamaged(f"{path}: tensor {tensor.key!r} begins at {tensor.byte_offset}, not at {at}")
        at += tensor.nbytes
    if at != nbytes:
        raise CheckpointDamaged(f"{path}: its tensors end at byte {at}, the file at {nbytes}")
