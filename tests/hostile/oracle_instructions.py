"""What each instruction of a pickle does to the machine; none imports, and none calls what is named.

A handler takes the machine and the position behind its opcode, and returns the position of the next one (STOP
returns STOPPED, and FRAME what IN_FRAME says). It says what is wrong with a ValueError (or an IndexError, KeyError,
TypeError or struct.error of the built-in operation); the reader adds where. What Python's own unpickler would carry
out, no handler stops at: it notes it and goes on, or raises OverLimit. The instructions are those of
pickletools.opcodes, protocols 0 to 5.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections import OrderedDict
from collections.abc import Callable

from oracle_machine import CALLEES, SET_COST, CutShort, Handler, OverLimit, PickleMachine, call

from ds_reshard.containers.pickle_rules import shown
from ds_reshard.model.records import ObjectRecord

_U4 = struct.Struct("<I").unpack_from
_U8 = struct.Struct("<Q").unpack_from

_RAW_UNICODE = codecs.lookup("raw-unicode-escape").decode  # looked up once: the first look-up imports it

_DIGITS = re.compile(rb"\s*[0-9a-fA-FxXoObB_.+-]*\s*")
_OCTAL = re.compile(rb"\s*[+-]?0[0-7]+(?=\0|$)")
_MARKS = 10_000
_MEMO_AHEAD = 1 << 16
"""How far the number of a memo entry may be ahead of the bytes read so far: a pickler that writes several pickles goes
on counting. Python's own unpickler allocates 16 bytes for each number up to it (_pickle.c `_Unpickler_MemoPut`, 3.13).
"""
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|[^x])", re.DOTALL)
_ESCAPED = {b"\\": b"\\", b"'": b"'", b'"': b'"', b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r"}
_ESCAPED |= {b"t": b"\t", b"v": b"\v", b"\n": b""}


def _value(constant: object) -> Handler:
    def push(m: PickleMachine, pos: int) -> int:
        m.stack.append(constant)
        return pos

    return push


def _empty(make: Callable[[], object]) -> Handler:
    def push(m: PickleMachine, pos: int) -> int:
        m.room -= 1 if m.room else m.refuse_more()
        m.stack.append(make())
        return pos

    return push


def _empty_set(m: PickleMachine, pos: int) -> int:
    m.charge(SET_COST)
    m.room -= 1 if m.room else m.refuse_more()
    m.stack.append(set())
    return pos


def _number(size: struct.Struct) -> Handler:
    unpack, nbytes = size.unpack_from, size.size

    def push(m: PickleMachine, pos: int) -> int:
        m.stack.append(unpack(m.data, pos)[0])
        return pos + nbytes

    return push


def _binint1(m: PickleMachine, pos: int) -> int:
    m.stack.append(m.data[pos])
    return pos + 1


def _integer(m: PickleMachine, line: bytes, base: int) -> int:
    """The integer that a line spells, as C reads it: up to a zero byte; OverLimit when its digits are too many."""
    return int(_digits(m, line, "an integer of {} digits"), base)


def _digits(m: PickleMachine, line: bytes, told: str = "a number of {} characters") -> bytes:
    digits = line.partition(b"\0")[0]
    if len(digits) > m.limits.integer_nbytes and _DIGITS.fullmatch(digits):
        raise OverLimit(f"{told.format(len(digits))}; at most {m.limits.integer_nbytes} are read")
    return digits


def _int(m: PickleMachine, pos: int) -> int:
    line = m.line(pos)
    octal = _OCTAL.match(line)  # strtol of base 0, of which Python's own reader takes what it can (_pickle.c load_int)
    if line in (b"00", b"01"):
        m.stack.append(line == b"01")
    elif octal or line[:1] == b"\0":
        m.stack.append(_integer(m, octal[0] if octal else b"0", 8))
    else:
        m.stack.append(_integer(m, line, 0))
    return pos + len(line) + 1


def _long_text(m: PickleMachine, pos: int) -> int:
    line = m.line(pos)
    m.stack.append(_integer(m, line.removesuffix(b"L"), 0))
    return pos + len(line) + 1


def _float(m: PickleMachine, pos: int) -> int:
    line = m.line(pos)
    m.stack.append(float(_digits(m, line)))
    return pos + len(line) + 1


def _string(m: PickleMachine, pos: int) -> int:
    """A quoted string of Python 2: escapes are replaced by rule, nothing is evaluated."""
    line = m.line(pos)
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise ValueError("the text is not in quotes")
    m.stack.append(_old_text(_ESCAPE.sub(_unescaped, line[1:-1])))
    return pos + len(line) + 1


def _old_text(data: bytes) -> str:
    """A string of Python 2: text in UTF-8, or any bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _unescaped(escape: re.Match[bytes]) -> bytes:
    code = escape[1]
    if code[0] in b"01234567":
        return bytes([int(code, 8) & 0xFF])
    if code[0] == ord("x"):
        return bytes([int(code[1:], 16)])
    return _ESCAPED.get(code, escape[0])


