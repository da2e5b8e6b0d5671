"""Megatron-LM's own load of a `fully_reshardable` checkpoint beside ours of the same files, under another topology.

Real Megatron-LM (`load_checkpoint` of training/checkpointing.py, as `pretrain` calls it), fresh interpreters under
torchrun, by turns; the same build and the same flags, without the hooks and with them. What every rank then holds,
weights, masters and moments, must be equal, or there is no result. One bucket holds all: Megatron-LM's own save shifts
the states of several.
Run: python -m benchmarks.megatron [--layers 6] [--runs N] [--release 0.19.2] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks import report
from benchmarks.memory import Counters, forget_peak, resident
from benchmarks.report import ROOT, spread

HARNESS = ROOT / "tests" / "hosts" / "megatron"
sys.path[:0] = [str(HARNESS), str(HARNESS.parent)]
SCRATCH = ROOT / ".bench"
SIZES = (
    "--num-layers {layers} --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 4096 --seq-length 64"
    " --max-position-embeddings 64 --vocab-size 32767 --make-vocab-size-divisible-by 128 --bf16"
    " --untie-embeddings-and-output-weights --use-distributed-optimizer --ddp-bucket-size 1000000000"
)
FULLY = " --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
CASES = {  # ranks and flags of the run that saves, and of the one that loads
    "tp 2 to tp 1": (2, " --tensor-model-parallel-size 2", 2, ""),
    "dp 4 to dp 2": (4, "", 2, ""),
}
CONTESTANTS = ("megatron", "ds_reshard")


def work(given: dict[str, Any]) -> None:
    """One rank: build, and save, or load once by the call of `setup_model_and_optimizer`, measured."""
    import torch

    rank = int(os.environ["RANK"])
    told: dict[str, Any] = {"rank": rank}
    with contextlib.redirect_stdout(io.StringIO()):
        import forks
        import format_jobs

        forks._import()  # with what stands in for CUDA and triton
        if given["hooked"]:
            import ds_reshard

            ds_reshard.install("megatron")
        from megatron.training import checkpointing, training

        load = training.load_checkpoint

        def measured(*args: Any, **kwargs: Any) -> Any:
            torch.distributed.barrier()
            forget_peak()
            before, started = Counters.now(), time.perf_counter()
            result = load(*args, **kwargs)
            told["seconds"] = time.perf_counter() - started
            told["read_nbytes"] = Counters.now().since(before).read_nbytes
            ctypes.CDLL(None).malloc_trim(0)  # what is free, and not given back, is not kept
            after = resident()
            told["extra_nbytes"] = after["peak"] - after["anonymous"] - after["file"]
            return result

        training.load_checkpoint = measured
        models, optimizer, scheduler = format_jobs._setup(given["arguments"])
        if given["saves"]:
            _fill(models, optimizer)
            checkpointing.save_checkpoint(5, models, optimizer, scheduler, 0, checkpointing_context={})
        else:
            told["held"] = _digest(models, optimizer)
    Path(f"{given['answers']}/{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    torch.distributed.barrier()
    for child in psutil.Process().children(recursive=True):  # the writers that saving `torch_dist` leaves behind
        child.kill()
    os._exit(0)  # gloo's threads may end the process with an error where it is left to Python


def _parts(optimizer: Any) -> Any:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _fill(models: Any, optimizer: Any) -> None:
    """Masters and moments of a step with random gradients, and the weights cast of the masters, on every rank."""
    import torch

    for one in _parts(optimizer):
        for group in one.optimizer.param_groups:
            for master in group["params"]:
                master.grad = torch.randn_like(master)
        one.optimizer.step()
        one.optimizer.zero_grad()
        one._copy_main_params_to_model_params()
    for model in models:
        model.start_param_sync(force_sync=True)


def _digest(models: Any, optimizer: Any) -> list[int]:
    """Of each tensor that the load has filled the sum of its 32-bit or 16-bit words."""
    import torch

    held = [parameter.detach() for model in models for parameter in model.parameters()]
    for one in _parts(optimizer):
        for group in one.optimizer.param_groups:
            for master in group["params"]:
                held += [master.detach(), *(one.optimizer.state[master][name] for name in ("exp_avg", "exp_avg_sq"))]
    words = {2: torch.int16, 4: torch.int32}
    return [int(tensor.view(words[tensor.element_size()]).sum(dtype=torch.int64)) for tensor in held]


def run(ranks: int, release: str, arguments: str, *, saves: bool = False, hooked: bool = False) -> list[dict[str, Any]]:
    """Every rank's account of one process group."""
    from releases import home

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as answers:
        given = {"release": release, "arguments": arguments, "saves": saves, "hooked": hooked, "answers": answers}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "benchmarks.megatron", "--work", json.dumps(given)]
        paths = (HARNESS, home(release), ROOT, HARNESS.parent, os.environ.get("PYTHONPATH", ""))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "NO_VCS_VERSION": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        log = Path(answers, "log")
        with log.open("wb") as file:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=900, check=False
            )
        if done.returncode:
            raise RuntimeError(f"{arguments}: {log.read_text(encoding='utf-8', errors='replace')[-6000:]}")
        return [json.loads(Path(answers, f"{rank}.json").read_text()) for rank in range(ranks)]


