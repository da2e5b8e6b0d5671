"""Folders of EasyR1 and verl that torch.save alone makes: what they may hold beside DTensors, carried or refused.

Each rank has whole tensors; tests/hosts/fsdp/test_fsdp_folders.py has what ranks of FSDP save.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_reshard.errors import CheckpointDamaged, UnsupportedLayout
from ds_reshard.formats.fsdp.checkpoint import _mesh_sizes, open_fsdp
from ds_reshard.formats.fsdp.target import Meshes
from ds_reshard.hosts.dcp import reader
from ds_reshard.model.records import GlobalName, ObjectRecord
from ds_reshard.operations import convert, diff, fingerprint, inspect, verify

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4)}
States = Callable[[str, torch.Tensor, int], Mapping[str, Any]]
"""The states of a parameter in a rank's file, by its name and value and the rank."""


def adam(name: str, weight: torch.Tensor, rank: int) -> dict[str, Any]:
    return {"step": torch.tensor(5.0), "exp_avg": weight * 2, "exp_avg_sq": weight**2}


def schedule(folder: Path, rank: int, *, ranks: int = 2, epoch: int = 3) -> None:
    """A rank's extra state: the schedule, and random states that are its own."""
    state = {"lr_scheduler": {"last_epoch": epoch, "_last_lr": [0.1]}, "rng": {"cpu": torch.tensor([rank])}}
    torch.save(state, folder / f"extra_state_world_size_{ranks}_rank_{rank}.pt")


def scheduled(folder: Path, *, epoch: int = 3) -> Path:
    saved(folder)
    for rank in range(2):
        schedule(folder, rank, epoch=epoch)
    return folder


def saved(folder: Path, states: States = adam, *, ranks: int = 2, rates: Sequence[Any] = (0.1, 0.1)) -> Path:
    """The files of each rank, whose group has its one of the `rates`."""
    folder.mkdir()
    for rank in range(ranks):
        state = {name: dict(states(name, weight, rank)) for name, weight in WEIGHTS.items()}
        groups = [{"params": list(WEIGHTS), "lr": rates[rank], "betas": (0.9, 0.99)}]
        torch.save(WEIGHTS, folder / f"model_world_size_{ranks}_rank_{rank}.pt")
        torch.save({"state": state, "param_groups": groups}, folder / f"optim_world_size_{ranks}_rank_{rank}.pt")
    return folder


def plain(step: int, of_rank_1: int | None = None) -> States:
    """transformers' Adafactor counts in Python, and so do optimizers of DeepSpeed; None is a state that is not used."""

    def of(name: str, weight: torch.Tensor, rank: int) -> dict[str, Any]:
        told = of_rank_1 if rank and of_rank_1 is not None else step
        return {**adam(name, weight, rank), "step": told, "RMS": 0.5, "momentum_buffer": None}

    return of


def test_states_that_are_plain_numbers_are_carried(tmp_path: Path) -> None:
    """They are told and compared, and are in what is converted."""
    folder = saved(tmp_path / "saved", plain(5))
    assert inspect(str(folder)).steps.optimizer_steps == (5,) and verify(str(folder), deep=True).clean
    found = diff(str(folder), str(saved(tmp_path / "later", plain(900))))
    assert [(one.where, one.a, one.b) for one in found.values] == [("step of a.weight and 1 more", "5", "900")]
    convert(str(folder), str(tmp_path / "pytorch"), to="pytorch")
    states = torch.load(tmp_path / "pytorch" / "optimizer.pt")["state"]
    assert [(one["step"], one["RMS"], one["momentum_buffer"]) for one in states.values()] == [(5, 0.5, None)] * 2
    convert(str(folder), str(tmp_path / "dcp"), to="dcp", dp=1)
    assert inspect(str(tmp_path / "dcp")).steps.optimizer_steps == (5,)


