"""nanotron with the hooks, and files that are not of one save, or of one run: the synthetic stand-in, as beside."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "formats"))
from nanotron_builder import STEP, Param, Run, write

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

EVEN = (Param("a.weight", (8, 4), (0,)), Param("b.weight", (4, 4), (0,)))


def _changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = torch.load(path)
    change(state)
    torch.save(state, path)


def _older(state: dict[str, Any]) -> None:
    for of_one in state["state"].values():
        of_one["step"] -= 1
        of_one["exp_avg"] += 1


@pytest.mark.parametrize("saved", [Run(dp=4, model=EVEN), Run(dp=2, model=EVEN)], ids=["another", "same"])
def test_files_of_an_older_step_are_refused_on_every_rank(saved: Run, tmp_path: Path, worlds: Any) -> None:
    """Also where no rank opens two files that differ: rank 0 needs the new ones alone, rank 1 the older ones."""
    folder = write(saved, tmp_path / "mixed")
    for rank in range(saved.dp // 2, saved.dp):
        (path,) = (folder / str(STEP) / "optimizer").glob(f"*dp-{rank}-of*")
        _changed(path, _older)
    found = worlds[2].run("nanotron_jobs.load", run=Run(dp=2, model=EVEN), folders=[str(folder)])
    assert found[0] == found[1] and found[0][0][0] == "CheckpointDamaged" and found[0][0][-1] == "changed: False"
    assert any("step of a.weight differs" in line for line in found[0][0])


def test_ranks_that_were_not_asked_alike_are_refused(tmp_path: Path, worlds: Any) -> None:
    """One would load and wait for the other."""
    folder = str(write(Run(dp=2), tmp_path / "saved"))
    found = worlds[2].run("nanotron_jobs.load", run=Run(dp=2), folders=[folder], policies=[{"optimizer": "skip"}, {}])
    assert found[0] == found[1] and found[0][0][0] == "ConfigError" and found[0][0][-1] == "changed: False"
    assert "optimizer: differs between ranks" in found[0][0][1]


@pytest.mark.parametrize("saved", [Run(tp=2, dp=2), Run(tp=2)], ids=["another", "same"])
def test_a_parameter_that_is_cut_in_other_chunks_is_refused(saved: Run, tmp_path: Path, worlds: Any) -> None:
    """nanotron takes each rank's weights as they are: the states would be of other rows."""
    other = tuple(replace(p, chunks=(4, 4, 8)) if p.chunks == (8, 4, 4) else p for p in saved.model)
    folder = str(write(replace(saved, model=other), tmp_path / "saved"))
    found = worlds[2].run("nanotron_jobs.load", run=Run(tp=2), folders=[folder])
    assert found[0] == found[1] and found[0][0][0] == "ModelMismatch" and found[0][0][-1] == "changed: False"
    assert any("qkv.weight: is cut over the tensor-parallel ranks in other chunks" in line for line in found[0][0])


@pytest.mark.parametrize("kinds", [("exp_avg_sq",), ("step",), ("step", "exp_avg", "exp_avg_sq")], ids=str)
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("saved", [Run(tp=2), Run(dp=2)], ids=["another", "same"])
def test_states_that_one_parameter_lacks_are_named(
    saved: Run, masters: bool, kinds: tuple[str, ...], tmp_path: Path, worlds: Any
) -> None:
    """AdamW would fail in its first step, behind a load that reports success."""
    name, folder = "blocks.0.pp_block.ln.weight", write(replace(saved, masters=masters), tmp_path / "saved")

    def without(state: dict[str, Any]) -> None:
        for number, known in state["names"].items():
            for kind in kinds if known == name else ():
                del state["state"][number][kind]

    for path in (folder / str(STEP) / "optimizer").glob("*.pt"):
        _changed(path, without)
    found = worlds[2].run("nanotron_jobs.load", run=Run(dp=2, masters=masters), folders=[str(folder)])
    assert found[0] == found[1] and found[0][0][0] == "ModelMismatch" and found[0][0][-1] == "changed: False"
    assert any(
        line.startswith((f"{kinds[0]} of {name}: is not there", f"{name}: is trained by")) for line in found[0][0]
    )


def test_param_groups_of_other_members_are_loaded_by_name(tmp_path: Path, worlds: Any) -> None:
    """As many groups, and as many parameters: torch raises a ValueError."""
    folder = write(Run(), tmp_path / "saved")
    (path,) = (folder / str(STEP) / "optimizer").glob("*.pt")

    def joined(state: dict[str, Any]) -> None:
        state["param_groups"][0]["params"], state["param_groups"][1]["params"] = [0, 1], []

    _changed(path, joined)
    assert worlds[1].run("nanotron_jobs.load", run=Run(), folders=[str(folder)]) == [[[]]]


def test_a_rank_without_a_part_of_any_parameter_loads_nothing(tmp_path: Path, worlds: Any) -> None:
    """nanotron asserts that there is something to load."""
    run = Run(dp=2, model=(Param("tiny", (1,), (0,)),))
    folder = str(write(run, tmp_path / "saved"))
    assert worlds[2].run("nanotron_jobs.load", run=run, folders=[folder]) == [[[]], [[]]]


@pytest.mark.parametrize("policy", [{"optimizer": "skip"}, {"optimizer": "masters"}])
def test_a_second_load_leaves_nothing_of_the_first(policy: dict[str, Any], tmp_path: Path, worlds: Any) -> None:
    """Moments that were not asked for are zero, masters those of the weights, hyper-parameters this run's."""
    folder = str(write(Run(dp=2), tmp_path / "saved"))
    for of_rank in worlds[2].run("nanotron_jobs.load_twice", run=Run(dp=2), folder=folder, policy=policy):
        assert of_rank == ([], 0, policy["optimizer"] == "masters", policy["optimizer"] == "skip")


def test_a_scheduler_that_is_not_at_the_iteration_is_told(tmp_path: Path, worlds: Any) -> None:
    folder = write(Run(), tmp_path / "saved")
    path = folder / str(STEP) / "checkpoint_metadata.json"
    content = json.loads(path.read_text())
    content["metas"]["last_train_step"] = STEP - 1
    path.write_text(json.dumps(content))
    (found,) = worlds[1].run("nanotron_jobs.resume", run=Run(), folder=str(folder))
    assert any(f"scheduler was saved at step {STEP} and the checkpoint" in warning for warning in found["warnings"])
