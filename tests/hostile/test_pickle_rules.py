"""Every name and call of a pickle is seen, whether or not its result is kept; what is not in the table is named."""

from __future__ import annotations

import argparse
import collections
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from listener import heard
from payloads import ACTING, NAMED, before, name, text

from ds_reshard.containers.pickle_reader import read_pickle, scan_bytes
from ds_reshard.containers.pickle_rules import UNSAFE, PickleRules, acts
from ds_reshard.containers.pickle_table import ALLOWED
from ds_reshard.containers.revive_recipes import RECIPES, VALUES
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import TrustRequired, UnsafePickle
from ds_reshard.model.records import ObjectRecord

PLAIN = pickle.dumps({"a": [1, 2.5, ("x", b"y")]}, 2)


assert scan_bytes(b"", "file", "", PickleRules()) == []  # imported before anything is listened to


def read(data: bytes, *trusted: str) -> object:
    return read_pickle(
        data,
        where="file",
        persistent=lambda identity: ObjectRecord(callable=None),
        rules=PickleRules(trusted),  # type: ignore[arg-type]
    )


def found(data: bytes, *trusted: str) -> list[str]:
    with pytest.raises(UnsafePickle) as caught:
        read(data, *trusted)
    unsafe = [fault for fault in caught.value.faults if fault.error in UNSAFE]
    assert all(fault.where == "file" and "nothing was run" in fault.what for fault in unsafe)
    return [fault.what for fault in unsafe]


@pytest.mark.parametrize("case", ACTING)
def test_what_acts_is_named_and_not_run(tmp_path: Path, case: str) -> None:
    payload, expected = ACTING[case]
    mark = tmp_path / "mark"
    data = before(PLAIN, payload(f"touch {mark}"))
    assert heard(lambda: read(data)) == []
    assert any(expected in what for what in found(data)), found(data)
    assert not mark.exists()


@pytest.mark.slow
def test_each_of_these_acts_when_it_is_unpickled(tmp_path: Path) -> None:
    """Otherwise nothing would be shown by naming it: Python itself runs every one, in processes of their own."""
    marks = {}
    for number, (case, (payload, _)) in enumerate(ACTING.items()):
        marks[case] = tmp_path / f"mark{number}"
        (tmp_path / f"{number}.pkl").write_bytes(before(PLAIN, payload(f"touch {marks[case]}")))
    loads = "\n".join(f"load({str(tmp_path / f'{number}.pkl')!r})" for number in range(len(ACTING)))
    script = (
        "import pickle, torch\n"
        "def load(path):\n"
        "    try: pickle.load(open(path, 'rb'))\n"
        "    except Exception: pass\n" + loads
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=tmp_path)
    assert [case for case, mark in marks.items() if not mark.exists()] == []


@pytest.mark.parametrize("case", NAMED)
def test_what_may_act_is_named(case: str) -> None:
    payload, expected = NAMED[case]
    data = before(PLAIN.replace(b"\x80\x02", b"\x80\x04", 1), payload)
    assert heard(lambda: read(data)) == []
    assert any(expected in what for what in found(data)), found(data)


def test_the_same_pickle_without_it_is_accepted() -> None:
    assert read(PLAIN) == {"a": [1, 2.5, ("x", b"y")]}


def test_a_finding_tells_where_and_with_what() -> None:
    payload, _ = ACTING["thrown away"]
    assert found(before(PLAIN, payload("touch x"))) == ["byte 27: calls posix.system('touch x'); nothing was run"]
    assert len(found(before(PLAIN, payload("x" * 5000)))[0]) < 150


def test_each_call_of_a_name_is_told() -> None:
    payload, _ = ACTING["thrown away"]
    data = before(PLAIN, payload("first") + payload("second"))
    told = [what for what in found(data) if "posix" in what]
    assert ["'first'" in what for what in told] == [True, False] and "'second'" in told[1]


def test_all_names_are_told_at_once() -> None:
    data = before(PLAIN, b"".join(payload for payload, _ in NAMED.values()))
    told = found(data)
    assert all(any(expected in what for what in told) for _, expected in NAMED.values())


def test_damage_behind_what_acts_hides_nothing() -> None:
    """Whoever unpickles the file runs it before coming to the damage, which is told beside."""
    payload, _ = ACTING["thrown away"]
    for ending in (b"", b"\xff", b"t", b"h\x77", b"c"):
        assert "posix.system" in found(b"\x80\x02" + payload("touch x") + ending)[0]


