"""Plain values and records as a pickle that torch.load reads: the inverse of `pickle_reader.py` and `torch_tensors.py`.

Protocol 2, as torch.save writes (torch/serialization.py, 2.13); opcodes from CPython's pickletools. Classes are named,
never imported. What is shared in the tree is shared in the pickle.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence

from ds_reshard.errors import UnsupportedLayout
from ds_reshard.model.codec import ElementType
from ds_reshard.model.records import GlobalName, ObjectRecord, SizeRecord, StorageRecord, TensorRecord

STORAGES = {
    ElementType.FLOAT64: "DoubleStorage",
    ElementType.FLOAT32: "FloatStorage",
    ElementType.FLOAT16: "HalfStorage",
    ElementType.BFLOAT16: "BFloat16Storage",
    ElementType.COMPLEX64: "ComplexFloatStorage",
    ElementType.COMPLEX128: "ComplexDoubleStorage",
    ElementType.INT64: "LongStorage",
    ElementType.INT32: "IntStorage",
    ElementType.INT16: "ShortStorage",
    ElementType.INT8: "CharStorage",
    ElementType.UINT8: "ByteStorage",
    ElementType.BOOL: "BoolStorage",
}
_BATCH = 1000


def write_pickle(value: object, storage_key: Callable[[StorageRecord], str]) -> bytes:
    """The pickle of `value`; `storage_key` names the member that holds a storage's bytes.

    Raises UnsupportedLayout for a value that the reader never makes.
    """
    writer = _Writer(storage_key)
    writer.put(b"\x80\x02")
    writer.save(value)
    writer.put(b".")
    return b"".join(writer.parts)


class _Writer:
    def __init__(self, storage_key: Callable[[StorageRecord], str]) -> None:
        self.parts: list[bytes] = []
        self._storage_key = storage_key
        self._memo: dict[int | str, int] = {}
        self._kept: list[object] = []  # an id stands for its object only while that lives

    def put(self, part: bytes) -> None:
        self.parts.append(part)

    def save(self, value: object) -> None:
        scalar = _SCALARS.get(type(value))
        if scalar is not None:
            self.parts.append(scalar(value))
        elif isinstance(value, GlobalName):
            self._name(value.module, value.name)
        elif not self._again(id(value)):
            self._kept.append(value)
            self._compound(value)

    def _compound(self, value: object) -> None:
        if isinstance(value, (TensorRecord, StorageRecord, ObjectRecord)):
            self._record(value)
        elif isinstance(value, SizeRecord):
            self._call("torch", "Size", (tuple(value),))
            self._remember(id(value))
        elif isinstance(value, tuple):
            self._tuple(value)
            self._remember(id(value))
        elif isinstance(value, list):
            self.put(b"]")
            self._remember(id(value))
            self._appends(value)
        elif isinstance(value, dict):
            self._dict(value)
        else:
            call = _plain_call(value)
            if call is None:
                raise UnsupportedLayout(f"a value of type {type(value).__name__} cannot be written into a torch file")
            self._call(*call)
            self._remember(id(value))

    def _record(self, value: TensorRecord | StorageRecord | ObjectRecord) -> None:
        if isinstance(value, ObjectRecord):
            self._object(value)
        elif isinstance(value, TensorRecord):
            self._tensor(value)
            self._remember(id(value))
        else:
            self._storage(value)
            self._remember(id(value))

    def _again(self, key: int | str) -> bool:
        at = self._memo.get(key)
        if at is None:
            return False
        self.put(b"h" + bytes([at]) if at < 256 else b"j" + struct.pack("<I", at))
        return True

    def _remember(self, key: int | str) -> None:
        at = self._memo[key] = len(self._memo)
        self.put(b"q" + bytes([at]) if at < 256 else b"r" + struct.pack("<I", at))

    def _name(self, module: str, name: str) -> None:
        key = f"{module}\n{name}\n"
        if not self._again(key):
            if "\n" in module or "\n" in name:
                raise UnsupportedLayout(f"a class named {name!r} cannot be written into a torch file")
            self.put(b"c" + key.encode("utf-8"))
            self._remember(key)

    def _call(self, module: str, name: str, args: tuple[object, ...]) -> None:
        self._name(module, name)
        self._tuple(args)
        self.put(b"R")

    def _tuple(self, value: tuple[object, ...]) -> None:
        if len(value) > 3:
            self.put(b"(")
        for item in value:
            self.save(item)
        self.put((b")", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) <= 3 else b"t")

    def _appends(self, items: Sequence[object]) -> None:
        for at in range(0, len(items), _BATCH):
            self.put(b"(")
            for item in items[at : at + _BATCH]:
                self.save(item)
            self.put(b"e")

    def _dict(self, value: dict[object, object]) -> None:
        if isinstance(value, OrderedDict):
            self._call("collections", "OrderedDict", ())
        else:
            self.put(b"}")
        self._remember(id(value))
        self._setitems(list(value.items()))
        attributes = vars(value) if isinstance(value, OrderedDict) else {}
        if attributes:
            self.save(attributes)
            self.put(b"b")

    def _setitems(self, pairs: Sequence[tuple[object, object]]) -> None:
        for at in range(0, len(pairs), _BATCH):
            self.put(b"(")
            for key, item in pairs[at : at + _BATCH]:
                self.save(key)
                self.save(item)
            self.put(b"u")

    def _object(self, value: ObjectRecord) -> None:
        self._name(value.callable.module, value.callable.name)
        self._tuple(value.args)
        if value.kwargs:
            self.save(value.kwargs)
            self.put(b"\x92")  # NEWOBJ_EX, of protocol 4: read by every unpickler, whatever the protocol is
        else:
            self.put(b"\x81" if value.by_new else b"R")
        self._remember(id(value))
        self._appends(value.items)
        self._setitems(value.pairs)
        if value.has_state:
            self.save(value.state)
            self.put(b"b")

    def _tensor(self, value: TensorRecord) -> None:
        hooks: OrderedDict[object, object] = OrderedDict()
        view = (
            value.storage,
            value.element_offset,
            tuple(value.shape),
            tuple(value.stride),
            value.requires_grad,
            hooks,
        )
        if value.dtype is value.storage.dtype and value.dtype in STORAGES:
            self._call("torch._utils", "_rebuild_tensor_v2", view)
        else:
            dtype = GlobalName(module="torch", name=value.dtype.label)
            self._call("torch._utils", "_rebuild_tensor_v3", (*view, dtype))

    def _storage(self, value: StorageRecord) -> None:
        kind = STORAGES.get(value.dtype)
        cls = (
            GlobalName(module="torch", name=kind) if kind else GlobalName(module="torch.storage", name="UntypedStorage")
        )
        identity = ("storage", cls, self._storage_key(value), "cpu", value.numel if kind else value.nbytes)
        self._tuple(identity)
        self.put(b"Q")


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data)) + data


_SCALARS: dict[type, Callable[..., bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: _integer,
    float: lambda value: b"G" + struct.pack(">d", value),
    str: _text,
}
"""The opcode of an atom, by its type."""


def _plain_call(value: object) -> tuple[str, str, tuple[object, ...]] | None:
    """The call that makes a plain value, by its name in Python 3."""
    if isinstance(value, (bytes, bytearray)):
        text = (bytes(value).decode("latin-1"), "latin1")
        return ("_codecs", "encode", text) if isinstance(value, bytes) else ("builtins", "bytearray", text)
    if isinstance(value, complex):
        return "builtins", "complex", (value.real, value.imag)
    if isinstance(value, (set, frozenset)):
        return "builtins", type(value).__name__, (list(value),)
    if isinstance(value, slice):
        return "builtins", "slice", (value.start, value.stop, value.step)
    if isinstance(value, range):
        return "builtins", "range", (value.start, value.stop, value.step)
    return None
