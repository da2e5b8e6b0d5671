"""`make bench`: every benchmark, one after another, and the tables of the pages that show them.

Run: python -m benchmarks [NAME ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.report import ROOT

RESULTS = ("--output", "benchmarks/results")
PARTS: dict[str, tuple[str, ...]] = {
    "first_load": RESULTS,
    "load": RESULTS,
    "convert": RESULTS,
    "offline": RESULTS,
    "verify": RESULTS,
    "fingerprint": RESULTS,
    "maps": RESULTS,
    "dcp": RESULTS,
    "rows": RESULTS,
    "megatron": RESULTS,
    "nodes": RESULTS,
    "remote": RESULTS,
    "scale": RESULTS,
    "long": ("--long", *RESULTS),
    "whole": ("--whole", "48", *RESULTS),
}
"""What each is given; the last two are parts of `scale`."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(PARTS)}")
    names = parser.parse_args().names or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"{', '.join(unknown)}: none of {', '.join(PARTS)}")
    for name in names:
        module = "scale" if name in ("long", "whole") else name
        subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *PARTS[name]], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-m", "benchmarks.page"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
