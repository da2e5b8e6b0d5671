"""The thread executor conforms, and the torch targets that it writes to say what they can take."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from ds_reshard.containers.crc import crc32_of_rows
from ds_reshard.execution import buffers, threads
from ds_reshard.execution.buffers import (
    HUGE_NBYTES,
    PageChoice,
    TensorTarget,
    element_type,
    memory_of,
    page_choice,
    tensor_from_bytes,
    torch_dtype,
)
from ds_reshard.execution.checksums import combine, partial_sums
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Rows
from ds_reshard.operations.ranks import Sums, are_complete
from ds_reshard.planning.copies import ROWS, Copies, Copy
from ds_reshard.planning.plan import Check, Plan, cut_checks
from ds_reshard.testing import ExecutorSuite
from ds_reshard.testing.suites import checksum_faults, open_files, write_record

KNOWN = [dtype for dtype in ElementType if hasattr(torch, dtype.label)]
FP32, BF16, UINT8 = ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.UINT8


class TestThreadExecutor(ExecutorSuite):
    def make(self, *, threads, memory_nbytes, checksum):
        return ThreadExecutor(threads=threads, memory_nbytes=memory_nbytes, checksum=checksum)


class Altered(ThreadExecutor):
    """A thread executor that carries out another plan than the one it was given."""

    def execute(self, plan, targets):
        return super().execute(self.alter(plan), targets)


class WithoutFills(Altered):
    def alter(self, plan):
        return replace(plan, fills=())


class WithoutChecks(Altered):
    def alter(self, plan):
        return replace(plan, checks=())


class Twice(Altered):
    def alter(self, plan):
        return replace(plan, copies=tuple(c for copy in plan.copies for c in (copy, copy._replace(numel=1))))


class OneFurther(Altered):
    def alter(self, plan):
        return replace(plan, copies=tuple(c._replace(element_offset=max(0, c.element_offset - 1)) for c in plan.copies))


class Greedy(ThreadExecutor):
    def __init__(self, *, threads, memory_nbytes, checksum):
        super().__init__(threads=threads, memory_nbytes=2 * memory_nbytes, checksum=checksum)


class Leaking(ThreadExecutor):
    def execute(self, plan, targets):
        kept.append(open(os.devnull))  # noqa: SIM115
        return super().execute(plan, targets)


class Raising(ThreadExecutor):
    def execute(self, plan, targets):
        outcome = super().execute(plan, targets)
        if outcome.faults:
            raise OSError(outcome.faults[0].what)
        return outcome


kept = []


@pytest.mark.parametrize(
    ("executor", "test"),
    [
        (WithoutFills, "test_fills_are_zero_and_touch_nothing_else"),
        (WithoutChecks, "test_every_byte_that_was_read_is_summed"),
        (Twice, "test_any_number_of_threads_and_any_budget_move_the_same_bytes"),
        (OneFurther, "test_copies_land_where_the_plan_says"),
        (Greedy, "test_scratch_memory_stays_within_the_budget"),
        (Leaking, "test_every_file_is_closed"),
        (Raising, "test_a_truncated_file_is_a_fault"),
        (Raising, "test_an_unreadable_file_is_a_fault"),
    ],
)
def test_the_kit_for_executors_can_fail(executor, test):
    """An executor that does something else fails the test for it."""

    class Broken(ExecutorSuite):
        def make(self, **limits):
            return executor(**limits)

    with pytest.raises((AssertionError, OSError)):
        getattr(Broken(), test)()
    while kept:
        kept.pop().close()


def one_by_one(record, numel, *, every=1):
    """A plan of `numel` copies of one byte, every so many bytes of the record."""
    first = record.byte_offset
    return Plan(copies=tuple(Copy(record, first + i * every, 1, UINT8, f"b{i}", 0, UINT8) for i in range(numel)))


@pytest.mark.parametrize(
    ("every", "read_calls"), [(1, 2), (2, 2), (20_000, 1000)], ids=["neighbours", "with a byte between", "with gaps"]
)
def test_neighbouring_copies_are_read_in_one_call(tmp_path, monkeypatch, every, read_calls):
    """512 targets a vectored read; what nobody wants is read to join two copies where it is less than a call costs."""
    data = bytes(range(251)) * (1000 * every // 251 + 1)
    record = write_record(str(tmp_path), "file", data)
    tensors = [torch.zeros(1, dtype=torch.uint8) for _ in range(1000)]
    targets = {f"b{i}": TensorTarget(tensor) for i, tensor in enumerate(tensors)}
    executor = ThreadExecutor(threads=2, memory_nbytes=1 << 20, checksum=True)
    calls, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: calls.append(given) or preadv(*given))
    outcome = executor.execute(one_by_one(record, 1000, every=every), targets)
    assert bytes(int(tensor) for tensor in tensors) == data[: 1000 * every : every]
    assert (len(calls), len({fd for fd, *_ in calls}), outcome.bytes_read) == (read_calls, 1, 1000)


def test_short_reads_are_continued(tmp_path, monkeypatch):
    """A file system may give fewer bytes than were asked for: reading goes on where it stopped."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:7]], offset))
    data = bytes(i % 251 for i in range(500))
    record = write_record(str(tmp_path), "file", data)
    lengths = {"a": 3, "b": 7, "c": 90, "d": 400}
    copies, at = [], record.byte_offset
    for buffer, numel in lengths.items():
        copies.append(Copy(record, at, numel, UINT8, buffer, 0, UINT8))
        at += numel
    tensors = {buffer: torch.zeros(numel, dtype=torch.uint8) for buffer, numel in lengths.items()}
    targets = {buffer: TensorTarget(tensor) for buffer, tensor in tensors.items()}
    executor = ThreadExecutor(threads=1, memory_nbytes=4096, checksum=True)
    outcome = executor.execute(Plan(copies=tuple(copies)), targets)
    assert bytes(value for tensor in tensors.values() for value in tensor.tolist()) == data
    assert (outcome.faults, checksum_faults([outcome])) == ([], [])


