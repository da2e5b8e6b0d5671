"""One contestant's load in one rank of a fresh process, measured."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.collectives import counted
from benchmarks.engines import engine, join
from benchmarks.gpt import Shape
from benchmarks.memory import Counters, forget_peak, opened, resident, take_back, touch

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

CONDITIONS = ("fresh", "kept", "touched")


def free_memory(condition: str, params: int, world: int) -> int:
    """Bytes that were touched and freed before a load: none; what the engine keeps of the load (its moments);
    or more than any contestant's peak (the shards and the module's file beside what they are copied to)."""
    moments, shard, module = 8 * params // world, 12 * params // world, 2 * params
    return {"fresh": 0, "kept": moments, "touched": 5 * (shard + module) // 4}[condition]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A way of loading: which checkpoint, what goes into the DeepSpeed JSON, and whether ds_reshard is imported."""

    name: str
    saved_dp: int
    config: dict[str, Any]
    hooked: bool


DEEPSPEED = Contestant(name="deepspeed", saved_dp=2, config={}, hooked=False)
DIRECT = Contestant(name="direct", saved_dp=4, config={}, hooked=True)
UNCHANGED = Contestant(name="unchanged", saved_dp=2, config={}, hooked=True)
UNIVERSAL = Contestant(name="universal", saved_dp=4, config={"checkpoint": {"load_universal": True}}, hooked=False)
CONVERTED = Contestant(name="converted", saved_dp=4, config={}, hooked=True)
"""The same folder as UNIVERSAL's."""


def load(
    rank: int,
    world: int,
    *,
    rendezvous: str,
    contestant: Contestant,
    shape: Shape,
    stage: int,
    folder: str,
    condition: str,
    round_number: int,
) -> dict[str, Any]:
    """Build an engine, load once, and say what that took on this rank. Collective."""
    import torch

    if contestant.hooked:
        import ds_reshard.auto  # noqa: F401
    join(rendezvous, rank, world)
    made = engine(shape, stage=stage, world=world, filled=False, config=contestant.config)
    params = sum(getattr(param, "ds_numel", param.numel()) for param in made.module.parameters())
    touch(free_memory(condition, params, world))
    take_back(free_memory("touched", params, world) - free_memory(condition, params, world))
    executions = []
    if contestant.hooked:
        from benchmarks.floor import compare, watch_executor

        executions = watch_executor()
    with opened(folder) as files, counted() as collectives:
        gc.collect()
        forget_peak()
        before_rss = resident()
        torch.distributed.barrier()
        before, started = Counters.now(), time.perf_counter()
        path, _ = made.load_checkpoint(folder)
        seconds = time.perf_counter() - started
        spent, after_rss = Counters.now().since(before), resident()
    assert path is not None and made.global_steps == 1, f"{contestant.name} loaded nothing"
    owned = _owned(made, stage)
    growth = after_rss["peak"] - after_rss["file"] - before_rss["anonymous"]
    measured = {
        "seconds": seconds,
        **{name: getattr(spent, name) for name in spent.__slots__},
        **owned,
        "collectives": len(collectives),
        "collective_nbytes": [one.nbytes for one in collectives],
        "files_opened": len(files.read),
        "files_written": sorted(files.written),
        "memory_above_nbytes": growth - owned["adopted_nbytes"],
    }
    if executions:
        measured["execute_s"] = executions[0].seconds
        measured["planned_nbytes"] = executions[0].plan.nbytes
        measured |= compare(
            executions[0],
            touched=condition != "fresh",
            executor_first=round_number % 2 == 0,
            barrier=torch.distributed.barrier,
        )
    torch.distributed.barrier()
    return measured


def _owned(made: DeepSpeedEngine, stage: int) -> dict[str, int]:
    """Bytes that this rank's engine holds and a checkpoint has: masters, moments, and its weights.

    Weights are the whole module where every rank holds it, this rank's partition at stage 3. `adopted_nbytes`
    is the part that did not exist before the load.
    """
    import torch

    optimizer = made.optimizer
    if stage == 3:
        masters, weights = optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat
    else:
        masters, weights = optimizer.single_partition_of_fp32_groups, list(made.module.state_dict().values())
    states = [
        value for state in optimizer.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]
    adopted = sum(value.nbytes for value in states)
    assert adopted, "no optimizer state was loaded"
    return {"owned_nbytes": sum(t.nbytes for t in (*masters, *weights)) + adopted, "adopted_nbytes": adopted}


def convert(
    rank: int, world: int, *, rendezvous: str, folder: str, output: str, stage: int, workers: int, keep: bool = False
) -> float:
    """Seconds that `ds_to_universal` takes, imports not counted; with `keep` it leaves its temporary files."""
    from argparse import Namespace
    from pathlib import Path

    from deepspeed.checkpoint.ds_to_universal import main

    tag = Path(folder, "latest").read_text().strip()
    arguments = Namespace(
        input_folder=str(Path(folder, tag)),
        output_folder=str(Path(output, tag)),
        num_extract_workers=workers,
        num_merge_workers=workers,
        keep_temp_folder=keep,
        strict=True,
        inject_missing_state=stage < 3,
    )
    started = time.perf_counter()
    main(arguments)
    seconds = time.perf_counter() - started
    Path(output, "latest_universal").write_text(tag)
    Path(output, "latest").write_text(tag)
    return seconds
