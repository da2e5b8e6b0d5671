"""What one rank of a resuming run does before bytes move, in a process of its own: the benchmark of scale starts it.

Rank 0 looks at the folder and tells the others what it lists; then each rank reads the first files of the model and of
the optimizer, plans its copies and opens the shards that it reads, and the model files that it compares (`look_too` and
`prepare` of the DeepSpeed host, without an engine).
Prints JSON. Run: python -m benchmarks.rank_plan FOLDER DP RANK
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.memory import resident
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.formats.zero.checkpoint import MODEL, SINGLE_TP_RANK, ZeroCheckpoint
from ds_reshard.formats.zero.flat import FlatBuffer, Rule, by_key, whole_placement
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.hosts.deepspeed.find_checkpoint import read_heads
from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.index import Index
from ds_reshard.model.layout import Layout, Placement
from ds_reshard.model.records import ElementType
from ds_reshard.operations.source import find_listing
from ds_reshard.planning.plan import Plan, Planner

RUN = "run"
KINDS = dict.fromkeys(("fp32", "exp_avg", "exp_avg_sq"), ElementType.FLOAT32)


def flat_buffer(checkpoint: ZeroCheckpoint, dp: int) -> FlatBuffer:
    (shapes,) = checkpoint.model.param_shapes or ()
    return FlatBuffer(shapes=shapes, rule=Rule.EACH if checkpoint.stage == 3 else Rule.FLAT, ranks=dp, kinds=KINDS)


def placements(checkpoint: ZeroCheckpoint, dp: int) -> Iterator[Placement]:
    """What a run of the saved stage on `dp` ranks wants: masters and moments, and below stage 3 whole weights."""
    buffer = flat_buffer(checkpoint, dp)
    yield from buffer.placements(RUN)
    for name, shape in buffer.shapes.items() if checkpoint.stage < 3 else ():
        yield whole_placement(name, "weight", shape, ElementType.BFLOAT16, family=RUN, buffer=f"module/{name}")


@gc_disabled()  # as `prepare` of the host is
def rank_plan(listing: Listing, dp: int, rank: int) -> tuple[Plan, Index, ZeroShards]:
    checkpoint, _ = read_heads(listing, optimizer=True, row=SINGLE_TP_RANK)
    shards = ZeroShards(checkpoint=checkpoint)
    index = Index(checkpoint.layout, shards)
    wanted = by_key(placements(checkpoint, dp))
    fresh = {f"{kind}/0": flat_buffer(checkpoint, dp).partition_numel for kind in KINDS if kind != "fp32"}
    plan = Planner(index, Layout(wanted, {RUN: dp}), {key: key for key in wanted}).plan(rank, sizes=fresh)
    if checkpoint.listing.partitioned_model:
        for shard in range(rank, checkpoint.dp, dp):
            index.open(MODEL, shard)
    assert not index.faults, index.faults[:3]
    return plan, index, shards


class Calls:
    """Calls that reach the file system, and the bytes that were read."""

    def __init__(self) -> None:
        self.opens = self.reads = self.read_nbytes = 0


@contextmanager
def counted() -> Iterator[Calls]:
    calls, opening, reading = Calls(), os.open, os.pread

    def count_open(*arguments: Any, **named: Any) -> int:
        calls.opens += 1
        return opening(*arguments, **named)

    def count_read(*arguments: Any) -> bytes:
        data = reading(*arguments)
        calls.reads += 1
        calls.read_nbytes += len(data)
        return data

    os.open, os.pread = count_open, count_read
    try:
        yield calls
    finally:
        os.open, os.pread = opening, reading


def timed(started: tuple[float, float]) -> dict[str, float]:
    return {"seconds": time.perf_counter() - started[0], "cpu_s": time.process_time() - started[1]}


def main() -> None:
    folder, dp, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    started = time.perf_counter(), time.process_time()
    with counted() as calls:
        listing = find_listing(folder, None).listing
    assert isinstance(listing, Listing)
    look = {**timed(started), **vars(calls), "listed": len(listing.nbytes)}
    started = time.perf_counter(), time.process_time()
    with counted() as calls:
        plan, index, shards = rank_plan(listing, dp, rank)
    own = {**timed(started), **vars(calls), "peak_nbytes": resident()["peak"]}
    executor = ThreadExecutor(threads=4, memory_nbytes=256 << 20, checksum=True)
    reads = sum(map(len, executor._batches(plan, remote=False)))
    planned = {
        "copies": len(plan.copies),
        "checks": len(plan.checks),
        "nbytes": plan.nbytes,
        "files": len(plan.files),
        "reads": reads,
        "largest_byte_offset": max(copy.byte_offset for copy in plan.copies),
        "largest_element_offset": max(copy.element_offset for copy in plan.copies),
    }
    said_nbytes = len(pickle.dumps((shards.signatures, shards.checksums)))
    print(
        json.dumps(
            {
                "rank": rank,
                "look": look,
                "said_nbytes": said_nbytes,
                "own": own,
                "shards": len(index.opened),
                "plan": planned,
            }
        )
    )


if __name__ == "__main__":
    main()
