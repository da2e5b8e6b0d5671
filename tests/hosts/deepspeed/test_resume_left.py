"""The policy where DeepSpeed itself loads, where ranks differ, and where a run reads what it has saved itself."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import Run
from resume_jobs import Setup
from resumed import STEPS, rates, resume, same_tensors, uninterrupted

pytestmark = pytest.mark.distributed

WARMUP = Setup(json=True, groups=1, scheduler=("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 8}))
UNIVERSAL = {"checkpoint": {"load_universal": True}}
OTHERS = {
    "the same class": {"scheduler": ("WarmupLR", {"warmup_max_lr": 0.5, "warmup_num_steps": 12})},
    "another class": {"json": False, "scheduler": ("CosineAnnealingLR", {"T_max": 60})},
    "none": {"scheduler": None},
}


@pytest.fixture(scope="module")
def universal(worlds: Any, kept: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A universal checkpoint of a stage-1 run, made by DeepSpeed's converter, and what that run held."""
    folder, held = kept(WARMUP.but(run=Run(1, 1)))
    made = tmp_path_factory.mktemp("universal") / "saved"
    shutil.copytree(folder, made)
    worlds[1].run("unowned_jobs.universal", folder=str(made), tag=(made / "latest").read_text())
    return made, held


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("policy", ["override", "reset"])
def test_a_universal_checkpoint_gives_its_position(worlds: Any, universal: Any, other: str, policy: str) -> None:
    """Into another class of scheduler, too, whose state DeepSpeed could not load."""
    folder, saved = universal
    new = WARMUP.but(run=Run(1, 1, config=UNIVERSAL), lr=0.5, weight_decay=0.7, **OTHERS[other])
    loaded = resume(worlds, new.but(policy={"scheduler": policy}), folder)
    assert loaded[0]["error"] is None, loaded[0]["text"]
    steps = STEPS if policy == "override" else 0
    assert rates(loaded[0]["rates"]) == rates(uninterrupted(worlds, new.but(run=Run(1, 1)), steps))
    same_tensors(saved, loaded, ("fp32", "exp_avg", "exp_avg_sq"))
    assert loaded[0]["counters"][0] == STEPS


@pytest.mark.parametrize("broken", ["absent", "garbage", "of something else"])
def test_a_universal_checkpoint_without_its_position_is_refused(
    worlds: Any, universal: Any, tmp_path: Path, broken: str
) -> None:
    import torch

    folder = tmp_path / "saved"
    shutil.copytree(universal[0], folder)
    path = folder / "universal" / "mp_rank_00_model_states.pt"
    if broken == "absent":
        path.unlink()
    elif broken == "garbage":
        path.write_bytes(b"garbage")
    else:
        torch.save({"module": {}}, path)
    setup = WARMUP.but(run=Run(1, 1, config=UNIVERSAL), policy={"scheduler": "override"})
    refused = resume(worlds, setup, folder)
    assert refused[0]["error"] in ("CheckpointNotFound", "CheckpointDamaged") and refused[0]["unchanged"]


