"""Where the ranks of tests hold their tensors: on the CPU over gloo, or (`TEST_DEVICE=cuda`) on a GPU over NCCL.

All ranks share the one device. NCCL refuses two of one node on it, so `NCCL_HOSTID` makes each rank a node of its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
BACKEND = "nccl" if DEVICE == "cuda" else "gloo"
# A bucket of DeepSpeed's default size takes 1 GB of a device for each rank.
BUCKETS = {"reduce_bucket_size": 10_000} if DEVICE == "cuda" else {}
_NODES = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MAX_NCHANNELS": "1"}


def device() -> torch.device:
    """This rank's device, with the number that FSDP wants of a GPU."""
    import torch

    return torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What a launcher tells rank `rank` of `size`: one of a node of so many, or alone on its node."""
    own = {"NCCL_HOSTID": f"rank{rank}", **_NODES} if DEVICE == "cuda" else {}
    local, locals_ = (0, 1) if own else (rank, size)
    numbers = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": locals_, "MASTER_PORT": port}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1", **own}
