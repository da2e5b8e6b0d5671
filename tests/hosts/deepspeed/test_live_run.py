"""A load asks the same of an engine and of a run that is still to come: all that decides is equal, rank by rank."""

from __future__ import annotations

from typing import Any

import pytest
from cases import Model, Run, ds_config
from live_run_jobs import asked
from saves import Saves

pytestmark = pytest.mark.distributed

TWO = Model(groups=2, frozen=True, batchnorm=True)
ALIGNED = {"round_robin_gradients": True, "parameter_alignment": True}
RUNS = [
    (Run(0, 2, "fp32"), TWO),
    (Run(0, 2, "fp16"), TWO),
    (Run(0, 2, "bf16"), Model()),
    (Run(1, 2), TWO),
    (Run(1, 3, "fp16"), TWO),
    (Run("bf16", 2), TWO),
    (Run(2, 3, options=ALIGNED), TWO),
    (Run(2, 2), Model(tied=True)),
    (Run(3, 2), TWO),
    (Run(3, 3, options={"sub_group_size": 40}), TWO),
    (Run(3, 2, "fp32"), Model(optimizer="sgd")),
]


@pytest.mark.parametrize(("run", "model"), RUNS, ids=str)
def test_a_run_that_is_foreseen_is_the_one_that_comes(
    worlds: Any, saves: Saves, foreseen: Any, run: Run, model: Model
) -> None:
    """Buffers and their masters, order, tensors, place and features; what was saved says the model.

    At stage 0 no file tells the optimizer's class, and so which states it keeps.
    """
    folder, _ = saves(run, model)
    made = foreseen._Forecasting(str(folder), foreseen.PlannedRun(config=ds_config(run), world=run.dp), None)
    made.decide()
    coming = [asked(made._plan_rank(rank).run) for rank in range(run.dp)]
    real = worlds[run.dp].run("live_run_jobs.of_engine", run=run, model=model)
    for foretold, is_so in zip(coming, real, strict=True):
        assert foretold == is_so
