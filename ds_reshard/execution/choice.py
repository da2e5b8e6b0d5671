"""Which executor fills a rank's buffers: that of the GPU they lie on, or that of the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ds_reshard.errors import ConfigError, Fault, raise_faults
from ds_reshard.execution.buffers import TensorTarget
from ds_reshard.execution.chunks import Named
from ds_reshard.execution.cuda import CudaExecutor, SawThere
from ds_reshard.execution.device import CudaDevice, Device
from ds_reshard.execution.ports import Executor, Saw
from ds_reshard.execution.threads import ThreadExecutor


def choose(
    device: str,
    targets: Mapping[str, TensorTarget],
    *,
    threads: int,
    memory_nbytes: int,
    checksum: bool,
    saw: Saw | None = None,
    saw_there: SawThere | None = None,
    named: Named | None = None,
) -> Executor:
    """An executor for these targets; with "auto" and "cuda" that of a GPU, if some of them lie on one.

    With "cpu" bytes for a GPU are cast on the host, and copied from memory that is not pinned.
    """
    gpu = gpu_of(targets) if device != "cpu" else None
    if gpu is None:
        return ThreadExecutor(threads=threads, memory_nbytes=memory_nbytes, checksum=checksum, saw=saw)
    return CudaExecutor(
        threads=threads,
        memory_nbytes=memory_nbytes,
        checksum=checksum,
        saw=saw,
        saw_there=saw_there,
        device=gpu,
        named=named,
    )


def gpu_of(targets: Mapping[str, TensorTarget]) -> Device | None:
    """The GPU that the targets lie on; the first, where there are several: the host's executor fills the others."""
    for target in targets.values():
        if target.tensor.device.type == "cuda":
            return CudaDevice(target.tensor.device.index)
    return None


def offline_device(device: str) -> torch.device | None:
    """The GPU that a tool without an engine computes on: that of "cuda" alone; None is the host.

    Raises ConfigError for "cuda" where there is none. Bytes of a file are summed on the host whatever is asked for.
    """
    raise_faults(device_faults("--device", device), subject=f"--device {device}")
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None


def device_faults(where: str, device: str) -> Iterator[Fault]:
    """What is wrong with a `device` that was asked for by name: "cuda" where there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        yield ConfigError.fault(
            where,
            "asks for a CUDA device, and this process has none",
            "torch.cuda.is_available()",
            f"torch {torch.__version__}, {built}",
            mend=f'set {where} to "auto", which uses a GPU where there is one, or run where torch sees one',
        )
