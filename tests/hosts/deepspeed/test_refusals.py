"""What is not supported under another layout is refused by name; under its own it is left to DeepSpeed.

The engines are real; the feature is switched on in them by hand (synthetic: none of these runs here on CPU).
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from damaged_files import flip
from gathered import assert_same
from saves import Saves

from ds_reshard.errors import UnsupportedLayout
from ds_reshard.operations import convert

pytestmark = pytest.mark.distributed

MODEL = Model()
FEATURES = {
    "model-parallel ranks in another order": "mp_world_size",
    "mixture of experts": "has_moe_layers",
    "NVMe offload": "nvme",
    "ZenFlow": "zenflow",
    "SuperOffload": "SuperOffloadOptimizer_Stage3",
    "MiCS": "MiCS_Optimizer",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_an_unsupported_feature_is_refused_by_name(worlds: Any, saves: Saves, feature: str) -> None:
    """One error, the same on every rank, naming the feature and both layouts; the engine is unchanged."""
    folder, _ = saves(Run(2, 2), MODEL)
    told = worlds[3].run(
        "refused_jobs.load_with_feature", run=Run(3, 3), model=MODEL, folder=str(folder), switch=FEATURES[feature]
    )
    assert {error for error, _ in told} == {"UnsupportedLayout"}
    assert len({text for _, text in told}) == 1
    assert feature in told[0][1] and "dp=2" in told[0][1] and "dp=3" in told[0][1] and "To mend: " in told[0][1]


@pytest.mark.parametrize("feature", ("ZenFlow", "MiCS"))
def test_an_unsupported_feature_on_its_own_layout_is_deepspeeds(worlds: Any, saves: Saves, feature: str) -> None:
    """The layout is unchanged: DeepSpeed's own method is called, whatever it makes of it."""
    folder, _ = saves(Run(3, 2), MODEL)
    told = worlds[2].run(
        "refused_jobs.load_with_feature", run=Run(3, 2), model=MODEL, folder=str(folder), switch=FEATURES[feature]
    )
    assert {error for error, _ in told} == {"original"}
    assert ("begin anew" in told[0][1]) is (feature == "ZenFlow") and not told[1][1]


def test_moments_of_superoffload_are_in_no_file(worlds: Any, saves: Saves) -> None:
    """DeepSpeed loads masters alone: refused where moments are asked for, under an unchanged layout too."""
    folder, _ = saves(Run(3, 2), MODEL)
    given = {"model": MODEL, "folder": str(folder), "switch": FEATURES["SuperOffload"]}
    told = worlds[2].run("refused_jobs.load_with_feature", run=Run(3, 2), **given)
    assert {error for error, _ in told} == {"UnsupportedLayout"}
    assert "super_offload" in told[0][1] and "--load-masters-only" in told[0][1]
    masters = Run(3, 2, config={"ds_reshard": {"resume": {"optimizer": "masters"}}})
    assert worlds[2].run("refused_jobs.load_with_feature", run=masters, **given) == [("original", "")] * 2


@pytest.mark.parametrize("policy", ({}, {"optimizer": "masters"}, {"optimizer": "skip"}), ids=str)
def test_deepspeeds_load_under_nvme_offload_is_refused(worlds: Any, saves: Saves, policy: dict[str, str]) -> None:
    """It leaves moments, steps and small param groups as they were built, without a word."""
    folder, _ = saves(Run(3, 2), MODEL)
    run = Run(3, 2, config={"ds_reshard": {"resume": policy}})
    given = {"run": run, "model": MODEL, "folder": str(folder), "switch": "nvme"}
    told = worlds[2].run("refused_jobs.load_with_feature", **given)
    assert {error for error, _ in told} == {"UnsupportedLayout"} and told[0] == told[1]
    assert policy or "they begin anew (expected cpu, found nvme)" in told[0][1]


