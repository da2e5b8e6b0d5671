"""`torch.distributed.checkpoint.load` of ZeRO checkpoints through `ds_reshard.dcp.Reader`, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import Model, Run
from damaged_files import cut, flip
from gathered import assert_moments, gathered, same_bits, scalars
from logs import heard
from saves import Saves, Universals
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import ds_reshard.dcp
from ds_reshard.cli.main import main

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

EVERYTHING = Model(groups=2, frozen=True, batchnorm=True)
TIED = Model(tied=True)
ROWS: list[tuple[Run, Model, int, dict[str, Any]]] = [
    (Run(1, 2, "fp32"), EVERYTHING, 3, {}),
    (Run(1, 3, "fp32", {"parameter_alignment": True}), EVERYTHING, 2, {"flat": True}),
    (Run(2, 2, options={"round_robin_gradients": True}), TIED, 3, {}),
    (Run(2, 4, options={"parameter_alignment": True}), Model(groups=2), 1, {}),
    (Run(3, 2, "fp32", {"sub_group_size": 60}), EVERYTHING, 3, {"flat": True}),
    (Run(3, 3, options={"sub_group_size": 20}), TIED, 2, {}),
]


def assert_loaded(saved: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> None:
    """Weights are the masters where there are some; states, steps and param groups are the saved ones."""
    truth, numbers = gathered(saved), scalars(saved)
    moments = {name for name, kind in truth if kind == "exp_avg"}
    assert_moments(truth)
    for rank in loaded:
        for name, tensor in rank["weights"].items():
            expected = truth.get((name, "fp32"), truth.get(("embed.weight" if name == "head.weight" else "", "fp32")))
            expected = saved[0]["weights"][name].view(-1) if expected is None else expected
            assert same_bits(tensor.view(-1), expected.to(tensor.dtype)), name
        assert {name for name, _ in rank["states"]} == moments
        for (name, kind), tensor in rank["states"].items():
            if kind == "step":
                assert float(tensor) == numbers[name, kind] > 0
            else:
                assert same_bits(tensor.view(-1), truth[name, kind]), (name, kind)
        said = dict(saved[0]["groups"])
        for members, values in rank["groups"]:  # initial_lr is of a scheduler, which this run has not
            assert values == {key: value for key, value in said[members].items() if key != "initial_lr"}


@pytest.mark.parametrize(("run", "model", "size", "how"), ROWS, ids=lambda value: str(value))
def test_fsdp2_is_filled_from_zero(worlds: Any, saves: Saves, run: Run, model: Model, size: int, how: Any) -> None:
    folder, saved = saves(run, model)
    loaded = worlds[size].run("dcp_jobs.load", folder=str(folder), model=model, **how)
    assert_loaded(saved, loaded)


def test_the_recipe_of_the_page(worlds: Any, saves: Saves) -> None:
    """The code of docs/fsdp.md as it stands, on another number of ranks."""
    page = (Path(__file__).parents[3] / "docs" / "fsdp.md").read_text(encoding="utf-8")
    (text,) = (
        block for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "get_state_dict(" in block
    )
    run, model, size, _ = ROWS[0]
    folder, saved = saves(run, model)
    assert_loaded(saved, worlds[size].run("dcp_jobs.recipe", text=text, folder=str(folder), model=model))


def test_a_universal_checkpoint_is_one_too(worlds: Any, universals: Universals) -> None:
    folder, saved = universals(Run(2, 2), Model(groups=2))
    assert_loaded(saved, worlds[2].run("dcp_jobs.load", folder=str(folder), model=Model(groups=2)))


def _wanted(saved: list[dict[str, Any]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 7, dtype=dtype) for name, tensor in saved[0]["weights"].items()}


def test_masters_that_zenflow_left_behind_are_refused(saves: Saves, tmp_path: Path) -> None:
    """The 16-bit weights are those of the run, and are given. Synthetic: the saved config names ZenFlow."""
    folder, saved = saves(Run(2, 2), TIED)
    folder = Path(shutil.copytree(folder, tmp_path / "ckpt"))
    for path in folder.glob("*/mp_rank_*"):
        states = torch.load(path, weights_only=False)
        states["ds_config"]["zero_optimization"]["zenflow"] = {"topk_ratio": 0.1}
        torch.save(states, path)
    with pytest.raises(CheckpointException, match="saved under ZenFlow"):
        dcp.load(_wanted(saved, torch.float32), storage_reader=ds_reshard.dcp.Reader(folder, model=""))
    halves = _wanted(saved, torch.bfloat16)
    dcp.load(halves, storage_reader=ds_reshard.dcp.Reader(folder, model=""))
    assert all(same_bits(tensor, saved[0]["weights"][name]) for name, tensor in halves.items())


@pytest.mark.parametrize("odd", ["group", "per_rank"])
def test_what_each_rank_counts_for_itself_is_refused(worlds: Any, tmp_path: Path, odd: str) -> None:
    """As Prodigy does: no rank's value is that of all. Weights alone are given."""
    saved = worlds[2].run("save", run=Run(2, 2), model=Model(optimizer=f"odd_{odd}"), folder=str(tmp_path))
    weights = _wanted(saved, torch.bfloat16)
    dcp.load(weights, storage_reader=ds_reshard.dcp.Reader(tmp_path, model=""))
    assert all(same_bits(tensor, saved[0]["weights"][name]) for name, tensor in weights.items())
    reader = ds_reshard.dcp.Reader(tmp_path)
    told = reader.read_metadata().state_dict_metadata
    wanted = {key: torch.zeros(told[key].size) for key in told if key.endswith(".exp_avg")}
    with pytest.raises(CheckpointException, match="the optimizer keeps it per rank"):
        dcp.load({**wanted, "optimizer.param_groups.0.lr": 0.0}, storage_reader=reader)