def _unicode(m: PickleMachine, pos: int) -> int:
    line = m.line(pos)
    m.stack.append(_RAW_UNICODE(line)[0])
    return pos + len(line) + 1


def _text4(m: PickleMachine, pos: int) -> int:
    stop: int = pos + 4 + _U4(m.data, pos)[0]
    text = m.data[pos + 4 : stop] if stop <= m.end else m.take(pos + 4, stop - pos - 4)
    m.stack.append(text.decode("utf-8", "surrogatepass"))
    return stop


def _counted(code: str, make: Callable[[bytes], object] = bytes) -> Handler:
    """Bytes behind their number (of BINSTRING and LONG4 a signed one), and what is made of them."""
    size = struct.Struct(f"<{code}")
    unpack, width = size.unpack_from, size.size

    def push(m: PickleMachine, pos: int) -> int:
        start, nbytes = pos + width, unpack(m.data, pos)[0]
        if nbytes < 0:
            raise ValueError("declares a negative number of bytes")
        data = m.take(start, nbytes)
        if make is _long and nbytes > m.limits.integer_nbytes:
            raise OverLimit(f"an integer of {nbytes} bytes; at most {m.limits.integer_nbytes} are read")
        m.stack.append(make(data))
        return start + int(nbytes)

    return push


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _utf8(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _mark(m: PickleMachine, pos: int) -> int:
    if len(m.marked) > _MARKS:
        raise OverLimit(f"more than {_MARKS} marks are open")
    m.marked.append(m.stack)
    m.stack = []
    return pos


def _pop(m: PickleMachine, pos: int) -> int:
    if m.stack:
        m.stack.pop()
    else:
        m.since_mark()
    return pos


def _pop_mark(m: PickleMachine, pos: int) -> int:
    m.since_mark()
    return pos


def _dup(m: PickleMachine, pos: int) -> int:
    m.stack.append(m.stack[-1])
    return pos


def _binput(m: PickleMachine, pos: int) -> int:
    m.memo[m.data[pos]] = m.stack[-1]
    return pos + 1


def _long_binput(m: PickleMachine, pos: int) -> int:
    number = _U4(m.data, pos)[0]
    m.memo[number if number <= pos else _ahead(m, number, pos)] = m.stack[-1]
    m.room -= 1 if m.room else m.refuse_more()
    return pos + 4


def _put(m: PickleMachine, pos: int) -> int:
    line = m.line(pos)
    number = _integer(m, line, 10)
    m.memo[number if 0 <= number <= pos else _ahead(m, number, pos)] = m.stack[-1]
    m.room -= 1 if m.room else m.refuse_more()
    return pos + len(line) + 1


def _ahead(m: PickleMachine, number: int, pos: int) -> int:
    """The number of a memo entry that is ahead of the bytes read so far; noted where it is far ahead."""
    if number < 0:
        raise ValueError(f"memo entry {number}: there are none below 0")
    if number > pos + _MEMO_AHEAD:
        m.refuse(pos - 1, f"stores memo entry {number} after {pos} bytes, which takes {16 * number} bytes of memory")
    return number


def _memoize(m: PickleMachine, pos: int) -> int:
    m.room -= 1 if m.room else m.refuse_more()
    m.memo[len(m.memo)] = m.stack[-1]
    return pos


def _binget(m: PickleMachine, pos: int) -> int:
    m.stack.append(m.memo[m.data[pos]])
    return pos + 1


def _long_binget(m: PickleMachine, pos: int) -> int:
    m.stack.append(m.memo[_U4(m.data, pos)[0]])
    return pos + 4


def _get(m: PickleMachine, pos: int) -> int:
    line = m.line(pos)
    m.stack.append(m.memo[_integer(m, line, 10)])
    return pos + len(line) + 1


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
        raise CutShort(f"declares {nbytes} bytes where {m.end - pos - 8} are left", pos + 8, 0)
    m.frame_end = pos + 8 + nbytes
    return IN_FRAME - (pos + 8)


def _stop(m: PickleMachine, pos: int) -> int:
    m.result = m.stack.pop()
    m.keep((m.result,), pos - 1)
    if m.stack or m.marked:
        m.refuse(pos - 1, "ends with values left on the stack")
    m.stopped_at = pos
    return STOPPED


def _tuple(m: PickleMachine, pos: int) -> int:
    items = tuple(m.since_mark())
    m.stack.append(items if CALLEES.isdisjoint(map(type, items)) else m.together(items, pos - 1))
    return pos


def _tuple1(m: PickleMachine, pos: int) -> int:
    item = m.stack[-1]
    m.stack[-1] = (item,) if type(item) not in CALLEES else m.together((item,), pos - 1)
    return pos


def _tuple2(m: PickleMachine, pos: int) -> int:
    last = m.stack.pop()
    first = m.stack[-1]
    plain = type(first) not in CALLEES and type(last) not in CALLEES
    m.stack[-1] = (first, last) if plain else m.together((first, last), pos - 1)
    return pos


def _tuple3(m: PickleMachine, pos: int) -> int:
    last, middle = m.stack.pop(), m.stack.pop()
    items = m.stack[-1], middle, last
    m.stack[-1] = items if CALLEES.isdisjoint(map(type, items)) else m.together(items, pos - 1)
    return pos


def _list(m: PickleMachine, pos: int) -> int:
    m.room -= 1 if m.room else m.refuse_more()
    items = m.since_mark()
    m.keep(items, pos - 1)
    m.stack.append(items)
    return pos


def _dict(m: PickleMachine, pos: int) -> int:
    m.room -= 1 if m.room else m.refuse_more()
    items = m.since_mark()
    made: dict[object, object] = {}
    m.stack.append(made)
    _set_items(m, made, items, pos - 1)
    return pos


def _frozenset(m: PickleMachine, pos: int) -> int:
    m.room -= 1 if m.room else m.refuse_more()
    items = m.since_mark()
    m.charge(SET_COST)
    m.keep(items, pos - 1)
    m.check_keys(items)
    m.stack.append(frozenset(items))
    return pos


def _append(m: PickleMachine, pos: int) -> int:
    item = m.stack.pop()
    _extend(m, m.stack[-1], [item], pos - 1)
    return pos


def _appends(m: PickleMachine, pos: int) -> int:
    items = m.since_mark()
    _extend(m, m.stack[-1], items, pos - 1)
    return pos


def _extend(m: PickleMachine, target: object, items: list[object], byte: int) -> None:
    if not CALLEES.isdisjoint(map(type, items)):
        m.keep(items, byte)
    if isinstance(target, list):
        m.see_unread(target, byte)
        target.extend(items)
    elif isinstance(target, ObjectRecord):
        m.give_items(target, byte, kind="list")
        target.items.extend(items)
    else:
        m.refuse(byte, f"appends to a {type(target).__name__}")


def _setitem(m: PickleMachine, pos: int) -> int:
    value, key = m.stack.pop(), m.stack.pop()
    _set_items(m, m.stack[-1], [key, value], pos - 1)
    return pos


def _setitems(m: PickleMachine, pos: int) -> int:
    items = m.since_mark()
    _set_items(m, m.stack[-1], items, pos - 1)
    return pos


def _set_items(m: PickleMachine, target: object, items: list[object], byte: int) -> None:
    if len(items) % 2:
        raise ValueError("a key has no value")
    if not CALLEES.isdisjoint(map(type, items)):
        m.keep(items, byte)
    if isinstance(target, ObjectRecord):
        m.give_items(target, byte, kind="pairs")
        target.pairs.extend(zip(items[::2], items[1::2], strict=True))
        return
    if not isinstance(target, dict):
        m.refuse(byte, f"sets items of a {type(target).__name__}")
        return
    m.see_unread(target, byte)
    keys = items[::2]
    m.check_keys(keys, target)
    target.update(zip(keys, items[1::2], strict=True))


def _additems(m: PickleMachine, pos: int) -> int:
    items = m.since_mark()
    target = m.stack[-1]
    if not isinstance(target, set):
        m.refuse(pos - 1, f"adds members to {shown(target)}")
        return pos
    m.keep(items, pos - 1)
    m.see_unread(target, pos - 1)
    m.check_keys(items, target)
    target.update(items)
    return pos


def _global(m: PickleMachine, pos: int) -> int:
    module = m.line(pos)
    name = m.line(pos + len(module) + 1)
    m.stack.append(m.name(module.decode("utf-8"), name.decode("utf-8"), pos - 1))
    return pos + len(module) + len(name) + 2


def _stack_global(m: PickleMachine, pos: int) -> int:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError("the name of a class is not text")
    m.stack.append(m.name(module, name, pos - 1))
    return pos


def _reduce(m: PickleMachine, pos: int) -> int:
    args = m.stack.pop()
    m.stack[-1] = call(m, m.stack[-1], args, {}, pos - 1, by_new=False)
    return pos


def _newobj(m: PickleMachine, pos: int) -> int:
    args = m.stack.pop()
    made = m.makes.get(id(m.stack[-1])) if args == () else None
    if made is not None:
        m.room -= 1 if m.room else m.refuse_more()
        m.stack[-1] = ObjectRecord(callable=made, by_new=True)
    else:
        m.stack[-1] = call(m, m.stack[-1], args, {}, pos - 1, by_new=True)
    return pos


def _newobj_ex(m: PickleMachine, pos: int) -> int:
    given, args = m.stack.pop(), m.stack.pop()
    if isinstance(given, ObjectRecord):  # a dict of a class of its own, which Python takes
        m.refuse(pos - 1, f"calls {shown(m.stack[-1])} with keywords in {shown(given)}")
        given = {}
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ValueError("keyword arguments are not a dict of text")
    m.charge(len(given))
    m.stack[-1] = call(m, m.stack[-1], args, dict(given), pos - 1, by_new=True)
    return pos


def _build(m: PickleMachine, pos: int) -> int:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(state) in CALLEES:
        m.keep((state,), pos - 1)
    if isinstance(target, ObjectRecord):
        m.give_state(target, state, pos - 1)
        if target.has_state:
            m.refuse(pos - 1, f"gives {shown(target)} a second state")
        target.state, target.has_state = state, True
    elif isinstance(target, OrderedDict) and isinstance(state, dict) and state.keys() <= {"_metadata"}:
        m.see_unread(target, pos - 1)
        vars(target).update(state)  # versions of a state_dict's modules, kept as an attribute
    else:
        m.refuse(pos - 1, f"gives {shown(target)} the state {shown(state)}")
    return pos


def _inst(m: PickleMachine, pos: int) -> int:
    """A call by name, as Python wrote instances before 2.2."""
    after = _global(m, pos)
    function = m.stack.pop()
    return _called(m, function, m.since_mark(), pos - 1, after)


def _obj(m: PickleMachine, pos: int) -> int:
    items = m.since_mark()
    return _called(m, items.pop(0), items, pos - 1, pos)


def _called(m: PickleMachine, function: object, args: list[object], byte: int, after: int) -> int:
    m.refuse(byte, f"calls {shown(function)}{shown(tuple(args))} by an instruction that no pickle since Python 2.2 has")
    m.stack.append(call(m, function, m.together(tuple(args), byte), {}, byte, by_new=False))
    return after


def _outside(what: str, nbytes: int | None) -> Handler:
    """An object that is not in the pickle; `nbytes` is the size of the instruction's argument, None for a line."""

    def push(m: PickleMachine, pos: int) -> int:
        stop = pos + (nbytes if nbytes is not None else len(m.line(pos)) + 1)
        m.refuse(pos - 1, f"asks for {what}")
        m.stack.append(m.outside)
        return stop

    return push


def _readonly(m: PickleMachine, pos: int) -> int:
    m.refuse(pos - 1, "asks for a buffer outside the pickle (READONLY_BUFFER)")
    return pos


def _binpersid(m: PickleMachine, pos: int) -> int:
    """An object that is not in the pickle: torch keeps storages so, and once kept a module's own object."""
    identity = m.stack[-1]
    if type(identity) is not tuple or not identity or identity[0] != "storage":
        m.keep((identity,), pos - 1)
        m.refuse(pos - 1, f"asks for {shown(identity)}, which is no storage of the file")
    m.stack[-1] = m.persistent(identity)
    return pos


_INSTRUCTIONS: dict[bytes, Handler] = {
    b"N": _value(None),
    b"\x88": _value(True),
    b"\x89": _value(False),
    b")": _value(()),
    b"]": _empty(list),
    b"}": _empty(dict),
    b"\x8f": _empty_set,
    b"J": _number(struct.Struct("<i")),
    b"K": _binint1,
    b"M": _number(struct.Struct("<H")),
    b"G": _number(struct.Struct(">d")),
    b"\x8a": _counted("B", _long),
    b"\x8b": _counted("i", _long),
    b"I": _int,
    b"L": _long_text,
    b"F": _float,
    b"S": _string,
    b"V": _unicode,
    b"U": _counted("B", _old_text),
    b"\x8c": _counted("B", _utf8),
    b"T": _counted("i", _old_text),
    b"X": _text4,
    b"\x8d": _counted("Q", _utf8),
    b"C": _counted("B"),
    b"B": _counted("I"),
    b"\x8e": _counted("Q"),
    b"\x96": _counted("Q", bytearray),
    b"(": _mark,
    b"0": _pop,
    b"1": _pop_mark,
    b"2": _dup,
    b"q": _binput,
    b"r": _long_binput,
    b"p": _put,
    b"\x94": _memoize,
    b"h": _binget,
    b"j": _long_binget,
    b"g": _get,
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
    b"P": _outside("an object outside the file by a line of text (PERSID)", None),
    b"i": _inst,
    b"o": _obj,
    b"\x82": _outside("an object of the copyreg registry (EXT1)", 1),
    b"\x83": _outside("an object of the copyreg registry (EXT2)", 2),
    b"\x84": _outside("an object of the copyreg registry (EXT4)", 4),
    b"\x97": _outside("a buffer outside the pickle (NEXT_BUFFER)", 0),
    b"\x98": _readonly,
}

STOPPED = -1
IN_FRAME = -2
"""What FRAME returns, less the position behind it: the instructions up to `frame_end` are to be watched."""

HANDLERS: tuple[Handler, ...] = tuple(_INSTRUCTIONS.get(bytes([code]), _unknown) for code in range(256))
"""The handler of each of the 256 opcodes."""
