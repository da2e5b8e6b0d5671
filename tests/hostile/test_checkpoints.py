"""Damaged and hostile checkpoints through the commands: a finding or a refusal by name, and no output that is wrong.

Synthetic checkpoints (tests/formats/zero_builder.py) and what `convert` makes of them, with its manifest.
"""

from __future__ import annotations

import io
import os
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from payloads import Attack

from ds_reshard.cli.main import main
from ds_reshard.containers.pickle_rules import ALLOW_ALL
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import ReadFailed, ReshardError
from ds_reshard.operations import Options, convert, inspect, verify

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
from zero_builder import TAG, Built, write

BUILT = Built(
    groups=((("first", (5, 3)), ("second", (4,))), (("third", (3,)),)),
    frozen=(("tower", (3,)),),
    tied=(("alias", "first"),),
)
MODEL = "mp_rank_00_model_states.pt"
SHARDS = tuple(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
FILES = (MODEL, *SHARDS)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As torch writes the files, and as `convert` does, with a manifest."""
    folder = tmp_path_factory.mktemp("whole")
    torch_made = write(BUILT, folder / "torch")
    convert(str(torch_made), str(folder / "converted"), to="zero2", options=Options(threads=1))
    return {"torch": torch_made, "converted": folder / "converted"}


@pytest.fixture
def damaged(sources: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a source, of which one file has other bytes; called anew it is whole again."""

    last: list[str] = []

    def make(source: str, name: str, content: bytes) -> Path:
        folder = tmp_path / "damaged"
        if last[:1] == [source]:
            shutil.copy2(sources[source] / last[1], folder / last[1])
        else:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(sources[source], folder)
        (folder / name).write_bytes(content)
        last[:] = source, name
        return folder

    return make


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the manifest, which names the source's times."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "ds_reshard.json"
    }


def converted(folder: Path, out: Path, to: str = "zero3") -> dict[str, bytes] | None:
    """What a conversion writes, None where it refuses; then there is no output."""
    shutil.rmtree(out, ignore_errors=True)
    try:
        convert(str(folder), str(out), to=to, dp=3 if to == "zero3" else None, options=Options(threads=1))
    except ReshardError:
        assert not out.exists()
        return None
    return contents(out)


