"""Every call on files by which a save is verified fails once on one rank, in each way that it can.

    python tests/torture/verified_saves.py                `verify_after_save` of torch and of a checkpoint manager
    python tests/torture/verified_saves.py --every 37     a sample

After each every rank is told the same: an error of the package, or that the save is good. It is never good where calls
were refused from then on, or the file had ended. The next save is good.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "hosts")]

import host_folders  # noqa: E402, F401
from on_ranks import Case, Tried, options  # noqa: E402
from verified_save_jobs import KINDS, is_loss  # noqa: E402
from worlds import World  # noqa: E402


def wrong(case: Case, told: list[tuple[str, ...]]) -> str:
    """What is wrong with what the ranks tell of one case, if anything."""
    said = {one[0] for one in told}
    if len(said) > 1:
        return f"the ranks do not say the same: {sorted(said)}"
    only = said.pop()
    if only.startswith(("unnamed", "the step")):
        return only
    if only == "done" and is_loss(*case):
        return "the save is said to be good, and not all of it was read"
    return "; ".join(one[1] for one in told if one[1])


def main(words: list[str]) -> int:
    given = options(words, __doc__, nargs="?", choices=KINDS)
    tried, world = Tried(given.every), World(2)
    with tempfile.TemporaryDirectory() as place:
        for kind in KINDS if given.only is None else (given.only,):
            arguments = {"kind": kind, "folder": f"{place}/save"}
            steps = world.run("verified_save_jobs.verified", cases=None, **arguments)
            tried.of(world, kind, steps, "verified_save_jobs.verified", wrong, **arguments)
    world.close()
    return tried.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
