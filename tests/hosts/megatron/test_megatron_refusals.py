"""What cannot be resumed as asked is a named error with the line that mends it; what is fine is reported.

On the newest release: where the releases differ is in test_megatron_loads.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from stages import CHECKPOINT, FORMATS, OVERRIDE, POSITION, SAVED, curve, row, used

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("release", ["0.19.2"])]
DECOUPLED = "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4"


def _without(stages: Any, release: str, name: str) -> Path:
    """The first stage's checkpoint without one of its entries."""
    copy: Path = stages.folder() / "copy"
    shutil.copytree(stages.first(release).folder, copy)
    stages.run(release, "small_gpt:drop", folder=str(copy), name=name)
    return copy


@pytest.mark.parametrize("flags", [CHECKPOINT, OVERRIDE, "--strict-opt-param-scheduler"])
def test_a_checkpoint_without_a_schedule(stages: Any, release: str, flags: str) -> None:
    told = stages.refused(release, flags, folder=_without(stages, release, "opt_param_scheduler"))
    assert told["error"] == "ScheduleMismatch" and "has no scheduler state" in told["message"]
    assert "--no-load-lr-state" in told["message"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (f"{OVERRIDE} {CHECKPOINT}", "--override-opt-param-scheduler with --use-checkpoint-opt-param-scheduler"),
        ("--no-load-optim --load-masters-only", "--no-load-optim with --load-masters-only"),
        (f"--override-optim-hparams lr {OVERRIDE}", "belongs to the schedule"),
        ("--override-optim-hparams betas,epsilon", "epsilon"),
        ("--reset-dataloader --dataloader-type external", "keeps its own place"),
        ("--finetune --strict-opt-param-scheduler", "contradict each other"),
    ],
)
def test_flags_that_contradict_each_other(stages: Any, release: str, flags: str, said: str) -> None:
    told = stages.refused(release, flags)
    assert told["error"] == "ConfigError" and said in told["message"] and "To mend: " in told["message"]


def test_both_spellings_are_one_flag(stages: Any, release: str) -> None:
    resumed = stages.second(release, "--override-opt-param-scheduler")[0]
    assert used(resumed, "lr") == pytest.approx([curve(POSITION, 3e-5, 2e-5)] * 2)


def test_another_models_groups(stages: Any, release: str) -> None:
    """A run with one group more than was saved is refused before anything is loaded."""
    told = stages.refused(
        release, OVERRIDE, options=f"{FORMATS['torch-fp32']} {DECOUPLED}", saved=FORMATS["torch-fp32"]
    )
    assert told["error"] == "ParamGroupMismatch" and "another number of param groups" in told["message"]


def test_the_report_is_written_where_asked(stages: Any, release: str) -> None:
    """One table in the log, and the same as JSON in a file."""
    path = stages.folder() / "report.json"
    resumed = stages.second(release, f"{OVERRIDE} --resume-report {path}")[0]
    assert json.loads(path.read_text(encoding="utf-8")) == resumed["report"]
    assert resumed["log"].count("Resumed from ") == 1
    names = {one["name"] for one in resumed["report"]["rows"]}
    assert {"iteration", "consumed samples", "position (samples)", "clip_grad", "global batch size"} <= names
    assert row(resumed, "iteration")["checkpoint"] == SAVED
