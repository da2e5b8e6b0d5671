"""What is not supported under another layout is refused by name; under its own it is left to DeepSpeed.

The engines are real; the feature is switched on in them by hand (synthetic: none of these runs here on CPU).
"""

from __future__ import annotations

from typing import Any

import pytest
from cases import Model, Run
from saves import Saves

pytestmark = pytest.mark.distributed

MODEL = Model()
FEATURES = {
    "model-parallel ranks in another order": "mp_world_size",
    "mixture of experts": "has_moe_layers",
    "NVMe offload": "nvme",
    "ZenFlow": "zenflow",
    "SuperOffload": "SuperOffloadOptimizer_Stage3",
    "MiCS": "MiCS_Optimizer",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_an_unsupported_feature_is_refused_by_name(worlds: Any, saves: Saves, feature: str) -> None:
    """One error, the same on every rank, naming the feature and both layouts; the engine is unchanged."""
    folder, _ = saves(Run(2, 2), MODEL)
    told = worlds[3].run(
        "refused_jobs.load_with_feature", run=Run(3, 3), model=MODEL, folder=str(folder), switch=FEATURES[feature]
    )
    assert {error for error, _ in told} == {"UnsupportedLayout"}
    assert len({text for _, text in told}) == 1
    assert feature in told[0][1] and "dp=2" in told[0][1] and "dp=3" in told[0][1] and "To mend: " in told[0][1]


@pytest.mark.parametrize("feature", ("NVMe offload", "ZenFlow", "MiCS"))
def test_an_unsupported_feature_on_its_own_layout_is_deepspeeds(worlds: Any, saves: Saves, feature: str) -> None:
    """The layout is unchanged: DeepSpeed's own method is called, whatever it makes of it, also with `always`."""
    folder, _ = saves(Run(3, 2), MODEL)
    run = Run(3, 2, config={"ds_reshard": {"reshard": {"always": True}}})
    told = worlds[2].run(
        "refused_jobs.load_with_feature", run=run, model=MODEL, folder=str(folder), switch=FEATURES[feature]
    )
    assert {error for error, _ in told} == {"original"}


def test_a_pending_decoupled_save_is_committed_first(worlds: Any, saves: Saves) -> None:
    """A checkpoint engine that writes in the background finishes before its files are read."""
    folder, _ = saves(Run(2, 2), MODEL)
    told = worlds[3].run("refused_jobs.load_after_decoupled_save", run=Run(1, 3), model=MODEL, folder=str(folder))
    assert told == [["commit", "load"]] * 3


def test_load_universal_without_latest_universal_is_deepspeeds_error(worlds: Any, saves: Saves) -> None:
    """`"load_universal": true` with a plain checkpoint and no tag: DeepSpeed says what is missing."""
    from worlds import WorkerFailed

    folder, _ = saves(Run(2, 2), MODEL)
    run = Run(2, 2, config={"checkpoint": {"load_universal": True}})
    with pytest.raises(WorkerFailed, match="latest_universal"):
        worlds[2].run("load", run=run, model=MODEL, folder=str(folder))
