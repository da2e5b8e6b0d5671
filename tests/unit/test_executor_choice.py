"""Which executor fills which buffers."""

from __future__ import annotations

import pytest
import torch

from ds_reshard.errors import ConfigError, raise_faults
from ds_reshard.execution import cuda
from ds_reshard.execution.buffers import TensorTarget
from ds_reshard.execution.cuda import CudaExecutor, choose, device_faults
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.testing.late_device import LateDevice

LIMITS = {"threads": 1, "memory_nbytes": 1 << 20, "checksum": True}
HOST = {"a": TensorTarget(torch.zeros(3))}


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_host_memory_is_filled_by_the_host(device):
    assert type(choose(device, HOST, **LIMITS)) is ThreadExecutor


@pytest.mark.parametrize(("device", "executor"), [("auto", CudaExecutor), ("cpu", ThreadExecutor)])
def test_memory_of_a_gpu_is_filled_by_the_gpu_unless_cpu_is_asked_for(monkeypatch, device, executor):
    monkeypatch.setattr(cuda, "gpu_of", lambda targets: LateDevice())
    assert type(choose(device, HOST, **LIMITS)) is executor


def test_cuda_without_a_gpu_is_a_named_error(monkeypatch):
    """Only where it was asked for by name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [list(device_faults("reshard.device", device)) for device in ("auto", "cpu")] == [[], []]
    with pytest.raises(ConfigError, match=r"asks for a CUDA device, and this process has none.*found torch "):
        raise_faults(device_faults("reshard.device", "cuda"), subject="DeepSpeed config")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert list(device_faults("reshard.device", "cuda")) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_of_the_buffers_is_found():
    there = {"a": TensorTarget(torch.zeros(3)), "b": TensorTarget(torch.zeros(3, device="cuda"))}
    assert type(choose("cuda", there, **LIMITS)) is CudaExecutor
