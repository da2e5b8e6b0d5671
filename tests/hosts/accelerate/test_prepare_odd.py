"""Odd scripts around `prepare`: right, or an error that names the line, and never another rate without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prepare_jobs import LR

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize(("clock", "expected"), [(None, "UnsupportedLayout"), ("accelerate", "1")])
def test_a_schedule_that_the_script_stepped_has_no_position(
    worlds: Any, tmp_path: Path, clock: str | None, expected: str
) -> None:
    """Its five updates are not its one step."""
    for told in worlds[2].run("prepare_odd_jobs.saved_by_the_script", folder=str(tmp_path), clock=clock):
        assert told.startswith(expected)
        assert clock or ("the script alone decided" in told and '"clock": "accelerate"' in told)


@pytest.mark.parametrize("stepped", [True, False])
def test_deepspeeds_own_scheduler_stays_the_engines(worlds: Any, stepped: bool) -> None:
    """Whether the script steps it or not, with the hooks as without."""
    on, off = (
        worlds[2].run("prepare_odd_jobs.deepspeeds_own", hooks=hooks, stepped=stepped) for hooks in (True, False)
    )
    assert on == off and on[0][-1] == [LR]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("nothing", "gave a NoneType, which is no scheduler"),
        ("a dummy", "gave a DummyScheduler, which is no scheduler"),
        ("an optimizer", "gave a AdamW, which is no scheduler"),
        ("another optimizer's", "on another optimizer than the one it was called with"),
        ("the placeholder's", ""),
    ],
)
def test_what_a_callable_makes_drives_the_real_optimizer(worlds: Any, kind: str, text: str) -> None:
    for told in worlds[2].run("prepare_odd_jobs.made", kind=kind):
        assert text in told and bool(text) == ("lr_scheduler_callable=lambda optimizer: LambdaLR" in told)


@pytest.mark.parametrize(("real", "rule"), [(False, "scheduler-on-placeholder"), (True, "unknown-scheduler")])
def test_a_scheduler_that_accelerate_does_not_know_is_saved(worlds: Any, tmp_path: Path, real: bool, rule: str) -> None:
    """`get_scheduler("greedy")`: begun anew it would double the rate at its first step."""
    told = worlds[2].run("prepare_odd_jobs.greedy", folder=str(tmp_path), real=real)[0]
    assert told["rates"] == pytest.approx([LR, 2 * LR, LR, LR / 2])
    assert told["resumed"] == pytest.approx([LR / 4, LR / 8, LR / 16, LR / 32])
    assert told["steps"] == 8 and rule in told["found"]
    refused = worlds[2].run(
        "prepare_odd_jobs.greedy", folder=str(tmp_path), real=real, policy={"scheduler": "override"}
    )
    assert refused[0] == refused[1] and "GreedyLR takes its state" in refused[0]["raised"]


@pytest.mark.parametrize("originals", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_nothing_is_prepared_twice(worlds: Any, stage: int, originals: bool) -> None:
    """A torch optimizer neither, whatever ZeRO makes of its param groups."""
    for told in worlds[2].run("prepare_odd_jobs.twice", stage=stage, originals=originals):
        assert "prepared already" in told and "go on with what the first prepare has returned" in told


def test_an_accelerator_that_was_freed(worlds: Any, tmp_path: Path) -> None:
    """Nothing of the run before is recorded, or in the way of the next; two models at once are refused."""
    for told in worlds[2].run("prepare_odd_jobs.freed", folder=str(tmp_path)):
        assert told["record"] is False and told["raised"][:2] == ["", ""]
        assert "make a new Accelerator for each model" in told["raised"][2]


def test_a_prepare_that_failed_leaves_the_json(worlds: Any) -> None:
    """ "auto" is the user's again."""
    assert worlds[2].run("prepare_odd_jobs.after_a_failure") == [[[LR / 10]]] * 2


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("no accelerator", "deepspeed_plugin=DeepSpeedPlugin"),
        ("not for DeepSpeed", "deepspeed_plugin=DeepSpeedPlugin"),
        ("no model", "model=torch.nn.Module"),
        ("loaders by name", "dataloader=[DataLoader(...), ...]"),
        ("a generator of loaders", "dataloader=[DataLoader(...), ...]"),
        ("another model's, made before the hooks", "model.parameters() of the model that is prepared with it"),
    ],
)
def test_what_is_given_to_the_explicit_form(worlds: Any, kind: str, text: str) -> None:
    for told in worlds[2].run("prepare_odd_jobs.explicit", kind=kind):
        assert told.startswith("PrepareError") and text in told


@pytest.mark.parametrize("registered", [True, False])
def test_a_scheduler_built_after_prepare_is_not_left_out_in_silence(
    worlds: Any, tmp_path: Path, registered: bool
) -> None:
    """accelerate saves it where it is registered; else a resume begins it anew."""
    lines = worlds[2].run("prepare_odd_jobs.built_after", folder=str(tmp_path), registered=registered)[0]
    assert any("accelerator.register_for_checkpointing(scheduler)" in line for line in lines) is not registered


@pytest.mark.parametrize("to_torch", [True, False])
def test_the_state_of_another_kind_of_scheduler(worlds: Any, tmp_path: Path, to_torch: bool) -> None:
    """torch's takes DeepSpeed's without a word, and begins at 0."""
    for told in worlds[2].run("prepare_odd_jobs.another_kind", folder=str(tmp_path), to_torch=to_torch):
        assert told.startswith("ModelMismatch") and "state of another kind" in told and "--override-opt" in told


@pytest.mark.parametrize(("saved", "loaded"), [("engine", "accelerate"), ("accelerate", "engine")])
def test_two_schedules_are_not_loaded_on_another_clock(worlds: Any, tmp_path: Path, saved: str, loaded: str) -> None:
    """The second alone would go on, and the first begin anew."""
    for told in worlds[2].run("prepare_odd_jobs.two_engines", folder=str(tmp_path), saved=saved, loaded=loaded):
        assert told.startswith("UnsupportedLayout") and "several schedulers" in told and f'"clock": "{saved}"' in told
