"""Tensor, pipeline and expert parallelism: columns are loaded under other data-parallel sizes and stages.

Truth is a rule that gives every element of every tensor its own value (`grid_jobs.py`).
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from cases import Model, Run
from gathered import assert_same
from grid_cases import Folders, Grid
from grid_models import PIPE_RULES, numbers
from saves import Saves

from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointDamaged
from ds_reshard.operations import convert, verify

pytestmark = pytest.mark.distributed


def pipe(pp: int, dp: int, stage: int | str = 1, dtype: str = "fp32", **options: Any) -> Grid:
    return Grid("pipeline", pp=pp, dp=dp, stage=stage, dtype=dtype, **options)


def autotp(dp: int, stage: int | str = 1, dtype: str = "fp32", tp: int = 2) -> Grid:
    return Grid("autotp", tp=tp, dp=dp, stage=stage, dtype=dtype)


def mpu(dp: int, stage: int | str = 1, dtype: str = "fp32") -> Grid:
    return Grid("mpu", tp=2, dp=dp, stage=stage, dtype=dtype)


LOADS = [
    (pipe(2, 2), pipe(2, 1)),
    (pipe(2, 2, 0, "bf16"), pipe(2, 1, 0, "bf16")),
    (pipe(2, 2, "bf16opt", "bf16"), pipe(2, 1, 1, "bf16")),
    (autotp(2), autotp(1)),
    (autotp(2, 1, "bf16"), autotp(1, 3, "bf16")),
    (autotp(2, 2), autotp(1, 1)),
    (autotp(2, 3), autotp(1, 2)),
    (autotp(2, "bf16opt", "bf16"), autotp(2, 2, "bf16")),
    (autotp(1, tp=4), autotp(1, 2, tp=4)),
    (autotp(2, 0), autotp(1, 0)),
    (autotp(2, 0), autotp(1, 2)),
    (autotp(2, 1), autotp(1, 0)),
    (pipe(2, 2, 0, layers="no ties"), pipe(2, 1, 1, layers="no ties")),
    (pipe(2, 2, 0, layers="no ties"), pipe(2, 1, 0, layers="no ties")),
    (pipe(2, 1, 0, tp=2, layers="no ties"), pipe(2, 2, 1, tp=2, layers="no ties")),
    (mpu(2), mpu(1, 2)),
    (mpu(2, 3, "bf16"), mpu(1, "bf16opt", "bf16")),
]


def of_first(target: Grid) -> Grid:
    """The same run, whose later stages have the first one's values of what is not tied."""
    one = "one position" if target.layers == "usual" else f"{target.layers} one position"
    return replace(target, layers=one) if target.kind == "pipeline" else target


def by_rules(target: Grid) -> Grid:
    return replace(target, config={"ds_reshard": {"reshard": {"tensor_parallel": PIPE_RULES}}})


