"""verl's folders of FSDP1: states of flat parameters by number, read with the order of these, which one call writes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from every_pair import FROM_FSDP
from gathered import same_bits
from safetensors.torch import load_file

import ds_reshard
from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.operations import convert, diff, fingerprint, inspect, verify

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

UNITS = "fsdp_units.json"


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bool], tuple[Path, list[Any]]]:
    """What verl's manager has saved of FSDP1 on some ranks, and what each rank held."""
    save = fresh.saver("fsdp_manager_jobs.flat_save", tmp_path_factory)
    return lambda size, orig: save(size, orig=orig, mixed=orig)


@pytest.mark.parametrize(("before", "after", "orig"), [(2, 3, True), (3, 2, False), (2, 1, True), (3, 1, False)])
def test_verl_loads_what_was_written_for_other_ranks(
    saves: Any, tmp_path: Path, before: int, after: int, orig: bool
) -> None:
    """Under the names they are the moments that the ranks held; verl's own load takes them, and training goes on."""
    folder, saved = saves(before, orig)
    expected = saved[0]["held"]
    found = {(one.name, one.kind): one.fingerprint for one in fingerprint(str(folder)).tensors}
    assert found == {at: str(fingerprint_of(tensor.contiguous())) for at, tensor in expected.items() if at[1] != "step"}
    assert sum(kind == "exp_avg" for _, kind in expected) == (12 if orig else 19)
    out = str(tmp_path / "out")
    convert(str(folder), out, to="fsdp", dp=after)
    assert verify(out, deep=True).clean and diff(str(folder), out).equal
    fresh.assert_goes_on(saved, fresh.run("fsdp_manager_jobs.flat_load", after, folder=out, orig=orig))


@pytest.mark.parametrize("orig", [True, False])
def test_it_comes_back_part_by_part(saves: Any, tmp_path: Path, orig: bool) -> None:
    """Written for three ranks and for two again, each rank's file has the very states that torch saved there."""
    folder, _ = saves(2, orig)
    convert(str(folder), str(tmp_path / "three"), to="fsdp", dp=3)
    convert(str(tmp_path / "three"), str(tmp_path / "two"), to="fsdp", dp=2)
    for rank in range(2):
        one, other = (torch.load(at / f"optim_world_size_2_rank_{rank}.pt", "cpu") for at in (folder, tmp_path / "two"))
        assert one["param_groups"] == other["param_groups"] and one["state"].keys() == other["state"].keys()
        for number, states in one["state"].items():
            assert states.keys() == other["state"][number].keys()
            assert all(same_bits(value, other["state"][number][kind]) for kind, value in states.items())


def test_it_is_told_and_converted_as_any_other(saves: Any, tmp_path: Path) -> None:
    """Inspected, compared, to torch's own folders, and to ZeRO, where every parameter is trained and of fp32."""
    folder = str(saves(2, False)[0])
    told = inspect(folder)
    assert not told.faults and len(told.groups) == 1 and told.dp == 2
    convert(folder, str(tmp_path / "dcp"), to="dcp", dp=3)
    convert(folder, str(tmp_path / "zero"), to="zero2", dp=2)
    assert diff(folder, str(tmp_path / "dcp")).equal and diff(str(tmp_path / "zero"), str(tmp_path / "dcp")).equal


@pytest.mark.parametrize("to", FROM_FSDP)
def test_folders_of_fsdp_are_written_in_other_formats(saves: Any, tmp_path: Path, to: str) -> None:
    """Every moment, and every weight as the master that it is, to the bit."""
    folder = saves(2, False)[0]
    sizes = {"dp": 3} if to in ("zero1", "zero2", "zero3", "dcp", "accelerate") else {}
    convert(str(folder), str(tmp_path / "out"), to=to, **sizes)
    expected = {(one.name, one.kind): one.fingerprint for one in fingerprint(str(folder)).tensors}
    if to == "safetensors":
        saved = load_file(tmp_path / "out" / "model.safetensors")
        assert {name: str(fingerprint_of(value)) for name, value in saved.items()} == {
            name: value for (name, kind), value in expected.items() if kind == "weight"
        }
        return
    if to == "torch":
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            saved = torch.load(tmp_path / "out" / f"{kind}.pt", weights_only=True)
            for name, value in saved.items():
                assert str(fingerprint_of(value)) == expected[name, kind], (name, kind)
        return
    assert verify(str(tmp_path / "out"), deep=True).faults == ()
    found = {(one.name, one.kind): one.fingerprint for one in fingerprint(str(tmp_path / "out")).tensors}
    for (name, kind), value in expected.items():
        kept = found.get((name, "fp32"), found.get((name, kind))) if kind == "weight" else found[name, kind]
        assert kept == value, (name, kind)


