"""The synthetic checkpoints of tests/formats/zero_builder.py, beside those that DeepSpeed saves of the same state."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from gathered import gathered
from saves import Saves

sys.path.insert(0, str(Path(__file__).parents[2] / "formats"))
from zero_builder import TAG, Built, write

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

OF_THE_RUN = {"ds_config", "lr_scheduler", "param_groups", "note", "epoch", "checkpoint_parallel_dimensions"}


def _same(one: Any, other: Any, where: str = "") -> None:
    """Of one type, shape and value, throughout; what the run itself was set to is passed over."""
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other), where
        return
    assert type(one) is type(other), (where, type(one), type(other))
    if isinstance(one, dict):
        assert [k for k in one if k not in OF_THE_RUN] == [k for k in other if k not in OF_THE_RUN], where
        for key in (key for key in one if key not in OF_THE_RUN):
            _same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            _same(left, right, f"{where}[{number}]")
    elif hasattr(one, "__dict__") and not hasattr(one, "value"):
        _same(vars(one), vars(other), where)
    else:
        assert one == other, where


@pytest.mark.parametrize("dp", [2, 3])
def test_a_synthetic_checkpoint_is_as_deepspeed_saves_it(saves: Saves, tmp_path: Path, dp: int) -> None:
    folder, saved = saves(Run(2, dp), Model(groups=2, frozen=True, tied=True))
    model = torch.load(folder / TAG / "mp_rank_00_model_states.pt", weights_only=False)
    shapes = {name: tuple(shape) for group in model["param_shapes"] for name, shape in group.items()}
    held = {key: value.reshape(shapes[key[0]]) for key, value in gathered(saved).items()}
    held |= {(name, "weight"): value for name, value in model["module"].items() if name not in model["shared_params"]}
    order = [name for name in model["module"] if name not in model["shared_params"]]
    held = {key: held[key] for key in sorted(held, key=lambda key: order.index(key[0]))}
    built = Built(
        groups=tuple(tuple((name, tuple(shape)) for name, shape in group.items()) for group in model["param_shapes"]),
        frozen=tuple((name, tuple(shape)) for name, shape in model["frozen_param_shapes"].items()),
        tied=tuple(model["shared_params"].items()),
        dp=dp,
    )
    made = write(built, tmp_path / "made", held)
    for path in sorted((folder / TAG).iterdir()):
        real, ours = (torch.load(place / TAG / path.name, "cpu", weights_only=False) for place in (folder, made))
        _same(ours, real, path.name)
