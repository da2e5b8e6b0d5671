"""What a folder of plain PyTorch does not prove, or holds in two ways: told or refused by name, never guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from ds_reshard.errors import ReshardError, UnsupportedLayout
from ds_reshard.operations import Options, convert

pytestmark = pytest.mark.slow
ONE_THREAD = Options(threads=1, memory_nbytes=1 << 20)
SIZES: dict[str, dict[str, Any]] = {
    **{to: {"dp": 2} for to in ("zero1", "zero2", "zero3", "dcp")},
    **{to: {} for to in ("pytorch", "safetensors", "universal")},
}


def states(shape: tuple[int, ...], step: Any = 3.0, **more: Any) -> dict[str, Any]:
    kept = torch.tensor(step) if isinstance(step, float) else step
    return {"step": kept, "exp_avg": torch.full(shape, 0.5), "exp_avg_sq": torch.full(shape, 0.25), **more}


def optimizer(names: list[str], held: dict[int, Any], **settings: Any) -> dict[str, Any]:
    group = {"lr": 0.1, "betas": (0.9, 0.99), **settings, "params": list(range(len(names))), "param_names": names}
    return {"state": held, "param_groups": [group]}


def folder(place: Path, weights: dict[Any, Any], saved: Any, *, safe: bool = False) -> Path:
    place.mkdir()
    if safe:
        save_file(weights, place / "model.safetensors")
    else:
        torch.save(weights, place / "pytorch_model.bin")
    torch.save(saved, place / "optimizer.pt")
    return place


def write(source: Path, out: Path, to: str) -> tuple[str, ...]:
    return tuple(convert(str(source), str(out), to=to, options=ONE_THREAD, **SIZES[to]).notes)


def module(out: Path) -> dict[str, Any]:
    tag = out / (out / "latest").read_text().strip()
    name = next(path for path in sorted(tag.iterdir()) if path.name.endswith("model_states.pt"))
    held: dict[str, Any] = torch.load(name, weights_only=False)
    return held


def settings(out: Path) -> dict[str, Any]:
    (file, *_) = sorted((out / (out / "latest").read_text().strip()).glob("*optim_states.pt"))
    held = torch.load(file, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]
    assert isinstance(held, dict)
    return held


ONES = {"ln1": torch.ones(8), "ln2": torch.ones(8), "a": torch.arange(4.0)}


@pytest.mark.parametrize("to", ["pytorch", "safetensors", "zero1", "zero3"])
def test_equal_bytes_are_no_tie(to: str, tmp_path: Path) -> None:
    """A frozen layer of ones beside a trained one: two weights, and a note."""
    source = folder(tmp_path / "s", ONES, optimizer(["ln1", "a"], {0: states((8,)), 1: states((4,))}))
    notes = write(source, tmp_path / "o", to)
    assert any("no proof that they are tied" in note and "ln2 and ln1" in note for note in notes)
    if to in ("pytorch", "safetensors"):
        assert load_file(tmp_path / "o" / "model.safetensors").keys() == ONES.keys()
    else:
        held = module(tmp_path / "o")
        assert held["shared_params"] == {} and held["module"].keys() == ONES.keys()
    if to == "zero3":
        assert list(held["frozen_param_shapes"]) == ["ln2"]


@pytest.mark.parametrize("to", ["zero2", "zero3"])
def test_frozen_or_a_buffer(to: str, tmp_path: Path) -> None:
    """Stage 2 holds either whole; stage 3 holds them in two ways, and is told which was taken."""
    weights = {"a": torch.ones(4), "inv_freq": torch.arange(6.0)}
    notes = write(folder(tmp_path / "s", weights, optimizer(["a"], {0: states((4,))})), tmp_path / "o", to)
    said = [note for note in notes if "written as frozen parameters: inv_freq." in note]
    assert bool(said) is (to == "zero3") and all("--to zero2" in note for note in said)
    shape = tuple(module(tmp_path / "o")["module"]["inv_freq"].shape)
    assert shape == ((6,) if to == "zero2" else (0,))


def test_a_member_without_states_is_no_other_name(tmp_path: Path) -> None:
    saved = optimizer(["ln1", "ln2", "a"], {0: states((8,)), 2: states((4,))})
    write(folder(tmp_path / "s", ONES, saved), tmp_path / "o", "pytorch")
    assert load_file(tmp_path / "o" / "model.safetensors").keys() == ONES.keys()


def test_one_storage_under_two_names_is_a_tie(tmp_path: Path) -> None:
    """Also of zeros: the storage is the proof."""
    both = torch.zeros(4, 3)
    weights = {"head": both, "embed": both, "x": torch.ones(2)}
    source = folder(tmp_path / "s", weights, optimizer(["embed", "x"], {0: states((4, 3)), 1: states((2,))}))
    write(source, tmp_path / "o", "zero1")
    held = module(tmp_path / "o")
    assert held["shared_params"] == {"head": "embed"}
    assert held["module"]["head"].data_ptr() == held["module"]["embed"].data_ptr()
    notes = write(source, tmp_path / "w", "safetensors")
    assert "head is tied to embed, and is there under that name alone" in notes


@pytest.mark.parametrize("kind", ["weight", "fp32"])
@pytest.mark.parametrize("value", [torch.full((4,), 7.0), 7.0], ids=["tensor", "number"])
def test_states_of_the_weights_names(kind: str, value: Any, tmp_path: Path) -> None:
    source = folder(tmp_path / "s", {"a": torch.ones(4)}, optimizer(["a"], {0: states((4,), **{kind: value})}))
    with pytest.raises(UnsupportedLayout, match=f"a: {kind} has a name that is reserved for weights"):
        write(source, tmp_path / "o", "pytorch")


@pytest.mark.parametrize("kind", ["weight", "fp32"])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_states_of_the_weights_names_in_torchs_folders(kind: str, flat: bool, tmp_path: Path) -> None:
    kept = {**states((4,)), kind: torch.full((4,), 7.0)}
    held = {f"state.a.{name}": value for name, value in kept.items()} if flat else {"state": {"a": kept}}
    dcp.save({"model": {"a": torch.ones(4)}, "optimizer": held}, checkpoint_id=str(tmp_path / "s"))
    with pytest.raises(UnsupportedLayout, match=f"a.{kind} has a name that is reserved for weights"):
        write(tmp_path / "s", tmp_path / "o", "pytorch")


NUMBERS = {
    "float32": (torch.tensor(0.1), torch.tensor(0.1).item()),
    "bfloat16": (torch.tensor(0.1, dtype=torch.bfloat16), torch.tensor(0.1, dtype=torch.bfloat16).item()),
    "float16": (torch.tensor(0.1, dtype=torch.float16), torch.tensor(0.1, dtype=torch.float16).item()),
    "inf": (torch.tensor(float("inf")), float("inf")),
    "bool": (torch.tensor(True), True),
    "int": (torch.tensor(7), 7),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_tensors_among_hyper_parameters_keep_their_value(name: str, tmp_path: Path) -> None:
    given, wanted = NUMBERS[name]
    source = folder(tmp_path / "s", {"a": torch.ones(4)}, optimizer(["a"], {0: states((4,))}, lr=given))
    write(source, tmp_path / "o", "zero1")
    found = settings(tmp_path / "o")["lr"]
    assert type(found) is type(wanted) and found == wanted


def test_a_tensor_that_is_no_number_is_refused(tmp_path: Path) -> None:
    saved = optimizer(["a"], {0: states((4,))}, lr=torch.tensor(1j))
    source = folder(tmp_path / "s", {"a": torch.ones(4)}, saved)
    with pytest.raises(UnsupportedLayout, match="param group 0: lr: is a complex64 tensor"):
        write(source, tmp_path / "o", "zero1")


def test_a_whole_step_stays_one(tmp_path: Path) -> None:
    """fp32 has no 16777217; torch.distributed.checkpoint has a place for an fp32 step alone."""
    source = folder(tmp_path / "s", {"a": torch.ones(4)}, optimizer(["a"], {0: states((4,), 16777217)}))
    write(source, tmp_path / "o", "pytorch")
    step = torch.load(tmp_path / "o" / "optimizer.pt")["state"][0]["step"]
    assert type(step) is int and step == 16777217
    with pytest.raises(UnsupportedLayout, match=r"a\[step\].*16777217"):
        write(source, tmp_path / "d", "dcp")


def test_a_groups_own_step_beside_that_of_a_state(tmp_path: Path) -> None:
    """A param group's `step` and the state `step` of a parameter that is called "0"."""
    held = {0: states((4,)), 1: states((4,))}
    weights = {"0": torch.ones(4), "1": torch.zeros(4)}
    write(
        folder(tmp_path / "s", weights, optimizer(["0", "1"], held, step=torch.tensor(9.0))), tmp_path / "o", "pytorch"
    )
    back = torch.load(tmp_path / "o" / "optimizer.pt")
    assert back["param_groups"][0]["step"].item() == 9 and back["state"][0]["step"].item() == 3


