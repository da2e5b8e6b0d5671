"""The tensors of one load: where their bytes lie, and the reading of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ds_reshard.errors import Fault, ModelMismatch
from ds_reshard.execution.buffers import TensorTarget, element_type, tensor_from_bytes
from ds_reshard.execution.checksums import PartialSum, partial_sums, settle
from ds_reshard.execution.choice import choose
from ds_reshard.execution.ports import Outcome
from ds_reshard.hosts.dcp.names import Single, Stored
from ds_reshard.model.facts import ScalarTensor
from ds_reshard.model.index import Index
from ds_reshard.model.region import Box, box_region
from ds_reshard.planning.coalesce import coalesce
from ds_reshard.planning.plan import Copy, Plan

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem


class Filling:
    """Collects what is asked for, then reads it; faults of the shards that were opened are in `index.faults`."""

    def __init__(self, index: Index, *, cast: bool) -> None:
        self.index = index
        self.filled: list[tuple[ReadItem, torch.Tensor]] = []
        self._cast = cast
        self._copies: list[Copy] = []
        self._targets: dict[str, TensorTarget] = {}
        self._scattered: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._outcome = Outcome()

    def add(self, item: ReadItem, entry: Stored, tensor: torch.Tensor) -> None:
        """Have `tensor` filled with the box of the entry that the item names; ModelMismatch for another type."""
        dtype = element_type(tensor.dtype)
        if dtype not in entry.sources and not self._cast:
            raise ModelMismatch("", [_other_type(entry, dtype.label)])
        tensor = tensor.detach()
        self.filled.append((item, tensor))
        target = tensor
        if not tensor.is_contiguous():
            target = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._scattered.append((tensor, target))
        buffer = str(len(self._targets))
        self._targets[buffer] = TensorTarget(target)
        key = entry.sources.get(dtype, entry.sources[entry.dtype])
        box = Box(offset=tuple(item.storage_offsets), size=tuple(item.lengths))
        for at, fragment in self.index.locate(key, box_region(entry.shape, box)):
            extent = fragment.extent
            self._copies.append(
                Copy(
                    record=extent.record,
                    byte_offset=extent.byte_offset,
                    numel=extent.numel,
                    dtype=extent.dtype,
                    buffer=buffer,
                    element_offset=at,
                    target_dtype=dtype,
                )
            )

    def execute(self, *, threads: int, memory_nbytes: int) -> int:
        """Read every byte once; how many they were."""
        executor = choose("auto", self._targets, threads=threads, memory_nbytes=memory_nbytes, checksum=True)
        self._outcome = executor.execute(Plan(copies=coalesce(self._copies)), self._targets)
        for tensor, target in self._scattered:
            tensor.copy_(target)
        return self._outcome.bytes_read

    def checked(self) -> tuple[list[Fault], list[PartialSum]]:
        """The faults of reading, and of records that were read whole; the sums of those that were read in part."""
        pending, faults = settle(partial_sums(self._outcome))
        return [*self._outcome.faults, *faults], pending


def single(entry: Single, dtype: torch.dtype, *, cast: bool) -> torch.Tensor:
    """The value in that type; ModelMismatch where the type cannot hold it, unless it may be `cast`."""
    value = entry.value
    saved = tensor_from_bytes(value.data, value.dtype, ()) if isinstance(value, ScalarTensor) else torch.tensor(value)
    found = saved.to(dtype)
    if not cast and not torch.allclose(found.to(saved.dtype), saved, rtol=0, atol=0, equal_nan=True):
        raise ModelMismatch("", [_other_type(entry, str(dtype))])
    return found


def _other_type(entry: Stored | Single, dtype: str) -> Fault:
    saved = ", ".join(one.label for one in entry.sources) if isinstance(entry, Stored) else "its value exactly"
    return ModelMismatch.fault(
        ".".join(map(str, entry.path)),
        "the target is of a type that was not saved",
        saved,
        dtype.removeprefix("torch."),
        mend="build the model in a type that was saved, or ds_reshard.dcp.Reader(path, cast=True)",
    )
