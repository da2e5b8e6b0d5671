"""Hypothesis strategies for hostile bytes: real files and pickles that were changed, and pickles made of opcodes."""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import torch.distributed.checkpoint as dcp
from archives import member_of
from hypothesis import strategies as st
from torch.utils.serialization import config

from ds_reshard.containers.torch_zip_writer import plan_archive

# Values at which sizes, offsets and counts begin to be wrong.
EDGES = (
    0,
    1,
    2,
    3,
    7,
    8,
    127,
    128,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 2,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
)


@dataclass(frozen=True)
class Change:
    """One change of a file's bytes: where (a fraction of its length), what, and with which number or bytes."""

    at: float
    kind: str
    number: int
    data: bytes

    def apply(self, content: bytes) -> bytes:
        at = min(int(self.at * len(content)), max(0, len(content) - 1))
        span = 1 + self.number % 64
        before, after = content[:at], content[at:]
        if self.kind == "flip":
            return before + bytes([after[0] ^ (1 << self.number % 8)]) + after[1:] if after else content
        if self.kind == "write":
            return before + self.data + after[len(self.data) :]
        if self.kind == "insert":
            return before + self.data + after
        if self.kind == "cut":
            return before
        if self.kind == "remove":
            return before + after[span:]
        if self.kind == "repeat":
            return before + after[:span] * (1 + self.number % 5) + after[span:]
        if self.kind == "move":
            to = self.number % (len(content) + 1)
            return content[:to] + after[:span] + content[to:]
        nbytes = {"edge2": 2, "edge4": 4, "edge8": 8}[self.kind]
        edge = (EDGES[self.number % len(EDGES)] & (1 << 8 * nbytes) - 1).to_bytes(nbytes, "little")
        return before + edge + after[nbytes:]


KINDS = ("flip", "write", "insert", "cut", "remove", "repeat", "move", "edge2", "edge4", "edge8")
changes = st.lists(
    st.builds(
        Change,
        at=st.floats(0, 1, exclude_max=True),
        kind=st.sampled_from(KINDS),
        number=st.integers(0, 2**16),
        data=st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=4,
)


def changed(content: bytes, made: list[Change]) -> bytes:
    for change in made:
        content = change.apply(content)
    return content


# -- pickles --------------------------------------------------------------------------------------------------


def _pickles() -> Iterator[bytes]:
    """Of plain values and of objects, in every protocol, those inside files of torch.save, and a directory of torch."""
    shared: list[object] = [1, (2.5, "é")]
    tree = {
        "ints": [0, -1, 300, 70000, 2**70],
        "texts": ("", "a" * 300, "\ud800"),
        "shared": [shared, shared],
        "bytes": [b"", b"x" * 300, bytearray(b"y")],
        "sets": [{1, "a"}, frozenset({(1, 2)})],
        3: None,
        1j: True,
        "objects": [collections.OrderedDict(a=1), collections.Counter("aab"), slice(1, None), range(3)],
    }
    for protocol in range(6):
        yield pickle.dumps(tree, protocol)
    for content in [*torch_files(), _saved(_optimizer())]:
        yield member_of(content, "data.pkl")
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"a": torch.ones(3), "epoch": 3}, checkpoint_id=folder, no_dist=True)
        yield Path(folder, ".metadata").read_bytes()


def _optimizer() -> list[object]:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    weight.sum().backward()
    optimizer.step()
    return [optimizer.state_dict(), scheduler.state_dict(), torch.get_rng_state(), numpy.random.get_state()]


_ARGUMENTS: dict[str, Callable[[st.DrawFn], bytes]] = {
    "uint1": lambda draw: bytes([draw(st.integers(0, 255))]),
    "uint2": lambda draw: struct.pack("<H", draw(st.integers(0, 2**16 - 1))),
    "int4": lambda draw: struct.pack("<i", draw(st.sampled_from([0, 1, -1, 5, 1000, 2**31 - 1, -(2**31)]))),
    "uint4": lambda draw: struct.pack("<I", draw(st.sampled_from([0, 1, 5, 1000, 2**31, 2**32 - 1]))),
    "uint8": lambda draw: struct.pack("<Q", draw(st.sampled_from([0, 1, 5, 1000, 2**63, 2**64 - 1]))),
    "float8": lambda draw: struct.pack(">d", draw(st.floats())),
    "decimalnl_short": lambda draw: draw(st.sampled_from([b"0", b"01", b"00", b"-7", b"9" * 40, b"x", b""])) + b"\n",
    "decimalnl_long": lambda draw: draw(st.sampled_from([b"0L", b"12", b"-3L", b"9" * 2000 + b"L", b"L"])) + b"\n",
    "floatnl": lambda draw: draw(st.sampled_from([b"1.5", b"nan", b"1e999", b"x", b"1_0"])) + b"\n",
    "stringnl": lambda draw: draw(st.sampled_from([b"'a'", b'"\\x41"', b"'\\", b"a", b"'\\q\\\\'", b""])) + b"\n",
    "stringnl_noescape": lambda draw: draw(st.sampled_from([b"0", b"id", b"\xff", b""])) + b"\n",
    "unicodestringnl": lambda draw: draw(st.sampled_from([b"a", b"\\u20ac", b"\\ud800", b"\\u12", b"\xff"])) + b"\n",
    "stringnl_noescape_pair": lambda draw: draw(st.sampled_from(_NAMES)),
}
_NAMES = [
    b"os\nsystem\n",
    b"builtins\neval\n",
    b"__builtin__\nset\n",
    b"collections\nOrderedDict\n",
    b"torch\nSize\n",
    b"torch\nFloatStorage\n",
    b"torch._utils\n_rebuild_tensor_v2\n",
    b"torch._utils\n_rebuild_parameter\n",
    b"_codecs\nencode\n",
    b"copyreg\n_reconstructor\n",
    b"builtins\nobject\n",
    b"builtins\nbytearray\n",
    b"builtins\ncomplex\n",
    b"builtins\nrange\n",
    b"builtins\nslice\n",
    b"numpy.core.multiarray\n_reconstruct\n",
    b"numpy\ndtype\n",
    b"numpy\nndarray\n",
    b"collections\ndefaultdict\n",
    b"datetime\ndatetime\n",
    b"a.b\nc.d\n",
    b"\n\n",
]
_SIZED = {
    "string1": "<B",
    "string4": "<i",
    "bytes1": "<B",
    "bytes4": "<I",
    "bytes8": "<Q",
    "bytearray8": "<Q",
    "unicodestring1": "<B",
    "unicodestring4": "<I",
    "unicodestring8": "<Q",
    "long1": "<B",
    "long4": "<i",
}


