"""The folder in which an output is made: nothing of another conversion is taken for its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_reshard.errors import ConfigError
from ds_reshard.operations.workspace import MANIFEST, Workspace, manifest_text, read_manifest, refuse_places


def test_a_manifest_that_was_changed_is_not_believed(tmp_path: Path) -> None:
    """One digit of one entry is enough; without its checksum it is none either."""
    path = tmp_path / MANIFEST
    path.write_text(manifest_text({"files": {"a": {"nbytes": 10}}}))
    assert read_manifest(str(path)) == {"files": {"a": {"nbytes": 10}}}
    path.write_text(path.read_text().replace("10", "11"))
    with pytest.raises(ValueError, match="its checksum is"):
        read_manifest(str(path))
    path.write_text(json.dumps({"files": {}}))
    with pytest.raises(ValueError, match="none was written"):
        read_manifest(str(path))


def test_what_another_conversion_left_is_not_gone_on_with(tmp_path: Path) -> None:
    """--resume goes on behind the units of the same conversion, and refuses those of another."""
    out = str(tmp_path / "out")
    with Workspace(out, {"of": "a"}, force=False).open(resume=False, part=(0, 1)) as finished:
        assert not finished
    with Workspace(out, {"of": "a"}, force=False).open(resume=True, part=(0, 1)) as finished:
        assert not finished
    with (
        pytest.raises(ConfigError, match="left by another conversion"),
        Workspace(out, {"of": "b"}, force=False).open(resume=True, part=(0, 1)),
    ):
        pass


@pytest.mark.parametrize("after", [b"", None], ids=["without its bytes", "without its name"])
def test_a_noted_file_that_a_power_cut_has_taken_is_written_again(tmp_path: Path, after: bytes | None) -> None:
    """The note has reached the disk, and the file has not, or not the name of it."""
    workspace = Workspace(str(tmp_path / "out"), {"of": "a"}, force=False)
    with workspace.open(resume=False, part=(0, 1)):
        path = Path(workspace.path("some/file"))
        path.write_bytes(b"1234")
        workspace.note("unit", {"files": {"some/file": {"nbytes": 4, "crc32": "00000000"}}})
        assert workspace.left(["unit", "other"]) == ["other"] and len(workspace.notes(["unit"])) == 1
        path.unlink()
        if after is not None:
            path.write_bytes(after)
        assert workspace.left(["unit", "other"]) == ["unit", "other"] and workspace.notes(["unit"]) == []


@pytest.mark.parametrize("out", ["saved", "saved/out", "."])
def test_an_output_in_the_source_or_around_it_is_refused(tmp_path: Path, out: str) -> None:
    """Neither the source itself, nor a folder in it, nor one that holds it."""
    (tmp_path / "saved").mkdir()
    with pytest.raises(ConfigError, match="lies in the source"):
        refuse_places(str(tmp_path / "saved"), str(tmp_path / out), 0)
    refuse_places(str(tmp_path / "saved"), str(tmp_path / "saved-2"), 0)
