"""The learning rates of a coming run: what the files tell is drawn, what they do not is said."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ds_reshard.errors import ConfigError
from ds_reshard.resume.lr_preview import CHECKPOINT, HOST, OVERRIDE, ComingRun, Past, coming_run


def _config(lr: object = None, kind: str | None = None, **params: object) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if lr is not None:
        made["optimizer"] = {"type": "AdamW", "params": {"lr": lr}}
    if kind is not None:
        made["scheduler"] = {"type": kind, "params": params}
    return made


DECAY = {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "total_num_steps": 20}
AT_5 = 0.01  # last_batch_iteration 4: the warm-up is over
PAST = Past(
    where="checkpoints/global_step5",
    version="0.19.8",
    position=5,
    rates=(AT_5,),
    scheduler=("last_batch_iteration",),
    config=_config(0.01, "WarmupDecayLR", **DECAY),
)
NEW = _config(0.5, "WarmupDecayLR", warmup_max_lr=0.5, warmup_num_steps=4, total_num_steps=20)
NO_SCHEDULER = replace(PAST, scheduler=None, config=_config(0.01))


def _run(past: Past = PAST, config: dict[str, Any] = NEW, **more: Any) -> ComingRun:
    return coming_run(past, config, where="ds_config.json", **{"steps": 4, "version": "0.19.8", **more})


def _rates(run: ComingRun) -> dict[str, list[tuple[float, ...]]]:
    return {curve.name: list(curve.rates) for curve in run.curves if curve.unknown is None}


def _unknown(run: ComingRun) -> dict[str, str]:
    return {curve.name: curve.unknown for curve in run.curves if curve.unknown is not None}


def test_without_a_flag_the_first_update_uses_the_checkpoints_rate() -> None:
    """And all after it this run's schedule, which the override uses from the first."""
    rates = _rates(_run())
    assert rates[CHECKPOINT][0][0] == rates[HOST][0][0] == AT_5
    assert rates[OVERRIDE][0][0] == 0.5
    assert rates[HOST][0][1:] == rates[OVERRIDE][0][1:] != rates[CHECKPOINT][0][1:]


def test_without_a_scheduler_the_checkpoints_rate_stays_for_ever() -> None:
    assert _rates(_run(NO_SCHEDULER, _config(0.5))) == {
        CHECKPOINT: [(0.01,) * 4],
        HOST: [(0.01,) * 4],
        OVERRIDE: [(0.5,) * 4],
    }


def test_param_groups_are_together_where_their_curves_are() -> None:
    """Three groups, two rates: two sets of curves."""
    past = replace(NO_SCHEDULER, rates=(0.01, 0.001, 0.01))
    run = _run(past, NEW)
    assert run.groups == ((0, 2), (1,))
    assert _rates(run)[CHECKPOINT] == [(0.01,) * 4, (0.001,) * 4]
    assert _run(replace(PAST, rates=(AT_5, AT_5))).groups == ((0, 1),)


