"""`python -m ds_reshard.run`: the script runs unchanged, with hooks and policy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import argparse, json, sys
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--no-load-optim", action="store_true")
args = parser.parse_args()
from ds_reshard.resume import policy_sources
from ds_reshard.hooks.installation import REGISTRY
import beside
print(json.dumps({
    "name": __name__, "argv": sys.argv, "local_rank": args.local_rank, "steps": args.steps,
    "policy": repr(policy_sources.asked_policy()), "hosts": sorted(REGISTRY.deferred), "beside": beside.HERE,
}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("HERE = True\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def _run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ds_reshard.run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)


def test_flags_before_the_script_are_ours_and_those_behind_it_are_its_own(script: Path) -> None:
    done = _run("--override-opt-param-scheduler", str(script), "--steps", "3")
    said = json.loads(done.stdout)
    assert said["name"] == "__main__" and said["steps"] == 3 and said["beside"]
    assert said["argv"] == [str(script), "--steps", "3"]
    assert "scheduler='override'" in said["policy"]
    assert "deepspeed" in said["hosts"]


def test_a_local_rank_before_the_flags_goes_to_the_script(script: Path) -> None:
    """`deepspeed --module` puts `--local_rank=N` first (deepspeed/launcher/launch.py, 0.19.8)."""
    said = json.loads(_run("--local_rank=1", "--no-load-lr-state", str(script), "--steps", "2").stdout)
    assert said["local_rank"] == 1 and said["steps"] == 2
    assert "scheduler='reset'" in said["policy"]


def test_a_module_runs_as_python_m_runs_it(script: Path) -> None:
    done = _run("--finetune", "-m", "train", "--steps", "1", cwd=script.parent)
    said = json.loads(done.stdout)
    assert said["name"] == "__main__" and said["steps"] == 1 and "finetune=True" in said["policy"]


def test_wrong_usage_is_a_message_and_status_2(script: Path) -> None:
    contradicting = _run("--finetune", "--load-masters-only", str(script))
    assert contradicting.returncode == 2 and "finetune" in contradicting.stderr
    assert "Traceback" not in contradicting.stderr
    missing = _run(str(script.with_name("absent.py")))
    assert missing.returncode == 2 and "no such script" in missing.stderr


def test_the_scripts_own_exit_status_and_errors_are_its_own(script: Path) -> None:
    script.write_text("import sys\nsys.exit(7)\n")
    assert _run(str(script)).returncode == 7
    script.write_text("raise ValueError('theirs')\n")
    failed = _run(str(script))
    assert failed.returncode == 1 and "ValueError: theirs" in failed.stderr


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


_PARSE = """
import argparse, ds_reshard
from ds_reshard.hooks.installation import REGISTRY
parser = ds_reshard.add_arguments(argparse.ArgumentParser())
parser.parse_args([])
print(sorted(REGISTRY.deferred))
parser.parse_args(["--no-load-optim"])
print("deepspeed" in REGISTRY.deferred)
"""


def test_a_flag_in_a_script_without_the_import_puts_the_hooks_on() -> None:
    """Else the policy would be dropped without a word; without a flag nothing is touched."""
    assert _python(_PARSE).stdout.split("\n")[:2] == ["[]", "True"]


def test_a_flag_while_the_hooks_are_disabled_is_refused() -> None:
    refused = _python(_PARSE, DS_RESHARD_DISABLE="1")
    assert refused.returncode != 0 and "DS_RESHARD_DISABLE is set" in refused.stderr