@pytest.mark.parametrize("orig", [True, False])
def test_verify_saved_compares_states_once_the_order_is_there(saves: Any, orig: bool) -> None:
    """Until then it is refused with the line to add."""
    folder, saved = saves(2, orig)
    for told in saved:
        assert told["said"] == ""
        assert told["before"].startswith("UnsupportedLayout")
        assert f"ds_reshard.save_units('{folder}', model, optimizer)" in told["before"]


def test_without_the_order_the_line_to_add_is_named(saves: Any, tmp_path: Path) -> None:
    """The weights are read, and nothing is guessed of the states."""
    folder = tmp_path / "folder"
    shutil.copytree(saves(2, True)[0], folder)
    os.remove(folder / UNITS)
    line = f"ds_reshard.save_units('{folder}', model, optimizer)"
    found = fingerprint(str(folder))
    assert {one.kind for one in found.tensors} == {"weight"} and line in found.notes[0]
    for to in ("fsdp", "dcp"):
        with pytest.raises(ds_reshard.UnsupportedLayout) as raised:
            convert(str(folder), str(tmp_path / "out"), to=to, dp=3)
        assert line in str(raised.value) and not (tmp_path / "out").exists()


def _order(folder: Path, change: Callable[[Any], object]) -> None:
    held = json.loads((folder / UNITS).read_text())
    change(held)
    (folder / UNITS).write_text(json.dumps(held))


def _optim(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / "optim_world_size_2_rank_1.pt"
    saved = torch.load(path)
    change(saved)
    torch.save(saved, path)


def _first(saved: Any) -> Any:
    return next(iter(saved["state"].values()))


def _halve(saved: Any) -> None:
    states = _first(saved)
    states["exp_avg"] = states["exp_avg"][: len(states["exp_avg"]) // 2].clone()


def _turn(held: Any) -> None:
    held["parameters"].reverse()


def _other_shape(held: Any) -> None:
    held["units"][0]["embed.weight"]["shape"] = [16, 24]


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "half-size moments": (lambda f: _optim(f, _halve), "is not rank 1's part of 2"),
    "another rate": (lambda f: _optim(f, lambda saved: saved["param_groups"][0].update(lr=1.0)), "of another run"),
    "another step": (lambda f: _optim(f, lambda saved: _first(saved)["step"].add_(1)), "of another step or run"),
    "a missing state": (lambda f: _optim(f, lambda saved: _first(saved).pop("exp_avg_sq")), "found nothing"),
    "another optimizer": (
        lambda f: _optim(f, lambda saved: saved["param_groups"][0]["params"].pop()),
        "its param groups are of another optimizer",
    ),
    "another order": (lambda f: _order(f, _turn), "is not rank 0's part of 2"),
    "another shape": (lambda f: _order(f, _other_shape), "embed.weight is another than in the model's files"),
    "no order": (lambda f: (f / UNITS).write_text("[1"), "holds no units of FSDP"),
    "a unit twice": (lambda f: _order(f, lambda held: held["units"].append(held["units"][0])), "is in two units"),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_what_does_not_fit_is_named(saves: Any, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(saves(2, True)[0], folder)
    wreck, text = REFUSED[damage]
    wreck(folder)
    with pytest.raises(ds_reshard.CheckpointDamaged) as raised:
        convert(str(folder), str(tmp_path / "out"), to="fsdp", dp=3)
    assert text in str(raised.value)
    assert os.listdir(tmp_path) == ["folder"]
    assert inspect(str(folder)).faults
