"""Any content as a ZeRO checkpoint: what is taken over, where its bytes are looked for, and what it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ds_reshard.formats.zero.content import optimizer_faults
from ds_reshard.formats.zero.flat import by_key, whole_placement
from ds_reshard.formats.zero.model_states import IdentityCache
from ds_reshard.formats.zero.target import Saving
from ds_reshard.hosts.deepspeed.foreign import layout_of, model_of
from ds_reshard.model.content import Content, TensorSource
from ds_reshard.model.facts import GroupFacts, OptimizerFacts
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.model.records import ElementType

FP32 = ElementType.FLOAT32
KINDS = ("weight", "fp32", "exp_avg")


def tensors(shapes: Mapping[tuple[str, str], tuple[int, ...]]) -> dict[TensorKey, TensorSource]:
    """Each read from the tensor of its own name; a master from its weight."""
    return {
        TensorKey(name=name, kind=kind): TensorSource(
            shape=shape, dtype=FP32, origin=TensorKey(name=name, kind="weight" if kind == "fp32" else kind)
        )
        for (name, kind), shape in shapes.items()
    }


def content() -> Content:
    """Two groups of one parameter, one weight of nobody, one that is tied."""
    shapes = {(name, kind): (2, 3) for name in ("one", "two") for kind in KINDS} | {("frozen", "weight"): (4,)}
    groups = tuple(GroupFacts(members=(name,), hyperparameters={"lr": 0.1}) for name in ("one", "two"))
    scalars = {"one": {"step": 7}, "two": {"step": 9}}
    return Content(
        folder="run",
        ranks=3,
        tensors=tensors(shapes),
        facts=OptimizerFacts(groups=groups, scalars=scalars),
        tied={"again": "one"},
        batch_size=12,
    )


def test_a_content_becomes_the_entries_of_a_model_file() -> None:
    """The steps of the parameter that was stepped most, sizes, frozen weights, tied names."""
    saving = Saving(content=content())
    entries, module = saving.entries, saving.module(None)
    assert (entries["global_steps"], entries["dp_world_size"], saving.dp) == (9, 3, 3)
    config = entries["ds_config"]
    assert isinstance(config, dict) and config["train_batch_size"] == 12
    assert saving.frozen == {"frozen": ((4,), FP32)}
    assert module["again"] is module["one"]
    assert saving.trained == {"one": (2, 3), "two": (2, 3)}


def test_a_master_is_looked_for_where_its_weight_lies() -> None:
    """Under a family of its own, as both are read; all others in those of the source."""
    held = content()
    placements = [
        whole_placement(key.name, key.kind, one.shape, one.dtype, family=f"file {key.name}", buffer=str(key))
        for key, one in held.tensors.items()
        if key.kind != "fp32"
    ]
    source = Layout(by_key(placements), {f"file {name}": 2 for name in ("one", "two", "frozen")})
    layout = layout_of(held, source)
    master, weight, moment = (layout[TensorKey(name="one", kind=kind)] for kind in ("fp32", "weight", "exp_avg"))
    assert (weight.family, moment.family) == ("file one", "file one") != (master.family, moment.family)
    assert master.buffer == weight.buffer != moment.buffer
    assert layout.shards[master.family] == 2


def test_a_member_of_which_nothing_was_saved_keeps_no_weights_from_a_run() -> None:
    """It is in no list of shapes; a load that wants the optimizer is told of it (`optimizer_faults`)."""
    group = GroupFacts(members=("one", "ghost"), hyperparameters={"lr": 0.1})
    model = model_of(replace(content(), facts=OptimizerFacts(groups=(group,))))
    assert model.param_shapes == ({"one": (2, 3)},)
    assert {*model.module} == {"one", "two", "frozen", "again"}


def lacking() -> dict[str, tuple[Content, str]]:
    """What each content lacks whose optimizer is wanted."""
    made, facts = content(), content().facts
    assert facts is not None
    one, two = facts.groups
    others = {key: held for key, held in made.tensors.items() if key.name != "two" or key.kind == "weight"}
    masters = {key: held for key, held in made.tensors.items() if key.kind != "fp32"}
    weights = {key: held for key, held in made.tensors.items() if key.kind == "weight"}
    moment = TensorKey(name="two", kind="exp_avg")
    narrow = {**made.tensors, moment: replace(made.tensors[moment], dtype=ElementType.BFLOAT16)}
    both = GroupFacts(members=("one", "two"), hyperparameters={"lr": 0.1})
    step = {"one": facts.scalars["one"]}
    return {
        "no groups": (replace(made, facts=OptimizerFacts(groups=())), "has no param groups"),
        "a member without states": (
            replace(made, tensors=others, facts=OptimizerFacts(groups=(one, two), scalars=step)),
            "is in a param group, and has no state",
        ),
        "no states at all": (
            replace(made, tensors=weights, facts=OptimizerFacts(groups=(one,))),
            "--to safetensors or torch, for the weights",
        ),
        "states of no member": (
            replace(made, facts=OptimizerFacts(groups=(one,), scalars=step)),
            "has states, and is in no param group",
        ),
        "another shape": (
            replace(made, tensors={**made.tensors, **tensors({("two", "exp_avg"): (3, 2)})}),
            "has another shape than its weight",
        ),
        "another type": (replace(made, tensors=narrow), "and DeepSpeed keeps fp32 masters and states"),
        "no masters": (replace(made, tensors=masters), "were trained without fp32 masters"),
        "several steps": (
            replace(made, facts=OptimizerFacts(groups=(both,), scalars=facts.scalars)),
            "has another step count than a parameter with the same",
        ),
        "pieces": (replace(made, buffers=frozenset({"frozen"})), "that is saved in several pieces"),
    }


@pytest.mark.parametrize("case", lacking())
def test_an_optimizer_that_is_none_of_deepspeeds_is_told(case: str) -> None:
    """Each reason alone, by name; and none of a content that lacks nothing."""
    held, said = lacking()[case]
    found = list(optimizer_faults(held))
    assert len(found) == 1 and said in f"{found[0].line()}; {found[0].mend}", found
    assert list(optimizer_faults(content())) == []
    assert list(optimizer_faults(replace(held, facts=None))) == []


def test_what_is_kept_of_values_is_bounded():
    """Values are told apart by what they are, not by what they equal; the oldest go first."""
    kept, made = IdentityCache[int](), []
    values = [{}, {}, {}]

    def make():
        made.append(len(made))
        return made[-1]

    assert [kept.get(value, 16000, make) for value in (values[0], values[1], values[0])] == [0, 1, 0]
    assert [kept.get(value, 16000, make) for value in (values[2], values[1], values[0])] == [2, 1, 3]
    large = {}
    assert [kept.get(value, 10**6, make) for value in (large, large)] == [4, 4]
    assert kept.get(values[0], 16000, make) == 5
