"""One pickle, read by CPython's own unpickler as inert values; each instruction that acts is judged at its turn.

The unpickler is given the stream of `Tokens`, in which these instructions are calls of methods of `Reading`. So the
order of evaluation, the stack and the memo are those of the loader, and nothing that the file names is imported, called
or hashed but by these methods. Where anything is found or goes wrong, the pickle is read a second time, by single
instructions, to know at which.
"""

from __future__ import annotations

import _compat_pickle
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import MethodType
from typing import NoReturn, cast

from ds_reshard.containers.pickle_rules import Callee, Finding, PickleRules, shown, shown_call
from ds_reshard.containers.pickle_table import Allowed, Args, is_of_torch, plain_state, reconstructed
from ds_reshard.containers.pickle_tokens import (
    HANDLERS,
    MOST_FINDINGS,
    NAMES,
    CutShort,
    OverLimit,
    PickleLimits,
    Tokens,
)
from ds_reshard.errors import CheckpointDamaged, ReshardError
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.nesting import LEAVES
from ds_reshard.model.records import GlobalName, ObjectRecord, SizeRecord, TensorRecord

Persistent = Callable[[object], object]
Reduce = Callable[[GlobalName, tuple[object, ...]], object]

# A set takes four times the memory of any other value that one byte asks for: nobody writes a pickle of nothing else.
_SET_COST = 40
_NAME_LENGTH = 4096
_NAMED = -1

# What a later instruction may change, and which modules make records of such.
_CHANGEABLE = frozenset({list, dict, OrderedDict, set})
_CHANGEABLE_OF = frozenset({"collections", "numpy"})

# What has no Callee in it: neither a tuple, which the unpickler makes unseen, nor what a hook may have made.
_WITHOUT_CALLEES = LEAVES | _CHANGEABLE | {frozenset, SizeRecord, ObjectRecord}
_SHORT = 16
_TENSOR_ARGUMENTS = (int, tuple, tuple, bool, OrderedDict)  # offset, shape, stride, requires_grad, hooks

# Hashing these is one step, however they were made, and next to none have the same hash.
_CHEAP_KEYS = frozenset({str, float, bool, type(None), bytes, ObjectRecord})

# What the operations of a handler and of the unpickler raise on bytes that no pickler wrote.
_MALFORMED = (EOFError, IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError, MemoryError)

UNKNOWN = GlobalName(module="", name="unknown")
"""Stands for what is called where no name is."""


class _Singly:
    """The instructions one at a time: of which the unpickler reads, that is where the tokens are."""

    def __init__(self, tokens: Tokens) -> None:
        self._instructions = filter(None, tokens.instructions(singly=True))
        self._left = b""

    def read(self, nbytes: int, /) -> bytes:
        self._left = self._left or next(self._instructions, b"")
        data, self._left = self._left[:nbytes], self._left[nbytes:]
        return data

    def readline(self) -> bytes:
        return self.read(self._left.find(b"\n") + 1)


class _Unpickler(pickle.Unpickler):
    """CPython's own, in which names are looked up, and calls made, by a Reading."""

    def __init__(self, reading: Reading, tokens: Tokens, source: io.BufferedReader[io.BytesIO] | _Singly) -> None:
        methods = [getattr(reading, name) for name in HANDLERS]
        super().__init__(source, buffers=map(methods.__getitem__, tokens.handlers))
        self._reading = reading
        self._persistent = reading.persistent

    def find_class(self, module: str, name: str) -> object:
        return self._reading.name(module, name)

    def persistent_load(self, identity: object) -> object:
        if type(identity) is tuple and identity:
            if type(method := identity[-1]) is MethodType:
                return method(identity[0], identity[1]) if len(identity) == 3 else method(identity[0])
            if len(identity) == 5 and identity[0] == "storage" and LEAVES.issuperset(map(type, identity)):
                return self._persistent(identity)
        return self._reading.ask(identity)


