"""The instructions of a pickle that push a number, text, bytes or an empty container."""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable

from ds_reshard.containers.pickle_machine import SET_COST, Handler, PickleMachine

_U2 = struct.Struct("<H").unpack_from
_U4 = struct.Struct("<I").unpack_from
_U8 = struct.Struct("<Q").unpack_from
_I4 = struct.Struct("<i").unpack_from
_F8 = struct.Struct(">d").unpack_from

_RAW_UNICODE = codecs.lookup("raw-unicode-escape").decode  # looked up once: the first look-up imports it

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
        m.stack.append(make())
        return pos

    return push


def _empty_set(m: PickleMachine, pos: int) -> int:
    m.charge(SET_COST)
    m.stack.append(set())
    return pos


def _binint(m: PickleMachine, pos: int) -> int:
    m.stack.append(_I4(m.data, pos)[0])
    return pos + 4


def _binint1(m: PickleMachine, pos: int) -> int:
    m.stack.append(m.data[pos])
    return pos + 1


def _binint2(m: PickleMachine, pos: int) -> int:
    m.stack.append(_U2(m.data, pos)[0])
    return pos + 2


def _binfloat(m: PickleMachine, pos: int) -> int:
    m.stack.append(_F8(m.data, pos)[0])
    return pos + 8


def _long1(m: PickleMachine, pos: int) -> int:
    nbytes = m.data[pos]
    m.stack.append(int.from_bytes(m.take(pos + 1, nbytes), "little", signed=True))
    return pos + 1 + nbytes


def _long4(m: PickleMachine, pos: int) -> int:
    nbytes: int = _I4(m.data, pos)[0]
    if not 0 <= nbytes <= m.limits.integer_nbytes:
        raise ValueError(f"an integer of {nbytes} bytes; at most {m.limits.integer_nbytes} are read")
    m.stack.append(int.from_bytes(m.take(pos + 4, nbytes), "little", signed=True))
    return pos + 4 + nbytes


def integer_of(m: PickleMachine, digits: bytes) -> int:
    """The integer that `digits` spell; ValueError when they are too many."""
    if len(digits) > m.limits.integer_nbytes:
        raise ValueError(f"an integer of {len(digits)} digits; at most {m.limits.integer_nbytes} are read")
    return int(digits)


def _int(m: PickleMachine, pos: int) -> int:
    line = m.line(pos)
    booleans = {b"00": False, b"01": True}
    m.stack.append(booleans[line] if line in booleans else integer_of(m, line))
    return pos + len(line) + 1


def _long(m: PickleMachine, pos: int) -> int:
    line = m.line(pos)
    m.stack.append(integer_of(m, line.removesuffix(b"L")))
    return pos + len(line) + 1


def _float(m: PickleMachine, pos: int) -> int:
    line = m.line(pos)
    if len(line) > m.limits.integer_nbytes:
        raise ValueError(f"a number of {len(line)} characters")
    m.stack.append(float(line))
    return pos + len(line) + 1


def _string(m: PickleMachine, pos: int) -> int:
    """A quoted string of Python 2: escapes are replaced by rule, nothing is evaluated."""
    line = m.line(pos)
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise ValueError("the text is not in quotes")
    m.stack.append(_ESCAPE.sub(_unescaped, line[1:-1]).decode("utf-8"))
    return pos + len(line) + 1


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


def _text1(m: PickleMachine, pos: int) -> int:
    nbytes = m.data[pos]
    m.stack.append(m.text(pos + 1, nbytes))
    return pos + 1 + nbytes


def _string4(m: PickleMachine, pos: int) -> int:
    """BINSTRING counts with a signed integer, BINUNICODE with an unsigned one."""
    if _I4(m.data, pos)[0] < 0:
        raise ValueError("declares a negative number of bytes")
    return _text4(m, pos)


def _text4(m: PickleMachine, pos: int) -> int:
    nbytes: int = _U4(m.data, pos)[0]
    m.stack.append(m.text(pos + 4, nbytes))
    return pos + 4 + nbytes


def _text8(m: PickleMachine, pos: int) -> int:
    nbytes: int = _U8(m.data, pos)[0]
    m.stack.append(m.text(pos + 8, nbytes))
    return pos + 8 + nbytes


def _bytes1(m: PickleMachine, pos: int) -> int:
    nbytes = m.data[pos]
    m.stack.append(m.take(pos + 1, nbytes))
    return pos + 1 + nbytes


def _bytes4(m: PickleMachine, pos: int) -> int:
    nbytes: int = _U4(m.data, pos)[0]
    m.stack.append(m.take(pos + 4, nbytes))
    return pos + 4 + nbytes


def _bytes8(m: PickleMachine, pos: int) -> int:
    nbytes: int = _U8(m.data, pos)[0]
    m.stack.append(m.take(pos + 8, nbytes))
    return pos + 8 + nbytes


def _bytearray8(m: PickleMachine, pos: int) -> int:
    nbytes: int = _U8(m.data, pos)[0]
    m.stack.append(bytearray(m.take(pos + 8, nbytes)))
    return pos + 8 + nbytes


SCALARS: dict[bytes, Handler] = {
    b"N": _value(None),
    b"\x88": _value(True),
    b"\x89": _value(False),
    b")": _value(()),
    b"]": _empty(list),
    b"}": _empty(dict),
    b"\x8f": _empty_set,
    b"J": _binint,
    b"K": _binint1,
    b"M": _binint2,
    b"G": _binfloat,
    b"\x8a": _long1,
    b"\x8b": _long4,
    b"I": _int,
    b"L": _long,
    b"F": _float,
    b"S": _string,
    b"V": _unicode,
    b"U": _text1,
    b"\x8c": _text1,
    b"T": _string4,
    b"X": _text4,
    b"\x8d": _text8,
    b"C": _bytes1,
    b"B": _bytes4,
    b"\x8e": _bytes8,
    b"\x96": _bytearray8,
}
