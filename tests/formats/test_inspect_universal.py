"""`ds-reshard inspect` of universal checkpoints, which DeepSpeed's converter made of real saves."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import Model, Run

from ds_reshard import operations
from ds_reshard.cli.main import main
from ds_reshard.operations import inspect

pytestmark = pytest.mark.distributed
MODEL = Model(groups=2, frozen=True, batchnorm=True, tied=True)


@pytest.fixture(scope="module")
def convert(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Calling it gives the folder that holds `universal`, made of a save of two ranks."""

    @functools.cache
    def converted(stage: int | str, model: Model = MODEL) -> Path:
        folder = tmp_path_factory.mktemp("universal")
        worlds[2].run("save", run=Run(stage, 2), model=model, folder=str(folder), tag="step")
        worlds[1].run("unowned_jobs.universal", folder=str(folder), tag="step")
        shutil.rmtree(folder / "step")
        (folder / "latest").unlink()
        return folder

    return converted


@pytest.mark.parametrize("stage", [1, 2, 3, "bf16"])
def test_a_universal_checkpoint_is_told(convert: Callable[..., Path], stage: int | str, tmp_path: Path) -> None:
    """By way of `latest_universal`: groups, states, steps, parameters and files of the run that saved; no fault."""
    folder = convert(stage)
    found = inspect(str(folder))
    assert found.faults == ()
    assert (found.format, found.tag, found.wrapper) == ("DeepSpeed universal", "universal", "universal")
    assert (found.stage, found.dp) == (1 if stage == "bf16" else stage, 2)
    assert {state.kind: state.scalar for state in found.states} == {
        "fp32": False,
        "exp_avg": False,
        "exp_avg_sq": False,
        "step": True,
    }
    assert [(group.members, group.numel) for group in found.groups] == [(3, 245), (4, 22)]
    assert [group.hyperparameters["weight_decay"] for group in found.groups if group.hyperparameters] == [0.1, 0.0]
    assert (found.steps.global_steps, found.steps.optimizer_steps) == (3, (3,))
    assert {role: count["elements"] for role, count in found.counts.items()} == {
        "trainable": 267,
        "frozen": 104,
        "buffer": 23,
    }
    assert {entry.name: entry.group for entry in found.parameters}["scale"] == 1
    assert {file.role for file in found.files} == {"model", "optimizer"}
    operations.convert(str(folder), str(tmp_path / "own"), to="universal")
    again = inspect(str(tmp_path / "own"))
    assert (again.stage, again.dp, again.parameters, again.faults) == (found.stage, 2, found.parameters, ())


def test_all_faults_are_found_at_once(convert: Callable[..., Path], tmp_path: Path, capsys: Any) -> None:
    """Missing folders and masters, truncated files and a common state that is none: each is told, and the exit is 1."""
    folder = Path(shutil.copytree(convert(1) / "universal", tmp_path / "universal"))
    shutil.rmtree(folder / "zero/scale")
    (folder / "zero/tiny/fp32.pt").unlink()
    for name in ("zero/first.weight/exp_avg.pt", "zero/optimizer_state.pt"):
        path = folder / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    told = {fault.where.removeprefix(f"{folder}/") for fault in inspect(str(folder)).faults}
    assert told == {"zero/scale", "zero/first.weight/exp_avg.pt", "zero/optimizer_state.pt"}
    shutil.copy(convert(1) / "universal/zero/optimizer_state.pt", folder / "zero")
    told = {fault.where.removeprefix(f"{folder}/") for fault in inspect(str(folder)).faults}
    assert told == {"zero/scale", "zero/tiny/fp32.pt", "zero/first.weight/exp_avg.pt"}
    assert main(["inspect", str(folder)]) == 1
    assert "tiny has no master" in capsys.readouterr().out.replace("\n", "")


def test_what_the_converter_dropped_is_a_fault(convert: Callable[..., Path]) -> None:
    """Of stage 3 the files name the states that were kept."""
    found = inspect(str(convert(3, Model(optimizer="amsgrad"))))
    assert {fault.what.split(" of parameter")[0] for fault in found.faults} == {
        "the saved optimizer had max_exp_avg_sq"
    }
