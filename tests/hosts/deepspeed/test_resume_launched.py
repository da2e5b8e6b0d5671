"""Unchanged scripts under launchers: `torchrun -m ds_reshard.run`, `deepspeed --module`, and flags that are adopted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fresh
import pytest
from ports import free_port

SCRIPT = Path(__file__).parents[1] / "scripts" / "fork_train.py"
ROOT = Path(__file__).resolve().parents[3]
FIRST = 0.4 * (1 - 12 / 400)  # three steps of four samples

pytestmark = pytest.mark.distributed


def _launch(*command: str, **environment: str) -> dict[str, Any]:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        **environment,
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    lines = [line for line in done.stdout.splitlines() if "SAID" in line]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-4000:]
    said: dict[str, Any] = json.loads(lines[-1].partition("SAID")[2])
    return said


def torchrun(python: str, *arguments: str, **environment: str) -> dict[str, Any]:
    prefix = (python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
    return _launch(*prefix, *arguments, **environment)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("fork"))
    _forked("--lr", "0.1", "--save", folder)
    return folder


def _forked(*arguments: str) -> dict[str, Any]:
    """The script on two ranks without a launcher, which only its environment tells of."""
    said = fresh.run("resume_jobs.script", 2, path=str(SCRIPT), arguments=list(arguments))
    assert isinstance(said[0], dict) and said[1] is None, said
    return said[0]


def test_the_forks_flags_are_dead_without_us(saved: str) -> None:
    said = _forked("--lr", "0.4", "--load", saved, "--no-load-optim", "--no-load-lr-state")
    assert said["moments"] and said["lr"] == pytest.approx(0.1 * (1 - 12 / 400))


def test_under_the_launcher_the_flags_are_live(saved: str, interpreter: str) -> None:
    """Two ranks resume as one; the flags come before the script. Other launchers below are given the other flags.

    The rank is a new interpreter, which imports DeepSpeed after ds_reshard: those below have it already.
    """
    run = ("-m", "ds_reshard.run", "--no-load-optim", str(SCRIPT), "--lr", "0.4", "--load", saved)
    said = torchrun(interpreter, *run, PYTHON_EXEC=sys.executable)
    assert said == {"lr": 0.4, "position": 0, "moments": False}


def test_flags_that_the_script_defines_are_adopted(saved: str, interpreter: str) -> None:
    """`ds_reshard.add_arguments(parser)` on the script's own parser; its own --no-load-rng stays its own."""
    run = ("-m", "ds_reshard.run", str(SCRIPT), "--lr", "0.4", "--load", saved)
    said = torchrun(interpreter, *run, "--override-opt_param-scheduler", "--no-load-rng", ADOPT="1")
    assert said == {"lr": FIRST, "position": 12, "moments": True}


CLI = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
"""A trainer's command line that starts its own ranks, as LLaMA-Factory with FORCE_TORCHRUN=1 and swift do."""


LAUNCHERS = {
    "torchrun": "torch.distributed.run --standalone --nproc_per_node=2",
    "accelerate": "accelerate.commands.launch --use_deepspeed --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --main_process_port {port}",
    "deepspeed": "deepspeed.launcher.runner --num_gpus 2 --num_nodes 1 --master_port {port}",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_under_a_command_line_that_starts_its_own_ranks(saved: str, tmp_path: Path, launcher: str) -> None:
    """The ranks get hooks and flags by environment, and say on stderr what they made of them.

    Python itself: the interpreter that has frameworks already reads no sitecustomize.
    """
    (tmp_path / "trainer_cli.py").write_text(CLI)
    run = (sys.executable, "-m", "ds_reshard.run", "--override-opt-param-scheduler", "-m", "trainer_cli")
    ranks = ("-m", *LAUNCHERS[launcher].format(port=free_port()).split(), str(SCRIPT), "--lr", "0.4")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))), "OMP_NUM_THREADS": "1"}
    env |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        (*run, *ranks, "--load", saved), env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    said = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert said == [{"lr": FIRST, "position": 12, "moments": True}], done.stderr[-4000:]
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("ds_reshard: --override")]
    assert lines == [
        f"ds_reshard: --override-opt-param-scheduler applied to {saved}/global_step3: "
        "the first update uses lr 0.388, schedule position 12, weight_decay 0.1"
    ]


def test_ranks_of_another_environment_get_the_flags_by_the_line_of_the_error(saved: str, tmp_path: Path) -> None:
    """A command line whose ranks are given an environment without ours: told at the end, with the launch that works."""
    bare = "{k: v for k, v in os.environ.items() if k != 'PYTHONPATH' and 'DS_RESHARD' not in k}"
    (tmp_path / "trainer_cli.py").write_text("import os\n" + CLI.replace("[1:]]", f"[1:]], env={bare}"))
    run = ("-m", "ds_reshard.run", "--override-opt-param-scheduler", "-m", "trainer_cli")
    script = (str(SCRIPT), "--lr", "0.4", "--load", saved)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))), "OMP_NUM_THREADS": "1"}
    env |= {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")  # which DeepSpeed loads itself
    done = subprocess.run(
        (sys.executable, *run, *ranks, *script), env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    told = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert done.returncode == 1 and told != [{"lr": FIRST, "position": 12, "moments": True}], done.stderr[-4000:]
    line = re.search(r"another environment: torchrun \.\.\. (.*) train\.py", done.stderr)
    assert line is not None, done.stderr[-4000:]
    assert torchrun(sys.executable, *line[1].split(), *script) == {"lr": FIRST, "position": 12, "moments": True}


def test_under_deepspeeds_own_launcher(saved: str, interpreter: str) -> None:
    """`deepspeed --module ds_reshard.run` puts --local_rank before our flags."""
    launcher = Path(sys.executable).with_name("deepspeed")
    ranks = f"--master_port {free_port()} --num_gpus 1 --num_nodes 1 --module ds_reshard.run"
    ranks += " --override-opt-param-scheduler"
    command = (str(launcher), *ranks.split(), str(SCRIPT), "--lr", "0.4", "--load", saved)
    assert _launch(interpreter, *command) == {"lr": FIRST, "position": 12, "moments": True}


def test_under_accelerates_launcher(saved: str, interpreter: str) -> None:
    launcher = "-m accelerate.commands.launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no"
    ours = "--dynamo_backend no -m ds_reshard.run --no-load-lr-state"
    command = (interpreter, *launcher.split(), *ours.split(), str(SCRIPT), "--lr", "0.4", "--load", saved)
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    assert _launch(*command, **environment) == {"lr": 0.4, "position": 0, "moments": True}