SHARDED = pipe(2, 1, tp=2, layers="divided")
STAGES = [
    (pipe(2, 2), pipe(2, 2)),
    (pipe(2, 2), pipe(1, 4)),
    (pipe(2, 2, 1, "bf16"), pipe(4, 1, 1, "bf16")),
    (pipe(2, 2), pipe(3, 1)),
    (pipe(2, 2, "bf16opt", "bf16"), pipe(1, 2, "bf16opt", "bf16")),
    (pipe(2, 2, 0, "bf16"), pipe(3, 1, "bf16opt", "bf16")),
    (pipe(4, 1, 1, "bf16"), pipe(1, 4, 0, "bf16")),
    (pipe(4, 1), pipe(2, 1)),
    (pipe(1, 2), pipe(2, 2, layers="one position")),
    (pipe(2, 1, tp=2), pipe(1, 2, tp=2)),
    (pipe(1, 2, tp=2), pipe(2, 1, tp=2, layers="one position")),
    (pipe(2, 2), pipe(1, 2, 0)),
    (pipe(2, 2, layers="no file"), pipe(3, 1, layers="no file")),
    (pipe(2, 2, 1, "bf16", layers="no file"), pipe(2, 2, 1, "bf16", layers="no file")),
    (SHARDED, pipe(2, 2, layers="divided")),
    (SHARDED, pipe(1, 4, layers="divided")),
    (SHARDED, pipe(1, 1, tp=4, layers="divided")),
    (pipe(2, 1, "bf16opt", "bf16", tp=2, layers="divided"), pipe(4, 1, 1, "bf16", layers="divided")),
    (pipe(2, 1, 0, "bf16", tp=2, layers="divided unsaid"), by_rules(pipe(1, 2, 1, "bf16", layers="divided unsaid"))),
    (pipe(1, 2, layers="divided"), pipe(2, 1, tp=2, layers="divided one position")),
    (pipe(2, 2, layers="divided"), pipe(1, 2, tp=2, layers="divided")),
    (pipe(4, 1, "bf16opt", "bf16", layers="divided"), pipe(1, 2, 1, "bf16", tp=2, layers="divided")),
    (pipe(4, 1), pipe(4, 1)),
    (pipe(4, 1, 0, "bf16"), pipe(3, 1, 1, "bf16")),
    (pipe(4, 1), pipe(1, 2)),
    (pipe(4, 1, "bf16opt", "bf16"), pipe(2, 2, "bf16opt", "bf16")),
    (SHARDED, pipe(3, 1, layers="divided")),
    (pipe(2, 1, 1, "bf16", tp=2, layers="divided"), pipe(2, 1, "bf16opt", "bf16", layers="divided")),
    (pipe(2, 2, layers="late file"), pipe(1, 2, 0, layers="late file")),
    (pipe(2, 2, 1, "bf16", layers="late file"), pipe(2, 2, 1, "bf16", layers="late file")),
]


@pytest.mark.parametrize(("source", "target"), STAGES, ids=str)
def test_a_pipeline_loads_bit_equal_with_other_stages(
    worlds: Any, folders: Folders, source: Grid, target: Grid
) -> None:
    """Weights of tied modules, masters and states; what is not tied of them is the first stage's."""
    loaded = worlds[target.ranks].run("grid_jobs.load", grid=of_first(target), folder=str(folders(source)))
    golden.check(f"{source} to {target}", [rank["layouts"] for rank in loaded])
    for rank in loaded:
        assert rank["wrong"] == {}, loaded
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)
        assert rank["scheduler"]["last_epoch"] == 1


@pytest.mark.parametrize(
    ("target", "arguments"), [(pipe(2, 1), {"load_optimizer_states": False}), (pipe(2, 1, 0), {})], ids=str
)
def test_what_only_a_later_stage_has_saved_is_not_the_first_stages(
    worlds: Any, folders: Folders, target: Grid, arguments: dict[str, Any]
) -> None:
    """Weights of what is not tied, where the first stage's spec has a forward_fn and so no file of its layer."""
    source = pipe(2, 2, target.stage, layers="late file")
    target = replace(target, layers="late file")
    told = worlds[2].run("grid_jobs.refused", grid=target, folder=str(folders(source)), **arguments)
    assert {(name, same) for name, _, same in told} == {("UnsupportedLayout", True)}, told
    assert "embed.position: is not tied, and no file of a layer has the first stage's value" in told[0][1]


def test_tools_take_a_later_stages_file_for_no_others(folders: Folders, tmp_path: Path) -> None:
    """What is not tied of it is no cast of the first stage's masters; of these a conversion makes the weights."""
    folder = str(folders(pipe(2, 2, layers="late file")))
    assert not verify(folder, deep=True).faults
    convert(folder, str(tmp_path / "out"), to="zero1", dp=1)
    assert not verify(str(tmp_path / "out"), deep=True).faults
    layer = torch.load(tmp_path / "out/t/layer_03-model_00-model_states.pt")
    assert torch.equal(layer["position"], numbers(40, 3))


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (0, "fp32"), ("bf16opt", "bf16")])
def test_a_pipeline_of_one_stage_and_a_plain_module_take_each_others(
    worlds: Any, folders: Folders, stage: int | str, dtype: str
) -> None:
    """Of the same names and sizes: DeepSpeed would look for files of layers, or for a module."""
    one, other = pipe(1, 2, stage, dtype, layers="no ties"), Grid("sequential", dp=2, stage=stage, dtype=dtype)
    for source, target in ((one, other), (other, one)):
        for rank in worlds[2].run("grid_jobs.load", grid=target, folder=str(folders(source))):
            assert (rank["wrong"], rank["steps"], rank["global_steps"]) == ({}, [1.0], 1)


