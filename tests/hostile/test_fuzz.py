"""Whatever the bytes: a value or a named error, nothing run, imported or opened, in bounded time and memory.

`make test` runs a slice of this, `make fuzz` as many cases as FUZZ_CASES says.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from archives import member_of, rebuilt
from hypothesis import HealthCheck, Phase, given, settings
from listener import heard
from mutations import ENDINGS, FILES, PICKLES, Change, changed, changes, opcodes

from ds_reshard.containers.pickle_reader import read_pickle
from ds_reshard.containers.revive import revive
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.containers.zip_frame import frame_faults
from ds_reshard.errors import ReshardError
from ds_reshard.formats.zero.plain import plain
from ds_reshard.model.facts import canonical, describe
from ds_reshard.model.nesting import children
from ds_reshard.model.records import ObjectRecord

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from torch_values import TREES, same

CASES = int(os.environ.get("FUZZ_CASES", "400"))
SECONDS, NBYTES = 5.0, 64 << 20
_calls = itertools.count()


def share(percent: int, each: int = 1) -> settings:
    """So many of all cases, `each` of them from one example; none is kept, and a failure is made small."""
    return settings(
        max_examples=max(1, CASES * percent // (100 * each)), deadline=None, database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def resident(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def forget_peak() -> None:
    """Let the high-water mark begin anew (proc(5)), which takes long."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as marks:
        marks.write("5")


def bounded(*works: Callable[[], object]) -> list[str]:
    """What was heard while each of `works` ran, none of which took long or much."""
    if next(_calls) % 100 == 0:
        forget_peak()
    before, found = resident("VmHWM"), []
    for work in works:
        start = time.process_time()
        found += heard(work)
        assert time.process_time() - start < SECONDS
    assert resident("VmHWM") - before < NBYTES
    return found


def all_of(data: bytes) -> None:
    """Everything that is done with a pickle's value without the framework."""
    value = read_pickle(data, where="file", persistent=lambda identity: ("persistent", identity))
    for told in (canonical(value), describe(value), plain(value, {})):
        assert told is not ...
    revive(value, builders={}, tensor=lambda record: record, where="file")


@share(25, each=len(PICKLES))
@given(changes)
def test_changed_pickles(made: list[Change]) -> None:
    """Of plain values in every protocol, and of files of torch.save."""
    assert bounded(*(partial(all_of, changed(data, made)) for data in PICKLES)) == []


@share(25, each=len(ENDINGS))
@given(opcodes())
def test_pickles_of_any_opcodes(data: bytes) -> None:
    assert bounded(*(partial(all_of, data + ending) for ending in ENDINGS)) == []


def read_whole(path: str) -> object:
    """All that is read of an archive: its directory, headers, pickle, members."""
    with open_archive(path) as archive:
        value = archive.load()
        for name in archive.members:
            archive.read(name)
    list(frame_faults(path))
    canonical(value)
    return value


def agrees(path: str) -> None:
    """What is accepted, and in which `verify` finds nothing, has the values that torch sees, where it accepts it too.

    A member whose directory entry has the attribute of a folder is one that torch 2.13 does not read: its tensor is
    memory as it was left. Here it has its bytes, and `verify` has a finding.
    """
    try:
        found = read_whole(path)
        expected = torch.load(path, weights_only=True)
    except Exception:
        return
    if not list(frame_faults(path)) and not any(isinstance(part, ObjectRecord) for part in parts_of(found)):
        assert same(found, expected)


def parts_of(value: object) -> Iterator[object]:
    seen, left = {id(value)}, [value]
    while left:
        yield (part := left.pop())
        for child in children(part):
            if id(child) not in seen:
                seen.add(id(child))
                left.append(child)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "archive.pt"


def opens_only(path: Path, content: bytes) -> None:
    """A file is opened, and no other; then it is compared with what torch makes of it."""
    path.write_bytes(content)
    found = bounded(partial(read_whole, str(path)))
    assert {event for event in found if not event.startswith(f"open ('{path}'")} == set()
    agrees(str(path))


@share(30, each=len(FILES))
@given(made=changes)
def test_changed_files(place: Path, made: list[Change]) -> None:
    """Bytes of headers, directory, end records, pickle and tensors, and pieces moved, lost and added."""
    for content in FILES:
        opens_only(place, changed(content, made))


@share(10, each=len(FILES))
@given(made=changes)
def test_changed_pickles_in_whole_files(place: Path, made: list[Change]) -> None:
    """Every checksum fits: only what the pickle says of storages and tensors is wrong."""
    for content in FILES:
        opens_only(place, rebuilt(content, {"data.pkl": changed(member_of(content, "data.pkl"), made)}))


@share(10)
@given(tree=TREES)
def test_whole_files_hold_what_torch_reads(place: Path, tree: object) -> None:
    """Values, element types, shapes, strides and bytes, as `torch.load(weights_only=True)` has them."""
    torch.save(tree, place)
    assert same(read_whole(str(place)), torch.load(place, weights_only=True))


def test_the_pickles_and_files_are_whole_before_they_are_changed(place: Path) -> None:
    """What is changed was accepted: otherwise nothing but the first check would be tried."""
    for data in PICKLES:
        read_pickle(data, where="file", persistent=lambda identity: identity)
    for content in FILES:
        place.write_bytes(content)
        read_whole(str(place))


def test_a_bound_that_is_broken_is_noticed() -> None:
    """The watch sees what is opened, what is slow and what is large."""
    assert bounded(lambda: open(os.devnull, "rb").close()) != []
    forget_peak()
    with pytest.raises(AssertionError):
        bounded(lambda: bytearray(os.urandom(1)) * (2 * NBYTES))
    with pytest.raises(ReshardError):
        all_of(b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.")
