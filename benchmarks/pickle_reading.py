"""How long pickles of many tensors take to be read as records, and commands that read them: process time.

    python -m benchmarks.pickle_reading [--against CHECKOUT]

A model file of 20,000 tensors, an optimizer file of 21,000 in 7,000 states, a `.metadata` of 2,352 chunks; and
`ds-reshard inspect` of a model file of 100,000 tensors. With `--against`, another checkout of this package is timed in
the same run, in turns.
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import report

ROUNDS = 7
_TIMED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from ds_reshard.containers.dcp_directory import read_directory
from ds_reshard.containers.torch_zip import open_archive
for line in sys.stdin:
    path = line.strip()
    started = time.process_time()
    if path.endswith(".pt"):
        with open_archive(path) as archive:
            started = time.process_time()
            archive.load()
    else:
        read_directory(path)
    print(time.process_time() - started, flush=True)
"""


def write_files(folder: Path) -> dict[str, Path]:
    """What is read, by what it is called."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    def model(tensors: int) -> dict[str, torch.Tensor]:
        return {f"model.layers.{n // 10}.self_attn.part_{n % 10}.weight": torch.zeros(2, 3) for n in range(tensors)}

    state = {
        n: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2, 3), "exp_avg_sq": torch.zeros(2, 3)}
        for n in range(7_000)
    }
    torch.save(model(20_000), folder / "model.pt")
    torch.save({"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}, folder / "optimizer.pt")
    for name in ("large", "dcp"):
        (folder / name).mkdir()
    torch.save(model(100_000), folder / "large" / "pytorch_model.bin")
    properties = dcp.TensorProperties(dtype=torch.float32)
    chunks = [dcp.ChunkStorageMetadata(torch.Size([8 * n, 0]), torch.Size([8, 64])) for n in range(8)]
    names = [f"model.layers.{n}.weight" for n in range(2_352 // 8)]
    saved = dcp.Metadata(
        {name: dcp.TensorStorageMetadata(properties, torch.Size([64, 64]), chunks) for name in names},
        storage_data={
            dcp.MetadataIndex(name, chunk.offsets, n): _StorageInfo(f"__{n}_0.distcp", 4096 * place, 4096)
            for place, name in enumerate(names)
            for n, chunk in enumerate(chunks)
        },
    )
    (folder / "dcp" / ".metadata").write_bytes(pickle.dumps(saved))
    for n in range(8):
        (folder / "dcp" / f"__{n}_0.distcp").write_bytes(bytes(4096 * len(names)))
    return {
        "model of 20,000 tensors": folder / "model.pt",
        "optimizer of 21,000 tensors": folder / "optimizer.pt",
        ".metadata of 2,352 chunks": folder / "dcp",
    }


def of_command(checkout: Path, path: Path) -> float:
    """Process time of `ds-reshard inspect` in a fresh interpreter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    subprocess.run(
        [sys.executable, "-m", "ds_reshard", "inspect", str(path)],
        env=environment,
        cwd=path.parent,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout of ds_reshard")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=report.results_folder, help="where the results are written")
    asked = parser.parse_args()
    checkouts = {"this": Path(__file__).parents[1], **({"other": asked.against} if asked.against else {})}
    checkouts = {name: path.resolve() for name, path in checkouts.items()}
    seconds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder))
        readers = {
            name: subprocess.Popen(
                [sys.executable, "-c", _TIMED, str(checkout)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=folder,
            )
            for name, checkout in checkouts.items()
        }
        for _ in range(asked.rounds):
            for kind, path in files.items():
                for name, reader in readers.items():
                    assert reader.stdin is not None and reader.stdout is not None
                    print(path, file=reader.stdin, flush=True)
                    seconds.setdefault(kind, {}).setdefault(name, []).append(float(reader.stdout.readline()))
            for name, checkout in checkouts.items():
                taken = of_command(checkout, Path(folder, "large"))
                seconds.setdefault("inspect of 100,000 tensors", {}).setdefault(name, []).append(taken)
        for reader in readers.values():
            reader.communicate()
    for kind, of in seconds.items():
        print(f"{kind}: " + ", ".join(f"{name} {min(times) * 1e3:.1f} ms" for name, times in of.items()))
    report.keep({"seconds": seconds}, "pickle-reading", asked.output)


if __name__ == "__main__":
    main()
