"""Folders that `torch.distributed.checkpoint.save` made of FSDP2, read without torch's reader and a process group."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from kept_folders import KeptFolders

import ds_reshard
from ds_reshard.formats.dcp import open_dcp, tensor_key
from ds_reshard.model.layout import TensorKey
from ds_reshard.operations import fingerprint

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MODEL = Model(groups=2, frozen=True)


@pytest.fixture(scope="module")
def folders(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By number of ranks: a folder, and what it holds."""
    made: dict[int, Any] = {}

    def of(size: int) -> Any:
        if size not in made:
            folder = tmp_path_factory.mktemp("dcp") / str(size)
            held = worlds[size].run("dcp_jobs.save", folder=str(folder), model=MODEL)[0]
            truth = {TensorKey(name=name, kind=kind): tensor for (name, kind), tensor in held.items()}
            moments = [name for name, kind in held if kind == "exp_avg"]
            assert moments and all(held[n, "exp_avg"].any() for n in moments)
            assert all(not torch.equal(held[n, "exp_avg"], held[n, "exp_avg_sq"]) for n in moments)
            made[size] = folder, truth
        return made[size]

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
    prints = {(one.name, one.kind): one.fingerprint for one in after.tensors if one.kind != "step"}
    expected = {(one.name, "weight" if one.kind == "fp32" else one.kind): one.fingerprint for one in before.tensors
                if one.kind != "weight"}  # fmt: skip
    assert not after.faults and prints == expected and len(set(prints.values())) == len(prints)


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


def test_a_directory_that_names_code_is_not_run(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ds_reshard.UnsafePickle, match="os"):
        open_dcp(str(tmp_path))


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
