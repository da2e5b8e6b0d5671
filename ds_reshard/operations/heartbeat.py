"""What all ranks of a tool have done so far, told every second; and whether all of them still do something.

A thread of each rank takes part in a sum over a process group of its own: a rank that has ended breaks it at once, one
that hangs after the group's timeout, whatever the ranks' other threads wait for meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta

from ds_reshard.errors import RankLost
from ds_reshard.operations.options import Progress
from ds_reshard.operations.ranks import collective, rank, world_size

BEAT_S = 1.0
_BEAT: ContextVar[Heartbeat | None] = ContextVar("the heartbeat of this tool", default=None)


def heartbeat() -> Heartbeat | None:
    """That of the tool that is going on; None where its ranks have none."""
    return _BEAT.get()


@contextmanager
def beating(lost: Callable[[RankLost], None], timeout: timedelta) -> Iterator[Heartbeat]:
    """A heartbeat while inside; `lost` is called in its thread where a rank does not answer. Collective."""
    made = Heartbeat(lost, timeout)
    token = _BEAT.set(made)
    try:
        yield made
    finally:
        _BEAT.reset(token)
        made.end()


class Heartbeat:
    """`failed` is set once any rank has failed, or is lost: the others' work is for nothing."""

    def __init__(self, lost: Callable[[RankLost], None], timeout: timedelta) -> None:
        import torch.distributed as dist

        self.failed = threading.Event()
        self._done = self._total = 0
        self._show: Progress | None = None
        self._lost = lost
        self._ended, self._over = threading.Event(), threading.Event()
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = threading.Thread(target=self._run, name="ds-reshard-heartbeat", daemon=True)
        self._thread.start()

    def note(self, done: int, total: int) -> None:
        """What this rank has done so far, and what all ranks will have."""
        self._done, self._total = done, total

    @contextmanager
    def showing(self, progress: Progress | None) -> Iterator[None]:
        """While inside, rank 0 tells `progress` what all ranks have noted."""
        self._done = self._total = 0
        self._show = progress if rank() == 0 else None
        try:
            yield
        finally:
            self._show = None

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
            if (show := self._show) is not None and self._total:
                show(min(done, self._total), self._total)
            if over == world_size():
                return
