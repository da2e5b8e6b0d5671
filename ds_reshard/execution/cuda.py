"""The executor for buffers on a GPU, what it needs of a device, and the choice between it and that of the host.

Each of `threads` threads takes the next chunk of the plan and a slot of a ring of pinned memory, and reads the chunk's
bytes into the slot and sums them there. It gives the device two pieces of work: the copy to the slot's scratch memory
on one stream, and the dealing out into the buffers on another, which waits for the copy. An event of that second stream
says when the slot is free again. So one chunk is read while another is copied and a third is dealt out. A chunk of few
pieces that are neither cast nor dealt out by rows skips the scratch memory: to give an H200 a copy took 0.1 ms, and one
thread at a time does.

Buffers in host memory, transposed tensors, and bytes that are read for their checksum alone, are left to the executor
of the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import numpy
import torch

from ds_reshard.containers.crc import crc32, crc32_of_rows
from ds_reshard.containers.positioned import read_into
from ds_reshard.errors import ConfigError, DeviceFailed, Fault, raise_faults
from ds_reshard.execution.buffers import TensorTarget, memory_of
from ds_reshard.execution.interfaces import Executor, Outcome, Saw, Slice, Target, ended_early, read_failed
from ds_reshard.execution.scatter import (
    INDEX_NUMEL,
    ROW_NBYTES,
    Chunk,
    Named,
    Run,
    chunks,
    chunks_of_rows,
    deal,
    scattering,
    straight,
)
from ds_reshard.execution.threads import OpenFiles, Seen, ThreadExecutor
from ds_reshard.planning.copies import BUFFER, NUMEL, ROWS, SPREAD, Copies, Copy
from ds_reshard.planning.plan import Plan


class Event(Protocol):
    """The work that a stream had been given at some moment."""

    def synchronize(self) -> None:
        """Wait for that work. Raises RuntimeError where some of it failed."""


class Stream(Protocol):
    """Work that a device does in order, after the host went on."""

    def run(self, work: Callable[[], None]) -> None:
        """Give the stream the tensor operations that `work` makes. Raises RuntimeError where they cannot be given."""

    def record(self) -> Event: ...

    def wait(self, event: Event) -> None:
        """Work that is given from now on begins after the event's; the host does not wait."""


class Device(Protocol):
    """Memory and streams; RuntimeError where memory cannot be had."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the device's memory."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that is copied to the device beside other work; one byte an element."""

    def scratch(self, nbytes: int) -> torch.Tensor:
        """Memory of the device; one byte an element."""

    def stream(self) -> Stream: ...

    def enter(self) -> None:
        """Have this thread work on the device; before it gives a stream anything."""

    def given(self) -> Event:
        """All work that the caller has given the device so far."""

    def give_back(self) -> None:
        """Give memory that nothing uses back to the device."""

    def free_nbytes(self) -> int:
        """Memory of the device that is free."""


