"""`diff` across ZeRO stages and sizes: equal where DeepSpeed's ranks held the same, else every difference counted."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from damaged_files import changed, flip
from gathered import gathered
from saves import Saves
from test_bad_input import TAG, optim
from test_verify import STATES, _moment

from ds_reshard.cli.main import main
from ds_reshard.operations import Reading, convert, diff, verify

pytestmark = pytest.mark.distributed

MODEL = Model(groups=2, frozen=True, batchnorm=True, tied=True)
LAYOUTS = (("zero1", 3), ("zero2", 1), ("zero3", 2), ("zero3", 4), ("bf16", 2), ("universal", None))


@pytest.mark.parametrize("run", [Run(2, 2), Run(3, 3, options={"sub_group_size": 60}), Run("bf16", 2)], ids=str)
def test_a_conversion_is_equal_to_its_source(saves: Saves, tmp_path: Path, run: Run) -> None:
    """Every tensor and value, from every layout to every other; each byte of the tensors read once."""
    folder, held = saves(run, MODEL)
    for number, (to, dp) in enumerate(LAYOUTS):
        out = tmp_path / str(number)
        convert(str(folder), str(out), to=to, dp=dp)
        found = diff(str(folder), str(out))
        assert (found.differing, found.values, found.faults) == ((), (), ()), (to, dp)
        compared = {(tensor.name, tensor.kind) for tensor in found.tensors}
        assert compared >= {key for key in gathered(held) if key[1] != "weight"}
        unstored = [note for note in found.notes if "only their fp32 masters" in note]
        assert len(unstored) == (run.stage == 3) + (to == "zero3")
        assert verify(str(out), deep=True).clean


PAIRS = ((Run(1, 1), Run(3, 3)), (Run(2, 3), Run("bf16", 2)), (Run(3, 2), Run(3, 3)), (Run(1, 2), Run(1, 2, "fp32")))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_what_differs_is_counted_as_the_ranks_held_it(saves: Saves, pair: tuple[Run, Run]) -> None:
    """Truth is each run's own flat partitions in memory: how many elements, by how much, and where first."""
    (one, truth_a), (other, truth_b) = (saves(run, Model(groups=2, seed=7 + n)) for n, run in enumerate(pair))
    truths = (gathered(truth_a), gathered(truth_b))
    for memory_nbytes in (256 << 20, 160):
        found = diff(str(one), str(other), reading=Reading(threads=2, memory_nbytes=memory_nbytes))
        tensors = {(tensor.name, tensor.kind): tensor for tensor in found.tensors}
        keys = [key for key in truths[0] if key[1] != "weight"]
        assert keys and set(keys) <= set(tensors)
        for key in keys:
            a, b = (truth[key] for truth in truths)
            unequal = a.view(torch.int32) != b.view(torch.int32)
            told = tensors[key]
            assert (told.state == "differs", told.differing) == (bool(unequal.any()), int(unequal.sum())), key
            if told.differing:
                assert told.max_abs == float((a.double() - b.double()).abs().max())
                assert math.ldexp(1, 0) <= (told.max_ulp or 0)
                first = torch.tensor(told.first)
                assert int(unequal.nonzero()[0]) == _flat(first, told.a)
        assert any(tensor.state == "differs" for tensor in tensors.values())


def _flat(index: torch.Tensor, described: str) -> int:
    sizes = [int(size) for size in described.split()[1].split("x")]
    flat = 0
    for at, size in zip(index.tolist(), sizes, strict=True):
        flat = flat * size + at
    return flat


def _copy(saves: Saves, into: Path, run: Run, model: Model = MODEL) -> tuple[Path, Path]:
    folder, _ = saves(run, model)
    shutil.copytree(folder, into)
    return folder, into


def test_one_changed_element_is_the_only_difference(saves: Saves, tmp_path: Path) -> None:
    """One moment of one parameter, at its index, with both values and the distance between them."""
    folder, other = _copy(saves, tmp_path / "b", Run(2, 2))
    _moment("exp_avg", 0.25, element=2)(other / TAG)
    found = diff(str(folder), str(other))
    (tensor,) = found.differing
    assert (tensor.kind, tensor.differing, tensor.first_b) == ("exp_avg", 1, "0.25")
    assert tensor.max_abs == pytest.approx(abs(0.25 - float(tensor.first_a)), rel=1e-7)
    assert not found.equal and not found.values


def test_zeros_of_two_signs_and_nans_of_two_kinds_differ(saves: Saves, tmp_path: Path) -> None:
    """Equal means the same bits."""
    _, one = _copy(saves, tmp_path / "a", Run(2, 2))
    _, other = _copy(saves, tmp_path / "b", Run(2, 2))
    _moment("exp_avg", 0.0)(one / TAG)
    _moment("exp_avg", -0.0)(other / TAG)
    (tensor,) = diff(str(one), str(other)).differing
    assert (tensor.differing, tensor.max_abs, tensor.max_ulp) == (1, 0.0, 0)
    for folder, bits in ((one, 0x7FC00000), (other, 0x7FC00001)):
        value = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        _moment("exp_avg", value)(folder / TAG)  # type: ignore[arg-type]
    (tensor,) = diff(str(one), str(other)).differing
    assert (tensor.first_a, tensor.first_b) == ("nan (0x7fc00000)", "nan (0x7fc00001)")
    assert math.isnan(tensor.max_abs) and tensor.max_ulp is None
    assert json.loads(json.dumps(diff(str(one), str(other)).to_json()))["tensors"]


