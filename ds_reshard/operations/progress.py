"""How far a load has read, of all ranks, on rank 0: a line that is rewritten on a terminal, one every 30 s in a log.

Ranks add what they have read to counters of the process group's store, from a thread beside the reading: no collective,
and nothing waits for it. A load under five seconds has no more than the thread.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from ds_reshard.execution.interfaces import Executor, Outcome
from ds_reshard.operations.ranks import rank, world_size
from ds_reshard.operations.watching import in_force
from ds_reshard.planning.plan import Plan
from ds_reshard.resume.report import say

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from ds_reshard.execution.buffers import TensorTarget

QUIET_S = 5.0
LOG_S = 30.0
_RANKS_A_SECOND = 500
_NUMBER = itertools.count()


def showing(subject: str) -> closing[Progress]:
    """While inside, what `execute` reads is shown, until all ranks have read: leave it after they have agreed.

    Every rank takes it in the same order.
    """
    return closing(Progress(subject, f"ds_reshard/progress/{next(_NUMBER)}"))


class Progress:
    """The progress of one reading: each rank's share goes to the store, and rank 0 shows the sum."""

    def __init__(self, subject: str, key: str) -> None:
        self._subject, self._key = subject, key
        self._told = self._total = 0
        self._store: Store | None = None
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def execute(self, executor: Executor, plan: Plan, targets: Mapping[str, TensorTarget]) -> Outcome:
        """Carry out the plan. What takes longer than five seconds is shown, where progress is not off."""
        if in_force().progress != "off":
            self._executor, self._total = executor, plan.nbytes
            self._thread = threading.Thread(target=self._run, name="ds-reshard-progress", daemon=True)
            self._thread.start()
        return executor.execute(plan, targets)

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)  # a store whose server has gone does not hold up the load

    def _run(self) -> None:
        if self._ended.wait(QUIET_S):
            return
        first, terminal = rank() == 0, sys.stderr.isatty()
        self._store = _store()
        self._count("total", self._total)
        wait, next_line = max(1.0, world_size() / _RANKS_A_SECOND), self._started + LOG_S
        while not self._ended.wait(wait):
            read = self._executor.nbytes_read
            done, total = self._count("done", read - self._told), self._count("total", 0)
            self._told = read
            if first and terminal:
                _rewrite(self._line(done, total))
            elif first and time.monotonic() >= next_line:
                next_line += LOG_S
                say(self._line(done, total))
        if first and terminal:
            _rewrite("")

    def _count(self, what: str, amount: int) -> int:
        """The sum over all ranks; this rank's own once the store does not answer."""
        if self._store is not None:
            try:
                return self._store.add(f"{self._key}/{what}", amount)
            except RuntimeError:
                self._store = None
        return self._total if what == "total" else self._executor.nbytes_read

    def _line(self, done: int, total: int) -> str:
        whose = "" if self._store is not None or world_size() == 1 else " by rank 0"
        return f"{self._subject}: {so_far(done, total, time.monotonic() - self._started, f'read{whose}')}"


def so_far(done: int, total: int, seconds: float, what: str) -> str:
    """Bytes, rate and the time that is left, in words."""
    rate = done / seconds
    left = f"{(total - done) / rate:.0f} s left" if rate else "nothing yet"
    part = f"{done / 2**30:.1f} of {total / 2**30:.1f} GiB" if total >= 2**30 else f"{done >> 20} of {total >> 20} MiB"
    return f"{part} {what}, {rate / 2**20:.0f} MiB/s, {left}"


def _rewrite(text: str) -> None:
    """Put it in place of the terminal's current line."""
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()


def _store() -> Store | None:
    """The store by which the process group met; None where there is no group, or its store cannot be had."""
    import torch.distributed as dist

    if world_size() == 1:
        return None
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None
