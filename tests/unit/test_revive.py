"""Records become the objects that torch.load makes, from an allow-list; everything else is refused at once."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import importlib
import io
import json
import math
import pathlib
import pickle
import re
import signal
import sys
import types
import uuid
import zipfile
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard.containers.pickle_reader import read_pickle
from ds_reshard.containers.pickle_rules import ALLOW_ALL, PickleRules
from ds_reshard.containers.pickle_table import FUNCTIONS
from ds_reshard.containers.revive import revive
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.containers.torch_zip_writer import write_pickle
from ds_reshard.errors import CheckpointDamaged, ConfigError, TrustRequired, UnsafePickle, UnsupportedLayout


def refuse(identity: object) -> object:
    raise AssertionError(identity)


ENUMS = frozenset({f"{__name__}.Color", f"{__name__}.Level"})


def again(data: bytes, **options: object) -> object:
    value = read_pickle(data, where="file", persistent=refuse, rules=ALLOW_ALL)
    return revive(value, **{"builders": {}, "tensor": refuse, "where": "file", "trusted": ENUMS, **options})


def equal(found: object, expected: object) -> bool:
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape, found.flags.writeable) == (expected.dtype, expected.shape, True)
        same_bytes = expected.dtype.hasobject or found.tobytes("A") == expected.tobytes("A")
        return np.array_equal(found, expected) and same_bytes
    if isinstance(expected, (np.random.RandomState, np.random.Generator)):
        return np.array_equal(found.standard_normal(9), expected.standard_normal(9))
    if isinstance(expected, (list, tuple, collections.deque)):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, (argparse.Namespace, types.SimpleNamespace)):
        return equal(vars(found), vars(expected))
    return bool(found == expected)


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Point:
    def __init__(self, x: int) -> None:
        self.x = x
        self.me = self


class Slotted:
    __slots__ = ("x",)

    def __init__(self) -> None:
        self.x = 1


class Custom:
    def __getstate__(self):
        return [1, 2]

    def __setstate__(self, state):
        self.state = state


class Names(list):
    pass


class Table(dict):
    pass


NESTED = argparse.Namespace(a=1, b=argparse.Namespace(c=[1, 2], d=pathlib.PurePosixPath("/a/b")))
NOW = datetime.datetime(2026, 2, 3, 4, 5, 6, 7)
STANDARD = [
    NESTED,
    types.SimpleNamespace(a=1),
    pathlib.Path("a/b"),
    pathlib.PureWindowsPath("c:/a"),
    NOW,
    NOW.replace(tzinfo=datetime.timezone.utc, fold=1),
    NOW.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=1), "X")),
    NOW.date(),
    NOW.time(),
    datetime.timedelta(-1, 2, 3),
    collections.OrderedDict(b=1, a=[1]),
    collections.defaultdict(list, a=[1]),
    collections.defaultdict(None, a=1),
    collections.deque([1, 2], 5),
    collections.deque([[1]]),
    collections.Counter("abca"),
    1j,
    {1, 2},
    frozenset({1}),
    slice(1, 2),
    range(3),
    bytearray(b"ab"),
    Color.RED,
    Level.HIGH,
    {Color.RED: (Level.HIGH,)},
    dict,
]
TIMES = np.array(["2020-01-01", "2021-01-02"], "M8[D]")
RECORDS = np.array([(1, [2.0, 3.0], b"x")], dtype=[("a", "<i2"), ("b", ">f8", (2,)), ("c", "S3")])
NUMPY = [
    np.arange(6).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(3, dtype=">i4"),
    np.zeros((0, 3), np.float16),
    np.array(5),
    np.array(["ab", "c"]),
    np.array([b"ab", b"c"]),
    np.array([True]),
    np.array([1j], np.complex64),
    np.array([1, "a", None, [2]], object),
    TIMES,
    RECORDS,
    np.float64(1.5),
    np.int8(-1),
    np.bool_(True),
    np.str_("ab"),
    np.datetime64("2020-01-01"),
    np.timedelta64(3, "ms"),
    np.dtype("f4"),
    RECORDS.dtype,
    np.float32,
]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", STANDARD, ids=lambda value: f"{type(value).__name__}-{value}"[:40])
def test_standard_types_come_back_equal(value, protocol):
    data = pickle.dumps(value, protocol)
    assert equal(again(data), pickle.loads(data))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", NUMPY, ids=lambda value: f"{type(value).__name__}-{value!r}"[:40])
def test_numpy_values_come_back_equal(value, protocol):
    data = pickle.dumps(value, protocol)
    assert equal(again(data), pickle.loads(data))


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_random_states_continue_where_they_were(kind, protocol):
    generator = np.random.Generator(getattr(np.random, kind)(7))
    generator.integers(0, 9, 5, dtype=np.int32)
    assert equal(again(pickle.dumps(generator, protocol)), generator)
    state = np.random.RandomState(getattr(np.random, kind)(7))
    state.standard_normal(3)
    assert equal(again(pickle.dumps(state, protocol)), state)
    assert equal(
        again(pickle.dumps(np.random.RandomState(3).get_state(), protocol)), np.random.RandomState(3).get_state()
    )


def test_generators_spawn_as_the_saved_one_would():
    found = again(pickle.dumps(np.random.default_rng(5), 4))
    assert equal(found.spawn(2)[1], np.random.default_rng(5).spawn(2)[1])


def test_client_state_of_a_checkpoint_is_what_torch_load_gives(tmp_path):
    model = collections.OrderedDict(w=torch.ones(2, 3), half=torch.ones(3, dtype=torch.bfloat16))
    model._metadata = {"": {"version": 1}}
    value = {
        "module": model,
        "args": NESTED,
        "rng": {"numpy": np.random.get_state(), "torch": torch.get_rng_state(), "np": np.random.RandomState(3)},
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "shape": torch.Size([1, 2]),
        "scalars": [np.float32(1.5), np.arange(3)],
    }
    path = str(tmp_path / "file.pt")
    torch.save(value, path)
    builders = {
        "torch.float16": lambda name, child: torch.float16,
        "torch.device": lambda record, child: torch.device(*child(list(record.args))),
    }
    with open_archive(path) as archive:

        def tensor(record):
            flat = torch.frombuffer(bytearray(archive.tensor_bytes(record)), dtype=getattr(torch, record.dtype.label))
            return flat.reshape(record.shape)

        found = revive(archive.load(), builders=builders, tensor=tensor, where=path)
    expected = torch.load(path, weights_only=False)
    for tree in (found, expected):
        tree["module"] = {name: (str(t.dtype), t.tolist()) for name, t in tree["module"].items()}
        tree["rng"]["torch"] = tree["rng"]["torch"].tolist()
        tree["shape"] = tuple(tree["shape"])
    assert equal(found, expected)


@settings(max_examples=60)
@given(
    st.recursive(
        st.one_of(st.integers(), st.text(max_size=3), st.none()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner),
            st.dictionaries(st.text(max_size=2), inner, max_size=3).map(
                lambda d: argparse.Namespace(**{"k" + k: v for k, v in d.items()})
            ),
            st.lists(inner, max_size=3).map(collections.deque),
        ),
        max_leaves=12,
    ),
    st.integers(0, 5),
)
def test_trees_come_back_equal(value, protocol):
    assert equal(again(pickle.dumps(value, protocol)), value)


@pytest.mark.parametrize("protocol", range(6))
def test_shared_parts_stay_shared_and_cycles_stay_cycles(protocol):
    shared = argparse.Namespace()
    cycle: list[object] = [shared, (shared,)]
    shared.cycle = cycle
    cycle.append((cycle,))
    deque: collections.deque[object] = collections.deque()
    deque.append(deque)
    found, queue = again(pickle.dumps((cycle, deque), protocol))
    assert found[0] is found[1][0]
    assert found[0].cycle is found
    assert found[2][0] is found
    assert queue[0] is queue


def test_a_tuple_inside_its_own_list_is_one_tuple():
    inner: list[object] = []
    value = (inner,)
    inner.append(value)
    found = again(pickle.dumps(value, 4))
    assert found[0][0] is found


@pytest.mark.parametrize("protocol", [2, 4])
def test_trusted_classes_are_built_as_pickle_builds_them(protocol):
    names = frozenset(f"{__name__}.{kind.__name__}" for kind in (Point, Slotted, Custom, Names, Table))
    data = pickle.dumps([Point(3), Custom(), Names([1]), Table(a=2), Slotted()], protocol)
    point, custom, items, table, slotted = again(data, trusted=names)
    assert (point.x, point.me is point, custom.state) == (3, True, [1, 2])
    assert (type(items), items, type(table), table) == (Names, [1], Table, {"a": 2})
    assert slotted.x == 1
    with pytest.raises(TrustRequired) as caught:
        again(data)
    assert {fault.mend for fault in caught.value.faults} == {
        f'if the class is your own, accept it by "trust": ["{__name__}.{kind}"] in the "ds_reshard" section of the '
        f"DeepSpeed JSON, without DeepSpeed in DS_RESHARD_SETTINGS, or by --trust {__name__}.{kind}"
        for kind in ["Point", "Custom", "Names", "Table", "Slotted"]
    }


def test_all_classes_to_trust_stand_in_one_line_that_mends():
    data = pickle.dumps([Point(3), Custom(), Names([1]), Table(a=2), Slotted()])
    with pytest.raises(TrustRequired) as caught:
        again(data)
    (line,) = [line for line in str(caught.value).splitlines() if "To mend: " in line]
    (names,) = re.findall(r'"trust": (\[[^]]*\])', line)
    assert again(data, trusted=frozenset(json.loads(names)))[0].x == 3
    assert line.endswith(" ".join(f"--trust {name}" for name in json.loads(names)))


@pytest.mark.parametrize("protocol", [2, 4])
def test_functions_of_numbers_are_values_and_no_actions(protocol):
    values = [F.gelu, F.relu, F.silu, F.softplus, F.logsigmoid, F.cross_entropy, math.tanh, np.tanh]
    values += [torch.tanh, torch.relu, torch.sigmoid, torch.softmax, F.hardshrink, torch.special.expit]
    assert again(pickle.dumps({"activation": values}, protocol)) == {"activation": values}


@pytest.mark.parametrize("protocol", range(6))
def test_a_function_of_numbers_with_some_arguments_is_a_value(protocol):
    made = [partial(F.gelu, approximate="tanh"), partial(F.leaky_relu, negative_slope=0.2, inplace=True)]
    made += [partial(math.pow, 2.0), partial(torch.softmax, dim=-1), partial(F.relu)]
    data = pickle.dumps(made, protocol)
    read_pickle(data, where="file", persistent=refuse, rules=PickleRules())
    found = again(data)
    assert [(one.func, one.args, one.keywords) for one in found] == [(o.func, o.args, o.keywords) for o in made]


def test_a_function_with_some_arguments_is_written_as_it_was():
    """As a conversion carries it, and no code of it is run."""
    data = pickle.dumps({"act": partial(F.gelu, approximate="tanh")}, 2)
    written = write_pickle(read_pickle(data, where="file", persistent=refuse), lambda storage: "")
    assert pickle.loads(written)["act"].keywords == {"approximate": "tanh"}


_PARTIAL = b"cfunctools\npartial\nctorch._C._nn\ngelu\n\x85R"


@pytest.mark.parametrize(
    "data",
    [
        b"cfunctools\npartial\ncposix\nsystem\n\x85R.",
        b"cfunctools\npartial\nctorch._C._nn\ngelu\nK\x01\x86R.",  # an argument where it has none
        _PARTIAL + b"K\x01\x85R.",  # called
        _PARTIAL + b"(cposix\nsystem\n)}Ntb.",
        _PARTIAL + b"(cbuiltins\neval\n(X\x01\0\0\0atN}tb.",
        _PARTIAL + b"(ctorch._C._nn\ngelu\n(cposix\nsystem\nt}Ntb.",
        _PARTIAL + b"(ctorch._C._nn\ngelu\n(]t}Ntb.",  # a list, that may be changed later
        _PARTIAL + b"(ctorch._C._nn\ngelu\n)}X\x01\0\0\0acposix\nsystem\nsNtb.",
        _PARTIAL + b"(ctorch._C._nn\ngelu\n)}K\x01K\x01sNtb.",
        _PARTIAL + b"(ctorch._C._nn\ngelu\n)}}tb.",  # attributes
        _PARTIAL + b"}X\x04\0\0\0funccposix\nsystem\nsb.",  # attributes by another form of state
        b"ccollections\ndefaultdict\n" + _PARTIAL + b"\x85R.",  # to be called for a key that lacks
        b"cfunctools\npartial\n.",
        b"](cfunctools\npartial\ne.",
        b"cfunctools\npartial\n)\x81.",
        b"cfunctools\npartial\nctorch._C._nn\ngelu\n\x85\x81.",  # by __new__
        b"cfunctools\npartial\nctorch\nload\n\x85R.",
        b"cfunctools\npartialmethod\nctorch._C._nn\ngelu\n\x85R.",
    ],
)
def test_what_else_partial_might_hold_is_refused(data):
    with pytest.raises(UnsafePickle) as caught:
        read_pickle(b"\x80\x02" + data, where="file", persistent=refuse, rules=PickleRules())
    assert not isinstance(caught.value, TrustRequired)


def test_each_function_of_the_table_is_one():
    for dotted in FUNCTIONS:
        module, _, name = dotted.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name)), dotted


_TANH = b"c__builtin__\ngetattr\nctorch._C\n_VariableFunctionsClass\nX\x04\0\0\0tanh\x86R"


@pytest.mark.parametrize(
    "data",
    [
        b"ctorch._C._nn\ngelu\n(K\x01tR.",
        b"cmath\nsqrt\nK\x01\x85R.",
        b"ctorch\ntanh\nK\x01\x85R.",
        _TANH + b"K\x01\x85R.",
        _TANH + b"K\x01\x85\x81.",  # by __new__
        _TANH + b"}b.",  # given a state
        _TANH + b"K\x01a.",  # given items
        b"ccollections\ndefaultdict\n" + _TANH + b"\x85R.",  # to be called for a key that lacks
        _TANH.replace(b"X\x04\0\0\0tanh", b"X\x09\0\0\0from_file") + b".",
        _TANH.replace(b"X\x04\0\0\0tanh", b"X\x03\0\0\0mro") + b".",
        _TANH.replace(b"X\x04\0\0\0tanh", b"X\x07\0\0\0float32") + b".",  # which is a name, but no builtin
        _TANH.replace(b"_VariableFunctionsClass", b"_nn") + b".",
        _TANH.replace(b"torch._C\n_VariableFunctionsClass", b"posix\nsystem") + b".",
        b"cbuiltins\ngetattr\ncsignal\nSignals\nX\x06\0\0\0SIGINT\x86R}b.",  # a state for the member of an enum
        _TANH.replace(b"torch._C\n_VariableFunctionsClass", b"numpy\nndarray") + b".",
        b"ctorch._C\n_VariableFunctionsClass\n.",
        b"](ctorch._C\n_VariableFunctionsClass\ne.",
        b"ctorch._C._nn\n_parse_to\n.",
        b"ctorch\nfrom_file\n.",
    ],
)
def test_no_function_is_called_or_changed(data):
    with pytest.raises(UnsafePickle):
        read_pickle(b"\x80\x02" + data, where="file", persistent=refuse, rules=PickleRules())
    with pytest.raises((UnsafePickle, CheckpointDamaged)):  # whoever reads it under no rules makes nothing of it
        again(b"\x80\x02" + data)


def test_objects_of_protocol_zero_are_built_when_no_builtin_holds_them():
    trusted = frozenset({f"{__name__}.Point", f"{__name__}.Names", "copyreg._reconstructor"})
    assert again(pickle.dumps(Point(3), 0), trusted=trusted).x == 3
    with pytest.raises(UnsafePickle, match="protocol 2 or later"):
        again(pickle.dumps(Names([1]), 0), trusted=trusted)


def test_a_trusted_class_that_is_not_installed_says_so():
    with pytest.raises(ConfigError, match=r"no\.module\.Gone is trusted, and cannot be imported"):
        again(b"\x80\x02cno.module\nGone\n)\x81.", trusted=frozenset({"no.module.Gone"}))


def test_enums_are_not_imported():
    """Whether or not their module is loaded already: this one is."""
    for module, name in (("wsgiref_like", "Color"), (__name__, "Color")):
        data = f"\x80\x02c{module}\n{name}\nX\x03\0\0\0red\x85R.".encode("latin-1")
        with pytest.raises(TrustRequired, match=rf"{module}\.{name}"):
            again(data, trusted=frozenset())
    assert "wsgiref_like" not in sys.modules


def test_an_enum_of_the_table_is_looked_up():
    assert again(pickle.dumps(signal.SIGTERM, 2)) is signal.SIGTERM
    assert again(pickle.dumps(signal.Signals, 2)) is signal.Signals


def test_an_enum_that_python_3_11_2_pickled_is_looked_up():
    """Python 3.11.0 to 3.11.3 write `getattr(class, name)` (enum.py `Enum.__reduce_ex__`); Debian 12 has 3.11.2."""
    by_name = b"\x80\x02cbuiltins\ngetattr\ncsignal\nSignals\nX\x07\0\0\0SIGTERM\x86R."
    assert pickle.loads(by_name) is signal.SIGTERM
    assert again(by_name) is signal.SIGTERM
    with pytest.raises(CheckpointDamaged, match="no such member"):
        again(by_name.replace(b"SIGTERM", b"SIGNONE"))


def test_a_signal_that_python_3_11_2_pickled_is_looked_up_and_never_called():
    """Its enum writes the name of a constant (enum.py `_reduce_ex_by_global_name`), as of Megatron's --exit-signal."""
    by_name = b"\x80\x02csignal\nSIGTERM\nq\x00."
    assert pickle.loads(by_name) is signal.SIGTERM
    assert again(by_name) is signal.SIGTERM
    for data in (b"\x80\x02csignal\nSIGTERM\n)R.", by_name.replace(b"SIGTERM", b"raise_signal")):
        with pytest.raises(UnsafePickle):
            again(data)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\x80\x02csignal\nSignals\nM\xe7\x03\x85R.", "no such member"),
        (b"\x80\x02cnanotron.random\nNothing\n.", "not rebuilt unasked"),
        (b"\x80\x02cmegatron.core.enums\nModelType\nK\x01\x85R.", "is not installed here"),
    ],
)
def test_an_enum_that_cannot_be_looked_up_is_refused(data, complaint):
    with pytest.raises((CheckpointDamaged, TrustRequired), match=complaint):
        again(data)


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "builtins.getattr", "subprocess.Popen", "io.open"])
def test_names_that_act_are_refused_even_when_trusted(name):
    module, _, attribute = name.rpartition(".")
    data = f"\x80\x02c{module}\n{attribute}\nX\x01\0\0\0a\x85R.".encode("latin-1")
    with pytest.raises(UnsafePickle) as caught:
        again(data, trusted=frozenset({name}))
    assert not isinstance(caught.value, TrustRequired)
    assert "trust" not in str(caught.value)