def _groups(content: Any) -> Any:
    return content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]


def _states(content: Any) -> Any:
    return content["optimizer_state_dict"]["base_optimizer_state"]["state"].values()


VALUES = {
    "rate": ([optim(0), optim(1)], lambda c: _groups(c)[1].update(lr=0.5), "param group 1, of ", "0.5"),
    "step": (
        [optim(0), optim(1)],
        lambda c: [state.update(step=state["step"] + 4) for state in _states(c)],
        "step of ",
        "7",
    ),
    "counter": ([STATES], lambda c: c.update(global_samples=1), "global_samples", "1"),
    "scheduler": ([STATES], lambda c: c["lr_scheduler"].update(last_epoch=99), "lr_scheduler.last_epoch", "99"),
    "client state": ([STATES], lambda c: c.update(note="other"), "note", "'other'"),
}


@pytest.mark.parametrize("case", VALUES)
def test_each_value_that_differs_is_named(saves: Saves, tmp_path: Path, case: str) -> None:
    """And nothing else is; also beside a checkpoint of another layout."""
    files, change, where, value = VALUES[case]
    folder, other = _copy(saves, tmp_path / "b", Run(2, 2))
    for name in files:
        changed(name, change)(other / TAG)
    convert(str(folder), str(tmp_path / "c"), to="zero3", dp=3)
    for against in (folder, tmp_path / "c"):
        found = diff(str(against), str(other))
        assert not found.differing
        assert {row.where.startswith(where) or where in row.where for row in found.values} == {True}, found.values
        assert all(value in row.b and row.a != row.b for row in found.values)


def test_tensors_of_one_side_alone_and_of_other_shapes_are_told(saves: Saves, tmp_path: Path) -> None:
    """An optimizer with one state more; a buffer of another shape, or of another type."""
    folder, _ = saves(Run(2, 2), Model(groups=2))
    other, _ = saves(Run(2, 2), Model(optimizer="amsgrad"))
    states = {(tensor.kind, tensor.state) for tensor in diff(str(folder), str(other)).tensors}
    assert ("max_exp_avg_sq", "only in B") in states and ("max_exp_avg_sq", "only in A") not in states
    for number, (change, state) in enumerate((("unsqueeze", "other shape"), ("double", "other type"))):
        source, other = _copy(saves, tmp_path / str(number), Run(2, 2))
        name = torch.load(source / TAG / STATES, weights_only=False)["buffer_names"][0]

        def apply(content: Any, name: str = name, change: str = change) -> None:
            old = content["module"][name]
            content["module"][name] = old.unsqueeze(0) if change == "unsqueeze" else old.double()

        changed(STATES, apply)(other / TAG)
        assert [(t.name, t.state) for t in diff(str(source), str(other)).differing] == [(name, state)]


def test_stage_0_is_compared_with_its_like(saves: Saves, tmp_path: Path) -> None:
    """Its optimizer names nothing: compared whole by checksums, and with another stage not at all, which is told."""
    model = Model(groups=2)
    folder, other = _copy(saves, tmp_path / "b", Run(0, 2, "fp32"), model)
    assert diff(str(folder), str(other)).equal
    changed(STATES, lambda c: c["optimizer"]["state"][0]["exp_avg"].view(-1)[:1].add_(1))(other / TAG)
    (row,) = diff(str(folder), str(other)).values
    assert row.where.startswith("optimizer.state.0.exp_avg")
    named, _ = saves(Run(1, 2, "fp32"), model)
    found = diff(str(folder), str(named))
    assert not found.equal and any("names no parameter" in note for note in found.notes)


def test_bytes_that_are_not_what_was_written_are_a_fault(saves: Saves, tmp_path: Path) -> None:
    """A flipped bit is a difference and a fault of the file."""
    folder, other = _copy(saves, tmp_path / "b", Run(2, 2))
    flip(optim(1), "data/")(other / TAG)
    found = diff(str(folder), str(other))
    assert [fault.where for fault in found.faults] == [f"{other / TAG}/{optim(1)}"]
    assert not found.equal


def test_the_command_says_what_differs(saves: Saves, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 and a line, 1 and a table, 2 for what cannot be read; --tensors lists the equal ones too."""
    folder, other = _copy(saves, tmp_path / "b", Run(2, 2))
    assert main(["diff", str(folder), str(other)]) == 0
    assert "equal to the bit" in capsys.readouterr().out
    assert main(["diff", str(folder), str(other), "--tensors", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["tensors"]) == told["tensors_compared"] > 10
    _moment("exp_avg", 0.25)(other / TAG)
    assert main(["diff", str(folder), str(other), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 1
    assert main(["diff", str(folder), str(other)]) == 1
    assert "1 of " in capsys.readouterr().out
    assert main(["diff", str(folder), str(tmp_path / "none")]) == 2
