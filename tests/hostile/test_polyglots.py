"""Files that are two things at once, and archives of which two readers would see two things: refused by name."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from archives import rebuilt

from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointDamaged, ReshardError, UnsafePickle
from ds_reshard.operations.archives import open_file


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


ONE, OTHER = saved({"a": torch.zeros(4)}), saved({"a": torch.ones(4)})


def _directory(content: bytes) -> int:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.start_dir


def _commented(content: bytes, comment: bytes) -> bytes:
    return content[:-2] + struct.pack("<H", len(comment)) + comment


def _twice() -> bytes:
    """Members of both, one after the other, and the directory of the second."""
    return ONE[: _directory(ONE)] + OTHER


def _two_directories() -> bytes:
    """The second archive's directory points into it; the first one's is still there, between them."""
    shifted = zipfile.ZipFile(stream := io.BytesIO(ONE), "a")
    with shifted, zipfile.ZipFile(io.BytesIO(OTHER)) as other:
        for entry in other.infolist():
            shifted.writestr(zipfile.ZipInfo(entry.filename), other.read(entry))
    return stream.getvalue()


POLYGLOTS: dict[str, Callable[[], bytes]] = {
    "bytes before": lambda: b"#!/bin/sh\n" + ONE,
    "a pickle before": lambda: pickle.dumps({"a": 1}) + ONE,
    "an archive before": lambda: ONE + OTHER,
    "an archive in the comment": lambda: _commented(ONE, OTHER),
    "an end record in the comment": lambda: _commented(ONE, OTHER[-22:]),
    "a second end record": lambda: ONE + ONE[-22:],
    "a second directory": lambda: ONE + ONE[_directory(ONE) :],
    "members of two": _twice,
    "the same names twice": _two_directories,
    "a pickle behind": lambda: ONE + pickle.dumps({"a": 1}),
    "zeros behind": lambda: ONE + bytes(4096),
    "a tar before": lambda: b"x".ljust(257, b"\0") + b"ustar" + bytes(250) + ONE,
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("case", POLYGLOTS)
def test_two_files_in_one_are_refused(tmp_path: Path, case: str) -> None:
    """Whichever of the two another reader takes it for; `verify` has it as a finding."""
    (tmp_path / "file.pt").write_bytes(POLYGLOTS[case]())
    with pytest.raises((CheckpointDamaged, UnsafePickle)):
        open_archive(tmp_path / "file.pt")
    assert open_file(str(tmp_path), "file.pt").faults


def test_an_archive_inside_a_member_is_bytes(tmp_path: Path) -> None:
    """Of the outer archive, whose end is at the end: what it holds is not looked at."""
    (tmp_path / "file.pt").write_bytes(rebuilt(ONE, {"notes": OTHER}))
    with open_archive(tmp_path / "file.pt") as archive:
        found = archive.load()
        assert isinstance(found, dict) and archive.tensor_bytes(found["a"]) == bytes(16)


def _wide(nbytes: int, packed: int, header: int, extra: bytes, local: bytes = b"") -> bytes:
    """An archive of one member of five bytes, whose directory entry has these sizes and this extra field."""
    name = b"file/version"
    body = (
        struct.pack("<4s5H3I2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, 5, 5, len(name), len(local)) + name + local + b"3\n   "
    )
    entry = (
        struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 45, 45, 0, 0, 0, 0, 0, packed, nbytes, len(name), len(extra), 0, 0, 0, 0, header
        )
        + name
        + extra
    )
    return body + entry + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(entry), len(body), 0)


def _field(content: bytes, kind: int = 1) -> bytes:
    return struct.pack("<HH", kind, len(content)) + content


FIVE, ZERO, ALL = struct.pack("<Q", 5), bytes(8), 0xFFFFFFFF
WIDE = {
    "as it should be": (ALL, ALL, 0, _field(FIVE + FIVE)),
    "one size of two": (ALL, 5, 0, _field(FIVE)),
    "the other size": (5, ALL, 0, _field(FIVE)),
    "more than is asked for": (ALL, 5, 0, _field(FIVE + bytes(4))),
    "half a number": (ALL, ALL, 0, _field(FIVE + FIVE + bytes(3))),
    "no number": (5, 5, 0, _field(b"")),
    "the offset alone": (5, 5, ALL, _field(ZERO)),
    "a field twice": (ALL, ALL, 0, _field(FIVE + FIVE) + _field(ZERO + ZERO)),
    "too few": (ALL, ALL, 0, _field(FIVE)),
    "cut short": (ALL, ALL, 0, _field(FIVE + FIVE)[:-3]),
    "two that differ": (ALL, ALL, 0, _field(FIVE + ZERO)),
    "an endless one": (ALL, ALL, 0, _field(b"\xff" * 16)),
}


@pytest.mark.parametrize("case", WIDE)
@pytest.mark.parametrize("local", [b"", _field(FIVE + FIVE), _field(b"\1\2\3"), _field(b"\xff" * 8)], ids=len)
def test_64_bit_sizes_of_any_form_are_a_file_or_a_fault(tmp_path: Path, case: str, local: bytes) -> None:
    """Opened or refused by name, by the reader and by what `verify` does with each file."""
    (tmp_path / "file.pt").write_bytes(_wide(*WIDE[case], local))
    try:
        with open_archive(tmp_path / "file.pt") as archive:
            assert archive.members["version"].nbytes == 5
    except ReshardError:
        assert open_file(str(tmp_path), "file.pt").faults
        return
    open_file(str(tmp_path), "file.pt")
    assert case not in ("too few", "cut short", "two that differ", "an endless one")