def moe(ep: int, dp: int, stage: int | str = 1, dtype: str = "fp32", swapped: bool = False) -> Grid:
    config = {"use_data_before_expert_parallelism": True} if swapped else {}
    return Grid("moe", ep=ep, dp=dp, stage=stage, dtype=dtype, config=config, layers="swapped" if swapped else "usual")


EXPERTS = [
    (moe(2, 4), moe(2, 2)),
    (moe(2, 4, 2, "bf16"), moe(2, 2, "bf16opt", "bf16")),
    (moe(2, 4, "bf16opt", "bf16"), moe(4, 4, 1, "bf16")),
    (moe(2, 4), moe(1, 4)),
    (moe(2, 4, swapped=True), moe(4, 4)),
    (moe(1, 2), moe(2, 4, 2, swapped=True)),
    (moe(4, 4), moe(4, 4)),
    (moe(1, 4), moe(2, 4)),
    (moe(1, 4, 2, "bf16"), moe(4, 4, "bf16opt", "bf16")),
    (moe(2, 4, 2, "bf16"), moe(4, 4, 2, "bf16")),
    (moe(4, 4), moe(1, 4, 2)),
    (moe(4, 4, 2, "bf16"), moe(2, 4, 1, "bf16")),
    (moe(4, 4, "bf16opt", "bf16"), moe(2, 2, "bf16opt", "bf16")),
    (moe(4, 4, swapped=True), moe(2, 2)),
    (moe(4, 4), moe(2, 4, swapped=True)),
    (moe(1, 4, "bf16opt", "bf16"), moe(1, 2, 2, "bf16")),
    (moe(1, 4), moe(1, 4, 2)),
    (moe(4, 4, 0), moe(4, 4, 2)),
    (moe(1, 4, swapped=True), moe(2, 2)),
    (moe(2, 4), moe(2, 4, 2, swapped=True)),
    (moe(1, 2, 0), moe(1, 4)),
    (moe(2, 4, 0), moe(2, 2, swapped=True)),
    (moe(2, 4, 0), moe(2, 2, 0)),
    (moe(4, 4), moe(2, 2, 0)),
    (moe(2, 2, 0, "bf16"), moe(2, 4, 2, "bf16")),
    (moe(2, 2, 0, "bf16"), moe(2, 2, 0, "bf16")),
]


def autoep(ep: int, dp: int, stage: int | str = 1, dtype: str = "fp32", swapped: bool = False) -> Grid:
    return replace(moe(ep, dp, stage, dtype, swapped), kind="autoep")


AUTOEP = [
    (autoep(2, 4), autoep(1, 4)),
    (autoep(2, 4), autoep(4, 4, 3)),
    (autoep(2, 4), autoep(2, 2, 2)),
    (autoep(2, 4, 3), autoep(4, 4, 3)),
    (autoep(2, 4, 3), autoep(1, 2, 3)),
    (autoep(2, 4, 3), autoep(2, 4)),
    (autoep(4, 4), autoep(2, 2, 3)),
    (autoep(4, 4, "bf16opt", "bf16"), autoep(1, 4, 1, "bf16")),
    (autoep(4, 4, 3, "bf16"), autoep(2, 4, "bf16opt", "bf16")),
    (autoep(4, 4, 3, "bf16"), autoep(1, 2, 2, "bf16")),
    (autoep(4, 4), autoep(4, 4, 3)),
    (autoep(1, 2), autoep(2, 4, 3)),
    (autoep(2, 4, 3, swapped=True), autoep(4, 4)),
    (autoep(2, 4), autoep(2, 4, 3, swapped=True)),
]


@pytest.mark.parametrize(("source", "target"), [*EXPERTS, *AUTOEP], ids=str)
def test_each_expert_loads_bit_equal_wherever_it_is(worlds: Any, folders: Folders, source: Grid, target: Grid) -> None:
    """Experts are counted through all ranks, in whatever order ranks are dealt out."""
    folder = str(folders(source))
    loaded = worlds[target.ranks].run("grid_jobs.load", grid=target, folder=folder, saved_ep=source.ep)
    golden.check(f"{source} to {target}", [rank["layouts"] for rank in loaded])
    for rank in loaded:
        assert rank["wrong"] == {}, loaded
        first = 2.0 if (source.stage, source.dtype) == (0, "bf16") else 1.0  # FP16_UnfusedOptimizer steps once on zeros
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([first], 1, 7)
        names = [group["name"] for group in rank["groups"]]
        assert names == ["dense-params" if target.kind == "autoep" else "all", f"ep_size_{target.ep}"]


