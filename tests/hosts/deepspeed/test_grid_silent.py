"""What DeepSpeed 0.19.8 does wrong with grids and does not say, beside what is done here: the truth, or a refusal.

Truth is a rule that gives every element of every tensor its own value (`grid_models.py`).
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grid_cases import Folders, Grid
from grid_models import MEGATRON_RULES, RULES

pytestmark = pytest.mark.distributed

UNIVERSAL = {"checkpoint": {"load_universal": True}}


def mpu(tp: int, layers: str, rules: list[dict[str, Any]] | None = None, stage: int = 1) -> Grid:
    config = {"ds_reshard": {"reshard": {"tensor_parallel": rules}}} if rules is not None else {}
    return Grid("cut", tp=tp, layers=layers, stage=stage, config=config)


def loaded(worlds: Any, target: Grid, folder: Path, **arguments: Any) -> list[dict[str, int]]:
    """What is wrong after a load, on each rank."""
    found = worlds[target.ranks].run("grid_jobs.load", grid=target, folder=str(folder), **arguments)
    return [rank["wrong"] for rank in found]


def of_deepspeed(worlds: Any, folders: Folders, tmp_path: Path, source: Grid, target: Grid) -> list[dict[str, int]]:
    """What is wrong after ds_to_universal and a load of what it has made, both of which end well."""
    folder = shutil.copytree(folders(source), tmp_path / "copy")
    worlds[1].run("unowned_jobs.universal", folder=str(folder), tag="t")
    return loaded(worlds, replace(target, config=UNIVERSAL), folder, hooks=False, saved_ep=source.ep)


@pytest.mark.parametrize("stage", [0, 1])
def test_weights_of_megatron_names_are_merged_by_their_names(worlds: Any, folders: Folders, stage: int) -> None:
    """DeepSpeed takes both halves of SwiGLU, gate and up, for one matrix."""
    source, target = mpu(2, "megatron", stage=stage), mpu(1, "megatron", stage=stage)
    (wrong,) = loaded(worlds, target, folders(source), hooks=False, load_module_only=True)
    assert (wrong["mlp.dense_h_to_4h.weight"], wrong["mlp.dense_h_to_4h.bias"]) == (48, 8)
    assert loaded(worlds, mpu(1, "megatron", MEGATRON_RULES, stage), folders(source)) == [{}]


def test_masters_of_megatron_names_are_those_of_one_rank(worlds: Any, folders: Folders) -> None:
    (wrong,) = loaded(worlds, mpu(1, "megatron"), folders(mpu(2, "megatron")), hooks=False)
    assert wrong["0 fp32"] > 0 and wrong["0 exp_avg"] > 0


def test_patterns_that_were_forgotten(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """DeepSpeed merges rows and parts along dimension 0. Here shapes that then differ are refused; a rule mends it."""
    source = mpu(2, "forgotten")
    (wrong,) = of_deepspeed(worlds, folders, tmp_path, source, mpu(1, "forgotten"))
    assert wrong["gate_up"] == 48 and wrong["qkv"] > 0
    ((error, said, same),) = worlds[1].run("grid_jobs.refused", grid=mpu(1, "forgotten"), folder=str(folders(source)))
    assert (error, same) == ("ModelMismatch", True) and "row: has another" in said
    assert loaded(worlds, mpu(1, "forgotten", RULES), folders(source)) == [{}]


def test_no_patterns_at_all(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """ds_to_universal --inject_missing_state writes what no rank has: a norm twice as long, for one."""
    source = mpu(2, "unsaid")
    with pytest.raises(Exception, match=r"norm|size|shape"):
        of_deepspeed(worlds, folders, tmp_path, source, mpu(1, "unsaid"))
    ((error, said, same),) = worlds[1].run("grid_jobs.refused", grid=mpu(1, "unsaid"), folder=str(folders(source)))
    assert (error, same) == ("UnsupportedLayout", True) and "norm: nothing says how it is cut" in said


def test_copies_that_are_averaged(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """DeepSpeed takes the mean of masters and of moments, which is neither rank's. Here the owner must be named."""
    source = mpu(2, "averaged")
    (wrong,) = of_deepspeed(worlds, folders, tmp_path, source, mpu(1, "averaged"))
    assert wrong["norm"] == 6
    ((error, said, same),) = worlds[1].run("grid_jobs.refused", grid=mpu(1, "averaged"), folder=str(folders(source)))
    assert (error, same) == ("UnsupportedLayout", True) and "norm: its copies may differ between ranks" in said
    owner = [{"parameters": "norm", "replicated": True, "owner": 0}]
    assert loaded(worlds, mpu(1, "averaged", owner), folders(source)) == [{}]


def test_the_last_stage_wins_what_is_tied(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """Of a position embedding ds_to_universal keeps the copy that the last stage never trains; of what is not trained,
    buffers and frozen parameters, nothing comes back."""
    source, target = Grid("pipeline", pp=2, dp=2), Grid("pipeline", dp=2)
    wrong = of_deepspeed(worlds, folders, tmp_path, source, target)
    assert any("exp_avg" in name for rank in wrong for name in rank)
    assert all({"tied_modules.embed.position", "1.fixed", "1.count"} <= rank.keys() for rank in wrong)
    assert loaded(worlds, target, folders(source)) == [{}, {}]


def test_param_groups_of_a_stage_that_has_fewer(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """DeepSpeed takes those of a universal checkpoint by their numbers: weight decay of weights for gains."""
    source, target = (Grid("pipeline", pp=pp, dp=2 // pp, layers="gains last") for pp in (1, 2))
    assert of_deepspeed(worlds, folders, tmp_path, source, target) == [{}, {"0 group": 2}]
    assert loaded(worlds, replace(target, config=UNIVERSAL), tmp_path / "copy") == [{}, {}]
    assert loaded(worlds, target, folders(source)) == [{}, {}]


def test_a_pipeline_in_bf16_at_stage_0_cannot_load_what_it_has_saved(worlds: Any, folders: Folders) -> None:
    same = Grid("pipeline", pp=2, dp=2, stage=0, dtype="bf16")
    with pytest.raises(Exception, match="KeyError"):
        loaded(worlds, same, folders(same), hooks=False)
    alike = replace(same, layers="one position")  # what is not tied is the first stage's
    assert loaded(worlds, alike, folders(same)) == [{}] * 4


def test_every_expert_parallel_rank_gets_the_first_experts(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """Of a universal checkpoint; from the ZeRO checkpoint each gets its own."""
    source, target = Grid("moe", dp=2), Grid("moe", ep=2, dp=2)
    wrong = of_deepspeed(worlds, folders, tmp_path, source, target)
    assert not any("fp32" in name for name in wrong[0]) and any("fp32" in name for name in wrong[1])
    assert loaded(worlds, target, folders(source)) == [{}, {}]


def test_experts_of_autoep_at_another_size(worlds: Any, folders: Folders) -> None:
    """As many ranks, and as many elements on each: DeepSpeed takes other experts' masters for this rank's."""
    source, target = Grid("autoep", ep=2, dp=4), Grid("autoep", ep=4, dp=4)
    arguments = {"folder": folders(source), "saved_ep": source.ep}
    assert any(rank.get("1 fp32") for rank in loaded(worlds, target, hooks=False, **arguments))
    assert loaded(worlds, target, **arguments) == [{}] * 4
