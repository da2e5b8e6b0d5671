"""A sample of `make torture`: of its cases, each so manieth."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_a_conversion_that_fails_leaves_all_or_nothing() -> None:
    """In a process of its own, of which each case is a fork."""
    command = [sys.executable, str(Path(__file__).with_name("__main__.py")), "--every", "661"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["tried"] > 40 and said["wrong"] == 0


@pytest.mark.distributed
@pytest.mark.parametrize(("script", "every", "least"), [("loads", 997, 20), ("ranks", 11, 3), ("stores", 149, 6)])
def test_a_load_that_fails_leaves_all_or_nothing(
    script: str, every: int, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks, and the clients of a store, are forks of the server of this session."""
    status = importlib.import_module(script).main(["--every", str(every)])
    text = capsys.readouterr().out
    assert status == 0, text[-3000:]
    said = json.loads(text.splitlines()[-1])
    assert said["tried"] > least and said["wrong"] == 0
