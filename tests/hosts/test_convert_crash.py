"""A conversion that ends at any moment: OUT is absent or whole, and the next run ends in the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cases import Model, Run
from saves import Saves

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize(
    ("to", "dp", "stride", "threads"),
    [("zero2", "2", "1", "1"), ("zero3", "3", "9", "1"), ("universal", "0", "23", "1"), ("zero3", "3", "13", "4")],
)
def test_ended_at_every_call_that_writes(
    saves: Saves, tmp_path: Path, to: str, dp: str, stride: str, threads: str
) -> None:
    """Killed, or refused with a full disk, an input-output error, or no permission; with an old OUT and without."""
    folder, _ = saves(Run(1, 2), Model(groups=2))
    script = Path(__file__).with_name("crashes.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(tmp_path), to, dp, stride, threads],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["calls"] > 40 and said["wrong"] == []
