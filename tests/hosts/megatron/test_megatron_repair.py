"""`convert --repair` puts back what Megatron-LM has saved shifted, and says what is in no file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from saved_worlds import DISTRIBUTED, SHIFTED, TP, WIDTH_20, Saved
from test_megatron_formats import _rule, _tensors

import ds_reshard.operations as tools
from ds_reshard.errors import CheckpointDamaged, ConfigError


def _lost(notes: tuple[str, ...]) -> dict[str, int]:
    """The elements that are in no file, by parameter."""
    found = [
        re.fullmatch(r"(.+): (\d+) elements are in no file: those of exp_avg, exp_avg_sq are zero, .*", one)
        for one in notes
    ]
    return {one[1]: int(one[2]) for one in found if one is not None}


@pytest.mark.parametrize("world", SHIFTED)
def test_every_element_is_the_one_that_was_saved_or_told(saved: Saved, tmp_path: Path, world: str) -> None:
    """Those that are told have the weights as masters, and moments that are zero; all others are as by the rule."""
    source, out = str(saved(world, "model_space")), str(tmp_path / "out")
    wrong = {fault.where for fault in tools.verify(source).faults}
    lost = _lost(tools.convert(source, out, to="megatron", repair=True).notes)
    assert wrong and lost
    assert tools.verify(out, deep=True).faults == ()
    weights = {name: held for name, kind, held in _tensors(Path(out)) if kind == "weight"}
    missing: dict[tuple[str, str], int] = {}
    for name, kind, held in _tensors(Path(out)):
        told = _rule(name, kind, held.shape).to(held.dtype)
        others = held != told
        assert held[others].equal(weights[name].float()[others] if kind == "fp32" else 0 * held[others]), (name, kind)
        missing[name, kind] = int(others.sum())
    for (name, kind), count in missing.items():
        assert count <= (lost.get(name, 0) if kind != "weight" else 0), (name, kind)
    total = sum(count for (_, kind), count in missing.items() if kind == "exp_avg_sq")
    assert 0 < total == sum(lost.values())  # no element is zero by the rule


def test_verify_says_what_can_be_put_back(saved: Saved, tmp_path: Path) -> None:
    """By tensor, and the command that does it."""
    folder = str(saved("many buckets dp2", "model_space"))
    told = {fault.where.removesuffix("[weight]"): fault.mend for fault in tools.verify(folder).faults}
    lost = _lost(tools.convert(folder, str(tmp_path / "out"), to="megatron", repair=True).notes)
    for name, mend in told.items():
        assert "--to megatron --repair" in mend and f"all but {lost.get(name, 0)} elements" in mend


def test_stock_megatron_loads_what_was_repaired(saved: Saved, releases: Any, tmp_path: Path) -> None:
    """Nothing is wrong there but states of which elements are told to be in no file."""
    done = tools.convert(
        str(saved("many buckets dp2", "model_space")), str(tmp_path / "out"), to="megatron", repair=True
    )
    arguments = f"{DISTRIBUTED}{WIDTH_20}{TP}--ckpt-format torch_dist"
    lost = {re.sub(r"layers\.\d+\.", "layers.", name) for name in _lost(done.notes)}
    for rank in releases["0.19.2"].run("format_jobs:loaded", ranks=2, arguments=arguments, folder=done.out):
        assert {name.partition(" of ")[2] for name in rank["wrong"]} <= lost and rank["wrong"]


def test_a_checkpoint_without_the_fault_stays_as_it_is(saved: Saved, tmp_path: Path) -> None:
    folder = str(saved("gated tp2 pp2", "model_space"))
    done = tools.convert(folder, str(tmp_path / "out"), to="megatron", repair=True)
    assert done.notes == ()
    assert {one.state for one in tools.diff(folder, done.out).tensors} == {"equal"}


def test_what_is_wrong_otherwise_is_not_repaired(saved: Saved, tmp_path: Path) -> None:
    """Masters of other parameters; and only Megatron-LM's own format is written."""
    from test_megatron_formats import exchanged_masters

    folder, out = exchanged_masters(saved, tmp_path), str(tmp_path / "out")
    with pytest.raises(CheckpointDamaged, match="not the cast"):
        tools.convert(folder, out, to="megatron", repair=True)
    with pytest.raises(ConfigError, match="--repair"):
        tools.convert(folder, out, to="zero2", dp=1, repair=True)
    assert not Path(out).exists()
