"""`make bench`: `convert` and `verify --deep` by one process, by copies of it, and by the ranks of two torchrun agents.

Each contestant is a command in fresh interpreters, imports counted, by turns, on a checkpoint that DeepSpeed saved and
that is in the page cache. One machine stands for both nodes: the ranks share its cores and its disk, so what shows is
what sharing costs, and how evenly a conversion is dealt out.
Prints each run; `--output FOLDER` writes JSON there too.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import engines, processes, report
from benchmarks.convert import SAVED_DP, SHAPES
from benchmarks.load import SCRATCH, warm

NODES, RANKS = 2, 2
ALONE, COPIES, SHARED = "one process", "a copy for each core", f"{NODES} agents of {RANKS} ranks"
CONTESTANTS = (ALONE, COPIES, SHARED)
TOOLS = ("convert", "verify --deep")


def main() -> None:
    given = report.parser("nodes", __doc__).parse_args()
    folder, out = SCRATCH / "nodes-source", SCRATCH / "nodes-out"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    runs: list[dict[str, Any]] = []
    processes.start()
    try:
        processes.run(engines.save, world=SAVED_DP, shape=SHAPES[200], stage=2, folder=str(folder))
        for number in range(given.runs):
            for tool in TOOLS:
                for name in CONTESTANTS:
                    run = {"round": number, "tool": tool, "contestant": name, **_run(tool, name, folder, out)}
                    runs.append(run)
                    print(f"{tool}, {name}: {run['seconds']:.2f} s", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
    made = {"summary": summary(runs), "runs": runs}
    print(json.dumps(made["summary"], indent=1))
    report.keep(made, "nodes", given.output)


def _run(tool: str, name: str, folder: Path, out: Path) -> dict[str, Any]:
    """Seconds of a command, and the bytes that each of its ranks wrote."""
    shutil.rmtree(out, ignore_errors=True)
    logs = Path(f"{out}.logs")
    shutil.rmtree(logs, ignore_errors=True)
    warm(folder)
    os.sync()
    words = [*tool.split(), str(folder), *([str(out), "--to", "zero3", "--dp", "16"] if tool == "convert" else [])]
    python = [sys.executable, "-m", "ds_reshard", *words, "--json"]
    commands = [python if name == COPIES else [*python, "--processes", "1"]]
    if name == SHARED:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES), "--nproc-per-node", str(RANKS)]
        launch += ["--master-addr", "127.0.0.1", "--master-port", port, "--redirects", "1", "--log-dir", str(logs)]
        commands = [[*launch, "--node-rank", str(node), *python[1:]] for node in range(NODES)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for command in commands]
    said = [one.communicate()[0] for one in running]
    seconds = time.perf_counter() - started
    if any(one.returncode for one in running):
        raise RuntimeError(f"{tool}, {name}: {[one.returncode for one in running]}")
    texts = [path.read_text() for path in sorted(logs.rglob("stdout.log"))] if name == SHARED else said
    shutil.rmtree(logs, ignore_errors=True)
    (text,) = filter(None, texts)
    written = json.loads(text)["written_by_rank"] if tool == "convert" else []
    return {"seconds": seconds, "written_nbytes": written}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """For each tool: each contestant's seconds, over those of one process in the same round; the balance of ranks."""
    made: dict[str, Any] = {}
    for tool in TOOLS:
        of = {name: [run for run in runs if (run["tool"], run["contestant"]) == (tool, name)] for name in CONTESTANTS}
        alone = [run["seconds"] for run in of[ALONE]]
        made[tool] = {ALONE: {"seconds": median(alone)}}
        for name in (COPIES, SHARED):
            seconds = [run["seconds"] for run in of[name]]
            over = [one / other for one, other in zip(seconds, alone, strict=True)]
            made[tool][name] = {"seconds": median(seconds), "over": report.spread(over)}
    shares = [run["written_nbytes"] for run in runs if run["tool"] == "convert" and run["contestant"] == SHARED]
    made["most of a rank over the mean"] = max(max(one) * len(one) / sum(one) for one in shares)
    return made


if __name__ == "__main__":
    main()
