"""Names are looked at as often as there are names, not once for each of them: counted, not timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_reshard.formats.zero import target
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.door import OpenedZero
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.reader import merge_orders
from ds_reshard.hosts.deepspeed.move import _shares_bytes, adopt
from ds_reshard.hosts.deepspeed.prepare import SavedGroups
from ds_reshard.model.content import Content, TensorSource
from ds_reshard.model.facts import GroupFacts
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.model.records import ElementType, new_tensor

_MANY = 64


class Counted(dict[str, Any]):
    """A dict that counts how often all of it is gone through."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.walks = 0

    def items(self) -> Any:
        self.walks += 1
        return super().items()


class Members(tuple[str, ...]):
    """Names that count how often they are gone through."""

    walks = 0

    def __iter__(self) -> Iterator[str]:
        Members.walks += 1
        return super().__iter__()


class Name(str):
    """A name that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)


def _checkpoint(names: list[str], shapes: dict[str, Any]) -> ZeroCheckpoint:
    module = {name: new_tensor(f"m/{name}", (2, 2), ElementType.BFLOAT16) for name in names}
    model = ModelStates(
        path="model",
        entries={"module": module},
        module=module,
        objects={},
        buffer_names=frozenset(),
        param_shapes=(shapes,),
        frozen_shapes={},
        frozen_fragments={},
        shared={},
        dp=1,
        version="0",
    )
    listing = Listing(folder="folder", nbytes={}, partitioned_model=True)
    return ZeroCheckpoint(listing=listing, model=model, optim=None, layout=Layout({}, {}), facts=None)


def test_the_files_of_experts_ask_for_the_whole_tensors_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"moe.deepspeed_experts.{number}.weight" for number in range(_MANY)]
    made: list[int] = []
    make = target.new_tensor
    monkeypatch.setattr(target, "new_tensor", lambda *of: made.append(1) or make(*of))
    tensors = {
        key: TensorSource(shape=(2, 2), dtype=ElementType.BFLOAT16, origin=key)
        for key in (TensorKey(name, "weight") for name in names)
    }
    saving = target.Saving(content=Content(folder="folder", ranks=1, tensors=tensors, facts=None))
    writer = target.Column(saving=saving, kind="zero", stage=2, dp=1, groups=[])
    assert len([writer.separate_tree(entries) for entries in writer.separate_files.values()]) == _MANY
    assert len(made) == 2 * _MANY  # each in the module, and in its file


def test_a_weight_that_is_not_stored_is_found_by_name() -> None:
    names = [f"layer.{number}" for number in range(_MANY)]
    shapes = Counted(dict.fromkeys(names, (2, 2)))
    opened = object.__new__(OpenedZero)
    opened.zero, opened.shared = _checkpoint(names, shapes), {}
    assert all(opened.stored_as_master_only(TensorKey(name, "weight")) for name in names)
    assert shapes.walks == 1


def test_groups_that_are_one_now_are_gone_through_once() -> None:
    """Each saved group is asked for its first member of this run's group."""
    names = [f"layer.{number}" for number in range(_MANY)]
    groups = [GroupFacts(members=Members(names[at : at + 8]), hyperparameters={"lr": at}) for at in range(0, _MANY, 8)]
    live = SimpleNamespace(groups=[{}], listed=lambda number: names)
    saved = SavedGroups(live, None, None)  # type: ignore[arg-type]
    vars(saved)["ordered"] = SimpleNamespace(facts=SimpleNamespace(groups=groups)), {}
    Members.walks = 0
    ((hyperparameters, differing),) = saved.matched.values()
    assert hyperparameters == {"lr": 0} and [key for key, _ in differing] == ["lr"] * 7
    assert "(as layer.8)" in differing[0][1].line()
    assert Members.walks == len(groups)


def test_what_was_read_is_dealt_out_to_buffers_in_one_look() -> None:
    """At ZeRO stage 0 each parameter is a buffer of its own."""
    parameters = [torch.zeros(2) for _ in range(_MANY)]
    read = {
        f"{kind}/{number}": torch.full((2,), float(number)) for kind in ("exp_avg", "fp32") for number in range(_MANY)
    }
    tensors = Counted({**{f"module/layer.{number}": torch.zeros(2) for number in range(_MANY)}, **read})
    taken: list[Any] = []
    inner = SimpleNamespace(param_groups=[{"params": [p.requires_grad_() for p in parameters]}])
    inner.load_state_dict = taken.append
    live = SimpleNamespace(buffers=[SimpleNamespace(group=0) for _ in parameters], replicated=True, kind="torch")
    values = SimpleNamespace(scalars={}, groups={0: {"lr": 0.5}}, step=None, extras={})
    engine = SimpleNamespace(optimizer=inner, zero_optimization_stage=lambda: 0)
    adopt(engine, live, values, tensors)  # type: ignore[arg-type]
    (state,) = taken
    assert {n: {k: v.tolist() for k, v in own.items()} for n, own in state["state"].items()} == {
        number: {"exp_avg": [number, number]} for number in range(_MANY)
    }
    assert tensors.walks == 1


def test_tensors_of_two_files_have_no_byte_in_common() -> None:
    """Wherever they lie in them, as of experts and layers: two more collectives are for tensors of one file."""

    def shared(*places: tuple[str, int]) -> bool:
        module, wanted, layout = dict[str, Any](), dict[int, TensorKey](), dict[TensorKey, Any]()
        for number, (path, byte_offset) in enumerate(places):
            record = new_tensor(f"module/{number}", (2, 2), ElementType.BFLOAT16)
            storage = replace(record.storage, path=path, byte_offset=byte_offset)
            module[str(number)], wanted[number] = replace(record, storage=storage), TensorKey(str(number), "weight")
            layout[wanted[number]] = SimpleNamespace(buffer=f"module/{number}")
        model = SimpleNamespace(module=module)
        checkpoint = SimpleNamespace(model=model, layout=layout, stages=(), tp_models=())
        wants = SimpleNamespace(wholes=set(), divided={}, sources=wanted)
        return _shares_bytes(SimpleNamespace(checkpoint=checkpoint, wants=wants))  # type: ignore[arg-type]

    assert shared(("one", 64), ("one", 70)) and shared(("one", 64), ("two", 0), ("one", 64))
    assert not shared(("one", 64), ("one", 72)) and not shared(("one", 64), ("two", 64), ("three", 68))


def test_the_orders_of_ranks_are_merged_by_hash() -> None:
    """Where the second rank has every other parameter, and some that the first has not."""
    first = [Name(f"a{number}") for number in range(_MANY)]
    second = [Name("b0")] + [Name(f"{kind}{number}") for number in range(0, _MANY, 2) for kind in ("a", "c")]
    Name.compared = 0
    order = merge_orders([first, second])
    assert Name.compared < 8 * _MANY
    assert order[:6] == ["b0", "a0", "c0", "a1", "a2", "c2"] and len(order) == _MANY + 1 + _MANY // 2
