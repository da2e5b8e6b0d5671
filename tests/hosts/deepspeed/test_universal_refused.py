"""Broken universal checkpoints, and what DeepSpeed's converter lost: one named error, before anything changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from damaged_files import cut, duplicate, flip, remove
from gathered import assert_same
from saves import UNIVERSAL, Universals
from test_bad_input import evil

pytestmark = pytest.mark.distributed

MODEL = Model(groups=2, frozen=True)
FIRST = "zero/first.weight"


def gone(*folders: str) -> Callable[[Path], None]:
    return lambda folder: [shutil.rmtree(folder / name) for name in folders] and None


def each(name: str) -> Callable[[Path], None]:
    """Remove this file of every parameter."""
    return lambda folder: [path.unlink() for path in folder.glob(f"zero/*/{name}")] and None


def rewrite(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        torch.save(change(torch.load(folder / name, weights_only=False)), folder / name)

    return run


def both(*damages: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: [damage(folder) for damage in damages] and None


def weight_for_master(folder: Path) -> None:
    """What ds_to_universal 0.19.8 makes of a parameter whose optimizer shard is missing: its weight, and no states."""
    module = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    shutil.rmtree(folder / FIRST)
    (folder / FIRST).mkdir()
    torch.save({"param": module["first.weight"].float()}, folder / FIRST / "fp32.pt")


def double(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "param": content["param"].double()}


STRUCTURAL = {
    "parameter without a folder": (Run(1, 2), gone(FIRST), "CheckpointDamaged", ["first.weight was trained"]),
    "several faults at once": (
        Run(1, 2),
        both(gone("zero/scale"), remove(f"{FIRST}/fp32.pt"), remove("zero/optimizer_state.pt")),
        "CheckpointNotFound",
        ["scale was trained", "optimizer_state.pt"],
    ),
    "two parameters' files": (
        Run(1, 2),
        both(gone("zero/scale"), remove(f"{FIRST}/fp32.pt")),
        "CheckpointDamaged",
        ["scale was trained", "first.weight has no master"],
    ),
    "state missing": (Run(1, 2), remove(f"{FIRST}/exp_avg_sq.pt"), "CheckpointDamaged", ["exp_avg_sq of parameter"]),
    "state missing everywhere at stage 3": (Run(3, 2), each("exp_avg_sq.pt"), "CheckpointDamaged", ["exp_avg_sq of"]),
    "step missing": (Run(1, 2), remove(f"{FIRST}/step.pt"), "CheckpointDamaged", ["step of parameter first.weight"]),
    "steps missing": (Run(1, 2), each("step.pt"), "UnsupportedLayout", ["says no step of"]),
    "step of another save": (
        Run(1, 2),
        rewrite(f"{FIRST}/step.pt", lambda step: step + 1),
        "CheckpointDamaged",
        ["first.weight/step.pt", "another step than embed.weight", "float32 3", "float32 4"],
    ),
    "truncated": (Run(1, 2), cut(f"{FIRST}/exp_avg.pt", 0.5), "CheckpointDamaged", [f"{FIRST}/exp_avg.pt"]),
    "truncated at stage 3": (Run(3, 2), cut(f"{FIRST}/exp_avg.pt", 1), "CheckpointDamaged", [f"{FIRST}/exp_avg.pt"]),
    "empty": (Run(1, 2), cut(f"{FIRST}/fp32.pt", 0), "CheckpointDamaged", ["is empty"]),
    "truncated common state": (Run(3, 2), cut("zero/optimizer_state.pt", 0.5), "CheckpointDamaged", ["_state.pt"]),
    "common state of another model": (
        Run(1, 2),
        rewrite("zero/optimizer_state.pt", lambda c: {**c, "param_groups": c["param_groups"][:1]}),
        "CheckpointDamaged",
        ["param_shapes differ"],
    ),
    "flipped bit in a pickle": (Run(1, 2), flip(f"{FIRST}/fp32.pt", "data.pkl"), "ChecksumMismatch", ["fp32.pt"]),
    "one state copied over another": (
        Run(1, 2),
        duplicate(f"{FIRST}/exp_avg.pt", f"{FIRST}/exp_avg_sq.pt"),
        "CheckpointDamaged",
        ["under another name"],
    ),
    "another parameter's state": (
        Run(3, 2),
        duplicate("zero/tiny/exp_avg.pt", f"{FIRST}/exp_avg.pt"),
        "CheckpointDamaged",
        ["another shape", "[11, 7]", "[3]"],
    ),
    "another type": (Run(1, 2), rewrite(f"{FIRST}/exp_avg.pt", double), "CheckpointDamaged", ["type", "float64"]),
    "pickle that calls os.system": (Run(1, 2), evil(f"{FIRST}/fp32.pt"), "UnsafePickle", ["system"]),
    "weight in the master's place": (
        Run(1, 2),
        weight_for_master,
        "CheckpointDamaged",
        ["is not the master", "shards"],
    ),
    "model file of a rank missing": (
        Run(3, 2),
        remove("zero_pp_rank_1_mp_rank_00_model_states.pt"),
        "CheckpointDamaged",
        ["ranks 1 are missing"],
    ),
    "model file missing": (Run(1, 2), remove("mp_rank_00_model_states.pt"), "CheckpointNotFound", ["no DeepSpeed"]),
}


def broken(universals: Universals, run: Run, damage: Callable[[Path], None], into: Path) -> Path:
    folder, _ = universals(run, MODEL)
    shutil.copytree(folder, into)
    damage(into / "universal")
    return into


def refused(worlds: Any, target: Run, folder: Path, model: Model = MODEL, **more: Any) -> dict[str, Any]:
    """What every rank raised, which is the same and has changed nothing."""
    said = worlds[target.dp].run("load_refused", run=target, model=model, folder=str(folder), **more)
    assert len({rank["text"] for rank in said}) == 1, "ranks disagree"
    assert all(rank["unchanged"] for rank in said), said[0]["text"]
    assert not any(rank["step"] == "EngineUnusable" for rank in said)
    assert "To mend: " in said[0]["text"]
    first: dict[str, Any] = said[0]
    return first


@pytest.mark.acts
@pytest.mark.parametrize("case", STRUCTURAL)
def test_structural_faults_leave_the_engine_unchanged(
    worlds: Any, universals: Universals, tmp_path: Path, case: str
) -> None:
    """Found before a byte moves, all at once, by a run at the saved stage or at another."""
    run, damage, error, texts = STRUCTURAL[case]
    folder = broken(universals, run, damage, tmp_path / "broken")
    target = Run(1, 3) if run.stage == 3 else Run(3, 3, config=UNIVERSAL)
    said = refused(worlds, target, folder)
    assert said["error"] == error, said["text"]
    assert all(text in said["text"] for text in texts), said["text"]
    assert not Path("evil").exists(), "the pickle was executed"


LOST = {
    "amsgrad, stage 1": (Run(1, 2), Model(optimizer="amsgrad"), "UnsupportedLayout", "max_exp_avg_sq"),
    "amsgrad, stage 3": (Run(3, 2), Model(optimizer="amsgrad"), "CheckpointDamaged", "had max_exp_avg_sq of"),
    "NAdam": (Run(2, 1), Model(optimizer="nadam"), "UnsupportedLayout", "NAdam may keep others"),
    "a class of the script": (Run(1, 1), Model(optimizer="odd_per_rank"), "UnsupportedLayout", "Odd may keep others"),
    "a class of the script, stage 3": (Run(3, 2), Model(optimizer="odd_per_rank"), "CheckpointDamaged", "had rms of"),
    "round robin": (
        Run(2, 2, options={"round_robin_gradients": True}),
        Model(groups=2),
        "CheckpointDamaged",
        "ds_to_universal mixes up",
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_what_the_converter_lost_is_refused_by_name(worlds: Any, universals: Universals, case: str) -> None:
    """Folders that DeepSpeed's converter made without a word; their weights load all the same."""
    run, model, error, text = LOST[case]
    folder, saved = universals(run, model)
    said = refused(worlds, Run(1, 3), folder, model)
    assert (said["error"], text in said["text"]) == (error, True), said["text"]
    loaded = worlds[3].run(
        "load", run=Run(1, 3), model=model, folder=str(folder), arguments={"load_optimizer_states": False}
    )
    assert all(torch.equal(loaded[0]["weights"][name], value) for name, value in saved[0]["weights"].items())