def test_plain_numbers_of_another_step_are_found(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", plain(5, of_rank_1=6))
    with pytest.raises(CheckpointDamaged, match=r"rank_1\.pt: its states that are plain numbers are not rank 0's"):
        fingerprint(str(folder))


UNIT = {"a.weight": {"shape": [2, 3], "offset": 0}, "b.weight": {"shape": [4], "offset": 6}}


@pytest.mark.parametrize("flat", [False, True])
def test_a_rate_that_is_a_tensor_is_compared_by_its_value(tmp_path: Path, flat: bool) -> None:
    """torch makes a tensor of it where the step is compiled: each rank's file has one of its own, of one value."""

    def of(name: str, *rates: float) -> str:
        folder = saved(tmp_path / name, rates=[torch.tensor(rate) for rate in rates])
        if flat:
            order = {"use_orig_params": True, "units": [UNIT], "parameters": list(WEIGHTS)}
            (folder / "fsdp_units.json").write_text(json.dumps(order))
        for rank, rate in enumerate(rates if flat else ()):
            part = slice(0, 5) if not rank else slice(5, 10)  # of the ten elements of the unit
            states = {n: part_of(tensor) for n, tensor in enumerate(_cut(part)) if tensor.numel()}
            groups = [{"params": [0, 1], "lr": torch.tensor(rate)}]
            torch.save({"state": states, "param_groups": groups}, folder / f"optim_world_size_2_rank_{rank}.pt")
        return str(folder)

    folder = of("saved", 0.1, 0.1)
    assert verify(folder).clean
    convert(folder, str(tmp_path / "pytorch"), to="pytorch")
    (group,) = torch.load(tmp_path / "pytorch" / "optimizer.pt")["param_groups"]
    assert torch.equal(group["lr"], torch.tensor(0.1))
    with pytest.raises(CheckpointDamaged, match=r"rank_1\.pt: its param groups have other members or values"):
        fingerprint(of("other", 0.1, 0.2))


def _cut(part: slice) -> list[torch.Tensor]:
    """What a rank holds of each weight, where it holds these elements of both."""
    whole = torch.arange(10.0)
    return [whole[max(part.start, start) : min(part.stop, stop)] for start, stop in ((0, 6), (6, 10))]


def part_of(tensor: torch.Tensor) -> dict[str, Any]:
    return {"step": torch.tensor(5.0), "exp_avg": tensor, "exp_avg_sq": tensor**2}


STATELESS: dict[str, States] = {
    "SGD": lambda *given: {},
    "plain numbers": lambda *given: {"step": 5},
    "steps in tensors": lambda *given: {"step": torch.tensor(5.0)},
}


@pytest.mark.parametrize("case", STATELESS)
def test_an_optimizer_without_moments_keeps_its_groups(tmp_path: Path, case: str) -> None:
    """SGD keeps no state without momentum, and its learning rate is in the group; all ranks have the same."""
    folder = saved(tmp_path / "saved", STATELESS[case])
    convert(str(folder), str(tmp_path / "dcp"), to="dcp", dp=1)
    for at in (folder, tmp_path / "dcp"):
        (group,) = inspect(str(at)).groups
        assert (group.members, group.hyperparameters["lr"]) == (2, 0.1)
    other = saved(tmp_path / "other", STATELESS[case], rates=(0.1, 0.2))
    with pytest.raises(CheckpointDamaged, match=r"rank_1\.pt: its param groups have other members or values"):
        fingerprint(str(other))


def test_plain_numbers_alone_are_found_to_be_of_another_step(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", lambda name, weight, rank: {"step": 5 + rank})
    with pytest.raises(CheckpointDamaged, match=r"rank_1\.pt: its states that are plain numbers are not rank 0's"):
        fingerprint(str(folder))


@pytest.mark.parametrize(("groups", "told"), [([[0, 1]], ("a.weight", "b.weight")), ([[0], [1]], None)])
def test_groups_of_numbers_without_states(
    tmp_path: Path, groups: list[list[int]], told: tuple[str, ...] | None
) -> None:
    """verl counts parameters: those of one group get their names; of several a note says that they are left out."""
    folder = saved(tmp_path / "saved", ranks=1)
    tree = {"state": {}, "param_groups": [{"params": numbers, "lr": 0.1} for numbers in groups]}
    torch.save(tree, folder / "optim_world_size_1_rank_0.pt")
    opened = open_fsdp(str(folder))
    assert (opened.facts.groups[0].members if opened.facts is not None else None) == told
    assert (opened.unnamed is not None) == (told is None)
    assert opened.unnamed is None or opened.unnamed.what.startswith("several param groups")


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("weight", torch.full((2, 3), 7.0), "weight has a name that is reserved for weights"),
        ("fp32", torch.full((2, 3), 7.0), "fp32 has a name that is reserved for weights"),
        ("fp32", 7, "fp32 has a name that is reserved for weights"),
        ("blocks", [torch.ones(2)], r"a\.weight has a state 'blocks' that is neither a tensor nor a number .*list"),
    ],
)
def test_states_that_would_be_taken_for_others_or_lost_are_refused(
    tmp_path: Path, kind: str, value: object, text: str
) -> None:
    """A state of the name of a weight would replace it in what is converted."""
    folder = saved(tmp_path / "saved", lambda *given: {**adam(*given), kind: value})
    with pytest.raises(UnsupportedLayout, match=text):
        convert(str(folder), str(tmp_path / "out"), to="dcp", dp=1)


