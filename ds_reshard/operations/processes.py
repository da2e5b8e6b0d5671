"""Work that copies of this process share: each takes the next part that nobody has taken."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Generic, TypeVar

from ds_reshard.errors import ReshardError, WriteFailed, as_faults, error_of

Part = TypeVar("Part")
Told = TypeVar("Told")


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


_RESUME = "run again with --resume; where memory was short, with fewer --processes or less --memory"
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def in_copies(
    number: int,
    work: Callable[[Callable[[Told], None]], None],
    told: Callable[[Told], None],
    *,
    lost: type[ReshardError] = WriteFailed,
    what: str = "its part not written",
    mend: str = _RESUME,
) -> None:
    """Do `work` in so many copies of this process, each of which may tell something; `told` hears all of it, here.

    What is open, and read so far, all of them have. A copy runs its operations of torch in one thread: the threads of
    this process are not in it. Raises what a copy raises first, and `lost` where one ends without a word, which says
    `what` then; none is left behind.
    """
    context = multiprocessing.get_context("fork")
    copies: dict[Connection[object, object], ForkProcess] = {}
    try:
        for _ in range(number):
            here, there = context.Pipe(duplex=False)
            copy = context.Process(target=_copy, args=(work, there, [*copies, here], os.getpid()), daemon=True)
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
    work: Callable[[Callable[[Told], None]], None],
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
