"""Folders of transformers' DistributedConfig: a safetensors file of each rank, and the optimizer's directory."""

from __future__ import annotations

import functools
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from every_pair import FROM_FSDP
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shard_file_jobs import expected, plain, rule

import ds_reshard
from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.operations import convert, diff, fingerprint, inspect, verify

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Saves = Callable[..., Path]
NAME = "shard-{:05d}-model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """The folder that so many ranks have saved; each made once."""

    @functools.cache
    def save(ranks: int, tied: bool = False, **given: Any) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        plain(str(folder / "plain"), tied=tied)
        out = folder / "out"
        told = fresh.run("shard_file_jobs.save", ranks, folder=str(out), source=str(folder / "plain"), **given)
        assert told == [None] * ranks, told
        return out

    return save


def _by_rule(tied: bool = False) -> dict[tuple[str, str], str]:
    return {at: str(fingerprint_of(tensor)) for at, tensor in expected(tied).items()}


def _prints(folder: object) -> dict[tuple[str, str], str]:
    return {(one.name, one.kind): one.fingerprint for one in fingerprint(str(folder)).tensors}


@pytest.mark.parametrize(("ranks", "given"), [(3, {}), (4, {"tp": 2}), (2, {"tied": True})], ids=str)
def test_every_tensor_is_read_as_the_rule_has_it(saves: Saves, ranks: int, given: Any) -> None:
    """Rows over FSDP, boxes of rows and columns over FSDP and tensor parallelism, and tied weights twice."""
    folder, tied = saves(ranks, **given), "tied" in given
    told = inspect(str(folder))
    assert not told.faults and told.steps.optimizer_steps == (7,)
    assert [group.members for group in told.groups] == [9 - tied, 3]
    assert verify(str(folder), deep=True).clean
    found = _prints(folder)
    again = found.pop(("lm_head.weight", "weight")) if tied else ""
    assert found == _by_rule(tied) and (not tied or again == found["model.embed_tokens.weight", "weight"])
    assert diff(str(saves(3)), str(folder)).equal or tied


def test_a_second_name_of_a_tied_weight_is_told(saves: Saves, tmp_path: Path) -> None:
    """The files tell two weights; that they are one is in the model's configuration alone."""
    notes = convert(str(saves(2, tied=True)), str(tmp_path / "out"), to="dcp", dp=1).notes
    assert [note for note in notes if "tie_word_embeddings" in note and "a weight for each" in note]
    assert not [note for note in convert(str(saves(3)), str(tmp_path / "two"), to="dcp", dp=1).notes if "tie_" in note]


@pytest.mark.parametrize("to", FROM_FSDP)
def test_folders_are_written_in_other_formats(saves: Saves, tmp_path: Path, to: str) -> None:
    """Every moment and weight of four ranks on a mesh of 2x2, to the bit, for three where a format has ranks."""
    out = tmp_path / "out"
    sizes = {"dp": 3} if to in ("zero1", "zero2", "zero3", "dcp", "accelerate") else {}
    convert(str(saves(4, tp=2)), str(out), to=to, **sizes)
    if to in ("safetensors", "torch"):
        weights = load_file(out / "model.safetensors") if to == "safetensors" else torch.load(out / "weight.pt")
        found = {(name, "weight"): str(fingerprint_of(value)) for name, value in weights.items()}
        assert found == {at: value for at, value in _by_rule().items() if at[1] == "weight"}
        return
    assert verify(str(out), deep=True).faults == ()
    found = _prints(out)
    for (name, kind), value in _by_rule().items():
        kept = found.get((name, "fp32"), found.get((name, kind))) if kind == "weight" else found[name, kind]
        assert kept == value, (name, kind)


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (4, 2)])
def test_transformers_loads_what_was_written_from_it(saves: Saves, tmp_path: Path, ranks: int, tp: int) -> None:
    """Weights for `from_pretrained`, with the configuration beside them, and a directory for its optimizer."""
    convert(str(saves(3)), str(tmp_path / "model"), to="safetensors")
    convert(str(saves(3)), str(tmp_path / "optimizer"), to="dcp", dp=2)
    shutil.copy(saves(3) / "config.json", tmp_path / "model")
    given = {"folder": str(tmp_path / "model"), "optimizer_folder": str(tmp_path / "optimizer")}
    assert fresh.run("shard_file_jobs.load", ranks, **given, tp=tp) == [[]] * ranks


