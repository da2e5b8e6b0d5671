"""Work that the ranks of a launcher, or copies of this process, share: each does a part, and all hear of the whole.

Ranks tell each other every second what they have done, in a thread of each that takes part in a sum over a process
group of its own: a rank that has ended breaks it at once, one that hangs after the group's timeout, whatever the ranks'
other threads wait for meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from heapq import heapify, heapreplace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Generic, TypeVar

from ds_reshard.errors import RankLost, ReadFailed, ReshardError, WriteFailed, as_faults, error_of
from ds_reshard.operations.options import Progress, Reading
from ds_reshard.operations.ranks import attempt, collective, gather, raise_caused, rank, world_size

Part = TypeVar("Part")
News = TypeVar("News")
T = TypeVar("T")
Told = Callable[[int], None] | None
"""Called with the number of bytes that a share has read so far."""
LEAST_NBYTES = 256 << 20
"""A process of its own is made for at least so many bytes to read."""
COPY_NBYTES = 16 << 20
"""Memory for buffers that a process of its own needs."""
BEAT_S = 1.0


def in_shares(
    work: Callable[[list[int], Reading, Told], T],
    sizes: Sequence[int],
    reading: Reading,
    *,
    progress: Progress | None,
    subject: str,
) -> list[T]:
    """Return what `work` gives for each share of items of these sizes, on every rank. Collective with `reading.ranks`.

    Else `reading.processes` copies of this process do it, which share its threads and memory; fewer if there are few
    bytes. `work` is given the numbers of its items, how to read, and whom to tell of the bytes that it has read.
    What one raises all do.
    """
    total, ranks = sum(sizes), reading.ranks and world_size() > 1
    copies = min(reading.processes, total // LEAST_NBYTES, reading.memory_nbytes // COPY_NBYTES)
    if ranks or copies < 2 or reading.device == "cuda":
        with showing(progress, ranks=ranks) as tell:
            mine = dealt(sizes, (rank(), world_size()) if ranks else (0, 1))
            told = (lambda done: tell(min(done, total), total)) if tell is not None else None
            return in_ranks(lambda: work(mine, reading, told), ranks=ranks, subject=subject)
    own, results, read = reading.divided(copies), dict[int, T](), [0] * copies

    def copy(number: int, tell: Callable[[tuple[int, int, T | None]], None]) -> None:
        result = work(dealt(sizes, (number, copies)), own, lambda done: tell((number, done, None)))
        tell((number, -1, result))

    def hear(said: tuple[int, int, T | None]) -> None:
        number, done, result = said
        if done < 0:
            results[number] = result  # type: ignore[assignment]
            return
        read[number] = done
        if progress is not None:
            progress(min(sum(read), total), total)

    mend = "run again; if memory was short, with fewer --processes or less --memory"
    in_copies(copies, copy, hear, lost=ReadFailed, what="its part not read", mend=mend)
    return [results[number] for number in range(copies)]


def in_ranks(work: Callable[[], T], *, ranks: bool, subject: str) -> list[T]:
    """Return what `work` gives on each rank, on every rank; what one raises all do. Collective with `ranks`."""
    if not ranks or world_size() == 1:
        return [work()]
    value, faults, cause = attempt(work)
    reports = gather((value, faults))
    try:
        raise_caused([fault for _, of_rank in reports for fault in of_rank], subject=subject, cause=cause)
    except ReshardError as error:
        error.agreed = True
        raise
    return [result for result, _ in reports]  # type: ignore[misc]


def dealt(nbytes: Sequence[int], share: tuple[int, int]) -> list[int]:
    """Return the numbers of a share's items, in order; `share` is its number and how many there are.

    The largest item is dealt first, each to the share that has least by then.
    """
    number, shares = share
    if shares == 1:
        return list(range(len(nbytes)))
    loads = [(0, one) for one in range(shares)]
    heapify(loads)
    own = []
    for item in sorted(range(len(nbytes)), key=lambda item: -nbytes[item]):
        load, least = loads[0]
        heapreplace(loads, (load + nbytes[item], least))
        own += [item] if least == number else []
    return sorted(own)


class Parts(Generic[Part]):
    """Parts of some work; each is given out once, to whichever thread, or copy of the process, asks for the next."""

    def __init__(self, parts: Sequence[Part], *, copied: bool) -> None:
        self._parts = parts
        context = multiprocessing.get_context("fork")
        self._lock: AbstractContextManager[object] = context.Lock() if copied else threading.Lock()
        self._next = context.RawValue("q", 0) if copied else ctypes.c_longlong(0)

    def __len__(self) -> int:
        return len(self._parts)

    def left(self) -> Iterator[Part]:
        while True:
            with self._lock:
                number = self._next.value
                self._next.value += 1
            if number >= len(self._parts):
                return
            yield self._parts[number]


_RESUME = "run again with --resume; if memory was short, with fewer --processes or less --memory"
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def in_copies(
    number: int,
    work: Callable[[int, Callable[[News], None]], None],
    told: Callable[[News], None],
    *,
    lost: type[ReshardError] = WriteFailed,
    what: str = "its part not written",
    mend: str = _RESUME,
) -> None:
    """Do `work` in so many copies of this process, by their numbers; each may tell something, and `told` hears it here.

    What is open, and read so far, all of them have. A copy runs its operations of torch in one thread: the threads of
    this process are not in it. Raises what a copy raises first, and `lost` where one ends without a word, which says
    `what` then; none is left behind.
    """
    context = multiprocessing.get_context("fork")
    copies: dict[Connection[object, object], ForkProcess] = {}
    try:
        for one in range(number):
            here, there = context.Pipe(duplex=False)
            given = partial(work, one), there, [*copies, here], os.getpid()
            copy = context.Process(target=_copy, args=given, daemon=True)
            copy.start()
            there.close()
            copies[here] = copy
        while copies:
            for pipe in wait(list(copies)):
                assert isinstance(pipe, Connection)
                try:
                    said = pipe.recv()
                except (EOFError, OSError):  # it has ended, perhaps in the middle of what it said
                    copy = copies.pop(pipe)
                    pipe.close()
                    copy.join()
                    if copy.exitcode:
                        raise lost.of(f"process {copy.pid}", f"{_end(copy)}, {what}", mend=mend) from None
                    continue
                if isinstance(said, ReshardError):
                    raise said
                told(said)
    finally:
        for pipe, copy in copies.items():
            copy.kill()
            copy.join()
            pipe.close()


def _copy(
    work: Callable[[Callable[[News], None]], None],
    pipe: Connection[object, object],
    of_others: Sequence[Connection[object, object]],
    parent: int,
) -> None:
    gc.freeze()  # a collection writes into each object that it passes, and so copies its page
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)  # which may be killed, and its lock is held here too
    if os.getppid() != parent:  # before it could ask
        os.kill(os.getpid(), signal.SIGKILL)
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C the process that made it is told, and ends it
    torch.set_num_threads(1)
    for other in of_others:
        other.close()
    try:
        work(pipe.send)
    except ReshardError as error:
        pipe.send(error)
    except Exception as error:
        where = f"process {os.getpid()}"
        pipe.send(error_of(as_faults(error, where=where), subject=where))


def _end(copy: ForkProcess) -> str:
    code = copy.exitcode or 0
    return f"was ended by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with status {code}"


_BEAT: ContextVar[Heartbeat | None] = ContextVar("the heartbeat of this tool", default=None)


@contextmanager
def beating(lost: Callable[[RankLost], None], timeout: timedelta) -> Iterator[None]:
    """A heartbeat while inside; `lost` is called in its thread where a rank does not answer. Collective."""
    heartbeat = Heartbeat(lost, timeout)
    token = _BEAT.set(heartbeat)
    try:
        yield
    finally:
        _BEAT.reset(token)
        heartbeat.end()


def stopping(*, ranks: bool) -> threading.Event:
    """Return an event that is set once any of the `ranks` has failed, or is lost: the others' work is for nothing."""
    heartbeat = _BEAT.get() if ranks else None
    return heartbeat.failed if heartbeat is not None else threading.Event()


