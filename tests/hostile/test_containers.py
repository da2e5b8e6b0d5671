"""Hostile files: nothing is run or imported, nothing costs more than its size, every lie is a ReshardError."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable

import pytest
import torch
from listener import heard
from payloads import Attack, call, text

from ds_reshard.containers import zip_directory
from ds_reshard.containers.pickle_engine import Reading
from ds_reshard.containers.pickle_reader import keep_as_record, read_pickle, scan_file
from ds_reshard.containers.pickle_rules import ALLOW_ALL, PickleRules
from ds_reshard.containers.pickle_tokens import PickleLimits
from ds_reshard.containers.revive import revive
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import CheckpointDamaged, ChecksumMismatch, ReshardError, UnsafePickle
from ds_reshard.model.records import ObjectRecord


def read(data: bytes) -> object:
    return read_pickle(data, where="file", persistent=lambda identity: identity, rules=ALLOW_ALL)


def revived(data: bytes) -> object:
    return revive(read(data), builders={}, tensor=lambda record: record, where="file")


ATTACKS = {
    "os.system": call("os", "system", text("touch pwned")),
    "posix.system": call("posix", "system", text("touch pwned")),
    "eval": call("builtins", "eval", text("__import__('os')")),
    "exec": call("builtins", "exec", text("import os")),
    "python 2 eval": call("__builtin__", "eval", text("1")),
    "getattr": call("builtins", "getattr", b"cos\nO_RDONLY\n", text("real")),
    "import": call("builtins", "__import__", text("this")),
    "import_module": call("importlib", "import_module", text("this")),
    "Popen": call("subprocess", "Popen", text("true")),
    "dotted stack global": text("os") + text("path.join") + b"\x93(" + text("a") + b"tR",
    "new of Popen": b"csubprocess\nPopen\n" + text("true") + b"\x85\x81",
    "new with keywords": b"csubprocess\nPopen\n)}" + text("args") + text("true") + b"s\x92",
    "state of a class": call("types", "SimpleNamespace") + b"}" + text("__class__") + text("x") + b"sb",
    "inst": b"(" + text("true") + b"ios\nsystem\n",
    "obj": b"(cos\nsystem\n" + text("true") + b"o",
    "extension": b"\x82\x01",
    "call of a call": b"cos\nsystem\n)R" + text("a") + b"\x85R",
    "partial": call("functools", "partial", b"cos\nsystem\n", text("true")),
    "attrgetter": call("operator", "attrgetter", text("system")),
    "torch.load": call("torch", "load", text("other.pt")),
    "numpy.load": call("numpy", "load", text("other.npy")),
    "no such module": call("this", "that"),
    "enum by import": call("this", "Color", b"K\x01"),
    "array of a subclass": call("numpy._core.multiarray", "_reconstruct", b"cthis\nthat\nK\0\x85C\x01b"),
    "reconstructor": call("copy_reg", "_reconstructor", b"csubprocess\nPopen\nc__builtin__\nobject\nN"),
    "reconstructor of a base": call("copy_reg", "_reconstructor", b"cthis\nthat\ncthis\nbase\nN"),
    "newobj function": call("copy_reg", "__newobj__", b"csubprocess\nPopen\n"),
    "apply": call("__builtin__", "apply", b"cos\nsystem\n"),
    "default of a dict": call("collections", "defaultdict", b"cos\ngetpid\n"),
    "in a set": b"(cos\nsystem\n)R\x91",
    "as a key": b"}cos\nsystem\n)RK\x01s",
    "as state": call("argparse", "Namespace") + b"}" + text("a") + call("os", "getcwd") + b"sb",
    "module that imports on look-up": call("torch", "compiler.nothing"),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_reading_runs_and_imports_nothing(attack):
    before = set(sys.modules)
    assert heard(lambda: read(b"\x80\x02" + attack + b".")) == []
    assert set(sys.modules) == before


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_reviving_runs_and_imports_nothing(attack):
    assert heard(lambda: revived(b"\x80\x02" + attack + b".")) == []


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "state of a class"])
def test_reviving_refuses_every_attack(attack):
    with pytest.raises(UnsafePickle):
        revived(b"\x80\x02" + ATTACKS[attack] + b".")


def test_the_listener_hears_a_real_pickle_run():
    assert heard(lambda: pickle.loads(b"\x80\x02" + call("os", "getpid") + b".")) != []


def deep(levels: int, opcodes: bytes) -> bytes:
    return b"\x80\x04]" + opcodes * levels + b"."


LIST, SIZE, CODEC = b"](" + b"N" * 50_000 + b"eq\x00", b"ctorch\nSize\nq\x01", b"c_codecs\nencode\nq\x02"
TEXTS = text("x" * 10**6) + b"q\0" + text("latin1") + b"q\x01"
DAG = b"\x80\x04]" + b"2\x86" * 400 + b"."
BOMBS = {
    "tuples in tuples": deep(10**6, b"\x85"),
    "lists in lists": b"\x80\x04" + b"(" * 10**6 + b"l" * 10**6 + b".",
    "objects in objects": b"\x80\x04ca\nb\nq\0" + b"0N" + b"".join([b"\x85h\0\x86"] * 200_000) + b".",
    "calls in calls": b"\x80\x04" + b"ca\nb\n" * 100_000 + b")" + b"R\x85" * 100_000 + b".",
    "tuples in tuples as a key": b"\x80\x04}N" + b"\x85" * 10**6 + b"Ns.",
    "pairs of pairs as a key": b"\x80\x04}N" + b"2\x86" * 190 + b"Ns.",
    "pairs of pairs in a set": b"\x80\x04\x8f(N" + b"2\x86" * 190 + b"\x90.",
    "pairs of pairs in a frozenset": b"\x80\x04(N" + b"2\x86" * 190 + b"\x91.",
    "deep frozensets": b"\x80\x04N" + b"\x85q\x000(h\x00\x91" * 200_000 + b".",
    "one list copied over and over": b"\x80\x04" + LIST + SIZE + b"h\x01h\0\x85R" * 50_000 + b".",
    "one text encoded over and over": b"\x80\x04" + TEXTS + CODEC + b"h\x02h\0h\x01\x86R" * 10_000 + b".",
    "bytes of a size": b"\x80\x04cbuiltins\nbytes\n\x8a\x06\0\0\0\0\0\x7f\x85R.",
    "declared text": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.",
    "declared bytes": b"\x80\x04B\xff\xff\xff\xff.",
    "huge integer": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "long digits": b"\x80\x04L" + b"9" * 10**6 + b"L\n.",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_soon_and_are_errors_or_small_values(name):
    start = time.process_time()
    try:
        value = read(BOMBS[name])
    except ReshardError:
        return
    finally:
        assert time.process_time() - start < 8
    assert isinstance(value, ObjectRecord)
    assert name == "bytes of a size"


def test_exponentially_many_ways_cost_linear_time():
    """Deep ones are refused, and shallow ones: whoever writes the value out would meet 2**150 parts."""
    start = time.process_time()
    with pytest.raises(CheckpointDamaged, match="nests deeper than 200"):
        read(DAG)
    with pytest.raises(CheckpointDamaged, match="has more than 10680"):
        read(b"\x80\x04]" + b"2\x86" * 150 + b".")
    shallow: object = []
    for _ in range(150):
        shallow = (shallow, shallow)
    revive(shallow, builders={}, tensor=lambda record: record, where="file")
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04Kcr\xff\xff\xff\xff0j\xff\xff\xff\xff.",
        b"\x80\x02Nr\x00\x00\x00\x04.",
        b"\x80\x02]r\x00\x00\x02\x00.",
        b"\x80\x04Kcp999999999999999999\n0g999999999999999999\n.",
        b"N0Np70000\n.",
        b"Np-1\n.",
    ],
)
def test_memo_entries_far_ahead_of_the_bytes_are_refused(data, tmp_path):
    """Python's unpickler allocates 16 bytes for each number up to the entry's: of 12 bytes 1 GiB."""
    with pytest.raises(UnsafePickle if b"-" not in data else CheckpointDamaged, match="memo entry"):
        read(data)
    (tmp_path / "data.pkl").write_bytes(data)
    assert any("memo entry" in fault.what for fault in scan_file(str(tmp_path / "data.pkl"), PickleRules()).faults)


def test_memo_entries_that_go_on_counting_are_read():
    """A pickler that is used twice without `clear_memo`, and Python 2's, which counted from 1."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, 2)
    pickler.dump([(n,) for n in range(20_000)])
    first = stream.tell()
    pickler.dump([[1.5], ["a"]])
    again = stream.getvalue()[first:]
    assert b"r" in again
    assert read(again) == pickle.loads(again) == [[1.5], ["a"]]
    assert read(b"(lp1\nI5\na.") == [5]


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (b"\x80\x02", b"(l0"),
        (b"\x80\x02", b"(d0"),
        (b"\x80\x04", b"\x8f0"),
        (b"\x80\x04", b"(N\x910"),
        (b"\x80\x02ca\nb\nq\1", b"h\1)R0"),
        (b"\x80\x02ccollections\nOrderedDict\nq\1", b"h\1)\x810"),
        (b"\x80\x02", b"]0"),
        (b"\x80\x02N]}", b"}0"),
    ],
    ids=["lists", "dicts", "sets", "frozensets", "calls", "objects", "empty lists", "empty dicts"],
)
def test_what_takes_a_hundred_bytes_for_one_is_counted(first, again):
    """There may be 16 million of these in a pickle, and as many empty lists and dicts."""
    for times in (6, 11):
        data = first + again * times + b"N."
        reading = Reading(data, lambda given: given, keep_as_record, PickleLimits(containers=10), PickleRules())
        assert reading.over_limit == (times > 10)


