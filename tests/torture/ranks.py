"""One rank of a load is killed, or stops, at each phase: the other ends with a named error, in time.

python tests/torture/ranks.py                every collective, and some calls on files
python tests/torture/ranks.py --every 5      a sample
"""

from __future__ import annotations

import signal
import sys
import tempfile

from loads import KINDS, MODEL, made
from on_ranks import Tried, options
from worlds import World

TIMEOUT_S = 5
"""What the DeepSpeed JSON says; the process group itself would wait twelve times as long."""
_CALLS = {"zero2 to zero3": 8, "universal to zero2": 3, "dcp to zero3": 3}
"""The loads of `loads.KINDS`, and how many calls on files of each rank, at equal distances."""


def main(words: list[str]) -> int:
    tried = Tried(options(words, __doc__).every)
    with tempfile.TemporaryDirectory() as place:
        for kind, calls in _CALLS.items():
            saved, to, run = KINDS[kind]
            world = World(2)
            folder = made(world, f"{place}/{kind}", saved, to, seed=7)
            found = world.run("load_jobs.moments", run=run, model=MODEL, folder=folder)
            world.close()
            moments = [(on, number) for on in (0, 1) for number in range(1, found[on][1] + 1)]
            moments += [(on, found[on][0][at * len(found[on][0]) // calls]) for on in (0, 1) for at in range(calls)]
            for on, at in moments:
                for sent in (signal.SIGKILL, signal.SIGSTOP):
                    if not tried.takes():
                        continue
                    world = World(2, timeout_s=12 * TIMEOUT_S)
                    arguments = {"run": run, "model": MODEL, "folder": folder, "on": on, "at": at}
                    arguments |= {"signal_number": sent, "seconds": TIMEOUT_S}
                    (told,) = world.run_without(on, "load_jobs.lost", 12 * TIMEOUT_S, **arguments)
                    named = told is not None and told[0].startswith("RankLost: ") and told[1] != "done"
                    in_time = named and told[2] <= 6 * TIMEOUT_S
                    tried.counts(kind, (kind, sent.name, on, at), [] if in_time else [told])
    return tried.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
