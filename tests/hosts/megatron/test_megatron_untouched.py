"""A refused load has changed nothing: no weight, no master, no value of a group, nothing of the schedule."""

from __future__ import annotations

from typing import Any

import pytest
from releases import WITH_TRAINING
from stages import CHECKPOINT, FORMATS, OVERRIDE

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("release", WITH_TRAINING)]
DECOUPLED = "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4"
SAME = {"lr": "3e-4", "min_lr": "3e-5"}
SHARDED = FORMATS["dist-sharded"]
KINDS = ("torch-sharded", "dist-fp32", "dist-sharded", "dist-reshardable")


@pytest.mark.parametrize("kind", KINDS)
def test_strict_about_bounds_of_a_groups_own(stages: Any, release: str, kind: str) -> None:
    """The schedule's own values agree; only the decoupled learning rate has changed."""
    new = f"{FORMATS[kind]} --decoupled-lr 2e-3 --decoupled-min-lr 1e-4"
    saved = f"{FORMATS[kind]} {DECOUPLED} --train-iters 8 --exit-interval 5"
    for flags in ("--strict-opt-param-scheduler", "--strict-opt-param-scheduler --no-load-optim"):
        told = stages.untouched(release, flags, options=new, saved=saved, **SAME)
        assert told["refused"] == "ScheduleMismatch" and told["changed"] == []
        assert told["where"] and all("max_lr" in where for where in told["where"])


def test_a_schedule_that_differs_without_a_flag(stages: Any, release: str) -> None:
    told = stages.untouched(release, options=SHARDED, **SAME)
    assert told["refused"] == "ScheduleMismatch" and told["changed"] == []


def test_groups_that_were_not_saved(stages: Any, release: str) -> None:
    """Two ranks say the same."""
    told = stages.untouched(release, OVERRIDE, options=f"{SHARDED} {DECOUPLED}", saved=SHARDED, ranks=2)
    assert told["refused"] == "ParamGroupMismatch" and "another number of param groups" in told["message"]
    assert told["changed"] == []


def test_groups_that_can_only_be_read_with_the_tensors(stages: Any, release: str) -> None:
    """On a store that only Megatron can read: refused at once where that is known to matter, or said to be late."""
    new = f"{SHARDED} {DECOUPLED}"
    told = stages.untouched(release, OVERRIDE, options=new, saved=SHARDED, unreadable=True)
    assert told["refused"] == "ParamGroupMismatch" and "has the checkpoint's weights already" in told["message"]
    assert any(name.startswith("weight ") for name in told["changed"])
    for flags in ("--strict-opt-param-scheduler", f"--no-load-optim {CHECKPOINT}"):
        told = stages.untouched(release, flags, options=new, saved=SHARDED, unreadable=True, train_iters="5", **SAME)
        assert told["refused"] == "UnsupportedLayout" and "cannot be read" in told["message"]
        assert told["changed"] == []