def test_every_changed_byte_of_a_pickle_is_a_value_or_an_error():
    tree = [{"a": (1, 2.5, "é", b"x", {1}, 2**70)}, collections.OrderedDict(b=1), complex(1, 2), slice(1), zipfile.Path]
    for protocol in (0, 2, 4):
        data = pickle.dumps(tree, protocol)
        for at in range(len(data)):
            for change in (0x01, 0x20, 0x80, 0xFF):
                changed = bytearray(data)
                changed[at] ^= change
                with contextlib.suppress(ReshardError):
                    revived(bytes(changed))


# -- archives -------------------------------------------------------------------------------------------


@pytest.fixture(params=(64, 1), ids=("by a loop", "by columns"))
def small(tmp_path, request, monkeypatch):
    """A small file, whose directory is read in each of two ways."""
    monkeypatch.setattr(zip_directory, "_MANY", request.param)
    path = tmp_path / "small.pt"
    torch.save({"a": torch.arange(3), "b": torch.ones(2, dtype=torch.bfloat16)}, path)
    return path


def opened(path: os.PathLike[str] | str) -> object:
    with open_archive(path) as archive:
        return archive.load()


def test_every_truncation_is_damage(small):
    data = small.read_bytes()
    for cut in range(len(data)):
        small.write_bytes(data[:cut])
        with pytest.raises(CheckpointDamaged):
            opened(small)


