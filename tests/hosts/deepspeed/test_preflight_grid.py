"""Preflight and the load agree for runs with tensor parallelism, and for what such runs have saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import grid_jobs
import pytest
import torch
from grid_cases import Grid
from preflight_answers import agree, change

pytestmark = pytest.mark.distributed


def test_a_run_without_tensor_parallelism_of_what_several_such_ranks_saved(
    worlds: Any, foreseen: Any, folders: Any
) -> None:
    """AutoTP's files say how they are divided; a run of which not every rank has the same model is not foreseen."""
    source, target = Grid("autotp", tp=2, dp=1, stage=1), Grid("autotp", dp=2, stage=2)
    folder = str(folders(source))
    said = foreseen.forecast(folder, foreseen.PlannedRun(config=grid_jobs.config_of(target), world=2))
    real = worlds[2].run("preflight_jobs.outcome", run=target, folder=folder)[0]
    agree(said, real, "ds_reshard", "")
    divides = {**grid_jobs.config_of(target), "tensor_parallel": {"autotp_size": 4}}
    for config in (divides, {**divides, "tensor_parallel": {}, "sequence_parallel_size": 2}):
        said = foreseen.forecast(folder, foreseen.PlannedRun(config=config, world=2))
        assert [fault.error for fault in said.faults] == ["UnsupportedLayout"]


LEFT = {"ds_reshard": {"reshard": {"unchanged": "deepspeed"}}}
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
        (Grid(kind, tp=2, dp=dp, stage=stage), Grid(kind, tp=2, dp=dp, stage=stage, config=config), loader)
        for kind, dp, stage in (("autotp", 1, 1), ("mpu", 1, 2), ("autotp", 2, 1), ("autotp", 2, 3))
        for config, loader in ((LEFT, "DeepSpeed"), ({}, "ds_reshard"))
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
    coming = foreseen.PlannedRun(config=grid_jobs.config_of(target), world=target.ranks, tp=2)
    said = foreseen.forecast(str(folder), coming)
    real = worlds[target.ranks].run("preflight_jobs.outcome", run=target, folder=str(folder))
    agree(said, real[0], loader, "CheckpointDamaged" if harmed else "")
    if not harmed:
        assert [[(cost.read_nbytes, tuple(sorted(cost.files)))] for cost in said.costs] == [one["read"] for one in real]


PIPELINE = [
    *(
        (Grid("pipeline", pp=2, dp=2, stage=a, dtype=t), Grid("pipeline", pp=pp, dp=dp, stage=b, dtype=t), loader)
        for t, a, b, pp, dp, loader in (
            ("fp32", 1, 1, 1, 4, "ds_reshard"),
            ("fp32", 1, "bf16opt", 4, 1, "ds_reshard"),
            ("fp32", 1, 1, 2, 1, "ds_reshard"),
            ("bf16", "bf16opt", 1, 1, 2, "ds_reshard"),
            ("bf16", 0, 0, 2, 1, "ds_reshard"),
        )
    ),
    (Grid("pipeline", pp=2, tp=2, dp=1), Grid("pipeline", pp=1, tp=2, dp=2), "ds_reshard"),
    (Grid("pipeline", pp=2, tp=2, dp=1), Grid("pipeline", pp=2, tp=2, dp=1), "ds_reshard"),
    *(
        (Grid("pipeline", pp=2, tp=2, layers="divided"), Grid("pipeline", pp=pp, dp=dp, tp=tp, layers="divided"), who)
        for pp, dp, tp, who in ((1, 1, 4, "ds_reshard"), (2, 2, 1, "ds_reshard"))
    ),
]


EXPERTS = [
    *(
        (Grid("moe", ep=a, dp=4, stage=s), Grid("moe", ep=b, dp=dp, stage=t, config=config), "ds_reshard")
        for a, b, dp, s, t, config in (
            (2, 1, 4, 1, 2, {}),
            (2, 4, 4, 2, 1, {}),
            (4, 2, 2, 1, 1, {}),
            (2, 2, 4, 1, 1, {"use_data_before_expert_parallelism": True}),
        )
    ),
    (Grid("moe", ep=1, dp=4), Grid("moe", ep=1, dp=4, config=LEFT), "DeepSpeed"),
]


DIVIDED = [
    (Grid("cut", tp=2, dp=2, stage=a, dtype=dtype), Grid("cut", tp=tp, dp=dp, stage=b, dtype=dtype), "ds_reshard")
    for a, tp, dp, b, dtype in ((1, 4, 1, 2, "fp32"), (3, 1, 2, 1, "bf16"), (2, 2, 1, 3, "fp32"), (0, 1, 2, 1, "bf16"))
]


