"""Ranks that see other files under one path, as copies on nodes may become, or ask for other things: no rank loads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from gathered import assert_same
from grid_cases import Grid
from saves import Saves

pytestmark = pytest.mark.distributed

MODEL = Model(groups=2)
LAYOUTS = [(Run(stage, 2), Run(stage, dp)) for stage in (0, 1, 2, 3) for dp in (2, 3)]
Edit = Callable[[Path], None]


def nodes(folder: Path, base: Path, count: int, who: int, edit: Edit) -> list[str]:
    """A copy of the checkpoint for each rank, that of one rank edited."""
    made = [base / f"node{number}" for number in range(count)]
    for node in made:
        shutil.copytree(folder, node / "ckpt")
    edit(made[who] / "ckpt")
    return [str(node) for node in made]


def saved_again(pattern: str, change: Callable[[dict[str, Any]], None]) -> Edit:
    def edit(folder: Path) -> None:
        paths = list(folder.glob(f"*/{pattern}"))
        assert paths
        for path in paths:
            content = torch.load(path, weights_only=False)
            change(content)
            torch.save(content, path)

    return edit


def _counter(content: dict[str, Any]) -> None:
    content["global_steps"] += 5


def _schedule(content: dict[str, Any]) -> None:
    content["lr_scheduler"]["last_epoch"] += 5


def _data(content: dict[str, Any]) -> None:
    content["random_ltd"] = {"current": 3}


def _client(content: dict[str, Any]) -> None:
    content["of this node"] = "1" * 1000


def _weights(content: dict[str, Any]) -> None:
    for value in content["module"].values():
        value.view(-1)[:1] += 1


def _optimizer(content: dict[str, Any]) -> None:
    """The first tensor of several elements of an optimizer that lies in the model file, as at stage 0."""
    left = [content["optimizer"]]
    while left:
        one = left.pop()
        if torch.is_tensor(one) and one.numel() > 1:
            one.data.view(-1)[0] += 1
            return
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else []
    raise AssertionError("no tensor")


def _masters(content: dict[str, Any]) -> None:
    held = content["optimizer_state_dict"]
    flats = held["single_partition_of_fp32_groups" if "single_partition_of_fp32_groups" in held else "fp32_flat_groups"]
    flats[0].data.view(-1)[0] += 1


def _no_latest(folder: Path) -> None:
    (folder / "latest").unlink()


MODEL_FILES, OPTIM_FILES = "*model_states.pt", "*optim_states.pt"
EDITS = {
    "counter": saved_again(MODEL_FILES, _counter),
    "schedule": saved_again(MODEL_FILES, _schedule),
    "data": saved_again(MODEL_FILES, _data),
    "weights": saved_again(MODEL_FILES, _weights),
    "optimizer of the model file": saved_again(MODEL_FILES, _optimizer),
    "masters": saved_again(OPTIM_FILES, _masters),
}


@pytest.mark.parametrize("who", (0, 1))
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize(("saved", "loaded"), LAYOUTS, ids=str)
def test_other_files_are_refused(
    worlds: Any, saves: Saves, tmp_path: Path, saved: Run, loaded: Run, edit: str, who: int
) -> None:
    """Each file is whole, and says that it is; also where DeepSpeed would load them, each rank its own."""
    if edit == "masters" and saved.stage == 0:
        edit = "optimizer of the model file"
    elif edit in ("weights", "optimizer of the model file") and saved.stage != 0:
        edit = "masters" if saved.stage == 3 else "weights"  # what a model file has
    folder, _ = saves(saved, MODEL)
    made = nodes(folder, tmp_path, loaded.dp, who, EDITS[edit])
    told = worlds[loaded.dp].run("differing_jobs.load", run=loaded, model=MODEL, nodes=made)
    assert refused(told) and re.search(
        r"_states.pt: rank(s see different files| . sees another folder)", told[0]["text"]
    )


@pytest.mark.parametrize("who", (1, 2))
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_shard_of_which_two_ranks_read_parts(worlds: Any, saves: Saves, tmp_path: Path, stage: int, who: int) -> None:
    """Each would find its own part as it was written, and the model would be put together of both."""
    folder, _ = saves(Run(stage, 2), MODEL)
    made = nodes(folder, tmp_path, 3, who, saved_again("*zero_pp_rank_1_*optim_states.pt", _masters))
    told = worlds[3].run("differing_jobs.load", run=Run(stage, 3), model=MODEL, nodes=made)
    assert refused(told) and "zero_pp_rank_1_mp_rank_00_optim_states.pt: ranks see different files" in told[0]["text"]


def refused(told: list[dict[str, Any]]) -> bool:
    assert {one["error"] for one in told} == {"CheckpointDamaged"}
    assert len({one["text"] for one in told}) == 1 and "copy all files to each node" in told[0]["text"]
    return all(one["unchanged"] for one in told)


@pytest.mark.parametrize("who", (0, 1))
@pytest.mark.parametrize(("saved", "loaded"), LAYOUTS[2:4], ids=str)
def test_ranks_of_two_versions_load_nothing(worlds: Any, saves: Saves, saved: Run, loaded: Run, who: int) -> None:
    """As where a node has an older installation: they would not do the same, and no rank is left waiting."""
    given = {"run": loaded, "model": MODEL, "folder": str(saves(saved, MODEL)[0]), "who": who}
    told = worlds[loaded.dp].run("differing_jobs.load_of_versions", **given)
    assert {one["error"] for one in told} == {"ConfigError"} and all(one["unchanged"] for one in told)
    assert len({one["text"] for one in told}) == 1 and f"0.0.9 on rank {who}" in told[0]["text"]


@pytest.mark.parametrize("who", (0, 1))
@pytest.mark.parametrize(("saved", "loaded"), LAYOUTS, ids=str)
def test_a_latest_that_not_all_see(
    worlds: Any, saves: Saves, tmp_path: Path, saved: Run, loaded: Run, who: int
) -> None:
    """Where rank 0 sees none the others do not load what theirs names; else all load what rank 0's names."""
    folder, truth = saves(saved, MODEL)
    made = nodes(folder, tmp_path, loaded.dp, who, lambda node: (node / "latest").unlink())
    told = worlds[loaded.dp].run("differing_jobs.load", run=loaded, model=MODEL, nodes=made)
    if who == 0:
        assert refused(told) and "ckpt/latest: rank 1 sees another folder than rank 0" in told[0]["text"]
    else:
        assert {one["error"] for one in told} == {None}
        assert_same(truth, [one["held"] for one in told])