@pytest.mark.parametrize("target", (Run(3, 2), Run(1, 1)), ids=str)
def test_what_lies_on_nvme_is_named_and_no_damage(worlds: Any, saves: Saves, tmp_path: Path, target: Run) -> None:
    """Synthetic: what the optimizer files of DeepSpeed 0.19.8 hold of tensors above 1 MiB (`MIN_AIO_BYTES`)."""
    folder = Path(shutil.copytree(saves(Run(3, 2), MODEL)[0], tmp_path / "ckpt"))
    for path in folder.glob("*/*optim_states.pt"):
        states = torch.load(path, weights_only=False)
        held = states["optimizer_state_dict"]
        held["fp32_flat_groups"] = [torch.empty(0) for _ in held["fp32_flat_groups"]]
        for state in held["optimizer_state_dict"]["state"].values():
            state |= {kind: torch.empty(0) for kind in ("exp_avg", "exp_avg_sq")}
        torch.save(states, path)
    given = {"run": target, "model": MODEL, "folder": str(folder)}
    assert worlds[target.dp].run("load_refused", **given)[0]["error"] == "CheckpointDamaged"
    (folder / "global_step3" / "offloaded_tensors").mkdir()
    for told in worlds[target.dp].run("load_refused", **given):
        assert (told["error"], told["unchanged"]) == ("UnsupportedLayout", True), told["text"]
        assert "NVMe offload keeps it in offloaded_tensors" in told["text"]


def test_masters_of_zenflow_are_behind_the_weights(worlds: Any, saves: Saves, tmp_path: Path) -> None:
    """Only a load with ZenFlow can take them; the weights can be had. Synthetic: the saved config names it."""
    folder, saved = saves(Run(2, 2), MODEL)
    folder = Path(shutil.copytree(folder, tmp_path / "ckpt"))
    for path in folder.glob("*/mp_rank_*"):
        states = torch.load(path, weights_only=False)
        states["ds_config"]["zero_optimization"]["zenflow"] = {"topk_ratio": 0.1}
        torch.save(states, path)
    for run in (Run(3, 3), Run(2, 2)):
        for told in worlds[run.dp].run("load_refused", run=run, model=MODEL, folder=str(folder)):
            assert (told["error"], told["unchanged"]) == ("UnsupportedLayout", True) and "ZenFlow" in told["text"], told
    weights = {"load_optimizer_states": False}
    loaded = worlds[3].run("load", run=Run(3, 3), model=MODEL, folder=str(folder), arguments=weights)
    assert all(torch.equal(loaded[0]["weights"][name], held) for name, held in saved[0]["weights"].items())
    for to, given in (("universal", {}), ("safetensors", {"dtype": "float32"})):
        with pytest.raises(UnsupportedLayout, match="under ZenFlow"):
            convert(str(folder), str(tmp_path / "out"), to=to, **given)
    convert(str(folder), str(tmp_path / "out"), to="safetensors")


def test_a_pending_decoupled_save_is_committed_first(worlds: Any, saves: Saves) -> None:
    """A checkpoint engine that writes in the background finishes before its files are read."""
    folder, _ = saves(Run(2, 2), MODEL)
    told = worlds[3].run("refused_jobs.load_after_decoupled_save", run=Run(1, 3), model=MODEL, folder=str(folder))
    assert told == [["commit", "load"]] * 3


WRITTEN = [Run(0, 2, "fp32"), Run(0, 2), Run(1, 2), Run("bf16", 2), Run(2, 2), Run(3, 2)]


@pytest.mark.parametrize("run", WRITTEN, ids=str)
@pytest.mark.parametrize("unchanged", ["direct", "deepspeed"])
def test_files_of_a_writer_load_at_the_layout_that_was_saved(
    worlds: Any, tmp_path: Path, unchanged: str, run: Run
) -> None:
    """DeepSpeed's engine of "writer" cannot unpickle what it has written, under torch 2.6 and newer."""
    config: dict[str, Any] = {"checkpoint": {"writer": {"type": "python", "data_parallel": "machine"}}}
    run = replace(run, config=config | {"ds_reshard": {"reshard": {"unchanged": unchanged}}})
    told = worlds[2].run("refused_jobs.load_by_writer", run=run, model=MODEL, folder=str(tmp_path))
    saved, loaded = [one for one, _, _ in told], [one for _, one, _ in told]
    assert_same(saved, loaded)
    assert all(one["client"]["note"] == "kept" for one in loaded)


