"""accelerate's files of ranks (`use_dcp=False`): saved and loaded by its own functions, every element by a rule."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from every_pair import FROM_FSDP
from rank_file_jobs import expected
from safetensors.torch import load_file

import ds_reshard
from ds_reshard.cli.main import main
from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.operations import convert, diff, fingerprint, inspect, verify

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Saves = Callable[..., Path]
BY_RULE = {at: str(fingerprint_of(tensor)) for at, tensor in expected().items() if at[1] != "step"}
BUFFERS = {("norm.running_mean", "weight"), ("norm.running_var", "weight"), ("norm.num_batches_tracked", "weight")}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """The folder that so many ranks have saved; each made once."""

    @functools.cache
    def save(ranks: int, **given: Any) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        assert fresh.run("rank_file_jobs.save", ranks, folder=str(folder), **given) == [None] * ranks
        return folder

    return save


def _prints(folder: object) -> dict[tuple[str, str], str]:
    return {(one.name, one.kind): one.fingerprint for one in fingerprint(str(folder)).tensors}


SAVED: list[tuple[int, dict[str, Any]]] = [
    (3, {}),
    (1, {}),
    (4, {"mesh": "hsdp"}),
    (3, {"version": 1, "mesh": "mesh"}),
    (1, {"version": 1}),
]


@pytest.mark.parametrize(("ranks", "given"), SAVED, ids=str)
def test_every_tensor_is_read_as_the_rule_has_it(saves: Saves, ranks: int, given: Any) -> None:
    """FSDP2 and FSDP1 with a mesh, rows that no number of ranks divides, groups that hold the same shards."""
    folder = saves(ranks, **given)
    told = inspect(str(folder))
    assert not told.faults and told.dp == ranks and told.steps.optimizer_steps == (7,)
    assert [group.members for group in told.groups] == [3, 3]
    assert verify(str(folder), deep=True).clean
    found = _prints(folder)
    assert {at: found[at] for at in BY_RULE} == BY_RULE and found.keys() - BY_RULE.keys() == BUFFERS


def test_folders_of_other_ranks_are_equal(saves: Saves) -> None:
    """Whoever saved them; the buffers, too, as all ranks have seen one batch."""
    assert diff(str(saves(3)), str(saves(3, version=1, mesh="mesh"))).equal
    assert diff(str(saves(3)), str(saves(4, mesh="hsdp"))).equal


CONVERTED: list[tuple[int, int, dict[str, Any]]] = [
    (3, 2, {}),
    (3, 4, {}),
    (3, 1, {}),
    (1, 2, {}),
    (3, 2, {"version": 1, "mesh": "mesh"}),
]


@pytest.mark.parametrize(("before", "after", "given"), CONVERTED, ids=str)
def test_accelerate_loads_what_was_written_for_other_ranks(
    saves: Saves, tmp_path: Path, before: int, after: int, given: Any
) -> None:
    """By its own functions, with the file that no name of a rank number tells the size of."""
    convert(str(saves(before, **given)), str(tmp_path / "out"), to="fsdp", dp=after)
    assert fresh.run("rank_file_jobs.load", after, folder=str(tmp_path / "out"), **given) == [[]] * after


@pytest.mark.parametrize("to", FROM_FSDP)
def test_folders_are_written_in_other_formats(saves: Saves, tmp_path: Path, to: str) -> None:
    """Every moment and weight, to the bit, from three ranks to two where a format has ranks."""
    out = tmp_path / "out"
    sizes = {"dp": 2} if to in ("zero1", "zero2", "zero3", "dcp", "accelerate") else {}
    convert(str(saves(3)), str(out), to=to, **sizes)
    if to in ("safetensors", "torch"):
        weights = load_file(out / "model.safetensors") if to == "safetensors" else torch.load(out / "weight.pt")
        found = {(name, "weight"): str(fingerprint_of(value)) for name, value in weights.items()}
        assert {at: found[at] for at in BY_RULE if at[1] == "weight"}.items() <= BY_RULE.items()
        return
    assert verify(str(out), deep=True).faults == ()
    found = _prints(out)
    for (name, kind), value in BY_RULE.items():
        kept = found.get((name, "fp32"), found.get((name, kind))) if kind == "weight" else found[name, kind]
        assert kept == value, (name, kind)


@pytest.mark.parametrize("after", [2, 4])
def test_a_load_under_other_ranks_names_the_line_that_converts(saves: Saves, tmp_path: Path, after: int) -> None:
    """On every rank alike, where the library ends in other errors on each; the line leads to a load."""
    folder = tmp_path / "the folder"
    shutil.copytree(saves(3), folder)
    told = fresh.run("rank_file_jobs.load", after, folder=str(folder), hooks=True)
    assert len(set(told)) == 1 and told[0].startswith("UnsupportedLayout"), told
    assert f"(expected {after}, found 3)" in told[0]
    command, _, out = told[0].partition("To mend: ")[2].partition(", and load ")
    assert main(shlex.split(command)[1:]) == 0
    assert fresh.run("rank_file_jobs.load", after, folder=out, hooks=True) == [[]] * after


def test_a_save_is_verified_before_training_goes_on(tmp_path: Path) -> None:
    """`verify_saved` compares what the ranks hold with the files, as it does EasyR1's."""
    told = fresh.run("rank_file_jobs.save", 3, folder=str(tmp_path), verified=True)
    assert told == [None] * 3


