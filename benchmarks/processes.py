"""Fresh processes for every run, without paying for the imports each time.

Processes are forked from one that has imported torch and DeepSpeed and has done nothing else: their heap,
their memory and their first load are as fresh as a training script's. `ds_reshard` is not among what was
imported: what it imports while loading is part of its time.
"""

from __future__ import annotations

import compileall
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# The last is imported whenever a client optimizer is checked, and brings torch._dynamo and torch._inductor.
PRELOADED = ["torch", "deepspeed", "benchmarks.engines", "deepspeed.runtime.zero.muon.muon_optimizer"]
TIMEOUT_S = 900.0


class RunFailed(Exception):
    """A rank raised, or did not answer in time."""


def start(*also: str) -> None:
    """Once, before the first `run`: set the environment that the forked processes inherit, modules `also` imported.

    Byte code is compiled here, as an installation does, not in the first load.
    """
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo", LOCAL_RANK="0")
    root = Path(__file__).resolve().parents[1]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    compileall.compile_dir(root / "ds_reshard", quiet=1)
    multiprocessing.set_forkserver_preload([*PRELOADED, *also])


def run(work: Callable[..., Any], *, world: int, **arguments: Any) -> list[Any]:
    """Call `work(rank, world, rendezvous=..., **arguments)` in `world` fresh processes; results in rank order."""
    context = multiprocessing.get_context("forkserver")
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # the rendezvous is no write of a load's to a disk
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        arguments["rendezvous"] = str(Path(folder, "rendezvous"))
        pipes: dict[Connection, int] = {}
        processes = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(theirs, work, rank, world, arguments))
            process.start()
            theirs.close()
            pipes[ours] = rank
            processes.append(process)
        try:
            return _answers(pipes, world)
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
                    process.join()


def _answers(pipes: dict[Connection, int], world: int) -> list[Any]:
    results: list[Any] = [None] * world
    while pipes:
        ready = wait(list(pipes), timeout=TIMEOUT_S)
        if not ready:
            raise RunFailed(f"ranks {sorted(pipes.values())} did not answer in {TIMEOUT_S:.0f} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.pop(pipe)
            try:
                good, value = pipe.recv()
            except EOFError:
                good, value = False, "the process ended without an answer"
            if not good:
                raise RunFailed(f"rank {rank}: {value}")
            results[rank] = value
    return results


def _serve(pipe: Connection, work: Callable[..., Any], rank: int, world: int, arguments: dict[str, Any]) -> None:
    # DeepSpeed and libraries below it print while they are set up; the terminal belongs to the tables.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    try:
        answer = (True, work(rank, world, **arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    pipe.close()
