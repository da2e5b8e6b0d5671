"""A grid is converted to any format, and what is written loads where no grid is known: by DeepSpeed itself, too.

Truth is a rule that gives every element of every tensor its own value (`grid_truth.py`).
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grid_cases import Folders, Grid, forget_json
from grid_models import NAMES, RULES
from grid_truth import tensors

from ds_reshard.errors import CheckpointDamaged, UnsupportedLayout
from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.model.rules import parse_rules, use_rules
from ds_reshard.operations import convert, diff, fingerprint, plan, verify

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("golden_layouts")]

PIPE, FOUR = Grid("pipeline", pp=2, dp=2), Grid("pipeline", pp=4)
HIDDEN = Grid("pipeline", pp=2, dp=2, dtype="bf16", layers="no file")
UNSAVED = Grid("pipeline", pp=2, dp=2, stage=0, dtype="bf16")
AUTOTP, UNEVEN = Grid("autotp", tp=2, dp=2), Grid("autotp", tp=3, stage=3, dtype="bf16")
FEW = Grid("autotp", tp=3, stage=2, layers="few")
CUT, UNSAID = Grid("cut", tp=2, layers="said"), Grid("cut", tp=2, dp=2, layers="unsaid")
WHOLE = Grid("cut", layers="unsaid")
MOE, FOUR_PLACES = Grid("moe", ep=2, dp=4), Grid("moe", ep=4, dp=4)
ROWS = Grid("pipeline", pp=2, tp=2, layers="divided")


def converted(source: Path, out: Path, grid: Grid, to: str, **asked: Any) -> Path:
    with use_rules(parse_rules(RULES) if grid in (UNSAID, WHOLE) else ()):
        convert(str(source), str(out), to=to, **asked)
    return out


CONVERTED = [
    *[(grid, to) for grid in (PIPE, HIDDEN, UNEVEN) for to in ("zero1", "zero3", "universal", "dcp", "accelerate")],
    *[(grid, to) for grid in (MOE, AUTOTP) for to in ("dcp", "pytorch", "universal", "zero1")],
    (FOUR, "zero2"),
    (UNSAVED, "bf16"),
    (AUTOTP, "zero2"),
    (FEW, "zero1"),
    (CUT, "universal"),
    (UNSAID, "zero3"),
]


@pytest.mark.parametrize(("grid", "to"), CONVERTED, ids=str)
def test_every_tensor_of_a_grid_is_written_whole(folders: Folders, tmp_path: Path, grid: Grid, to: str) -> None:
    """Masters and moments of all formats, and the weights of those that keep them beside masters."""
    names = {}
    if grid.kind == "pipeline":
        (tmp_path / "names.json").write_text(json.dumps(NAMES))
        names = {"names": str(tmp_path / "names.json")}
    out = converted(folders(grid), tmp_path / "out", grid, to, **names)
    told = {(one.name, one.kind): one.fingerprint for one in fingerprint(str(out)).tensors}
    expected = {(renamed(name) if names else name, kind): value for (name, kind), value in tensors(grid).items()}
    for (name, kind), value in expected.items():
        kept = (name, "weight") if kind == "fp32" and (name, kind) not in told else (name, kind)
        if kind != "weight" or (to in ("zero1", "zero2", "bf16", "universal")):
            assert told.get(kept) == str(fingerprint_of(value.contiguous())), (name, kind)
    assert {name for name, kind in told if kind not in ("weight", "fp32")} == {name for name, kind in expected}


def renamed(name: str) -> str:
    """By hand, what `NAMES` says."""
    name = name.replace("tied_modules.embed", "embed")
    return re.sub(r"^[0-9]+", lambda m: {"1": "blocks.0", "2": "blocks.1", "4": "blocks.2", "6": "norm"}[m[0]], name)


LOADED = [
    (PIPE, "zero1", Grid("plain", dp=2)),
    (FOUR, "zero3", Grid("plain", dp=2, stage=3)),
    (PIPE, "universal", Grid("plain", dp=2, stage=2)),
    (HIDDEN, "zero2", Grid("plain", dp=2, stage=2, dtype="bf16")),
    (UNSAVED, "bf16", Grid("plain", dp=2, stage="bf16opt", dtype="bf16")),
    (AUTOTP, "zero2", Grid("autotp", dp=2, stage=2)),
    (UNEVEN, "bf16", Grid("autotp", dp=2, stage="bf16opt", dtype="bf16")),
    (UNEVEN, "zero3", Grid("autotp", dp=2, stage=3, dtype="bf16")),
    (FEW, "zero1", Grid("autotp", dp=2, layers="few")),
    (CUT, "universal", Grid("cut", dp=2)),
    (UNSAID, "zero1", Grid("cut", dp=2)),
]


@pytest.mark.parametrize("hooks", [False, True], ids=["DeepSpeed", "ds_reshard"])
@pytest.mark.parametrize(("source", "to", "target"), LOADED, ids=str)
def test_what_is_written_of_a_grid_loads_where_there_is_none(
    worlds: Any, folders: Folders, tmp_path: Path, source: Grid, to: str, target: Grid, hooks: bool
) -> None:
    """Weights, masters, moments, steps, groups, scheduler and the script's own state, on every rank."""
    asked: dict[str, Any] = {} if to == "universal" else {"dp": target.dp}
    if source.kind == "pipeline":
        (tmp_path / "names.json").write_text(json.dumps(NAMES))
        asked["names"] = str(tmp_path / "names.json")
    out = converted(folders(source), tmp_path / "out", source, to, **asked)
    config = {"checkpoint": {"load_universal": True}} if to == "universal" else {}
    target = replace(target, config=config)
    for rank in worlds[target.ranks].run("grid_jobs.load", grid=target, folder=str(out), hooks=hooks):
        wrong = {
            name: count for name, count in rank["wrong"].items() if not (to == "universal" and unloaded(name, hooks))
        }
        assert wrong == {}
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)
        assert rank["scheduler"]["last_epoch"] == 1
        assert [group.get("mark") for group in rank["groups"]] == [None, 5]