@pytest.mark.slow
def test_every_changed_byte_is_harmless_or_an_error(small):
    """No flip gives another value of the pickle; flips of padding, times and tensors' bytes are not seen here."""
    data = small.read_bytes()
    with open_archive(small) as archive:
        expected = repr(archive.load())
        pickled = archive.members["data.pkl"]
    for at in range(len(data)):
        for change in (0x01, 0x80, 0xFF):
            changed = bytearray(data)
            changed[at] ^= change
            small.write_bytes(changed)
            try:
                found = opened(small)
            except ReshardError:
                continue
            assert not pickled.byte_offset <= at < pickled.byte_offset + pickled.nbytes
            # The recorded checksum of a tensor may be the byte that changed.
            assert at >= data.index(b"PK\x01\x02") or repr(found) == expected


def test_added_bytes_are_damage(small):
    small.write_bytes(small.read_bytes() + b"x")
    with pytest.raises(CheckpointDamaged, match="cut short, or bytes were added"):
        opened(small)


def pickled(path: object, tree_pickle: bytes, records: dict[str, bytes] | None = None) -> str:
    """A well-formed archive around a pickle."""
    members = {"data.pkl": tree_pickle, "byteorder": b"little", **(records or {}), "version": b"3\n"}
    with zipfile.ZipFile(str(path), "w") as archive:
        for name, data in members.items():
            archive.writestr(f"small/{name}", data)
    return str(path)


