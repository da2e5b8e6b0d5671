"""What is wrong with the files of a grid is found before a byte moves: all of it, the same on every rank, by name."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_files import Damage, changed, duplicate, exchanged, remove
from grid_cases import Folders, Grid

from ds_reshard.errors import ReshardError
from ds_reshard.operations import convert, inspect, verify

sys.path.insert(0, str(Path(__file__).parents[2] / "hostile"))
import payloads

pytestmark = pytest.mark.distributed

PIPE = Grid("pipeline", pp=2)
PLAIN = Grid("pipeline", pp=2, stage=0)
ALIKE = Grid("pipeline", pp=2, stage=0, layers="no ties")
SHARDED = Grid("pipeline", pp=2, tp=2, layers="divided")
TP = Grid("autotp", tp=2)
MOE, PLAIN_MOE = Grid("moe", ep=2, dp=2), Grid("moe", ep=2, dp=2, stage=0)
AUTOEP, AUTOEP3 = Grid("autoep", ep=2, dp=2), Grid("autoep", ep=2, dp=2, stage=3)
LAYERS = "ds_autoep_layers"
HEAD = "mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_0_mp_rank_01_optim_states.pt"
MODEL = "mp_rank_01_model_states.pt"
TIED, POSITION = "tied_modules.embed.weight", "tied_modules.embed.position"


def swapped(one: str, other: str) -> Damage:
    """The model and optimizer files of two ranks of the grid change places, with the names in them."""

    def run(folder: Path) -> None:
        named = [path for path in folder.iterdir() if one in path.name or other in path.name]
        contents = {path.name: torch.load(path, weights_only=False) for path in named}
        for name, content in contents.items():
            torch.save(content, folder / name.replace(*((one, other) if one in name else (other, one))))

    return run


def of_stage(name: str, kind: str, value: float, rank: str = "mp_rank_01") -> Damage:
    """The first element of a parameter of the second stage's optimizer takes another value."""

    def run(folder: Path) -> None:
        groups = torch.load(folder / f"{rank}_model_states.pt", weights_only=False)["param_shapes"]
        (number,) = (g for g, group in enumerate(groups) if name in group)
        before = list(groups[number])[: list(groups[number]).index(name)]
        at = sum(groups[number][one].numel() for one in before)

        def change(content: dict[str, Any]) -> None:
            said = content["optimizer_state_dict"]
            flat = said["single_partition_of_fp32_groups"][number].detach()
            (flat if kind == "fp32" else said["base_optimizer_state"]["state"][number][kind])[at] = value

        changed(f"zero_pp_rank_0_{rank}_optim_states.pt", change)(folder)

    return run


def all_of(*damages: Damage) -> Damage:
    """One damage after another."""

    def run(folder: Path) -> None:
        for damage in damages:
            damage(folder)

    return run


def reshape(content: dict[str, Any]) -> None:
    for group in content["param_shapes"]:
        if TIED in group:
            group[TIED] = torch.Size((3, 11))


def of_first_stage(content: dict[str, Any]) -> None:
    content["param_shapes"][0] = {"1.w": torch.Size((5, 7)), **content["param_shapes"][0]}


def placed(experts: list[list[int]]) -> Callable[[dict[str, Any]], None]:
    """Each rank of AutoEP is said to have these."""

    def change(content: dict[str, Any]) -> None:
        for layer in content["ds_autoep_layers"]:
            for rank, own in zip(layer["expert_placement"]["ranks"], experts, strict=True):
                rank["experts"] = own

    return change


def of_ranks(ranks: list[int]) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["ds_zero_partition_groups"][1]["partition_ranks"] = ranks

    return change


def decayed(content: dict[str, Any]) -> None:
    content["optimizer"]["param_groups"][1]["weight_decay"] = 0.75


def copied_otherwise(content: dict[str, Any]) -> None:
    """The last parameter of one axis, of which each tensor-parallel rank has a copy."""
    *_, last = (state["exp_avg"] for state in content["optimizer"]["state"].values() if state["exp_avg"].dim() == 1)
    last.add_(1.0)


def stepped(content: dict[str, Any]) -> None:
    for state in content["optimizer"]["state"].values():
        state["step"] += 1


