"""Times `torch.distributed.checkpoint.load` through `ds_reshard.dcp.Reader` beside torch's `FileSystemReader`.

One state dict, three ways: torch's reader of a folder that torch saved, ours of the same folder, and ours of the ZeRO
checkpoint that the values came from, both saved by 4 ranks; into plain tensors of one process, and into FSDP2 on two.
By turns, each in fresh processes whose imports are done, from the page cache, into memory that was written to before.
After each load of ours, the floor: a bare loop of `preadv` over the same bytes, with as many threads. What every rank
holds afterwards is compared bit for bit. Prints a table; `--output FOLDER` writes JSON there too.
Run: python -m benchmarks.dcp [--repeats N] [--output FOLDER]
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks import engines, processes, report
from benchmarks.gpt import GPT, Shape
from benchmarks.load import SCRATCH, warm
from benchmarks.memory import Counters

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from benchmarks.floor import Execution

TORCH, OURS, ZERO = "FileSystemReader", "Reader", "Reader, ZeRO"
READERS = (TORCH, OURS, ZERO)
SAVED_DP = 4
WORLDS = (1, 2)
KINDS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its ZeRO stage, and the type of the weights that are asked for; moments are fp32."""

    width: int
    layers: int
    stage: int
    weights: str

    @property
    def shape(self) -> Shape:
        return Shape(width=self.width, layers=self.layers)

    @property
    def name(self) -> str:
        return f"ZeRO-{self.stage}, {12 * self.layers + 4} parameters, {self.weights} weights and both moments"


CASES = (
    Case(width=656, layers=16, stage=3, weights="float32"),
    Case(width=2048, layers=2, stage=2, weights="bfloat16"),
)
"""86M parameters of 12 bytes, and 117M of 10."""


def main() -> None:
    from rich.console import Console

    given = report.parser("dcp", __doc__).parse_args()
    console = Console(width=max(Console().width, report.WIDTH))
    processes.start("ds_reshard.dcp", "torch.distributed.fsdp")
    runs: list[dict[str, Any]] = []
    for case in CASES:
        for run in _case(case, given.runs):
            runs.append(run)
            console.print(f"{case.name}, {run['world']}: {run['reader']:<16} {run['seconds']:8.3f} s", highlight=False)
    made = {"repeats": given.runs, "versions": report.versions("torch", "deepspeed", "isal"), "runs": runs}
    console.print(table(made))
    report.keep(made, "dcp", given.output)


def _case(case: Case, repeats: int) -> Iterator[dict[str, Any]]:
    """Every run of one case; its checkpoints are made first and removed afterwards."""
    folders = {TORCH: SCRATCH / "dcp-torch", ZERO: SCRATCH / "dcp-zero"}
    held: dict[int, Any] = {}
    try:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        zero = str(folders[ZERO])
        processes.run(engines.save, world=SAVED_DP, shape=case.shape, stage=case.stage, folder=zero)
        processes.run(_save, world=SAVED_DP, case=case, source=zero, folder=str(folders[TORCH]))
        for number in range(repeats):
            for world in WORLDS:
                for reader in READERS:
                    folder = folders[ZERO if reader == ZERO else TORCH]
                    warm(folder)
                    ranks = processes.run(load, world=world, case=case, reader=reader, folder=str(folder))
                    sums = [rank.pop("crc32") for rank in ranks]
                    assert sums == held.setdefault(world, sums), f"{reader} loaded other values"
                    yield {
                        "case": asdict(case),
                        "reader": reader,
                        "world": world,
                        "round": number,
                        "seconds": max(rank["seconds"] for rank in ranks),
                        "preadv_s": max((rank["preadv_s"] for rank in ranks if "preadv_s" in rank), default=None),
                        "nbytes": sum(rank["nbytes"] for rank in ranks),
                        "ranks": ranks,
                    }
    finally:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)


def targets(case: Case, world: int) -> dict[str, Any]:
    """The state dict that is filled: of plain tensors, or with more ranks of FSDP2's, every page written to."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = GPT(case.shape).to(getattr(torch, case.weights))
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7)
    held = model.state_dict()
    states = {
        name: {kind: torch.full_like(weight, 7, dtype=torch.float32) for kind in KINDS} for name, weight in held.items()
    }
    return {"model": held, "optimizer": {"state": states}}


def tensors(wanted: dict[str, Any]) -> Iterator[torch.Tensor]:
    """This rank's part of every tensor."""
    states = (value for state in wanted["optimizer"]["state"].values() for value in state.values())
    for tensor in (*wanted["model"].values(), *states):
        yield tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _join(rendezvous: str, rank: int, world: int) -> None:
    import torch

    torch.set_num_threads(_threads(world))
    if world > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)


