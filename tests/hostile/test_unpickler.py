"""What CPython's unpickler would do with a pickle, and does not here: traps of reading by it, and resources."""

from __future__ import annotations

import copyreg
import os
import pickle
import pickletools
import struct
import time
from collections import OrderedDict
from collections.abc import Iterator

import pytest
from listener import heard
from opcodes import spelled
from payloads import ACTING, call, name, text

from ds_reshard.containers.pickle_reader import read_pickle, scan_bytes
from ds_reshard.containers.pickle_rules import ALLOW_ALL, PickleRules
from ds_reshard.containers.pickle_tokens import PickleLimits, Tokens, instruction_end
from ds_reshard.errors import CheckpointDamaged, ReshardError, TrustRequired, UnsafePickle
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, StorageRecord, TensorRecord

STORAGE = StorageRecord("file", "0", ElementType.FLOAT32, 4, 0, 16, None)
TENSOR = TensorRecord(STORAGE, ElementType.FLOAT32, 0, (4,), (1,))


def read(data: bytes, rules: PickleRules = ALLOW_ALL) -> object:
    return read_pickle(
        data,
        where="file",
        persistent=lambda identity: STORAGE,
        reduce=lambda function, args: TENSOR if function.name == "_rebuild_tensor_v2" else NotImplemented,
        rules=rules,
    )


def what(data: bytes, rules: PickleRules = ALLOW_ALL) -> list[str]:
    with pytest.raises(ReshardError) as caught:
        read(data, rules)
    faults = getattr(caught.value, "faults", ())
    return [fault.what for fault in faults] or [str(caught.value)]


def test_next_buffer_gives_any_object() -> None:
    """What the rewriting relies on: `buffers` may be an iterable of anything (_pickle.c `load_next_buffer`)."""
    given = object()
    assert pickle.loads(b"\x80\x05\x97.", buffers=[given]) is given


def test_the_lengths_of_instructions_are_those_of_pickletools() -> None:
    """Both must agree on where each instruction ends, and on nothing else."""
    value = [{"a": (1, 2.5, "é" * 300, b"x" * 300, {1}, 2**80, bytearray(b"y"))}, OrderedDict(b=len), "x" * 70_000]
    for protocol in range(6):
        data = pickle.dumps(value, protocol)
        begins = [at for _, _, at in pickletools.genops(data)]
        ends = [instruction_end(data, at)[1] for at in begins]
        assert ends == [*begins[1:], len(data)]
        tokens = Tokens(data, PickleLimits())
        assert b"".join(tokens.instructions())
        assert (tokens.error, tokens.stop) == (None, len(data))


def test_the_unpickler_is_given_no_instruction_that_acts() -> None:
    """Of each opcode there is, rewritten: those alone that build constants, keep the stack, or call what is ours."""
    acting = "REDUCE NEWOBJ NEWOBJ_EX INST OBJ BUILD PERSID EXT1 EXT2 EXT4 READONLY_BUFFER FRAME "
    acting += "APPEND APPENDS SETITEM SETITEMS ADDITEMS DICT LIST EMPTY_SET FROZENSET"
    for opcode in pickletools.opcodes:
        tokens = Tokens(b"\x80\x04" + spelled(opcode) + b".", PickleLimits())
        stream = b"".join(tokens.instructions())
        names = [one.name for one, _, _ in pickletools.genops(stream)] if stream.endswith(b".") else []
        assert not set(names) & set(acting.split())
        assert names.count("NEXT_BUFFER") == len(tokens.handlers)
        assert names or opcode.name == "PROTO"


# -- nine traps --------------------------------------------------------------------------------------------------------

_HOOKS = call("collections", "OrderedDict")
_STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\4tQ"
STATES = (
    b"}" + text("__defaults__") + b"K\1\x85s",
    b"N}" + text("__code__") + b"Ns\x86",
    b"}" + text("module") + b"Ns",
)


