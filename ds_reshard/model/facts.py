"""Typed facts that travel beside the tensors: param groups, scalars, counters."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ds_reshard.model.nesting import children
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, StorageRecord, TensorRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarTensor:
    """A small tensor that does not follow a parameter, read whole: `step`, NAdam's `mu_product`."""

    dtype: ElementType
    shape: tuple[int, ...]
    data: bytes


_LONGEST = 4096
_COMPOUND = (dict, list, tuple, set, frozenset, ObjectRecord)

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


def canonical(value: object, *, known: Mapping[int, str] | None = None) -> str:
    """A text that is equal exactly for equal trees of plain values and records; a list equals its tuple.

    Used to compare what two shards say. Tensors stand for their shape, type and checksum. A part that
    is shared is written once, so the cost is linear; a part that contains itself is written as such.
    `known` has texts of parts by their id, which are used instead of these parts' own.
    """
    done: dict[int, str] = dict(known or {})
    open_parts: set[int] = set()
    left = [value]
    while left:
        part = left[-1]
        key = id(part)
        if key in done or not _is_kept(part):
            left.pop()
        elif key not in open_parts:
            open_parts.add(key)
            left += [child for child in children(part) if id(child) not in open_parts]
        else:
            left.pop()
            open_parts.discard(key)
            text = _compound(part, done)
            digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
            done[key] = text if len(text) <= _LONGEST else f"sha256:{digest.hexdigest()}"
    return _text(value, done)


def _is_kept(value: object) -> bool:
    """Whether the text of a part is made once: it has parts itself, or is long."""
    if isinstance(value, str | bytes | bytearray):
        return len(value) > _LONGEST
    return isinstance(value, _COMPOUND)


def _text(value: object, done: Mapping[int, str]) -> str:
    if (text := done.get(id(value))) is not None:
        return text
    if isinstance(value, TensorRecord):
        where = (value.shape, value.stride, value.element_offset, value.storage.numel, value.storage.crc32)
        return f"tensor({value.dtype.label},{where})"
    if isinstance(value, StorageRecord):
        return f"storage({value.dtype.label},{value.numel},{value.crc32})"
    if isinstance(value, ScalarTensor):
        return f"scalar({value.dtype.label},{value.shape},{value.data.hex()})"
    if isinstance(value, GlobalName):
        return str(value)
    return "itself" if _is_kept(value) else repr(value)


def _compound(value: object, done: Mapping[int, str]) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{v}" for k, v in sorted(_rows(value.items(), done))) + "}"
    if isinstance(value, ObjectRecord):
        given = ",".join(f"{name}={_text(arg, done)}" for name, arg in sorted(value.kwargs.items()))
        pairs = ",".join(f"{k}:{v}" for k, v in _rows(value.pairs, done))
        parts = (
            _list(value.args, done),
            f"{{{given}}}",
            str(value.by_new),
            str(value.has_state),
            _text(value.state, done),
            _list(value.items, done),
            f"{{{pairs}}}",
        )
        return f"{value.callable}({','.join(parts)})"
    if isinstance(value, set | frozenset):
        return "set[" + ",".join(sorted(_text(item, done) for item in value)) + "]"
    return _list(value, done) if isinstance(value, list | tuple) else repr(value)


def _list(items: Iterable[object], done: Mapping[int, str]) -> str:
    return "[" + ",".join(_text(item, done) for item in items) + "]"


def _rows(pairs: Iterable[tuple[object, object]], done: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    return ((_text(key, done), _text(value, done)) for key, value in pairs)


def describe(value: object) -> str:
    """A short text of a value for an error message."""
    if isinstance(value, ScalarTensor):
        number = number_of(value)
        return f"{value.dtype.label} {value.data.hex() if number is None else f'{number:g}'}"
    text = canonical(value)
    return text if len(text) <= 80 else text[:77] + "..."


def text_of(value: object) -> str:
    """A text as it is, and of anything else what `describe` says: its own could be endless."""
    return value if isinstance(value, str) else describe(value)


_CODES = {"float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "int8": "b"}


def number_of(value: Scalar) -> int | float | None:
    """The number that a scalar is, None for one that is none."""
    if isinstance(value, ScalarTensor):
        return exact_number(value) if value.dtype.label in _CODES else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


# Types of which every value is a number of Python, with no rounding; struct has a letter for each but bfloat16.
_EXACT = _CODES | {"uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "bool": "?"}


def exact_number(value: ScalarTensor) -> bool | int | float | None:
    """The very value of a tensor of one element as Python has it; None where it has none."""
    label, data = value.dtype.label, value.data
    if label == "bfloat16" and len(data) == 2:
        label, data = "float32", b"\0\0" + data
    code = _EXACT.get(label)
    if code is None or len(data) != struct.calcsize("<" + code):
        return None
    number = struct.unpack("<" + code, data)[0]
    assert isinstance(number, bool | int | float)
    return number


def as_scalar(number: float, like: ScalarTensor) -> ScalarTensor | None:
    """The same number as a tensor of the type and shape of another; None where that type has not this number."""
    code = _CODES.get(like.dtype.label)
    if code is None:
        return None
    try:
        made = replace(like, data=struct.pack("<" + code, number if code in "dfe" else int(number)))
    except (struct.error, OverflowError, ValueError):
        return None
    return made if number_of(made) == number else None


def torch_step(value: Scalar) -> Scalar:
    """A step as torch's optimizers keep it: an fp32 tensor."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return ScalarTensor(dtype=ElementType.FLOAT32, shape=(), data=struct.pack("<f", value))
