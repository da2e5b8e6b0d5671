"""The folder in which an output is made: nothing of another conversion is taken for its own."""

from __future__ import annotations

import json
import os
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


@pytest.mark.parametrize(("resume", "part"), [(False, (0, 1)), (True, (0, 1)), (False, (0, 2))])
@pytest.mark.parametrize("done", [False, True], ids=["to be made", "there"])
def test_a_folder_that_no_conversion_made_is_not_cleared(
    tmp_path: Path, resume: bool, part: tuple[int, int], done: bool
) -> None:
    """A checkpoint may have the name that the workspace of an output has; whatever lies in it stays."""
    mine = tmp_path / "out.ds-reshard" / "global_step5" / "mp_rank_00_model_states.pt"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    if done:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / MANIFEST).write_text(manifest_text({"conversion": {"of": "a"}}))
    workspace = Workspace(str(tmp_path / "out"), {"of": "a"}, force=True)
    with pytest.raises(ConfigError, match=r"no conversion has put there: global_step5"):
        workspace.open(resume=resume, part=part).__enter__()
    assert [path for path in (tmp_path / "out.ds-reshard").rglob("*") if path.is_file()] == [mine]


def test_what_a_conversion_left_is_cleared(tmp_path: Path) -> None:
    """Every name that one leaves, killed at any moment; and what NFS names a file that is removed while it is open."""
    folder = tmp_path / "out.ds-reshard"
    for name in ("locks", "done", "out", "old"):
        (folder / name).mkdir(parents=True)
    for name in ("conversion.json", f"{os.urandom(8).hex()}.part", ".nfs0000000002"):
        (folder / name).write_bytes(b"of another")
    with Workspace(str(tmp_path / "out"), {"of": "a"}, force=False).open(resume=False, part=(0, 1)) as finished:
        assert not finished
        assert sorted(path.name for path in folder.iterdir()) == ["conversion.json", "done", "locks", "out"]


@pytest.mark.parametrize("force", [False, True])
def test_what_took_the_outputs_name_meanwhile_is_not_replaced(tmp_path: Path, force: bool) -> None:
    """A run may have begun to save there, hours after OUT was found to be free; what was converted is kept, too."""
    out, mine = tmp_path / "out", tmp_path / "out" / "global_step5" / "mp_rank_00_model_states.pt"
    workspace = Workspace(str(out), {"of": "a"}, force=force)
    with workspace.open(resume=False, part=(0, 1)):
        Path(workspace.path("some/file")).write_bytes(b"1234")
        mine.parent.mkdir(parents=True)
        mine.write_bytes(b"mine")
        if force:
            workspace.commit({"files": {}}, {})
        else:
            with pytest.raises(ConfigError, match=f"{out}: is there already(.|\n)*run again with --resume"):
                workspace.commit({"files": {}}, {})
    assert mine.exists() is not force and (out / "some" / "file").exists() is force
    if not force:
        out.rename(tmp_path / "theirs")
        with workspace.open(resume=True, part=(0, 1)):
            workspace.commit({"files": {}}, {})
        assert (out / "some" / "file").read_bytes() == b"1234"


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


def test_what_an_interrupted_conversion_has_made_is_no_source_of_that_output(tmp_path: Path) -> None:
    """It would be removed before it is read; another output may be made of it."""
    (tmp_path / "out.ds-reshard" / "out").mkdir(parents=True)
    source = str(tmp_path / "out.ds-reshard" / "out")
    with pytest.raises(ConfigError, match="is cleared, and holds the source"):
        refuse_places(source, str(tmp_path / "out"), 0)
    refuse_places(source, str(tmp_path / "out2"), 0)


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_folder_of_this_machine_is_the_same_by_its_url(tmp_path: Path, scheme: str) -> None:
    """A source by such a URL is not replaced by an output on its place; an output is given by its path."""
    (tmp_path / "saved").mkdir()
    for out in ("saved", "saved/out", "."):
        with pytest.raises(ConfigError, match="lies in the source"):
            refuse_places(f"{scheme}://{tmp_path}/saved/", str(tmp_path / out), 0)
    with pytest.raises(ConfigError, match=f"give its path, which is not a URL: {tmp_path}/out"):
        refuse_places(str(tmp_path / "saved"), f"{scheme}://{tmp_path}/out", 0)
    refuse_places(f"{scheme}://{tmp_path}/saved", str(tmp_path / "out"), 0)


def test_the_command_that_makes_the_folder_is_one_for_a_shell(tmp_path: Path) -> None:
    """A blank in the path would make two folders."""
    with pytest.raises(ConfigError, match=f"mkdir -p '{tmp_path}/no folder'"):
        refuse_places(str(tmp_path / "saved"), str(tmp_path / "no folder" / "out"), 0)