@pytest.mark.parametrize("state", STATES)
def test_no_function_class_or_record_takes_a_state(state: bytes) -> None:
    """BUILD would write `__dict__` of a function, slots of a record, and attributes of a class."""
    tensor = name("torch._utils", "_rebuild_tensor_v2") + b"(" + _STORAGE + b"K\0K\4\x85K\1\x85\x89" + _HOOKS + b"tR"
    for target in (name("math", "sqrt"), name("torch", "Size"), name("a", "B"), _STORAGE, tensor, b"\x8f", b")", b"N"):
        assert any("gives" in one and "the state" in one for one in what(b"\x80\x04" + target + state + b"b."))
    assert (
        StorageRecord("file", "0", ElementType.FLOAT32, 4, 0, 16, None),
        TensorRecord(STORAGE, ElementType.FLOAT32, 0, (4,), (1,)),
    ) == (STORAGE, TENSOR)


@pytest.fixture
def extension() -> Iterator[int]:
    """A code of copyreg's registry whose object was asked for before: the unpickler looks up no name then."""
    copyreg.add_extension("posix", "system", 240)
    copyreg._extension_cache[240] = os.system  # type: ignore[attr-defined]
    yield 240
    copyreg.remove_extension("posix", "system", 240)
    copyreg._extension_cache.pop(240, None)  # type: ignore[attr-defined]


def test_objects_of_the_extension_registry_are_not_taken(extension: int) -> None:
    for code in (
        b"\x82" + bytes([extension]),
        b"\x83" + struct.pack("<H", extension),
        b"\x84" + struct.pack("<I", extension),
    ):
        data = b"\x80\x02" + code + text("touch pwned") + b"\x85R."
        assert heard(lambda data=data: read(data)) == []  # type: ignore[misc]
        assert any("copyreg registry" in one for one in what(data))


def test_names_and_texts_of_python_2_are_read_by_the_protocol() -> None:
    for protocol, expected in ((b"\x80\x02", "builtins.set"), (b"\x80\x03", "__builtin__.set"), (b"", "builtins.set")):
        assert str(read(protocol + b"c__builtin__\nset\n.")) == expected
    for data in (
        b"\x80\x02c__builtin__\nset\n\x80\x04c__builtin__\nset\n\x86.",
        b"\x80\x02\x80\x02N.",
        b"N0\x80\x02N.",
    ):
        with pytest.raises(UnsafePickle, match="a protocol behind the beginning"):
            read(data)
    for data, expected in (
        (b"U\2\xc3\xa9.", "é"),
        (b"U\1\xe9.", "é"),
        (b"T\2\0\0\0\xff\xfe.", "ÿþ"),
        (b"S'\\xe9'\n.", "é"),
        (b"S'\\xc3\\xa9'\n.", "é"),
    ):
        assert read(data) == expected


@pytest.mark.parametrize("names", [("a\0b", "c\0"), ("", ""), ("a", ""), ("\ud800", "x"), ("a.b", "c.d.e")])
def test_names_that_no_class_could_have_are_names(names: tuple[str, str]) -> None:
    """As values, as arguments, called, and made."""
    data = (
        b"\x80\x04"
        + b"".join(
            b"X" + struct.pack("<I", len(raw)) + raw for raw in (n.encode("utf-8", "surrogatepass") for n in names)
        )
        + b"\x93"
    )
    found = GlobalName(module=names[0], name=names[1])
    assert read(data + b".") == found and type(read(data + b".")) is GlobalName
    for end in (b")R.", b")\x81.", b")}\x92."):
        made = read(data + end)
        assert isinstance(made, ObjectRecord) and made.callable == found
    with pytest.raises(TrustRequired):
        read(data + b".", PickleRules())
    if names == ("", ""):
        assert read(b"c\n\n.") == found


def test_findings_stand_at_their_instruction() -> None:
    """Behind frames, long texts and what was rewritten: as pickletools counts."""
    system = ACTING["thrown away"][0]("touch x")
    value = [{"a": "x" * 500, "b": {1, 2}}, OrderedDict(a=1), b"y" * 70_000]
    for protocol in (2, 4, 5):
        data = pickle.dumps(value, protocol)
        changed = data[:2] + system + (data[2:] if protocol == 2 else data[11:])  # without its frame
        expected = max(at for op, _, at in pickletools.genops(changed) if op.name == "REDUCE" and at < 2 + len(system))
        assert what(changed, PickleRules())[0] == f"byte {expected}: calls posix.system('touch x'); nothing was run"
    behind = pickle.dumps(value, 2)[:-1] + b"0" + system + b"N."
    (expected,) = [at for op, arg, at in pickletools.genops(behind) if op.name == "GLOBAL" and arg == "posix system"]
    assert int(what(behind, PickleRules())[0].split()[1].rstrip(":")) == behind.index(b"R", expected)


