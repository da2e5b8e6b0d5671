"""The executor for GPUs, on a device that does everything as late as it may; on a real one by `make gpu`."""

from __future__ import annotations

import os
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard.errors import DeviceFailed, raise_faults
from ds_reshard.execution import cuda
from ds_reshard.execution.buffers import TensorTarget, element_type
from ds_reshard.execution.checksums import combine, partial_sums
from ds_reshard.execution.cuda import CudaDevice, CudaExecutor, Slot
from ds_reshard.execution.scatter import ROW_NBYTES, chunks, deal, scattering
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.index import Record
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Rows
from ds_reshard.planning.copies import Copy
from ds_reshard.planning.plan import Check, Plan
from ds_reshard.testing import ExecutorSuite
from ds_reshard.testing.late_device import LateDevice
from ds_reshard.testing.suites import checksum_faults, open_files, write_record

FP32, BF16, FP16, UINT8 = ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.FLOAT16, ElementType.UINT8
QUICK = settings(max_examples=60)
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class TestOnALateDevice(ExecutorSuite):
    def make(self, **limits):
        return CudaExecutor(ThreadExecutor(**limits), LateDevice())


@pytest.mark.gpu
@CUDA
class TestOnAGpu(ExecutorSuite):
    def make(self, **limits):
        return CudaExecutor(ThreadExecutor(**limits), CudaDevice(0))

    def place(self, tensor):
        return TensorTarget(tensor.cuda())

    def bring(self, target):
        return target.tensor.cpu()


class Forgetful(Slot):
    """A slot that is used again before the device is done with it."""

    def wait(self):
        return None


def test_a_slot_that_is_not_waited_for_leaves_other_bytes(tmp_path, monkeypatch):
    """The late device shows what a GPU shows once in a while."""
    plan, target, saved = long_copy(tmp_path, numel=40_000)
    assert loaded(plan, target).faults == [] and torch.equal(target.tensor, saved)
    target.tensor.zero_()
    monkeypatch.setattr(cuda, "Slot", Forgetful)
    loaded(plan, target)
    assert not torch.equal(target.tensor, saved)


def copy(record, first, numel, element_offset, *, dtype=FP32, to=None, buffer="a"):
    return Copy(
        record=record,
        byte_offset=record.byte_offset + first * dtype.itemsize,
        numel=numel,
        dtype=dtype,
        buffer=buffer,
        element_offset=element_offset,
        target_dtype=to or dtype,
    )


def saved_floats(tmp_path, numel):
    saved = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    return saved, write_record(str(tmp_path), "file", saved.numpy().tobytes())


def long_copy(tmp_path, numel):
    saved, record = saved_floats(tmp_path, numel)
    return Plan(copies=(copy(record, 0, numel, 0),)), TensorTarget(torch.zeros(numel)), saved


def loaded(plan, target, *, memory_nbytes=16 << 10, threads=2, device=None, saw=None, **given):
    host = ThreadExecutor(threads=threads, memory_nbytes=memory_nbytes, checksum=True, saw=saw)
    return CudaExecutor(host, device or LateDevice(), **given).execute(plan, {"a": target})


@pytest.mark.parametrize("there", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, CUDA])])
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "planes"), [((600, 64), 1), ((40, 12_000), 1), ((300, 64), 2)], ids=["windows", "far apart", "planes"]
)
def test_rows_of_large_copies_are_dealt_out_by_one_operation(tmp_path, monkeypatch, shape, planes, to, there):
    """What two ranks read of a matrix that they share by columns adds up; no object is made for a row."""
    saved, record = saved_floats(tmp_path, planes * shape[0] * shape[1])
    width, sums, dealt = shape[1] // 2, [], []
    monkeypatch.setattr(cuda, "chunks", None)
    monkeypatch.setattr(cuda, "deal", lambda chunk, how, *more: dealt.append(how) or deal(chunk, how, *more))
    rows = (*[Rows(planes, shape[0] * shape[1], shape[0] * width)] * (planes > 1), Rows(shape[0], shape[1], width))
    for rank in range(2):
        target = TensorTarget(torch.zeros(planes * shape[0] * width, dtype=to, device=there))
        one = copy(record, rank * width, width, 0, to=element_type(to))._replace(rows=rows)
        device = CudaDevice(0) if there == "cuda" else LateDevice()
        outcome = loaded(Plan(copies=(one,)), target, memory_nbytes=256 << 10, device=device)
        wanted = saved.view(planes * shape[0], shape[1])[:, rank * width : (rank + 1) * width].to(to)
        assert torch.equal(target.tensor.cpu().view(wanted.shape), wanted)
        assert (outcome.faults, outcome.bytes_read) == ([], one.nbytes)
        sums.append(partial_sums(outcome))
    assert combine(sums) == ([], set()) and combine(sums[:1])[1] == {record}
    assert all([len(scatter.blocks) for scatter in how.scatters] == [1] and not how.table[0] for how in dealt)


