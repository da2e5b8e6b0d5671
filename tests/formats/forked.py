"""Ranks as forks of this process, whose imports they have: what each ends with, of those that are killed too."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

import pytest

from ds_reshard.cli import launch
from ds_reshard.operations import runner

LIMIT_S = 120


def in_ranks(size: int, work: Callable[[int], int | None]) -> list[int]:
    """The exit status of each rank: what `work` gives, minus the signal that ended it, 1 where it raises.

    One that stops itself is killed when all others have ended.
    """
    ranks = [_fork(rank, work) for rank in range(size)]
    said = {rank: os.waitpid(rank, os.WUNTRACED)[1] for rank in ranks}
    for rank, status in said.items():
        if os.WIFSTOPPED(status):
            os.kill(rank, signal.SIGKILL)
            said[rank] = os.waitpid(rank, 0)[1]
    return [os.waitstatus_to_exitcode(said[rank]) for rank in ranks]


def launched(port: str, rank: int, size: int, **more: str) -> None:
    """What torchrun sets."""
    told = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({"TORCHELASTIC_RUN_ID": "none", **{name: str(one) for name, one in told.items()}, **more})


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that hear nothing of another for three seconds take it for lost."""
    monkeypatch.setattr(launch, "_SILENCE", timedelta(seconds=3))
    monkeypatch.setattr(launch, "_UNWINDING_S", 0.5)
    monkeypatch.setattr(runner, "BEAT_S", 0.2)


def _fork(rank: int, work: Callable[[int], int | None]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.alarm(LIMIT_S)
        status = work(rank) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
