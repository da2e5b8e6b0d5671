"""What changes after Python has read it is refused, and what is read over and over ends soon."""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from payloads import text

from ds_reshard.containers.pickle_reader import Scanned, scan_file
from ds_reshard.containers.pickle_rules import PickleRules
from ds_reshard.errors import UnsafePickle
from ds_reshard.operations.pickles import refuse_unsafe_folder


def scanned(path: Path) -> Scanned:
    return scan_file(str(path), PickleRules())


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_a_directory_whose_places_change_after_they_were_read_is_unsafe(tmp_path: Path) -> None:
    """torch unpickles the place that the state had at BUILD: what it becomes later is seen by nobody else."""
    saved = tmp_path / "saved"
    dcp.save({"w": torch.ones(3), "name": "x"}, checkpoint_id=saved, no_dist=True)
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    (place,) = (place for index, place in metadata.storage_data.items() if index.fqn == "name")
    content = (saved / place.relative_path).read_bytes()
    good, bad = (place.offset, place.length), (len(content), len(_saved(1)))
    place.offset, place.length = bad
    stream = io.BytesIO()
    writer = _Watched(stream, 2)
    writer.dump(metadata)
    later = b"j" + struct.pack("<I", writer.place)
    for key, value in zip(("offset", "length"), good, strict=True):
        later += text(key) + b"J" + struct.pack("<i", value) + b"s"
    data = stream.getvalue()[:-1] + later + b"0."
    (found,) = (one for index, one in pickle.loads(data).storage_data.items() if index.fqn == "name")
    assert (found.offset, found.length) == bad
    (saved / place.relative_path).write_bytes(content + _saved(1))
    (saved / ".metadata").write_bytes(data)
    with pytest.raises(UnsafePickle, match="after a call or an object was given it"):
        refuse_unsafe_folder(str(saved))


class _Watched(pickle._Pickler):  # type: ignore[name-defined, misc]
    """Python's own; `place` is where it memoized the state of the place that does not begin the file."""

    def save(self, value: object, *args: Any, **options: Any) -> None:
        super().save(value, *args, **options)
        if isinstance(value, dict) and value.get("offset"):
            self.place = self.memo[id(value)][0]


def test_members_that_lie_over_each_other_are_not_read_over_and_over(tmp_path: Path) -> None:
    body = b"\0\0\0\xff\xff" * 200_000
    head = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 8, 0, 0, 0, len(body), 0, 1, 0) + b"a"
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 8, 0, 0, 0, len(body), 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 9, 9, 9 * len(entry), len(head + body), 0)
    (tmp_path / "file").write_bytes(head + body + 9 * entry + end)
    assert any("lie over each other" in fault.what for fault in scanned(tmp_path / "file").faults)


def test_long_texts_behind_many_instructions_end_soon(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.write(b"\x80\x02]" + b"N0" * 1_000_000)
        for _ in range(30):
            file.write(b"X" + struct.pack("<I", (1 << 20) + 1))
            file.seek((1 << 20) + 1, 1)
            file.write(b"0")
        file.write(b".")
    (fault,) = scanned(tmp_path / "file").faults
    assert fault.error == "CheckpointDamaged" and "long texts behind so many instructions" in fault.what
