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
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=cwd)


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


def test_an_error_of_the_script_shows_its_own_frames_alone(script: Path) -> None:
    script.write_text("def step():\n    raise ValueError('theirs')\n\n\nstep()\n")
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert _run(str(script)).stderr == plain.stderr
    as_module = _run("-m", "train", cwd=script.parent)
    assert as_module.stderr == plain.stderr and as_module.returncode == 1
    script.write_text("import sys\nsys.excepthook = lambda *error: print('shown', error[1])\nraise KeyError(1)\n")
    assert _run(str(script)).stdout == "shown 1\n"


STARTER = """
import os, subprocess, sys
here = os.path.dirname(os.path.abspath(__file__))
kind, python, *arguments = sys.argv[1:]
command = [python, *arguments]
if kind == "exec":
    os.execv(python, command)
sys.exit(subprocess.run(command).returncode)
"""
CHILD = """
import sys
assert "ds_reshard" not in sys.modules, "imported by a process without a framework"
import nanotron
loaded = "ds_reshard.auto" in sys.modules
if loaded:
    from ds_reshard.hooks.installation import REGISTRY
    from ds_reshard.resume import policy_sources
    policy = policy_sources.asked_policy()
    print(policy.scheduler, policy.hyperparameters, policy.report, "deepspeed" in REGISTRY.deferred)
    if "load" in sys.argv:
        policy_sources.note_applied(policy)
print(loaded, sys.argv[1:])
sys.exit(3 if "fail" in sys.argv else 0)
"""
FLAGS = ("--override-opt-param-scheduler", "--override-optim-hparams", "betas,eps", "--resume-report", "a b's.json")
APPLIED = "override ('betas', 'eps') a b's.json True\n"
UNSEEN = "no load has applied it, in this process or in one that it started"


@pytest.fixture
def starter(tmp_path: Path) -> Path:
    """A script in a folder whose name has a space, and a child of it that imports a framework (a synthetic one)."""
    folder = tmp_path / "of a user"
    (folder / "nanotron").mkdir(parents=True)
    (folder / "nanotron" / "__init__.py").touch()
    (folder / "child.py").write_text(CHILD)
    (folder / "start.py").write_text(STARTER)
    return folder / "start.py"


@pytest.mark.parametrize("kind", ["subprocess", "exec"])
def test_python_processes_that_the_script_starts_get_hooks_and_flags(starter: Path, kind: str) -> None:
    child = (str(starter), kind, sys.executable, str(starter.with_name("child.py")))
    done = _run(*FLAGS, *child, "load")
    assert done.stdout == f"{APPLIED}True ['load']\n", done.stderr
    assert (done.returncode, done.stderr) == (0, "")
    unseen = _run(*FLAGS, *child)
    assert unseen.stdout == f"{APPLIED}True []\n"
    assert unseen.returncode == 1 and UNSEEN in unseen.stderr and "Traceback" not in unseen.stderr


def test_below_a_process_of_its_own_that_is_nested(starter: Path) -> None:
    """A second `ds_reshard.run` below the first one has its flags too, and the first one says the error."""
    child = ("subprocess", sys.executable, "-m", "ds_reshard.run", str(starter.with_name("child.py")))
    starter.with_name("child.py").write_text(CHILD.replace('assert "ds_reshard" not in sys.modules', "assert True"))
    assert _run(*FLAGS, str(starter), *child, "load").returncode == 0
    unseen = _run(*FLAGS, str(starter), *child)
    assert (unseen.returncode, unseen.stderr.count(UNSEEN)) == (1, 1)
    other = _run(
        "--no-load-lr-state", str(starter), "subprocess", sys.executable, "-m", "ds_reshard.run", *FLAGS, "x.py"
    )
    assert other.returncode == 2 and "DS_RESHARD_FLAGS" in other.stderr


@pytest.mark.parametrize("switch", ["-I", "-S", "-E"])
def test_a_process_that_reads_no_path_is_as_without_us_and_the_end_says_so(starter: Path, switch: str) -> None:
    child = starter.with_name("child.py")
    child.write_text(f"import sys\nsys.path.insert(0, {str(starter.parent)!r})\n{CHILD}")
    done = _run(*FLAGS, str(starter), "subprocess", sys.executable, switch, str(child))
    assert done.stdout == "False []\n"
    assert done.returncode == 1 and UNSEEN in done.stderr


def test_a_run_that_ends_by_its_own_error_keeps_its_status(starter: Path, script: Path) -> None:
    failed = _run(*FLAGS, str(starter), "subprocess", sys.executable, str(starter.with_name("child.py")), "fail")
    assert failed.returncode == 3 and UNSEEN not in failed.stderr
    script.write_text("raise ValueError('theirs')\n")
    failed = _run(*FLAGS, str(script))
    assert failed.returncode == 1 and UNSEEN not in failed.stderr
    script.write_text("import sys\nsys.exit(0)\n")
    unseen = _run("--finetune", str(script))
    assert unseen.returncode == 1 and UNSEEN in unseen.stderr and unseen.stderr.startswith("python -m ds_reshard.run: ")


def test_a_script_that_leaves_by_os_exit_is_told_too(script: Path) -> None:
    """Which nothing can catch; a fork of it that leaves so, as multiprocessing ends them, is none of a run's end."""
    script.write_text("import os\nos._exit(0)\n")
    unseen = _run("--finetune", str(script))
    assert unseen.returncode == 1 and UNSEEN in unseen.stderr and unseen.stderr.startswith("python -m ds_reshard.run: ")
    script.write_text("import os\nos._exit(5)\n")
    failed = _run("--finetune", str(script))
    assert (failed.returncode, failed.stderr) == (5, "")
    load = "from ds_reshard.resume import policy_sources as p; p.note_applied(p.asked_policy())"
    fork = (
        "pid = os.fork()\nif not pid:\n    os._exit(0)\nassert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
    )
    script.write_text(f"import os\n{fork}{load}\nos._exit(0)\n")
    loaded = _run("--finetune", str(script))
    assert (loaded.returncode, loaded.stderr) == (0, "")


