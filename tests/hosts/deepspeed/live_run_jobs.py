"""What a load asks of a run, as values that a test compares: of an engine, and of a run that is still to come."""

from __future__ import annotations

from typing import Any

import grid_jobs
import jobs
from cases import Model, Run
from grid_cases import Grid


def asked(run: Any) -> dict[str, Any]:
    """The values of a run that decide how its tensors are read and where they lie."""
    optimizer = run.optimizer
    buffers = [
        {
            "shapes": list(buffer.shapes.items()),
            "gaps": tuple(buffer.gaps) if any(buffer.gaps or ()) else None,
            **{
                name: getattr(buffer, name)
                for name in ("rule", "ranks", "rank", "number", "group", "dtype", "held_numel")
            },
            "states": buffer.states if optimizer.stage else None,
        }
        for buffer in optimizer.buffers
    ]
    return {
        "buffers": buffers,
        "order": [list(group.items()) for group in optimizer.order],
        "optimizer": [getattr(optimizer, name) for name in ("kind", "stage", "rank", "dp")],
        "tensors": sorted(
            (one.entries, one.names, one.shape, one.dtype.label, one.trainable, one.partitioned)
            for one in run.module.tensors
        ),
        "names": run.module.names,
        "place": (run.grid.stage, run.grid.pp, run.grid.parts, run.grid.column, run.grid.tied, dict(run.grid.experts)),
        **{
            name: getattr(run, name)
            for name in ("data_rank", "data_ranks", "columns", "stage", "kind", "fp16", "bf16", "features", "universal")
        },
    }


def of_engine(run: Run | Grid, model: Model | None = None) -> dict[str, Any]:
    """What `run_of` reads of this rank's engine."""
    from ds_reshard.hosts.deepspeed.engine import run_of, unsupported

    engine = grid_jobs.build(run) if isinstance(run, Grid) else jobs.build(run, model or Model())
    return asked(run_of(engine, unsupported(engine)))
