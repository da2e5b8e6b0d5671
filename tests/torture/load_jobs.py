"""What each rank does while calls on files fail, one rank at a time."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from calls import DEATH, Calls, Step, ended, files, left_open
from cases import Model, Run
from jobs import build, contents, outcome, same, weights
from store_proxy import in_a_hurry, reach

from ds_reshard.containers import remote


def _held(engine: Any) -> dict[str, Any]:
    return {**contents(engine), "weights": weights(engine)}


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    weights_equal = all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())
    return same(one, other) and weights_equal and one["scheduler"] == other["scheduler"]


def _tried(
    engine: Any, good: str, right: dict[str, Any], before: dict[str, Any], within: AbstractContextManager[None]
) -> tuple[str, str, str]:
    """What a load ended in, what the engine holds then, and whether it makes a step where that is neither."""
    with within:
        said = ended(lambda: engine.load_checkpoint(good))
    now = _held(engine)
    held = "right" if _equal(now, right) else "unchanged" if _equal(now, before) else "neither"
    return said, held, "" if held != "neither" else outcome(engine.step)


def steps(run: Run, model: Model, folder: str) -> list[Step]:
    """The calls of this rank in a load."""
    import ds_reshard

    engine, calls = build(run, model, seed=99), Calls(folder)
    with ds_reshard.install("deepspeed"), calls.watched():
        engine.load_checkpoint(folder)
    return calls.steps


def befallen(
    run: Run, model: Model, good: str, other: str, cases: list[tuple[int, Step, str]]
) -> list[tuple[str, str, str, str]]:
    """For each case what it ended in, what the engine holds then, whether it makes a step, and what is wrong after it.

    The engine holds another checkpoint before. `good` is put right again where a file was replaced; then the next load
    of it is right, all of its bytes are as before, and no file or thread is left.
    """
    import ds_reshard

    logging.getLogger("ds_reshard").setLevel(logging.ERROR)
    rank, found = torch.distributed.get_rank(), []
    engine = build(run, model, seed=99)
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(good)
        right, threads = _held(engine), threading.active_count()
        for on, step, fault in cases:
            engine.load_checkpoint(other)
            before = _held(engine)
            calls = Calls(good, step if on == rank else None, fault)
            said, held, stepped = _tried(engine, good, right, before, calls.watched())
            if on == rank and not calls.befallen:
                said = f"the step was not reached; {said}"
            after = f"files are left open: {left}" if (left := left_open(good)) else ""
            if threading.active_count() > threads:
                after = f"threads are left: {[thread.name for thread in threading.enumerate()]}"
            torch.distributed.barrier()
            if fault == "replaced" and rank == on:
                shutil.copytree(f"{good}.whole", good, dirs_exist_ok=True)
            torch.distributed.barrier()
            again = outcome(lambda: engine.load_checkpoint(good))
            if again != "done" or not _equal(_held(engine), right):
                after = f"the next load ends otherwise: {again}"
            if rank == 0 and files(good) != files(f"{good}.whole"):
                after = "the checkpoint has changed"
            found.append((said, held, stepped, after))
    logging.getLogger("ds_reshard").setLevel(logging.NOTSET)  # as other tests find it
    return found


@contextmanager
def _before_collectives(befalls: Callable[[int], None]) -> Iterator[None]:
    """Call `befalls` with the number of each collective, counted from 1, before it is made."""
    own, seen = {name: getattr(torch.distributed, name) for name in ("all_gather_object", "broadcast_object_list")}, 0

    def counted(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            befalls(seen)
            return function(*args, **kwargs)

        return called

    for name, function in own.items():
        setattr(torch.distributed, name, counted(function))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(torch.distributed, name, function)


def moments(run: Run, model: Model, folder: str) -> tuple[list[Step], int]:
    """The calls of this rank in a load, and the number of its collectives."""
    numbers: list[int] = []
    with _before_collectives(numbers.append):
        return steps(run, model, folder), len(numbers)


_BEGUN: dict[str, tuple[Any, dict[str, Any]]] = {}
"""The engine that loads from a URL, and what it holds then."""


def begin_by_url(environment: dict[str, str], run: Run, model: Model, url: str) -> None:
    """What follows is asked of the store by a client that is called as the rank, and in a hurry."""
    import ds_reshard

    reach({**environment, "AWS_SDK_UA_APP_ID": f"rank-{torch.distributed.get_rank()}"})
    in_a_hurry()
    logging.getLogger("ds_reshard").setLevel(logging.ERROR)
    engine = build(run, model, seed=99)
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(url)
    _BEGUN[url] = engine, _held(engine)


def befallen_by_url(url: str, other: str, again: bool) -> tuple[str, str, str]:
    """As `befallen`, of one case, which the store sees to. With `again` the load of before is tried a second time."""
    import ds_reshard

    engine, right = _BEGUN[url]
    with ds_reshard.install("deepspeed"):
        if not again:
            engine.load_checkpoint(other)
        remote.release()
        return _tried(engine, url, right, _held(engine), nullcontext())


def lost(
    run: Run, model: Model, folder: str, on: int, at: Step | int, signal_number: int, seconds: int
) -> tuple[str, str, float]:
    """What a rank says where rank `on` is sent a signal: at a call on a file, or before its `at`-th collective.

    With the seconds that it waited.
    """
    import ds_reshard
    from ds_reshard.operations.ranks import collective_timeout

    run = replace(run, config={**run.config, "ds_reshard": {"timeout_s": seconds}})
    engine, rank = build(run, model, seed=99), torch.distributed.get_rank()
    calls = Calls(folder, at if isinstance(at, Step) and rank == on else None, DEATH, signal_number)

    def befalls(number: int) -> None:
        if rank == on and number == at:
            os.kill(os.getpid(), signal_number)

    began = time.monotonic()
    with ds_reshard.install("deepspeed"), calls.watched(), _before_collectives(befalls):
        said = ended(lambda: engine.load_checkpoint(folder))
    waited = time.monotonic() - began
    with collective_timeout(seconds):
        return said, "" if said.startswith(("done", "unnamed")) else outcome(engine.step), waited
