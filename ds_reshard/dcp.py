"""`torch.distributed.checkpoint.load(state_dict, storage_reader=Reader(path), planner=LoadPlanner())`."""

from __future__ import annotations

from ds_reshard.hosts.dcp.reader import LoadPlanner, Reader

__all__ = ["LoadPlanner", "Reader"]
