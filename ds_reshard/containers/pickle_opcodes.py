"""What each instruction of a pickle does to the machine; none imports, and none calls what is named.

A handler takes the machine and the position behind its opcode, and returns the position of the next one. It
says what is wrong with a ValueError (or an IndexError, KeyError, TypeError or struct.error of the built-in
operation); the reader adds where. The instructions are those of pickletools.opcodes, protocols 0 to 5.
"""

from __future__ import annotations

import struct
from collections import OrderedDict

from ds_reshard.containers.pickle_calls import call
from ds_reshard.containers.pickle_machine import SET_COST, Forbidden, Handler, PickleMachine
from ds_reshard.containers.pickle_scalars import SCALARS
from ds_reshard.containers.pickle_stack import STACK
from ds_reshard.model.records import ObjectRecord

_U8 = struct.Struct("<Q").unpack_from


def _refused(what: str) -> Handler:
    def refuse(m: PickleMachine, pos: int) -> int:
        raise Forbidden(what)

    return refuse


def _unknown(m: PickleMachine, pos: int) -> int:
    raise ValueError("is not an instruction")


def _proto(m: PickleMachine, pos: int) -> int:
    m.protocol = m.data[pos]
    if m.protocol > 5:
        raise ValueError(f"protocol {m.protocol} is not known; 0 to 5 are")
    return pos + 1


def _frame(m: PickleMachine, pos: int) -> int:
    nbytes = _U8(m.data, pos)[0]
    if pos + 8 + nbytes > m.end:
        raise ValueError(f"declares {nbytes} bytes where {m.end - pos - 8} are left")
    return pos + 8


def _stop(m: PickleMachine, pos: int) -> int:
    m.result = m.stack.pop()
    if m.stack or m.marked:
        raise ValueError("values are left on the stack")
    m.stopped_at = pos
    return -1


def _tuple(m: PickleMachine, pos: int) -> int:
    items = tuple(m.since_mark())
    m.stack.append(items)
    return pos


def _tuple1(m: PickleMachine, pos: int) -> int:
    m.stack[-1] = (m.stack[-1],)
    return pos


def _tuple2(m: PickleMachine, pos: int) -> int:
    last = m.stack.pop()
    m.stack[-1] = (m.stack[-1], last)
    return pos


def _tuple3(m: PickleMachine, pos: int) -> int:
    last, middle = m.stack.pop(), m.stack.pop()
    m.stack[-1] = (m.stack[-1], middle, last)
    return pos


def _list(m: PickleMachine, pos: int) -> int:
    items = m.since_mark()
    m.stack.append(items)
    return pos


def _dict(m: PickleMachine, pos: int) -> int:
    items = m.since_mark()
    made: dict[object, object] = {}
    m.stack.append(made)
    _set_items(m, made, items)
    return pos


def _frozenset(m: PickleMachine, pos: int) -> int:
    items = m.since_mark()
    m.charge(SET_COST)
    m.check_keys(items)
    m.stack.append(frozenset(items))
    return pos


def _append(m: PickleMachine, pos: int) -> int:
    item = m.stack.pop()
    _extend(m.stack[-1], [item])
    return pos


def _appends(m: PickleMachine, pos: int) -> int:
    items = m.since_mark()
    _extend(m.stack[-1], items)
    return pos


def _extend(target: object, items: list[object]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, ObjectRecord):
        target.items.extend(items)
    else:
        raise ValueError(f"appends to a {type(target).__name__}")


def _setitem(m: PickleMachine, pos: int) -> int:
    value, key = m.stack.pop(), m.stack.pop()
    _set_items(m, m.stack[-1], [key, value])
    return pos


def _setitems(m: PickleMachine, pos: int) -> int:
    items = m.since_mark()
    _set_items(m, m.stack[-1], items)
    return pos