@pytest.mark.parametrize("there", ["device", "host", "both"])
def test_families_of_rows_are_taken_apart_a_portion_at_a_time(tmp_path, monkeypatch, there):
    """Small copies are dealt out together, row by row; all rows at once, as objects, would take too much memory."""
    saved, record = saved_floats(tmp_path, 400)
    rows = (Rows(50, 8, 4),)
    copies = [copy(record, half * 4, 4, 0, buffer=buffer)._replace(rows=rows) for half, buffer in enumerate("ab")]
    targets = {"a": TensorTarget(torch.zeros(200)), "b": TensorTarget(torch.zeros(200))}
    device, taken, given = LateDevice(), [], []
    of_device = {"device": "ab", "host": "", "both": "a"}[there]
    device.holds = lambda tensor: any(tensor is targets[name].tensor for name in of_device)
    monkeypatch.setattr("ds_reshard.planning.copies._PORTION", 7)
    monkeypatch.setattr(cuda, "chunks", lambda runs, *more: taken.append(len(runs)) or chunks(runs, *more))
    host = ThreadExecutor(threads=2, memory_nbytes=1 << 20, checksum=True)
    execute = host.execute
    monkeypatch.setattr(host, "execute", lambda plan, to: given.append(len(plan.copies)) or execute(plan, to))
    outcome = CudaExecutor(host, device).execute(Plan(copies=tuple(copies)), targets)
    assert outcome.faults == []
    wanted = saved.view(50, 8)
    assert torch.equal(targets["a"].tensor, wanted[:, :4].reshape(-1))
    assert torch.equal(targets["b"].tensor, wanted[:, 4:].reshape(-1))
    assert sum(taken) == 50 * len(of_device) and max(taken, default=0) <= 7
    assert given == [2 - len(of_device)]


@pytest.mark.parametrize("how", ["written to", "taken the place of", "removed"])
@pytest.mark.parametrize("there", [True, False], ids=["device", "host"])
def test_a_file_without_checksums_that_changes_is_a_fault(tmp_path, monkeypatch, there, how):
    """As of safetensors: some bytes would be of another save. What is only removed was open, and is read whole."""
    saved, record = saved_floats(tmp_path, 40_000)
    record = record._replace(crc32=None)
    preadv, calls = os.preadv, []

    def changing(*given):
        calls.append(given)
        if len(calls) == 2 and how == "written to":
            with open(record.path, "r+b") as file:
                file.write(bytes(100))
        if len(calls) == 2 and how == "taken the place of":
            os.rename(write_record(str(tmp_path), "other", b"0").path, record.path)
        if len(calls) == 2 and how == "removed":
            os.unlink(record.path)
        return preadv(*given)

    monkeypatch.setattr(os, "preadv", changing)
    plan, target = Plan(copies=(copy(record, 0, 40_000, 0),)), TensorTarget(torch.zeros(40_000))
    host = ThreadExecutor(threads=1, memory_nbytes=16 << 10, checksum=True)
    outcome = (CudaExecutor(host, LateDevice()) if there else host).execute(plan, {"a": target})
    assert len(calls) > 2
    expected = [] if how == "removed" else ["has changed while it was read"]
    assert [fault.what for fault in outcome.faults] == expected
    assert how != "removed" or torch.equal(target.tensor, saved)


def test_pinned_and_scratch_memory_stay_within_the_budget(tmp_path):
    """The ring is no larger than `memory_nbytes`, on both sides, and nothing of it stays."""
    plan, target, saved = long_copy(tmp_path, numel=100_000)
    for threads, memory_nbytes in ((1, 8 << 10), (4, 200_000), (8, 4096), (3, 64 << 20)):
        device = LateDevice()
        target.tensor.zero_()
        assert loaded(plan, target, threads=threads, memory_nbytes=memory_nbytes, device=device).faults == []
        assert 0 < device.pinned_nbytes <= memory_nbytes
        assert 0 < device.scratch_nbytes <= memory_nbytes
        assert device.free_nbytes() == 1 << 62
        assert torch.equal(target.tensor, saved)