def test_a_feature_beside_a_writer_is_refused(worlds: Any, saves: Saves) -> None:
    """At the layout that was saved, too, with the key that keeps DeepSpeed from loading; without it all is loaded."""
    folder, saved = saves(Run(3, 2), MODEL)
    run = Run(3, 2, config={"checkpoint": {"writer": {"type": "python", "data_parallel": "machine"}}})
    asked = {"run": run, "model": MODEL, "folder": str(folder), "switch": "MiCS_Optimizer"}
    told = worlds[2].run("refused_jobs.load_with_feature", **asked)
    assert {error for error, _ in told} == {"UnsupportedLayout"} and len({text for _, text in told}) == 1
    line = re.search(r'remove "(\w+)" from "(\w+)": .* resume with the layout that was saved', told[0][1])
    assert line is not None, told[0][1]
    run.config[line[2]].pop(line[1])
    again = worlds[2].run("refused_jobs.load_with_feature", **{**asked, "run": run}, real=True)
    assert_same(saved, again)


def test_load_universal_without_latest_universal_is_deepspeeds_error(worlds: Any, saves: Saves) -> None:
    """`"load_universal": true` with a plain checkpoint and no tag: DeepSpeed says what is missing."""
    from worlds import WorkerFailed

    folder, _ = saves(Run(2, 2), MODEL)
    run = Run(2, 2, config={"checkpoint": {"load_universal": True}})
    with pytest.raises(WorkerFailed, match="latest_universal"):
        worlds[2].run("load", run=run, model=MODEL, folder=str(folder))


@pytest.mark.parametrize("target", [Run(1, 2), Run(2, 3)], ids=str)
def test_a_run_without_norms_takes_over_no_clipping(worlds: Any, saves: Saves, target: Run) -> None:
    """DeepSpeed says so when it has loaded the weights; the flag that the error names loads the rest."""
    folder, saved = saves(Run(1, 2), MODEL)
    run = replace(target, options={"compute_grad_norm": False}, config={"gradient_clipping": 0.0})
    for told in worlds[target.dp].run("load_refused", run=run, model=MODEL, folder=str(folder)):
        assert (told["error"], told["unchanged"]) == ("UnsupportedLayout", True), told
        assert "compute_grad_norm" in told["text"] and "--override-optim-hparams clip_grad" in told["text"]
    run = replace(run, config={**run.config, "ds_reshard": {"resume": {"hyperparameters": ["clip_grad"]}}})
    assert_same(saved, worlds[target.dp].run("load", run=run, model=MODEL, folder=str(folder)))


NONE_KEPT = {"stage3_param_persistence_threshold": 0}


@pytest.mark.parametrize(
    ("saved", "run", "quantize"),
    [
        (True, Run(3, 2), False),
        (True, Run(3, 3, options=NONE_KEPT), True),
        (True, Run(1, 2), False),
        (False, Run(3, 2, options=NONE_KEPT), True),
        (False, Run(3, 3, options=NONE_KEPT), True),
    ],
    ids=str,
)
def test_quantized_weights_go_into_no_other_layout(
    worlds: Any, saves: Saves, tmp_path: Path, saved: bool, run: Run, quantize: bool
) -> None:
    """`zero_quantized_nontrainable_weights`: DeepSpeed saves the numbers, and not the scale of each part."""
    model, folder = Model(frozen=True), tmp_path / "ckpt"
    if saved:
        run_of_saved = Run(3, 2, options=NONE_KEPT)
        worlds[2].run("refused_jobs.save_quantized", run=run_of_saved, model=model, folder=str(folder))
    else:
        folder, _ = saves(Run(3, 2), model)
    given = {"run": run, "model": model, "folder": str(folder), "quantize": quantize}
    told = worlds[run.dp].run("refused_jobs.load_quantized", **given)
    assert len(set(told)) == 1 and "module entry tower.weight" in told[0] and "quantized" in told[0]