GROUPED = [
    (moe(2, 2, 0), moe(2, 4, 0), "one group"),
    (moe(2, 2, 0), moe(2, 4, 1), "groups"),
    (moe(1, 2, 1), moe(2, 2, 0), "groups"),
]


@pytest.mark.parametrize(("source", "target", "groups"), GROUPED, ids=str)
def test_param_groups_of_experts_are_those_of_the_run(
    worlds: Any, folders: Folders, source: Grid, target: Grid, groups: str
) -> None:
    """Experts between dense parameters, as `model.parameters()` has them, and with decay or without it."""
    source, target = replace(source, layers=groups), replace(target, layers=groups)
    arguments = {"grid": target, "folder": str(folders(source)), "saved_ep": source.ep}
    loaded = worlds[target.ranks].run("grid_jobs.load", **arguments)
    golden.check(f"{source} to {target}", [rank["layouts"] for rank in loaded])
    for rank in loaded:
        assert (rank["wrong"], rank["global_steps"]) == ({}, 1)
        assert len(rank["groups"]) == (1 if groups == "one group" else 4)


UNNAMED = [
    (pipe(2, 2, 0), pipe(1, 4)),
    (pipe(1, 2, 0), pipe(2, 2)),
    (pipe(2, 2, 0, layers="no ties"), pipe(2, 1, 1, layers="no ties, earlier")),
    (pipe(3, 1, 0, layers="no ties"), pipe(3, 1, 0, layers="no ties, earlier")),
    (pipe(2, 1, 0, tp=2, layers="divided"), pipe(2, 1, layers="divided")),
    (moe(2, 4, 0), moe(4, 4)),
    (moe(1, 2, 0), moe(2, 2, 0)),
]


@pytest.mark.parametrize(("source", "target"), UNNAMED, ids=str)
def test_optimizers_that_name_no_parameter_go_into_no_other_stages_or_experts(
    worlds: Any, folders: Folders, source: Grid, target: Grid
) -> None:
    """At ZeRO stage 0, also of other layers in as many stages; the weights load as the error says."""
    folder = str(folders(source))
    told = worlds[target.ranks].run("grid_jobs.refused", grid=target, folder=folder)
    assert {(name, same) for name, _, same in told} == {("UnsupportedLayout", True)}, told
    assert len({said for _, said, _ in told}) == 1
    assert "holds optimizers that name no parameter (ZeRO stage 0), one for each" in told[0][1]
    assert "load_optimizer_states=False, load_lr_scheduler_states=False" in told[0][1]
    alone = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
    loaded = worlds[target.ranks].run("grid_jobs.load", grid=of_first(target), folder=folder, **alone)
    assert not [name for rank in loaded for name in rank["wrong"] if "." in name], loaded


@pytest.mark.parametrize(("source", "target"), [(moe(2, 4), moe(1, 4)), (moe(2, 4), moe(2, 2))], ids=str)
@pytest.mark.parametrize("layers", ["half", "named experts"])
def test_experts_that_some_files_lack_load_bit_equal(
    worlds: Any, folders: Folders, source: Grid, target: Grid, layers: str
) -> None:
    """Every second expert is not trained; with "expert" in their names DeepSpeed saves others' masters alone."""
    source, target = replace(source, layers=layers), replace(target, layers=layers)
    arguments = {"grid": target, "folder": str(folders(source)), "saved_ep": source.ep}
    loaded = worlds[target.ranks].run("grid_jobs.load", **arguments)
    golden.check(f"{source} to {target}", [rank["layouts"] for rank in loaded])
    for rank in loaded:
        assert (rank["wrong"], rank["steps"]) == ({}, [1.0])
    assert not verify(str(folders(source)), deep=True).faults


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (pipe(2, 2, 1, "bf16"), pipe(3, 1, 1, "bf16")),
        STAGES[15],
        (pipe(2, 2, 0), pipe(3, 1)),
        (pipe(2, 2, 0, "bf16"), pipe(3, 1, "bf16opt", "bf16")),
        (moe(2, 4), moe(1, 2)),
        AUTOEP[1],
        AUTOEP[5],
        LOADS[4],
    ],
    ids=str,
)
def test_weights_alone_load_bit_equal(worlds: Any, folders: Folders, source: Grid, target: Grid) -> None:
    """What is not tied of a later stage is the first's, as a warning says; stages without names have no schedule."""
    arguments = {"grid": of_first(target), "folder": str(folders(source)), "load_optimizer_states": False}
    if source.kind == "pipeline" and (source.stage, source.dtype) == (0, "fp32"):
        arguments["load_lr_scheduler_states"] = False
    loaded = worlds[target.ranks].run("grid_jobs.load", **arguments)
    golden.check(f"{source} to {target} weights alone", [rank["layouts"] for rank in loaded])
    for rank in loaded:
        weights = {name: n for name, n in rank["wrong"].items() if not name[0].isdigit() or "." in name}
        assert weights == {}