def columns(record, shape, first, width):
    """Columns [first, first + width) of a matrix of float32 that is all of the record, as one copy with rows."""
    rows, of_row = shape
    at = record.byte_offset + first * 4
    return Copy(record, at, width, FP32, "columns", 0, FP32, (Rows(rows, of_row, width),))


@pytest.mark.parametrize(
    ("shape", "calls"),
    [((600, 24), 30), ((60, 42_000), 60), ((1, 24), 1), ((3, 600), 6)],
    ids=["windows", "far apart", "one row", "a window a row"],
)
@pytest.mark.parametrize("shared", [2, 3])
def test_rows_at_equal_distances_are_read_in_windows_or_by_themselves(tmp_path, monkeypatch, shape, shared, calls):
    """Ranks that share a matrix by columns get theirs, and what they read adds up to its checksum."""
    values = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    record = write_record(str(tmp_path), "file", values.numpy().tobytes())
    preadv, counted, outcomes = os.preadv, [], []
    monkeypatch.setattr(os, "preadv", lambda *given: counted.append(given) or preadv(*given))
    for rank in range(shared):
        width = shape[1] // shared
        found = torch.zeros(shape[0] * width)
        executor = ThreadExecutor(threads=2, memory_nbytes=max(8192, 8 * shape[1]), checksum=True)
        plan = Plan(copies=(columns(record, shape, rank * width, width),))
        outcomes.append(executor.execute(plan, {"columns": TensorTarget(found)}))
        assert torch.equal(found.view(shape[0], width), values[:, rank * width : (rank + 1) * width])
        assert (outcomes[-1].bytes_read, executor.nbytes_read) == (found.nbytes, found.nbytes)
    sums = [partial_sums(outcome) for outcome in outcomes]
    assert combine(sums) == ([], set())
    assert combine(sums[1:])[1] == combine(sums[::2])[1] == {record}
    assert len(counted) <= calls * shared
    assert are_complete([Sums.of(one, 0) for one in sums]) and not are_complete([Sums.of(one, 0) for one in sums[1:]])


