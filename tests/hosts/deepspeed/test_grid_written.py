"""`convert --tp N` writes the files of several tensor-parallel ranks, and DeepSpeed itself goes on from them.

Truth is a rule that gives every element of every tensor its own value (`grid_models.py`).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grid_cases import Folders, Grid
from grid_models import PIPE_RULES, RULES, expert_sizes

from ds_reshard.errors import ConfigError, ReshardError, UnsupportedLayout
from ds_reshard.model.rules import parse_rules, use_rules
from ds_reshard.operations import Options, convert, diff, verify

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("golden_layouts")]


def autotp(tp: int, dp: int = 1, stage: int | str = 1, dtype: str = "fp32", layers: str = "usual") -> Grid:
    return Grid("autotp", tp=tp, dp=dp, stage=stage, dtype=dtype, layers=layers)


def cut(tp: int, dp: int = 1, stage: int | str = 1, dtype: str = "fp32", layers: str = "said") -> Grid:
    return Grid("cut", tp=tp, dp=dp, stage=stage, dtype=dtype, layers=layers)


UNSAID, WHOLE = cut(2, 2, layers="unsaid"), cut(1, layers="unsaid")
WRITTEN = [
    (autotp(2, 2), "zero3", autotp(2, 1, 3)),
    (autotp(2, 2), "zero1", autotp(2, 1)),
    (autotp(3, 1, 3, "bf16"), "bf16", autotp(2, 2, "bf16opt", "bf16")),
    (autotp(3, 1, 3, "bf16"), "zero2", autotp(2, 1, 2, "bf16")),
    (autotp(3, 1, 2, layers="few"), "zero1", autotp(2, 1, layers="few")),
    (cut(2), "zero1", cut(4)),
    (cut(2), "zero2", cut(2, 2, 2)),
    (cut(4, layers="even"), "zero3", cut(2, 2, 3, layers="even")),
    (cut(2, 1, "bf16opt", "bf16"), "bf16", cut(4, 1, "bf16opt", "bf16")),
    (cut(2, layers="short"), "zero1", cut(4, layers="short")),
    (cut(2, 2, layers="unsaid"), "zero2", cut(4, 1, 2, layers="unsaid")),
    (cut(1, layers="unsaid"), "zero1", cut(2, 2, layers="unsaid")),
    (cut(1), "zero3", cut(2, 1, 3)),
    (autotp(2, 2), "zero1", autotp(4)),
    (autotp(3, 1, 2, layers="few"), "zero3", autotp(4, 1, 3, layers="few")),
]


@pytest.mark.parametrize(("source", "to", "target"), WRITTEN, ids=str)
def test_what_is_written_for_several_ranks_is_loaded_by_deepspeed(
    worlds: Any, folders: Folders, tmp_path: Path, source: Grid, to: str, target: Grid
) -> None:
    """Each rank's shards, copies of the rest, padding of the vocabulary; and back, nothing differs.

    Of one part the first ranks may have one more; a rank without any has the parameter in no flat buffer.
    """
    out = tmp_path / "out"
    with use_rules(parse_rules(RULES) if source.layers == "unsaid" else ()):
        convert(str(folders(source)), str(out), to=to, tp=target.tp, dp=target.dp)
        found = diff(str(folders(source)), str(out))
    assert len(found.tensors) > 10 and all(one.state == "equal" for one in found.tensors)
    assert not verify(str(out), deep=True).faults
    for rank in worlds[target.ranks].run("grid_jobs.load", grid=target, folder=str(out), hooks=False):
        assert rank["wrong"] == {}
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)
        assert rank["scheduler"]["last_epoch"] == 1


def test_what_is_written_says_itself_how_it_is_cut(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """A run of one rank takes it without a rule, and a second conversion too."""
    with use_rules(parse_rules(RULES)):
        convert(str(folders(cut(2, 2, layers="unsaid"))), str(tmp_path / "four"), to="zero1", tp=4, dp=1)
    (rank,) = worlds[1].run("grid_jobs.load", grid=cut(1, layers="unsaid"), folder=str(tmp_path / "four"))
    assert rank["wrong"] == {}
    convert(str(tmp_path / "four"), str(tmp_path / "two"), to="zero3", tp=2, dp=2)
    target = cut(2, 2, 3, layers="unsaid")
    for rank in worlds[4].run("grid_jobs.load", grid=target, folder=str(tmp_path / "two"), hooks=False):
        assert rank["wrong"] == {}


@pytest.mark.parametrize("source", [autotp(2, 2), cut(2), autotp(2, 1, layers="few"), UNSAID, WHOLE], ids=str)
@pytest.mark.parametrize("between", [["universal"], ["universal", "universal"], ["universal", "zero2"]], ids=str)
def test_a_universal_checkpoint_says_how_it_was_cut(
    worlds: Any, folders: Folders, tmp_path: Path, source: Grid, between: list[str]
) -> None:
    """The shards of a run of two ranks are right, element by element, without a rule but for the first conversion."""
    at, rules, target = folders(source), RULES if source.layers == "unsaid" else (), replace(source, tp=2)
    for number, to in enumerate(between):
        with use_rules(parse_rules(list(rules) if number == 0 else [])):
            convert(str(at), str(tmp_path / str(number)), to=to, dp=None if to == "universal" else 1)
        at = tmp_path / str(number)
    done = convert(str(at), str(tmp_path / "out"), to="zero1", tp=2, dp=source.dp)
    assert not any("no pattern" in note for note in done.notes)
    for rank in worlds[target.ranks].run("grid_jobs.load", grid=target, folder=str(tmp_path / "out"), hooks=False):
        assert rank["wrong"] == {}


def test_the_mark_of_a_universal_checkpoint_does_not_say_how_it_is_cut(folders: Folders, tmp_path: Path) -> None:
    """DeepSpeed takes all of what no pattern names as cut along dimension 0, which rows, norms and halves are not."""
    convert(str(folders(Grid("plain"))), str(tmp_path / "whole"), to="universal")
    with pytest.raises(UnsupportedLayout, match=r"norm\.m: nothing says how it is cut"):
        convert(str(tmp_path / "whole"), str(tmp_path / "out"), to="zero1", tp=2, dp=1)


def test_what_no_pattern_names_is_said_when_it_is_cut(folders: Folders, tmp_path: Path) -> None:
    done = convert(str(folders(cut(1, layers="forgotten"))), str(tmp_path / "out"), to="zero1", tp=2, dp=1)
    assert any("no pattern of the checkpoint matches gate_up, qkv, row" in note for note in done.notes)


REFUSED = {
    "parts that are not even": (autotp(2, 2), 3, (), "do not divide by 3 (expected multiples of 3, found [8, 4, 4])"),
    "nothing says how": (Grid("plain"), 2, (), "embed.weight: nothing says how it is cut"),
    "a rule of another whole": (
        cut(1, layers="unsaid"),
        2,
        [{**rule, "vocabulary": 5} if "vocabulary" in rule else rule for rule in RULES],
        "embed: the parameter that was cut has another shape",
    ),
    "experts": (Grid("moe", ep=2, dp=2), 2, [{"parameters": ".*"}], "has files of experts"),
    "a layer of which nothing says how": (Grid("pipeline", pp=2), 2, (), "1.w: nothing says how it is cut"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_so_is_refused_by_name(folders: Folders, tmp_path: Path, case: str) -> None:
    source, tp, rules, text = REFUSED[case]
    with use_rules(parse_rules(list(rules))), pytest.raises(UnsupportedLayout) as raised:
        convert(str(folders(source)), str(tmp_path / "out"), to="zero1", tp=tp, dp=1)
    assert text in str(raised.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("to", "size"), [("universal", "tp"), ("universal", "pp"), ("zero3", "ep")])
def test_sizes_that_are_not_written_are_refused(folders: Folders, tmp_path: Path, to: str, size: str) -> None:
    with pytest.raises(ConfigError, match=f"--{size}: {to} has no such option"):
        convert(str(folders(cut(2))), str(tmp_path / "out"), to=to, **{size: 2})


def moe(ep: int, dp: int, stage: int | str = 1, dtype: str = "fp32", layers: str = "usual") -> Grid:
    config = {"use_data_before_expert_parallelism": True} if layers == "swapped" else {}
    return Grid("moe", ep=ep, dp=dp, stage=stage, dtype=dtype, config=config, layers=layers)


TWO = moe(2, 4, layers="two sizes")
EXPERTS = [
    (moe(2, 4), "zero1", moe(4, 4), False),
    (moe(2, 4), "zero2", moe(2, 2, 2), False),
    (moe(2, 4, layers="swapped"), "zero1", moe(2, 2, layers="swapped"), False),
    (moe(2, 4, layers="swapped"), "zero1", moe(2, 2), True),
    (moe(4, 4, "bf16opt", "bf16"), "bf16", moe(2, 4, "bf16opt", "bf16"), False),
    (TWO, "zero1", moe(2, 4), False),
    (TWO, "zero2", moe(1, 4, 2), False),
    (moe(1, 4), "zero1", TWO, True),
]


@pytest.mark.parametrize(("source", "to", "target", "shown"), EXPERTS, ids=str)
def test_what_is_written_for_several_expert_parallel_ranks_is_loaded_by_deepspeed(
    worlds: Any, folders: Folders, tmp_path: Path, source: Grid, to: str, target: Grid, shown: bool
) -> None:
    """Each rank's experts, of layers of one size or several, residual ones, in either order of the ranks; and back."""
    like = first_step(folders(target), tmp_path / "like") if shown else None
    out, size = tmp_path / "out", None if shown else target.ep
    done = convert(str(folders(source)), str(out), to=to, ep=size, dp=target.dp, like=like)
    assert any("PYTHONHASHSEED" in note for note in done.notes) == (target is TWO)
    assert not verify(str(out), deep=True).faults
    found = diff(str(folders(source)), str(out))
    assert all(one.state == "equal" for one in found.tensors)
    assert found.equal or source is TWO or target is TWO  # with other param groups
    arguments = {"grid": target, "folder": str(out), "saved_ep": expert_sizes(source)}
    for rank in worlds[target.ranks].run("grid_jobs.load", hooks=False, **arguments):
        assert rank["wrong"] == {}
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)
        assert {group["name"] for group in rank["groups"][1:]} == {f"ep_size_{ep}" for ep in expert_sizes(target)}