POLICIES: dict[str, dict[str, Any]] = {
    "checkpoint": {"policy": {"scheduler": "checkpoint"}, "lr": 0.5},
    "strict": {"policy": {"scheduler": "strict"}},
    "strict, and another rate": {"policy": {"scheduler": "strict"}, "weight_decay": 0.7},
    "masters": {"policy": {"optimizer": "masters", "scheduler": "override"}, "lr": 0.5},
    "skip": {"policy": {"optimizer": "skip", "scheduler": "reset"}},
    "finetune": {"policy": {"finetune": True}},
    "iteration": {"policy": {"iteration": "reset", "scheduler": "override"}},
    "weight decay": {"policy": {"hyperparameters": ["weight_decay"]}, "weight_decay": 0.7},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("run", (Run(2, 2), Run(3, 2)), ids=str)
def test_a_policy_takes_a_universal_checkpoint_as_the_one_that_it_was_made_from(
    worlds: Any, kept: Any, universal: Any, run: Run, policy: str
) -> None:
    """Every policy under another layout, with "load_universal" set: rates, counters and tensors, or the refusal."""
    plain, _ = kept(WARMUP.but(run=Run(1, 1)))
    new = WARMUP.but(run=run, **POLICIES[policy])
    expected = resume(worlds, new, plain)[0]
    found = resume(worlds, new.but(run=replace(run, config=UNIVERSAL)), universal[0])[0]
    assert found["error"] == expected["error"] == ("ScheduleMismatch" if "another" in policy else None)
    if found["error"] is not None:
        assert found["unchanged"]
        return
    assert rates(found["rates"]) == rates(expected["rates"])
    assert found["counters"] == expected["counters"]
    same_tensors([expected], [found])


def test_policies_that_differ_between_ranks_are_named(worlds: Any, kept: Any) -> None:
    setup = Setup(run=Run(2, 2))
    folder, _ = kept(setup)
    policies = [{"scheduler": "override"}, {"scheduler": "override", "optimizer": "masters"}]
    said = worlds[2].run("unowned_jobs.rank_policies", setup=setup, folder=str(folder), policies=policies)
    assert said[0] == said[1] and said[0].startswith("ConfigError")
    assert "optimizer: differs between ranks" in said[0] and "'masters' on rank 1" in said[0]
    assert "scheduler: differs" not in said[0]


@pytest.mark.parametrize("policy", ["override", "reset", "strict"])
@pytest.mark.parametrize("run", (Run(1, 1), Run(2, 2)), ids=str)
def test_what_the_run_has_saved_itself_is_loaded_as_it_is(worlds: Any, tmp_path: Path, policy: str, run: Run) -> None:
    """By tag and by `latest`; a tag that somebody wrote anew is a resume, which comes too late here."""
    setup = Setup(run=run, scheduler=("CosineAnnealingLR", {"T_max": 40}), policy={"scheduler": policy})
    said = worlds[run.dp].run("unowned_jobs.own_saves", setup=setup, folder=str(tmp_path))
    assert rates(said[0]["latest"]) == rates(said[0]["tag"]) == rates(said[0]["rates"])
    assert len({rank.get("error") for rank in said}) == 1
    assert ("error" in said[0]) == (policy != "strict")


MERGED = Setup(run=Run(1, 1))


def test_groups_may_merge_where_this_runs_values_replace_the_ones_that_differ(worlds: Any, kept: Any) -> None:
    folder, saved = kept(MERGED)
    one = MERGED.but(groups=1, lr=0.5, weight_decay=0.7)
    refused = resume(worlds, one, folder)
    assert refused[0]["error"] == "ParamGroupMismatch" and refused[0]["unchanged"]
    loaded = resume(worlds, one.but(policy={"scheduler": "override"}), folder)
    assert loaded[0]["error"] is None, loaded[0]["text"]
    assert rates(loaded[0]["rates"]) == rates(uninterrupted(worlds, one))
    same_tensors(saved, loaded)


@pytest.mark.parametrize("stage", [1, 3])
def test_merged_groups_do_not_take_the_first_ones_rate(worlds: Any, kept: Any, stage: int) -> None:
    """Without the optimizer nothing refuses the groups themselves; their saved rates are then not known."""
    run = Run(stage, 1)
    folder, _ = kept(MERGED.but(run=run))
    one = MERGED.but(run=run, groups=1, lr=0.5, policy={"scheduler": "checkpoint", "optimizer": "skip"})
    refused = resume(worlds, one, folder)
    assert refused[0]["error"] == "UnsupportedLayout" and refused[0]["unchanged"]


def test_a_schedule_whose_bounds_lie_in_files_left_unopened_is_refused(worlds: Any, kept: Any) -> None:
    """OneCycleLR keeps its bounds in the param groups: without the optimizer's files they would be this run's."""
    cycle = Setup(scheduler=("OneCycleLR", {"max_lr": [0.01, 0.001], "total_steps": 40}))
    skip = {"scheduler": "checkpoint", "optimizer": "skip"}
    other = {"scheduler": ("OneCycleLR", {"max_lr": [0.5, 0.05], "total_steps": 40}), "policy": skip}
    for stage in (1, 3):
        folder, saved = kept(cycle.but(run=Run(stage, 1)))
        loaded = resume(worlds, cycle.but(run=Run(stage, 1), **other), folder)
        if stage == 3:
            names = ("lr", "weight_decay", "betas")
            assert rates(loaded[0]["rates"], names) == rates(saved[0]["rates"], names)
        else:
            assert loaded[0]["error"] == "UnsupportedLayout" and "max_lr" in loaded[0]["text"]


def test_a_saved_json_that_the_scheduler_belies_is_refused(worlds: Any, kept: Any, tmp_path: Path) -> None:
    """B goes on with A's rates and decay under B's JSON; C skips the optimizer, and would take B's decay for A's."""
    first = Setup(json=True, groups=1, scheduler=("CosineAnnealingLR", {"T_max": 40}))
    skip = first.but(lr=0.9, weight_decay=0.9, policy={"scheduler": "checkpoint", "optimizer": "skip"})
    folder, saved = kept(first)
    taken = resume(worlds, skip, folder)
    assert rates(taken[0]["rates"]) == rates(saved[0]["rates"])
    chained = resume(worlds, first.but(lr=0.5, weight_decay=0.7), folder, save_to=str(tmp_path))
    assert chained[0]["error"] is None
    refused = resume(worlds, skip, tmp_path)
    assert refused[0]["error"] == "UnsupportedLayout" and "does not describe the optimizer" in refused[0]["text"]
    assert refused[0]["unchanged"]


EQUAL = {
    "Plateau": ({"patience": 0, "factor": 0.5}, {"patience": 0, "factor": 0.4}),
    "ChainedScheduler": ({"gammas": [0.9, 0.8]}, {"gammas": [0.9, 0.7]}),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_strict_takes_equal_schedules(worlds: Any, kept: Any, kind: str) -> None:
    """Of ReduceLROnPlateau, reduced since; another base rate or factor is a mismatch."""
    params, others = EQUAL[kind]
    setup = Setup(scheduler=(kind, params))
    folder, saved = kept(setup)
    loaded = resume(worlds, setup.but(policy={"scheduler": "strict"}), folder)
    assert loaded[0]["error"] is None, loaded[0]["text"]
    assert rates(loaded[0]["rates"]) == rates(saved[0]["rates"])
    for other in ({"lr": 0.013}, {"scheduler": (kind, others)}):
        refused = resume(worlds, setup.but(policy={"scheduler": "strict"}, **other), folder)
        assert refused[0]["error"] == "ScheduleMismatch" and refused[0]["unchanged"]


def test_a_chain_is_placed(worlds: Any, kept: Any) -> None:
    """A chain has no position but that of its parts."""
    params, others = EQUAL["ChainedScheduler"]
    folder, _ = kept(Setup(scheduler=("ChainedScheduler", params)))
    new = Setup(lr=0.5, scheduler=("ChainedScheduler", others))
    loaded = resume(worlds, new.but(policy={"scheduler": "override"}), folder)
    assert loaded[0]["error"] is None, loaded[0]["text"]
    assert rates(loaded[0]["rates"]) == rates(uninterrupted(worlds, new))


def test_strict_says_that_nobody_knows_what_configured_a_scheduler_of_deepspeed(worlds: Any, kept: Any) -> None:
    """Built by the script, which is right to be refused: its state is a position."""
    setup = Setup(scheduler=("client WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 8}))
    folder, _ = kept(setup)
    refused = resume(worlds, setup.but(policy={"scheduler": "strict"}), folder)
    assert refused[0]["error"] == "UnsupportedLayout" and "the script built it" in refused[0]["text"]
