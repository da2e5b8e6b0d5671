"""The state of a pickle being read: stack, memo, findings, and the allowance of work that keeps reading linear."""

from __future__ import annotations

import _compat_pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NoReturn, cast

from ds_reshard.containers.pickle_engine import UNKNOWN, Persistent, Reduce
from ds_reshard.containers.pickle_rules import Callee, Finding, PickleRules, shown, shown_call
from ds_reshard.containers.pickle_table import Allowed, Args, is_of_torch, plain_state, reconstructed
from ds_reshard.containers.pickle_tokens import PickleLimits
from ds_reshard.model.nesting import LEAVES
from ds_reshard.model.records import GlobalName, ObjectRecord, SizeRecord


class CalleeArguments(tuple[object, ...]):
    """Arguments with a Callee among them, for a function that calls it."""

    __slots__ = ()


CALLEES = frozenset({Callee, CalleeArguments})
Handler = Callable[["PickleMachine", int], int]

# A set takes four times the memory of any other value that one byte asks for: nobody writes a pickle of nothing else.
SET_COST = 40
_NAME_LENGTH = 4096
_MOST_FINDINGS = 1000
_MOST_CONTAINERS = 1 << 24
_NAMED = -1

# What a later instruction may change, which modules make records of such, and what only holds them.
_CHANGEABLE = frozenset({list, dict, OrderedDict, set})
_CHANGEABLE_OF = frozenset({"collections", "numpy"})
_FIXED = frozenset({tuple, CalleeArguments})

# Hashing these is one step, however they were made, and next to none have the same hash.
_CHEAP_KEYS = frozenset({str, float, bool, type(None), bytes, ObjectRecord})


class CutShort(ValueError):
    """An instruction's argument that ends beyond the bytes: where it begins, and of how many bytes it is."""

    def __init__(self, what: str, start: int, nbytes: int) -> None:
        super().__init__(what)
        self.start = start
        self.nbytes = nbytes


class OverLimit(ValueError):
    """What is not read because it costs too much: Python might read it, and go on."""


