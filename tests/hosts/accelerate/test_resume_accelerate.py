"""accelerate loads its schedulers after the engine: the policy must hold there too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from logs import uses

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
