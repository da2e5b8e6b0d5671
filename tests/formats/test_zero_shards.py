"""Shards of ZeRO that do not belong together are told by name: of another size, another step, or there twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from zero_builder import TAG, Built, write

from ds_reshard.formats.zero.door import list_folder
from ds_reshard.formats.zero.reader import open_checkpoint
from ds_reshard.formats.zero.shards import ZeroShards, compare_checksums
from ds_reshard.model.index import Index
from ds_reshard.operations import verify

FIRST, SECOND = (f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))


def _changed(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def rewrite(place: Path) -> None:
        saved = torch.load(place / SECOND, weights_only=False)
        change(saved["optimizer_state_dict"])
        torch.save(saved, place / SECOND)

    return rewrite


def _longer(saved: dict[str, Any]) -> None:
    (partition,) = saved["single_partition_of_fp32_groups"]
    saved["single_partition_of_fp32_groups"] = [torch.cat([partition, torch.ones(2)])]


def _later(saved: dict[str, Any]) -> None:
    (state,) = saved["base_optimizer_state"]["state"].values()
    state["step"] = state["step"] + 1


def _again(place: Path) -> None:
    torch.save(torch.load(place / FIRST, weights_only=False), place / SECOND)


def test_a_copied_shard_is_told_however_often_one_is_opened(tmp_path: Path) -> None:
    """One of the two is opened by a second index, too, as that of copies, or a rank that opens all."""
    folder = write(Built(groups=((("first", (5, 3)), ("second", (5,))),)), tmp_path / "saved")
    _again(folder / TAG)
    checkpoint = open_checkpoint(list_folder(str(folder / TAG)), optimizer=True)
    shards = ZeroShards(checkpoint=checkpoint)
    for shard in (0, 1, 1):
        Index(checkpoint.layout, shards).open("optim", shard)
    assert [SECOND in fault.line() for fault in compare_checksums(shards.checksums, "folder")] == [True]


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "another size": (_changed(_longer), "fp32 partition 0 has the wrong size"),
    "another step": (_changed(_later), "is of another step or run than"),
    "there twice": (_again, "holds the same bytes as"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_shard_that_is_no_part_of_the_save_is_told(case: str, tmp_path: Path) -> None:
    """And nothing is told of those that belong together."""
    change, said = CASES[case]
    folder = write(Built(groups=((("first", (5, 3)), ("second", (5,))),)), tmp_path / "saved")
    assert verify(str(folder)).faults == ()
    change(folder / TAG)
    told = [fault.line() for fault in verify(str(folder)).faults]
    assert any(SECOND in line and said in line for line in told), told
