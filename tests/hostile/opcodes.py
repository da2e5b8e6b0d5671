"""Pickles that hold each of the opcodes in turn, with what a call needs on the stack."""

from __future__ import annotations

import pickletools

# What each kind of argument looks like (pickletools, "Represent arguments").
_ARGUMENTS = {
    "uint1": b"\1",
    "uint2": b"\1\0",
    "int4": b"\1\0\0\0",
    "uint4": b"\1\0\0\0",
    "uint8": b"\1" + bytes(7),
    "float8": bytes(8),
    "decimalnl_short": b"1\n",
    "decimalnl_long": b"1L\n",
    "floatnl": b"1\n",
    "stringnl": b"'a'\n",
    "stringnl_noescape": b"a\n",
    "stringnl_noescape_pair": b"os\nsystem\n",
    "unicodestringnl": b"a\n",
    "string1": b"\1a",
    "string4": b"\1\0\0\0a",
    "bytes1": b"\1a",
    "bytes4": b"\1\0\0\0a",
    "bytes8": b"\1" + bytes(7) + b"a",
    "bytearray8": b"\1" + bytes(7) + b"a",
    "unicodestring1": b"\1a",
    "unicodestring4": b"\1\0\0\0a",
    "unicodestring8": b"\1" + bytes(7) + b"a",
    "long1": b"\1\1",
    "long4": b"\1\0\0\0\1",
}


def spelled(opcode: pickletools.OpcodeInfo) -> bytes:
    """The opcode with an argument that is well-formed."""
    return opcode.code.encode("latin-1") + (_ARGUMENTS[opcode.arg.name] if opcode.arg is not None else b"")


# A name, the mark and argument that OBJ and INST take, and the tuple of REDUCE and NEWOBJ.
_PUSHED = {
    "and call": b"(cos\nsystem\nX\4\0\0\0true",
    "with a tuple": b"cos\nsystem\nq\1X\4\0\0\0true\x85",
    "with words": b"cos\nsystem\n)}",
    "alone": b"",
    "in a memo": b"cos\nsystem\n\x94q\1",
}
EVERY_OPCODE = {
    f"{opcode.name} {how}": b"\x80\2" + pushed + spelled(opcode) + b"."
    for opcode in pickletools.opcodes
    for how, pushed in _PUSHED.items()
}