def loads_of(name: str, sizes: str, release: str, runs: int) -> list[dict[str, Any]]:
    """One case: saved by Megatron-LM, loaded by either, by turns; raises where they then hold different bits."""
    saving, parallel, ranks, other = CASES[name]
    folder = SCRATCH / f"megatron {name}".replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found, held = [], []
    try:
        run(saving, release, f"{sizes}{FULLY}{parallel} --save {folder} --save-interval 1", saves=True)
        for number in range(runs):
            for peer in CONTESTANTS[:: 1 if number % 2 else -1]:
                asked = f"{sizes}{FULLY}{other} --load {folder}"
                told = run(ranks, release, asked, hooked=peer == "ds_reshard")
                held.append([one.pop("held") for one in told])
                found.append({"case": name, "contestant": peer, "round": number, "ranks": told})
                print(f"{name} {peer:<10} {max(one['seconds'] for one in told):7.2f} s", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if any(one != held[0] for one in held) or not any(map(any, held[0])):
        raise RuntimeError(f"{name}: the loads hold different bits")
    return found


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """By case: seconds of the slowest rank, most extra memory, most bytes read; and ours over Megatron-LM's."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(run["case"] for run in runs):
        told: dict[str, dict[str, list[float]]] = {}
        for peer in CONTESTANTS:
            here = [run["ranks"] for run in runs if (run["case"], run["contestant"]) == (name, peer)]
            told[peer] = {
                key: [max(rank[key] for rank in ranks) for ranks in here]
                for key in ("seconds", "extra_nbytes", "read_nbytes")
            }
        ours, theirs = told["ds_reshard"], told["megatron"]
        found[name] = {
            **{peer: {key: median(values) for key, values in one.items()} for peer, one in told.items()},
            "over": spread([a / b for a, b in zip(ours["seconds"], theirs["seconds"], strict=True)]),
            "memory_over": spread([a / b for a, b in zip(ours["extra_nbytes"], theirs["extra_nbytes"], strict=True)]),
        }
    return found


def main() -> None:
    parser = report.parser("megatron", __doc__)
    parser.add_argument("--layers", type=int, default=6, help="of 12.6M parameters each, beside 67M (default 6)")
    parser.add_argument("--release", default="0.19.2", help="of megatron-core (default 0.19.2)")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work is not None:
        work(asked.work)
        return
    started, sizes = time.monotonic(), SIZES.format(layers=asked.layers)
    runs = [one for name in CASES for one in loads_of(name, sizes, asked.release, asked.runs)]
    made = {
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - started),
        "release": asked.release,
        "layers": asked.layers,
        "summary": summary(runs),
        "runs": runs,
    }
    print(json.dumps(made["summary"], indent=2))
    report.keep(made, "megatron", asked.output)


if __name__ == "__main__":
    main()
