"""One tensor of a file, read whole: for what is not row-major, or not worth a plan."""

from __future__ import annotations

import torch

from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import raise_faults
from ds_reshard.execution.buffers import tensor_from_bytes
from ds_reshard.execution.checksums import read_again
from ds_reshard.model.index import Record
from ds_reshard.model.records import TensorRecord


def read_tensor(record: TensorRecord) -> torch.Tensor:
    """One tensor, whole, in memory of its own; strides as saved."""
    storage = record.storage
    itemsize = record.dtype.itemsize
    if storage.crc32 is not None and record.nbytes != storage.nbytes:
        whole = Record(path=storage.path, byte_offset=storage.byte_offset, nbytes=storage.nbytes, crc32=storage.crc32)
        raise_faults(read_again([whole]), subject=f"reading {storage.path}")
    if record.contiguous:
        with open_archive(storage.path) as archive:
            return tensor_from_bytes(archive.tensor_bytes(record), record.dtype, record.shape)
    flat = TensorRecord(
        storage=storage, dtype=record.dtype, element_offset=0, shape=(storage.nbytes // itemsize,), stride=(1,)
    )
    with open_archive(storage.path) as archive:
        values = tensor_from_bytes(archive.tensor_bytes(flat), record.dtype, flat.shape)
    return torch.as_strided(values, record.shape, record.stride, record.element_offset)
