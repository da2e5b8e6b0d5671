"""Files of torch.save open without torch, and say of tensors what torch.load makes of them."""

from __future__ import annotations

import decimal
import os
import random
import re
import zipfile
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from torch.utils.serialization import config
from torch_values import DTYPES, TREES, same

from ds_reshard.containers import torch_zip, zip_directory
from ds_reshard.containers.digests import digests
from ds_reshard.containers.pickle_rules import PickleRules
from ds_reshard.containers.positioned import PositionedBytes, PositionedFile, PositionedView
from ds_reshard.containers.torch_zip import Twins, digest_of, open_archive
from ds_reshard.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ChecksumMismatch,
    ReadFailed,
    TrustRequired,
    UnsupportedLayout,
)
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, StorageRecord


def saved(tmp_path, value: object, name: str = "file.pt") -> str:
    path = str(tmp_path / name)
    torch.save(value, path)
    return path


def loaded(path: str) -> object:
    with open_archive(path) as archive:
        return archive.load()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type(tmp_path, dtype):
    path = saved(tmp_path, {"a": torch.arange(6).to(dtype), "b": torch.arange(6).to(dtype).reshape(2, 3).t()[1:]})
    assert same(loaded(path), torch.load(path, weights_only=True))


@settings(max_examples=80)
@given(tree=TREES)
def test_trees_of_tensors_say_what_torch_load_makes(tmp_path_factory, tree):
    path = saved(tmp_path_factory.mktemp("tree"), tree)
    assert same(loaded(path), torch.load(path, weights_only=True))


def _both_ways(path: str, monkeypatch) -> list[object]:
    """What the directory says, read by columns and by a loop; None where it is refused."""
    found: list[object] = []
    for many in (1, 1 << 40):
        monkeypatch.setattr(zip_directory, "_MANY", many)
        with PositionedFile(path) as file:
            try:
                root, members = zip_directory.read_members(file, 1 << 30)
            except CheckpointDamaged:
                found.append(None)
            else:
                found.append((root, list(members.items())))
    return found


@pytest.mark.parametrize("sizes", ([0] * 5000, [*range(0, 3000, 37)], [20_000, 0, 300, 70_000] * 20))
@pytest.mark.parametrize("crc32", (True, False))
def test_many_members_are_read_at_once(tmp_path, monkeypatch, sizes, crc32):
    """Near headers and far ones: the same as one by one, and without that loop."""
    torch.serialization.set_crc32_options(crc32)
    try:
        path = saved(tmp_path, [torch.ones(size) for size in sizes])
    finally:
        torch.serialization.set_crc32_options(True)
    one, other = _both_ways(path, monkeypatch)
    assert one == other is not None
    monkeypatch.setattr(zip_directory, "_MANY", 64)
    monkeypatch.setattr(zip_directory, "_entries", None)
    assert len(loaded(path)) == len(sizes)


def test_whatever_is_changed_both_ways_say_the_same(tmp_path, monkeypatch):
    path = saved(tmp_path, [torch.ones(size) for size in range(70)])
    data = Path(path).read_bytes()
    told = [one.start() for what in (b"PK\x01\x02", b"PK\x03\x04") for one in re.finditer(what, data)]
    accepted = 0
    for start in (*told[:2], told[40], told[72], *told[-2:]):
        for at, value in product(range(start, start + 100), (0, 1, 8, 0x2E, 0x2F, 0x5C, 0xFF)):
            Path(path).write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
            one, other = _both_ways(path, monkeypatch)
            assert one == other, (at, value)
            accepted += one is not None
    assert 500 < accepted < 3500  # times, versions, attributes and padding say nothing


@pytest.mark.parametrize("count", [1, 100])
def test_a_member_that_torch_takes_for_a_folder_is_refused(tmp_path, count):
    """Its tensor would be memory as it was left there (torch 2.13), and the file's bytes here."""
    path = saved(tmp_path, [torch.ones(3) for _ in range(count)])
    data = bytearray(Path(path).read_bytes())
    data[data.rindex(b"PK\x01\x02", 0, data.rindex(b"/data/0")) + 38] |= 0x10
    Path(path).write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="has the attribute of a folder"):
        loaded(path)


def test_tensors_that_share_a_storage_share_its_record(tmp_path):
    base = torch.arange(12.0)
    found = loaded(saved(tmp_path, [base, base[3:], base.view(3, 4)]))
    assert found[0].storage is found[1].storage is found[2].storage
    assert found[1].element_offset == 3