@pytest.mark.parametrize("stage", [1, 3])
def test_plain_tensors_without_a_process_group(saves: Saves, stage: int) -> None:
    """Under names of one's own, or none; each type comes from where it was saved, and each byte once."""
    folder, saved = saves(Run(stage, 2), Model(groups=2))
    truth = gathered(saved)
    reader = ds_reshard.dcp.Reader(folder, model="", optimizer="optim")
    moments = {f"optim.state.{n}.{kind}": values for (n, kind), values in truth.items() if kind == "exp_avg"}
    wanted = _wanted(saved, torch.float32) | {key: torch.zeros_like(values) for key, values in moments.items()}
    shapes = {key: reader.read_metadata().state_dict_metadata[key].size for key in moments}
    wanted = {key: tensor.reshape(shapes.get(key, tensor.shape)) for key, tensor in wanted.items()}
    dcp.load(wanted, storage_reader=reader)
    for key, tensor in wanted.items():
        assert same_bits(tensor.view(-1), moments[key] if key in moments else truth[key, "fp32"]), key
    assert reader.bytes_read == sum(4 * tensor.numel() for tensor in wanted.values())
    if stage == 1:
        halves = _wanted(saved, torch.bfloat16)
        dcp.load(halves, storage_reader=ds_reshard.dcp.Reader(folder, model=""))
        assert all(same_bits(tensor, saved[0]["weights"][name]) for name, tensor in halves.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_shards_by_columns(worlds: Any, saves: Saves, stage: int) -> None:
    """Boxes that lie scattered in every partition, and are no partition's shape."""
    folder, saved = saves(Run(stage, 3), Model(groups=2))
    truth = gathered(saved)
    for columns in worlds[2].run("dcp_jobs.columns", folder=str(folder)):
        assert {name for name, kind in truth if kind == "fp32"} == columns.keys()
        for name, tensor in columns.items():
            assert same_bits(tensor.reshape(-1), truth[name, "fp32"]), name


def test_each_rank_reads_its_own_bytes(worlds: Any, saves: Saves) -> None:
    folder, saved = saves(Run(3, 3, "fp32"), Model(groups=2))
    loaded = worlds[2].run("dcp_jobs.load", folder=str(folder), model=Model(groups=2))
    whole = sum(4 * values.numel() for values in gathered(saved).values())
    assert sum(rank["bytes"] for rank in loaded) == whole
    assert max(rank["bytes"] for rank in loaded) < 0.6 * whole


def test_groups_are_matched_by_name(worlds: Any, saves: Saves) -> None:
    """The second group first: each position has the members that it had, with their values."""
    folder, saved = saves(Run(1, 2, "fp32"), Model(groups=2))
    said = dict(saved[0]["groups"])
    assert len({values["lr"] for values in said.values()}) == 2
    for flat in (False, True):
        turned = worlds[2].run("dcp_jobs.load", folder=str(folder), model=Model(groups=2), flat=flat, turned=True)
        assert_loaded(saved, turned)
        for rank in turned:
            assert [members for members, _ in rank["asked"]] == rank["own"]
            for members, values in rank["asked"]:
                assert values == {name: said[tuple(sorted(members))][name] for name in values}
        assert flat or all(len(rank["asked"]) == 2 for rank in turned)


@pytest.mark.parametrize("flat", [False, True])
def test_one_group_of_two_is_refused(worlds: Any, saves: Saves, flat: bool) -> None:
    """torch would give a group of a flattened state dict the values of its first parameter."""
    folder, _ = saves(Run(1, 2, "fp32"), Model(groups=2))
    what = "parameters that this run does not tell apart were" if flat else "the parameters of this group were"
    for told in worlds[2].run("dcp_jobs.raised", folder=str(folder), model=Model(), flat=flat):
        assert "ParamGroupMismatch" in told
        assert f".lr: {what} saved in groups that differ in it" in told and f".weight_decay: {what}" in told


@pytest.mark.parametrize("params", [{"params": [0, 1]}, {}], ids=["numbers", "none"])
def test_groups_that_name_no_parameters_are_refused(saves: Saves, params: dict[str, Any]) -> None:
    """Of several saved groups nothing says which is meant: the first one's rate would be taken."""
    folder, _ = saves(Run(1, 2, "fp32"), Model(groups=2))
    wanted = {"optimizer": {"param_groups": [{"lr": 7.0, **params}]}}
    with pytest.raises(CheckpointException, match="does not name the parameters of its own"):
        dcp.load(wanted, storage_reader=ds_reshard.dcp.Reader(folder))
    assert wanted["optimizer"]["param_groups"] == [{"lr": 7.0, **params}]
    folder, _ = saves(Run(1, 2, "fp32"), Model())
    dcp.load(wanted, storage_reader=ds_reshard.dcp.Reader(folder))
    assert wanted["optimizer"]["param_groups"][0]["lr"] != 7.0


def test_another_type_is_refused_unless_it_is_asked_for(worlds: Any, saves: Saves) -> None:
    """All at once, and before anything changes; torch casts without a word."""
    model = Model(frozen=True)
    folder, saved = saves(Run(2, 2), model)
    for told in worlds[2].run("dcp_jobs.raised", folder=str(folder), model=model):
        assert "ModelMismatch" in told and "model.tower.weight: the target is of a type that was not saved" in told
        assert "expected bfloat16, found float32" in told and "cast=True" in told
    assert_loaded(saved, worlds[2].run("dcp_jobs.load", folder=str(folder), model=model, cast=True))


def test_everything_that_is_missing_is_told_at_once(saves: Saves) -> None:
    """Keys and shapes; torch's own planner stops at the first. A partial load leaves what is not there as it was."""
    folder, saved = saves(Run(1, 2, "fp32"), Model(groups=2))
    wanted = {**_wanted(saved, torch.float32), "more": torch.full((3,), 7.0), "most": torch.full((2,), 7.0)}
    wanted["tiny"] = torch.zeros(4)
    with pytest.raises(CheckpointException) as raised:
        dcp.load(wanted, storage_reader=ds_reshard.dcp.Reader(folder, model=""), planner=ds_reshard.dcp.LoadPlanner())
    (error,) = raised.value.failures.values()
    found = error[0]
    assert isinstance(found, ds_reshard.ModelMismatch)
    assert {fault.where for fault in found.faults} == {"more", "most", "tiny"}
    wanted["tiny"] = torch.zeros(3)
    dcp.load(
        wanted,
        storage_reader=ds_reshard.dcp.Reader(folder, model=""),
        planner=ds_reshard.dcp.LoadPlanner(allow_partial_load=True),
    )
    assert wanted["more"].eq(7).all() and same_bits(wanted["tiny"], saved[0]["weights"]["tiny"])


@pytest.mark.parametrize("planner", [dcp.DefaultLoadPlanner, ds_reshard.dcp.LoadPlanner])
@pytest.mark.parametrize("run", [Run(1, 2, "fp32"), Run(3, 2)], ids=str)
def test_a_partial_load_that_finds_no_weight_is_an_error(saves: Saves, tmp_path: Path, planner: Any, run: Run) -> None:
    """Its lines mend what a wrapper has renamed; what it finds in part it says."""
    folder, saved = saves(run, Model())
    keys = {key: value for key, value in _wanted(saved, torch.float32).items() if not key.startswith("optimizer.")}

    def load(path: Any, wanted: dict[str, Any], **names: str) -> None:
        reader = ds_reshard.dcp.Reader(path, cast=True, **names)
        dcp.load(wanted, storage_reader=reader, planner=planner(allow_partial_load=True))

    wrapped = {"model": {f"_orig_mod.{key}": torch.full_like(value, 7.0) for key, value in keys.items()}}
    for wanted, names in ((wrapped, {}), (wrapped["model"], {"model": ""}), (dict(keys), {})):
        with pytest.raises(CheckpointException) as raised:
            load(folder, wanted, **names)
        (error,) = raised.value.failures.values()
        assert isinstance(error[0], ds_reshard.ModelMismatch) and "has none of the weights" in str(error[0])
        if wanted is wrapped:
            text = str(error[0])
    assert all(value.eq(7).all() for value in wrapped["model"].values())
    (tmp_path / "map.json").write_text(re.search(r"write (\{.*\}) to map.json", text)[1])
    (line,) = (line for line in text.splitlines() if line.startswith("ds-reshard convert"))
    places = {"OUT": str(tmp_path / "out"), "map.json": str(tmp_path / "map.json")}
    assert main([places.get(word, word) for word in line.split()[1:]]) == 0
    some = {**wrapped["model"], "more": torch.zeros(2)}
    with heard() as lines:
        load(tmp_path / "out", {"model": some})
    assert all(not value.eq(7).all() for value in wrapped["model"].values())
    assert any("lacks 1 tensor (model.more), which stay as they are" in str(line) for line in lines)


@pytest.mark.parametrize("ours", [False, True])
def test_what_each_rank_misses_is_told_to_all(worlds: Any, saves: Saves, ours: bool) -> None:
    """Another key on each; of torch's planner the first of each rank. A partial load fills all that is there."""
    folder, saved = saves(Run(2, 2), Model())
    told = worlds[2].run("dcp_jobs.missing", folder=str(folder), model=Model(), ours=ours, partial=False)
    for text, _, _ in told:
        assert "model.more0" in text and "model.more1" in text and ("model.most1" in text) == ours
    assert all(kept for _, kept, _ in told), "nothing changes"
    loaded = worlds[2].run("dcp_jobs.missing", folder=str(folder), model=Model(), ours=ours, partial=True)
    truth = gathered(saved)
    for text, _, weights in loaded:
        assert not text and weights.pop("more0", weights.pop("more1", None)).eq(7).all()
        weights.pop("most1", None)
        assert all(same_bits(tensor.view(-1), truth[name, "fp32"]) for name, tensor in weights.items())


def test_a_damaged_shard_is_seen(worlds: Any, saves: Saves, tmp_path: Path) -> None:
    """A flipped byte that two ranks share with others of its record: by the sum of what both have read."""
    folder, _ = saves(Run(3, 3, "fp32"), Model(groups=2))
    made = tmp_path / "made"
    shutil.copytree(folder, made)
    (path,) = made.rglob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")
    flip(path.name, "data/")(path.parent)
    for told in worlds[2].run("dcp_jobs.raised", folder=str(made), model=Model(groups=2)):
        assert "ChecksumMismatch" in told and path.name in told


HARMS = {
    "all shards are cut": ((0, 1), lambda name: cut(name, 0.3), "CheckpointDamaged"),
    "the second is cut": ((1,), lambda name: cut(name, 0.3), "CheckpointDamaged"),
    "a byte of each is flipped": ((0, 1), lambda name: flip(name, "data/", each=True), "ChecksumMismatch"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_ranks_read_the_model_alone_whatever_the_optimizer_is(
    worlds: Any, saves: Saves, tmp_path: Path, harm: str
) -> None:
    """Of fp32 weights, which have the type of their masters."""
    folder, saved = saves(Run(1, 2, "fp32"), Model())
    shutil.copytree(folder, tmp_path / "made")
    numbers, damage, error = HARMS[harm]
    for number, path in enumerate(sorted((tmp_path / "made").rglob("*optim_states.pt"))):
        if number in numbers:
            damage(path.name)(path.parent)
    loaded = worlds[2].run("dcp_jobs.missing", folder=str(tmp_path / "made"), model=Model(), ours=False, partial=True)
    truth = gathered(saved)
    for text, _, weights in loaded:
        assert not text
        found = {name: tensor for name, tensor in weights.items() if not name.startswith("mo")}
        assert found and all(same_bits(tensor.view(-1), truth[name, "fp32"]) for name, tensor in found.items())
    (told, _) = worlds[2].run("dcp_jobs.raised", folder=str(tmp_path / "made"), model=Model())
    assert error in told and "optim_states.pt" in told


def test_a_folder_that_one_rank_lacks_is_told_to_all(worlds: Any, saves: Saves) -> None:
    folder, _ = saves(Run(1, 2, "fp32"), Model())
    first, second = worlds[2].run("dcp_jobs.opened", folders=[str(folder), f"{folder}-else"])
    assert first == second and first.startswith("CheckpointNotFound") and f"{folder}-else" in first


@pytest.mark.parametrize("made", ("by DeepSpeed", "by torch"))
def test_copies_of_two_saves_are_no_checkpoint(worlds: Any, saves: Saves, tmp_path: Path, made: str) -> None:
    """As on nodes' own disks; copies of one are. A save of torch has an id of its own in its directory."""
    if made == "by DeepSpeed":
        runs = Run(1, 2, "fp32"), Run(1, 2, "bf16")
        one, other = (str(saves(run, Model())[0]) for run in runs)
    else:
        one, other = (str(tmp_path / name) for name in ("one", "other"))
        for folder in (one, other):
            torch.distributed.checkpoint.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=folder)
    shutil.copytree(one, tmp_path / "copy")
    assert worlds[2].run("dcp_jobs.opened", folders=[one, str(tmp_path / "copy")]) == ["", ""]
    first, second = worlds[2].run("dcp_jobs.opened", folders=[one, other])
    assert first == second and first.startswith("CheckpointDamaged") and "ranks see different files" in first


def test_ranks_with_two_maps_read_nothing(worlds: Any, tmp_path: Path) -> None:
    """Or with other numbers in one map, or of which one has none; with copies of one map they do."""
    folder, paths = str(tmp_path / "saved"), list[str]()
    dcp.save({"model": {"w": torch.ones(4, 3)}}, checkpoint_id=folder)
    split = {"sides": ["a", "b"], "entries": [{"a": "w : (g q+1) h", "b": ["x", "y"]}]}
    for held in (
        {"w": "new"},
        {"w": "new"},
        {"w": "other"},
        *({**split, "numbers": {"g": g, "q": q, "h": 3}} for g, q in ((2, 1), (1, 3))),
    ):
        paths.append(str(tmp_path / f"map{len(paths)}.json"))
        Path(paths[-1]).write_text(json.dumps(held), encoding="utf-8")
    assert worlds[2].run("dcp_jobs.opened", folders=[folder] * 2, names=(paths[0], paths[1])) == ["", ""]
    for names in ((paths[0], paths[2]), (paths[3], paths[4]), (paths[0], None)):
        first, second = worlds[2].run("dcp_jobs.opened", folders=[folder] * 2, names=names)
        assert first == second and "ranks have different maps of names" in first


def test_copies_of_two_saves_are_none_for_torch_either(worlds: Any, tmp_path: Path) -> None:
    """With the hooks on; a cut tensor would be put together of both."""
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=nodes[0] / "ckpt")
    shutil.copytree(nodes[0], nodes[1])
    places = list(map(str, nodes))
    assert worlds[2].run("dcp_jobs.loaded_by_torch", nodes=places) == [("", [1.0] * 3)] * 2
    dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=nodes[1] / "ckpt")
    first, second = worlds[2].run("dcp_jobs.loaded_by_torch", nodes=places)
    assert first == second and first[1] == [0.0] * 3
    assert first[0].startswith("CheckpointDamaged") and "ckpt/.metadata: ranks see different files" in first[0]