def _argument(draw: st.DrawFn, opcode: pickletools.OpcodeInfo) -> bytes:
    if opcode.arg is None:
        return b""
    if opcode.arg.name in _SIZED:
        data = draw(st.sampled_from([b"", b"a", b"storage", b"latin1", b"\xff\xfe", b"0", b"cpu", b"x" * 100]))
        lie = draw(st.sampled_from([0, 0, 0, 0, 1, -1, 100]))
        return struct.pack(_SIZED[opcode.arg.name], max(0, len(data) + lie)) + data
    return _ARGUMENTS[opcode.arg.name](draw)


# A pickle of opcodes drawn alike ends at once: those that push, and those that take what is there, come oftener.
_WEIGHTS = {
    "MARK": 6,
    "EMPTY_DICT": 4,
    "EMPTY_LIST": 4,
    "BININT1": 6,
    "TUPLE": 4,
    "TUPLE2": 3,
    "GLOBAL": 6,
    "REDUCE": 6,
    "BUILD": 3,
    "NEWOBJ": 3,
    "MEMOIZE": 5,
    "BINGET": 5,
    "BINPERSID": 3,
    "SETITEM": 3,
    "SETITEMS": 3,
    "APPENDS": 3,
    "EMPTY_TUPLE": 4,
    "SHORT_BINUNICODE": 5,
    "DUP": 3,
}
_OPCODES = [opcode for opcode in pickletools.opcodes for _ in range(_WEIGHTS.get(opcode.name, 1))]


ENDINGS = (b"", b".", b"t.", b"l.", b"d.", b"u.", b"R.", b"b.")


@st.composite
def opcodes(draw: st.DrawFn) -> bytes:
    """The beginning of a pickle, made of opcodes, some of them over and over; ENDINGS finish it."""
    parts = [b"\x80" + bytes([draw(st.integers(0, 5))])] if draw(st.booleans()) else []
    for opcode in draw(st.lists(st.sampled_from(_OPCODES), max_size=25)):
        parts.append(opcode.code.encode("latin-1") + _argument(draw, opcode))
    if parts and draw(st.integers(0, 9)) == 0:
        first = draw(st.integers(0, len(parts) - 1))
        parts[first:] = parts[first:] * draw(st.sampled_from([2, 50, 1000]))
    return b"".join(parts)


# -- files ----------------------------------------------------------------------------------------------------


def torch_files() -> list[bytes]:
    """What torch.save writes: many kinds of tensors, other alignments, no checksums; and what this package writes."""
    base = torch.arange(12.0)
    values: list[object] = [
        {"a": torch.arange(3), "b": torch.ones(2, dtype=torch.bfloat16)},
        [base, base[3:], base.view(3, 4).t(), torch.zeros(0), torch.tensor(2.5)],
        collections.OrderedDict(weight=torch.nn.Parameter(torch.ones(2, 2)), step=3),
        {"c": torch.ones(2, dtype=torch.complex64).conj(), "s": torch.eye(2).to_sparse(), "u": torch.UntypedStorage(5)},
    ]
    files = [_saved(value) for value in values]
    with config.patch("save.storage_alignment", 4096):
        files.append(_saved(values[0]))
    torch.serialization.set_crc32_options(False)
    try:
        files.append(_saved(values[0]))
    finally:
        torch.serialization.set_crc32_options(True)
    plan = plan_archive("archive", {"step": 3, "name": "x"})
    content = bytearray(plan.nbytes)
    for at, data in plan.parts({}):
        content[at : at + len(data)] = data
    return [*files, bytes(content)]


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


HARMLESS = list(_pickles())
PICKLES = [*HARMLESS, *(pickle.dumps([ValueError("x"), len], protocol) for protocol in range(6))]
FILES = torch_files()
