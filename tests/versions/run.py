"""A part of the matrix against older DeepSpeed releases; writes results.json and the table in docs/formats.md.

Every release is put into a folder of its own, `.venv-versions/RELEASE`, without its dependencies, and comes first
on the path: the rest, torch included, is the project's own environment. Each release saves every cell and loads it
again; then the project's DeepSpeed loads what each has saved.

    make test-versions
    .venv/bin/python tests/versions/run.py 0.16.9 0.17.6   only these; other results are kept
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from homes import NotRun, home, last_line
from rich.console import Console
from rich.table import Table
from table import RESULTS, ROOT, read_results, rows, write_block

CURRENT = metadata.version("deepspeed")
RELEASES = ("0.14.5", "0.15.4", "0.16.9", "0.17.6", "0.18.4", "0.18.9", "0.19.5", CURRENT)
CELLS_TIMEOUT_S = 1200
console = Console()


def _home(release: str) -> Path | None:
    """Where the release is installed; None for the project's own. Raises NotRun where pip cannot."""
    return None if release == CURRENT else home("deepspeed", release, release)


def _cells(action: str, home: Path | None, folder: Path, expected: str) -> list[dict[str, str]]:
    """Run cells.py under one release; what it says of each cell. Raises NotRun where the release does not start."""
    paths = [str(path) for path in (home, ROOT / "tests" / "hosts", ROOT) if path is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["LOCAL_SIZE"] = "4"  # `device_count` of cpu_accelerator.py: without it, 0.14 and 0.15 need `numactl`
    report = folder / f"{action}.json"
    program = [sys.executable, str(Path(__file__).with_name("cells.py")), action, str(folder), str(report)]
    with (folder / "log").open("w+", encoding="utf-8") as log:
        ended = subprocess.run(program, env=environment, stdout=log, stderr=log, timeout=CELLS_TIMEOUT_S, check=False)
        log.seek(0)
        said = log.read()
    if ended.returncode:
        raise NotRun(last_line(said))
    told = json.loads(report.read_text(encoding="utf-8"))
    assert told["deepspeed"] == expected, f"{expected} was to run, {told['deepspeed']} did"
    cells: list[dict[str, str]] = told["cells"]
    for cell in cells:
        console.print(f"  {cell['outcome']:9} {cell['cell']}  {cell['reason']}", markup=False, highlight=False)
    return cells


def _test(release: str, scratch: Path) -> dict[str, Any]:
    """One release: its cells, saved and loaded by itself, then loaded by the project's DeepSpeed."""
    result: dict[str, Any] = {"deepspeed": release, "reason": "", "cells": []}
    folder = scratch / release
    folder.mkdir()
    try:
        home = _home(release)
        console.print(f"[bold]DeepSpeed {release}[/bold] saves")
        saved = _cells("save", home, folder, release)
        for loader in dict.fromkeys((release, CURRENT)):
            console.print(f"[bold]DeepSpeed {loader}[/bold] loads what {release} saved")
            loaded = _cells("load", home if loader == release else None, folder, loader)
            for one, other in zip(saved, loaded, strict=True):
                told = one if other["outcome"] == "not saved" else other
                result["cells"].append({**told, "loaded_by": loader})
    except NotRun as error:
        result["reason"] = str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _show(results: dict[str, Any]) -> None:
    table = Table(title="DeepSpeed releases", title_justify="left", show_lines=True)
    for heading in ("DeepSpeed", "runs here", "saved by it loads", "loads under it", "note"):
        table.add_column(heading, overflow="fold")
    for row in rows(results):
        table.add_row(*row)
    console.print(table)


def main() -> int:
    wanted = tuple(sys.argv[1:]) or RELEASES
    kept = {r["deepspeed"]: r for r in read_results()["releases"]} if len(sys.argv) > 1 and RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for release in wanted:
            kept[release] = _test(release, Path(scratch))
    results = {
        "current": CURRENT,
        "torch": metadata.version("torch").split("+")[0],
        "python": platform.python_version(),
        "releases": [kept[release] for release in sorted(kept, key=lambda text: [int(n) for n in text.split(".")])],
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    write_block(results)
    _show(results)
    unseen = [release["deepspeed"] for release in results["releases"] if not release["cells"]]
    if unseen:
        console.print(f"without any cell, and so not tested: {', '.join(unseen)}")
    failed = any(cell["outcome"] == "failed" for release in results["releases"] for cell in release["cells"])
    return int(failed or bool(unseen))


if __name__ == "__main__":
    sys.exit(main())
