"""Which saved group is which live one: pure, no Megatron."""

from __future__ import annotations

from typing import Any

import pytest

from ds_reshard.hosts.megatron.groups import dealt, experts_differ, match_groups
from ds_reshard.resume.policy import ResumePolicy


def group(max_lr: float = 3e-4, min_lr: float = 3e-5, *, wd_mult: float = 1.0, **more: Any) -> dict[str, Any]:
    held = {"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "eps": 1e-8}
    return {**held, "max_lr": max_lr, "min_lr": min_lr, "default_config": True, **more}


OWN = {"default_config": False}
MATCHED = {
    "by structure, bounds changed": ([group(), group(wd_mult=0.0)], [group(3e-5, wd_mult=0.0), group(3e-5)], (1, 0)),
    "names of NeMo": (
        [group()],
        [{**{k: v for k, v in group().items() if "mult" not in k}, "pre_wd_mult": 1.0, "pre_lr_mult": 1.0}],
        (0,),
    ),
    "expert parallel": ([group(), group(is_expert_parallel=True)], [group(is_expert_parallel=True), group()], (1, 0)),
    "own bounds beside the default": ([group(), group(1e-4, **OWN)], [group(1e-3, **OWN), group(1e-2)], (1, 0)),
    "muP and decoupled by eps": (
        [group(), group(1e-4, eps=1e-9, **OWN), group(1e-3, **OWN)],
        [group(), group(5e-4, **OWN), group(7e-4, eps=1e-9, **OWN)],
        (0, 2, 1),
    ),
    "all are equal on either side": ([group(), group()], [group(1e-3), group(1e-3)], (0, 1)),
}


HOST, OVERRIDE = ResumePolicy(), ResumePolicy(scheduler="override")
CHECKPOINT, STRICT = ResumePolicy(scheduler="checkpoint"), ResumePolicy(scheduler="strict")


def two(one: float, other: float, **more: Any) -> list[dict[str, Any]]:
    """A group that follows the schedule, and two that only their bounds tell apart."""
    return [group(), group(one, **OWN, **more), group(other, **OWN)]


@pytest.mark.parametrize("name", MATCHED)
def test_groups_are_found(name: str) -> None:
    live, saved, order = MATCHED[name]
    for policy in (HOST, OVERRIDE, CHECKPOINT, STRICT):
        assert match_groups(live, saved, where="x", policy=policy).order == order


REFUSED = {
    "another number": ([group()], [group(), group()]),
    "another kind": ([group(wd_mult=0.5)], [group()]),
    "both bounds changed": (two(1e-4, 6e-4), two(2e-4, 7e-4)),
    "one bound changed": (two(1e-4, 6e-4), two(1e-4, 7e-4)),
    "scaled with the schedule": ([group(3e-3), *two(1e-3, 6e-3)[1:]], two(1e-4, 6e-4)),
    "exchanged, as multiples of the schedule's": ([group(3e-3), *two(6e-3, 1e-3)[1:]], two(1e-4, 6e-4)),
    "equal now": (two(1e-4, 1e-4), two(1e-4, 6e-4)),
    "equal then": (two(1e-4, 6e-4), two(1e-4, 1e-4)),
    "no default_config, exchanged with the schedule's": (
        [group(1e-3), group(3e-4, **OWN)],
        [{**group(), "default_config": None}, {**group(1e-3), "default_config": None}],
    ),
}


@pytest.mark.parametrize("policy", [OVERRIDE, CHECKPOINT, STRICT], ids=["override", "checkpoint", "strict"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_guess_is_refused(name: str, policy: ResumePolicy) -> None:
    live, saved = REFUSED[name]
    matched = match_groups(live, saved, where="x", policy=policy)
    assert matched.order == () and {fault.error for fault in matched.faults} == {"ParamGroupMismatch"}


@pytest.mark.parametrize("policy", [OVERRIDE, CHECKPOINT, STRICT], ids=["override", "checkpoint", "strict"])
@pytest.mark.parametrize("shapes", [None, [((4, 4),), ((4, 2),), ((4, 2),)]], ids=["no shapes", "one shape"])
def test_bounds_identify_nothing_once_a_flag_is_given(policy: ResumePolicy, shapes: Any) -> None:
    """The same two values on both sides: as they were, or exchanged since. Moments would go to the wrong parameters."""
    live, saved = two(1e-4, 6e-4), two(1e-4, 6e-4)
    matched = match_groups(live, saved, where="x", policy=policy, live_shapes=shapes, saved_shapes=shapes)
    (fault,) = matched.faults
    assert "cannot be told apart without a guess: alike in wd_mult, lr_mult" in fault.what
    assert "max_lr=0.0001" in fault.expected and "max_lr=0.0006" in fault.found and "--no-load-optim" in fault.mend


def test_without_a_flag_unchanged_bounds_are_megatrons_own_pairs() -> None:
    live, saved = two(1e-4, 6e-4), [group(), *reversed(two(1e-4, 6e-4)[1:])]
    assert match_groups(live, saved, where="x", policy=HOST).order == (0, 2, 1)
    assert match_groups(live, two(1e-4, 7e-4), where="x", policy=HOST).order == ()


def test_a_pairing_that_makes_no_difference_is_no_guess() -> None:
    """States go by parameter, and all that the checkpoint gives is the same: each bound is this run's."""
    matched = match_groups(two(1e-4, 6e-4), two(2e-4, 7e-4), where="x", policy=OVERRIDE, moves_states=False)
    assert (matched.order, matched.bounds_unknown) == ((0, 1, 2), {1, 2})
    for policy in (CHECKPOINT, STRICT, HOST):
        assert match_groups(two(1e-4, 6e-4), two(2e-4, 7e-4), where="x", policy=policy, moves_states=False).order == ()


def test_a_difference_that_the_checkpoint_gives_is_named() -> None:
    """betas stay the checkpoint's under the override, unless they are named."""
    live, saved = two(1e-4, 6e-4), two(2e-4, 7e-4, betas=(0.9, 0.95))
    (fault,) = match_groups(live, saved, where="x", policy=OVERRIDE, moves_states=False).faults
    assert "differ in betas" in fault.what and "--override-optim-hparams betas" in fault.mend
    named = ResumePolicy(scheduler="override", hyperparameters=("betas",))
    assert match_groups(live, saved, where="x", policy=named, moves_states=False).order == (0, 1, 2)


def test_shapes_go_before_values() -> None:
    """Where it is known whose parameters are whose, that decides; values alone would pair them the other way."""
    live, saved = [group(1e-3, **OWN), group(2e-3, **OWN)], [group(2e-3, **OWN), group(1e-3, **OWN)]
    shapes = [((4, 2),), ((2, 4),)]
    for policy in (HOST, OVERRIDE, CHECKPOINT):
        matched = match_groups(live, saved, where="x", policy=policy, live_shapes=shapes, saved_shapes=shapes)
        assert matched.order == (0, 1)
    others = [((4, 2),), ((9,),)]
    other = match_groups(live, saved, where="x", policy=HOST, live_shapes=shapes, saved_shapes=others)
    assert other.order == () and "other parameters" in other.faults[0].what


def test_groups_of_the_same_shapes_are_not_taken_in_order() -> None:
    """Megatron sorts groups by their values: new ones may have turned the order round."""
    live, saved = [group(3e-3, **OWN), group(5e-3, **OWN)], [group(1e-3, **OWN), group(2e-3, **OWN)]
    shapes = [((4, 2),), ((4, 2),)]
    for policy in (HOST, OVERRIDE):
        assert not match_groups(live, saved, where="x", policy=policy, live_shapes=shapes, saved_shapes=shapes).order


def test_groups_of_experts_are_dealt_to_the_optimizer_that_trains_them() -> None:
    """From one optimizer to two, where experts have no biases; and back, which drops what the dense groups say too."""
    dense = [{"wd_mult": one, "lr_mult": 1.0, "is_expert_parallel": False, "max_lr": 3e-4} for one in (1.0, 0.0)]
    experts = {**dense[0], "is_expert_parallel": True}
    assert dealt(dense, [experts]) == [experts]
    assert dealt([*dense, experts], dense) == dense and dealt([*dense, experts], [experts]) == [experts]
    assert experts_differ([*dense, experts], "here") == []
    (fault,) = experts_differ([*dense, {**experts, "max_lr": 1e-4}], "here")
    assert fault.error == "ParamGroupMismatch" and fault.where == "here"
