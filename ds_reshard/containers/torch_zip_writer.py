"""Archives of torch.save to be written: every byte has its place before the first is written, in any order.

The layout of torch's own writer (caffe2/serialize/inline_container.cc, torch 2.13): stored members below one root,
their bytes at multiples of 64, the padding in an extra field "FB"; 64-bit sizes where they are needed (PKWARE's
APPNOTE.TXT 6.3.10, 4.5.3). Sizes and checksums stand in the local headers too, so no descriptors follow the bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ds_reshard.containers.crc import crc32
from ds_reshard.containers.zip_directory import END, END64, END64_LOCATOR, ENTRY, LOCAL, WIDE
from ds_reshard.errors import UnsupportedLayout
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, SizeRecord, StorageRecord, TensorRecord

_WIDE_COUNT = 0xFFFF
_UTF8 = 0x0800
_ALIGNMENT = 64
_MADE_BY, _NEEDS, _NEEDS_WIDE = 20, 20, 45


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A file of the archive: where its header and its bytes lie; `data` is None for a storage, which comes later."""

    name: str
    header_offset: int
    byte_offset: int
    nbytes: int
    data: bytes | None = None

    def header(self, crc: int) -> bytes:
        """The local header, with what pads it to the first byte."""
        name = self.name.encode("utf-8")
        wide = _wide_extra((self.nbytes, self.nbytes)) if self.nbytes >= WIDE else b""
        padding = self.byte_offset - self.header_offset - LOCAL.size - len(name) - len(wide) - 4
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        size = min(self.nbytes, WIDE)
        needs = _NEEDS_WIDE if wide else _NEEDS
        fixed = LOCAL.pack(b"PK\x03\x04", needs, _UTF8, 0, 0, 0, crc, size, size, len(name), len(extra))
        return fixed + name + extra

    def entry(self, crc: int) -> bytes:
        """The line of the directory."""
        name = self.name.encode("utf-8")
        wide = _wide_extra(_wide_fields(self.nbytes, self.header_offset))
        needs = _NEEDS_WIDE if wide else _NEEDS
        nbytes, offset = min(self.nbytes, WIDE), min(self.header_offset, WIDE)
        sizes = (nbytes, nbytes, len(name), len(wide), 0, 0, 0, 0, offset)
        return ENTRY.pack(b"PK\x01\x02", _MADE_BY, needs, _UTF8, 0, 0, 0, crc, *sizes) + name + wide


def _wide_fields(nbytes: int, offset: int) -> tuple[int, ...]:
    """What does not fit a line of the directory: a member's bytes, packed and not, and the place of its header."""
    return tuple(value for value in (nbytes, nbytes, offset) if value >= WIDE)


