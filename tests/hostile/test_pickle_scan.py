"""Every pickle of any file is found by its content, and what is none is left alone."""

from __future__ import annotations

import bz2
import gzip
import inspect
import io
import json
import os
import pickle
import random
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from archives import member_of, rebuilt
from payloads import ACTING, before, call, name, put_before, text, twice
from safetensors.torch import save_file

from ds_reshard.cli.main import main
from ds_reshard.containers import pickle_rules
from ds_reshard.containers.pickle_reader import Scanned, read_pickle, scan_file
from ds_reshard.containers.pickle_rules import PickleRules
from ds_reshard.errors import ConfigError, Fault, ReadFailed, ReshardError, TrustRequired, UnsafePickle
from ds_reshard.hosts.fsdp.settings import ask_settings
from ds_reshard.operations import pickles, scan_pickles
from ds_reshard.operations.pickles import ScanTarget, _digest, refuse_unsafe_folder, walk

COMMAND = "touch pwned"
ACTS = ACTING["thrown away"][0](COMMAND)
EVIL = before(pickle.dumps({"a": 1}, 2), ACTS)


def scanned(path: Path) -> Scanned:
    found = scan_file(str(path), PickleRules())
    assert not Path("pwned").exists()
    return found


def named(found: Scanned) -> bool:
    return any("calls posix.system('touch pwned')" in fault.what for fault in found.faults)


def _saved(value: object, **options: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)  # type: ignore[arg-type]
    return stream.getvalue()


def _evil_archive() -> bytes:
    content = _saved({"a": torch.ones(2)})
    return rebuilt(content, {"data.pkl": before(member_of(content, "data.pkl"), ACTS)})


def _legacy(payload: bytes = b"") -> bytes:
    content = _saved({"a": torch.ones(2), "b": 3}, _use_new_zipfile_serialization=False)
    fourth = content.index(b"\x80\x02}q\x00(X\x01\0\0\0a")  # the pickle of the value
    return content[: fourth + 2] + payload + content[fourth + 2 :]


def _array(value: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, value, allow_pickle=True)
    return stream.getvalue()