def test_a_device_with_little_memory_gets_smaller_chunks(tmp_path):
    """A ring of 128 KiB is brought down to what 40,000 bytes hold; the bytes are the same."""
    plan, target, saved = long_copy(tmp_path, numel=100_000)
    device = LateDevice(memory_nbytes=40_000)
    assert loaded(plan, target, memory_nbytes=128 << 10, device=device).faults == []
    assert 0 < device.scratch_nbytes <= 40_000
    assert torch.equal(target.tensor, saved)


def test_rows_at_steps_that_are_no_multiple_of_their_width(tmp_path):
    """Rows of four elements, six apart: copied in units of two, however wide a row is."""
    saved, record = saved_floats(tmp_path, 12)
    target = TensorTarget(torch.zeros(18))
    copies = tuple(copy(record, 4 * row, 4, 6 * row) for row in range(3))
    assert loaded(Plan(copies=copies), target).faults == []
    assert torch.equal(target.tensor.view(3, 6)[:, :4], saved.view(3, 4))
    assert not target.tensor.view(3, 6)[:, 4:].any()


def test_a_device_without_memory_is_a_fault_with_figures(tmp_path):
    """Nothing is moved, no file stays open, and the fault says how much was asked for and how much there is."""
    plan, target, _ = long_copy(tmp_path, numel=1000)
    before = open_files()
    (fault,) = loaded(plan, target, device=LateDevice(memory_nbytes=5000)).faults
    assert (fault.error, fault.expected, fault.found) == (
        "DeviceFailed",
        "16384 bytes of each, in small pieces",
        "5000 bytes free on the device",
    )
    assert not target.tensor.any() and open_files() == before
    with pytest.raises(DeviceFailed, match=re.escape('load with "reshard": {"device": "cpu"}')):
        raise_faults([fault], subject="loading checkpoint")


def test_work_that_finds_no_memory_is_given_again_in_smaller_pieces(tmp_path):
    """One refusal is made good; more of them are a fault that names buffer, elements and file."""
    plan, target, saved = long_copy(tmp_path, numel=1000)
    for refused, faults in ((1, 0), (3, 1)):
        target.tensor.zero_()
        device = Refusing(refused)
        found = loaded(plan, target, device=device, threads=1).faults
        assert len(found) == faults
        assert torch.equal(target.tensor, saved) is not bool(faults)
    assert device.left == 0, "memory is given back that the device is still to write to"
    assert found[0].where == plan.copies[0].path
    assert found[0].what.startswith("the device failed at a elements [0, 1000): tried to allocate")


class Refusing(LateDevice):
    """The second stream, which deals out, has no memory for an index, so many times."""

    def __init__(self, times):
        super().__init__()
        self.times = times
        self.streams = 0

    def stream(self):
        made = super().stream()
        self.streams += 1
        if self.streams == 2:
            run = made.run

            def refusing(work):
                if self.times:
                    self.times -= 1
                    raise torch.cuda.OutOfMemoryError("tried to allocate 32 MiB")
                run(work)

            made.run = refusing
        return made


def test_a_failure_of_the_device_names_buffer_and_elements_and_ends_the_load(tmp_path, monkeypatch):
    """It shows when the work is waited for; later chunks are not read."""

    def failing(chunk, how, table, targets):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    plan, target, _ = long_copy(tmp_path, numel=100_000)
    monkeypatch.setattr(cuda, "deal", failing)
    before = open_files()
    outcome = loaded(plan, target)
    (fault,) = outcome.faults
    assert fault.error == "DeviceFailed" and fault.where == plan.copies[0].path
    assert "CUDA error: an illegal memory access was encountered" in fault.what and "Compile" not in fault.what
    assert re.search(r"a elements \[\d+, \d+\)", fault.what), fault.what  # whichever chunk was waited for first
    assert outcome.bytes_read < plan.nbytes // 4 and open_files() == before


