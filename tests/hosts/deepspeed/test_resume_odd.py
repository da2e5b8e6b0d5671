"""What an adversary tried on the resume policy: states of other schedulers, odd groups, faults on one rank alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from gathered import same_bits
from resume_jobs import Setup
from resumed import rates, resume, same_tensors, uninterrupted
from saves import Saves

pytestmark = pytest.mark.distributed

LAMBDA = ("LambdaLR", {"slope": 0.1})
COSINE = ("CosineAnnealingLR", {"T_max": 40})


@pytest.mark.parametrize("policy", ["checkpoint", "strict"])
def test_a_function_that_no_checkpoint_holds_is_refused(worlds: Any, kept: Any, policy: str) -> None:
    setup = Setup(run=Run(1, 1), scheduler=LAMBDA)
    folder, _ = kept(setup)
    refused = resume(worlds, setup.but(policy={"scheduler": policy}), folder)
    assert refused[0]["error"] == "UnsupportedLayout" and "LambdaLR" in refused[0]["text"]
    assert refused[0]["unchanged"]


@pytest.mark.parametrize(
    "other",
    [
        ("ExponentialLR", {"gamma": 0.9}),
        ("StepLR", {"step_size": 2}),
        LAMBDA,
        ("SequentialLR", {"start": 0.1, "T_max": 9}),
    ],
    ids=lambda kind: kind[0],
)
def test_checkpoint_does_not_take_the_state_of_another_class(worlds: Any, kept: Any, other: Any) -> None:
    folder, _ = kept(Setup(run=Run(1, 1), scheduler=COSINE))
    refused = resume(worlds, Setup(run=Run(1, 1), scheduler=other, policy={"scheduler": "checkpoint"}), folder)
    assert refused[0]["error"] == "UnsupportedLayout" and refused[0]["unchanged"], refused[0].get("text")


def test_a_saved_json_that_does_not_describe_what_ran_is_refused(worlds: Any, kept: Any, tmp_path: Path) -> None:
    """A resumes as B under the checkpoint's schedule, B saves its own JSON beside A's rates, and C trusts neither."""
    first = Setup(run=Run(1, 1), json=True, scheduler=("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 8}))
    folder, _ = kept(first)
    second = first.but(lr=0.5, scheduler=("WarmupLR", {"warmup_max_lr": 0.5, "warmup_num_steps": 8}))
    chained = resume(worlds, second.but(policy={"scheduler": "checkpoint"}), folder, save_to=str(tmp_path / "second"))
    assert chained[0]["error"] is None
    third = resume(worlds, second.but(policy={"scheduler": "checkpoint"}), tmp_path / "second")
    assert third[0]["error"] == "UnsupportedLayout" and "other rates" in third[0]["text"]


OF_DEEPSPEED = {
    "LRRangeTest": lambda lr: {"lr_range_test_min_lr": lr, "lr_range_test_step_size": 3},
    "OneCycle": lambda lr: {"cycle_min_lr": lr / 10, "cycle_max_lr": lr, "cycle_first_step_size": 6},
    "WarmupLR": lambda lr: {"warmup_max_lr": lr, "warmup_num_steps": 20},
    "WarmupDecayLR": lambda lr: {"warmup_max_lr": lr, "warmup_num_steps": 2, "total_num_steps": 20},
    "WarmupCosineLR": lambda lr: {"warmup_num_steps": 2, "total_num_steps": 20},
}


@pytest.mark.parametrize("kind", OF_DEEPSPEED)
@pytest.mark.parametrize("policy", ["checkpoint", "override"])
def test_each_update_after_a_load_has_the_rate_of_its_policy(worlds: Any, kept: Any, kind: str, policy: str) -> None:
    """LRRangeTest took over a method of the scheduler that was built to compare with, and stood still."""
    first, then = (
        Setup(run=Run(1, 1), json=True, lr=lr, scheduler=(kind, OF_DEEPSPEED[kind](lr))) for lr in (0.01, 0.3)
    )
    folder, _ = kept(first)
    (loaded,) = resume(worlds, then.but(policy={"scheduler": policy}), folder)
    assert loaded["error"] is None, loaded.get("text")
    expected = rates(uninterrupted(worlds, first if policy == "checkpoint" else then), ("lr",))
    found = rates(loaded["rates"], ("lr",))
    assert len({str(step) for step in expected}) == 3
    assert found == [[{"lr": pytest.approx(group["lr"], rel=1e-12)} for group in step] for step in expected]


@pytest.mark.parametrize("stage", [0, 1])
def test_weights_alone_survive_the_first_step(worlds: Any, kept: Any, stage: int) -> None:
    """At stage 0 in bf16 DeepSpeed steps on masters of its own, which a load of weights alone leaves as they were."""
    setup = Setup(run=Run(stage, 1))
    folder, saved = kept(setup)
    for more in ({"flags": ["--no-load-optim"]}, {"arguments": {"load_optimizer_states": False}}):
        loaded = resume(worlds, setup.but(lr=0.0), folder, more=1, weights_after=True, **more)
        assert loaded[0]["error"] is None, loaded[0].get("text")
        after = loaded[0]["weights_after"]
        wrong = [n for n, w in saved[0]["weights"].items() if not same_bits(w, after[n])]
        assert not wrong, f"weights changed in a step with lr 0: {wrong}"


def test_momentum_that_a_schedule_cycles_is_this_runs(worlds: Any, kept: Any) -> None:
    cycle = {"max_lr": [0.01, 0.001], "total_steps": 40}
    folder, saved = kept(Setup(run=Run(1, 1), scheduler=("OneCycleLR", cycle)))
    new = Setup(run=Run(1, 1), scheduler=("OneCycleLR", {**cycle, "base_momentum": 0.5, "max_momentum": 0.6}))
    for policy, steps in (("override", 5), ("reset", 0)):
        loaded = resume(worlds, new.but(policy={"scheduler": policy}), folder)
        assert rates(loaded[0]["rates"], ("lr", "betas")) == rates(uninterrupted(worlds, new, steps), ("lr", "betas"))
        same_tensors(saved, loaded)
    plain, _ = kept(Setup(run=Run(1, 1)))
    loaded = resume(worlds, new.but(policy={"scheduler": "override"}), plain)
    assert rates(loaded[0]["rates"], ("lr", "betas")) == rates(uninterrupted(worlds, new), ("lr", "betas"))


def test_a_scheduler_that_is_built_after_the_load_finds_no_bounds_of_the_checkpoint(worlds: Any, kept: Any) -> None:
    folder, _ = kept(Setup(run=Run(1, 1), scheduler=COSINE))
    loaded = resume(worlds, Setup(run=Run(1, 1), lr=0.5, policy={"scheduler": "override"}), folder)
    assert loaded[0]["error"] is None
    assert all("initial_lr" not in group for _, group in loaded[0]["groups"])


def test_a_first_start_finds_nothing_and_refuses_nothing(worlds: Any, tmp_path: Path) -> None:
    """Scripts pass their flags from the start, and rely on (None, None)."""
    for flag in (
        "--use-checkpoint-opt-param-scheduler",
        "--no-load-optim",
        "--finetune",
        "--strict-opt-param-scheduler",
    ):
        loaded = resume(worlds, Setup(run=Run(2, 2)), tmp_path, flags=[flag])
        assert loaded[0]["error"] is None, loaded[0].get("text")
        assert loaded[0]["counters"] == (0, 0)


def test_dead_references_in_the_process_do_not_hurt(worlds: Any, kept: Any) -> None:
    folder, _ = kept(Setup(run=Run(2, 2)))
    for policy in ({}, {"scheduler": "override"}):
        loaded = resume(worlds, Setup(run=Run(2, 2), policy=policy), folder, dead_proxy=True)
        assert loaded[0]["error"] is None and loaded[1]["error"] is None


def test_a_report_that_cannot_be_written_is_an_error_on_every_rank(worlds: Any, kept: Any, tmp_path: Path) -> None:
    folder, _ = kept(Setup(run=Run(2, 2)))
    refused = resume(worlds, Setup(run=Run(2, 2), policy={"report": str(tmp_path / "absent" / "r.json")}), folder)
    assert refused[0]["error"] == "ConfigError" and refused[0]["text"] == refused[1]["text"]
    assert "absent" in refused[0]["text"] and all(rank["unchanged"] for rank in refused)


def test_a_schedule_that_ends_before_the_position_is_refused(worlds: Any, kept: Any) -> None:
    folder, _ = kept(Setup(run=Run(1, 2)))
    short = Setup(run=Run(1, 2), scheduler=("OneCycleLR", {"max_lr": 0.1, "total_steps": 2}))
    for refused in resume(worlds, short.but(policy={"scheduler": "override"}), folder):
        assert refused["error"] == "UnsupportedLayout" and refused["unchanged"], refused.get("text")
        assert "OneCycleLR ends after 2 steps, and the checkpoint is at" in refused["text"]


def test_rates_that_are_tensors_are_reported(worlds: Any, kept: Any, tmp_path: Path) -> None:
    setup = Setup(run=Run(2, 2), tensor_lr=True)
    folder, _ = kept(setup)
    path = tmp_path / "report.json"
    new = setup.but(lr=0.5, policy={"scheduler": "override", "report": str(path)})
    loaded = resume(worlds, new, folder)
    assert loaded[0]["error"] is None, loaded[0].get("text")
    assert loaded[0]["rates"][0][0]["lr"] == 0.5 and path.is_file()


WITHOUT_MOMENTS: list[dict[str, Any]] = [
    *({"flags": [flag]} for flag in ("--no-load-optim", "--load-masters-only", "--finetune")),
    *({"arguments": one} for one in ({"load_optimizer_states": False}, {"load_module_only": True})),
]


@pytest.mark.parametrize(
    "now", [Run(2, 2), Run(1, 1), Run(3, 2), Run("bf16", 2), Run(0, 1, "fp32"), Run(0, 1, "fp16")], ids=str
)
@pytest.mark.parametrize("asked", WITHOUT_MOMENTS, ids=str)
def test_a_load_without_moments_into_a_run_that_has_stepped(worlds: Any, kept: Any, now: Run, asked: Any) -> None:
    """Afterwards moments and step counts are those of a run that has not stepped, and so are its next updates."""
    folder, _ = kept(Setup(run=Run(2, 2, now.dtype)))
    fresh, stepped = (
        resume(worlds, Setup(run=now), folder, weights_after=True, stepped=steps, **asked) for steps in (0, 2)
    )
    for held in (fresh, stepped):
        assert held[0]["error"] is None, held[0].get("text")
    for one, other in zip(fresh, stepped, strict=True):
        assert _alike(one, other)
        assert all(same_bits(one["weights_after"][name], other["weights_after"][name]) for name in one["weights_after"])
    if "load_module_only" not in asked.get("arguments", {}):
        reports = [held[0]["report"] for held in (fresh, stepped)]
        assert [row["used"] for report in reports for row in report["rows"] if row["name"] == "moments"] == ["anew"] * 2
        told = [f"{FORGOTTEN}, begin anew" in str(one["warnings"]) for one in reports]
        assert told == [False, True]


FORGOTTEN = "its moments and step counts, which are not of these weights"


def _alike(one: Any, other: Any) -> bool:
    pieces = list(zip(one["pieces"], other["pieces"], strict=True))
    held = all(first[:3] == second[:3] and same_bits(first[3], second[3]) for first, second in pieces)
    weights = all(same_bits(one["weights"][name], other["weights"][name]) for name in one["weights"])
    return held and weights and (one["scalars"], one["groups"]) == (other["scalars"], other["groups"])


KEPT: dict[str, tuple[int | str, ...]] = {
    "adamw": (0, 1, 2, 3, "bf16"),
    "fused": (2, 3, "bf16"),
    "adagrad": (0, 1, 3),
    "nadam": (0, 2),
    "sgd": (1, 3),
}


@pytest.mark.parametrize(("optimizer", "stage"), [(one, stage) for one, stages in KEPT.items() for stage in stages])
def test_what_each_optimizer_keeps_of_its_steps_begins_anew(
    worlds: Any, saves: Saves, optimizer: str, stage: int | str
) -> None:
    """States that are made in the first step or with the optimizer, steps of groups, and what parameters link to."""
    run, model = (
        Run(stage, 2, "bf16" if stage else "fp32"),
        Model(optimizer=optimizer, groups=1 if optimizer == "adagrad" else 2, scheduler=False),
    )
    folder, _ = saves(run if not stage else Run(2, 2), Model(groups=2, scheduler=False))
    for loader in ("direct", "deepspeed") if stage == 0 else ("direct",):
        given = {"run": run, "model": model, "folder": str(folder), "section": {"reshard": {"unchanged": loader}}}
        fresh, stepped = (worlds[2].run("refused_jobs.load_without_moments", **given, stepped=n) for n in (0, 2))
        for one, other in zip(fresh, stepped, strict=True):
            assert not one["raised"] and not other["raised"], other["raised"]
            assert _alike(one["held"], other["held"]) and _alike(one["after"], other["after"])
            links = [(one["linked"][name], other["linked"][name]) for name in one["linked"]]
            assert all(same_bits(first[kind], second[kind]) for first, second in links for kind in first)
        assert (fresh[0]["row"], stepped[0]["row"]) == ("anew", "anew")
        told = [any(FORGOTTEN in line for line in found[0]["told"]) for found in (fresh, stepped)]
        assert told == [False, True]


@pytest.mark.parametrize("now", [Run(2, 2), Run(1, 2), Run(0, 2)], ids=str)
def test_an_optimizer_whose_states_are_not_known_is_refused_and_its_line_mends_it(
    worlds: Any, saves: Saves, now: Run
) -> None:
    """On every rank, before anything changes; in an engine that is built anew the load is that of a run's beginning."""
    folder, _ = saves(Run(2, 2), Model(groups=2, scheduler=False))
    given = {"run": now, "model": Model(optimizer="odd_blocks", groups=2, scheduler=False), "folder": str(folder)}
    fresh = worlds[2].run("refused_jobs.load_without_moments", **given, stepped=0)
    stepped = worlds[2].run("refused_jobs.load_without_moments", **given, stepped=2, anew=True)
    assert stepped[0]["raised"] == stepped[1]["raised"]
    for one, other in zip(fresh, stepped, strict=True):
        ((error, text, unchanged),) = other["raised"]
        assert error == "ConfigError" and "the optimizer Odd: has taken steps" in text and unchanged
        assert "To mend: build the engine anew for a load without moments" in text
        assert not one["raised"] and _alike(one["held"], other["held"]) and _alike(one["after"], other["after"])


