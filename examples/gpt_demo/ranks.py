"""Processes of one run on this machine: started together, watched, and never left behind."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TIMEOUT_S = 600.0
_SHOWN_LINES = 15


class RankFailed(Exception):
    """A rank died, raised or did not answer; says which, and how its log ends."""


def run_ranks(job: str, ranks: int, folder: Path, tell: Callable[[int, float], None], **arguments: Any) -> Any:
    """Run a function of `runs.py` on `ranks` processes; rank 0's result. `tell` hears each step and its loss.

    Raises RankFailed as soon as one rank fails. Whatever happens, no process is alive afterwards.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    processes: list[BaseProcess] = [
        context.Process(target=_enter, args=(job, rank, ranks, folder, theirs, arguments), daemon=True)
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        theirs.close()
        result = _watch(processes, ours, folder, tell)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    return result


def _watch(processes: list[BaseProcess], pipe: Connection, folder: Path, tell: Callable[[int, float], None]) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    result, running = None, dict(enumerate(processes))
    while running:
        if not wait([pipe, *(p.sentinel for p in running.values())], timeout=max(0.0, deadline - time.monotonic())):
            raise RankFailed(f"{folder}: ranks {sorted(running)} did not finish in {TIMEOUT_S:.0f} s")
        ended = {rank: process.exitcode for rank, process in running.items() if process.exitcode is not None}
        for what, *values in _messages(pipe):
            if what == "step":
                tell(*values)
            else:
                result = values[0]
        for rank, status in ended.items():
            if status != 0:
                how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
                raise RankFailed(f"rank {rank} {how}; {_end_of_log(_log(folder, rank))}")
            del running[rank]
    return result


def _messages(pipe: Connection) -> Iterator[tuple[Any, ...]]:
    """What has been sent so far; the end of the last sender ends it too."""
    try:
        while pipe.poll():
            yield pipe.recv()
    except EOFError:
        return


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _end_of_log(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n  ".join([f"the end of {path}:", *(lines[-_SHOWN_LINES:] or ["(empty)"])])


def _enter(job: str, rank: int, ranks: int, folder: Path, pipe: Connection, arguments: dict[str, Any]) -> None:
    """The life of one rank; everything that it prints goes to its log."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    log = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
        GLOO_SOCKET_IFNAME="lo",
    )
    try:
        from gpt_demo import runs

        runs.prepare_process(folder / "rendezvous", rank, ranks)
        tell = (lambda step, loss: pipe.send(("step", step, loss))) if rank == 0 else (lambda step, loss: None)
        result = getattr(runs, job)(folder, tell, **arguments)
        if rank == 0:
            pipe.send(("done", result))
        runs.dist.barrier()
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
