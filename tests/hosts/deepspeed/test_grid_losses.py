"""A GPT that was saved on a grid goes on under other layouts, and its losses are those of the run that went on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS, CHECKPOINT = 16, 8
RUNS = {
    "stages": (
        {"pp": 2, "dp": 2, "pipeline": True},
        [{"pp": 4, "pipeline": True}, {"pp": 1, "dp": 2, "pipeline": True}],
    ),
    "tensor-parallel ranks": ({"tp": 2, "dp": 2}, [{"dp": 3}, {"tp": 4}]),
}


@pytest.mark.parametrize("case", RUNS)
def test_losses_go_on(worlds: Any, tmp_path: Path, case: str) -> None:
    """They part only by the order in which numbers are added; a wrong moment or layer is thousands of times as much."""
    saved, others = RUNS[case]
    asked = {"steps": STEPS, "checkpoint": CHECKPOINT, "folder": str(tmp_path)}
    whole = worlds[4].run("loss_jobs.uninterrupted", layout=saved, **asked)[0]
    assert len(whole) == STEPS and whole[CHECKPOINT] < whole[0] - 0.1 and whole[-1] < whole[CHECKPOINT] - 0.1
    for layout in others:
        ranks = layout.get("pp", 1) * layout.get("tp", 1) * layout.get("dp", 1)
        for losses in worlds[ranks].run("loss_jobs.resumed", layout=layout, **asked):
            assert losses == pytest.approx(whole[CHECKPOINT:], abs=1e-5)
