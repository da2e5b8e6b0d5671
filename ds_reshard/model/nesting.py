"""Measure how deep a value nests and how large it is, without recursion; each shared part is visited once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ds_reshard.model.records import GlobalName, ObjectRecord, SizeRecord, StorageRecord, TensorRecord

_UNITS = frozenset({float, bool, type(None), complex, slice, range})
LEAVES = _UNITS | {str, int, bytes, bytearray, GlobalName, StorageRecord, TensorRecord}
"""Types whose values have no values inside."""

_NDIM = 64  # the most dimensions of a tensor; longer sizes are counted once, so that the walk stays linear
_WRITTEN_OUT = 1 << 20  # the most references that are counted without asking whether they are shared
_SEQUENCES = frozenset({list, tuple, SizeRecord})
_LIGHT = _UNITS | _SEQUENCES | {str, int, dict, ObjectRecord, TensorRecord}


def children(value: object) -> Iterator[object]:
    """Return the values directly inside `value`, in the order in which they are rebuilt; a leaf has none.

    The children of an ObjectRecord are its arguments, items and state, not the tuples and lists that hold these.
    """
    if isinstance(value, (list, tuple, set, frozenset)):
        return iter(value)
    if isinstance(value, dict):
        return chain.from_iterable(value.items())
    if isinstance(value, ObjectRecord):
        if not (value.kwargs or value.items or value.pairs):
            return iter((*value.args, value.state) if value.has_state else value.args)
        inner = chain(value.args, value.kwargs.values(), value.items, chain.from_iterable(value.pairs))
        return chain(inner, (value.state,)) if value.has_state else inner
    return iter(())


def out_of_bounds(value: object, *, depth: int, parts: int) -> str | None:
    """Return how `value` exceeds the greatest depth or number of parts, as a text; None if it does not.

    A part counts as often as it is reached, as code that writes the value out meets it that often (forty nested pairs
    of the same value are 10**12 parts). Long texts count by their length; an object counts as one part of its holder,
    as it is written as its class. The sizes of parts are remembered, so the walk is linear. A cycle counts once.
    """
    if type(value) in LEAVES or _surely_within(value, depth, parts >> 4):
        return None
    measured: dict[int, tuple[int, int]] = {id(value): (0, 0)}  # height and size; of a part being walked, none yet
    path: list[tuple[object, Iterator[object]]] = [(value, children(value))]
    totals = [(1, 1)]
    while path:
        if len(path) > depth:
            return f"nests deeper than {depth} levels"
        height, size = totals[-1]
        for child in path[-1][1]:
            kind = type(child)
            if kind is str:
                size += 1 + len(child) // 8  # type: ignore[arg-type]
                continue
            if kind in LEAVES:
                size += 1 if kind in _UNITS else _weight(child)
                continue
            if kind is SizeRecord and isinstance(child, SizeRecord) and len(child) <= _NDIM and len(path) < depth:
                height, size = max(height, 2), size + 1 + sum(map(_weight, child))
                continue
            key = id(child)
            inner = measured.get(key)
            if inner is None:
                measured[key] = (0, 0)
                totals[-1] = (height, size)
                path.append((child, children(child)))
                totals.append((1, 1))
                break
            height, size = max(height, inner[0] + 1), size + inner[1]
            if len(path) + inner[0] > depth:
                return f"nests deeper than {depth} levels"
        else:
            if size > parts:
                return f"has more than {parts} parts, where shared parts count as often as they are used"
            part = path.pop()[0]
            counted = 1 if isinstance(part, ObjectRecord) else size
            measured[id(part)] = height, counted
            totals.pop()
            if totals:
                outer = totals[-1]
                totals[-1] = max(outer[0], height + 1), outer[1] + counted
    return None


def _surely_within(value: object, depth: int, parts: int) -> bool:
    """True if the value is within the bounds with each part counted as often as it is reached: a fast first try."""
    level, room = [value], min(parts, _WRITTEN_OUT)
    for _ in range(depth):
        inner: list[object] = []
        for part in level:
            if type(part) is dict:
                inner += part
                inner += part.values()
            else:
                inner += part if type(part) in _SEQUENCES else children(part)  # type: ignore[arg-type]
            if len(inner) > room:
                return False
        room -= len(inner)
        parts -= len(inner) + sum([len(child) >> 3 for child in inner if type(child) is str])
        parts -= sum([child.bit_length() >> 5 for child in inner if type(child) is int])
        parts -= sum([len(child.storage.key) + len(child.shape) >> 3 for child in inner if type(child) is TensorRecord])
        if not _LIGHT.issuperset(map(type, inner)):
            parts -= sum([_weight(child) for child in inner if type(child) not in _LIGHT])
        level = [child for child in inner if type(child) not in LEAVES]
        if not level:
            return parts >= 0
    return False


def _weight(value: object) -> int:
    """Return the number of parts that a leaf counts for."""
    if isinstance(value, int):
        return 1 + value.bit_length() // 32
    if isinstance(value, (bytes, bytearray)):
        return 1 + len(value) // 8
    if isinstance(value, TensorRecord):
        return 1 + (len(value.storage.key) + len(value.shape)) // 8
    return 1
