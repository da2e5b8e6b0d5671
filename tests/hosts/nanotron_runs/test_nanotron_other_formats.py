"""nanotron's trainer is given a folder of another format: every weight, master, moment and step, to the bit.

The folders are written by `convert` of a synthetic checkpoint of nanotron, so that each tensor is known.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "formats"))
from nanotron_builder import PEAK, STEP, Run, values, write

from ds_reshard.errors import ConfigError
from ds_reshard.hosts.fsdp.settings import ask_settings
from ds_reshard.operations import convert
from ds_reshard.operations.name_map import ask_names, asked_names

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

KINDS = {
    "zero1": {"dp": 2},
    "zero2": {"dp": 3},
    "zero3": {"dp": 2},
    "bf16": {"dp": 2},
    "universal": {},
    "dcp": {},
    "accelerate": {},
}
LIVE = {"one rank": Run(), "dp 2": Run(dp=2), "tp 2, ZeRO-0": Run(tp=2, zero=0), "pp 2": Run(pp=2)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint in each format, with a scheduler and nanotron's own counters or without."""

    @functools.cache
    def folder(kind: str, *, scheduler: bool = True) -> str:
        at = tmp_path_factory.mktemp("other")
        source = write(Run(dp=2), at / "nanotron")
        if not scheduler:
            shutil.rmtree(source / str(STEP) / "lr_scheduler")
        convert(str(source), str(at / kind), to=kind, **KINDS.get(kind, {}))
        return str(at / kind)

    return folder