def storage(key: str, numel: bytes, kind: str = "FloatStorage") -> bytes:
    return b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + numel + b"tQ"


def tensor(place: bytes, offset: bytes, shape: bytes, stride: bytes) -> bytes:
    hooks = b"ccollections\nOrderedDict\n)R"
    view = b"(" + place + offset + shape + stride + b"\x89" + hooks + b"t"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + view + b"R."


K0, K1, K2, K3, K4 = (b"K" + bytes([i]) for i in range(5))
MINUS = b"J\xff\xff\xff\xff"
HUGE = b"\x8a\x08" + b"\xff" * 7 + b"\x7f"
WIDE = b"\x8a\x0a" + b"\xff" * 9 + b"\x7f"
ONE, FOUR = K1 + b"\x85", K4 + b"\x85"
GOOD = storage("0", K4)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (tensor(GOOD, K1, FOUR, ONE), "ends at element 5"),
        (tensor(GOOD, K0, FOUR, K2 + b"\x85"), "ends at element 7"),
        (tensor(GOOD, HUGE, ONE, ONE), "ends at element"),
        (tensor(GOOD, K0, HUGE + b"\x85", ONE), "ends at element"),
        (tensor(GOOD, K0, HUGE + HUGE + b"\x86", K0 + K1 + b"\x86"), "ends at element"),
        (tensor(GOOD, K0, K2 + b"\x85", HUGE + b"\x85"), "ends at element"),
        (tensor(GOOD, WIDE, ONE, ONE), "malformed"),
        (tensor(GOOD, MINUS, ONE, ONE), "malformed"),
        (tensor(GOOD, K0, MINUS + b"\x85", ONE), "malformed"),
        (tensor(GOOD, K3, K2 + b"\x85", MINUS + b"\x85"), "malformed"),
        (tensor(GOOD, b"\x88", ONE, ONE), "malformed"),
        (tensor(GOOD, K0, b"\x88\x85", ONE), "malformed"),
        (tensor(GOOD, K0, ONE, K1 + K1 + b"\x86"), "malformed"),
        (tensor(GOOD, K0, K1, ONE), "malformed"),
        (tensor(GOOD, K0, b"(" + K1 * 65 + b"t", b"(" + K1 * 65 + b"t"), "malformed"),
        (tensor(b"N", K0, ONE, ONE), "not a storage"),
        (tensor(storage("0", K3), K0, ONE, ONE), "expected 12 bytes, found 16"),
        (tensor(storage("0", K4, "DoubleStorage"), K0, ONE, ONE), "expected 32 bytes, found 16"),
        (tensor(storage("0", MINUS), K0, ONE, ONE), "malformed"),
        (tensor(storage("0", b"\x88"), K0, ONE, ONE), "malformed"),
        (tensor(storage("9", K4), K0, ONE, ONE), "has no bytes in the archive"),
        (tensor(storage("../version", K4), K0, ONE, ONE), "has no bytes in the archive"),
        (b"\x80\x02X\x07\0\0\0storage\x85Q.", "not that of a torch storage"),
    ],
)
def test_tensors_that_leave_their_storage_are_damage(tmp_path, data, complaint):
    path = pickled(tmp_path / "file.pt", data, {"data/0": b"\0" * 16})
    with pytest.raises(CheckpointDamaged, match=complaint):
        opened(path)