REFUSED = {
    "AutoEP at stage 0": (
        AUTOEP,
        changed(HEAD, lambda content: content.update(param_shapes=None)),
        "UnsupportedLayout",
        "has AutoEP experts together with tensor or pipeline parallelism, at ZeRO stage 0",
    ),
    "an expert on two ranks, and each on one": (
        AUTOEP,
        changed(HEAD, placed([[0, 1, 2], [1, 2, 3]])),
        "CheckpointDamaged",
        "has model.layers.0.mlp.experts.w1 in another shape than its experts (expected [3, 3, 4], found [2, 3, 4]",
    ),
    "an expert is placed twice": (
        AUTOEP,
        changed(HEAD, placed([[0, 1], [1, 2]])),
        "CheckpointDamaged",
        "has an expert placement without some experts (expected each of 4, found 0: [0, 1]; 1: [1, 2]",
    ),
    "an expert twice on one rank": (
        AUTOEP,
        changed(HEAD, placed([[0, 1], [2, 3, 3]])),
        "CheckpointDamaged",
        "places experts that do not exist, or twice on one rank",
    ),
    "a placement of another version": (
        AUTOEP,
        changed(HEAD, lambda content: [one["expert_placement"].update(version=2) for one in content[LAYERS]]),
        "UnsupportedLayout",
        "has an expert placement of an unknown version (expected version 1, found 2",
    ),
    "an expert of AutoEP is missing": (
        AUTOEP,
        remove("layer_1_expert_2_mp_rank_00_model_states.pt"),
        "CheckpointDamaged",
        "files of experts are missing: layer 1 expert 2",
    ),
    "one expert of AutoEP over another": (
        AUTOEP,
        duplicate("layer_0_expert_1_mp_rank_00_model_states.pt", "layer_0_expert_3_mp_rank_00_model_states.pt"),
        "CheckpointDamaged",
        "layer_0_expert_3_mp_rank_00_model_states.pt",
    ),
    "experts that other ranks share": (
        AUTOEP3,
        changed("zero_pp_rank_1_mp_rank_00_optim_states.pt", of_ranks([0])),
        "CheckpointDamaged",
        "the experts of flat buffer 1 are shared by other ranks than their expert-parallel group",
    ),
    "a column is missing": (PIPE, remove(MODEL), "CheckpointDamaged", "model_states files of mp_rank_01"),
    "a shard of a column is missing": (PIPE, remove(OPTIM), "CheckpointDamaged", "optim_states files of mp_rank_01"),
    "a shard of a row is missing": (TP, remove(OPTIM), "CheckpointDamaged", "optim_states files of mp_rank_01"),
    "two layers are missing": (
        PIPE,
        remove("layer_02-model_00-model_states.pt", "layer_04-model_00-model_states.pt"),
        "CheckpointDamaged",
        "files of layers are missing: layer_02-model_00, layer_04-model_00",
    ),
    "a column too many": (
        PIPE,
        duplicate(MODEL, "mp_rank_02_model_states.pt"),
        "CheckpointDamaged",
        "files of another grid (expected mp_rank_00 to mp_rank_01",
    ),
    "a stage of another step": (
        PIPE,
        changed(MODEL, lambda content: content.update(global_steps=9)),
        "CheckpointDamaged",
        "global_steps differs",
    ),
    "a row of another step": (
        TP,
        changed(MODEL, lambda content: content.update(global_steps=9)),
        "CheckpointDamaged",
        "global_steps differs",
    ),
    "ranks are numbered otherwise": (
        PIPE,
        changed(MODEL, of_first_stage),
        "UnsupportedLayout",
        "numbers its ranks differently",
    ),
    "a tied copy of another shape": (PIPE, changed(MODEL, reshape), "CheckpointDamaged", "in another shape"),
    "a tied master with another value": (
        PIPE,
        of_stage(TIED, "fp32", 3.0),
        "CheckpointDamaged",
        f"tied parameter {TIED}[fp32]: is tied across pipeline stages in this run, but saved copy 2 differs",
    ),
    "a tied moment with another value": (
        PIPE,
        of_stage(TIED, "exp_avg", 3.0),
        "CheckpointDamaged",
        f"tied parameter {TIED}[exp_avg]",
    ),
    "what is not tied was trained twice": (
        PIPE,
        of_stage(POSITION, "exp_avg", 3.0),
        "UnsupportedLayout",
        f"parameter {POSITION}[exp_avg]: is not tied in this run, but several pipeline stages trained their own copy",
    ),
    "what is not tied was trained twice, with equal moments": (
        PIPE,
        all_of(
            of_stage(POSITION, "exp_avg", 3.0, "mp_rank_00"),
            of_stage(POSITION, "exp_avg", 3.0),
            of_stage(POSITION, "fp32", 3.0),
        ),
        "UnsupportedLayout",
        f"parameter {POSITION}[fp32]: is not tied in this run, but several pipeline stages trained their own copy",
    ),
    "a copy of another tensor-parallel rank": (
        SHARDED,
        changed("layer_04-model_01-model_states.pt", lambda content: content["b"].add_(1.0)),
        "CheckpointDamaged",
        "tensor 4.b[weight]: is not divided, and tensor-parallel rank 1 has other values than rank 0",
    ),
    "a copy of another rank, of what is not tied": (
        SHARDED,
        of_stage(POSITION, "fp32", 3.0, "mp_rank_03"),
        "CheckpointDamaged",
        f"tensor {POSITION}[fp32]: is not divided, and tensor-parallel rank 1 has other values than rank 0",
    ),
    "a shard of a tied master with another value": (
        SHARDED,
        of_stage(TIED, "fp32", 3.0, "mp_rank_03"),
        "CheckpointDamaged",
        f"tied parameter {TIED}[fp32]: is tied across pipeline stages in this run, but saved copy 2 differs",
    ),
    "ranks are numbered by tensor-parallel rank first": (
        SHARDED,
        swapped("mp_rank_01", "mp_rank_02"),
        "UnsupportedLayout",
        "numbers its ranks differently",
    ),
    "what is not tied was trained twice at stage 0": (
        PLAIN,
        changed(MODEL, lambda content: content["optimizer"]["state"][3]["exp_avg"].add_(1.0)),
        "UnsupportedLayout",
        f"parameter {POSITION}[exp_avg]: is not tied in this run, but several pipeline stages trained their own copy",
    ),
    "a state of stage 0 is missing": (
        ALIKE,
        changed(MODEL, lambda content: content["optimizer"]["state"].pop(0) and None),
        "ParamGroupMismatch",
        "beside others with states (expected states of all trained parameters, found none of some)",
    ),
    "stages of stage 0 in one another's place": (
        ALIKE,
        swapped("mp_rank_00", "mp_rank_01"),
        "UnsupportedLayout",
        "one for each stage of the pipeline (expected the layers of stage 0, as saved, found others)",
    ),
    "files of stages of stage 0 in one another's place": (
        ALIKE,
        exchanged(HEAD, MODEL),
        "CheckpointDamaged",
        "was written under another name: a shard was copied or swapped",
    ),
    "an expert is missing": (
        MOE,
        remove("layer_1_expert_2_mp_rank_00_model_states.pt"),
        "CheckpointDamaged",
        "files of experts are missing: layer 1 expert 2",
    ),
    "an optimizer of another expert-parallel rank at stage 0": (
        PLAIN_MOE,
        changed("expp_rank_1_mp_rank_00_optim_states.pt", decayed),
        "CheckpointDamaged",
        "keeps other states, steps or param groups than the first expert-parallel rank",
    ),
    "the optimizer of the first expert-parallel rank at stage 0 is missing": (
        PLAIN_MOE,
        remove("expp_rank_0_mp_rank_00_optim_states.pt"),
        "CheckpointDamaged",
        "optimizer files of expert-parallel ranks are missing",
    ),
    "the optimizer of the last expert-parallel rank at stage 0 is missing": (
        PLAIN_MOE,
        remove("expp_rank_1_mp_rank_00_optim_states.pt"),
        "UnsupportedLayout",
        "one for each expert-parallel rank (expected ep=1, as saved, found ep=[2])",
    ),
    "the optimizers of two expert-parallel ranks at stage 0 changed places": (
        PLAIN_MOE,
        exchanged("expp_rank_0_mp_rank_00_optim_states.pt", "expp_rank_1_mp_rank_00_optim_states.pt"),
        "CheckpointDamaged",
        "was written under another name: a shard was copied or swapped",
    ),
    "two expert-parallel sizes at stage 0": (
        replace(PLAIN_MOE, ep=1, layers="two sizes"),
        lambda folder: None,
        "UnsupportedLayout",
        "one for each expert-parallel rank (expected experts of one size, as saved, found ep=[1, 2])",
    ),
    "one expert over another": (
        MOE,
        lambda folder: torch.save(
            torch.load(folder / "layer_0_expert_1_mp_rank_00_model_states.pt"),
            folder / "layer_0_expert_3_mp_rank_00_model_states.pt",
        ),
        "CheckpointDamaged",
        "does not hold this expert",
    ),
}
TARGETS = {
    "pipeline": Grid("pipeline", dp=2),
    "autotp": Grid("autotp", tp=2, stage=2),
    "moe": Grid("moe", dp=2),
    "autoep": Grid("autoep", dp=2),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_with_a_grid_is_said_on_every_rank(
    worlds: Any, folders: Folders, tmp_path: Path, case: str
) -> None:
    source, damage, error, text = REFUSED[case]
    folder = shutil.copytree(folders(source), tmp_path / "broken")
    damage(folder / "t")
    target = replace(TARGETS[source.kind], layers=source.layers)
    if source.stage == 0 and source.pp * source.ep > 1:  # whose optimizers go into the same stages and experts alone
        target = replace(source, stage=1)
    told = worlds[2].run("grid_jobs.refused", grid=target, folder=str(folder))
    assert {name for name, _, _ in told} == {error}, told[0][1]
    assert len({said for _, said, _ in told}) == 1
    assert text in told[0][1] and "To mend: " in told[0][1]
    assert all(same for _, _, same in told)


def test_experts_that_are_placed_otherwise_are_not_those_of_their_masters(
    worlds: Any, folders: Folders, tmp_path: Path
) -> None:
    """Seen where both are loaded: the engine then refuses every use."""
    folder = shutil.copytree(folders(AUTOEP), tmp_path / "broken")
    changed(HEAD, placed([[2, 3], [0, 1]]))(folder / "t")
    told = worlds[2].run("grid_jobs.refused", grid=TARGETS["autoep"], folder=str(folder))
    assert {name for name, _, _ in told} == {"CheckpointDamaged"}, told[0][1]
    assert all("weights and fp32 masters of flat buffer 1 (" in said for _, said, _ in told)


AS_SAVED = {
    "a parameter that a layer's file lacks": (
        PLAIN,
        changed("layer_01-model_00-model_states.pt", lambda content: content.pop("fixed")),
        "1.fixed: is missing from the checkpoint",
    ),
    "a tied module that no layer has a file of": (
        replace(PLAIN, layers="no file"),
        lambda folder: None,
        f"{TIED}: is missing from the checkpoint",
    ),
}


@pytest.mark.parametrize("case", AS_SAVED)
@pytest.mark.parametrize("unchanged", ["direct", "deepspeed"])
def test_stages_that_lack_a_weight_are_refused_on_every_rank(
    worlds: Any, folders: Folders, tmp_path: Path, case: str, unchanged: str
) -> None:
    """At stage 0, as saved: DeepSpeed stops one stage, for which others wait, or all keep what was built."""
    source, damage, text = AS_SAVED[case]
    folder = shutil.copytree(folders(source), tmp_path / "broken")
    damage(folder / "t")
    config = {"ds_reshard": {"reshard": {"unchanged": unchanged}}}
    told = worlds[2].run("grid_jobs.refused", grid=replace(source, config=config), folder=str(folder))
    assert {(name, same) for name, _, same in told} == {("ModelMismatch", True)}, told
    assert text in told[0][1] and len({said for _, said, _ in told}) == 1


def truncated(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:1500]) and None


