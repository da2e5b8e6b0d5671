"""How long pickles of many tensors take to be read as records, beside torch's own readers: process time, a tensor.

    python -m benchmarks.pickle_reading [--against CHECKOUT]

Two files: a model of 20,000 tensors, and an optimizer of 21,000 in 7,000 states. With `--against`, the reader of
another checkout of this package is timed in the same run, in turns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 7
_TIMED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from ds_reshard.containers.torch_zip import open_archive
for line in sys.stdin:
    with open_archive(line.strip()) as archive:
        started = time.process_time()
        archive.load()
        print(time.process_time() - started, flush=True)
"""


def write_files(folder: Path) -> dict[str, tuple[Path, int]]:
    """The two files, and how many tensors each has."""
    import torch

    model = {f"model.layers.{n // 10}.self_attn.part_{n % 10}.weight": torch.zeros(2, 3) for n in range(20_000)}
    state = {
        n: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2, 3), "exp_avg_sq": torch.zeros(2, 3)}
        for n in range(7_000)
    }
    files = {"model": (folder / "model.pt", 20_000), "optimizer": (folder / "optimizer.pt", 21_000)}
    torch.save(model, files["model"][0])
    torch.save({"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}, files["optimizer"][0])
    return files


def with_torch(path: Path) -> float:
    import torch

    started = time.process_time()
    torch.load(path, weights_only=True, mmap=True)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout of ds_reshard")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--torch", action="store_true", help="time torch.load(weights_only=True), too")
    asked = parser.parse_args()
    checkouts = {"this": Path(__file__).parents[1], **({"other": asked.against} if asked.against else {})}
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder))
        readers = {
            name: subprocess.Popen(
                [sys.executable, "-c", _TIMED, str(checkout.resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=folder,
            )
            for name, checkout in checkouts.items()
        }
        for kind, (path, tensors) in files.items():
            seconds: dict[str, list[float]] = {name: [] for name in readers}
            for _ in range(asked.rounds):
                for name, reader in readers.items():
                    assert reader.stdin is not None and reader.stdout is not None
                    print(path, file=reader.stdin, flush=True)
                    seconds[name].append(float(reader.stdout.readline()))
            if asked.torch:
                seconds["torch"] = [with_torch(path) for _ in range(asked.rounds)]
            told = ", ".join(f"{name} {min(times) / tensors * 1e6:.1f} us" for name, times in seconds.items())
            print(f"{kind} of {tensors} tensors: {told} a tensor")
        for reader in readers.values():
            reader.communicate()


if __name__ == "__main__":
    main()