NOT_EXPERTS = {
    "experts that do not divide": (moe(2, 2), {"ep": 3, "dp": 3}, None, "cannot be shared evenly by so many ranks"),
    "ranks that do not divide": (moe(2, 2), {"ep": 4}, None, "--ep 4: 2 data-parallel ranks are not a multiple"),
    "no experts": (cut(1), {"ep": 2, "dp": 2}, None, "--ep 2: no parameter is an expert"),
    "another size than is shown": (moe(1, 2), {"ep": 1}, moe(2, 2), "--ep 1: --like shows 2"),
}


@pytest.mark.parametrize("case", NOT_EXPERTS)
def test_experts_that_cannot_be_dealt_out_so_are_refused(folders: Folders, tmp_path: Path, case: str) -> None:
    source, asked, like, text = NOT_EXPERTS[case]
    shown = str(folders(like)) if like is not None else None
    with pytest.raises(ReshardError) as raised:
        convert(str(folders(source)), str(tmp_path / "out"), to="zero1", like=shown, **asked)
    assert text in str(raised.value) and not (tmp_path / "out").exists()


def pipe(pp: int, dp: int = 1, stage: int | str = 1, dtype: str = "fp32", layers: str = "one position") -> Grid:
    return Grid("pipeline", pp=pp, dp=dp, stage=stage, dtype=dtype, layers=layers)