def test_a_file_that_an_earlier_save_left_is_refused(saves: Saves, tmp_path: Path) -> None:
    """By three ranks and then by two: transformers takes what the folder lists last, and one order gives old values."""
    folder = tmp_path / "folder"
    shutil.copytree(saves(2), folder)
    shutil.copy(saves(3, scale=2.0) / NAME.format(3), folder)
    given = {"folder": str(folder), "optimizer_folder": str(folder / "optimizer")}
    loaded = [fresh.run("shard_file_jobs.load", 2, **given, backwards=order) for order in (False, True)]
    assert all(isinstance(wrong, list) for told in loaded for wrong in told), loaded
    assert [bool(told[0]) for told in loaded].count(True) == 1
    with pytest.raises(ds_reshard.CheckpointDamaged) as raised:
        convert(str(folder), str(tmp_path / "out"), to="safetensors")
    assert "model.lm_head.weight: declares impossible chunks" in str(raised.value) and not (tmp_path / "out").exists()
    assert "move the files that the last save did not write out of the folder" in str(raised.value)


def _metadata(path: Path, **changed: str | None) -> None:
    """Change entries of a header's metadata."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    entries = {**header["__metadata__"], **changed}
    header["__metadata__"] = {name: value for name, value in entries.items() if value is not None}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def _retyped(path: Path) -> None:
    """One rank's part of a weight in another type."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"].bfloat16()}, path, metadata=metadata)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file in the middle": (lambda f: os.remove(f / NAME.format(2)), "declares impossible chunks"),
    "the last file": (lambda f: os.remove(f / NAME.format(3)), "or a rank's file of these is missing"),
    "another version": (lambda f: _metadata(f / NAME.format(1), DCP_VERSION="2.0"), "only 1.0, which torch 2.13"),
    "no offsets": (lambda f: _metadata(f / NAME.format(1), DCP_SHARDING_INFO=None), "has no offset in DCP_SHARDING"),
    "another type": (lambda f: _retyped(f / NAME.format(2)), "lm_head.weight: its parts differ"),
    "two numbers of files": (
        lambda f: os.rename(f / NAME.format(2), f / "shard-00002-model-00001-of-00002.safetensors"),
        "of several saves, by the numbers in their names",
    ),
    "two optimizers": (lambda f: shutil.copytree(f / "optimizer", f / "another"), "nothing tells which is its"),
    "the whole weights, too": (
        lambda f: save_file({"w": torch.ones(2)}, f / "model.safetensors"),
        "holds the files of several formats",
    ),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_what_is_wrong_is_named(saves: Saves, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(saves(3), folder)
    wreck, text = REFUSED[damage]
    wreck(folder)
    with pytest.raises((ds_reshard.CheckpointDamaged, ds_reshard.UnsupportedLayout)) as raised:
        fingerprint(str(folder))
    assert text in str(raised.value)


def test_weights_without_their_optimizer(saves: Saves, tmp_path: Path) -> None:
    """They are read; that the last rank's file may be lost, which nothing could show then, is a note."""
    folder = tmp_path / "folder"
    shutil.copytree(saves(3), folder, ignore=shutil.ignore_patterns("optimizer"))
    assert _prints(folder) == {at: value for at, value in _by_rule().items() if at[1] == "weight"}
    notes = convert(str(folder), str(tmp_path / "out"), to="safetensors").notes
    assert [note for note in notes if "if the last rank's file is lost, nothing here can see it" in note]


def test_an_optimizer_in_the_folder_of_the_weights(saves: Saves) -> None:
    """`save_optimizer_distributed` writes where the script says."""
    folder = saves(2, optimizer_folder=".")
    assert (folder / ".metadata").is_file() and _prints(folder) == _by_rule()


def test_what_torchs_writer_saves_is_read(tmp_path: Path) -> None:
    """`HuggingFaceStorageWriter(save_distributed=True)`, with several files of a rank."""
    assert fresh.run("shard_file_jobs.hf_writer", 2, folder=str(tmp_path)) == [None, None]
    assert len(list(tmp_path.iterdir())) == 3
    shapes = {"cut": (5, 3), "whole": (3,)}
    truth = {(name, "weight"): str(fingerprint_of(rule(name, shape))) for name, shape in shapes.items()}
    assert _prints(tmp_path) == truth