def test_tensors_inside_their_storage_are_accepted(tmp_path):
    """The attacks above differ from these in one place only."""
    for data in (
        tensor(GOOD, K0, FOUR, ONE),
        tensor(GOOD, K3, ONE, HUGE + b"\x85"),
        tensor(GOOD, K4, K0 + b"\x85", ONE),
    ):
        assert opened(pickled(tmp_path / "file.pt", data, {"data/0": b"\0" * 16})).storage.nbytes == 16


def test_deeply_nested_rebuilds_do_not_recurse(tmp_path):
    """A subclass's rebuild that names itself is left as a record."""
    name = b"ctorch._tensor\n_rebuild_from_type_v2\nq\0ctorch\nTensor\nq\x0100"
    nested = b"\x80\x02" + name + b"(h\0h\x01)Nt" + b"q\x020(h\0h\x01h\x02Nt" * 20_000 + b"q\x020h\0h\x02R."
    with pytest.raises(UnsafePickle, match="which is only called"):
        opened(pickled(tmp_path / "file.pt", nested))


def rewritten(path: os.PathLike[str], change: Callable[[list[dict[str, object]]], None]) -> None:
    """Write the archive again with `change` applied to what its directory says."""
    with zipfile.ZipFile(path) as archive:
        members: list[dict[str, object]] = [
            {"name": i.filename, "data": archive.read(i), "flags": 0, "method": 0, "copies": 1}
            for i in archive.infolist()
        ]
    change(members)
    body, directory = b"", b""
    for member in members:
        name, data = str(member["name"]).encode(), member["data"]
        assert isinstance(data, bytes)
        stored = int(str(member.get("stored", len(data))))
        sizes = (zlib.crc32(data), stored, int(str(member.get("nbytes", stored))))
        fields = (member["flags"], member["method"], 0, 0, *sizes, len(name))
        header_name = str(member.get("header_name", member["name"])).encode()
        offset = int(str(member.get("offset", len(body))))
        said = (*fields[:4], int(str(member.get("header_crc", sizes[0]))), *fields[5:])
        extra = member.get("extra", b"")
        assert isinstance(extra, bytes)
        local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, *said, len(extra)) + header_name + extra + data
        entry = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 0, 0, *fields, 0, 0, 0, 0, 0, offset) + name
        body += local
        directory += entry * int(str(member["copies"]))
    entries = sum(int(str(member.get("entries", member["copies"]))) for member in members)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, entries, entries, len(directory), len(body), 0)
    with open(path, "wb") as file:
        file.write(body + directory + end)


def changed(number: int, **fields: object) -> Callable[[list[dict[str, object]]], None]:
    return lambda members: members[number].update(fields)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (changed(4, flags=1), "encrypted"),
        (changed(4, flags=0x2000), "encrypted"),
        (changed(4, flags=0x20), "zip flags 0x0020"),
        (changed(4, method=8), "compressed"),
        (changed(4, copies=2), "inside another member|twice"),
        (changed(4, name="small/data.pkl"), "twice"),
        (changed(4, name="../data/0"), "not the name of a member"),
        (changed(4, name="small/../../x"), "not the name of a member"),
        (changed(4, name="/small/x"), "not the name of a member"),
        (changed(4, name="small//x"), "not the name of a member"),
        (changed(4, name="small/data\\0"), "not the name of a member"),
        (changed(4, name="other/data/0"), "outside the archive's one folder"),
        (changed(4, name="data"), "outside the archive's one folder"),
        (changed(4, header_name="small/data/1"), "is not that of"),
        (changed(4, extra=b"FB\x01\x00"), "another length than declared"),
        (changed(4, extra=b"FB\xff", data=b"\xff" * 24), "another length than declared"),
        (changed(4, header_crc=1), "another size or checksum in its header"),
        (changed(-1, entries=0), "bytes follow the last entry"),
        (changed(4, nbytes=5), "is not stored"),
        (changed(4, stored=60), "inside another member"),
        (changed(4, offset=0), "inside another member"),
        (changed(4, offset=10), "inside another member|is not that of"),
        (changed(4, offset=2**31), "cut short or is damaged"),
        (changed(4, offset=2**32 - 1), "lacks the 64-bit sizes"),
        (lambda members: members.clear(), "not a file of torch.save|is empty"),
        (lambda members: members.pop(0), "no member 'data.pkl'"),
        (lambda members: members.pop(4), "has no bytes in the archive"),
        (lambda members: members.pop(-2), "no member 'version'"),
        (changed(-2, data=b"99\n"), "version b'99'"),
        (changed(-2, data=b"x" * 100), "where a word is expected"),
        (changed(3, data=b"big"), "byte order b'big'"),
        (changed(3, data=b"middle"), "byte order b'middle'"),
        (changed(4, data=b"short"), "expected 24 bytes, found 5"),
    ],
)
def test_directories_that_lie_are_refused(small, change, complaint):
    rewritten(small, lambda members: None)
    assert set(opened(small)) == {"a", "b"}
    rewritten(small, change)
    with pytest.raises(ReshardError, match=complaint):
        opened(small)


