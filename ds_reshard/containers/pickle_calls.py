"""The few calls in pickles of plain values that are carried out; every other becomes a record."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ds_reshard.containers.pickle_machine import UNKNOWN, PickleMachine
from ds_reshard.containers.pickle_rules import Callee, CalleeArguments, shown
from ds_reshard.model.records import GlobalName, ObjectRecord, SizeRecord

_Call = Callable[[PickleMachine, tuple[object, ...]], object]


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
    machine.use(function, args, kwargs, byte, by_new=by_new)
    if not kwargs:
        harmless = _HARMLESS.get((function.module, function.name))
        made = harmless(machine, args) if harmless is not None else NotImplemented
        if made is NotImplemented and not by_new:
            made = machine.reduce(function, args)
        if made is not NotImplemented:
            return made
    return ObjectRecord(callable=function, args=args, kwargs=kwargs, by_new=by_new)


def _ordered_dict(machine: PickleMachine, args: tuple[object, ...]) -> object:
    if not args:
        return OrderedDict()
    pairs = args[0]
    if len(args) != 1 or not isinstance(pairs, list):
        return NotImplemented
    machine.charge(len(pairs))
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        return NotImplemented
    machine.check_keys(pair[0] for pair in pairs)
    return OrderedDict(pairs)


def _elements(machine: PickleMachine, args: tuple[object, ...]) -> list[object] | tuple[object, ...] | None:
    """The one list or tuple that is given, () when nothing is, None for anything else; its copy is paid for."""
    if not args:
        return ()
    given = args[0]
    if len(args) != 1 or not isinstance(given, (list, tuple)):
        return None
    machine.charge(len(given))
    return given


def _size(machine: PickleMachine, args: tuple[object, ...]) -> object:
    sizes = _elements(machine, args)
    if sizes is None or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    return SizeRecord(size for size in sizes if isinstance(size, int))


def _set(machine: PickleMachine, args: tuple[object, ...]) -> object:
    members = _keys(machine, args)
    return NotImplemented if members is None else set(members)


def _frozen(machine: PickleMachine, args: tuple[object, ...]) -> object:
    members = _keys(machine, args)
    return NotImplemented if members is None else frozenset(members)


def _keys(machine: PickleMachine, args: tuple[object, ...]) -> list[object] | tuple[object, ...] | None:
    members = _elements(machine, args)
    machine.check_keys(members or ())
    return members


def _bytes(machine: PickleMachine, args: tuple[object, ...]) -> object:
    if not args:
        return b""
    given = args[0]
    if len(args) != 1 or not isinstance(given, (bytes, bytearray)):
        return NotImplemented
    machine.charge(len(given))
    return bytes(given)


def _bytearray(machine: PickleMachine, args: tuple[object, ...]) -> object:
    made = _encode(machine, args) if len(args) == 2 else _bytes(machine, args)
    return bytearray(made) if isinstance(made, bytes) else NotImplemented


def _encode(machine: PickleMachine, args: tuple[object, ...]) -> object:
    """Bytes as protocols 0 to 2 write them: pickle.py `save_bytes`, `codecs.encode(str, "latin1")`."""
    if len(args) != 2 or args[1] not in ("latin1", "latin-1") or not isinstance(args[0], str):
        return NotImplemented
    machine.charge(len(args[0]))
    return args[0].encode("latin-1")


def _complex(_: PickleMachine, args: tuple[object, ...]) -> object:
    parts = [part for part in args if isinstance(part, (int, float))]
    return complex(*parts) if len(parts) == len(args) == 2 else NotImplemented


def _slice(_: PickleMachine, args: tuple[object, ...]) -> object:
    if len(args) != 3 or not all(part is None or type(part) is int for part in args):
        return NotImplemented
    return slice(*args)


def _range(_: PickleMachine, args: tuple[object, ...]) -> object:
    bounds = [part for part in args if type(part) is int]
    return range(*bounds) if 1 <= len(bounds) == len(args) <= 3 else NotImplemented


_HARMLESS: dict[tuple[str, str], _Call] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("torch", "Size"): _size,
    ("builtins", "set"): _set,
    ("builtins", "frozenset"): _frozen,
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "complex"): _complex,
    ("builtins", "slice"): _slice,
    ("builtins", "range"): _range,
    ("_codecs", "encode"): _encode,
}
