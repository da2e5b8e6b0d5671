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
ROOT = Path(__file__).resolve().parents[3]
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


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What each order of a new interpreter said."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, str(Path(__file__).with_name("hook_orders.py")), *ORDERS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    said = [json.loads(line.removeprefix("SAID")) for line in lines]
    assert sorted(one["order"] for one in said) == sorted(ORDERS), done.stderr[-3000:]
    return {one["order"]: one for one in said}


@pytest.mark.parametrize("order", ORDERS)
def test_removal_restores_every_object(told: dict[str, Any], order: str) -> None:
    """All of the table's targets change, once, and nothing else; removed, each name holds what it held."""
    said = told[order]
    assert said["states"] == dict.fromkeys(TARGETS, "installed")
    assert said["left"] == [] and said["ours"] == []
    assert said["changed"] == said["again"] == sorted(TARGETS)
