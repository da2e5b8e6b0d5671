"""The instructions of a pickle, bounded and rewritten so that CPython's own unpickler only builds constants from them.

The unpickler (Modules/_pickle.c) keeps the stack, the marks and the memo, and reads numbers and texts. Each instruction
that would call, hash, set or ask becomes BINPERSID of its operands and of a function of ours, which NEXT_BUFFER takes
from an iterator: `buffers` may give any objects. So nothing of a file is called or hashed in C, and the function that
judges an instruction is called in the order of the loader.

Nothing here has a stack, so it cannot disagree with the unpickler about meaning, but for the lengths of instructions,
which pickletools has as constants. Bounded are: memo indexes, the digits of integers, empty containers, and frames that
do not end where an instruction does.
"""

from __future__ import annotations

import pickletools
import re
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


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
    *("add_items", "make_list", "make_dict", "make_set", "make_frozenset", "set_protocol", "note", "put_far"),
    *("get_far", "finish"),
)
_NUMBER = {name: number for number, name in enumerate(HANDLERS)}

_ONE = b"\x97\x86Q"  # NEXT_BUFFER, TUPLE2, BINPERSID: the value on the stack and the function
_TWO = b"\x97\x87Q"  # NEXT_BUFFER, TUPLE3, BINPERSID: two values and the function
_SEVERAL = b"t"  # TUPLE: all values above the mark
_POP = b"0"

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
_FRAME_PROBLEM = "reads across the end of a frame, behind which Python's own reader may go on"


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
    return _run(b"|".join((_SINGLE + index, _TEXT + index, index, _STAYING)))


