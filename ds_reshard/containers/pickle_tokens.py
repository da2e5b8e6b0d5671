"""The instructions of a pickle, bounded and rewritten so that CPython's own unpickler only builds constants from them.

The unpickler (Modules/_pickle.c) keeps the stack, the marks and the memo, and reads numbers and texts. Each instruction
that would call, hash, set or ask becomes BINPERSID of its operands and of a function of ours, which NEXT_BUFFER takes
from an iterator: `buffers` may give any objects. So nothing of a file is called or hashed in C, and the function that
judges an instruction is called in the order of the loader.

Nothing here has a stack, so it cannot disagree with the unpickler about meaning, but for the lengths of instructions,
which pickletools has as constants. Bounded are memo indexes, the digits of integers, and empty lists and dicts. What no
pickle of a checkpoint has is noted: frames that do not end where an instruction does, and objects from outside.
"""

from __future__ import annotations

import codecs
import pickletools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


MOST_FINDINGS = 1000
"""So many are told of one pickle."""


class CutShort(ValueError):
    """An instruction, or the pickle, that ends beyond the bytes: where its argument begins, and its declared size."""

    def __init__(self, problem: str, start: int, nbytes: int = 0) -> None:
        super().__init__(problem)
        self.start = start
        self.nbytes = nbytes


