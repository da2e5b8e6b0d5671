"""Ranks that pass on what all of them read hold the same bits; what goes wrong on one is an error on all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from cases import Model, Run
from gathered import assert_same
from saves import Saves

pytestmark = pytest.mark.distributed

MODEL = Model(groups=2, frozen=True, batchnorm=True, tied=True)
ROWS = [
    (Run(1, 2), Run(2, 3), "node"),
    (Run(2, 2), Run(0, 3), "node"),
    (Run(0, 2), Run(1, 3), "all"),
    (Run(3, 2), Run(1, 3), "node"),
    (Run(1, 2), Run(3, 3), "all"),
    (Run("bf16", 2), Run("bf16", 3), "all"),
]


@pytest.mark.parametrize(("source", "target", "share"), ROWS, ids=str)
def test_shared_reads_leave_the_same_bits(worlds: Any, saves: Saves, source: Run, target: Run, share: str) -> None:
    """Proved by fingerprints, and equal to what each rank held when it saved."""
    folder, saved = saves(source, MODEL)
    told = worlds[target.dp].run("share_jobs.load_shared", run=target, model=MODEL, folder=str(folder), share=share)
    assert [rank["error"] for rank in told] == [None] * target.dp
    assert all(rank["proved"] for rank in told)
    assert_same(saved, [rank["contents"] for rank in told])


def test_what_all_ranks_read_is_read_once(worlds: Any, saves: Saves) -> None:
    """Weights are read by one rank of three; the report says what that spared."""
    folder, _ = saves(Run(1, 2), MODEL)
    read, rows = {}, {}
    for share in ("off", "node"):
        told = worlds[3].run("share_jobs.load_shared", run=Run(2, 3), model=MODEL, folder=str(folder), share=share)
        read[share], rows[share] = sum(rank["bytes_read"] for rank in told), told[0]["shared"]
    model = next(Path(folder).glob("*/mp_rank_00_model_states.pt")).stat().st_size
    assert 0 < read["off"] - read["node"] < 2 * model
    assert rows["off"] == [] and re.fullmatch(r"\d\.\d MiB, \d+ read calls and \d opens .* by 3 ranks", rows["node"][0])


def test_sharing_that_finds_nothing_to_share_says_so(worlds: Any, saves: Saves) -> None:
    """At stage 3 every rank wants other bytes of a model without buffers; the report does not keep silent."""
    folder, saved = saves(Run(3, 2), Model())
    told = worlds[3].run("share_jobs.load_shared", run=Run(3, 3), model=Model(), folder=str(folder), share="node")
    assert [(rank["error"], rank["bytes_read"] > 0) for rank in told] == [(None, True)] * 3
    assert told[0]["shared"] == ["nothing that ranks want alike, or no room for it in memory_mib"]
    assert_same(saved, [rank["contents"] for rank in told])


FAILURES = [
    ("reading", "ReadFailed", "Input/output error"),
    ("on the way", "ChecksumMismatch", "are not what was written"),
    ("leaving", "InternalError", "left in the middle"),
    ("memory", "InternalError", "no memory for a window"),
    ("group", "InternalError", "no interface to listen on"),
    ("saying nothing", "InternalError", "were not passed on to rank"),
]


@pytest.mark.parametrize(("harm", "error", "said"), FAILURES, ids=[harm for harm, _, _ in FAILURES])
def test_a_fault_of_one_rank_is_every_ranks(worlds: Any, saves: Saves, harm: str, error: str, said: str) -> None:
    """The same text on all, naming what the one rank found; none may step. The load after a rank left is sound."""
    folder, saved = saves(Run(1, 2), MODEL)
    job = {"run": Run(2, 3), "model": MODEL, "folder": str(folder), "share": "node"}
    told = worlds[3].run("share_jobs.load_shared", harm=harm, **job)
    assert [(rank["error"], rank["step"]) for rank in told] == [(error, "EngineUnusable")] * 3
    assert len({rank["text"] for rank in told}) == 1 and said in told[0]["text"]
    if harm == "leaving":
        again = worlds[3].run("share_jobs.load_shared", **job)
        assert_same(saved, [rank["contents"] for rank in again])


def test_ranks_with_other_settings_do_not_wait_for_each_other(worlds: Any, saves: Saves) -> None:
    """One rank reads for itself, the two others share."""
    folder, saved = saves(Run(1, 2), MODEL)
    told = worlds[3].run("share_jobs.load_apart", run=Run(2, 3), model=MODEL, folder=str(folder))
    assert [rank["error"] for rank in told] == [None] * 3
    assert told[0]["shared"][0].endswith("by 3 ranks")
    assert_same(saved, [rank["contents"] for rank in told])