def _exchanged(folder: Path, other: Path) -> None:
    """The files of ranks 0 and 1, of as many rows, under each other's names."""
    for prefix in ("pytorch_model_fsdp", "optimizer"):
        first, second = (folder / f"{prefix}_0_rank{rank}.bin" for rank in (0, 1))
        os.rename(first, folder / "kept")
        os.rename(second, first)
        os.rename(folder / "kept", second)


def _of_another_step(folder: Path, other: Path) -> None:
    """One rank's files of an earlier save: what a copy that was interrupted leaves."""
    for path in folder.glob("*_rank1.bin"):
        shutil.copy(other / path.name, path)


SILENT = {
    "ranks that were exchanged": (_exchanged, "was saved by another rank than the file's name says"),
    "a rank of another step": (_of_another_step, "[step] has another value than rank 0's: of another step or run"),
}


@pytest.mark.parametrize("damage", SILENT)
def test_what_accelerate_loads_without_a_word_is_refused(saves: Saves, tmp_path: Path, damage: str) -> None:
    """Its own load gives every rank parts of other values, and says nothing."""
    folder = tmp_path / "folder"
    shutil.copytree(saves(3), folder)
    wreck, text = SILENT[damage]
    wreck(folder, saves(3, step=3.0))
    loaded = fresh.run("rank_file_jobs.load", 3, folder=str(folder))
    assert all(isinstance(wrong, list) for wrong in loaded) and "('up.weight', 'exp_avg')" in loaded[0], loaded
    with pytest.raises(ds_reshard.CheckpointDamaged) as raised:
        convert(str(folder), str(tmp_path / "out"), to="dcp", dp=2)
    assert text in str(raised.value) and not (tmp_path / "out").exists()


def _further(folder: Path, other: Path) -> None:
    """What an earlier save by four ranks leaves behind a later one by three."""
    for path in other.glob("*_rank3.bin"):
        shutil.copy(path, folder)


def _begun(folder: Path, other: Path) -> None:
    """A save by four ranks over one of three that has ended on rank 1 alone."""
    for path in other.glob("*_rank1.bin"):
        shutil.copy(path, folder)


def _grouped(folder: Path, change: Callable[[list[Any]], object]) -> None:
    """Change the members of the second group, the biases, in the files of all ranks."""
    for path in folder.glob("optimizer_0_rank*.bin"):
        held = torch.load(path, weights_only=False)
        change(held["param_groups"][1]["params"])
        torch.save(held, path)


