"""`make gpu` runs where torch and numpy are all there is; here on the CPU, in place of a device."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = ("deepspeed", "accelerate", "transformers", "megatron", "rich", "packaging", "isal", "safetensors", "psutil")


@pytest.mark.slow
def test_the_benchmark_runs_on_the_double_and_says_so(tmp_path: Path) -> None:
    """It compares all loads bit for bit, and its figures are labelled, and written nowhere."""
    program = f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); from benchmarks.gpu import main; main()"
    arguments = ["--double", "--mib", "16", "--runs", "1", "--threads", "2", "--memory-mib", "4"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(done.stdout)
    assert made["double"] and made["device"]["name"] == "double on the CPU: no figures of a GPU"
    assert made["same_bits_as_saved"] == ["ds_reshard, 2 threads", "ds_reshard, 2 threads, no checksums", "torch.load"]
    assert set(made["goals"]) <= set(made["ratios"])
    assert not list(tmp_path.iterdir())


def test_no_figures_of_the_double_are_committed() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("gpu-*.json"):
        assert not json.loads(path.read_text(encoding="utf-8"))["double"], path.name


def test_make_gpu_runs_every_test_that_needs_a_gpu() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    (named,) = re.findall(r"^GPU_TESTS := (.+)$", makefile, flags=re.MULTILINE)
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8") and path != Path(__file__)
    }
    assert set(named.split()) == marked
