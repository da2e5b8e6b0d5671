"""How large the house is: files and lines of the package, and what of it a load and a conversion pass through.

Beside another commit, each in fresh processes; a load is that of ZeRO-2 from one rank into two. Nothing is timed.
Run: python -m benchmarks.house COMMIT [--output FOLDER]
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import engines, processes
from benchmarks.against import worktree
from benchmarks.gpt import Shape
from benchmarks.load import SCRATCH
from benchmarks.report import ROOT, commit, keep, results_folder

TRACED = """
import json, sys, os, threading
seen = set()
def trace(frame, event, arg):
    name = frame.f_code.co_filename
    if event == "call" and f"{os.sep}ds_reshard{os.sep}" in name and frame.f_code.co_name != "<module>":
        seen.add((name.rpartition(f"{os.sep}ds_reshard{os.sep}")[2], frame.f_code.co_qualname
                  if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name))
def told(**more):
    sys.setprofile(None); threading.setprofile(None)
    print(json.dumps({"files": len({file for file, _ in seen}), "functions": len(seen), **more}), flush=True)
"""
LOAD = (
    TRACED
    + """
import ds_reshard.auto, tempfile
from collectives import counted
from benchmarks.engines import engine, join
from benchmarks.gpt import Shape
folder, rendezvous, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.environ["LOCAL_RANK"] = str(rank)
join(rendezvous, rank, 2)
made = engine(Shape.of(1e6), stage=2, world=2, filled=False, config={})
with counted() as calls:
    threading.setprofile(trace); sys.setprofile(trace)
    path, _ = made.load_checkpoint(folder)
    sys.setprofile(None)
assert path is not None
if not rank:
    told(collectives=len(calls), collective_nbytes=sum(call.nbytes for call in calls))
"""
)
CONVERT = (
    TRACED
    + """
from ds_reshard.operations import convert
threading.setprofile(trace); sys.setprofile(trace)
convert(sys.argv[1], sys.argv[2], to="zero3", dp=8)
told()
"""
)


def size(package: Path) -> dict[str, int]:
    """Files, lines, lines of imports and exceptions from the formatter."""
    texts = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
    imports = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    return {
        "files": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts),
        "import_lines": sum(imports),
        "fmt_skip": sum(text.count("# fmt: skip") for text in texts),
    }


def told(tree: Path, script: str, *arguments: str, ranks: int = 1) -> dict[str, Any]:
    """What a script tells that is run with the package of a tree, on some ranks."""
    path = os.pathsep.join([str(tree), str(ROOT), str(ROOT / "benchmarks")])
    more = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "PYTHONSAFEPATH": "1"}
    environment = {**os.environ, **more, "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    running = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True, cwd=tree)
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"{tree}: failed")
    found: dict[str, Any] = json.loads(outputs[0].strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--output", type=results_folder, metavar="FOLDER")
    arguments = parser.parse_args()
    processes.start()
    SCRATCH.mkdir(exist_ok=True)
    results: dict[str, Any] = {"commit": commit(), "then": arguments.commit}
    with tempfile.TemporaryDirectory(dir=SCRATCH) as place, worktree(arguments.commit, Path(place)) as then:
        folder = str(Path(place) / "saved")
        processes.run(engines.save, world=1, shape=Shape.of(1e6), stage=2, folder=folder)
        for name, tree in (("before", then), ("now", ROOT)):
            made = results[name] = {"package": size(tree / "ds_reshard")}
            made["load"] = told(tree, LOAD, folder, str(Path(place) / f"meet-{name}"), ranks=2)
            made["convert"] = told(tree, CONVERT, folder, str(Path(place) / f"out-{name}"))
    keep(results, "house", arguments.output, device="any")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
