"""A load plan whose every obstacle is named at once; torch's own stops at the first."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from ds_reshard.errors import Fault, raise_faults


class LoadPlanner(DefaultLoadPlanner):
    """torch's `DefaultLoadPlanner`, of any storage, that raises ModelMismatch with all missing keys and other shapes.

    With `allow_partial_load` missing keys are left as they are, and other shapes are still an error.
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
                yield Fault(
                    error="ModelMismatch", where=key, what="is asked for, and the checkpoint has no such key",
                    mend="leave it out of the state dict, or LoadPlanner(allow_partial_load=True) to keep it",
                )  # fmt: skip
            size = getattr(value, "size", None)
            if isinstance(told, TensorStorageMetadata) and callable(size) and told.size != size():
                yield Fault(
                    error="ModelMismatch", where=key, what="has another shape in the checkpoint",
                    expected=str(list(size())), found=str(list(told.size)), mend="build the model that was saved",
                )  # fmt: skip
