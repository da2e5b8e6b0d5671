"""Typed values of an optimizer that are not tensors of a parameter's shape: param groups, scalars, counters."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ds_reshard.model.nesting import children
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, StorageRecord, TensorRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarTensor:
    """A small tensor without a parameter's shape, with its bytes: `step`, NAdam's `mu_product`."""

    dtype: ElementType
    shape: tuple[int, ...]
    data: bytes


_LONGEST = 4096
_COMPOUND = (dict, list, tuple, set, frozenset, ObjectRecord)

Scalar = ScalarTensor | int | float | bool | str | None
"""A value of an optimizer state that holds for a whole partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """One param group as saved: the names of its parameters, and its hyper-parameters as records.

    `hyperparameters` is None if the format stores none (elastic checkpoints).
    """

    members: tuple[str, ...]
    hyperparameters: Mapping[str, object] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """The values that all optimizer shards agree on: param groups, and the scalar states of each parameter by name."""

    groups: tuple[GroupFacts, ...]
    scalars: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)


def canonical(value: object, *, known: Mapping[int, str] | None = None) -> str:
    """Return a text that is equal for two trees of plain values and records exactly if they are equal.

    It serves to compare two shards. A list equals its tuple; a tensor is written as its shape, type and checksum. A
    shared part is written once, so the cost is linear; a part that contains itself is written as "itself". `known` has
    texts of parts by their id, which replace the parts' own.
    """
    texts: dict[int, str] = dict(known or {})
    in_progress: set[int] = set()
    stack = [value]
    while stack:
        part = stack[-1]
        key = id(part)
        if key in texts or not _is_kept(part):
            stack.pop()
        elif key not in in_progress:
            in_progress.add(key)
            stack += [child for child in children(part) if id(child) not in in_progress]
        else:
            stack.pop()
            in_progress.discard(key)
            text = _compound(part, texts)
            digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
            texts[key] = text if len(text) <= _LONGEST else f"sha256:{digest.hexdigest()}"
    return _text(value, texts)


def _is_kept(value: object) -> bool:
    """True if the text of a part is made once and kept: the part has parts itself, or is long."""
    if isinstance(value, str | bytes | bytearray):
        return len(value) > _LONGEST
    return isinstance(value, _COMPOUND)


def _text(value: object, texts: Mapping[int, str]) -> str:
    """Return the text of a part; `texts` has those of the parts inside it."""
    if (text := texts.get(id(value))) is not None:
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


def _compound(value: object, texts: Mapping[int, str]) -> str:
    """Return the text of a dict, list, tuple, set or object record, from the texts of its parts."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{v}" for k, v in sorted(_rows(value.items(), texts))) + "}"
    if isinstance(value, ObjectRecord):
        kwargs = ",".join(f"{name}={_text(arg, texts)}" for name, arg in sorted(value.kwargs.items()))
        pairs = ",".join(f"{k}:{v}" for k, v in _rows(value.pairs, texts))
        parts = (
            _list(value.args, texts),
            f"{{{kwargs}}}",
            str(value.by_new),
            str(value.has_state),
            _text(value.state, texts),
            _list(value.items, texts),
            f"{{{pairs}}}",
        )
        return f"{value.callable}({','.join(parts)})"
    if isinstance(value, set | frozenset):
        return "set[" + ",".join(sorted(_text(item, texts) for item in value)) + "]"
    return _list(value, texts) if isinstance(value, list | tuple) else repr(value)


def _list(items: Iterable[object], texts: Mapping[int, str]) -> str:
    return "[" + ",".join(_text(item, texts) for item in items) + "]"


def _rows(pairs: Iterable[tuple[object, object]], texts: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    return ((_text(key, texts), _text(value, texts)) for key, value in pairs)


def describe(value: object) -> str:
    """Return a short text of a value for an error message."""
    if isinstance(value, ScalarTensor):
        number = number_of(value)
        return f"{value.dtype.label} {value.data.hex() if number is None else f'{number:g}'}"
    text = canonical(value)
    return text if len(text) <= 80 else text[:77] + "..."


def text_of(value: object) -> str:
    """Return `value` if it is a text, and else what `describe` returns, as str(value) could be endless."""
    return value if isinstance(value, str) else describe(value)


_CODES = {"float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "int8": "b"}


def number_of(value: Scalar) -> int | float | None:
    """Return a scalar as a number, None if it is none."""
    if isinstance(value, ScalarTensor):
        return exact_number(value) if value.dtype.label in _CODES else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


# Types of which every value is a number of Python, with no rounding; struct has a letter for each but bfloat16.
_EXACT = _CODES | {"uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "bool": "?"}


def exact_number(value: ScalarTensor) -> bool | int | float | None:
    """Return the value of a tensor of one element without rounding; None if Python has no such value."""
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
    """Return `number` as a tensor of the type and shape of `like`; None if the type cannot hold it exactly."""
    code = _CODES.get(like.dtype.label)
    if code is None:
        return None
    try:
        scalar = replace(like, data=struct.pack("<" + code, number if code in "dfe" else int(number)))
    except (struct.error, OverflowError, ValueError):
        return None
    return scalar if number_of(scalar) == number else None


def torch_step(value: Scalar) -> Scalar:
    """Return a step as torch's optimizers keep it: an fp32 tensor."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return ScalarTensor(dtype=ElementType.FLOAT32, shape=(), data=struct.pack("<f", value))
