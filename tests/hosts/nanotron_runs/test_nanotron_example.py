"""examples/07_nanotron_resume.py on the synthetic stand-in, in a process of its own: `import ds_reshard.auto` stays."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import host_folders
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "formats"))
from nanotron_builder import STEP, Run, write

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ROOT = Path(__file__).parents[3]
MAIN = """
import runpy, sys
import torch.distributed as dist
import nanotron_jobs
from nanotron_builder import Run

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
from nanotron import config

config.KNOWN["config.yaml"] = nanotron_jobs.config_for(Run(), nanotron_jobs.context_of(Run()), sys.argv[1])
sys.argv = ["07_nanotron_resume.py", "config.yaml", *sys.argv[2:]]
runpy.run_path("examples/07_nanotron_resume.py", run_name="__main__")
dist.destroy_process_group()
"""


def test_the_example_resumes_as_asked(tmp_path: Path, interpreter: str) -> None:
    """At another topology than was saved, with a flag, and prints what was done."""
    folder = write(Run(dp=2), tmp_path / "saved")
    paths = [
        str(ROOT),
        str(ROOT / "tests" / "formats"),
        str(Path(__file__).parent / "nanotron_stand_in"),
        *host_folders.FOLDERS,
    ]
    done = subprocess.run(
        [interpreter, "-c", MAIN, str(folder), "--override-opt-param-scheduler"],
        cwd=ROOT,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.match(rf"goes on after iteration {STEP}, learning rates \[0\.000\d+\]\n", done.stdout), done.stdout
    for name, why in (
        ("position", "--override"),
        ("moments and step", "nanotron"),
        ("group 0 initial lr", "--override"),
    ):
        assert re.search(rf"^{name} .*  {why}", done.stdout, re.MULTILINE), (name, done.stdout)