def unloaded(name: str, hooks: bool) -> bool:
    """Frozen parameters and buffers, which DeepSpeed's own load of a universal checkpoint leaves as they are."""
    return not hooks and (name.endswith(("count", "fixed")) or name == "frozen")


def test_a_grid_converted_twice_is_what_one_grid_is(folders: Folders, tmp_path: Path) -> None:
    """Stages 2 and 4 of one model become files that differ in the samples that more ranks have seen."""
    (tmp_path / "names.json").write_text(json.dumps(NAMES))
    outs = [
        converted(folders(grid), tmp_path / str(grid), grid, "zero2", dp=2, names=str(tmp_path / "names.json"))
        for grid in (PIPE, FOUR)
    ]
    found = diff(*map(str, outs))
    assert all(one.state == "equal" for one in found.tensors)
    assert {one.where for one in found.values} <= {"global_samples"}


def test_a_plan_of_a_grid_says_which_files_are_read(folders: Folders) -> None:
    made = plan(str(folders(AUTOTP)), to="zero3", dp=3)
    read = {name for unit in made.units for name in unit.reads}
    assert {f"zero_pp_rank_{rank}_mp_rank_0{tp}_optim_states.pt" for rank in range(2) for tp in range(2)} <= read


def test_names_of_layers_follow_their_numbers(folders: Folders, tmp_path: Path) -> None:
    """A pattern that two match, that none matches, or whose number falls below 0, is named."""
    wrong = {**NAMES, "1\\.w(.*)": "again{1}", "9\\.(.*)": "none", "(?P<n>[12])\\.(.*)": "blocks.{n-2}.{2}"}
    (tmp_path / "names.json").write_text(json.dumps(wrong))
    with pytest.raises(Exception) as raised:
        converted(folders(PIPE), tmp_path / "out", PIPE, "zero1", names=str(tmp_path / "names.json"))
    for text in (
        "1.w: is matched by two patterns",
        "9\\.(.*): is a pattern that no name",
        "1.b: has no number there, or one below 0",
    ):
        assert text in str(raised.value)


