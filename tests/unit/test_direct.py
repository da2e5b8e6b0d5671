"""Chunks that go straight to the device: only where nobody sums them, only where that is faster, and the same bytes."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from ds_reshard.execution import cuda, direct
from ds_reshard.execution.buffers import TensorTarget, memory_of
from ds_reshard.execution.cuda import CudaExecutor
from ds_reshard.execution.device import CudaDevice
from ds_reshard.execution.direct import KvikioFiles
from ds_reshard.model.codec import ElementType
from ds_reshard.planning.plan import Copy, Plan
from ds_reshard.testing import ExecutorSuite
from ds_reshard.testing.late_device import LateDevice
from ds_reshard.testing.recorded import open_files, write_record

FP32 = ElementType.FLOAT32
NUMEL = 200_000


class Double:
    """A synthetic DirectFiles: reads into host memory, which is that of a LateDevice; the call `failing` fails."""

    def __init__(self, *, delay_s=0.0, failing=None, how="raises"):
        self.delay_s, self.failing, self.how = delay_s, failing, how
        self.calls = self.closed = 0
        self._lock = threading.Lock()

    def read(self, path, into, byte_offset):
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
        time.sleep(self.delay_s)
        fd = os.open(path, os.O_RDONLY)
        try:
            got = os.pread(fd, into.nbytes, byte_offset)
        finally:
            os.close(fd)
        if number == self.failing:
            into.fill_(0x5A)
            if self.how == "raises":
                raise RuntimeError("cuFile driver error")
            return into.nbytes - 1
        memory_of(into)[: len(got)] = got
        return len(got)

    def close(self):
        self.closed += 1


class TestStraightToALateDevice(ExecutorSuite):
    def make(self, *, threads, memory_nbytes, checksum):
        device = LateDevice(direct_files=Double())
        return CudaExecutor(threads=threads, memory_nbytes=memory_nbytes, checksum=checksum, device=device)


def model(tmp_path):
    """A plan of pieces of one file in another order, some of them cast, and what it is to make."""
    saved = torch.randn(NUMEL, generator=torch.Generator().manual_seed(3))
    record = write_record(str(tmp_path), "file", saved.numpy().tobytes())
    copies, wanted = [], torch.zeros(NUMEL, dtype=torch.bfloat16)
    for number, first in enumerate(range(0, NUMEL, 1000)):
        to = (first + 5000) % NUMEL
        numel = 1000 - number % 3
        copies.append(Copy(record, record.byte_offset + 4 * first, numel, FP32, "a", to, ElementType.BFLOAT16))
        wanted[to : to + numel] = saved[first : first + numel].bfloat16()
    return Plan(copies=tuple(copies)), wanted


def load(plan, files, *, checksum=False, saw=None, threads=2):
    target = TensorTarget(torch.zeros(NUMEL, dtype=torch.bfloat16))
    device = LateDevice(direct_files=files)
    executor = CudaExecutor(threads=threads, memory_nbytes=16 << 10, checksum=checksum, saw=saw, device=device)
    before = open_files()
    outcome = executor.execute(plan, {"a": target})
    assert open_files() == before and device.left == 0
    return target.tensor, outcome


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kvikio_brings_the_same_bits_to_a_gpu(tmp_path):
    """With GPUDirect Storage, or with what kvikio does without it."""
    pytest.importorskip("kvikio")
    plan, wanted = model(tmp_path)
    target = TensorTarget(torch.zeros(NUMEL, dtype=torch.bfloat16, device="cuda"))
    outcome = CudaExecutor(threads=2, memory_nbytes=16 << 10, checksum=False).execute(plan, {"a": target})
    assert outcome.faults == [] and torch.equal(target.tensor.cpu(), wanted)


def test_what_is_summed_on_the_host_does_not_go_past_it(tmp_path):
    plan, wanted = model(tmp_path)
    for given in ({"checksum": True}, {"saw": lambda copies, data: None}):
        files = Double()
        found, _ = load(plan, files, **given)
        assert torch.equal(found, wanted) and files.calls == 0


def test_the_slower_way_is_left_after_a_few_chunks(tmp_path, monkeypatch):
    """Both are tried; the bytes are the same, and all of them are counted."""
    plan, wanted = model(tmp_path)
    slow = Double(delay_s=0.05)
    found, outcome = load(plan, slow, threads=1)
    assert torch.equal(found, wanted) and outcome.bytes_read == plan.nbytes and outcome.faults == []
    assert direct._TRIED <= slow.calls < outcome.read_calls // 8 and slow.closed == 1

    reading = os.preadv

    def slowly(*arguments):
        time.sleep(0.05)
        return reading(*arguments)

    monkeypatch.setattr(cuda.os, "preadv", slowly)
    fast = Double()
    found, outcome = load(plan, fast, threads=1)
    assert torch.equal(found, wanted) and outcome.bytes_read == plan.nbytes
    assert fast.calls > outcome.read_calls * 7 // 8


@pytest.mark.parametrize("how", ["raises", "falls short"])
@pytest.mark.parametrize("failing", [0, 3])
def test_what_cannot_be_read_there_is_read_by_the_host(tmp_path, failing, how):
    """Silently, as nothing was lost: that chunk and all that follow."""
    plan, wanted = model(tmp_path)
    files = Double(failing=failing, how=how)
    found, outcome = load(plan, files, threads=1)
    assert torch.equal(found, wanted) and outcome.faults == [] and outcome.bytes_read == plan.nbytes
    assert files.calls == failing + 1 and files.closed == 1


def test_a_file_that_ends_early_is_told_by_the_host(tmp_path):
    plan, _ = model(tmp_path)
    os.truncate(plan.copies[0].path, os.path.getsize(plan.copies[0].path) // 2)
    _, outcome = load(plan, Double())
    assert {fault.error for fault in outcome.faults} == {"CheckpointDamaged"}


class CuFile:
    """Synthetic: what is used of kvikio's class."""

    opened: ClassVar[list[CuFile]] = []

    def __init__(self, path):
        self.path, self.closed = path, False
        CuFile.opened.append(self)

    def raw_read(self, buf, size, file_offset):
        got = Path(self.path).read_bytes()[file_offset : file_offset + size]
        memory_of(buf)[: len(got)] = got
        return len(got)

    def close(self):
        self.closed = True


def test_kvikio_opens_a_file_once_a_thread_and_closes_it(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() * 1000)
    monkeypatch.setitem(sys.modules, "kvikio", SimpleNamespace(CuFile=CuFile))
    CuFile.opened = []
    files = CudaDevice(0).direct()
    assert isinstance(files, KvikioFiles)
    into = torch.zeros(10, dtype=torch.uint8)
    assert files.read(str(tmp_path / "a"), into, 5) == 10 and bytes(into.tolist()) == b"a" * 10
    assert files.read(str(tmp_path / "a"), into, 995) == 5
    assert files.read(str(tmp_path / "b"), into, 0) == 10 and bytes(into.tolist()) == b"b" * 10
    assert [os.path.basename(one.path) for one in CuFile.opened] == ["a", "b"]
    assert [one.closed for one in CuFile.opened] == [True, False]
    files.close()
    assert CuFile.opened[1].closed


def test_without_kvikio_there_is_no_such_way(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert CudaDevice(0).direct() is None
