"""What a rank of another grid plans and reads; see docs/scale.md.

Planned: a Llama of 1.01e12 parameters at ZeRO-1, which no disk here holds, of tensor-parallel ranks alone and of a
PipelineModule of 16 stages: 4,096 optimizer files of real structure, with holes for the bytes of tensors. Each figure
is of a fresh process. Read: smaller ones, and all bytes that a rank really asks the system for, over what it owns.
Prints JSON; `--output FOLDER` writes it there too. Run: python -m benchmarks.grid_plan [--runs N] [--output FOLDER]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.load import ROOT, SCRATCH
from benchmarks.memory import resident
from benchmarks.rank_plan import KINDS, RUN, counted, timed
from benchmarks.report import spread
from benchmarks.scale import LLAMA, python
from ds_reshard.execution.buffers import TensorTarget
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.formats.zero.checkpoint import Shape, TpRank, ZeroCheckpoint
from ds_reshard.formats.zero.flat import FlatBuffer, Rule, by_key, whole_placement
from ds_reshard.formats.zero.modules import layer_of
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.reader import open_checkpoint
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.formats.zero.tensor_parallel import TensorSplit, resplit
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.index import Index
from ds_reshard.model.layout import Layout, Placement
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box
from ds_reshard.operations.source import find_listing
from ds_reshard.planning.plan import Plan, Planner

sys.path.insert(0, str(ROOT / "tests" / "formats"))

from sparse_checkpoint import by_layers, llama_shapes, write_pipeline, write_tensor_parallel


@dataclass(frozen=True)
class Sizes:
    """Of a grid; `pp` is 0 where there is no PipelineModule."""

    tp: int
    dp: int
    pp: int = 0

    def __str__(self) -> str:
        return f"tp {self.tp}" + (f", pp {self.pp}" if self.pp else "") + f", dp {self.dp}"


SMALL = llama_shapes(layers=6, width=256, wide=768, vocabulary=1024)
PLANNED = ((Sizes(8, 512), Sizes(4, 768)), (Sizes(8, 32, 16), Sizes(4, 96, 8)))
READ = (
    (Sizes(4, 4), Sizes(4, 3)),
    (Sizes(4, 2, 4), Sizes(4, 3, 2)),
    (Sizes(4, 4), Sizes(2, 6)),
    (Sizes(4, 4), Sizes(8, 2)),
    (Sizes(4, 2, 4), Sizes(8, 2, 2)),
    (Sizes(4, 2, 4), Sizes(2, 3, 2)),
)


def write(folder: Path, shapes: Mapping[str, Shape], sizes: Sizes) -> None:
    if sizes.pp:
        write_pipeline(folder, by_layers(shapes), sizes.tp, sizes.pp, sizes.dp)
    else:
        write_tensor_parallel(folder, shapes, sizes.tp, sizes.dp)


def placements(
    local: Mapping[str, Shape], divided: Mapping[str, TensorSplit], dp: int, tp_rank: int
) -> Iterator[Placement]:
    """What a rank of a ZeRO-1 run wants: masters and moments of its part of its tensors, and its weights."""
    wanted = [*FlatBuffer(shapes=local, rule=Rule.FLAT, ranks=dp, kinds=KINDS).placements(RUN)]
    for name, shape in local.items():
        wanted.append(whole_placement(name, "weight", shape, ElementType.BFLOAT16, family=RUN, buffer=f"module/{name}"))
    for one in wanted:
        division = divided.get(one.key.name)
        if division is None:
            yield one
            continue
        every = one._replace(shape=division.shape, box=Box.whole(division.shape))
        tiles = tuple(
            every._replace(box=box, cut=one.cut._replace(phase=one.cut.phase + at))
            for box, at in division.parts_by_rank[tp_rank]
        )
        yield tiles[0] if len(tiles) == 1 else every._replace(tiles=tiles)


def local_shapes(
    checkpoint: ZeroCheckpoint, to: Sizes, tp_rank: int, stage: int
) -> tuple[dict[str, Shape], dict[str, TensorSplit]]:
    """The tensors that a rank of a stage has, and how they are divided where that is another way than was saved.

    Layers are dealt out to the stages in equal numbers, but for the last.
    """
    names = list(checkpoint.model.trainable)
    if to.pp:
        count = 1 + max(layer_of(name) or 0 for name in names)
        names = [name for name in names if min(to.pp - 1, (layer_of(name) or 0) // -(-count // to.pp)) == stage]
    if not checkpoint.tp_models:
        return {name: checkpoint.model.trainable[name] for name in names}, {}
    divided = {name: resplit(one, one.shape, to.tp) for name, one in checkpoint.splits.items() if name in {*names}}
    return {name: divided[name].shards[tp_rank] for name in names}, divided


@dataclass
class GridRank:
    """What a rank of a coming run has found and plans."""

    plan: Plan
    index: Index
    sizes: dict[str, int]
    local: dict[str, Shape]
    share: int
    rank: int
    dp: int

    @property
    def owned_nbytes(self) -> int:
        """Masters and moments of its part, 12 bytes an element, and its weights."""
        total = sum(map(prod, self.local.values()))
        return 12 * max(0, min(self.share, total - self.rank * self.share)) + 2 * total

    def read(self) -> int:
        """Carry the plan out; the bytes that the system was asked for."""
        buffers = {name: torch.empty(numel) for name, numel in self.sizes.items()}
        buffers |= {
            f"module/{name}": torch.empty(prod(shape), dtype=torch.bfloat16) for name, shape in self.local.items()
        }
        targets = {name: TensorTarget(tensor, untouched=False) for name, tensor in buffers.items()}
        before = _asked()
        ThreadExecutor(threads=2, memory_nbytes=64 << 20, checksum=True).execute(self.plan, targets)
        return _asked() - before


def _asked() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


@gc_disabled()  # as `prepare` of the host is
def planned(checkpoint: ZeroCheckpoint, to: Sizes, tp_rank: int, stage: int, rank: int) -> GridRank:
    """The copies of rank `rank` of those that share the tensors of a tensor-parallel rank of a stage."""
    index = Index(checkpoint.layout, ZeroShards(checkpoint=checkpoint))
    local, divided = local_shapes(checkpoint, to, tp_rank, stage)
    wanted = by_key(placements(local, divided, to.dp, tp_rank))
    share = FlatBuffer(shapes=local, rule=Rule.FLAT, ranks=to.dp).partition_numel
    fresh = {f"{kind}/0": share for kind in KINDS}
    elsewhere = frozenset(checkpoint.layout.placements).difference(wanted) if to.pp else frozenset()
    layout = Layout(wanted, {RUN: to.dp})
    plan = Planner(index, layout, {key: key for key in wanted}, elsewhere=elsewhere).plan(rank, sizes=fresh)
    assert not index.faults, index.faults[:3]
    return GridRank(plan, index, fresh, local, share, rank, to.dp)


def measured(folder: str, to: Sizes, tp_rank: int, stage: int, rank: int) -> dict[str, Any]:
    """What this process takes to look at the folder, as rank 0 does, and to open it and plan, as each rank does."""
    row = TpRank(to.tp, tp_rank, {} if to.pp else None)
    started = time.perf_counter(), time.process_time()
    with counted() as calls:
        found = find_listing(folder, None).listing
    assert isinstance(found, Listing)
    look = {**timed(started), **vars(calls), "listed": len(found.nbytes)}
    before, started = resident()["anonymous"], (time.perf_counter(), time.process_time())
    with counted() as calls, gc_disabled():
        checkpoint = open_checkpoint(found, optimizer=True, tp=row)
    heads = {**timed(started), **vars(calls)}
    started = time.perf_counter(), time.process_time()
    with counted() as calls:
        made = planned(checkpoint, to, tp_rank, stage, rank)
    own = {**timed(started), **vars(calls), "nbytes": resident()["anonymous"] - before}
    beside = sum(check.nbytes for check in made.plan.checks)
    said = {"copies": len(made.plan.copies), "nbytes": made.plan.nbytes, "beside_nbytes": beside}
    said |= {"files": len(made.plan.files), "owned_nbytes": made.owned_nbytes}
    return {"look": look, "heads": heads, "own": own, "shards": len(made.index.opened), "plan": said}


def ratios(folder: str, to: Sizes) -> list[float]:
    """Bytes that each rank of the last tensor-parallel rank of each stage reads, over those that it owns."""
    found = find_listing(folder, None).listing
    assert isinstance(found, Listing)
    checkpoint = open_checkpoint(found, optimizer=True, tp=TpRank(to.tp, to.tp - 1, {} if to.pp else None))
    ranks = [planned(checkpoint, to, to.tp - 1, stage, rank) for stage in range(to.pp or 1) for rank in range(to.dp)]
    return [rank.read() / rank.owned_nbytes for rank in ranks]


def main() -> None:
    parser = report.parser("grid_plan", __doc__)
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "CASE"), help="this process alone")
    given = parser.parse_args()
    if given.one:
        to = PLANNED[int(given.one[1])][1]
        print(json.dumps(measured(given.one[0], to, 1, (to.pp or 1) // 2, to.dp // 2 + 17)))
        return
    SCRATCH.mkdir(exist_ok=True)
    cases, read = [], []
    for number, (saved, to) in enumerate(PLANNED):
        with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
            write(Path(name), LLAMA, saved)
            seen = [python("benchmarks.grid_plan", "--one", name, str(number)) for _ in range(given.runs)]
        seconds = {part: spread([run[part]["seconds"] for run in seen]) for part in ("look", "heads", "own")}
        cpu = {part: spread([run[part]["cpu_s"] for run in seen]) for part in ("look", "heads", "own")}
        cases.append({"saved": str(saved), "to": str(to), **seen[0], "seconds": seconds, "cpu_s": cpu})
    for saved, to in READ:
        with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
            write(Path(name), SMALL, saved)
            read.append({"saved": str(saved), "to": str(to), "ratios": ratios(name, to)})
    numel = sum(map(prod, LLAMA.values()))
    made = {"runs": given.runs, "tensors": len(LLAMA), "numel": numel, "cases": cases, "read": read}
    print(json.dumps(made, indent=1))
    report.keep(made, "grid-plan", given.output)


if __name__ == "__main__":
    main()