def _zip(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


def _flagged(flag: int) -> bytes:
    """An archive whose members are said to be encrypted, compressed patches, or of other strange kinds."""
    content = bytearray(_evil_archive())
    at = 0
    while (at := content.find(b"PK\x01\x02", at)) >= 0:
        struct.pack_into("<H", content, at + 8, flag)
        at += 4
    return bytes(content)


def _two_directories() -> bytes:
    """An archive with a second directory behind the first: readers that look from other ends find other members."""
    evil, mild = _evil_archive(), _saved({"a": torch.ones(2)})
    return evil + mild[mild.index(b"PK\x01\x02") :]


def _tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            entry = tarfile.TarInfo(name)
            entry.size = len(EVIL)
            archive.addfile(entry, io.BytesIO(EVIL))
    return stream.getvalue()


def _extra_state(data: bytes, form: Callable[[torch.Tensor], torch.Tensor] = lambda state: state) -> bytes:
    state = form(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return _saved({"layer._extra_state": state, "weight": torch.ones(3)})


def _strided(state: torch.Tensor) -> torch.Tensor:
    return torch.stack([state, torch.zeros_like(state)], 1)[:, 0]


class _Reduced:
    """Pickled as a BytesIO that holds these bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[object, ...]:
        return io.BytesIO, (self.data,)


def _nested(depth: int) -> bytes:
    data = EVIL
    for _ in range(depth):
        data = pickle.dumps(io.BytesIO(data), 2)
    return data


ACT: dict[str, bytes] = {
    "a file of torch.save": _evil_archive(),
    "one that follows another": _saved([1]) + _evil_archive() + _saved([2]),
    "a file of torch.save before 1.6": _legacy(ACTS),
    **{f"a pickle of protocol {n}": before(pickle.dumps([1, "a"], n), ACTS) for n in range(2, 6)},
    "a pickle of protocol 0": ACTS + pickle.dumps([1, "a"], 0),
    "a pickle of protocol 1": ACTS + pickle.dumps([1, "a"], 1),
    "the second of two pickles": pickle.dumps(1) + EVIL,
    "a pickle with more behind it": EVIL + os.urandom(2000),
    "a pickle that is cut short": EVIL[:-3],
    "a pickle in front of an archive": EVIL + _saved([1]),
    "an array of objects": _array(np.array([1], object))[:128] + EVIL,
    "arrays of objects": _zip({"arr_0.npy": _array(np.array([1], object))[:128] + EVIL}),
    "an archive with two data.pkl": twice(_saved({"a": 1}), ACTS),
    "an archive with a persistent id that is a tuple of calls": rebuilt(
        _saved([1]),
        {"data.pkl": before(member_of(_saved([1]), "data.pkl"), b"(" + text("storage") + ACTS[:-1] + b"tQ0")},
    ),
    "an archive that is compressed": _zip({"archive/data.pkl": EVIL, "archive/version": b"3\n"}),
    "an archive that is said to be encrypted": _flagged(0x1),
    "an archive with strange flags": _flagged(0x20),
    "an archive with a pickle of another name": rebuilt(_saved([1]), {"other.pkl": EVIL}),
    "a zip file of anything": _zip({"a/b.bin": EVIL, "notes.txt": b"hello"}),
    "extra state of a model": _extra_state(EVIL),
    "extra state of signed bytes": _extra_state(EVIL, lambda state: state.view(torch.int8)),
    "extra state in rows": _extra_state(EVIL, lambda state: state[None]),
    "extra state that is a file of torch.save": _extra_state(_evil_archive()),
    "bytes that a model keeps": _saved({"state": io.BytesIO(EVIL)}),
    "bytes that a model keeps, by a call": pickle.dumps(_Reduced(EVIL), 2),
    "a pickle in a pickle in a pickle": _nested(4),
}


@pytest.mark.parametrize("suffix", [".pt", ".bin", ""])
@pytest.mark.parametrize("case", ACT)
def test_what_acts_is_named_wherever_it_lies(tmp_path: Path, case: str, suffix: str) -> None:
    path = tmp_path / f"file{suffix}"
    path.write_bytes(ACT[case])
    found = scanned(path)
    assert named(found), found
    assert {fault.where for fault in found.faults} == {str(path)}


def _random_state(seed: int) -> torch.Tensor:
    """Of these seeds the first bytes are those of a pickle's mark, or of an instruction."""
    return torch.Generator().manual_seed(seed).get_state()


def _module() -> bytes:
    """A file of torch.save before 1.6 that asks for an object as the container of a module, which torch gives back."""
    held = call("argparse", "Namespace") + b"}" + text("append") + name("torch.storage", "_load_from_bytes") + b"sb"
    return _legacy(b"(" + text("module") + held + b"NNtQ" + b"C\x01xa0")


def _hidden_directory() -> bytes:
    """Two archives, of which a reader from the start of the file finds the directory of the second in the first."""
    evil, behind = _evil_archive(), _saved(["x" * 20_000, 1])
    return _saved({"w": torch.frombuffer(bytearray(evil), dtype=torch.uint8).float()}) + behind


def _named_member() -> bytes:
    """A tar file whose first member's name is a pickle."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo(f"cposix\nsystem\n(S'{COMMAND}'\ntR."))
    return stream.getvalue()


def _behind(harm: bytes) -> bytes:
    """What Python runs before it comes to an instruction that is none."""
    return b"\x80\x02" + harm + b"\xff"


def _loaded(data: bytes) -> bytes:
    return b"\x80\x02" + call("torch.storage", "_load_from_bytes", b"B" + struct.pack("<I", len(data)) + data) + b"."


THOUSAND = b"".join(b"(" + name("builtins", "complex") + b"K\1M" + struct.pack("<H", n) + b"o0" for n in range(1001))
OTHERWISE: dict[str, tuple[bytes, str]] = {
    "behind a thousand findings": (_behind(THOUSAND + ACTS), "builtins.complex"),
    "behind a thousand findings, in bytes": (_loaded(_behind(THOUSAND + ACTS)), "builtins.complex"),
    "bytes for a loader that are no pickle": (_loaded(b"hello"), "byte 0"),
    "a name that acts when it is imported": (name("unittest.__main__", "main") + b"\xff", "unittest.__main__"),
    "a name that is imported, and no more": (_behind(name("somebody.module", "x")), "somebody.module.x"),
    "behind what another Python takes": (b"\x80\x02}]N" + b"s0" + ACTS + b"\xff", "unhashable"),
    "an object for a module": (_module(), "asks for ('module', argparse.Namespace(), None, None), which is no storage"),
    "two archives": (_hidden_directory(), "2 zip files lie in it"),
    "two archives in a tensor": (_extra_state(_hidden_directory()), "2 zip files lie in it"),
    "two archives in bytes": (pickle.dumps(io.BytesIO(_hidden_directory())), "2 zip files lie in it"),
    "a tar file": (_named_member(), "calls posix.system('touch pwned')"),
    "many pickles": (b"N." * 20_000, "more than 10000 pickles"),
    "marks": (_zip({"a.pkl": b"(" * (20 << 20)}), "the pickle ends before its STOP"),
    "dicts": (_zip({"a.pkl": b"}" * (20 << 20)}), "more lists and dicts than are read"),
    "a member of zeros": (_zip({"a.pkl": bytes(80 << 20)}), "more than 64 MiB"),
}


LARGE = ("marks", "dicts", "a member of zeros")  # archives, which all others show to be told by any name


@pytest.mark.parametrize(
    ("case", "suffix"),
    [(case, suffix) for case in OTHERWISE for suffix in (".pt", ".bin", "") if suffix == ".pt" or case not in LARGE],
)
def test_what_readers_take_otherwise_is_told(tmp_path: Path, case: str, suffix: str) -> None:
    content, said = OTHERWISE[case]
    (tmp_path / f"file{suffix}").write_bytes(content)
    found = scanned(tmp_path / f"file{suffix}")
    assert any(said in fault.what for fault in found.faults), found


CLEAN: dict[str, tuple[bytes, int]] = {
    "a file of torch.save": (_saved({"a": torch.ones(2), "b": [1]}), 1),
    "a file of torch.save before 1.6": (_legacy(), 5),
    "tensors pickled by Python": (pickle.dumps({"a": torch.ones(2)}), 1),
    "random states": (pickle.dumps([random.getstate(), np.random.get_state(), torch.get_rng_state()]), 1),
    **{f"a pickle of protocol {n}": (pickle.dumps([1, "a", {2.5: None}], n), 1) for n in range(6)},
    "numbers": (_array(np.arange(1000.0)), 0),
    "an array of objects": (_array(np.array([1, "a", None], object)), 1),
    "arrays": (_zip({"a.npy": _array(np.arange(3)), "b.npy": _array(np.array(["x"], object))}), 1),
    **{f"random states of seed {seed}": (_saved(_random_state(seed)), 1) for seed in (640, 896, 1152, 1408)},
    "noise behind the mark of a pickle": (b"\x80\x04" + random.Random(1).randbytes(20 << 20), 0),
    "extra state": (_extra_state(pickle.dumps({"scale": torch.ones(2)})), 1),
    "text": (b"checkpoint of a run\nof no importance\n", 0),
    "text that begins like an instruction": (b"cat\ndog\nbird\n", 0),
    "JSON": (json.dumps({"global_step": 3}).encode(), 0),
    "a script": (Path(__file__).read_bytes(), 0),
    "nothing": (b"", 0),
    "zeros": (bytes(10_000), 0),
    "one letter": (b"N" * 100_000, 0),
    "what is compressed": (gzip.compress(b"x" * 1000), 0),
    "what is compressed otherwise": (bz2.compress(b"x" * 1000), 0),
    "a picture": (b"\x89PNG\r\n\x1a\n" + zlib.compress(b"x" * 1000), 0),
    "words in a file that is called .bin": (np.arange(80_000, dtype=np.uint16).tobytes()[256:], 0),
    "tokens": (np.arange(100_000, dtype=np.uint16).tobytes(), 0),
    "a zip file": (_zip({"notes.txt": b"hello"}), 0),
}


@pytest.mark.parametrize("case", CLEAN)
def test_what_does_not_act_is_left_alone(tmp_path: Path, case: str) -> None:
    content, pickles = CLEAN[case]
    (tmp_path / "file").write_bytes(content)
    found = scanned(tmp_path / "file")
    assert (found.faults, found.pickles) == ([], pickles)


def test_random_bytes_are_no_pickles(tmp_path: Path) -> None:
    """Two thousand files of noise, and of noise behind the mark of a pickle, name nothing."""
    drawn = random.Random(3)
    for number in range(2000):
        (tmp_path / "file").write_bytes(drawn.randbytes(drawn.choice((1, 30, 500, 5000))))
        assert scanned(tmp_path / "file").faults == [], number


def test_safetensors_have_no_pickles(tmp_path: Path) -> None:
    """Also where the size of the header, its first eight bytes, reads like the mark of a pickle."""
    for length in range(40, 1400):
        save_file({"a": torch.ones(300)}, tmp_path / "model.safetensors", {"x": "y" * length})
        with open(tmp_path / "model.safetensors", "rb") as file:
            if length == 40 or file.read(2) == b"\x80\x02":
                assert scanned(tmp_path / "model.safetensors") == Scanned()


UNREAD: dict[str, tuple[str, bytes]] = {
    "a tar file of torch.save": ("file.pt", _tar()),
    "one that is called otherwise": ("file.bin", _tar()),
    "what is called a pickle and is none": ("file.pkl", b"hello"),
    "a marked pickle that is none": ("file.pkl", b"\x80\x04hello"),
    "an archive that was cut": ("file.pt", _saved([1])[:-30]),
    "an archive without data.pkl": (
        "file.pt",
        _zip({"archive/version": b"3\n", "archive/x": b"1"}, zipfile.ZIP_STORED),
    ),
    "pickles in pickles without end": ("file", _nested(20)),
    "an archive of two directories": ("file.pt", _two_directories()),
    "a line across the end of a frame": ("file", b"\x80\x04\x95" + struct.pack("<Q", 8) + b"N0N0N0ia\xff\nb\n."),
    "a broken second pickle of a file of torch.save before 1.6": ("file", _legacy()[:15] + b"?" + _legacy()),
    "extra state with gaps": ("file.pt", _extra_state(EVIL, _strided)),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_cannot_be_looked_at_is_a_fault(tmp_path: Path, case: str) -> None:
    name, content = UNREAD[case]
    (tmp_path / name).write_bytes(content)
    found = scanned(tmp_path / name)
    assert found.faults and not {fault.error for fault in found.faults} & {"InternalError"}


def test_every_changed_byte_of_an_archive_is_bounded_and_named(tmp_path: Path) -> None:
    """Whatever one changed byte makes of a file that acts: a fault, and nothing runs."""
    content = _evil_archive()
    for place in range(0, len(content), 3):
        changed = content[:place] + bytes([content[place] ^ 0x41]) + content[place + 1 :]
        (tmp_path / "file.pt").write_bytes(changed)
        assert scanned(tmp_path / "file.pt").faults, place


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of no format: files of many kinds, some below others."""
    made = tmp_path / "folder"
    (made / "deep" / "er").mkdir(parents=True)
    (made / "a.pt").write_bytes(_saved([1]))
    (made / "deep" / "b.bin").write_bytes(pickle.dumps([1]))
    (made / "deep" / "er" / "notes.txt").write_bytes(b"hello")
    (made / "link").symlink_to(made / "nothing")
    os.mkfifo(made / "pipe")
    return made


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["verify", "--pickles", *words])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_a_folder_of_no_format(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys, str(folder))
    assert (status, out) == (0, f"{folder}: 3 files; pickles: 2 read, nothing in them acts\n")
    (folder / "deep" / "er" / "c.pkl").write_bytes(EVIL)
    put_before(folder / "a.pt", ACTS)
    status, out = run(capsys, str(folder))
    assert status == 1 and out.splitlines() == [
        f"{folder}/a.pt: data.pkl, byte 31: calls posix.system('touch pwned'); nothing was run",
        f"{folder}/deep/er/c.pkl: byte 31: calls posix.system('touch pwned'); nothing was run",
        "to mend: do not load this file elsewhere either: ask whoever wrote it",
        f"{folder}: 4 files; pickles: 3 read, 2 findings",
    ]
    status, out = run(capsys, str(folder), "--json")
    told = json.loads(out)
    assert status == 1 and (told["clean"], told["files"], told["pickles"], len(told["faults"])) == (False, 4, 3, 2)
    assert run(capsys, str(folder / "deep" / "b.bin"))[0] == 0
    assert run(capsys, str(folder / "deep" / "er" / "c.pkl"))[0] == 1


class Mine:
    pass


def test_trust_is_given_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.pkl").write_bytes(pickle.dumps(Mine(), 2))
    name = f"{__name__}.Mine"
    status, out = run(capsys, str(folder))
    assert status == 1 and f"calls {name}(), for which nobody vouches" in out and f"--trust {name}" in out
    assert run(capsys, str(folder), "--trust", name)[0] == 0
    for wrong in ("posix.system", "Mine", "torch.load", ""):
        status, out = run(capsys, str(folder), "--trust", wrong)
        assert status == 2 and "--trust" in out and repr(wrong) in out


def test_what_a_process_trusts_holds_for_every_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DS_RESHARD_SETTINGS: also for what we read ourselves, as for nanotron and `ds_reshard.dcp.Reader`."""
    monkeypatch.setattr(pickle_rules, "_TRUSTED_ALWAYS", set())
    data = pickle.dumps(Mine(), 2)
    (folder / "mine.pkl").write_bytes(data)
    with pytest.raises(TrustRequired):
        refuse_unsafe_folder(str(folder), alone=True)
    ask_settings(json.dumps({"trust": [f"{__name__}.Mine"]}), place="DS_RESHARD_SETTINGS")
    refuse_unsafe_folder(str(folder), alone=True)
    read_pickle(data, where="file", persistent=lambda identity: identity)
    for wrong in ("posix.system", "Mine"):
        with pytest.raises(ConfigError, match="trust"):
            ask_settings(json.dumps({"trust": [wrong]}), place="DS_RESHARD_SETTINGS")


def test_wrong_usage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (("--deep",), "leave out --deep"),
        (("--tag", "x"), "--tag"),
        (("--against", "y"), "--against"),
    ):
        status, out = run(capsys, str(folder), *words)
        assert status == 2 and said in out
    status, out = run(capsys, str(folder / "missing"))
    assert status == 2 and "does not exist" in out


def test_a_folder_that_may_not_be_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told, and no load goes on: what lies in it may act."""
    listed = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = scan_pickles(str(folder))
    assert [(fault.error, fault.where) for fault in found.faults] == [("ReadFailed", str(folder / "deep"))]
    assert found.unread == 1
    with pytest.raises(ReadFailed, match="deep: cannot be listed"):
        refuse_unsafe_folder(str(folder), alone=True)


def test_links_are_followed_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.pkl").write_bytes(EVIL)
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "again").symlink_to(folder)
    assert [fault.where for fault in scan_pickles(str(folder)).faults] == [str(folder / "linked" / "c.pkl")]
    with pytest.raises(UnsafePickle, match=r"linked/c\.pkl"):
        refuse_unsafe_folder(str(folder), alone=True)