@pytest.mark.parametrize(
    ("arguments", "later", "problem"),
    [
        (b"K\0K\4\x85K\1\x85\x89" + _HOOKS + b"q\7", b"h\7K\1K\2s0", "after a call or an object was given it"),
        (b"K\0]q\7K\4aK\1\x85\x89" + _HOOKS, b"h\7K\4a0", "after a call or an object was given it"),
        (b"K\0K\4\x85K\1\x85" + name("operator", "itemgetter") + _HOOKS, b"", "which is only called"),
        (b"K\0K\4\x85K\1\x85\x89" + _HOOKS + name("operator", "itemgetter"), b"", "which is only called"),
        (b"K\0K\4\x85K\1\x85\x89" + _HOOKS + b"K\1" + name("math", "sqrt") + b"s", b"", "not how it is saved"),
    ],
    ids=["hooks", "a shape", "a function", "metadata", "a hook"],
)
def test_the_call_of_which_there_are_many_is_judged(arguments: bytes, later: bytes, problem: str) -> None:
    """As any other is: what it was given, and what is changed behind it."""
    start = b"\x80\x02" + name("torch._utils", "_rebuild_tensor_v2") + b"(" + _STORAGE
    good = b"K\0K\4\x85K\1\x85\x89" + _HOOKS
    assert read(start + good + b"tR.", PickleRules()) is TENSOR
    assert any(problem in one for one in what(start + arguments + b"tR" + later + b".", PickleRules()))


def test_an_object_is_no_mapping_for_an_ordered_dict() -> None:
    """`OrderedDict(made)` would ask it for keys, and iterate over it."""
    made = call("collections", "Counter") + text("keys") + b"Ns"
    (found,) = what(b"\x80\x02" + call("collections", "OrderedDict", made) + b".", PickleRules())
    assert "which is not how it is saved" in found


def test_damage_behind_a_class_to_trust_is_told_with_it() -> None:
    """Otherwise the user trusts the class, and meets the damage then."""
    with pytest.raises(TrustRequired) as caught:
        read(b"\x80\x02ca\nB\n)\x81h\x07.", PickleRules())
    assert [fault.error for fault in caught.value.faults] == ["TrustRequired", "CheckpointDamaged"]
    for behind in (b"h\7", b"t", b"\xff", b"K", b"\x95\1"):
        acting = b"\x80\x02ca\nB\n)\x810" + ACTING["thrown away"][0]("touch x")
        with pytest.raises(UnsafePickle, match=r"posix\.system"):
            read(acting + behind, PickleRules())


def test_sets_pay_for_what_is_hashed() -> None:
    """Also those to which members are added, which PySet_Add would hash in C."""
    deep = b"N" + b"\x85" * 100_000
    for data in (b"\x8f(" + deep + b"\x90.", b"(" + deep + b"\x91.", b"}" + deep + b"Ns.", b"(" + deep + b"Nd."):
        with pytest.raises(CheckpointDamaged, match="nested deeper than 200"):
            read(b"\x80\x04" + data)


# -- resources ---------------------------------------------------------------------------------------------------------


