"""Folders of EasyR1 and verl written for other ranks: their own loading takes them, and training goes on."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from gathered import same_bits

import ds_reshard
from ds_reshard.cli.main import main
from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.operations import convert, fingerprint, verify

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TYPES: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16", "mixed": False},
    "fp32 with bf16 moments of some": {"dtype": "float32", "mixed": True},
}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], tuple[Path, list[Any]]]:
    """What EasyR1's manager has saved on some ranks, in some types, and what each rank held."""
    save = fresh.saver("fsdp_manager_jobs.easyr1_save", tmp_path_factory)
    return lambda size, types: save(size, **TYPES[types])


@pytest.mark.parametrize(
    ("before", "after", "types"),
    [(2, 1, "bf16"), (2, 3, "bf16"), (3, 2, "bf16"), (2, 3, "fp32 with bf16 moments of some")],
)
def test_easyr1_loads_what_was_written_for_other_ranks(
    saves: Any, tmp_path: Path, before: int, after: int, types: str
) -> None:
    """Weights and moments are equal to the bit, the schedule goes on, and so do the losses."""
    folder, saved = saves(before, types)
    out = str(tmp_path / "out")
    convert(str(folder), out, to="fsdp", dp=after)
    assert fingerprint(out).tensors == fingerprint(str(folder)).tensors
    loaded = fresh.run("fsdp_manager_jobs.easyr1_load", after, folder=out, dtype=TYPES[types]["dtype"])
    fresh.assert_goes_on(saved, loaded)
    assert sum(kind == "exp_avg" for _, kind in saved[0]["held"]) == 12


@pytest.fixture(scope="module")
def verls(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, list[Any]]]:
    """What verl's manager has saved of FSDP2 on some ranks."""
    saves = fresh.saver("fsdp_manager_jobs.verl_save", tmp_path_factory)

    def save(size: int, dtype: str = "float32", **given: Any) -> tuple[Path, list[Any]]:
        folder, told = saves(size, dtype=dtype, **given)
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": size}))
        return folder, told

    return save


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (3, 2), (1, 2)])
def test_verl_loads_what_was_written_for_other_ranks(
    verls: Any, tmp_path: Path, before: int, after: int, dtype: str
) -> None:
    """Its optimizer's files have numbers: moments come back to the parameters they are of, and verify_saved agrees."""
    folder, saved = verls(before, dtype)
    out = str(tmp_path / "out")
    convert(str(folder), out, to="fsdp", dp=after)
    assert fingerprint(out).tensors == fingerprint(str(folder)).tensors
    loaded = fresh.run("fsdp_manager_jobs.verl_load", after, folder=out, dtype=dtype)
    fresh.assert_goes_on(saved, loaded, rel=1e-4 if dtype == "float32" else 0.02)
    types = {at: tensor.dtype for at, tensor in saved[0]["held"].items()}
    assert all({at: tensor.dtype for at, tensor in told["held"].items()} == types for told in loaded)
    assert {told["said"] for told in [*saved, *loaded]} == {""}


@pytest.mark.parametrize("kind", ["EasyR1", "verl"])
def test_a_manager_under_other_ranks_is_told_what_to_convert(verls: Any, tmp_path: Path, kind: str) -> None:
    """Each rank would look for a file under a size that no file has. The command that is named leads to a load."""
    folder = tmp_path / "the folder"
    shutil.copytree(verls(2)[0], folder)

    def told(at: str, name: str) -> str:
        (tmp_path / name).mkdir()
        said = fresh.run("fsdp_asked_jobs.managed_load", 3, folder=at, scratch=str(tmp_path / name), kind=kind)
        assert len(set(said)) == 1, said
        return str(said[0])

    said = told(str(folder), "first")
    assert said.startswith("UnsupportedLayout") and "(expected 3, found 2)" in said
    (line,) = [line for line in said.splitlines() if "To mend: ds-reshard" in line]
    command, _, out = line.partition("To mend: ")[2].partition(", and load ")
    assert main(shlex.split(command)[1:]) == 0
    assert told(out, "then") == "" and fingerprint(out).tensors == fingerprint(str(folder)).tensors