UNIVERSAL = [
    (CUT, Grid("cut", tp=2, dp=2, layers="said")),
    (CUT, Grid("cut", tp=4, stage="bf16opt", dtype="bf16", layers="said")),
    (UNSAID, Grid("cut", tp=4, stage=2, layers="said")),
    (AUTOTP, Grid("autotp", tp=2, stage=2)),
    (UNEVEN, Grid("autotp", tp=4, dtype="bf16")),
    (PIPE, Grid("pipeline", pp=4, layers="one position")),
    (FOUR, Grid("pipeline", pp=2, dp=2, layers="one position")),
    (HIDDEN, Grid("pipeline", pp=3, stage="bf16opt", dtype="bf16", layers="one position")),
    (MOE, Grid("moe", ep=1, dp=4, stage=2)),
    (ROWS, Grid("pipeline", pp=4, layers="divided one position")),
    (ROWS, Grid("pipeline", tp=2, dp=2, layers="divided one position")),
    (Grid("cut", dp=2, layers="said"), Grid("cut", tp=2, layers="said")),
    (WHOLE, Grid("cut", tp=2, stage=2, layers="said")),
    (Grid("pipeline", pp=2, layers="divided"), Grid("pipeline", tp=2, dp=2, layers="divided one position")),
]


@pytest.mark.parametrize(
    ("source", "target", "hooks"),
    [
        *((source, target, False) for source, target in UNIVERSAL),
        *((source, target, True) for source, target in UNIVERSAL if target.tp == 1 or source in (UNSAID, WHOLE, ROWS)),
        (MOE, Grid("moe", ep=2, dp=2), True),
        (FOUR_PLACES, Grid("moe", ep=2, dp=2, stage=2), True),
        (MOE, Grid("moe", ep=4, dp=4, stage="bf16opt", dtype="bf16"), True),
    ],
    ids=str,
)
def test_a_universal_checkpoint_of_a_grid_loads_into_another(
    worlds: Any, folders: Folders, tmp_path: Path, source: Grid, target: Grid, hooks: bool
) -> None:
    """Rows, columns, uneven parts, a padded vocabulary, stages and experts are cut as DeepSpeed reads in the files."""
    out = converted(folders(source), tmp_path / "out", source, "universal")
    target = replace(target, config={"checkpoint": {"load_universal": True}})
    arguments = {"grid": target, "folder": str(out), "saved_ep": source.ep}
    for rank in worlds[target.ranks].run("grid_jobs.load", hooks=hooks, **arguments):
        assert {name for name in rank["wrong"] if not unloaded(name, hooks)} == set()
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)


def test_a_universal_checkpoint_of_a_grid_keeps_loss_scale_and_clipping(folders: Folders, tmp_path: Path) -> None:
    """In files of ranks and in another universal folder that are made of it."""
    source = converted(folders(AUTOTP), tmp_path / "source", AUTOTP, "universal")
    for to, name in (("universal", "optimizer_state.pt"), ("zero1", "zero_pp_rank_0_mp_rank_00_optim_states.pt")):
        (path,) = converted(source, tmp_path / to, AUTOTP, to).rglob(name)
        saved = torch.load(path, weights_only=False)
        kept = saved.get("optimizer_state_dict", saved) if to == "zero1" else saved
        assert kept["clip_grad"] == 0.0 and kept["loss_scaler"].cur_scale == 1.0


