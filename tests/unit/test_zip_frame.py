"""No byte of a file of torch.save changes unseen: members by their checksums, all else by what repeats it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_reshard.containers.torch_zip_writer import plan_archive
from ds_reshard.containers.zip_directory import frame_faults
from ds_reshard.execution.checksums import Ledger
from ds_reshard.operations.archives import open_file, read_records
from ds_reshard.operations.options import Reading


def _by_torch(path: Path) -> None:
    torch.save({"a": torch.arange(5), "b": torch.zeros(3), "none": torch.zeros(0)}, path)


def _by_this_package(path: Path) -> None:
    plan = plan_archive(path.stem, {"step": 3, "name": "x"})
    content = bytearray(plan.nbytes)
    for at, data in plan.parts({}):
        content[at : at + len(data)] = data
    path.write_bytes(content)


def _found(path: Path) -> list[str]:
    file = open_file(str(path.parent), path.name)
    ledger = Ledger()
    read_records(list(file.members), ledger, Reading(threads=1, memory_nbytes=1 << 20), progress=None, subject="a test")
    return [fault.what for fault in (*file.faults, *ledger.faults, *ledger.mismatches())]


@pytest.mark.slow
@pytest.mark.parametrize("write", [_by_torch, _by_this_package])
@pytest.mark.parametrize("bits", [0x01, 0x80])
def test_no_byte_flips_unseen(tmp_path: Path, write: Callable[[Path], None], bits: int) -> None:
    """Each byte of the file in turn: headers, padding, members, descriptors, directory, end records."""
    path = tmp_path / "file.pt"
    write(path)
    whole = path.read_bytes()
    assert (list(frame_faults(str(path))), _found(path)) == ([], [])
    unseen = []
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= bits
        path.write_bytes(flipped)
        if not _found(path):
            unseen.append(at)
    assert unseen == []


def test_a_file_without_checksums_fits(tmp_path: Path) -> None:
    """torch can leave them out: nothing is wrong then, and nothing is known of the members."""
    path = tmp_path / "bare.pt"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(5)}, path)
    finally:
        torch.serialization.set_crc32_options(before)
    assert _found(path) == []
    assert {record.crc32 for record in open_file(str(tmp_path), "bare.pt").members} == {None}


def test_a_file_above_4_gib_fits(tmp_path: Path) -> None:
    """64-bit sizes in header, directory and descriptor, as torch writes them; the file is one large hole."""
    path = tmp_path / "large.pt"
    with torch.serialization.skip_data():
        torch.save({"a": torch.empty(2**32 + 64, dtype=torch.uint8)}, path)
    assert list(frame_faults(str(path))) == []
