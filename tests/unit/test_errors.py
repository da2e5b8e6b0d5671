"""Errors travel between processes, and the same faults raise the same text on every rank."""

from __future__ import annotations

import copy
import inspect
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard import errors
from ds_reshard.errors import Fault, ReshardError, as_faults, faults_of, raise_faults, without_secrets

QUICK = settings(max_examples=50)
CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ReshardError)]
PRECEDENCE = [
    "InternalError",
    "ConfigError",
    "CheckpointNotFound",
    "UnsupportedLayout",
    "UnsafePickle",
    "TrustRequired",
    "CheckpointDamaged",
    "ReadFailed",
    "WriteFailed",
    "DeviceFailed",
    "ChecksumMismatch",
    "FingerprintMismatch",
    "ModelMismatch",
    "ParamGroupMismatch",
    "HookError",
    "EngineUnusable",
    "ReshardError",
]

words = st.sampled_from(["a", "b", "c"])
found_faults = st.builds(
    Fault, error=st.sampled_from(PRECEDENCE), where=words, what=words, found=words, expected=st.just("a"), mend=words
)


def raised(faults: list[Fault]) -> ReshardError:
    with pytest.raises(ReshardError) as caught:
        raise_faults(faults, subject="loading it")
    return caught.value


def fault(error: str = "CheckpointDamaged", **more: str) -> Fault:
    return Fault(**{"error": error, "where": "file", "what": "is odd"} | more)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_pickles_with_its_faults(cls):
    error = cls("file: is odd", [fault(cls.__name__, expected="1", found="2", mend="mend it"), fault()])
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again), again.faults) == (cls, str(error), error.faults)


def test_the_tree_of_the_docstring_is_that_of_the_classes():
    drawn, path = {}, []
    for line in inspect.getdoc(errors).splitlines():
        name = line.lstrip(" │├└─").partition(" ")[0]
        if "── " in line or name == "ReshardError":
            depth = 0 if name == "ReshardError" else 1 + (line.index("── ") - 5) // 4
            path = [*path[:depth], name]
            drawn[name] = path[-2] if depth else "Exception"
    assert drawn == {cls.__name__: cls.__base__.__name__ for cls in CLASSES}


def test_the_tree_says_something_of_every_class():
    lines = [line for line in inspect.getdoc(errors).splitlines() if "── " in line]
    assert all(len(line.split("── ")[1].split(None, 1)) == 2 for line in lines)
    assert all(cls.__doc__ and not cls.__doc__.startswith(cls.__name__) for cls in CLASSES)


@QUICK
@given(st.lists(found_faults, min_size=1, max_size=8), st.randoms())
def test_the_same_faults_raise_the_same_error_in_any_order(faults, rng):
    """And however often each was found: a rank that gathers others' faults hears of some twice."""
    shuffled = [*faults, *rng.choices(faults, k=3)]
    rng.shuffle(shuffled)
    one, other = raised(faults), raised(shuffled)
    assert (type(one), str(one), one.faults) == (type(other), str(other), other.faults)


def test_faults_that_differ_in_what_was_expected_have_an_order():
    """Sets are ordered by hashes, which differ between processes: faults built anew stand for those here."""
    texts = set()
    for attempt in range(20):
        rng = random.Random(attempt)
        faults = [fault(expected=str(i), mend=str(-i)) for i in range(20)]
        rng.shuffle(faults)
        texts.add(str(raised(faults)))
    assert len(texts) == 1


@pytest.mark.parametrize("first", range(len(PRECEDENCE)))
def test_the_cause_names_the_error_before_its_consequences(first):
    """Of faults of several classes, the first in the order of causes gives the class."""
    faults = [fault(name) for name in PRECEDENCE[first:]]
    error = raised(faults[::-1])
    assert type(error).__name__ == PRECEDENCE[first]
    assert [f.error for f in error.faults] == PRECEDENCE[first:]


