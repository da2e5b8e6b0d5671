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

    files_opened = 1

    def __init__(self, *, delay_s=0.0, failing=None, how=None):
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
        memory_of(into)[: len(got)] = got
        if number == self.failing:
            into.fill_(0x5A)
            if isinstance(self.how, Exception):
                raise self.how
            return len(got) - (self.how == "falls short")
        return len(got)

    def close(self):
        self.closed += 1
        raise RuntimeError("cuFile cannot be closed")


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


def load(plan, files, *, checksum=False, saw=None, threads=2, device=None):
    target = TensorTarget(torch.zeros(NUMEL, dtype=torch.bfloat16))
    device = device or LateDevice(direct_files=files)
    executor = CudaExecutor(threads=threads, memory_nbytes=16 << 10, checksum=checksum, saw=saw, device=device)
    before = open_files()
    outcome = executor.execute(plan, {"a": target})
    assert open_files() == before and device.left == 0
    return target.tensor, outcome


@pytest.fixture
def slow_host(monkeypatch):
    """The host takes long for its first reads, those of the trial, so that the other way is the better one."""
    reading, left = os.preadv, iter(range(20))

    def slowly(*arguments):
        time.sleep(0.01 if next(left, None) is not None else 0)
        return reading(*arguments)

    monkeypatch.setattr(os, "preadv", slowly)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kvikio_brings_the_same_bits_to_a_gpu(tmp_path, monkeypatch, slow_host):
    """With GPUDirect Storage, or with what kvikio does without it; most of the reads are its own."""
    pytest.importorskip("kvikio", reason="kvikio is not installed")
    plan, wanted = model(tmp_path)
    target = TensorTarget(torch.zeros(NUMEL, dtype=torch.bfloat16, device="cuda"))
    reading, done = KvikioFiles.read, []

    def counted(*given):
        done.append(reading(*given))
        return done[-1]

    monkeypatch.setattr(KvikioFiles, "read", counted)
    outcome = CudaExecutor(threads=2, memory_nbytes=16 << 10, checksum=False).execute(plan, {"a": target})
    assert outcome.faults == [] and torch.equal(target.tensor.cpu(), wanted)
    assert len(done) > outcome.read_calls // 2


def test_what_is_summed_on_the_host_does_not_go_past_it(tmp_path, slow_host):
    plan, wanted = model(tmp_path)
    for given in ({"checksum": True}, {"saw": lambda copies, data: None}):
        files = Double()
        found, _ = load(plan, files, **given, threads=8)
        assert torch.equal(found, wanted) and files.calls == 0


def test_the_slower_way_is_left_after_a_few_chunks(tmp_path):
    plan, wanted = model(tmp_path)
    slow = Double(delay_s=0.02)
    found, outcome = load(plan, slow)
    assert torch.equal(found, wanted) and outcome.bytes_read == plan.nbytes and outcome.faults == []
    assert 0 < slow.calls < outcome.read_calls // 8 and slow.closed == 1


@pytest.mark.parametrize("threads", [1, 4])
def test_the_better_way_brings_all_the_rest(tmp_path, slow_host, threads):
    """The bytes are the same, and all of them are counted, once; those of the trial beside them."""
    plan, wanted = model(tmp_path)
    fast = Double()
    found, outcome = load(plan, fast, threads=threads)
    assert torch.equal(found, wanted) and outcome.bytes_read == plan.nbytes and outcome.faults == []
    assert fast.calls > outcome.read_calls and outcome.files_opened == 1 and fast.closed == 1


FAILURES = [RuntimeError("cuFile driver error"), AttributeError("raw_read"), ArithmeticError(), MemoryError()]


@pytest.mark.parametrize("how", [*FAILURES, "falls short"], ids=str)
@pytest.mark.parametrize("failing", [0, 3, 100])
def test_what_cannot_be_read_there_is_read_by_the_host(tmp_path, slow_host, failing, how):
    """In the trial and behind it: that chunk, with all of its bytes, and all that follow."""
    plan, wanted = model(tmp_path)
    files = Double(failing=failing, how=how)
    found, outcome = load(plan, files, threads=1)
    assert torch.equal(found, wanted) and outcome.faults == [] and outcome.bytes_read == plan.nbytes
    assert files.calls == failing + 1 and files.closed == 1


@pytest.mark.parametrize("failing", [0, 5])
def test_other_bytes_in_the_trial_are_seen(tmp_path, slow_host, failing):
    """A device that says that it has read, and has not, is not relied on."""
    plan, wanted = model(tmp_path)
    files = Double(failing=failing, how="says nothing")
    found, outcome = load(plan, files)
    assert torch.equal(found, wanted) and outcome.faults == [] and 0 < files.calls < 20


class Pending(LateDevice):
    """Scratch memory that the caller's own stream has still to write to: it was the caller's before."""

    def __init__(self, **given):
        super().__init__(**given)
        self.caller = self.stream()

    def scratch(self, nbytes):
        made = super().scratch(nbytes)
        self.caller.run(lambda: made.fill_(0xEE))
        return made

    def given(self):
        return self.caller.record()


def test_work_of_the_caller_is_waited_for(tmp_path, slow_host):
    plan, wanted = model(tmp_path)
    files = Double()
    found, outcome = load(plan, files, device=Pending(direct_files=files))
    assert torch.equal(found, wanted) and outcome.faults == [] and files.calls > outcome.read_calls


def test_a_file_that_ends_early_is_told_by_the_host(tmp_path, slow_host):
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
    assert [one.closed for one in CuFile.opened] == [True, False] and files.files_opened == 2
    files.close()
    assert CuFile.opened[1].closed


@pytest.mark.parametrize("found", [None, SimpleNamespace()], ids=["absent", "another kvikio"])
def test_without_kvikio_there_is_no_such_way(monkeypatch, found):
    monkeypatch.setitem(sys.modules, "kvikio", found)
    assert CudaDevice(0).direct() is None
