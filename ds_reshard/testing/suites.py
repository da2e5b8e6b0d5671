"""What every executor and every format must do, as classes to subclass, and files and targets of known bytes.

Executors bring bytes to their places, read and sum each once, and collect faults. The index of a format says where each
element of each tensor lies, once, inside its file.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ds_reshard.containers.crc import crc32
from ds_reshard.errors import Fault, ReshardError
from ds_reshard.execution.buffers import TensorTarget, element_type, torch_dtype
from ds_reshard.execution.checksums import combine, partial_sums, settle
from ds_reshard.execution.interfaces import Executor, Outcome, Strides, Target
from ds_reshard.model.index import Extent, Index, Record
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box, Region
from ds_reshard.planning.copies import Copy
from ds_reshard.planning.plan import Check, Fill, Plan

MEMORY_NBYTES = 1 << 20
LONG_NBYTES = 1 << 18
FLOATS = (0.0, -0.0, 1.0, -1.5, 1 / 3, 65504.0, 65520.0, 1e-8, 1e-40, 3e38, -3e38, float("inf"), float("-inf"))


class ExecutorSuite:
    """Subclass it and write `make`; overwrite `place` and `bring` for an executor of another device's memory."""

    def make(self, *, threads: int, memory_nbytes: int, checksum: bool) -> Executor:
        """The executor under test, with at most so many threads and so much scratch memory."""
        raise NotImplementedError

    def place(self, tensor: torch.Tensor) -> Target:
        """A target of the executor's own kind whose elements are those of `tensor` (host memory, 1-D)."""
        return TensorTarget(tensor)

    def bring(self, target: Target) -> torch.Tensor:
        """What a target that `place` made holds now, in host memory."""
        assert isinstance(target, TensorTarget), "a suite that overwrites place() overwrites bring() as well"
        return target.tensor

    def test_copies_land_where_the_plan_says(self) -> None:
        """Elements arrive at their offsets, in order and in every type; what no copy names stays as it was."""
        for dtype in ElementType:
            if not hasattr(torch, dtype.label):
                continue
            with tempfile.TemporaryDirectory() as folder:
                saved = _bytes(23 * dtype.itemsize, seed=1)
                record = write_record(folder, "file", saved)
                before = _bytes(40 * dtype.itemsize, seed=2)
                target = self.place(_tensor(before, dtype))
                plan = Plan(copies=(_copy(record, dtype, 0, 5, 30), _copy(record, dtype, 7, 16, 2)))
                outcome = self.make(threads=2, memory_nbytes=MEMORY_NBYTES, checksum=True).execute(plan, {"a": target})
                size = dtype.itemsize
                expected = bytearray(before)
                expected[30 * size : 35 * size] = saved[: 5 * size]
                expected[2 * size : 18 * size] = saved[7 * size :]
                assert outcome.faults == []
                assert _raw(self.bring(target)) == bytes(expected), f"{dtype.label} elements differ"

    def test_casts_are_those_of_torch(self) -> None:
        """fp32 to bf16 and fp16 and back round, overflow and keep NaN exactly as `Tensor.to` does."""
        values = torch.tensor([*FLOATS, *torch.randn(4000, generator=torch.Generator().manual_seed(3)).tolist()])
        kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        for source in kinds:
            for wanted in kinds:
                saved = values.to(source)
                with tempfile.TemporaryDirectory() as folder:
                    record = write_record(folder, "file", _raw(saved))
                    target = self.place(torch.zeros(saved.numel(), dtype=wanted))
                    plan = Plan(copies=(_copy(record, element_type(source), 0, saved.numel(), 0, to=wanted),))
                    outcome = self._run(plan, {"a": target}, memory_nbytes=4096)
                    assert outcome.faults == []
                    assert _raw(self.bring(target)) == _raw(saved.to(wanted)), f"{source} to {wanted} differs"

    def test_fills_are_zero_and_touch_nothing_else(self) -> None:
        """A fill zeroes exactly its elements."""
        target = self.place(torch.arange(1, 10, dtype=torch.int32))
        plan = Plan(copies=(), fills=(_fill(0, 1), _fill(4, 3), _fill(9, 0)))
        self._run(plan, {"a": target})
        assert self.bring(target).tolist() == [0, 2, 3, 4, 0, 0, 0, 8, 9]

    def test_nothing_to_do_is_no_fault(self) -> None:
        """Neither an empty plan nor a copy of no elements reads, writes or fails."""
        with tempfile.TemporaryDirectory() as folder:
            record = write_record(folder, "file", b"")
            target = self.place(torch.ones(3))
            for copies in ((), (_copy(record, ElementType.FLOAT32, 0, 0, 1),)):
                outcome = self._run(Plan(copies=copies), {"a": target})
                assert (outcome.faults, outcome.bytes_read, self.bring(target).tolist()) == ([], 0, [1.0, 1.0, 1.0])

    def test_any_number_of_threads_and_any_budget_move_the_same_bytes(self) -> None:
        """1 and 8 threads, budgets from one byte up: the same elements, each byte read once, sums that agree."""
        with tempfile.TemporaryDirectory() as folder:
            plan, expected = _many_small(folder)
            for threads in (1, 8):
                for memory_nbytes in (1, 5000, MEMORY_NBYTES):
                    targets = {name: self.place(torch.empty_like(tensor)) for name, tensor in expected.items()}
                    outcome = self._run(plan, targets, threads=threads, memory_nbytes=memory_nbytes)
                    assert outcome.faults == []
                    assert checksum_faults([outcome]) == []
                    assert outcome.bytes_read == plan.nbytes
                    for name, tensor in expected.items():
                        assert _raw(self.bring(targets[name])) == _raw(tensor), f"{threads} threads: {name} differs"

    def test_every_byte_that_was_read_is_summed(self) -> None:
        """Copies and checks together give the crc32 of the record; a changed byte anywhere is seen."""
        with tempfile.TemporaryDirectory() as folder:
            data = _bytes(1000, seed=5)
            record = write_record(folder, "file", data)
            plan = Plan(
                copies=(_copy(record, ElementType.INT16, 50, 400, 0),),
                checks=(_check(record, 0, 100), _check(record, 900, 100)),
            )
            for damaged_at in (None, 0, 99, 100, 899, 900, 999):
                if damaged_at is not None:
                    _overwrite(record, damaged_at, bytes([data[damaged_at] ^ 64]))
                outcome = self._run(plan, {"a": self.place(torch.empty(400, dtype=torch.int16))})
                expected = [] if damaged_at is None else [("ChecksumMismatch", record.path)]
                assert [(fault.error, fault.where) for fault in checksum_faults([outcome])] == expected
                if damaged_at is not None:
                    _overwrite(record, damaged_at, bytes([data[damaged_at]]))

    def test_without_checksums_only_what_is_wanted_is_read(self) -> None:
        """`checksum=False` reads no checks and reports no sums."""
        with tempfile.TemporaryDirectory() as folder:
            record = write_record(folder, "file", _bytes(100, seed=6))
            plan = Plan(copies=(_copy(record, ElementType.UINT8, 10, 20, 0),), checks=(_check(record, 30, 70),))
            target = self.place(torch.empty(20, dtype=torch.uint8))
            outcome = self.make(threads=1, memory_nbytes=MEMORY_NBYTES, checksum=False).execute(plan, {"a": target})
            assert (outcome.bytes_read, outcome.slices, outcome.faults) == (20, {}, [])

    def test_scratch_memory_stays_within_the_budget(self) -> None:
        """All buffers that elements are staged in are together no larger than `memory_nbytes`."""
        with tempfile.TemporaryDirectory() as folder:
            saved = _bytes(LONG_NBYTES, seed=7)
            record = write_record(folder, "file", saved)
            for threads, memory_nbytes in ((1, 8 << 10), (4, 64 << 10), (8, 200_000)):
                target = self.place(torch.empty(LONG_NBYTES, dtype=torch.uint8))
                stored = StoredTarget(target)
                plan = Plan(copies=(_copy(record, ElementType.UINT8, 0, LONG_NBYTES, 0),))
                outcome = self._run(plan, {"a": stored}, threads=threads, memory_nbytes=memory_nbytes)
                assert outcome.faults == []
                assert 0 < stored.scratch_nbytes <= memory_nbytes
                assert _raw(self.bring(target)) == saved

    def test_a_truncated_file_is_a_fault(self) -> None:
        """A file that ends too soon is reported as damaged, by name; the other files are read all the same."""
        with tempfile.TemporaryDirectory() as folder:
            short = write_record(folder, "short", _bytes(9000, seed=8))
            sound = write_record(folder, "sound", _bytes(400, seed=9))
            os.truncate(short.path, short.byte_offset + 8999)
            plan = Plan(
                copies=(
                    _copy(short, ElementType.UINT8, 0, 9000, 0),
                    _copy(sound, ElementType.UINT8, 0, 400, 0, buffer="b"),
                )
            )
            target = self.place(torch.zeros(400, dtype=torch.uint8))
            targets = {"a": self.place(torch.zeros(9000, dtype=torch.uint8)), "b": target}
            outcome = self._run(plan, targets, memory_nbytes=4096)
            assert {(fault.error, fault.where) for fault in outcome.faults} == {("CheckpointDamaged", short.path)}
            assert all(fault.mend for fault in outcome.faults)
            assert _raw(self.bring(target)) == _bytes(400, seed=9)

    def test_an_unreadable_file_is_a_fault(self) -> None:
        """A file that is gone, or cannot be read, is reported by name as ReadFailed; nothing is raised."""
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(os.path.join(folder, "directory"))
            for name in ("absent", "directory"):
                record = Record(path=os.path.join(folder, name), byte_offset=0, nbytes=8, crc32=0)
                plan = Plan(copies=(_copy(record, ElementType.UINT8, 0, 4, 0),), checks=(_check(record, 4, 4),))
                outcome = self._run(plan, {"a": self.place(torch.zeros(4, dtype=torch.uint8))})
                assert {(fault.error, fault.where) for fault in outcome.faults} == {("ReadFailed", record.path)}

    def test_every_file_is_closed(self) -> None:
        """After an execution, sound or faulty, as many files are open as before."""
        with tempfile.TemporaryDirectory() as folder:
            records = [write_record(folder, f"file{i}", _bytes(6000, seed=i)) for i in range(9)]
            os.truncate(records[4].path, 100)
            os.unlink(records[6].path)
            plan = Plan(copies=tuple(_copy(r, ElementType.UINT8, 0, 6000, 6000 * i) for i, r in enumerate(records)))
            target = self.place(torch.zeros(6000 * 9, dtype=torch.uint8))
            self._run(plan, {"a": target}, threads=4)
            before = open_files()
            outcome = self._run(plan, {"a": target}, threads=4)
            assert {fault.where for fault in outcome.faults} == {records[4].path, records[6].path}
            assert open_files() == before

    def _run(
        self, plan: Plan, targets: dict[str, Target], *, threads: int = 2, memory_nbytes: int = MEMORY_NBYTES
    ) -> Outcome:
        return self.make(threads=threads, memory_nbytes=memory_nbytes, checksum=True).execute(plan, targets)


