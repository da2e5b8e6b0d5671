"""`verify` on checkpoints that real DeepSpeed saved: nothing on whole ones, and each damage as its own finding."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from damaged_files import Damage, changed, cut, duplicate, duplicate_without_name, exchanged, flip, remove
from saves import Saves, Universals
from test_bad_input import TAG, optim

from ds_reshard.cli.main import main
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointNotFound
from ds_reshard.operations import Reading, Verification, convert, diff, verify

pytestmark = pytest.mark.distributed

MODEL = Model(groups=2, tied=True)
RUN = Run(2, 2)
STATES = "mp_rank_00_model_states.pt"
WHOLE = (
    (Run(0, 2), Model(groups=2, batchnorm=True)),
    (Run(1, 1), MODEL),
    (RUN, MODEL),
    (Run(2, 3, options={"round_robin_gradients": True}), Model(optimizer="amsgrad", frozen=True)),
    (Run(3, 3, options={"sub_group_size": 60}), Model(groups=2, frozen=True, batchnorm=True, tied=True)),
    (Run("bf16", 2), Model(groups=2, empty=True)),
    (Run(1, 2, "fp32", {"elastic_checkpoint": True}), Model(optimizer="sgd")),
)


@pytest.mark.parametrize(("run", "model"), WHOLE, ids=str)
def test_nothing_is_found_in_what_deepspeed_saved(saves: Saves, run: Run, model: Model) -> None:
    """Every record of every file is compared, each byte of the members read once, with and without --deep."""
    folder, _ = saves(run, model)
    flat, deep = verify(str(folder)), verify(str(folder), deep=True)
    assert (flat.faults, deep.faults, flat.unchecked) == ((), (), 0)
    files = list((folder / TAG).iterdir())
    assert flat.files == len(files)
    nbytes = records = 0
    for path in files:
        with open_archive(path) as archive:
            nbytes += sum(member.nbytes for member in archive.members.values())
            records += len(archive.members)
    assert flat.records == deep.records == records
    assert flat.bytes_read == deep.bytes_read == nbytes
    assert deep.tensors > 0 and flat.tensors == 0


def test_little_memory_finds_as_much(saves: Saves, tmp_path: Path) -> None:
    """Tensors are cut into spans of a few elements: the index of the first bad one stays the tensor's own."""
    folder = _damaged(saves, tmp_path, _moment("exp_avg", math.nan))
    one = verify(str(folder), deep=True)
    other = verify(str(folder), deep=True, reading=Reading(threads=1, memory_nbytes=64))
    assert one.faults == other.faults and len(one.faults) == 1


def _byte(name: str, place: Callable[[bytes], int]) -> Damage:
    def run(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[place(content)] ^= 1
        (folder / name).write_bytes(content)

    return run


def _both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages] and None


def _group(content: Any, number: int) -> Any:
    return content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][number]


def _state(content: Any, number: int) -> Any:
    return content["optimizer_state_dict"]["base_optimizer_state"]["state"][number]


def _later(content: Any) -> None:
    """The shard as the run's next save would have had it."""
    for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] += 1


FLAT: dict[str, tuple[Damage, str, str]] = {
    "local header": (_byte(optim(1), lambda c: c.index(b"data/0") - 26), optim(1), "header"),
    "directory": (_byte(optim(1), lambda c: c.index(b"PK\x01\x02") + 17), optim(1), "are not what was written"),
    "end record": (_byte(optim(1), lambda c: len(c) - 3), optim(1), "end record"),
    "pickle": (flip(optim(1), "data.pkl"), optim(1), "record 'data.pkl'"),
    "version": (flip(optim(1), "version"), optim(1), "version"),
    "a member that nobody reads": (flip(optim(1), "serialization_id"), optim(1), "serialization_id"),
    "states": (flip(optim(1), "data/"), optim(1), "/0): bytes ["),
    "weights": (flip(STATES, "data/"), STATES, "(module/"),
    "no bytes": (cut(optim(1), 0), optim(1), "is empty"),
    "half": (cut(optim(1), 0.5), optim(1), "cut short"),
    "one byte short": (cut(optim(1), 1), optim(1), "cut short"),
    "half a model file": (cut(STATES, 0.5), STATES, "cut short"),
    "shard missing": (remove(optim(1)), "", "ranks 1 are missing"),
    "model missing": (remove(STATES), "", "model_states"),
    "swapped": (exchanged(optim(0), optim(1)), optim(0), "under another name"),
    "duplicated": (duplicate(optim(0), optim(1)), optim(1), "under another name"),
    "duplicated without a name": (duplicate_without_name(optim(0), optim(1)), optim(1), "has the wrong size"),
    "another step": (changed(optim(1), _later), optim(1), "step of partition 0 differs"),
    "another rate": (changed(optim(1), lambda c: _group(c, 1).update(lr=0.5)), optim(1), "lr of param group 1 differs"),
    "groups of two steps": (
        _both(*(changed(optim(r), lambda c: _state(c, 1).update(step=_state(c, 1)["step"] + 2)) for r in (0, 1))),
        optim(0),
        "flat buffer 1 is of another step than flat buffer 0",
    ),
}


