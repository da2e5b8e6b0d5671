"""A rank of another grid plans and reads what it owns of a Llama that no disk here holds, from few files.

The checkpoint is synthetic (see sparse_checkpoint.py); what is expected is computed here by DeepSpeed's rules anew.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from sparse_checkpoint import by_layers, shard

from benchmarks.grid_plan import READ, SMALL, Sizes, measured, ratios, write


@pytest.mark.parametrize("to", [Sizes(4, 3), Sizes(2, 12), Sizes(8, 4), Sizes(1, 2)], ids=str)
def test_a_rank_plans_the_bytes_that_it_owns(tmp_path: Path, to: Sizes) -> None:
    """Masters and moments of its partition, 12 bytes an element, and its shards of weights; copies are summed up."""
    write(tmp_path, SMALL, Sizes(4, 4))
    total = sum(prod(shard(name, shape, to.tp)) for name, shape in SMALL.items())
    chunk = -(-total // (2 * to.dp)) * 2
    for rank in range(to.dp):
        told = measured(str(tmp_path), to, to.tp - 1, 0, rank)
        owned = max(0, min(chunk, total - rank * chunk))
        beside = told["plan"]["beside_nbytes"]
        assert told["plan"]["nbytes"] - beside == 12 * owned + 2 * total == told["plan"]["owned_nbytes"]
        assert beside < 0.02 * told["plan"]["nbytes"]
        assert told["own"]["opens"] <= 4 * 4 + 4


@pytest.mark.parametrize("to", [Sizes(2, 3, 2), Sizes(8, 1, 3)], ids=str)
def test_a_rank_of_a_stage_plans_the_bytes_of_its_own_layers(tmp_path: Path, to: Sizes) -> None:
    layers = by_layers(SMALL)
    write(tmp_path, SMALL, Sizes(4, 2, 3))
    count = 1 + max(int(name.split(".")[0]) for name in layers)
    for stage in range(to.pp):
        own = {
            name: shard(name, shape, to.tp)
            for name, shape in layers.items()
            if int(name.split(".")[0]) // -(-count // to.pp) == stage
        }
        told = measured(str(tmp_path), to, to.tp - 1, stage, 0)
        total = sum(map(prod, own.values()))
        chunk = -(-total // (2 * to.dp)) * 2
        assert told["plan"]["nbytes"] - told["plan"]["beside_nbytes"] == 12 * min(chunk, total) + 2 * total
        assert told["plan"]["beside_nbytes"] < 0.02 * told["plan"]["nbytes"]


@pytest.mark.parametrize(("saved", "to"), READ, ids=str)
def test_a_rank_asks_the_system_for_little_more_than_it_owns(tmp_path: Path, saved: Sizes, to: Sizes) -> None:
    """With as many tensor-parallel ranks for at most 1.02 of it; where rows are cut anew for at most the rows."""
    write(tmp_path, SMALL, saved)
    found = ratios(str(tmp_path), to)
    assert max(found) <= (1.02 if saved.tp == to.tp else 2), found
    assert len(found) == to.dp * (to.pp or 1)