def unnamed(held: dict[int, Any], count: int) -> dict[str, Any]:
    return {"state": held, "param_groups": [{"lr": 0.1, "params": list(range(count))}]}


@pytest.mark.parametrize(
    "held",
    [
        {0: {"step": torch.tensor(3.0), "exp_avg": torch.tensor(0.5)}},
        {0: {"exp_avg": torch.tensor(0.5)}, 1: {"exp_avg": torch.tensor(0.5)}},
        {0: {"momentum_buffer": None}, 1: {"momentum_buffer": torch.tensor(0.5)}},
        {0: {"step": torch.tensor(3.0)}, 1: {"step": torch.tensor(3.0)}},
        {},
    ],
    ids=["scalars", "scalars of all", "none", "steps alone", "no states"],
)
def test_shapes_that_prove_nothing(held: dict[int, Any], tmp_path: Path) -> None:
    """A scalar state may be of any weight, and a number without states is any weight's."""
    weights = {"a": torch.ones(5), "scale": torch.tensor(2.0)}
    source = folder(tmp_path / "s", weights, unnamed(held, 2), safe=True)
    with pytest.raises(UnsupportedLayout, match="which parameter is which"):
        write(source, tmp_path / "o", "pytorch")


def test_a_number_that_stands_twice(tmp_path: Path) -> None:
    saved = optimizer(["a", "b"], {0: states((4,))})
    saved["param_groups"][0]["params"] = [0, 0]
    source = folder(tmp_path / "s", {"a": torch.ones(4), "b": torch.ones(4)}, saved)
    with pytest.raises(UnsupportedLayout, match="which parameter is which"):
        write(source, tmp_path / "o", "pytorch")


