"""An archive that is framed like one seen before gives what parsing it gives, or the same error."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from ds_reshard.containers.dcp_directory import AlikeArchives
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import ReshardError, UnsafePickle
from ds_reshard.model.records import TensorRecord

KIND = ("float32", (3, 5))


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def parsed(path: Path, part: tuple[int, int]) -> object:
    try:
        with open_archive(path, part=part) as archive:
            return archive.load()
    except ReshardError as error:
        return type(error), str(error)


def loaded(archives: AlikeArchives, path: Path, part: tuple[int, int]) -> object:
    try:
        return archives.load(str(path), part, KIND)
    except ReshardError as error:
        return type(error), str(error)


def learned(tmp_path: Path) -> AlikeArchives:
    """Archives that have seen one of a tensor of 3 x 5."""
    first, archives = tmp_path / "first", AlikeArchives()
    first.write_bytes(saved(torch.arange(15.0).view(3, 5)))
    assert archives.load(str(first), (0, first.stat().st_size), KIND) == parsed(first, (0, first.stat().st_size))
    return archives


def test_another_archive_is_not_parsed_and_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At another place of another file, with other values: the record has their place and their checksum."""
    archives, data = learned(tmp_path), saved(torch.randn(3, 5))
    path, part = tmp_path / "many", (100, len(data))
    path.write_bytes(b"x" * 100 + data + b"y" * 7)
    expected = parsed(path, part)
    assert isinstance(expected, TensorRecord) and expected.byte_offset > 100 and expected.storage.crc32
    monkeypatch.setattr("ds_reshard.containers.dcp_directory.open_archive", None)
    assert archives.load(str(path), part, KIND) == expected


def test_every_changed_byte_is_told_as_by_parsing(tmp_path: Path) -> None:
    """Each byte of an archive in turn: of its headers, its pickle, its tensor and its directory."""
    archives, data = learned(tmp_path), saved(torch.randn(3, 5))
    path, part, refused = tmp_path / "changed", (0, len(data)), 0
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x11]) + data[at + 1 :])
        expected = parsed(path, part)
        assert loaded(archives, path, part) == expected, at
        refused += isinstance(expected, tuple)
    assert 100 < refused < len(data)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(15.0).view(5, 3).T,
        torch.arange(30.0)[15:].view(3, 5),
        torch.arange(15).view(3, 5),
        torch.ones(15, dtype=torch.bfloat16),
        {"one": torch.arange(15.0).view(3, 5)},
        [torch.ones(3), torch.zeros(3)],
        {"step": 3},
    ],
    ids=["columns", "view", "integers", "halves", "dict", "two", "none"],
)
def test_what_is_not_alike_is_parsed(tmp_path: Path, value: object) -> None:
    """Other views, types and values under the same kind, before and after it; and without checksums."""
    archives, path = learned(tmp_path), tmp_path / "other"
    torch.serialization.set_crc32_options(False)
    bare = saved(value)
    torch.serialization.set_crc32_options(True)
    for data in (saved(value), bare):
        path.write_bytes(data)
        expected = parsed(path, (0, len(data)))
        for known in (archives, AlikeArchives()):
            for _ in range(2):
                assert repr(known.load(str(path), (0, len(data)), KIND)) == repr(expected)


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    archives, data = learned(tmp_path), saved(torch.randn(3, 5))
    path = tmp_path / "short"
    path.write_bytes(data[:-9])
    with pytest.raises(ReshardError, match="ends at"):
        archives.load(str(path), (0, len(data)), KIND)


def test_a_pickle_in_a_tensor_of_bytes_is_found_in_each_archive(tmp_path: Path) -> None:
    """The first holds zeros; the second, framed alike, a pickle that would act, which is refused as by parsing."""
    evil = b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R."
    archives, path = AlikeArchives(), tmp_path / "bytes"
    for content in (bytes(len(evil)), evil):
        data = saved(torch.frombuffer(bytearray(content), dtype=torch.uint8).clone())
        path.write_bytes(data)
        found = loaded(archives, path, (0, len(data)))
        assert found == parsed(path, (0, len(data)))
    assert isinstance(found, tuple) and found[0] is UnsafePickle
