"""Ranks that pass bytes on to each other: here threads of one process, which meet at a barrier."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ds_reshard.execution import passing
from ds_reshard.execution.buffers import TensorTarget
from ds_reshard.execution.checksums import partial_sums, settle
from ds_reshard.execution.sharing import SharingExecutor, capacity_nbytes
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.codec import ElementType
from ds_reshard.planning.plan import Check, Copy, Plan
from ds_reshard.testing import ExecutorSuite
from ds_reshard.testing.recorded import checksum_faults, open_files, write_record

FP32, BF16 = ElementType.FLOAT32, ElementType.BFLOAT16
MEMORY = 64 << 10


class Alone:
    """A rank that nobody shares with."""

    rank, size = 0, 1

    def gather(self, mine: torch.Tensor, everyone: Sequence[torch.Tensor]) -> None:
        everyone[0].copy_(mine)


class Meeting:
    """What the threads of one test share: what each gives, and a barrier with a time limit."""

    def __init__(self, size: int, *, harm=lambda rank, row: None) -> None:
        self.size, self.harm = size, harm
        self.rows: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=20)
        self.gathered = 0


class Threaded:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def gather(self, mine: torch.Tensor, everyone: Sequence[torch.Tensor]) -> None:
        meeting = self.meeting
        meeting.rows[self.rank] = mine.clone()
        meeting.barrier.wait()
        for row, given in zip(everyone, meeting.rows, strict=True):
            row.copy_(given)
            meeting.harm(self.rank, row)
        meeting.gathered += self.rank == 0
        meeting.barrier.wait()


class TestAlone(ExecutorSuite):
    """One rank passes everything on to itself."""

    def make(self, *, threads, memory_nbytes, checksum):
        inner = ThreadExecutor(threads=threads, memory_nbytes=memory_nbytes, checksum=checksum)
        if not capacity_nbytes(1, memory_nbytes):
            return inner
        limits = {"threads": threads, "memory_nbytes": memory_nbytes, "checksum": checksum}
        return SharingExecutor(inner, Alone(), alike={"a", "b", "cast"}, **limits)


class Shared:
    """A module of three files that every rank wants, and a partition that each has for itself."""

    def __init__(self, folder: str) -> None:
        make = torch.Generator().manual_seed(3)
        self.saved = [torch.randn(9_000 + 7 * n, generator=make) for n in range(3)]
        self.own = torch.randn(600, generator=make)
        self.records = [
            write_record(folder, f"module{n}", bytes(t.view(torch.uint8))) for n, t in enumerate(self.saved)
        ]
        self.record = write_record(folder, "optimizer", bytes(self.own.view(torch.uint8)))
        self.nbytes = sum(record.nbytes for record in self.records)

    def plan(self, rank: int, size: int) -> Plan:
        """The second tensor is cast; of the third, the last element is wanted by nobody."""
        kinds = (FP32, BF16, FP32)
        whole = [
            Copy(record, record.byte_offset, t.numel() - (n == 2), FP32, f"module/{n}", 0, kinds[n])
            for n, (record, t) in enumerate(zip(self.records, self.saved, strict=True))
        ]
        last = self.records[2]
        check = Check(last, last.byte_offset + last.nbytes - 4, 4)
        numel = 600 // size
        part = Copy(self.record, self.record.byte_offset + 4 * numel * rank, numel, FP32, "fp32/0", 0, FP32)
        return Plan(copies=(*whole, part), checks=(check,))

    def targets(self, size: int) -> dict[str, TensorTarget]:
        kinds = (torch.float32, torch.bfloat16, torch.float32)
        made = {f"module/{n}": torch.zeros(t.numel(), dtype=kinds[n]) for n, t in enumerate(self.saved)}
        return {name: TensorTarget(tensor) for name, tensor in {**made, "fp32/0": torch.zeros(600 // size)}.items()}

    def run(self, meeting: Meeting, *, memory_nbytes: int = MEMORY, targets=None, saw=None):
        """Each rank's outcome or error, and its targets."""
        filled = targets or [self.targets(meeting.size) for _ in range(meeting.size)]

        def of_rank(rank):
            limits = {"threads": 2, "memory_nbytes": memory_nbytes, "checksum": True}
            executor = SharingExecutor(
                ThreadExecutor(**limits, saw=saw), Threaded(meeting, rank), **limits, saw=saw,
                alike={"module/0", "module/1", "module/2"},
            )  # fmt: skip
            try:
                return executor.execute(self.plan(rank, meeting.size), filled[rank])
            except Exception as error:
                return error

        with ThreadPoolExecutor(meeting.size) as pool:
            return list(pool.map(of_rank, range(meeting.size))), filled

    def assert_filled(self, filled) -> None:
        for rank, targets in enumerate(filled):
            for n, saved in enumerate(self.saved):
                found = targets[f"module/{n}"].tensor
                wanted = saved.to(found.dtype)
                if n == 2:
                    wanted[-1] = 0
                assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), (rank, n)
            part = targets["fp32/0"].tensor
            assert torch.equal(part, self.own[rank * len(part) :][: len(part)])


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """For the tests that leave its files as they are."""
    return Shared(str(tmp_path_factory.mktemp("shared")))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("memory_nbytes", [64 << 10, 1 << 20])
