"""What one process of plain PyTorch has saved: into ZeRO and back, to the bit, or refused by name. Real torch saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from ds_reshard.cli.main import main
from ds_reshard.errors import CheckpointDamaged, ReshardError, UnsafePickle, UnsupportedLayout
from ds_reshard.operations import Options, convert, diff, inspect, plan, verify

pytestmark = pytest.mark.slow
ONE_THREAD = Options(threads=1, memory_nbytes=1 << 20)


def net() -> torch.nn.Module:
    """A parameter of one element, one without dimensions, one without elements, one that is frozen."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1))
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(1.5)))
    model.register_parameter("none", torch.nn.Parameter(torch.zeros(0, 3)))
    return model


def trained(named: bool = True, groups: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = net()
    parts = list(model.named_parameters())
    cut = [parts[::2], parts[1::2]] if groups == 2 else [parts]
    given = [part if named else [parameter for _, parameter in part] for part in cut]
    settings = [{"params": part, "lr": 0.1 / (number + 1)} for number, part in enumerate(given)]
    optimizer = torch.optim.AdamW(settings, betas=(0.8, 0.9))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(3):
        rows = torch.arange(10.0).reshape(2, 5) + step
        (model(rows).square().sum() * model.scale + model.none.sum()).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


def saved(folder: Path, *, named: bool = True, groups: int = 2, safe: bool = False) -> Path:
    folder.mkdir()
    model, optimizer, scheduler = trained(named, groups)
    if safe:
        save_file(model.state_dict(), folder / "model.safetensors")
    else:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    return folder


def gathered(folder: Path, *, groups: int, trainers: bool) -> Path:
    """As accelerate saves FSDP's FULL_STATE_DICT, and the Trainer, which has its own file of weights beside it."""
    folder.mkdir()
    model, optimizer, _ = trained(False, groups)
    weights, kept = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    torch.save(weights, folder / "pytorch_model_fsdp.bin")
    torch.save(kept, folder / "optimizer.bin")
    if trainers:
        save_file(model.state_dict(), folder / "model.safetensors")
    return folder


def states(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "optimizer.pt", weights_only=True)
    names = [name for group in loaded["param_groups"] for name in group["param_names"]]
    numbers = [number for group in loaded["param_groups"] for number in group["params"]]
    return {name: loaded["state"].get(number, {}) for name, number in zip(names, numbers, strict=True)}


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            same(value, other[name])
        else:
            assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name


@pytest.mark.parametrize("trainers", [False, True], ids=["accelerate", "Trainer"])
@pytest.mark.parametrize("groups", [1, 2])
def test_an_optimizer_that_was_gathered_from_fsdp_has_names(groups: int, trainers: bool, tmp_path: Path) -> None:
    """In place of numbers: of several groups, and of one whose weights lie in another order in their file."""
    source = gathered(tmp_path / "saved", groups=groups, trainers=trainers)
    done = convert(str(source), str(tmp_path / "out"), to="zero2", dp=2, options=ONE_THREAD)
    assert any("pytorch_model_fsdp.bin" in note for note in done.notes) == trainers
    assert verify(str(source), deep=True).clean and diff(str(source), str(tmp_path / "out")).equal
    convert(str(tmp_path / "out"), str(tmp_path / "back"), to="pytorch", options=ONE_THREAD)
    model, optimizer, _ = trained(True, groups)
    held = {name: one for name, one in load_file(tmp_path / "back" / "model.safetensors").items() if one.numel()}
    same(held, {name: value for name, value in model.state_dict().items() if value.numel()})
    expected = {name: optimizer.state[param] for name, param in model.named_parameters() if param.numel()}
    same({name: kinds for name, kinds in states(tmp_path / "back").items() if name != "none"}, expected)


@pytest.mark.parametrize("position", [1, 3, 6])
def test_a_schedule_that_counts_the_steps_of_several_processes_is_refused(position: int, tmp_path: Path) -> None:
    """accelerate steps it once for each: after three updates of two processes it is at position six, not three.

    A script that steps its scheduler itself may do so once for each epoch.
    """
    source = gathered(tmp_path / "saved", groups=2, trainers=False)
    torch.save({"last_epoch": position, "_last_lr": [0.1, 0.05]}, source / "scheduler.bin")
    for rank in range(2):
        torch.save({"step": 3}, source / f"random_states_{rank}.pkl")
    if position <= 3:
        convert(str(source), str(tmp_path / "out"), to="zero2", dp=2, options=ONE_THREAD)
        return
    with pytest.raises(UnsupportedLayout, match=r"position, 6, counts the steps of 2 processes.*made 3.* updates"):
        convert(str(source), str(tmp_path / "out"), to="zero2", dp=2, options=ONE_THREAD)
    (source / "scheduler.bin").unlink()
    convert(str(source), str(tmp_path / "out"), to="zero2", dp=2, options=ONE_THREAD)


@pytest.mark.parametrize("to", ["zero1", "zero2", "zero3", "universal", "dcp"])
@pytest.mark.parametrize("safe", [False, True], ids=["bin", "safetensors"])
def test_there_and_back(to: str, safe: bool, tmp_path: Path) -> None:
    """Weights, moments, steps, groups and the schedule; a real optimizer of torch loads what came back."""
    source = saved(tmp_path / "saved", safe=safe)
    size = {} if to == "universal" else {"dp": 3}
    convert(str(source), str(tmp_path / "mid"), to=to, options=ONE_THREAD, **size)
    assert verify(str(tmp_path / "mid"), deep=True).faults == ()
    convert(str(tmp_path / "mid"), str(tmp_path / "back"), to="pytorch", options=ONE_THREAD)
    assert verify(str(tmp_path / "back"), deep=True).faults == () and inspect(str(tmp_path / "back")).faults == ()
    model, optimizer, scheduler = trained()
    held = {name: value for name, value in model.state_dict().items() if value.numel()}
    same({name: one for name, one in load_file(tmp_path / "back" / "model.safetensors").items() if one.numel()}, held)
    same(
        {name: kinds for name, kinds in states(tmp_path / "back").items() if name != "none"},
        {name: kinds for name, kinds in states(source).items() if name != "none"},
    )
    back = torch.load(tmp_path / "back" / "optimizer.pt", weights_only=True)
    optimizer.load_state_dict(back)
    assert [group["lr"] for group in back["param_groups"]] == [group["lr"] for group in optimizer.param_groups]
    assert torch.load(tmp_path / "back" / "scheduler.pt")["last_epoch"] == scheduler.last_epoch
    difference = diff(str(source), str(tmp_path / "back"))
    assert {one.name for one in difference.differing} <= {"none"}


def test_shards_with_an_index(tmp_path: Path) -> None:
    source = saved(tmp_path / "saved")
    weights = torch.load(source / "pytorch_model.bin")
    (source / "pytorch_model.bin").unlink()
    names = list(weights)
    located = {}
    for number in (1, 2):
        file = f"model-0000{number}-of-00002.safetensors"
        part = {name: weights[name] for name in names[number - 1 :: 2]}
        save_file(part, source / file)
        located |= dict.fromkeys(part, file)
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": located}))
    convert(str(source), str(tmp_path / "out"), to="zero2", dp=2, options=ONE_THREAD)
    assert verify(str(tmp_path / "out"), deep=True).faults == ()
    index.write_text(json.dumps({"weight_map": {**located, "ghost": file}}))
    assert any("does not hold what" in fault.what for fault in inspect(str(source)).faults)
    index.write_text(json.dumps({"weight_map": {**located, "ghost": "../other.safetensors"}}))
    assert any("is not there" in fault.what for fault in inspect(str(source)).faults)
    index.write_text("{")
    assert any("is not JSON" in fault.what for fault in inspect(str(source)).faults)


def test_numbers_without_names(tmp_path: Path) -> None:
    """A list tells them, or shapes where no two are alike; else they are refused; a list that is wrong is found out."""
    names = [name for name, _ in net().named_parameters()]
    for groups, told in ((1, names), (2, [*names[::2], *names[1::2]])):
        source = saved(tmp_path / f"saved-{groups}", named=False, groups=groups)
        with pytest.raises(UnsupportedLayout, match=r"(?s)which parameter is which.*optimizer_names\.json"):
            convert(str(source), str(tmp_path / "out"), to="zero1", dp=1)
        (source / "optimizer_names.json").write_text(json.dumps(told))
        convert(str(source), str(tmp_path / f"out-{groups}"), to="zero1", dp=1, options=ONE_THREAD)
    same(_states_of(tmp_path / "out-1", tmp_path), _states_of_named(tmp_path))
    (tmp_path / "saved-2" / "optimizer_names.json").write_text(json.dumps(names))
    with pytest.raises(UnsupportedLayout, match=r"parameter \d is not .*: its exp_avg is of another shape"):
        convert(str(tmp_path / "saved-2"), str(tmp_path / "c"), to="zero1", dp=1)


def test_numbers_that_shapes_tell_apart(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    convert(str(folder), str(tmp_path / "back"), to="pytorch", options=ONE_THREAD)
    state = optimizer.state_dict()["state"]
    same(states(tmp_path / "back"), {"weight": state[0], "bias": state[1]})
    torch.save(torch.optim.AdamW(reversed(list(model.parameters()))).state_dict(), folder / "optimizer.bin")
    loaded = torch.load(folder / "optimizer.bin")
    torch.save({**loaded, "state": {0: state[1], 1: state[0]}}, folder / "optimizer.bin")
    with pytest.raises(UnsupportedLayout, match="is of another shape"):
        convert(str(folder), str(tmp_path / "c"), to="zero1", dp=1)


def _states_of(folder: Path, place: Path) -> dict[str, Any]:
    convert(str(folder), str(place / "states"), to="pytorch", options=ONE_THREAD)
    return {name: kinds for name, kinds in states(place / "states").items() if name != "none"}


def _states_of_named(place: Path) -> dict[str, Any]:
    found = states(saved(place / "named", groups=1))
    return {name: kinds for name, kinds in found.items() if name != "none"}


def test_weights_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As zero_to_fp32 leaves them: every tool but a conversion to a run's files takes them."""
    folder = tmp_path / "weights"
    folder.mkdir()
    torch.save({"state_dict": net().state_dict()}, folder / "pytorch_model.bin")
    assert inspect(str(folder)).faults == ()
    assert plan(str(folder), to="safetensors").units
    convert(str(folder), str(tmp_path / "out"), to="safetensors", options=ONE_THREAD)
    same(load_file(tmp_path / "out" / "model.safetensors"), dict(net().state_dict()))
    assert main(["convert", str(folder), str(tmp_path / "zero"), "--to", "zero1", "--dp", "2"]) == 2
    assert "holds an optimizer that names no parameter" in capsys.readouterr().err


def _cut(folder: Path) -> None:
    path = folder / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-200])


