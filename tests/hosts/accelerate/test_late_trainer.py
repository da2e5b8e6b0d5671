"""Hugging Face's Trainer with the hooks: as without them, on other ranks, and with another learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from late_trainer_jobs import SAVED, UPDATES

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("mode", ["none", "optimizer", "both"])
def test_trainer(worlds: Any, tmp_path: Path, mode: str) -> None:
    """The rate of each update is what it is without the hooks; resumed on three ranks, and at a tenth of the rate."""

    def run(ranks: int, folder: str, **kwargs: Any) -> Any:
        told = worlds[ranks].run("late_trainer_jobs.run", mode=mode, stage=1, folder=str(tmp_path / folder), **kwargs)
        assert all(rank == told[0] for rank in told) and told[0]["raised"] is None, told
        return told[0]["rates"]

    without = run(2, "without", hooks=False)
    rates = run(2, "with")
    assert rates == without and len(rates) == UPDATES and len({rate for (rate,) in rates}) > 4
    assert run(2, "with", resumes=True) == rates[SAVED:]
    assert run(3, "with", resumes=True) == rates[SAVED:]
    tenth = run(1, "with", resumes=True, lr=0.001, policy={"scheduler": "override"})
    assert tenth == [[pytest.approx(rate / 10)] for (rate,) in rates[SAVED:]]


@pytest.mark.parametrize("mode", ["none", "optimizer", "both"])
def test_the_checkpoints_schedule(worlds: Any, tmp_path: Path, mode: str) -> None:
    """Of DeepSpeed's scheduler in the JSON; what the Trainer builds is a function, which no checkpoint holds."""
    given = {"mode": mode, "stage": 1, "folder": str(tmp_path)}
    rates = worlds[1].run("late_trainer_jobs.run", **given)[0]["rates"]
    told = worlds[1].run("late_trainer_jobs.run", **given, resumes=True, lr=0.5, policy={"scheduler": "checkpoint"})[0]
    if mode == "both":
        assert told["raised"] is None and told["rates"] == rates[SAVED:]
    else:
        assert told["raised"] == "UnsupportedLayout" and "no checkpoint holds it" in told["text"]


@pytest.mark.parametrize("metric", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_follows_the_evaluations(worlds: Any, tmp_path: Path, metric: str) -> None:
    """On DeepSpeed's own optimizer as on torch's, where DeepSpeed alone feeds it the batch size at each update."""

    def run(mode: str, **kwargs: Any) -> Any:
        given = {"mode": mode, "stage": 1, "folder": str(tmp_path / mode), "metric": metric, **kwargs}
        return worlds[2].run("late_trainer_jobs.run", **given)[0]["rates"]

    rates = run("none", hooks=False)
    assert len(rates) == UPDATES and len({rate for (rate,) in rates}) == 3
    assert run("optimizer") == rates
    assert run("optimizer", resumes=True) == rates[SAVED:]
