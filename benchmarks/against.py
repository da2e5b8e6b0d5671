"""Times `inspect` and loads of this tree beside those of another commit, by turns, each in a fresh process.

For a change that may not cost time: what it costs is the ratio of the two. The checkpoints are those of
`benchmarks.inspect_opening` (synthetic, files with holes) and of real DeepSpeed (`benchmarks.engines`); every file is
in the page cache. Seconds are those of the call alone, imports left out.
Run: python -m benchmarks.against COMMIT [--runs N] [--params N] [--output FOLDER]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import engines, processes, report
from benchmarks.gpt import Shape
from benchmarks.load import SCRATCH, warm
from benchmarks.report import ROOT, spread
from benchmarks.verify import fill, gpt_shapes, write_checkpoint

TREES = ("now", "then")
INSPECT = """
import sys, time
from ds_reshard.operations import inspect
started, cpu = time.perf_counter(), time.process_time()
found = inspect(sys.argv[1])
print(time.perf_counter() - started, time.process_time() - cpu)
assert found.parameters and not found.faults, found.faults
"""
LOAD = """
import json, os, sys, tempfile, time
folder, params, config = sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3])
import ds_reshard.auto
from benchmarks.engines import engine, join
from benchmarks.gpt import Shape
with tempfile.TemporaryDirectory() as place:
    join(os.path.join(place, "rendezvous"), 0, 1)
    made = engine(Shape.of(params), stage=2, world=1, filled=False, config=config)
    started, cpu = time.perf_counter(), time.process_time()
    path, _ = made.load_checkpoint(folder)
    print(time.perf_counter() - started, time.process_time() - cpu)
    assert path is not None and made.global_steps == 1
"""


def timed(tree: Path, script: str, *arguments: str) -> tuple[float, float]:
    """Seconds by the clock and of the processor that a script tells, run with the package of a tree."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "LOCAL_RANK": "0",
        "PYTHONSAFEPATH": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=tree,
    )
    if done.returncode:
        raise SystemExit(f"{tree}: {done.stderr[-2000:]}")
    wall, cpu = done.stdout.split()[-2:]
    return float(wall), float(cpu)


@contextmanager
def worktree(name: str, scratch: Path) -> Iterator[Path]:
    place = scratch / "then"
    subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(place), name], cwd=ROOT, check=True)
    try:
        yield place
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=ROOT, check=True)


def contest(trees: dict[str, Path], works: dict[str, tuple[str, ...]], runs: int) -> dict[str, Any]:
    """Each work with each tree, by turns; what goes first changes from round to round, and one round is left out."""
    taken: dict[str, dict[str, list[tuple[float, float]]]] = {work: {tree: [] for tree in TREES} for work in works}
    for number in range(runs + 1):
        for work, (script, *arguments) in works.items():
            for tree in TREES if number % 2 else TREES[::-1]:
                spent = timed(trees[tree], script, *arguments)
                if number:
                    taken[work][tree].append(spent)
        print(f"round {number} of {runs}", file=sys.stderr, flush=True)
    return {
        work: {
            **{tree: spread([wall for wall, _ in of_tree[tree]]) for tree in TREES},
            "ratio": spread([now[0] / then[0] for now, then in zip(of_tree["now"], of_tree["then"], strict=True)]),
            "processor_ratio": spread(
                [now[1] / then[1] for now, then in zip(of_tree["now"], of_tree["then"], strict=True)]
            ),
        }
        for work, of_tree in taken.items()
    }


def main() -> None:
    parser = report.parser("against", __doc__, runs=9)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--params", type=float, default=30e6, help="of the model that is loaded (default: %(default)s)")
    arguments = parser.parse_args()
    processes.start()
    SCRATCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as place, worktree(arguments.commit, Path(place)) as then:
        scratch, shape = Path(place), Shape.of(arguments.params)
        write_checkpoint(scratch / "wide", gpt_shapes(24, 256), dp=64)
        fill(scratch / "wide")
        for dp in (1, 2):
            processes.run(engines.save, world=dp, shape=shape, stage=2, folder=str(scratch / f"dp{dp}"))
        for folder in ("wide", "dp1", "dp2"):
            warm(scratch / folder)
        params = str(arguments.params)
        works = {
            "inspect, 64 shards": (INSPECT, str(scratch / "wide")),
            "load, unchanged": (LOAD, str(scratch / "dp1"), params, "{}"),
            "load, dp 2 to 1": (LOAD, str(scratch / "dp2"), params, "{}"),
        }
        works_found = contest({"now": ROOT, "then": then}, works, arguments.runs)
    report.keep({"then": arguments.commit, "runs": arguments.runs, **works_found}, "against", arguments.output)
    for work, told in works_found.items():
        figures = ", ".join(f"{name} {told[name]['median']:.3f}" for name in (*TREES, "ratio", "processor_ratio"))
        print(f"{work}: {figures}")
    print(f"worst ratio: {max(told['ratio']['median'] for told in works_found.values()):.3f}")


if __name__ == "__main__":
    main()