def _damaged(saves: Saves, into: Path, damage: Damage, run: Run = RUN) -> Path:
    folder, _ = saves(run, MODEL)
    shutil.copytree(folder, into / "damaged")
    damage(into / "damaged" / TAG)
    return into / "damaged"


def _at(found: Verification) -> set[str]:
    return {fault.where for fault in found.faults}


@pytest.mark.parametrize("case", FLAT)
def test_each_damage_is_a_finding(saves: Saves, tmp_path: Path, case: str) -> None:
    """It names the file and what is wrong with it; what is whole is named nowhere."""
    damage, name, text = FLAT[case]
    folder = _damaged(saves, tmp_path, damage)
    found = verify(str(folder))
    assert any(text in fault.line() for fault in found.faults), [fault.line() for fault in found.faults]
    assert all(fault.mend for fault in found.faults)
    listed = _at(found)
    assert f"{folder / TAG}/{name}".rstrip("/") in listed
    untouched = {f"{folder / TAG}/{other}" for other in (optim(0), optim(1), STATES)} - {f"{folder / TAG}/{name}"}
    assert case in ("swapped", "model missing") or not untouched & listed


def test_damage_in_several_files_is_found_at_once(saves: Saves, tmp_path: Path) -> None:
    """A missing shard does not hide a flipped byte in another file."""
    folder = _damaged(saves, tmp_path, _both(remove(optim(0)), flip(optim(1), "data/1"), flip(STATES, "data/0")))
    found = verify(str(folder), deep=True)
    assert {f"{folder / TAG}/{name}" for name in (optim(1), STATES)} | {str(folder / TAG)} == _at(found)
    assert "the values of the tensors were not looked at" in found.notes[0]


