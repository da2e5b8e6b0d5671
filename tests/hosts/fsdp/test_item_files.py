"""Folders of torch_checkpointing 0.1.1, saved by the package itself under gloo, every element by a rule."""

from __future__ import annotations

import copy
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
import torch.distributed.checkpoint as dcp
from item_file_jobs import PACKAGE, expected
from safetensors.torch import load_file

import ds_reshard
from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.formats.dcp.checkpoint import open_dcp
from ds_reshard.model.facts import ScalarTensor
from ds_reshard.model.records import ElementType
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


def _told(held: Any) -> dict[str, Any]:
    """What the metadata has of the model."""
    return held["metadata"]["model"]["nested_path_to_metadata"]  # type: ignore[no-any-return]


def _of_nothing(held: Any) -> None:
    for item in held["metadata"].values():
        item["rank_to_layout_info"] = {}
    held["world_size"] = 0


def _elsewhere(held: Any) -> None:
    """An item whose files lie in a folder beside this one."""
    held["metadata"]["../other/model"] = held["metadata"].pop("model")


def _of_no_rank(held: Any) -> None:
    _told(held)['["2.weight"]'][0]["ranks"] = ()


def _twice(held: Any) -> None:
    _told(held)['[ "2.weight" ]'] = _told(held)['["2.weight"]']


def _of_lists(held: Any) -> None:
    _told(held)['[["2.weight"]]'] = []


def _changed(folder: Path, change: Callable[[Any], object], ranks: tuple[int, ...] = (0, 1, 2)) -> None:
    """Change the model's state dict in files of ranks."""
    for rank in ranks:
        path = folder / f"model_{rank}.pt"
        held = torch.load(path, weights_only=False)
        change(held)
        torch.save(held, path)


def _retyped(held: Any) -> None:
    """The part of one rank in another type, of as many bytes."""
    held["2.weight"]._local_tensor = held["2.weight"]._local_tensor.view(torch.int32).clone()


def _nested(folder: Path) -> None:
    """A tensor whose path has the text of another's."""
    _changed(folder, lambda held: held.update({"2": {"weight": held["2.weight"]}}))
    _metadata(folder, lambda held: _told(held).update({'["2", "weight"]': _told(held)['["2.weight"]']}))


def _other_views(folder: Path) -> None:
    """A tensor that all ranks hold whole, as another part of one storage on each."""
    for rank in range(3):
        parts = torch.arange(9.0).split(3)
        _changed(folder, lambda held, rank=rank, parts=parts: held.update(mean=parts[rank]), (rank,))

    def described(held: Any) -> None:
        entry = copy.deepcopy(_told(held)['["2.bias"]'][0])
        entry["sharding_metadata"]["data"].update(global_shape=(3,), placements=[{"type": "Replicate"}])
        _told(held)['["mean"]'] = [entry]

    _metadata(folder, described)


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
    "no ranks": (lambda f: _metadata(f, _of_nothing), "does not say how many ranks saved"),
    "an item elsewhere": (lambda f: _metadata(f, _elsewhere), "names an item that no file of the folder can have"),
    "a description of no rank": (lambda f: _metadata(f, _of_no_rank), "2.weight has placements that are not known"),
    "two descriptions": (lambda f: _metadata(f, _twice), "describes a tensor of model twice"),
    "a path of lists": (lambda f: _metadata(f, _of_lists), "is described by nothing in metadata.pkl"),
    "a part of another type": (lambda f: _changed(f, _retyped, (1,)), "2.weight is of another type than rank 0's"),
    "two paths of one text": (_nested, "model.2.weight is the text of two paths"),
    "other parts of one storage": (_other_views, "mean is another than rank 0's, which holds the same part"),
    "a tree in itself": (lambda f: _changed(f, lambda held: held.update(own=held)), "model contains itself"),
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


def test_rates_that_are_tensors_are_read_with_their_groups(saves: Saves) -> None:
    """The metadata describes them by their places in the list of groups."""
    folder = str(saves(3, rates=True))
    facts = open_dcp(folder).facts
    assert facts is not None and [len(group.members) for group in facts.groups] == [2, 2]
    rates = [(group.hyperparameters or {})["lr"] for group in facts.groups]
    assert rates == [ScalarTensor(dtype=ElementType.FLOAT32, shape=(), data=bytes(4))] * 2
    assert _prints(folder) == BY_RULE


def test_files_of_further_ranks_are_told(saves: Saves, tmp_path: Path) -> None:
    """Nothing reads them: they are of another save."""
    folder = tmp_path / "folder"
    shutil.copytree(saves(3), folder)
    shutil.copy(folder / "model_2.pt", folder / "model_3.pt")
    (note,) = [one for one in convert(str(folder), str(tmp_path / "out"), to="dcp", dp=1).notes if "left out" in one]
    assert "model_3.pt" in note and "model_2.pt" not in note


def test_a_directory_of_torch_is_no_folder_of_items(tmp_path: Path) -> None:
    """Whatever metadata.pkl and files of ranks a script has put beside it."""
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=str(tmp_path), no_dist=True)
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps({"epoch": 3}))
    torch.save(torch.get_rng_state(), tmp_path / "rng_0.pt")
    assert _prints(tmp_path) == {("w", "weight"): str(fingerprint_of(torch.ones(3)))}


def test_states_by_number_are_not_guessed(saves: Saves) -> None:
    """`optimizer.state_dict()` counts its parameters, and no file names them."""
    with pytest.raises(ds_reshard.UnsupportedLayout, match="nothing names their parameters"):
        fingerprint(str(saves(3, numbers=True)))