def _wide_extra(values: tuple[int, ...]) -> bytes:
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivePlan:
    """One archive to be written.

    `storages` are the storages that `value` refers to, by the key of their member, in the order of their first use;
    `places` gives the member of each.
    """

    members: tuple[Member, ...]
    storages: Mapping[str, StorageRecord]
    nbytes: int

    @property
    def places(self) -> dict[str, Member]:
        return {member.name.rpartition("/")[2]: member for member in self.members if member.data is None}

    def parts(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """All bytes but those of the storages, each with its offset; `checksums` are the storages' crc32 by key."""
        entries = []
        for member in self.members:
            crc = crc32(member.data) if member.data is not None else checksums[member.name.rpartition("/")[2]]
            yield member.header_offset, member.header(crc) + (member.data or b"")
            entries.append(member.entry(crc))
        directory = b"".join(entries)
        yield self._directory_offset, directory + _end(len(entries), len(directory), self._directory_offset)

    @property
    def _directory_offset(self) -> int:
        last = self.members[-1]
        return last.byte_offset + last.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPlan:
    """A file without checksums of its own: `data`, and the storages behind it, if there are some."""

    data: bytes
    storages: Mapping[str, StorageRecord] = field(default_factory=dict)
    places: Mapping[str, Member] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(place.nbytes for place in self.places.values())

    def parts(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """All bytes but those of the storages, each with its offset."""
        yield 0, self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class Pickled:
    """A value as its pickle, and the storages that it refers to, by the key of their member, in order of first use."""

    data: bytes
    storages: Mapping[str, StorageRecord]


def pickled(value: object) -> Pickled:
    """A tree of plain values and records, ready to be planned under any root.

    Storages are told apart by path, place and key: tensors that share one share its bytes in the new file too.
    """
    keys: dict[tuple[str, int, str], str] = {}
    storages: dict[str, StorageRecord] = {}

    def key_of(storage: StorageRecord) -> str:
        key = keys.setdefault((storage.path, storage.byte_offset, storage.key), str(len(keys)))
        storages[key] = storage
        return key

    return Pickled(data=write_pickle(value, key_of), storages=storages)


def plan_archive(root: str, value: object) -> ArchivePlan:
    """Where everything lies in the archive that holds `value`, a tree as for `pickled`, or what that gave."""
    made = value if isinstance(value, Pickled) else pickled(value)
    identity = str(int.from_bytes(hashlib.sha256(made.data).digest(), "big"))[:40]
    before = {"data.pkl": made.data, ".format_version": b"1", ".storage_alignment": b"64", "byteorder": b"little"}
    after = {"version": b"3\n", ".data/serialization_id": identity.encode("ascii")}
    contents: dict[str, bytes | None] = {**before, **{f"data/{key}": None for key in made.storages}, **after}
    members, at, directory_nbytes = [], 0, 0
    for name, data in contents.items():
        nbytes = len(data) if data is not None else made.storages[name.removeprefix("data/")].nbytes
        full = f"{root}/{name}"
        name_nbytes = len(full.encode("utf-8"))
        least = at + LOCAL.size + name_nbytes + 4 + (20 if nbytes >= WIDE else 0)
        start = -(-least // _ALIGNMENT) * _ALIGNMENT
        members.append(Member(name=full, header_offset=at, byte_offset=start, nbytes=nbytes, data=data))
        directory_nbytes += ENTRY.size + name_nbytes + len(_wide_extra(_wide_fields(nbytes, at)))
        at = start + nbytes
    nbytes = at + directory_nbytes + len(_end(len(members), directory_nbytes, at))
    return ArchivePlan(members=tuple(members), storages=made.storages, nbytes=nbytes)


def _end(entries: int, nbytes: int, offset: int) -> bytes:
    """The end records; the 64-bit ones where a number does not fit."""
    count = min(entries, _WIDE_COUNT)
    narrow = END.pack(b"PK\x05\x06", 0, 0, count, count, min(nbytes, WIDE), min(offset, WIDE), 0)
    if entries < _WIDE_COUNT and nbytes < WIDE and offset < WIDE:
        return narrow
    wide = END64.pack(b"PK\x06\x06", END64.size - 12, _MADE_BY, _NEEDS_WIDE, 0, 0, entries, entries, nbytes, offset)
    return wide + END64_LOCATOR.pack(b"PK\x06\x07", 0, offset + nbytes, 1) + narrow


# -- the pickle of an archive ------------------------------------------------------------------------------------------

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
    """The pickle of `value`, plain values and records; `storage_key` names the member that holds a storage's bytes.

    The inverse of `read_pickle` and of `TensorCalls`: protocol 2, as torch.save writes (torch/serialization.py, 2.13).
    Classes are named, never imported. What is shared in the tree is shared in the pickle.

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
        """A value that the memo knows afterwards: one that may contain itself before its content is written."""
        if isinstance(value, list):
            self.put(b"]")
            self._remember(id(value))
            self._appends(value)
        elif isinstance(value, dict):
            self._dict(value)
        elif isinstance(value, ObjectRecord):
            self._object(value)
        else:
            self._immutable(value)
            self._remember(id(value))

    def _immutable(self, value: object) -> None:
        if isinstance(value, TensorRecord):
            self._tensor(value)
        elif isinstance(value, StorageRecord):
            self._storage(value)
        elif isinstance(value, SizeRecord):
            self._call("torch", "Size", (tuple(value),))
        elif isinstance(value, tuple):
            self._tuple(value)
        elif (call := _plain_call(value)) is not None:
            self._call(*call)
        else:
            raise UnsupportedLayout(f"a value of type {type(value).__name__} cannot be written into a torch file")

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
        shape, stride = tuple(value.shape), tuple(value.stride)
        view = (value.storage, value.element_offset, shape, stride, value.requires_grad, hooks)
        if value.dtype is value.storage.dtype and value.dtype in STORAGES:
            self._call("torch._utils", "_rebuild_tensor_v2", view)
        else:
            dtype = GlobalName(module="torch", name=value.dtype.label)
            self._call("torch._utils", "_rebuild_tensor_v3", (*view, dtype))

    def _storage(self, value: StorageRecord) -> None:
        kind = STORAGES.get(value.dtype)
        module = "torch" if kind else "torch.storage"
        cls = GlobalName(module=module, name=kind or "UntypedStorage")
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