def _states_in_a_list(source: Path) -> None:
    torch.save(optimizer(["a"], {0: [1, 2]}), source / "optimizer.pt")


def _of_adafactor(source: Path) -> None:
    held = {"step": torch.tensor(1.0), "row_var": torch.ones(4, 1), "col_var": torch.ones(1, 2)}
    torch.save({"a": torch.ones(4, 2)}, source / "pytorch_model.bin")
    torch.save(optimizer(["a"], {0: held}), source / "optimizer.pt")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "states that are no dict": (_states_in_a_list, "the states of parameter 0, a, are no dict"),
    "two optimizers": (
        lambda source: torch.save(optimizer(["a"], {}), source / "optimizer.bin"),
        "states of the optimizer in several files.*optimizer.pt, optimizer.bin",
    ),
    "two files of weights": (
        lambda source: save_file({"a": torch.zeros(4)}, source / "model.safetensors"),
        "holds weights in several files.*model.safetensors, pytorch_model.bin",
    ),
    "an index beside a file": (
        lambda source: (source / "pytorch_model.bin.index.json").write_text("{}"),
        "holds weights in several files.*pytorch_model.bin, pytorch_model.bin.index.json",
    ),
    "two schedulers": (
        lambda source: [torch.save({"last_epoch": 1}, source / f"scheduler.{end}") for end in ("pt", "bin")],
        "states of a scheduler in several files",
    ),
    "keys of one name": (
        lambda source: torch.save(
            {1: torch.ones(4), "1": torch.zeros(4), "a": torch.ones(4)}, source / "pytorch_model.bin"
        ),
        "several of its keys are '1'",
    ),
    "factored states": (_of_adafactor, "a factored state of Adafactor.*not carried"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    change, said = REFUSED[case]
    source = folder(tmp_path / "s", {"a": torch.ones(4)}, optimizer(["a"], {0: states((4,))}))
    change(source)
    with pytest.raises(ReshardError, match=f"(?s){said}"):
        write(source, tmp_path / "o", "pytorch")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("to", ["pytorch", "zero1", "safetensors"])
def test_what_is_left_out_is_told(to: str, tmp_path: Path) -> None:
    """Entries beside the weights, files that nothing reads; the Trainer's step is the iteration."""
    weights: dict[Any, Any] = {"state_dict": {"a": torch.ones(4)}, "epoch": 7, "ema": {"a": torch.ones(4)}}
    source = folder(tmp_path / "s", weights, optimizer(["a"], {0: states((4,))}))
    torch.save({"scale": 65536.0}, source / "scaler.pt")
    torch.save({}, source / "rng_state.pth")
    (source / "trainer_state.json").write_text(json.dumps({"global_step": 77}))
    said = "\n".join(write(source, tmp_path / "o", to))
    assert "left out of pytorch_model.bin, beside its state_dict: ema, epoch" in said
    assert "left out, as nothing here reads them: rng_state.pth, scaler.pt" in said
    assert "of trainer_state.json its global_step, 77, alone is taken" in said
    assert "trainer_state.json says step 77, and the optimizer 3" in said
    if to == "zero1":
        assert module(tmp_path / "o")["global_steps"] == 77


@pytest.mark.parametrize("name", ["__metadata__", "a\udc80"])
@pytest.mark.parametrize("to", ["pytorch", "safetensors"])
def test_names_that_safetensors_cannot_have(name: str, to: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "s", {name: torch.ones(4)}, optimizer([name], {0: states((4,))}))
    with pytest.raises(UnsupportedLayout, match="no tensor of a safetensors file"):
        write(source, tmp_path / "o", to)
    assert not (tmp_path / "o").exists()


def test_a_parameter_without_elements_keeps_its_states(tmp_path: Path) -> None:
    """Through a universal checkpoint, beside a parameter of a group of its own."""
    weights = {"none": torch.zeros(0, 3), "a": torch.ones(4)}
    saved = {
        "state": {0: states((0, 3)), 1: states((4,))},
        "param_groups": [
            {"lr": 0.5, "params": [0], "param_names": ["none"]},
            {"lr": 0.7, "params": [1], "param_names": ["a"]},
        ],
    }
    write(folder(tmp_path / "s", weights, saved), tmp_path / "u", "universal")
    write(tmp_path / "u", tmp_path / "o", "pytorch")
    back = torch.load(tmp_path / "o" / "optimizer.pt")["state"]
    assert {kind: tuple(value.shape) for kind, value in back[0].items()} == {
        "step": (),
        "exp_avg": (0, 3),
        "exp_avg_sq": (0, 3),
    }
