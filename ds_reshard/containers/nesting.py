"""How deep a value nests, found without recursion and with every shared part visited once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ds_reshard.model.records import GlobalName, ObjectRecord, StorageRecord, TensorRecord

_LEAVES = frozenset(
    {
        str,
        int,
        float,
        bool,
        type(None),
        bytes,
        bytearray,
        complex,
        slice,
        range,
        GlobalName,
        StorageRecord,
        TensorRecord,
    }
)


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
        inner = chain(value.args, value.kwargs.values(), value.items, chain.from_iterable(value.pairs))
        return chain(inner, (value.state,)) if value.has_state else inner
    return iter(())


def too_deep(value: object, limit: int) -> bool:
    """Whether a chain of more than `limit` values lies inside each other.

    Exact for values without cycles, where shared parts make exponentially many chains: the height of each
    part is kept, so the walk is linear. A cycle counts once around.
    """
    if type(value) in _LEAVES:
        return False
    heights: dict[int, int] = {id(value): 0}  # 0 while the part is being walked
    path: list[tuple[int, Iterator[object]]] = [(id(value), children(value))]
    reached = [1]
    while path:
        if len(path) > limit:
            return True
        for child in path[-1][1]:
            if type(child) in _LEAVES:
                continue
            key = id(child)
            height = heights.get(key)
            if height is None:
                heights[key] = 0
                path.append((key, children(child)))
                reached.append(1)
                break
            if height >= reached[-1]:
                reached[-1] = height + 1
                if len(path) + height > limit:
                    return True
        else:
            height = heights[path.pop()[0]] = reached.pop()
            if reached and height >= reached[-1]:
                reached[-1] = height + 1
    return False