@pytest.mark.parametrize("who", (0, 1))
def test_a_latest_that_not_all_see_where_deepspeed_alone_loads(
    worlds: Any, saves: Saves, tmp_path: Path, who: int
) -> None:
    """Rank 0 names the tag there too."""
    folder, _ = saves(Run(3, 2), MODEL)
    made = nodes(folder, tmp_path, 2, who, lambda node: (node / "latest").unlink())
    told = worlds[2].run("differing_jobs.load_without_optimizer", run=Run(3, 2), model=MODEL, nodes=made)
    if who == 0:
        assert refused(told) and "ckpt/latest: rank 1 sees another folder than rank 0" in told[0]["text"]
    else:
        assert [one["held"]["tags"] for one in told] == [["global_step3"]] * 2


@pytest.mark.parametrize(("saved", "loaded"), LAYOUTS, ids=str)
def test_what_a_script_keeps_may_differ_where_deepspeed_loads(
    worlds: Any, saves: Saves, tmp_path: Path, saved: Run, loaded: Run
) -> None:
    """Each node may have saved a model file of its own (`use_node_local_storage`); from files to another layout not."""
    folder, truth = saves(saved, MODEL)
    made = nodes(folder, tmp_path, loaded.dp, 1, saved_again(MODEL_FILES, _client))
    told = worlds[loaded.dp].run("differing_jobs.load", run=loaded, model=MODEL, nodes=made)
    if saved.stage == 0 or saved.dp == loaded.dp:
        assert {one["error"] for one in told} == {None}
        assert_same(truth, [one["held"] for one in told])
    else:
        assert refused(told)


ON_NODES = {"checkpoint": {"use_node_local_storage": True}}


