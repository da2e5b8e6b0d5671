"""What accelerate, the Trainer, torch and scripts load beside DeepSpeed, or without it: no flag is dropped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dropped_jobs import SCRIPTS

pytestmark = pytest.mark.distributed

FLAGS = {
    "--override-opt-param-scheduler": ["--override-opt-param-scheduler"],
    "--no-load-optim": ["--no-load-optim"],
    "--resume-report": ["--resume-report", "report.json"],
}


@pytest.mark.parametrize("host", ["accelerate", "Trainer", "torch", "manager", *SCRIPTS])
def test_a_run_without_deepspeed_refuses_flags(worlds: Any, tmp_path: Path, host: str) -> None:
    """All load what torch has saved as it is, whatever the flags say; where nothing is loaded nothing is refused.

    `dcp.load` of torch, the managers of EasyR1 and verl (a synthetic class), and a script that loads its optimizer:
    also by `set_optimizer_state_dict`, which begins its states; where some are there as entries without anything, or
    as Adagrad's, before the first step.
    """
    folder = str(tmp_path / "saved")
    assert worlds[2].run("dropped_jobs.start", host=host, folder=folder, flags=["--no-load-optim"]) == ["", ""]
    for flag, given in FLAGS.items():
        told = worlds[2].run("dropped_jobs.resume", host=host, folder=folder, flags=given)
        assert {error for error, _ in told} == {"ConfigError"} and len({text for _, text in told}) == 1, told
        assert f"{flag}: " in told[0][1] and "without DeepSpeed" in told[0][1]
    assert worlds[2].run("dropped_jobs.resume", host=host, folder=folder, flags=[]) == [("", "")] * 2


def test_torchs_load_beside_deepspeed_refuses_none(worlds: Any, tmp_path: Path) -> None:
    """There the flags are those of the engine's load."""
    folder = str(tmp_path / "saved")
    worlds[2].run("unsafe_jobs.dcp_save", folder=folder)
    told = worlds[2].run("dropped_jobs.beside_deepspeed", folder=folder, flags=["--no-load-optim"])
    assert told == [("", "", False)] * 2


def test_what_the_run_itself_has_saved_is_no_resume(worlds: Any, tmp_path: Path) -> None:
    """The Trainer with FSDP loads the best of its own saves at the end of training, whatever the flags of its start."""
    told = worlds[2].run("dropped_jobs.own_save", folder=str(tmp_path / "saved"), flags=["--no-load-optim"])
    assert [own for own, _ in told] == [("", "")] * 2
    assert [error for _, (error, _) in told] == ["ConfigError"] * 2


def test_an_optimizer_beside_the_engine_refuses_flags(worlds: Any, tmp_path: Path) -> None:
    """The engine's own load follows them; what the script gives another optimizer of its own would not."""
    for number, flag in enumerate(("--no-load-lr-state", "--no-load-optim")):
        folder = str(tmp_path / str(number))
        assert worlds[1].run("dropped_jobs.beside", folder=folder, flags=[flag]) == [["", "ConfigError"]]
    assert worlds[1].run("dropped_jobs.beside", folder=str(tmp_path / "none"), flags=[]) == [["", ""]]


def test_an_optimizer_that_gets_its_own_state_does_not_resume(worlds: Any) -> None:
    """accelerate gives each optimizer its own state when it prepares it, and a script may go back to one of its run."""
    assert worlds[1].run("dropped_jobs.no_resume", flags=["--no-load-optim"]) == [["", "", ""]]


BITSANDBYTES = """
import torch

class Optimizer8bit(torch.optim.AdamW):
    def load_state_dict(self, state_dict, move_to_device=True):
        self.param_groups = state_dict["param_groups"]
"""
RESUME = """
import argparse, torch, ds_reshard, ds_reshard.auto
from bitsandbytes.optim.optimizer import Optimizer8bit
from ds_reshard.resume.policy_sources import add_arguments

optimizer = Optimizer8bit(torch.nn.Linear(2, 2).parameters())
saved = {**optimizer.state_dict(), "state": {0: {"step": 3}}}
add_arguments(argparse.ArgumentParser()).parse_args()
try:
    optimizer.load_state_dict(saved)
except ds_reshard.ConfigError as error:
    print(error)
"""