def first_step(folder: Path, to: Path) -> str:
    """What a run with these stages has saved, with other values in all tensors: the source's must not be there."""
    shutil.copytree(folder, to)
    for file in to.glob("t/*.pt"):
        content = torch.load(file, weights_only=False)
        torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().mul_(3).add_(1), content)
        torch.save(content, file)
    return str(to)


STAGES = [
    (pipe(2, 2, layers="usual"), "zero1", pipe(4)),
    (pipe(2, 2, layers="usual"), "zero1", pipe(3)),
    (pipe(4, layers="usual"), "zero1", pipe(2, 2)),
    (pipe(2, 2, 0, "bf16", layers="usual"), "bf16", pipe(3, 1, "bf16opt", "bf16")),
    (pipe(2, 2, 1, "bf16", layers="usual"), "zero1", pipe(4, 1, 1, "bf16")),
    (pipe(2, 2), "zero1", pipe(2)),
    (pipe(2, 2, layers="odd ones"), "zero1", pipe(3, layers="odd ones")),
]


@pytest.mark.parametrize("hooks", [False, True], ids=["DeepSpeed", "ds_reshard"])
@pytest.mark.parametrize(("source", "to", "target"), STAGES, ids=str)
def test_what_is_written_for_stages_is_loaded_by_deepspeed(
    worlds: Any, folders: Folders, tmp_path: Path, source: Grid, to: str, target: Grid, hooks: bool
) -> None:
    """As a first save of the coming run shows them: each has its parameters, param groups, schedule and layers.

    What is not tied of a tied module has no file in a later stage, of DeepSpeed's own saves either: its weight stays as
    it was until the first step, and its master is right.
    """
    like, out = first_step(folders(target), tmp_path / "like"), tmp_path / "out"
    done = convert(str(folders(source)), str(out), to=to, pp=target.pp, like=like)
    assert not any("one stage" in note for note in done.notes)
    assert not verify(str(out), deep=True).faults
    assert all(one.state == "equal" for one in diff(str(folders(source)), str(out)).tensors)
    for rank in worlds[target.ranks].run("grid_jobs.load", grid=target, folder=str(out), hooks=hooks):
        assert rank["wrong"] in ({}, {} if hooks else {"tied_modules.embed.position": 3})
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)
        assert rank["scheduler"]["last_epoch"] == 1


