"""Ranks that live for one job: what torch does to a process group that has lost a rank cannot be undone.

They are forked from a server that has imported torch and started nothing, so that a world costs half a second.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from devices import BACKEND, environment
from gathered import assert_moments, same_bits
from lifetimes import die_with_parent
from worlds import server

PATIENCE_S = 90.0


def run(job: str, size: int, *, collective_s: float = PATIENCE_S, **kwargs: Any) -> list[Any]:
    """What `module.function` gave on each rank; an exception as text, else "signal 6", "status 1" or "silent"."""
    context = server()
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            given = (theirs, job, kwargs, rank, size, str(Path(folder) / "store"), collective_s)
            process = context.Process(target=_rank, args=given, daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        deadline = time.monotonic() + PATIENCE_S
        answers = [_answer(process, pipe, deadline) for process, pipe in ranks]
        for process, _ in ranks:
            process.kill()
            process.join(5)
        return answers


def saver(job: str, factory: Any) -> Callable[..., tuple[Path, list[Any]]]:
    """A function that gives the folder which `job` has saved on so many ranks, and what they held; each made once."""

    @functools.cache
    def save(size: int, **given: Any) -> tuple[Path, list[Any]]:
        folder = factory.mktemp("saved")
        told = run(job, size, folder=str(folder), **given)
        assert all(isinstance(one, dict) for one in told), told
        assert_moments(told[0]["held"])
        return folder, told

    return save


def assert_goes_on(saved: list[Any], loaded: list[Any], rel: float = 1e-4) -> None:
    """Each rank holds what was saved, to the bit in its own types, and its losses go on; a mean of three rounds."""
    expected = saved[0]["held"]
    for told in loaded:
        assert isinstance(told, dict), told
        assert told["held"].keys() == expected.keys()
        for at, tensor in expected.items():
            assert same_bits(told["held"][at], tensor.to(told["held"][at].dtype)), at
        assert told["losses"] == pytest.approx(saved[0]["losses"], rel=rel)


def _answer(process: Any, pipe: Connection, deadline: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else "silent"
    except EOFError:
        process.join(5)
        status = process.exitcode or 0
        return f"signal {-status}" if status < 0 else f"status {status}" if status else "silent"


def _rank(
    pipe: Connection, job: str, kwargs: dict[str, Any], rank: int, size: int, store: str, collective_s: float
) -> None:
    die_with_parent()
    import torch

    os.environ.update(environment(rank, size, 0))
    torch.set_num_threads(1)
    module, _, name = job.rpartition(".")
    try:
        torch.distributed.init_process_group(
            BACKEND,
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=collective_s),
        )
        pipe.send(getattr(importlib.import_module(module), name)(**kwargs))
    except Exception as error:  # of joining, of the job, or of sending: no room for its tensors in shared memory
        pipe.send(f"{type(error).__name__}: {error}")
    time.sleep(PATIENCE_S)  # its end would be an error of the ranks that wait for it, and hide that they do