def _set_items(m: PickleMachine, target: object, items: list[object]) -> None:
    if len(items) % 2:
        raise ValueError("a key has no value")
    if isinstance(target, ObjectRecord):
        target.pairs.extend(zip(items[::2], items[1::2], strict=True))
        return
    if not isinstance(target, dict):
        raise ValueError(f"sets items of a {type(target).__name__}")
    m.check_keys(items[::2], target)
    for i in range(0, len(items), 2):
        target[items[i]] = items[i + 1]


def _additems(m: PickleMachine, pos: int) -> int:
    items = m.since_mark()
    target = m.stack[-1]
    if not isinstance(target, set):
        raise ValueError(f"adds members to a {type(target).__name__}")
    m.check_keys(items, target)
    target.update(items)
    return pos


def _global(m: PickleMachine, pos: int) -> int:
    module = m.line(pos)
    name = m.line(pos + len(module) + 1)
    m.stack.append(m.name(module.decode("utf-8"), name.decode("utf-8")))
    return pos + len(module) + len(name) + 2


def _stack_global(m: PickleMachine, pos: int) -> int:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError("the name of a class is not text")
    m.stack.append(m.name(module, name))
    return pos


def _reduce(m: PickleMachine, pos: int) -> int:
    args = m.stack.pop()
    m.stack[-1] = call(m, m.stack[-1], args, {}, by_new=False)
    return pos


def _newobj(m: PickleMachine, pos: int) -> int:
    args = m.stack.pop()
    m.stack[-1] = call(m, m.stack[-1], args, {}, by_new=True)
    return pos


def _newobj_ex(m: PickleMachine, pos: int) -> int:
    given, args = m.stack.pop(), m.stack.pop()
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ValueError("keyword arguments are not a dict of text")
    m.charge(len(given))
    m.stack[-1] = call(m, m.stack[-1], args, dict(given), by_new=True)
    return pos


def _build(m: PickleMachine, pos: int) -> int:
    state = m.stack.pop()
    target = m.stack[-1]
    if isinstance(target, ObjectRecord):
        if target.has_state:
            raise ValueError(f"{target.callable} is given a second state")
        target.state, target.has_state = state, True
    elif isinstance(target, OrderedDict):
        if (
            isinstance(state, dict) and "_metadata" in state
        ):  # versions of a state_dict's modules, kept as its attribute
            vars(target)["_metadata"] = state["_metadata"]
    else:
        raise Forbidden(f"sets the state of a {type(target).__name__}, which no pickle needs")
    return pos


def _binpersid(m: PickleMachine, pos: int) -> int:
    m.stack[-1] = m.persistent(m.stack[-1])
    return pos


_INSTRUCTIONS: dict[bytes, Handler] = {
    **SCALARS,
    **STACK,
    b"\x80": _proto,
    b"\x95": _frame,
    b".": _stop,
    b"t": _tuple,
    b"\x85": _tuple1,
    b"\x86": _tuple2,
    b"\x87": _tuple3,
    b"l": _list,
    b"d": _dict,
    b"\x91": _frozenset,
    b"a": _append,
    b"e": _appends,
    b"s": _setitem,
    b"u": _setitems,
    b"\x90": _additems,
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _newobj,
    b"\x92": _newobj_ex,
    b"b": _build,
    b"Q": _binpersid,
    b"P": _refused("names an object outside the file as text (PERSID)"),
    b"i": _refused("calls a class by name (INST), which no pickle since Python 2.2 does"),
    b"o": _refused("calls a class (OBJ), which no pickle since Python 2.2 does"),
    b"\x82": _refused("asks for an object of the copyreg registry (EXT1)"),
    b"\x83": _refused("asks for an object of the copyreg registry (EXT2)"),
    b"\x84": _refused("asks for an object of the copyreg registry (EXT4)"),
    b"\x97": _refused("asks for a buffer outside the pickle (NEXT_BUFFER)"),
    b"\x98": _refused("asks for a buffer outside the pickle (READONLY_BUFFER)"),
}

HANDLERS: tuple[Handler, ...] = tuple(_INSTRUCTIONS.get(bytes([code]), _unknown) for code in range(256))
"""The handler of each of the 256 opcodes."""
