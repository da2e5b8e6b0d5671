"""Ranks that see other files under one path, as copies on nodes may become, or ask for other things: no rank loads."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from saved_worlds import DISTRIBUTED, TP, WORLDS, Saved
from torch.distributed.checkpoint import FileSystemReader

pytestmark = pytest.mark.slow
WORLD, RELEASE = "biases tp2 dp2", "0.18.2"
LOADS = {
    "another layout": ("", 2),
    "the saved one": (TP, 4),
    "by Megatron-LM": (f"{TP}--no-load-optim --load-main-params-from-ckpt ", 4),
}
TRACKER = "latest_checkpointed_iteration.txt"
Edit = Callable[[Path], None]


@pytest.fixture
def nodes(saved: Saved, tmp_path: Path) -> Callable[[str, int], list[Path]]:
    """The folder that each of so many ranks sees: a copy of one checkpoint."""

    def made(form: str, ranks: int) -> list[Path]:
        places = [tmp_path / f"node{rank}" for rank in range(ranks)]
        for place in places:
            shutil.copytree(saved(WORLD, form), place / "ckpt")
        return places

    return made


def _load(releases: Any, nodes: list[Path], load: str, **more: Any) -> list[dict[str, Any]]:
    arguments, ranks = LOADS[load]
    job = {"arguments": f"{DISTRIBUTED}{arguments} --load ckpt", "nodes": list(map(str, nodes)), **more}
    told: list[dict[str, Any]] = releases[RELEASE].run("load_jobs:refused", ranks=ranks, **job)
    return told


def _refused(told: list[dict[str, Any]], said: str) -> None:
    assert len({one.get("message") for one in told}) == 1, told
    assert told[0]["refused"] and all(one["changed"] == [] for one in told)
    assert said in told[0]["message"], told[0]["message"]


@pytest.mark.parametrize("who", (0, 1))
@pytest.mark.parametrize("form", ("model_space", "buckets"))
@pytest.mark.parametrize("load", LOADS)
def test_another_save(nodes: Any, saved: Saved, releases: Any, tmp_path: Path, load: str, form: str, who: int) -> None:
    """The same run has saved it again, and one node has the files of the time before: both are whole."""
    places = nodes(form, LOADS[load][1])
    world, asked = WORLDS[WORLD], {"ckpt_format": "torch_dist"}
    asked |= {"dist_ckpt_optim_fully_reshardable": form == "model_space", "save": str(places[who] / "ckpt")}
    shutil.rmtree(places[who] / "ckpt")
    releases[RELEASE].run("format_jobs:save", ranks=world.ranks, arguments=world.arguments, saves=[asked])
    _refused(_load(releases, places, load), ".metadata: ranks see different files of this name")


@pytest.mark.parametrize(
    ("load", "file", "name"),
    [
        ("another layout", "mp_rank_00/model_optim_rng.pt", "schedule"),
        ("another layout", "mp_rank_01/model_optim_rng.pt", "model"),
        ("another layout", "mp_rank_01/distrib_optim.pt", "states"),
        ("the saved one", "mp_rank_00/model_optim_rng.pt", "schedule"),
        ("the saved one", "mp_rank_01/model_optim_rng.pt", "model"),
        ("by Megatron-LM", "mp_rank_00/model_optim_rng.pt", "schedule"),
        ("by Megatron-LM", "mp_rank_01/model_optim_rng.pt", "model"),
    ],
)
def test_a_file_that_was_saved_again(nodes: Any, releases: Any, load: str, file: str, name: str) -> None:
    places = nodes("torch", LOADS[load][1])
    path = next((places[1] / "ckpt").glob(f"*/{file}"))
    releases[RELEASE].run("load_jobs:change", path=str(path), name=name)
    _refused(_load(releases, places, load), f"{file}: ranks see different files of this name")


@pytest.mark.parametrize("who", (0, 1))
@pytest.mark.parametrize("form", ("model_space", "torch"))
@pytest.mark.parametrize("load", LOADS)
def test_nothing_on_one_node(nodes: Any, releases: Any, load: str, form: str, who: int) -> None:
    places = nodes(form, LOADS[load][1])
    shutil.rmtree(places[who] / "ckpt")
    _refused(_load(releases, places, load), "is not seen by every rank")


@pytest.mark.parametrize("load", LOADS)
def test_no_tracker_file_on_one_node(nodes: Any, releases: Any, load: str) -> None:
    places = nodes("torch", LOADS[load][1])
    (places[1] / "ckpt" / TRACKER).unlink()
    _refused(_load(releases, places, load), f"has no file {TRACKER}, without which Megatron-LM would begin anew")


FLAGS = ("--no-load-optim", "--finetune", "--no-load-rng", "--ckpt-step 5")
OTHERS = [*product(("another layout", "the saved one"), FLAGS), ("by Megatron-LM", FLAGS[-1])]


@pytest.mark.parametrize(("load", "own"), OTHERS)
def test_other_arguments(nodes: Any, releases: Any, load: str, own: str) -> None:
    """A flag on one rank alone: ranks would part ways, or resume other things."""
    places = nodes("buckets", LOADS[load][1])
    for place in places:
        shutil.copytree(place / "ckpt", place / "other")
    told = _load(releases, places, load, own=["", own, *[""] * (len(places) - 2)])
    _refused(told, "differs between ranks")


def _saved_again(step: Path) -> bytes:
    """The directory of another save of the same."""
    metadata = FileSystemReader(step).read_metadata()
    metadata.storage_meta.save_id = "another"  # type: ignore[union-attr]
    return pickle.dumps(metadata)


@pytest.mark.parametrize("load", ("the saved one", "by Megatron-LM"))
@pytest.mark.parametrize("form", ("model_space", "torch"))
def test_folders_of_other_names(nodes: Any, releases: Any, form: str, load: str) -> None:
    """As `/scratch/$HOSTNAME`: they are loaded where their files are the same, whoever loads."""
    places = nodes(form, 4)
    (places[1] / "ckpt").rename(places[1] / "other")
    own = ["", "--load other", "", ""]
    assert [one["refused"] for one in _load(releases, places, load, own=own)] == [None] * 4
    step = next((places[1] / "other").glob("iter_*"))
    if form == "torch":
        path = step / "mp_rank_01" / "model_optim_rng.pt"
        releases[RELEASE].run("load_jobs:change", path=str(path), name="model")
    else:
        (step / ".metadata").write_bytes(_saved_again(step))
    told = _load(releases, places, load, own=own)
    assert {one["refused"] for one in told} == {"CheckpointDamaged"} and all(one["changed"] == [] for one in told)
    assert all("ranks see different files of this name" in one["message"] for one in told)


@pytest.mark.parametrize("form", ("model_space", "torch"))
@pytest.mark.parametrize("load", LOADS)
def test_copies_on_nodes_are_loaded(nodes: Any, releases: Any, load: str, form: str) -> None:
    told = _load(releases, nodes(form, LOADS[load][1]), load)
    assert told == [{"refused": None, "log": one["log"]} for one in told]
