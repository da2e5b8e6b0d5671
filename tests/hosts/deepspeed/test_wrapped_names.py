"""Names that a wrapper has changed between save and load: the error gives the line that mends it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import wrapped_jobs
from cases import Run
from safetensors.torch import load_file

from ds_reshard.cli.main import main
from ds_reshard.operations import convert
from ds_reshard.operations.wrapper_names import patterns

pytestmark = pytest.mark.distributed

ROWS = [
    (Run(2, 2), "compiled", Run(2, 1), "plain"),
    (Run(3, 2), "held", Run(1, 2), "compiled"),
    (Run(2, 2), "plain", Run(2, 2), "compiled"),
    (Run(0, 1), "compiled", Run(0, 1), "plain"),
    (Run(1, 1), "half", Run(3, 2), "plain"),
    (Run(2, 1), "adapter default", Run(2, 2), "adapter mine"),
    (Run(3, 2), "adapter default", Run(3, 2), "adapter mine"),
]
LOOSE = {"load_module_strict": False, "load_optimizer_states": False}


@pytest.mark.parametrize(("source", "saved", "target", "loaded"), ROWS, ids=str)
def test_the_line_of_the_error_renames_them(
    worlds: Any, tmp_path: Path, source: Run, saved: str, target: Run, loaded: str
) -> None:
    """Strict or not; and what the run saves under its own names then loads with the same line."""
    (truth, *_) = worlds[source.dp].run("wrapped_jobs.save", run=source, wrapper=saved, folder=str(tmp_path / "ckpt"))
    asked = {"run": target, "wrapper": loaded, "folder": str(tmp_path / "ckpt")}
    for arguments in ({}, LOOSE) if saved != "half" else ({},):
        refused = worlds[target.dp].run("wrapped_jobs.load", names=None, **asked, **arguments)
        assert {one.get("error") for one in refused} == {"ModelMismatch"}, refused
        assert len({one["text"] for one in refused}) == 1
        line = re.search(r'add "names": (\{.*\}) to the "ds_reshard" section', refused[0]["text"])
        assert line is not None, refused[0]["text"]
    again = str(tmp_path / "again")
    for told in worlds[target.dp].run("wrapped_jobs.load", names=json.loads(line[1]), again=again, **asked):
        assert "error" not in told, told
        shared = truth.keys() & told["held"].keys()
        assert shared and all(torch.equal(truth[name].float(), told["held"][name].float()) for name in shared)


def test_none_of_what_is_trained_is_an_error_and_some_is_a_warning(worlds: Any, tmp_path: Path) -> None:
    """Whatever strict says; names that no wrapper explains."""
    worlds[2].run("wrapped_jobs.save", run=Run(2, 2), wrapper="two second", folder=str(tmp_path))
    asked = {"folder": str(tmp_path), "names": None, **LOOSE}
    (told,) = worlds[1].run("wrapped_jobs.load", run=Run(2, 1), wrapper="two other", **asked)
    warned = [line for line in told["lines"] if "has 2 of the 4 parameters that this run trains" in line]
    assert warned and "other.weight" in warned[0] and "second.weight" in warned[0], told
    worlds[1].run("wrapped_jobs.save", run=Run(2, 1), wrapper="adapter default", folder=str(tmp_path / "other"))
    asked["folder"] = str(tmp_path / "other")
    for told in worlds[2].run("wrapped_jobs.load", run=Run(1, 2), wrapper="two other", **asked):
        assert told.get("error") == "ModelMismatch" and "has 0 of the 4" in told["text"]


@pytest.mark.parametrize(("source", "target"), [(Run(2, 2), Run(3, 1)), (Run(0, 1), Run(0, 1)), (Run(1, 1), Run(1, 1))])
def test_what_a_loose_load_leaves_in_the_checkpoint_is_named(
    worlds: Any, tmp_path: Path, source: Run, target: Run
) -> None:
    """As what stays as it is in the run; whoever loads."""
    worlds[source.dp].run("wrapped_jobs.save", run=source, wrapper="headed", folder=str(tmp_path))
    asked = {"run": target, "wrapper": "two second", "folder": str(tmp_path), "names": None}
    (told,) = worlds[target.dp].run("wrapped_jobs.load", **asked, **LOOSE)
    (line,) = [line for line in told["lines"] if "left out" in line]
    assert "has entries that this run's model has not, and they are left out (2): head.bias, head.weight" in line


@pytest.mark.parametrize("arguments", [LOOSE, {"load_module_strict": False}], ids=["weights", "optimizer"])
@pytest.mark.parametrize(("source", "target"), [(Run(2, 2), Run(3, 1)), (Run(0, 1), Run(0, 1)), (Run(1, 1), Run(1, 1))])
def test_buffers_that_one_side_alone_has_are_named(
    worlds: Any, tmp_path: Path, source: Run, target: Run, arguments: dict[str, bool]
) -> None:
    """Of both sides at once, and also where the optimizer is loaded, for which the trained parameters must agree."""
    worlds[source.dp].run("wrapped_jobs.save", run=source, wrapper="buffered old", folder=str(tmp_path))
    asked = {"run": target, "wrapper": "buffered new", "folder": str(tmp_path), "names": None}
    (told,) = worlds[target.dp].run("wrapped_jobs.load", **asked, **arguments)
    lines = " ".join(told["lines"])
    assert "has entries that this run's model has not, and they are left out (1): old" in lines, told
    assert "lacks entries of this run's model, and they keep their values (1): new" in lines, told


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("frozen first", "two second"),
        ("two second", "frozen first"),
        ("two second", "longer"),
        ("frozen first", "longer"),
    ],
)
@pytest.mark.parametrize(("source", "target"), [(Run(3, 2), Run(2, 2)), (Run(3, 1), Run(3, 2)), (Run(2, 1), Run(3, 2))])
def test_weights_alone_are_those_of_the_checkpoint_whatever_is_trained(
    worlds: Any, tmp_path: Path, source: Run, target: Run, saved: str, loaded: str
) -> None:
    """From stage 3 a weight is the cast of its master, if it was trained; one that is new makes no other one random."""
    (truth, *_) = worlds[source.dp].run("wrapped_jobs.save", run=source, wrapper=saved, folder=str(tmp_path))
    asked = {"run": target, "wrapper": loaded, "folder": str(tmp_path), "names": None, **LOOSE}
    for told in worlds[target.dp].run("wrapped_jobs.load", **asked):
        assert "error" not in told, told
        weights = [f"{number} weight" for number in range(4)]
        assert [name for name in weights if not torch.equal(truth[name], told["held"][name])] == []


@pytest.mark.parametrize(
    "names",
    [
        {"(first|second)\\.weight": "{1}.weight", "first.bias": "second.bias", "second.bias": "first.bias"},
        {"first\\.(.+)": "second.{1}", "second\\.(.+)": "first.{1}"},
        {"first\\.(.+)": "second.{1}", "second\\.(.+)": "third.{1}"},
    ],
    ids=["names", "patterns", "shifted"],
)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_names_that_the_run_has_are_not_exchanged_in_silence(
    worlds: Any, tmp_path: Path, stage: int, names: dict[str, str]
) -> None:
    worlds[1].run("wrapped_jobs.save", run=Run(stage, 1), wrapper="two second", folder=str(tmp_path))
    asked = {"wrapper": "two second", "folder": str(tmp_path), "names": names}
    (told,) = worlds[1].run("wrapped_jobs.load", run=Run(stage, 1), **asked)
    assert told.get("error") == "ConfigError" and "exchanges or shifts names of this run" in told["text"], told


TWO_MAPS = [
    ("in the JSON", Run(0, 2), {}),
    ("in the JSON", Run(3, 2), {}),
    ("by path", Run(1, 2), {}),
    ("by path", Run(2, 2), LOOSE),
    ("one by path", Run(2, 2), {}),
    ("one by path", Run(3, 2), LOOSE),
]


@pytest.mark.parametrize(("form", "target", "arguments"), TWO_MAPS, ids=str)
def test_ranks_with_two_maps_load_nothing(
    worlds: Any, tmp_path: Path, form: str, target: Run, arguments: dict[str, bool]
) -> None:
    """One of them exchanges parameters of one shape; each rank alone would load. Two forms of one map are one."""
    saved = {"run": Run(target.stage, 1), "wrapper": "held", "folder": str(tmp_path / "ckpt")}
    (truth,) = worlds[1].run("wrapped_jobs.save", **saved)
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    line = {f"module.{name}": name for name in names}
    other = dict(zip(line, names[2:] + names[:2], strict=True))
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    asked = {"run": target, "wrapper": "plain", "folder": str(tmp_path / "ckpt"), **arguments}
    for maps in ([line, other], [line, {}], [{}, line], [line, line]):
        for path, held in zip(paths, maps, strict=True):
            path.write_text(json.dumps(held))
        given = {"in the JSON": maps, "by path": list(map(str, paths)), "one by path": [maps[0], str(paths[1])]}
        told = worlds[2].run("wrapped_jobs.load", names=given[form], **asked)
        if maps[0] == maps[1]:
            for one in told:
                assert "error" not in one and all(torch.equal(truth[name], held) for name, held in one["held"].items())
            continue
        error = "ConfigError" if all(maps) else "ModelMismatch"
        assert {one.get("error") for one in told} == {error}, told
        assert len({one["text"] for one in told}) == 1
        assert not all(maps) or "ranks have different maps of names" in told[0]["text"]


def test_ranks_with_two_maps_load_nothing_of_another_format(worlds: Any, tmp_path: Path) -> None:
    """Rank 0 reads that folder, and its map: a rank with another one, or with none, did not get what it had asked for.

    A file of the first node alone is enough.
    """
    worlds[1].run("wrapped_jobs.save", run=Run(1, 1), wrapper="held", folder=str(tmp_path / "ckpt"))
    convert(str(tmp_path / "ckpt"), str(tmp_path / "out"), to="dcp")
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    line = {f"module.{name}": name for name in names}
    other = dict(zip(line, names[2:] + names[:2], strict=True))
    asked = {"run": Run(2, 2), "wrapper": "plain", "folder": str(tmp_path / "out")}
    for maps in ([line, other], [line, None]):
        told = worlds[2].run("wrapped_jobs.load", names=maps, **asked)
        assert {one.get("error") for one in told} == {"ConfigError"}, told
        assert len({one["text"] for one in told}) == 1 and "ranks have different maps of names" in told[0]["text"]
    (tmp_path / "one.json").write_text(json.dumps(line))
    for own in (line, str(tmp_path / "one.json"), str(tmp_path / "none.json")):
        told = worlds[2].run("wrapped_jobs.load", names=[line, own], **asked)
        assert not [one for one in told if "error" in one], told


def test_a_rank_without_the_map_of_another_loads_nothing(worlds: Any, tmp_path: Path) -> None:
    """Where it would leave out what the other renames, with a warning."""
    worlds[1].run("wrapped_jobs.save", run=Run(1, 1), wrapper="half", folder=str(tmp_path))
    asked = {"run": Run(1, 2), "wrapper": "plain", "folder": str(tmp_path), **LOOSE}
    line = {"second._orig_mod.(.+)": "second.{1}"}
    for maps in ([line, None], [None, line]):
        told = worlds[2].run("wrapped_jobs.load", names=maps, **asked)
        assert {one.get("error") for one in told} == {"ConfigError"}, told
        assert len({one["text"] for one in told}) == 1 and "ranks have different maps of names" in told[0]["text"]
    for one in worlds[2].run("wrapped_jobs.load", names=[None, {"no such": "name"}], **asked):
        assert "error" not in one, one


@pytest.mark.parametrize(("stage", "target"), [(0, 0), (2, 1), (3, 3)])
def test_frozen_names_are_renamed_where_trained_ones_stay(worlds: Any, tmp_path: Path, stage: int, target: int) -> None:
    """As PEFT's `base_layer`, which older releases left out."""
    (truth, *_) = worlds[2].run(
        "wrapped_jobs.save", run=Run(stage, 2), wrapper="adapter default old", folder=str(tmp_path / "ckpt")
    )
    asked = {"run": Run(target, 1), "wrapper": "adapter default", "folder": str(tmp_path / "ckpt")}
    (told,) = worlds[1].run("wrapped_jobs.load", names=None, **asked)
    line = re.search(r'add "names": (\{.*\}) to the "ds_reshard" section', told["text"])
    assert line is not None, told
    again = str(tmp_path / "again")
    (told,) = worlds[1].run("wrapped_jobs.load", names=json.loads(line[1]), again=again, **asked)
    assert "error" not in told, told
    shared = truth.keys() & told["held"].keys()
    assert shared and all(torch.equal(truth[name].float(), told["held"][name].float()) for name in shared)