def _framed(inside: bytes, declared: int) -> bytes:
    """A frame of which the header says another size than the instruction in it takes."""
    hidden = inside.ljust(300, b"N")
    return b"\x80\x05(\x95" + declared.to_bytes(8, "little") + b"B" + (300).to_bytes(4, "little") + hidden + b"1N."


def test_an_instruction_across_the_end_of_a_frame_is_refused() -> None:
    """CPython's issue 154848: its reader goes on behind the frame, in the middle of what another takes for bytes."""
    evil = ACTING["thrown away"][0]("touch x")
    assert found(_framed(evil, 2)) == [
        "byte 12: reads across the end of a frame, behind which Python's own reader may go on; nothing was run"
    ]
    for declared in (1, 7, 304):
        assert found(_framed(b"", declared))
    assert read(_framed(b"", 305)) is None and read(_framed(b"", 0)) is None
    two = b"\x80\x05\x95" + (12).to_bytes(8, "little") + b"\x95" + (3).to_bytes(8, "little") + b"N.."
    assert "end of a frame" in found(two)[0]


def test_what_is_loaded_already_makes_no_difference() -> None:
    """`signal.Signals` and a class of this very module, imported or not."""
    data = pickle.dumps({"signal": __import__("signal").SIGTERM}, 2)
    program = (
        "import sys\n"
        "from ds_reshard.containers.pickle_reader import read_pickle\n"
        "assert 'signal' not in sys.modules\n"
        f"print(read_pickle({data!r}, where='f', persistent=None))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "signal.Signals" in done.stdout, done.stderr
    assert "signal.Signals" in repr(read(data))


class Mine:
    def __init__(self) -> None:
        self.value = [1]


class MineWithKeywords(dict):
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"width": 3}


def test_what_the_user_trusts_is_accepted_by_name() -> None:
    for protocol in (0, 2, 4):
        data = pickle.dumps([Mine(), Mine], protocol)
        with pytest.raises(TrustRequired) as caught:
            read(data)
        assert [fault.mend for fault in caught.value.faults] == [
            f'if the class is your own, accept it by "trust": ["{__name__}.Mine"] in the "ds_reshard" section of the '
            f"DeepSpeed JSON, without DeepSpeed in DS_RESHARD_SETTINGS, or by --trust {__name__}.Mine"
        ]
        read(data, f"{__name__}.Mine")
    read(pickle.dumps(MineWithKeywords(a=1), 4), f"{__name__}.MineWithKeywords")


ACTS = (
    "posix.system builtins.eval torch.load pip.main functools.partial dataclasses.make_dataclass collections.namedtuple"
)


