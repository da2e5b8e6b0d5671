"""Names of another framework: groups, schedules, states and tied names go with their parameters."""

from __future__ import annotations

from ds_reshard.model.content import Content, Held, Schedule
from ds_reshard.model.facts import GroupFacts, OptimizerFacts
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType
from ds_reshard.operations.name_map import NameMap


def test_groups_schedules_and_states_are_renamed_in_the_order_of_the_map() -> None:
    """The second group is the first parameter's in the map: its rates and its schedule come first, too."""
    keys = [TensorKey(name=name, kind=kind) for name in ("a", "b", "c") for kind in ("weight", "exp_avg")]
    tensors = {key: Held(shape=(1,), dtype=ElementType.FLOAT32, origin=key) for key in keys}
    groups = tuple(GroupFacts(members=m, hyperparameters={"lr": lr}) for m, lr in ((("a", "c"), 0.1), (("b",), 0.2)))
    facts = OptimizerFacts(groups=groups, scalars={name: {"step": at} for at, name in enumerate("abc")})
    rows = tuple({"base_lrs": lr, "_last_lr": lr, "lr_lambdas": None} for lr in (0.1, 0.2))
    schedule = Schedule(counters={"last_epoch": 3}, groups=rows)
    content = Content(folder="run", ranks=1, tensors=tensors, facts=facts, schedule=schedule)
    names = {"b": ("B", "head"), "c": ("C",), "a": ("A",)}
    made = NameMap(path="map.json", names=names, digest="").applied(content)
    assert list(made.weights) == ["B", "C", "A"]
    assert made.tied == {"head": "B"}
    assert made.facts is not None and made.schedule is not None
    found = [(group.members, (group.hyperparameters or {})["lr"]) for group in made.facts.groups]
    assert found == [(("B",), 0.2), (("C", "A"), 0.1)]
    assert made.facts.scalars == {"A": {"step": 0}, "B": {"step": 1}, "C": {"step": 2}}
    assert [group["base_lrs"] for group in made.schedule.groups] == [0.2, 0.1]
    origins = {(key.name, held.origin.name) for key, held in made.tensors.items()}
    assert origins == {("A", "a"), ("B", "b"), ("C", "c")}