def test_experts_of_a_universal_checkpoint_are_no_other_ranks(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """DeepSpeed would give each expert-parallel rank the first ones; it stops."""
    out = converted(folders(MOE), tmp_path / "out", MOE, "universal")
    target = Grid("moe", ep=2, dp=2, config={"checkpoint": {"load_universal": True}})
    with pytest.raises(Exception, match="ep_num_experts"):
        worlds[2].run("grid_jobs.load", grid=target, folder=str(out), hooks=False)


ONE_STAGE = [
    (PIPE, "zero1", Grid("pipeline", dp=2, layers="one position"), False),
    (FOUR, "zero1", Grid("pipeline", dp=3, layers="one position"), False),
    (HIDDEN, "zero1", Grid("pipeline", dp=2, dtype="bf16", layers="one position"), True),
    (UNSAVED, "bf16", Grid("pipeline", dp=2, stage="bf16opt", dtype="bf16", layers="one position"), False),
    (PIPE, "zero1", Grid("pipeline", pp=2, layers="one position"), True),
    (FOUR, "zero1", Grid("pipeline", pp=3, layers="one position"), True),
    (Grid("pipeline", pp=2, layers="odd ones"), "zero1", Grid("pipeline", dp=2, layers="odd ones"), False),
]


@pytest.mark.parametrize(("source", "to", "target", "hooks"), ONE_STAGE, ids=str)
def test_stages_are_written_as_one(
    worlds: Any, folders: Folders, tmp_path: Path, source: Grid, to: str, target: Grid, hooks: bool
) -> None:
    """Files of layers, frozen parameters and buffers in them: DeepSpeed itself loads them into one stage."""
    out = converted(folders(source), tmp_path / "out", source, to, dp=target.dp)
    for rank in worlds[target.ranks].run("grid_jobs.load", grid=target, folder=str(out), hooks=hooks):
        assert rank["wrong"] == {}
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)
        assert rank["scheduler"]["last_epoch"] == 1
    assert not any(one.state != "equal" for one in diff(str(folders(source)), str(out)).tensors)


def test_layers_that_are_in_the_model_file_are_loaded(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """As they are in what is made of a universal checkpoint; DeepSpeed stops at them: it looks for files of layers."""
    whole = converted(folders(PIPE), tmp_path / "whole", PIPE, "universal")
    out, target = converted(whole, tmp_path / "out", PIPE, "zero1", dp=2), Grid("pipeline", dp=2, layers="one position")
    for rank in worlds[2].run("grid_jobs.load", grid=target, folder=str(out)):
        assert (rank["wrong"], rank["global_steps"]) == ({}, 1)


EXPERTS = [
    ("zero1", Grid("moe", ep=1, dp=2), False),
    ("zero2", Grid("moe", ep=1, dp=4, stage=2), False),
    ("bf16", Grid("moe", ep=1, dp=2, stage="bf16opt", dtype="bf16"), False),
    ("zero1", Grid("moe", ep=1, dp=2, stage=2), True),
    ("zero2", Grid("moe", ep=4, dp=4), True),
    ("bf16", Grid("moe", ep=2, dp=4, dtype="bf16"), True),
]


@pytest.mark.parametrize(("to", "target", "hooks"), EXPERTS, ids=str)
def test_experts_are_written_for_one_expert_parallel_rank(
    worlds: Any, folders: Folders, tmp_path: Path, to: str, target: Grid, hooks: bool
) -> None:
    """DeepSpeed itself loads them, and the hooks load them at any expert-parallel size."""
    source = Grid("moe", ep=2, dp=4, stage="bf16opt", dtype="bf16") if to == "bf16" else MOE
    asked = {} if hooks else {"dp": target.dp}
    out = converted(folders(source), tmp_path / "out", source, to, **asked)
    arguments = {"grid": target, "folder": str(out), "saved_ep": source.ep, "hooks": hooks}
    for rank in worlds[target.ranks].run("grid_jobs.load", **arguments):
        assert rank["wrong"] == {}
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)
        assert [group["name"] for group in rank["groups"]] == ["all", f"ep_size_{target.ep}"]
    assert not any(one.state != "equal" for one in diff(str(folders(source)), str(out)).tensors)