def regions(content: bytes) -> Iterator[tuple[str, int]]:
    """A byte in each region of an archive: of the members' headers, padding, bytes and descriptors, and behind."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        directory = archive.start_dir
    for entry in entries:
        at = entry.header_offset
        name_nbytes, extra_nbytes = struct.unpack_from("<HH", content, at + 26)
        begin = at + 30 + name_nbytes + extra_nbytes
        short = entry.filename.partition("/")[2]
        yield f"{short}: signature", at
        yield f"{short}: checksum in the header", at + 14
        yield f"{short}: length of the name", at + 26
        yield f"{short}: name", at + 30 + name_nbytes - 1
        if extra_nbytes:
            yield f"{short}: padding", begin - 1
        if entry.file_size:
            yield f"{short}: first byte", begin
            yield f"{short}: last byte", begin + entry.file_size - 1
        if entry.flag_bits & 8:
            yield f"{short}: descriptor", begin + entry.file_size + 5
    at = directory
    for number in range(len(entries)):
        name_nbytes, extra_nbytes = struct.unpack_from("<HH", content, at + 28)
        for what, place in (
            ("flags", 8),
            ("checksum", 16),
            ("size", 24),
            ("attributes", 38),
            ("offset", 42),
            ("name", 46),
        ):
            yield f"entry {number} of the directory: {what}", at + place
        at += 46 + name_nbytes + extra_nbytes
    for what, back in (("count", 12), ("length", 10), ("offset", 6), ("comment", 1), ("signature", 22)):
        yield f"end record: {what}", len(content) - back
    if content[-42:-38] == b"PK\x06\x07":
        yield "64-bit end record: count", len(content) - 98 + 24
        yield "locator: offset", len(content) - 42 + 8


@pytest.mark.slow
@pytest.mark.parametrize("source", ["torch", "converted"])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_in_any_region_is_found(
    sources: dict[str, Path], damaged: Callable[..., Path], tmp_path: Path, source: str, name: str
) -> None:
    """`verify` names the file, if any reader looks there; `convert` refuses, or writes what it writes of the whole one.

    The second shard has the members of the first; every fifth of its regions is each kind of header of some of them.
    """
    content = (sources[source] / TAG / name).read_bytes()
    expected = converted(sources[source], tmp_path / "out")
    unseen, wrong, all_regions = [], [], [*regions(content)]
    for region, at in all_regions[:: 5 if name == SHARDS[1] else 1]:
        folder = damaged(source, f"{TAG}/{name}", content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        if not any(fault.where.endswith(name) for fault in verify(str(folder)).faults):
            unseen.append(region)
        inspect(str(folder))
        if converted(folder, tmp_path / "out") not in (None, expected):
            wrong.append(region)
    unread = ("padding", "descriptor", "attributes")  # between members, or of no reader's interest
    assert ([region for region in unseen if not region.endswith(unread)], wrong) == ([], [])
    named = {region.partition(": ")[2] if "entry" not in region else "directory" for region, _ in all_regions}
    assert {"first byte", "name", "directory", "offset"} <= named


def lengths(content: bytes) -> dict[str, int]:
    """Of each kind of truncation one length that is left."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries, directory = archive.infolist(), archive.start_dir
    first, data = entries[0], max(entries, key=lambda entry: entry.file_size)
    return {
        "nothing": 0,
        "within the magic": 2,
        "the magic": 4,
        "within the first header": 20,
        "the first header": 30,
        "within the first name": 33,
        "within the first member": first.header_offset + 70,
        "before the largest member": data.header_offset,
        "within the largest member": data.header_offset + 200,
        "before the directory": directory,
        "within the directory": directory + 50,
        "within an end record": len(content) - 9,
        "before the end record": len(content) - 22,
        "all but one byte": len(content) - 1,
    }


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_truncation_is_found(
    sources: dict[str, Path], damaged: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """By `verify` and `inspect`, which name the file, and by `convert`, which refuses."""
    content = (sources["torch"] / TAG / name).read_bytes()
    for kind, nbytes in lengths(content).items():
        folder = damaged("torch", f"{TAG}/{name}", content[:nbytes])
        for found in (verify(str(folder)), inspect(str(folder))):
            assert any(fault.where.endswith(name) for fault in found.faults), kind
        assert converted(folder, tmp_path / "out") is None, kind


def test_a_flipped_byte_anywhere_in_the_manifest_is_found(
    sources: dict[str, Path], damaged: Callable[..., Path]
) -> None:
    """Also where it stays JSON; white space, which no reader tells apart, may change."""
    content = (sources["converted"] / "ds_reshard.json").read_bytes()
    own = content.index(b'\n "crc32"')  # where the manifest's own checksum stands: it may not lose its name
    for at in {*range(0, len(content), 19), *range(own, own + 20)}:
        changed = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        folder = damaged("converted", "ds_reshard.json", changed)
        found = verify(str(folder)).faults
        assert [fault.where for fault in found] == [str(folder / "ds_reshard.json")] or content[at : at + 1].isspace()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"files": 3}',
        b'{"files": {"a": 1}}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"files": {}, "crc32": []}',
        b"9" * 5000,
        b'{"crc32": "00000000"}',
    ],
)
def test_a_manifest_that_is_none_is_a_finding(damaged: Callable[..., Path], content: bytes) -> None:
    folder = damaged("converted", "ds_reshard.json", content)
    assert [fault.where for fault in verify(str(folder)).faults] == [str(folder / "ds_reshard.json")]


def _swap(folder: Path) -> None:
    for one, other in ((SHARDS[0], "kept"), (SHARDS[1], SHARDS[0]), ("kept", SHARDS[1])):
        (folder / one).rename(folder / other)


