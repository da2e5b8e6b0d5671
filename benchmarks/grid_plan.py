"""What a rank of another tensor-parallel size plans, at a size that no disk here holds; see docs/scale.md.

A Llama of 1.01e12 parameters at ZeRO-1, tensor-parallel 8 and data-parallel 512, resumed at 4 and 768: 4,096 optimizer
files of real structure, with holes for the bytes of tensors. Each figure is of a fresh process.
Prints JSON; `--output FOLDER` writes it there too. Run: python -m benchmarks.grid_plan [--runs N] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.load import ROOT, SCRATCH
from benchmarks.memory import resident
from benchmarks.rank_plan import KINDS, RUN, counted, timed
from benchmarks.report import commit, keep, machine, spread
from benchmarks.scale import LLAMA, python
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint, open_checkpoint
from ds_reshard.formats.zero.layout import by_key, flat_group, partition_numel, whole
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.formats.zero.tensor_parallel import Division, redivided
from ds_reshard.model.gc_pause import uncollected
from ds_reshard.model.index import Index
from ds_reshard.model.layout import Layout, Placement
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box
from ds_reshard.operations.source import find_listing
from ds_reshard.planning.plan import Plan, plan_rank

sys.path.insert(0, str(ROOT / "tests" / "formats"))

from sparse_checkpoint import write_tensor_parallel

SAVED, RESUMED = (8, 512), (4, 768)


def placements(divided: Mapping[str, Division], dp: int, tp_rank: int) -> Iterator[Placement]:
    """What a rank of a ZeRO-1 run wants: masters and moments of its part of the shards, and its shards of weights."""
    local = {name: division.shards[tp_rank] for name, division in divided.items()}
    wanted = [*flat_group(local, None, dp, KINDS, number=0, family=RUN)]
    for name, shape in local.items():
        wanted.append(whole(name, "weight", shape, ElementType.BFLOAT16, family=RUN, buffer=f"module/{name}"))
    for one in wanted:
        division = divided[one.key.name]
        every = one._replace(shape=division.shape, box=Box.whole(division.shape))
        tiles = tuple(
            every._replace(box=box, cut=one.cut._replace(phase=one.cut.phase + at))
            for box, at in division.ranks[tp_rank]
        )
        yield tiles[0] if len(tiles) == 1 else every._replace(tiles=tiles)


@uncollected()  # as `prepare` of the host is
def grid_plan(checkpoint: ZeroCheckpoint, tp: int, dp: int, tp_rank: int, rank: int) -> tuple[Plan, Index]:
    """The copies of rank `rank` of `dp` of tensor-parallel rank `tp_rank` of `tp`."""
    index = Index(checkpoint.layout, ZeroShards(checkpoint=checkpoint))
    divided = {name: redivided(one, one.shape, tp) for name, one in checkpoint.divided.items()}
    wanted = by_key(placements(divided, dp, tp_rank))
    share = partition_numel(sum(prod(one.shards[tp_rank]) for one in divided.values()), dp)
    fresh = {f"{kind}/0": share for kind in KINDS}
    plan = plan_rank(index, Layout(wanted, {RUN: dp}), rank, {key: key for key in wanted}, sizes=fresh)
    assert not index.faults, index.faults[:3]
    return plan, index


def measured(folder: str, tp: int, dp: int, tp_rank: int, rank: int) -> dict[str, Any]:
    """What this process takes to look at the folder, as rank 0 does, and to plan one rank of the run."""
    started = time.perf_counter(), time.process_time()
    with counted() as calls:
        found = find_listing(folder, None).listing
        assert isinstance(found, Listing)
        checkpoint = open_checkpoint(found, optimizer=True)
    look = {**timed(started), **vars(calls), "listed": len(found.nbytes)}
    told = pickle.dumps(checkpoint)
    started = time.perf_counter(), time.process_time()
    with counted() as calls:
        plan, index = grid_plan(pickle.loads(told), tp, dp, tp_rank, rank)
    own = {**timed(started), **vars(calls), "peak_nbytes": resident()["peak"]}
    beside = sum(check.nbytes for check in plan.checks)
    said = {"copies": len(plan.copies), "nbytes": plan.nbytes, "beside_nbytes": beside, "files": len(plan.files)}
    return {"look": look, "own": own, "told_nbytes": len(told), "shards": len(index.opened), "plan": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", nargs=5, metavar=("FOLDER", "TP", "DP", "TP_RANK", "RANK"), help="this process alone")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(given.one[0], *map(int, given.one[1:]))))
        return
    SCRATCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        write_tensor_parallel(Path(name), LLAMA, *SAVED)
        rank = ["--one", name, *map(str, RESUMED), "1", str(RESUMED[1] // 2 + 17)]
        seen = [python("benchmarks.grid_plan", *rank) for _ in range(given.runs)]
    numel = sum(map(prod, LLAMA.values()))
    made = {"commit": commit(), "runs": given.runs, "tensors": len(LLAMA), "numel": numel, "saved": SAVED}
    made |= {"resumed": RESUMED, **seen[0], "own_seconds": spread([run["own"]["seconds"] for run in seen])}
    made["machine"] = machine()
    print(json.dumps(made, indent=1))
    keep(made, "grid-plan", given.output)


if __name__ == "__main__":
    main()
