"""Schedulers of the script's own, in every order in which their state can come: the policy holds for all of them."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from cases import Run
from resume_jobs import Setup
from resumed import rates, uninterrupted

pytestmark = pytest.mark.distributed

STEPS = 5
RUN = Run(1, 1)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LambdaLR": ({"slope": 0.1}, {"slope": 0.2}),
    "CosineAnnealingLR": ({"T_max": 40}, {"T_max": 60}),
    "LinearLR": ({"start_factor": 0.1, "total_iters": 8}, {"start_factor": 0.2, "total_iters": 12}),
    "OneCycleLR": ({"max_lr": [0.01, 0.001], "total_steps": 40}, {"max_lr": [0.5, 0.05], "total_steps": 60}),
    "CyclicLR": (
        {"base_lr": [0.01, 0.001], "max_lr": [0.02, 0.002], "step_size_up": 3, "cycle_momentum": False},
        {"base_lr": [0.5, 0.05], "max_lr": [0.6, 0.06], "step_size_up": 4, "cycle_momentum": False},
    ),
    "SequentialLR": ({"start": 0.1, "T_max": 30}, {"start": 0.2, "T_max": 50}),
    "warmup, then OneCycleLR": ({"start": 0.1, "max_lr": [0.05, 0.005]}, {"start": 0.2, "max_lr": [0.9, 0.09]}),
    "ChainedScheduler": ({"start": 0.1, "gamma": 0.9}, {"start": 0.2, "gamma": 0.8}),
    "SWALR": ({"swa_lr": 0.001, "anneal_epochs": 9}, {"swa_lr": 0.05, "anneal_epochs": 12}),
    "WarmupLR": ({"warmup_max_lr": 0.01, "warmup_num_steps": 8}, {"warmup_max_lr": 0.5, "warmup_num_steps": 12}),
    "OneCycle": (
        {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 4},
        {"cycle_min_lr": 0.05, "cycle_max_lr": 0.5, "cycle_first_step_size": 6},
    ),
    "ReduceLROnPlateau": ({"patience": 1, "factor": 0.5}, {"patience": 2, "factor": 0.25}),
}
ORDERS = ("before", "after", "late", "twice", "thrice")
FUNCTION_OF_POSITION = [kind for kind in KINDS if kind != "ReduceLROnPlateau"]
NO_STATE_HOLDS = ("LambdaLR", "WarmupLR", "OneCycle")


def _rows() -> list[tuple[str, str, str]]:
    """Every scheduler in every order; the policies take turns, so that each meets each of both."""
    rows = []
    for number, kind in enumerate(KINDS):
        if kind == "ReduceLROnPlateau":
            rows += [(kind, order, "checkpoint") for order in ORDERS]
            continue
        policies = ("override", "reset") if kind in NO_STATE_HOLDS else ("override", "checkpoint", "reset")
        rows += [(kind, order, policies[(number + at) % len(policies)]) for at, order in enumerate(ORDERS)]
    return rows


def _new(setup: Setup, policy: str) -> Setup:
    return setup.but(lr=0.5, weight_decay=0.7, policy={"scheduler": policy})


@pytest.fixture(scope="module")
def saved(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For a kind of scheduler: a folder, what the saving run's steps used, and what the new configuration's use."""

    @functools.cache
    def save(kind: str, run: Run = RUN) -> Any:
        folder, setup = tmp_path_factory.mktemp("unowned"), Setup(run=run)

        def seen(name: str, of: Setup, params: Any) -> Any:
            given = {"setup": of, "kind": kind, "params": params, "folder": str(folder / name)}
            return _seen(worlds[run.dp].run("unowned_jobs.save", steps=STEPS, **given)[0])

        old, new = KINDS[kind]
        return folder / "old", seen("old", setup, old), seen("new", setup.but(lr=0.5, weight_decay=0.7), new)

    return save


def _seen(rows: Any) -> Any:
    return rates(rows, ("lr", "weight_decay", "betas"))


def _resume(worlds: Any, setup: Setup, kind: str, folder: Path, order: str, params: Any = None, **more: Any) -> Any:
    ranks = worlds[setup.run.dp].run(
        "unowned_jobs.resume",
        setup=setup,
        kind=kind,
        params=params or KINDS[kind][1],
        folder=str(folder),
        order=order,
        **more,
    )
    assert len({repr((rank.get("error"), rank.get("text"), rank.get("rates"))) for rank in ranks}) == 1
    return ranks[0]


