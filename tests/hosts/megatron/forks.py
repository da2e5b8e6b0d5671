"""A process that has imported one release of Megatron-LM, and forks itself for every run.

Importing torch and Megatron takes many times as long as the small runs of these tests do, and Megatron keeps its
arguments and groups in globals: so each rank of each run is a fork of a process that has imported and done nothing.
A run that does not end in time is killed; forks die with the process that made them.

The client is `Release`; what runs on the other side of its pipe is `main` below.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from devices import DEVICE, environment, share_gloo_device
from lifetimes import die_with_parent, to_huge_pages
from package import import_with
from ports import free_port

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
START_TIMEOUT_S = 180.0
RUN_TIMEOUT_S = 150.0
_OF_A_FIRST_RUN = (
    "dist_checkpointing.gpt_checkpoint_interop",
    "dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "models.mimo.optimizer",
    "tokenizers.text.models.gpt_tokenizer",
)
"""What `megatron.training` imports as late as in a run."""


class Failed(Exception):
    """A rank raised: `error` is the name of its class, `ranks` what every rank said."""

    def __init__(self, message: str, error: str, ranks: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.error = error
        self.ranks = ranks


class Release:
    """One release of Megatron-LM, ready to run `module:function` on some ranks."""

    def __init__(self, release: str, home: Path, scratch: Path, *, paths: tuple[Path, ...] = ()) -> None:
        self.release = release
        self._scratch = scratch
        self._runs = 0
        path = os.pathsep.join(str(one) for one in (HERE, home, ROOT, *paths, HERE.parent))
        inherited = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and "tests" not in one]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([path, *inherited]),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "NO_VCS_VERSION": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # any other check keeps forks from the device
        }
        self._log = scratch / "server.log"
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "forks.py"), release],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self._expect("ready", START_TIMEOUT_S)

    def run(self, function: str, *, ranks: int = 1, **arguments: Any) -> list[dict[str, Any]]:
        """What `module:function(**arguments)` returned on each rank; Failed when one of them raised."""
        import torch

        self._runs += 1
        folder = self._scratch / f"run{self._runs}"
        folder.mkdir()
        job = {"function": function, "ranks": ranks, "folder": str(folder), "arguments": arguments}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        self._expect("done", RUN_TIMEOUT_S + 30)
        told: list[dict[str, Any]] = []
        for rank in range(ranks):
            path = folder / f"rank{rank}.pt"
            lost = {"error": "Lost", "message": "ended without an answer or in time", "lines": ""}
            told.append(torch.load(path, weights_only=False) if path.exists() else lost)
        for rank, one in enumerate(told):
            one["log"] = (folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
        wrong = [(rank, one) for rank, one in enumerate(told) if "error" in one]
        if wrong:
            rank, one = wrong[0]
            text = f"rank {rank}: {one['error']}: {one['message']}\n{one['lines']}\n{one['log'][-3000:]}"
            raise Failed(text, one["error"], told)
        return told

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def _expect(self, word: str, timeout_s: float) -> None:
        import selectors  # not select(): it takes no descriptor above 1023

        assert self._process.stdout is not None
        with selectors.DefaultSelector() as answers:
            answers.register(self._process.stdout, selectors.EVENT_READ)
            ready = answers.select(timeout_s)
        line = self._process.stdout.readline() if ready else "no answer in time"
        if line.strip() != word:
            self._process.kill()
            self._process.wait(10)
            said = self._log.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"megatron-core {self.release}: expected {word!r}, got {line!r}\n{said[-3000:]}")


def main(release: str) -> None:
    """Import, say so, and serve one job a line until the pipe is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Megatron prints goes to the log
    die_with_parent()
    _import()
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        _serve(json.loads(line))
        answers.write("done\n")
        answers.flush()


def _import() -> None:
    import torch

    torch.set_num_threads(1)
    from cuda_stand_in import imported, stand_in

    if DEVICE == "cpu":
        stand_in()
    names = ["optimizer", "optimizer.distrib_optimizer", "optimizer_param_scheduler", "tensor_parallel"]
    for name in names:
        importlib.import_module(f"megatron.core.{name}")
    if importlib.util.find_spec("megatron.training") is not None:
        for name in ("core.models.gpt", "core.tokenizers.text", "training.training"):  # the tokenizers: transformers
            importlib.import_module(f"megatron.{name}")
        for name in _OF_A_FIRST_RUN:
            with contextlib.suppress(ImportError):  # not in each release
                importlib.import_module(f"megatron.core.{name}")
        datasets = importlib.import_module("megatron.core.datasets.utils")
        datasets.compile_helpers = lambda: None  # the C++ index builder; the runs bring their own dataset
        _parse_once()
    imported()
    share_gloo_device()
    import_with("megatron", "torch", "dcp")
    for name in ("torch.utils.serialization", "format_jobs", "load_jobs", "small_gpt"):
        importlib.import_module(name)
    gc.freeze()  # what is imported would be most of what each run's collections look at, and copy
    to_huge_pages()


def _parse_once() -> None:
    """What each option is, and its help, for which Megatron parses the source of its classes: a third of a run."""
    from megatron.training import argument_utils, arguments

    factory = argument_utils.ArgumentGroupFactory
    read = functools.cache(functools.partial(factory._get_field_docstrings, object.__new__(factory)))
    factory._get_field_docstrings = lambda self, source: read(source)
    add = arguments.add_megatron_arguments
    made = add(argparse.ArgumentParser(add_help=False))

    def add_made(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if type(parser) is not argparse.ArgumentParser:
            return add(parser)
        parser._add_container_actions(made)
        return parser

    arguments.add_megatron_arguments = add_made


def _serve(job: dict[str, Any]) -> None:
    port = free_port()
    children = []
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            _rank(job, rank, port)
        children.append(pid)
    running = list(children)
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while running and time.monotonic() < deadline:
        running = [pid for pid in running if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.02)
    for pid in children:  # each leads a group, in which is what it has started and not ended
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for pid in running:
        os.waitpid(pid, 0)


def _rank(job: dict[str, Any], rank: int, port: int) -> None:
    """One rank of a job: never returns."""
    import torch
    from torch.utils import _pytree

    die_with_parent()
    gc.disable()  # it ends before its garbage matters
    os.setpgid(0, 0)
    folder = Path(job["folder"])
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment(rank, job["ranks"], port))
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, force=True)
    try:
        module, _, name = job["function"].partition(":")
        made = getattr(importlib.import_module(module), name)(**job["arguments"])
        answer = _pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, made)
    except BaseException as error:
        faults = [vars_of(fault) for fault in getattr(error, "faults", ())]
        answer = {
            "error": type(error).__name__,
            "message": str(error),
            "faults": faults,
            "lines": traceback.format_exc(),
        }
    torch.save(answer, folder / f"rank{rank}.part")
    os.replace(folder / f"rank{rank}.part", folder / f"rank{rank}.pt")
    sys.stdout.flush()
    while DEVICE == "cuda" and len(list(folder.glob("rank*.pt"))) < job["ranks"]:
        time.sleep(0.01)  # NCCL aborts a rank whose peer has ended
    os._exit(0)


def vars_of(fault: Any) -> dict[str, str]:
    return {name: getattr(fault, name) for name in ("error", "where", "what", "expected", "found", "mend")}


if __name__ == "__main__":
    main(sys.argv[1])