@pytest.mark.parametrize(("stage", "target"), [(0, 0), (1, 2), (3, 3)])
def test_a_base_is_loaded_for_what_is_new_by_the_lines_of_the_error(
    worlds: Any, tmp_path: Path, stage: int, target: int
) -> None:
    """Nothing of what is trained is there: an error, as for an adapter of another name; its lines load the base."""
    (truth,) = worlds[1].run("wrapped_jobs.save", run=Run(stage, 1), wrapper="two second", folder=str(tmp_path))
    asked = {"run": Run(target, 2), "wrapper": "headed", "folder": str(tmp_path), "names": None}
    for told in worlds[2].run("wrapped_jobs.load", **asked, load_module_only=True, load_module_strict=False):
        assert told.get("error") == "ModelMismatch" and "has 0 of the 2 parameters that this run trains" in told["text"]
    (line,) = (line for line in told["text"].splitlines() if line.startswith("ds-reshard convert"))
    assert main([str(tmp_path / "out") if word == "OUT" else word for word in line.split()[1:]]) == 0
    base = load_file(tmp_path / "out" / "model.safetensors")
    weights = [truth[f"{number} weight"] for number in range(4)]
    net = wrapped_jobs.network("headed")
    assert not net.load_state_dict(base, strict=False).unexpected_keys
    assert all(torch.equal(saved, found.bfloat16()) for saved, found in zip(weights, net.parameters(), strict=False))


