"""The kernel of the fingerprint, compiled for the host: thread by thread it sums what the definition says."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard.execution import factors, word_kernel
from ds_reshard.execution.factors import BLOCK_WORDS, kernel_on, sum_on_device
from ds_reshard.execution.fingerprint import Fingerprints
from ds_reshard.model.layout import TensorKey

HOST = torch.device("cpu")
KEY = TensorKey(name="w", kind="weight")
BIG = random.Random(1).randbytes(4 * (3 * BLOCK_WORDS + 5) + 3)
FRAME = """
struct Index { unsigned x; };
static Index blockIdx, threadIdx, gridDim;
#define __global__
%s
extern "C" void launch(int groups, const int* words, int numel, int block, int inside, const long long* table,
                       long long* sums)
{
    gridDim.x = groups;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < 1024; threadIdx.x++)
            sum_words(words, numel, block, inside, table, sums);
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Called as torch calls a kernel; its threads run one after the other."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernel")
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(FRAME % word_kernel.SOURCE, encoding="utf-8")
    subprocess.run([compiler, "-O1", "-fwrapv", "-shared", "-fPIC", source, "-o", library], check=True)
    launch = ctypes.CDLL(str(library)).launch

    def called(*, grid: tuple[int, ...], block: tuple[int, ...], args: list[Any]) -> None:
        assert block == (1024, 1, 1) and grid[1:] == (1, 1)
        assert all(not isinstance(arg, int) or 0 <= arg < 2**31 for arg in args), "these become C ints"
        launch(grid[0], *(ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in args))

    return called


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a device was found to have is looked for anew."""
    kernel_on.cache_clear()
    yield
    kernel_on.cache_clear()


@settings(deadline=None, max_examples=40)
@given(
    bounds=st.lists(st.integers(0, len(BIG)), min_size=2, max_size=2).map(sorted),
    far=st.sampled_from((0, 2**40)),
    shift=st.integers(0, 4),
    groups=st.sampled_from((1, 2, 512)),
    launch=st.sampled_from((1000, 20_000, 1 << 30)),
)
def test_the_kernel_sums_as_the_host_does(kernel, bounds, far, shift, groups, launch):
    """Any part, any address, any number of thread groups and launches, also far behind the first 2**31 words."""
    start, stop = bounds
    here = Fingerprints()
    here.add(KEY, far + start, BIG[start:stop])
    memory = torch.frombuffer(bytearray(shift) + bytearray(BIG[start:stop]) + b"\0", dtype=torch.uint8)
    with (
        mock.patch.object(factors, "compiled", lambda device: kernel),
        mock.patch.object(factors, "_GROUPS", groups),
        mock.patch.object(factors, "_LAUNCH_WORDS", launch),
    ):
        assert kernel_on(HOST) is kernel
        found = sum_on_device(far + start, memory[shift : shift + stop - start])
    assert int(found) % 2**64 == here[KEY].value


def test_a_kernel_that_sums_otherwise_is_not_used(kernel, monkeypatch):
    def other(*, grid, block, args):
        kernel(grid=grid, block=block, args=args)
        args[-1][0] += 1

    monkeypatch.setattr(factors, "compiled", lambda device: other)
    assert kernel_on(HOST) is None


def test_without_a_compiler_there_is_no_kernel(monkeypatch):
    """A torch that cannot compile, and one without the means to."""

    def failing(source, name):
        raise OSError("CUDA_HOME environment variable is not set")

    there = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", failing, raising=False)
    assert word_kernel.compiled(there) is None
    monkeypatch.delattr(torch.cuda, "_compile_kernel")
    assert word_kernel.compiled(there) is None and word_kernel.compiled(HOST) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_the_kernel():
    """Compiled there, and found to sum as torch's operations do."""
    assert kernel_on(torch.device("cuda", 0)) is not None
