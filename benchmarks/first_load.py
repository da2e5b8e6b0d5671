"""The first load of a fresh process, as users have it: `torchrun` of a script that imports `ds_reshard.auto`.

By turns with DeepSpeed's own load of an unchanged layout, ours of that, and `ds_to_universal` and a load, in each
condition that a machine may be in: as it is; after an hour of work, which the benchmark makes itself (free memory in
the page cache, or in pieces of 4 KiB); and each policy of huge pages that the kernel offers. What is imported during a
load is part of its time. Everything is printed; `worst` is the headline.
Run: python -m benchmarks.first_load [--params 270e6] [--runs N] [--stage N] [--no-universal] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import contest, engines, processes, report
from benchmarks.contest import DEEPSPEED, DIRECT, UNCHANGED, UNIVERSAL, Contestant
from benchmarks.gpt import Shape
from benchmarks.load import LOADED_DP, ROOT, SCRATCH, STAGES, warm
from benchmarks.memory import free_nbytes
from benchmarks.report import spread

SMALL_PAGES = Contestant(name="small pages", saved_dp=4, config={}, hooked=True)
"""As `direct`, but that huge pages are never tried."""
CONTESTANTS = {one.name: one for one in (DEEPSPEED, DIRECT, UNCHANGED, SMALL_PAGES, UNIVERSAL)}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
KEPT_FREE_NBYTES = 3 << 30
_PR_SET_THP_DISABLE = 41


def work(given: dict[str, Any]) -> None:
    """One rank of a load: what a training script does, and a line of JSON for each rank."""
    if given["no_huge_pages"]:
        ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    import deepspeed  # noqa: F401
    import torch

    contestant, rank, world = CONTESTANTS[given["contestant"]], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if contestant.hooked:
        import ds_reshard.auto  # noqa: F401
    engines.join(given["rendezvous"], rank, world)
    shape = Shape(**given["shape"])
    made = engines.engine(shape, stage=given["stage"], world=world, filled=False, config=contestant.config)
    executions: list[Any] = []
    ending: list[float] = []
    if contestant.hooked:
        from benchmarks.floor import watch_ending, watch_executor
        from ds_reshard.execution import buffers

        executions, ending = watch_executor(), watch_ending()
        if contestant is SMALL_PAGES:
            buffers.page_choice = lambda: None  # type: ignore[assignment]
    torch.distributed.barrier()
    before, started = len(sys.modules), time.perf_counter()
    path, _ = made.load_checkpoint(given["folder"])
    seconds = time.perf_counter() - started
    assert path is not None and made.global_steps == 1, f"{contestant.name} loaded nothing"
    told = {
        "rank": rank,
        "seconds": seconds,
        "moving_s": sum(one.seconds for one in executions),
        "ending_s": sum(ending),
        "imported": len(sys.modules) - before,
    }
    Path(f"{given['answers']}/{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may end the process with an error where it is left to Python


def run(contestant: Contestant, folder: Path, shape: Shape, stage: int, condition: str) -> list[dict[str, Any]]:
    """One load by `torchrun`, every rank's account of it."""
    warm(folder)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as answers:
        given = {
            "contestant": contestant.name,
            "folder": str(folder),
            "shape": {"width": shape.width, "layers": shape.layers},
            "stage": stage,
            "no_huge_pages": condition == "no huge pages",
            "answers": answers,
            "rendezvous": f"{answers}/rendezvous",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={LOADED_DP}"]
        command += ["-m", "benchmarks.first_load", "--work", json.dumps(given)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            raise RuntimeError(f"{contestant.name}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        return [json.loads(Path(answers, f"{rank}.json").read_text()) for rank in range(LOADED_DP)]


@contextlib.contextmanager
def in_condition(name: str) -> Iterator[bool]:
    """Bring the machine into a condition, and out of it; false where that cannot be done here."""
    if name == "page cache filled":
        with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
            with Path(folder, "filler").open("wb") as file:
                file.truncate(max(0, free_nbytes() - KEPT_FREE_NBYTES))
            warm(Path(folder))
            yield True
    elif name == "memory in pieces":
        nbytes = max(0, free_nbytes() - KEPT_FREE_NBYTES) // mmap.PAGESIZE * mmap.PAGESIZE
        with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            for at in range(0, nbytes, mmap.PAGESIZE):
                memory[at] = 1
            for at in range(0, nbytes, 2 * mmap.PAGESIZE):
                memory.madvise(mmap.MADV_DONTNEED, at, mmap.PAGESIZE)
            yield True
    elif name == "huge pages always":
        before = HUGE_PAGES.read_text(encoding="ascii").split("[")[1].split("]")[0] if HUGE_PAGES.exists() else ""
        if not before or not os.access(HUGE_PAGES, os.W_OK):
            yield False
            return
        HUGE_PAGES.write_text("always", encoding="ascii")
        try:
            yield True
        finally:
            HUGE_PAGES.write_text(before, encoding="ascii")
    else:
        yield True


CONDITIONS = ("as it is", "page cache filled", "memory in pieces", "huge pages always", "no huge pages")


def stage_of(stage: int, shape: Shape, runs: int, *, universal: bool) -> Iterator[dict[str, Any]]:
    """All loads of one ZeRO stage."""
    folders = {dp: SCRATCH / f"first{stage}-dp{dp}" for dp in (2, 4)}
    converted, converting = SCRATCH / f"first{stage}-universal", 0.0
    peers = [DEEPSPEED, DIRECT, UNCHANGED, SMALL_PAGES]
    try:
        for dp, folder in folders.items():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            processes.run(engines.save, world=dp, shape=shape, stage=stage, folder=str(folder))
        if universal:
            shutil.rmtree(converted, ignore_errors=True)
            converted.mkdir(parents=True)
            (converting,) = processes.run(
                contest.convert, world=1, folder=str(folders[4]), output=str(converted), stage=stage, workers=LOADED_DP
            )
            peers.append(UNIVERSAL)
        for condition in CONDITIONS:
            with in_condition(condition) as made:
                for number in range(runs if made else 0):
                    for peer in peers if number % 2 else reversed(peers):
                        folder = converted if peer is UNIVERSAL else folders[peer.saved_dp]
                        ranks = run(peer, folder, shape, stage, condition)
                        seconds = max(rank["seconds"] for rank in ranks)
                        yield {
                            "stage": stage,
                            "condition": condition,
                            "round": number,
                            "contestant": peer.name,
                            "seconds": seconds + (converting if peer is UNIVERSAL else 0.0),
                            "apart_s": max(rank["seconds"] - rank["moving_s"] - rank["ending_s"] for rank in ranks),
                            "ranks": ranks,
                        }
    finally:
        for folder in (*folders.values(), converted):
            shutil.rmtree(folder, ignore_errors=True)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """By stage and condition: seconds, and `direct`'s over each other's of the same round; the worst of them.

    `unchanged` is ours of an unchanged layout over DeepSpeed's own of it.
    """
    found: dict[str, Any] = {}
    for stage, condition in dict.fromkeys((run["stage"], run["condition"]) for run in runs):
        here = [run for run in runs if (run["stage"], run["condition"]) == (stage, condition)]
        taken = {name: [run["seconds"] for run in here if run["contestant"] == name] for name in CONTESTANTS}
        found[f"ZeRO-{stage}, {condition}"] = {
            "seconds": {name: spread(values) for name, values in taken.items() if values},
            "over": {
                name: spread([ours / theirs for ours, theirs in zip(taken["direct"], values, strict=True)])
                for name, values in taken.items()
                if values and name != "direct"
            },
            "unchanged": spread([a / b for a, b in zip(taken["unchanged"], taken["deepspeed"], strict=True)]),
            "apart_s": median(run["apart_s"] for run in here if run["contestant"] == "direct"),
        }
    peers = {name for one in found.values() for name in one["over"]}
    worst = {name: max(one["over"][name]["median"] for one in found.values()) for name in sorted(peers)}
    return {
        "conditions": found,
        "worst": worst,
        "worst_unchanged": max(one["unchanged"]["median"] for one in found.values()),
    }


def main() -> None:
    parser = report.parser("first_load", __doc__)
    parser.add_argument("--params", type=float, default=270e6, help="parameters of the model (default 270e6)")
    parser.add_argument("--stage", type=int, choices=STAGES, action="append", help="a ZeRO stage; default: 1 and 3")
    parser.add_argument("--no-universal", action="store_true", help="leave ds_to_universal out: it takes minutes")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work is not None:
        work(asked.work)
        return
    started, shape = time.monotonic(), Shape.of(int(asked.params))
    processes.start()
    runs = []
    for stage in asked.stage or STAGES:
        for one in stage_of(stage, shape, asked.runs, universal=not asked.no_universal):
            runs.append(one)
            print(f"ZeRO-{stage} {one['condition']:<18} {one['contestant']:<12} {one['seconds']:7.2f} s", flush=True)
    made = {
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - started),
        "params": int(asked.params),
        "layers": shape.layers,
        **summary(runs),
        "runs": runs,
    }
    print(json.dumps({key: made[key] for key in ("conditions", "worst", "worst_unchanged")}, indent=1))
    report.keep(made, "first-load", asked.output)


if __name__ == "__main__":
    main()