@pytest.mark.parametrize("limit", [{"threads": 0}, {"threads": -3}, {"memory_nbytes": 0}], ids=str)
def test_a_limit_that_is_none_is_refused(tmp_path: Path, limit: dict[str, int]) -> None:
    with pytest.raises(ds_reshard.ConfigError, match="1 or more"):
        ds_reshard.dcp.Reader(tmp_path, **limit)


def test_what_is_no_checkpoint_is_an_error_before_any_rank_waits(tmp_path: Path) -> None:
    with pytest.raises(ds_reshard.CheckpointNotFound):
        ds_reshard.dcp.Reader(tmp_path)


@pytest.mark.parametrize("alike", [True, False])
def test_a_tensor_of_two_names_is_filled_once_or_refused(tmp_path: Path, alike: bool) -> None:
    """Tied weights have two names. What was saved untied does not go into them: torch has the last name win."""
    torch.manual_seed(0)
    first = torch.randn(300, 200)
    second = first.clone() if alike else torch.randn(300, 200)
    folder = str(tmp_path / "saved")
    dcp.save({"model": {"embed.weight": first, "head.weight": second}}, checkpoint_id=folder, no_dist=True)
    tied = torch.zeros(300, 200)
    reader = ds_reshard.dcp.Reader(folder)
    wanted = {"model": {"embed.weight": tied, "head.weight": tied}}
    if alike:
        dcp.load(wanted, storage_reader=reader, no_dist=True)
        assert torch.equal(tied, first) and reader.bytes_read < 2 * first.nbytes
        return
    with pytest.raises(CheckpointException, match=r"head\.weight: shares memory with model\.embed\.weight in this run"):
        dcp.load(wanted, storage_reader=reader, no_dist=True)
    assert not tied.any()


