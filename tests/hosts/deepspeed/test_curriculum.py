"""The data sampler of curriculum learning, and random-LTD: what they go on with after a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed


def test_data_that_start_anew_are_drawn_as_at_first(worlds: Any, tmp_path: Path) -> None:
    """`--reset-dataloader`: the clusters that the checkpoint names were drawn from all the same."""
    given = {"folder": str(tmp_path), "before": 0, "policy": {"dataloader": "reset"}}
    for told in worlds[2].run("curriculum_jobs.resumed", **given):
        assert told["loaded"] == (0, [], 0)
        assert told["next"] == told["first"]


@pytest.mark.parametrize("before", [0, 2])
def test_the_position_comes_back_whatever_was_drawn_before(worlds: Any, tmp_path: Path, before: int) -> None:
    """DeepSpeed lists the clusters of a state behind those that are open, and then finds no position for the last."""
    for told in worlds[2].run("curriculum_jobs.resumed", folder=str(tmp_path), before=before, policy={}):
        assert told["loaded"][0] == 3 and told["loaded"][2] == 1
        assert len(told["next"]) == 3


def test_layer_tokens_begin_anew_with_the_iteration(worlds: Any, tmp_path: Path) -> None:
    """Of random-LTD, whose tokens once at their end stay there whatever the iteration."""
    policies = [{}, {"iteration": "reset"}]
    for told in worlds[2].run("curriculum_jobs.layer_tokens", folder=str(tmp_path), policies=policies):
        assert told == [(8, 4), (8, 4), (2, 0)]
