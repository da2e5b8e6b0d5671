"""Element types, and inert records of the names, objects, storages and tensors in pickles; nothing is imported."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from math import prod


class ElementType(enum.Enum):
    """An element type of a tensor as torch names it; the value is (name, bytes per element)."""

    FLOAT64 = ("float64", 8)
    FLOAT32 = ("float32", 4)
    FLOAT16 = ("float16", 2)
    BFLOAT16 = ("bfloat16", 2)
    FLOAT8_E4M3FN = ("float8_e4m3fn", 1)
    FLOAT8_E5M2 = ("float8_e5m2", 1)
    FLOAT8_E4M3FNUZ = ("float8_e4m3fnuz", 1)
    FLOAT8_E5M2FNUZ = ("float8_e5m2fnuz", 1)
    COMPLEX64 = ("complex64", 8)
    COMPLEX128 = ("complex128", 16)
    INT64 = ("int64", 8)
    INT32 = ("int32", 4)
    INT16 = ("int16", 2)
    INT8 = ("int8", 1)
    UINT8 = ("uint8", 1)
    UINT16 = ("uint16", 2)
    UINT32 = ("uint32", 4)
    UINT64 = ("uint64", 8)
    BOOL = ("bool", 1)

    def __init__(self, label: str, itemsize: int) -> None:
        self.label = label
        self.itemsize = itemsize

    @property
    def is_floating(self) -> bool:
        return "float" in self.label

    @classmethod
    def named(cls, label: str) -> ElementType:
        """Return the type that torch calls `label`, for example "bfloat16"; KeyError if there is none."""
        return _BY_LABEL[label]

    @classmethod
    def is_named(cls, label: str) -> bool:
        return label in _BY_LABEL


_BY_LABEL = {member.label: member for member in ElementType}


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalName:
    """A class or function that a pickle names; never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True, kw_only=True)
class ObjectRecord:
    """An object that a pickle builds: the callable, its arguments, and the state and items set on the result.

    It is mutable because pickles build objects in steps (state and items come after the call).
    """

    callable: GlobalName
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    by_new: bool = False
    state: object = None
    has_state: bool = False
    items: list[object] = field(default_factory=list)
    pairs: list[tuple[object, object]] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{self.callable}>"


class SizeRecord(tuple[int, ...]):
    """A `torch.Size`: a tuple of a class of its own, so that it can be rebuilt as a `torch.Size`."""

    __slots__ = ()


@dataclass(slots=True, unsafe_hash=True)
class StorageRecord:
    """A flat storage of `numel` elements, and where its bytes lie in a file; never changed, and made at half the cost.

    `byte_offset` and `nbytes` are those of its record in the file; `crc32` is the record's checksum in the archive's
    directory, None if the writer recorded none.
    """

    path: str
    key: str
    dtype: ElementType
    numel: int
    byte_offset: int
    nbytes: int
    crc32: int | None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as a call: the default of slotted dataclasses is slower, and there may be many records."""
        return StorageRecord, (self.path, self.key, self.dtype, self.numel, self.byte_offset, self.nbytes, self.crc32)


@dataclass(slots=True, unsafe_hash=True)
class TensorRecord:
    """A tensor as a view of a storage: `element_offset`, `shape` and `stride` count elements; never changed."""

    storage: StorageRecord
    dtype: ElementType
    element_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.storage, self.dtype, self.element_offset, self.shape, self.stride, self.requires_grad)
        return TensorRecord, fields

    @property
    def numel(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def byte_offset(self) -> int:
        """The offset of the first element in the file."""
        return self.storage.byte_offset + self.element_offset * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """True if the elements lie row-major without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected and self.numel:
                return False
            expected *= size
        return True

    def first_offsets(self, most: int) -> list[int]:
        """Return the offsets of the first `most` elements (row-major order) from the first one, in the storage."""
        offsets = [0] * min(most, self.numel)
        for number in range(len(offsets)):
            rest = number
            for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
                rest, index = divmod(rest, size)
                offsets[number] += index * stride
        return offsets


def new_tensor(buffer: str, shape: tuple[int, ...], dtype: ElementType, *, requires_grad: bool = False) -> TensorRecord:
    """Return a row-major tensor that is still to be written: its storage has the buffer's name as key, and no path."""
    numel = prod(shape)
    storage = StorageRecord(
        path="", key=buffer, dtype=dtype, numel=numel, byte_offset=0, nbytes=numel * dtype.itemsize, crc32=None
    )
    stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return TensorRecord(
        storage=storage, dtype=dtype, element_offset=0, shape=shape, stride=stride, requires_grad=requires_grad
    )
