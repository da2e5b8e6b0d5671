"""What DeepSpeed has saved, as nanotron's files and back: loaded by DeepSpeed itself, everything as it was saved.

The nanotron checkpoint that shows the arrangement is synthetic (tests/formats/nanotron_builder.py).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from gathered import assert_same
from saves import Saves

from ds_reshard.operations import convert, fingerprint

sys.path.insert(0, str(Path(__file__).parents[2] / "formats"))
from nanotron_builder import Param, write
from nanotron_builder import Run as NanotronRun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROWS = (
    (Run(2, 2), "zero2", Run(2, 3), Model(groups=2, tied=True), NanotronRun(dp=2)),
    (Run(3, 2), "zero3", Run(3, 1), Model(groups=2), NanotronRun(dp=3, tp=1, zero=0)),
    (Run(1, 1, "fp32"), "universal", Run(1, 2, "fp32"), Model(), NanotronRun(dp=2, masters=False)),
)


def _module_name(name: str) -> str:
    return name.replace("weight", "pp_block.weight")


def _like(folder: Path, shown: NanotronRun, out: Path) -> tuple[Path, dict[str, str]]:
    """A run of nanotron that trains the same parameters in another order; their names there in that of DeepSpeed."""
    tag = (folder / "latest").read_text()
    model = torch.load(next((folder / tag).glob("*mp_rank_00_model_states.pt")), weights_only=False)
    shapes = {name: tuple(shape) for group in model["param_shapes"] for name, shape in group.items()}
    params = tuple(Param(_module_name(name), shape, (0,)) for name, shape in sorted(shapes.items()))
    return write(replace(shown, model=params), out), {name: _module_name(name) for name in shapes}


def _named(path: Path, names: dict[str, str]) -> str:
    path.write_text(json.dumps(names))
    return str(path)


@pytest.mark.parametrize(("source", "to", "target", "model", "shown"), ROWS, ids=["zero2", "zero3", "universal-fp32"])
def test_there_and_back_deepspeed_loads_what_it_has_saved(
    worlds: Any, saves: Saves, tmp_path: Path, source: Run, to: str, target: Run, model: Model, shown: NanotronRun
) -> None:
    """Weights, masters, moments, steps, param groups, schedule: also what the coming updates make of them.

    And nanotron's folder itself, given to `engine.load_checkpoint`.
    """
    folder, saved = saves(source, model)
    like, names = _like(folder, shown, tmp_path / "like")
    between, out = tmp_path / "nanotron", tmp_path / "out"
    done = convert(str(folder), str(between), to="nanotron", like=str(like), names=_named(tmp_path / "a.json", names))
    assert any("note" in note and note.startswith("left out") for note in done.notes)
    metas = json.loads(next(between.glob("3/checkpoint_metadata.json")).read_text())["metas"]
    (stage,) = metas["data_stages"]
    assert (metas["last_train_step"], metas["consumed_train_samples"], stage["consumed_train_samples"]) == (3, 36, 36)
    assert metas["consumed_tokens_total"] == sum(stage["consumed_tokens_per_dataset_folder"].values()) == 36 * 16
    held = {(one.name, one.kind): one.fingerprint for one in fingerprint(str(folder)).tensors}
    moved = {(one.name, one.kind): one.fingerprint for one in fingerprint(str(between)).tensors}
    expected = {(names[name], kind): found for (name, kind), found in held.items() if name in names}
    common = expected.keys() & moved.keys()  # ZeRO 3 keeps no weights, and a run in float32 no masters
    assert {key: moved[key] for key in common} == {key: expected[key] for key in common}
    assert len(common) >= 3 * len(names)
    assert len(moved) == (4 if shown.masters else 3) * len(names)
    back: dict[str, Any] = {
        new: [old, "head.weight"] if model.tied and old == "embed.weight" else old for old, new in names.items()
    }
    size = {"dp": target.dp} if to != "universal" else {}
    convert(str(between), str(out), to=to, names=_named(tmp_path / "b.json", back), **size)
    run = replace(target, config={"checkpoint": {"load_universal": True}}) if to == "universal" else target
    loaded = worlds[target.dp].run("load", run=run, model=model, folder=str(out), more=2, hooks=False)
    assert_same(saved, loaded)
    direct = worlds[target.dp].run("load", run=target, model=model, folder=str(folder), more=2)
    assert loaded[0]["later"] == direct[0]["later"]
    itself = replace(target, config={"ds_reshard": {"names": str(tmp_path / "b.json")}})
    read = worlds[target.dp].run("load", run=itself, model=model, folder=str(between), more=2)
    assert_same(saved, read)
    assert read[0]["later"] == direct[0]["later"]