@dataclass(slots=True, eq=False, repr=False)
class PickleMachine:
    """A pickle's bytes and the values made from them so far.

    `work` is what is left of the allowance for steps whose cost does not follow from the pickle's size:
    copies of memoized lists and hashes of memoized tuples. A pickle of n bytes that refers to the same
    list n times would otherwise cost n * n. `findings` are the uses of names that the rules do not allow: each call,
    and each name that is never called, once; `refused` says whether one of them is of an instruction that no pickle
    needs. `nested` are bytes that a known loader would open as a pickle of their own, with the offset of the
    instruction that hands them over, and whether it surely would. `outside` stands for every object that is not in the
    pickle. `given` are the lists, dicts and the like that a call or an object was given, by identity: Python has read
    them then, and nothing may change them later. `stopped_at` is where the pickle ended, or the instruction that could
    not be carried out; then `lacks` is
    what it declared beyond the end of the bytes, `cut_short` says that only bytes behind them were missing, and
    `over_limit` that it cost too much. `astray` says that more may be behind than was found: Python's own reader may
    have gone on, or elsewhere.
    """

    data: bytes
    persistent: Persistent
    reduce: Reduce
    limits: PickleLimits
    rules: PickleRules
    end: int = field(init=False)
    work: int = field(init=False)
    room: int = _MOST_CONTAINERS
    protocol: int = 0
    stack: list[object] = field(default_factory=list)
    marked: list[list[object]] = field(default_factory=list)
    memo: dict[int, object] = field(default_factory=dict)
    named: dict[tuple[str, str, bool], GlobalName | Callee] = field(default_factory=dict)
    makes: dict[int, GlobalName] = field(default_factory=dict)
    uses: dict[int, Allowed | None] = field(default_factory=lambda: {id(UNKNOWN): None})
    outside: ObjectRecord = field(default_factory=lambda: ObjectRecord(callable=UNKNOWN))
    findings: dict[tuple[str, int], Finding] = field(default_factory=dict)
    nested: dict[bytes, tuple[int, bool]] = field(default_factory=dict)
    given: dict[int, object] = field(default_factory=dict)
    refused: bool = False
    frame_end: int = 0
    result: object = None
    stopped_at: int = 0
    lacks: CutShort | None = None
    cut_short: bool = False
    over_limit: bool = False
    astray: bool = False
    _alike: dict[int, dict[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.end = len(self.data)
        self.work = 16 * len(self.data) + (1 << 16)

    def since_mark(self) -> list[object]:
        """Take everything above the last mark off the stack, and the mark; ValueError when there is none."""
        items = self.stack
        if not self.marked:
            raise ValueError("there is no mark on the stack")
        self.stack = self.marked.pop()
        return items

    def take(self, start: int, nbytes: int) -> bytes:
        """The bytes [start, start + nbytes); CutShort when they leave the pickle, before any copy."""
        if start + nbytes > self.end:
            what = f"declares {nbytes} bytes where {max(0, self.end - start)} are left"
            raise CutShort(what, start, nbytes)
        return self.data[start : start + nbytes]

    def line(self, start: int) -> bytes:
        """The bytes up to the next newline, for the text instructions of protocol 0."""
        stop = self.data.find(b"\n", start)
        if stop < 0:
            raise CutShort("the pickle ends inside a line", start, 0)
        return self.data[start:stop]

    def name(self, module: str, name: str, byte: int) -> GlobalName | Callee:
        """The name, one record each; names of Python 2 become today's, as pickle.py `find_class` does."""
        old = self.protocol < 3
        kept = self.named.get((module, name, old))
        if kept is None:
            if len(module) + len(name) > _NAME_LENGTH:
                self.refuse(byte, f"names a class with {len(module) + len(name)} characters")
            today = module, name
            if old and today in _compat_pickle.NAME_MAPPING:
                today = _compat_pickle.NAME_MAPPING[today]
            elif old and module in _compat_pickle.IMPORT_MAPPING:
                today = _compat_pickle.IMPORT_MAPPING[module], name
            found = GlobalName(module=today[0], name=today[1])
            allowed = self.uses[id(found)] = self.rules.of(*today)
            if allowed is None:
                self.find(byte, found, f"names {shown(found)}")
            only_called = allowed is not None and not allowed.value and not self.rules.everything
            kept = self.named[module, name, old] = Callee(found) if only_called else found
            if allowed is not None and allowed.plain:
                self.makes[id(kept)] = found
        return kept

    def keep(self, values: Iterable[object], byte: int) -> None:
        """See that nothing is kept in a value that is only there to be called."""
        if not CALLEES.isdisjoint(map(type, values)):
            for value in values:
                for part in value if isinstance(value, CalleeArguments) else (value,):
                    if isinstance(part, Callee):
                        self.find(byte, part.name, f"keeps {shown(part)}, which is only called", called=True)

    def together(self, items: tuple[object, ...], byte: int) -> tuple[object, ...]:
        """A tuple with a Callee in it, which may be the arguments of a call, and no part of another tuple."""
        self.keep([item for item in items if isinstance(item, CalleeArguments)], byte)
        return CalleeArguments(items)

    def arguments(self, function: GlobalName, args: tuple[object, ...], byte: int) -> tuple[object, ...]:
        """The arguments of a call with names for Callees, where this function may be given them."""
        allowed = self.uses.get(id(function))
        at = allowed.callee_at if allowed is not None else -1
        self.keep([arg for place, arg in enumerate(args) if place != at or isinstance(arg, tuple)], byte)
        return tuple(arg.name if isinstance(arg, Callee) else arg for arg in args)

    def use(
        self, function: GlobalName, args: tuple[object, ...], kwargs: dict[str, object], byte: int, *, by_new: bool
    ) -> bool:
        """Whether a name is allowed to be called so, by `__new__` or as it is; noted where it is not."""
        allowed = self.uses.get(id(function))
        if allowed is not None and not allowed.callee_at and function.module == "copyreg":
            made = reconstructed(function, args)
            if made is not None:
                function, args, by_new = made, (), True
                allowed = self.uses.get(id(made))
        if allowed is None:
            self.findings.pop((str(function), _NAMED), None)
            self.find(byte, function, f"calls {shown_call(function, args, kwargs)}", called=True)
            return False
        if (
            (kwargs and not allowed.keywords)
            or not (allowed.new if by_new else allowed.call)
            or (allowed.fits is not None and not allowed.fits(args, self.rules))
        ):
            what = f"calls {shown_call(function, args, kwargs)}, which is not how it is saved"
            self.find(byte, function, what, called=True)
            return False
        if allowed.nested:
            self._hand_over(args, byte, surely=allowed.nested == "opened")
        return True

    def give_state(self, target: ObjectRecord, state: object, byte: int) -> None:
        """See that an object may be given this state: BUILD calls `__setstate__`, and sets attributes of any name."""
        self.see_unread(target, byte)
        function = target.callable
        self.give((state,), inside=function.module == "numpy" and function.name == "dtype")
        made = reconstructed(function, target.args) if function.module == "copyreg" else None
        allowed = self.uses.get(id(made or function))
        if function is UNKNOWN:
            self.find(byte, None, f"gives the state {shown(state)} to what is not known", called=True)
        if allowed is None:
            return  # its making was found
        fits = allowed.fits_state is None or allowed.fits_state(state)
        if not (allowed.state and fits and (allowed.keywords or plain_state(state))):
            self.find(byte, function, f"gives {shown(function)} the state {shown(state)}", called=True)
        elif allowed.nested:
            content = state[:1] if isinstance(state, tuple) else ()
            if content and isinstance(content[0], bytes):
                self._hand_over(content, byte, surely=False)
            else:
                self.find(byte, function, f"gives {shown(function)} the state {shown(state)}", called=True)

    def _hand_over(self, values: tuple[object, ...], byte: int, *, surely: bool) -> None:
        for value in values:
            assert isinstance(value, bytes | bytearray)  # the table allows nothing else
            self.charge(len(value) >> 3)
            data = bytes(value)
            self.nested[data] = byte, surely or (data in self.nested and self.nested[data][1])

    def give(self, values: Iterable[object], *, inside: bool = False) -> None:
        """Note what may be changed among the values of a call or a state, and in the tuples among them.

        Of what lies deeper, Python keeps the same objects as are seen here. With `inside` the values of dicts are noted
        too: numpy looks into the parts of an element type.
        """
        left = [values]
        for held in left:
            for value in held:
                kind = type(value)
                if kind in LEAVES:
                    continue
                if kind in _FIXED:
                    assert isinstance(value, tuple)
                    self.charge(len(value))
                    if not LEAVES.issuperset(map(type, value)):
                        left.append(value)
                elif kind in _CHANGEABLE:
                    self.given[id(value)] = value
                    if inside and isinstance(value, dict):
                        self.charge(len(value))
                        left.append(tuple(value.values()))
                elif isinstance(value, ObjectRecord) and value.callable.module in _CHANGEABLE_OF:
                    self.given[id(value)] = value

    def see_unread(self, target: object, byte: int) -> None:
        """See that what is changed was not given to a call or an object before: Python has read it as it was."""
        if id(target) in self.given:
            self.refuse(byte, f"changes {shown(target, 1)} after a call or an object was given it")

    def give_items(self, target: ObjectRecord, byte: int, *, kind: str) -> None:
        """See that an object may be given items, a "list" or "pairs" of them: both call methods of any class."""
        self.see_unread(target, byte)
        if target.callable is UNKNOWN:
            self.find(byte, None, "puts items into what is not known", called=True)
        allowed = self.uses.get(id(target.callable))
        if allowed is not None and allowed.items not in (kind, "both"):
            self.find(byte, target.callable, f"puts items into {shown(target.callable)}", called=True)

    def find(self, byte: int, name: GlobalName | None, what: str, *, called: bool = False) -> None:
        """Note a use that is not allowed; a name that is `called` or otherwise used is worse than one that stands."""
        if len(self.findings) >= _MOST_FINDINGS:
            self.astray = True
        else:
            dotted = str(name) if name is not None else ""
            finding = Finding(byte=byte, name=dotted, what=what, called=called)
            self.findings.setdefault((dotted or what, byte if called else _NAMED), finding)

    def refuse(self, byte: int, what: str) -> None:
        """Note an instruction that no checkpoint's pickle has; the rest is read all the same, to name what it does."""
        self.refused = True
        self.find(byte, None, what)

    def charge(self, steps: int) -> None:
        """Pay for work out of proportion with an instruction's size; ValueError when nothing is left."""
        self.work -= steps
        if self.work < 0:
            raise OverLimit("the same values are copied or hashed over and over: not a pickle that pickle writes")

    def refuse_more(self) -> NoReturn:
        """For one byte of the pickle a container, an object or a memo entry takes a hundred, or several hundred."""
        raise OverLimit(f"more than {_MOST_CONTAINERS} containers, objects and memo entries")

    def check_keys(self, keys: Iterable[object], holder: object = None) -> None:
        """Pay for hashing the keys, and for comparing each with those of the same hash in the `holder` they go into.

        Numbers and tuples can be made to have any hash: a dict of n keys of one hash costs n * n. Without a holder
        they are all that goes into something new.
        """
        if _CHEAP_KEYS.issuperset(map(type, keys)):
            return
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
        raise OverLimit(f"a key is nested deeper than {self.limits.depth}")


def call(
    machine: PickleMachine, function: object, args: object, kwargs: dict[str, object], byte: int, *, by_new: bool
) -> object:
    """What `function(*args, **kwargs)` gives in a pickle: a plain value, the hook's record, or an ObjectRecord."""
    if not isinstance(args, tuple):
        machine.refuse(byte, f"calls {shown(function)} with a {type(args).__name__} for a tuple of arguments")
        args = ()
    if type(function) is Callee:
        function = function.name
    if not isinstance(function, GlobalName):
        machine.keep((args,), byte)
        machine.refuse(byte, f"calls {shown(function)}{shown(args)}, which is no name")
        return ObjectRecord(callable=UNKNOWN, args=args, kwargs=kwargs, by_new=by_new)
    if type(args) is CalleeArguments:
        args = machine.arguments(function, args, byte)
    make = _MADE.get((function.module, function.name))
    for arg in args if make is not None else ():
        machine.charge(len(arg) if isinstance(arg, _SIZED) else 1)
    machine.room -= 1 if machine.room else machine.refuse_more()
    as_saved = machine.use(function, args, kwargs, byte, by_new=by_new)
    if make is not None and as_saved:
        if args and make in (set, frozenset, OrderedDict):
            members = cast("Iterable[object]", args[0])
            machine.check_keys(members if make is not OrderedDict else [cast(Args, pair)[0] for pair in members])
        return make(*args)
    if as_saved and function.module == "builtins" and is_of_torch(args):  # getattr: `torch.tanh` is written so
        return machine.name("torch", str(args[1]), byte)
    machine.give((*args, *kwargs.values()) if kwargs else args)
    if not kwargs and not by_new:
        made = machine.reduce(function, args)
        if made is not NotImplemented:
            return made
    return ObjectRecord(callable=function, args=args, kwargs=kwargs, by_new=by_new)


# Values that are made at once, of arguments as the table has them: plain ones, which Python makes as well.
_MADE: dict[tuple[str, str], Callable[..., object]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): SizeRecord,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytes"): bytes,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
    ("builtins", "slice"): slice,
    ("builtins", "range"): range,
    ("_codecs", "encode"): lambda text, latin: text.encode("latin-1"),
}
_SIZED = (str, bytes, bytearray, list, tuple, set, frozenset, dict)
