"""What a resume costs to plan at sizes that no disk here holds; see docs/scale.md.

Checkpoints are synthetic: real names, headers, directories and pickles, holes for the bytes of tensors. Each figure is
of a fresh process. `--whole N` plans all ranks' files of the largest case instead, with `ds-reshard plan --shard I/N`,
as many parts at a time as there are cores; with `--every M` only one part of M, and says what that makes of all.
Prints JSON; `--output FOLDER` writes it there too.
Run: python -m benchmarks.scale [--runs N] [--long] [--whole N [--every M]] [--output FOLDER]
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.load import ROOT, SCRATCH
from benchmarks.report import exponent, spread

sys.path.insert(0, str(ROOT / "tests" / "formats"))

from sparse_checkpoint import Shape, llama_shapes, write_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A checkpoint of `dp` ranks at a ZeRO stage, and the rank of the coming run, of `to_dp`, that is measured."""

    name: str
    shapes: Mapping[str, Shape]
    stage: int
    dp: int
    to_dp: int
    rank: int


LLAMA = llama_shapes(layers=133, width=24576, wide=69632)
"""1.01e12 parameters in 1,200 tensors."""
UNEVEN = llama_shapes(layers=121, width=25600, wide=70000)
"""As large; no size of it is a multiple of 4,096."""


def small(tensors: int) -> dict[str, Shape]:
    return {f"blocks.{i // 10}.{i % 10}.weight": (64, 100 + i % 7) for i in range(tensors)}


SHARDS = (512, 1024, 2048, 4096)
RANKS = (384, 768, 1536)
TENSORS = (1_000, 3_000, 10_000)
FEWER = "1T parameters, fewer ranks"
CASES = (
    *(Case(name="1T parameters", shapes=LLAMA, stage=3, dp=dp, to_dp=3 * dp // 4, rank=dp // 2 + 17) for dp in SHARDS),
    *(Case(name=FEWER, shapes=LLAMA, stage=3, dp=4096, to_dp=to_dp, rank=to_dp // 2 + 17) for to_dp in RANKS),
    Case(name="1T parameters, uneven", shapes=UNEVEN, stage=3, dp=4096, to_dp=3072, rank=2065),
    *(Case(name=f"{n} tensors", shapes=small(n), stage=s, dp=8, to_dp=6, rank=4) for s in (1, 3) for n in TENSORS),
    *(
        Case(name="one tensor of 2^40", shapes={"weight": (1 << 20, 1 << 20)}, stage=s, dp=8, to_dp=6, rank=5)
        for s in (1, 3)
    ),
)
LONG = tuple(Case(name="100000 tensors", shapes=small(100_000), stage=s, dp=8, to_dp=6, rank=4) for s in (1, 3))


def needed(case: Case) -> Collection[int] | None:
    """The saved ranks whose files need be there: all of a small checkpoint; of a large one those that can be read."""
    if case.dp <= 8:
        return None
    shards: set[int] = {0, *range(case.rank, case.dp, case.to_dp)}
    for shape in case.shapes.values():
        old, new = -(-prod(shape) // case.dp), -(-prod(shape) // case.to_dp)
        start, stop = case.rank * new, min(prod(shape), (case.rank + 1) * new)
        shards |= {*range(start // old, -(-stop // old))} if start < stop else set()
    return shards


def python(module: str, *arguments: str) -> Any:
    """What a fresh interpreter prints, as JSON."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def measured(case: Case, runs: int, scratch: Path) -> dict[str, Any]:
    folder = scratch / "checkpoint"
    nbytes = write_checkpoint(folder, case.shapes, case.dp, stage=case.stage, ranks=needed(case))
    try:
        seen = [python("benchmarks.rank_plan", str(folder), str(case.to_dp), str(case.rank)) for _ in range(runs)]
    finally:
        shutil.rmtree(folder)
    numel = sum(map(prod, case.shapes.values()))
    return {
        "name": case.name,
        "stage": case.stage,
        "tensors": len(case.shapes),
        "numel": numel,
        "nbytes": nbytes,
        "dp": case.dp,
        "to_dp": case.to_dp,
        **seen[0],
        "own_seconds": spread([run["own"]["seconds"] for run in seen]),
        "own_cpu_s": spread([run["own"]["cpu_s"] for run in seen]),
    }


def whole_plan(shards: int, every: int, scratch: Path) -> dict[str, Any]:
    """Plan the files of the coming run in parts, and add up what those that were planned say."""
    case = CASES[SHARDS.index(max(SHARDS))]
    folder = scratch / "checkpoint"
    write_checkpoint(folder, case.shapes, case.dp, stage=case.stage)
    arguments = ["plan", str(folder), "--to", "zero3", "--dp", str(case.to_dp), "--json", "--shard"]

    def part(number: int) -> tuple[float, dict[str, Any]]:
        began = time.perf_counter()
        told = python("ds_reshard", *arguments, f"{number}/{shards}")
        return time.perf_counter() - began, told

    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(part, range(0, shards, every)))
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(folder)
    units = [unit for _, told in parts for unit in told["units"]]
    return {
        "dp": case.dp,
        "to_dp": case.to_dp,
        "parts": shards,
        "planned_parts": len(parts),
        "processes": os.cpu_count(),
        "seconds": seconds,
        "all_seconds": seconds * shards / len(parts),
        "part_seconds": spread([taken for taken, _ in parts]),
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "units": len(units),
        "files_written": sum(told["files_written"] for _, told in parts),
        "bytes_read": sum(told["bytes_read"] for _, told in parts),
        "bytes_written": sum(told["bytes_written"] for _, told in parts),
        "files_read_by_a_unit": max(unit["files_opened"] for unit in units),
        "metadata_nbytes": sum(told["metadata_nbytes"] for _, told in parts),
    }


def points(cases: list[dict[str, Any]]) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """What a rank's cost may grow by: the key of that size, and the cases that differ in it, not in the model."""
    trillion = [case for case in cases if case["name"] == "1T parameters"]
    most = [case for case in trillion if case["dp"] == max(SHARDS)]
    return {
        "source shards, ZeRO-3": ("dp", trillion),
        "target ranks, ZeRO-3": ("to_dp", [*(case for case in cases if case["name"] == FEWER), *most]),
        **{
            f"tensors, ZeRO-{stage}": (
                "tensors",
                [case for case in cases if case["stage"] == stage and case["name"].endswith(" tensors")],
            )
            for stage in (1, 3)
        },
    }


def growth(cases: list[dict[str, Any]]) -> dict[str, float]:
    """By which power of each of those sizes a rank's processor time grows."""
    return {
        name: exponent([case[by] for case in here], [case["own_cpu_s"]["median"] for case in here])
        for name, (by, here) in points(cases).items()
    }


def main() -> None:
    parser = report.parser("scale", __doc__)
    parser.add_argument("--whole", type=int, metavar="N", help="plan all ranks' files, in N parts")
    parser.add_argument("--long", action="store_true", help="100,000 tensors instead: a minute a run, and a gigabyte")
    parser.add_argument("--every", type=int, metavar="M", default=1, help="plan one part of M (default: all)")
    given = parser.parse_args()
    SCRATCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        if given.whole:
            made = whole_plan(given.whole, given.every, Path(name))
        else:
            cases = [measured(case, given.runs, Path(name)) for case in (LONG if given.long else CASES)]
            made = {"runs": given.runs, "cases": cases, "growth": {} if given.long else growth(cases)}
    print(json.dumps(made, indent=1))
    report.keep(made, "scale-whole" if given.whole else "scale-long" if given.long else "scale", given.output)


if __name__ == "__main__":
    main()
