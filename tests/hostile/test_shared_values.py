"""Small pickles of endless values: parts shared over and over, keys of one hash, values that hold themselves."""

from __future__ import annotations

import argparse
import collections
import pickle
import shutil
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_reshard.cli.main import main
from ds_reshard.containers.pickle_reader import read_pickle
from ds_reshard.containers.pickle_rules import ALLOW_ALL
from ds_reshard.containers.pickle_tokens import PickleLimits
from ds_reshard.errors import CheckpointDamaged, UnsafePickle
from ds_reshard.model.facts import canonical
from ds_reshard.model.nesting import out_of_bounds
from ds_reshard.model.records import GlobalName, ObjectRecord

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
from zero_builder import TAG, Built, write

MODEL = "mp_rank_00_model_states.pt"
SHARD = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def read(data: bytes, **limits: int) -> object:
    return read_pickle(
        data, where="file", persistent=lambda identity: identity, rules=ALLOW_ALL, limits=PickleLimits(**limits)
    )


def pairs_of_pairs(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value, value]
    return value


def test_shared_parts_count_as_often_as_they_are_used() -> None:
    """A limit of parts is kept exactly: 2**n lists and what holds them."""
    data = pickle.dumps(pairs_of_pairs(10), 4)
    parts = 2**11 - 1
    assert read(data, parts=parts, expansion=0) == pairs_of_pairs(10)
    with pytest.raises(CheckpointDamaged, match=f"has more than {parts - 1} parts"):
        read(data, parts=parts - 1, expansion=0)


@pytest.mark.parametrize(
    "value",
    [
        [["x" * 10**6] * 60] * 60,
        [[b"x" * 10**6] * 60] * 60,
        [dict.fromkeys(range(1000), [None] * 1000)] * 10,
        pairs_of_pairs(150),
        (pairs_of_pairs(60), {"a": pairs_of_pairs(60)}),
    ],
    ids=["texts", "bytes", "lists", "pairs", "pairs in a dict"],
)
def test_what_would_be_endless_when_it_is_told_is_refused(value: object) -> None:
    with pytest.raises(CheckpointDamaged, match="parts, where shared parts count as often"):
        read(pickle.dumps(value, 4))


def test_objects_that_know_each_other_are_read() -> None:
    """Forty that each hold all: a part of the user's own state, of which nothing is told but the class."""
    found = [argparse.Namespace() for _ in range(40)]
    for one in found:
        one.others = found
    value = read(pickle.dumps({"user": found}, 4))
    assert isinstance(value, dict) and len(value["user"]) == 40
    assert len(canonical(value)) < 10**6


def test_a_long_text_that_is_used_over_and_over_is_told_once() -> None:
    text, start = "x" * 10**7, time.process_time()
    objects = [ObjectRecord(callable=GlobalName(module="a", name="b"), args=([text] * 1000,)) for _ in range(100)]
    assert "sha256:" in canonical(objects)
    assert time.process_time() - start < 10
    with pytest.raises(UnsafePickle, match="names a class with"):
        read(b"ca\n" + b"x" * 5000 + b"\n.")


def test_what_is_large_or_shared_as_checkpoints_are_is_read() -> None:
    """Long lists, a config that every group refers to, texts that come again, and values that hold themselves."""
    config = {"name": "x" * 40, "sizes": list(range(1000))}
    value: list[Any] = [[config] * 500, list(range(200_000)), {f"layer.{i}.weight": "bfloat16" for i in range(20_000)}]
    value.append(value)
    found = read(pickle.dumps(value, 2))
    assert isinstance(found, list) and found[:3] == value[:3] and found[3] is found


MODULUS = sys.hash_info.modulus
KEYS: dict[str, list[Any]] = {
    "integers": [i * MODULUS for i in range(1, 20_000)],
    "complex numbers": [complex(-sys.hash_info.imag * i, i) for i in range(1, 20_000)],
    "tuples": [(i * MODULUS, 1) for i in range(1, 20_000)],
    "ranges": [range(i * MODULUS, i * MODULUS + 1) for i in range(1, 20_000)],
}
HOLDERS: dict[str, Callable[[list[Any]], object]] = {
    "dict": dict.fromkeys,
    "set": set,
    "frozenset": frozenset,
    "OrderedDict": collections.OrderedDict.fromkeys,
}


def _of(holder: str, keys: list[Any]) -> bytes:
    """The pickle of such a holder, whose own hash table is not made here, which would take minutes."""
    listed = pickle.dumps(keys, 4)
    body = listed[11:-1] if listed[2:3] == b"\x95" else listed[2:-1]  # without PROTO, FRAME and STOP
    if holder == "set":
        return b"\x80\x04cbuiltins\nset\n" + body + b"\x85R."
    if holder == "frozenset":
        return b"\x80\x04cbuiltins\nfrozenset\n" + body + b"\x85R."
    if holder == "OrderedDict":
        rows = pickle.dumps([[key, None] for key in keys], 2)[2:-1]
        return b"\x80\x02ccollections\nOrderedDict\n" + rows + b"\x85R."
    return b"\x80\x02}" + b"".join(pickle.dumps(key, 2)[2:-1] + b"Ns" for key in keys) + b"."


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_keys_of_one_hash_end_soon(kind: str, holder: str) -> None:
    """Each would be compared with all before it: 20,000 take seconds, and ten times as many minutes."""
    assert len({hash(key) for key in KEYS[kind][:50]}) == 1
    data = _of(holder, KEYS[kind])
    start = time.process_time()
    with pytest.raises(CheckpointDamaged, match="hashed over and over"):
        read(data)
    assert time.process_time() - start < 10  # on a busy machine; ten times as many keys would take minutes
    few = KEYS[kind][:50]
    found = read(_of(holder, few))
    assert found == HOLDERS[holder](few)