@pytest.mark.parametrize("name", ACTS.split())
def test_what_acts_is_not_trusted(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    data = f"\x80\x02c{module}\n{attribute}\nX\x01\0\0\0a\x85R.".encode("latin-1")
    with pytest.raises(UnsafePickle) as caught:
        read(data, name)
    assert not isinstance(caught.value, TrustRequired) and "trust" not in str(caught.value)


def test_the_table_names_what_is_rebuilt_and_nothing_that_acts_with_it() -> None:
    """Each recipe is of a name in the table, and each entry has a reason."""
    allowed = {f"{module}.{name}" for module, name in ALLOWED}
    assert {*RECIPES, *VALUES} <= allowed
    assert all(len(entry.reason) > 5 for entry in ALLOWED.values())
    assert not [name for name in allowed if name in ("builtins.eval", "torch.load", "builtins.__import__")]


# Of other releases than the ones that are installed, and where Python 3.13 and torch.load have them.
ELSEWHERE = {
    "pathlib._local.",
    "torch.tensor._rebuild_from_type_v2",
    "torch._utils._rebuild_sparse_csr_tensor",
    "torch.distributed._tensor._dtensor_spec.",
    "torch.distributed._tensor.placement_types._StridedShard",
    "torch.distributed.tensor.placement_types.DTensorSpec",
    "torch.distributed.tensor.placement_types.TensorMeta",
    "transformers.deepspeed.",
    "transformers.trainer_utils.EvaluationStrategy",
}
_LOOK = """
import importlib, json, sys
missing = []
for module, name in json.load(sys.stdin):
    try:
        found = hasattr(importlib.import_module(module), name)
    except ImportError:
        found = False
    if not found:
        missing.append(f"{module}.{name}")
print(json.dumps(missing))
"""


@pytest.mark.slow
def test_each_name_of_the_table_is_one_of_the_frameworks(interpreter: str) -> None:
    """Of Megatron-LM's, which is not installed, tests/hosts/megatron has the same test; of nanotron's, none."""
    names = [pair for pair in ALLOWED if pair[0].partition(".")[0] not in ("megatron", "nanotron")]
    done = subprocess.run(
        [interpreter, "-W", "ignore", "-c", _LOOK], input=json.dumps(names), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    missing = json.loads(done.stdout.splitlines()[-1])
    known = {one for one in missing for elsewhere in ELSEWHERE if one == elsewhere or one.startswith(elsewhere)}
    assert set(missing) == known, set(missing) - known


def test_what_holds_data_may_be_trusted() -> None:
    assert not acts("my_project.state.RunState") and not acts("decimal.Decimal") and not acts("torch.optim.AdamW")
    assert acts("os.path.join") and acts("torch.jit.load") and acts("pip.main") and acts("numpy.load")


def test_tensors_of_a_trusted_class(tmp_path: Path) -> None:
    """`_rebuild_from_type_v2` of a subclass is the subclass's affair."""
    torch.save(torch.ones(2).as_subclass(_Subclass), tmp_path / "file.pt")
    with open_archive(tmp_path / "file.pt") as archive:
        with pytest.raises(TrustRequired, match="_Subclass"):
            archive.load()
        archive.load(rules=PickleRules([f"{__name__}._Subclass"]))


class _Subclass(torch.Tensor):
    pass


_DTYPE = name("numpy", "dtype") + b"(" + text("V8") + b"\x89\x88tR"
_FIELDS = b"(K\3" + text("|") + b"N" + text("x") + b"\x85}" + text("x") + b"h\0K\0\x86sK\x08K\1K\0t"
_NAMESPACE = name("argparse", "Namespace") + b")\x81"
# What is changed after Python has read it, and what Python makes of it.
CHANGED: dict[str, tuple[bytes, object]] = {
    "a state": (_NAMESPACE + b"}q\0" + text("a") + b"K\1sbh\0" + text("a") + b"K\2s0.", argparse.Namespace(a=1)),
    "the second of two states": (
        _NAMESPACE + b"N}q\0" + text("a") + b"K\1s\x86bh\0" + text("a") + b"K\2s0.",
        argparse.Namespace(a=1),
    ),
    "a list": (name("collections", "deque") + b"]q\0K\1a\x85Rh\0K\2a0.", collections.deque([1])),
    "a set": (name("collections", "deque") + b"\x8fq\0(K\1\x90\x85Rh\0(K\2\x900.", collections.deque([1])),
    "a dict": (name("collections", "Counter") + b"}q\0K\1K\1s\x85Rh\0K\2K\2s0.", collections.Counter([1])),
    "pairs": (name("collections", "Counter") + b"}q\0K\1K\1s\x85Rh\0(K\2K\2u0.", collections.Counter([1])),
    "hooks": (
        name("torch._utils", "_rebuild_parameter")
        + b"(N\x89"
        + name("collections", "OrderedDict")
        + b")Rq\0tRh\0K\1K\2s0.",
        None,
    ),
    "a part of an element type": (
        _DTYPE + b"q\0" + _DTYPE + _FIELDS + b"bh\0(K\3" + text("|") + b"NNNK\x08K\1K\0tb00.",
        None,
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_was_given_must_not_change_afterwards(case: str) -> None:
    """Python reads a state, or what is in an argument, at its instruction; others do so when the pickle has ended."""
    data, seen = CHANGED[case]
    if seen is not None:
        assert pickle.loads(data) == seen
    (finding,) = found(data)
    assert "after a call or an object was given it" in finding


def test_a_state_that_knows_itself_is_read() -> None:
    """So are lists and objects that hold each other: Python keeps the same objects as are seen here."""
    state = argparse.Namespace(a=1)
    state.own, state.me, state.all = vars(state), state, [state]
    for protocol in range(2, 6):
        for value in (state, [state, vars(state)], state.all, {"x": state.all, "y": state}):
            read(pickle.dumps(value, protocol))
    read(b"\x80\x02]q\0" + _NAMESPACE + b"}" + text("all") + b"h\0sba.")