@pytest.mark.parametrize(("source", "target", "loader"), [*PIPELINE, *EXPERTS, *DIVIDED], ids=str)
@pytest.mark.parametrize("harmed", [False, True], ids=["whole", "harmed"])
def test_runs_of_another_grid(
    worlds: Any, foreseen: Any, folders: Any, tmp_path: Path, source: Grid, target: Grid, loader: str, harmed: bool
) -> None:
    """Stages cut anew, experts dealt out anew, tensors divided anew; each rank reads what was said.

    Or the last rank's file is harmed. Only a run whose script cuts stages otherwise than by default reads other bytes.
    """
    folder = folders(source)
    if harmed:
        folder = Path(shutil.copytree(folder, tmp_path / "copy"))
        kind = "model" if source.stage == 0 else "optim"
        change(max(folder.glob(f"*/*_{kind}_states.pt")).name)(folder)
    config = grid_jobs.config_of(target)
    coming = foreseen.PlannedRun(config=config, world=target.ranks, tp=target.tp, pp=target.pp, ep=target.ep)
    said = foreseen.forecast(str(folder), coming)
    real = worlds[target.ranks].run("preflight_jobs.outcome", run=target, folder=str(folder))
    agree(said, real[0], loader, "CheckpointDamaged" if harmed else "")
    if not harmed and target.pp in (1, source.pp):
        assert [[(cost.read_nbytes, tuple(sorted(cost.files)))] for cost in said.costs] == [one["read"] for one in real]


def test_rows_of_several_saves_and_sizes_that_are_not_foreseen(foreseen: Any, folders: Any, tmp_path: Path) -> None:
    """Files of another step in one row; a run that divides tensors otherwise than they were saved."""
    source = Grid("mpu", tp=2, dp=1)
    config = grid_jobs.config_of(source)
    folder = Path(shutil.copytree(folders(source), tmp_path / "copy"))
    (path,) = folder.glob("*/mp_rank_01_model_states.pt")
    torch.save({**torch.load(path, weights_only=False), "global_steps": 99}, path)
    said = foreseen.forecast(str(folder), foreseen.PlannedRun(config=config, world=2, tp=2))
    assert "is of another step or run" in said.verdict
    said = foreseen.forecast(str(folders(source)), foreseen.PlannedRun(config=config, world=4, tp=4))
    assert "nothing says how it is cut" in said.verdict


REFUSED = [
    (Grid("pipeline", pp=2, dp=2), Grid("pipeline", pp=2, dp=2, stage=2), "DeepSpeed refuses ZeRO 2"),
    (Grid("moe", ep=2, dp=4), Grid("moe", ep=2, dp=4, stage=3), "DeepSpeed refuses ZeRO 3"),
]


@pytest.mark.parametrize(("source", "target", "why"), REFUSED, ids=str)
def test_stages_that_deepspeed_refuses(
    worlds: Any, foreseen: Any, folders: Any, source: Grid, target: Grid, why: str
) -> None:
    coming = foreseen.PlannedRun(config=grid_jobs.config_of(target), world=target.ranks, pp=target.pp, ep=target.ep)
    said = foreseen.forecast(str(folders(source)), coming)
    real = worlds[target.ranks].run("preflight_jobs.outcome", run=target, folder=str(folders(source)))[0]
    assert why in said.verdict
    agree(said, real, "", "ConfigError")


UNFORESEEN = [
    (Grid("autotp", tp=2, dp=1), {"pp": 2}, "--pp 2 of a checkpoint without the files of layers"),
    (Grid("pipeline", pp=2, dp=2), {"ep": 2}, "--ep 2 of a checkpoint without the files of experts"),
    (Grid("moe", ep=2, dp=4, stage=0), {"ep": 2}, "experts at ZeRO stage 0"),
    (Grid("pipeline", pp=2, dp=2, stage=0), {"pp": 2}, "a PipelineModule at ZeRO stage 0"),
    (Grid("autotp", tp=2, dp=1), {"tp": 4}, "--tp 4: "),
    (Grid("pipeline", pp=2, dp=2), {"pp": 7}, "--pp 7, with a stage that trains nothing"),
    (Grid("moe", ep=2, dp=4), {"ep": 8}, "--ep 8 of [4, 4] experts"),
]


@pytest.mark.parametrize(("source", "asked", "why"), UNFORESEEN, ids=str)
def test_what_the_script_alone_says_is_not_foreseen(
    foreseen: Any, folders: Any, source: Grid, asked: dict[str, int], why: str
) -> None:
    config = {**grid_jobs.config_of(source), "tensor_parallel": {}}
    said = foreseen.forecast(str(folders(source)), foreseen.PlannedRun(config=config, world=56, **asked))
    assert why in said.verdict and "cannot predict" in said.verdict
