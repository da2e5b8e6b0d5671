"""What the worker processes do with the GPT of the demo on a grid: train, save, resume and train on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from grid_jobs import alone

sys.path.append(str(Path(__file__).parents[3] / "examples"))


@alone
def uninterrupted(layout: dict[str, Any], steps: int, checkpoint: int, folder: str) -> list[float]:
    from gpt_demo.grid import GridLayout, build, train
    from gpt_demo.layouts import Schedule
    from gpt_demo.text import Text

    grid, text, schedule = GridLayout(**layout), Text(), Schedule(steps=steps, checkpoint=checkpoint)
    engine = build(grid, schedule, seed=0)
    losses = train(engine, grid, text, checkpoint)
    engine.save_checkpoint(folder)
    return losses + train(engine, grid, text, steps)


@alone
def resumed(layout: dict[str, Any], steps: int, checkpoint: int, folder: str) -> list[float]:
    from gpt_demo.grid import GridLayout, build, train
    from gpt_demo.layouts import Schedule
    from gpt_demo.text import Text

    import ds_reshard

    grid = GridLayout(**layout)
    engine = build(grid, Schedule(steps=steps, checkpoint=checkpoint), seed=1)
    with ds_reshard.install("deepspeed"):
        path, _ = engine.load_checkpoint(folder)
    assert path is not None
    return train(engine, grid, Text(), steps)
