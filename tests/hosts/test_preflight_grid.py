"""Preflight and the load agree for runs with tensor parallelism, and for what such runs have saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import grid_jobs
import pytest
import torch
from foretold import agree, change
from grid_cases import Grid

pytestmark = pytest.mark.distributed


def test_a_run_without_tensor_parallelism_of_what_several_such_ranks_saved(
    worlds: Any, foreseen: Any, folders: Any
) -> None:
    """AutoTP's files say how they are divided; a run that divides, or a PipelineModule, is not foreseen."""
    source, target = Grid("autotp", tp=2, dp=1, stage=1), Grid("autotp", dp=2, stage=2)
    folder = str(folders(source))
    said = foreseen.forecast(folder, foreseen.Coming(config=grid_jobs.config_of(target), world=2))
    real = worlds[2].run("preflight_jobs.outcome", run=target, folder=folder)[0]
    agree(said, real, "ds_reshard", "")
    divides = {**grid_jobs.config_of(target), "tensor_parallel": {"autotp_size": 4}}
    for config in (divides, {**divides, "tensor_parallel": {}, "sequence_parallel_size": 2}):
        said = foreseen.forecast(folder, foreseen.Coming(config=config, world=2))
        assert [fault.error for fault in said.faults] == ["UnsupportedLayout"]
    layers = str(folders(Grid("pipeline", pp=2, dp=1)))
    said = foreseen.forecast(layers, foreseen.Coming(config=grid_jobs.config_of(target), world=2))
    assert "PipelineModule" in said.verdict


TENSOR = [
    *(
        (Grid(kind, tp=2, dp=1, stage=a, dtype=dtype), Grid(kind, tp=2, dp=2, stage=b, dtype=dtype), "ds_reshard")
        for kind, a, b, dtype in (
            ("autotp", 1, 2, "fp32"),
            ("autotp", 2, "bf16opt", "bf16"),
            ("mpu", 1, 1, "fp32"),
            ("mpu", 2, 1, "bf16"),
        )
    ),
    *(
        (Grid(kind, tp=2, dp=1, stage=stage), Grid(kind, tp=2, dp=1, stage=stage), "DeepSpeed")
        for kind, stage in (("autotp", 1), ("mpu", 2))
    ),
]


@pytest.mark.parametrize(("source", "target", "loader"), TENSOR, ids=str)
@pytest.mark.parametrize("harmed", [False, True], ids=["whole", "harmed"])
def test_tensor_parallel_runs_of_as_many_ranks_as_saved(
    worlds: Any, foreseen: Any, folders: Any, tmp_path: Path, source: Grid, target: Grid, loader: str, harmed: bool
) -> None:
    """Each row has shards of its own, and what is wrong in that of the second is found, too."""
    folder = folders(source)
    if harmed:
        folder = Path(shutil.copytree(folder, tmp_path / "copy"))
        change("*pp_rank_0_mp_rank_01_optim_states.pt")(folder)
    coming = foreseen.Coming(config=grid_jobs.config_of(target), world=target.ranks, tp=2)
    said = foreseen.forecast(str(folder), coming)
    real = worlds[target.ranks].run("preflight_jobs.outcome", run=target, folder=str(folder))[0]
    agree(said, real, loader, "CheckpointDamaged" if harmed else "")


def test_rows_of_several_saves_and_sizes_that_are_not_foreseen(foreseen: Any, folders: Any, tmp_path: Path) -> None:
    """Files of another step in one row; a run that divides tensors otherwise than they were saved."""
    source = Grid("mpu", tp=2, dp=1)
    config = grid_jobs.config_of(source)
    folder = Path(shutil.copytree(folders(source), tmp_path / "copy"))
    (path,) = folder.glob("*/mp_rank_01_model_states.pt")
    torch.save({**torch.load(path, weights_only=False), "global_steps": 99}, path)
    said = foreseen.forecast(str(folder), foreseen.Coming(config=config, world=2, tp=2))
    assert "is of another step or run" in said.verdict
    said = foreseen.forecast(str(folders(source)), foreseen.Coming(config=config, world=4, tp=4))
    assert "--tp 4 of a checkpoint of another tensor-parallel size" in said.verdict
