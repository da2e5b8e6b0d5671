"""The recipes of docs/megatron.md, line by line, on checkpoints that Megatron-LM saved."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from format_jobs import ITERATION, SAMPLES_SEEN, STEP
from saved_worlds import DISTRIBUTED, GATED, TP, Saved

import ds_reshard.operations as tools
from ds_reshard.cli.main import main

PAGE = Path(__file__).resolve().parents[3] / "docs" / "megatron.md"
SECTION = PAGE.read_text(encoding="utf-8").split("## Three recipes\n")[1].split("\n## ")[0]
GROW, RESHARD, DEEPSPEED = (
    [shlex.split(line[2:]) for line in block.splitlines()]
    for block in re.findall(r"```console\n(.*?)```", SECTION, flags=re.DOTALL)
)


def _followed(lines: list[list[str]], source: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line, where `checkpoints` is the source; each ends well."""
    monkeypatch.chdir(place)
    (place / "checkpoints").symlink_to(source)
    for line in lines:
        assert line[0] == "ds-reshard" and main(line[1:]) == 0, line


def _goes_on(releases: Any, function: str, arguments: str, ranks: int) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = releases["0.19.2"].run(
        function, ranks=ranks, arguments=f"{DISTRIBUTED}{GATED}{arguments}"
    )
    return told


def test_more_tensor_parallel_ranks(saved: Saved, releases: Any) -> None:
    (line,) = GROW
    at = line.index("pretrain_gpt.py")
    asked = " ".join(line[at + 1 :]).replace("checkpoints", str(saved("gated pp2 vp2", "buckets")))
    for told in _goes_on(releases, "load_jobs:load", asked, int(line[at - 1])):
        assert (told["wrong"], told["iteration"], told["samples"]) == ([], ITERATION, SAMPLES_SEEN)
        assert told["steps"] == [STEP]


@pytest.mark.parametrize("form", ["buckets", "torch"])
def test_one_that_megatron_loads_under_any_size(
    saved: Saved, releases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    _followed(RESHARD, saved("gated tp2 pp2", form), tmp_path, monkeypatch)
    arguments = {
        "arguments": f"{DISTRIBUTED}{GATED}{TP}--ckpt-format torch_dist",
        "folder": str(tmp_path / "resharded"),
    }
    for told in releases["0.19.2"].run("format_jobs:loaded", ranks=2, **arguments):
        assert told["wrong"] == [] and told["compared"] > 1000


def test_to_deepspeed_and_back(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _followed(DEEPSPEED, saved("gated tp2 pp2", "buckets"), tmp_path, monkeypatch)
    found = tools.diff(str(tmp_path / "checkpoints"), str(tmp_path / "back"))
    assert {one.state for one in found.tensors} == {"equal"}