def test_folders_that_lie_deep_in_each_other_are_walked_to_their_end(tmp_path: Path) -> None:
    """Deeper than Python's own functions may call each other."""
    deep = tmp_path.joinpath(*["a"] * 150)
    deep.mkdir(parents=True)
    (deep / "c.pkl").write_bytes(EVIL)
    (deep / "again").symlink_to(tmp_path)
    faults: list[Fault] = []
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 60)
    try:
        paths = list(walk(str(tmp_path), faults))
    finally:
        sys.setrecursionlimit(limit)
    assert (paths, faults) == ([str(deep / "c.pkl")], [])
    with pytest.raises(UnsafePickle, match=r"c\.pkl.*posix\.system"):
        refuse_unsafe_folder(str(tmp_path), alone=True)


@pytest.mark.parametrize("alike", [True, False], ids=["the same files", "files of their own"])
def test_ranks_share_the_files_that_all_of_them_see(folder: Path, monkeypatch: pytest.MonkeyPatch, alike: bool) -> None:
    """Each scans its share; but all of them, where the same names are files of another disk."""
    seen: list[str] = []
    monkeypatch.setattr(pickles, "rank", lambda group=None: 1)
    monkeypatch.setattr(pickles, "gather", lambda value, group=None: [value if alike else b"another", value])
    monkeypatch.setattr(pickles, "broadcast", lambda value, group=None: (_targets(folder), []))
    scan = pickles.scan_file
    monkeypatch.setattr(pickles, "scan_file", lambda path, *a, **k: (seen.append(path), scan(path, *a, **k))[1])
    refuse_unsafe_folder(str(folder))
    every = [target.path for target in _targets(folder)]
    assert seen == (every[1::2] if alike else every)