@pytest.mark.parametrize(("source", "target"), LOADS, ids=str)
def test_a_column_of_the_grid_loads_bit_equal(worlds: Any, folders: Folders, source: Grid, target: Grid) -> None:
    loaded = worlds[target.ranks].run("grid_jobs.load", grid=of_first(target), folder=str(folders(source)))
    golden.check(f"{source} to {target}", [rank["layouts"] for rank in loaded])
    for rank in loaded:
        assert rank["wrong"] == {}, loaded
        assert rank["compared"] > 5
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)
        assert rank["scheduler"]["last_epoch"] == 1


def plain(dp: int, stage: int = 1, layers: str = "usual", **said: Any) -> Grid:
    return Grid("plain", dp=dp, stage=stage, layers=layers, **said)


HPZ = plain(4, 3, "hpz", options={"zero_hpz_partition_size": 2})
AUTOCAST = plain(2, 1, "autocast", config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
COMPILED = plain(2, 3, "compiled", config={"compile": {"deepcompile": True}})


@pytest.mark.parametrize(
    ("source", "target"), [(HPZ, plain(2)), (plain(2, 2), HPZ), (AUTOCAST, plain(1, 2)), (COMPILED, plain(1))], ids=str
)
def test_what_leaves_the_files_as_they_are_loads_as_any_other(
    worlds: Any, folders: Folders, source: Grid, target: Grid
) -> None:
    loaded = worlds[target.ranks].run("grid_jobs.load", grid=target, folder=str(folders(source)))
    golden.check(f"{source} to {target}", [rank["layouts"] for rank in loaded])
    for rank in loaded:
        assert (rank["wrong"], rank["steps"], rank["note"]) == ({}, [1.0], 7)


@pytest.mark.parametrize("saved", [2, 4])
def test_the_second_copies_of_hpz_are_those_of_the_checkpoint(worlds: Any, saves: Saves, saved: int) -> None:
    """Forward gathers what is frozen of them; DeepSpeed's own load leaves them as they were built."""
    model = Model(frozen=True)
    folder, truth = saves(Run(3, saved, "fp32"), model)
    run = Run(3, 4, "fp32", {"zero_hpz_partition_size": 2})
    loaded = worlds[4].run("grid_jobs.load_net", run=run, model=model, folder=str(folder), more=2)
    assert_same(truth, loaded)
    assert loaded[0]["later"] == pytest.approx(truth[0]["later"], rel=1e-5)


def test_steps_that_are_numbers_are_those_of_tensors(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """As ZenFlow, which needs a compiler to run, writes them (`ZenFlowCPUAdam`, 0.19.8)."""
    folder = shutil.copytree(folders(plain(2, 2)), tmp_path / "numbers")
    for path in folder.glob("t/*_optim_states.pt"):
        content = torch.load(path, weights_only=False)
        for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] = int(state["step"])
        torch.save(content, path)
    (loaded,) = worlds[1].run("grid_jobs.load", grid=plain(1), folder=str(folder))
    assert (loaded["wrong"], loaded["steps"]) == ({}, [1.0])


def muon(dp: int, stage: int = 1, dtype: str = "fp32", layers: str = "usual", **said: Any) -> Grid:
    return Grid("muon", dp=dp, stage=stage, dtype=dtype, layers=layers, **said)


ALIGNED = muon(2, layers="aligned", options={"parameter_alignment": True})
OFFLOADED = {"options": {"offload_optimizer": {"device": "cpu"}}, "config": {"zero_force_ds_cpu_optimizer": False}}
MUON = [
    (muon(2), muon(2)),
    (muon(2), muon(3, 2)),
    (muon(2), muon(1, 3)),
    (muon(2, 3), muon(3)),
    (muon(2, 1, "bf16"), muon(3, 2, "bf16")),
    (muon(2), muon(1, 0)),
    (muon(1, 0), muon(2)),
    (ALIGNED, muon(1)),
]


@pytest.mark.parametrize(("source", "target"), MUON, ids=str)
def test_momentum_of_muon_loads_bit_equal(worlds: Any, folders: Folders, source: Grid, target: Grid) -> None:
    """Below stage 3 each rank has that of whole parameters, a copy of those that are cut. DeepSpeed loads the first."""
    arguments = {"grid": target, "folder": str(folders(source)), "hooks": source != target}
    for rank in worlds[target.ranks].run("grid_jobs.load", **arguments):
        assert (rank["wrong"], rank["global_steps"], rank["note"]) == ({}, 1, 7)
        assert [group["use_muon"] for group in rank["groups"]] == [True, False]


PROVING = {"config": {"ds_reshard": {"reshard": {"verify": "fingerprint"}}}}
NO_MUON = [
    (muon(2), muon(3, **OFFLOADED), "not supported with Muon in CPU memory"),
    (muon(2, layers="offloaded", **OFFLOADED), muon(1), "Muon's, of whole parameters"),
    (
        muon(2, layers="elastic", options={"elastic_checkpoint": True}),
        muon(1),
        "plain files of ZeRO stages, found elastic",
    ),
    (muon(2), muon(3, **PROVING), "does not prove the momentum of Muon"),
    (muon(2), plain(1), "was trained by another optimizer"),
    (plain(2), muon(1), "was trained by another optimizer"),
]


@pytest.mark.parametrize(("source", "target", "said"), NO_MUON, ids=str)
def test_momentum_of_muon_that_would_be_lost_is_refused(
    worlds: Any, folders: Folders, source: Grid, target: Grid, said: str
) -> None:
    told = worlds[target.ranks].run("grid_jobs.refused", grid=target, folder=str(folders(source)))
    assert {(name[-8:], same) for name, _, same in told} <= {("edLayout", True), ("Mismatch", True)}
    assert said in told[0][1] and len({text for _, text, _ in told}) == 1


def test_copies_of_momentum_that_differ_are_refused(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """In a run and offline: of a parameter that two ranks have parts of, which copy is right no file says."""
    folder = shutil.copytree(folders(muon(2)), tmp_path / "saved")
    path = folder / "t/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=False)
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["momentum_buffer"][0] += 1
    torch.save(content, path)
    told = worlds[3].run("grid_jobs.refused", grid=muon(3), folder=str(folder))
    assert {(name, same) for name, _, same in told} == {("CheckpointDamaged", True)}
    said = "tensor blocks.1.w[momentum_buffer]: is kept whole by each rank with a part of the parameter, and copy 2"
    assert said in told[0][1] and "1 of 35 elements differ" in told[0][1]
    assert any(said in fault.line() for fault in verify(str(folder), deep=True).faults)
    with pytest.raises(CheckpointDamaged, match="is kept whole by each rank"):
        convert(str(folder), str(tmp_path / "out"), to="zero3", dp=1)


PROVED = [
    (pipe(2, 2), pipe(2, 1)),
    (pipe(2, 2), pipe(3, 1)),
    (pipe(2, 2, 0, layers="no ties"), pipe(2, 1, layers="no ties")),
    (autotp(2), autotp(1)),
    (autotp(2), autotp(2)),
]


@pytest.mark.parametrize(("source", "target"), PROVED, ids=str)
def test_fingerprints_are_added_up_over_a_column(worlds: Any, folders: Folders, source: Grid, target: Grid) -> None:
    proving = replace(of_first(target), config={"ds_reshard": {"reshard": {"verify": "fingerprint"}}})
    loaded = worlds[target.ranks].run("grid_jobs.load", grid=proving, folder=str(folders(source)))
    assert not any(rank["wrong"] for rank in loaded)
    assert "tensors proved" in loaded[0]["report"]


def test_frozen_parameters_that_a_stage_0_optimizer_lists_have_no_states(
    worlds: Any, folders: Folders, tmp_path: Path
) -> None:
    """As `torch.optim.AdamW(module.parameters())` numbers them."""
    folder = shutil.copytree(folders(pipe(2, 1, 0, layers="no ties")), tmp_path / "listed")
    for path in folder.glob("t/mp_rank_*_model_states.pt"):
        content = torch.load(path, weights_only=False)
        content["optimizer"]["param_groups"][1]["params"].insert(1, 99)
        torch.save(content, path)
    for rank in worlds[2].run("grid_jobs.load", grid=pipe(2, 1, layers="no ties"), folder=str(folder)):
        assert (rank["wrong"], rank["steps"]) == ({}, [1.0])


BY_DEEPSPEED = {
    "stages, as equal sizes are taken for equal layouts": (
        pipe(2, 2, "bf16opt", "bf16"),
        pipe(1, 2, "bf16opt", "bf16"),
    ),
    "experts, likewise": (moe(2, 4, "bf16opt", "bf16"), moe(4, 4, "bf16opt", "bf16")),
    "what is not tied": (pipe(2, 2), pipe(2, 2)),
    "weights of which the first stage has no file": (
        pipe(2, 2, 0, layers="late tie"),
        pipe(2, 2, 0, layers="late tie"),
    ),
    "weights that are in no file": (pipe(2, 2, layers="no file"), pipe(2, 2, layers="no file")),
}


@pytest.mark.parametrize("case", BY_DEEPSPEED)
def test_what_deepspeed_loads_wrongly_without_a_word(worlds: Any, folders: Folders, case: str) -> None:
    """Its own load returns, and masters, moments or weights are others; with the hooks they are the truth."""
    source, target = BY_DEEPSPEED[case]
    arguments = {"folder": str(folders(source)), "saved_ep": source.ep}
    alone = worlds[target.ranks].run("grid_jobs.load", hooks=False, grid=target, **arguments)
    assert any(rank["wrong"] for rank in alone)
    loaded = worlds[target.ranks].run("grid_jobs.load", grid=of_first(target), **arguments)
    assert not any(rank["wrong"] for rank in loaded)


def test_ranks_that_train_other_numbers_of_experts_are_not_damaged(worlds: Any, folders: Folders) -> None:
    """Only rank 0 says of which parameters its buffers are; weights load as the error says."""
    grid = Grid("moe", dp=2, ep=2, layers="one")
    told = worlds[2].run("grid_jobs.refused", grid=grid, folder=str(folders(grid)))
    assert {(name, same) for name, _, same in told} == {("UnsupportedLayout", True)}, told
    assert "ranks have frozen different numbers of experts" in told[0][1]
    loaded = worlds[2].run("grid_jobs.load", grid=grid, folder=str(folders(grid)), load_optimizer_states=False)
    assert not [name for rank in loaded for name in rank["wrong"] if "." in name], loaded


@pytest.mark.parametrize(("source", "target"), [(pipe(2, 1), pipe(1, 2)), (autotp(1), autotp(1, 2))], ids=str)
def test_what_was_half_loaded_neither_trains_nor_saves(
    worlds: Any, folders: Folders, tmp_path: Path, source: Grid, target: Grid
) -> None:
    """A pipeline trains by a method of its own."""
    bad = shutil.copytree(folders(source), tmp_path / "bad")
    path = bad / "t" / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    with open_archive(str(path)) as archive:
        longest = max(
            (member for name, member in archive.members.items() if name.startswith("data/")), key=lambda one: one.nbytes
        )
    content = bytearray(path.read_bytes())
    content[longest.byte_offset + longest.nbytes // 2] ^= 1
    path.write_bytes(content)
    told = worlds[2].run("grid_jobs.half_loaded", grid=target, bad=str(bad), good=str(folders(source)))
    assert told == [["ChecksumMismatch", "EngineUnusable", "EngineUnusable", "done"]] * 2
