"""Typed facts that travel beside the tensors: param groups, scalars, counters."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_reshard.model.codec import ElementType
from ds_reshard.model.records import GlobalName, ObjectRecord, TensorRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarTensor:
    """A small tensor that does not follow a parameter, read whole: `step`, NAdam's `mu_product`."""

    dtype: ElementType
    shape: tuple[int, ...]
    data: bytes


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
    """A text that is equal exactly for equal trees of plain values and records.

    Used to compare what two shards say. Tensors stand for their shape, type and checksum.
    """
    if isinstance(value, dict):
        rows = sorted((canonical(k), canonical(v)) for k, v in value.items())
        return "{" + ",".join(f"{k}:{v}" for k, v in rows) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(canonical(v) for v in value) + "]"
    if isinstance(value, TensorRecord):
        return f"tensor({value.dtype.label},{value.shape},{value.storage.crc32},{value.element_offset})"
    if isinstance(value, ScalarTensor):
        return f"scalar({value.dtype.label},{value.shape},{value.data.hex()})"
    if isinstance(value, GlobalName):
        return str(value)
    if isinstance(value, ObjectRecord):
        parts = (value.args, value.kwargs, value.state, value.items, value.pairs)
        return f"{value.callable}({','.join(canonical(part) for part in parts)})"
    return repr(value)


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