def test_another_environment_is_left_as_it_is_or_takes_ours(starter: Path, tmp_path: Path) -> None:
    """A child of a virtual environment without ds_reshard: with none of our requirements, with one, and with all."""
    import sysconfig
    import venv

    venv.create(tmp_path / "other", with_pip=False, symlinks=True)
    installed, one = Path(sysconfig.get_path("purelib")), tmp_path / "one"
    one.mkdir()
    (one / "packaging").symlink_to(installed / "packaging")
    others = "os.environ['PYTHONPATH'] = os.environ['PYTHONPATH'].split(os.pathsep)[0] + os.pathsep + sys.argv.pop()"
    starter.write_text(f"import os, sys\n{others}\n{STARTER}")
    child = (str(starter), "subprocess", str(tmp_path / "other" / "bin" / "python"), str(starter.with_name("child.py")))
    for there in (tmp_path, one):
        lacking = _run(*FLAGS, *child, "load", str(there))
        assert lacking.stdout == "False ['load']\n" and lacking.returncode == 1 and UNSEEN in lacking.stderr
    done = _run(*FLAGS, *child, "load", str(installed))
    assert (done.returncode, done.stdout) == (0, f"{APPLIED}True ['load']\n"), done.stderr


def test_the_sitecustomize_that_is_hidden_runs_and_is_the_module(starter: Path) -> None:
    starter.with_name("sitecustomize.py").write_text("print('theirs')\n")
    code = "import sitecustomize, sys; print(sitecustomize.__file__, 'ds_reshard' in sys.modules)"
    done = _python(code, PYTHONPATH=f"{_startup()}:{starter.parent}")
    assert done.stdout == f"theirs\n{starter.with_name('sitecustomize.py')} False\n" and not done.stderr
    starter.with_name("sitecustomize.py").write_text("1 / 0\n")
    broken = _python(
        "import nanotron, sys; print('ds_reshard.auto' in sys.modules)", PYTHONPATH=f"{_startup()}:{starter.parent}"
    )
    assert broken.stdout == "True\n" and "ZeroDivisionError" in broken.stderr


def test_the_folder_by_hand_and_flags_by_environment(starter: Path) -> None:
    """What docs/resume.md says: rank 0 of a run then ends with an error, as no load has applied them.

    What it has started by itself says nothing; a load there counts. A script's own error keeps its status.
    """
    given = {"PYTHONPATH": f"{_startup()}:{starter.parent}", "DS_RESHARD_FLAGS": "--no-load-lr-state"}
    code = "import nanotron; from ds_reshard.resume import policy_sources as p; print(p.asked_policy().scheduler)"
    done = _python(code, **given, RANK="0")
    assert (done.returncode, done.stdout) == (1, "reset\n") and UNSEEN in done.stderr
    for quiet in (_python(code, **given, RANK="1"), _python(code, **given)):
        assert quiet.returncode == 0 and not quiet.stderr
    failed = _python(f"{code}; 1 / 0", **given, RANK="0")
    assert failed.returncode == 1 and UNSEEN not in failed.stderr
    child = "import subprocess, sys; print(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
    inner = "import nanotron; from ds_reshard.resume import policy_sources as p; " + "{}"
    for work, status in (("0", 1), ("p.note_applied(p.asked_policy())", 0)):
        both = f"import nanotron, sys; sys.argv.append({inner.format(work)!r}); {child}"
        done = _python(both, **given, RANK="0")
        assert (done.returncode, done.stdout) == (status, "0\n"), done.stderr
    for flags, said in (("--lr 3", "no such flag: --lr"), ("--resume-report", "expected one argument")):
        refused = _python("import nanotron", **{**given, "DS_RESHARD_FLAGS": flags})
        assert refused.returncode and said in refused.stderr and "DS_RESHARD_FLAGS" in refused.stderr
    refused = _python("import nanotron", **given, DS_RESHARD_DISABLE="1")
    assert refused.returncode and "DS_RESHARD_DISABLE is set" in refused.stderr


def test_the_folder_waits_for_every_package_that_is_patched() -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    from ds_reshard.hosts import tables

    spec = spec_from_file_location("of_a_test", f"{_startup()}/sitecustomize.py")
    assert spec is not None and spec.loader is not None
    made, before = module_from_spec(spec), list(sys.meta_path)
    try:
        spec.loader.exec_module(made)
    finally:
        sys.meta_path[:] = before
    patched = {patch.package for table in tables() for patch in (*table.patches, *table.instead)}
    assert patched == made.FRAMEWORKS


@pytest.mark.parametrize(
    "policy",
    [
        {"scheduler": "override", "hyperparameters": ("betas", "eps")},
        {"scheduler": "reset", "rng": False, "dataloader": "reset", "report": "a b's.json"},
        {"scheduler": "strict"},
        {"scheduler": "checkpoint", "optimizer": "masters", "iteration": "reset"},
        {"optimizer": "skip", "finetune": True},
    ],
)
def test_flags_say_all_of_a_policy(policy: dict[str, object]) -> None:
    from ds_reshard.resume.policy import ResumePolicy, combine
    from ds_reshard.resume.policy_sources import flags_of, from_flags

    made = ResumePolicy(**policy)  # type: ignore[arg-type]
    assert combine([from_flags(flags_of(made), place="test")]) == made


def _startup() -> str:
    command = [sys.executable, "-m", "ds_reshard", "hooks", "--path"]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout.strip()


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env={**os.environ, **environment}
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
