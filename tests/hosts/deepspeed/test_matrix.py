"""Any ZeRO stage and data-parallel size into any other: every tensor, number and weight equal, to the bit.

Truth is read from the saving run's own flat partitions, in memory, before it saves. The table pairs every
saved stage with every loading stage twice, and walks through data-parallel sizes, models and options so
that each value of each column meets each value of the stages several times.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import golden
import pytest
from cases import Model, Run
from gathered import assert_same
from saves import Saves

pytestmark = pytest.mark.distributed

STAGES: tuple[int | str, ...] = (0, 1, 2, 3, "bf16")

MODELS = (
    Model(groups=2, frozen=True, batchnorm=True),
    Model(optimizer="amsgrad", tied=True),
    Model(optimizer="sgd", groups=2),
    Model(optimizer="nadam", frozen=True),
    Model(optimizer="adagrad", tied=True),
    Model(batchnorm=True, empty=True),
    Model(optimizer="plain_sgd", frozen=True),
)

OPTIONS: dict[int | str, tuple[dict[str, Any], ...]] = {
    0: ({},),
    1: ({"round_robin_gradients": True}, {}, {"parameter_alignment": True}),
    2: ({}, {"round_robin_gradients": True}, {"parameter_alignment": True}),
    3: ({}, {"sub_group_size": 60}, {"sub_group_size": 20}),
    "bf16": ({},),
}


def _rows() -> list[tuple[Run, Run, Model]]:
    rows = []
    for i, (source, target) in enumerate(product(STAGES, STAGES)):
        for variant in range(2):
            n = 2 * i + variant
            dp, other = (4, 1, 3, 2)[n % 4], (2, 3, 1, 4)[(n // 2) % 4]
            dtype = "bf16" if "bf16" in (source, target) or n % 3 else "fp32"
            of, to = OPTIONS[source], OPTIONS[target]
            model = MODELS[(n + i) % len(MODELS)]
            if source == "bf16" and model.optimizer == "adagrad":  # DeepSpeed itself fails at the first step
                model = MODELS[2]
            rows.append(
                (Run(source, dp, dtype, of[n % len(of)]), Run(target, other, dtype, to[(n + 1) % len(to)]), model)
            )
    return rows


def _name(row: tuple[Run, Run, Model]) -> str:
    return f"{row[0]}-to-{row[1]}-{row[2].optimizer}-{row[2].groups}g"


@pytest.mark.parametrize("row", _rows(), ids=_name)
def test_a_checkpoint_loads_bit_equal_under_another_stage_and_size(worlds: Any, saves: Saves, row: Any) -> None:
    """Masters, states, steps, hyper-parameters, weights, buffers and counters survive, and so does training."""
    source, target, model = row
    folder, saved = saves(source, model)
    loaded = worlds[target.dp].run("load", run=target, model=model, folder=str(folder), more=2)
    golden.check(_name(row), [rank["layouts"] for rank in loaded])
    assert_same(saved, loaded)
    assert loaded[0]["client"]["note"] == "kept"
    if not model.batchnorm:  # BatchNorm's loss depends on how many rows a rank sees
        assert loaded[0]["later"] == pytest.approx(saved[0]["later"], rel=0.02 if target.dtype == "bf16" else 1e-4)


SAME_SIZE = (
    (Run(2, 2, options={"round_robin_gradients": True}), Run(2, 2)),
    (Run(1, 3), Run(1, 3, options={"round_robin_gradients": True})),
    (Run(1, 2, options={"elastic_checkpoint": True}), Run(1, 2, options={"elastic_checkpoint": True})),
    (Run(2, 3, options={"elastic_checkpoint": True}), Run(2, 3)),
    (Run(2, 2, options={"parameter_alignment": True}), Run(2, 2)),
    (Run(1, 2), Run(1, 2, options={"parameter_alignment": True})),
    (Run(3, 2, options={"sub_group_size": 60}), Run(3, 2)),
    (Run(3, 2), Run(3, 2, options={"sub_group_size": 20})),
    (Run(1, 2), Run("bf16", 2)),
    (Run("bf16", 2), Run(1, 2)),
)


@pytest.mark.parametrize(("source", "target"), SAME_SIZE, ids=str)
def test_another_layout_at_the_same_size_is_loaded_as_another_layout(
    worlds: Any, saves: Saves, source: Run, target: Run
) -> None:
    """A toggled round-robin, alignment, elastic flag, sub-group size or wrapper is not loaded scrambled."""
    model = Model(groups=2)
    folder, saved = saves(source, model)
    loaded = worlds[target.dp].run("load", run=target, model=model, folder=str(folder))
    golden.check(f"{source} to {target}, same size", [rank["layouts"] for rank in loaded])
    if "elastic_checkpoint" in source.options:
        for rank in (*saved, *loaded):
            rank["groups"] = []
    assert_same(saved, loaded)


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("source", "target"),
    (
        (Run(2, 2, options=OFFLOADED), Run(3, 3)),
        (Run(3, 2, options=OFFLOADED), Run(1, 1)),
        (Run(1, 3), Run(2, 2, options=OFFLOADED)),
        (Run(2, 3), Run(3, 2, options=OFFLOADED)),
    ),
    ids=str,
)
def test_cpu_offloaded_optimizers_on_either_side(worlds: Any, saves: Saves, source: Run, target: Run) -> None:
    """Offload changes where partitions live, not what they hold."""
    model = Model(groups=2)
    folder, saved = saves(source, model)
    assert_same(saved, worlds[target.dp].run("load", run=target, model=model, folder=str(folder)))


@pytest.mark.parametrize("run", (Run(1, 2), Run(2, 3), Run(3, 2), Run("bf16", 2), Run(3, 3, "fp32")), ids=str)
def test_the_direct_path_on_an_unchanged_layout_equals_deepspeed(worlds: Any, saves: Saves, run: Run) -> None:
    """It gives what DeepSpeed's own load gives, losses included."""
    model = Model(groups=2, frozen=True, batchnorm=True)
    folder, saved = saves(run, model)
    plain = worlds[run.dp].run("load", run=run, model=model, folder=str(folder), hooks=False, more=2)
    direct = worlds[run.dp].run("load", run=run, model=model, folder=str(folder), more=2)
    assert_same(saved, direct)
    for one, other in zip(plain, direct, strict=True):
        assert one["later"] == other["later"]
        assert (one["path"], one["client"], one["client_keys"]) == (
            other["path"],
            other["client"],
            other["client_keys"],
        )


def test_more_ranks_than_a_group_has_elements(worlds: Any, tmp_path: Path) -> None:
    """Ranks that hold nothing but padding save and load like the others."""
    model = Model(groups=2, optimizer="amsgrad")
    saved = worlds[4].run("save", run=Run(1, 4), model=model, folder=str(tmp_path), tiny=True)
    for target in (Run(3, 3), Run(2, 1), Run(1, 2)):
        assert_same(saved, worlds[target.dp].run("load", run=target, model=model, folder=str(tmp_path), tiny=True))


def test_adagrad_at_stage_3_under_an_unchanged_layout(worlds: Any, saves: Saves) -> None:
    """DeepSpeed's own load stops: a fresh torch Adagrad has its masters in its groups already."""
    model = Model(optimizer="adagrad")
    folder, saved = saves(Run(3, 2), model)
    assert_same(saved, worlds[2].run("load", run=Run(3, 2), model=model, folder=str(folder), more=1))
