"""What `convert` refuses: named, before anything is written, with the command that mends it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cases import Model, Run
from saves import Saves

from ds_reshard.cli.main import main
from ds_reshard.errors import ChecksumMismatch, ConfigError, ReshardError
from ds_reshard.execution import disk
from ds_reshard.operations import Options, convert, plan
from ds_reshard.operations.workspace import LOCKS, MANIFEST, lock_name, read_manifest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture
def source(saves: Saves, tmp_path: Path) -> Path:
    """A copy of a real checkpoint, whose files a test may change."""
    folder, _ = saves(Run(2, 2), Model(groups=2))
    return Path(shutil.copytree(folder, tmp_path / "source"))


def _refused(source: Path, out: Path, *words: str, to: str = "zero3", **given: Any) -> str:
    """The text of the refusal, after which nothing is there that was not."""
    before = sorted(out.parent.iterdir()) if out.parent.is_dir() else []
    with pytest.raises(ReshardError) as caught:
        convert(str(source), str(out), to=to, **given)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert (sorted(out.parent.iterdir()) if out.parent.is_dir() else []) == before
    return text


def test_places(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refused(source, source / "global_step3" / "out", "lies in the source", "name a folder apart")
    _refused(source, source / "out", "lies in the source")
    _refused(source, tmp_path, "or holds it")
    _refused(source, tmp_path / "no" / "out", "does not exist", "mkdir -p")
    (tmp_path / "there").mkdir()
    _refused(source, tmp_path / "there", "is there already", "--force")
    if os.path.ismount("/dev/shm"):
        _refused(source, Path("/dev/shm"), "is a file system of its own", options=Options(force=True))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    _refused(source, tmp_path / "out", "has 1000 bytes free", "free space")


def test_a_tag_that_no_file_can_name(source: Path, tmp_path: Path) -> None:
    """A folder whose name is no UTF-8: 'latest' could not be written when all else was."""
    name = os.fsdecode(b"step\xff3")
    (source / "global_step3").rename(source / name)
    _refused(source, tmp_path / "out", "latest: would name a tag that is no UTF-8", r"'step\udcff3'", tag=name)


def test_settings(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _refused(source, tmp_path / "out", "'zero4' is no format", "zero1 | zero2", to="zero4")
    _refused(source, tmp_path / "out", "loaded at any size", to="universal", dp=2)
    _refused(source, tmp_path / "out", "--to zero3", to="zero2", sub_group_size=9)
    _refused(source, tmp_path / "out", "more than a run has", to="zero2", dp=10**9)
    with pytest.raises(ConfigError, match="more than a run has"):
        plan(str(source), to="zero3", dp=10**12)
    little = Options(threads=4, memory_nbytes=1 << 20)
    _refused(source, tmp_path / "out", "too little for 4 threads", "--memory 4", options=little)
    for words in (["--to", "zero9"], ["--to", "zero1", "--shard", "2/2"], ["--to", "zero1", "--dp", "0"], []):
        with pytest.raises(SystemExit) as ended:
            main(["convert", str(source), str(tmp_path / "out"), *words])
        assert ended.value.code == 2
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "out"), "--to", "zero1"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert (
        main(["convert", str(source), str(tmp_path / "out"), "--to", "zero1", "--memory", "8", "--threads", "2"]) == 0
    )


@pytest.mark.parametrize(
    ("run", "model", "to", "words"),
    [
        (Run(0, 2), Model(), "zero1", ("names no parameter", "ds_reshard.auto")),
        (Run(1, 2, options={"elastic_checkpoint": True}), Model(), "zero1", ("elastic_checkpoint",)),
        (Run(1, 2), Model(optimizer="nadam"), "universal", ("mu_product", "--to zero1")),
        (Run(1, 2, "fp32"), Model(), "bf16", ("was not trained in bf16", "--to zero1")),
    ],
    ids=["stage 0", "elastic", "nadam", "fp32"],
)
def test_what_a_format_cannot_hold(
    saves: Saves, tmp_path: Path, run: Run, model: Model, to: str, words: tuple[str, ...]
) -> None:
    folder, _ = saves(run, model)
    _refused(Path(folder), tmp_path / "out", *words, to=to)


def test_weights_of_a_run_without_zero(saves: Saves, tmp_path: Path) -> None:
    """The weights are there; the masters are not known by name, and are not made up of the weights."""
    folder, _ = saves(Run(0, 2), Model())
    _refused(Path(folder), tmp_path / "out", "optimizer that names no parameter", to="safetensors", dtype="float32")
    assert convert(str(folder), str(tmp_path / "out"), to="safetensors").complete


def test_damaged_sources(source: Path, tmp_path: Path) -> None:
    """Missing, of another step, and one flipped bit in a tensor, which is found as it passes."""
    shards = sorted(source.glob("global_step3/*optim_states.pt"))
    kept = shards[1].read_bytes()
    shards[1].unlink()
    _refused(source, tmp_path / "out", "are missing")
    shards[1].write_bytes(shards[0].read_bytes())
    _refused(source, tmp_path / "out", shards[1].name)
    changed = bytearray(kept)
    changed[kept.index(b"data/1FB") + 64] ^= 1
    shards[1].write_bytes(bytes(changed))
    with pytest.raises(ChecksumMismatch):
        convert(str(source), str(tmp_path / "out"), to="zero3", dp=2)
    assert not (tmp_path / "out").exists()
    shards[1].write_bytes(kept)
    assert convert(str(source), str(tmp_path / "out"), to="zero3", dp=2).complete
    assert not (tmp_path / "out.ds-reshard").exists()


def test_another_conversions_workspace(source: Path, tmp_path: Path) -> None:
    """With --resume it must be the same; a plain run clears it; two at a time are refused."""
    convert(str(source), str(tmp_path / "out"), to="zero3", dp=2, options=Options(shard=(0, 2)))
    left = tmp_path / "out.ds-reshard"
    assert left.is_dir()
    _refused(source, tmp_path / "out", "another conversion", to="zero2", options=Options(resume=True))
    fd = disk.lock(str(left / LOCKS / lock_name((0, 1))))
    assert fd is not None
    try:
        _refused(source, tmp_path / "out", "another process works there")
    finally:
        os.close(fd)
    assert convert(str(source), str(tmp_path / "out"), to="zero2", dp=2).complete
    assert not left.exists()


def test_a_note_whose_bytes_a_crash_took(source: Path, tmp_path: Path) -> None:
    """What it told of is written anew: its file's name was on the disk, its bytes were not."""
    out = str(tmp_path / "out")
    whole = convert(str(source), str(tmp_path / "whole"), to="zero3", dp=2)
    convert(str(source), out, to="zero3", dp=2, options=Options(shard=(0, 2)))
    note = min((tmp_path / "out.ds-reshard" / "done").iterdir())
    kept = note.read_bytes()
    again = Options(resume=True, shard=(0, 2))
    assert convert(str(source), out, to="zero3", dp=2, options=again).files == 0
    for left in (b"", bytes(len(kept)), kept[: len(kept) // 2]):
        note.write_bytes(left)
        assert convert(str(source), out, to="zero3", dp=2, options=again).files > 0
        assert note.read_bytes() == kept
    note.write_bytes(b"")
    assert convert(str(source), out, to="zero3", dp=2, options=Options(resume=True)).complete
    for name in read_manifest(str(tmp_path / "whole" / MANIFEST))["files"]:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert whole.complete
