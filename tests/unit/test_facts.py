"""`canonical`: one text for equal trees, another for different ones, in linear time."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard.model.facts import ScalarTensor, canonical, describe
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, StorageRecord, TensorRecord

QUICK = settings(max_examples=60)
FP32, INT64 = ElementType.FLOAT32, ElementType.INT64
SECONDS = 2.0

scalars = st.builds(
    ScalarTensor, dtype=st.sampled_from([FP32, INT64]), shape=st.sampled_from([(), (1,)]), data=st.binary(max_size=3)
)
globals_ = st.builds(GlobalName, module=st.sampled_from(["torch", "numpy"]), name=st.sampled_from(["a", "b"]))
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(width=16)
    | st.text("ab'{}[],:", max_size=3)
    | st.binary(max_size=2)
    | scalars
    | globals_
)
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3)
)


def shape_of(value: object) -> object:
    """The tree with its types said aloud, so that == tells 1 from True from 1.0, and NaN equals itself."""
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape_of(item) for item in value]
    return (type(value).__name__, repr(value))


@QUICK
@given(trees)
def test_equal_trees_have_equal_text(tree):
    """A copy of a tree shares no part with it."""
    assert canonical(copy.deepcopy(tree)) == canonical(tree)


@QUICK
@given(trees, trees)
def test_different_trees_have_different_text(one, other):
    assert (canonical(one) == canonical(other)) == (shape_of(one) == shape_of(other))


@QUICK
@given(trees, st.data())
def test_one_changed_leaf_changes_the_text(tree, data):
    """Wherever in the tree it lies; a tree with a part exchanged is another tree."""
    holder = [copy.deepcopy(tree)]
    places = [(holder, 0)]
    for parent, key in places:
        inner = parent[key]
        if isinstance(inner, list | dict):
            places.extend((inner, k) for k in (range(len(inner)) if isinstance(inner, list) else list(inner)))
    parent, key = data.draw(st.sampled_from(places))
    parent[key] = ["something else", 99]
    assert canonical(holder[0]) != canonical(tree)


@QUICK
@given(st.dictionaries(st.text("abc", max_size=2), trees, max_size=4))
def test_the_order_of_a_dict_does_not_matter(tree):
    assert canonical(dict(reversed(tree.items()))) == canonical(tree)


@QUICK
@given(trees)
def test_sharing_does_not_matter(tree):
    """The same part twice, and two equal parts."""
    assert canonical([tree, tree, {"a": tree}]) == canonical([tree, copy.deepcopy(tree), {"a": copy.deepcopy(tree)}])


def record(crc32: int = 1, path: str = "a.pt", **more: object) -> TensorRecord:
    storage = StorageRecord(path=path, key="0", dtype=FP32, numel=6, byte_offset=0, nbytes=24, crc32=crc32)
    made = {"storage": storage, "dtype": FP32, "element_offset": 0, "shape": (2, 3), "stride": (3, 1)}
    return TensorRecord(**made | more)


def built(name: str = "f", **more: object) -> ObjectRecord:
    return ObjectRecord(callable=GlobalName(module="m", name=name), **more)


def test_a_tensor_stands_for_its_bytes_not_for_its_file():
    assert canonical(record(path="a.pt")) == canonical(record(path="b.pt"))


DIFFERENT = {
    "bytes of tensors": (record(crc32=1), record(crc32=2)),
    "shapes of tensors": (record(), record(shape=(3, 2), stride=(2, 1))),
    "types of tensors": (record(), record(dtype=ElementType.INT32)),
    "parts of a storage": (record(shape=(2,), stride=(1,)), record(shape=(2,), stride=(1,), element_offset=2)),
    "callables": (built("f"), built("g")),
    "arguments": (built(args=(1,)), built(args=(2,))),
    "named arguments": (built(kwargs={"a": 1}), built(kwargs={"b": 1})),
    "states": (built(state={"a": 1}, has_state=True), built(state={"a": 2}, has_state=True)),
    "items": (built(items=[1]), built(pairs=[(1, 1)])),
    "a name and its text": (GlobalName(module="m", name="f"), "m.f"),
    "a cycle and none": ((lambda a: a.append(a) or a)([1]), [1, "itself"]),
    "long lists": (list(range(5000)), [*range(4999), 0]),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_records_that_differ_have_different_text(one, other):
    assert canonical(one) != canonical(other)
    assert canonical(copy.deepcopy(one)) == canonical(one)


ALIKE = {
    "the order in which a view walks": (record(shape=(2, 2), stride=(2, 1)), record(shape=(2, 2), stride=(1, 2))),
    "a state of None and none": (built(state=None, has_state=True), built()),
}


@pytest.mark.parametrize(("one", "other"), ALIKE.values(), ids=ALIKE)
def test_values_that_are_not_equal_have_different_text(one, other):
    assert canonical(one) != canonical(other)


def test_a_set_has_the_same_text_in_every_process():
    """Ranks compare their texts: a set in the saved config must not look like another step or run."""
    program = "from ds_reshard.model.facts import canonical; print(canonical({'a', 'b', 'c', 'd', 'e'}))"
    texts = [
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]


def cycle() -> list[object]:
    """A list and a dict that hold each other."""
    inner: dict[str, object] = {}
    outer: list[object] = [inner, 1]
    inner["outer"] = outer
    return outer


def test_a_cycle_ends_and_is_told_from_another():
    one, other = cycle(), cycle()
    assert canonical(one) == canonical(other)
    other[1] = 2
    assert canonical(one) != canonical(other)


def shared(levels: int, leaf: object) -> list[object]:
    """A list of two references to a list of two references to ...: 2 ** levels leaves in a few objects."""
    value = [leaf]
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize("leaf", ["short", "x" * 5000], ids=["short", "long"])
def test_exponentially_shared_parts_are_written_once(leaf):
    """2 ** 200 leaves, in no time; and a change in the single leaf is seen."""
    before = time.perf_counter()
    text = canonical(shared(200, leaf))
    assert canonical(shared(200, leaf)) == text != canonical(shared(200, leaf + "!"))
    assert len(text) <= 10_000
    assert time.perf_counter() - before < SECONDS


def test_many_cycles_through_one_list_end_quickly():
    hub: list[object] = []
    hub.extend({"hub": hub, "number": i} for i in range(20_000))
    before = time.perf_counter()
    assert canonical(hub)
    assert time.perf_counter() - before < SECONDS


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (ScalarTensor(dtype=FP32, shape=(), data=b"\0\0\xc0\x3f"), "float32 1.5"),
        (ScalarTensor(dtype=INT64, shape=(), data=b"\7" + bytes(7)), "int64 7"),
        (ScalarTensor(dtype=ElementType.BFLOAT16, shape=(), data=b"\xc0\x3f"), "bfloat16 c03f"),
        (ScalarTensor(dtype=FP32, shape=(2,), data=bytes(8)), "float32 " + "00" * 8),
        ([0.9, 0.999], "[0.9,0.999]"),
        ("x" * 200, "'" + "x" * 76 + "..."),
    ],
)
def test_a_value_is_described_in_few_words(value, text):
    assert describe(value) == text
