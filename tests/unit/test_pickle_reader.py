"""Pickles of plain values read as pickle.loads reads them; everything named becomes a record."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard.containers.pickle_reader import read_pickle
from ds_reshard.containers.pickle_rules import ALLOW_ALL
from ds_reshard.containers.pickle_tokens import PickleLimits
from ds_reshard.errors import CheckpointDamaged, UnsafePickle
from ds_reshard.model.records import GlobalName, ObjectRecord


def read(data: bytes, **options: object) -> object:
    return read_pickle(
        data, where="file", **{"persistent": lambda identity: ("persistent", identity), "rules": ALLOW_ALL, **options}
    )


class Slotted:
    def __init__(self) -> None:
        self.value = [1]


class Extended:
    def __new__(cls, *, width):
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (), {"width": 3}


class Names(list):
    pass


class Table(dict):
    pass


class Color(enum.Enum):
    RED = 1


KEYS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=6),
    st.binary(max_size=6),
    st.tuples(st.integers(0, 3), st.text(max_size=2)),
    st.frozensets(st.integers(0, 9), max_size=3),
)
VALUES = st.recursive(
    st.one_of(KEYS, st.complex_numbers(allow_nan=False), st.binary(max_size=300).map(bytearray)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict),
        st.sets(KEYS, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(VALUES, st.integers(0, 5))
def test_plain_values_come_back_as_pickle_reads_them(value, protocol):
    found = read(pickle.dumps(value, protocol))
    assert found == value
    assert repr(type(found)) == repr(type(value))


TEXTS = ["", "é\n\\'\"\u20ac\U0001f600", "x" * 300, "\ud800", b"", b"\0\xff" * 200, bytearray(b"")]
NUMBERS = [0, -1, 255, 256, -(2**31), 2**31, 1e300, -0.0, float("inf"), True, 1j, range(2, 9, 3), slice(1, None, 2)]
CONTAINERS = [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {}, [], set(), frozenset({1}), list(range(2000))]
CONTAINERS += [dict.fromkeys(range(2000)), set(range(2000))]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", [*TEXTS, *NUMBERS, *CONTAINERS], ids=lambda value: repr(value)[:20])
def test_every_kind_of_instruction(value, protocol):
    found = read(pickle.dumps(value, protocol))
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"I01\n.", True),
        (b"I00\n.", False),
        (b"I-7\n.", -7),
        (b"L12L\n.", 12),
        (b"L12\n.", 12),
        (b"F1.5\n.", 1.5),
        (b"S'a\\n\\x41\\101\\\\\\''\n.", "a\nAA\\'"),
        (b'S"b"\n.', "b"),
        (b"Va\\u20acb\n.", "a\u20acb"),
        (b"U\x02ab.", "ab"),
        (b"T\x02\0\0\0ab.", "ab"),
        (b"(I1\nI2\ntp0\ng0\n\x86.", ((1, 2), (1, 2))),
        (b"(lp0\nI1\na.", [1]),
        (b"(dp0\nI1\nI2\ns.", {1: 2}),
        (b"(I1\nI2\nd.", {1: 2}),
        (b"(I1\nI2\nl.", [1, 2]),
        (b"K\x012\x86.", (1, 1)),
        (b"(K\x01K\x021K\x03.", 3),
        (b"K\x01K\x020.", 1),
        (b"\x8b\x02\0\0\0\xff\xff.", -1),
        (b"\x8a\0.", 0),
        (b"c__builtin__\nxrange\n(K\x03tR.", range(3)),
        (b"K\x05.\0\0\0", 5),
    ],
)
def test_instructions_of_old_and_rare_writers(data, value):
    assert read(data) == value == pickle.loads(data.rstrip(b"\0"), encoding="utf-8")


@pytest.mark.parametrize("protocol", range(6))
def test_shared_values_stay_shared_and_cycles_stay_cycles(protocol):
    shared: list[object] = []
    cycle: list[object] = [shared, shared]
    cycle.append(cycle)
    found = read(pickle.dumps(cycle, protocol))
    assert found[0] is found[1]
    assert found[2] is found


@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_become_records_of_what_was_asked(protocol):
    here = __name__
    record = read(pickle.dumps(Slotted(), protocol))
    assert isinstance(record, ObjectRecord)
    assert (str(record.callable), record.args, record.by_new) == (f"{here}.Slotted", (), True)
    assert (record.has_state, record.state) == (True, {"value": [1]})
    names = read(pickle.dumps(Names([1, 2]), protocol))
    assert (str(names.callable), names.items) == (f"{here}.Names", [1, 2])
    table = read(pickle.dumps(Table(a=1), protocol))
    assert (str(table.callable), table.pairs) == (f"{here}.Table", [("a", 1)])
    color = read(pickle.dumps(Color.RED, protocol))
    assert (str(color.callable), color.args, color.by_new) == (f"{here}.Color", (1,), False)


def test_keyword_arguments_of_new_are_kept():
    record = read(pickle.dumps(Extended(width=3), 4))
    assert (record.kwargs, record.by_new) == ({"width": 3}, True)


def test_names_are_never_looked_up():
    assert read(pickle.dumps(datetime.timedelta, 4)) == GlobalName(module="datetime", name="timedelta")
    assert read(b"\x80\x02cno.such.module\nNoSuch.Class\n.") == GlobalName(module="no.such.module", name="NoSuch.Class")


def test_names_of_python_2_become_those_of_python_3():
    assert str(read(pickle.dumps(print, 2))) == "builtins.print"
    assert str(read(pickle.dumps(collections.UserDict, 2))) == "collections.UserDict"


def test_state_of_an_ordered_dict_is_dropped():
    class_free = collections.OrderedDict(a=1)
    class_free._metadata = {"version": 1}
    assert read(pickle.dumps(class_free, 2)) == {"a": 1}


def test_hook_gives_calls_a_meaning_and_passes_on_the_rest():
    def hook(function: GlobalName, args: tuple[object, ...]) -> object:
        return ("made", args) if function.name == "timedelta" else NotImplemented

    data = pickle.dumps([datetime.timedelta(1), datetime.date(2020, 1, 2)], 4)
    first, second = read(data, reduce=hook)
    assert first == ("made", (1, 0, 0))
    assert str(second.callable) == "datetime.date"


def test_persistent_ids_go_to_the_hook():
    assert read(b"\x80\x02X\x07\0\0\0storageK\x07\x86Q.") == ("persistent", ("storage", 7))
    for other in (b"K\x07", b"]", b")", b"X\x06\0\0\0moduleK\x07\x86"):
        with pytest.raises(UnsafePickle, match="no storage of the file"):
            read(b"\x80\x02" + other + b"Q.")


def test_namespace_of_protocol_zero_is_a_record_of_copyreg():
    record = read(pickle.dumps(argparse.Namespace(a=1), 0))
    assert (str(record.callable), record.state) == ("copyreg._reconstructor", {"a": 1})


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "byte 0: the pickle ends before its STOP"),
        (b"]", "byte 1: the pickle ends before its STOP"),
        (b".", "byte 0: STOP"),
        (b"K", "byte 0: BININT1: the pickle ends inside"),
        (b"J\0\0", "byte 0: BININT: the pickle ends inside"),
        (b"X\xff\xff\xff\xffab.", "byte 0: BINUNICODE: declares 4294967295 bytes where 3 are left"),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\xffab.", "BINBYTES8: declares 18446744073709551615"),
        (b"\x96\xff\xff\xff\xff\xff\xff\xff\x7fab.", "BYTEARRAY8: declares"),
        (b"\x95\xff\0\0\0\0\0\0\0N.", "FRAME: declares"),
        (b"T\xff\xff\xff\xffab.", "BINSTRING: declares a negative"),
        (b"X\x01\0\0\0\xff.", "BINUNICODE: 'utf-8' codec"),
        (b"h\x07.", "BINGET: memo entry 7 was never stored"),
        (b"t.", "byte 0: TUPLE: there is no mark"),
        (b"a..", "APPEND: the instruction needs more values"),
        (b"\xfe.", "byte 0: opcode 0xfe: is not an instruction"),
        (b"\x80\x07.", "PROTO: protocol 7"),
        (b"}]K\x01s.", "SETITEM: unhashable type: 'list'"),
        (b"}(K\x01u.", "SETITEMS: a key has no value"),
        (b"K\x01K\x02a.", "appends to a int"),
        (b"NK\x01K\x02s.", "sets items of a NoneType"),
        (b"](K\x01\x90.", "adds members to []"),
        (b"\x8f(]\x90.", "ADDITEMS: unhashable"),
        (b"cos\nsystem\nNR.", "with a NoneType for a tuple of arguments"),
        (b"K\x01K\x01\x93.", "STACK_GLOBAL: the name of a class is not text"),
        (b"K\x01K\x02.", "values left on the stack"),
        (b"(.", "STOP"),
        (b"N.x", "byte 2: 1 bytes follow the end"),
        (b"I" + b"1" * 2000 + b"\n.", "an integer of 2000 digits"),
        (b"\x8b\xff\xff\0\0" + b"1" * 65535 + b".", "an integer of 65535 bytes"),
        (b"\x8b\xff\xff\xff\xff.", "LONG4: declares a negative number of bytes"),
        (b"Fx\n.", "could not convert"),
        (b"S'a\n.", "not in quotes"),
        (b"cabc", "GLOBAL: the pickle ends inside a line"),
        (b"cno\nclass\n)\x81]b]b.", "a second state"),
        (b"c__builtin__\nrange\n(K\x01K\x02K\0tR.", "arg 3 must not be zero"),
        (b"NK\x01}\x92.", "calls None with a int for a tuple of arguments"),
    ],
)
def test_malformed_pickles_are_damage_with_place_and_cause(data, complaint):
    with pytest.raises((CheckpointDamaged, UnsafePickle)) as caught:
        read(data)
    assert complaint in str(caught.value)
    assert "file: byte" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"Pid\n.",
        b"(ios\nsystem\n.",
        b"(cos\nsystem\no.",
        b"\x82\x01.",
        b"\x83\x01\0.",
        b"\x84\x01\0\0\0.",
        b"\x97.",
        b"N\x98.",
        b"N)R.",
        b"cos\nsystem\n)R)R.",
        b"]}b.",
        b"cos\nsystem\n}b.",
    ],
)
def test_what_no_checkpoint_needs_is_unsafe(data):
    with pytest.raises(UnsafePickle, match="nothing was run"):
        read(data)


def test_nesting_is_limited_exactly():
    value: object = []
    for _ in range(199):
        value = [value]
    data = pickle.dumps(value, 4)
    assert read(data) == value
    with pytest.raises(CheckpointDamaged, match="nests deeper than 199"):
        read(data, limits=PickleLimits(depth=199))


def test_nesting_is_that_of_the_longest_way_to_a_shared_part():
    """The shared tail is first seen near the top, then at the end of a long chain."""
    tail: list[object] = []
    for _ in range(120):
        tail = [tail]
    chain: object = tail
    for _ in range(120):
        chain = [chain]
    with pytest.raises(CheckpointDamaged, match="nests deeper"):
        read(pickle.dumps([tail, chain], 4))


def test_size_is_limited():
    with pytest.raises(CheckpointDamaged, match="at most 3 are read"):
        read(b"]]]]", limits=PickleLimits(nbytes=3))


def test_every_truncation_of_a_pickle_is_damage():
    for protocol in range(6):
        data = pickle.dumps([{"a": (1, 2.5, None, "é", b"x", 2**80, {1}, Slotted())}], protocol)
        for cut in range(len(data)):
            with pytest.raises(CheckpointDamaged):
                read(data[:cut])
