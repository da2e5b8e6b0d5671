"""A sample of `make torture`: one call in so many fails, and OUT is whole or absent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_what_fails_leaves_all_or_nothing() -> None:
    command = [sys.executable, str(Path(__file__).parent), "--every", "331"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["tried"] > 80 and said["wrong"] == 0