def test_bytes_before_the_first_entry_are_refused(small):
    rewritten(small, lambda members: None)
    data = small.read_bytes()
    start, end = data.index(b"PK\x01\x02"), data.rindex(b"PK\x05\x06")
    *fields, nbytes, at, comment = struct.unpack("<4s4H2IH", data[end:])
    small.write_bytes(
        data[:start] + b"junk" + data[start:end] + struct.pack("<4s4H2IH", *fields, nbytes + 4, at, comment)
    )
    with pytest.raises(CheckpointDamaged, match="has 0 entries"):
        opened(small)


def test_a_header_inside_a_header_is_refused(small):
    """What it says of its extra field would be read beyond what was read of the file."""
    rewritten(small, lambda members: members.extend({**members[4], "name": f"small/data/{n}"} for n in "89"))
    data = bytearray(small.read_bytes())
    last = data.rindex(b"PK\x01\x02")
    before = data.rindex(b"PK\x01\x02", 0, last)
    data[last + 42 : last + 46] = (int.from_bytes(data[before + 42 : before + 46], "little") + 10).to_bytes(4, "little")
    small.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="inside another member"):
        opened(small)


def test_names_that_are_not_text_are_refused(small):
    data = small.read_bytes().replace(b"small/data/0", b"small/data/\xff")
    small.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match="not UTF-8"):
        opened(small)


def test_compressed_archives_are_refused(tmp_path, small):
    with zipfile.ZipFile(small) as source, zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    with pytest.raises(CheckpointDamaged, match="compressed"):
        opened(tmp_path / "z.pt")


def test_members_of_four_gigabytes_take_their_sizes_from_the_64_bit_fields(tmp_path):
    """A sparse file as torch writes it: 64-bit sizes and offsets in the directory's extra field."""
    path, huge = tmp_path / "huge.pt", 5 << 30
    tree = tensor(storage("0", b"\x8a\x05" + (huge // 4).to_bytes(5, "little")), K0, ONE, ONE)
    body, directory, at = {}, b"", 0
    for name, nbytes, data in [("data/0", huge, b""), ("data.pkl", len(tree), tree), ("version", 2, b"3\n")]:
        full = f"small/{name}".encode()
        body[at] = struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, 8, 0, 0, 0, 0, 0, 0, len(full), 0) + full + data
        wide, size, offset = b"", nbytes, at
        if nbytes >= 0xFFFFFFFF:
            wide, size = struct.pack("<QQ", nbytes, nbytes), 0xFFFFFFFF
        if at >= 0xFFFFFFFF:
            wide, offset = wide + struct.pack("<Q", at), 0xFFFFFFFF
        extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
        fields = (8, 0, 0, 0, zlib.crc32(data), size, size, len(full), len(extra), 0, 0, 0, 0, offset)
        directory += struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 0, 0, *fields) + full + extra
        at += 30 + len(full) + nbytes
    wide_end = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 0, 0, 0, 0, 3, 3, len(directory), at)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, at + len(directory), 1)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 3, 3, len(directory), 0xFFFFFFFF, 0)
    with open(path, "wb") as file:
        for offset, data in body.items():
            file.seek(offset)
            file.write(data)
        file.seek(at)
        file.write(directory + wide_end + locator + end)
    found = opened(path)
    assert (found.storage.nbytes, found.storage.byte_offset) == (huge, 30 + len("small/data/0"))