def divided(pp: int, dp: int = 1, tp: int = 1, layers: str = "divided") -> Grid:
    return Grid("pipeline", pp=pp, dp=dp, tp=tp, layers=layers)


SAME = "divided one position"
GRIDS = [
    (divided(2, tp=2), "zero1", divided(1, 2, layers=SAME), False),
    (divided(2, tp=2), "zero1", divided(1, tp=4, layers=SAME), False),
    (divided(4), "zero1", divided(1, 2, 2, layers=SAME), False),
    (divided(2, 2), "zero1", divided(2, tp=2, layers=SAME), True),
    (divided(1, 2, 2), "zero1", divided(2, tp=2, layers=SAME), True),
    (divided(2), "zero1", divided(1, 1, 2, layers=SAME), False),
    (autotp(2, 2), "zero2", autotp(4, 1, 2), True),
    (autotp(2, 2, "bf16opt", "bf16"), "zero3", autotp(3, 1, 3, "bf16"), True),
    (autotp(1), "zero1", autotp(3), True),
]


@pytest.mark.parametrize(("source", "to", "target", "shown"), GRIDS, ids=str)
def test_what_is_written_for_a_grid_is_loaded_by_deepspeed(
    worlds: Any, folders: Folders, tmp_path: Path, source: Grid, to: str, target: Grid, shown: bool
) -> None:
    """Stages of several tensor-parallel ranks, and parts that are not even as a first save of the run shows them."""
    like = first_step(folders(target), tmp_path / "like") if shown else None
    out = tmp_path / "out"
    with use_rules(parse_rules(PIPE_RULES if source in (divided(4), divided(2, 2)) else ())):
        convert(str(folders(source)), str(out), to=to, tp=None if shown else target.tp, dp=target.dp, like=like)
        assert all(one.state == "equal" for one in diff(str(folders(source)), str(out)).tensors)
    assert not verify(str(out), deep=True).faults
    for rank in worlds[target.ranks].run("grid_jobs.load", grid=target, folder=str(out), hooks=False):
        assert rank["wrong"] in ({}, {"tied_modules.embed.position": 3} if target.pp > 1 else {})
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)
        assert rank["scheduler"]["last_epoch"] == 1


