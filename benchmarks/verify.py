"""Times `verify` and `diff` on one core, beside a plain read of the same bytes, page cache warm.

The checkpoint is a synthetic ZeRO-2 one of a GPT, by default 1.2 GB in 4 shards, filled with random values, in a
temporary folder. One thread each; the time is that of the processor, so that other work on the machine
counts little. Prints JSON; `--output FOLDER` writes it there too.
Run: python -m benchmarks.verify [--layers N] [--runs N] [--output FOLDER]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.fingerprint import rate
from benchmarks.report import spread
from ds_reshard.operations import Reading, diff, verify

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "formats"))

from sparse_checkpoint import gpt_shapes, write_checkpoint

_CHUNK_NBYTES = 2 << 20
READING = Reading(threads=1)


def fill(folder: Path) -> int:
    """Write every file anew with values in place of its holes: random ones, the weights being their masters' casts."""
    generator = torch.Generator().manual_seed(1)
    (model, *shards) = sorted(folder.rglob("*.pt"), key=lambda path: (path.name.endswith("optim_states.pt"), path.name))
    content = torch.load(model, weights_only=False)
    for weight in content["module"].values():
        weight.uniform_(0, 1, generator=generator)
    torch.save(content, model)
    masters = torch.cat([content["module"][name].float().view(-1) for name in content["param_shapes"][0]])
    at = 0
    for path in shards:
        content = torch.load(path, weights_only=False)
        saved = content["optimizer_state_dict"]
        (part,) = saved["single_partition_of_fp32_groups"]
        part.copy_(masters[at : at + part.numel()])
        at += part.numel()
        for moment in saved["base_optimizer_state"]["state"][0].values():
            moment.uniform_(0, 1, generator=generator)
        torch.save(content, path)
    return sum(path.stat().st_size for path in (model, *shards))


def plain_read(folder: Path) -> None:
    """Every byte of every file into one buffer."""
    buffer = bytearray(_CHUNK_NBYTES)
    for path in sorted(folder.rglob("*.pt")):
        descriptor = os.open(path, os.O_RDONLY)
        at = 0
        while got := os.preadv(descriptor, [buffer], at):
            at += got
        os.close(descriptor)


def measured(folder: Path, nbytes: int, runs: int) -> dict[str, Any]:
    """All contestants in turn, `runs` times after one that is not counted."""
    torch.set_num_threads(1)
    path = str(folder)
    assert verify(path, deep=True, reading=READING).clean
    contestants: dict[str, tuple[Callable[[], object], int]] = {
        "plain read": (lambda: plain_read(folder), nbytes),
        "verify": (lambda: verify(path, reading=READING), nbytes),
        "verify --deep": (lambda: verify(path, deep=True, reading=READING), nbytes),
        "diff, both sides": (lambda: diff(path, path, reading=READING), 2 * nbytes),
    }
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(runs + 1):
        for name, (work, size) in contestants.items():
            found = rate(work, size)
            if number:
                rates[name].append(found)
    return {name: spread(found) for name, found in rates.items()}


def main() -> None:
    parser = report.parser("verify", __doc__)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoint"
        write_checkpoint(folder, gpt_shapes(layers=given.layers, width=1024), 4)
        nbytes = fill(folder)
        rates = measured(folder, nbytes, given.runs)
    made = {"torch": torch.__version__, "nbytes": nbytes, "gigabytes_per_cpu_second": rates}
    print(json.dumps(made, indent=1))
    report.keep(made, "verify", given.output)


if __name__ == "__main__":
    main()
