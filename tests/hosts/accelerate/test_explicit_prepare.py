"""`ds_reshard.prepare` makes optimizer and scheduler in the right order, or says what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from prepare_jobs import LR

pytestmark = pytest.mark.distributed

FALLING = [[LR / (1 + step)] for step in range(3)]
TWICE = [[LR / (1 + 2 * step)] for step in range(3)]


@pytest.mark.parametrize(
    ("kind", "clock", "expected"),
    [
        ("real", None, FALLING),
        ("dummy", None, FALLING),
        ("objects", None, FALLING),
        ("real", "accelerate", TWICE),
        ("objects", "accelerate", TWICE),
        ("dummy", "engine", FALLING),
    ],
)
def test_functions_and_objects(worlds: Any, kind: str, clock: str | None, expected: list[list[float]]) -> None:
    """The rate of each update, on the clock that is asked for; each step is logged; fields have names."""
    told = worlds[2].run("prepare_jobs.explicit", kind=kind, clock=clock)[0]
    assert told["raised"] is None, told
    assert [rates[:1] for rates in told["rates"]] == [pytest.approx(rates) for rates in expected]
    steps = [line.split(" ")[1] for line in told["lines"] if line.startswith("prepare: ")]
    assert steps == ["model", "optimizer", "scheduler", "DeepSpeed"] and told["loaders"] == 1


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("twice", "PrepareError", "make a new Accelerator for each model"),
        ("no function", "PrepareError", "optimizer=lambda params: ..."),
        ("wrong", "PrepareError", "the function gave a Linear"),
    ],
)
def test_what_cannot_be_prepared(worlds: Any, kind: str, error: str, text: str) -> None:
    for told in worlds[2].run("prepare_jobs.explicit", kind=kind):
        assert told["raised"] == error and text in told["text"]


def test_two_clocks_that_differ_are_an_error(worlds: Any) -> None:
    told = worlds[2].run("prepare_jobs.explicit", kind="dummy", clock="engine", said="accelerate")[0]
    assert told["raised"] == "ConfigError" and "given in two places and differs" in told["text"]


def test_an_unknown_clock_is_an_error(worlds: Any) -> None:
    told = worlds[2].run("prepare_jobs.explicit", kind="dummy", clock="engin")[0]
    assert told["raised"] == "ConfigError" and "'engin'" in told["text"]