def _chains(levels: int) -> bytes:
    """Two equal chains of frozensets, each of the one before and a tuple of it, as members of one set."""
    one = b"(N\x91" + b"".join(b"q%c(h%ch%c\x85\x91" % (slot, slot, slot) for slot in [1, 2] * (levels // 2))
    return b"\x80\x04\x8f(" + one + one + b"\x90."


_OFTEN = 10_000
_LONG = b"\x80\x04(" + b"K\1" * _OFTEN + b"tq\0"
_DICT = b"\x80\x04}(" + b"".join(text(f"a{n}") + b"N" for n in range(_OFTEN)) + b"uq\0"
_FIELDS = (
    b"\x80\x04"
    + name("numpy", "dtype")
    + b"q\1"
    + text("V8")
    + b"\x89\x88\x87Rq\0"
    + b"".join(
        b"h\1"
        + text("V8")
        + b"\x89\x88\x87R(K\3"
        + text("|")
        + b"N("
        + b"".join(text(f) for f in "ab")
        + b"t}("
        + b"".join(text(f) + b"h%cK\0\x86" % (n and 1 + n) for f in "ab")
        + b"uK\x10K\1K\x10tb"
        + b"q%c" % (n + 2)
        for n in range(40)
    )
)
ATTACKS = {
    "persistent ids of one long tuple": b"\x80\x04("
    + text("storage")
    + b"N" * _OFTEN
    + b"tq\0"
    + b"h\0Q0" * _OFTEN
    + b".",
    "calls with one long tuple": _LONG + name("operator", "itemgetter") + b"q\1" + b"0h\1h\0R" * _OFTEN + b"N.",
    "calls of no name with it": _LONG + b"N" + b"0Nh\0R" * _OFTEN + b"N.",
    "tensors of one long tuple": _LONG
    + name("torch._utils", "_rebuild_tensor_v2")
    + b"q\1"
    + b"0h\1h\0R" * _OFTEN
    + b"N.",
    "calls with one long dict": _DICT
    + name("torch._utils", "_rebuild_tensor")
    + b"q\1"
    + b"0h\1h\0\x85R" * _OFTEN
    + b"N.",
    "one long dict as a state": _DICT + name("argparse", "Namespace") + b"q\1" + b"0h\1)\x81h\0b" * _OFTEN + b"N.",
    "one long dict as a state that is refused": _DICT + b"h\0h\0b" * _OFTEN + b"N.",
    "calls of one long name": b"\x80\x04X\0\0\x10\0"
    + b"a" * (1 << 20)
    + text("x")
    + b"\x93q\1"
    + b"0h\1)R" * _OFTEN
    + b".",
    "element types, each twice in the next": _FIELDS + name("numpy.core.multiarray", "scalar") + b"h\x29N\x86R.",
    "a key of tuples, each twice in the next": b"\x80\x04}N" + b"2\x86" * 60 + b"Ns.",
    "equal chains of frozensets": _chains(60),
    "one tuple as a key over and over": b"\x80\x02}(" + b"(" + b"K\1" * 100_000 + b"tq\0N" + b"h\0N" * 100_000 + b"u.",
    "one tuple in sets over and over": b"\x80\x04(" + b"K\1" * 100_000 + b"tq\0" + b"0\x8f(h\0\x90" * 100_000 + b".",
    "the longest list in lists": b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "tuples that are looked into": b"\x80\x04]N" + b"2\x86" * 190 + b"a.",
    "memo entries by text": b"Np" + b"9" * 1000 + b"\n.",
    "memo entries of many digits": b"Np" + b"9" * 100_000 + b"\n.",
    "a get of many digits": b"Ng" + b"9" * 100_000 + b"\n.",
    "sharing": b"\x80\x04"
    + b"".join((b"](" + b"h%c" % (n - 1) * 9 if n else b"](") + b"N" * 9 + b"eq%c" % n for n in range(20))
    + b".",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_out_of_proportion_to_the_bytes_ends_soon(attack: str) -> None:
    """In C, with the GIL held, some of these would never end."""
    start = time.process_time()
    with pytest.raises(ReshardError):
        read(ATTACKS[attack], PickleRules())
    scan_bytes(ATTACKS[attack], "file", "", PickleRules())
    assert time.process_time() - start < 10


def test_what_many_bytes_make_is_read() -> None:
    """The bounds are in proportion: long lists of tuples, which every part of a pickle may share."""
    shared = tuple(range(1000))
    value = {"a": [shared] * 1000, "b": [((n,), [n]) for n in range(5000)], "c": {(n, "x"): n for n in range(5000)}}
    for protocol in range(2, 6):
        assert read(pickle.dumps(value, protocol), PickleRules()) == value
    many = b"\x80\x04(" + b"]K\1\x86" * 50_000 + b"tq\0" + b"]h\0a0" * 50_000 + b"N1N."
    start = time.process_time()
    with pytest.raises(CheckpointDamaged, match="no mark"):
        read(many)
    assert time.process_time() - start < 10
