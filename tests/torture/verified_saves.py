"""Every call on files by which a save is verified fails once on one rank, in each way that it can.

    python tests/torture/verified_saves.py                `verify_after_save` of torch and of a checkpoint manager
    python tests/torture/verified_saves.py --every 37     a sample

After each every rank is told the same: an error of the package, or that the save is good. It is never good where calls
were refused from then on, or the file had ended. The next save is good.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "hosts")]

from calls import FAULTS, Step  # noqa: E402
from verified_save_jobs import KINDS, is_loss  # noqa: E402
from worlds import World  # noqa: E402

_SAME = 50
"""Cases that one call of the workers goes through."""


def wrong(on: int, step: Step, fault: str, told: list[tuple[str, str]]) -> str:
    """What is wrong with what the ranks tell of one case, if anything."""
    said = {one for one, _ in told}
    if len(said) > 1:
        return f"the ranks do not say the same: {sorted(said)}"
    only = said.pop()
    if only.startswith(("unnamed", "the step")):
        return only
    if only == "done" and is_loss(on, step, fault):
        return "the save is said to be good, and not all of it was read"
    return "; ".join(left for _, left in told if left)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS)
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args(words)
    began, tried, findings, turn = time.monotonic(), Counter[str](), 0, 0
    world = World(2)
    with tempfile.TemporaryDirectory() as place:
        for kind in KINDS if given.kind is None else (given.kind,):
            arguments = {"kind": kind, "folder": f"{place}/save"}
            cases: list[tuple[int, Step, str]] = []
            for rank, steps in enumerate(world.run("verified_save_jobs.verified", cases=None, **arguments)):
                for step, fault in ((one, fault) for one in steps for fault in FAULTS[one.kind]):
                    turn += 1
                    if turn % given.every == 0:
                        cases.append((rank, step, fault))
            for first in range(0, len(cases), _SAME):
                part = cases[first : first + _SAME]
                told = world.run("verified_save_jobs.verified", cases=part, **arguments)
                for case, by_rank in zip(part, zip(*told, strict=True), strict=True):
                    tried[f"{kind}: {case[1].kind}"] += 1
                    if found := wrong(*case, list(by_rank)):
                        findings += 1
                        print(kind, case, found, flush=True)
    world.close()
    seconds = round(time.monotonic() - began)
    print(json.dumps({"tried": sum(tried.values()), "by": tried, "wrong": findings, "seconds": seconds}))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
