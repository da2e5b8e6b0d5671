"""A rank of another tensor-parallel size reads what it owns of a Llama that no disk here holds, from few files.

The checkpoint is synthetic (see sparse_checkpoint.py); what is expected is computed here by DeepSpeed's rules anew.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from sparse_checkpoint import llama_shapes, shard, write_tensor_parallel

from benchmarks.grid_plan import measured

LLAMA = llama_shapes(layers=6, width=256, wide=768, vocabulary=1024)


@pytest.mark.parametrize(("tp", "dp"), [(4, 3), (2, 12), (8, 4), (1, 2)])
def test_a_rank_plans_the_bytes_that_it_owns(tmp_path: Path, tp: int, dp: int) -> None:
    """Masters and moments of its partition, 12 bytes an element, and its shards of weights; copies are summed up."""
    write_tensor_parallel(tmp_path, LLAMA, 4, 4)
    local = {name: shard(name, shape, tp) for name, shape in LLAMA.items()}
    total = sum(map(prod, local.values()))
    chunk = -(-total // (2 * dp)) * 2
    for rank in range(dp):
        told = measured(str(tmp_path), tp, dp, tp - 1, rank)
        owned = max(0, min(chunk, total - rank * chunk))
        beside = told["plan"]["beside_nbytes"]
        assert told["plan"]["nbytes"] - beside == 12 * owned + 2 * total
        assert beside < 0.02 * told["plan"]["nbytes"]
        assert told["own"]["opens"] <= 4 * 4 + 4