def _place(folder: Path, element: int) -> tuple[str, tuple[int, ...], int, int]:
    """A parameter of the first group, and the shard and place of one of its elements; from the files alone."""
    shapes = torch.load(folder / STATES, weights_only=False)["param_shapes"][0]
    part = torch.load(folder / optim(0), weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    name, shape = list(shapes.items())[-1]
    before = sum(math.prod(size) for size in list(shapes.values())[:-1])
    shard, inside = divmod(before + element, part["exp_avg"].numel())
    return name, tuple(shape), shard, inside


def _moment(kind: str, value: float, element: int = 3) -> Damage:
    def run(folder: Path) -> None:
        _, _, shard, inside = _place(folder, element)
        changed(optim(shard), lambda c: _state(c, 0)[kind].__setitem__(inside, value))(folder)

    return run


@pytest.mark.parametrize(
    ("kind", "value", "text", "shown"),
    [
        ("exp_avg", math.nan, "1 of {} elements are not finite", "nan (0x7fc00000)"),
        ("exp_avg", -math.inf, "1 of {} elements are not finite", "-inf"),
        ("exp_avg_sq", -1e-30, "1 of {} elements are below zero", "-1.00000000e-30"),
    ],
)
def test_a_bad_value_is_named_with_its_index(
    saves: Saves, tmp_path: Path, kind: str, value: float, text: str, shown: str
) -> None:
    """The parameter, the state, how many elements, and where the first one is; without --deep it is not seen."""
    folder = _damaged(saves, tmp_path, _moment(kind, value))
    name, shape, _, _ = _place(folder / TAG, 3)
    found = verify(str(folder), deep=True)
    assert [fault.where for fault in found.faults] == [f"{name}[{kind}]"]
    assert text.format(math.prod(shape)) in found.faults[0].what
    index = [int(i) for i in torch.unravel_index(torch.tensor(3), shape)]
    assert found.faults[0].found in (f"{shown} at {index}", f"{value:.9g} at {index}")
    assert verify(str(folder)).clean


def test_a_negative_first_moment_is_none(saves: Saves, tmp_path: Path) -> None:
    """Only what sums up squares cannot be below zero."""
    folder = _damaged(saves, tmp_path, _moment("exp_avg", -0.5))
    assert verify(str(folder), deep=True).clean


def test_a_bad_value_at_stage_3_is_named(saves: Saves, tmp_path: Path) -> None:
    """The element lies in one rank's share of one parameter."""
    run = Run(3, 3)

    def damage(folder: Path) -> None:
        def change(content: Any) -> None:
            content["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["exp_avg"][0] = math.inf

        changed(optim(1), change)(folder)

    folder = _damaged(saves, tmp_path, damage, run)
    shapes = torch.load(folder / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)["param_shapes"]
    name, shape = next(iter(shapes[0].items()))
    index = [int(i) for i in torch.unravel_index(torch.tensor(-(-math.prod(shape) // 3)), tuple(shape))]
    (fault,) = verify(str(folder), deep=True).faults
    assert (fault.where, fault.found) == (f"{name}[exp_avg]", f"inf at {index}")


def _edited(names: slice) -> Damage:
    """Some of the trained weights changed in the model file, and tied ones with them."""

    def change(content: Any) -> None:
        shapes = [name for group in content["param_shapes"] for name in group]
        for name in shapes[names]:
            content["module"][name].view(-1)[0] += 1

    return changed(STATES, change)


def test_a_weight_that_is_not_its_masters_cast_is_a_finding(saves: Saves, tmp_path: Path) -> None:
    """Where the others are."""
    folder = _damaged(saves, tmp_path, _edited(slice(1, 2)))
    (fault,) = verify(str(folder), deep=True).faults
    assert fault.where.endswith("[weight]") and "not the cast of their fp32 masters" in fault.what
    assert fault.what.startswith("1 of ")


def test_weights_none_of_which_is_a_cast_are_told(saves: Saves, tmp_path: Path) -> None:
    """Averaged or edited weights are no damage; a resume refuses them, and verify says so."""
    found = verify(str(_damaged(saves, tmp_path, _edited(slice(None)))), deep=True)
    assert found.clean
    assert any("is the cast of its fp32 master" in note for note in found.notes)


def test_tied_tensors_that_differ_are_a_finding(saves: Saves, tmp_path: Path) -> None:
    """A file in which each name has bytes of its own, and one of them other ones."""

    def change(content: Any) -> None:
        (alias,) = content["shared_params"]
        content["module"][alias] = content["module"][alias].clone()
        content["module"][alias].view(-1)[5] += 1

    folder = _damaged(saves, tmp_path, changed(STATES, change))
    (fault,) = verify(str(folder), deep=True).faults
    assert "differ from those of the parameter that it is tied to" in fault.what


def test_a_buffer_that_is_infinite_is_no_finding(saves: Saves, tmp_path: Path) -> None:
    """A mask may be meant so: it is told."""
    model = Model(groups=2, batchnorm=True)
    folder, _ = saves(RUN, model)
    shutil.copytree(folder, tmp_path / "damaged")
    buffers = torch.load(folder / TAG / STATES, weights_only=False)["buffer_names"]
    name = next(name for name in buffers if "running_mean" in name)
    changed(STATES, lambda c: c["module"][name].fill_(-math.inf))(tmp_path / "damaged" / TAG)
    found = verify(str(tmp_path / "damaged"), deep=True)
    assert found.clean and any(name in note for note in found.notes)


MANIFEST: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda out: (out / TAG / optim(1)).unlink(), "expected"),
    "additional": (lambda out: (out / TAG / "notes.txt").write_text("x"), "not in the manifest"),
    "longer": (lambda out: (out / TAG / STATES).open("ab").write(b"x"), "not as the manifest lists it"),
    "other bytes, own checksums": (
        lambda out: changed(STATES, lambda c: c.update(skipped_steps=0))(out / TAG),
        "not as the manifest lists it",
    ),
    "a byte of it": (
        lambda out: _byte("ds_reshard.json", lambda c: c.index(b"nbytes") + 1)(out),
        "not what was written",
    ),
    "a number in it": (
        lambda out: _byte("ds_reshard.json", lambda c: c.index(b'"nbytes": ') + 11)(out),
        "not what was written",
    ),
}


@pytest.mark.parametrize("case", MANIFEST)
def test_a_folder_is_compared_with_its_manifest(saves: Saves, tmp_path: Path, case: str) -> None:
    """What `convert` wrote is whole; a file that is missing, additional or changed since is a finding."""
    folder, _ = saves(RUN, MODEL)
    out = tmp_path / "out"
    convert(str(folder), str(out), to="zero2")
    whole = verify(str(out), deep=True)
    assert whole.clean and whole.bytes_read == sum(path.stat().st_size for path in (out / TAG).iterdir())
    damage, text = MANIFEST[case]
    damage(out)
    assert any(text in fault.line() for fault in verify(str(out)).faults)


def test_against_another_layout(saves: Saves, tmp_path: Path) -> None:
    """Equal whatever the layout; status 1 where a value differs."""
    folder, _ = saves(RUN, MODEL)
    convert(str(folder), str(tmp_path / "out"), to="zero3", dp=3)
    assert main(["verify", str(folder), "--against", str(tmp_path / "out")]) == 0
    other = _damaged(saves, tmp_path, _moment("exp_avg", 0.25))
    assert main(["verify", str(other), "--against", str(tmp_path / "out")]) == 1
    assert main(["verify", str(folder), "--against", str(tmp_path / "none")]) == 2
    remove(optim(1))(other / TAG)
    found = verify(str(other), against=str(folder))
    assert found.faults and found.difference is None and found.notes[-1].startswith(f"not compared with {folder}")


def test_the_command_says_what_it_found(saves: Saves, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 and a line, 1 and a table or JSON, 2 for a folder that is none; nothing on stderr in a pipe."""
    folder, _ = saves(RUN, MODEL)
    assert main(["verify", str(folder), "--deep"]) == 0
    assert "nothing found" in capsys.readouterr().out
    broken = _damaged(saves, tmp_path, flip(optim(1), "data/0"))
    assert main(["verify", str(broken), "--json"]) == 1
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert (told["clean"], len(told["faults"]), said.err) == (False, 1, "")
    assert main(["verify", str(broken)]) == 1
    said = capsys.readouterr().out
    assert "1 finding" in said and said.startswith(f"{told['faults'][0]['where']}: {told['faults'][0]['what']}")
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert main(["verify", str(folder), "--threads", "9", "--memory", "8"]) == 2
    assert "--memory 9, or --threads 8" in capsys.readouterr().err
    with pytest.raises(CheckpointNotFound):
        verify(str(tmp_path / "none"))


UNIVERSAL: dict[str, tuple[Damage, str]] = {
    "bytes": (flip("zero/first.weight/exp_avg.pt", "data/0"), "not what was written"),
    "missing": (remove("zero/first.weight/exp_avg.pt"), "first.weight"),
    "value": (
        changed("zero/first.weight/exp_avg.pt", lambda c: c["param"].view(-1)[4:5].fill_(math.nan)),
        "not finite",
    ),
    "another step": (changed("zero/first.weight/step.pt", lambda c: c.add_(1)), "another step"),
}


@pytest.mark.parametrize("case", UNIVERSAL)
def test_a_universal_checkpoint_is_verified_likewise(saves: Saves, tmp_path: Path, case: str) -> None:
    """Its files below `zero` are read as all others are; without the manifest, which would tell first."""
    folder, _ = saves(RUN, MODEL)
    out = tmp_path / "out"
    convert(str(folder), str(out), to="universal")
    (out / "ds_reshard.json").unlink()
    assert verify(str(out), deep=True).clean
    damage, text = UNIVERSAL[case]
    damage(out / TAG)
    assert any(text in fault.line() for fault in verify(str(out), deep=True).faults)


@pytest.mark.parametrize("run", [Run(2, 2), Run(3, 3)], ids=str)
def test_what_ds_to_universal_made_is_whole_and_equal(saves: Saves, universals: Universals, run: Run) -> None:
    """DeepSpeed's own converter, of a checkpoint that it can carry over."""
    model = Model(groups=2)
    folder, _ = saves(run, model)
    made, _ = universals(run, model)
    assert verify(str(made), deep=True).faults == ()
    found = diff(str(folder), str(made))
    assert (found.differing, found.values, found.faults) == ((), (), ())


def test_a_terminal_sees_the_progress(saves: Saves, tmp_path: Path) -> None:
    """A bar with bytes and rate on stderr, which ends at the whole; standard output has the result alone."""
    folder, _ = saves(RUN, MODEL)
    ours, theirs = os.openpty()
    seen = b""
    with (tmp_path / "out").open("wb") as out:
        command = [sys.executable, "-m", "ds_reshard", "verify", str(folder), "--deep", "--json"]
        done = subprocess.Popen(command, stdout=out, stderr=theirs)
        os.close(theirs)
        with contextlib.suppress(OSError):  # how the other end says that it was closed
            while part := os.read(ours, 1 << 16):
                seen += part
        os.close(ours)
        assert done.wait(60) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    nbytes = json.loads((tmp_path / "out").read_text())["bytes_read"]
    assert f"{nbytes / 1000:.1f}/{nbytes / 1000:.1f} kB" in shown and "read" in shown