@pytest.mark.parametrize("member", ["global", 2])
def test_states_beside_those_of_numbers_are_refused(tmp_path: Path, member: object) -> None:
    """verl counts parameters: what it has not counted is of none."""
    folder = saved(tmp_path / "saved", ranks=1)
    states = {number: adam(*one, 0) for number, one in enumerate(WEIGHTS.items())}
    tree = {"state": {**states, member: {"k": torch.ones(3)}}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    torch.save(tree, folder / "optim_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointDamaged, match=f"holds states of {member!r}, which is no number of a parameter"):
        fingerprint(str(folder))


def test_states_of_flat_parameters_have_no_name_of_a_weight(tmp_path: Path) -> None:
    """Of verl with FSDP1, read in the order that fsdp_units.json tells."""
    folder = saved(tmp_path / "saved", ranks=1)
    order = {"use_orig_params": True, "units": [UNIT], "parameters": list(WEIGHTS)}
    (folder / "fsdp_units.json").write_text(json.dumps(order))
    groups = [{"params": [number], "lr": 0.1} for number in range(2)]
    states = {number: adam(*one, 0) for number, one in enumerate(WEIGHTS.items())}
    torch.save({"state": states, "param_groups": groups}, folder / "optim_world_size_1_rank_0.pt")
    assert len(fingerprint(str(folder)).tensors) == 6
    states[1]["weight"] = torch.full((4,), 7.0)
    torch.save({"state": states, "param_groups": groups}, folder / "optim_world_size_1_rank_0.pt")
    with pytest.raises(UnsupportedLayout, match="parameter 1: weight has a name that is reserved for weights"):
        fingerprint(str(folder))


EXTRA = "extra_state_world_size_2_rank_1.pt"
WRONG_EXTRA: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing": (lambda folder: (folder / EXTRA).unlink(), [f"{EXTRA}: is missing"]),
    "another size beside it": (
        lambda folder: schedule(folder, 2, ranks=4),
        ["saved: holds extra states of another world size (expected of 2 ranks, found extra_state_world_size_4_rank_*"],
    ),
    "under another size": (
        lambda folder: (folder / EXTRA).rename(folder / EXTRA.replace("size_2", "size_4")),
        [f"{EXTRA}: is missing", "saved: holds extra states of another world size"],
    ),
    "of another step": (
        lambda folder: schedule(folder, 1, epoch=4),
        [f"{EXTRA}: lr_scheduler is another than rank 0's: of another step or run"],
    ),
}


@pytest.mark.parametrize("case", WRONG_EXTRA)
def test_extra_states_that_are_missing_or_of_another_save_are_found(tmp_path: Path, case: str) -> None:
    """`verify` names them, and so does what uses them; weights and states can be had without."""
    folder = scheduled(tmp_path / "saved")
    assert verify(str(folder), deep=True).clean
    wreck, expected = WRONG_EXTRA[case]
    wreck(folder)
    found = verify(str(folder), deep=True)
    assert [one for one in expected if not any(one in fault.line() for fault in found.faults)] == []
    assert len(found.faults) == len(expected) and found.tensors == 6
    with pytest.raises(CheckpointDamaged):
        diff(str(folder), str(folder))
    assert not fingerprint(str(folder)).faults


def test_a_damaged_extra_state_is_told_once(tmp_path: Path) -> None:
    folder = scheduled(tmp_path / "saved")
    file = bytearray((folder / EXTRA).read_bytes())
    file[file.index(b"last_epoch")] ^= 1
    (folder / EXTRA).write_bytes(file)
    assert [fault.error for fault in verify(str(folder)).faults] == ["ChecksumMismatch"]


def test_the_schedules_of_two_folders_are_compared(tmp_path: Path) -> None:
    """Random states are each rank's own, and are not, which a note says; a folder of another format has none."""
    folder = str(scheduled(tmp_path / "saved"))
    found = diff(folder, str(scheduled(tmp_path / "other", epoch=99)))
    assert [(one.where, one.a, one.b) for one in found.values] == [("extra_state.lr_scheduler.last_epoch", "3", "99")]
    assert [note[:24] for note in found.notes] == [f"the random states in {side}'s" for side in "AB"]
    found = diff(folder, str(saved(tmp_path / "without")))
    assert [(one.where, one.b) for one in found.values] == [("extra_state.lr_scheduler", "absent")]
    convert(folder, str(tmp_path / "dcp"), to="dcp", dp=1)
    found = diff(folder, str(tmp_path / "dcp"))
    assert found.equal and ["with a folder of another format" in note for note in found.notes] == [True]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_note_names_buffers_that_differ_between_ranks(
    tmp_path: Path, damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics of batches: verify finds nothing wrong with them, and convert has one place for them, rank 0's.

    So has `ds_reshard.dcp.Reader`.
    """
    folder = saved(tmp_path / "saved")
    for rank in range(2):
        statistics = {"norm.running_mean": torch.full((4,), float(rank)), "norm.running_var": torch.ones(4)}
        torch.save({**WEIGHTS, **statistics}, folder / f"model_world_size_2_rank_{rank}.pt")
    if damaged:
        (folder / "model_world_size_2_rank_1.pt").write_bytes(b"no archive")
        with pytest.raises(CheckpointDamaged, match="rank_1"):
            convert(str(folder), str(tmp_path / "out"), to="dcp", dp=1)
        return
    assert verify(str(folder), deep=True).clean
    done = convert(str(folder), str(tmp_path / "out"), to="dcp", dp=1)
    note, told = "ranks have different values of these, and those of rank 0 are taken: norm.running_mean", list[str]()
    monkeypatch.setattr(reader.logger, "warning", lambda text, *given: told.append(text % given))
    reader.Reader(folder)
    assert note in done.notes and f"{folder}: {note}" in told


def test_what_lies_beside_the_ranks_files_is_copied_or_named(tmp_path: Path) -> None:
    """Texts below `huggingface/` at any depth, as chat templates; LoRA's files are left out, and a note says so."""
    folder = saved(tmp_path / "saved", ranks=1)
    kept = ("huggingface/config.json", "huggingface/additional_chat_templates/tool_use.jinja", "fsdp_config.json")
    for name in (*kept, "lora_train_meta.json", "lora_adapter/adapter_config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    out = tmp_path / "out"
    done = convert(str(folder), str(out), to="fsdp", dp=1)
    assert done.notes == ("left out, as nothing here reads them: lora_adapter, lora_train_meta.json",)
    assert all((out / name).is_file() for name in kept) and verify(str(out)).clean
    assert convert(str(out), str(tmp_path / "again"), to="fsdp", dp=1).notes == ()


def layout(**state: object) -> ObjectRecord:
    return ObjectRecord(callable=GlobalName(module="torch.distributed._mesh_layout", name="_MeshLayout"), state=state)


def test_meshes_of_torch_up_to_2_12_have_one_shape() -> None:
    """Synthetic, as torch 2.11.0 was seen to keep them; tests/versions has the files of the real one."""
    one, pairs = layout(shape=(1,), stride=(1,)), layout(shape=(2, 2), stride=(2, 1))
    assert (_mesh_sizes({"_layout": one}), _mesh_sizes({"_layout": pairs})) == ((1,), (2, 2))
    assert Meshes("a", saved_size=1, rank=0, size=3)._resized(one).state == {"shape": (3,), "stride": (1,)}
    grown = Meshes("a", saved_size=4, rank=0, size=6, shards=2)._regrouped(pairs, 2)
    assert grown.state == {"shape": (3, 2), "stride": (2, 1)}
    with pytest.raises(UnsupportedLayout, match="a mesh of two dimensions"):
        Meshes("a", saved_size=4, rank=0, size=6, shards=2)._regrouped(layout(shape=(2, 2), stride=(1, 2)), 2)


def test_what_the_files_hold_beside_tensors_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    for rank in range(2):
        for name, key in (("model", "note"), ("optim", "scaler")):
            path = folder / f"{name}_world_size_2_rank_{rank}.pt"
            torch.save({**torch.load(path), key: "text"}, path)
    notes = convert(str(folder), str(tmp_path / "out"), to="pytorch").notes
    assert {
        f"left out of {name}_world_size_2_rank_0.pt, as no other format has a place for it: {key}"
        for name, key in (("model", "note"), ("optim", "scaler"))
    } <= {*notes}


def test_two_keys_of_one_text_are_damage(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    path = folder / "model_world_size_2_rank_0.pt"
    torch.save({**torch.load(path), 1: torch.ones(2), "1": torch.zeros(2)}, path)
    with pytest.raises(CheckpointDamaged, match="has two keys of one text"):
        convert(str(folder), str(tmp_path / "out"), to="pytorch")