def test_a_plain_module_becomes_stages(worlds: Any, folders: Folders, tmp_path: Path) -> None:
    """By the names that they have there, and a first save that shows which are in which stage, and in which file."""
    names = {
        "embed\\.(.*)": "tied_modules.embed.{1}",
        "blocks\\.(?P<n>[01])\\.(.*)": "{n+1}.{2}",
        "blocks\\.2\\.(.*)": "4.{1}",
        "norm\\.(.*)": "6.{1}",
    }
    (tmp_path / "names.json").write_text(json.dumps(names))
    target = pipe(2)
    like = first_step(folders(target), tmp_path / "like")
    source, out = folders(Grid("plain", dp=2)), tmp_path / "out"
    convert(str(source), str(out), to="zero1", dp=1, like=like, names=str(tmp_path / "names.json"))
    for rank in worlds[2].run("grid_jobs.load", grid=target, folder=str(out), hooks=False):
        assert rank["wrong"] in ({}, {"tied_modules.embed.position": 3})
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)


NOT_STAGES = {
    "other tensor-parallel ranks than are shown": (pipe(2), {"tp": 4}, divided(2, tp=2), "--tp 4: --like shows 2"),
    "ranks of another model": (autotp(2, 2), {}, autotp(3, 1, 2, layers="few"), "few.weight: differs from the source"),
    "no folder shows them": (pipe(2), {"pp": 4}, None, "--pp 4: no file says which layers"),
    "the folder shows others": (pipe(2), {"pp": 4}, pipe(2), "--pp 4: no file says which layers"),
    "the folder shows none": (pipe(2), {}, cut(1), "has no stages"),
    "a plain module": (Grid("plain"), {}, pipe(2), "embed.weight: differs from the source"),
    "a stage that there is not": (pipe(2), {"to": "zero2"}, pipe(4), "cannot be the files of a PipelineModule"),
    "another model": (pipe(2), {}, pipe(2, layers="no ties"), "3.w: differs from the source"),
}


@pytest.mark.parametrize("case", NOT_STAGES)
def test_stages_that_are_not_known_are_refused(folders: Folders, tmp_path: Path, case: str) -> None:
    source, asked, like, text = NOT_STAGES[case]
    shown = str(folders(like)) if like is not None else None
    with pytest.raises(ReshardError) as raised:
        convert(str(folders(source)), str(tmp_path / "out"), **{"to": "zero1", "like": shown, **asked})
    assert text in str(raised.value) and not (tmp_path / "out").exists()


def test_a_conversion_is_not_resumed_with_other_rules(folders: Folders, tmp_path: Path) -> None:
    """What was written by the first rules would stand beside what is written by the second."""
    source, out = str(folders(cut(1, layers="unsaid"))), str(tmp_path / "out")
    with use_rules(parse_rules(RULES)):
        convert(source, out, to="zero1", tp=2, dp=1, options=Options(shard=(0, 2)))
    with (
        use_rules(parse_rules([*RULES[:-1], {"parameters": "norm"}])),
        pytest.raises(ReshardError, match="left by another conversion"),
    ):
        convert(source, out, to="zero1", tp=2, dp=1, options=Options(shard=(1, 2)))