def _run(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(b"(?:" + pattern + b"){1,%d}" % _RUN, re.DOTALL)


_EMPTY = re.compile(rb"[\]}]+")
_BETWEEN = _run(_STAYING.replace(rb"[()\]}", rb"[()"))

_WITHOUT_MEMO = _run(rb"[()\]}NQt0-2\x85-\x89\x93]|K.|M..|J....")

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
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|[^x])", re.DOTALL)
_ESCAPED = {b"\\": b"\\", b"'": b"'", b'"': b'"', b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r"}
_ESCAPED |= {b"t": b"\t", b"v": b"\v", b"\n": b""}


def _unescaped(escape: re.Match[bytes]) -> bytes:
    code = escape[1]
    if code[0] in b"01234567":
        return bytes([int(code, 8) & 0xFF])
    return bytes([int(code[1:], 16)]) if code[0] == ord("x") else _ESCAPED.get(code, escape[0])


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
    """The rewritten instructions of a pickle up to STOP, or up to the first that cannot be followed: then `error`.

    `stream` is what the unpickler reads; `handlers` has a number of HANDLERS for each NEXT_BUFFER in it; `notes` are
    what its calls of "note" say. `stop` is where the pickle ends, or where the instruction of the error begins.
    `astray` says that Python's own reader may read something else. With `located`, `byte_of` leads back.
    """

    def __init__(self, data: bytes, limits: PickleLimits, *, located: bool = False) -> None:
        self.data = data
        self.limits = limits
        self.handlers = bytearray()
        self.notes: list[str] = []
        self._far: dict[int, int] = {}  # memo entries that are far ahead, by their numbers, and how many there were
        self.error: ValueError | None
        self.stop = 0
        self.frame_end = -1
        self.frames: list[tuple[int, int]] = []
        self.astray = False
        self._pieces: list[bytes] = []  # as they are, and rewritten, in turn
        self._cuts = array("Q")  # where each rewritten one stands in the data
        begun = self._rewrite()
        if self.error is not None:
            self._pieces.append(data[begun : self.stop])
        self.stream = b"".join(self._pieces)
        self._begins = array("Q", accumulate(map(len, self._pieces), initial=0) if located else ())
        if not located:
            self._pieces.clear()

    def _rewrite(self) -> int:
        """Fill the pieces; returns where the last one that is not yet among them begins."""
        self.error = None
        data, pieces, cuts, handlers, rewritten = self.data, self._pieces, self._cuts, self.handlers, _REWRITTEN.get
        pos = begun = 0
        match, turn = _run_pattern(16).match, _MEMO_AHEAD
        bound = end = _containers_end(data, self.limits.containers)
        try:
            while not self.stop:
                if self._far:
                    match = _WITHOUT_MEMO.match
                elif pos >= turn:  # twice as far, and twice as many memo entries
                    bits = (pos + _MEMO_AHEAD).bit_length() - 1
                    match, turn = _run_pattern(bits).match, (2 << bits) - _MEMO_AHEAD
                if (run := match(data, pos, bound)) is not None:
                    pos = run.end()
                if pos >= bound:
                    if self.frame_end < 0:
                        raise _no_end(data, end)
                    bound, self.frame_end = end, -1
                elif (found := rewritten(data[pos])) is not None:
                    pieces.append(data[begun:pos])
                    cuts.append(pos)
                    pieces.append(found[0])
                    handlers.append(found[1])
                    pos = begun = pos + 1
                else:
                    stop, instead = self._other(pos)
                    if instead is not None:
                        pieces.append(data[begun:pos])
                        cuts.append(pos)
                        pieces.append(instead)
                        begun = stop
                    pos, bound = stop, self.frame_end if self.frame_end >= 0 else end
        except ValueError as error:
            self.error, self.stop = error, pos
        return begun

    def _other(self, pos: int) -> tuple[int, bytes | None]:
        """Where an instruction that is long or rare ends, and what the unpickler reads instead, if it is rewritten."""
        data, code = self.data, self.data[pos]
        if code == _STOP:
            self.stop = pos + 1
            # The stack must be empty then: one POP takes what `finish` returns, and the second must fail.
            return pos + 1, self._handled(_ONE + _POP + _POP + b"N.", "finish")
        start, stop = instruction_end(data, pos)
        noted = b""
        if 0 <= self.frame_end < stop or (code == _FRAME and self.frame_end >= 0):
            noted = self._note(_FRAME_PROBLEM) + _POP
            self.frame_end, self.astray = -1, True
        instead = self._instead(code, pos, start, stop)
        if noted:
            instead = noted + (data[pos:stop] if instead is None else instead)
        return stop, instead

    def _instead(self, code: int, pos: int, start: int, stop: int) -> bytes | None:
        data = self.data
        if code == _FRAME:
            nbytes = int.from_bytes(data[start:stop], "little")
            if stop + nbytes > len(data):
                raise CutShort(f"declares {nbytes} bytes where {len(data) - stop} are left", stop)
            self.frame_end = stop + nbytes
            self.frames.append((stop, self.frame_end))
            return b""
        if code == _PROTO:
            if data[start] > 5:
                raise ValueError(f"protocol {data[start]} is not known; 0 to 5 are")
            return b"K" + data[start:stop] + self._handled(_ONE + _POP, "set_protocol")
        if code in b"TU":
            return _python_2_text(data[start:stop])
        if code == ord("S"):
            line = data[start : stop - 1]
            if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
                raise ValueError("the text is not in quotes")
            return _python_2_text(_ESCAPE.sub(_unescaped, line[1:-1]))
        if code in b"ILFgp":
            kind = "a number of {} characters" if code == ord("F") else "an integer of {} digits"
            digits = data[start : stop - 1].partition(b"\0")[0].removesuffix(b"L" if code == ord("L") else b"")
            if len(digits) > self.limits.integer_nbytes and _DIGITS.fullmatch(digits):
                raise OverLimit(f"{kind.format(len(digits))}; at most {self.limits.integer_nbytes} are read")
            return self._memo(code, int(digits), start) if code in b"gp" else None
        if code in b"rjqh":
            return self._memo(code, int.from_bytes(data[start:stop], "little"), start)
        if code in b"\x8a\x8b" and stop - start > self.limits.integer_nbytes:
            raise OverLimit(f"an integer of {stop - start} bytes; at most {self.limits.integer_nbytes} are read")
        if code in b"ci":
            name = _name(data[start:stop])
            return name if code == ord("c") else _SEVERAL + name + self._handled(_TWO, "instance_of")
        if (outside := _OUTSIDE.get(code)) is not None:
            return self._note(f"asks for {outside}") + (_POP if code == 0x98 else b"")
        return None

    def _memo(self, code: int, number: int, pos: int) -> bytes | None:
        """What stores or gets a memo entry: not the unpickler, if its number is far ahead of the bytes read so far."""
        if number < 0:
            raise ValueError(f"memo entry {number}: there are none below 0")
        stored, noted = code in b"rqp", b""
        if stored and number > pos + _MEMO_AHEAD:
            problem = f"stores memo entry {number} after {pos} bytes, which takes {16 * number} bytes of memory"
            noted = self._note(problem) + _POP
            self._far.setdefault(number, len(self._far))
        far = self._far.get(number)
        if far is None:
            return b"%c%d\n" % (code, number) if code in b"gp" else None
        pushed = b"J" + far.to_bytes(4, "little")
        if stored:
            return noted + b"2" + pushed + self._handled(_TWO, "put_far") + _POP
        return pushed + self._handled(_ONE, "get_far")

    def _handled(self, instructions: bytes, handler: str) -> bytes:
        self.handlers.append(_NUMBER[handler])
        return instructions

    def _note(self, problem: str) -> bytes:
        self.notes.append(problem)
        return b"J" + (len(self.notes) - 1).to_bytes(4, "little") + self._handled(_ONE, "note")

    def byte_of(self, position: int) -> int:
        """The byte of the data that a position of the stream stands for: of what was rewritten, the instruction's."""
        piece = bisect_right(self._begins, position, hi=len(self._pieces)) - 1
        after = self._cuts[piece // 2] if piece // 2 < len(self._cuts) else self.stop
        if piece % 2:
            return after
        return after - len(self._pieces[piece]) + position - self._begins[piece]

    def instruction_at(self, position: int) -> int:
        """The beginning of the instruction in which a position of the stream lies."""
        piece = bisect_right(self._begins, position, hi=len(self._pieces)) - 1
        byte = self.byte_of(position)
        if piece % 2:
            return byte
        at = self.byte_of(self._begins[piece])
        while (stop := instruction_end(self.data, at)[1]) <= byte:
            at = stop
        return at


def _containers_end(data: bytes, most: int) -> int:
    """Where there are more than `most` empty lists and dicts, if that is before the end of the data."""
    end = len(data)
    if end <= most or data.count(b"]") + data.count(b"}") <= most:
        return end
    pos = count = 0
    while pos < end and data[pos] != _STOP:
        if (run := _EMPTY.match(data, pos)) is not None:
            count += run.end() - pos
            if count > most:
                return run.end() - (count - most)
            pos = run.end()
        elif (run := _BETWEEN.match(data, pos)) is not None:
            pos = run.end()
        else:
            try:
                pos = instruction_end(data, pos)[1]
            except ValueError:
                break
    return end


def _no_end(data: bytes, end: int) -> ValueError:
    if end < len(data):
        return OverLimit("more lists and dicts than are read of a pickle")
    return CutShort("the pickle ends before its STOP instruction: the file was cut short", end)
