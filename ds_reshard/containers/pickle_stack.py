"""The instructions of a pickle that move values between its stack, its marks and its memo."""

from __future__ import annotations

import struct

from ds_reshard.containers.pickle_machine import Handler, PickleMachine
from ds_reshard.containers.pickle_scalars import integer_of

_U4 = struct.Struct("<I").unpack_from


def _mark(m: PickleMachine, pos: int) -> int:
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
    m.memo[_U4(m.data, pos)[0]] = m.stack[-1]
    return pos + 4


def _put(m: PickleMachine, pos: int) -> int:
    line = m.line(pos)
    m.memo[integer_of(m, line)] = m.stack[-1]
    return pos + len(line) + 1


def _memoize(m: PickleMachine, pos: int) -> int:
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
    m.stack.append(m.memo[integer_of(m, line)])
    return pos + len(line) + 1


STACK: dict[bytes, Handler] = {
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
}
