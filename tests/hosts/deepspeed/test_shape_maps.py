"""A run goes on in a module that has other parameters: weights, masters and moments are the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Run
from gathered import assert_moments, gathered, scalars
from safetensors.torch import save_file
from shape_map_jobs import MAP, as_apart, assert_equal

pytestmark = pytest.mark.distributed

ROWS = [
    (Run(2, 3), Run(3, 2)),
    (Run(3, 2), Run(1, 3)),
    (Run(1, 2), Run(2, 1)),
    (Run(1, 2, "fp32"), Run(3, 2, "fp32")),
    (Run("bf16", 2), Run(2, 2)),
    (Run(2, 2), Run(0, 1)),
]


@pytest.mark.parametrize("fused", [True, False], ids=["split", "joined"])
@pytest.mark.parametrize(("source", "target"), ROWS, ids=str)
def test_a_run_goes_on_in_another_module(worlds: Any, tmp_path: Path, source: Run, target: Run, fused: bool) -> None:
    """Bit for bit, there; a save of the run then loads with the same setting; the losses are those of the saved run."""
    folder = str(tmp_path / "saved")
    saved = worlds[source.dp].run("shape_map_jobs.save", run=source, fused=fused, folder=folder, more=2)
    save_file({"weights": torch.zeros(3)}, f"{folder}/model.safetensors")  # a Trainer saves them beside the tag
    asked = {"run": target, "fused": not fused, "names": MAP, "more": 2}
    loaded = worlds[target.dp].run("shape_map_jobs.load", folder=folder, again=str(tmp_path / "again"), **asked)
    assert not [one for one in loaded if "error" in one], loaded[0]
    held = [gathered(saved), gathered(loaded)]
    assert_moments(held[0])
    assert_equal(*(as_apart(one) if fused == (number == 0) else one for number, one in enumerate(held)))
    if not fused:
        padding = [one.reshape(5, 4)[3:] for (name, _), one in held[1].items() if name.endswith("table")]
        assert padding and not torch.cat(padding).any(), "rows that the other module lacks are zeros"
    assert set(scalars(loaded).values()) == set(scalars(saved).values())
    steps = {one["steps"] for one in (*saved, *loaded)}
    assert len(steps) == 1
    means = [torch.tensor([one["later"] for one in held]).mean(0) for held in (saved, loaded)]
    assert torch.allclose(*means, rtol=2e-2), means


def test_what_cannot_be_joined_is_refused_on_every_rank(worlds: Any, tmp_path: Path) -> None:
    """Weights that decay with others that do not; a folder of stage 0, whose optimizer names no parameter."""
    folder = str(tmp_path / "saved")
    worlds[2].run("shape_map_jobs.save", run=Run(2, 2), fused=False, folder=folder)
    joined = {"fused": "layers.{l}.norm_and_bias : h+h*g*2", "apart": ["layers.{l}.scale", "layers.{l}.q"]}
    wrong = {**MAP, "entries": [joined, *MAP["entries"]]}
    told = worlds[3].run("shape_map_jobs.load", run=Run(3, 3), fused=True, folder=folder, names=wrong)
    assert {one.get("error") for one in told} == {"ModelMismatch"} and len({one["text"] for one in told}) == 1
    assert "layers.0.q: is given twice in the map" in told[0]["text"]
    folder = str(tmp_path / "stage 0")
    worlds[2].run("shape_map_jobs.save", run=Run(0, 2, "fp32"), fused=False, folder=folder)
    asked = {"fused": True, "folder": folder, "names": MAP}
    told = worlds[3].run("shape_map_jobs.load", run=Run(3, 3, "fp32"), **asked)
    assert {one.get("error") for one in told} == {"UnsupportedLayout"} and len({one["text"] for one in told}) == 1
    assert "holds an optimizer that names no parameter" in told[0]["text"]
    (again,) = {
        one.get("error")
        for one in worlds[2].run("shape_map_jobs.load", run=Run(0, 2, "fp32"), **{**asked, "fused": False})
    }
    assert again is None, "a run that has the names of the folder is not mapped"


@pytest.mark.parametrize("source", [Run(3, 2), Run(2, 3)], ids=str)
def test_weights_alone_go_into_another_module(worlds: Any, tmp_path: Path, source: Run) -> None:
    """Of stage 3, which saves masters alone, too."""
    folder = str(tmp_path)
    saved = gathered(worlds[source.dp].run("shape_map_jobs.save", run=source, fused=True, folder=folder))
    asked = {"run": Run(2, 2), "fused": False, "names": MAP, "load_optimizer_states": False}
    loaded = worlds[2].run("shape_map_jobs.load", folder=folder, **asked)
    assert not [one for one in loaded if "error" in one], loaded[0]
    masters = {name: values for (name, kind), values in as_apart(saved).items() if kind == "fp32"}
    weights = loaded[0]["weights"]
    assert weights.keys() == masters.keys()
    wrong = [name for name, one in weights.items() if not torch.equal(one.flatten(), masters[name].to(one.dtype))]
    assert not wrong, wrong