def test_what_deepspeed_alone_loads_keeps_its_moments_and_the_line_of_its_warning_mends_it(
    worlds: Any, saves: Saves
) -> None:
    """With "enabled": false nothing is changed by us; without it, as the warning says, moments begin anew."""
    folder, _ = saves(Run(2, 2), Model(groups=2, scheduler=False))
    given = {"run": Run(2, 2), "model": Model(groups=2, scheduler=False), "folder": str(folder), "stepped": 2}
    kept = worlds[2].run("refused_jobs.load_without_moments", **given, section={"enabled": False})
    assert kept[0]["row"] == "as before this load"
    (line,) = [line for line in kept[0]["told"] if FORGOTTEN in line]
    assert 'stay; to begin them anew, leave out "enabled": false, or build the engine anew' in line
    assert worlds[2].run("refused_jobs.load_without_moments", **given)[0]["row"] == "anew"
    built = worlds[2].run("refused_jobs.load_without_moments", **{**given, "stepped": 0}, section={"enabled": False})
    assert built[0]["row"] == "anew"


@pytest.mark.parametrize("now", [Run(2, 2), Run(1, 1)], ids=["unchanged", "resharded"])
def test_rows_tell_the_engine_and_not_the_request(worlds: Any, kept: Any, now: Run) -> None:
    """Masters that DeepSpeed makes of the weights, and this run's counters where it has trained or loaded before."""
    folder, _ = kept(Setup(run=Run(2, 2)))

    def rows(run: Run, **more: Any) -> dict[str, Any]:
        loaded = resume(worlds, Setup(run=run), folder, **more)
        assert loaded[0]["error"] is None, loaded[0].get("text")
        return {row["name"]: row for row in loaded[0]["report"]["rows"]}

    told = rows(now)
    assert [told["fp32 masters"][at] for at in ("checkpoint", "used")] == ["saved", "checkpoint"]
    assert [told["moments"][at] for at in ("checkpoint", "used")] == ["saved", "checkpoint"]
    assert [told[name]["this_run"] for name in ("iteration", "samples")] == [0, 0]
    again = rows(now, stepped=2)
    assert again["iteration"]["this_run"] == 2 and again["samples"]["this_run"] > 0
    assert again["iteration"]["used"] == told["iteration"]["used"] == rows(now, twice=True)["iteration"]["this_run"]
    anew = rows(replace(now, options={"load_from_fp32_weights": False}))
    assert (anew["fp32 masters"]["used"], anew["moments"]["used"]) == ("from weights", "checkpoint")
    alone = rows(now, arguments={"load_optimizer_states": False})
    assert {alone[name]["checkpoint"] for name in ("fp32 masters", "moments")} <= {"saved", "not opened"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_large_masters_are_compared_with_weights_at_places(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Of a flat buffer of more than 32,768 elements some are compared, in any type of the weights."""
    from ds_reshard.hosts.deepspeed import move

    masters = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0))
    weights = masters.to(dtype, copy=True)
    for name, value in {
        "live_grid": None,
        "live_optimizer": "any",
        "masters_of": [masters],
        "_weights_beside": [weights],
    }.items():
        monkeypatch.setattr(move, name, lambda *_, value=value: value)
    engine: Any = None
    assert move._masters_left(engine, loaded=True) == "checkpoint"
    weights[: 1 << 10] += 1
    assert move._masters_left(engine, loaded=True) == "not those of the weights"


@pytest.mark.parametrize("now", [Run(2, 2), Run(1, 1)], ids=["unchanged", "resharded"])
def test_rows_of_what_is_alike_are_looked_at(worlds: Any, tmp_path: Path, now: Run) -> None:
    """Masters that are no finer than their weights, and moments of zero, are said to be so, whatever was asked for."""

    def rows(saved: Run, run: Run, **more: Any) -> tuple[str, str]:
        folder = tmp_path / saved.dtype
        if not folder.exists():
            worlds[saved.dp].run("resume_jobs.save", setup=Setup(run=saved), folder=str(folder), steps=0)
        loaded = resume(worlds, Setup(run=run), folder, **more)
        assert loaded[0]["error"] is None, loaded[0].get("text")
        told = {row["name"]: row["used"] for row in loaded[0]["report"]["rows"]}
        return told["fp32 masters"], told["moments"]

    for stepped in (0, 2):
        assert rows(Run(2, 2), now, stepped=stepped) == ("equal to the weights", "anew")
        assert rows(Run(2, 2, "fp32"), replace(now, dtype="fp32"), stepped=stepped) == ("checkpoint", "anew")
    alone = {"arguments": {"load_optimizer_states": False}}
    assert rows(Run(2, 2, "fp32"), replace(now, dtype="fp32"), stepped=2, **alone) == ("from weights", "anew")


@pytest.mark.parametrize(("spoil", "left"), [("zero_", "anew"), ("uniform_", "not those of the checkpoint")])
def test_moments_that_a_hook_changes_are_told(worlds: Any, kept: Any, spoil: str, left: str) -> None:
    """What the optimizer was given is compared with what it holds: at a changed layout on every rank, by an error."""
    folder, _ = kept(Setup(run=Run(2, 2)))
    for run in (Run(1, 2), Run(3, 2), Run(0, 1)):
        for refused in resume(worlds, Setup(run=run), folder, spoil=spoil):
            assert refused["error"] == "FingerprintMismatch", refused.get("text")
            assert f"exp_avg, exp_avg_sq in the optimizer of rank {run.dp - 1} have changed" in refused["text"]
    loaded = resume(worlds, Setup(run=Run(1, 1), verify="off"), folder, spoil=spoil)
    assert loaded[0]["error"] is None, loaded[0].get("text")
    assert {row["name"]: row["used"] for row in loaded[0]["report"]["rows"]}["moments"] == left


@pytest.mark.parametrize(("spoil", "left"), [("zero_", "anew"), ("uniform_", "not those of the checkpoint")])
def test_moments_that_a_hook_changes_as_deepspeed_loads_are_told(worlds: Any, kept: Any, spoil: str, left: str) -> None:
    folder, _ = kept(Setup(run=Run(2, 1)))
    for policy in ({}, {"scheduler": "override"}):
        loaded = resume(worlds, Setup(run=Run(2, 1), policy=policy, unchanged="deepspeed"), folder, spoil=spoil)
        if policy:
            assert loaded[0]["error"] == "FingerprintMismatch", loaded[0].get("text")
        else:
            assert {row["name"]: row["used"] for row in loaded[0]["report"]["rows"]}["moments"] == left