def _act(folder: Path) -> None:
    class Act:
        def __reduce__(self) -> tuple[Any, ...]:
            return print, ("ran",)

    torch.save({"state": {}, "param_groups": [], "more": Act()}, folder / "optimizer.pt")


def _value(folder: Path) -> None:
    torch.save([1, 2], folder / "optimizer.pt")


def _extra(folder: Path) -> None:
    loaded = torch.load(folder / "optimizer.pt")
    loaded["state"][99] = {"exp_avg": torch.ones(2)}
    torch.save(loaded, folder / "optimizer.pt")


DAMAGED: dict[str, tuple[Any, type[ReshardError], str]] = {
    "cut short": (_cut, CheckpointDamaged, "optimizer.pt"),
    "acts": (_act, UnsafePickle, "builtins.print"),
    "another value": (_value, CheckpointDamaged, "is no state dict of an optimizer"),
    "states of nobody": (_extra, CheckpointDamaged, "parameter 99 has states, and is in no param group"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_wrong_is_named_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    change, error, said = DAMAGED[case]
    source = saved(tmp_path / "saved")
    change(source)
    assert inspect(str(source)).faults
    with pytest.raises(error, match=said):
        convert(str(source), str(tmp_path / "out"), to="zero1", dp=2)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_two_formats_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "saved")
    convert(str(source), str(tmp_path / "zero"), to="zero1", dp=1, options=ONE_THREAD)
    for path in (tmp_path / "zero" / "saved").iterdir():
        path.rename(source / path.name)
    with pytest.raises(UnsupportedLayout, match="holds the files of several formats"):
        inspect(str(source))


def test_the_tag_is_the_one_that_latest_names(tmp_path: Path) -> None:
    """Also beside a `latest_universal`, which is looked at where there is no `latest`."""
    for tag in ("one", "two"):
        (tmp_path / tag).mkdir()
        save_file(net().state_dict(), tmp_path / tag / "model.safetensors")
    (tmp_path / "latest_universal").write_text("two")
    assert inspect(str(tmp_path)).tag == "two"
    (tmp_path / "latest").write_text("one")
    assert inspect(str(tmp_path)).tag == "one"


def test_a_sub_group_ends_with_the_parameter_that_fills_it(tmp_path: Path) -> None:
    """As `_create_fp16_sub_groups` cuts them (runtime/zero/stage3.py): at least, not more than, `sub_group_size`."""
    folder = tmp_path / "saved"
    folder.mkdir()
    model = torch.nn.ParameterDict({name: torch.ones(10) for name in "abc"})
    optimizer = torch.optim.AdamW(list(model.named_parameters()))
    sum(parameter.sum() for parameter in model.values()).backward()
    optimizer.step()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    convert(str(folder), str(tmp_path / "out"), to="zero3", dp=2, sub_group_size=10, options=ONE_THREAD)
    (file, _) = sorted((tmp_path / "out").rglob("*optim_states.pt"))
    saved = torch.load(file, weights_only=False)["optimizer_state_dict"]
    assert [len(flat) for flat in saved["fp32_flat_groups"]] == [10, 5]


def test_what_nothing_reads_is_told_where_two_folders_are_compared(tmp_path: Path) -> None:
    """Another loss scale may lie in a file that `diff` does not look into: a note names it."""
    folders = [saved(tmp_path / name) for name in ("a", "b")]
    for number, folder in enumerate(folders):
        torch.save({"scale": 2.0**number}, folder / "scaler.pt")
    found = diff(*map(str, folders))
    assert found.equal and [note.partition(":")[::2] for note in found.notes if "nothing" in note] == [
        (side, " left out, as nothing here reads them: scaler.pt") for side in "AB"
    ]