def given(worlds: Any, run: Run, folder: str, **how: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = worlds[run.dp * run.tp * run.pp].run(
        "nanotron_jobs.other", run=run, folder=folder, **how
    )
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_any_format_at_any_topology(kind: str, folders: Any, worlds: Any) -> None:
    folder = folders(kind)
    for name, run in LIVE.items():
        for one in given(worlds, run, folder):
            assert "error" not in one, (name, one)
            assert (one["weights"], one["states"]) == ([], []), name
            assert one["position"] == one["metadata"]["last_train_step"] == STEP
            assert one["bases"] == [PEAK]


def test_a_folder_by_url_is_read_in_place(folders: Any, worlds: Any) -> None:
    """Of another format, and nanotron's own, which it would copy to its own disk; nothing there is a run begun anew."""
    nanotrons = str(Path(folders("zero2")).parent / "nanotron")
    cases = [(folders("zero2"), "dp 2"), (nanotrons, "tp 2, ZeRO-0"), (f"{nanotrons}/{STEP}", "pp 2")]
    for folder, name in cases:
        for one in given(worlds, LIVE[name], f"file://{folder}"):
            assert "error" not in one, (folder, name, one)
            assert (one["weights"], one["states"]) == ([], []), (folder, name)
            assert one["position"] == one["metadata"]["last_train_step"] == STEP
            assert one["bases"] == [PEAK]
    one = given(worlds, Run(), f"file://{nanotrons}/none")[0]
    assert "error" not in one and one["position"] == 0


def test_a_scheduler_that_is_not_there_is_refused(folders: Any, worlds: Any) -> None:
    """Never made up: this run's schedule, at the checkpoint's step, has to be asked for."""
    folder = folders("dcp", scheduler=False)
    for one in given(worlds, Run(dp=2), folder):
        assert (one["error"], one["unchanged"]) == ("UnsupportedLayout", True)
        assert "holds no scheduler: it is not there" in one["text"]
        assert "--override-opt-param-scheduler" in one["text"]
    for one in given(worlds, Run(dp=2), folder, policy={"scheduler": "override"}):
        assert (one["weights"], one["states"], one["position"]) == ([], [], STEP)


def test_steps_and_samples_that_are_not_there_are_refused(folders: Any, worlds: Any) -> None:
    """A plain folder of PyTorch counts neither; with one data stage samples alone have a place, and steps have not."""
    folder = folders("pytorch")
    for one in given(worlds, Run(dp=2), folder):
        assert (one["error"], one["unchanged"]) == ("UnsupportedLayout", True)
        assert "does not say how many steps were made: they are not there" in one["text"]
        assert "does not say what was consumed of which data" in one["text"]
    for run in LIVE.values():
        for one in given(worlds, run, folder, policy={"iteration": "reset"}):
            assert (one.get("weights"), one.get("states")) == ([], []), one
            assert one["metadata"]["last_train_step"] == one["position"] == 0


def test_random_states_that_are_not_there_are_a_warning(folders: Any, worlds: Any) -> None:
    one = given(worlds, Run(), folders("zero2"))[0]
    assert any("random states are of this run" in warning for warning in one["warnings"])


def test_names_of_another_framework(folders: Any, worlds: Any, tmp_path: Path) -> None:
    """Renamed by the map that DS_RESHARD_SETTINGS names; without it each name of either side is named."""
    names = {name for name, kind in values(Run()) if kind == "weight"}
    there, back = tmp_path / "there.json", tmp_path / "back.json"
    there.write_text(json.dumps({name: f"model.{name}" for name in sorted(names)}))
    back.write_text(json.dumps({f"model.{name}": name for name in sorted(names)}))
    convert(folders("zero2"), str(tmp_path / "out"), to="dcp", names=str(there))
    one = given(worlds, Run(), str(tmp_path / "out"), names=str(back))[0]
    assert (one["weights"], one["states"]) == ([], [])
    refused = given(worlds, Run(dp=2), str(tmp_path / "out"))
    assert {one["error"] for one in refused} == {"ModelMismatch"} and all(one["unchanged"] for one in refused)
    assert all(name in refused[0]["text"] and f"model.{name}" in refused[0]["text"] for name in names)
    assert len({one["text"] for one in refused}) == 1 and "DS_RESHARD_SETTINGS" in refused[0]["text"]


@pytest.mark.parametrize("loop", [False, True], ids=["trainer", "loop"])
def test_a_map_is_applied_to_the_model_that_the_run_tells(
    loop: bool, folders: Any, worlds: Any, tmp_path: Path
) -> None:
    """Of rows in another order, and of another number, each would load without a word: the shapes fit."""
    names = sorted({name for name, kind in values(Run()) if kind == "weight"})
    entries = [{"nanotron": name, "transformers": f"model.{name}"} for name in names]
    for path, numbers in (("there.json", {}), ("back.json", {"d": "head_dim"})):
        held = {"sides": ["nanotron", "transformers"], "numbers": numbers, "entries": entries}
        (tmp_path / path).write_text(json.dumps(held))
    convert(folders("zero2"), str(tmp_path / "out"), to="dcp", names=str(tmp_path / "there.json"))
    (tmp_path / "out" / "config.json").write_text(json.dumps({"head_dim": 8}))
    asked: dict[str, Any] = {"names": str(tmp_path / "back.json"), "loop": loop}
    for config, why in (
        ({"head_dim": 8, "rope_interleaved": True}, "rope_interleaved: is set, and the map was not written for it"),
        ({"head_dim": 4}, "head_dim: is another number in one file than in another (expected one, found 8 in "),
    ):
        refused = given(worlds, Run(dp=2), str(tmp_path / "out"), model_config=config, **asked)
        assert {one["error"] for one in refused} == {"ModelMismatch"} and all(one["unchanged"] for one in refused)
        assert len({one["text"] for one in refused}) == 1 and why in refused[0]["text"], refused[0]["text"]
    config = {"head_dim": 8, "rope_interleaved": False}
    for one in given(worlds, Run(dp=2), str(tmp_path / "out"), model_config=config, **asked):
        assert (one["weights"], one["states"]) == ([], [])


@pytest.mark.parametrize("on_nodes", [True, False], ids=["one path on two nodes", "two paths"])
def test_ranks_with_two_maps_of_names_load_nothing(on_nodes: bool, folders: Any, worlds: Any, tmp_path: Path) -> None:
    """Two weights of one shape are exchanged in the map of one rank, so that each rank alone would load."""
    names = {name: name for name, kind in values(Run()) if kind == "weight"}
    first, second = "blocks.0.pp_block.qkv.weight", "blocks.1.pp_block.qkv.weight"
    maps = [names, {**names, first: second, second: first}]
    nodes = [tmp_path / f"node{rank}" for rank in range(2)]
    for node, held in zip(nodes, maps, strict=True):
        node.mkdir()
        (node / "map.json").write_text(json.dumps(held))
    paths = [str(node / "map.json") for node in nodes]
    asked = {"nodes": list(map(str, nodes)), "names": "map.json"} if on_nodes else {"names": paths}
    for two in [asked] if on_nodes else [asked, {"names": [None, paths[1]]}, {"names": [paths[1], None]}]:
        told = given(worlds, Run(dp=2), folders("dcp"), **two)
        assert {one.get("error") for one in told} == {"ConfigError"} and all(one["unchanged"] for one in told), told
        assert len({one["text"] for one in told}) == 1 and "ranks have different maps of names" in told[0]["text"]
    Path(paths[1]).write_text(json.dumps(names, indent=1))
    for one in given(worlds, Run(dp=2), folders("dcp"), **asked):
        assert (one.get("weights"), one.get("states")) == ([], []), one


def test_a_tag_that_is_not_there_is_refused(worlds: Any, tmp_path: Path) -> None:
    """nanotron alone finds nothing of its own there, and begins anew."""
    (tmp_path / "latest").write_text("global_step8")
    one = given(worlds, Run(), str(tmp_path))[0]
    assert one["error"] == "CheckpointNotFound" and "global_step8" in one["text"]


def test_weights_alone_are_weights_alone(worlds: Any, tmp_path: Path) -> None:
    """A folder without an optimizer is refused by name, and loaded where the optimizer begins anew."""
    convert(str(write(Run(), tmp_path / "nanotron")), str(tmp_path / "out"), to="safetensors")
    asked = {"scheduler": "override", "iteration": "reset"}
    one = given(worlds, Run(), str(tmp_path / "out"), policy=asked)[0]
    assert (one["error"], "holds no states of an optimizer" in one["text"]) == ("CheckpointDamaged", True), one
    asked = {"optimizer": "skip", "iteration": "reset", "dataloader": "reset"}
    one = given(worlds, Run(), str(tmp_path / "out"), policy=asked)[0]
    assert (one.get("weights"), one.get("states")) == ([], None), one


def test_fp32_runs_without_masters(worlds: Any, tmp_path: Path) -> None:
    """Weights of fp32 are their own masters on either side."""
    run = Run(masters=False, dp=2)
    convert(str(write(run, tmp_path / "nanotron")), str(tmp_path / "out"), to="zero2", dp=3)
    for live in (run, Run(dp=2)):  # and a run of 16-bit weights with masters
        for one in given(worlds, live, str(tmp_path / "out")):
            assert (one.get("weights"), one.get("states")) == ([], []), one


def test_masters_on_one_side_only_are_refused(folders: Any, worlds: Any) -> None:
    """A run without masters would lose those that were saved beside 16-bit weights."""
    for one in given(worlds, Run(dp=2, masters=False), folders("zero2")):
        assert one["error"] == "ModelMismatch" and "fp32 masters: are on one side only" in one["text"]


def test_a_loop_of_ones_own(worlds: Any, tmp_path: Path) -> None:
    """`load_optimizer` alone, of a folder of torch.distributed.checkpoint."""
    (tmp_path / "other").mkdir()
    convert(str(write(Run(dp=2), tmp_path / "nanotron")), str(tmp_path / "other" / str(STEP)), to="dcp")
    found = worlds[2].run("nanotron_jobs.load", run=Run(tp=2), folders=[str(tmp_path / "other")])
    assert found == [[[]], [[]]]


def test_another_shape_leaves_everything_as_it_was(folders: Any, worlds: Any) -> None:
    first, *others = Run().model
    run = Run(dp=2, model=(type(first)(first.name, (8, 6), first.stages, first.split), *others))
    for one in given(worlds, run, folders("zero3")):
        assert (one["error"], one["unchanged"]) == ("ModelMismatch", True)
        assert "has another shape" in one["text"] and first.name in one["text"]


def test_the_map_of_names_is_a_setting_of_the_environment() -> None:
    """`DS_RESHARD_SETTINGS='{"names": "map.json"}'`; anything else than a path is a ConfigError."""
    try:
        ask_settings('{"names": "map.json"}', place="DS_RESHARD_SETTINGS")
        assert asked_names() == "map.json"
        with pytest.raises(ConfigError, match="the path of a JSON file"):
            ask_settings('{"names": 3}', place="DS_RESHARD_SETTINGS")
    finally:
        ask_names(None)
    assert asked_names() is None


@pytest.mark.parametrize(
    ("kind", "files"),
    [("zero2", "*/*optim_states.pt"), ("accelerate", "optimizer_0/*"), ("zero3", "*/*optim_states.pt")],
)
def test_weights_alone_whatever_the_optimizer_is(
    folders: Any, worlds: Any, tmp_path: Path, kind: str, files: str
) -> None:
    """Cut files of it; of ZeRO stage 3 they are the only ones that hold the weights.

    Without it nothing says that fp32 weights are masters, and 16-bit ones are not made of them.
    """
    folder = tmp_path / "saved"
    shutil.copytree(folders(kind), folder)
    for file in folder.glob(files):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for name in ("dp 2", "pp 2"):
        for one in given(worlds, LIVE[name], str(folder), policy={"optimizer": "skip"}):
            if kind == "zero3":
                assert one["error"] == "CheckpointDamaged" and one["unchanged"]
            elif kind == "accelerate":
                assert "expected bfloat16, found float32" in one["text"] and "model.dtype: float32" in one["text"]
            else:
                assert one.get("weights") == [], one["text"]
    assert all(one["error"] == "CheckpointDamaged" for one in given(worlds, LIVE["dp 2"], str(folder)))
    if kind == "accelerate":
        (one,) = given(worlds, Run(masters=False), str(folder), policy={"optimizer": "skip"})
        assert "error" not in one, one["text"]
