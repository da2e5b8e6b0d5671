"""`engine.load_checkpoint(FOLDER)` of a folder of another format: every master, moment and step, under any layout."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run, ds_config
from gathered import assert_same, same_bits
from loading_modules import Counting
from safetensors.torch import load_file, save_file
from saves import Saves

from ds_reshard.operations import convert

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MODEL = Model(groups=2, scheduler=False)


@pytest.fixture(scope="module")
def folders(saves: Saves, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same run in each format, and what each of its ranks held."""

    @functools.cache
    def folder(dtype: str, kind: str) -> tuple[Path, Any]:
        source, saved = saves(Run(2, 3, dtype), MODEL)
        out = tmp_path_factory.mktemp("other") / kind
        convert(str(source), str(out), to=kind)
        return out, saved

    return folder


@pytest.mark.parametrize("run", [Run(1, 2), Run(2, 3), Run(3, 2), Run(0, 2, "fp32"), Run(3, 3, "fp32")], ids=str)
@pytest.mark.parametrize("kind", ["dcp", "accelerate", "pytorch"])
def test_masters_moments_and_steps_come_back(worlds: Any, folders: Any, kind: str, run: Run) -> None:
    folder, saved = folders(run.dtype, kind)
    loaded = worlds[run.dp].run("load", run=run, model=MODEL, folder=str(folder), more=2)
    assert_same(saved, loaded)
    assert loaded[0]["steps"] == saved[0]["steps"]
    assert loaded[0]["later"] == pytest.approx(saved[0]["later"], abs=1e-2 if run.dtype == "bf16" else 1e-5)


