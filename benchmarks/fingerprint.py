"""Times the fingerprint of bytes in memory on one core, beside a plain read of the same bytes: their sum as int64.

The time is that of the processor, so that other work on the machine counts little.
Prints JSON; `--output FOLDER` writes it there too.
Run: python -m benchmarks.fingerprint [--mib N] [--runs N] [--output FOLDER]
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import report
from benchmarks.report import spread
from ds_reshard.execution.fingerprint import fingerprint_of


def rate(work: Callable[[], object], nbytes: int) -> float:
    """Gigabytes (1e9) a second of processor time."""
    started = time.process_time()
    work()
    return nbytes / (time.process_time() - started) / 1e9


def measured(mib: int, runs: int) -> dict[str, Any]:
    """Both contestants in turn, `runs` times, on memory that was written before; one thread."""
    torch.set_num_threads(1)
    words = torch.randint(-(2**63), 2**63 - 1, (mib << 17,), dtype=torch.int64)
    unaligned = words.view(torch.uint8)[1:]
    contestants: dict[str, Callable[[], object]] = {
        "sum of int64": words.sum,
        "fingerprint": lambda: fingerprint_of(words),
        "fingerprint, unaligned": lambda: fingerprint_of(unaligned),
    }
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for work in contestants.values():
        work()
    for _ in range(runs):
        for name, work in contestants.items():
            rates[name].append(rate(work, words.numel() * words.element_size()))
    return {name: spread(found) for name, found in rates.items()}


def main() -> None:
    parser = report.parser("fingerprint", __doc__)
    parser.add_argument("--mib", type=int, default=256)
    given = parser.parse_args()
    made = {"torch": torch.__version__, "mib": given.mib, "gigabytes_per_cpu_second": measured(given.mib, given.runs)}
    print(json.dumps(made, indent=1))
    report.keep(made, "fingerprint", given.output)


if __name__ == "__main__":
    main()
