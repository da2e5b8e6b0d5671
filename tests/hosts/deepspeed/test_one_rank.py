"""fp16 with a dynamic loss scale, on a GPU; the same script in bf16 on the CPU, so that it is known to run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "one_rank.py"
OVERRIDE = {"scheduler": "override", "hyperparameters": ["loss_scale"]}


PROVED = {"verify": "fingerprint", "device": "cuda"}
NEEDED = pytest.mark.skipif(
    not torch.cuda.is_available() or not find_spec("deepspeed"), reason="fp16 needs a CUDA device, and DeepSpeed"
)


def _run(
    folder: Path,
    device: str,
    dtype: str,
    stages: tuple[int, int],
    policy: dict[str, Any],
    reshard: dict[str, Any],
    python: str = sys.executable,
) -> dict[str, Any]:
    command = [
        python,
        str(SCRIPT),
        str(folder),
        "--device",
        device,
        "--dtype",
        dtype,
        "--stages",
        *map(str, stages),
        "--policy",
        json.dumps(policy),
        "--reshard",
        json.dumps(reshard),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["tensors"] >= 24 and not found["wrong"]
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_the_script_in_bf16_on_the_cpu(tmp_path: Path, interpreter: str) -> None:
    found = _run(tmp_path, "cpu", "bf16", (2, 3), {"scheduler": "override"}, {}, interpreter)
    assert found["first_rate"] == 0.001


@pytest.mark.gpu
@NEEDED
@pytest.mark.parametrize("stages", [(0, 2), (1, 3), (2, 1), (3, 2), (2, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("reshard", [{}, {"device": "cpu"}, PROVED], ids=str)
def test_fp16(tmp_path: Path, stages: tuple[int, int], reshard: dict[str, Any]) -> None:
    """The scale after five steps, two of which doubled it, comes back, and with it every bit of the state."""
    found = _run(tmp_path, "cuda", "fp16", stages, {}, reshard)
    assert found["first_rate"] == 0.01
    assert found["scales"] == [2.0**10, 2.0**10] or stages[0] == 0


@pytest.mark.gpu
@NEEDED
@pytest.mark.parametrize("stages", [(2, 3), (3, 1), (1, 1)], ids=str)
def test_fp16_with_the_rate_and_the_scale_of_this_run(tmp_path: Path, stages: tuple[int, int]) -> None:
    found = _run(tmp_path, "cuda", "fp16", stages, OVERRIDE, PROVED)
    assert found["first_rate"] == 0.001
    assert found["scales"][1] == 2.0**12
