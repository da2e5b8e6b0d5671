"""Tensor-parallel sizes change: what ranks have divided loads under any other, bit for bit, or is refused by name.

Truth is a rule that gives every element of every tensor its own value (`grid_jobs.py`).
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from damaged_files import changed
from grid_cases import Folders, Grid
from grid_models import RULES
from grid_truth import tensors

from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.formats.zero.checkpoint import TpRank
from ds_reshard.formats.zero.door import list_folder
from ds_reshard.formats.zero.reader import open_checkpoint
from ds_reshard.model.rules import parse_rules, use_rules
from ds_reshard.operations import convert, fingerprint, verify

pytestmark = pytest.mark.distributed


def autotp(dp: int, stage: int | str = 1, dtype: str = "fp32", tp: int = 1) -> Grid:
    return Grid("autotp", tp=tp, dp=dp, stage=stage, dtype=dtype)


def few(dp: int, stage: int | str = 1, tp: int = 1) -> Grid:
    """With a layer of two rows: some ranks have none of them."""
    return Grid("autotp", tp=tp, dp=dp, stage=stage, layers="few")


def llama(dp: int, stage: int | str = 1, dtype: str = "fp32", tp: int = 1, layers: str = "tied") -> Grid:
    return Grid("llama", tp=tp, dp=dp, stage=stage, dtype=dtype, layers=layers)


def mpu(dp: int, stage: int | str = 1, dtype: str = "fp32", tp: int = 1, layers: str = "said") -> Grid:
    return Grid("cut", tp=tp, dp=dp, stage=stage, dtype=dtype, layers=layers)


def proved(target: Grid) -> Grid:
    config = {"ds_reshard": {"reshard": {"verify": "fingerprint"}}}
    return Grid(target.kind, tp=target.tp, dp=target.dp, stage=target.stage, config=config, layers=target.layers)


def by_rules(target: Grid, rules: list[dict[str, Any]] = RULES) -> Grid:
    config = {"ds_reshard": {"reshard": {"tensor_parallel": rules}}}
    return replace(target, config=config, layers="rules")


LOADS = [
    (autotp(2, tp=2), autotp(4)),
    (autotp(2, 2, "bf16", tp=2), autotp(1, 3, "bf16")),
    (autotp(2, 3, tp=2), autotp(2, 2)),
    (autotp(1, "bf16opt", "bf16", tp=3), autotp(2, 1, "bf16")),
    (autotp(1, 3, "bf16", tp=3), autotp(1, "bf16opt", "bf16")),
    (autotp(1, tp=4), autotp(1, 0)),
    (autotp(2, tp=2), autotp(1, 2, tp=4)),
    (autotp(1, 3, "bf16", tp=3), autotp(2, 2, "bf16", tp=2)),
    (autotp(2, 2, "bf16", tp=2), autotp(1, 3, "bf16", tp=3)),
    (autotp(1), autotp(2, 3, tp=2)),
    (llama(2, tp=2), llama(2, 2)),
    (llama(1, 3, "bf16", tp=2), llama(1, 1, "bf16", tp=3)),
    (llama(1, 2, tp=3, layers="untied"), llama(1, 3, tp=4, layers="untied")),
    (Grid("t5", tp=2), Grid("t5", tp=3, stage=2)),
    (Grid("t5", tp=3), Grid("t5", tp=4, dtype="bf16")),
    (few(1, tp=4), few(2, 2)),
    (few(1, 2, tp=3), proved(few(2))),
    (few(1, 3, tp=3), few(2)),
    (few(2), few(1, 3, tp=4)),
    (few(1, 2, tp=3), few(2, tp=2)),
    (mpu(2, tp=2, layers="even"), mpu(1, 2, tp=4, layers="even")),
    (mpu(1, tp=4, layers="even"), mpu(2, 3, "bf16", tp=2, layers="even")),
    (mpu(2, tp=2), mpu(2, 2)),
    (mpu(2, 3, "bf16", tp=2), mpu(1, "bf16opt", "bf16")),
    (mpu(2, 2, tp=2), mpu(4, 1)),
    (mpu(2, "bf16opt", "bf16", tp=2), mpu(2, 3, "bf16")),
    (mpu(2, 2, "bf16", tp=2), mpu(1, 2, "bf16", tp=2)),
    (mpu(1, tp=4, layers="unsaid"), by_rules(mpu(2, 3))),
    (mpu(1, tp=2, layers="beginnings"), mpu(2, layers="beginnings")),
    (autotp(1, tp=3), autotp(1, 2, tp=2)),
    (autotp(1, 2, "bf16", tp=3), autotp(1, 1, "bf16", tp=4)),
    (autotp(2, tp=2), autotp(1, 2, tp=3)),
    (autotp(1, 2, "bf16", tp=4), autotp(1, 1, "bf16", tp=3)),
    (autotp(2, 3, "bf16", tp=2), autotp(1, "bf16opt", "bf16", tp=3)),
    (autotp(2), autotp(1, 0, tp=3)),
    (mpu(2, tp=2), mpu(4, 3)),
    (mpu(2, tp=2), mpu(1, 2, tp=2)),
    (mpu(2, 2, tp=2), mpu(2, 1)),
    (mpu(2, 3, "bf16", tp=2), mpu(2, 1, "bf16")),
    (mpu(2, 3, "bf16", tp=2), mpu(4, 2, "bf16")),
    (mpu(2, 3, "bf16", tp=2), mpu(1, 1, "bf16", tp=2)),
    (mpu(2, "bf16opt", "bf16", tp=2), mpu(4, 1, "bf16")),
    (mpu(2, "bf16opt", "bf16", tp=2), mpu(1, 3, "bf16", tp=2)),
    (autotp(1, 0, tp=2), autotp(2)),
    (autotp(1, 0, "bf16", tp=2), autotp(1, 0, "bf16", tp=4)),
    (few(1, 0, tp=3), few(2, 0)),
    (mpu(1, 0, "bf16", tp=2), mpu(2, 3, "bf16")),
    (mpu(2, 0, "bf16"), mpu(1, 0, "bf16", tp=2)),
    (autotp(1, 3, "bf16", tp=4), autotp(4, 1, "bf16")),
    (autotp(1, "bf16opt", "bf16", tp=4), autotp(1, 2, "bf16", tp=2)),
    (autotp(1, tp=3), autotp(4, 3)),
    (autotp(1, tp=3), autotp(1, 2, tp=3)),
    (autotp(1, 0, tp=4), autotp(2, 1, tp=2)),
]


@pytest.mark.parametrize(("source", "target"), LOADS, ids=str)
def test_tensors_load_bit_equal_under_another_tensor_parallel_size(
    worlds: Any, folders: Folders, source: Grid, target: Grid
) -> None:
    """Weights, masters, moments, steps, buffers and frozen parameters, of even and of uneven parts."""
    loaded = worlds[target.ranks].run("grid_jobs.load", grid=target, folder=str(folders(source)))
    golden.check(f"{source} to {target}", [rank["layouts"] for rank in loaded])
    for rank in loaded:
        assert rank["wrong"] == {}, loaded
        assert rank["compared"] > 5
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([steps_of(source)], 1, 7)
        assert rank["scheduler"]["last_epoch"] == 1


def steps_of(source: Grid) -> float:
    """FP16_UnfusedOptimizer steps once, on zeros, to make its states."""
    return 2.0 if (source.stage, source.dtype) == (0, "bf16") else 1.0


TP, CUT, PLAIN = autotp(1, tp=2), mpu(1, tp=2), mpu(1, 0, tp=2)
UNSAID = mpu(1, tp=2, layers="unsaid")
SHORT = mpu(1, tp=2, layers="short")
ATTRIBUTES = mpu(1, tp=2, layers="attributes")
BESIDE = {"ds_reshard": {"reshard": {"tensor_parallel": [RULES[0], RULES[2]]}}}
PADDED = [
    (CUT, mpu(1, tp=4)),
    (mpu(1, tp=4), mpu(1, 3, "bf16", tp=2)),
    (mpu(1, "bf16opt", "bf16", tp=2), mpu(1, 2, "bf16", tp=4)),
    (SHORT, mpu(1, tp=4, layers="short")),
    (SHORT, mpu(1, 3, tp=4, layers="short")),
    (SHORT, mpu(1, "bf16opt", "bf16", tp=4, layers="short")),
    (UNSAID, mpu(1, tp=4, layers="rules")),
    (mpu(1, tp=2, layers="beginnings"), mpu(1, 2, tp=4, layers="beginnings")),
    (ATTRIBUTES, replace(mpu(1, 2, tp=4, layers="attributes"), config=BESIDE)),
    (mpu(2, tp=2), mpu(1, 2, tp=4)),
    (mpu(2, 2, tp=2), mpu(1, 3, tp=4)),
    (mpu(2, 3, "bf16", tp=2), mpu(1, "bf16opt", "bf16", tp=4)),
    (mpu(2, "bf16opt", "bf16", tp=2), mpu(1, 1, "bf16", tp=4)),
    *((mpu(1, 1, tp=2), mpu(dp, stage, layers="padded")) for dp, stage in ((2, 0), (1, 1), (1, 2), (2, 3))),
    (mpu(1, 2, tp=2), mpu(1, 2, layers="bare")),
    (mpu(1, 0, "bf16", tp=2), mpu(1, 1, "bf16", layers="padded")),
    (mpu(2, 3, "bf16", tp=2), mpu(1, "bf16opt", "bf16", layers="bare")),
    (mpu(2, 1, layers="padded"), mpu(1, 2, tp=2)),
    (mpu(2, 2, layers="padded"), mpu(1, 1)),
    (mpu(1, 0, layers="padded"), mpu(2, 0)),
    (mpu(1, 1), mpu(2, 3, layers="padded")),
    (mpu(2, 1, tp=2), mpu(1, 2, tp=2, layers="padded")),
    (mpu(1, 3, tp=2, layers="padded"), mpu(1, 1, tp=2)),
    (mpu(1, 0, tp=2, layers="padded"), mpu(1, 0, tp=2)),
    (mpu(1, 1, tp=2, layers="padded"), mpu(1, 1, tp=2)),
    (UNSAID, mpu(1, 2, layers="ruled")),
]


@pytest.mark.parametrize(("source", "target"), PADDED, ids=str)
def test_rows_behind_the_vocabulary_are_zeros(worlds: Any, folders: Folders, source: Grid, target: Grid) -> None:
    """In weights, masters and moments, whatever was there; of 5 rows in four shards the last has none."""
    target = by_rules(target) if target.layers == "rules" else target
    target = replace(by_rules(target), layers="bare and wide") if target.layers == "ruled" else target
    for rank in worlds[target.ranks].run("grid_jobs.load", grid=target, folder=str(folders(source)), wiped=3.0):
        assert rank["wrong"] == {}


@pytest.mark.parametrize("to", ["zero1", "zero3", "dcp", "universal"])
def test_rows_behind_the_vocabulary_of_what_was_converted_are_zeros(
    worlds: Any, folders: Folders, tmp_path: Path, to: str
) -> None:
    """What `convert` writes for one rank has no padding, and is loaded by a run that says what its own is."""
    convert(str(folders(CUT)), f"{tmp_path}/out", to=to, dp=2 if to.startswith("zero") else None)
    target = mpu(1, 1, layers="padded")
    if to == "universal":
        target = replace(target, config={"checkpoint": {"load_universal": True}})
    (found,) = worlds[1].run("grid_jobs.load", grid=target, folder=f"{tmp_path}/out", wiped=3.0)
    assert found["wrong"] == {}


@pytest.mark.parametrize(("layers", "rows"), [("bare and wide", 12), ("bare", 8)])
def test_rows_that_no_padding_explains_are_not_made_of_zeros(
    worlds: Any, folders: Folders, tmp_path: Path, layers: str, rows: int
) -> None:
    """A run of 12 rows that says nothing of them, of 7 saved in 8; or of 8, of 7 in a universal folder.

    And the line that says it, which is followed.
    """
    folder, config = str(folders(CUT)), dict[str, Any]()
    if rows == 8:
        folder, config = f"{tmp_path}/out", {"checkpoint": {"load_universal": True}}
        convert(str(folders(CUT)), folder, to="universal")
    grid = mpu(1, layers=layers)
    ((error, text, whole),) = worlds[1].run("grid_jobs.refused", grid=replace(grid, config=config), folder=folder)
    assert error == "ModelMismatch" and f"embed: has another shape (expected [{rows}, 6], found [7, 6])" in text
    assert whole
    line = json.loads("{" + text.rpartition("add to the DeepSpeed JSON: ")[2] + "}")
    assert line == {"ds_reshard": {"reshard": {"tensor_parallel": [{"parameters": "embed", "vocabulary": 7}]}}}
    asked = {"grid": replace(grid, config=config | line), "folder": folder, "wiped": 3.0}
    (found,) = worlds[1].run("grid_jobs.load", **asked)
    assert found["wrong"] == {}


@pytest.mark.parametrize(("layers", "size"), [("short padded", 5), ("even", 8)])
def test_a_run_with_another_vocabulary_is_refused(worlds: Any, folders: Folders, layers: str, size: int) -> None:
    """Its patterns say 5, in 12 rows, or 8; and 7 were saved. Each way out that the error names is followed."""
    ((error, text, whole),) = worlds[1].run("grid_jobs.refused", grid=mpu(1, layers=layers), folder=str(folders(CUT)))
    assert error == "ModelMismatch" and f"embed: has another shape (expected [{size}, 6], found [7, 6])" in text, text
    assert whole
    assert "To mend: build the model with the shapes that were saved" in text
    (found,) = worlds[1].run("grid_jobs.load", grid=mpu(1), folder=str(folders(CUT)))
    assert found["wrong"] == {}
    said = re.search(r"add to the DeepSpeed JSON: (.*)", text)
    if said is None:
        assert size < 7, "only rows behind those that were saved can be padding"
        return
    grid = mpu(1, layers=layers)
    asked = {"grid": replace(grid, config=json.loads(f"{{{said[1]}}}")), "folder": str(folders(CUT)), "wiped": 3.0}
    (found,) = worlds[1].run("grid_jobs.load", **asked)
    row = 6  # the eighth, which is padding by that line, and zero
    assert found["wrong"] == dict.fromkeys(("embed", "0 fp32", "0 exp_avg", "0 exp_avg_sq"), row)


def test_weights_alone_load_whole(worlds: Any, folders: Folders) -> None:
    folder, target = str(folders(LOADS[0][0])), LOADS[0][1]
    for rank in worlds[4].run("grid_jobs.load", grid=target, folder=folder, load_optimizer_states=False):
        assert not any(name[0].isalpha() for name in rank["wrong"]), rank["wrong"]


def anew(dp: int, stage: int | str = 1, dtype: str = "fp32", tp: int = 2, layers: str = "one part") -> Grid:
    """A run whose script has another `partition_config`."""
    return replace(autotp(dp, stage, dtype, tp), layers=layers)


ANEW = [
    (autotp(2, tp=2), anew(1)),
    (autotp(2, tp=2), anew(2)),
    (autotp(2, 3, tp=2), anew(2, 2)),
    (anew(1), autotp(1, 3, tp=2)),
    (autotp(1, 0, tp=2), anew(1, 0)),
    (autotp(1, "bf16opt", "bf16", tp=2), anew(1, "bf16opt", "bf16")),
    (autotp(1, 2, tp=2), anew(2, 2, layers="whole columns")),
]


@pytest.mark.parametrize("mapped", [True, False], ids=["maps", "patterns"])
@pytest.mark.parametrize(("source", "target"), ANEW, ids=str)
def test_as_many_ranks_that_cut_otherwise_take_their_own_parts(
    worlds: Any, folders: Folders, tmp_path: Path, source: Grid, target: Grid, mapped: bool
) -> None:
    """DeepSpeed mixes query, key and value of one part with those of three, without a word.

    Without maps, as before DeepSpeed 0.19.6 and in what `convert` writes, shapes and patterns tell it.
    """
    folder = shutil.copytree(folders(source), tmp_path / "saved")
    for file in () if mapped else (folder / "t").glob("*model_states.pt"):
        changed(file.name, lambda content: content["universal_checkpoint_info"].pop("affine_map"))(folder / "t")
    for rank in worlds[target.ranks].run("grid_jobs.load", grid=target, folder=str(folder)):
        assert rank["wrong"] == {}
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([steps_of(source)], 1, 7)


def test_as_many_ranks_that_cut_alike_read_their_own_files(folders: Folders, tmp_path: Path) -> None:
    """And leave them to DeepSpeed, where nothing else has changed; also what `convert` writes, by its patterns."""
    folder = folders(autotp(2, tp=2))
    convert(str(folder), str(tmp_path / "out"), to="zero1", tp=2, dp=2)
    maps = torch.load(folder / "t" / HEAD, weights_only=False)["universal_checkpoint_info"]["affine_map"]["params"]
    for one in (folder, tmp_path / "out"):
        opened = open_checkpoint(list_folder(str(one / "t")), optimizer=True, tp=TpRank(2, 1, affine_maps=maps))
        assert not opened.tp_models and len(opened.columns) == 1


MODEL, OPTIM = "mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt"


def scaled(content: dict[str, Any]) -> None:
    for entry in content["universal_checkpoint_info"]["affine_map"]["params"].values():
        for piece in entry["ranks"][0]["pieces"]:
            piece["scale"] = 0.5


def mapped(content: dict[str, Any]) -> dict[str, Any]:
    """What the affine map says of each column, of each rank."""
    params = content["universal_checkpoint_info"]["affine_map"]["params"]
    return {name: entry["ranks"] for name, entry in params.items() if "col" in name and "weight" in name}


def twice(content: dict[str, Any]) -> None:
    """The second rank has the first one's rows, and none has its own."""
    for ranks in mapped(content).values():
        for piece, other in zip(ranks[1]["pieces"], ranks[0]["pieces"], strict=True):
            piece["source"] = other["source"]