ALL = {CHECKPOINT, HOST, OVERRIDE}
BEFORE = _config(0.01, "WarmupCosineLR", warmup_num_steps=2, total_num_steps=9)
UNKNOWN = {
    "a function": (replace(PAST, scheduler=("last_epoch", "lr_lambdas")), NEW, ALL, "LambdaLR"),
    "beside the engine": (replace(NO_SCHEDULER, outside=True), _config(0.5), ALL, "steps itself"),
    "a config that was a path": (
        replace(PAST, config=None, config_path="ds.json"),
        NEW,
        {CHECKPOINT},
        "keeps the path, ds.json",
    ),
    "deepspeed's, of the script": (replace(PAST, config=_config(0.01)), NEW, ALL, "the saved JSON names none"),
    "no config": (replace(PAST, config=None), NEW, {CHECKPOINT}, "does not name"),
    "muon": (NO_SCHEDULER, {"optimizer": {"type": "Muon", "params": {"lr": 0.5}}}, {OVERRIDE}, "rates of their own"),
    "rates set by hand": (replace(PAST, rates=(0.007,)), NEW, {CHECKPOINT}, "0.007"),
    "no param groups": (replace(PAST, rates=None), NEW, {HOST}, "holds no param groups"),
    "nothing at all": (replace(NO_SCHEDULER, rates=None), _config(0.5), {CHECKPOINT, HOST}, "holds no param groups"),
    "no state to load": (NO_SCHEDULER, NEW, {HOST}, "the load fails"),
    "a client optimizer": (NO_SCHEDULER, {}, {OVERRIDE}, "script builds the optimizer"),
    "no rate": (NO_SCHEDULER, {"optimizer": {"type": "AdamW"}}, {OVERRIDE}, "has no lr"),
    "auto": (NO_SCHEDULER, _config("auto"), {OVERRIDE}, '"auto"'),
    "auto in the scheduler": (PAST, _config(0.5, "WarmupLR", warmup_num_steps="auto"), {HOST, OVERRIDE}, '"auto"'),
    "groups of the script": (replace(NO_SCHEDULER, rates=(0.1, 0.2)), _config(0.5), {OVERRIDE}, "rates of their own"),
    "torch's": (PAST, _config(0.5, "CosineAnnealingLR", T_max=9), {HOST, OVERRIDE}, "CosineAnnealingLR"),
    "a list too long": (PAST, _config(0.5, "WarmupLR", warmup_max_lr=[1.0, 2.0]), {HOST, OVERRIDE}, "2 values"),
    "from the middle": (PAST, _config(0.5, "WarmupLR", last_batch_iteration=7), {HOST, OVERRIDE}, "in the middle"),
    "a base that nothing tells": (
        replace(PAST, position=0, rates=(0.0, 0.0), config=BEFORE),
        NEW,
        {CHECKPOINT},
        "do not tell",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_the_files_do_not_tell_is_said_and_not_drawn(case: str) -> None:
    past, config, names, words = UNKNOWN[case]
    unknown = _unknown(_run(past, config))
    assert set(unknown) == names
    assert all(words in reason for reason in unknown.values()), unknown


def test_rates_that_the_saved_json_does_not_explain_make_all_curves_doubtful() -> None:
    """A scheduler that the script passes wins over the JSON: seen in the saved rates, and said."""
    assert any(note.startswith("beware") for note in _run(replace(PAST, rates=(0.007,))).notes)
    assert not any(note.startswith("beware") for note in _run().notes)


OLDER = {
    "0.18.9": _config(0.5, "WarmupLR", warmup_num_steps=9),
    "0.18.4": _config(0.5, "OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_first_stair_count=3),
    "0.16.9": _config(0.5, "WarmupCosineLR", warmup_num_steps=2, total_num_steps=6),
}


@pytest.mark.parametrize("version", OLDER)
def test_where_an_older_deepspeed_differs_nothing_is_drawn(version: str) -> None:
    """The formulas are 0.19.8's; what this run's DeepSpeed would do otherwise is named with its version."""
    config = OLDER[version]
    unknown = _unknown(_run(config=config, version=version))
    assert set(unknown) == {HOST, OVERRIDE} and all(version in reason for reason in unknown.values())
    assert _unknown(_run(config=config)) == {}
    assert _unknown(_run(version=version)) == {}


def test_the_base_of_a_cosine_is_found_in_the_saved_rates() -> None:
    """The script gave its groups 0.03 and 0.004: the saved rates tell, to the last bit."""
    config = _config(0.01, "WarmupCosineLR", warmup_num_steps=2, total_num_steps=9)
    made = [
        _rates(_run(replace(PAST, position=0, rates=(0.0,), config=_config(lr, **_kind(config))), steps=9))[CHECKPOINT][
            0
        ]
        for lr in (0.03, 0.004)
    ]
    run = _run(replace(PAST, rates=(made[0][5], made[1][5]), config=config))
    assert _rates(run)[CHECKPOINT] == [made[0][5:], made[1][5:]]


def _kind(config: dict[str, Any]) -> dict[str, Any]:
    return {"kind": config["scheduler"]["type"], **config["scheduler"]["params"]}


WRONG = {
    "an unknown parameter": (_config(0.5, "WarmupLR", warmup_steps=3), "warmup_steps"),
    "a missing one": (_config(0.5, "WarmupDecayLR"), "total_num_steps"),
    "a text": (_config(0.5, "WarmupLR", warmup_max_lr="0.1"), "warmup_max_lr"),
    "no steps": (_config(0.5, "WarmupLR", warmup_num_steps=0), "positive whole number"),
    "nothing to cycle": (
        _config(0.5, "OneCycle", cycle_min_lr=1, cycle_max_lr=2, cycle_first_step_size=0),
        "cycle_first",
    ),
    "beyond numbers": (_config(0.5, "WarmupLR", warmup_max_lr=10**400), "warmup_max_lr"),
    "a rate that is none": (_config("high"), "optimizer.params.lr"),
    "no params": ({"scheduler": {"type": "WarmupLR"}}, "params"),
    "no section": ({"scheduler": "WarmupLR"}, "scheduler"),
    "a policy": ({"ds_reshard": {"resume": {"scheduler": "overide"}}}, "overide"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_deepspeed_would_refuse_is_refused_by_name(case: str) -> None:
    config, words = WRONG[case]
    with pytest.raises(ConfigError, match="To mend") as error:
        _run(NO_SCHEDULER, config)
    assert words in str(error.value)


def test_a_drawing_goes_to_the_end_of_the_schedule_that_ends_last() -> None:
    longer = _config(0.5, "WarmupDecayLR", warmup_max_lr=0.5, warmup_num_steps=4, total_num_steps=200)
    run = _run(config=longer, steps=None)
    assert run.positions == tuple(range(5, 202)) and _rates(run)[OVERRIDE][0][-1] == 0.0
    assert len(_run(NO_SCHEDULER, _config(0.5), steps=None).positions) == 1001


@pytest.mark.parametrize("steps", [1, 2, 3, 1999, 2000, 2001, 54_321, 10_000_000])
def test_long_runs_are_drawn_at_two_thousand_positions(steps: int) -> None:
    """The first two, the last, and others between: each once, in order."""
    positions = _run(steps=steps).positions
    assert list(positions) == sorted(set(positions)) and len(positions) == min(steps, len(positions)) <= 2000
    assert positions[0] == 5 and positions[-1] == 5 + steps - 1
    assert steps < 2 or positions[1] == 6


@pytest.mark.parametrize(
    ("resume", "words"),
    [
        ({"scheduler": "override"}, "asks for: this run, --override"),
        ({"scheduler": "checkpoint"}, "asks for: the checkpoint's own"),
        ({}, "asks for: this run, no flag"),
        ({"scheduler": "reset"}, "what no curve shows"),
        ({"optimizer": "skip"}, "what no curve shows"),
        ({"scheduler": "override", "iteration": "reset"}, "what no curve shows"),
    ],
)
def test_the_curve_that_the_json_itself_asks_for_is_named(resume: dict[str, str], words: str) -> None:
    assert any(words in note for note in _run(config={**NEW, "ds_reshard": {"resume": resume}}).notes)


def test_a_coming_run_is_json() -> None:
    run = _run(NO_SCHEDULER)
    told = json.loads(json.dumps(run.to_json(), allow_nan=False))
    assert told["curves"][OVERRIDE]["rates"] == [list(one) for one in _rates(run)[OVERRIDE]]
    assert told["curves"][HOST]["rates"] == [] and told["curves"][HOST]["unknown"]
