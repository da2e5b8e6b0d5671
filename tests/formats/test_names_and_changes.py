"""Names that mean two things, names that a map gives anew, and a source that changes while it is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from zero_builder import TAG, Built, values, write

from ds_reshard.errors import CheckpointDamaged, ChecksumMismatch, ModelMismatch, UnsupportedLayout
from ds_reshard.hosts.deepspeed.foreign import read_foreign
from ds_reshard.operations import Options, convert, diff, plan
from ds_reshard.operations.name_map import read_name_map
from ds_reshard.operations.shape_map import Coming
from ds_reshard.operations.source import find_listing

pytestmark = pytest.mark.slow
ONE_THREAD = Options(threads=1, memory_nbytes=1 << 20)


def stepped(model: torch.nn.Module, *optimizers: torch.optim.Optimizer, shape: tuple[int, ...] = (4, 3)) -> None:
    torch.manual_seed(0)
    for _ in range(2):
        model(torch.randn(shape)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_a_module_that_is_called_state_holds_weights(tmp_path: Path) -> None:
    model = torch.nn.Sequential()
    model.state = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    assert "state.0.weight" in weights
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(tmp_path / "saved"))
    for to, size in (("safetensors", {}), ("pytorch", {}), ("dcp", {"dp": 2}), ("zero2", {"dp": 2})):
        convert(str(tmp_path / "saved"), str(tmp_path / to), to=to, options=ONE_THREAD, **size)
    for to in ("dcp", "zero2"):
        convert(str(tmp_path / to), str(tmp_path / f"{to}-back"), to="pytorch", options=ONE_THREAD)
    for folder in ("safetensors", "pytorch", "dcp-back", "zero2-back"):
        held = load_file(tmp_path / folder / "model.safetensors")
        assert held.keys() == weights.keys()
        assert all(torch.equal(held[name], weights[name]) for name in held), folder


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_the_groups_of_two_optimizers_are_all_kept(tmp_path: Path, flat: bool) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizers = [torch.optim.AdamW(part.parameters(), lr=lr) for part, lr in zip(model, (0.1, 0.7), strict=True)]
    stepped(model, *optimizers)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state: dict[str, Any] = {"model": model.state_dict()}
    for name, optimizer in zip(("generator", "critic"), optimizers, strict=True):
        state[name] = get_state_dict(model, optimizer, options=options)[1]
    dcp.save(state, checkpoint_id=str(tmp_path / "saved"))
    convert(str(tmp_path / "saved"), str(tmp_path / "out"), to="pytorch", options=ONE_THREAD)
    groups = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)["param_groups"]
    rates = {name: group["lr"] for group in groups for name in group["param_names"]}
    assert rates == {"0.weight": 0.1, "0.bias": 0.1, "1.weight": 0.7, "1.bias": 0.7}


def test_parameters_that_are_called_as_groups_are_refused(tmp_path: Path) -> None:
    """`optimizer.param_groups.0.lr` would be the rate of the first group, and of the parameter "0"."""
    model = torch.nn.ParameterList([torch.ones(3), torch.ones(3)])
    groups = [{"params": [("1", model[1])], "lr": 0.1}, {"params": [("0", model[0])], "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups)
    (model[0] * model[1]).sum().backward()
    optimizer.step()
    folder = tmp_path / "saved"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    for to in ("dcp", "accelerate"):
        with pytest.raises(UnsupportedLayout, match=r"(?s)parameter 1: is called as a param group.*--names"):
            convert(str(folder), str(tmp_path / to), to=to, dp=1)


def normed(folder: Path, scheduler: type[torch.optim.lr_scheduler.LRScheduler], **settings: Any) -> Any:
    """Two groups with a schedule that is no LambdaLR, statistics, and a tie."""
    folder.mkdir()
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model[2].weight = model[0].weight
    named = dict(model.named_parameters())
    first, second = [("1.weight", named["1.weight"])], [part for part in named.items() if part[0] != "1.weight"]
    optimizer = torch.optim.AdamW([{"params": first, "lr": 1.0}, {"params": second, "lr": 2.0}])
    schedule = scheduler(optimizer, **settings)
    stepped(model, optimizer)
    schedule.step()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    return model, optimizer, schedule


@pytest.mark.parametrize("to", ["zero1", "zero3", "dcp", "pytorch"])
def test_a_map_takes_the_schedule_along_and_leaves_buffers_buffers(tmp_path: Path, to: str) -> None:
    """The map's order is that of param groups, and of the values that any scheduler has for each."""
    model, _, schedule = normed(tmp_path / "saved", torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    names: dict[str, Any] = {name: f"new.{name}" for name in model.state_dict() if not name.startswith("2.weight")}
    names["0.weight"] = ["new.0.weight", "new.2.weight"]
    assert next(iter(names)) == "0.weight", "of the second group, which comes first now"
    path = tmp_path / "map.json"
    path.write_text(json.dumps(names))
    size = {} if to == "pytorch" else {"dp": 2}
    convert(str(tmp_path / "saved"), str(tmp_path / "out"), to=to, names=str(path), options=ONE_THREAD, **size)
    if to.startswith("zero"):
        file = next((tmp_path / "out").rglob("*mp_rank_00_model_states.pt"))
        held = torch.load(file, weights_only=False)
        assert sorted(held["buffer_names"]) == [
            f"new.1.{n}" for n in ("num_batches_tracked", "running_mean", "running_var")
        ]
        assert torch.equal(held["module"]["new.1.running_mean"], model[1].running_mean)
        assert held["lr_scheduler"]["base_lrs"] == [2.0, 1.0] and not held["frozen_param_shapes"]
    if to != "pytorch":
        convert(str(tmp_path / "out"), str(tmp_path / "back"), to="pytorch", options=ONE_THREAD)
    back = tmp_path / ("out" if to == "pytorch" else "back")
    groups = torch.load(back / "optimizer.pt", weights_only=True)["param_groups"]
    assert [group["initial_lr"] for group in groups] == schedule.base_lrs[::-1] == [2.0, 1.0]
    assert [group["lr"] for group in groups] == schedule.get_last_lr()[::-1] == [1.0, 0.5]
    assert groups[1]["param_names"] == ["new.1.weight"]
    later = torch.load(back / "scheduler.pt", weights_only=True)
    assert later["base_lrs"] == [2.0, 1.0] and later["_last_lr"] == [1.0, 0.5]
    held = load_file(back / "model.safetensors")
    assert torch.equal(held["new.1.running_var"], model[1].running_var)


def test_a_map_that_leaves_out_a_tied_name_says_so(tmp_path: Path) -> None:
    model, *_ = normed(tmp_path / "saved", torch.optim.lr_scheduler.StepLR, step_size=1)
    path = tmp_path / "map.json"
    path.write_text(json.dumps({name: f"new.{name}" for name in model.state_dict() if name != "2.weight"}))
    made = convert(str(tmp_path / "saved"), str(tmp_path / "out"), to="zero1", dp=1, names=str(path))
    assert (
        "left out: 2.weight, in the source another name of 0.weight, which the map calls new.0.weight alone"
        in made.notes
    )


def test_no_map_gives_a_parameter_the_name_of_a_tensor_outside_the_model(tmp_path: Path) -> None:
    """As a state of random numbers beside the model: it would take the parameter's place, in a load too."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    folder, path = tmp_path / "saved", tmp_path / "map.json"
    dcp.save({"model": weights, "optimizer": states, "rng": torch.arange(6.0).view(2, 3)}, checkpoint_id=str(folder))
    for others in ("rng", ["kernel", "rng"]):
        path.write_text(json.dumps({"weight": others, "bias": "bias"}))
        message = r"(?s)rng\[weight\]: is a new name by the map, and that of a tensor that stays.*map.json"
        for to in ("safetensors", "zero1"):
            with pytest.raises(ModelMismatch, match=message):
                convert(str(folder), str(tmp_path / to), to=to, names=str(path), **({"dp": 1} if to == "zero1" else {}))
            assert not (tmp_path / to).exists()
        run = Coming({"rng", "kernel", "bias"})
        with pytest.raises(ModelMismatch, match=message):
            read_foreign(find_listing(str(folder), None), optimizer=True, names=read_name_map(str(path)), run=run)


@pytest.mark.parametrize("how", ["in place", "renamed over"])
def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, how: str) -> None:
    """safetensors has no checksums: nothing else would tell."""
    folder, other = tmp_path / "saved", tmp_path / "other.safetensors"
    folder.mkdir()
    save_file({f"w{number}": torch.zeros(100, 100) for number in range(20)}, folder / "model.safetensors")
    save_file({f"w{number}": torch.ones(100, 100) for number in range(20)}, other)
    changed = []

    def progress(done: int, total: int) -> None:
        if changed:
            return
        changed.append(done)
        if how == "in place":
            with open(folder / "model.safetensors", "r+b") as file:  # and never shorter, while others read it
                file.write(other.read_bytes())
        else:
            os.replace(other, folder / "model.safetensors")

    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors: has changed while it was read"):
        convert(str(folder), str(tmp_path / "out"), to="dcp", dp=8, options=ONE_THREAD, progress=progress)
    assert changed and not (tmp_path / "out").exists()


def test_a_comparison_of_two_frameworks_says_what_it_left_out(tmp_path: Path) -> None:
    normed(tmp_path / "saved", torch.optim.lr_scheduler.StepLR, step_size=1)
    convert(str(tmp_path / "saved"), str(tmp_path / "out"), to="zero1", dp=2)
    (note,) = (note for note in diff(str(tmp_path / "saved"), str(tmp_path / "out")).notes if "frameworks" in note)
    assert "param groups" in note and "schedulers" in note


@pytest.mark.parametrize("to", ["zero2", "zero3"])
@pytest.mark.parametrize("value", [None, 7.0], ids=["equal", "another"])
def test_a_tied_weight_is_compared_with_a_tensor_of_its_own(tmp_path: Path, to: str, value: float | None) -> None:
    """Stage 3 keeps the second name of a tied weight nowhere: it is that of the master of the first. Synthetic."""
    built = Built(((("a", (4, 3)), ("d", (3,))),), tied=(("e", "a"),))
    convert(str(write(built, tmp_path / "saved")), str(tmp_path / "zero"), to=to, dp=2, options=ONE_THREAD)
    held = values(built)
    weights = {name: held[name, "fp32"] for name in ("a", "d")}
    weights["e"] = weights["a"].clone() if value is None else torch.full((4, 3), value)
    states = {name: {kind: held[name, kind] for kind in ("exp_avg", "exp_avg_sq")} for name in ("a", "d")}
    groups = [{"lr": 0.1, "params": ["a", "d"]}]
    dcp.save({"model": weights, "optimizer": {"state": states, "param_groups": groups}}, checkpoint_id=tmp_path / "dcp")
    for pair in (("zero", "dcp"), ("dcp", "zero")):
        found = diff(*(str(tmp_path / one) for one in pair))
        assert [one.name for one in found.differing] == ([] if value is None else ["e"])


def test_an_optimizer_that_one_side_alone_saved_is_a_difference(tmp_path: Path) -> None:
    """At stage 0, where it names no parameter. Synthetic."""

    def saved(folder: Path, optimizer: object) -> str:
        (folder / TAG).mkdir(parents=True)
        (folder / "latest").write_text(TAG)
        entries = {"module": {"a": torch.ones(3)}, "buffer_names": [], "param_shapes": None, "shared_params": {}}
        entries |= {"optimizer": optimizer, "global_steps": 3, "dp_world_size": 1, "mp_world_size": 1, "ds_config": {}}
        torch.save({**entries, "ds_version": "0.19.8"}, folder / TAG / "mp_rank_00_model_states.pt")
        return str(folder)

    states = {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(3)}}
    sides = [saved(tmp_path / "with", {"state": states, "param_groups": [{"lr": 0.1, "params": [0]}]})]
    sides.append(saved(tmp_path / "without", None))
    assert diff(*sides).values and diff(*reversed(sides)).values
    assert not diff(sides[0], sides[0]).values and not diff(sides[1], sides[1]).values


PADDED = {
    "sides": ["padded", "bare"],
    "numbers": {"v": 3, "pad": 5, "h": 4},
    "entries": [{"padded": "table : v+pad h", "bare": ["rows", None]}, {"padded": "head", "bare": "head"}],
}
"""The last two of four ranks hold nothing but padding of `table`."""


@pytest.fixture
def padded(tmp_path: Path) -> tuple[Built, dict[tuple[str, str], torch.Tensor], str]:
    built = Built(groups=((("table", (8, 4)),), (("head", (3,)),)), dp=4)
    (tmp_path / "map.json").write_text(json.dumps(PADDED))
    return built, values(built), str(tmp_path / "map.json")


@pytest.mark.parametrize("found", ["numbers", "NaN"])
def test_the_largest_value_of_padding_that_is_left_out_is_told(tmp_path: Path, padded: Any, found: str) -> None:
    """And the way back says that its rows are zeros, in weights, masters and moments."""
    built, held, names = padded
    if found == "NaN":
        held["table", "exp_avg"][7, 1] = torch.nan
    folder = write(built, tmp_path / "saved", held)
    kinds = ("weight", "fp32", "exp_avg", "exp_avg_sq")
    largest = [f"{kind} {float(held['table', kind][3:].abs().max()):.2g}" for kind in kinds]
    assert ("exp_avg nan" in largest) == (found == "NaN")
    told = f"left out: 20 elements of table that the map says are padding (largest: {', '.join(largest)})"
    made = convert(str(folder), str(tmp_path / "bare"), to="zero1", dp=2, names=names, options=ONE_THREAD)
    assert told.replace("nan", "NaN") in made.notes
    back = convert(str(tmp_path / "bare"), str(tmp_path / "back"), to="zero2", dp=3, names=names, options=ONE_THREAD)
    assert "made of zeros: 20 elements of table that the map says are padding" in back.notes
    for one in held.values():
        if one.shape == (8, 4):
            one[3:] = 0
    expected = write(built, tmp_path / "expected", held)
    compared = diff(str(expected), str(tmp_path / "back"))
    assert not [one for one in compared.tensors if one.state != "equal"] and len(compared.tensors) == 8
    planned = plan(str(tmp_path / "bare"), to="zero2", dp=3, names=names)
    assert not [name for name in planned.sources if "zero" in name.split("/")], "files of the checkpoint alone"


def test_damage_in_padding_that_is_left_out_is_found(tmp_path: Path, padded: Any) -> None:
    built, held, names = padded
    folder = write(built, tmp_path / "saved", held)
    path = folder / TAG / "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"
    data, value = bytearray(path.read_bytes()), held["table", "exp_avg"][7].numpy().tobytes()
    data[data.index(value)] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumMismatch, match="pp_rank_3_mp_rank_00"):
        convert(str(folder), str(tmp_path / "out"), to="zero1", dp=2, names=names, options=ONE_THREAD)
    assert not (tmp_path / "out").exists()
