"""How deep a value nests and how large it is, without recursion and with every shared part visited once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ds_reshard.model.records import GlobalName, ObjectRecord, SizeRecord, StorageRecord, TensorRecord

_UNITS = frozenset({float, bool, type(None), complex, slice, range})
LEAVES = _UNITS | {str, int, bytes, bytearray, GlobalName, StorageRecord, TensorRecord}
"""Types whose values have no values inside."""

_NDIM = 64  # of a tensor, at most; counting more of them anew wherever they are shared would not be linear
_WRITTEN_OUT = 1 << 20  # references that are looked at without asking whether they are shared
_SEQUENCES = frozenset({list, tuple, SizeRecord})
_LIGHT = _UNITS | _SEQUENCES | {str, int, dict, ObjectRecord}


def children(value: object) -> Iterator[object]:
    """The values directly inside `value`, in the order in which they are rebuilt; none inside a leaf.

    What an ObjectRecord was called with and what was set on it are its children, not the tuples and lists
    between.
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
    """What is too much of `value`, None where nothing is: values inside each other, or parts in all.

    A part counts as often as it is reached: whoever writes the value out meets it that often, and forty pairs of
    pairs are a million million. Long texts count by their length, and an object is one part of what holds it: it is
    told by its class. The sizes of the parts are kept, so the walk is linear. A cycle counts once around.
    """
    if type(value) in LEAVES or _surely_within(value, depth, parts >> 4):
        return None
    known: dict[int, tuple[int, int]] = {id(value): (0, 0)}  # height and size; of a part being walked, none yet
    path: list[tuple[object, Iterator[object]]] = [(value, children(value))]
    reached = [(1, 1)]
    while path:
        if len(path) > depth:
            return f"nests deeper than {depth} levels"
        height, size = reached[-1]
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
            below = known.get(key)
            if below is None:
                known[key] = (0, 0)
                reached[-1] = (height, size)
                path.append((child, children(child)))
                reached.append((1, 1))
                break
            height, size = max(height, below[0] + 1), size + below[1]
            if len(path) + below[0] > depth:
                return f"nests deeper than {depth} levels"
        else:
            if size > parts:
                return f"has more than {parts} parts, where those that are shared count as often as they are used"
            part = path.pop()[0]
            told = 1 if isinstance(part, ObjectRecord) else size
            known[id(part)] = height, told
            reached.pop()
            if reached:
                above = reached[-1]
                reached[-1] = max(above[0], height + 1), above[1] + told
    return None


def _surely_within(value: object, depth: int, parts: int) -> bool:
    """Whether the value is within the bounds however often its parts are shared: looked at level by level, each part
    as often as it is reached. What nobody shares much is done with that in half the time.
    """
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
        if not _LIGHT.issuperset(map(type, inner)):
            parts -= sum([_weight(child) for child in inner if type(child) not in _LIGHT])
        level = [child for child in inner if type(child) not in LEAVES]
        if not level:
            return parts >= 0
    return False


def _weight(value: object) -> int:
    """How much of the bound a leaf takes."""
    if isinstance(value, int):
        return 1 + value.bit_length() // 32
    if isinstance(value, (bytes, bytearray)):
        return 1 + len(value) // 8
    if isinstance(value, TensorRecord):
        return 1 + (len(value.storage.key) + len(value.shape)) // 8
    return 1
