"""Bytes that several ranks want alike: each rank reads a part of them, and they pass their parts on to each other.

The chunks of a plan go to the ranks in turn. A window is one chunk of each rank: every rank reads its own, then gets
all of them in one collective, while its next chunk is being read. What arrived is summed and dealt out by each rank as
if it had read it from the file itself, so that checksums and fingerprints also prove what came from another rank.

No rank leaves the windows early. One that cannot read its chunk says so beside the bytes and goes on, and so does one
that cannot place what it got: nobody waits for it in vain, and what it found is raised after the last window.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch

from ds_reshard.containers.crc import crc32
from ds_reshard.errors import Fault
from ds_reshard.execution.buffers import memory_of
from ds_reshard.execution.chunks import Chunk
from ds_reshard.execution.ports import Outcome, Saw, Slice, Spared, Target
from ds_reshard.execution.reading import OpenFiles, ended_early, read_at, read_failed

SAID_NBYTES = 64
"""Room behind the bytes of a chunk for what a rank says of it."""

_READ_NBYTES = 1 << 20


class Exchange(Protocol):
    """Ranks that pass bytes on to each other."""

    @property
    def rank(self) -> int:
        """This rank's number among them."""

    @property
    def size(self) -> int: ...

    def gather(self, mine: torch.Tensor, everyone: Sequence[torch.Tensor]) -> None:
        """Fill `everyone` with what each rank gives as `mine`. Collective; RuntimeError where a rank is gone.

        It may take as much memory again as `everyone` has.
        """


class Slot:
    """Memory for a chunk; behind it whether it could not be read."""

    def __init__(self, row: torch.Tensor) -> None:
        self.row = row
        self.nbytes = len(row) - SAID_NBYTES
        self.memory = memory_of(row)
        self._said = row[-SAID_NBYTES:].view(torch.int64)

    def say(self, *, failed: bool) -> None:
        self._said[0] = int(failed)

    @property
    def failed(self) -> bool:
        return bool(self._said[0])


class _Part(NamedTuple):
    """Bytes of a chunk that one call reads, to `position` of its memory."""

    path: str
    byte_offset: int
    position: int
    nbytes: int


def _parts(chunk: Chunk | None) -> Iterator[_Part]:
    for run in chunk.runs if chunk is not None else ():
        for at in range(0, run.nbytes, _READ_NBYTES):
            nbytes = min(_READ_NBYTES, run.nbytes - at)
            yield _Part(run.record.path, run.byte_offset + at, run.position + at, nbytes)


class Passing:
    """One execution: the windows, and what the threads share."""

    def __init__(
        self,
        exchange: Exchange,
        slots: Sequence[Slot],
        *,
        threads: int,
        checksum: bool,
        saw: Saw | None,
    ) -> None:
        self.outcome = Outcome()
        self._exchange = exchange
        self._everyone, self._own = slots[: exchange.size], slots[exchange.size :]
        self._threads, self._checksum, self._saw = threads, checksum, saw
        self._noting = threading.Lock()
        self._failure: Exception | None = None

    def run(self, work: Sequence[Chunk], targets: Mapping[str, Target]) -> None:
        """Read this rank's chunks and deal out everyone's. Collective; raises in the end what failed on this rank."""
        size = self._exchange.size
        self._targets = targets
        self._windows = [work[at : at + size] for at in range(0, len(work), size)]
        read = [self._chunk(number) for number in range(len(self._windows))]
        with (
            OpenFiles((part.path for chunk in read for part in _parts(chunk)), self.outcome) as self._files,
            ThreadPoolExecutor(self._threads, thread_name_prefix="ds-reshard-read") as self._readers,
            ThreadPoolExecutor(self._threads, thread_name_prefix="ds-reshard-place") as self._placers,
        ):
            self._pass_on()
        self._count()
        if self._failure is not None:
            raise self._failure

    def _pass_on(self) -> None:
        reading = self._begin(self._chunk(0), self._own[0])
        for number, window in enumerate(self._windows):
            own = self._own[number % 2]
            own.say(failed=not self._finished(reading))
            reading = self._begin(self._chunk(number + 1), self._own[(number + 1) % 2])
            self._exchange.gather(own.row, [slot.row for slot in self._everyone])
            self._place(window)

    def _chunk(self, number: int) -> Chunk | None:
        """This rank's chunk of a window; the last window may have none for it."""
        window, rank = self._windows[number] if number < len(self._windows) else (), self._exchange.rank
        return window[rank] if rank < len(window) else None

    def _begin(self, chunk: Chunk | None, slot: Slot) -> list[Future[bool]]:
        try:
            return [self._readers.submit(self._read, part, slot.memory) for part in _parts(chunk)]
        except RuntimeError as error:  # no thread could be started
            refused: Future[bool] = Future()
            refused.set_exception(error)
            return [refused]

    def _finished(self, reading: list[Future[bool]]) -> bool:
        """Wait for a chunk; whether all of it was read."""
        try:
            done = [part.result() for part in reading]
        except Exception as error:
            self._failure = self._failure or error
            return False
        return all(done)

    def _read(self, part: _Part, memory: memoryview) -> bool:
        try:
            fd = self._files.acquire(part.path)
            got, calls = read_at(fd, memory[part.position : part.position + part.nbytes], part.byte_offset)
        except OSError as error:
            self._note(read_failed(part.path, error))
            return False
        finally:
            self._files.release(part.path)
        if got < part.nbytes:
            self._note(ended_early(part.path, part.byte_offset, part.nbytes, part.byte_offset + got))
            return False
        with self._noting:
            self.outcome.bytes_read += got
            self.outcome.read_calls += calls
        return True

    def _place(self, window: Sequence[Chunk]) -> None:
        """Sum up and deal out what arrived; what another rank could not read is noted as missing."""
        try:
            list(self._placers.map(self._place_chunk, window, self._everyone))
        except Exception as error:
            self._failure = self._failure or error

    def _place_chunk(self, chunk: Chunk, slot: Slot) -> None:
        if slot.failed:
            with self._noting:
                self.outcome.missing_nbytes += sum(run.nbytes for run in chunk.runs)
            return
        for run in chunk.runs:
            placed = [(copy, slot.memory[at : at + copy.nbytes]) for copy, at in run.placed()]
            if self._saw is not None:
                self._saw([copy for copy, _ in placed], [data for _, data in placed])
            for copy, data in placed:
                target = self._targets[copy.buffer]
                view = target.view(copy.element_offset, copy.numel, copy.dtype)
                if view is None:
                    target.store(copy.element_offset, data, copy.dtype)
                else:
                    view[:] = data
            if self._checksum:
                crc = crc32(slot.memory[run.position : run.position + run.nbytes])
                part = Slice(byte_offset=run.byte_offset - run.record.byte_offset, nbytes=run.nbytes, crc32=crc)
                with self._noting:
                    self.outcome.slices.setdefault(run.record, []).append(part)

    def _count(self) -> None:
        """What this rank did not read, as others did."""
        rank = self._exchange.rank
        theirs = [part for w in self._windows for at, chunk in enumerate(w) if at != rank for part in _parts(chunk)]
        mine = {part.path for number in range(len(self._windows)) for part in _parts(self._chunk(number))}
        self.outcome.spared = Spared(
            nbytes=sum(part.nbytes for part in theirs),
            read_calls=len(theirs),
            files_opened=len({part.path for part in theirs} - mine),
        )

    def _note(self, fault: Fault) -> None:
        with self._noting:
            self.outcome.faults.append(fault)
