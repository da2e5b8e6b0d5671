"""Hugging Face's Trainer under a policy that is given from the start: what it saved itself is no resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("own_scheduler", [True, False], ids=["the Trainer's scheduler", "the engine's scheduler"])
def test_the_best_checkpoint_of_the_run_is_loaded_at_its_end(worlds: Any, tmp_path: Path, own_scheduler: bool) -> None:
    """`load_best_model_at_end` after training; and a resume takes the new rate at the saved position."""
    first = worlds[1].run("trainer_jobs.best_at_end", folder=str(tmp_path / "1"), own_scheduler=own_scheduler)[0]
    assert first["error"] is None, first["error"]
    assert Path(first["best"]).name == "checkpoint-6" and first["own"] == 1
    second = worlds[1].run(
        "trainer_jobs.best_at_end",
        folder=str(tmp_path / "2"),
        own_scheduler=own_scheduler,
        resume_from=str(tmp_path / "1" / "checkpoint-2"),
        lr=0.5,
    )[0]
    assert second["error"] is None, second["error"]
    assert second["own"] == 0, "what another run has saved is a resume"
    assert second["rates"][2:] == pytest.approx([50 * rate for rate in first["rates"][6:]])
    assert second["rates"][0] == pytest.approx(50 * first["rates"][4])


@pytest.mark.parametrize("policy", [{"scheduler": "override"}, {"optimizer": "skip"}, {"finetune": True}], ids=str)
def test_the_best_checkpoint_of_the_run_before_is_loaded_at_the_end(
    worlds: Any, tmp_path: Path, policy: dict[str, Any]
) -> None:
    """The Trainer remembers it through a resume that finds no better one: to load it is no resume either."""
    given = {"own_scheduler": True, "rising": True, "beside": ("transformers",)}
    first = worlds[2].run("trainer_jobs.best_at_end", folder=str(tmp_path / "1"), **given)[0]
    best = str(tmp_path / "1" / "checkpoint-2")
    assert first["error"] is None and first["best"] == best
    second = worlds[1].run(
        "trainer_jobs.best_at_end",
        folder=str(tmp_path / "2"),
        resume_from=str(tmp_path / "1" / "checkpoint-4"),
        policy=policy,
        **given,
    )[0]
    assert second["error"] is None, second["error"]
    assert second["best"] == best and second["rates"], "it trained on"
    for name, value in first["weights"].items():
        assert torch.equal(second["weights"][name], value), name
