"""`make bench`, a part: tensors that are cut along an inner axis, planned and moved under another tensor-parallel size.

A weight of 8,192 x 28,672 elements that is cut by columns, float32: from 8 ranks to 4 and to 16, and from one file to
8. Planning is timed for one such weight and one rank, which has an entry for each file that holds some of it. Moving is
timed for all ranks, one after another in one process, 2 GiB of files in the page cache, by turns with a bare loop of
`preadv` of the same bytes, 2 MiB a call, with as many threads. The loop takes no checksum; the executor does. Prints a
table; `--output FOLDER` writes JSON there too.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from ds_reshard.containers.crc import crc32
from ds_reshard.execution.buffers import TensorTarget, memory_of
from ds_reshard.execution.checksums import combine, partial_sums, settle
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.index import Extent, Index, Record
from ds_reshard.model.layout import Layout, TensorKey, chunked_placement
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box
from ds_reshard.planning.plan import Planner

SHAPE = (8192, 28672)
NUMBER = 2
KEYS = [TensorKey(f"layers.{number}.weight", "weight") for number in range(NUMBER)]
CASES = ((8, 4), (8, 16), (1, 8))
THREADS = os.cpu_count() or 1
CALL_NBYTES = 2 << 20


def layout(ranks: int) -> Layout:
    columns = SHAPE[1] // ranks
    boxes = [Box(offset=(0, rank * columns), size=(SHAPE[0], columns)) for rank in range(ranks)]
    placed = [chunked_placement(key, SHAPE, ElementType.FLOAT32, boxes, family="tp", buffer=key.name) for key in KEYS]
    return Layout(dict(zip(KEYS, placed, strict=True)), {"tp": ranks})


class Files:
    """One file a rank, its shard of every tensor row by row."""

    def __init__(self, folder: Path, ranks: int, tensors: list[torch.Tensor]) -> None:
        self._extents: list[dict[str, Extent]] = []
        columns = SHAPE[1] // ranks
        for rank in range(ranks):
            path, extents, at = folder / f"rank{rank}", {}, 0
            with open(path, "wb") as file:
                for key, tensor in zip(KEYS, tensors, strict=True):
                    shard = tensor[:, rank * columns : (rank + 1) * columns].contiguous()
                    data = memory_of(shard)
                    record = Record(path=str(path), byte_offset=at, nbytes=len(data), crc32=crc32(data))
                    extents[key.name] = Extent(record, at, ElementType.FLOAT32, shard.numel())
                    file.write(data)
                    at += len(data)
            self._extents.append(extents)
        self.paths = [folder / f"rank{rank}" for rank in range(ranks)]

    def buffers(self, family: str, shard: int) -> dict[str, Extent]:
        return self._extents[shard]


def bare(paths: list[Path], memory: memoryview) -> float:
    """Seconds that a loop takes to read all files to one place in memory after another."""
    calls = [(path, at) for path in paths for at in range(0, path.stat().st_size, CALL_NBYTES)]
    opened = {path: os.open(path, os.O_RDONLY) for path in paths}

    def read(thread: int) -> None:
        for number in range(thread, len(calls), THREADS):
            path, at = calls[number]
            os.preadv(opened[path], [memory[number * CALL_NBYTES : (number + 1) * CALL_NBYTES]], at)

    started = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read, range(THREADS)))
    seconds = time.perf_counter() - started
    for fd in opened.values():
        os.close(fd)
    return seconds


def measured(saved: int, coming: int, runs: int, tensors: list[torch.Tensor], folder: Path) -> dict[str, Any]:
    files, target = Files(folder, saved, tensors), layout(coming)
    columns = SHAPE[1] // coming
    held = [[torch.zeros(SHAPE[0] * columns) for _ in KEYS] for _ in range(coming)]
    room = torch.zeros(sum(map(torch.Tensor.numel, tensors)) + CALL_NBYTES)
    rounds = []
    for _ in range(runs):
        plain = bare(files.paths, memory_of(room))
        index = Index(layout(saved), files)
        began = time.perf_counter()
        made = Planner(index, target, {KEYS[0]: KEYS[0]}).plan(0, sizes={})
        first = time.perf_counter() - began
        planner = Planner(index, target, {key: key for key in KEYS})
        seconds, sums = 0.0, []
        for rank in range(coming):
            plan = planner.plan(rank, sizes={})
            targets = {key.name: TensorTarget(one) for key, one in zip(KEYS, held[rank], strict=True)}
            began = time.perf_counter()
            outcome = ThreadExecutor(threads=THREADS, memory_nbytes=64 << 20, checksum=True).execute(plan, targets)
            pending, faults = settle(partial_sums(outcome))
            seconds += time.perf_counter() - began
            assert not (faults or outcome.faults)
            sums.append(pending)
        began = time.perf_counter()
        assert combine(sums) == ([], set())
        seconds += time.perf_counter() - began
        rounds.append({"plan_s": first, "seconds": seconds, "preadv_s": plain, "entries": len(made.copies)})
    for rank, mine in enumerate(held):
        for tensor, one in zip(tensors, mine, strict=True):
            assert torch.equal(one.view(SHAPE[0], columns), tensor[:, rank * columns : (rank + 1) * columns])
    return {
        "saved": saved,
        "coming": coming,
        "entries": rounds[0]["entries"],
        "plan_s": report.spread([one["plan_s"] for one in rounds]),
        "seconds": report.spread([one["seconds"] for one in rounds]),
        "ratio": report.spread([one["seconds"] / one["preadv_s"] for one in rounds]),
    }


def main() -> None:
    from rich.console import Console

    given = report.parser("rows", __doc__).parse_args()
    torch.manual_seed(1)
    tensors = [torch.randn(SHAPE) for _ in KEYS]
    cases = []
    rows = report.empty_table(
        "cut by columns", "from", "to", "entries", "planning, ms", "moving, seconds", "over preadv"
    )
    for saved, coming in CASES:
        with tempfile.TemporaryDirectory(dir=given.output) as name:
            case = measured(saved, coming, given.runs, tensors, Path(name))
        cases.append(case)
        plan_ms = {**case["plan_s"], **{k: 1e3 * case["plan_s"][k] for k in ("median", "min", "max")}}
        rows.add_row(
            f"{saved}",
            f"{coming}",
            f"{case['entries']}",
            report.of(plan_ms),
            report.of(case["seconds"]),
            report.of(case["ratio"]),
        )
    Console(width=report.WIDTH).print(rows)
    report.keep({"versions": report.versions("torch", "numpy", "isal"), "cases": cases}, "rows", given.output)


if __name__ == "__main__":
    main()