def test_a_universal_folder_is_renamed_by_convert(worlds: Any, tmp_path: Path) -> None:
    """The line of the error ends in another one, and what that writes loads."""
    worlds[1].run("wrapped_jobs.save", run=Run(2, 1), wrapper="compiled", folder=str(tmp_path / "own"))
    folder, renamed, names = tmp_path / "universal", tmp_path / "renamed", tmp_path / "names.json"
    assert main(["convert", str(tmp_path / "own"), str(folder), "--to", "universal"]) == 0
    run = Run(2, 1, config={"checkpoint": {"load_universal": True}})
    line = {"_orig_mod\\.(.+)": "{1}"}
    (told,) = worlds[1].run("wrapped_jobs.load", run=run, wrapper="plain", folder=str(folder), names=line)
    assert told.get("error") == "ConfigError" and "ds-reshard convert with --names" in told["text"], told
    names.write_text(json.dumps(line))
    assert main(["convert", str(folder), str(renamed), "--to", "universal", "--names", str(names)]) == 0
    (told,) = worlds[1].run("wrapped_jobs.load", run=run, wrapper="plain", folder=str(renamed), names=None)
    assert "error" not in told, told


@pytest.mark.parametrize(
    ("saved", "run"),
    [
        ("layers.{}.mlp.weight", "layers.{}._orig_mod.mlp.weight"),
        ("module.layers.{}.w", "_orig_mod.layers.{}.w"),
        ("layers.{}.lora_A.weight", "base_model.model.layers.{}.lora_A.default.weight"),
        ("base_model.model.layers.{}.q.base_layer.weight", "layers.{}.q.weight"),
        ("model.layers.{}.w", "layers.{}.w"),
        ("layers.{}.w", "net.model.layers.{}.w"),
        ("model.layers.{}.w", "base_model.model.layers.{}.w"),
        ("_orig_mod.model.layers.{}.w", "module.layers.{}.w"),
    ],
)
def test_wrappers_of_every_layer_are_a_few_patterns(saved: str, run: str) -> None:
    names = [[form.format(number) for number in range(12)] for form in (saved, run)]
    made = patterns(*names)
    assert made is not None and len(made) <= 2
    assert patterns(["a.weight"], ["b.weight"]) is None


