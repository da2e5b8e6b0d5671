"""One rank of a load is killed, or stops, at each phase: the other ends with a named error, in time.

python tests/torture/ranks.py                every collective, and eight calls on files
python tests/torture/ranks.py --every 5      a sample
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time

from loads import KINDS, MODEL, made
from worlds import World

TIMEOUT_S = 5
"""What the DeepSpeed JSON says; the process group itself would wait twelve times as long."""
_COLLECTIVES, _CALLS = 4, 8


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args(words)
    began, tried, findings = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as place:
        saved, to, run = KINDS["zero2 to zero3"]
        world = World(2)
        folder = made(world, f"{place}/checkpoint", saved, to, seed=7)
        steps = world.run("load_jobs.steps", run=run, model=MODEL, folder=folder)
        world.close()
        moments = [(on, number) for on in (0, 1) for number in range(1, _COLLECTIVES + 1)]
        moments += [(on, steps[on][at * len(steps[on]) // _CALLS]) for on in (0, 1) for at in range(_CALLS)]
        for number, (on, at) in enumerate(moments):
            for sent in (signal.SIGKILL, signal.SIGSTOP):
                if (2 * number + (sent == signal.SIGSTOP)) % given.every:
                    continue
                tried += 1
                world = World(2, timeout_s=12 * TIMEOUT_S)
                arguments = {"run": run, "model": MODEL, "folder": folder, "on": on, "at": at, "signal_number": sent}
                arguments["seconds"] = TIMEOUT_S
                (told,) = world.run_without(on, "load_jobs.lost", 12 * TIMEOUT_S, **arguments)
                named = told is not None and told[0].startswith("RankLost: ") and told[1] != "done"
                if not named or told[2] > 6 * TIMEOUT_S:
                    findings += 1
                    print(sent.name, on, at, told, flush=True)
    seconds = round(time.monotonic() - began)
    print(json.dumps({"tried": tried, "wrong": findings, "seconds": seconds}))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
