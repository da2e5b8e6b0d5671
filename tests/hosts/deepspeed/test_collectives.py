"""What a load costs in collectives of ds_reshard's own: four, none of which grows with the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import Model, Run
from gathered import assert_same
from grid_cases import Folders, Grid
from saves import Saves

pytestmark = pytest.mark.distributed

FOUND, READY, READ, DONE = "broadcast_object_list", *["all_gather_object"] * 3
"""What rank 0 found; every rank is ready; what every rank read, as checksums; every rank is done."""


def own(collectives: list[tuple[str, int]], stage: int | str) -> list[tuple[str, int]]:
    """Without the one barrier in which stage 3 over gloo waits for what DeepSpeed gathers: it carries no bytes."""
    barriers = [one for one in collectives if one == ("barrier", 0)]
    assert len(barriers) == (stage == 3)
    return [one for one in collectives if one not in barriers]


LAYOUTS = [
    (Run(1, 4), Run(1, 2)),
    (Run(2, 2), Run(2, 3)),
    (Run(3, 4), Run(3, 3)),
    (Run(2, 3), Run(3, 2)),
    (Run(3, 2), Run(1, 4)),
    (Run(0, 2), Run(3, 3)),
    (Run("bf16", 2), Run("bf16", 3)),
]


@pytest.mark.parametrize(("saved", "loaded"), LAYOUTS, ids=str)
@pytest.mark.parametrize("model", [Model(groups=2, frozen=True, batchnorm=True), Model(tied=True)], ids=("odd", "tied"))
def test_a_load_costs_four_collectives(worlds: Any, saves: Saves, saved: Run, loaded: Run, model: Model) -> None:
    """Also where the data-parallel size, the stage or both change, on every rank alike."""
    folder, truth = saves(saved, model)
    told = worlds[loaded.dp].run("collective_jobs.load_counted", run=loaded, model=model, folder=str(folder))
    for collectives, _ in told:
        assert [name for name, _ in own(collectives, loaded.stage)] == [FOUND, READY, READ, DONE]
    assert_same(truth, [held for _, held in told])


BF16 = Grid("pipeline", pp=2, dp=2, stage=0, dtype="bf16")
READING = [
    (Grid("moe", ep=4, dp=4), Grid("moe", ep=2, dp=4), "_expert_", 8, 0),
    (BF16, BF16, "_optim_states", 4 + 2 + 1, 2 + 1),
    (BF16, replace(BF16, dp=1), "_optim_states", 4 + 2 + 1, 2 + 2),
]


@pytest.mark.parametrize(("saved", "loaded", "files", "first", "others"), READING, ids=str)
def test_what_all_ranks_need_of_many_files_one_reads(
    worlds: Any, folders: Folders, saved: Grid, loaded: Grid, files: str, first: int, others: int
) -> None:
    """Heads of experts; slices of bf16 masters at ZeRO stage 0. Others read a head of each stage, and their shards."""
    told = worlds[loaded.ranks].run("grid_jobs.load_reading", grid=loaded, folder=str(folders(saved)))
    counts = [sum(files in name for name in names) for names in told]
    assert counts[0] <= first and max(counts[1:]) <= others, counts


CHANGED = [(Run(2, 2), Run(2, 3)), (Run(3, 2), Run(1, 3))]


def differing(
    worlds: Any, saves: Saves, saved: Run, loaded: Run, who: int | None, differs: str
) -> list[dict[str, Any]]:
    """What three ranks tell of a load, in which that of one, or of all, differs so."""
    model = Model(groups=2, frozen=True, batchnorm=True)
    given = {"run": loaded, "model": model, "folder": str(saves(saved, model)[0]), "who": who, "differs": differs}
    told: list[dict[str, Any]] = worlds[3].run("collective_jobs.load_differing", **given)
    return told


def assert_all_refuse(told: list[dict[str, Any]], collectives: list[str], why: str) -> None:
    assert [[name for name, _ in one["collectives"]] for one in told] == [collectives] * 3
    errors = {one["error"] for one in told}
    assert len(errors) == 1 and why in errors.pop()


@pytest.mark.parametrize(("saved", "loaded"), CHANGED, ids=str)
def test_all_ranks_read_at_once(worlds: Any, saves: Saves, saved: Run, loaded: Run) -> None:
    """Rank 0 tells what it lists before it reads: that takes as long as the model is large, and no rank waits."""
    told = differing(worlds, saves, saved, loaded, 0, "")
    assert [one["before"] for one in told] == [[1]] * 3


@pytest.mark.parametrize("who", (0, 2))
@pytest.mark.parametrize(("saved", "loaded"), CHANGED, ids=str)
def test_a_rank_that_reads_another_file_loads_nothing(
    worlds: Any, saves: Saves, saved: Run, loaded: Run, who: int
) -> None:
    """Every rank then says what it has read, and all raise the same; real files are those of test_ranks_differ.py."""
    told = differing(worlds, saves, saved, loaded, who, "another file")
    assert_all_refuse(told, [FOUND, READY, READY], "see different files")


@pytest.mark.parametrize("differs", ("unreadable", "unreadable, sizes too"))
@pytest.mark.parametrize("who", (None, 0, 2))
@pytest.mark.parametrize(("saved", "loaded"), [*CHANGED, (Run(2, 3), Run(2, 3))], ids=str)
def test_what_a_rank_cannot_read_no_rank_loads(
    worlds: Any, saves: Saves, saved: Run, loaded: Run, who: int | None, differs: str
) -> None:
    """Though others can: it tells why, and every rank raises that."""
    told = differing(worlds, saves, saved, loaded, who, differs)
    shards = [] if who is None else [READY]  # what the others say of theirs is compared, and told with it
    assert_all_refuse(told, [FOUND, READY, *shards], "Input/output error")


@pytest.mark.parametrize("who", (None, 0, 2))
def test_a_rank_that_cannot_say_what_it_has_read_loads_nothing(worlds: Any, saves: Saves, who: int | None) -> None:
    """Nor does any other, though all fail alike."""
    told = differing(worlds, saves, Run(2, 2), Run(2, 3), who, "says nothing")
    assert_all_refuse(told, [FOUND, READY, *([] if who is None else [READY])], "out of order")


@pytest.mark.parametrize("run", [Run(1, 2), Run(3, 2)], ids=str)
def test_an_unchanged_layout_costs_four_too(worlds: Any, saves: Saves, run: Run) -> None:
    """It goes the same way."""
    model = Model(groups=2, frozen=True, batchnorm=True)
    folder, truth = saves(run, model)
    told = worlds[2].run("collective_jobs.load_counted", run=run, model=model, folder=str(folder))
    for collectives, _ in told:
        assert [name for name, _ in own(collectives, run.stage)] == [FOUND, READY, READ, DONE]
    assert_same(truth, [held for _, held in told])


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_what_ranks_exchange_does_not_grow_with_the_model(worlds: Any, tmp_path: Path, stage: int) -> None:
    """Ten times the tensors: each rank says as much as before."""
    said = []
    for count in (4, 40):
        folder = str(tmp_path / str(count))
        worlds[2].run("collective_jobs.save_wide", run=Run(stage, 2), count=count, folder=folder)
        told = worlds[3].run("collective_jobs.load_wide", run=Run(stage, 3), count=count, folder=folder)
        told = [own(collectives, stage) for collectives in told]
        assert [[name for name, _ in collectives] for collectives in told] == [[FOUND, READY, READ, DONE]] * 3
        said.append([[nbytes for _, nbytes in collectives] for collectives in told])
    few, many = said
    for rank_few, rank_many in zip(few, many, strict=True):
        assert all(abs(one - other) <= 16 for one, other in zip(rank_few, rank_many, strict=True))
        assert max(rank_many) < 2000