def nowhere(content: dict[str, Any]) -> None:
    for ranks in mapped(content).values():
        ranks[1]["pieces"] = []


def drifted(content: dict[str, Any]) -> None:
    content["module"]["norm"][2] += 0.5


def moment(content: dict[str, Any]) -> None:
    """The norm is alone in its param group."""
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["exp_avg"][3] = 4.0


def nothing(folder: Path) -> None:
    pass


def owned(target: Grid, rank: int) -> Grid:
    config = {"ds_reshard": {"reshard": {"tensor_parallel": owners(rank)}}}
    return Grid(target.kind, tp=target.tp, dp=target.dp, stage=target.stage, config=config, layers=target.layers)


def owners(rank: int) -> list[dict[str, Any]]:
    return [{"parameters": "no.m", "replicated": True, "owner": rank}]


HEAD = "mp_rank_00_model_states.pt"
OVERLAP = "parameter layers.{}.col.weight: has parts that do not make up the whole"
HOLE = "has parts that do not make up the whole (expected [10, 6], found boxes of 30 elements for 60)"
TWICE = [*RULES, {"parameters": "q.*", "parts": 2}]
NOT_FIT = [{**rule, **({"parts": [8, 8, 4]} if rule["parameters"] == "qkv" else {})} for rule in RULES]
AS_COLUMN, DIVIDED = (
    [{"parameters": name} if rule["parameters"] == name else rule for rule in RULES] for name in ("row", "norm")
)
REFUSED = {
    "a row that is taken for a column": (UNSAID, by_rules(mpu(1), AS_COLUMN), nothing, "row: has another"),
    "copies that are taken for parts": (UNSAID, by_rules(mpu(1), DIVIDED), nothing, "norm: has another"),
    "no rule": (UNSAID, by_rules(mpu(1), RULES[:1]), nothing, "nothing says how it is cut"),
    "an attribute that does not tell the parts": (
        ATTRIBUTES,
        mpu(1, layers="attributes"),
        nothing,
        "qkv: its partition_dim is 0, which does not say whether it is cut as one piece or as several",
    ),
    "two rules": (UNSAID, by_rules(mpu(1), TWICE), nothing, "two rules match it"),
    "a rule that does not fit": (UNSAID, by_rules(mpu(1), NOT_FIT), nothing, "are not of these parts"),
    "copies of a weight differ": (
        CUT,
        mpu(1),
        changed(MODEL, drifted),
        "norm[weight]: is not divided, and tensor-parallel rank 1 has other values than rank 0, whose copy counts "
        "(expected the same bytes, found 1 of 6 elements differ, by at most 0.5)",
    ),
    "the owner of copies is no rank": (CUT, owned(mpu(1), 2), nothing, "rank that it has no copy of"),
    "copies of a moment differ": (CUT, mpu(1), changed(OPTIM, moment), "tensor norm[exp_avg]: is not divided"),
    "copies of a moment differ at stage 0": (
        PLAIN,
        mpu(1),
        changed(MODEL, lambda content: content["optimizer"]["state"][4]["exp_avg"].add_(1.0)),
        "tensor norm[exp_avg]: is not divided",
    ),
    "the optimizer of a rank of stage 0 has other groups": (
        PLAIN,
        mpu(1),
        changed(MODEL, lambda content: content["optimizer"]["param_groups"][0].update(weight_decay=9.0)),
        "keeps other states, steps or param groups than the first tensor-parallel rank",
    ),
    "a rank's file is missing": (TP, autotp(1), lambda f: (f / OPTIM).unlink(), "optim_states files of mp_rank_01"),
    "an affine map that scales": (TP, autotp(1), changed(HEAD, scaled), "affine map scales it"),
    "an affine map of which parts overlap": (TP, autotp(1), changed(HEAD, twice), OVERLAP),
    "an affine map that leaves a hole": (TP, autotp(4), changed(HEAD, nowhere), HOLE),
    "another run divides what overlaps": (TP, autotp(1, tp=4), changed(HEAD, twice), OVERLAP),
    "a proof of parts": (TP, proved(autotp(1, tp=4)), nothing, "does not prove tensors that this run divides"),
    "this run does not say": (CUT, mpu(1, tp=4, layers="unsaid"), nothing, "nothing says how it is cut"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_anew_is_refused_by_name(
    worlds: Any, folders: Folders, tmp_path: Path, case: str
) -> None:
    source, target, damage, text = REFUSED[case]
    folder = shutil.copytree(folders(source), tmp_path / "broken")
    damage(folder / "t")
    told = worlds[target.ranks].run("grid_jobs.refused", grid=target, folder=str(folder))
    assert {name for name, _, _ in told} <= {"CheckpointDamaged", "UnsupportedLayout", "ModelMismatch"}
    assert len({said for _, said, _ in told}) == 1
    assert told[0][0], told[0][1]
    for layer in range(2):  # all findings at once
        assert text.format(layer) in told[0][1] and "To mend: " in told[0][1], told[0][1]
    assert all(same for _, _, same in told)


def master(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].detach()[2] += 0.5


def trained(folder: Path) -> None:
    changed(MODEL, drifted)(folder)
    changed(OPTIM, master)(folder)


OWNED = {"a weight": (trained, {"norm": 1, "1 fp32": 1}), "a moment": (changed(OPTIM, moment), {"1 exp_avg": 1})}


@pytest.mark.parametrize("case", OWNED)
def test_where_copies_differ_the_owners_counts(worlds: Any, folders: Folders, tmp_path: Path, case: str) -> None:
    """The first rank has the truth, the second an element that is not; the checkpoint says all else itself."""
    damage, second = OWNED[case]
    folder = shutil.copytree(folders(CUT), tmp_path / "drifted")
    damage(folder / "t")
    for rank, wrong in enumerate(({}, second)):
        (loaded,) = worlds[1].run("grid_jobs.load", grid=owned(mpu(1), rank), folder=str(folder))
        assert loaded["wrong"] == wrong
        with use_rules(parse_rules(owners(rank))):
            told = {one.kind: one.fingerprint for one in fingerprint(str(folder)).tensors if one.name == "norm"}
            assert not verify(str(folder)).faults
        for kind in ("fp32", "exp_avg"):
            truth = str(fingerprint_of(tensors(CUT)["norm", kind].contiguous()))
            assert (told[kind] == truth) == (f"1 {kind}" not in wrong)


def test_a_folder_of_two_grids_is_of_none(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """The second rank's files are those of a run with other data-parallel ranks."""
    folder = shutil.copytree(folders(TP), tmp_path / "mixed")
    for name in (MODEL, OPTIM):
        shutil.copy(folders(autotp(2, tp=2)) / "t" / name, folder / "t" / name)
    told = worlds[2].run("grid_jobs.refused", grid=autotp(2), folder=str(folder))
    assert len({said for _, said, _ in told}) == 1
    assert "is of another step or run than mp_rank_00" in told[0][1] and "dp_world_size differs" in told[0][1]
    assert all(name == "CheckpointDamaged" and same for name, _, same in told)
    assert any("dp_world_size differs" in fault.line() for fault in verify(str(folder)).faults)
