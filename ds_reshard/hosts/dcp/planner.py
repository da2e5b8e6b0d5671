"""A load plan whose every obstacle is named at once; torch's own stops at the first."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ds_reshard.errors import Fault, ModelMismatch, raise_faults


class LoadPlanner(DefaultLoadPlanner):
    """torch's `DefaultLoadPlanner`, of any storage, that raises ModelMismatch with all missing keys and other shapes.

    With `allow_partial_load` missing keys are left as they are, and other shapes are still an error; so is a DTensor of
    which a rank holds another part than its mesh says.
    """

    def create_local_plan(self) -> LoadPlan:
        raise_faults(list(self._faults()), subject="torch.distributed.checkpoint")
        return super().create_local_plan()

    def _faults(self) -> Iterator[Fault]:
        assert self.metadata is not None, "torch gives the metadata before it asks for a plan"
        saved = self.metadata.state_dict_metadata
        for key, value in self.state_dict.items():
            told = saved.get(key)
            if told is None and not self.allow_partial_load:
                yield ModelMismatch.fault(
                    key,
                    "is asked for, and the checkpoint has no such key",
                    mend="leave it out of the state dict, or LoadPlanner(allow_partial_load=True) to keep it",
                )
            size = getattr(value, "size", None)
            if isinstance(told, TensorStorageMetadata) and callable(size) and told.size != size():
                yield ModelMismatch.fault(
                    key,
                    "has another shape in the checkpoint",
                    str(list(size())),
                    str(list(told.size)),
                    mend="build the model that was saved",
                )
            yield from off_mesh(key, value)


def off_mesh(key: str, value: object) -> Iterator[Fault]:
    """A DTensor's part of another shape than torch cuts for this rank of the mesh, where it has elements."""
    if not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is None:
        return
    expected = tuple(compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)[0])
    found = tuple(value.to_local().shape)
    if found != expected and prod(found) + prod(expected):
        yield ModelMismatch.fault(
            key,
            "is held in another shape than its mesh says",
            str(list(expected)),
            str(list(found)),
            mend="make it with fully_shard or distribute_tensor on the mesh of this run",
        )