def _threads(world: int) -> int:
    return max(1, (os.cpu_count() or 1) // world)


def _save(rank: int, world: int, *, rendezvous: str, case: Case, source: str, folder: str) -> None:
    """Have torch save the values of a ZeRO checkpoint as FSDP2 has them. Collective."""
    import torch
    from torch.distributed import checkpoint

    from ds_reshard.dcp import Reader

    _join(rendezvous, rank, world)
    wanted = targets(case, world)
    checkpoint.load(wanted, storage_reader=Reader(source, group=torch.distributed.group.WORLD))
    checkpoint.save(wanted, checkpoint_id=folder)


def load(rank: int, world: int, *, rendezvous: str, case: Case, reader: str, folder: str) -> dict[str, Any]:
    """One load, and what it took on this rank: its reader is made within that time. Collective."""
    from torch import distributed
    from torch.distributed import checkpoint

    import ds_reshard.dcp
    from benchmarks.floor import watch_executor
    from ds_reshard.containers.crc import crc32
    from ds_reshard.execution.buffers import memory_of

    _join(rendezvous, rank, world)
    wanted, threads = targets(case, world), _threads(world)
    group = distributed.group.WORLD if world > 1 else None
    executions = watch_executor()
    gc.collect()  # else whether all objects of torch are walked within a load is by chance
    _wait(world)
    before, started = Counters.now(), time.perf_counter()
    if reader == TORCH:
        storage: checkpoint.StorageReader = checkpoint.FileSystemReader(folder)
    else:
        storage = ds_reshard.dcp.Reader(folder, group=group, threads=threads)
    checkpoint.load(wanted, storage_reader=storage, no_dist=group is None)
    seconds = time.perf_counter() - started
    spent = Counters.now().since(before)
    crc = 0
    for tensor in tensors(wanted):
        crc = crc32(memory_of(tensor), crc)
    measured = {
        "seconds": seconds,
        **{name: getattr(spent, name) for name in spent.__slots__},
        "nbytes": sum(tensor.nbytes for tensor in tensors(wanted)),
        "crc32": crc,
    }
    if executions:
        measured |= {"execute_s": executions[0].seconds, "copied_nbytes": executions[0].plan.nbytes}
        measured["preadv_s"] = _floor(executions[0], threads, world)
    return measured


def _wait(world: int) -> None:
    if world > 1:
        from torch import distributed

        distributed.barrier()


def _floor(execution: Execution, threads: int, world: int) -> float:
    """Seconds of a bare loop of `preadv` over the bytes of an execution, into the same memory. Collective."""
    from benchmarks.floor import bare_preadv

    copies = execution.plan.copies
    shares = [replace(execution.plan, copies=copies[number::threads]) for number in range(threads)]
    _wait(world)
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(bare_preadv, share, execution.targets) for share in shares]:
            done.result()
    return time.perf_counter() - started


def ratios(made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """By case, ranks and reader: seconds, gigabytes a second, how many times as long torch took, and over `preadv`."""
    for case in dict.fromkeys(tuple(sorted(run["case"].items())) for run in made["runs"]):
        for world in WORLDS:
            here = [run for run in made["runs"] if run["case"] == dict(case) and run["world"] == world]
            torchs = {run["round"]: run["seconds"] for run in here if run["reader"] == TORCH}
            for reader in READERS:
                mine = [run for run in here if run["reader"] == reader]
                ours = reader != TORCH
                yield {
                    "case": Case(**dict(case)).name,
                    "world": world,
                    "reader": reader,
                    "seconds": report.spread([run["seconds"] for run in mine]),
                    "rate": report.spread([run["nbytes"] / run["seconds"] / 1e9 for run in mine]),
                    "torch": report.spread([torchs[run["round"]] / run["seconds"] for run in mine]) if ours else None,
                    "floor": report.spread([run["seconds"] / run["preadv_s"] for run in mine]) if ours else None,
                }


def table(made: dict[str, Any]) -> Table:
    rows = report.empty_table(
        "dcp.load, page cache warm", "", "ranks", "", "seconds", "GB/s", "FileSystemReader over it", "over preadv"
    )
    for row in ratios(made):
        rows.add_row(
            row["case"],
            str(row["world"]),
            row["reader"],
            report.of(row["seconds"], ".3f"),
            report.of(row["rate"]),
            report.of(row["torch"]),
            report.of(row["floor"]),
        )
    return rows


if __name__ == "__main__":
    main()