def test_sizes_devices_element_types_and_bare_storages(tmp_path):
    value = [torch.Size([1, 2]), torch.float16, torch.device("cpu"), torch.UntypedStorage(5)]
    size, dtype, device, storage = loaded(saved(tmp_path, value))
    assert (size, dtype) == ((1, 2), GlobalName(module="torch", name="float16"))
    assert (str(device.callable), device.args) == ("torch.device", ("cpu",))
    assert isinstance(storage, StorageRecord)
    assert (storage.dtype, storage.nbytes) == (ElementType.UINT8, 5)


def test_tensors_with_attributes_lose_them(tmp_path):
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(3))
    tensor.note = "kept by torch"
    parameter.ds_id = 4
    first, second = loaded(saved(tmp_path, [tensor, parameter]))
    assert (first.shape, second.shape, second.requires_grad) == ((2,), (3,), True)


def test_tensors_that_a_record_cannot_say_stay_calls(tmp_path):
    """A lazy conjugate has other values than its storage; sparse tensors have no one storage."""
    found = loaded(saved(tmp_path, [torch.ones(2, dtype=torch.complex64).conj(), torch.eye(2).to_sparse()]))
    assert [type(value) for value in found] == [ObjectRecord, ObjectRecord]


def test_bytes_read_are_kilobytes_of_a_large_file(tmp_path, monkeypatch):
    path = saved(tmp_path, {f"layer{i}": torch.zeros(400_000) for i in range(8)})
    sizes, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: sizes.append(nbytes) or pread(fd, nbytes, at))
    loaded(path)
    assert os.path.getsize(path) > 12_000_000 and 0 < sum(sizes) < 40_000


def test_root_is_the_name_under_which_it_was_saved(tmp_path):
    path = saved(tmp_path, 1, "zero_pp_rank_0_optim_states.pt")
    os.rename(path, tmp_path / "renamed.pt")
    with open_archive(tmp_path / "renamed.pt") as archive:
        assert archive.root == "zero_pp_rank_0_optim_states"


def test_tensor_bytes_are_those_that_were_saved(tmp_path):
    path = saved(tmp_path, {"a": torch.arange(10), "t": torch.ones(2, 3).t(), "e": torch.empty(0)})
    with open_archive(path) as archive:
        found = archive.load()
        assert archive.tensor_bytes(found["a"]) == torch.arange(10).numpy().tobytes()
        assert archive.read(f"data/{found['a'].storage.key}") == torch.arange(10).numpy().tobytes()
        assert archive.tensor_bytes(found["e"]) == b""
        with pytest.raises(UnsupportedLayout, match="not contiguous"):
            archive.tensor_bytes(found["t"])


def test_changed_bytes_of_a_tensor_are_found_when_read_whole(tmp_path):
    path = saved(tmp_path, torch.arange(10))
    record = loaded(path)
    with open(path, "r+b") as file:
        file.seek(record.byte_offset + 3)
        file.write(b"\x01")
    with open_archive(path) as archive, pytest.raises(ChecksumMismatch, match="storage '0': expected crc32"):
        archive.tensor_bytes(archive.load())


def test_files_without_checksums_have_none(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path, torch.ones(3))
    finally:
        torch.serialization.set_crc32_options(True)
    with open_archive(path) as archive:
        assert {member.crc32 for member in archive.members.values()} == {None}
        record = archive.load()
        assert record.storage.crc32 is None
        assert archive.tensor_bytes(record) == torch.ones(3).numpy().tobytes()


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_any_storage_alignment(tmp_path, alignment):
    with config.patch("save.storage_alignment", alignment):
        path = saved(tmp_path, [torch.ones(3), torch.arange(5)])
    found = loaded(path)
    assert same(found, torch.load(path, weights_only=True))
    assert [tensor.byte_offset % alignment for tensor in found] == [0, 0]


def test_absent_byteorder_means_little_and_big_is_refused(tmp_path):
    path = str(tmp_path / "file.pt")
    torch.save(torch.ones(2), path, _disable_byteorder_record=True)
    assert loaded(path).shape == (2,)
    with open(saved(tmp_path, 1), "r+b") as file:
        data = file.read().replace(b"little", b"bigbig")
        file.seek(0)
        file.write(data)
    with pytest.raises(ChecksumMismatch):
        open_archive(path)