@pytest.mark.parametrize("value", [decimal.Decimal("1.50"), fractions.Fraction(-3, 4), uuid.UUID(int=5)])
def test_other_values_of_the_standard_library_are_rebuilt_when_they_are_trusted(value):
    name = f"{type(value).__module__}.{type(value).__name__}"
    with pytest.raises(TrustRequired, match=f"--trust {name}"):
        again(pickle.dumps(value, 2))
    assert again(pickle.dumps(value, 2), trusted=frozenset({name})) == value


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"cnumpy\ndtype\nX\x03\0\0\0a,b\x85R.", "malformed element type"),
        (b"cdatetime\ndate\nC\x04\x07\xe7\x02\xff\x85R.", "day"),
        (b"cargparse\nNamespace\n)\x81]b.", "not attributes"),
        (b"ccollections\ndefaultdict\ncnumpy\nndarray\n\x85R.", "not a built-in type"),
        (b"cnumpy.random._pickle\n__bit_generator_ctor\nX\x01\0\0\0x\x85R.", "not a known bit generator"),
        (b"ccollections\ndeque\nK\x01\x85R.", "malformed deque"),
    ],
)
def test_malformed_parts_of_accepted_classes_are_damage(data, complaint):
    with pytest.raises(CheckpointDamaged, match=complaint):
        again(b"\x80\x03" + data)