@pytest.mark.parametrize("offset", ((1 << 63) - 1, 1 << 63, (1 << 64) - 1))
def test_a_header_far_behind_the_file_is_damage(tmp_path, small, offset):
    """Also where no file, and no call of the system, has such a number."""
    data = small.read_bytes()
    end = data.rindex(b"PK\x05\x06")
    *_, count, nbytes, at, _ = struct.unpack("<4s4H2IH", data[end:])
    last = data.rindex(b"PK\x01\x02", at, at + nbytes)
    name_nbytes = int.from_bytes(data[last + 28 : last + 30], "little")
    entry = bytearray(data[last : last + 46 + name_nbytes])
    entry[30:34], entry[42:46] = struct.pack("<2H", 12, 0), b"\xff" * 4
    directory = data[at:last] + entry + struct.pack("<2HQ", 1, 8, offset)
    path = tmp_path / "far.pt"
    path.write_bytes(
        data[:at] + directory + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, len(directory), at, 0)
    )
    with pytest.raises(CheckpointDamaged, match=f"declares .* bytes at {offset}"):
        opened(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "the file is empty"),
        (b"\0" * 5000, "zeros: its blocks were never written"),
        (b"<!DOCTYPE html><html>502 Bad Gateway</html>", "an HTML or XML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (b"\x1f\x8b\x08" + b"x" * 50, "a compressed file"),
        (b'\x08\0\0\0\0\0\0\0{"a":1} ', "safetensors"),
        (pickle.dumps({"a": 1}), "a bare pickle"),
        (b"PK\x03\x04", "cut short"),
        (b"PK", "it begins with"),
        (b"PK\x05\x06" + b"\0" * 18, "it begins with"),
        (b"anything else", "it begins with b'anything'"),
    ],
)
def test_files_of_other_kinds_are_named(tmp_path, content, complaint):
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=complaint):
        opened(tmp_path / "file.pt")


def test_legacy_files_say_how_to_save_them_again(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointDamaged, match=r"legacy torch.save format: re-save with torch.save\(torch.load"):
        opened(tmp_path / "old.pt")


def test_a_changed_pickle_is_a_checksum_mismatch(small):
    small.write_bytes(small.read_bytes().replace(b"LongStorage", b"LongStorafe"))
    with pytest.raises(ChecksumMismatch, match=r"data\.pkl"):
        opened(small)


def test_attacks_in_real_files_are_read_without_running(tmp_path):
    stream = io.BytesIO()
    torch.save({"a": Attack("touch pwned"), "b": torch.ones(2)}, stream)
    (tmp_path / "file.pt").write_bytes(stream.getvalue())

    def look() -> object:
        with open_archive(tmp_path / "file.pt") as archive:
            return archive.load(rules=ALLOW_ALL)

    events = heard(look)
    assert [event for event in events if not event.startswith(f"open ('{tmp_path / 'file.pt'}'")] == []
    found = look()
    assert isinstance(found["a"], ObjectRecord)
    with pytest.raises(UnsafePickle, match=r"system', which acts on the machine; nothing was run"):
        revive(found, builders={}, tensor=lambda record: record, where="file")
    with pytest.raises(UnsafePickle, match=r"calls posix\.system\('touch pwned'\); nothing was run"):
        opened(tmp_path / "file.pt")