def test_every_fault_is_shown_and_what_mends_it_comes_last():
    faults = [
        fault("ModelMismatch", where="weight", what="is not there", mend="rename it"),
        fault(where="b.pt", what="is empty", expected="a zip file", found="0 bytes", mend="restore it"),
        fault(where="a.pt", what="is odd", mend="restore it"),
    ]
    assert str(raised(faults)) == (
        "loading it: 3 faults found\n"
        "  a.pt: is odd\n"
        "  b.pt: is empty (expected a zip file, found 0 bytes)\n"
        "  weight: is not there\n"
        "  To mend: restore it\n"
        "  To mend: rename it"
    )


def test_one_fault_is_one():
    assert str(raised([fault()])) == "loading it: 1 fault found\n  file: is odd"


def test_of_very_many_faults_forty_are_shown_and_all_are_kept():
    error = raised([fault(where=f"{i:04}", mend="restore them") for i in range(1000)])
    lines = str(error).splitlines()
    assert (len(lines), lines[40], lines[41:]) == (
        43,
        "  0039: is odd",
        ["  ... and 960 more", "  To mend: restore them"],
    )
    assert len(error.faults) == 1000


def test_no_fault_is_no_error():
    assert raise_faults([], subject="loading it") is None


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_of_text_alone_is_one_fault_of_its_class(cls):
    """Its beginning names the file, and it says what to do; another rank that hears of it raises the same class."""
    (made,) = faults_of(cls("folder/file: is odd: very"))
    assert (made.error, made.where, made.what) == (cls.__name__, "folder/file", "is odd: very")
    assert made.mend
    assert type(raised([made])) is cls


@pytest.mark.parametrize(
    ("error", "named", "says"),
    [
        (MemoryError("10 MiB"), "DeviceFailed", "no memory is left on the host: 10 MiB"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"), "DeviceFailed", "8 bytes"),
        (RuntimeError("can't start new thread"), "DeviceFailed", "no thread is left on the host"),
        (OSError(24, "Too many open files", "/dev/null"), "ReadFailed", "Too many open files: /dev/null"),
        (RuntimeError("surprise"), "InternalError", "RuntimeError: surprise"),
    ],
)
def test_what_the_machine_lacks_is_no_bug(error, named, says):
    """By what torch 2.13 and Python say where the host has no memory, no thread or no descriptor left."""
    try:
        raise error
    except Exception as raised_one:
        (found,) = as_faults(raised_one, where="rank 1")
    assert found.error == named and says in found.what and (found.error == "InternalError") == ("report" in found.mend)


def test_faults_of_an_error_are_its_own():
    faults = [fault(where="a"), fault(where="b")]
    assert faults_of(raised(faults)) == faults


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("s3://key:SECRET@bucket/run", "s3://bucket/run"),
        ("S3://key:SECRET@bucket/run", "S3://bucket/run"),
        ("s3:/key:SECRET@bucket/run", "s3:/bucket/run"),
        ("s3:///key:SECRET@bucket/run", "s3:///bucket/run"),
        ("simplecache::s3://SECRET@bucket/run", "simplecache::s3://bucket/run"),
        ("s3://key:SE/CR?E'T@SECRET@bucket/run", "s3://bucket/run"),
        ("s3://bucket/run?X=SECRET&Y=SE@CRET: is odd", "s3://bucket/run: is odd"),
        ("a tag 's3://key:SECRET@bucket/run', b: 'hf://SECRET@c/d?e'", "a tag 's3://bucket/run', b: 'hf://c/d'"),
        ("hf://name/repository@revision/run", "hf://name/repository@revision/run"),
        ("hdfs://node:8020/run@1/x", "hdfs://node:8020/run@1/x"),
        ("/home/me@host/run: what is it? expected a:b@c", "/home/me@host/run: what is it? expected a:b@c"),
    ],
)
def test_no_error_tells_the_secrets_of_a_url(told, shown):
    """Neither its text nor its faults, wherever it came from; and what holds none is told as it is."""
    assert without_secrets(told) == without_secrets(shown) == shown
    made = Fault(error="ConfigError", where=told, what=told, expected=told, found=told, mend=told)
    assert made == Fault(error="ConfigError", where=shown, what=shown, expected=shown, found=shown, mend=shown)
    assert str(ReshardError(told)) == shown
