"""Folders of torch_checkpointing 0.1.1, saved by the package itself under gloo, every element by a rule."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from item_file_jobs import PACKAGE, expected
from safetensors.torch import load_file

import ds_reshard
from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.operations import convert, diff, fingerprint, inspect, verify

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "megatron"))
from releases import NotFetched, home

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Saves = Callable[..., Path]
BY_RULE = {at: str(fingerprint_of(tensor)) for at, tensor in expected().items()}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """The folder that so many ranks have saved; each made once."""
    try:
        package = str(home(PACKAGE))
    except NotFetched as error:
        pytest.skip(str(error))

    @functools.cache
    def save(ranks: int, **given: Any) -> Path:
        folder = tmp_path_factory.mktemp("saved") / "out"
        told = fresh.run("item_file_jobs.save", ranks, folder=str(folder), path=package, **given)
        assert told == [None] * ranks, told
        return folder

    return save


def _prints(folder: object) -> dict[tuple[str, str], str]:
    return {(one.name, one.kind): one.fingerprint for one in fingerprint(str(folder)).tensors}


@pytest.mark.parametrize(("ranks", "given"), [(3, {}), (4, {"tp": 2}), (1, {})], ids=str)
def test_every_tensor_is_read_as_the_rule_has_it(saves: Saves, ranks: int, given: Any) -> None:
    """Rows over FSDP, and over FSDP and tensor parallelism, which cut one axis or two."""
    folder = saves(ranks, **given)
    told = inspect(str(folder))
    assert not told.faults and told.steps.optimizer_steps == (7,) and [group.members for group in told.groups] == [2, 2]
    assert verify(str(folder), deep=True).clean
    assert _prints(folder) == BY_RULE
    assert diff(str(saves(3)), str(folder)).equal


@pytest.mark.parametrize("to", ["zero1", "zero2", "zero3", "universal", "dcp", "accelerate", "pytorch", "safetensors"])
def test_folders_are_written_in_other_formats(saves: Saves, tmp_path: Path, to: str) -> None:
    """Every moment and weight of four ranks on a mesh of 2x2, to the bit, for three where a format has ranks."""
    out = tmp_path / "out"
    sizes = {"dp": 3} if to in ("zero1", "zero2", "zero3", "dcp", "accelerate") else {}
    notes = convert(str(saves(4, tp=2)), str(out), to=to, **sizes).notes
    assert "left out, as nothing here reads them: step_0.pt, step_1.pt, step_2.pt, step_3.pt" in notes
    if to == "safetensors":
        found = {
            (name, "weight"): str(fingerprint_of(one)) for name, one in load_file(out / "model.safetensors").items()
        }
        assert found == {at: value for at, value in BY_RULE.items() if at[1] == "weight"}
        return
    assert verify(str(out), deep=True).faults == ()
    found = _prints(out)
    for (name, kind), value in BY_RULE.items():
        kept = found.get((name, "fp32"), found.get((name, kind))) if kind == "weight" else found[name, kind]
        assert kept == value, (name, kind)


def _metadata(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / "metadata.pkl"
    held = pickle.loads(path.read_bytes())
    change(held)
    path.write_bytes(pickle.dumps(held))


def _placed(held: Any) -> None:
    """A placement of another package."""
    for entries in held["metadata"]["model"]["nested_path_to_metadata"].values():
        entries[0]["sharding_metadata"]["data"]["placements"][0]["type"] = "Ragged"


def _described(held: Any) -> None:
    for entries in held["metadata"]["model"]["nested_path_to_metadata"].values():
        entries[0]["sharding_metadata"]["type"] = "default_tensor_v1"


def _undescribed(held: Any) -> None:
    held["metadata"]["model"]["nested_path_to_metadata"].pop('["2.weight"]')


class _Acts:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def _exchanged(folder: Path) -> None:
    """The files of two ranks, of as many rows, under each other's names."""
    os.rename(folder / "model_0.pt", folder / "kept")
    os.rename(folder / "model_1.pt", folder / "model_0.pt")
    os.rename(folder / "kept", folder / "model_1.pt")


def _cut(folder: Path) -> None:
    path = folder / "model_1.pt"
    held = torch.load(path, weights_only=False)
    held["2.weight"]._local_tensor = held["2.weight"]._local_tensor[:1].clone()
    torch.save(held, path)


def _of_another_step(folder: Path) -> None:
    path = folder / "optimizer_1.pt"
    held = torch.load(path, weights_only=False)
    for state in held["state"].values():
        state["step"] += 1
    torch.save(held, path)


def _of_another_rate(folder: Path) -> None:
    path = folder / "optimizer_1.pt"
    held = torch.load(path, weights_only=False)
    held["param_groups"][0]["lr"] = 0.5
    torch.save(held, path)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another version": (lambda f: _metadata(f, lambda held: held.update(version="3.0")), "only 2.0, which torch_check"),
    "a rank too few": (lambda f: os.remove(f / "model_1.pt"), "model_1.pt"),
    "another world size": (
        lambda f: _metadata(f, lambda held: held.update(world_size=4)),
        "was not saved by all ranks",
    ),
    "an unknown placement": (lambda f: _metadata(f, _placed), "has placements that are not known"),
    "an unknown description": (lambda f: _metadata(f, _described), "is described by default_tensor_v1"),
    "ranks that were exchanged": (_exchanged, "was saved by another rank than the file's name says"),
    "a part of fewer rows": (_cut, "2.weight: its part is not rank 1's of the mesh that metadata.pkl says"),
    "a rank of another step": (_of_another_step, "step is another than rank 0's"),
    "a tensor without a description": (lambda f: _metadata(f, _undescribed), "that metadata.pkl does not have"),
    "a rank of another rate": (
        _of_another_rate,
        "its param groups, or other values that are no tensors, are not rank 0's",
    ),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_what_is_wrong_is_named(saves: Saves, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(saves(3), folder)
    wreck, text = REFUSED[damage]
    wreck(folder)
    with pytest.raises(ds_reshard.ReshardError) as raised:
        fingerprint(str(folder))
    assert text in str(raised.value)


def test_the_package_loads_ranks_that_were_exchanged_without_a_word(saves: Saves, tmp_path: Path) -> None:
    """Which is refused here, by the place on the mesh that each tensor has beside it."""
    folder = tmp_path / "folder"
    shutil.copytree(saves(3), folder)
    given = {"folder": str(folder), "path": str(home(PACKAGE))}
    assert fresh.run("item_file_jobs.load", 3, **given) == [[]] * 3
    _exchanged(folder)
    loaded = fresh.run("item_file_jobs.load", 3, **given)
    assert all(isinstance(wrong, list) and wrong for wrong in loaded), loaded


@pytest.mark.acts
def test_a_metadata_file_with_a_call_is_refused(saves: Saves, tmp_path: Path) -> None:
    """The package unpickles it as trusted; here nothing is run."""
    folder = tmp_path / "folder"
    shutil.copytree(saves(3), folder)
    _metadata(folder, lambda held: held.update(world_size=_Acts(str(tmp_path / "acted"))))
    with pytest.raises(ds_reshard.UnsafePickle, match="nothing was run"):
        fingerprint(str(folder))
    assert not (tmp_path / "acted").exists()
    pickle.loads((folder / "metadata.pkl").read_bytes())
    assert (tmp_path / "acted").exists()


def test_states_by_number_are_not_guessed(saves: Saves) -> None:
    """`optimizer.state_dict()` counts its parameters, and no file names them."""
    with pytest.raises(ds_reshard.UnsupportedLayout, match="nothing names their parameters"):
        fingerprint(str(saves(3, numbers=True)))
