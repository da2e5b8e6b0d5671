"""What the ranks do: the uninterrupted run, and a run that resumes from its checkpoint under another layout."""

from __future__ import annotations

import gc
import logging
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from gpt_demo import grid
from gpt_demo.contents import read_contents
from gpt_demo.engine import build, timed, train
from gpt_demo.grid import GridLayout
from gpt_demo.layouts import Layout, Outcome, Schedule
from gpt_demo.text import Text

Tell = Callable[[int, float], None]


def uninterrupted(folder: Path, tell: Tell, *, layout: Layout, schedule: Schedule, checkpoints: Path) -> Outcome:
    """Train to the end; half-way write a checkpoint, and a copy of everything that the engine holds."""
    text = Text()
    engine = build(layout, schedule, seed=0)
    losses = train(engine, text, schedule.checkpoint, tell)
    torch.save(read_contents(engine), folder / f"contents-{dist.get_rank()}.pt")
    seconds = timed(lambda: engine.save_checkpoint(str(checkpoints)))
    losses += train(engine, text, schedule.steps, tell)
    return Outcome(first_step=0, losses=losses, seconds=seconds)


def resumed(folder: Path, tell: Tell, *, layout: Layout, schedule: Schedule, checkpoints: Path) -> Outcome:
    """Show that DeepSpeed alone refuses; load with ds_reshard into another engine; train to the end."""
    refusal = refusal_of_deepspeed(layout, schedule, checkpoints)
    engine = build(layout, schedule, seed=2)

    import ds_reshard.auto  # noqa: F401  (the one line that a training script needs; usually at its top)

    seconds = timed(lambda: engine.load_checkpoint(str(checkpoints)))
    torch.save(read_contents(engine), folder / f"contents-{dist.get_rank()}.pt")
    losses = train(engine, Text(), schedule.steps, tell)
    return Outcome(first_step=schedule.checkpoint, losses=losses, seconds=seconds, refusal=refusal)


def refusal_of_deepspeed(layout: Layout, schedule: Schedule, checkpoints: Path) -> str:
    """What DeepSpeed's own load says to this checkpoint, in an engine that is then thrown away."""
    engine = build(layout, schedule, seed=1)
    try:
        path, _ = engine.load_checkpoint(str(checkpoints))
        said = "" if path is not None else "loads nothing: load_checkpoint returns None"
    except Exception as error:
        failing = traceback.extract_tb(error.__traceback__)[-1].line
        said = f"{type(error).__name__}: {str(error) or failing}"
    told: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(told, said)
    del engine
    gc.collect()
    return str(max(told, key=lambda text: len(str(text))))


def prepare_process(rendezvous: Path, rank: int, ranks: int) -> None:
    """Join the ranks on this machine, over the loopback interface."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    # DeepSpeed would compile an operator for shared memory on first use, under a lock that ranks can hang on.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    dist.init_process_group("gloo", init_method=rendezvous.resolve().as_uri(), rank=rank, world_size=ranks)
    deepspeed.init_distributed("gloo", verbose=False)


def grid_uninterrupted(
    folder: Path, tell: Tell, *, layout: GridLayout, schedule: Schedule, checkpoints: Path
) -> Outcome:
    """Train to the end on a grid of ranks; half-way write a checkpoint."""
    text, engine = Text(), grid.build(layout, schedule, seed=0)
    losses = grid.train(engine, layout, text, schedule.checkpoint, tell)
    seconds = timed(lambda: engine.save_checkpoint(str(checkpoints)))
    return Outcome(
        first_step=0, losses=losses + grid.train(engine, layout, text, schedule.steps, tell), seconds=seconds
    )


def grid_resumed(folder: Path, tell: Tell, *, layout: GridLayout, schedule: Schedule, checkpoints: Path) -> Outcome:
    """Load it with ds_reshard into an engine of another grid; train to the end."""
    import ds_reshard.auto  # noqa: F401

    engine = grid.build(layout, schedule, seed=2)
    seconds = timed(lambda: engine.load_checkpoint(str(checkpoints)))
    losses = grid.train(engine, layout, Text(), schedule.steps, tell)
    return Outcome(first_step=schedule.checkpoint, losses=losses, seconds=seconds)
