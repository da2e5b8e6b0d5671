"""Universal folders that ds_to_universal has made of grids: read as one model by the tools, and in part by each rank.

Truth is a rule that gives every element of every tensor its own value (`grid_truth.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from grid_cases import Folders, Grid, forget_json
from grid_models import RULES
from grid_truth import tensors

from ds_reshard.errors import ReshardError
from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.model.rules import parse_rules, use_rules
from ds_reshard.operations import convert, fingerprint, inspect, verify

pytestmark = pytest.mark.distributed

STAGES = Grid("pipeline", pp=2, tp=2, layers="divided bare")
UNPATTERNED = Grid("pipeline", pp=2, dp=2)
AUTOTP, UNEVEN = Grid("autotp", tp=2, dp=2), Grid("autotp", tp=3, stage=3, dtype="bf16")
CUT, FORGOTTEN = Grid("cut", tp=2, layers="said"), Grid("cut", tp=2, layers="forgotten")
UNSAID, OF_STAGE_3 = Grid("cut", tp=2, dp=2, layers="unsaid"), Grid("cut", tp=2, dp=2, stage=3, layers="said")
MOE = Grid("moe", ep=1, dp=4)


class Universals:
    """What ds_to_universal makes of what each run saved; each made once."""

    def __init__(self, worlds: Any, folders: Folders, base: Path) -> None:
        self._worlds, self._folders, self._base = worlds, folders, base

    def __call__(self, grid: Grid) -> str:
        made = self._base / str(grid)
        if not made.exists():
            shutil.copytree(self._folders(grid), made)
            strict = grid.kind != "autotp"  # which names a frozen parameter that ds_to_universal then has no use for
            self._worlds[1].run("unowned_jobs.universal", folder=str(made), tag="t", strict=strict)
            shutil.rmtree(made / "t")
            (made / "latest").unlink()
        return str(made)


@pytest.fixture(scope="module")
def universals(worlds: Any, folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Universals]:
    yield Universals(worlds, folders, tmp_path_factory.mktemp("grids"))


@pytest.mark.parametrize("grid", [STAGES, AUTOTP, UNEVEN, CUT, OF_STAGE_3, MOE], ids=str)
def test_every_tensor_has_the_fingerprint_of_the_whole(universals: Universals, grid: Grid) -> None:
    """Masters and moments; weights where the model files have them, which are those of plain modules and no experts."""
    folder = universals(grid)
    found = fingerprint(folder)
    assert not found.faults and not verify(folder, deep=True).faults
    said = inspect(folder)
    assert (said.faults, said.tp, said.pp) == ((), *((grid.tp, grid.pp) if grid is not MOE else (None, None)))
    expected = {at: str(fingerprint_of(value.contiguous())) for at, value in tensors(grid).items()}
    told = {(one.name, one.kind): one.fingerprint for one in found.tensors}
    unsaved = {at for at in expected if at[1] == "weight" and (grid is STAGES or ".deepspeed_experts." in at[0])}
    assert {at: told.get(at) for at in expected if at not in unsaved} == {
        at: text for at, text in expected.items() if at not in unsaved
    }
    assert {name for name, kind in told if kind != "weight"} == {name for name, kind in expected}


SAME = "divided bare one position"
BEGINNINGS = Grid("cut", tp=2, layers="beginnings")
LOADED = [
    (BEGINNINGS, replace(BEGINNINGS, tp=4), {}),
    (CUT, replace(CUT, tp=4), {}),
    (CUT, replace(CUT, dp=2), {"checkpoint": {"load_universal": True}}),
    (AUTOTP, Grid("autotp", tp=4, stage=2), {}),
    (UNEVEN, Grid("autotp", tp=2, dp=2, dtype="bf16"), {}),
    (OF_STAGE_3, Grid("cut", dp=2, stage=3), {}),
    (STAGES, Grid("pipeline", tp=2, dp=2, layers=SAME), {}),
    (STAGES, Grid("pipeline", pp=4, layers=SAME), {}),
    (MOE, Grid("moe", ep=2, dp=2), {}),
]


@pytest.mark.parametrize(("source", "target", "config"), LOADED, ids=str)
def test_each_rank_loads_its_part(
    worlds: Any, universals: Universals, source: Grid, target: Grid, config: dict[str, Any]
) -> None:
    """Also into the grid that it was made of, and experts that DeepSpeed's own load gives the first rank's to all."""
    target = replace(target, config=config)
    loaded = worlds[target.ranks].run("grid_jobs.load", grid=target, folder=universals(source))
    golden.check(f"{source}, universal, to {target}", [rank["layouts"] for rank in loaded])
    for rank in loaded:
        assert rank["wrong"] == {}
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)


CONVERTED = [
    (AUTOTP, "zero1", {"tp": 4, "dp": 1}, Grid("autotp", tp=4)),
    (CUT, "zero3", {"dp": 2}, Grid("cut", dp=2, stage=3)),
    (STAGES, "zero1", {"like": True}, Grid("pipeline", pp=4, layers=SAME)),
    (MOE, "zero2", {"ep": 2, "dp": 2}, Grid("moe", ep=2, dp=2, stage=2)),
]


@pytest.mark.parametrize(("source", "to", "asked", "target"), CONVERTED, ids=str)
def test_what_is_written_of_it_is_loaded_by_deepspeed(
    worlds: Any,
    folders: Folders,
    universals: Universals,
    tmp_path: Path,
    source: Grid,
    to: str,
    asked: Any,
    target: Grid,
) -> None:
    asked = {**asked, **({"like": str(folders(target))} if "like" in asked else {})}
    convert(universals(source), str(tmp_path / "out"), to=to, **asked)
    for rank in worlds[target.ranks].run("grid_jobs.load", grid=target, folder=str(tmp_path / "out"), hooks=False):
        assert rank["wrong"] in ({}, {"tied_modules.embed.position": 3} if target.pp > 1 else {})
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)


IN_TURN = Grid("pipeline", pp=2, dp=2, layers="no ties", options={"round_robin_gradients": True})


def test_stages_whose_parameters_were_dealt_out_in_turn_are_refused(worlds: Any, tmp_path: Path) -> None:
    """As the JSON says; without it, in whose place its path may be saved, nobody knows."""
    worlds[4].run("grid_jobs.save", grid=IN_TURN, folder=str(tmp_path))
    worlds[1].run("unowned_jobs.universal", folder=str(tmp_path), tag="t")
    target = replace(IN_TURN, options={}, dp=1, config={"checkpoint": {"load_universal": True}})
    for text in ("ds_to_universal mixes up", "has no DeepSpeed JSON in its entry"):
        assert any(text in fault.line() for fault in verify(str(tmp_path), tag="universal").faults)
        for name, said, same in worlds[2].run("grid_jobs.refused", grid=target, folder=str(tmp_path)):
            assert (name, same) == ("CheckpointDamaged", True) and text in said
        forget_json(tmp_path / "universal")


def test_stages_whose_files_of_layers_were_not_copied_are_no_pipelines(universals: Universals, tmp_path: Path) -> None:
    """What is written would be without weights. A folder that the coming run has saved shows the files."""
    with pytest.raises(ReshardError, match="has no files of layers, which a PipelineModule loads"):
        convert(universals(STAGES), str(tmp_path / "out"), to="zero1", dp=2)


REFUSED = {
    "no pattern for what is tied": (UNPATTERNED, (), "has a copy of tied_modules.embed.weight that no pattern matches"),
    "nothing says how": (UNSAID, (), "gate_up: nothing says how it is cut"),
    "rows that were merged along another dimension": (FORGOTTEN, RULES, "row/fp32.pt: has another shape"),
    "padding that was kept": (UNSAID, RULES, "embed/fp32.pt: has another shape than its parameter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_was_merged_wrong_is_refused_by_name(
    worlds: Any, universals: Universals, tmp_path: Path, case: str
) -> None:
    """By every tool, and by a load, which leaves the engine as it is."""
    grid, rules, text = REFUSED[case]
    folder = universals(grid)
    with use_rules(parse_rules(list(rules))):
        assert any(text in fault.line() for fault in verify(folder).faults)
        with pytest.raises(ReshardError) as raised:
            convert(folder, str(tmp_path / "out"), to="universal")
    assert text in str(raised.value) and not (tmp_path / "out").exists()
    config = {"ds_reshard": {"reshard": {"tensor_parallel": list(rules)}}} if rules else {}
    target = replace(grid, tp=1, pp=1, dp=1, config=config)
    ((_, said, same),) = worlds[1].run("grid_jobs.refused", grid=target, folder=folder)
    assert text in said and same


def test_what_another_rule_has_merged_is_named_beside_the_original(
    worlds: Any, folders: Folders, tmp_path: Path
) -> None:
    """Of ZeRO stage 3 no weights lie beside the masters, and both halves in one have the right shape."""
    grid = replace(OF_STAGE_3, layers="forgotten")
    made = shutil.copytree(folders(grid), tmp_path / "made")
    worlds[1].run("unowned_jobs.universal", folder=str(made), tag="t")
    zero = made / "universal" / "zero"
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):  # whose shape would be found without the original
        found = torch.load(zero / "row" / f"{kind}.pt")
        torch.save({**found, "param": torch.cat(found["param"].chunk(2), 1)}, zero / "row" / f"{kind}.pt")
    with use_rules(parse_rules([{**rule, "vocabulary": 7} if "vocabulary" in rule else rule for rule in RULES])):
        assert not verify(str(made), tag="universal").faults
        difference = verify(str(made), tag="universal", against=str(folders(grid))).difference
    assert difference is not None
    assert {(one.name, one.state) for one in difference.differing} == {("gate_up", "differs"), ("qkv", "differs")}
    assert any("gate_up[exp_avg]" in note and "along dimension 0: it was merged" in note for note in difference.notes)


def test_halves_that_were_merged_as_one_are_found_by_their_weights(universals: Universals, tmp_path: Path) -> None:
    """Of the right shape: only what the ranks' weights are by the right rule tells it."""
    assert not verify(universals(FORGOTTEN)).faults  # by what its files say, which is wrong
    folder = shutil.copytree(universals(FORGOTTEN), tmp_path / "copy")
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):  # whose shape would be found first
        file = folder / "universal" / "zero" / "row" / f"{kind}.pt"
        found = torch.load(file)
        torch.save({**found, "param": torch.cat(found["param"].chunk(2), 1)}, file)
    with use_rules(parse_rules(RULES)):
        found = [fault.line() for fault in verify(str(folder)).faults]
    assert any("gate_up[weight]: 48 of 96 elements are not the cast" in line for line in found)
    assert any("qkv[weight]" in line for line in found)
