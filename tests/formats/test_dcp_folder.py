"""A folder that torch.distributed.checkpoint saves in one process, converted to every format and back."""

from __future__ import annotations

import argparse
import copy
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from nanotron_builder import RUNS, values, write
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ds_reshard.dcp
from ds_reshard.operations import convert, diff, inspect, plan, verify

pytestmark = pytest.mark.slow


class Net(torch.nn.Module):
    """Tied weights, statistics, a parameter without dimensions, one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 7)
        self.norm = torch.nn.BatchNorm1d(7)
        self.head = torch.nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.none = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(words))) * self.scale + self.none.sum()


def _state(flat: bool) -> dict[str, Any]:
    """A state dict after two steps, with a learning rate that is a tensor, and values of the script's own."""
    torch.manual_seed(0)
    net = Net()
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1], "lr": 1e-2},
        {"params": [p for p in net.parameters() if p.dim() <= 1], "lr": torch.tensor(1e-3)},
    ]
    optimizer = torch.optim.AdamW(groups)
    for step in range(2):
        net(torch.arange(step, 8 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    own = {"step": 3, "rng": torch.get_rng_state(), "mix": (torch.ones(2), torch.zeros(3), 1)}
    return {"model": weights, "optimizer": states, "train": own}


def _moments(states: dict[str, Any], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments of a parameter, by its own name or by that of which it is another."""
    name = {"head.weight": "embed.weight"}.get(name, name)
    kinds = ("exp_avg", "exp_avg_sq")
    held = states["state"][name] if "state" in states else {kind: states[f"state.{name}.{kind}"] for kind in kinds}
    return held[kinds[0]], held[kinds[1]]


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return torch.equal(one, other) if torch.is_tensor(one) else bool(one == other)


def _emptied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _emptied(part) for key, part in state.items()}
    if isinstance(state, list):
        return [_emptied(part) for part in state]
    return torch.full_like(state, 7) if torch.is_tensor(state) else 0


@pytest.fixture(scope="module", params=[False, True], ids=["nested", "flattened"])
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, state = str(tmp_path_factory.mktemp("dcp") / "step-2"), _state(request.param)
    moments = [_moments(state["optimizer"], name) for name in state["model"] if name.endswith(("weight", "bias"))]
    assert all(first.any() and second.any() and not torch.equal(first, second) for first, second in moments)
    dcp.save(copy.deepcopy(state), checkpoint_id=folder)
    return folder, state


def test_the_folder_tells_of_itself(saved: Any) -> None:
    told = inspect(saved[0])
    assert not told.faults and told.steps.optimizer_steps == (2,) and [g.members for g in told.groups] == [2, 3]
    roles = {entry.name: entry.role for entry in told.parameters}
    assert {name for name, role in roles.items() if role == "trainable"} == {
        "embed.weight",
        "none",
        "norm.bias",
        "norm.weight",
        "scale",
    }
    assert verify(saved[0], deep=True).clean


@pytest.mark.parametrize("files", [1, 3])
def test_torch_loads_the_folder_that_was_written_anew(saved: Any, tmp_path: Path, files: int) -> None:
    folder, state = saved
    convert(folder, str(tmp_path / "out"), to="dcp", dp=files)
    assert len(list((tmp_path / "out").glob("*.distcp"))) == files
    wanted = _emptied(state)
    dcp.load(wanted, checkpoint_id=str(tmp_path / "out"))
    assert _alike(wanted, state)
    assert diff(folder, str(tmp_path / "out")).equal and verify(str(tmp_path / "out"), deep=True).clean


def test_weights_alone_are_a_folder_too(tmp_path: Path) -> None:
    """Without an optimizer accelerate's has one part; no more files than rows; to ZeRO it is refused."""
    state = {"model": Net().state_dict()}
    dcp.save(state, checkpoint_id=str(tmp_path / "saved"))
    convert(str(tmp_path / "saved"), str(tmp_path / "out"), to="accelerate", dp=20)
    assert len(list((tmp_path / "out" / "pytorch_model_fsdp_0").glob("*.distcp"))) == 13
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["ds_reshard.json", "pytorch_model_fsdp_0"]
    assert diff(str(tmp_path / "saved"), str(tmp_path / "out")).equal
    with pytest.raises(ds_reshard.UnsupportedLayout, match="names no parameter"):
        convert(str(tmp_path / "saved"), str(tmp_path / "zero"), to="zero2", dp=2)


def test_what_accelerate_keeps_beside_the_first_model_is_verified_and_named(saved: Any, tmp_path: Path) -> None:
    """`Accelerator.save_state` of two models and a scheduler: the second has folders of its own, of the same keys."""
    for number in range(2):
        for below, name in (("pytorch_model_fsdp", "model"), ("optimizer", "optimizer")):
            state = copy.deepcopy({name: saved[1][name]})
            dcp.save(state, checkpoint_id=str(tmp_path / "state" / f"{below}_{number}"))
    torch.save({"last_epoch": 7}, tmp_path / "state" / "scheduler.bin")
    folder, said = str(tmp_path / "state"), "left out, as nothing here reads them: "
    assert verify(folder, deep=True).clean
    done = convert(folder, str(tmp_path / "out"), to="accelerate", dp=1)
    assert [note for note in done.notes if said in note] == [f"{said}optimizer_1, pytorch_model_fsdp_1, scheduler.bin"]
    found = diff(folder, str(tmp_path / "out"))
    assert found.equal and [note.partition(":")[0] for note in found.notes if said in note] == ["A"]
    file = tmp_path / "state" / "optimizer_1" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    assert [os.path.basename(fault.where) for fault in verify(folder).faults] == ["__0_0.distcp"]


def test_it_goes_to_accelerates_folders(saved: Any, tmp_path: Path) -> None:
    folder, state = saved
    convert(folder, str(tmp_path / "out"), to="accelerate", dp=2)
    for below, name in (("pytorch_model_fsdp_0", "model"), ("optimizer_0", "optimizer")):
        wanted = {name: _emptied(state[name])}
        dcp.load(wanted, checkpoint_id=str(tmp_path / "out" / below))
        assert _alike(wanted[name], state[name])
    assert diff(folder, str(tmp_path / "out")).equal


@pytest.mark.parametrize("to", ["zero1", "zero2", "zero3", "universal"])
def test_it_goes_to_deepspeed_and_back(saved: Any, tmp_path: Path, to: str) -> None:
    """Masters, states, steps, weights, buffers: to the bit; the script's own values are its client state."""
    folder, state = saved
    done = convert(folder, str(tmp_path / "out"), to=to, dp=None if to == "universal" else 2)
    found = diff(folder, str(tmp_path / "out"))
    assert [one.name for one in found.differing] == ["train.rng"] and not found.values
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if to == "zero3" else "mp_rank_00_model_states.pt"
    held = torch.load(tmp_path / "out" / "step-2" / name, weights_only=False)
    assert _alike(held["train"], state["train"]) and held["global_steps"] == 2
    # torch saves a tied weight once for each name; equal bytes do not prove a tie, so these are two weights.
    assert held["shared_params"] == {}
    assert any("no proof that they are tied" in note and "head.weight and embed.weight" in note for note in done.notes)
    assert all(torch.equal(held["module"][key], state["model"][key]) for key in held["buffer_names"])
    assert sorted(held["buffer_names"]) == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    convert(str(tmp_path / "out"), str(tmp_path / "back"), to="dcp", dp=2)
    wanted = _emptied(state)
    dcp.load(wanted, checkpoint_id=str(tmp_path / "back"))
    assert _alike(wanted["model"], state["model"]) and _alike(wanted["optimizer"], state["optimizer"])


@pytest.mark.parametrize("flat", [False, True])
def test_hyper_parameters_that_are_tensors_come_back(tmp_path: Path, flat: bool) -> None:
    """In a tuple, each an archive inside a file, as everything is there; also of a folder that was written anew."""
    net = Net()
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=torch.tensor(3e-3), betas=(torch.tensor(0.8), torch.tensor(0.97))
    )
    net(torch.arange(8)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    saved, anew = str(tmp_path / "saved"), str(tmp_path / "anew")
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=saved)
    convert(saved, anew, to="dcp", dp=2)
    assert verify(saved, deep=True).clean and diff(saved, anew).equal
    for folder in (saved, anew):
        wanted = {"optimizer": _emptied(states)}
        dcp.load(wanted, storage_reader=ds_reshard.dcp.Reader(folder))
        assert _alike(wanted["optimizer"], states)


def _part(name: str) -> Any:
    return lambda held: getattr(held, name).pop(next(key for key in getattr(held, name) if "exp_avg" in str(key)))


SAID: dict[str, Any] = {
    "nothing says what it is": _part("state_dict_metadata"),
    "it has no path in the state dict": _part("planner_data"),
    "nothing says where it lies": lambda held: held.storage_data.pop(
        next(key for key in held.storage_data if key.fqn.endswith("weight_decay"))
    ),
}


def _other_path(held: Any) -> None:
    key = next(key for key, names in held.planner_data.items() if len(names) > 1)
    held.planner_data[key] = (*held.planner_data[key][:-1], "else")


def _empty_path(held: Any) -> None:
    held.planner_data[next(iter(held.planner_data))] = ()


@pytest.mark.parametrize(
    ("what", "change"),
    [
        *SAID.items(),
        ("it has no path in the state dict", _empty_path),
        ("path in the state dict is another", _other_path),
    ],
)
def test_a_directory_that_contradicts_itself_is_refused(saved: Any, tmp_path: Path, what: str, change: Any) -> None:
    """By whatever reads it: one part of `.metadata` has a key that another lacks."""
    folder = tmp_path / "step-2"
    shutil.copytree(saved[0], folder)
    held = pickle.loads((folder / ".metadata").read_bytes())
    change(held)
    (folder / ".metadata").write_bytes(pickle.dumps(held))
    with pytest.raises(ds_reshard.CheckpointDamaged, match=what):
        ds_reshard.dcp.Reader(folder)
    with pytest.raises(ds_reshard.CheckpointDamaged, match=what):
        convert(str(folder), str(tmp_path / "out"), to="zero2", dp=2)
    assert not verify(str(folder)).clean


@pytest.mark.parametrize(
    ("make", "flat", "told"),
    [
        (
            torch.optim.AdamW,
            False,
            r"first\.state\.bias\.exp_avg and second\.state\.bias\.exp_avg are of one name here",
        ),
        (torch.optim.SGD, False, "parameter bias is in groups of first and of second"),
        (
            torch.optim.SGD,
            True,
            r"first\.param_groups\.bias\.lr and second\.param_groups\.bias\.lr are of one name here",
        ),
    ],
)
def test_two_optimizers_of_parameters_of_one_name_are_refused(tmp_path: Path, make: Any, flat: bool, told: str) -> None:
    """As a GAN has them: one's learning rate took the place of the other's, or the folder was called damaged."""
    state: dict[str, Any] = {}
    for number, name in enumerate(("first", "second"), start=1):
        model = torch.nn.Linear(3, 2)
        optimizer = make(model.parameters(), lr=0.1 * number)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        state[f"{name} model"], state[name] = get_state_dict(model, optimizer, options=options)
    dcp.save(state, checkpoint_id=str(tmp_path / "gan"))
    with pytest.raises(ds_reshard.UnsupportedLayout, match=told):
        convert(str(tmp_path / "gan"), str(tmp_path / "out"), to="dcp", dp=1)


@pytest.mark.parametrize("name", ["", "net", "model"])
@pytest.mark.parametrize("flat", [None, False, True])
def test_a_module_called_state_has_weights(tmp_path: Path, name: str, flat: bool | None) -> None:
    """Its keys look like those of flattened states: with an optimizer beside it, and without one."""
    model = torch.nn.ModuleDict({"state": torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=bool(flat))
    weights, states = get_state_dict(model, optimizer, options=options)
    state = {**({name: weights} if name else weights), **({"optimizer": states} if flat is not None else {})}
    dcp.save(state, checkpoint_id=str(tmp_path / "saved"))
    convert(str(tmp_path / "saved"), str(tmp_path / "out"), to="safetensors")
    held = load_file(tmp_path / "out" / "model.safetensors")
    below = f"{name}." if name not in ("", "model") else ""
    assert held.keys() == {f"{below}{key}" for key in weights}
    assert all(torch.equal(held[f"{below}{key}"], value) for key, value in weights.items())


@pytest.mark.parametrize("to", ["pytorch", "zero2", "dcp"])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("top", ["app", "net"])
def test_a_model_of_another_name_is_found_by_its_optimizer(tmp_path: Path, top: str, flat: bool, to: str) -> None:
    """As torch's tutorial saves one, below one name with its optimizer; an average of the weights lies beside it."""
    weights, states = _state(flat)["model"], _state(flat)["optimizer"]
    model: dict[str, Any] = (
        {"app": {"model": weights, "optim": states}} if top == "app" else {top: weights, "opt": states}
    )
    average = {name: value * 2 for name, value in weights.items() if name == "embed.weight"}
    saved, usual = (str(tmp_path / name) for name in ("saved", "usual"))
    dcp.save({**model, "average": average}, checkpoint_id=saved)
    dcp.save({"model": weights, "optimizer": states, "average": average}, checkpoint_id=usual)
    assert diff(saved, usual).equal and verify(saved).clean
    name, optimizer = {"app": ("app.model", "app.optim"), "net": ("net", "opt")}[top]
    wanted = {f"{name}.{key}": torch.full_like(value, 7) for key, value in weights.items()}
    dcp.load(wanted, storage_reader=ds_reshard.dcp.Reader(saved, model=name, optimizer=optimizer))
    assert _alike(wanted, {f"{name}.{key}": value for key, value in weights.items()})
    told = [convert(one, f"{one}.{to}", to=to, dp=1 if to != "pytorch" else None) for one in (saved, usual)]
    assert diff(f"{saved}.{to}", f"{usual}.{to}").equal and told[0].notes == told[1].notes


@pytest.mark.parametrize("to", ["pytorch", "zero2", "dcp"])
def test_weights_without_a_name_above_them_are_the_model(tmp_path: Path, to: str) -> None:
    """As torchtitan saves them, flattened: counters beside them that are tensors are no weights of a coming run."""
    weights, states = _state(flat=True)["model"], _state(flat=True)["optimizer"]
    own = {"train_state": {"step": torch.tensor(2, dtype=torch.int32), "ntokens_seen": torch.tensor(640)}, "epoch": 1}
    dcp.save({**weights, "optimizer": states, **own}, checkpoint_id=str(tmp_path / "saved"))
    done = convert(str(tmp_path / "saved"), str(tmp_path / "out"), to=to, dp=None if to == "pytorch" else 1)
    if to == "zero2":
        held = torch.load(tmp_path / "out" / "saved" / "mp_rank_00_model_states.pt", weights_only=False)
        assert held["module"].keys() == weights.keys() and held["epoch"] == 1
        assert _alike(held["train_state"], own["train_state"])
    elif to == "pytorch":
        assert load_file(tmp_path / "out" / "model.safetensors").keys() >= weights.keys() - {"head.weight"}
        assert any("train_state.ntokens_seen" in note for note in done.notes)
    else:
        assert diff(str(tmp_path / "saved"), str(tmp_path / "out")).equal
    wanted = _emptied({**weights, "optimizer": states, **own})
    dcp.load(wanted, storage_reader=ds_reshard.dcp.Reader(str(tmp_path / "saved"), model=""))
    assert _alike(wanted, {**weights, "optimizer": states, **own})


def test_a_tensor_that_does_not_lie_row_major_is_no_damage(tmp_path: Path) -> None:
    """torch saves the weights of a channels_last model as they lie, and loads them; nothing here reads them."""
    folder = str(tmp_path / "step-2")
    state = {"model": torch.nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last).state_dict()}
    assert not state["model"]["weight"].is_contiguous()
    dcp.save(state, checkpoint_id=folder)
    (fault,) = verify(folder).faults
    assert (fault.error, "weight: the chunk at [0, 0, 0, 0] does not lie row-major" in fault.what) == (
        "UnsupportedLayout",
        True,
    )
    with pytest.raises(
        ds_reshard.UnsupportedLayout, match=r"(?s)does not lie row-major.*make its tensors contiguous\(\)"
    ):
        convert(folder, str(tmp_path / "out"), to="safetensors")


@pytest.mark.parametrize("what", ["shape", "type"])
def test_a_chunk_that_is_not_what_the_directory_says_is_refused(saved: Any, tmp_path: Path, what: str) -> None:
    """As many bytes of another shape or type: elements would be those of others."""
    folder = tmp_path / "step-2"
    shutil.copytree(saved[0], folder)
    held = pickle.loads((folder / ".metadata").read_bytes())
    told = held.state_dict_metadata["model.embed.weight"]
    if what == "type":
        told.properties.dtype = torch.int32
    else:
        told.size = torch.Size([7, 13])
        (chunk,) = told.chunks
        chunk.sizes = torch.Size([7, 13])
    (folder / ".metadata").write_bytes(pickle.dumps(held))
    with pytest.raises(
        ds_reshard.CheckpointDamaged, match=r"model\.embed\.weight: the chunk .* is not what the directory"
    ):
        convert(str(folder), str(tmp_path / "out"), to="safetensors")


def test_a_step_that_the_type_cannot_hold_is_refused_unless_it_may_be_cast(tmp_path: Path) -> None:
    """One that is no number is what it was."""
    steps = {"a": torch.tensor(2.5), "b": torch.tensor(float("nan"))}
    states = {name: {"step": step, "exp_avg": torch.ones(3)} for name, step in steps.items()}
    weights = {name: torch.zeros(3) for name in steps}
    dcp.save({"model": weights, "optimizer": {"state": states}}, checkpoint_id=str(tmp_path))
    wanted = {"optimizer": {"state": {"a": {"step": torch.tensor(0)}}}}
    with pytest.raises(CheckpointException, match="cast=True"):
        dcp.load(wanted, storage_reader=ds_reshard.dcp.Reader(tmp_path))
    dcp.load(wanted, storage_reader=ds_reshard.dcp.Reader(tmp_path, cast=True))
    assert wanted["optimizer"]["state"]["a"]["step"] == 2
    wanted = {"optimizer": {"state": {"b": {"step": torch.tensor(0.0)}}}}
    dcp.load(wanted, storage_reader=ds_reshard.dcp.Reader(tmp_path))
    assert wanted["optimizer"]["state"]["b"]["step"].isnan()


def _numbered(groups: int, lr: float) -> tuple[Any, Any]:
    """A model after a step, and its optimizer of so many param groups, each with a rate of its own."""
    torch.manual_seed(int(lr))
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    parts = [net] if groups == 1 else list(net)
    made = [{"params": list(part.parameters()), "lr": lr / (1 + number)} for number, part in enumerate(parts)]
    optimizer = torch.optim.AdamW(made)
    net(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("groups", [1, 2])
def test_an_optimizer_that_numbers_its_parameters_gets_its_states(tmp_path: Path, groups: int) -> None:
    """`optimizer.state_dict()` as it is: given names for its numbers, torch would drop every state without a word."""
    net, optimizer = _numbered(groups, 1.0)
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(copy.deepcopy(state), checkpoint_id=str(tmp_path))
    other, resumed = _numbered(groups, 7.0)
    wanted = {"model": other.state_dict(), "optimizer": resumed.state_dict()}
    dcp.load(wanted, storage_reader=ds_reshard.dcp.Reader(tmp_path))
    assert _alike(wanted, state)
    resumed.load_state_dict(wanted["optimizer"])
    assert _alike(resumed.state_dict(), optimizer.state_dict())


def test_an_optimizer_that_numbers_its_parameters_otherwise_is_refused(tmp_path: Path) -> None:
    """Of another number of groups, or of fewer parameters: a number says nothing but a position."""
    _, optimizer = _numbered(2, 1.0)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=str(tmp_path))
    for members in ([0, 1, 2, 3], [0], [3, 2]):
        wanted = {"optimizer": {"param_groups": [{"lr": 7.0, "params": list(members)}]}}
        with pytest.raises(CheckpointException, match="have other numbers than those of the group that was saved"):
            dcp.load(wanted, storage_reader=ds_reshard.dcp.Reader(tmp_path))
        assert wanted["optimizer"]["param_groups"] == [{"lr": 7.0, "params": members}]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("value", [3, 0.5, True, "warm", None], ids=repr)
def test_a_state_that_is_a_plain_value_comes_back(tmp_path: Path, value: Any, flat: bool) -> None:
    """As the steps of transformers' Adafactor are; a number goes into the tensor that an optimizer has for it, too."""
    states: dict[str, Any] = {"state": {"a": {"exp_avg": torch.ones(3), "kept": value}}}
    if flat:
        states = {"state.a.exp_avg": torch.ones(3), "state.a.kept": value}
    dcp.save({"model": {"a": torch.ones(3)}, "optimizer": states}, checkpoint_id=str(tmp_path))
    for other in ("other", torch.tensor(7.0)):
        for reader in (dcp.FileSystemReader(tmp_path), ds_reshard.dcp.Reader(tmp_path)):
            wanted: Any = {"optimizer": {"state": {"a": {"exp_avg": torch.zeros(3), "kept": other}}}}
            if flat:
                wanted = {"optimizer": {"state.a.exp_avg": torch.zeros(3), "state.a.kept": other}}
            dcp.load(wanted, storage_reader=reader)
            held = wanted["optimizer"]["state.a.kept"] if flat else wanted["optimizer"]["state"]["a"]["kept"]
            assert held == value and (torch.is_tensor(held) or type(held) is type(value))


def test_all_files_that_are_not_there_are_named(saved: Any, tmp_path: Path) -> None:
    """Also where what is no tensor lies in them, which is read first."""
    folder = tmp_path / "three"
    convert(saved[0], str(folder), to="dcp", dp=3)
    files = sorted(folder.glob("*.distcp"))
    for file in files[:2]:
        file.unlink()
    for read in (
        lambda: ds_reshard.dcp.Reader(folder),
        lambda: convert(str(folder), str(tmp_path / "out"), to="zero1"),
    ):
        with pytest.raises(ds_reshard.CheckpointNotFound, match="To mend: restore the folder") as raised:
            read()
        assert {fault.where for fault in raised.value.faults} == {str(file) for file in files[:2]}


class Evil:
    """Unpickled by pickle, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def _read_by(folder: str, out: Path) -> list[Any]:
    return [
        lambda: ds_reshard.dcp.Reader(folder),
        lambda: convert(folder, str(out), to="zero2", dp=2),
        lambda: convert(folder, str(out), to="dcp", dp=2),
    ]


@pytest.mark.parametrize("where", ["an object", "the directory"])
def test_nothing_in_a_folder_is_executed(saved: Any, tmp_path: Path, where: str) -> None:
    """Neither in `.metadata` nor in a .distcp file; torch's own pickle would."""
    folder, ran = tmp_path / "step-2", tmp_path / "ran"
    if where == "an object":
        dcp.save({**copy.deepcopy(saved[1]), "own": Evil(ran)}, checkpoint_id=str(folder))
    else:
        shutil.copytree(saved[0], folder)
        held = pickle.loads((folder / ".metadata").read_bytes())
        held.planner_data["more"] = ("model", Evil(ran))
        (folder / ".metadata").write_bytes(pickle.dumps(held))
    for read in _read_by(str(folder), tmp_path / "out"):
        with pytest.raises(ds_reshard.UnsafePickle, match="system"):
            read()
    found = inspect(str(folder))
    assert {fault.error for fault in found.faults} == {"UnsafePickle"} and not verify(str(folder)).clean
    assert not ran.exists() and not (tmp_path / "out").exists()


def test_a_folder_without_paths_says_that_it_is_all_weights(tmp_path: Path) -> None:
    """A planner that does not flatten tells of no paths: keys may be anything."""
    kept = {"model.w": torch.ones(2), "optimizer.state.w.exp_avg": torch.zeros(2)}
    dcp.save(kept, checkpoint_id=str(tmp_path), planner=DefaultSavePlanner(flatten_state_dict=False))
    with pytest.raises(ds_reshard.UnsupportedLayout, match="all of its tensors are taken for weights"):
        convert(str(tmp_path), str(tmp_path / "out"), to="dcp", dp=1)
    wanted = _emptied(kept)
    dcp.load(wanted, storage_reader=ds_reshard.dcp.Reader(tmp_path, model="", optimizer=""))
    assert _alike(wanted, kept)


def test_the_plan_is_of_the_files_that_are_written(saved: Any, tmp_path: Path) -> None:
    made = plan(saved[0], to="dcp", dp=2)
    convert(saved[0], str(tmp_path / "out"), to="dcp", dp=2)
    written = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir() if path.suffix != ".json"}
    assert sum(written.values()) == made.bytes_written
    assert {name for unit in made.units for name in unit.files} == written.keys()


def test_the_size_of_the_coming_run_is_asked_for(saved: Any, tmp_path: Path) -> None:
    with pytest.raises(ds_reshard.ConfigError, match="--dp N"):
        convert(saved[0], str(tmp_path / "out"), to="zero2")


def test_a_member_without_states_is_refused(tmp_path: Path) -> None:
    """All of them, by name, before anything is written."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    net.norm.requires_grad_(False)
    net(torch.arange(8)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(net, optimizer)
    states["state"] = {name: kept for name, kept in states["state"].items() if not name.startswith("norm")}
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(tmp_path / "saved"))
    with pytest.raises(ds_reshard.UnsupportedLayout, match="has no state") as raised:
        convert(str(tmp_path / "saved"), str(tmp_path / "out"), to="zero1", dp=2)
    assert {fault.where for fault in raised.value.faults} == {"norm.weight", "norm.bias"}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"precond": {0: torch.ones(2)}}, "state.norm.bias.precond.0"),
        ({"precond": [torch.ones(2)]}, "state.norm.bias.precond.0"),
        ({"seen": [1, 2]}, "state.norm.bias.seen"),
        ({"betas": [torch.tensor(0.8), torch.tensor(0.9)]}, "param_groups.1.betas.1"),
    ],
    ids=["dict", "list of tensors", "list", "group"],
)
def test_parts_of_the_optimizer_that_lie_deeper_are_refused(tmp_path: Path, part: dict[str, Any], what: str) -> None:
    """As Shampoo's: they became entries of the client state, and DeepSpeed's optimizer went on without them."""
    state = _state(flat=False)
    of = state["optimizer"]["param_groups"][1] if "betas" in part else state["optimizer"]["state"]["norm.bias"]
    of.update(part)
    folder = str(tmp_path / "saved")
    dcp.save(copy.deepcopy(state), checkpoint_id=folder)
    for to in ("zero2", "universal", "pytorch"):
        with pytest.raises(ds_reshard.UnsupportedLayout, match="inside a dict or a list") as raised:
            convert(folder, str(tmp_path / to), to=to, dp=2 if to == "zero2" else None)
        assert f"optimizer.{what}" in {fault.where for fault in raised.value.faults}
    convert(folder, str(tmp_path / "dcp"), to="dcp", dp=2)
    wanted = _emptied(state)
    dcp.load(wanted, checkpoint_id=str(tmp_path / "dcp"))
    assert _alike(wanted["optimizer"], state["optimizer"])


@pytest.mark.parametrize("name", ["pp 2 tp 2 dp 3", "pp 2 tp 2, whole states, fp32"])
def test_the_reader_serves_nanotron(tmp_path: Path, name: str) -> None:
    """Synthetic files, of every axis: masters where there are some, and moments, to the bit."""
    held = values(RUNS[name])
    folder = write(RUNS[name], tmp_path / "saved")
    best = {n: held.get((n, "fp32"), held[n, "weight"]) for n, kind in held if kind == "weight"}
    truth = {f"model.{n}": tensor for n, tensor in best.items()}
    truth |= {f"optimizer.state.{n}.{kind}": t for (n, kind), t in held.items() if kind not in ("weight", "fp32")}
    wanted = _emptied(truth)
    dcp.load(wanted, storage_reader=ds_reshard.dcp.Reader(folder))
    assert _alike(wanted, truth)


def test_what_megatron_saves_as_torch_dcp_is_looked_at_and_not_resumed_from(tmp_path: Path) -> None:
    """The state dict of `generate_state_dict`, whose optimizer numbers its states: no number is taken for a name."""
    weight = torch.randn(4, 2)
    state = {
        "args": argparse.Namespace(num_layers=1),
        "checkpoint_version": 3.0,
        "iteration": 5,
        "model": {"weight": weight},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(4, 2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "folder"))
    folder, out = str(tmp_path / "folder"), str(tmp_path / "out")
    for told in (inspect(folder), verify(folder, deep=True)):
        assert told.faults == () and any("of Megatron-LM's format torch_dcp" in note for note in told.notes)
    for to in ("zero2", "dcp"):
        with pytest.raises(ds_reshard.UnsupportedLayout, match=r"format torch_dcp, or of.*--ckpt-format torch_dist"):
            convert(folder, out, to=to, dp=1)
    convert(folder, out, to="safetensors")
