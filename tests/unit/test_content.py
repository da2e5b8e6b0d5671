"""What one format hands another: schedules group by group, and entries where they were."""

from __future__ import annotations

from ds_reshard.model.content import Content, schedule_of


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