def _many_small(folder: str) -> tuple[Plan, dict[str, torch.Tensor]]:
    """700 neighbouring copies of 1 to 9 elements, dealt to three buffers (one of another type), and the result."""
    rng = random.Random(4)
    lengths = [rng.randint(1, 9) for _ in range(700)]
    saved = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(4))
    record = write_record(folder, "file", _raw(saved))
    parts: dict[str, list[torch.Tensor]] = {"a": [], "b": [], "cast": []}
    copies, at = [], 0
    for i, numel in enumerate(lengths):
        buffer = list(parts)[i % 3]
        to = torch.bfloat16 if buffer == "cast" else torch.float32
        offset = sum(part.numel() for part in parts[buffer])
        copies.append(_copy(record, ElementType.FLOAT32, at, numel, offset, buffer=buffer, to=to))
        parts[buffer].append(saved[at : at + numel].to(to))
        at += numel
    return Plan(copies=tuple(copies)), {buffer: torch.cat(of) for buffer, of in parts.items()}


def _copy(
    record: Record,
    dtype: ElementType,
    first: int,
    numel: int,
    element_offset: int,
    *,
    buffer: str = "a",
    to: torch.dtype | None = None,
) -> Copy:
    """`numel` elements from element `first` of the record to `element_offset` of a buffer."""
    return Copy(
        record=record,
        byte_offset=record.byte_offset + first * dtype.itemsize,
        numel=numel,
        dtype=dtype,
        buffer=buffer,
        element_offset=element_offset,
        target_dtype=element_type(to) if to is not None else dtype,
    )


