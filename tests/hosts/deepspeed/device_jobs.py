"""Jobs about loads whose buffers lie on a device: one that does everything as late as it may, in memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from cases import Model, Run
from fingerprint_jobs import load_proved

HELD: dict[str, Callable[[torch.Tensor], bool]] = {
    "all": lambda tensor: True,
    "weights": lambda tensor: tensor.dtype is not torch.float32,
}


def load_there(run: Run, model: Model, folder: str, held: str, harm: str = "") -> dict[str, Any]:
    """`load_proved`, with the buffers of a kind on the device; that of the last rank may have no memory, or fail."""
    from ds_reshard.execution import cuda
    from ds_reshard.testing.late_device import LateDevice

    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    memory = {"memory_nbytes": 1000} if harm == "no memory" and last else {}
    device = LateDevice(holds=HELD[held], **memory)

    def failing(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    deal = failing if harm == "kernel" and last else cuda.deal
    with mock.patch.object(cuda, "gpu_of", lambda targets: device), mock.patch.object(cuda, "deal", deal):
        told = load_proved(run, model, folder)
    return {**told, "scratch_nbytes": device.scratch_nbytes}