@pytest.mark.parametrize("run", [Run(0, 1, "fp32"), Run(2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_an_extra_state_that_is_a_tensor_comes_back(worlds: Any, tmp_path: Path, run: Run, kind: str) -> None:
    state = Counting(7.0).state_dict()
    if kind == "torch":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_file(state, tmp_path / "model.safetensors")
    assert worlds[run.dp].run("loading_modules.load_counting", run=run, folder=str(tmp_path)) == [7.0] * run.dp


@pytest.mark.parametrize("run", [Run(1, 2), Run(3, 2), Run(0, 1, "fp32")], ids=str)
def test_a_tied_weight_that_a_folder_has_under_its_first_name_alone(
    worlds: Any, saves: Saves, tmp_path: Path, run: Run
) -> None:
    """As safetensors does, in which transformers saves; also of what is converted from there, and of weights alone."""
    model = Model(groups=2, tied=True, scheduler=False)
    source, saved = saves(Run(2, 2, run.dtype), model)
    convert(str(source), str(tmp_path / "plain"), to="pytorch")
    assert "head.weight" not in load_file(tmp_path / "plain" / "model.safetensors")
    convert(str(tmp_path / "plain"), str(tmp_path / "zero"), to="zero1", dp=3)
    for folder in ("plain", "zero"):
        at = str(tmp_path / folder)
        assert_same(saved, worlds[run.dp].run("load", run=run, model=model, folder=at))
        alone = {"load_optimizer_states": False}
        for one in worlds[run.dp].run("load", run=run, model=model, folder=at, arguments=alone):
            assert same_bits(one["weights"]["head.weight"], saved[0]["weights"]["head.weight"])
    (tmp_path / "plain" / "optimizer.pt").unlink()
    save_file({"other": torch.ones(2)}, tmp_path / "plain" / "model.safetensors")
    assert "ModelMismatch" in _refused(worlds, run, tmp_path / "plain", model, **{"load_optimizer_states": False})


@pytest.mark.parametrize("run", [Run(0, 1, "fp32"), Run(1, 2, "fp32")], ids=str)
def test_one_weight_of_a_folder_is_two_of_the_run(worlds: Any, tmp_path: Path, run: Run) -> None:
    """Without the optimizer; a weight that does not lie row by row in the run is refused before anything changes."""
    values = torch.randn(4, 3)
    torch.save({"first": values}, tmp_path / "pytorch_model.bin")
    how = {"run": run, "folder": str(tmp_path), "names": {"first": ["first", "second"]}}
    for one in worlds[run.dp].run("loading_modules.load_pair", **how, turned=False):
        assert not one["told"]
        assert same_bits(one["first"], values)
        assert same_bits(one["second"], values)


def test_a_weight_that_lies_column_by_column_in_the_run(worlds: Any, tmp_path: Path) -> None:
    """It is read whole, which a folder of another format is not: refused before anything changes."""
    torch.save({"first": torch.randn(4, 3), "second": torch.randn(4, 3)}, tmp_path / "pytorch_model.bin")
    how = {"run": Run(0, 1, "fp32"), "folder": str(tmp_path), "names": {"first": "first", "second": "second"}}
    (one,) = worlds[1].run("loading_modules.load_pair", **how, turned=True)
    assert "module entry second: is not contiguous in this run" in one["told"]
    assert not one["first"].any()


def _refused(worlds: Any, run: Run, folder: Path, model: Model = MODEL, **how: Any) -> str:
    told = worlds[run.dp].run("load_refused", run=run, model=model, folder=str(folder), **how)
    assert all(one["unchanged"] for one in told) and len({one["text"] for one in told}) == 1, told
    return f"{told[0]['error']}: {told[0]['text']}"


def test_names_of_another_framework(worlds: Any, folders: Any, saves: Saves, tmp_path: Path) -> None:
    """Renamed there and back; a map with every kind of mistake is refused with all of them at once."""
    source, saved = saves(Run(2, 3), MODEL)
    weights = {one.name for one in _tensors(source)}
    there = tmp_path / "there.json"
    there.write_text(json.dumps({name: f"model.{name}" for name in sorted(weights)}))
    convert(str(source), str(tmp_path / "out"), to="dcp", names=str(there))
    back = tmp_path / "back.json"
    back.write_text(json.dumps({f"model.{name}": name for name in sorted(weights)}))
    run = Run(1, 2, config={"ds_reshard": {"names": str(back)}})
    assert_same(saved, worlds[2].run("load", run=run, model=MODEL, folder=str(tmp_path / "out")))
    first, second, *others = sorted(weights)
    wrong = {f"model.{first}": first, f"model.{second}": first, "ghost": "nobody"}
    back.write_text(json.dumps(wrong))
    said = _refused(worlds, run, tmp_path / "out")
    assert "ghost: is in the map, and the source has no such parameter" in said
    assert f"model.{others[0]}: is in the source and not in the map" in said
    assert f"{first}: is the name of several parameters in the map" in said


def _tensors(folder: Path) -> Any:
    from ds_reshard.operations import fingerprint

    return [one for one in fingerprint(str(folder)).tensors if one.kind == "fp32"]


def test_what_the_source_does_not_hold_is_refused(worlds: Any, folders: Any, tmp_path: Path) -> None:
    """A scheduler, an optimizer; a model of other names; none of it is invented."""
    run = Run(1, 2)
    folder, _ = folders("bf16", "pytorch")
    assert "holds no scheduler state" in _refused(worlds, run, folder, Model(groups=2))
    convert(str(folders("bf16", "dcp")[0]), str(tmp_path / "weights"), to="safetensors")
    assert "holds no optimizer" in _refused(worlds, run, tmp_path / "weights")
    assert "ModelMismatch" in _refused(worlds, run, folder, Model(groups=2, scheduler=False, tied=True))


def test_an_optimizer_without_names_decides_no_load_of_weights_alone(
    worlds: Any, folders: Any, foreseen: Any, tmp_path: Path
) -> None:
    """Neither does a file of another kind in its place, which is not opened."""
    source, saved = folders("bf16", "pytorch")
    folder, run = tmp_path / "saved", Run(1, 2)
    shutil.copytree(source, folder)
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    for group in state["param_groups"]:
        del group["param_names"]
    torch.save(state, folder / "optimizer.pt")
    assert "which parameter is which" in _refused(worlds, run, folder)
    for content in (None, b"no file of torch"):
        if content is not None:
            (folder / "optimizer.pt").write_bytes(content)
        alone = {"load_optimizer_states": False}
        loaded = worlds[2].run("load", run=run, model=MODEL, folder=str(folder), arguments=alone)
        assert all(same_bits(loaded[0]["weights"][name], kept) for name, kept in saved[0]["weights"].items())
    skipped = {**ds_config(run), "ds_reshard": {"resume": {"optimizer": "skip"}}}
    for config, faults in ((skipped, 0), (ds_config(run), 1)):
        assert len(foreseen.forecast(str(folder), foreseen.PlannedRun(config=config, world=2)).faults) == faults
    for there in ("not opened", None):
        told = foreseen.forecast(str(folder), foreseen.PlannedRun(config=skipped, world=2))
        assert told.faults == () and told.report is not None
        rows = [told.report[name] for name in ("fp32 masters", "moments")]
        assert [(row.checkpoint, row.used) for row in rows] == [(there, "from weights"), (there, "anew")]
        assert told.report["stage and dp"].checkpoint == ("plain PyTorch", 1), "and not a stage of ZeRO"
        (folder / "optimizer.pt").unlink(missing_ok=True)


@pytest.mark.parametrize("fault", ["cut", "missing"])
@pytest.mark.parametrize(
    ("kind", "files"), [("accelerate", "optimizer_0/*"), *[(stage, "*/*optim_states.pt") for stage in (1, 2, 3)]]
)
def test_optimizer_files_that_are_damaged_decide_no_load_of_weights_alone(
    worlds: Any, folders: Any, saves: Saves, foreseen: Any, tmp_path: Path, kind: str | int, files: str, fault: str
) -> None:
    """Under the saved layout or another; of ZeRO stage 3 alone they hold the weights."""
    source, saved = folders("bf16", kind) if isinstance(kind, str) else saves(Run(kind, 2), MODEL)
    folder, alone = tmp_path / "saved", {"load_optimizer_states": False}
    shutil.copytree(source, folder)
    for file in folder.glob(files):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        if fault == "missing":
            file.unlink()
    for run in (Run(2, 2), Run(1, 3)):
        skipped = {**ds_config(run), "ds_reshard": {"resume": {"optimizer": "skip"}}}
        told = foreseen.forecast(str(folder), foreseen.PlannedRun(config=skipped, world=run.dp))
        assert bool(told.faults) is (kind == 3)
        if kind == 3:
            _refused(worlds, run, folder, **alone)
            continue
        loaded = worlds[run.dp].run("load", run=run, model=MODEL, folder=str(folder), arguments=alone)
        assert all(same_bits(loaded[0]["weights"][name], kept) for name, kept in saved[0]["weights"].items())
        _refused(worlds, run, folder)


def test_a_tied_weight_that_was_saved_twice(worlds: Any, saves: Saves, tmp_path: Path) -> None:
    """The run's own sharing proves it: the same bytes under both names load, others are refused on every rank."""
    model = Model(scheduler=False, tied=True)
    source, saved = saves(Run(2, 3), model)
    folder = tmp_path / "out"
    convert(str(source), str(folder), to="pytorch")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "head.weight": weights["embed.weight"].clone()}, folder / "model.safetensors")
    run = Run(1, 2)
    assert_same(saved, worlds[2].run("load", run=run, model=model, folder=str(folder)))
    other = weights["embed.weight"].clone()
    other[-1, -1] += 1
    save_file({**weights, "head.weight": other}, folder / "model.safetensors")
    said = _refused(worlds, run, folder, model)
    assert "parameter head.weight: is tied to embed.weight in this run, and has other values" in said


def test_an_optimizer_of_another_kind_is_refused(worlds: Any, folders: Any, saves: Saves, tmp_path: Path) -> None:
    """States that this run's optimizer does not have, and states that it has and the source has not."""
    run, momentum = Run(2, 2), Model(groups=2, scheduler=False, optimizer="sgd")
    adam, _ = folders("bf16", "pytorch")
    said = _refused(worlds, run, adam, momentum)
    assert "exp_avg" in said and "momentum" in said, said
    source, saved = saves(Run(2, 3), momentum)
    folder = tmp_path / "momentum"
    convert(str(source), str(folder), to="pytorch")
    assert "does not tell how many steps were made" in _refused(worlds, run, folder, momentum)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": saved[0]["steps"][0]}))
    loaded = worlds[2].run("load", run=run, model=momentum, folder=str(folder))
    assert_same(saved, loaded)
    assert loaded[0]["steps"] == saved[0]["steps"]
    assert "momentum" in _refused(worlds, run, folder, MODEL)
