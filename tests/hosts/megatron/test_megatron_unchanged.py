"""An unchanged layout is read straight from its files, too, and leaves all that Megatron's own load leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forks import Failed
from format_jobs import OPERATIONS
from releases import EVERY, TRAINED
from small_gpt import _same
from test_megatron_load import CELLS, FORMS, _arguments

pytestmark = pytest.mark.slow
SIDES = sorted({(cell.model, *side) for cell in CELLS for side in (cell.saved, cell.loaded)})
FEW = [("B", "tp2pp2", "sharded"), ("M", "ep2pp2", "sharded"), ("BT", "pp2", "sharded"), ("B", "dp2", "bf16")]
FLAGS = ("", "--no-load-optim", "--finetune", "--data-parallel-random-init", "--no-load-rng")
HELD = ("argument load", "argument save", "argument rank", "argument ds_reshard")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("model", "topology", "optimizer"), SIDES if EVERY else FEW)
@pytest.mark.parametrize("release", TRAINED)
def test_all_is_as_megatron_leaves_it(
    releases: Any, release: str, model: str, topology: str, optimizer: str, form: str, tmp_path: Path
) -> None:
    """Weights, masters, moments, groups, schedule, counters, arguments and generators of every rank, bit for bit."""
    arguments, ranks = _arguments(model, (topology, optimizer))
    runs = {"ranks": ranks, "saves": [{"save": str(tmp_path), **FORMS[form]}], "stirred": True}
    try:
        releases[release].run("format_jobs:save", arguments=arguments, **runs)
    except Failed:
        pytest.skip("Megatron-LM itself saves no such state")
    for flags in FLAGS if EVERY else ("",):
        job = {"ranks": ranks, "arguments": f"{arguments}--load {tmp_path} {flags}"}
        try:
            own = releases[release].run("load_jobs:everything", hooks=False, **job)
        except Failed:
            continue  # what Megatron-LM itself does not load
        told = releases[release].run("load_jobs:everything", **job)
        for rank, (one, other) in enumerate(zip(own, told, strict=True)):
            assert one["told"]["returned"][1] == other["told"]["returned"][1] == OPERATIONS
            names = one["told"].keys() & other["told"].keys() - set(HELD)
            assert {name for name in one["told"] if not name.startswith("argument ")} <= names
            differ = [name for name in sorted(names) if not _same(one["told"][name], other["told"][name])]
            assert differ == [], (rank, flags, differ)
        rows = {row["name"]: row for row in told[0]["report"]["rows"]}
        assert rows["tensors read by"]["used"] == "ds_reshard", rows["tensors read by"]
