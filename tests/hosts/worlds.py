"""Worlds of worker processes that stay alive across test cases.

A world of n ranks is n processes joined by gloo on a free port of the loopback interface. Jobs are functions
of `jobs.py` (or `module.function`), named by text, run on every rank at once; a world that does not answer in
time is ended, and the next case gets a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from devices import environment
from lifetimes import Cost, cost, die_with_parent
from ports import free_port

START_TIMEOUT_S = 300.0
JOB_TIMEOUT_S = 200.0
MOST = Cost(threads=32, files=256, memory_mib=2048)
"""What a worker may cost when the next test begins."""
COLLECTIVE_TIMEOUT_S = 90


class WorkerFailed(Exception):
    """A job raised on some rank; `errors` holds each rank's exception (None where it did not raise)."""

    def __init__(self, message: str, errors: list[BaseException | None]) -> None:
        super().__init__(message)
        self.errors = errors


def server() -> Any:
    """The context whose processes are forked from one that has imported the frameworks, and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    return context


class World:
    """`size` ranks; `run(job, **kwargs)` returns each rank's result in rank order."""

    def __init__(self, size: int, timeout_s: int = COLLECTIVE_TIMEOUT_S) -> None:
        self.size = size
        self.cost = Cost(0, 0, 0)
        port = free_port()
        context = server()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port, timeout_s), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._start()

    def _start(self) -> None:
        """Let all ranks be there first, for which the first waits for the server's imports, and join together then."""
        deadline = time.monotonic() + START_TIMEOUT_S
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise TimeoutError(f"rank {rank} of {self.size} did not start in {START_TIMEOUT_S} s")
            pipe.recv()
        for pipe in self._pipes:
            pipe.send("join")

    def run_without(self, lost: int, job: str, timeout_s: float, **kwargs: Any) -> list[Any]:
        """What the other ranks answer, where one ends or hangs in its job; None of one that does not in time."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send((job, kwargs))
        others, deadline = [pipe for rank, pipe in enumerate(self._pipes) if rank != lost], time.monotonic() + timeout_s
        answers = [pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else None for pipe in others]
        for process in self._processes:
            process.kill()
        return [answer and (answer[1] if answer[0] else answer[2]) for answer in answers]

    def run(self, job: str, **kwargs: Any) -> list[Any]:
        """What each rank answers; between jobs they are stopped, as threads of gloo wake up each hundredth second."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send((job, kwargs))
        deadline = time.monotonic() + JOB_TIMEOUT_S
        results: list[Any] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size
        report = ""
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise TimeoutError(f"rank {rank} of {self.size} did not finish {job} in {JOB_TIMEOUT_S} s")
            ok, value, trace, told = pipe.recv()
            self.cost = Cost(*map(max, self.cost, told))
            if ok:
                results[rank] = value
            else:
                errors[rank] = value
                report += f"\n--- rank {rank} ---\n{trace}"
        self._signal(signal.SIGSTOP)
        if report:
            raise WorkerFailed(f"{job} failed{report}", errors)
        return results

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.kill(process.pid, number)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """Let the workers end by themselves, so that they clean up; kill those that have not ended after 5 s."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 5
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join(5)


class Worlds:
    """One living world per size."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}
        self.started = 0
        self.most = Cost(0, 0, 0)
        atexit.register(self.close)

    def __getitem__(self, size: int) -> World:
        world = self._worlds.get(size)
        if world is None or not world.alive:
            self._worlds[size] = world = World(size)
            self.started += 1
        return world

    def renew(self) -> None:
        """End worlds that cost more than `MOST`.

        A process group of gloo keeps its threads, each of which wakes up every hundredth second, while anything refers
        to it, and an engine that is gone leaves groups behind.
        """
        for size, world in list(self._worlds.items()):
            if any(spent > most for spent, most in zip(world.cost, MOST, strict=True)):
                self._end(size)

    def close(self) -> None:
        for size in list(self._worlds):
            self._end(size)

    def _end(self, size: int) -> None:
        world = self._worlds.pop(size)
        world.close()
        self.most = Cost(*map(max, self.most, world.cost))


def _serve(pipe: Connection, rank: int, size: int, port: int, timeout_s: int) -> None:
    die_with_parent()
    os.environ.update(environment(rank, size, port))
    import jobs
    import torch
    from torch.utils import _pytree

    jobs.load_frameworks()  # is done already, but where the server could not import everything
    pipe.send("ready")
    pipe.recv()
    jobs.join(timeout_s)
    while True:
        try:
            job, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            module, _, name = job.rpartition(".")
            made = getattr(importlib.import_module(module or "jobs"), name)(**kwargs)
            answer = (True, _pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, made), "")
        except Exception as error:
            answer = (False, _sendable(error), traceback.format_exc())
        jobs.put_back()
        pipe.send((*answer, cost()))


def _sendable(error: Exception) -> Exception:
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
