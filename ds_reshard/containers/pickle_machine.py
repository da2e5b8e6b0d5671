"""The state of a pickle being read: stack, memo, and the allowance of work that keeps reading linear."""

from __future__ import annotations

import _compat_pickle
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ds_reshard.model.records import GlobalName

Persistent = Callable[[object], object]
Reduce = Callable[[GlobalName, tuple[object, ...]], object]
Handler = Callable[["PickleMachine", int], int]

# A set takes four times the memory of any other value that one byte asks for: nobody writes a pickle of nothing else.
SET_COST = 40
_NAME_LENGTH = 4096

# Hashing these is one step, however they were made, and next to none have the same hash.
_CHEAP_KEYS = frozenset({str, float, bool, type(None), bytes})


class Forbidden(Exception):
    """The pickle asks for what is never done; the reader adds where, and raises UnsafePickle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleLimits:
    """What a pickle may cost: its bytes, the nesting of its value, its parts, the bytes of one integer.

    A value may have `parts`, and `expansion` more for each byte, where what is shared counts as often as it is used.
    """

    nbytes: int = 256 << 20
    depth: int = 200
    parts: int = 1 << 20
    expansion: int = 64
    integer_nbytes: int = 1024


class PickleMachine:
    """A pickle's bytes and the values made from them so far.

    `work` is what is left of the allowance for steps whose cost does not follow from the pickle's size:
    copies of memoized lists and hashes of memoized tuples. A pickle of n bytes that refers to the same
    list n times would otherwise cost n * n. `named` are the classes and functions that were named.
    """

    __slots__ = (
        "_alike",
        "data",
        "end",
        "limits",
        "marked",
        "memo",
        "named",
        "persistent",
        "protocol",
        "reduce",
        "result",
        "stack",
        "stopped_at",
        "work",
    )

    def __init__(self, data: bytes, persistent: Persistent, reduce: Reduce, limits: PickleLimits) -> None:
        self.data = data
        self.end = len(data)
        self.limits = limits
        self.persistent = persistent
        self.reduce = reduce
        self.stack: list[object] = []
        self.marked: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.protocol = 0
        self.work = 16 * len(data) + (1 << 16)
        self.result: object = None
        self.stopped_at = 0
        self._alike: dict[int, dict[int, int]] = {}
        self.named: dict[tuple[str, str], GlobalName] = {}

    def since_mark(self) -> list[object]:
        """Take everything above the last mark off the stack, and the mark; ValueError when there is none."""
        items = self.stack
        if not self.marked:
            raise ValueError("there is no mark on the stack")
        self.stack = self.marked.pop()
        return items

    def text(self, start: int, nbytes: int) -> str:
        return self.take(start, nbytes).decode("utf-8", "surrogatepass")

    def take(self, start: int, nbytes: int) -> bytes:
        """The bytes [start, start + nbytes); ValueError when they leave the pickle, before any copy."""
        if start + nbytes > self.end:
            raise ValueError(f"declares {nbytes} bytes where {max(0, self.end - start)} are left")
        return self.data[start : start + nbytes]

    def line(self, start: int) -> bytes:
        """The bytes up to the next newline, for the text instructions of protocol 0."""
        stop = self.data.find(b"\n", start)
        if stop < 0:
            raise ValueError("the pickle ends inside a line")
        return self.data[start:stop]

    def name(self, module: str, name: str) -> GlobalName:
        """The name, one record each; names of Python 2 become today's, as pickle.py `find_class` does."""
        found = self.named.get((module, name))
        if found is None:
            if len(module) + len(name) > _NAME_LENGTH:
                raise ValueError(f"names a class with {len(module) + len(name)} characters")
            today = module, name
            if self.protocol < 3:
                if today in _compat_pickle.NAME_MAPPING:
                    today = _compat_pickle.NAME_MAPPING[today]
                elif module in _compat_pickle.IMPORT_MAPPING:
                    today = _compat_pickle.IMPORT_MAPPING[module], name
            found = self.named[module, name] = GlobalName(module=today[0], name=today[1])
        return found

    def charge(self, steps: int) -> None:
        """Pay for work out of proportion with an instruction's size; ValueError when nothing is left."""
        self.work -= steps
        if self.work < 0:
            raise ValueError("the same values are copied or hashed over and over: not a pickle that pickle writes")

    def check_keys(self, keys: Iterable[object], holder: object = None) -> None:
        """Pay for hashing the keys, and for comparing each with those of the same hash in the `holder` they go into.

        Numbers and tuples can be made to have any hash: a dict of n keys of one hash costs n * n. Without a holder
        they are all that goes into something new.
        """
        alike: dict[int, int] | None = None
        for key in keys:
            if type(key) in _CHEAP_KEYS or (type(key) is int and abs(key) < sys.hash_info.modulus):
                continue
            cost = self._hash_cost(key)
            if alike is None:
                alike = {} if holder is None else self._alike.setdefault(id(holder), {})
            hashed = hash(key)
            before = alike.get(hashed, 0)
            self.charge(before * cost)
            alike[hashed] = before + 1

    def _hash_cost(self, key: object) -> int:
        """Pay for hashing `key` and see that its nesting is small: hashing recurses in C without a check."""
        cost = 1
        level: list[object] = [key]
        for _ in range(self.limits.depth):
            inner: list[object] = []
            for value in level:
                if isinstance(value, (tuple, frozenset)):
                    self.charge(len(value))
                    cost += len(value)
                    inner.extend(value)
            if not inner:
                return cost
            level = inner
        raise ValueError(f"a key is nested deeper than {self.limits.depth}")