def test_files_that_are_not_there_or_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(CheckpointNotFound, match=r"none\.pt"):
        open_archive(tmp_path / "none.pt")
    with pytest.raises(CheckpointDamaged, match="not a regular file"):
        open_archive(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointDamaged, match="not a regular file"):
        open_archive(tmp_path / "pipe")
    with open_archive(saved(tmp_path, torch.ones(3))) as archive:
        record = archive.load()
    with pytest.raises(ReadFailed, match="cannot be read"):
        archive.tensor_bytes(record)


@pytest.mark.parametrize("nbytes", [10, 9000, 20000])
def test_bytes_are_those_of_the_file_wherever_they_lie(tmp_path, nbytes):
    """Also of a part of it, and near its ends, which are read once; what lies outside is refused."""
    data = random.Random(nbytes).randbytes(nbytes)
    (tmp_path / "file").write_bytes(b"before" + data + b"behind")
    places = {0, 1, 5, 8191, 8192, 8193, nbytes - 8193, nbytes - 8192, nbytes - 8191, nbytes - 3, nbytes}
    with PositionedFile(str(tmp_path / "file"), (6, nbytes)) as file:
        for view in (file, PositionedView(file, 0, nbytes), PositionedBytes("file", data)):
            for start, stop in product(sorted(at for at in places if 0 <= at <= nbytes), repeat=2):
                if start <= stop:
                    assert view.read(start, stop - start) == data[start:stop]
        for start, length in ((-1, 5), (-7, 8), (nbytes - 2, 3), (nbytes + 1, 0), (5, -1)):
            with pytest.raises(CheckpointDamaged, match="are meant to be there"):
                file.read(start, length)


def test_a_closed_archive_holds_no_file_open(tmp_path):
    path = saved(tmp_path, 1)
    before = sorted(os.listdir("/proc/self/fd"))
    open_archive(path).close()
    (tmp_path / "bad.pt").write_bytes(b"PK\x03\x04 and nothing else")
    with pytest.raises(CheckpointDamaged):
        open_archive(tmp_path / "bad.pt")
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_file_that_shrinks_while_it_is_open_is_damage(tmp_path):
    path = saved(tmp_path, torch.zeros(100_000))
    with open_archive(path) as archive:
        record = archive.load()
        os.truncate(path, 10_000)
        with pytest.raises(CheckpointDamaged, match="shrank"):
            archive.tensor_bytes(record)


RULES = PickleRules()


def twin(tmp_path, twins, value, name):
    with open_archive(saved(tmp_path, value, name)) as archive:
        return archive.load(rules=RULES, twins=twins)


def test_what_files_pickle_alike_is_made_once(tmp_path):
    """The model files of ZeRO stage 3: the same pickle beside storages without bytes."""
    value, twins = {"step": 3, "module": {"a": torch.ones(0), "b": torch.ones(0)}}, Twins()
    first = twin(tmp_path, twins, value, "rank_0.pt")
    others = [twin(tmp_path, twins, {**value, "gpu": number}, f"rank_{number}.pt") for number in range(1, 16)]
    assert twin(tmp_path, twins, value, "rank_16.pt") is first
    assert twin(tmp_path, twins, {**value, "gpu": 15}, "rank_31.pt") is others[-1]
    other = twin(tmp_path, twins, {**value, "step": 4}, "rank_1.pt")
    assert (first["step"], other["step"]) == (3, 4)
    assert other["module"]["a"].storage.path == str(tmp_path / "rank_1.pt")


@pytest.mark.parametrize("advice", ("taken", "refused", "unknown"))
def test_headers_that_lie_apart_are_announced_before_the_first_of_them_is_read(tmp_path, monkeypatch, advice):
    """A disk or a server has a latency for each read, and then fetches them all at once; it is no more than advice."""
    path = saved(tmp_path, [*(torch.ones(5000) for _ in range(50)), *(torch.ones(1) for _ in range(50))])
    expected, calls, pread = loaded(path), [], os.pread

    def read(descriptor: int, nbytes: int, offset: int) -> bytes:
        calls.append(("read", offset, nbytes))
        return pread(descriptor, nbytes, offset)

    def advise(descriptor: int, offset: int, nbytes: int, what: int) -> None:
        calls.append(("announced", offset, nbytes))
        if advice == "refused":
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "pread", read)
    if advice == "unknown":
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    else:
        monkeypatch.setattr(os, "posix_fadvise", advise, raising=False)
        monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    assert loaded(path) == expected
    announced = [offset for what, offset, _ in calls if what == "announced"]
    if advice != "taken":
        assert len(announced) == (advice == "refused")
        return
    with open_archive(path) as archive:
        headers = [one.header_offset for one in archive.members.values()]
    kinds = [what for what, *_ in calls]
    first = kinds.index("announced")
    assert set(kinds[first : first + len(announced)]) == {"announced"}
    read_after = {offset for what, offset, _ in calls[first:] if what == "read"}
    assert len(read_after.intersection(announced)) > 45
    assert 50 < len(announced) < 60 and all(any(at <= header < at + 4096 for at in announced) for header in headers)