def test_every_policy_meets_every_scheduler_and_order() -> None:
    policies = {"override", "checkpoint", "reset"}
    for kind in FUNCTION_OF_POSITION:
        assert {row[2] for row in _rows() if row[0] == kind} == policies - (
            {"checkpoint"} if kind in NO_STATE_HOLDS else set()
        )
    assert {row[1:] for row in _rows()} == {(order, policy) for order in ORDERS for policy in policies}


@pytest.mark.parametrize(("kind", "order", "policy"), _rows())
def test_the_policy_holds_whenever_the_state_comes(worlds: Any, saved: Any, kind: str, order: str, policy: str) -> None:
    """`override` at the position, `reset` from the beginning, `checkpoint` on the saved schedule."""
    folder, there, here = saved(kind)
    loaded = _resume(worlds, _new(Setup(run=RUN), policy), kind, folder, order)
    assert loaded["error"] is None, loaded["text"]
    expected = {"override": here[STEPS:], "reset": here[:3], "checkpoint": there[STEPS:]}
    assert _seen(loaded["rates"]) == expected[policy]


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        (kind, ("before", "after")[number % 2])
        for number, kind in enumerate(kind for kind in FUNCTION_OF_POSITION if kind not in NO_STATE_HOLDS)
    ],
)
def test_strict_compares_when_the_state_is_given(worlds: Any, saved: Any, kind: str, order: str) -> None:
    folder, there, _ = saved(kind)
    old, new = KINDS[kind]
    same = Setup(run=RUN, policy={"scheduler": "strict"})
    loaded = _resume(worlds, same, kind, folder, order, old)
    assert loaded["error"] is None, loaded["text"]
    assert _seen(loaded["rates"]) == there[STEPS:]
    refused = _resume(worlds, same, kind, folder, order, {**new, **_rates_of(old)})
    assert refused["error"] == "ScheduleMismatch" and refused["unchanged"]
    assert "scheduler: " in refused["text"] and "--override-opt-param-scheduler" in refused["text"]