@pytest.mark.parametrize("shape", [(600, 24), (600, 42_000)], ids=["windows", "far apart"])
def test_damage_in_a_row_is_found_and_that_beside_it_is_not(tmp_path, shape):
    """A rank sums the bytes that it wants: those between two rows are another rank's."""
    data = bytearray(4 * shape[0] * shape[1])
    record = write_record(str(tmp_path), "file", bytes(data))
    halves = [columns(record, shape, first, shape[1] // 2) for first in (0, shape[1] // 2)]
    with open(record.path, "r+b") as file:
        file.seek(record.byte_offset + 4 * shape[1] * 77 + 5)
        file.write(b"\1")
    sums = []
    for half in halves:
        found = torch.zeros(half.nbytes // 4)
        executor = ThreadExecutor(threads=2, memory_nbytes=max(8192, 8 * shape[1]), checksum=True)
        sums += partial_sums(executor.execute(Plan(copies=(half,)), {"columns": TensorTarget(found)}))
    zeros = memoryview(bytes(half.nbytes // shape[0]))
    assert sums[0].crc32 != sums[1].crc32
    assert sums[1].crc32 == crc32_of_rows([zeros] * shape[0], 4 * shape[1])
    (fault,), again = combine([sums])
    assert (fault.error, again) == ("ChecksumMismatch", set())


@pytest.mark.parametrize("shape", [(600, 24), (600, 42_000)], ids=["windows", "far apart"])
def test_a_file_that_ends_among_rows_is_a_fault(tmp_path, shape):
    """What was read of them is not counted."""
    record = write_record(str(tmp_path), "file", bytes(4 * shape[0] * shape[1]))
    os.truncate(record.path, record.byte_offset + 4 * shape[1] * 300 + 20)
    copy = columns(record, shape, 0, shape[1] // 2)
    executor = ThreadExecutor(threads=2, memory_nbytes=max(8192, 8 * shape[1]), checksum=True)
    outcome = executor.execute(Plan(copies=(copy,)), {"columns": TensorTarget(torch.zeros(copy.nbytes // 4))})
    assert {fault.error for fault in outcome.faults} == {"CheckpointDamaged"}
    assert outcome.bytes_read < copy.nbytes


def test_rows_of_planes_and_gaps_in_the_buffer_stay(tmp_path):
    """Rows of rows are read plane by plane; elements of the buffer between two rows are not touched."""
    values = torch.arange(2 * 50 * 30, dtype=torch.float32).view(2, 50, 30)
    record = write_record(str(tmp_path), "file", values.numpy().tobytes())
    rows = (Rows(2, 1500, 50 * 7), Rows(50, 30, 7))
    copy = Copy(record, record.byte_offset + 4 * 10, 5, FP32, "part", 0, FP32, rows)
    found = torch.full((2 * 50 * 7,), -1.0)
    executor = ThreadExecutor(threads=3, memory_nbytes=3 * 4096, checksum=True)
    outcome = executor.execute(Plan(copies=(copy,)), {"part": TensorTarget(found)})
    expected = torch.full((2, 50, 7), -1.0)
    expected[:, :, :5] = values[:, :, 10:15]
    assert torch.equal(found.view(2, 50, 7), expected)
    assert outcome.faults == []


def test_planes_of_one_row_are_read_as_they_are(tmp_path):
    """Such a copy has planes, and no rows inside them."""
    values = torch.arange(4 * 30, dtype=torch.float32)
    record = write_record(str(tmp_path), "file", values.numpy().tobytes())
    copies = Copies.of([Copy(record, record.byte_offset, 5, FP32, "part", 0, FP32, (Rows(4, 30, 5), Rows(2, 10, 20)))])
    copies.table[ROWS] = 1
    found = torch.zeros(20)
    ThreadExecutor(threads=1, memory_nbytes=4096, checksum=True).execute(
        Plan(copies=copies), {"part": TensorTarget(found)}
    )
    assert torch.equal(found.view(4, 5), values.view(4, 30)[:, :5])


def test_threads_wait_for_each_other_once_between_rows_and_other_copies(tmp_path, monkeypatch):
    """Tensors that are cut by columns and by rows alternate in a model; a wait for each would leave threads idle."""
    values = torch.arange(20 * 64, dtype=torch.float32)
    record = write_record(str(tmp_path), "file", values.numpy().tobytes())
    copies, rounds, opened = [], [], threads.OpenFiles
    for number in range(10):
        at = record.byte_offset + number * 2 * 64 * 4
        rows = Copy(record, at, 4, FP32, "rows", number * 32, FP32, (Rows(8, 8, 4),))
        copies += [rows, Copy(record, at + 64 * 4, 64, FP32, "plain", number * 64, FP32)]
    monkeypatch.setattr(threads, "OpenFiles", lambda paths: rounds.append(1) or opened(paths))
    targets = {name: TensorTarget(torch.zeros(numel)) for name, numel in (("rows", 320), ("plain", 640))}
    ThreadExecutor(threads=2, memory_nbytes=8192, checksum=True).execute(Plan(copies=tuple(copies)), targets)
    halves = values.view(10, 2, 64)
    assert torch.equal(targets["rows"].tensor, halves[:, 0].view(10, 8, 8)[:, :, :4].flatten())
    assert torch.equal(targets["plain"].tensor, halves[:, 1].flatten())
    assert len(rounds) == 2


def test_elements_of_different_sizes_share_scratch_memory(tmp_path):
    """A byte before four-byte elements: a cast reads elements that are not aligned in the scratch buffer."""
    values = torch.tensor([1.5, -2.25, 1e30])
    record = write_record(str(tmp_path), "file", b"\7" + bytes(values.view(torch.uint8).tolist()))
    first = Copy(record, record.byte_offset, 1, UINT8, "byte", 0, FP32)
    plan = Plan(copies=(first, Copy(record, record.byte_offset + 1, 3, FP32, "cast", 0, BF16)))
    byte, cast = torch.zeros(1), torch.zeros(3, dtype=torch.bfloat16)
    targets = {"byte": TensorTarget(byte), "cast": TensorTarget(cast)}
    ThreadExecutor(threads=1, memory_nbytes=4096, checksum=True).execute(plan, targets)
    assert (byte.tolist(), cast.tolist()) == ([7.0], values.bfloat16().tolist())


class BrokenTarget(TensorTarget):
    def view(self, element_offset, numel, dtype):
        raise RuntimeError("broken target")


def test_files_are_opened_side_by_side_and_each_once(monkeypatch):
    """Opening a file of a store takes a request: two threads that wait for each other both come through."""
    both, calls = threading.Barrier(2, timeout=20), []

    def opened(path):
        calls.append(path)
        both.wait()
        return path

    monkeypatch.setattr(threads, "opened", opened)
    monkeypatch.setattr(threads, "close", lambda file: calls.append(f"close {file}"))
    with threads.OpenFiles(["a", "b", "a", "b"]) as files, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(files.acquire, ["a", "b", "a", "b"])) == ["a", "b", "a", "b"]
        for path in ("a", "a", "b"):
            files.release(path)
        assert sorted(calls) == ["a", "b", "close a"]
    assert sorted(calls) == ["a", "b", "close a", "close b"]


def test_files_are_closed_when_a_target_breaks(tmp_path):
    record = write_record(str(tmp_path), "file", bytes(50))
    targets = {f"b{i}": BrokenTarget(torch.zeros(1)) for i in range(50)}
    executor = ThreadExecutor(threads=4, memory_nbytes=1 << 20, checksum=True)
    before = open_files()
    with pytest.raises(RuntimeError, match="broken target"):
        executor.execute(one_by_one(record, 25, every=2), targets)
    assert open_files() == before


@pytest.mark.parametrize("ends", ["interrupted", "an error"])
def test_what_ends_the_work_of_one_thread_ends_the_others(tmp_path, ends):
    """Ctrl-C, or an error of one thread: of a hundred parts the others read no more than those that they have begun."""
    record = write_record(str(tmp_path), "file", bytes(100 * 4096))
    seen = []

    def saw(copies, views):
        seen.append(len(copies))
        if len(seen) == 3 and ends == "an error":
            raise MemoryError
        if len(seen) == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.02)

    executor = ThreadExecutor(threads=2, memory_nbytes=2 * 4096, checksum=True, saw=saw)
    plan = Plan(copies=(Copy(record, record.byte_offset, 100 * 4096, UINT8, "all", 0, UINT8),))
    before = open_files()
    with pytest.raises(KeyboardInterrupt if ends == "interrupted" else MemoryError):
        executor.execute(plan, {"all": TensorTarget(torch.zeros(100 * 4096, dtype=torch.uint8))})
    assert len(seen) < 50 and open_files() == before


def test_one_fault_a_file_however_many_copies(tmp_path):
    """A record that is gone is one fault once duplicates are taken out: its text names no offset."""
    record = write_record(str(tmp_path), "file", bytes(50))
    (tmp_path / "file").unlink()
    targets = {f"b{i}": TensorTarget(torch.zeros(1)) for i in range(50)}
    outcome = ThreadExecutor(threads=4, memory_nbytes=1 << 20, checksum=True).execute(
        one_by_one(record, 25, every=2), targets
    )
    assert len(set(outcome.faults)) == 1


@pytest.mark.parametrize("dtype", KNOWN, ids=lambda dtype: dtype.label)
def test_element_types_are_those_of_torch(dtype):
    assert element_type(torch_dtype(dtype)) is dtype
    assert torch.empty(1, dtype=torch_dtype(dtype)).element_size() == dtype.itemsize
    assert ElementType.named(dtype.label) is dtype


def test_a_tensor_that_is_not_contiguous_is_no_target():
    with pytest.raises(ValueError, match="contiguous"):
        TensorTarget(torch.zeros(3, 4).t())


def test_a_view_is_the_memory_of_its_own_elements():
    """Of the tensor's own type only; through it the tensor changes, a parameter that needs gradients too."""
    tensor = torch.nn.Parameter(torch.zeros(2, 3))
    target = TensorTarget(tensor)
    assert target.view(0, 6, BF16) is None
    view = target.view(2, 3, FP32)
    assert view is not None and len(view) == 12
    view[:] = bytes(torch.tensor([1.0, 2.0, 3.0]).view(torch.uint8).tolist())
    assert tensor.tolist() == [[0.0, 0.0, 1.0], [2.0, 3.0, 0.0]]


def test_an_empty_tensor_has_no_view():
    assert TensorTarget(torch.zeros(0)).view(0, 0, FP32) is None


def test_store_casts_and_zero_clears():
    tensor = torch.ones(5, dtype=torch.bfloat16)
    target = TensorTarget(tensor)
    data = memoryview(bytearray(torch.tensor([0.1, 3.0]).view(torch.uint8).tolist()))
    target.store(1, data, FP32)
    target.zero(3, 2)
    assert tensor.tolist() == [1.0, torch.tensor(0.1).bfloat16().item(), 3.0, 0.0, 0.0]


COSTS = {
    "cheap": lambda number: 0.15,
    "ten times": lambda number: 10.0,
    "a tenth more": lambda number: 1.1,
    "cheap at first": lambda number: 0.15 if number < 400 else 10.0,
    "cheap at last": lambda number: 10.0 if number < 400 else 0.15,
    "every third dear": lambda number: 10.0 if number % 3 == 0 else 0.15,
    "every tenth dear": lambda number: 10.0 if number % 10 == 0 else 0.3,
    "now and then dear": lambda number: 10.0 if number % 40 == 0 else 0.3,
    "cheap where tried first": lambda number: 0.15 if number in (96, 97, 200, 201, 290, 291, 292) else 10.0,
}


def touched(cost, portions):
    """What it costs to touch so many portions of which a small one costs 1, and which were huge."""
    spent, huge, at = [], [], 0

    def small(address):
        spent.append(1.0)
        return 1.0

    def large(address):
        huge.append(at)
        spent.append(cost(at))
        return cost(at)

    choice = PageChoice(small, large)
    for at in range(portions):
        before = len(spent)
        choice.touch(at * HUGE_NBYTES)
        if len(spent) == before:
            spent.append(1.0)
    assert len(spent) == portions
    return sum(spent), huge


@pytest.mark.parametrize("portions", [1, 47, 100, 1000, 10_000])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_pages_cost_at_most_a_tenth_more_than_small_ones(cost, portions):
    """Whatever a huge page costs: a model of costs, no clock."""
    assert touched(cost, portions)[0] <= 1.1 * portions


def test_pages_are_huge_where_that_is_cheap():
    spent, huge = touched(COSTS["cheap"], 1000)
    assert spent < 250 and huge == list(range(PageChoice.FIRST_WAIT, 1000))
    assert len(touched(COSTS["cheap at last"], 10_000)[1]) > 8_000
    assert len(touched(COSTS["ten times"], 10_000)[1]) < 20
    assert len(touched(COSTS["now and then dear"], 10_000)[1]) > 8_000


def test_the_first_huge_page_of_a_trial_is_tried_by_one_thread_alone():
    """Others come while it is being touched: they would each pay for what one finds out."""
    tried = []

    def large(address):
        tried.append(address)
        if len(tried) == 1:
            for other in range(1, 4):
                choice.touch(other)
        return 0.5

    choice = PageChoice(lambda address: 1.0, large)
    for _ in range(PageChoice.FIRST_WAIT + 1):
        choice.touch(0)
    assert tried == [0]
    choice.touch(5)
    assert tried == [0, 5]


@pytest.mark.skipif(page_choice() is None, reason="this kernel gives no huge pages to who asks (MADV_POPULATE_WRITE)")
def test_memory_that_is_touched_keeps_what_was_written(monkeypatch):
    """Every portion once, and none of the bytes that another thread has written there before."""
    seen = []
    choice = PageChoice(lambda address: seen.append(("small", address)) or 1.0, page_choice()._huge)
    monkeypatch.setattr(buffers, "page_choice", lambda: choice)
    tensor = torch.empty(300 << 20, dtype=torch.uint8)
    target = TensorTarget(tensor, untouched=True)
    chunk = 3 << 19
    for at in range(0, tensor.numel(), chunk):
        size = min(chunk, tensor.numel() - at)
        tensor[at : at + size] = at % 251
        target.view(at, size, UINT8)
    expected = (torch.arange(tensor.numel() // chunk) * chunk % 251).to(torch.uint8).repeat_interleave(chunk)
    assert torch.equal(tensor, expected)
    assert len(seen) == len(set(seen)) == 4


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (3, 0)])
def test_a_tensor_is_made_of_its_bytes(shape):
    expected = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).reshape(shape)
    made = tensor_from_bytes(bytes(expected.reshape(-1).view(torch.uint8).tolist()), ElementType.INT16, shape)
    assert torch.equal(made, expected) and made.dtype == expected.dtype


@pytest.mark.parametrize("chunk_nbytes", [1, 3, 10, 11])
def test_checks_are_cut_to_the_byte(tmp_path, chunk_nbytes):
    record = write_record(str(tmp_path), "file", bytes(40))
    made = list(cut_checks([Check(record=record, byte_offset=20, nbytes=10)], chunk_nbytes))
    assert [at for c in made for at in range(c.byte_offset, c.byte_offset + c.nbytes)] == list(range(20, 30))
    assert max(c.nbytes for c in made) <= chunk_nbytes


def test_bytes_of_a_tensor_keep_it_alive():
    """Whoever has a view of the bytes of a tensor that nobody else has reads them, and not what took their place."""
    view = memory_of(torch.arange(1 << 20))[8:16]
    others = [torch.full((1 << 20,), -1) for _ in range(8)]
    assert bytes(view) == (1).to_bytes(8, "little") and len(others) == 8