@contextmanager
def showing(progress: Progress | None, *, ranks: bool) -> Iterator[Progress | None]:
    """Yield what is to be told of this rank's work: with a heartbeat, rank 0 tells `progress` of all ranks'."""
    heartbeat = _BEAT.get() if ranks else None
    if heartbeat is None:
        yield progress
        return
    heartbeat.note(0, 0)
    heartbeat.show = progress if rank() == 0 else None
    try:
        yield heartbeat.note
    finally:
        heartbeat.show = None


class Heartbeat:
    """`failed` is set once any rank has failed, or is lost: the others' work is for nothing."""

    def __init__(self, lost: Callable[[RankLost], None], timeout: timedelta) -> None:
        import torch.distributed as dist

        self.failed = threading.Event()
        self._done = self._total = 0
        self.show: Progress | None = None
        self._lost = lost
        self._ended, self._over = threading.Event(), threading.Event()
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = threading.Thread(target=self._run, name="ds-reshard-heartbeat", daemon=True)
        self._thread.start()

    def note(self, done: int, total: int) -> None:
        """What this rank has done so far, and what all ranks will have."""
        self._done, self._total = done, total

    def end(self) -> None:
        """Wait for all ranks, so that none ends while others still count on it."""
        self._ended.set()
        self._over.wait()

    def _run(self) -> None:
        try:
            self._beat()
        except RankLost as error:
            self.failed.set()
            self._over.set()
            self._lost(error)
        finally:
            self._over.set()

    def _beat(self) -> None:
        import torch
        import torch.distributed as dist

        while True:
            ended = self._ended.wait(BEAT_S)
            said = torch.tensor([self._done, int(self.failed.is_set()), int(ended)])
            with collective():
                dist.all_reduce(said, group=self._group)
            done, failed, over = said.tolist()
            if failed:
                self.failed.set()
            if (show := self.show) is not None and self._total:
                show(min(done, self._total), self._total)
            if over == world_size():
                return
