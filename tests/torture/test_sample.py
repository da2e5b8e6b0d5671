"""A sample of `make torture`: of its cases, each so manieth."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("script", "every", "least"), [("__main__.py", 331, 80), ("loads.py", 499, 40), ("ranks.py", 11, 3)]
)
def test_what_fails_leaves_all_or_nothing(script: str, every: int, least: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name(script)), "--every", str(every)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["tried"] > least and said["wrong"] == 0