def own_shards(folder: Path, base: Path, count: int) -> list[str]:
    """What each rank has saved, on a disk of its own, as nodes of one rank have it."""
    made = nodes(folder, base, count, 0, lambda node: None)
    for number, node in enumerate(made):
        for path in Path(node).glob("ckpt/*/*zero_pp_rank_*"):
            if f"zero_pp_rank_{number}_" not in path.name:
                path.unlink()
    return made


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_nodes_that_each_have_their_own_shards_load_as_they_saved(
    worlds: Any, saves: Saves, tmp_path: Path, stage: int
) -> None:
    """`use_node_local_storage`: DeepSpeed loads them, each rank its own file; no other layout can."""
    folder, truth = saves(Run(stage, 2), MODEL)
    made, run = own_shards(folder, tmp_path, 2), Run(stage, 2, config=ON_NODES)
    told = worlds[2].run("differing_jobs.load", run=run, model=MODEL, nodes=made)
    assert {one["error"] for one in told} == {None}, told[0]["text"]
    assert_same(truth, [one["held"] for one in told])
    for other in (Run(stage, 2), Run(stage, 3, config=ON_NODES)):
        told = worlds[other.dp].run("differing_jobs.load", run=other, model=MODEL, nodes=(made * 2)[: other.dp])
        assert {(one["error"], one["unchanged"]) for one in told} == {("CheckpointDamaged", True)}
        assert len({one["text"] for one in told}) == 1


@pytest.mark.parametrize("stage", (1, 3))
def test_nodes_with_shards_of_two_steps_or_of_other_ranks_load_nothing(
    worlds: Any, saves: Saves, tmp_path: Path, stage: int
) -> None:
    """One was started where another had been, or has not saved what the others have."""
    folder, _ = saves(Run(stage, 2), MODEL)
    made, run = own_shards(folder, tmp_path, 2), Run(stage, 2, config=ON_NODES)
    told = worlds[2].run("differing_jobs.load", run=run, model=MODEL, nodes=made[::-1])
    assert len({one["text"] for one in told}) == 1 and all(one["error"] and one["unchanged"] for one in told)
    assert "its own" in told[0]["text"] or stage == 3  # where rank 0 finds no model file at all
    saved_again(MODEL_FILES, _counter)(Path(made[1]) / "ckpt")
    told = worlds[2].run("differing_jobs.load", run=run, model=MODEL, nodes=made)
    assert refused(told) and "see different files" in told[0]["text"]


@pytest.mark.parametrize("who", (0, 1))
@pytest.mark.parametrize("edit", (saved_again(MODEL_FILES, _counter), saved_again("zero/optimizer_state.pt", _client)))
@pytest.mark.parametrize("stage", (1, 3))
def test_of_a_universal_checkpoint_too(
    worlds: Any, universals: Any, tmp_path: Path, stage: int, edit: Edit, who: int
) -> None:
    """Rank 0 alone reads it, and tells the others; they look at the files that say of which step it is."""
    folder, _ = universals(Run(stage, 2), MODEL)
    made = nodes(folder, tmp_path, 3, who, edit)
    told = worlds[3].run("differing_jobs.load", run=Run(stage, 3), model=MODEL, nodes=made)
    assert refused(told) and "see different files" in told[0]["text"]


@pytest.mark.parametrize(("saved", "loaded"), LAYOUTS, ids=str)
def test_a_file_that_one_rank_lacks(worlds: Any, saves: Saves, tmp_path: Path, saved: Run, loaded: Run) -> None:
    """It is told of which rank and where, and not that the file is damaged, which rank 0 sees."""
    folder, _ = saves(saved, MODEL)
    name = f"{'zero_pp_rank_0_' if saved.stage == 3 else ''}mp_rank_00_model_states.pt"
    made = nodes(folder, tmp_path, loaded.dp, 1, lambda node: next(node.glob(f"*/{name}")).unlink())
    told = worlds[loaded.dp].run("differing_jobs.load", run=loaded, model=MODEL, nodes=made)
    assert refused(told) and f"{name}: rank 1 sees another folder than rank 0" in told[0]["text"]


