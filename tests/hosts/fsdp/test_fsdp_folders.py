"""Folders that EasyR1 and verl save, read without a process group: every tensor whole, or a named fault."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
import torch.distributed.checkpoint as dcp
from damaged_files import cut
from gathered import same_bits
from kept_folders import KeptFolders
from safetensors.torch import load_file

import ds_reshard.dcp
from ds_reshard.formats.fsdp.checkpoint import open_fsdp
from ds_reshard.model.layout import TensorKey
from ds_reshard.operations import convert, diff, fingerprint, inspect, verify

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By number of ranks: a folder of EasyR1, and what it holds."""

    @functools.cache
    def of(size: int) -> Any:
        folder = tmp_path_factory.mktemp("easyr1")
        held = fresh.run("fsdp_jobs.easyr1", size, folder=str(folder), bf16=size == 2)[0]
        assert isinstance(held, dict), held
        return folder, {TensorKey(name=n, kind=kind): t for (n, kind), t in held.items() if kind != "step"}

    return of


@pytest.mark.parametrize("size", [2, 3])
class TestEasyR1(KeptFolders):
    """What every format must say, of folders that 2 and 3 ranks have saved."""

    opened = staticmethod(open_fsdp)


def _file(family: str, rank: int, size: int = 2) -> str:
    return f"{family}_world_size_{size}_rank_{rank}.pt"


def _renamed(folder: Path) -> None:
    """Each rank's file under the other's name."""
    os.rename(folder / _file("optim", 0), folder / "kept")
    os.rename(folder / _file("optim", 1), folder / _file("optim", 0))
    os.rename(folder / "kept", folder / _file("optim", 1))


def _as_of_one(folder: Path) -> None:
    for family in ("model", "optim"):
        os.rename(folder / _file(family, 0), folder / _file(family, 0, 1))
        os.remove(folder / _file(family, 1))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing file": (lambda f: os.remove(f / _file("optim", 1)), "missing 1"),
    "a truncated file": (cut(_file("model", 1), 0.5), _file("model", 1)),
    "two world sizes": (lambda f: shutil.copy(f / _file("model", 0), f / _file("model", 0, 3)), "2, 3"),
    "ranks that were exchanged": (_renamed, "saved by another rank than the file's name says"),
    "half of it under the name of all": (_as_of_one, "lies on a mesh of another size"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_with_a_folder_is_named(folders: Any, tmp_path: Path, damage: str) -> None:
    made = tmp_path / "made"
    shutil.copytree(folders(2)[0], made)
    wreck, text = DAMAGES[damage]
    wreck(made)
    with pytest.raises(ds_reshard.CheckpointDamaged) as raised:
        fingerprint(str(made))
    assert text in str(raised.value)


def test_fingerprints_are_of_the_values_whoever_saved_them(folders: Any) -> None:
    """Two and three ranks train on other samples: frozen weights alone are equal, if of one type."""
    found = fingerprint(str(folders(2)[0]))
    assert not found.faults and not found.notes
    assert {(one.name, one.kind) for one in found.tensors} == {(key.name, key.kind) for key in folders(2)[1]}
    types = {(one.name, one.kind): one.dtype for one in fingerprint(str(folders(3)[0])).tensors}
    assert types["lm_head.weight", "exp_avg"] == "bfloat16" and types["lm_head.weight", "exp_avg_sq"] == "float32"


def test_every_tool_reads_the_folder(folders: Any, tmp_path: Path) -> None:
    """Told, verified and compared; a flipped byte is found."""
    made = tmp_path / "made"
    shutil.copytree(folders(2)[0], made)
    told, found = inspect(str(made)), verify(str(made), deep=True)
    assert not told.faults and told.dp == 2 and len(told.groups) == 1 and told.steps.optimizer_steps == (2,)
    assert told.groups[0].members == len({key.name for key in folders(2)[1] if key.kind == "weight"})
    assert found.clean and found.tensors == len(folders(2)[1])
    path = made / _file("optim", 1)
    extent = open_fsdp(str(made)).buffers("optim", 1)["embed.weight[exp_avg]"]
    whole = path.read_bytes()
    path.write_bytes(
        whole[: extent.byte_offset] + bytes([whole[extent.byte_offset] ^ 1]) + whole[extent.byte_offset + 1 :]
    )
    assert [fault.error for fault in verify(str(made)).faults] == ["ChecksumMismatch"]
    assert [fault.error for fault in diff(str(made), str(folders(2)[0])).faults] == ["ChecksumMismatch"]


def test_the_reader_fills_plain_tensors(folders: Any) -> None:
    """Every weight and moment in the type in which it was saved, and the param groups."""
    folder, truth = folders(2)
    names = {
        key: f"model.{key.name}" if key.kind == "weight" else f"optim.state.{key.name}.{key.kind}" for key in truth
    }
    wanted: dict[str, Any] = {names[key]: torch.zeros_like(tensor) for key, tensor in truth.items()}
    wanted["optim.param_groups.0.lr"] = 0.0
    dcp.load(wanted, storage_reader=ds_reshard.dcp.Reader(folder, optimizer="optim"))
    assert all(same_bits(wanted[names[key]], tensor) for key, tensor in truth.items())
    assert wanted["optim.param_groups.0.lr"] == 1e-2


def test_it_is_converted_as_far_as_it_can_be(folders: Any, tmp_path: Path) -> None:
    """To torch's own folder with all that it has; not to ZeRO, where its frozen tower is in the param group."""
    folder = str(folders(2)[0])
    done = convert(folder, str(tmp_path / "dcp"), to="dcp", dp=3)
    assert ["extra_state" in note for note in done.notes] == [True]
    assert diff(folder, str(tmp_path / "dcp")).equal
    convert(folder, str(tmp_path / "weights"), to="safetensors")
    written = load_file(str(tmp_path / "weights" / "model.safetensors"))
    weights = {key.name: tensor for key, tensor in folders(2)[1].items() if key.kind == "weight"}
    assert written.keys() == weights.keys() and all(same_bits(written[name], weights[name]) for name in weights)
    with pytest.raises(
        ds_reshard.UnsupportedLayout, match=r"visual\..* is in a param group, and has no state"
    ) as raised:
        convert(folder, str(tmp_path / "zero"), to="zero2")
    assert "bfloat16, and DeepSpeed keeps fp32" in str(raised.value) and not (tmp_path / "zero").exists()
