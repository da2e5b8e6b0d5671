"""An optimizer of the same states is not always the same optimizer, and not all that torch loads is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("stage", [1, 2])
def test_fp32_moments_of_16_bit_masters_are_not_rounded(worlds: Any, tmp_path: Path, stage: int) -> None:
    """torch casts what it loads to the type of the parameter: DeepSpeed's own load has another moment for each."""
    given = {"saved": ("cpu", 2), "loaded": ("cpu", stage), "folder": str(tmp_path), "steps": 3}
    for told in worlds[2].run("adam_jobs.load", **given):
        assert told["error"] is None, told
        assert (told["same"], told["types"]) == ([True, True], ["torch.float32"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_moments_are_not_rounded_where_the_masters_become_16_bit(worlds: Any, tmp_path: Path, stage: int) -> None:
    """`bf16_master_weights_and_grads` was switched on, and nothing else was changed."""
    given = {"saved": ("cpu, fp32 masters", stage), "loaded": ("cpu", stage), "folder": str(tmp_path), "steps": 3}
    for told in worlds[2].run("adam_jobs.load", **given):
        assert told["error"] is None, told
        assert (told["same"], told["types"]) == ([True, True], ["torch.float32"])


@pytest.mark.parametrize("saved", [("cpu, fp32 masters", 2), ("cpu, in part", 3)], ids=str)
def test_moments_that_stay_on_the_device_are_refused(worlds: Any, tmp_path: Path, saved: tuple[str, int]) -> None:
    """An offload with a ratio keeps them in a second optimizer, which DeepSpeed's own load leaves as it was built."""
    given = {"saved": saved, "loaded": ("cpu, in part", 3), "folder": str(tmp_path), "steps": 3}
    for told in worlds[2].run("adam_jobs.load", **given):
        assert told["error"] == "UnsupportedLayout" and "offload_optimizer.ratio" in told["text"], told


@pytest.mark.parametrize("stage", [1, 2])
def test_a_group_keeps_what_this_runs_optimizer_needs(worlds: Any, tmp_path: Path, stage: int) -> None:
    """FusedAdam reads bias_correction from its groups, and those of torch's AdamW have none; also where nothing else
    has changed, where DeepSpeed's own load leaves it out."""
    given = {"saved": ("adamw", 2), "loaded": ("needy", stage), "folder": str(tmp_path), "steps": 2}
    for told in worlds[2].run("adam_jobs.load", **given):
        assert told["error"] is None and told["same"] == [True, True], told


@pytest.mark.parametrize("stage", [1, 3])
def test_fused_adam_counts_at_the_last_parameter(worlds: Any, tmp_path: Path, stage: int) -> None:
    """At stage 0 in fp32 DeepSpeed's FusedAdam keeps the step of a group with the last one, and steps all by it."""
    told = worlds[1].run("adam_jobs.fused_of_stage_0", stage=stage, folder=str(tmp_path))[0]
    assert (told["saved"], told["loaded"]) == ([0, 0, 0, 3], [3])
    assert all(map(torch.allclose, told["truth"], told["now"]))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("kind", "into", "asked", "said"),
    [
        ("adamw", "needy", {"maximize": True}, "maximize True"),
        ("adam", "needy", {"weight_decay": 0.1}, "decoupled_weight_decay False"),
        ("adam", "adamw", {"weight_decay": 0.1}, "decoupled_weight_decay False"),
    ],
    ids=["maximize", "decoupled", "torch's own"],
)
def test_another_rule_of_a_step_is_refused(
    worlds: Any, tmp_path: Path, kind: str, into: str, asked: dict[str, Any], said: str, stage: int
) -> None:
    given = {"saved": (kind, 2), "loaded": (into, stage), "folder": str(tmp_path), "steps": 2, **asked}
    for told in worlds[2].run("adam_jobs.load", **given):
        assert told["error"] == "ModelMismatch" and said in told["text"], told


def test_torchs_adam_takes_the_rule_that_was_saved(worlds: Any, tmp_path: Path) -> None:
    given = {"saved": ("adamw", 2), "loaded": ("adam", 1), "folder": str(tmp_path), "steps": 2, "weight_decay": 0.1}
    for told in worlds[2].run("adam_jobs.load", **given):
        assert told["error"] is None and told["same"] == [True, True], told


@pytest.mark.parametrize("stages", [(2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("kinds", [("fused lion", "cpu lion"), ("cpu lion", "fused lion")], ids=str)
def test_lion_goes_into_cpu_memory_and_back(
    worlds: Any, tmp_path: Path, kinds: tuple[str, str], stages: tuple[int, int]
) -> None:
    """DeepSpeed's Lion for the CPU has a second state, which no step uses."""
    saved, loaded = zip(kinds, stages, strict=True)
    for told in worlds[2].run("adam_jobs.lion", saved=saved, loaded=loaded, folder=str(tmp_path)):
        assert torch.equal(told["saved"], told["loaded"]) and told["saved"].any()
        assert all(map(torch.equal, told["truth"], told["now"]))


@pytest.mark.parametrize("stages", [(2, 2), (3, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("loaded", ["sgd", "adagrad"])
def test_states_of_another_optimizer_are_refused(
    worlds: Any, tmp_path: Path, loaded: str, stages: tuple[int, int]
) -> None:
    """DeepSpeed's own load takes them at an unchanged layout; the first step may stop at what is missing."""
    given = {"saved": ("adamw", stages[0]), "loaded": (loaded, stages[1]), "folder": str(tmp_path), "steps": 2}
    for told in worlds[2].run("adam_jobs.load", **given):
        assert told["error"] == "ModelMismatch" and "its states are others" in told["text"], told


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (1, 3), (2, 1), (3, 3), (3, 2), (2, 3)])
def test_a_run_that_has_made_no_step(worlds: Any, tmp_path: Path, saved: int, loaded: int) -> None:
    """torch makes its states with the first step."""
    given = {"saved": ("adamw", saved), "loaded": ("adamw", loaded), "folder": str(tmp_path), "steps": 0}
    for told in worlds[2].run("adam_jobs.load", **given):
        assert told["error"] is None and told["same"] == [True, True], told


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 1)])
def test_adafactor_of_torch_keeps_a_variance_of_each_element_of_a_flat_buffer(
    worlds: Any, tmp_path: Path, saved: int, loaded: int
) -> None:
    """Of a matrix it keeps rows and columns, and there are no matrices in the buffers of ZeRO."""
    given = {"saved": ("adafactor", saved), "loaded": ("adafactor", loaded), "folder": str(tmp_path), "steps": 2}
    for told in worlds[2].run("adam_jobs.load", **given):
        assert told["error"] is None and told["same"] == [True, True], told


@pytest.mark.parametrize("kind", ["adafactor", "of transformers"])
def test_states_of_flat_buffers_are_none_that_adafactor_keeps_of_a_matrix(
    worlds: Any, tmp_path: Path, kind: str
) -> None:
    """At stage 0 it would look for rows and columns at its first step."""
    given = {"saved": (kind, 1), "loaded": (kind, 0), "folder": str(tmp_path), "steps": 2}
    for told in worlds[1].run("adam_jobs.load", **given):
        assert told["error"] == "ModelMismatch" and "its states are others" in told["text"], told