def of_another_grid(folder: Path) -> None:
    """The second stage's first file says that there is one stage."""
    changed("mp_rank_02_model_states.pt", lambda said: said["checkpoint_parallel_dimensions"].update(pp_degree=1))(
        folder
    )


MANY: dict[str, tuple[Grid, list[Damage], list[str]]] = {
    "two rows, two stages, and a head": (
        SHARDED,
        [
            remove("layer_02-model_01-model_states.pt", "layer_04-model_00-model_states.pt"),
            changed("mp_rank_03_model_states.pt", lambda content: content.update(global_steps=9)),
            truncated("zero_pp_rank_0_mp_rank_01_optim_states.pt"),
            of_another_grid,
        ],
        [
            "files of layers are missing: layer_02-model_01",
            "files of layers are missing: layer_04-model_00",
            "mp_rank_03_model_states.pt: is of another step or run",
            "mp_rank_01_optim_states.pt: the zip file does not end with its directory",
            "mp_rank_02_model_states.pt: is of another step or run than mp_rank_00_model_states.pt: sizes differs",
        ],
    ),
    "a column, and a shard of another": (
        SHARDED,
        [remove("mp_rank_03_model_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt")],
        ["model_states files of mp_rank_03", "optim_states files of mp_rank_01"],
    ),
    "an expert, and a shard": (
        Grid("moe", ep=2, dp=4),
        [
            truncated("layer_1_expert_2_mp_rank_00_model_states.pt"),
            truncated("zero_pp_rank_3_mp_rank_00_optim_states.pt"),
        ],
        ["layer_1_expert_2_mp_rank_00_model_states.pt: the zip", "zero_pp_rank_3_mp_rank_00_optim_states.pt: the zip"],
    ),
}


