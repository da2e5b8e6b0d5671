"""Times `ds-reshard inspect` in a fresh process on a synthetic 64-shard ZeRO-2 checkpoint of more than 10 GB.

The checkpoint is sparse files (about 3 MiB on disk) in a temporary folder; prints JSON.
Run: python benchmarks/inspect_opening.py [--runs N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "formats"))

from sparse_checkpoint import gpt_shapes, write_checkpoint

SHARDS = 64


def timed_inspect(folder: Path) -> tuple[float, dict[str, Any]]:
    """Seconds from starting the interpreter to its exit, and what it printed."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "ds_reshard", "inspect", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - started, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoint"
        nbytes = write_checkpoint(folder, gpt_shapes(layers=48, width=1152), SHARDS)
        results = [timed_inspect(folder) for _ in range(runs)]
    seconds = [taken for taken, _ in results]
    told = results[-1][1]
    figures = {
        "shards": SHARDS,
        "nbytes": nbytes,
        "parameters": len(told["parameters"]),
        "faults": len(told["faults"]),
        "bytes_read": told["bytes_read"],
        "share_read": told["bytes_read"] / nbytes,
        "first_seconds": round(seconds[0], 3),
        "median_seconds": round(statistics.median(seconds), 3),
        "worst_seconds": round(max(seconds), 3),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
