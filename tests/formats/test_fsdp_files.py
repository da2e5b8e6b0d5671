"""Folders of EasyR1 and verl that torch.save alone makes: what they may hold beside DTensors, carried or refused.

Each rank has whole tensors; tests/hosts/test_fsdp_folders.py has what ranks of FSDP save.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_reshard.errors import CheckpointDamaged, UnsupportedLayout
from ds_reshard.operations import convert, diff, fingerprint, inspect, verify

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4)}
States = Callable[[str, torch.Tensor, int], Mapping[str, Any]]
"""The states of a parameter in a rank's file, by its name and value and the rank."""


def adam(name: str, weight: torch.Tensor, rank: int) -> dict[str, Any]:
    return {"step": torch.tensor(5.0), "exp_avg": weight * 2, "exp_avg_sq": weight**2}


def saved(folder: Path, states: States = adam, *, ranks: int = 2) -> Path:
    folder.mkdir()
    for rank in range(ranks):
        state = {name: dict(states(name, weight, rank)) for name, weight in WEIGHTS.items()}
        groups = [{"params": list(WEIGHTS), "lr": 0.1, "betas": (0.9, 0.99)}]
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


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("weight", torch.full((2, 3), 7.0), "has an optimizer state of the name 'weight', which is that of its weight"),
        ("fp32", torch.full((2, 3), 7.0), "has an optimizer state of the name 'fp32', which is that of its weight"),
        ("fp32", 7, "has an optimizer state of the name 'fp32'"),
        ("blocks", [torch.ones(2)], r"a\.weight has a state 'blocks' that is neither a tensor nor a number .*list"),
    ],
)
def test_states_that_would_be_taken_for_others_or_lost_are_refused(
    tmp_path: Path, kind: str, value: object, text: str
) -> None:
    """A state of the name of a weight would replace it in what is converted."""
    folder = saved(tmp_path / "saved", lambda *given: {**adam(*given), kind: value})
    with pytest.raises(UnsupportedLayout, match=text):
        convert(str(folder), str(tmp_path / "out"), to="safetensors")


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
    unit = {"a.weight": {"shape": [2, 3], "offset": 0}, "b.weight": {"shape": [4], "offset": 6}}
    order = {"use_orig_params": True, "units": [unit], "parameters": list(WEIGHTS)}
    (folder / "fsdp_units.json").write_text(json.dumps(order))
    groups = [{"params": [number], "lr": 0.1} for number in range(2)]
    states = {number: adam(*one, 0) for number, one in enumerate(WEIGHTS.items())}
    torch.save({"state": states, "param_groups": groups}, folder / "optim_world_size_1_rank_0.pt")
    assert len(fingerprint(str(folder)).tensors) == 6
    states[1]["weight"] = torch.full((4,), 7.0)
    torch.save({"state": states, "param_groups": groups}, folder / "optim_world_size_1_rank_0.pt")
    with pytest.raises(UnsupportedLayout, match="parameter 1 has an optimizer state of the name 'weight'"):
        fingerprint(str(folder))