def test_an_optimizer_that_does_not_call_torchs_method_refuses_flags(tmp_path: Path) -> None:
    """A synthetic class with the load of bitsandbytes 0.50, whose own was seen to drop them."""
    (tmp_path / "bitsandbytes" / "optim").mkdir(parents=True)
    (tmp_path / "bitsandbytes" / "optim" / "optimizer.py").write_text(BITSANDBYTES)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    for flags in (["--no-load-optim"], []):
        command, environment = [sys.executable, "-c", RESUME, *flags], {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout.startswith("--no-load-optim: ") if flags else not done.stdout


BESIDE_NANOTRON = """
import argparse, nanotron.serialize, torch, ds_reshard, ds_reshard.auto
import nanotron.trainer

optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
saved = {**optimizer.state_dict(), "state": {0: {"step": torch.tensor(3.0)}}}
ds_reshard.add_arguments(argparse.ArgumentParser()).parse_args()
assert "nanotron" in {one.host for one in ds_reshard.installed() if one.state == "installed"}
try:
    optimizer.load_state_dict(saved)
except ds_reshard.ConfigError as error:
    print(error)
"""


def test_an_optimizer_of_the_scripts_own_beside_nanotrons_hooks_refuses_flags() -> None:
    """nanotron and Megatron load theirs by their own seams, which apply no flags to what a script loads itself."""
    path = os.pathsep.join(
        [str(Path(__file__).parents[1] / "nanotron_runs" / "nanotron_stand_in"), *filter(None, sys.path)]
    )
    for flags in (["--override-opt-param-scheduler"], []):
        command, environment = [sys.executable, "-c", BESIDE_NANOTRON, *flags], {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout.startswith(f"{flags[0]}: ") if flags else not done.stdout, done.stdout


SCHEDULE_ALONE = """
import argparse, torch, ds_reshard, ds_reshard.auto

optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
ds_reshard.add_arguments(argparse.ArgumentParser()).parse_args()
scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 3})
"""


def test_flags_that_a_script_parses_and_no_load_applies_are_said_at_its_end() -> None:
    """A schedule that is given its state without DeepSpeed; once, by rank 0, and the status stays the script's."""
    for flags, rank, told in ((["--no-load-lr-state"], "0", 1), (["--no-load-lr-state"], "1", 0), ([], "0", 0)):
        command, environment = [sys.executable, "-c", SCHEDULE_ALONE, *flags], {**os.environ, "RANK": rank}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        assert done.stderr.count("--no-load-lr-state: no load has applied it") == told, done.stderr


def test_an_engine_that_nobody_built_applies_no_flags(worlds: Any, tmp_path: Path) -> None:
    """DeepSpeed is hooked where anything imports it; torch's load fills what FSDP2's optimizer is then given."""
    for flags, error in ((["--no-load-optim"], "ConfigError"), ([], "")):
        folder = str(tmp_path / (error or "loaded"))
        assert worlds[2].run("dropped_jobs.beside_an_import", folder=folder, flags=flags) == [error] * 2


def test_the_trainers_hooks_alone_refuse_a_policy(worlds: Any, tmp_path: Path) -> None:
    """The hooks of DeepSpeed apply it: without them DeepSpeed would load as if nothing had been asked."""
    worlds[2].run("late_trainer_jobs.run", mode="none", stage=1, folder=str(tmp_path))
    told = worlds[2].run("dropped_jobs.unhooked", folder=str(tmp_path), policy={"optimizer": "skip"})
    assert {one["raised"] for one in told} == {"HookError"} and "ds_reshard.auto" in told[0]["text"], told
    assert worlds[2].run("dropped_jobs.unhooked", folder=str(tmp_path), policy={})[0]["raised"] is None


def test_weights_alone_leave_the_trainers_random_states_out(worlds: Any, tmp_path: Path) -> None:
    """It restores them beside the engine, where the report says that they are this run's. Its counters it keeps, and is
    told of.
    """
    given = {"mode": "optimizer", "stage": 1, "folder": str(tmp_path)}
    worlds[2].run("late_trainer_jobs.run", **given)
    for policy, changes in (({}, True), ({"finetune": True}, False)):
        told = worlds[2].run("dropped_jobs.random_states", folder=str(tmp_path), policy=policy)
        assert told == [([changes], not changes), ([changes], False)], policy


@pytest.mark.parametrize("mode", ["none", "optimizer"], ids=["its own optimizer", "DeepSpeed's optimizer"])
@pytest.mark.parametrize("policy", [{"scheduler": "override"}, {"scheduler": "reset"}, {"optimizer": "skip"}], ids=str)
def test_a_schedule_that_takes_the_saved_rates_is_refused(
    worlds: Any, tmp_path: Path, mode: str, policy: dict[str, str]
) -> None:
    """GreedyLR, which the Trainer builds and whose state holds the rates, is no scheduler of torch."""
    given = {"mode": mode, "stage": 1, "folder": str(tmp_path), "metric": "greedy", "beside": ("transformers",)}
    worlds[2].run("late_trainer_jobs.run", **given)
    told = worlds[2].run("late_trainer_jobs.run", **given, resumes=True, lr=0.001, policy=policy)
    assert {one["raised"] for one in told} == {"UnsupportedLayout"} and told[0] == told[1], told
    assert "GreedyLR" in told[0]["text"] and "the policy would be dropped" in told[0]["text"]
    kept = worlds[2].run("late_trainer_jobs.run", **given, resumes=True, policy={"scheduler": "checkpoint"})
    assert kept[0]["raised"] is None, "which takes all of the checkpoint"
