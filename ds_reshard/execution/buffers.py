"""torch tensors: as targets, as fresh memory for what an engine adopts, and read whole from a file."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from math import prod

import torch

from ds_reshard.containers.crc import crc32
from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.errors import raise_faults
from ds_reshard.execution.checksums import mismatch, read_again
from ds_reshard.model.index import Record
from ds_reshard.model.records import ElementType, TensorRecord

_ADVISE_FROM_NBYTES = 4 << 20


def torch_dtype(dtype: ElementType) -> torch.dtype:
    """The torch type of that name; AttributeError on a torch too old to have it."""
    found = getattr(torch, dtype.label)
    assert isinstance(found, torch.dtype)
    return found


def element_type(dtype: torch.dtype) -> ElementType:
    """The element type of a torch type."""
    return ElementType.named(str(dtype).removeprefix("torch."))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, which must be kept alive as long as they are used."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor in host memory has bytes to look at")
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


class TensorTarget:
    """A torch tensor as a flat, row-major target of `numel` elements.

    Contiguous host memory of the wanted type is written in place; anything else (a device tensor, a
    cast) goes through `store`. The tensor must be contiguous; it is kept alive by this object.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError("a target tensor must be contiguous")
        self.tensor = tensor.detach().view(-1)
        self.dtype = element_type(tensor.dtype)
        self._memory: memoryview | None = None
        if tensor.device.type == "cpu" and tensor.numel():
            self._memory = memory_of(tensor)

    def view(self, element_offset: int, numel: int, dtype: ElementType) -> memoryview | None:
        if element_offset < 0 or element_offset + numel > self.tensor.numel():
            raise IndexError(
                f"elements [{element_offset}, {element_offset + numel}) of a buffer of {self.tensor.numel()}"
            )
        if self._memory is None or dtype is not self.dtype:
            return None
        size = self.dtype.itemsize
        return self._memory[element_offset * size : (element_offset + numel) * size]

    def store(self, element_offset: int, data: memoryview, dtype: ElementType) -> None:
        values = torch.frombuffer(data, dtype=torch_dtype(dtype))
        with torch.no_grad():
            self.tensor[element_offset : element_offset + values.numel()].copy_(values)

    def zero(self, element_offset: int, numel: int) -> None:
        with torch.no_grad():
            self.tensor[element_offset : element_offset + numel].zero_()


def fresh(numel: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """An uninitialised 1-D tensor, its host memory asked to come in huge pages.

    First touch of fresh memory bounds a load; with 4 KiB pages it costs more than the copy. The advice
    is best effort: it changes no bytes, and a kernel without it is only slower.
    """
    tensor = torch.empty(numel, dtype=dtype, device=device)
    nbytes = numel * tensor.element_size()
    if tensor.device.type == "cpu" and nbytes >= _ADVISE_FROM_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        page = mmap.PAGESIZE
        start = -(-tensor.data_ptr() // page) * page
        stop = (tensor.data_ptr() + nbytes) // page * page
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_HUGEPAGE)
    return tensor


def tensor_from_bytes(data: bytes, dtype: ElementType, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of its own memory with these row-major elements."""
    if not prod(shape):
        return torch.empty(shape, dtype=torch_dtype(dtype))
    return torch.frombuffer(bytearray(data), dtype=torch_dtype(dtype)).reshape(shape)


def read_tensor(record: TensorRecord) -> torch.Tensor:
    """One tensor, whole, in memory of its own; strides as saved."""
    if record.contiguous:
        return tensor_from_bytes(_checked_bytes(record), record.dtype, record.shape)
    storage, itemsize = record.storage, record.dtype.itemsize
    flat = TensorRecord(
        storage=storage, dtype=record.dtype, element_offset=0, shape=(storage.nbytes // itemsize,), stride=(1,)
    )
    values = tensor_from_bytes(_checked_bytes(flat), record.dtype, flat.shape)
    return torch.as_strided(values, record.shape, record.stride, record.element_offset)


def _checked_bytes(tensor: TensorRecord) -> bytes:
    """A row-major tensor's bytes, wherever in its file the archive lies; the whole record is compared with its sum."""
    storage = tensor.storage
    record = Record(path=storage.path, byte_offset=storage.byte_offset, nbytes=storage.nbytes, crc32=storage.crc32)
    with PositionedFile(storage.path) as file:
        data = file.read(tensor.byte_offset, tensor.nbytes)
    if record.crc32 is not None and tensor.nbytes != record.nbytes:
        raise_faults(read_again([record]), subject=f"reading {storage.path}")
    elif record.crc32 is not None and (found := crc32(data)) != record.crc32:
        raise_faults([mismatch(record, found)], subject=f"reading {storage.path}")
    return data
