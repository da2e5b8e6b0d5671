"""accelerate loads its schedulers after the engine: the policy must hold there too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from logs import uses
from worlds import WorkerFailed

pytestmark = pytest.mark.distributed

STEPS = 4


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("scheduler", ["host", "override", "reset"])
def test_a_scheduler_that_accelerate_keeps_follows_the_policy(
    worlds: Any, tmp_path: Path, stage: int, scheduler: str
) -> None:
    old, new = {"lr": 0.01, "slope": 0.1}, {"lr": 0.5, "slope": 0.2}
    world = worlds[2]
    saved = world.run("accelerate_jobs.save", stage=stage, folder=str(tmp_path / "old"), steps=STEPS, **old)
    fresh = world.run("accelerate_jobs.save", stage=stage, folder=str(tmp_path / "new"), steps=STEPS, **new)
    loaded = world.run(
        "accelerate_jobs.resume", stage=stage, folder=str(tmp_path / "old"), policy={"scheduler": scheduler}, **new
    )
    got = loaded[0]["rates"]
    assert loaded[0]["moments"] > 0 and loaded[1]["rates"] == got
    assert "load_state_dict" not in loaded[0]["state"]
    expected = {"host": saved[0][:STEPS][:0], "override": fresh[0][STEPS:], "reset": fresh[0][:3]}[scheduler]
    if scheduler == "host":
        assert got[0] == saved[0][STEPS] and got != fresh[0][STEPS:], "base rates are the checkpoint's without a flag"
        assert loaded[0]["told"] == []
    else:
        assert got == expected
        before, after = loaded[0]["told"]
        assert before.endswith("; an external scheduler sets it when it loads its state")
        assert uses(after, got[:1]) and "anew" not in after


@pytest.mark.parametrize(
    "place", ["runs", "runs/one/pytorch_model", "runs/one/pytorch_model/latest", "runs/one/scheduler.bin"]
)
def test_a_place_above_a_folder_or_inside_one_is_refused_with_the_line_that_loads_it(
    worlds: Any, tmp_path: Path, place: str
) -> None:
    """On every rank, in the same words; DeepSpeed would miss a tag, which `load_state` has no argument for."""
    given: dict[str, Any] = {"stage": 1, "lr": 0.01, "slope": 0.1}
    saved = worlds[2].run("accelerate_jobs.save", folder=str(tmp_path / "runs" / "one"), steps=STEPS, **given)
    given |= {"policy": {}, "hosts": ("deepspeed", "accelerate")}
    with pytest.raises(WorkerFailed) as raised:
        worlds[2].run("accelerate_jobs.resume", folder=str(tmp_path / place), **given)
    one, other = map(str, raised.value.errors)
    line = re.search(r"give load_state (\S+)$", one)
    assert one == other and f"{tmp_path / place}: is above a folder of accelerate, or inside one" in one
    assert line is not None, one
    loaded = worlds[2].run("accelerate_jobs.resume", folder=line[1], **given)
    assert loaded[0]["rates"][0] == saved[0][STEPS] and loaded[0]["moments"] > 0
