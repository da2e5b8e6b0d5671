"""Which saved group is which live one: pure, no Megatron."""

from __future__ import annotations

from typing import Any

import pytest

from ds_reshard.hosts.megatron.groups import match_groups


def group(max_lr: float = 3e-4, min_lr: float = 3e-5, *, wd_mult: float = 1.0, **more: Any) -> dict[str, Any]:
    held = {"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "eps": 1e-8}
    return {**held, "max_lr": max_lr, "min_lr": min_lr, "default_config": True, **more}


OWN = {"default_config": False}
MATCHED = {
    "by structure, bounds changed": ([group(), group(wd_mult=0.0)], [group(3e-5, wd_mult=0.0), group(3e-5)], (1, 0)),
    "names of NeMo": ([group()], [{**{k: v for k, v in group().items() if "mult" not in k}, "pre_wd_mult": 1.0,
                                   "pre_lr_mult": 1.0}], (0,)),
    "expert parallel": ([group(), group(is_expert_parallel=True)], [group(is_expert_parallel=True), group()], (1, 0)),
    "own bounds beside the default": ([group(), group(1e-4, **OWN)], [group(1e-3, **OWN), group(1e-2)], (1, 0)),
    "muP and decoupled by eps": (
        [group(), group(1e-4, eps=1e-9, **OWN), group(1e-3, **OWN)],
        [group(), group(5e-4, **OWN), group(7e-4, eps=1e-9, **OWN)],
        (0, 2, 1),
    ),
    "two of their own, scaled with the schedule": (
        [group(), group(1e-4, 1e-5, **OWN), group(6e-4, 6e-5, **OWN)],
        [group(3e-3, 3e-4), group(6e-3, 6e-4, **OWN), group(1e-3, 1e-4, **OWN)],
        (0, 2, 1),
    ),
    "two of their own, unchanged": (
        [group(), group(1e-4, **OWN), group(6e-4, **OWN)],
        [group(9e-3), group(6e-4, **OWN), group(1e-4, **OWN)],
        (0, 2, 1),
    ),
    "nothing tells them apart": ([group(), group()], [group(1e-3), group(1e-3)], (0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", MATCHED)
def test_groups_are_found(name: str) -> None:
    live, saved, order = MATCHED[name]
    assert match_groups(live, saved, where="x").order == order


REFUSED = {
    "another number": ([group()], [group(), group()]),
    "another kind": ([group(wd_mult=0.5)], [group()]),
    "both bounds changed": (
        [group(), group(1e-4, **OWN), group(6e-4, **OWN)], [group(), group(2e-4, **OWN), group(7e-4, **OWN)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_guess_is_refused(name: str) -> None:
    live, saved = REFUSED[name]
    matched = match_groups(live, saved, where="x")
    assert matched.order == () and {fault.error for fault in matched.faults} == {"ParamGroupMismatch"}


def test_shapes_go_before_values() -> None:
    """Where it is known whose parameters are whose, that decides; values alone would pair them the other way."""
    live, saved = [group(1e-3, **OWN), group(2e-3, **OWN)], [group(2e-3, **OWN), group(1e-3, **OWN)]
    shapes = [((4, 2),), ((2, 4),)]
    assert match_groups(live, saved, where="x").order == (1, 0)
    assert match_groups(live, saved, where="x", live_shapes=shapes, saved_shapes=shapes).order == (0, 1)
    other = match_groups(live, saved, where="x", live_shapes=shapes, saved_shapes=[((4, 2),), ((9,),)])
    assert other.order == () and "other parameters" in other.faults[0].what


def test_alike_groups_of_known_parameters_are_taken_in_order() -> None:
    live, saved = [group(1e-3, **OWN), group(2e-3, **OWN)], [group(5e-3, **OWN), group(7e-3, **OWN)]
    shapes = [((4, 2),), ((4, 2),)]
    assert match_groups(live, saved, where="x", live_shapes=shapes, saved_shapes=shapes).order == (0, 1)
