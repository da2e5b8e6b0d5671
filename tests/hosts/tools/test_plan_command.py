"""`plan`: what it foretells is what a conversion then reads and writes; it reads no tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
from cases import Model, Run
from saves import Saves
from test_bad_input import TAG

from ds_reshard.cli.main import main
from ds_reshard.errors import ConfigError
from ds_reshard.formats.zero.reader import open_checkpoint
from ds_reshard.operations import convert, plan
from ds_reshard.operations.source import find_listing

pytestmark = pytest.mark.distributed

MODEL = Model(groups=2, frozen=True, tied=True)
CASES = [
    (run, to, dp)
    for run in (Run(2, 2), Run(3, 3, options={"sub_group_size": 60}), Run("bf16", 2))
    for to, dp in (("zero1", 3), ("zero3", 2), ("universal", None))
]


@pytest.mark.parametrize(("run", "to", "dp"), CASES, ids=str)
def test_a_plan_is_what_the_conversion_does(saves: Saves, tmp_path: Path, run: Run, to: str, dp: int | None) -> None:
    """Bytes read and written in all and by each file, and the files that are there afterwards."""
    folder, _ = saves(run, MODEL)
    foretold = plan(str(folder), to=to, dp=dp, bandwidth=2e9)
    done = convert(str(folder), str(tmp_path / "out"), to=to, dp=dp)
    assert (foretold.bytes_read, foretold.bytes_written) == (done.bytes_read, done.bytes_written)
    assert foretold.seconds == (done.bytes_read + done.bytes_written) / 2e9
    tag = tmp_path / "out" / TAG
    for unit in foretold.units:
        assert unit.bytes_written == sum((tag / name).stat().st_size for name in unit.files)
    written = {path.relative_to(tag).as_posix() for path in tag.rglob("*.pt")}
    assert {name for unit in foretold.units for name in unit.files} == written
    assert {name for unit in foretold.units for name in unit.reads} <= set(foretold.sources)
    assert all((folder / TAG / name).stat().st_size == size for name, size in foretold.sources.items())


def test_a_plan_from_a_universal_checkpoint(saves: Saves, tmp_path: Path) -> None:
    """Its files are sources as any others."""
    folder, _ = saves(Run(2, 2), MODEL)
    convert(str(folder), str(tmp_path / "universal"), to="universal")
    foretold = plan(str(tmp_path / "universal"), to="zero3", dp=3)
    done = convert(str(tmp_path / "universal"), str(tmp_path / "out"), to="zero3", dp=3)
    assert (foretold.bytes_read, foretold.bytes_written) == (done.bytes_read, done.bytes_written)
    assert any(name.startswith("zero/") for name in foretold.sources)


def test_planning_needs_no_torch(saves: Saves) -> None:
    """In a fresh process torch is not loaded."""
    folder, _ = saves(Run(2, 2), MODEL)
    code = (
        "import sys; from ds_reshard.operations import plan; "
        f"plan({str(folder)!r}, to='zero3', dp=5); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_parts_of_a_plan_are_the_whole(saves: Saves) -> None:
    """Of files that DeepSpeed saved: each unit once, with the same bytes from the same files."""
    folder, _ = saves(Run(3, 3, options={"sub_group_size": 60}), MODEL)
    whole = plan(str(folder), to="zero3", dp=2)
    parts = [plan(str(folder), to="zero3", dp=2, shard=(number, 3)) for number in range(3)]
    units = [unit for part in parts for unit in part.units]
    assert sorted(map(str, units)) == sorted(map(str, whole.units))


def test_a_rank_opens_the_shards_that_it_reads(worlds: Any, saves: Saves, tmp_path: Path) -> None:
    """Of 16 shards of ZeRO-3: those that hold its share, its model files, and the two that each rank compares."""
    folder, _ = saves(Run(3, 2), Model())
    convert(str(folder), str(tmp_path / "out"), to="zero3", dp=16)
    opened = worlds[2].run("load_opening", run=Run(3, 2), model=Model(), folder=str(tmp_path / "out"))
    checkpoint = open_checkpoint(find_listing(str(tmp_path / "out"), None).listing, optimizer=True)
    names = checkpoint.listing
    for rank, files in enumerate(opened):
        shards = set()
        for numel in map(prod, checkpoint.model.trainable.values()):
            half, part = -(-numel // 2), -(-numel // 16)
            shards |= {element // part for element in range(rank * half, min(numel, (rank + 1) * half))}
        wanted = {names.optim[shard] for shard in shards} | {names.model[shard] for shard in range(rank, 16, 2)}
        wanted |= {names.model[0], names.optim[0]}
        assert 8 <= len(shards) < 16
        assert {name for name in files if name.endswith(".pt")} == wanted


def test_the_command_tells_it(saves: Saves, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table or JSON; 2 for memory too small, and a rate that is none."""
    folder, _ = saves(Run(2, 2), MODEL)
    assert main(["plan", str(folder), "--to", "zero3", "--dp", "3", "--bandwidth", "0.5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (len(told["units"]), told["bandwidth"], told["files_written"]) == (6, 5e8, 6)
    assert main(["plan", str(folder), "--to", "zero3", "--dp", "3", "--shard", "1/4", "--json"]) == 0
    part = json.loads(capsys.readouterr().out)
    assert (part["shard"], part["units"]) == ([1, 4], told["units"][1::4])
    assert main(["plan", str(folder), "--to", "zero1", "--shard", "0/2"]) == 0
    assert "part 0 of 2" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", str(folder), "--to", "zero1"]) == 0
    assert "optim 1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", str(folder), "--to", "zero1", "--bandwidth", "nan"])
    with pytest.raises(SystemExit):
        main(["plan", str(folder), "--to", "zero1", "--shard", "2/2"])
    with pytest.raises(ConfigError):
        plan(str(folder), to="zip")
