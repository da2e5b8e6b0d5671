"""A load of accelerate with `strict=False`, without DeepSpeed, which would pass over whatever goes by another name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_reshard.cli.main import main

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
JOB = "accelerate_jobs.without_deepspeed"


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch"])
@pytest.mark.parametrize(
    ("saved", "loaded", "then", "now"), [("held", "plain", 2, 1), ("compiled", "plain", 1, 2), ("plain", "held", 1, 1)]
)
def test_none_of_what_is_trained_is_an_error_and_its_line_mends_it(
    worlds: Any, tmp_path: Path, saved: str, loaded: str, then: int, now: int, safe: bool
) -> None:
    """On every rank, before anything changes; what the line makes is loaded to the bit, strictly."""
    folder = tmp_path / "saved"
    (truth, *_) = worlds[then].run(JOB, wrapper=saved, folder=str(folder), safe=safe)
    given = {"wrapper": loaded, "folder": str(folder)}
    refused = worlds[now].run(JOB, strict=False, **given)
    assert len({one["error"] for one in refused}) == 1 and all(one["changed"] == [] for one in refused)
    told = refused[0]["error"]
    assert told.startswith("ModelMismatch") and "has 0 of the 4 parameters that this run trains" in told, told
    line = re.search(r"write (\{.*\}) to map\.json and put the (\S+) .* into (.*):\nds-reshard (.*)", told)
    assert line is not None, told
    (tmp_path / "map.json").write_text(line[1])
    places = {"OUT": str(tmp_path / "OUT"), "map.json": str(tmp_path / "map.json")}
    assert main([places.get(word, word) for word in line[4].split()]) == 0
    shutil.copy(tmp_path / "OUT" / line[2], line[3])
    for one in worlds[now].run(JOB, **given):
        assert one["error"] == "" and all(map(torch.equal, truth["weights"], one["weights"]))


def test_some_of_what_is_trained_is_a_warning(worlds: Any, tmp_path: Path) -> None:
    """With counts and names, by rank 0; a load of the same names says nothing."""
    worlds[2].run(JOB, wrapper="two second", folder=str(tmp_path), safe=True)
    told, other = (one["told"] for one in worlds[2].run(JOB, wrapper="two other", folder=str(tmp_path), strict=False))
    assert other == [] and len(told) == 1 and "has 2 of the 4 parameters that this run trains" in told[0]
    assert "these keep their values: other.weight, other.bias (only in the checkpoint: second.bias" in told[0]
    for one in worlds[2].run(JOB, wrapper="two second", folder=str(tmp_path), strict=False):
        assert (one["error"], one["told"]) == ("", [])