@pytest.mark.parametrize("ranks", [(2, 3), (3, 2, 1)])
def test_a_tied_weight_is_one_parameter_with_two_names(verls: Any, tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """Its number is that of the first name; so it is in what was written, from which further ranks are written."""
    folder, saved = verls(ranks[0], tied=True)
    told = fingerprint(str(folder))
    assert told.notes == () and ("embed.weight", "exp_avg") in {(one.name, one.kind) for one in told.tensors}
    source = str(folder)
    for size in ranks[1:]:
        out = str(tmp_path / str(size))
        convert(source, out, to="fsdp", dp=size)
        assert fingerprint(out).tensors == told.tensors
        source = out
    loaded = fresh.run("fsdp_manager_jobs.verl_load", ranks[-1], folder=source, dtype="float32", tied=True)
    fresh.assert_goes_on(saved, loaded, rel=1e-4)
    assert {told["said"] for told in [*saved, *loaded]} == {""}


def test_numbers_are_named_as_the_parameters_are(verls: Any) -> None:
    """The fingerprints under the names are those of the moments that the ranks held."""
    folder, saved = verls(2)
    held = saved[0]["held"]
    moments = {
        (one.name, one.kind): one.fingerprint for one in fingerprint(str(folder)).tensors if one.kind != "weight"
    }
    assert moments == {
        at: str(fingerprint_of(tensor.contiguous()))
        for at, tensor in held.items()
        if at[1] in ("exp_avg", "exp_avg_sq")
    }


def _in_two_groups(folder: Path) -> None:
    """One param group less its last parameter, and that in a group of its own: as an optimizer of two would save."""
    for path in folder.glob("optim_*.pt"):
        saved = torch.load(path, weights_only=False)
        (group,) = saved["param_groups"]
        last = {**group, "params": group["params"][-1:], "lr": 0.5}
        saved["param_groups"] = [{**group, "params": group["params"][:-1]}, last]
        torch.save(saved, path)


def test_numbers_of_two_groups_are_not_guessed(verls: Any, tmp_path: Path) -> None:
    """Two groups may count the parameters in another order."""
    folder = tmp_path / "folder"
    shutil.copytree(verls(2)[0], folder)
    _in_two_groups(folder)
    _refused_until_weights_alone(folder, tmp_path / "out", r"several param groups .*found 2\)")


def _refused_until_weights_alone(folder: Path, out: Path, said: str) -> None:
    """The cause is named in a note and an error; what the error says to do leads to the weights."""
    assert "name no parameter" in fingerprint(str(folder)).notes[0]
    weights = [one for one in fingerprint(str(folder)).tensors if one.kind == "weight"]
    with pytest.raises(ds_reshard.UnsupportedLayout, match=said) as raised:
        convert(str(folder), str(out), to="fsdp", dp=3)
    assert not out.exists() and "move the optim files out of the folder" in str(raised.value)
    assert "save_units" not in str(raised.value)
    for path in folder.glob("optim_*.pt"):
        path.unlink()
    convert(str(folder), str(out), to="fsdp", dp=3)
    assert weights and list(fingerprint(str(out)).tensors) == weights


def test_an_optimizer_of_fewer_parameters_than_the_model_is_not_guessed(verls: Any, tmp_path: Path) -> None:
    """As one that was made of the trained parameters alone: numbers count these, and no file says which they are."""
    folder = tmp_path / "folder"
    shutil.copytree(verls(2)[0], folder)
    for path in folder.glob("optim_*.pt"):
        saved = torch.load(path, weights_only=False)
        saved["param_groups"][0]["params"].pop()
        saved["state"].pop(max(saved["state"]))
        torch.save(saved, path)
    _refused_until_weights_alone(folder, tmp_path / "out", r"counts other parameters .*found \d+, not \d+\)")


def test_two_groups_stay_two(saves: Any, tmp_path: Path) -> None:
    """By names, as EasyR1 saves them: groups and their hyper-parameters come along as they are."""
    folder = tmp_path / "folder"
    shutil.copytree(saves(2, "bf16")[0], folder)
    _in_two_groups(folder)
    convert(str(folder), str(tmp_path / "out"), to="fsdp", dp=3)
    paths = folder / "optim_world_size_2_rank_0.pt", tmp_path / "out" / "optim_world_size_3_rank_2.pt"
    groups = [torch.load(path, weights_only=False)["param_groups"] for path in paths]
    assert groups[0] == groups[1] and [group["lr"] for group in groups[1]] == [groups[0][0]["lr"], 0.5]


def _halved(folder: Path) -> None:
    """The moments of one parameter as half of the ranks would have saved them."""
    path = folder / "optim_world_size_2_rank_1.pt"
    saved = torch.load(path, weights_only=False)
    local = saved["state"]["lm_head.weight"]["exp_avg"]._local_tensor
    saved["state"]["lm_head.weight"]["exp_avg"]._local_tensor = local[: len(local) // 2].clone()
    torch.save(saved, path)


def _of_another_model(folder: Path) -> None:
    for path in folder.glob("optim_*.pt"):
        saved = torch.load(path, weights_only=False)
        saved["state"]["other.weight"] = saved["state"].pop("lm_head.weight")
        torch.save(saved, path)


def _of_another_rate(folder: Path) -> None:
    path = folder / "optim_world_size_2_rank_1.pt"
    saved = torch.load(path, weights_only=False)
    saved["param_groups"][0]["lr"] *= 2
    torch.save(saved, path)


def _of_another_step(folder: Path) -> None:
    path = folder / "extra_state_world_size_2_rank_1.pt"
    saved = torch.load(path, weights_only=False)
    saved["lr_scheduler"]["last_epoch"] += 1
    torch.save(saved, path)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "half-size moments": (_halved, "lm_head.weight[exp_avg]: its part is not rank 1's of 2"),
    "an optimizer of another model": (_of_another_model, "other.weight[exp_avg] is of no parameter of the model's"),
    "rates of several runs": (_of_another_rate, "its param groups have other members or values than rank 0's"),
    "schedules of several steps": (_of_another_step, "lr_scheduler is another than rank 0's"),
    "a rank without extra state": (lambda f: os.remove(f / "extra_state_world_size_2_rank_1.pt"), "is missing"),
    "two world sizes": (
        lambda f: shutil.copy(f / "optim_world_size_2_rank_0.pt", f / "optim_world_size_3_rank_0.pt"),
        "several world sizes",
    ),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_what_is_wrong_is_named_and_nothing_is_written(saves: Any, tmp_path: Path, damage: str) -> None:
    folder, out = tmp_path / "folder", tmp_path / "out"
    shutil.copytree(saves(2, "bf16")[0], folder)
    wreck, text = REFUSED[damage]
    wreck(folder)
    with pytest.raises(ds_reshard.CheckpointDamaged) as raised:
        convert(str(folder), str(out), to="fsdp", dp=3)
    assert text in str(raised.value)
    assert os.listdir(tmp_path) == ["folder"]


def test_whole_tensors_of_one_rank_tell_of_no_mesh(saves: Any, tmp_path: Path) -> None:
    """FSDP1 shards nothing under one rank."""
    one = str(tmp_path / "one")
    convert(str(saves(2, "bf16")[0]), one, to="fsdp", dp=1)
    with pytest.raises(ds_reshard.UnsupportedLayout, match="no file tells of a mesh"):
        convert(one, str(tmp_path / "two"), to="fsdp", dp=2)


def test_ranks_that_were_there_keep_their_random_states(saves: Any, tmp_path: Path) -> None:
    """A new rank has none, and draws what the run has seeded: no two ranks draw the same."""
    folder, _ = saves(2, "bf16")
    convert(str(folder), str(tmp_path / "out"), to="fsdp", dp=3)
    out = tmp_path / "out"
    kept = [torch.load(out / f"extra_state_world_size_3_rank_{rank}.pt", weights_only=False) for rank in range(3)]
    assert [sorted(one) for one in kept] == [["lr_scheduler", "rng"], ["lr_scheduler", "rng"], ["lr_scheduler"]]
    before = [torch.load(folder / f"extra_state_world_size_2_rank_{rank}.pt", weights_only=False) for rank in range(2)]
    for one, other in zip(before, kept, strict=False):
        assert torch.equal(one["rng"]["cpu"], other["rng"]["cpu"]) and one["rng"]["random"] == other["rng"]["random"]
    assert all(one["lr_scheduler"] == before[0]["lr_scheduler"] for one in kept)


def test_what_was_written_is_what_was_there(saves: Any, tmp_path: Path) -> None:
    """The files pass verify, hold the same fingerprints, and come back to the first size part by part."""
    folder, _ = saves(2, "bf16")
    once, back = str(tmp_path / "once"), str(tmp_path / "back")
    convert(str(folder), once, to="fsdp", dp=3)
    convert(once, back, to="fsdp", dp=2)
    assert not verify(once).faults
    assert fingerprint(once).tensors == fingerprint(str(folder)).tensors == fingerprint(back).tensors
    for rank in range(2):
        one, other = (
            torch.load(os.path.join(at, f"optim_world_size_2_rank_{rank}.pt"), weights_only=False)
            for at in (str(folder), back)
        )
        assert one["param_groups"] == other["param_groups"] and one["state"].keys() == other["state"].keys()
        for name, states in one["state"].items():
            for kind, value in states.items():
                found = other["state"][name][kind]
                assert type(found) is type(value)
                assert same_bits(*(getattr(tensor, "_local_tensor", tensor) for tensor in (found, value))), (name, kind)


def test_what_verl_keeps_beside_comes_along(saves: Any, tmp_path: Path) -> None:
    """The configuration names the new size; texts of `huggingface` are copied, exported weights are not."""
    source = tmp_path / "source"
    shutil.copytree(saves(2, "bf16")[0], source)
    (source / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1, "world_size": 2}))
    (source / "huggingface").mkdir()
    (source / "huggingface" / "config.json").write_text("{}")
    (source / "huggingface" / "model.safetensors").write_bytes(b"weights")
    done = convert(str(source), str(tmp_path / "out"), to="fsdp", dp=3)
    assert done.notes == (
        "ranks 2 to 2 have no random states: those that the run seeds hold",
        "weights that were exported are not copied: huggingface/model.safetensors",
    )
    assert json.loads((tmp_path / "out" / "fsdp_config.json").read_text()) == {"FSDP_version": 1, "world_size": 3}
    assert os.listdir(tmp_path / "out" / "huggingface") == ["config.json"]
