"""Every call on files of a load fails once on one rank, in each way that it can.

    python tests/torture/loads.py                a load of each kind
    python tests/torture/loads.py --every 37     a sample

The engine holds another checkpoint before. After each fault every rank has raised the same error of the package, and
the engine is what it was, or refuses to step; or no rank has, and it holds what a load without faults gives it. Then
the next load of the same files is right, they are as before, and no file is open and no thread left.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "hosts")]

import host_folders  # noqa: E402, F401
from cases import Model, Run  # noqa: E402
from on_ranks import Tried, options  # noqa: E402
from worlds import World  # noqa: E402

from ds_reshard.operations import Options, convert  # noqa: E402

MODEL = Model(groups=2)
KINDS = {
    "zero2 to zero3": (Run(2, 2), None, Run(3, 2)),
    "zero3 to zero1": (Run(3, 2), None, Run(1, 2)),
    "universal to zero2": (Run(1, 2), "universal", Run(2, 2)),
    "dcp to zero3": (Run(1, 2, "fp32"), "dcp", Run(3, 2, "fp32")),
}
"""What is saved, what that is converted into, and the run that loads it."""


def wrong(told: Sequence[tuple[str, ...]]) -> str:
    """What is wrong with what the ranks tell of one case, if anything."""
    if after := "; ".join(said for one in told for said in one[3:] if said):
        return after
    said, held = {one[0] for one in told}, {one[1] for one in told}
    if len(said) > 1:
        return f"the ranks do not say the same: {sorted(said)}"
    only = said.pop()
    if only.startswith(("unnamed", "the step")):
        return only
    if only == "done":
        return "" if held == {"right"} else f"done, and the engine holds {sorted(held)}"
    steps = {one[2] for one in told} - {""}
    if held <= {"unchanged", "right"} or steps == {"EngineUnusable"}:
        return ""
    return f"the engine holds {sorted(held)}, and a step ends in {sorted(steps)} after {only}"


def main(words: list[str]) -> int:
    given = options(words, __doc__, nargs="?", choices=KINDS)
    tried, world = Tried(given.every), World(2)
    with tempfile.TemporaryDirectory() as place:
        for name, (saved, to, run) in KINDS.items():
            if given.only in (None, name):
                good, other = (made(world, f"{place}/{name}", saved, to, seed) for seed in (7, 8))
                steps = world.run("load_jobs.steps", run=run, model=MODEL, folder=good)
                arguments = {"run": run, "model": MODEL, "good": good, "other": other}
                tried.of(world, name, steps, "load_jobs.befallen", lambda _, told: wrong(told), **arguments)
    world.close()
    return tried.end()


def made(world: World, place: str, saved: Run, to: str | None, seed: int) -> str:
    folder = f"{place} {seed}"
    world.run("save", run=saved, model=Model(groups=2, seed=seed), folder=folder)
    if to is not None:
        shutil.move(folder, f"{folder}.saved")
        convert(f"{folder}.saved", folder, to=to, options=Options(threads=1), **({"dp": 2} if to == "dcp" else {}))
    shutil.copytree(folder, f"{folder}.whole")
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
