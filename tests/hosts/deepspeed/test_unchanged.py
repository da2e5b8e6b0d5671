"""An unchanged layout is loaded directly, and leaves an engine as DeepSpeed's own load does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import Model, Run

pytestmark = pytest.mark.distributed

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
RUNS = (
    *(Run(stage, dp, dtype) for stage, dp, dtype in ((0, 2, "fp32"), (0, 2, "bf16"), ("bf16", 2, "bf16"))),
    *(Run(stage, dp) for stage in (1, 2, 3) for dp in (1, 2)),
    *(Run(stage, 1, "none", config=FP16) for stage in (0, 2, 3)),
    Run(1, 2, options={"offload_optimizer": {"device": "cpu"}}),
    Run(3, 2, options={"sub_group_size": 60}),
    Run(2, 2, options={"round_robin_gradients": True}),
    Run(2, 2, config={"data_types": {"grad_accum_dtype": "fp32"}}),
)
MODEL = Model(groups=2, frozen=True, batchnorm=True, tied=True, empty=True)


def _compare(worlds: Any, run: Run, folder: Path, model: Model = MODEL, **given: Any) -> list[list[str]]:
    """The loaders of each rank; all else must be equal."""
    given = {"steps": 3, "stepped": 0, "arguments": {}, **given}
    told = worlds[run.dp].run("unchanged_jobs.compare", run=run, model=model, folder=str(folder), **given)
    assert [differ for differ, _ in told] == [{}] * run.dp
    return [loaders for _, loaders in told]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_direct_load_leaves_what_deepspeeds_own_leaves(worlds: Any, tmp_path: Path, run: Run) -> None:
    """Then, and two updates later."""
    assert _compare(worlds, run, tmp_path) == [["DeepSpeed", "ds_reshard"]] * run.dp


@pytest.mark.parametrize("run", (Run(0, 2), Run(1, 2), Run(3, 2)), ids=str)
@pytest.mark.parametrize(
    "given",
    (
        {"stepped": 2},
        {"steps": 0},
        {"arguments": {"load_lr_scheduler_states": False}},
        {"model": Model(optimizer="sgd")},
        {"model": Model(optimizer="amsgrad")},
        {"model": Model(optimizer="nadam")},
    ),
    ids=str,
)
def test_so_it_does_with_other_arguments_and_optimizers(worlds: Any, tmp_path: Path, run: Run, given: Any) -> None:
    assert _compare(worlds, run, tmp_path, **given) == [["DeepSpeed", "ds_reshard"]] * run.dp


@pytest.mark.parametrize("run", (Run(1, 2), Run(3, 2), Run("bf16", 2)), ids=str)
@pytest.mark.parametrize("kind", ("odd_blocks", "odd_per_rank", "coded"))
def test_deepspeed_loads_what_no_other_layout_could_hold(worlds: Any, tmp_path: Path, run: Run, kind: str) -> None:
    """A scale per block, a value of each rank, codes of 8 bits."""
    loaders = _compare(worlds, run, tmp_path, Model(optimizer=kind))
    assert loaders == [["DeepSpeed", "DeepSpeed"]] * run.dp
