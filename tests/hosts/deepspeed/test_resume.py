"""The resume policy on DeepSpeed: what the first optimizer steps after a load use, and what the load kept.

The measure is an uninterrupted run of the configuration that should win, read where the optimizer steps.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from cases import Run
from logs import uses
from resume_jobs import Setup
from resumed import STEPS, rates, resume, same_tensors, uninterrupted

pytestmark = pytest.mark.distributed

SAVED = {
    "none-json": Setup(json=True),
    "none-client": Setup(),
    "WarmupLR": Setup(json=True, scheduler=("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 8})),
    "WarmupDecayLR": Setup(
        json=True, scheduler=("WarmupDecayLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "total_num_steps": 20})
    ),
    "WarmupCosineLR": Setup(json=True, scheduler=("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 20})),
    "OneCycle": Setup(
        json=True, scheduler=("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 4})
    ),
    "LambdaLR": Setup(scheduler=("LambdaLR", {"slope": 0.1})),
    "CosineAnnealingLR": Setup(scheduler=("CosineAnnealingLR", {"T_max": 40})),
    "OneCycleLR": Setup(scheduler=("OneCycleLR", {"max_lr": [0.01, 0.001], "total_steps": 40})),
    "SequentialLR": Setup(scheduler=("SequentialLR", {"start": 0.1, "T_max": 30})),
}
CHANGED = {
    "none-json": {},
    "none-client": {},
    "WarmupLR": {"scheduler": ("WarmupLR", {"warmup_max_lr": 0.5, "warmup_num_steps": 12})},
    "WarmupDecayLR": {
        "scheduler": ("WarmupDecayLR", {"warmup_max_lr": 0.5, "warmup_num_steps": 3, "total_num_steps": 30})
    },
    "WarmupCosineLR": {"scheduler": ("WarmupCosineLR", {"warmup_num_steps": 3, "total_num_steps": 30})},
    "OneCycle": {"scheduler": ("OneCycle", {"cycle_min_lr": 0.05, "cycle_max_lr": 0.5, "cycle_first_step_size": 6})},
    "LambdaLR": {"scheduler": ("LambdaLR", {"slope": 0.2})},
    "CosineAnnealingLR": {"scheduler": ("CosineAnnealingLR", {"T_max": 60})},
    "OneCycleLR": {"scheduler": ("OneCycleLR", {"max_lr": [0.5, 0.05], "total_steps": 60})},
    "SequentialLR": {"scheduler": ("SequentialLR", {"start": 0.2, "T_max": 50})},
}
LAYOUTS = (Run(0, 1), Run(1, 1), Run(2, 2), Run(3, 2), Run("bf16", 1))
POLICIES = ("override", "checkpoint", "reset")


def _rows() -> list[tuple[str, Run, str, str]]:
    """Every scheduler on every layout; policies and loaders take turns, so that each policy meets each of them."""
    rows = [
        (kind, run, POLICIES[(number + at) % 3], ("direct", "deepspeed")[(number + at) % 2])
        for number, kind in enumerate(SAVED)
        for at, run in enumerate(LAYOUTS)
    ]
    # No checkpoint holds the function of a LambdaLR.
    return [
        (kind, run, "override" if (kind, of) == ("LambdaLR", "checkpoint") else of, by) for kind, run, of, by in rows
    ]


def _new(kind: str, run: Run) -> Setup:
    return SAVED[kind].but(run=run, lr=0.5, weight_decay=0.7, **CHANGED[kind])


def test_every_policy_meets_every_scheduler_and_layout() -> None:
    for at, values in ((0, SAVED), (1, LAYOUTS), (3, ("direct", "deepspeed"))):
        met = {(str(row[at]), row[2]) for row in _rows()}
        assert met == {(str(value), of) for value in values for of in POLICIES} - {("LambdaLR", "checkpoint")}


@pytest.mark.parametrize(("kind", "run", "policy", "by"), _rows(), ids=str)
def test_the_rates_are_those_of_the_policy_from_the_first_step_and_the_moments_stay(
    worlds: Any, kept: Any, kind: str, run: Run, policy: str, by: str
) -> None:
    """On an unchanged layout: each step as in an uninterrupted run of this or of the saving run's configuration.

    `override`: this run's, at the position; `checkpoint`: rates, decay and schedule of the saving run; `reset`: this
    run's from the beginning.
    """
    folder, saved = kept(SAVED[kind].but(run=run))
    new = _new(kind, run)
    loaded = resume(worlds, new.but(policy={"scheduler": policy}, unchanged=by), folder)
    assert loaded[0]["error"] is None, loaded[0].get("text")
    there = rates(saved[0]["rates"])
    expected = there if policy == "checkpoint" else rates(uninterrupted(worlds, new, 0 if policy == "reset" else STEPS))
    assert all(rates(rank["rates"]) == expected for rank in loaded)
    assert rates(uninterrupted(worlds, new)) != there, "the configurations must differ for this to show anything"
    assert loaded[0]["counters"][0] == STEPS
    same_tensors(saved, loaded)
    (line,) = loaded[0]["told"]
    assert line.startswith(f'"scheduler": "{policy}" applied to {folder}')
    assert uses(line, [group["lr"] for group in loaded[0]["rates"][0]]), (line, loaded[0]["rates"][0])
    assert not any(rank["told"] for rank in loaded[1:]) and all(rank["applied"] for rank in loaded)


@pytest.mark.parametrize("kind", ["none-client", "WarmupDecayLR", "LambdaLR", "SequentialLR"])
@pytest.mark.parametrize(("source", "target"), [(Run(2, 2), Run(3, 3)), (Run(3, 2), Run(1, 1)), (Run(1, 3), Run(0, 2))])
def test_override_under_another_layout(worlds: Any, kept: Any, kind: str, source: Run, target: Run) -> None:
    """`scheduler: override` together with another stage and dp."""
    folder, saved = kept(SAVED[kind].but(run=source))
    new = _new(kind, target)
    loaded = resume(worlds, new.but(policy={"scheduler": "override"}), folder)
    assert loaded[0]["error"] is None, loaded[0].get("text")
    expected = rates(uninterrupted(worlds, new))
    assert all(rates(rank["rates"]) == expected for rank in loaded)
    same_tensors(saved, loaded)


@pytest.mark.parametrize("kind", ["none-json", "WarmupLR", "OneCycle", "CosineAnnealingLR", "SequentialLR"])
def test_strict_lists_every_difference_and_loads_what_agrees(worlds: Any, kept: Any, kind: str) -> None:
    run = Run(2, 2)
    folder, saved = kept(SAVED[kind].but(run=run))
    refused = resume(worlds, _new(kind, run).but(policy={"scheduler": "strict"}), folder)
    assert refused[0]["error"] == "ScheduleMismatch"
    assert len({rank["text"] for rank in refused}) == 1 and all(rank["unchanged"] for rank in refused)
    text = refused[0]["text"]
    assert "weight_decay" in text and "0.1" in text and "0.7" in text
    ways = {way: re.search(rf"\({way} with (--\S+?)\)", text) for way in ("kept", "used")}
    for way, expected in (("kept", rates(saved[0]["rates"])), ("used", rates(uninterrupted(worlds, _new(kind, run))))):
        flag = ways[way]
        assert flag is not None, text
        loaded = resume(worlds, _new(kind, run), folder, flags=[flag[1]])
        assert loaded[0]["error"] is None and rates(loaded[0]["rates"]) == expected, loaded[0].get("text")
        same_tensors(saved, loaded)
    loaded = resume(worlds, SAVED[kind].but(run=run, policy={"scheduler": "strict"}), folder)
    assert loaded[0]["error"] is None, loaded[0].get("text")
    assert rates(loaded[0]["rates"]) == rates(saved[0]["rates"])


EXCHANGED = {
    "LambdaLR": SAVED["LambdaLR"],
    "CosineAnnealingLR": SAVED["CosineAnnealingLR"],
    "SequentialLR": SAVED["SequentialLR"],
    "Chained": Setup(scheduler=("ChainedScheduler", {"gammas": [0.9, 0.8]})),
    "Plateau": Setup(scheduler=("Plateau", {"patience": 1, "factor": 0.5})),
    "OneCycleLR": SAVED["OneCycleLR"],
}


@pytest.mark.parametrize("policy", [None, "checkpoint"])
@pytest.mark.parametrize(
    ("kind", "source", "target"),
    [(kind, Run(1, 2), Run(*((2, 1), (3, 2), (0, 1))[number % 3])) for number, kind in enumerate(EXCHANGED)],
    ids=str,
)
def test_param_groups_in_another_order_keep_their_rates(
    worlds: Any, kept: Any, kind: str, source: Run, target: Run, policy: str | None
) -> None:
    """Groups are found by their members: what a scheduler has for each goes with them."""
    folder, saved = kept(EXCHANGED[kind].but(run=source))
    given = {} if policy is None else {"scheduler": policy}
    new = EXCHANGED[kind].but(run=target, exchanged=True, policy=given)
    loaded = resume(worlds, new, folder)
    if loaded[0]["error"] is not None:
        assert (kind, policy) == ("LambdaLR", "checkpoint"), loaded[0]["text"]
        return
    expected = [step[::-1] for step in rates(saved[0]["rates"])]
    assert [rates(rank["rates"]) for rank in loaded] == [expected] * len(loaded)
    same_tensors(saved, loaded)


_ALONE = {"load_optimizer_states": False, "load_lr_scheduler_states": True}


def test_groups_that_are_joined_have_one_rate(worlds: Any, kept: Any) -> None:
    """Two saved groups of other rates cannot be one, also where the schedule alone is loaded."""
    folder, _ = kept(SAVED["CosineAnnealingLR"].but(run=Run(1, 2)))
    joined = SAVED["CosineAnnealingLR"].but(run=Run(2, 1), groups=1)
    for given, what in (({}, "were saved with different values of 'lr'"), (_ALONE, "lr_scheduler of this run")):
        refused = resume(worlds, joined, folder, arguments=given)
        assert refused[0]["error"] == "ParamGroupMismatch" and refused[0]["unchanged"]
        assert what in refused[0]["text"]


@pytest.mark.parametrize(
    ("kind", "flags", "warned"),
    [
        ("none-client", None, True),
        ("LambdaLR", None, True),
        ("WarmupLR", None, True),
        ("none-client", ["--override-opt-param-scheduler"], False),
    ],
)
def test_a_learning_rate_that_is_not_used_is_warned_of(
    worlds: Any, kept: Any, kind: str, flags: list[str] | None, warned: bool
) -> None:
    """With the line that uses it, once a param group; also where DeepSpeed uses it an update later."""
    run = Run(1, 1)
    folder, _ = kept(SAVED[kind].but(run=run))
    held = resume(worlds, _new(kind, run), folder, flags=flags)[0]
    found = [line for line in held["report"]["warnings"] if "learning rate" in line]
    assert len(found) == (len(new_groups(held)) if warned else 0)
    for line in found[:1]:  # each of the two ways that it names, followed
        ways = re.search(r"to use it: (\{.*\}) in the DeepSpeed JSON, or (--\S+)", line)
        assert ways is not None and all(ways[0] in other for other in found), found
        expected = rates(uninterrupted(worlds, _new(kind, run)))
        for how in ({"flags": [ways[2]]}, {"policy": json.loads(ways[1])["ds_reshard"]["resume"]}):
            held = resume(worlds, _new(kind, run).but(policy=how.pop("policy", {})), folder, **how)[0]
            assert held["error"] is None and rates(held["rates"]) == expected, held.get("text")
            assert not [line for line in held["report"]["warnings"] if "learning rate" in line]


def new_groups(held: dict[str, Any]) -> list[str]:
    return [row["name"] for row in held["report"]["rows"] if row["name"].endswith(": lr")]
