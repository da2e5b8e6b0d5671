"""One tensor of a file, read whole: for what is not row-major, or not worth a plan."""

from __future__ import annotations

import torch

from ds_reshard.containers.crc import crc32
from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.errors import raise_faults
from ds_reshard.execution.buffers import tensor_from_bytes
from ds_reshard.execution.checksums import mismatch, read_again
from ds_reshard.model.index import Record
from ds_reshard.model.records import TensorRecord


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
    file = PositionedFile(storage.path)
    try:
        data = file.read(tensor.byte_offset, tensor.nbytes)
    finally:
        file.close()
    if record.crc32 is not None and tensor.nbytes != record.nbytes:
        raise_faults(read_again([record]), subject=f"reading {storage.path}")
    elif record.crc32 is not None and (found := crc32(data)) != record.crc32:
        raise_faults([mismatch(record, found)], subject=f"reading {storage.path}")
    return data