def test_a_digest_tells_files_apart_that_say_or_hold_anything_else(tmp_path):
    """A copy on another node has the same; another value, another size of a tensor, or another name has not."""
    values = {"a/r.pt": 1, "b/r.pt": 1, "c/r.pt": 2, "d/s.pt": 1}
    with digests() as found:
        for name, value in values.items():
            (tmp_path / name).parent.mkdir()
            loaded(saved(tmp_path, {"step": value, "module": torch.ones(value)}, name))
    with digests() as others:
        pass
    first, copy, other, renamed = (found[str(tmp_path / name)] for name in values)
    assert first == copy and len({first, other, renamed}) == 3 and not others
    data = bytearray((tmp_path / "b/r.pt").read_bytes())
    with open_archive(tmp_path / "b/r.pt") as archive:
        at = archive.members["data/0"].entry_offset + 16  # the tensor's checksum in the directory
    data[at] ^= 1
    (tmp_path / "b/r.pt").write_bytes(data)
    with digests() as found:
        loaded(str(tmp_path / "b/r.pt"))
    assert found[str(tmp_path / "b/r.pt")] == digest_of(str(tmp_path / "b/r.pt")) != first


def test_what_lies_in_another_file_is_no_twin(tmp_path):
    twins = Twins()
    paths = [twin(tmp_path, twins, torch.ones(2), name).storage.path for name in ("rank_0.pt", "rank_1.pt")]
    assert paths == [str(tmp_path / "rank_0.pt"), str(tmp_path / "rank_1.pt")]


def test_a_twin_is_judged_by_its_own_rules_members_and_checksum(tmp_path):
    """Trust that one load was given is no other's; a storage without its member, or a flipped bit, is found in each."""
    value, twins = {"module": torch.ones(0), "kept": decimal.Decimal(1)}, Twins()
    path = saved(tmp_path, value, "rank_0.pt")
    with open_archive(path) as archive:
        archive.load(rules=PickleRules(["decimal.Decimal"]), twins=twins)
        with pytest.raises(TrustRequired):
            archive.load(rules=RULES, twins=twins)
    plain = twin(tmp_path, twins, {"module": torch.ones(0)}, "rank_1.pt")
    data = bytearray((tmp_path / "rank_1.pt").read_bytes())
    at = data.index(b"module")
    data[at] ^= 1
    (tmp_path / "rank_2.pt").write_bytes(data)
    with open_archive(tmp_path / "rank_2.pt") as archive, pytest.raises(ChecksumMismatch):
        archive.load(rules=RULES, twins=twins)
    with zipfile.ZipFile(tmp_path / "rank_1.pt") as whole, zipfile.ZipFile(tmp_path / "rank_3.pt", "w") as part:
        for member in whole.infolist():
            if not member.filename.endswith("/data/0"):
                part.writestr(member, whole.read(member))
    with open_archive(tmp_path / "rank_3.pt") as archive, pytest.raises(CheckpointDamaged, match="no bytes in"):
        archive.load(rules=RULES, twins=twins)
    assert twin(tmp_path, twins, {"module": torch.ones(0)}, "rank_4.pt") is plain


def test_a_directory_without_end_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_zip, "_DIRECTORY_NBYTES", 10)
    with pytest.raises(CheckpointDamaged, match="at most 10 are read"):
        open_archive(saved(tmp_path, 1))


def test_torchscript_is_refused_by_name(tmp_path):
    path = str(tmp_path / "script.pt")
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), path)
    with pytest.raises((UnsupportedLayout, CheckpointDamaged), match=r"TorchScript|compressed"):
        open_archive(path)
