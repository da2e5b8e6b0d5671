"""Typed facts that travel beside the tensors: param groups, scalars, counters."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_reshard.model.codec import ElementType
from ds_reshard.model.records import GlobalName, ObjectRecord, StorageRecord, TensorRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarTensor:
    """A small tensor that does not follow a parameter, read whole: `step`, NAdam's `mu_product`."""

    dtype: ElementType
    shape: tuple[int, ...]
    data: bytes


_LONGEST = 4096

Scalar = ScalarTensor | int | float | bool | str | None
"""A state value that is one for a whole partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """One param group as it was saved: its members by name, its hyper-parameters as records.

    `hyperparameters` is None where the format stores none (elastic checkpoints).
    """

    members: tuple[str, ...]
    hyperparameters: Mapping[str, object] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """What all optimizer shards agree on: groups, and for each parameter its scalar states."""

    groups: tuple[GroupFacts, ...]
    scalars: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)


def canonical(value: object) -> str:
    """A text that is equal exactly for equal trees of plain values and records; a list equals its tuple.

    Used to compare what two shards say. Tensors stand for their shape, type and checksum. A part that
    is shared is written once, so the cost is linear; a part that contains itself is written as such.
    """
    return _canonical(value, {}, set())


def _canonical(value: object, done: dict[int, str], open_parts: set[int]) -> str:
    if isinstance(value, TensorRecord):
        where = (value.shape, value.stride, value.element_offset, value.storage.numel, value.storage.crc32)
        return f"tensor({value.dtype.label},{where})"
    if isinstance(value, StorageRecord):
        return f"storage({value.dtype.label},{value.numel},{value.crc32})"
    if isinstance(value, ScalarTensor):
        return f"scalar({value.dtype.label},{value.shape},{value.data.hex()})"
    if isinstance(value, GlobalName):
        return str(value)
    if not isinstance(value, dict | list | tuple | set | frozenset | ObjectRecord):
        return repr(value)
    key = id(value)
    if key in open_parts:
        return "itself"
    if key not in done:
        open_parts.add(key)
        text = _compound(value, done, open_parts)
        open_parts.discard(key)
        done[key] = text if len(text) <= _LONGEST else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    return done[key]


def _compound(value: object, done: dict[int, str], open_parts: set[int]) -> str:
    if isinstance(value, dict):
        rows = sorted((_canonical(k, done, open_parts), _canonical(v, done, open_parts)) for k, v in value.items())
        return "{" + ",".join(f"{k}:{v}" for k, v in rows) + "}"
    if isinstance(value, ObjectRecord):
        parts = (value.args, value.kwargs, value.by_new, value.has_state, value.state, value.items, value.pairs)
        return f"{value.callable}({','.join(_canonical(part, done, open_parts) for part in parts)})"
    if isinstance(value, set | frozenset):
        return "set[" + ",".join(sorted(_canonical(item, done, open_parts) for item in value)) + "]"
    assert isinstance(value, list | tuple)
    return "[" + ",".join(_canonical(item, done, open_parts) for item in value) + "]"


def describe(value: object) -> str:
    """A short text of a value for an error message."""
    if isinstance(value, ScalarTensor):
        return f"{value.dtype.label} {_number(value)}"
    text = canonical(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _number(value: ScalarTensor) -> str:
    codes = {"float32": "f", "float64": "d", "int64": "q", "int32": "i"}
    code = codes.get(value.dtype.label)
    if code is None or len(value.data) != value.dtype.itemsize:
        return value.data.hex()
    return f"{struct.unpack('<' + code, value.data)[0]:g}"
