"""Installing and removing the DeepSpeed hooks: everything that was there is there again, in every order of imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_reshard.hosts import table

pytestmark = pytest.mark.slow

TARGETS = [patch.target for patch in table("deepspeed").patches]
ROOT = Path(__file__).resolve().parents[2]
ORDERS = (
    "auto deepspeed",
    "torch auto deepspeed",
    "deepspeed auto",
    "install",
    "torch install",
    "deepspeed install install",
    "auto deepspeed install",
    "install auto",
    "auto deepspeed remove install",
)


def _run(*order: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, str(ROOT / "tests" / "hosts" / "hook_orders.py"), *order]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert lines, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(lines[-1].removeprefix("SAID"))
    return said


@pytest.mark.parametrize("order", ORDERS)
def test_removal_restores_every_object(order: str) -> None:
    """All of the table's targets change, once, and nothing else; removed, each name holds what it held."""
    said = _run(*order.split())
    assert said["states"] == dict.fromkeys(TARGETS, "installed")
    assert said["left"] == [] and said["ours"] == []
    assert said["changed"] == said["again"] == sorted(TARGETS)