@pytest.mark.parametrize("case", MANY)
def test_all_that_is_wrong_is_listed_at_once(folders: Folders, tmp_path: Path, case: str) -> None:
    source, damages, texts = MANY[case]
    folder = shutil.copytree(folders(source), tmp_path / "broken")
    for damage in damages:
        damage(folder / "t")
    found = [fault.line() for fault in inspect(str(folder)).faults]
    assert [text for text in texts if not any(text in line for line in found)] == [], found
    assert len(found) == len(set(found))
    with pytest.raises(ReshardError, match="To mend: "):
        convert(str(folder), str(tmp_path / "out"), to="zero1", dp=1)
    assert not (tmp_path / "out").exists()


OF_FILES = [
    "AutoEP at stage 0",
    "an expert is placed twice",
    "an expert of AutoEP is missing",
    "experts that other ranks share",
    "a column is missing",
    "a shard of a column is missing",
    "a shard of a row is missing",
    "two layers are missing",
    "a column too many",
    "a stage of another step",
    "a row of another step",
    "ranks are numbered otherwise",
    "ranks are numbered by tensor-parallel rank first",
    "a tied copy of another shape",
    "an expert is missing",
    "one expert over another",
]


@pytest.mark.parametrize("case", OF_FILES)
def test_tools_say_what_is_wrong_with_the_files_of_a_grid(folders: Folders, tmp_path: Path, case: str) -> None:
    source, damage, error, text = REFUSED[case]
    folder = shutil.copytree(folders(source), tmp_path / "broken")
    damage(folder / "t")
    for found in (inspect(str(folder)), verify(str(folder))):
        assert any(text in fault.line() for fault in found.faults), [fault.line() for fault in found.faults]
    with pytest.raises(ReshardError) as raised:
        convert(str(folder), str(tmp_path / "out"), to="zero1", dp=1)
    assert type(raised.value).__name__ == error and text in str(raised.value)
    assert not (tmp_path / "out").exists()


