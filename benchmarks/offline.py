"""Times the offline tools beside what else does a part of the same, by turns, on one checkpoint in the page cache.

`verify` beside `sha256sum`, `inspect` beside `torch.load` of the same files, `convert` beside
`torch.distributed.checkpoint` saving the same state, both with their files brought to the disk. The checkpoint is the
synthetic one of `benchmarks.verify`, filled with random values. Then by which power of the checkpoint's bytes `verify`
grows, and of its tensors and shards `inspect`.
Prints JSON; `--output FOLDER` writes it there too.
Run: python -m benchmarks.offline [--layers N] [--runs N] [--output FOLDER]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import report
from benchmarks.load import SCRATCH, warm
from benchmarks.memory import Counters, forget_peak, resident
from benchmarks.report import exponent, spread
from benchmarks.verify import fill, gpt_shapes, write_checkpoint
from ds_reshard.operations import convert, inspect, verify

PAIRS = {"verify": "sha256sum", "inspect": "torch.load", "convert": "torch.distributed.checkpoint"}
WIDTH, DP = 1024, 4


def files(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.rglob("*.pt"))]


def load_all(folder: Path) -> list[Any]:
    return [torch.load(path, weights_only=False) for path in files(folder)]


def save_state(state: dict[str, Any], out: Path) -> None:
    """One process saves all of it; its writer syncs each file (FileSystemWriter, sync_files)."""
    from torch.distributed import checkpoint

    checkpoint.save(state, checkpoint_id=str(out), no_dist=True)


def contestants(folder: Path, out: Path) -> dict[str, Callable[[], object]]:
    state = {str(number): content for number, content in enumerate(load_all(folder))}
    return {
        "verify": lambda: verify(str(folder)),
        "sha256sum": lambda: subprocess.run(["sha256sum", *files(folder)], stdout=subprocess.DEVNULL, check=True),
        "inspect": lambda: inspect(str(folder)),
        "torch.load": lambda: load_all(folder),
        "convert": lambda: convert(str(folder), str(out), to="zero2", dp=DP - 1),
        "torch.distributed.checkpoint": lambda: save_state(state, out),
    }


def contest(folder: Path, out: Path, runs: int) -> dict[str, Any]:
    """All contestants by turns, `runs` times after a round that is not counted."""
    taken: dict[str, list[float]] = {}
    spent: dict[str, list[Counters]] = {}
    works = contestants(folder, out)
    for number in range(runs + 1):
        for name, work in works.items():
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            before, started = Counters.now(), time.perf_counter()
            work()
            if number:
                taken.setdefault(name, []).append(time.perf_counter() - started)
                spent.setdefault(name, []).append(Counters.now().since(before))
    shutil.rmtree(out, ignore_errors=True)
    ratios = {
        name: spread([mine / theirs for mine, theirs in zip(taken[name], taken[peer], strict=True)])
        for name, peer in PAIRS.items()
    }
    counted = {
        name: {key: median(getattr(one, key) for one in each) for key in Counters.__slots__}
        for name, each in spent.items()
        if name in PAIRS
    }
    return {"seconds": {name: spread(of) for name, of in taken.items()}, "ratios": ratios, "spent": counted}


def cost(work: Callable[[], object], runs: int) -> tuple[float, int]:
    """Seconds of processor time, the median of some runs, and by how many bytes the process grew at most."""
    work()
    forget_peak()
    before, taken = resident(), []
    for _ in range(runs):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return median(taken), resident()["peak"] - before["anonymous"] - before["file"]


def growing(folder: Path, runs: int) -> Iterator[dict[str, Any]]:
    """`verify` by bytes, `inspect` by tensors and by shards."""
    cases = (
        *(("verify, bytes", verify, layers, 512, DP) for layers in (1, 4, 16)),
        *(("inspect, tensors", inspect, layers, 16, DP) for layers in (16, 64, 128, 256)),
        *(("inspect, shards", inspect, 16, 64, dp) for dp in (16, 64, 128)),
    )
    for name, work, layers, width, dp in cases:
        shutil.rmtree(folder, ignore_errors=True)
        nbytes = write_checkpoint(folder, gpt_shapes(layers, width, vocabulary=1024), dp)
        warm(folder)
        cpu_s, grown = cost(lambda work=work: work(str(folder)), runs)  # type: ignore[misc]
        size = {"bytes": nbytes, "tensors": len(gpt_shapes(layers, width, vocabulary=1024)), "shards": dp}
        yield {"name": name, "size": size[name.partition(", ")[2]], "cpu_s": cpu_s, "grown_nbytes": grown}
    shutil.rmtree(folder)


def growth(points: list[dict[str, Any]]) -> dict[str, Any]:
    made = {}
    for name in dict.fromkeys(point["name"] for point in points):
        here = [point for point in points if point["name"] == name]
        made[name] = {
            "exponent": exponent([point["size"] for point in here], [point["cpu_s"] for point in here]),
            "points": here,
        }
    return made


def main() -> None:
    parser = report.parser("offline", __doc__)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    SCRATCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        folder = Path(scratch) / "checkpoint"
        write_checkpoint(folder, gpt_shapes(layers=given.layers, width=WIDTH), DP)
        nbytes = fill(folder)
        measured = contest(folder, Path(scratch) / "out", given.runs)
        made = {
            "runs": given.runs,
            "nbytes": nbytes,
            "versions": report.versions("torch", "isal", "numpy"),
            **measured,
            "growth": growth(list(growing(Path(scratch) / "growing", given.runs))),
        }
    print(json.dumps(made, indent=1))
    report.keep(made, "offline", given.output)


if __name__ == "__main__":
    main()