class CudaStream:
    """A stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)


class CudaDevice:
    """A CUDA device, by number."""

    def __init__(self, number: int) -> None:
        self._device = torch.device("cuda", number)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def scratch(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def stream(self) -> CudaStream:
        return CudaStream(self._device)

    def enter(self) -> None:
        """Else the thread is one of GPU 0, of whose memory torch then takes half a gigabyte.

        (`StreamContext.__exit__` goes back to the stream of the thread's device: torch/cuda/__init__.py, 2.13.)
        """
        torch.cuda.set_device(self._device)

    def given(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def free_nbytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])


SMALLEST_NBYTES = 4096


class Slot:
    """A place of the ring: pinned memory, scratch memory of the device, and what they were last used for."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.pinned = device.pinned(nbytes)
        self.scratch = device.scratch(nbytes)
        self.memory = memory_of(self.pinned)
        self.used: tuple[Chunk, Event] | None = None

    def wait(self) -> Fault | None:
        """Wait until the device is done with the slot; what went wrong, if it did."""
        if self.used is not None:
            chunk, event = self.used
            try:
                event.synchronize()
            except RuntimeError as error:
                return device_failed(chunk, error)
        return None


def ring(device: Device, slots: int, nbytes: int) -> list[Slot] | Fault:
    """So many slots of `nbytes`, or of the largest half, quarter, ... that there is memory for; or what is missing."""
    while True:
        try:
            return [Slot(device, nbytes) for _ in range(slots)]
        except RuntimeError as error:
            device.give_back()
            if nbytes // 2 < SMALLEST_NBYTES:
                return DeviceFailed.fault(
                    "scratch memory of the load",
                    f"the device or the host has no memory left for it: {_first_line(error)}",
                    f"{slots * nbytes} bytes of each, in small pieces",
                    f"{device.free_nbytes()} bytes free on the device",
                    mend='free memory of the device before the load, or load with "reshard": {"device": "cpu"}',
                )
            nbytes //= 2


def device_failed(chunk: Chunk, error: RuntimeError) -> Fault:
    """A device failed at a chunk, or at work before it."""
    return DeviceFailed.fault(
        chunk.runs[0].record.path,
        f"the device failed at {chunk.described()}: {_first_line(error)}",
        mend='load again in a new process, with "reshard": {"device": "cpu"} if it comes back',
    )


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_SLOTS_A_THREAD = 2
_LARGEST_NBYTES = 8 << 20
_READ_NBYTES = 2 << 20
_SCARCE_NUMEL = 1 << 12
_FEWEST = 16
"""Rows are read and dealt out together if they take at least such a part of a slot."""
_SHOWN_THERE_NBYTES = 1 << 19
_UNIT = 16

SawThere = Callable[[Sequence[Copy], Sequence[torch.Tensor]], None]
"""Takes copies that were read, and the bytes of each in the memory of a device."""


class CudaExecutor:
    """Reads with as many threads as `host`; pinned memory, and scratch memory of the device, within its memory each.

    Rows without a pattern need up to 32 MiB more of the device, for their index. Where the device has not so much
    memory left, smaller chunks are used. `host.saw` is called for copies to the device too; with `saw_there`, those
    that are large, or cast, are shown to that one instead: as bytes there, on a stream of the executor. `named` says in
    the fault of a device of which tensors the elements were.
    """

    def __init__(
        self, host: ThreadExecutor, device: Device, *, saw_there: SawThere | None = None, named: Named | None = None
    ) -> None:
        self.host = host
        self.device = device
        self.saw_there = saw_there
        self.named = named
        self.slots = max(1, min(_SLOTS_A_THREAD * host.threads, host.memory_nbytes // SMALLEST_NBYTES))
        share = max(1, min(_LARGEST_NBYTES, host.memory_nbytes // self.slots))
        self.slot_nbytes = max(SMALLEST_NBYTES, 1 << share.bit_length() - 1)

    @property
    def nbytes_read(self) -> int:
        """How much was read so far, for the device and for the host."""
        return self.host.nbytes_read

    def execute(self, plan: Plan, targets: Mapping[str, Target]) -> Outcome:
        tensors = {
            name: target.tensor
            for name, target in targets.items()
            if isinstance(target, TensorTarget) and self.device.holds(target.tensor)
        }
        outcome = Outcome()
        for fill in plan.fills:
            targets[fill.buffer].zero(fill.element_offset, fill.numel)
        copies = Copies.of(plan.copies)
        there = numpy.array([buffer in tensors for buffer in copies.buffers], dtype=bool)[copies.table[BUFFER]]
        there &= copies.table[SPREAD] == 1
        to_device, others = copies.take(there & (copies.table[NUMEL] > 0)), copies.take(~there)
        if len(to_device):
            before = Seen(to_device.records_used)
            _Load(self, outcome, tensors).run(to_device)
            outcome.faults += before.changed_faults()
        outcome.add(self.host.execute(replace(plan, copies=others, fills=()), targets))
        return outcome


class _Load:
    """One execution: what the threads share."""

    def __init__(self, executor: CudaExecutor, outcome: Outcome, tensors: Mapping[str, torch.Tensor]) -> None:
        self._executor = executor
        self._outcome = outcome
        self._tensors = tensors
        self._free: SimpleQueue[Slot] = SimpleQueue()
        self._noting, self._giving = threading.Lock(), threading.Lock()
        self._stopped = threading.Event()

    def run(self, copies: Copies) -> None:
        """Move the copies, a portion of their rows at a time; faults are in the outcome."""
        executor, threads = self._executor, self._executor.host.threads
        slots = ring(executor.device, executor.slots, executor.slot_nbytes)
        if isinstance(slots, Fault):
            self._note(slots)
            return
        self._copying, self._dealing = executor.device.stream(), executor.device.stream()
        given = executor.device.given()  # fills, and whatever the caller does with the buffers
        for stream in (self._copying, self._dealing):
            stream.wait(given)
        for slot in slots:
            self._free.put(slot)
        for work in self._portions(copies, len(slots[0].memory)):
            with OpenFiles(run.record.path for chunk in work for run in chunk.runs) as self._files:
                left = iter(work)  # next() of a list's iterator is atomic: each thread takes the next chunk
                try:
                    with ThreadPoolExecutor(threads, "ds-reshard", initializer=executor.device.enter) as pool:
                        for done in [pool.submit(self._carry_all, left) for _ in range(min(threads, len(work)))]:
                            done.result()
                finally:
                    self._finish(slots, work[-1])
            if self._stopped.is_set():
                return

    def _portions(self, copies: Copies, slot_nbytes: int) -> Iterator[list[Chunk]]:
        """The chunks of all copies: rows of large copies as they are, all others one by one, a portion at a time."""
        executor = self._executor
        shown = executor.saw_there is not None or executor.host.saw is not None
        table, row = copies.table, copies.table[NUMEL] * copies.itemsizes
        large = (table[ROWS] > 1) & (row <= slot_nbytes) & (row * table[ROWS] * _FEWEST >= slot_nbytes)
        by_rows = large & (not shown)
        if by_rows.any():
            yield list(chunks_of_rows(copies.take(by_rows).planes_apart(), slot_nbytes, executor.named))
        for runs in copies.take(~by_rows).runs():
            if len(runs):
                yield list(chunks(runs, slot_nbytes, executor.named))

    def _finish(self, slots: list[Slot], last: Chunk) -> None:
        """Wait for all that the device was given, also for a chunk that it was given in part, as memory ran out."""
        for slot in slots:
            self._stop(slot.wait())
        for stream in (self._copying, self._dealing):
            try:
                stream.record().synchronize()
            except RuntimeError as error:
                self._stop(device_failed(last, error))

    def _carry_all(self, left: Iterator[Chunk]) -> None:
        for chunk in left:
            if self._stopped.is_set():
                return
            slot = self._free.get()
            try:
                fault = slot.wait() or self._carry(chunk, slot)
            finally:
                self._free.put(slot)
            self._stop(fault)

    def _stop(self, fault: Fault | None) -> None:
        """End the load for a fault of the device; what it says of later work is a consequence of the first."""
        if fault is not None:
            with self._giving:
                first = not self._stopped.is_set()
                self._stopped.set()
            if first:
                self._note(fault)

    def _carry(self, chunk: Chunk, slot: Slot) -> Fault | None:
        """Read a chunk and give the device its work; a fault of the device ends the load."""
        runs = [run for run in chunk.runs if self._read(run, slot.memory)]
        shown = self._show(runs, slot)
        how = scattering(runs, chunk.nbytes, self._tensors, INDEX_NUMEL)
        source = slot.pinned if shown is None and straight(how, self._tensors) else slot.scratch
        rows = len(how.table[0])
        behind = -(-chunk.nbytes // _UNIT) * _UNIT
        nbytes = behind + ROW_NBYTES * rows if rows else chunk.nbytes
        if rows:
            slot.pinned[behind:nbytes].view(torch.int64).copy_(torch.tensor(how.table, dtype=torch.int64).view(-1))
        table = slot.scratch[behind : behind + ROW_NBYTES * rows].view(torch.int64).view(3, rows)
        with self._giving:
            try:
                if source is slot.scratch:
                    self._copying.run(lambda: _copy(slot, nbytes))
                    self._dealing.wait(self._copying.record())
                try:
                    self._dealing.run(lambda: deal(source, how, table, self._tensors))
                except torch.cuda.OutOfMemoryError:
                    self._dealing.record().synchronize()
                    self._executor.device.give_back()
                    smaller = scattering(runs, chunk.nbytes, self._tensors, _SCARCE_NUMEL)
                    self._dealing.run(lambda: deal(source, smaller, table, self._tensors))
                if shown is not None:
                    self._dealing.run(shown)
                slot.used = chunk, self._dealing.record()
            except RuntimeError as error:
                return device_failed(chunk, error)
        return None

    def _show(self, runs: list[Run], slot: Slot) -> Callable[[], None] | None:
        """Tell `saw` of small copies, and return what tells `saw_there` of others, if any, once they are on the device.

        What is cast is shown there whatever its size: the NaN of a cast has other bits on a GPU than on the host.
        """
        saw, there = self._executor.host.saw, self._executor.saw_there
        small: list[tuple[Copy, int]] = []
        others: list[tuple[Copy, int]] = []
        for copy, at in (placed for run in runs for placed in run.placed()):
            apart = copy.nbytes >= _SHOWN_THERE_NBYTES or copy.dtype is not copy.target_dtype
            (others if there is not None and apart else small).append((copy, at))
        if saw is not None and small:
            saw([copy for copy, _ in small], [slot.memory[at : at + copy.nbytes] for copy, at in small])

        def tell(there: SawThere) -> None:
            there([copy for copy, _ in others], [slot.scratch[at : at + copy.nbytes] for copy, at in others])

        return partial(tell, there) if there is not None and others else None

    def _read(self, run: Run, memory: memoryview) -> bool:
        """Fill the run's place in `memory`, summing what is still in the processor's cache."""
        path, host, rows = run.record.path, self._executor.host, list(run.rows())
        crc, alone = 0, len(rows) == 1
        try:
            fd = self._files.acquire(path)
            for offset, position, nbytes in [(run.byte_offset, run.position, run.nbytes)] if run.window else rows:
                done = 0
                while done < nbytes:
                    part = memory[position + done : position + min(nbytes, done + _READ_NBYTES)]
                    got = read_into(fd, [part], offset + done)
                    if not got:
                        self._note(ended_early(path, offset, nbytes, offset + done))
                        return False
                    if host.checksum and alone:
                        crc = crc32(part[:got], crc)
                    done += got
        except OSError as error:
            self._note(read_failed(path, error))
            return False
        finally:
            self._files.release(path)
        copy = run.copies[0]
        nbytes, step = (run.nbytes, 0) if alone else (copy.row_nbytes, copy.step_nbytes)
        if host.checksum and not alone:
            crc = crc32_of_rows((memory[at : at + nbytes] for _, at, _ in rows), step)
        with self._noting:
            self._outcome.bytes_read += run.wanted_nbytes
            host.nbytes_read += run.wanted_nbytes
            if host.checksum:
                at = run.byte_offset - run.record.byte_offset
                self._outcome.slices.setdefault(run.record, []).append(Slice(at, nbytes, crc, len(rows), step))
        return True

    def _note(self, fault: Fault) -> None:
        with self._noting:
            self._outcome.faults.append(fault)


def _copy(slot: Slot, nbytes: int) -> None:
    slot.scratch[:nbytes].copy_(slot.pinned[:nbytes], non_blocking=True)


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
    host = ThreadExecutor(threads=threads, memory_nbytes=memory_nbytes, checksum=checksum, saw=saw)
    gpu = gpu_of(targets) if device != "cpu" else None
    return host if gpu is None else CudaExecutor(host, gpu, saw_there=saw_there, named=named)


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
