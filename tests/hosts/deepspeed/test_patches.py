"""The source patches: they apply once to the released file, do what the hook does, and the hook stands aside."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from resume_jobs import Setup
from resumed import STEPS

ROOT = Path(__file__).resolve().parents[3]
PATCH = ROOT / "patches" / "deepspeed-0.19.8.patch"

pytestmark = pytest.mark.distributed


def _patch(tree: Path, *arguments: str) -> int:
    with PATCH.open() as text:
        command = ["patch", "-p1", "--force", "--silent", "-d", str(tree), *arguments]
        return subprocess.run(command, stdin=text, capture_output=True, timeout=60).returncode


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the installed DeepSpeed, patched."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    tree = tmp_path_factory.mktemp("vendored")
    shutil.copytree(Path(spec.origin).parent, tree / "deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    assert _patch(tree) == 0
    return tree


def test_only_adds_lines() -> None:
    lines = PATCH.read_text().splitlines()
    assert not [line for line in lines if line.startswith("-") and not line.startswith("---")]
    assert sum(line.startswith("+") and not line.startswith("+++") for line in lines) < 8


def test_applies_once_checks_and_reverts(tree: Path, tmp_path: Path) -> None:
    file = Path("deepspeed/runtime/engine.py")
    copy = tmp_path / file
    copy.parent.mkdir(parents=True)
    copy.write_bytes((tree / file).read_bytes())
    patched = copy.read_bytes()
    assert _patch(tmp_path, "--dry-run", "--forward") != 0, "a second application must be refused"
    assert _patch(tmp_path, "--dry-run", "-R") == 0
    assert _patch(tmp_path, "-R") == 0
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    assert copy.read_bytes() == (Path(spec.origin).parent / "runtime" / "engine.py").read_bytes() != patched


_SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import ds_reshard.auto, jobs, resume_jobs, ds_reshard, torch, deepspeed
assert deepspeed.__file__.startswith({tree!r}), deepspeed.__file__
jobs.load_frameworks()
torch.distributed.init_process_group("gloo", init_method="file://{rendezvous}", rank=0, world_size=1)
deepspeed.init_distributed("gloo", verbose=False)
states = {{s.target.rpartition(".")[2]: s.state for s in ds_reshard.installed() if s.host == "deepspeed"}}
expected = {{"load_checkpoint": "vendored", "save_checkpoint": "installed", "_take_model_step": "installed",
            "_batch_assertion": "installed", "load_state_dict": "installed"}}
assert states == expected, states
from cases import Run
from resume_jobs import Setup
setup = Setup(run=Run(3, 1), lr=0.5, policy={{"scheduler": "override"}})
engine = resume_jobs.make(setup, seed=99)
engine.load_checkpoint({folder!r})
rates = resume_jobs.used(engine, 100, 1)
moments = sum(float(s["exp_avg"].abs().sum()) for s in engine.optimizer.optimizer.state.values())
assert rates[0][0]["lr"] == 0.5 and moments > 0, (rates, moments)
assert engine.global_steps == {steps} + 1
print("as the hook does")
"""


def test_a_patched_tree_does_what_the_hook_does(tree: Path, kept: Any, tmp_path: Path) -> None:
    """In a fresh process with `ds_reshard.auto`: vendored, and a stage-1 save of two ranks resumes at stage 3."""
    from cases import Run

    folder, _ = kept(Setup(run=Run(1, 2)))
    script = _SCRIPT.format(
        tests=str(ROOT / "tests" / "hosts"),
        tree=str(tree),
        rendezvous=tmp_path / "meet",
        folder=str(folder),
        steps=STEPS,
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(tree), str(ROOT))),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "LOCAL_RANK": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=200)
    assert "as the hook does" in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]