def _fill(element_offset: int, numel: int) -> Fill:
    return Fill(buffer="a", element_offset=element_offset, numel=numel)


def _check(record: Record, first: int, nbytes: int) -> Check:
    return Check(record=record, byte_offset=record.byte_offset + first, nbytes=nbytes)


def _bytes(nbytes: int, *, seed: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def _tensor(data: Sequence[int], dtype: ElementType) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch_dtype(dtype))


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def _overwrite(record: Record, at: int, data: bytes) -> None:
    with open(record.path, "r+b") as file:
        file.seek(record.byte_offset + at)
        file.write(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint on disk: how it is opened, and what it holds.

    `truth` has every logical tensor of the checkpoint, in the type in which it was saved.
    """

    open: Callable[[], Index]
    truth: Mapping[TensorKey, torch.Tensor]


class FormatSuite:
    """Subclass it and write `make`; more than one shard, padding and an empty tensor make it tell the most."""

    def make(self, folder: str) -> SavedCheckpoint:
        """Write a checkpoint below the empty folder `folder`."""
        raise NotImplementedError

    def test_every_tensor_is_placed(self) -> None:
        """The layout has exactly the tensors that were saved, with their shapes and element types."""
        with self._saved() as saved:
            layout = saved.open().layout
            found = {key: (place.shape, place.dtype) for key, place in layout.placements.items()}
            assert found == {key: (tuple(t.shape), element_type(t.dtype)) for key, t in saved.truth.items()}

    def test_opening_opens_no_shard(self) -> None:
        """Shards are opened when their bytes are wanted, and then only those that have some."""
        with self._saved() as saved:
            index = saved.open()
            assert index.opened == ()
            for key, tensor in saved.truth.items():
                assert bool(list(_locate(index, key))) == bool(tensor.numel())
            placements = [part for key in saved.truth for part in index.layout[key].parts]
            holders = {(p.family, piece.shard) for p in placements for piece in p.cut.pieces(0, p.numel)}
            assert set(index.opened) == holders

    def test_fragments_tile_every_tensor(self) -> None:
        """The fragments of a tensor follow each other from its first element to its last: no hole, no overlap."""
        with self._saved() as saved:
            index = saved.open()
            for key, tensor in saved.truth.items():
                spans = sorted((at, at + extent.numel) for at, extent in _locate(index, key))
                edges = [0, *(stop for _, stop in spans)]
                assert [start for start, _ in spans] == edges[:-1], f"{key}: fragments lie at {spans}"
                assert edges[-1] == tensor.numel(), f"{key}: {edges[-1]} of {tensor.numel()} elements are placed"
            assert index.faults == []

    def test_extents_lie_in_their_files(self) -> None:
        """An extent lies inside its record, and the record inside its file."""
        with self._saved() as saved:
            index = saved.open()
            for key in saved.truth:
                for _, extent in _locate(index, key):
                    record = extent.record
                    assert record.byte_offset <= extent.byte_offset, f"{key}: begins before its record"
                    stop = record.byte_offset + record.nbytes
                    assert extent.byte_offset + extent.nbytes <= stop, f"{key}: ends behind its record"
                    assert 0 <= stop <= os.path.getsize(record.path), f"{key}: its record leaves the file"

    def test_records_have_the_checksum_of_their_bytes(self) -> None:
        """A record that declares a crc32 has it."""
        with self._saved() as saved:
            for record in _records(saved):
                found = crc32(_read(record.path, record.byte_offset, record.nbytes))
                assert record.crc32 in (None, found), f"{record.path}: {record} has crc32 {found:08x}"

    def test_reading_every_fragment_gives_what_was_saved(self) -> None:
        """The elements of all fragments are, bit for bit, those of the tensor that was saved."""
        with self._saved() as saved:
            index = saved.open()
            for key, tensor in saved.truth.items():
                assert _elements(index, key, _whole(tensor)) == _raw(tensor), f"{key} differs"

    def test_parts_are_found_as_the_whole_is(self) -> None:
        """Half of a tensor, and a box inside it, are read from their own fragments alone."""
        with self._saved() as saved:
            index = saved.open()
            for key, tensor in saved.truth.items():
                whole = Box.whole(tuple(tensor.shape))
                half = Region(box=whole, start=tensor.numel() // 3, stop=tensor.numel() - tensor.numel() // 4)
                assert _elements(index, key, half) == _raw(tensor.reshape(-1)[half.start : half.stop]), f"{key}: a span"
                box = Box(offset=tuple(n // 3 for n in tensor.shape), size=tuple(n - n // 3 for n in tensor.shape))
                inner = tensor[tuple(slice(n // 3, None) for n in tensor.shape)]
                region = Region(box=box, start=0, stop=box.numel)
                assert _elements(index, key, region) == _raw(inner), f"{key}: a box"

    def test_a_truncated_file_is_a_fault(self) -> None:
        """Half of any file is refused: when the checkpoint is opened, or as a fault of the index."""
        with self._saved() as saved:
            for path in sorted({record.path for record in _records(saved)}):
                whole = _read(path, 0, os.path.getsize(path))
                os.truncate(path, len(whole) // 2)
                assert _complains(saved), f"half of {path} passes for a whole checkpoint"
                with open(path, "wb") as file:
                    file.write(whole)
            assert not _complains(saved)

    @contextmanager
    def _saved(self) -> Iterator[SavedCheckpoint]:
        with tempfile.TemporaryDirectory() as folder:
            yield self.make(folder)


def _whole(tensor: torch.Tensor) -> Region:
    return Region(box=Box.whole(tuple(tensor.shape)), start=0, stop=tensor.numel())


def _locate(index: Index, key: TensorKey) -> Iterator[tuple[int, Extent]]:
    box = Box.whole(index.layout[key].shape)
    return index.locate(key, Region(box=box, start=0, stop=box.numel))


def _elements(index: Index, key: TensorKey, region: Region) -> bytes:
    """The bytes of a region's elements, gathered from its fragments."""
    size = index.layout[key].dtype.itemsize
    data = bytearray(region.numel * size)
    for at, extent in index.locate(key, region):
        data[at * size : at * size + extent.nbytes] = _read(extent.path, extent.byte_offset, extent.nbytes)
    return bytes(data)


def _records(saved: SavedCheckpoint) -> set[Record]:
    index = saved.open()
    return {extent.record for key in saved.truth for _, extent in _locate(index, key)}


def _complains(saved: SavedCheckpoint) -> bool:
    """Whether opening the checkpoint, and every shard of it that has bytes, finds a fault."""
    try:
        index = saved.open()
        for key in saved.truth:
            for _ in _locate(index, key):
                pass
    except ReshardError:
        return True
    return bool(index.faults)


def _read(path: str, byte_offset: int, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(byte_offset)
        return file.read(nbytes)


_LEAD = b"before the record"  # records begin at an odd offset: nothing may count on alignment in the file


def write_record(folder: str, name: str, data: bytes) -> Record:
    """A new file in `folder` that holds `data` as one record, between bytes that belong to none."""
    path = os.path.join(folder, name)
    with open(path, "xb") as file:
        file.write(_LEAD + data + b"after it")
    return Record(path=path, byte_offset=len(_LEAD), nbytes=len(data), crc32=crc32(data))


def checksum_faults(outcomes: Iterable[Outcome]) -> list[Fault]:
    """What the ranks of one run find when they combine what they read.

    AssertionError where slices do not tile their record exactly: bytes were read twice or left out.
    """
    pending, faults = [], []
    for outcome in outcomes:
        left, found = settle(partial_sums(outcome))
        pending.append(left)
        faults += found
    combined, again = combine(pending)
    assert not again, f"these records were not read exactly once: {sorted(again)}"
    return faults + combined


def open_files() -> int | None:
    """How many file descriptors this process has open; None where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


class StoredTarget:
    """A target that offers no view, as a device's memory does, and keeps the scratch memory that it was given."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._given: dict[int, memoryview] = {}

    @property
    def scratch_nbytes(self) -> int:
        """The sizes of all buffers that bytes were ever stored from, together."""
        return sum(given.nbytes for given in self._given.values())

    def view(self, element_offset: int, numel: int, dtype: ElementType) -> memoryview | None:
        return None

    def store(self, element_offset: int, data: memoryview, dtype: ElementType) -> None:
        self._keep(data)
        self._target.store(element_offset, data, dtype)

    def scatter(self, element_offset: int, data: memoryview, dtype: ElementType, strides: Strides) -> None:
        self._keep(data)
        self._target.scatter(element_offset, data, dtype, strides)

    def _keep(self, data: memoryview) -> None:
        with self._lock:
            self._given[id(data.obj)] = memoryview(data.obj)

    def zero(self, element_offset: int, numel: int) -> None:
        self._target.zero(element_offset, numel)