def test_keys_of_many_hashes_are_read() -> None:
    value = (
        {(f"a{i}", "b"): i for i in range(20_000)}
        | {i * 0.5: i for i in range(20_000)}
        | {i * 1j: i for i in range(500)}
    )
    assert read(pickle.dumps([value, {(0, 1)}, *({(0, 1): i} for i in range(5000))], 4))[0] == value  # type: ignore[index]


def test_a_text_of_a_value_is_made_without_recursion() -> None:
    """Of records inside records, as deep as a pickle may be, and of names that no encoding has."""
    value: object = None
    for _ in range(5000):
        value = ObjectRecord(callable=GlobalName(module="a", name="b\ud800"), args=([value],))
    assert "sha256:" in canonical(value)
    assert "sha256:" in canonical(["\ud800" * 5000])


def every_list_holds_every(count: int) -> list[Any]:
    lists: list[Any] = [[] for _ in range(count)]
    for one in lists:
        one.extend(lists)
    return lists


def test_lists_that_hold_each_other_are_told_soon() -> None:
    """`repr` would follow each of 25! ways."""
    start = time.process_time()
    told = canonical(every_list_holds_every(25))
    assert "itself" in told or told.startswith("sha256:")
    assert time.process_time() - start < 10


def _of_optimizer(content: Any) -> Any:
    return content["optimizer_state_dict"]["base_optimizer_state"]


PLACES: dict[str, tuple[str, Callable[[Any, Any], object]]] = {
    "steps": (MODEL, lambda c, v: c.update(global_steps=v)),
    "config": (MODEL, lambda c, v: c.update(ds_config=v)),
    "version": (MODEL, lambda c, v: c.update(ds_version=v)),
    "scheduler": (MODEL, lambda c, v: c.update(lr_scheduler=v)),
    "user's own": (MODEL, lambda c, v: c.update(user=v)),
    "a shape": (MODEL, lambda c, v: c["param_shapes"][0].update(first=v)),
    "a tied name": (MODEL, lambda c, v: c["shared_params"].update(alias=v)),
    "in the module": (MODEL, lambda c, v: c["module"].update(extra=v)),
    "a rate": (SHARD, lambda c, v: _of_optimizer(c)["param_groups"][0].update(lr=v)),
    "members": (SHARD, lambda c, v: _of_optimizer(c)["param_groups"][0].update(params=[v])),
    "a state": (SHARD, lambda c, v: _of_optimizer(c)["state"][0].update(step=v)),
    "paddings": (SHARD, lambda c, v: c["optimizer_state_dict"].update(group_paddings=v)),
    "count": (SHARD, lambda c, v: c["optimizer_state_dict"].update(partition_count=v)),
    "stage": (SHARD, lambda c, v: c["optimizer_state_dict"].update(zero_stage=v)),
}


def _nested() -> object:
    value: object = None
    for _ in range(90):
        value = argparse.Namespace(a=value)
    return value


VALUES: dict[str, Callable[[], object]] = {
    "pairs of pairs": lambda: pairs_of_pairs(150),
    "each in each": lambda: every_list_holds_every(25),
    "objects in objects": _nested,
    "a text without an encoding": lambda: "\ud800" * 5000,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = Built(groups=((("first", (5, 3)), ("second", (4,))), (("third", (3,)),)), tied=(("alias", "first"),))
    return write(built, tmp_path_factory.mktemp("source") / "whole")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", PLACES)
def test_each_command_ends_with_an_answer(source: Path, tmp_path: Path, place: str, value: str) -> None:
    """Wherever such a value lies: a finding, a refusal, or what it is told as; no traceback and no endless text."""
    folder = shutil.copytree(source, tmp_path / "in")
    name, put = PLACES[place]
    content = torch.load(folder / TAG / name, weights_only=False)
    put(content, VALUES[value]())
    torch.save(content, folder / TAG / name)
    start = time.process_time()
    for words in (["inspect"], ["inspect", "--json"], ["verify", "--deep"], ["diff", str(source)]):
        assert main([*words, str(folder)]) in (0, 1, 2), words
    for to in ("zero3", "universal"):
        assert main(["convert", str(folder), str(tmp_path / to), "--to", to, "--threads", "1"]) in (0, 2)
    assert time.process_time() - start < 30


def test_shared_lists_are_not_written_out_under_a_large_bound() -> None:
    """A long text makes the bound of parts large; what is looked at without asking for shared parts stays small."""
    value: list[object] = [1] * 300
    for _ in range(2):
        value = [value] * 300
    tracemalloc.start()
    try:
        assert out_of_bounds(value, depth=200, parts=1 << 34) is None
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
