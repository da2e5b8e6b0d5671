"""Loads into buffers on a device are bit for bit those into host memory; faults of one device are every rank's."""

from __future__ import annotations

from typing import Any

import pytest
from cases import Model, Run
from gathered import assert_same
from saves import Saves

pytestmark = pytest.mark.distributed

MODEL = Model(groups=2, frozen=True, batchnorm=True, tied=True)


@pytest.mark.parametrize(
    ("source", "target", "held"),
    [(Run(1, 2), Run(3, 3), "all"), (Run(3, 2), Run(1, 2), "all"), (Run(1, 2), Run(2, 3), "weights")],
    ids=str,
)
def test_buffers_on_a_device_hold_the_same_bits(worlds: Any, saves: Saves, source: Run, target: Run, held: str) -> None:
    """Masters, states and weights, all there or the weights alone (CPU offload), proved and compared."""
    folder, saved = saves(source, MODEL)
    there = worlds[target.dp].run("device_jobs.load_there", run=target, model=MODEL, folder=str(folder), held=held)
    here = worlds[target.dp].run("fingerprint_jobs.load_proved", run=target, model=MODEL, folder=str(folder))
    assert all(rank["error"] is None and rank["scratch_nbytes"] for rank in there)
    assert [rank["proved"] for rank in there] == [rank["proved"] for rank in here]
    assert_same(saved, [rank["contents"] for rank in there])


def test_a_device_without_memory_on_one_rank_ends_the_load_on_all(worlds: Any, saves: Saves) -> None:
    """The same error with the figure on every rank, and none may step."""
    folder, _ = saves(Run(1, 2), MODEL)
    told = worlds[3].run(
        "device_jobs.load_there", run=Run(2, 3), model=MODEL, folder=str(folder), held="all", without_memory=True
    )
    assert [(rank["error"], rank["step"]) for rank in told] == [("DeviceFailed", "EngineUnusable")] * 3
    assert len({rank["text"] for rank in told}) == 1 and "1000 bytes free on the device" in told[0]["text"]
