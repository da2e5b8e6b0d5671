"""Whatever the bytes: a value or a named error, nothing run, imported or opened, in bounded time and memory.

`make test` runs a slice of this, `make fuzz` as many cases as FUZZ_CASES says.
"""

from __future__ import annotations

import _compat_pickle
import io
import itertools
import os
import pickle
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from archives import lying, member_of, rebuilt
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from listener import heard
from mutations import ENDINGS, FILES, HARMLESS, PICKLES, Change, changed, changes, opcodes
from payloads import ACTING, NAMED, Payload, at, places

from ds_reshard.containers import zip_directory
from ds_reshard.containers.pickle_engine import UNKNOWN, Reading
from ds_reshard.containers.pickle_reader import DEFAULT_LIMITS, keep_as_record, read_pickle, scan_bytes
from ds_reshard.containers.pickle_rules import ALLOW_ALL, PickleRules
from ds_reshard.containers.pickle_table import ALLOWED
from ds_reshard.containers.plain import plain
from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.revive import revive
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import ReshardError, UnsafePickle
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
        max_examples=max(1, CASES * percent // (100 * each)),
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


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
    value = read_pickle(data, where="file", persistent=lambda identity: ("persistent", identity), rules=ALLOW_ALL)
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


HARMS: list[tuple[Payload, str]] = [
    *ACTING.values(),
    *((lambda _, data=data: data, name) for data, name in NAMED.values()),
]
harms = st.tuples(
    st.sampled_from(HARMLESS),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(HARMS),
    st.sampled_from(("touch x", "", "\\'\"", "y" * 300)),
)


@share(10)
@given(harms)
def test_a_harmful_call_anywhere_is_named(drawn: tuple[bytes, float, tuple[Payload, str], str]) -> None:
    """Among the instructions of any pickle, at any place, with any argument; nothing runs."""
    data, where, (payload, expected), command = drawn
    found = places(data)
    changed = at(data, found[int(where * len(found))], payload(command))
    with pytest.raises(UnsafePickle) as caught:
        read_pickle(changed, where="file", persistent=lambda identity: ("persistent", identity))
    names = (expected, expected.replace("builtins.", "__builtin__."))  # protocol 3 and later names no Python 2
    assert any(name in fault.what for name in names for fault in caught.value.faults)
    assert bounded(partial(read_pickle, changed, where="file", persistent=lambda identity: identity)) == []


# -- what Python's own reader asks for ---------------------------------------------------------------------------------

HARMLESS_MODULES = ("builtins", "collections", "_codecs", "copyreg", "datetime")


def today(module: str, name: str) -> tuple[str, str]:
    """What a name of Python 2 is called now, as pickles before protocol 3 are read."""
    return _compat_pickle.NAME_MAPPING.get((module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name))


class _Meta(type):
    def __call__(cls, *args: object, **kwargs: object) -> object:
        return cls.__new__(cls, *args, **kwargs)


class _Inert(metaclass=_Meta):
    """Stands for whatever is named, takes whatever it is given, and notes that it was called."""

    name, called = ("", ""), set[tuple[str, str]]()

    def __new__(cls, *_: object, **__: object) -> Any:
        cls.called.add(cls.name)
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None: ...
    def __setitem__(self, key: object, value: object) -> None: ...
    def __call__(self, *_: object) -> object:
        return self

    def append(self, value: object) -> None: ...
    def extend(self, values: object) -> None: ...
    def add(self, value: object) -> None: ...


class _Asking(pickle.Unpickler):
    """Python's own reader, of which every name is noted, and replaced where it is none that only holds values."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.named: set[tuple[str, str]] = set()
        self.called: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.named.add((module, name))
        known = today(module, name)
        if known in ALLOWED and known[0] in HARMLESS_MODULES:
            return super().find_class(*known)
        return type("Inert", (_Inert,), {"name": (module, name), "called": self.called})

    def persistent_load(self, identity: object) -> object:
        return _Inert()


@contextmanager
def little_memory() -> Iterator[None]:
    """Python's reader makes room for whatever memo a pickle names."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (resident("VmSize") + (1 << 30), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def asked_of_python(data: bytes) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """The names that Python's own reader asks for, and those of them that it calls, as far as it comes."""
    reader = _Asking(data)
    with little_memory(), suppress(Exception):
        reader.load()
    named, called = (
        {one for one in names if not {one, today(*one)} & ALLOWED.keys()} for names in (reader.named, reader.called)
    )
    return named, called


def finds_what_python_asks(data: bytes) -> None:
    named, called = asked_of_python(data)
    if named:
        with pytest.raises(ReshardError):
            read_pickle(data, where="file", persistent=lambda identity: ("persistent", identity))
    reading = Reading(data, lambda _: ObjectRecord(callable=UNKNOWN), keep_as_record, DEFAULT_LIMITS, PickleRules())
    found = {finding.name for finding in reading.findings.values()}
    assert (
        reading.astray
        or reading.over_limit
        or all(f"{module}.{name}" in found or ".".join(today(module, name)) in found for module, name in named)
    )
    if called and all(name.isidentifier() for pair in called for part in pair for name in part.split(".")):
        assert scan_bytes(data, "file", "", PickleRules())


@share(25)
@given(harms, changes)
def test_python_asks_for_nothing_in_changed_pickles_that_is_not_found(
    drawn: tuple[bytes, float, tuple[Payload, str], str], made: list[Change]
) -> None:
    data, where, (payload, _), command = drawn
    found = places(data)
    finds_what_python_asks(changed(at(data, found[int(where * len(found))], payload(command)), made))


@share(25, each=len(ENDINGS))
@given(opcodes())
def test_python_asks_for_nothing_in_any_opcodes_that_is_not_found(data: bytes) -> None:
    for ending in ENDINGS:
        finds_what_python_asks(data + ending)


def read_whole(path: str) -> object:
    """All that is read of an archive: its directory, headers, pickle, members."""
    with open_archive(path) as archive:
        value = archive.load()
        for name in archive.members:
            archive.read(name)
    canonical(value)
    return value


def agrees(path: str) -> None:
    """What is accepted has the values that torch sees, where it accepts it too."""
    try:
        found = read_whole(path)
        expected = torch.load(path, weights_only=True)
    except Exception:
        return
    if not any(isinstance(part, ObjectRecord) for part in parts_of(found)):
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


@share(20)
@given(drawn=st.randoms(use_true_random=False))
def test_directories_of_files_say_the_same_by_columns(place: Path, drawn: random.Random) -> None:
    """As by the loop, which tells what is wrong."""
    place.write_bytes(lying(drawn))
    told: list[object] = []
    for many in (1, 1 << 40):
        with mock.patch.object(zip_directory, "_MANY", many), PositionedFile(str(place)) as file:
            try:
                root, members = zip_directory.read_members(file, 1 << 20)
                told.append((root, list(members.items())))
            except ReshardError as error:
                told.append(str(error))
    assert told[0] == told[1]


@share(10)
@given(tree=TREES)
def test_whole_files_hold_what_torch_reads(place: Path, tree: object) -> None:
    """Values, element types, shapes, strides and bytes, as `torch.load(weights_only=True)` has them."""
    torch.save(tree, place)
    assert same(read_whole(str(place)), torch.load(place, weights_only=True))


def test_the_pickles_and_files_are_whole_before_they_are_changed(place: Path) -> None:
    """What is changed was accepted: otherwise nothing but the first check would be tried."""
    for data in HARMLESS:
        read_pickle(data, where="file", persistent=lambda identity: identity)
    for data in PICKLES:
        read_pickle(data, where="file", persistent=lambda identity: identity, rules=ALLOW_ALL)
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
