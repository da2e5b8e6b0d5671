"""What a pickle said, as inert values: nothing here was imported or called to make it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from ds_reshard.model.codec import ElementType


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalName:
    """A class or function that a pickle names; never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True, kw_only=True)
class ObjectRecord:
    """An object that a pickle wanted built: which callable, with what, and what was set on it.

    Mutable because pickles build objects in steps (state and items come after the call).
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
    """A `torch.Size`: a tuple in every respect, told apart so that it comes back as what it was."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRecord:
    """A flat storage: where its bytes lie in the file.

    `byte_offset` and `nbytes` are of the record in the file, `numel` elements of `dtype`; `crc32` is the
    record's checksum in the archive's directory, None when the writer recorded none.
    """

    path: str
    key: str
    dtype: ElementType
    numel: int
    byte_offset: int
    nbytes: int
    crc32: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A tensor as a view of a storage: `element_offset`, `shape` and `stride` count elements of `dtype`."""

    storage: StorageRecord
    dtype: ElementType
    element_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False

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
        """Where the first element lies in the file."""
        return self.storage.byte_offset + self.element_offset * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected and self.numel:
                return False
            expected *= size
        return True

    def first_offsets(self, most: int) -> list[int]:
        """How many elements behind the first the first ones lie, row-major."""
        offsets = [0] * min(most, self.numel)
        for number in range(len(offsets)):
            left = number
            for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
                left, index = divmod(left, size)
                offsets[number] += index * stride
        return offsets


def new_tensor(buffer: str, shape: tuple[int, ...], dtype: ElementType, *, requires_grad: bool = False) -> TensorRecord:
    """A row-major tensor whose bytes will come: its storage has the buffer's name, and no path."""
    numel = prod(shape)
    storage = StorageRecord(
        path="", key=buffer, dtype=dtype, numel=numel, byte_offset=0, nbytes=numel * dtype.itemsize, crc32=None
    )
    stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return TensorRecord(
        storage=storage, dtype=dtype, element_offset=0, shape=shape, stride=stride, requires_grad=requires_grad
    )