ACTING = {
    "an expert": (MOE, "layer_1_expert_2_mp_rank_00_model_states.pt"),
    "an expert at stage 0": (PLAIN_MOE, "layer_1_expert_2_mp_rank_00_model_states.pt"),
    "an optimizer of experts at stage 0": (PLAIN_MOE, "expp_rank_1_mp_rank_00_optim_states.pt"),
    "a layer": (PIPE, "layer_02-model_00-model_states.pt"),
    "a column": (TP, "mp_rank_01_model_states.pt"),
    "a column's optimizer": (TP, OPTIM),
}


@pytest.mark.acts
@pytest.mark.parametrize("case", ACTING)
def test_what_acts_in_a_grid_that_is_deepspeeds_is_refused(
    worlds: Any, folders: Folders, tmp_path: Path, case: str
) -> None:
    """On the layout that was saved, where DeepSpeed reads the file itself."""
    grid, file = ACTING[case]
    folder, ran = shutil.copytree(folders(grid), tmp_path / "acts"), tmp_path / "ran"
    payloads.put_before(folder / "t" / file, payloads.ACTING["thrown away"][0](f"touch {ran}"))
    told = worlds[grid.ranks].run("grid_jobs.refused", grid=grid, folder=str(folder))
    assert {name for name, _, _ in told} == {"UnsafePickle"}, told
    assert len({said for _, said, _ in told}) == 1 and file in told[0][1] and not ran.exists()


def test_experts_at_stage_0_that_deepspeed_loads_are_seen_first(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """At the same sizes it would take another rank's states; of two sizes it loads what it has saved."""
    folder = shutil.copytree(folders(PLAIN_MOE), tmp_path / "broken")
    exchanged("expp_rank_0_mp_rank_00_optim_states.pt", "expp_rank_1_mp_rank_00_optim_states.pt")(folder / "t")
    told = worlds[2].run("grid_jobs.refused", grid=PLAIN_MOE, folder=str(folder))
    assert {(name, same) for name, _, same in told} == {("CheckpointDamaged", True)}, told
    two = replace(PLAIN_MOE, ep=1, layers="two sizes")
    for rank in worlds[2].run("grid_jobs.load", grid=two, folder=str(folders(two)), saved_ep=(1, 2)):
        assert (rank["wrong"], rank["steps"]) == ({}, [1.0])


def test_tools_do_not_know_what_optimizers_of_experts_at_stage_0_are_of(folders: Folders, tmp_path: Path) -> None:
    """Only a run's own order of parameters tells."""
    folder, said = str(folders(PLAIN_MOE)), "one for each expert-parallel rank"
    assert [said in fault.line() for fault in verify(folder).faults] == [True]
    assert not inspect(folder).faults
    with pytest.raises(ReshardError, match=said):
        convert(folder, str(tmp_path / "out"), to="zero1", dp=1)