REFUSED: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "further ranks": (_further, "files of ranks 3 too, of another save"),
    "a mesh of another size": (_begun, "lies on a mesh of another size"),
    "a missing rank": (lambda folder, _: os.remove(folder / "optimizer_0_rank2.bin"), "2 files; missing 2"),
    "a missing first rank": (lambda folder, _: os.remove(folder / "pytorch_model_fsdp_0_rank0.bin"), "missing 0"),
    "a parameter in no group": (
        lambda folder, _: _grouped(folder, lambda names: names.remove("out.bias")),
        "out.bias is not in one param group (expected 1, found 0)",
    ),
    "a parameter in two groups": (
        lambda folder, _: _grouped(folder, lambda names: names.append("out.weight")),
        "out.weight is not in one param group (expected 1, found 2)",
    ),
    "a member that is no name": (
        lambda folder, _: _grouped(folder, lambda names: names.__setitem__(0, ["norm.bias"])),
        "is not in one param group (expected 1, found 0)",
    ),
    "EasyR1's files, too": (
        lambda folder, _: shutil.copy(folder / "optimizer_0_rank0.bin", folder / "model_world_size_2_rank_0.pt"),
        "several world sizes",
    ),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_files_of_several_saves_are_refused(saves: Saves, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(saves(3), folder)
    wreck, text = REFUSED[damage]
    wreck(folder, saves(4))
    with pytest.raises(ds_reshard.CheckpointDamaged) as raised:
        fingerprint(str(folder))
    assert text in str(raised.value)
    if damage == "further ranks":
        assert "move them out of the folder if the save of 3 ranks" in str(raised.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"version": 1}, "holds ShardedTensors, as FSDP1 without a device mesh saves"),
        ({"number": 1}, "or of an optimizer or a further model alone"),
    ],
)
def test_what_is_not_read_is_named(saves: Saves, given: Any, text: str) -> None:
    with pytest.raises(ds_reshard.UnsupportedLayout, match=text):
        fingerprint(str(saves(3, **given)))


def test_accelerate_does_not_load_sharded_tensors_either(saves: Saves) -> None:
    """Under the very ranks that saved them: there is nothing to resume from."""
    told = fresh.run("rank_file_jobs.load", 3, folder=str(saves(3, version=1)), version=1)
    assert all(one.startswith("UnpicklingError") for one in told)


def test_weights_alone_and_what_lies_beside(saves: Saves, tmp_path: Path) -> None:
    """A model without its optimizer is one; further models and the scheduler are named, and another format refused."""
    folder = tmp_path / "folder"
    shutil.copytree(saves(3, optimizer=False), folder)
    (folder / "scheduler.bin").write_bytes(b"")
    found = fingerprint(str(folder))
    assert {one.kind for one in found.tensors} == {"weight"}
    notes = convert(str(folder), str(tmp_path / "out"), to="dcp", dp=1).notes
    assert "left out, as nothing here reads them: scheduler.bin" in notes
    done = convert(str(saves(3)), str(folder / "optimizer_0"), to="dcp", dp=1)
    assert done.complete
    with pytest.raises(ds_reshard.UnsupportedLayout, match="holds the files of several formats"):
        fingerprint(str(folder))


def test_a_mesh_of_hsdp_is_written_in_other_formats_alone(saves: Saves, tmp_path: Path) -> None:
    """Its groups are slices of a mesh of accelerate's own, which the refusal says, and what takes it instead."""
    with pytest.raises(ds_reshard.UnsupportedLayout, match="give --to dcp"):
        convert(str(saves(4, mesh="hsdp")), str(tmp_path / "out"), to="fsdp", dp=6)
    convert(str(saves(4, mesh="hsdp")), str(tmp_path / "out"), to="dcp", dp=3)
    assert diff(str(saves(3)), str(tmp_path / "out")).equal