@pytest.mark.parametrize("who", (0, 1))
def test_states_that_each_rank_reads_whole(worlds: Any, universals: Any, tmp_path: Path, who: int) -> None:
    """At stage 0 every rank reads all files of a universal checkpoint, so that each finds its own as it was written."""
    folder, _ = universals(Run(1, 2), MODEL)

    def edit(node: Path) -> None:
        path = next(node.glob("*/zero/*/exp_avg.pt"))
        content = torch.load(path, weights_only=False)
        content["param"] += 1
        torch.save(content, path)

    made = nodes(folder, tmp_path, 2, who, edit)
    told = worlds[2].run("differing_jobs.load", run=Run(0, 2), model=MODEL, nodes=made)
    assert refused(told) and "exp_avg.pt: ranks see different files" in told[0]["text"]


ASKED = [
    {"load_dir": "another"},
    {"tag": "global_step3"},
    {"load_optimizer_states": False},
    {"load_lr_scheduler_states": False},
    {"load_module_strict": False},
    {"load_module_only": True},
    {"custom_load_fn": max},
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize(("saved", "loaded"), LAYOUTS, ids=str)
def test_ranks_that_ask_for_other_things(
    worlds: Any, saves: Saves, tmp_path: Path, saved: Run, loaded: Run, asked: dict[str, Any]
) -> None:
    """As where each looks for the newest folder by itself, or one alone has a flag: no rank loads anything."""
    folder, _ = saves(saved, MODEL)
    made = nodes(folder, tmp_path, loaded.dp, 0, lambda node: shutil.copytree(node, node.parent / "another") and None)
    given = {"run": loaded, "model": MODEL, "nodes": made[:1] * loaded.dp}
    told = worlds[loaded.dp].run("differing_jobs.load", **given, arguments=[*[{}] * (loaded.dp - 1), asked])
    ((name, value),) = asked.items()
    assert {one["error"] for one in told} == {"ConfigError"} and len({one["text"] for one in told}) == 1
    shown = repr("a function" if callable(value) else value)
    assert f"load_checkpoint: {name}" in told[0]["text"] and f"{shown} on rank {loaded.dp - 1}" in told[0]["text"]
    assert all(one["unchanged"] for one in told)


def test_other_words_for_the_same_are_no_difference(worlds: Any, saves: Saves, tmp_path: Path) -> None:
    folder, truth = saves(Run(1, 2), MODEL)
    made = nodes(folder, tmp_path, 3, 0, lambda node: None)
    asked = [{}, {"load_dir": Path("./ckpt/"), "load_module_strict": 1}, {"load_dir": "./ckpt//", "tag": ""}]
    told = worlds[3].run("differing_jobs.load", run=Run(1, 3), model=MODEL, nodes=made, arguments=asked)
    assert {one["error"] for one in told} == {None}
    assert_same(truth, [one["held"] for one in told])


GRIDS = [
    (Grid("autotp", dp=2, stage=1), Grid("autotp", tp=2, stage=1)),
    (Grid("autotp", dp=2, stage=3), Grid("autotp", tp=2, stage=3)),
    (Grid("autotp", tp=2, dp=2, stage=1), Grid("autotp", tp=2, dp=2, stage=1)),
    (Grid("autotp", tp=2, stage=1), Grid("autotp", dp=2, stage=1)),
    (Grid("pipeline", dp=2, stage=1), Grid("pipeline", pp=2, stage=1)),
    (Grid("pipeline", dp=2, pp=2, stage=0), Grid("pipeline", dp=2, pp=2, stage=0)),
]


@pytest.mark.parametrize("who", (0, 1))
@pytest.mark.parametrize(("saved", "loaded"), GRIDS, ids=str)
def test_of_a_grid_too(worlds: Any, folders: Any, tmp_path: Path, saved: Grid, loaded: Grid, who: int) -> None:
    """Also where ranks of other rows and stages alone read the same files."""
    made = nodes(folders(saved), tmp_path, loaded.ranks, who, saved_again("*mp_rank_*_model_states.pt", _counter))
    assert refused(worlds[loaded.ranks].run("differing_jobs.load_grid", grid=loaded, nodes=made))