class OverLimit(ValueError):
    """What is not read because it costs too much: Python might read it, and go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleLimits:
    """What a pickle may cost: its bytes, the nesting of its value, its parts, the bytes of one integer, its containers.

    A value may have `parts`, and `expansion` more for each byte, where what is shared counts as often as it is used.
    `containers` bounds lists and dicts, and as many objects, sets and calls: one byte asks for a hundred bytes of each.
    """

    nbytes: int = 256 << 20
    depth: int = 200
    parts: int = 1 << 20
    expansion: int = 64
    integer_nbytes: int = 1024
    containers: int = 1 << 24


# -- what is rewritten -------------------------------------------------------------------------------------------------

# The functions that take over, by the number that stands for each in `Tokens.handlers`.
HANDLERS = (
    *("call", "new", "new_with_keywords", "instance_of", "instance_of_first", "build", "extend", "set_items"),
    *("add_items", "make_list", "make_dict", "make_set", "make_frozenset", "finish"),
)
_NUMBER = {name: number for number, name in enumerate(HANDLERS)}

_ONE = b"\x97\x86Q"  # NEXT_BUFFER, TUPLE2, BINPERSID: the value on the stack and the function
_TWO = b"\x97\x87Q"  # NEXT_BUFFER, TUPLE3, BINPERSID: two values and the function
_SEVERAL = b"t"  # TUPLE: all values above the mark

_REWRITTEN: dict[int, tuple[bytes, int]] = {
    opcode: (instructions, _NUMBER[handler])
    for opcode, instructions, handler in (
        (ord("R"), _TWO, "call"),
        (ord("u"), _SEVERAL + _TWO, "set_items"),
        (ord("s"), b"\x86" + _TWO, "set_items"),
        (ord("e"), _SEVERAL + _TWO, "extend"),
        (ord("a"), b"\x85" + _TWO, "extend"),
        (0x81, _TWO, "new"),
        (ord("b"), _TWO, "build"),
        (0x92, b"\x87" + _ONE, "new_with_keywords"),
        (0x90, _SEVERAL + _TWO, "add_items"),
        (0x8F, b"N" + _ONE, "make_set"),
        (0x91, _SEVERAL + _ONE, "make_frozenset"),
        (ord("d"), _SEVERAL + _ONE, "make_dict"),
        (ord("l"), _SEVERAL + _ONE, "make_list"),
        (ord("o"), _SEVERAL + _ONE, "instance_of_first"),
    )
}
_STOP, _FRAME, _PROTO = ord("."), 0x95, 0x80

_OUTSIDE = {
    ord("P"): "an object outside the file by a line of text (PERSID)",
    0x82: "an object of the copyreg registry (EXT1)",
    0x83: "an object of the copyreg registry (EXT2)",
    0x84: "an object of the copyreg registry (EXT4)",
    0x97: "a buffer outside the pickle (NEXT_BUFFER)",
    0x98: "a buffer outside the pickle (READONLY_BUFFER)",
}


# -- instructions that stay, in runs -----------------------------------------------------------------------------------

_RUN = 1024
_SHORT = 96
_MEMO_AHEAD = 1 << 16
"""How far the number of a memo entry may be ahead of the bytes read so far: a pickler that writes several pickles goes
on counting. Python's own unpickler allocates 16 bytes for each number up to it (_pickle.c `_Unpickler_MemoPut`, 3.13).
"""


def _counted(opcode: bytes, width: int, most: int) -> bytes:
    """A pattern of an instruction with 0 to `most` bytes behind their number."""
    sizes = (re.escape(nbytes.to_bytes(width, "little")) + b".{%d}" % nbytes for nbytes in range(most + 1))
    return re.escape(opcode) + b"(?:" + b"|".join(sizes) + b")"


_TEXT = _counted(b"X", 4, _SHORT)
_SINGLE, _INDEXED = rb"[()\]}NQt0-2\x85-\x89\x93\x94]", rb"[Khq]."
_STAYING = (
    b"%b%b|%b|%b|" % (_INDEXED, _INDEXED, _INDEXED, _SINGLE)
    + rb"M..|[Jj]....|G.{8}|c[^\n]{1,256}\n[^\n]{1,256}\n|"
    + b"|".join((_TEXT, _counted(b"\x8c", 1, _SHORT), _counted(b"C", 1, _SHORT), _counted(b"\x8a", 1, 16)))
    + rb"|p[0-9]{1,4}\n|g[0-9]{1,9}\n|[IL]-?[0-9]{1,18}L?\n|F[0-9.e+-]{1,32}\n|V[^\n]{0,96}\n"
    + rb"|S'[ !#-&(-\[\]-~]{0,96}'\n"
)


@cache
def _run_pattern(bits: int) -> re.Pattern[bytes]:
    """A run of instructions that stay as they are, and among them LONG_BINPUT of an index of at most so many bits."""
    third, fourth = min(0xFF, (1 << bits - 16) - 1), (1 << max(0, bits - 24)) - 1
    index = b"r..[\\x00-\\x%02x][\\x00-\\x%02x]" % (third, fourth)
    # What is often together is one alternative: each turn of the repetition costs as much as ten bytes.
    run = b"|".join((_SINGLE + index, _TEXT + index, index, _STAYING))
    return re.compile(b"(?:" + run + b"){1,%d}" % _RUN, re.DOTALL)


_FIXED = {ord(op.code): op.arg.n if op.arg is not None else 0 for op in pickletools.opcodes}
_LINES = {code: 2 if NAMES[code] in ("GLOBAL", "INST") else 1 for code, n in _FIXED.items() if n == -1}
_SIZES = {pickletools.TAKEN_FROM_ARGUMENT1: (1, False), pickletools.TAKEN_FROM_ARGUMENT4: (4, True)}
_SIZES |= {pickletools.TAKEN_FROM_ARGUMENT4U: (4, False), pickletools.TAKEN_FROM_ARGUMENT8U: (8, False)}


def instruction_end(data: bytes, at: int) -> tuple[int, int]:
    """Where the argument of the instruction at a position begins behind its size, and where the instruction ends.

    Raises CutShort where that is beyond the bytes, and ValueError for what is no instruction.
    """
    fixed = _FIXED.get(data[at])
    start, end = at + 1, len(data)
    if fixed is None:
        raise ValueError("is not an instruction")
    if fixed >= 0:
        if start + fixed > end:
            raise CutShort("the pickle ends inside this instruction: the file was cut short", start)
        return start, start + fixed
    if (lines := _LINES.get(data[at])) is not None:
        stop = start
        for _ in range(lines):
            begun, stop = stop, data.find(b"\n", stop) + 1
            if not stop:
                raise CutShort("the pickle ends inside a line", begun)
        return start, stop
    width, signed = _SIZES[fixed]
    if start + width > end:
        raise CutShort("the pickle ends inside this instruction: the file was cut short", start)
    nbytes = int.from_bytes(data[start : start + width], "little", signed=signed)
    start += width
    if nbytes < 0:
        raise ValueError("declares a negative number of bytes")
    if start + nbytes > end:
        raise CutShort(f"declares {nbytes} bytes where {end - start} are left", start, nbytes)
    return start, start + nbytes


_DIGITS = re.compile(rb"\s*[0-9a-fA-FxXoObB_.+-]*\s*")


def _python_2_text(data: bytes) -> bytes:
    """BINUNICODE of a string of Python 2: text in UTF-8, or any bytes."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    encoded = text.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def _name(lines: bytes) -> bytes:
    """GLOBAL of a module and a name; the unpickler takes one of no letters by STACK_GLOBAL alone."""
    module, name, _ = lines.split(b"\n")
    if module and name:
        return b"c" + lines
    return b"".join(b"X" + len(text).to_bytes(4, "little") + text for text in (module, name)) + b"\x93"


