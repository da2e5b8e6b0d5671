"""Folders that `torch.distributed.checkpoint.save` made of FSDP2, read without torch's reader and a process group."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from gathered import assert_moments, same_bits
from kept_folders import KeptFolders

import ds_reshard
from ds_reshard.formats.dcp.checkpoint import open_dcp
from ds_reshard.formats.dcp.entries import tensor_key
from ds_reshard.model.layout import TensorKey
from ds_reshard.operations import diff, fingerprint, inspect, verify

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MODEL = Model(groups=2, frozen=True)


@pytest.fixture(scope="module")
def folders(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By number of ranks: a folder, and what it holds."""

    @functools.cache
    def of(size: int) -> Any:
        folder = tmp_path_factory.mktemp("dcp") / str(size)
        held = worlds[size].run("dcp_jobs.save", folder=str(folder), model=MODEL)[0]
        assert_moments(held)
        return folder, {TensorKey(name=n, kind=kind): t for (n, kind), t in held.items() if kind != "step"}

    return of


@pytest.mark.parametrize("size", [1, 2, 3])
class TestFsdp2(KeptFolders):
    """What every format must say, of folders that 1, 2 and 3 ranks have saved."""

    opened = staticmethod(open_dcp)


def test_fingerprints_are_the_same_all_the_way(worlds: Any, saves: Any, tmp_path: Path) -> None:
    """ZeRO 2 on four ranks, FSDP2 on three, and the folder that torch saves there: every master and moment."""
    run, model = Run(2, 4), Model(groups=2)
    folder, _ = saves(run, model)
    worlds[3].run("dcp_jobs.load", folder=str(folder), model=model, out=str(tmp_path / "dcp"))
    before, after = fingerprint(str(folder)), fingerprint(str(tmp_path / "dcp"))
    prints = {(one.name, one.kind): one.fingerprint for one in after.tensors}
    expected = {
        (one.name, "weight" if one.kind == "fp32" else one.kind): one.fingerprint
        for one in before.tensors
        if one.kind != "weight"
    }
    assert not after.faults and prints == expected and len(set(prints.values())) == len(prints)
    found = diff(str(folder), str(tmp_path / "dcp"))
    assert found.equal and {one.kind for one in found.tensors} == {"fp32", "exp_avg", "exp_avg_sq"}


def test_the_folder_tells_of_itself(folders: Any) -> None:
    """Roles, param groups and steps, as the saving run had them."""
    folder, truth = folders(2)
    told = inspect(str(folder))
    groups = MODEL.groups
    assert not told.faults and told.format == "torch.distributed.checkpoint" and told.steps.optimizer_steps == (2,)
    assert [group.number for group in told.groups] == list(range(groups))
    assert {group.hyperparameters["weight_decay"] for group in told.groups if group.hyperparameters} == {0.0, 0.1}
    trained = {key.name for key in truth if key.kind == "exp_avg"}
    assert {entry.name for entry in told.parameters if entry.role == "trainable"} == trained
    assert sum(group.members for group in told.groups) == len(trained)
    assert {file.name for file in told.files} == {".metadata", "__0_0.distcp", "__1_0.distcp"}


def test_every_byte_of_the_folder_is_verified(folders: Any, tmp_path: Path) -> None:
    """A whole folder is clean; any other byte is found in tensors, steps and objects, or lies between them."""
    made = tmp_path / "made"
    shutil.copytree(folders(2)[0], made)
    found = verify(str(made), deep=True)
    assert found.clean and not found.unchecked and found.records > 100 and found.tensors == len(folders(2)[1])
    path, prints = made / "__1_0.distcp", fingerprint(str(made)).tensors
    whole = path.read_bytes()
    for at in range(40, len(whole), len(whole) // 12):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert verify(str(made)).faults or fingerprint(str(made)).tensors == prints, at
    path.write_bytes(whole[:-30])
    assert verify(str(made)).faults and inspect(str(made)).faults


def test_two_folders_are_compared(folders: Any) -> None:
    """Ranks of 2 and 3 train on other samples; the frozen tower is equal, whoever saved it."""
    found = diff(str(folders(2)[0]), str(folders(3)[0]))
    states = {(one.name, one.kind): one.state for one in found.tensors}
    assert "differs" in {state for (name, kind), state in states.items() if kind == "exp_avg"}
    assert states["tower.weight", "weight"] == "equal" and not found.values
    assert diff(str(folders(2)[0]), str(folders(2)[0])).equal


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return same_bits(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_the_reader_gives_what_torchs_gives(worlds: Any, folders: Any, tmp_path: Path) -> None:
    """On another number of ranks: weights, states, steps, param groups and the script's own values."""
    folder, truth = folders(2)
    for rank in worlds[3].run("dcp_jobs.passed_on", folder=str(folder), model=MODEL, out=str(tmp_path / "again")):
        for name, (theirs, ours) in rank.items():
            assert theirs and _alike(theirs, ours), name
    prints = {
        (one.name, one.kind): one.fingerprint
        for one in fingerprint(str(folder)).tensors
        if not one.name.startswith("odd.")
    }
    assert prints == {(one.name, one.kind): one.fingerprint for one in fingerprint(str(tmp_path / "again")).tensors}
    assert len(prints) == len(truth) - 4


def test_a_flipped_byte_has_no_fingerprint(folders: Any, tmp_path: Path) -> None:
    shutil.copytree(folders(2)[0], tmp_path / "made")
    found = open_dcp(str(tmp_path / "made"))
    family = found.layout[TensorKey(name="first.weight", kind="exp_avg")].family
    extent = found.buffers(family, 1)["chunk"]
    with open(extent.path, "r+b") as file:
        file.seek(extent.byte_offset)
        byte = file.read(1)[0]
        file.seek(extent.byte_offset)
        file.write(bytes([byte ^ 1]))
    told = fingerprint(str(tmp_path / "made"))
    assert [fault.error for fault in told.faults] == ["ChecksumMismatch"]
    assert {one.kind for one in told.tensors if one.name == "first.weight" and one.fingerprint is None} >= {"exp_avg"}


@pytest.mark.acts
@pytest.mark.parametrize(("old", "new"), [(b"model.tiny", b"model.tinx"), (b".distcp", b"/x/y/cp")])
def test_a_directory_that_contradicts_itself_is_refused(folders: Any, tmp_path: Path, old: bytes, new: bytes) -> None:
    shutil.copytree(folders(2)[0], tmp_path / "made")
    path = tmp_path / "made" / ".metadata"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(old, new, 1))
    with pytest.raises(ds_reshard.CheckpointDamaged):
        open_dcp(str(tmp_path / "made"))


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        (("model", "layer.w"), "layer.w", "weight"),
        (("layer.w",), "layer.w", "weight"),
        (("optimizer", "state", "layer.w", "exp_avg"), "layer.w", "exp_avg"),
        (("optimizer", "state.layer.w.exp_avg"), "layer.w", "exp_avg"),
        (("state.layer.w.exp_avg",), "layer.w", "exp_avg"),
        (("ema", "layer.w"), "ema.layer.w", "weight"),
    ],
)
def test_the_names_of_a_state_dict_are_those_of_tensors(path: tuple[str, ...], name: str, kind: str) -> None:
    assert tensor_key(path) == TensorKey(name=name, kind=kind)
