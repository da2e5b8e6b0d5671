"""The sum of the fingerprint as one kernel: words are read once, and nothing is written but 8 bytes a thread.

It is compiled by the NVRTC that comes with torch, through `torch.cuda._compile_kernel` (torch/cuda/__init__.py, 2.13),
which wants CUDA_HOME to be set to some folder.
"""

from __future__ import annotations

from typing import Protocol

import torch

BLOCK_THREADS = 1024
SOURCE = """
extern "C" __global__ void sum_words(
    const int* words, int numel, int block, int inside, const long long* table, long long* sums)
{
    unsigned long long factors[16], total = 0;
    for (int k = 0; k < 16; k++)
        factors[k] = (unsigned long long) table[threadIdx.x + 1024 * k];
    long long blocks = ((long long) inside + numel + 16383) / 16384;
    for (long long b = blockIdx.x; b < blocks; b += gridDim.x) {
        unsigned long long of_block = 0;
        for (int k = 0; k < 16; k++) {
            long long i = b * 16384 + threadIdx.x + 1024 * k - inside;
            if (i >= 0 && i < numel)
                of_block += factors[k] * (unsigned long long) (long long) words[i];
        }
        unsigned long long x = 0x100000000ULL + (unsigned long long) (block + b) + 0x9E3779B97F4A7C15ULL;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
        total += ((x ^ (x >> 31)) | 1) * of_block;
    }
    sums[(long long) blockIdx.x * 1024 + threadIdx.x] = (long long) total;
}
"""


class Kernel(Protocol):
    """A compiled kernel; whole numbers among `args` become C ints."""

    def __call__(
        self, *, grid: tuple[int, int, int], block: tuple[int, int, int], args: list[torch.Tensor | int]
    ) -> None: ...


def compiled(device: torch.device) -> Kernel | None:
    """The kernel for a device; None where this torch cannot compile it there."""
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if device.type != "cuda" or compile_kernel is None:
        return None
    try:
        with torch.cuda.device(device):
            kernel: Kernel = compile_kernel(SOURCE, "sum_words")
    except (RuntimeError, OSError):
        return None
    return kernel