def test_without_the_saved_json_nothing_tells_the_order(worlds: Any, universals: Universals, tmp_path: Path) -> None:
    """DeepSpeed saves the path of its JSON where it was given one (the model file is edited so: synthetic)."""
    folder, _ = universals(Run(2, 2, "fp32"), Model(groups=2))
    shutil.copytree(folder, tmp_path / "copy")
    forget = rewrite("mp_rank_00_model_states.pt", lambda content: {**content, "ds_config": "ds_config.json"})
    forget(tmp_path / "copy" / "universal")
    said = refused(worlds, Run(0, 3, "fp32"), tmp_path / "copy", Model(groups=2))
    assert said["error"] == "CheckpointDamaged" and "has no DeepSpeed JSON in its entry 'ds_config'" in said["text"]
    assert "load the ZeRO checkpoint that it was made from" in said["text"]


def test_a_run_that_had_made_no_step_did_not_survive_the_conversion(worlds: Any, tmp_path: Path) -> None:
    """Its masters are there no more: the converter took the weights for them."""
    worlds[2].run("save", run=Run(1, 2), model=MODEL, folder=str(tmp_path), steps=0, tag="t")
    worlds[1].run("unowned_jobs.universal", folder=str(tmp_path), tag="t")
    said = refused(worlds, Run(2, 3, config=UNIVERSAL), tmp_path)
    assert said["error"] == "CheckpointDamaged" and "before the first step" in said["text"]