@pytest.mark.parametrize("reader", ["ours", "torch's"])
def test_a_fresh_optimizer_that_asks_for_no_state_is_refused(tmp_path: Path, reader: str) -> None:
    """Its state dict has no key for what was saved: torch fills its param groups, and the moments begin anew."""
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    wanted = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    dcp.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    given = ds_reshard.dcp.Reader(tmp_path) if reader == "ours" else dcp.FileSystemReader(tmp_path)
    with ds_reshard.install("fsdp"), pytest.raises((ds_reshard.ModelMismatch, CheckpointException)) as told:
        dcp.load(wanted, storage_reader=given, no_dist=True)
    assert "optimizer: asks for no state of its parameters" in str(told.value)
    assert "found none" in str(told.value) and "6 of optimizer.state.*" in str(told.value)
    del wanted["optimizer"]["state"]
    with ds_reshard.install("fsdp"):
        dcp.load(wanted, storage_reader=given, no_dist=True)


def _frozen_run(frozen: bool, *, every: bool = True) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Two layers of which the first may be frozen, and an optimizer of every parameter or of trained ones."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    net[0].requires_grad_(not frozen)
    return net, torch.optim.AdamW([param for param in net.parameters() if every or param.requires_grad])


@pytest.mark.parametrize("form", ["nested", "flattened", "numbered"])
@pytest.mark.parametrize("reader", ["ours", "torch's"])
def test_states_of_what_is_frozen_now_are_refused_and_each_way_out_works(
    tmp_path: Path, reader: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No key asks for them, so they would be left out, and begin anew when the parameter is trained again."""
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")

    def states(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        made = get_optimizer_state_dict(net, optimizer, options=options)
        return made if form != "numbered" else optimizer.state_dict()

    def loaded(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        wanted = {"model": net.state_dict(), "optimizer": states(net, optimizer)}
        given = ds_reshard.dcp.Reader(tmp_path) if reader == "ours" else dcp.FileSystemReader(tmp_path)
        with ds_reshard.install("fsdp"):
            dcp.load(wanted, storage_reader=given, no_dist=True)
        return wanted["optimizer"]

    net, optimizer = _frozen_run(False)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = states(net, optimizer)
    dcp.save({"model": net.state_dict(), "optimizer": saved}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises((ds_reshard.ModelMismatch, CheckpointException)) as told:
        loaded(*_frozen_run(True))
    names = "0, 1" if form == "numbered" else "0.bias, 0.weight"
    assert f"optimizer: asks for no state of 2 parameters ({names})" in str(told.value)
    assert "set requires_grad_(True) on them" in str(told.value)

    net, optimizer = _frozen_run(False)
    again = loaded(net, optimizer)
    if form == "numbered":
        optimizer.load_state_dict(again)
    else:
        set_optimizer_state_dict(net, optimizer, again, options=options)
    net[0].requires_grad_(False)
    assert len(optimizer.state) == 4 and all(state["step"] == 1 for state in optimizer.state.values())
    if form != "numbered":  # whose numbers are other parameters' when there are fewer
        with caplog.at_level("WARNING", logger="ds_reshard"):
            net, optimizer = _frozen_run(True, every=False)
            set_optimizer_state_dict(net, optimizer, loaded(net, optimizer), options=options)
        (line,) = [record.getMessage() for record in caplog.records if record.name == "ds_reshard"]
        assert "6 states of 2 parameters (optimizer.state.0.bias, optimizer.state.0.weight) are left out" in line
        assert all(optimizer.state[param]["step"] == 1 for param in net[1].parameters())


@pytest.mark.parametrize("reader", ["ours", "torch's"])
def test_states_that_another_rank_asks_for_are_not_left_out(worlds: Any, tmp_path: Path, reader: str) -> None:
    """Ranks with other optimizers, as stages of a pipeline: what none of them has is told, once."""
    told = worlds[2].run("dcp_jobs.stages_ask", folder=str(tmp_path), ours=reader == "ours")
    lines = [line for one in told for line in one["part"]]
    assert [one["all"] for one in told] == [[], []] and len(lines) == 1
    assert "1 states of 1 parameter (optimizer.state.a2) are left out" in lines[0]
