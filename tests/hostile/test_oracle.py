"""The reader of pickles and the one before it, kept as an oracle for one release, say the same of any bytes."""

from __future__ import annotations

import os
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import oracle
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from mutations import ENDINGS, PICKLES, Change, changed, changes, opcodes
from opcodes import EVERY_OPCODE
from payloads import Payload, at, places
from test_fuzz import harms

from ds_reshard.containers.pickle_engine import UNKNOWN
from ds_reshard.containers.pickle_reader import read_pickle
from ds_reshard.containers.pickle_rules import ALLOW_ALL, PickleRules
from ds_reshard.errors import ReshardError, faults_of
from ds_reshard.model.records import ObjectRecord

CASES = int(os.environ.get("FUZZ_CASES", "400"))
KINDS: Counter[str] = Counter()


def share(percent: int, each: int = 1) -> settings:
    return settings(
        max_examples=max(1, CASES * percent // (100 * each)),
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def alike(first: object, second: object) -> bool:
    """Whether two values are the same, of the same types and shared in the same places."""
    pairs: dict[int, object] = {}
    left = [(first, second)]
    for one, other in left:
        if type(one) is not type(other):
            return False
        if isinstance(one, float) and isinstance(other, float):
            if struct.pack("d", one) != struct.pack("d", other):
                return False
            continue
        if isinstance(one, (list, tuple, dict, set, frozenset, ObjectRecord)) and (one or isinstance(one, list | dict)):
            if id(one) in pairs:
                if pairs[id(one)] is not other:
                    return False
                continue
            pairs[id(one)] = other
        if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
            if len(one) != len(other):
                return False
            left += zip(one, other, strict=True)
        elif isinstance(one, dict) and isinstance(other, dict):
            left.append((list(one.items()), list(other.items())))
            if isinstance(one, OrderedDict):
                left.append((vars(one), vars(other)))
        elif isinstance(one, ObjectRecord) and isinstance(other, ObjectRecord):
            left += [(getattr(one, name), getattr(other, name)) for name in ObjectRecord.__slots__]
        elif isinstance(one, (set, frozenset)):
            if sorted(map(repr, one)) != sorted(map(repr, other)):  # type: ignore[call-overload]
                return False
        elif repr(one) != repr(other):
            return False
    return True


def outcome(reader: Callable[..., object], data: bytes, rules: PickleRules) -> tuple[str, object]:
    try:
        value = reader(data, where="file", persistent=lambda _: ObjectRecord(callable=UNKNOWN), rules=rules)
    except ReshardError as error:
        return type(error).__name__, [(fault.error, fault.what) for fault in faults_of(error)]
    return "value", value


Told = list[tuple[str, str]]


def judged(old: tuple[str, Any], new: tuple[str, Any]) -> str | None:
    """Why the two may differ in what they raise; None where they may not."""
    before: Told = [] if old[0] == "value" else [fault for fault in old[1] if fault[0] != "CheckpointDamaged"]
    after: Told = [] if new[0] == "value" else new[1]
    if any("convert to float" in what or "number too large" in what for _, what in after):
        return "a text of a float that only pickle.py takes: C, which loads, stops there"
    if new[0] == "UnsafePickle" and any("end of a frame" in what or "memo entry" in what for _, what in after):
        return "a frame or memo entry that is noted before its instruction fails, not behind it"
    if new[0] == "UnsafePickle" and any("protocol behind the beginning" in what for _, what in after):
        return "a second protocol: refused, as it changes what names mean"
    if before and all("which is only called" in what for _, what in before):
        return "a name that is only called in a tuple which is thrown away"
    if before and all("(EXT" in what or "which is only called" in what for _, what in before):
        return "an instruction that is cut short is not carried out"
    if any("INST: there is no mark" in what for _, what in after):
        return "INST without a mark: C looks for the mark first, and then for the name"
    if old[0] == "UnsafePickle" and all("left on the stack" in what for _, what in before) and new[0] != "value":
        return "a mark that is left on the stack is damage"
    return None


def difference(data: bytes, rules: PickleRules) -> str | None:
    """How the two differ, where that was not judged; None where they do not."""
    old, new = outcome(oracle.read_pickle, data, rules), outcome(read_pickle, data, rules)
    if old[0] == new[0]:
        return None if old[0] != "value" or alike(old[1], new[1]) else "other value"
    if (why := judged(old, new)) is not None:
        KINDS[why] += 1
        return None
    return f"{old[0]} -> {new[0]}: {old[1]!r:.300} -> {new[1]!r:.300}"


def agrees(data: bytes) -> None:
    for rules in (ALLOW_ALL, PickleRules()):
        assert difference(data, rules) is None, data


@pytest.mark.parametrize("data", PICKLES, ids=range(len(PICKLES)))
def test_real_pickles_are_the_same_values(data: bytes) -> None:
    agrees(data)
    assert outcome(read_pickle, data, ALLOW_ALL)[0] == "value"


@pytest.mark.parametrize("case", EVERY_OPCODE)
def test_each_instruction_is_the_same(case: str) -> None:
    agrees(EVERY_OPCODE[case])


@share(25, each=len(PICKLES))
@given(changes)
def test_changed_pickles_are_the_same(made: list[Change]) -> None:
    for data in PICKLES:
        agrees(changed(data, made))


@share(50, each=len(ENDINGS))
@given(opcodes())
def test_any_opcodes_are_the_same(data: bytes) -> None:
    for ending in ENDINGS:
        agrees(data + ending)


@share(25)
@given(harms, changes)
def test_harmful_calls_in_changed_pickles_are_the_same(
    drawn: tuple[bytes, float, tuple[Payload, str], str], made: list[Change]
) -> None:
    data, where, (payload, _), command = drawn
    found = places(data)
    agrees(changed(at(data, found[int(where * len(found))], payload(command)), made))


def test_a_difference_is_noticed() -> None:
    assert not alike([1, (2.5, {"a": 1})], [1, (2.5, {"a": True})]) and not alike([0.0], [-0.0])
    shared: list[object] = []
    assert not alike([shared, shared], [[], []]) and alike([shared, {1: shared}], [shared, {1: shared}])
    assert judged(("value", 1), ("UnsafePickle", [("UnsafePickle", "names a.b")])) is None
    assert judged(("UnsafePickle", [("UnsafePickle", "calls a.b()")]), ("value", 1)) is None