@pytest.mark.parametrize("name", [f"{FIRST}/fp32.pt", f"{FIRST}/exp_avg.pt"])
@pytest.mark.parametrize("run", (Run(1, 2), Run(3, 2)), ids=str)
def test_a_flipped_byte_makes_the_engine_refuse_work(
    worlds: Any, universals: Universals, tmp_path: Path, run: Run, name: str
) -> None:
    """Noticed whichever ranks read the file; no step and no save until a load succeeds."""
    bad = broken(universals, run, flip(name, "data/0"), tmp_path / "broken")
    good, saved = universals(run, MODEL)
    said = worlds[3].run("load_bad_then_good", run=Run(3, 3), model=MODEL, bad=str(bad), good=str(good))
    assert {rank["error"] for rank in said} == {"ChecksumMismatch"} and name in said[0]["text"]
    assert len({rank["text"] for rank in said}) == 1
    assert {(rank["step"], rank["save"]) for rank in said} == {("EngineUnusable", "EngineUnusable")}
    assert_same(saved, [rank["after"] for rank in said])
    assert {rank["step_after"] for rank in said} == {"done"}


def test_masters_of_another_run_are_found_by_the_weights(worlds: Any, universals: Universals, tmp_path: Path) -> None:
    """Below stage 3 the model file holds weights, and every master must round to its own."""
    other, _ = universals(Run(1, 2), Model(groups=2, frozen=True, seed=8))
    folder, _ = universals(Run(1, 2), MODEL)
    shutil.copytree(folder, tmp_path / "mixed")
    shutil.copy(other / "universal" / FIRST / "fp32.pt", tmp_path / "mixed" / "universal" / FIRST)
    said = worlds[3].run("load_refused", run=Run(2, 3), model=MODEL, folder=str(tmp_path / "mixed"))
    assert {rank["error"] for rank in said} == {"CheckpointDamaged"} and "do not belong together" in said[0]["text"]


def test_another_model_is_listed_whole(worlds: Any, universals: Universals) -> None:
    folder, _ = universals(Run(3, 2), MODEL)
    said = refused(worlds, Run(1, 3), folder, Model(groups=2, tied=True, extra=True))
    assert said["error"] == "ModelMismatch"
    assert all(text in said["text"] for text in ("new.weight: is missing", "tower.weight: is in the checkpoint"))


@pytest.mark.parametrize("fault", ("another folder", "crash", "unreadable"))
def test_a_fault_on_one_rank_is_every_ranks_fault(worlds: Any, universals: Universals, fault: str) -> None:
    folder, _ = universals(Run(1, 2), MODEL)
    said = worlds[3].run("load_refused", run=Run(3, 3), model=MODEL, folder=str(folder), fault=fault)
    expected = {"unreadable": "ReadFailed", "another folder": "CheckpointDamaged", "crash": "InternalError"}[fault]
    assert {rank["error"] for rank in said} == {expected} and len({rank["text"] for rank in said}) == 1
    assert all(rank["unchanged"] for rank in said) is (fault != "unreadable")


def test_with_an_unsupported_feature_it_is_deepspeeds_where_that_was_asked_for(
    worlds: Any, universals: Universals
) -> None:
    """Tensor parallelism, switched on by hand (synthetic): DeepSpeed's own load, or a refusal that names it."""
    folder, _ = universals(Run(1, 2), MODEL)
    for config, error, text in (({}, "UnsupportedLayout", "load_universal"), (UNIVERSAL, "original", "")):
        said = worlds[2].run(
            "refused_jobs.load_with_feature",
            run=Run(1, 2, config=config),
            model=MODEL,
            folder=str(folder),
            switch="mp_world_size",
        )
        assert {name for name, _ in said} == {error} and text in said[0][1]