class Reading:
    """A pickle that was read: its `result`, or the `error` with which reading it ended.

    `findings` are the uses of names that the rules do not allow: each call, and each name that is never called, once;
    `refused` says whether one of them is of an instruction that no pickle needs. `nested` are bytes that a known loader
    would open as a pickle, with the offset of the instruction that hands them over, and whether it surely would.
    `stopped_at` is where the pickle ended, or the instruction that could not be carried out; then `lacks` is what it
    declared beyond the end of the bytes, `cut_short` says that only bytes behind them were missing, and `over_limit`
    that it cost too much. `astray` says that more may be behind than was found, as Python's own reader may go on.

    `_work` is what is left of the allowance for steps whose cost does not follow from the pickle's size: copies of
    memoized lists and hashes of memoized tuples. A pickle of n bytes that refers to the same list n times would
    otherwise cost n * n. `_given` are the lists, dicts and the like that a call or an object was given, by identity:
    Python has read them then, and nothing may change them later.
    """

    def __init__(
        self, data: bytes, persistent: Persistent, reduce: Reduce, limits: PickleLimits, rules: PickleRules
    ) -> None:
        self.data = data
        self.rules = rules
        self.persistent = persistent
        self._reduce = reduce
        self._limits = limits
        self.result: object = None
        self._read(singly=False)
        known = self.error is None or self.error is self._tokens.error or isinstance(self.error, OverLimit)
        if not known or self.findings or self.nested:
            self._read(singly=True)

    def _begin(self) -> None:
        """What is known before the first instruction."""
        self.error: Exception | None = None
        self.findings: dict[tuple[str, int], Finding] = {}
        self.nested: dict[bytes, tuple[int, bool]] = {}
        self.refused = self.astray = self.cut_short = self.over_limit = self._finished = False
        self.lacks: CutShort | None = None
        self._work = 16 * len(self.data) + (1 << 16)
        self._room = self._limits.containers
        self._named: dict[tuple[str, str], GlobalName | Callee] = {}
        self._uses: dict[int, Allowed | None] = {id(UNKNOWN): None}
        self._makes: dict[int, GlobalName] = {}
        self._given: dict[int, object] = {}
        self._seen_tuples: dict[int, tuple[object, ...]] = {}
        self._alike: dict[int, dict[int, int]] = {}
        self._ordered: object = UNKNOWN
        self._tensor = Callee(UNKNOWN)

    @gc_disabled()
    def _read(self, *, singly: bool) -> None:
        """Carry out the instructions up to STOP; what is wrong with them, where they end before."""
        self._begin()
        tokens = self._tokens = Tokens(self.data, self._limits)
        stream = io.BytesIO()
        if not singly:
            stream.writelines(tokens.instructions())
            stream.seek(0)
        source = _Singly(tokens) if singly else io.BufferedReader(stream, 1 << 17)
        failed: Exception | None = None
        try:
            _Unpickler(self, tokens, source).load()
            self.refuse("ends with values left on the stack")
        except (ReshardError, pickle.UnpicklingError, *_MALFORMED) as error:
            if not (self._finished and isinstance(error, pickle.UnpicklingError)):
                failed = error.with_traceback(None)  # which holds all that was read
        self._given.clear()
        for byte, problem in tokens.notes:
            self.refuse(problem, byte)
        self.stopped_at, self.astray = tokens.stop, self.astray or tokens.astray
        if failed is not None:
            self._end(failed)

    def _end(self, error: Exception) -> None:
        """Note why reading ended before STOP was carried out."""
        self.error = error
        if isinstance(error, ReshardError):  # of what makes values of persistent ids and calls
            return
        if isinstance(error, MemoryError):
            self.over_limit = True
            return
        tokens = self._tokens
        if isinstance(error, EOFError) and tokens.error is not None:  # all instructions before it were carried out
            self.error = error = tokens.error
        else:
            self.stopped_at = tokens.at
        self.lacks = error if isinstance(error, CutShort) else None
        self.cut_short = self.lacks is not None
        self.over_limit = isinstance(error, OverLimit)
        self.astray |= tokens.frame_end >= 0 or isinstance(error, TypeError | OverflowError | RecursionError)

    def damage(self, place: str) -> ReshardError | None:
        """The error with which reading ended, as one of the file at `place`."""
        error = self.error
        if error is None or isinstance(error, ReshardError):
            return error
        if isinstance(error, MemoryError):
            what = f"a pickle of {len(self.data)} bytes takes more memory than there is"
        elif isinstance(error, OverLimit) and error is not self._tokens.error:
            what = str(error)
        elif self.stopped_at >= len(self.data):
            what = f"byte {self.stopped_at}: {error}"
        else:
            code = self.data[self.stopped_at]
            what = f"byte {self.stopped_at}: {NAMES.get(code, f'opcode 0x{code:02x}')}: {_problem(error)}"
        damage = CheckpointDamaged(f"{place}: {what}")
        damage.__cause__ = error
        return damage

    @property
    def in_frame(self) -> bool:
        """Whether the instruction that was cut short is a frame, or lies in one."""
        return self.data[self.stopped_at : self.stopped_at + 1] == b"\x95" or self._tokens.frame_end >= 0

    # -- names ---------------------------------------------------------------------------------------------------------

    def name(self, module: str, name: str) -> GlobalName | Callee:
        """The name, one record each; names of Python 2 become today's, as pickle.py `find_class` does."""
        kept = self._named.get((module, name))
        if kept is None:
            if len(module) + len(name) > _NAME_LENGTH:
                self.refuse(f"names a class with {len(module) + len(name)} characters")
            today, old = (module[:_NAME_LENGTH], name[:_NAME_LENGTH]), self._tokens.protocol < 3
            if old and today in _compat_pickle.NAME_MAPPING:
                today = _compat_pickle.NAME_MAPPING[today]
            elif old and module in _compat_pickle.IMPORT_MAPPING:
                today = _compat_pickle.IMPORT_MAPPING[module], name
            found = GlobalName(module=today[0], name=today[1])
            allowed = self._uses[id(found)] = self.rules.of(*today)
            if allowed is None:
                self.find(found, f"names {shown(found)}")
            only_called = allowed is not None and not allowed.value and not self.rules.everything
            kept = self._named[module, name] = Callee(found) if only_called else found
            if allowed is not None and allowed.plain:
                self._makes[id(kept)] = found
            if today == ("collections", "OrderedDict"):
                self._ordered = kept
            elif today == ("torch._utils", "_rebuild_tensor_v2") and type(kept) is Callee:
                self._tensor = kept
        return kept

    def keep(self, values: Iterable[object]) -> None:
        """See that nothing is kept in values, or in the tuples among them, that is only there to be called."""
        if _WITHOUT_CALLEES.issuperset(map(type, values)):
            return
        left = list(values)
        for value in left:
            if type(value) is Callee:
                self.find(value.name, f"keeps {shown(value)}, which is only called", called=True)
                continue
            if type(value) is not tuple or id(value) in self._seen_tuples:
                continue
            if len(value) > _SHORT or not LEAVES.issuperset(map(type, value)):
                self._seen_tuples[id(value)] = value  # kept alive: no other has its identity then
                left += value

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(self, function: object, args: object) -> object:
        """REDUCE. The two calls of which there are many come first: a tensor as torch saves it, and its hooks."""
        if type(args) is tuple and self._room:
            if function is self._ordered and not args:
                self._room -= 1
                return OrderedDict()
            if (
                function is self._tensor
                and len(args) == 6
                and tuple(map(type, args[1:])) == _TENSOR_ARGUMENTS
                and not args[5]
            ):
                made = self._reduce(self._tensor.name, args)
                if type(made) is TensorRecord:  # so the others are a storage and numbers
                    self._room -= 1
                    self._given[id(args[5])] = args[5]
                    return made
        return self._called(function, args, {}, by_new=False)

    def new(self, kind: object, args: object) -> object:
        """NEWOBJ."""
        made = self._makes.get(id(kind)) if args == () else None
        if made is None:
            return self._called(kind, args, {}, by_new=True)
        self._room -= 1 if self._room else self._refuse_more()
        return ObjectRecord(callable=made, by_new=True)

    def new_with_keywords(self, given: tuple[object, object, object]) -> object:
        """NEWOBJ_EX."""
        kind, args, keywords = given
        if isinstance(keywords, ObjectRecord):  # a dict of a class of its own, which Python takes
            self.refuse(f"calls {shown(kind)} with keywords in {shown(keywords)}")
            keywords = {}
        if not isinstance(keywords, dict) or not all(isinstance(key, str) for key in keywords):
            raise ValueError("keyword arguments are not a dict of text")
        self._charge(len(keywords))
        return self._called(kind, args, dict(keywords), by_new=True)

    def instance_of(self, args: tuple[object, ...], function: object) -> object:
        """INST: a call by name, as Python wrote instances before 2.2."""
        what = f"calls {shown(function)}{shown(args)} by an instruction that no pickle since Python 2.2 has"
        self.refuse(what)
        return self._called(function, args, {}, by_new=False)

    def instance_of_first(self, items: tuple[object, ...]) -> object:
        """OBJ: the same, with the class before the arguments."""
        return self.instance_of(items[1:], items[0])

    def ask(self, identity: object) -> object:
        """BINPERSID: torch writes each storage so, and once wrote modules. All else is refused; reading goes on."""
        self._parts((identity,))
        if type(identity) is not tuple or not identity or identity[0] != "storage":
            self.keep((identity,))
            self.refuse(f"asks for {shown(identity)}, which is no storage of the file")
        else:
            self.keep(identity)
        return self.persistent(identity)

    def _called(self, function: object, args: object, kwargs: dict[str, object], *, by_new: bool) -> object:
        """What `function(*args, **kwargs)` gives: a plain value, the hook's record, or an ObjectRecord."""
        if not isinstance(args, tuple):
            self.refuse(f"calls {shown(function)} with a {type(args).__name__} for a tuple of arguments")
            args = ()
        if type(function) is Callee:
            function = function.name
        parts = self._parts((*args, *kwargs.values()) if kwargs else args)
        if not isinstance(function, GlobalName):
            self.keep(args)
            self.refuse(f"calls {shown(function)}{shown(args)}, which is no name")
            return ObjectRecord(callable=UNKNOWN, args=args, kwargs=kwargs, by_new=by_new)
        args = self._arguments(function, args)
        make = _MADE.get((function.module, function.name))
        if make is not None:  # which copies them
            self._charge(sum([len(arg) for arg in args if isinstance(arg, str | bytes | bytearray)]))
        self._room -= 1 if self._room else self._refuse_more()
        as_saved = self._use(function, args, kwargs, by_new=by_new)
        if make is not None and as_saved:
            if args and make in (set, frozenset, OrderedDict):
                members = cast("Iterable[object]", args[0])
                self._check_keys(members if make is not OrderedDict else [cast(Args, pair)[0] for pair in members])
            return make(*args)
        if as_saved and function.module == "builtins" and is_of_torch(args):  # getattr: `torch.tanh` is written so
            return self.name("torch", str(args[1]))
        self._given.update(parts)
        if not kwargs and not by_new:
            made = self._reduce(function, args)
            if made is not NotImplemented:
                return made
        return ObjectRecord(callable=function, args=args, kwargs=kwargs, by_new=by_new)

    def _arguments(self, function: GlobalName, args: tuple[object, ...]) -> tuple[object, ...]:
        """The arguments of a call with names for Callees, where this function may be given them."""
        if _WITHOUT_CALLEES.issuperset(map(type, args)):
            return args
        allowed = self._uses.get(id(function))
        at = allowed.callee_at if allowed is not None else -1
        self.keep([arg for place, arg in enumerate(args) if place != at or isinstance(arg, tuple)])
        return tuple(arg.name if isinstance(arg, Callee) else arg for arg in args)

    def _use(self, function: GlobalName, args: tuple[object, ...], kwargs: dict[str, object], *, by_new: bool) -> bool:
        """Whether a name is allowed to be called so, by `__new__` or as it is; noted where it is not."""
        allowed = self._uses.get(id(function))
        if allowed is not None and not allowed.callee_at and function.module == "copyreg":
            made = reconstructed(function, args)
            if made is not None:
                function, args, by_new = made, (), True
                allowed = self._uses.get(id(made))
        if allowed is None:
            self.findings.pop((str(function), _NAMED), None)
            self.find(function, f"calls {shown_call(function, args, kwargs)}", called=True)
            return False
        if (
            (kwargs and not allowed.keywords)
            or not (allowed.new if by_new else allowed.call)
            or (allowed.fits is not None and not allowed.fits(args, self.rules))
        ):
            what = f"calls {shown_call(function, args, kwargs)}, which is not how it is saved"
            self.find(function, what, called=True)
            return False
        if allowed.nested:
            self._hand_over(args, surely=allowed.nested == "opened")
        return True

    # -- states and items ----------------------------------------------------------------------------------------------

    def build(self, target: object, state: object) -> object:
        """BUILD: calls `__setstate__`, and sets attributes of any name."""
        self.keep((state,))
        if isinstance(target, ObjectRecord):
            self._give_state(target, state)
            if target.has_state:
                self.refuse(f"gives {shown(target)} a second state")
            target.state, target.has_state = state, True
        elif isinstance(target, OrderedDict) and isinstance(state, dict) and state.keys() <= {"_metadata"}:
            self._see_unread(target)
            vars(target).update(state)  # versions of a state_dict's modules, kept as an attribute
        else:
            self.refuse(f"gives {shown(target)} the state {shown(state)}")
        return target

    def _give_state(self, target: ObjectRecord, state: object) -> None:
        self._see_unread(target)
        function = target.callable
        self._given.update(self._parts((state,), inside=function.module == "numpy" and function.name == "dtype"))
        made = reconstructed(function, target.args) if function.module == "copyreg" else None
        allowed = self._uses.get(id(made or function))
        if function is UNKNOWN:
            self.find(None, f"gives the state {shown(state)} to what is not known", called=True)
        if allowed is None:
            return  # its making was found
        fits = allowed.fits_state is None or allowed.fits_state(state)
        if not (allowed.state and fits and (allowed.keywords or plain_state(state))):
            self.find(function, f"gives {shown(function)} the state {shown(state)}", called=True)
        elif allowed.nested:
            content = state[:1] if isinstance(state, tuple) else ()
            if content and isinstance(content[0], bytes):
                self._hand_over(content, surely=False)
            else:
                self.find(function, f"gives {shown(function)} the state {shown(state)}", called=True)

    def extend(self, target: object, items: tuple[object, ...]) -> object:
        """APPEND and APPENDS."""
        self.keep(items)
        if isinstance(target, list):
            self._see_unread(target)
            target.extend(items)
        elif isinstance(target, ObjectRecord):
            self._give_items(target, kind="list")
            target.items.extend(items)
        else:
            self.refuse(f"appends to a {type(target).__name__}")
        return target

    def set_items(self, target: object, items: tuple[object, ...]) -> object:
        """SETITEM and SETITEMS, with keys and values in turn."""
        if len(items) % 2:
            raise ValueError("a key has no value")
        self.keep(items)
        if isinstance(target, ObjectRecord):
            self._give_items(target, kind="pairs")
            target.pairs.extend(zip(items[::2], items[1::2], strict=True))
        elif isinstance(target, dict):
            self._see_unread(target)
            keys = items[::2]
            self._check_keys(keys, target)
            target.update(zip(keys, items[1::2], strict=True))
        else:
            self.refuse(f"sets items of a {type(target).__name__}")
        return target

    def add_items(self, target: object, items: tuple[object, ...]) -> object:
        """ADDITEMS."""
        if not isinstance(target, set):
            self.refuse(f"adds members to {shown(target)}")
            return target
        self.keep(items)
        self._see_unread(target)
        self._check_keys(items, target)
        target.update(items)
        return target

    def make_list(self, items: tuple[object, ...]) -> list[object]:
        """LIST."""
        self._room -= 1 if self._room else self._refuse_more()
        self.keep(items)
        return list(items)

    def make_dict(self, items: tuple[object, ...]) -> object:
        """DICT."""
        self._room -= 1 if self._room else self._refuse_more()
        return self.set_items({}, items)

    def make_set(self, nothing: None) -> set[object]:
        """EMPTY_SET."""
        self._charge(_SET_COST)
        self._room -= 1 if self._room else self._refuse_more()
        return set()

    def make_frozenset(self, items: tuple[object, ...]) -> frozenset[object]:
        """FROZENSET."""
        self._room -= 1 if self._room else self._refuse_more()
        self._charge(_SET_COST)
        self.keep(items)
        self._check_keys(items)
        return frozenset(items)

    def finish(self, result: object) -> None:
        """STOP."""
        self.result = result
        self.keep((result,))
        self._finished = True

    # -- findings ------------------------------------------------------------------------------------------------------

    def find(self, name: GlobalName | None, what: str, *, called: bool = False, byte: int | None = None) -> None:
        """Note a use that is not allowed; a name that is `called` or otherwise used is worse than one that stands."""
        if len(self.findings) >= MOST_FINDINGS:
            self.astray = True
        else:
            dotted, byte = str(name) if name is not None else "", self._tokens.at if byte is None else byte
            finding = Finding(byte=byte, name=dotted, what=what, called=called)
            self.findings.setdefault((dotted or what, byte if called else _NAMED), finding)

    def refuse(self, what: str, byte: int | None = None) -> None:
        """Note an instruction that no checkpoint's pickle has; the rest is read all the same, to name what it does."""
        self.refused = True
        self.find(None, what, byte=byte)

    def _hand_over(self, values: tuple[object, ...], *, surely: bool) -> None:
        for value in values:
            assert isinstance(value, bytes | bytearray)  # the table allows nothing else
            self._charge(len(value) >> 3)
            data = bytes(value)
            self.nested[data] = self._tokens.at, surely or (data in self.nested and self.nested[data][1])

    def _parts(self, values: tuple[object, ...], *, inside: bool = False) -> dict[int, object]:
        """What may be changed among the values of a call or a state, and in the tuples among them, by identity.

        Of what lies deeper, Python keeps the same objects as are seen here. With `inside` the values of dicts are noted
        too: numpy looks into the parts of an element type. All that is looked at, here and by the table, is paid for.
        """
        parts: dict[int, object] = {}
        left = [values]
        for held in left:
            self._charge(len(held))
            for value in held:
                kind = type(value)
                if kind in LEAVES:
                    continue
                if isinstance(value, tuple):
                    left.append(value)
                elif kind is frozenset:
                    self._charge(len(cast("frozenset[object]", value)))
                elif kind in _CHANGEABLE:
                    parts[id(value)] = value
                    self._charge(len(cast("list[object]", value)))
                    if inside and isinstance(value, dict):
                        left.append(tuple(value.values()))
                elif isinstance(value, ObjectRecord) and value.callable.module in _CHANGEABLE_OF:
                    parts[id(value)] = value
        return parts

    def _see_unread(self, target: object) -> None:
        """See that what is changed was not given to a call or an object before: Python has read it as it was."""
        if id(target) in self._given:
            self.refuse(f"changes {shown(target, 1)} after a call or an object was given it")

    def _give_items(self, target: ObjectRecord, *, kind: str) -> None:
        """See that an object may be given items, a "list" or "pairs" of them: both call methods of any class."""
        self._see_unread(target)
        if target.callable is UNKNOWN:
            self.find(None, "puts items into what is not known", called=True)
        allowed = self._uses.get(id(target.callable))
        if allowed is not None and allowed.items not in (kind, "both"):
            self.find(target.callable, f"puts items into {shown(target.callable)}", called=True)

    # -- costs ---------------------------------------------------------------------------------------------------------

    def _charge(self, steps: int) -> None:
        """Pay for work out of proportion with an instruction's size; OverLimit when nothing is left."""
        self._work -= steps
        if self._work < 0:
            raise OverLimit("the same values are copied or hashed over and over: not a pickle that pickle writes")

    def _refuse_more(self) -> NoReturn:
        """For one byte of the pickle a container or an object takes a hundred, or several hundred."""
        raise OverLimit(f"more than {self._limits.containers} containers and objects")

    def _check_keys(self, keys: Iterable[object], holder: object = None) -> None:
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
            self._charge(before * cost)
            alike[hashed] = before + 1

    def _hash_cost(self, key: object) -> int:
        """Pay for hashing `key` and see that its nesting is small: hashing recurses in C without a check."""
        cost = 1
        level: list[object] = [key]
        for _ in range(self._limits.depth):
            inner: list[object] = []
            for value in level:
                if isinstance(value, (tuple, frozenset)):
                    self._charge(len(value))
                    cost += len(value)
                    inner.extend(value)
            if not inner:
                return cost
            level = inner
        raise OverLimit(f"a key is nested deeper than {self._limits.depth}")


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


def _problem(error: Exception) -> str:
    """An error of the unpickler, or of an operation, in the words of this package."""
    text = str(error)
    if isinstance(error, IndexError) or "stack underflow" in text or "unexpected MARK" in text:
        return "the instruction needs more values than the stack holds"
    if "find MARK" in text:
        return "there is no mark on the stack"
    if "Memo value not found" in text:
        return f"memo entry {text.rpartition(' ')[2]} was never stored"
    if "STACK_GLOBAL requires" in text:
        return "the name of a class is not text"
    return text[:200]
