"""Universal checkpoints, made by DeepSpeed's converter of real saves, into any stage and data-parallel size.

Truth is what the saving run held in memory, as in test_matrix.py.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from cases import Model, Run
from gathered import assert_same
from saves import UNIVERSAL, Universals

pytestmark = pytest.mark.distributed

TARGETS: tuple[int | str, ...] = (0, 1, 2, 3, "bf16")
SIZES = (1, 2, 3, 4)
SOURCES = (
    (Run(1, 2), Model(groups=2, frozen=True, batchnorm=True)),
    (Run(1, 3), Model(tied=True, empty=True)),
    (Run("bf16", 2), Model(groups=2, frozen=True)),
    (Run(2, 4), Model(groups=2, tied=True)),
    (Run(2, 1, "fp32"), Model(frozen=True, batchnorm=True)),
    (Run(2, 2, options={"parameter_alignment": True}), Model(groups=2)),
    (Run(3, 2, options={"sub_group_size": 60}), Model(groups=2, frozen=True, batchnorm=True)),
    (Run(3, 3), Model(tied=True)),
    (Run(3, 4), Model(optimizer="nadam", groups=2)),
)


def _rows() -> list[tuple[Run, Model, Run]]:
    """Every target stage at every size twice; the sources take turns."""
    rows = []
    for n, (stage, dp) in enumerate(product(TARGETS, SIZES)):
        for step in range(2):
            source, model = SOURCES[(2 * n + step + n // 9) % len(SOURCES)]
            if source.dtype == "fp32" and stage == "bf16":
                source, model = SOURCES[0]
            config = UNIVERSAL if (n + step) % 2 else {}
            rows.append((source, model, Run(stage, dp, source.dtype, config=config)))
    return rows


def _name(row: tuple[Run, Model, Run]) -> str:
    return f"{row[0]}-to-{row[2]}-{'flag' if row[2].config else 'bare'}"


@pytest.mark.parametrize("row", _rows(), ids=_name)
def test_a_universal_checkpoint_loads_bit_equal(worlds: Any, universals: Universals, row: Any) -> None:
    """Masters, states, steps, every group's hyper-parameters, weights, frozen ones, buffers, counters, and losses."""
    source, model, target = row
    folder, saved = universals(source, model)
    loaded = worlds[target.dp].run("load", run=target, model=model, folder=str(folder), more=2)
    assert_same(saved, loaded)
    assert loaded[0]["client"]["note"] == "kept"
    if not model.batchnorm:  # BatchNorm's loss depends on how many rows a rank sees
        assert loaded[0]["later"] == pytest.approx(saved[0]["later"], rel=0.02 if target.dtype == "bf16" else 1e-4)
