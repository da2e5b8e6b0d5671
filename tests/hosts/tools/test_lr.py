"""`ds-reshard lr` draws what the engine then does: each curve against the rates that real optimizer steps used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import Run, ds_config
from resume_jobs import Setup
from resumed import resume

from ds_reshard.operations import coming_run

pytestmark = pytest.mark.distributed

SAVED, NEW = 0.01, 0.5
SCHEDULES: dict[str, tuple[tuple[str, dict[str, Any]] | None, tuple[str, dict[str, Any]] | None]] = {
    "none": (None, None),
    "WarmupLR": (("WarmupLR", {"warmup_num_steps": 9}), ("WarmupLR", {"warmup_num_steps": 30})),
    "WarmupDecayLR": (
        ("WarmupDecayLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "total_num_steps": 20}),
        ("WarmupDecayLR", {"warmup_max_lr": 0.5, "warmup_num_steps": 3, "total_num_steps": 30}),
    ),
    "WarmupCosineLR": (
        ("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 20}),
        ("WarmupCosineLR", {"warmup_num_steps": 3, "total_num_steps": 30}),
    ),
    "OneCycle": (
        ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 8}),
        ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.5, "cycle_first_step_size": 30}),
    ),
    "LRRangeTest": (("LRRangeTest", {"lr_range_test_min_lr": 0.001}), ("LRRangeTest", {"lr_range_test_min_lr": 0.1})),
    "another kind": (
        ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 8}),
        ("WarmupCosineLR", {"warmup_num_steps": 3, "total_num_steps": 30}),
    ),
    "none any more": (("WarmupLR", {"warmup_num_steps": 9}), None),
}
RUNS = (Run(0, 1), Run(1, 1), Run(3, 2))


def _config(setup: Setup, path: Path) -> str:
    config = ds_config(setup.run)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": setup.lr, "torch_adam": True}}
    if setup.scheduler is not None:
        config["scheduler"] = {"type": setup.scheduler[0], "params": setup.scheduler[1]}
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def _lr(loaded: Any) -> list[float]:
    assert loaded[0]["error"] is None, loaded[0].get("text")
    return [step[0]["lr"] for step in loaded[0]["rates"]]


CASES = [(Run(1, 1), kind) for kind in SCHEDULES]
CASES += [(run, kind) for run in (Run(0, 1), Run(3, 2)) for kind in ("none", "WarmupLR")]


@pytest.mark.parametrize(("run", "kind"), CASES, ids=str)
def test_each_curve_is_what_the_engine_does(worlds: Any, kept: Any, tmp_path: Path, run: Run, kind: str) -> None:
    """Without a flag, with the override, and with the checkpoint's own configuration: equal to the last bit."""
    theirs, ours = SCHEDULES[kind]
    old = Setup(run=run, json=True, groups=1, lr=SAVED, scheduler=theirs)
    new = old.but(lr=NEW, scheduler=ours)
    folder, _ = kept(old)
    drawn = coming_run(str(folder), _config(new, tmp_path / "ds_config.json"), steps=3, version="0.19.8")
    assert [curve.unknown for curve in drawn.curves] == [None] * 3
    curves = {curve.name: list(curve.rates[0]) for curve in drawn.curves}
    assert curves["no flag"] == _lr(resume(worlds, new, folder))
    assert curves["override"] == _lr(resume(worlds, new.but(policy={"scheduler": "override"}), folder))
    assert curves["checkpoint"] == _lr(resume(worlds, old, folder))


def test_a_run_with_a_scheduler_cannot_load_a_checkpoint_of_none(worlds: Any, kept: Any, tmp_path: Path) -> None:
    """The drawing says that such a load fails without a flag; it does, and the override is as drawn."""
    old = Setup(json=True, groups=1, lr=SAVED)
    new = old.but(lr=NEW, scheduler=SCHEDULES["WarmupDecayLR"][1])
    folder, _ = kept(old)
    drawn = coming_run(str(folder), _config(new, tmp_path / "ds_config.json"), steps=3, version="0.19.8")
    curves = {curve.name: curve for curve in drawn.curves}
    assert "the load fails" in str(curves["no flag"].unknown)
    with pytest.raises(Exception, match=r"(?s)NoneType|scheduler"):
        _lr(resume(worlds, new, folder))
    loaded = resume(worlds, new.but(policy={"scheduler": "override"}), folder)
    assert list(curves["override"].rates[0]) == _lr(loaded)


@pytest.mark.parametrize("kind", ["LambdaLR", "CosineAnnealingLR"])
def test_a_scheduler_of_the_script_is_named_and_not_guessed(kept: Any, tmp_path: Path, kind: str) -> None:
    """A function is not in the files, so no curve is drawn."""
    old = Setup(scheduler=(kind, {"slope": 0.5} if kind == "LambdaLR" else {"T_max": 40}))
    folder, _ = kept(old)
    drawn = coming_run(str(folder), _config(old.but(scheduler=None), tmp_path / "ds_config.json"))
    assert all(kind in str(curve.unknown) for curve in drawn.curves)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_param_groups_with_rates_of_their_own_stay_apart(worlds: Any, kept: Any, tmp_path: Path, run: Run) -> None:
    """The saved rates tell what each group began with; this run's are the script's, so they are not drawn."""
    old = Setup(run=run, json=True, groups=2, lr=SAVED, scheduler=SCHEDULES["WarmupCosineLR"][0])
    folder, _ = kept(old)
    drawn = coming_run(str(folder), _config(old, tmp_path / "ds_config.json"), steps=3, version="0.19.8")
    curves = {curve.name: curve for curve in drawn.curves}
    loaded = resume(worlds, old, folder)
    assert drawn.groups == ((0,), (1,))
    for group in (0, 1):
        if group == len(loaded[0]["rates"][0]):
            break  # stages 1 and 2 show a step one param group only
        expected = [step[group]["lr"] for step in loaded[0]["rates"]]
        assert list(curves["checkpoint"].rates[group]) == expected
    assert "rates of their own" in str(curves["no flag"].unknown) and "rates of their own" in str(
        curves["override"].unknown
    )