@pytest.mark.parametrize("position", [625, -1, 2**31, True])
def test_random_states_that_point_outside_their_buffer_are_damage(position):
    made = np.random.MT19937(1)
    reduced = made.__reduce__()
    state = {**made.state, "state": {**made.state["state"], "pos": position}}

    class Forged:
        def __reduce__(self):
            return reduced[0], reduced[1], (state, reduced[2][1])

    with pytest.raises(CheckpointDamaged, match=r"outside its buffer|expected int"):
        again(pickle.dumps(Forged(), 4))


def test_bare_storages_are_refused_by_name(tmp_path):
    torch.save([torch.UntypedStorage(4)], tmp_path / "file.pt")
    with open_archive(tmp_path / "file.pt") as archive, pytest.raises(UnsupportedLayout, match="without a tensor"):
        revive(archive.load(), builders={}, tensor=refuse, where="file")


def test_all_unknown_classes_are_named_at_once():
    data = b"\x80\x02](ca\nB\n)\x81cc.d\nE\n)R(lca\nB\n)\x81ae."
    with pytest.raises(TrustRequired, match=r"2 faults found") as caught:
        again(data)
    assert [fault.what.split()[5] for fault in caught.value.faults] == ["a.B,", "c.d.E,"]


def test_torch_reads_the_same_pickles(tmp_path):
    """The pickles above are those of torch.save: its data.pkl is protocol 2."""
    stream = io.BytesIO()
    torch.save(STANDARD, stream)
    with zipfile.ZipFile(stream) as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    assert equal(again(data), torch.load(io.BytesIO(stream.getvalue()), weights_only=False))