def test_experts_of_a_folder_that_does_not_say_how_many_they_are(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """As what plain PyTorch has saved; DeepSpeed wants their number for each layer."""
    between = converted(folders(MOE), tmp_path / "between", MOE, "pytorch")
    out = converted(between, tmp_path / "out", MOE, "zero2", dp=2, ep=1)
    assert not verify(str(out), deep=True).faults
    arguments = {"grid": Grid("moe", dp=2, stage=2), "folder": str(out), "saved_ep": 2, "hooks": False}
    assert [rank["wrong"] for rank in worlds[2].run("grid_jobs.load", **arguments)] == [{}, {}]


def test_experts_have_no_stage_3(folders: Folders, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLayout, match="does not know ZeRO stage 3"):
        convert(str(folders(MOE)), str(tmp_path / "out"), to="zero3")


@pytest.mark.parametrize("known", [True, False], ids=["JSON", "path"])
@pytest.mark.parametrize("grid", [AUTOTP, PIPE], ids=str)
def test_parameters_that_were_dealt_out_in_turn_are_refused(
    worlds: Any, tmp_path: Path, grid: Grid, known: bool
) -> None:
    """Under round_robin_gradients, whose order no plain file has; also where the JSON's path alone was saved."""
    grid = replace(grid, options={"round_robin_gradients": True})
    worlds[4].run("grid_jobs.save", grid=grid, folder=str(tmp_path))
    if not known:
        forget_json(tmp_path / "t")
    with pytest.raises(UnsupportedLayout, match="round_robin_gradients on a grid"):
        convert(str(tmp_path), str(tmp_path / "out"), to="zero1")


@pytest.mark.parametrize("grid", [AUTOTP, PIPE], ids=str)
def test_what_was_not_dealt_out_is_written_without_the_json(
    worlds: Any, folders: Folders, tmp_path: Path, grid: Grid
) -> None:
    forget_json(shutil.copytree(folders(grid), tmp_path / "in") / "t")
    convert(str(tmp_path / "in"), str(tmp_path / "out"), to="zero1")
    target = Grid(grid.kind, dp=2, layers="one position" if grid is PIPE else "usual")
    for rank in worlds[2].run("grid_jobs.load", grid=target, folder=str(tmp_path / "out"), hooks=False):
        assert rank["wrong"] == {}


@pytest.mark.parametrize(("dp", "stage"), [(2, 1), (2, 3)])
def test_momentum_of_muon_is_written_where_it_is_cut_as_its_parameters(
    folders: Folders, tmp_path: Path, dp: int, stage: int
) -> None:
    """It is a fixed part of the gradient, and that of the master. Several ranks of stage 1 would want it otherwise."""
    folder = str(folders(Grid("muon", dp=dp, stage=stage)))
    convert(folder, str(tmp_path / "out"), to="zero1", dp=1)
    (path,) = (tmp_path / "out").glob("*/*_optim_states.pt")
    saved = torch.load(path, weights_only=False)["optimizer_state_dict"]
    momentum = saved["base_optimizer_state"]["state"][0]["momentum_buffer"]
    master = saved["single_partition_of_fp32_groups"][0].detach()
    assert torch.equal(momentum[: len(master)], torch.zeros_like(master).lerp(master / 4, 1 - 0.95))
    assert not any(one.state != "equal" for one in diff(folder, str(tmp_path / "out")).tensors)
    with pytest.raises(UnsupportedLayout, match="was trained with Muon, whose momentum"):
        convert(folder, str(tmp_path / "other"), to="zero2", dp=2)


def test_momentum_of_muon_that_is_as_long_as_a_partition_is_not_one(folders: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(folders(Grid("muon", dp=2)), tmp_path / "saved")
    for path in folder.glob("t/*_optim_states.pt"):
        content = torch.load(path, weights_only=False)
        said = content["optimizer_state_dict"]
        state = said["base_optimizer_state"]["state"][0]
        state["momentum_buffer"] = state["momentum_buffer"][: len(said["single_partition_of_fp32_groups"][0])].clone()
        torch.save(content, path)
    with pytest.raises(CheckpointDamaged, match="does not hold every parameter of the partition whole"):
        convert(str(folder), str(tmp_path / "out"), to="zero1", dp=1)


def test_a_second_name_of_which_stage_3_has_no_value_is_left_out(folders: Folders, tmp_path: Path) -> None:
    """AutoEP gives each router two; all else is what files of stage 1 make of the same run."""
    saved = {stage: str(folders(Grid("autoep", ep=2, dp=2, stage=stage))) for stage in (1, 3)}
    done = {stage: convert(folder, str(tmp_path / str(stage)), to="dcp") for stage, folder in saved.items()}
    second = {f"model.layers.{layer}.mlp.gate.gate.weight" for layer in range(2)}
    assert {name for name in second for note in done[3].notes if f"left out: {name}: ZeRO stage 3" in note} == second
    found = {
        one.name: one.state for one in diff(str(tmp_path / "1"), str(tmp_path / "3")).tensors if one.state != "equal"
    }
    assert found.keys() == second and "other shape" not in found.values()
