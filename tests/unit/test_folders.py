"""What lies in a folder: absent, there, or not to be told, which is an error."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_reshard.containers import folders
from ds_reshard.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, ReadFailed


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "below" / "deep").mkdir(parents=True)
    (tmp_path / "b.pt").write_bytes(b"12345")
    (tmp_path / "a.json").write_text('{"n": 1}')
    (tmp_path / "below" / "deep" / "c.pt").write_bytes(b"1")
    (tmp_path / "nowhere").symlink_to("nothing")
    (tmp_path / "link").symlink_to("below")
    return str(tmp_path)


def test_what_is_there_is_told(place: str) -> None:
    assert folders.entries(place) == {"a.json": 8, "b.pt": 5, "below": None, "link": None, "nowhere": None}
    assert folders.files(place) == {"a.json": 8, "b.pt": 5}
    assert folders.files_below(place) == {"a.json": 8, "b.pt": 5, "below/deep/c.pt": 1}
    assert folders.is_file(f"{place}/b.pt") and not folders.is_file(f"{place}/below")
    assert folders.is_folder(f"{place}/link") and not folders.is_folder(f"{place}/b.pt")
    assert folders.read_small(f"{place}/b.pt", 2) == b"12" and folders.read_json(f"{place}/a.json") == {"n": 1}


def test_an_old_size_is_no_shorter_file(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may remember a size from before the file was written anew."""
    told = os.fstat

    def old(descriptor: int) -> os.stat_result:
        values = list(told(descriptor))
        values[6] -= 1
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", old)
    with pytest.raises(ReadFailed, match=r"b.pt: holds more than the 4 bytes that the file system said"):
        folders.read_small(f"{place}/b.pt")
    assert folders.read_small(f"{place}/b.pt", 2) == b"12"


def test_a_text_that_is_none_is_damaged(place: str) -> None:
    Path(f"{place}/b.pt").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(CheckpointDamaged, match=r"b\.pt: is no text \(expected UTF-8"):
        folders.read_text(f"{place}/b.pt")


@pytest.mark.parametrize("number", [1, 2])
def test_each_read_of_a_small_file_may_fail(place: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second asks whether there is more than the file system said."""
    own, seen = os.pread, []

    def pread(*given: int) -> bytes:
        seen.append(given)
        if len(seen) == number:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return own(*given)

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(ReadFailed, match=r"b\.pt: .*: .*Stale"):
        folders.read_small(f"{place}/b.pt")
    assert len(seen) == number


@pytest.mark.parametrize("name", ["nothing", "b.pt/in/a/file", "nowhere", "a\0b", "n" * 300])
def test_what_is_not_there_is_no_error(place: str, name: str) -> None:
    path = f"{place}/{name}"
    assert not folders.exists(path) and not folders.is_file(path) and not folders.is_folder(path)
    assert folders.exists(path, follow=False) is (name == "nowhere")


def test_a_folder_that_is_not_there_holds_nothing(place: str) -> None:
    assert folders.entries(f"{place}/nothing") == {} == folders.files_below(f"{place}/b.pt")
    with pytest.raises(CheckpointNotFound):
        folders.read_small(f"{place}/nothing")


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize(
    ("call", "look"),
    [
        ("stat", folders.exists),
        ("stat", folders.is_file),
        ("stat", folders.is_folder),
        ("stat", folders.entries),
        ("scandir", folders.entries),
        ("scandir", folders.files_below),
        ("open", folders.read_json),
    ],
)
def test_what_the_system_does_not_tell_is_an_error(
    place: str, call: str, look: Callable[[str], object], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> object:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, refused)
    with pytest.raises(ReadFailed, match=os.strerror(code)):
        look(place)


def test_a_link_that_leads_to_itself_is_an_error(place: str) -> None:
    os.symlink(f"{place}/round", f"{place}/round")
    for look in (folders.exists, folders.is_file, folders.read_small):
        with pytest.raises(ReadFailed, match="symbolic links"):
            look(f"{place}/round")
    with pytest.raises(ReadFailed, match="symbolic links"):
        folders.entries(place)


def test_a_folder_that_is_a_link_is_looked_into_once(place: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a checkpoint has on another disk is a part of it; one that leads back is no other."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "d.pt").write_bytes(b"123")
    os.symlink(elsewhere, f"{place}/zero")
    os.symlink(place, f"{place}/below/back")
    assert folders.files_below(place) == {"a.json": 8, "b.pt": 5, "below/deep/c.pt": 1, "zero/d.pt": 3}


def test_a_link_is_followed_by_url_too(place: str) -> None:
    """A run's folder may have its tags on another disk; what a link inside a checkpoint leads to is not left out."""
    pytest.importorskip("fsspec", reason="the test extra has fsspec")
    os.symlink(f"{place}/b.pt", f"{place}/below/deep/d.pt")
    url = f"file://{place}"
    folders.renew(url)
    assert folders.entries(url) == {"a.json": 8, "b.pt": 5, "below": None, "link": None}
    assert folders.is_folder(f"{url}/link") and not folders.exists(f"{url}/nowhere")
    assert folders.files_below(f"{url}/link") == {"deep/c.pt": 1, "deep/d.pt": 5}
    with pytest.raises(ReadFailed, match=f"{place}/link is a link to a folder.*give the path"):
        folders.files_below(url)


@pytest.mark.parametrize(
    ("scheme", "package", "install"),
    [
        ("s3", "fsspec", "pip install 'ds_reshard[remote]'"),
        ("memory", "fsspec", "pip install 'ds_reshard[remote]'"),
        ("s3", "s3fs", "pip install s3fs"),
        ("s3a", "s3fs", "pip install s3fs"),
        ("gs", "gcsfs", "pip install gcsfs"),
        ("gcs", "gcsfs", "pip install gcsfs"),
        ("az", "adlfs", "pip install adlfs"),
        ("abfs", "adlfs", "pip install adlfs"),
        ("abfss", "adlfs", "pip install adlfs"),
        ("hf", "huggingface_hub", "pip install huggingface_hub"),
        ("oss", "ossfs", "install the package that it names"),
    ],
)
def test_the_package_that_a_url_needs_is_named(
    monkeypatch: pytest.MonkeyPatch, scheme: str, package: str, install: str
) -> None:
    """Where it is not installed: fsspec itself, or that of the store."""
    pytest.importorskip("fsspec", reason="the test extra has fsspec")
    monkeypatch.delitem(
        sys.modules["fsspec.registry"]._registry, scheme, raising=False
    )  # a class that was imported before
    for name in [name for name in sys.modules if name.partition(".")[0] == package] or [package]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as raised:
        folders.is_folder(f"{scheme}://namespace/name/run")
    (fault,) = raised.value.faults
    assert fault.where == f"{scheme}://namespace/name/run" and fault.mend.startswith(install), fault
    assert package in fault.what or scheme == "abfss"


def test_a_store_that_cannot_be_set_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what its package says, of a key that is not given for one, and not by a kind that is not known."""
    memory = pytest.importorskip("fsspec.implementations.memory", reason="the test extra has fsspec")

    def none(*_: object, **__: object) -> None:
        raise ValueError("needs an account: https://key:secret@host/x?token=secret")

    monkeypatch.setattr(memory.MemoryFileSystem, "_get_kwargs_from_urls", none)
    with pytest.raises(ReadFailed) as raised:
        folders.is_folder("memory://somewhere")
    assert "memory://somewhere: cannot be looked at: ValueError: needs an account: https://host/x" in str(raised.value)
    assert "secret" not in str(raised.value)