class Tokens:
    """The instructions of a pickle, rewritten, up to STOP or up to the first that cannot be followed: then `error`.

    `handlers` has a number of HANDLERS for each NEXT_BUFFER among them. `at` is the instruction under way, and `stop`
    where the pickle ends, or where the instruction of the error begins. `frame_end` is that of the frame it lies in.
    `notes` are the places of what no pickle of a checkpoint has, and what it does. `astray` says that Python's own
    reader may read something else.
    """

    def __init__(self, data: bytes, limits: PickleLimits) -> None:
        self.data = data
        self.limits = limits
        self.handlers = bytearray()
        self.error: ValueError | DeprecationWarning | None = None
        self.at = self.stop = self.protocol = 0
        self.frame_end = -1
        self.notes: list[tuple[int, str]] = []
        self.astray = False

    def instructions(self, *, singly: bool = False) -> Iterator[bytes]:
        """What the unpickler reads: long runs of instructions, or with `singly` one at a time."""
        data, handlers, rewritten = self.data, self.handlers, _REWRITTEN.get
        pos = begun = 0
        bound = end = len(data)
        match, turn = _run_pattern(16).match, _MEMO_AHEAD
        try:
            if data.count(b"]") + data.count(b"}") > self.limits.containers:
                raise OverLimit("more lists and dicts than are read of a pickle")
            while not self.stop:
                if pos >= turn:  # twice as far, and twice as many memo entries
                    bits = (pos + _MEMO_AHEAD).bit_length() - 1
                    match, turn = _run_pattern(bits).match, (2 << bits) - _MEMO_AHEAD
                if not singly and (run := match(data, pos, bound)) is not None:
                    pos = run.end()
                if pos >= bound:
                    if self.frame_end < 0:
                        raise CutShort("the pickle ends before its STOP instruction: the file was cut short", end)
                    bound, self.frame_end = end, -1
                    continue
                self.at = pos
                instead: bytes | None
                if (found := rewritten(data[pos])) is not None:
                    stop, instead = pos + 1, found[0]
                    handlers.append(found[1])
                else:
                    stop, instead = self._other(pos)
                    bound = self.frame_end if self.frame_end >= 0 else end
                if instead is not None or singly:
                    yield data[begun:pos]
                    yield data[pos:stop] if instead is None else instead
                    begun = stop
                pos = stop
        except (ValueError, DeprecationWarning) as error:  # of escapes in texts
            self.error, self.stop = error, pos
        yield data[begun:pos]

    def _other(self, pos: int) -> tuple[int, bytes | None]:
        """Where an instruction that is long or rare ends, and what the unpickler reads instead, if it is rewritten."""
        data, code = self.data, self.data[pos]
        if code == _STOP:
            self.stop = pos + 1
            self.handlers.append(_NUMBER["finish"])
            # The stack must be empty then: one POP takes what `finish` returns, and the second must fail.
            return pos + 1, _ONE + b"00N."
        start, stop = instruction_end(data, pos)
        if 0 <= self.frame_end < stop or (code == _FRAME and self.frame_end >= 0):
            self._note(pos, "reads across the end of a frame, behind which Python's own reader may go on")
            self.frame_end, self.astray = -1, True
        if code == _FRAME:
            nbytes = int.from_bytes(data[start:stop], "little")
            if stop + nbytes > len(data):
                raise CutShort(f"declares {nbytes} bytes where {len(data) - stop} are left", stop)
            self.frame_end = stop + nbytes
            return stop, b""
        if (outside := _OUTSIDE.get(code)) is not None:
            self._note(pos, f"asks for {outside}")
            return stop, b"" if NAMES[code] == "READONLY_BUFFER" else b"N"
        return stop, self._bounded(code, start, stop)

    def _bounded(self, code: int, start: int, stop: int) -> bytes | None:
        """What the unpickler reads instead of an instruction with this argument; None where that is itself."""
        argument, most = self.data[start:stop], self.limits.integer_nbytes
        if code == _PROTO:
            if start > 1:
                self._note(start - 1, "declares a protocol behind the beginning of the pickle")
                return b""
            self.protocol = argument[0]
            if self.protocol > 5:
                raise ValueError(f"protocol {self.protocol} is not known; 0 to 5 are")
        elif code in b"TU":
            return _python_2_text(argument)
        elif code == ord("S"):
            if len(argument) < 3 or argument[:1] != argument[-2:-1] or argument[:1] not in (b"'", b'"'):
                raise ValueError("the text is not in quotes")
            return _python_2_text(codecs.escape_decode(argument[1:-2])[0])
        elif code in b"ILFgp":
            kind = "a number of {} characters" if code == ord("F") else "an integer of {} digits"
            digits = argument[:-1].partition(b"\0")[0].removesuffix(b"L" if code == ord("L") else b"")
            if len(digits) > most and _DIGITS.fullmatch(digits):
                raise OverLimit(f"{kind.format(len(digits))}; at most {most} are read")
            return self._far(int(digits), start) if code == ord("p") else None
        elif code == ord("r"):
            return self._far(int.from_bytes(argument, "little"), start)
        elif code in b"\x8a\x8b" and len(argument) > most:
            raise OverLimit(f"an integer of {len(argument)} bytes; at most {most} are read")
        elif code == ord("c"):
            return _name(argument)
        elif code == ord("i"):
            self.handlers.append(_NUMBER["instance_of"])
            return _SEVERAL + _name(argument) + _TWO
        return None

    def _note(self, byte: int, problem: str) -> None:
        if len(self.notes) < MOST_FINDINGS:
            self.notes.append((byte, problem))
        else:
            self.astray = True

    def _far(self, number: int, pos: int) -> bytes | None:
        """Nothing for what stores a memo entry whose number is far ahead of the bytes read so far."""
        if number < 0:
            raise ValueError(f"memo entry {number}: there are none below 0")
        if number <= pos + _MEMO_AHEAD:
            return None
        problem = f"stores memo entry {number} after {pos} bytes, which takes {16 * number} bytes of memory"
        self._note(pos - 1, problem)
        return b""