def test_every_byte_is_read_once_and_arrives_everywhere(shared, size, memory_nbytes):
    """Bits, sums and counts: what all ranks read together is the files once, and each has every slice's sum."""
    before = open_files()
    outcomes, filled = shared.run(Meeting(size), memory_nbytes=memory_nbytes)
    assert [outcome.faults for outcome in outcomes] == [[]] * size
    shared.assert_filled(filled)
    assert checksum_faults(outcomes) == []
    own, checks = 2400, size * 4
    assert sum(outcome.bytes_read for outcome in outcomes) == shared.nbytes - 4 + own + checks
    assert sum(outcome.spared.nbytes for outcome in outcomes) == (size - 1) * (shared.nbytes - 4)
    assert all(outcome.missing_nbytes == 0 for outcome in outcomes)
    assert open_files() == before


def test_memory_without_room_for_a_chunk_of_each_is_refused():
    """Whoever makes the executor asks capacity_nbytes first."""
    limits = {"threads": 2, "memory_nbytes": 20_000, "checksum": True}
    assert capacity_nbytes(3, 20_000) == 0
    with pytest.raises(ValueError, match="3 ranks have no room for their chunks in 20000 bytes"):
        SharingExecutor(ThreadExecutor(**limits), Threaded(Meeting(3), 0), alike={"a"}, **limits)


@pytest.mark.parametrize("size", [1, 2, 8, 512])
@pytest.mark.parametrize("memory_nbytes", [0, 4096, 1 << 20, 64 << 20, 1 << 36])
def test_memory_for_what_is_passed_on_stays_within_the_budget(size, memory_nbytes):
    capacity = capacity_nbytes(size, memory_nbytes)
    assert capacity == 0 or 4096 <= (2 * size + 2) * (capacity + passing.SAID_NBYTES) <= memory_nbytes


@pytest.mark.parametrize("harmed", ["truncated", "gone"])
def test_a_rank_that_cannot_read_says_so_and_keeps_nobody_waiting(tmp_path, harmed):
    """The reading rank has the fault; the others know that bytes are missing, and wait for none."""
    shared = Shared(str(tmp_path))
    path = shared.records[1].path
    if harmed == "truncated":
        os.truncate(path, shared.records[1].byte_offset + 30_000)
    else:
        os.unlink(path)
    began = time.monotonic()
    told, _ = shared.run(Meeting(3))
    assert time.monotonic() - began < 15
    faults = {(fault.error, fault.where) for outcome in told for fault in outcome.faults}
    assert faults == {("CheckpointDamaged" if harmed == "truncated" else "ReadFailed", path)}
    assert all(outcome.missing_nbytes for outcome in told)


def test_one_call_that_fails_on_one_rank_is_missed_by_all(shared, monkeypatch):
    """No rank takes the bytes of a chunk that was not read; the other chunks arrive."""
    read_at, calls = passing.read_at, []

    def failing(fd, view, byte_offset):
        calls.append(byte_offset)
        if len(calls) == 7:
            raise OSError(5, "Input/output error")
        return read_at(fd, view, byte_offset)

    monkeypatch.setattr(passing, "read_at", failing)
    told, _ = shared.run(Meeting(3))
    assert sorted(len(outcome.faults) for outcome in told) == [0, 0, 1]
    missing = {outcome.missing_nbytes for outcome in told}
    assert len(missing) == 1 and missing.pop() > 0


class Full(TensorTarget):
    def view(self, element_offset, numel, dtype):
        raise RuntimeError("no memory left on the device")


def test_a_rank_that_cannot_place_what_arrives_goes_on_and_raises_in_the_end(shared):
    meeting = Meeting(3)
    targets = [shared.targets(3) for _ in range(3)]
    targets[1]["module/0"] = Full(torch.zeros(9_000))
    told, filled = shared.run(meeting, targets=targets)
    assert isinstance(told[1], RuntimeError) and "no memory left" in str(told[1])
    assert [told[rank].faults for rank in (0, 2)] == [[], []]
    shared.assert_filled([filled[0]])


def test_bytes_that_change_on_the_way_are_a_wrong_checksum(shared):
    """Sums are taken of what arrived: another rank's memory or network is not trusted."""

    def flip(rank, row):
        if rank == 2:
            row[5] ^= 1

    told, _ = shared.run(Meeting(3, harm=flip))
    found = [{fault.error for fault in settle(partial_sums(outcome))[1]} for outcome in told]
    assert found == [set(), set(), {"ChecksumMismatch"}]


def test_fingerprints_see_what_arrives_and_what_is_read(shared):
    """`saw` is told of every byte of the plan once."""
    seen, lock = [], threading.Lock()

    def saw(copies, views):
        with lock:
            seen.extend((copy.buffer, len(view)) for copy, view in zip(copies, views, strict=True))

    shared.run(Meeting(2), saw=saw)
    assert sum(nbytes for buffer, nbytes in seen if buffer != "fp32/0") == 2 * (shared.nbytes - 4)
    assert sum(nbytes for buffer, nbytes in seen if buffer == "fp32/0") == 2400