@pytest.mark.parametrize("policy", ["override", "checkpoint", "strict"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_the_engine_need_not_be_asked_for_a_scheduler_that_it_has_not(
    worlds: Any, saved: Any, policy: str, order: str
) -> None:
    """Lightning says load_lr_scheduler_states=False of each load: its scheduler gets its state from the client's."""
    folder, there, here = saved("CosineAnnealingLR")
    strict, old = policy == "strict", KINDS["CosineAnnealingLR"][0]
    setup = Setup(run=RUN, policy={"scheduler": policy}) if strict else _new(Setup(run=RUN), policy)
    loaded = _resume(worlds, setup, "CosineAnnealingLR", folder, order, old if strict else None, asks=False)
    assert loaded["error"] is None, loaded["text"]
    assert _seen(loaded["rates"]) == (here if policy == "override" else there)[STEPS:]


def _rates_of(params: dict[str, Any]) -> dict[str, Any]:
    """What the groups themselves keep stays the same, so that the schedule alone differs."""
    return {name: value for name, value in params.items() if name in ("max_lr", "base_lr", "swa_lr")}


@pytest.mark.parametrize(
    ("kind", "policy", "words"),
    [
        ("LambdaLR", "checkpoint", "function"),
        ("LambdaLR", "strict", "function"),
        ("WarmupLR", "checkpoint", "stores its position alone"),
        ("ReduceLROnPlateau", "override", "metrics"),
    ],
)
@pytest.mark.parametrize("order", ("before", "after"))
def test_what_no_state_holds_is_refused(
    worlds: Any, saved: Any, kind: str, policy: str, words: str, order: str
) -> None:
    folder, *_ = saved(kind)
    setup = _new(Setup(run=RUN), policy) if policy != "strict" else Setup(run=RUN, policy={"scheduler": policy})
    refused = _resume(worlds, setup, kind, folder, order, KINDS[kind][0] if policy == "strict" else None)
    assert refused["error"] == "UnsupportedLayout" and words in refused["text"] and refused["unchanged"]


@pytest.mark.parametrize("kind", ("LambdaLR", "CosineAnnealingLR", "ReduceLROnPlateau", "WarmupLR"))
def test_strict_refuses_rates_that_no_scheduler_was_built_for(worlds: Any, saved: Any, kind: str) -> None:
    """When the engine loads nothing says yet that a scheduler will come, so the rates are compared as they are."""
    folder, *_ = saved(kind)
    refused = _resume(worlds, Setup(run=RUN, policy={"scheduler": "strict"}), kind, folder, "late", KINDS[kind][0])
    assert refused["error"] == "ScheduleMismatch" and "param group 0: lr" in refused["text"] and refused["unchanged"]


def test_plateau_starts_anew_under_reset(worlds: Any, saved: Any) -> None:
    folder, _, here = saved("ReduceLROnPlateau")
    for order in ORDERS:
        loaded = _resume(worlds, _new(Setup(run=RUN), "reset"), "ReduceLROnPlateau", folder, order)
        assert _seen(loaded["rates"]) == here[:3], order


@pytest.mark.parametrize("order", ("before", "after"))
def test_a_count_of_metrics_is_no_position_of_another_scheduler(worlds: Any, saved: Any, order: str) -> None:
    """ReduceLROnPlateau counts evaluations, of which a run may have one in many updates."""
    folder, *_ = saved("ReduceLROnPlateau")
    _, _, here = saved("CosineAnnealingLR")
    refused = _resume(worlds, _new(Setup(run=RUN), "override"), "CosineAnnealingLR", folder, order)
    assert refused["error"] == "UnsupportedLayout" and "counts the metrics" in refused["text"] and refused["unchanged"]
    loaded = _resume(worlds, _new(Setup(run=RUN), "reset"), "CosineAnnealingLR", folder, order)
    assert _seen(loaded["rates"]) == here[:3], "as the refusal says"


@pytest.mark.parametrize("kind", ("LambdaLR", "CosineAnnealingLR"))
def test_without_a_policy_the_state_is_taken_as_it_is(worlds: Any, saved: Any, kind: str) -> None:
    """The checkpoint's base rates, as torch has it: what the hooks find, they leave alone."""
    folder, there, _ = saved(kind)
    setup = Setup(run=RUN, lr=0.5, weight_decay=0.7)
    assert _seen(_resume(worlds, setup, kind, folder, "after", KINDS[kind][0])["rates"]) == there[STEPS:]


@pytest.mark.parametrize("policy", ("override", "reset", "checkpoint"))
def test_a_state_of_the_run_itself_is_no_resume(worlds: Any, saved: Any, policy: str) -> None:
    """A script that falls back to an earlier state of its own gets that, once it has trained."""
    folder, *_ = saved("CosineAnnealingLR")
    said = _resume(worlds, _new(Setup(run=RUN), policy), "CosineAnnealingLR", folder, "after", later=True)
    assert rates(said["again"]) == rates(said["expected"])


@pytest.mark.parametrize(("source", "target"), [(Run(2, 2), Run(3, 2)), (Run(1, 2), Run("bf16", 1))])
def test_under_another_layout_all_ranks_alike(worlds: Any, saved: Any, source: Run, target: Run) -> None:
    folder, *_ = saved("SequentialLR", source)
    _, _, here = saved("SequentialLR", target)
    loaded = _resume(worlds, _new(Setup(run=target), "override"), "SequentialLR", folder, "late")
    assert loaded["error"] is None, loaded["text"]
    assert _seen(loaded["rates"]) == here[STEPS:]


def test_a_load_state_dict_of_the_scripts_own_is_refused(worlds: Any, tmp_path: Path) -> None:
    worlds[1].run(
        "unowned_jobs.save", setup=Setup(), kind="Scripts", params={"gamma": 0.9}, folder=str(tmp_path), steps=2
    )
    refused = _resume(worlds, _new(Setup(), "override"), "Scripts", tmp_path, "after", {"gamma": 0.5})
    assert refused["error"] == "UnsupportedLayout" and "Scripts.load_state_dict" in refused["text"]


@pytest.mark.parametrize("order", ORDERS)
def test_the_report_says_what_the_scheduler_used(worlds: Any, saved: Any, tmp_path: Path, order: str) -> None:
    folder, _, here = saved("CosineAnnealingLR")
    path = tmp_path / "report.json"
    setup = Setup(run=RUN, lr=0.5, weight_decay=0.7, policy={"scheduler": "override", "report": str(path)})
    loaded = _resume(worlds, setup, "CosineAnnealingLR", folder, order)
    assert json.loads(path.read_text()) == json.loads(json.dumps(loaded["report"]))
    rows = {row["name"]: row for row in loaded["report"]["rows"]}
    assert rows["schedule position"]["used"] == rows["schedule position"]["checkpoint"] == STEPS
    assert rows["group 0: lr"]["used"] == here[STEPS][0]["lr"]
    assert not [text for text in loaded["report"]["warnings"] if "has not been given its state" in text]


def test_schedulers_that_share_an_optimizer_are_refused(worlds: Any, saved: Any) -> None:
    folder, *_ = saved("CosineAnnealingLR")
    said = worlds[1].run("unowned_jobs.two", setup=_new(Setup(run=RUN), "override"), folder=str(folder))
    assert "LinearLR" in said[0] and "ExponentialLR" in said[0] and "ChainedScheduler" in said[0]


def test_a_state_that_the_script_gives_the_engines_own_scheduler_again_changes_nothing(worlds: Any, kept: Any) -> None:
    cosine = Setup(run=RUN, scheduler=("CosineAnnealingLR", {"T_max": 40}))
    folder, _ = kept(cosine)
    new = cosine.but(lr=0.5, scheduler=("CosineAnnealingLR", {"T_max": 60}))
    for policy, steps in (("override", STEPS), ("reset", 0)):
        setup = new.but(policy={"scheduler": policy})
        loaded = worlds[1].run("unowned_jobs.owned_again", setup=setup, folder=str(folder))[0]
        assert rates(loaded) == rates(uninterrupted(worlds, new, steps))


def test_without_a_policy_nothing_of_a_scheduler_need_be_copied(worlds: Any) -> None:
    assert worlds[1].run("unowned_jobs.uncopied", setup=Setup(run=RUN)) == [[0, 3]]


def test_bounds_in_an_optimizer_that_is_not_loaded_are_refused(worlds: Any, saved: Any) -> None:
    folder, *_ = saved("OneCycleLR", Run(3, 1))
    setup = Setup(run=Run(3, 1), lr=0.5, policy={"scheduler": "checkpoint", "optimizer": "skip"})
    refused = _resume(worlds, setup, "OneCycleLR", folder, "after")
    assert refused["error"] == "UnsupportedLayout" and "max_lr" in refused["text"]


def test_what_is_noted_keeps_neither_engine_nor_optimizer_alive(worlds: Any, saved: Any) -> None:
    folder, *_ = saved("CosineAnnealingLR")
    setup = _new(Setup(run=RUN), "override")
    assert worlds[1].run("unowned_jobs.kept_alive", setup=setup, folder=str(folder)) == [[]]


def test_a_position_that_counts_the_batches_of_other_ranks_is_a_warning(worlds: Any, tmp_path: Path) -> None:
    """accelerate steps its scheduler once for each rank: five updates of two ranks are a position of ten."""
    old, new = {"lr": 0.01, "slope": 0.1}, {"lr": 0.02, "slope": 0.2}
    worlds[2].run("accelerate_jobs.save", stage=1, folder=str(tmp_path), steps=4, times=2, **old)
    for policy, asked in (({}, old), ({"scheduler": "override"}, new)):
        given = {"stage": 1, "folder": str(tmp_path), "policy": policy, **asked}
        assert not _counted(worlds[2].run("accelerate_jobs.resume", times=2, **given))
        (line,) = _counted(worlds[1].run("accelerate_jobs.resume", **given))
        position = re.search(r"where the script's lengths are multiples of .* with last_epoch (\d+)", line)
        assert position is not None, line
        found = worlds[1].run("accelerate_jobs.resume", moved=int(position[1]), **given)
        assert not _counted(found)
        expected = [asked["lr"] / (1 + asked["slope"] * update) for update in (4, 5, 6)]
        assert found[0]["rates"] == pytest.approx(expected, rel=1e-12), policy


def _counted(told: Any) -> list[str]:
    return [text for text in told[0]["heard"] if "counts batches" in text]


def test_the_warning_is_of_the_scheduler_that_has_just_taken_its_state(worlds: Any, kept: Any) -> None:
    """Of schedulers of any class: these are equal, and have no hash."""
    folder, _ = kept(Setup(run=RUN))
    found = worlds[1].run("unowned_jobs.in_turn", setup=Setup(run=RUN), folder=str(folder), positions=[7, 8, 20, 20, 7])
    assert found == [[(7, 0), (8, 0), (20, 1), (20, 1), (7, 0)]]


@pytest.mark.parametrize("order", ORDERS)
def test_a_reset_iteration_begins_this_runs_schedule_anew(worlds: Any, saved: Any, order: str) -> None:
    """A scheduler that is built on the loaded rates has no beginning of this run's."""
    folder, _, here = saved("CosineAnnealingLR")
    setup = Setup(run=RUN, lr=0.5, weight_decay=0.7, policy={"iteration": "reset"})
    loaded = _resume(worlds, setup, "CosineAnnealingLR", folder, order)
    if order == "late":
        assert loaded["error"] == "ConfigError" and "before load_checkpoint" in loaded["text"]
    else:
        assert rates(loaded["rates"], ("lr",)) == rates(here[:3], ("lr",))