def _replace(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def run(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return run


SHUFFLED: dict[str, Callable[[Path], object]] = {
    "swapped": _swap,
    "duplicated": lambda folder: shutil.copyfile(folder / SHARDS[0], folder / SHARDS[1]),
    "missing": lambda folder: (folder / SHARDS[1]).unlink(),
    "all missing": lambda folder: [(folder / name).unlink() for name in SHARDS],
    "model missing": lambda folder: (folder / MODEL).unlink(),
    "model for a shard": lambda folder: shutil.copyfile(folder / MODEL, folder / SHARDS[1]),
    "shard for the model": lambda folder: shutil.copyfile(folder / SHARDS[1], folder / MODEL),
    "a folder": _replace(SHARDS[1], lambda path: path.mkdir()),
    "a pipe": _replace(SHARDS[1], os.mkfifo),
    "a link to nothing": _replace(SHARDS[1], lambda path: path.symlink_to("none")),
    "a device": _replace(SHARDS[1], lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("case", SHUFFLED)
def test_shards_that_are_not_where_they_belong_are_found(
    damaged: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    """Nothing is converted, and nothing waits for a pipe or a device."""
    folder = damaged("torch", "latest", TAG.encode())
    SHUFFLED[case](folder / TAG)
    assert verify(str(folder), tag=TAG).faults and inspect(str(folder), tag=TAG).faults
    assert converted(folder, tmp_path / "out") is None


def test_a_folder_that_cannot_be_listed_is_said_to_be(damaged: Callable[..., Path]) -> None:
    """A link that leads to itself: what else lies there is not guessed."""
    folder = damaged("torch", "latest", TAG.encode())
    (folder / TAG / "loop").symlink_to(folder / TAG / "loop")
    with pytest.raises(ReadFailed, match="symbolic links"):
        verify(str(folder))


@pytest.mark.parametrize("name", ["latest", "ds_reshard.json"])
def test_a_pipe_in_the_place_of_a_small_file_is_not_waited_for(damaged: Callable[..., Path], name: str) -> None:
    folder = damaged("converted", name, b"")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if name == "latest":
        assert main(["verify", str(folder)]) == 2
    else:
        assert [fault.where for fault in verify(str(folder)).faults] == [str(folder / name)]


@pytest.mark.parametrize("tag", ["", "..", "../..", "a\0b", "none", "x" * 5000, "\udcff"])
def test_a_latest_that_names_nothing_is_refused(damaged: Callable[..., Path], tag: str) -> None:
    folder = damaged("torch", "latest", tag.encode("utf-8", "surrogateescape"))
    for command in (["verify"], ["inspect"]):
        assert main([*command, str(folder)]) == 2


def test_a_tag_reached_by_another_way_has_its_own_name(sources: dict[str, Path], tmp_path: Path) -> None:
    """With a slash at its end, or through `..`: the output has the tag's name, and nothing lies beside it."""
    expected = converted(sources["torch"], tmp_path / "out")
    assert expected is not None and f"{TAG}/{MODEL.replace('mp_', 'zero_pp_rank_0_mp_')}" in expected
    shutil.copytree(sources["torch"], tmp_path / "in")
    (tmp_path / "in" / TAG / "below").mkdir()
    ways = (f"{tmp_path}/in/{TAG}/", f"{tmp_path}/in/{TAG}/below/..", f"{tmp_path}/in/./{TAG}/.")
    for way in ways:
        assert converted(Path(way) if not way.endswith(("/", ".")) else way, tmp_path / "out") == expected  # type: ignore[arg-type]
    (tmp_path / "in" / TAG / "below" / "latest").write_text("..")
    assert converted(tmp_path / "in" / TAG / "below", tmp_path / "out") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


NAMES = ("../../evil", "/tmp/evil", "..", ".", "", "a\0b", "a/b", "x" * 300, "\ud800", "a\nb", "\x1b[2J")


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("to", ["zero3", "universal", "safetensors", "torch"])
def test_a_parameter_of_any_name_stays_in_the_output(tmp_path: Path, name: str, to: str) -> None:
    """Its name is no path: it is written as it is, or refused; the terminal is not commanded."""
    folder = write(Built(groups=(((name, (5, 3)), ("second", (4,))),)), tmp_path / "in")
    assert main(["inspect", str(folder)]) == 0
    assert main(["verify", "--deep", str(folder)]) == 0
    made = converted(folder, tmp_path / "out", to)
    assert {path.name for path in tmp_path.iterdir()} <= {"in", "out", "out.ds-reshard"}
    if made is not None:
        again = converted(tmp_path / "out", tmp_path / "back", "zero3") if to in ("zero3", "universal") else {}
        assert again is not None


def test_what_torch_would_run_is_refused_by_each_command(damaged: Callable[..., Path], tmp_path: Path) -> None:
    """One call of os.system deep inside the user's own state."""

    folder = damaged("torch", "latest", TAG.encode())
    content = torch.load(folder / TAG / MODEL, weights_only=False)
    content["user"] = [{"deep": (Attack(f"touch {tmp_path}/pwned"),)}]
    torch.save(content, folder / TAG / MODEL)
    for found in (verify(str(folder)), inspect(str(folder))):
        assert {fault.error for fault in found.faults} == {"UnsafePickle"}
    assert converted(folder, tmp_path / "out") is None
    assert not (tmp_path / "pwned").exists()
    with open_archive(folder / TAG / MODEL) as archive:
        assert "user" in archive.load(rules=ALLOW_ALL)  # type: ignore[operator]
