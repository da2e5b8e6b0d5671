"""`torch.distributed.checkpoint.load(state_dict, storage_reader=Reader(path), planner=LoadPlanner())`."""

from __future__ import annotations

try:
    from ds_reshard.hosts.dcp.reader import LoadPlanner, Reader
except ImportError as error:
    raise ImportError(f"ds_reshard.dcp needs torch 2.5 or later ({error}): pip install 'torch>=2.5'") from error

__all__ = ["LoadPlanner", "Reader"]