def _targets(folder: Path) -> list[ScanTarget]:
    return [ScanTarget(path=path) for path in walk(str(folder), [])]


def test_ranks_see_other_files_where_only_what_is_in_them_differs(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"{rank}").mkdir()
        (tmp_path / f"{rank}" / "a.pkl").write_bytes(pickle.dumps(rank))
    (tmp_path / "at").symlink_to(tmp_path / "0")
    first = _digest([str(tmp_path / "at" / "a.pkl")])
    (tmp_path / "at").unlink()
    (tmp_path / "at").symlink_to(tmp_path / "1")
    assert _digest([str(tmp_path / "at" / "a.pkl")]) != first


def test_what_is_never_loaded_may_hold_a_class_of_ones_own(folder: Path) -> None:
    """As `training_args.bin` of the Trainer: what acts in it is refused all the same."""
    (folder / "args.bin").write_bytes(pickle.dumps(Mine(), 2))
    with pytest.raises(TrustRequired):
        refuse_unsafe_folder(str(folder), alone=True)
    refuse_unsafe_folder(str(folder), alone=True, unread=["args.*"])
    (folder / "args.bin").write_bytes(EVIL)
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        refuse_unsafe_folder(str(folder), alone=True, unread=["args.*"])


def _directory(folder: Path, change: Callable[[Any], object]) -> Path:
    """A folder of torch.distributed.checkpoint whose directory was changed."""
    dcp.save({"w": torch.ones(3), "step": 3}, checkpoint_id=str(folder), no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def _placed(**changed: object) -> Callable[[Any], object]:
    def change(metadata: Any) -> None:
        for index, place in metadata.storage_data.items():
            if index.fqn == "step":
                metadata.storage_data[index] = replace(place, **changed)

    return change


DIRECTORIES: dict[str, tuple[Callable[[Any], object], str]] = {
    "an entry that is none": (lambda held: held.storage_data.update({3: 4}), "is not the name of a file"),
    "a file by a longer way": (_placed(relative_path="./__0_0.distcp"), "is not the name of a file"),
    "a file elsewhere": (_placed(relative_path="../outside"), "is not the name of a file"),
    "a place behind the end": (_placed(offset=1 << 40), "it ends at"),
    "an object that was compressed": (_placed(transform_descriptors=["zstd"]), "compressed or otherwise changed"),
}


@pytest.mark.parametrize("case", DIRECTORIES)
def test_a_directory_that_cannot_be_followed_is_told_and_refused(tmp_path: Path, case: str) -> None:
    change, said = DIRECTORIES[case]
    _directory(tmp_path, change)
    assert any(said in fault.what for fault in scan_pickles(str(tmp_path)).faults)
    with pytest.raises(ReshardError, match=said):
        refuse_unsafe_folder(str(tmp_path), alone=True)


def test_a_directory_of_each_rank_is_followed(tmp_path: Path) -> None:
    """torch falls back to `__RANK.metadata` where there is no `.metadata`."""
    evil = _evil_archive()
    _directory(tmp_path, _placed(relative_path="__1_0.distcp", offset=30, length=len(evil)))
    (tmp_path / "__1_0.distcp").write_bytes((pickle.dumps(1, 2) + b"junk").ljust(30) + evil)
    (tmp_path / ".metadata").rename(tmp_path / "__0.metadata")
    assert any(fault.error == "UnsafePickle" for fault in scan_pickles(str(tmp_path)).faults)
    with pytest.raises(UnsafePickle, match=r"__1_0\.distcp.*posix\.system"):
        refuse_unsafe_folder(str(tmp_path), alone=True)


def test_a_directory_that_is_none_and_acts_is_unsafe(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=str(tmp_path), no_dist=True)
    (tmp_path / ".metadata").write_bytes(EVIL)
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        refuse_unsafe_folder(str(tmp_path), alone=True)


def test_tokens_beside_a_checkpoint_do_not_stop_a_load(tmp_path: Path) -> None:
    """Whatever they begin with; a file called `.bin` is a pickle where it reads as one."""
    for first in range(256):
        (tmp_path / f"tokens_{first}.bin").write_bytes(bytes([first]) + random.Random(first).randbytes(3000))
    refuse_unsafe_folder(str(tmp_path), alone=True)


def test_an_object_in_a_file_of_any_name_is_looked_at(tmp_path: Path) -> None:
    evil = _evil_archive()
    _directory(tmp_path, _placed(relative_path="data.txt", offset=5, length=len(evil)))
    (tmp_path / "data.txt").write_bytes(b"hello" + evil)
    with pytest.raises(UnsafePickle, match=r"data\.txt.*posix\.system"):
        refuse_unsafe_folder(str(tmp_path), alone=True)
    assert any(fault.error == "UnsafePickle" for fault in scan_pickles(str(tmp_path)).faults)


def test_the_parts_that_a_directory_tells_are_looked_at(tmp_path: Path) -> None:
    """An object of torch.distributed.checkpoint may be said to lie inside a tensor's bytes."""
    values = torch.arange(2000.0)
    dcp.save({"w": values, "step": 3}, checkpoint_id=str(tmp_path), no_dist=True)
    clean = scan_pickles(str(tmp_path))
    assert clean.faults == () and clean.pickles >= 3
    data = (tmp_path / "__0_0.distcp").read_bytes()
    raw = values.numpy().tobytes()
    hidden = data.index(raw)
    evil = _evil_archive()
    assert len(evil) < len(raw)
    changed = data[:hidden] + evil + data[hidden + len(evil) :]
    (tmp_path / "__0_0.distcp").write_bytes(changed)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for index, place in metadata.storage_data.items():
        if index.fqn == "step":
            metadata.storage_data[index] = type(place)(place.relative_path, hidden, len(evil), None)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    found = scan_pickles(str(tmp_path))
    assert any(
        f"{len(evil)} bytes at {hidden}" in fault.what and "posix.system" in fault.what for fault in found.faults
    )


def test_text_of_a_name_does_not_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.pkl").write_bytes(b"\x80\x02" + text("x\x1b[2Jx") + text("y\ny") + b"\x93.")
    status, out = run(capsys, str(tmp_path))
    assert status == 1 and "\x1b[2J" not in out and "names x\\x1b[2Jx.y\\ny" in out
