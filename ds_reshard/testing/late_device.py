"""A device without a GPU: its memory is the host's, and its streams do each piece of work as late as they may.

What a GPU does at any moment between the giving of the work and the wait for it is done here at the wait alone. An
executor that uses memory again too early, or reads what it has not waited for, then leaves other bytes behind.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ds_reshard.execution.cuda import Event

_POISON = 0xA5


@dataclass(frozen=True)
class LateEvent:
    """The first `number` pieces of a stream's work; -1 for work of nobody."""

    stream: LateStream | None
    number: int

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.catch_up(self.number)


class LateStream:
    """Work in order, done when it is waited for; a failure is raised at every wait from then on, as CUDA does."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._work: deque[Callable[[], None]] = deque()
        self._given = self._done = 0

    def run(self, work: Callable[[], None]) -> None:
        assert getattr(self._device.thread, "entered", False), "a thread that is one of another device"
        self._give(work)

    def record(self) -> LateEvent:
        return LateEvent(self, self._given)

    def wait(self, event: Event) -> None:
        self._give(event.synchronize)

    def _give(self, work: Callable[[], None]) -> None:
        with self._device.lock:
            self._work.append(work)
            self._given += 1
            self._device.left += 1

    def catch_up(self, number: int) -> None:
        with self._device.lock:
            while self._done < number:
                if self._device.failure is None:
                    try:
                        self._work.popleft()()
                    except RuntimeError as error:
                        self._device.failure = error
                if self._device.failure is not None:
                    raise self._device.failure
                self._done += 1
                self._device.left -= 1


class LateDevice:
    """Holds every tensor of the host, unless told otherwise, and counts what it is asked for.

    `memory_nbytes` bounds the scratch memory that it has at a time. `left` is how much work was given and not done;
    `pinned_nbytes` and `scratch_nbytes` are the most memory that there was at a time.
    """

    def __init__(
        self, *, memory_nbytes: int = 1 << 62, holds: Callable[[torch.Tensor], bool] = lambda tensor: True
    ) -> None:
        self.lock = threading.RLock()
        self.thread = threading.local()
        self.left = 0
        self.failure: RuntimeError | None = None
        self.pinned_nbytes = self.scratch_nbytes = 0
        self._memory_nbytes = memory_nbytes
        self._holds = holds
        self._in_use = {"pinned": 0, "scratch": 0}

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._holds(tensor)

    def pinned(self, nbytes: int) -> torch.Tensor:
        made = self._made("pinned", nbytes)
        self.pinned_nbytes = max(self.pinned_nbytes, self._in_use["pinned"])
        return made

    def scratch(self, nbytes: int) -> torch.Tensor:
        if self._in_use["scratch"] + nbytes > self._memory_nbytes:
            raise torch.cuda.OutOfMemoryError(f"tried to allocate {nbytes} bytes")
        made = self._made("scratch", nbytes)
        self.scratch_nbytes = max(self.scratch_nbytes, self._in_use["scratch"])
        return made

    def stream(self) -> LateStream:
        return LateStream(self)

    def enter(self) -> None:
        self.thread.entered = True

    def given(self) -> LateEvent:
        return LateEvent(None, -1)

    def give_back(self) -> None:
        """Nothing: memory is given back as soon as nothing uses it."""

    def free_nbytes(self) -> int:
        return self._memory_nbytes - self._in_use["scratch"]

    def _made(self, kind: str, nbytes: int) -> torch.Tensor:
        made = torch.full((nbytes,), _POISON, dtype=torch.uint8)
        self._in_use[kind] += nbytes
        weakref.finalize(made, self._gone, kind, nbytes)
        return made

    def _gone(self, kind: str, nbytes: int) -> None:
        self._in_use[kind] -= nbytes