@pytest.mark.gpu
@CUDA
def test_a_gpu_without_memory_is_a_fault_and_takes_loads_again(tmp_path):
    """All but 1 MiB of the device is in use: smaller chunks or a fault; freed, the same load ends well."""
    plan, _, saved = long_copy(tmp_path, numel=1 << 20)
    target = TensorTarget(torch.zeros(1 << 20, device="cuda"))
    kept = []
    for exponent in range(40, 19, -1):
        try:
            while True:
                kept.append(torch.empty(1 << exponent, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            continue
    faults = loaded(plan, target, memory_nbytes=64 << 20, device=CudaDevice(0)).faults
    assert {fault.error for fault in faults} <= {"DeviceFailed"}
    assert faults or torch.equal(target.tensor.cpu(), saved)
    kept.clear()
    torch.cuda.empty_cache()
    assert loaded(plan, target, memory_nbytes=64 << 20, device=CudaDevice(0)).faults == []
    assert torch.equal(target.tensor.cpu(), saved)


def test_host_buffers_and_checks_are_left_to_the_host(tmp_path):
    """A plan for buffers of both kinds fills both; each byte is read and summed once."""
    saved, record = saved_floats(tmp_path, 9000)
    host, there = torch.zeros(3000), torch.zeros(5000, dtype=torch.bfloat16)
    plan = Plan(
        copies=(copy(record, 0, 5000, 0, to=BF16), copy(record, 5000, 3000, 0, buffer="host")),
        checks=(Check(record=record, byte_offset=record.byte_offset + 32000, nbytes=4000),),
    )
    device = LateDevice(holds=lambda tensor: tensor.data_ptr() == there.data_ptr())
    executor = CudaExecutor(ThreadExecutor(threads=2, memory_nbytes=8 << 10, checksum=True), device)
    outcome = executor.execute(plan, {"a": TensorTarget(there), "host": TensorTarget(host)})
    assert outcome.faults == checksum_faults([outcome]) == []
    assert outcome.bytes_read == record.nbytes and device.scratch_nbytes
    assert torch.equal(there, saved[:5000].bfloat16()) and torch.equal(host, saved[5000:8000])


@pytest.mark.parametrize(
    ("numel", "to", "there"),
    [(1000, FP32, False), (300_000, FP32, True), (1000, BF16, True)],
    ids=["small", "large", "cast"],
)
def test_what_was_read_is_shown_once(tmp_path, numel, to, there):
    """`saw` gets every byte at its place: small copies in host memory, large ones and casts where they were brought."""
    saved, record = saved_floats(tmp_path, numel)
    target = TensorTarget(torch.zeros(numel, dtype=getattr(torch, to.label)))
    seen, kinds = torch.zeros(numel), set()

    def note(parts, values, kind):
        kinds.add(kind)
        for part, value in zip(parts, values, strict=True):
            at = part.element_offset
            assert not seen[at : at + part.numel].any()
            seen[at : at + part.numel] = value

    def saw(parts, views):
        note(parts, [torch.frombuffer(view, dtype=torch.float32) for view in views], "here")

    def saw_there(parts, tensors):
        note(parts, [tensor.view(torch.float32) for tensor in tensors], "there")

    plan = Plan(copies=(copy(record, 0, numel, 0, to=to),))
    assert loaded(plan, target, memory_nbytes=8 << 20, saw=saw, saw_there=saw_there).faults == []
    assert torch.equal(seen, saved) and torch.equal(target.tensor, saved.to(target.tensor.dtype))
    assert ("there" in kinds) is there
    seen.zero_()
    kinds.clear()
    assert loaded(plan, target, memory_nbytes=8 << 20, saw=saw).faults == []
    assert torch.equal(seen, saved) and kinds == {"here"}


@pytest.mark.parametrize(("to", "shown"), [(FP32, False), (FP32, True), (BF16, False)], ids=str)
def test_only_what_is_cast_or_shown_there_goes_through_scratch_memory(tmp_path, monkeypatch, to, shown):
    """Whole pieces are dealt out from pinned memory itself; rows without a pattern and casts are not."""
    saved, record = saved_floats(tmp_path, 300_000)
    target = TensorTarget(torch.zeros(300_000, dtype=getattr(torch, to.label)))
    brought, bring = [], cuda._copy
    monkeypatch.setattr(cuda, "_copy", lambda slot, nbytes: (brought.append(nbytes), bring(slot, nbytes)))
    saw_there = (lambda parts, tensors: None) if shown else None
    plan = Plan(copies=(copy(record, 0, 300_000, 0, to=to),))
    assert loaded(plan, target, memory_nbytes=8 << 20, saw_there=saw_there).faults == []
    assert bool(brought) == (shown or to is BF16)
    assert torch.equal(target.tensor, saved.to(target.tensor.dtype))


def rows_of(record, rows, numel, source_step, target_step, *, first=0, at=0, **given):
    return [copy(record, first + i * source_step, numel, at + i * target_step, **given) for i in range(rows)]


def interleaved(record):
    """Pairs of rows, every second pair to another part of the buffer."""
    for i in range(40):
        yield from rows_of(record, 2, 3, 3, 500, first=6 * i, at=3 * i + 1000 * (i % 2))


def boxes(record):
    for i in range(9):
        yield from rows_of(record, 20, 3, 3, 7, first=60 * i, at=200 * i)


PATTERNS = {
    "strided": (lambda record: rows_of(record, 200, 5, 5, 17), 1),
    "boxes": (boxes, 1),
    "interleaved": (interleaved, 0),
    "wide, strided": (lambda record: rows_of(record, 90, 8, 8, 32), 1),
    "wide, without a pattern": (
        lambda record: [copy(record, *(4 * n for n in row)) for row in irregular(90, seed=6)],
        0,
    ),
    "without a pattern": (lambda record: [copy(record, *row) for row in irregular(300, seed=5)], 0),
}


def irregular(rows, seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 5) for _ in range(rows)]
    order = rng.sample(range(rows), rows)
    places, to = {}, 0
    for row in order:
        to += rng.randint(0, 2)
        places[row] = to
        to += lengths[row]
    at = 0
    for row, numel in enumerate(lengths):
        yield at, numel, places[row]
        at += numel


@pytest.mark.parametrize("there", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, CUDA])])
@pytest.mark.parametrize("before", [0, 3], ids=["aligned", "in the midst of memory"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rows_are_dealt_out_by_few_operations(tmp_path, pattern, to, before, there):
    """Rows at equal distances, in two or three dimensions, are one strided copy; others go by an index."""
    saved, record = saved_floats(tmp_path, 4000)
    make, operations = PATTERNS[pattern]
    copies = list(make(record))
    (chunk,) = chunks(copies, 1 << 20)
    target = TensorTarget(torch.empty(5004, dtype=to, device=there)[before:][:5000])
    how = scattering(chunk.runs, chunk.nbytes, {"a": target.tensor}, 64)
    assert sum(len(scatter.blocks) for scatter in how.scatters) == operations
    if pattern == "wide, without a pattern":
        assert how.scatters[0].unit_nbytes == (16 if to is torch.float32 and not before else 4)
    expected = torch.full((5000,), 7.0, dtype=to)
    for one in copies:
        first = (one.byte_offset - record.byte_offset) // 4
        expected[one.element_offset : one.element_offset + one.numel] = saved[first : first + one.numel].to(to)
    for index_numel in (1, 64, 1 << 20):
        target.tensor.fill_(7.0)
        brought = torch.zeros(chunk.nbytes, dtype=torch.uint8)
        for run in chunk.runs:
            first = run.byte_offset - record.byte_offset
            brought[run.position : run.position + run.nbytes] = saved.view(torch.uint8)[first : first + run.nbytes]
        padded = torch.cat([brought, brought.new_zeros(-len(brought) % 16)])
        smaller = scattering(chunk.runs, chunk.nbytes, {"a": target.tensor}, index_numel)
        assert smaller.table == how.table
        deal(padded.to(there), smaller, torch.tensor(how.table).to(there), {"a": target.tensor})
        assert torch.equal(target.tensor.cpu(), expected)
    target.tensor.fill_(7.0)
    device = CudaDevice(0) if there == "cuda" else LateDevice()
    assert loaded(Plan(copies=tuple(copies)), target, device=device).faults == []
    assert torch.equal(target.tensor.cpu(), expected)


def fake_record(nbytes, number=0):
    return Record(path=f"file{number}", byte_offset=3, nbytes=nbytes, crc32=None)


@QUICK
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 90), st.sampled_from([UINT8, FP16, FP32])), max_size=40),
    st.integers(56, 3000),
)
def test_chunks_hold_every_element_once_within_their_capacity(parts, capacity):
    """Cut, not dropped: elements, their order, alignment and the room for their rows."""
    at, copies = 3, []
    for gap, numel, dtype in parts:
        at += gap
        copies.append(copy(fake_record(10_000), 0, numel, at, dtype=dtype)._replace(byte_offset=at))
        at += numel * dtype.itemsize
    made = list(chunks(copies, capacity))
    placed = [(c, position) for chunk in made for run in chunk.runs for c, position in run.placed()]
    assert all(position % c.dtype.itemsize == 0 for c, position in placed)
    elements = [
        (c.byte_offset + i * c.dtype.itemsize, c.element_offset + i, c.dtype) for c, _ in placed for i in range(c.numel)
    ]
    assert elements == [
        (c.byte_offset + i * c.dtype.itemsize, c.element_offset + i, c.dtype) for c in copies for i in range(c.numel)
    ]
    for chunk in made:
        number = sum(len(run.copies) for run in chunk.runs)
        assert chunk.nbytes + 15 + ROW_NBYTES * number <= capacity
        assert all(a.position + a.nbytes <= b.position for a, b in zip(chunk.runs, chunk.runs[1:], strict=False))


def test_a_capacity_without_room_for_an_element_is_refused():
    with pytest.raises(ValueError, match="no element fits in 55 bytes"):
        list(chunks([copy(fake_record(8), 0, 1, 0)], 55))
