"""`torch.distributed.checkpoint.load(state_dict, storage_reader=ds_reshard.dcp.Reader(path))`."""

from __future__ import annotations

from ds_reshard.hosts.dcp.reader import Reader

__all__ = ["Reader"]