@pytest.mark.parametrize("to", ["zero1", "zero3", "safetensors", "universal", "dcp"])
def test_quantized_weights_are_not_converted(worlds: Any, tmp_path: Path, to: str) -> None:
    given = {"run": Run(3, 2, options=NONE_KEPT), "model": Model(frozen=True), "folder": str(tmp_path / "ckpt")}
    worlds[2].run("refused_jobs.save_quantized", **given)
    dp = 1 if to in ("zero1", "zero3", "dcp") else None
    with pytest.raises(UnsupportedLayout, match=r"tower\.weight: was saved quantized"):
        convert(str(tmp_path / "ckpt"), str(tmp_path / "out"), to=to, dp=dp)


def test_a_rank_that_is_refused_does_not_leave_others_waiting(worlds: Any, saves: Saves) -> None:
    """A pending save ends in a barrier, which every rank reaches before its own settings are looked at."""
    folder, _ = saves(Run(2, 2), MODEL)
    told = worlds[2].run("refused_jobs.load_with_one_faulty_rank", run=Run(1, 2), model=MODEL, folder=str(folder))
    assert len(set(told)) == 1 and "nonsense" in told[0]


@pytest.mark.parametrize(
    ("dp", "unchanged", "expected"),
    [
        (2, "deepspeed", ["done", "done", [3, 2]]),  # which sees no damage
        (2, "direct", ["ChecksumMismatch", "EngineUnusable", [2, 2]]),
        (1, "direct", ["ChecksumMismatch", "EngineUnusable", [2, 2]]),
    ],
)
def test_what_others_put_on_the_engine_stays_there(
    worlds: Any, saves: Saves, tmp_path: Path, dp: int, unchanged: str, expected: list[Any]
) -> None:
    """A wrapper around `engine.step` sees each update: after loads of either loader, and one that has failed."""
    folder, _ = saves(Run(2, 2), MODEL)
    bad = Path(shutil.copytree(folder, tmp_path / "bad"))
    flip("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "/data/")(bad / "global_step3")
    run = Run(2, dp, config={"ds_reshard": {"reshard": {"unchanged": unchanged}}})
    asked = {"run": run, "model": MODEL, "folder": str(folder), "bad": str(bad)}
    for told in worlds[dp].run("refused_jobs.load_under_wrappers", **asked):
        assert told == expected


WRAPPERS = {1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
WRAPPERS |= {"bf16": "BF16_Optimizer"}
OWN = [(Run(stage, 2), Run(stage, ranks), "adamw", name) for stage, name in WRAPPERS.items() for ranks in (1, 2)]
OWN += [
    (Run(0, 2, dtype), Run(0, 2, dtype), kind, name)
    for dtype, kind, name in (
        ("fp32", "adamw", "AdamW"),
        ("bf16", "adamw", "FP16_UnfusedOptimizer"),
        ("bf16", "fused", "FP16_Optimizer"),
    )
]


@pytest.mark.parametrize(("source", "target", "kind", "wrapper"), OWN, ids=str)
def test_a_state_that_the_script_gives_the_optimizer_itself(
    worlds: Any, tmp_path: Path, source: Run, target: Run, kind: str, wrapper: str
) -> None:
    """Shards of other ranks, of which DeepSpeed takes what fits, and a policy that nobody applies are refused.

    What a run that has trained goes back to is no resume.
    """
    job, model = "refused_jobs.give_own_state", Model(optimizer=kind, scheduler=False)
    worlds[source.dp].run(job, run=source, model=model, folder=str(tmp_path), reshard=None)

    def told(resume: dict[str, Any], steps: int = 0) -> list[list[str]]:
        asked = {"resume": resume} if resume else {}
        said = {"run": target, "model": model, "folder": str(tmp_path), "reshard": asked, "steps": steps}
        found: list[list[str]] = worlds[target.dp].run(job, **said)
        return found

    for error, text in told({"scheduler": "override"}):
        assert error == "ConfigError" and '"scheduler": "override": cannot be applied' in text
        assert f"gives {wrapper} its state" in text
    plain = {tuple(one[:1]) for steps in (0, 1) for one in told({}, steps)}
    assert plain == ({()} if source.dp == target.dp else {("UnsupportedLayout",)})
    if source.dp == target.dp:
        assert told({"scheduler": "override"}, 1) == [[]] * target.dp
    line = re.search(r"save by engine\.(\w+), and load by engine\.(\w+)", text)  # followed, under the policy
    assert line is not None, text
    given = {"model": model, "folder": str(tmp_path / "again")}
    if kind != "fused":  # whose parameters `contents` does not name
        saved = worlds[source.dp].run("refused_jobs.by_engine", run=source, method=line[1], **given)
        asked = {"resume": {"scheduler": "override"}}
        loaded = worlds[target.dp].run("refused_jobs.by_engine", run=target, method=line[2], reshard=asked, **given)
        assert_same(saved, loaded)


@pytest.mark.parametrize("give", ["optimizer", "inside", "schedule"])
@pytest.mark.parametrize(
    "run", [Run(0, 1, "fp32"), Run(0, 1), Run(1, 1), Run(2, 1), Run(3, 1), Run("bf16", 1)], ids=str
)
def test_a_state_that_the_script_gives_before_or_after_the_load(
    worlds: Any, tmp_path: Path, run: Run, give: str
) -> None:
    """The engine's optimizer, the one inside it, and its schedule: refused under a policy that it would undo.

    A schedule takes a state after a load as the policy says, and before one that may come: it is refused at the first
    update, where none has come. A load of weights alone names the policy that it does not apply.
    """
    job, asked = "refused_jobs.give_later_state", {"run": run, "model": Model(), "folder": str(tmp_path), "give": give}
    worlds[1].run("refused_jobs.keep_state", run=run, model=Model(), folder=str(tmp_path))
    (told,) = worlds[1].run(job, resume={"scheduler": "reset"}, **asked)
    warned = told.pop("weights, warned")
    assert 'this load does not apply "scheduler": "reset"' in warned, warned
    refused = {load for load, text in told.items() if text}
    assert all(
        text.startswith('ConfigError: "scheduler": "reset": cannot be applied') for text in told.values() if text
    )
    if give == "schedule":
        assert refused == {"none, trained", "weights, trained"}
    else:
        assert refused == {"none", "all", "weights"}
    if run.stage != 3 or give == "schedule":
        (told,) = worlds[1].run(job, resume={}, **asked)
        assert set(told.values()) == {""}


@pytest.mark.parametrize("run", [Run(1, 2), Run(2, 2), Run(3, 2), Run("bf16", 2)], ids=str)
def test_a_strict_load_that_lacks_weights_changes_nothing_under_its_own_layout(
    worlds: Any, tmp_path: Path, run: Run
) -> None:
    """DeepSpeed itself stops with torch's error, when it has loaded those that are there; not strict it loads them."""
    model, folder, asked = Model(frozen=True), str(tmp_path), {"reshard": {"unchanged": "deepspeed"}}
    worlds[2].run("save", run=run, model=model, folder=folder, save_options={"exclude_frozen_parameters": True})
    run = Run(run.stage, run.dp, config={"ds_reshard": asked})
    for told in worlds[2].run("load_refused", run=run, model=model, folder=folder):
        assert told["error"] == "ModelMismatch" and told["unchanged"], told
        assert "tower.weight: is missing from the checkpoint" in told["text"]
    worlds[2].run("load", run=run, model=model, folder=folder, arguments={"load_module_strict": False})


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_other_members_of_a_stage_0_optimizer_are_refused_before_weights_change(
    worlds: Any, tmp_path: Path, dtype: str
) -> None:
    """torch counts them when the weights are in, and compares no shape: moments of one parameter went to another."""
    run = Run(0, 1, dtype, config={"ds_reshard": {"reshard": {"unchanged": "deepspeed"}}})
    rows = [("", "scale", "expected [7] (this run), found [8] (saved)"), ("first.weight", "second.weight", "exp_avg")]
    for number, (saved, loaded, text) in enumerate(rows):
        folder = str(tmp_path / str(number))
        job, asked = "refused_jobs.load_without", {"run": run, "folder": folder}
        ((told, unchanged),) = worlds[1].run(job, saved=saved, loaded=loaded, **asked)
        assert told.startswith(("ParamGroupMismatch", "ModelMismatch")) and text in told and unchanged, told
    ((told, unchanged),) = worlds[1].run(
        job, run=Run(0, 1, dtype), folder=f"{tmp_path}/same", saved="tiny", loaded="tiny"
    )
    assert told == "" and not unchanged