def test_every_rank_has_the_same_line() -> None:
    """Each has hashes of its own."""
    code = """if True:
        from ds_reshard.operations.wrapper_names import patterns
        part = [f"layers.{n}.lora_{of}" for n in range(3) for of in "AB"]
        print(patterns([f"_orig_mod.{one}.default.weight" for one in part], [f"{one}.mine.weight" for one in part]))
    """
    told = {
        subprocess.check_output([sys.executable, "-c", code], text=True, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in "1234"
    }
    assert len(told) == 1 and "lora_B" in told.pop()


def test_one_module_around_all_is_no_guess() -> None:
    """What else is saved beside it stays; a part of another model, or a name twice, is no such module."""
    assert patterns(["model.a.w", "model.b.w", "lm_head.w"], ["a.w", "b.w"]) == {r"model\.(.+)": "{1}"}
    assert patterns(["a.w", "b.w"], ["model.a.w", "model.b.w", "head.w"]) == {"(.+)": "model.{1}"}
    assert patterns(["model.a.w", "model.c.w"], ["a.w", "b.w"]) is None
    assert patterns(["student.a.w", "teacher.a.w"], ["a.w"]) is None


@pytest.mark.parametrize("loose", [False, True], ids=["strict", "partial"])
@pytest.mark.parametrize("top", ["model", "net", "app", ""])
@pytest.mark.parametrize(("saved", "loaded"), [("compiled", "plain"), ("plain", "held")])
def test_torchs_own_load_that_finds_nothing_is_mended_by_its_lines(
    worlds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str, loaded: str, top: str, loose: bool
) -> None:
    """Of `torch.distributed.checkpoint.load`: a partial one left the weights as they were, and said nothing."""
    folder = str(tmp_path / "saved")
    (truth, _) = worlds[2].run("wrapped_jobs.directory", wrapper=saved, folder=folder, top=top)
    asked = {"wrapper": loaded, "top": top, "load": True}
    told = worlds[2].run("wrapped_jobs.directory", folder=folder, loose=loose, **asked)
    assert {one.get("error") for one in told} == {"ModelMismatch"} and len({one["text"] for one in told}) == 1, told
    assert "has none of the weights that this run asks for" in told[0]["text"]
    wrote = re.search(r"write (\{.*\}) to map\.json and .*\nds-reshard (.*)", told[0]["text"])
    monkeypatch.chdir(tmp_path)
    if wrote is not None:
        Path("map.json").write_text(wrote[1])
        assert main(wrote[2].split()) == 0
    by = re.search(r"by storage_reader=(.*)", told[0]["text"])
    assert wrote is not None or by is not None
    reader = by[1].replace("'OUT'", repr(str(tmp_path / "OUT"))) if by is not None else ""
    for one in worlds[2].run("wrapped_jobs.directory", folder=str(tmp_path / "OUT"), reader=reader, **asked):
        assert "error" not in one, one
        assert all(map(torch.equal, truth["weights"], one["weights"]))


def test_torchs_own_partial_load_names_what_stays(worlds: Any, tmp_path: Path) -> None:
    worlds[2].run("wrapped_jobs.directory", wrapper="two second", folder=str(tmp_path), top="model")
    asked = {"folder": str(tmp_path), "top": "model", "load": True, "loose": True}
    told = worlds[2].run("wrapped_jobs.directory", wrapper="two other", **asked)
    stays = [line for one in told for line in one["lines"] if "lacks 8 tensors (model.other.bias, " in line]
    assert len(stays) == 1 and "which stay as they are" in stays[0], told


def test_torchs_own_strict_load_names_everything_that_is_missing(worlds: Any, tmp_path: Path) -> None:
    """In place of torch's exception, which names one key of them."""
    worlds[2].run("wrapped_jobs.directory", wrapper="two second", folder=str(tmp_path), top="model")
    asked = {"folder": str(tmp_path), "top": "model", "load": True}
    for told in worlds[2].run("wrapped_jobs.directory", wrapper="two other", **asked):
        assert told.get("error") == "ModelMismatch" and "lacks 8 tensors (model.other.bias, " in told["text"], told
