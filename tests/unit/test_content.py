"""What one format hands another: schedules group by group, and entries where they were."""

from __future__ import annotations

from ds_reshard.model.content import Content, TensorSource, flatten, schedule_of
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import ElementType


def test_each_group_keeps_its_own_rates() -> None:
    """The lists of a LambdaLR's state dict come back as they were, in the order of the groups."""
    state = {"base_lrs": [0.1, 0.2], "last_epoch": 7, "_last_lr": [0.03, 0.04], "lr_lambdas": [None, {"a": 1}]}
    schedule = schedule_of(state, 2)
    assert schedule is not None and schedule.entries() == state
    assert schedule_of(state, 3) is None


def test_a_value_in_the_way_is_kept() -> None:
    """Where a value lies on the way to another, the other has its whole name, and neither is lost."""
    objects = {("a",): 1, ("a", "b"): 2, ("c", "d"): 3}
    content = Content(folder="run", ranks=1, tensors={}, facts=None, objects=objects)
    assert content.entries == {"a": 1, "a.b": 2, "c": {"d": 3}}


def test_what_is_trained_has_every_state_and_what_lies_beside_is_no_weight() -> None:
    """Masters and moments by parameter; a tensor of the script is nobody's weight."""
    kinds = {("w", "weight"), ("w", "fp32"), ("w", "exp_avg"), ("v", "weight"), ("rng", "weight")}
    keys = {TensorKey(name=name, kind=kind) for name, kind in kinds}
    tensors = {key: TensorSource(shape=(2,), dtype=ElementType.FLOAT32, origin=key) for key in keys}
    content = Content(folder="run", ranks=1, tensors=tensors, facts=None, extra_tensors={"rng": ("train", "rng")})
    assert set(content.weights) == {"w", "v"}
    assert {name: set(states) for name, states in content.trained.items()} == {"w": {"fp32", "exp_avg"}}


def test_a_folder_that_is_a_step_has_the_tag_of_deepspeed() -> None:
    """And any other its own name; a step that is no whole number is none."""
    for folder, step, tag in (("runs/7", 7, "global_step7"), ("runs/7", 8, "7"), ("runs/best", 7, "best")):
        objects = {("global_steps",): step, ("train", "epoch"): 2}
        content = Content(folder=folder, ranks=1, tensors={}, facts=None, objects=objects)
        assert (content.tag, content.steps, content.extra_entries) == (tag, step, ["train"])
    assert Content(folder="run", ranks=1, tensors={}, facts=None, objects={("global_steps",): True}).steps is None


def test_values_are_found_by_all_keys_that_lead_to_them() -> None:
    """An empty dict, and one whose keys are no names, are values themselves."""
    values = {"a": {"b": {"c": 1}, "d": {}}, "e": {0: 2}}
    assert dict(flatten(values)) == {("a", "b", "c"): 1, ("a", "d"): {}, ("e",): {0: 2}}
