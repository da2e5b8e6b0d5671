"""Where the ranks of tests hold their tensors: on the CPU over gloo, or (`TEST_DEVICE=cuda`) on a GPU over NCCL.

All ranks share the one device. NCCL refuses two of one node on it, so `NCCL_HOSTID` makes each rank a node of its own.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

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


def share_gloo_device() -> None:
    """Let all groups of a process have one gloo device: the thread of each wakes up a hundred times a second.

    Called before a fork: each process makes its own with its first group.
    """
    from torch.distributed import ProcessGroupGloo

    make = ProcessGroupGloo.__init__
    shared = functools.cache(functools.partial(ProcessGroupGloo.create_device, interface="lo"))

    def init(self: Any, store: Any, rank: int, size: int, options: Any = None, **timeout: Any) -> None:
        if options is None:
            options = ProcessGroupGloo._Options()
            options._devices, options._threads = [shared()], 2
            options._timeout = timeout.get("timeout", options._timeout)
        make(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = init
