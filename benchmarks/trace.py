"""What a reader of the code meets in one load: functions, files, and changes from file to file.

ZeRO-2 on 4 ranks is loaded as ZeRO-3 on 2, of real DeepSpeed over gloo. Every call of a named function of ds_reshard on
rank 0's main thread is noted. A change of file is counted where the functions, in the order of their first calls, go on
in another one.

Run: python -m benchmarks.trace [--list] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import processes
from benchmarks.collectives import counted
from benchmarks.engines import engine, join, save
from benchmarks.gpt import Shape
from benchmarks.report import ROOT

PACKAGE = f"{ROOT}/ds_reshard/"
SHAPE = Shape(width=64, layers=2, vocabulary=128)


@dataclass(slots=True)
class Calls:
    """The functions of ds_reshard that were called, as file and name, in the order of their first calls."""

    functions: dict[tuple[str, str], int]
    collectives: int = 0

    @property
    def files(self) -> dict[str, int]:
        """The files, with the number of their functions that were called."""
        return dict(Counter(file for file, _ in self.functions))

    @property
    def changes(self) -> int:
        return sum(one[0] != other[0] for one, other in pairwise(self.functions))


def traced(work: Callable[[], object]) -> Calls:
    """The calls that this thread makes in `work`."""
    found: dict[tuple[str, str], int] = {}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            place = code.co_filename.removeprefix(PACKAGE), getattr(code, "co_qualname", code.co_name)
            found[place] = found.get(place, 0) + 1

    with counted() as collectives:
        sys.setprofile(profile)
        try:
            work()
        finally:
            sys.setprofile(None)
    return Calls(functions=found, collectives=len(collectives))


def load(rank: int, world: int, *, rendezvous: str, folder: str) -> Calls | None:
    """Load the folder as ZeRO-3; the calls of rank 0. Collective."""
    join(rendezvous, rank, world)
    import ds_reshard.auto  # noqa: F401

    made = engine(SHAPE, stage=3, world=world, filled=False)
    if rank:
        made.load_checkpoint(folder)
        return None
    return traced(lambda: made.load_checkpoint(folder))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description=__doc__)
    parser.add_argument("--list", action="store_true", help="every function, in the order of its first call")
    parser.add_argument("--output", metavar="FOLDER", help="write trace.json there")
    asked = parser.parse_args()
    processes.start()
    with tempfile.TemporaryDirectory() as folder:
        processes.run(save, world=4, shape=SHAPE, stage=2, folder=folder)
        calls, _ = processes.run(load, world=2, folder=folder)
    if asked.list:
        for (file, name), times in calls.functions.items():
            print(f"{times:>6}  {file:<44} {name}")
    told: dict[str, Any] = {
        "functions": len(calls.functions),
        "files": len(calls.files),
        "changes of file": calls.changes,
        "collectives": calls.collectives,
    }
    print(", ".join(f"{count} {what}" for what, count in told.items()))
    if asked.output is not None:
        Path(asked.output, "trace.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
