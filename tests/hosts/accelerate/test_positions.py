"""A schedule that accelerate steps once for each process goes on at the same update on another number of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from position_jobs import LR, rates

from ds_reshard.resume.policy_sources import FLAGS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

UPDATES = '{"accelerate": {"position": "updates"}}'
SCALED = [
    "constant_with_warmup",
    "linear",
    "cosine",
    "LinearLR",
    "CosineAnnealingLR",
    "MultiStepLR",
    "OneCycleLR",
    "SequentialLR",
]


@pytest.fixture(scope="module")
def saved(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a run of four updates, each made once."""
    made: dict[str, str] = {}

    def save(ranks: int, kind: str, times: int, **given: Any) -> str:
        key = repr((ranks, kind, times, given))
        if key not in made:
            made[key] = str(tmp_path_factory.mktemp("positions"))
            worlds[ranks].run("position_jobs.run", kind=kind, times=times, folder=made[key], **given)
        return made[key]

    return save


def _load(worlds: Any, ranks: int, **given: Any) -> Any:
    told = worlds[ranks].run("position_jobs.run", load=True, **given)
    assert [rank["rates"] for rank in told] == [told[0]["rates"]] * ranks
    assert [rank["raised"] for rank in told] == [told[0]["raised"]] * ranks
    return told[0]


def _same(found: list[float], expected: list[float]) -> None:
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)


ROWS = [(kind, *((2, 1), (1, 2), (2, 3))[n % 3], ("host", "override")[n % 2]) for n, kind in enumerate(SCALED)]
ROWS = [(*row[:3], "override") if row[0] == "OneCycleLR" else row for row in ROWS]  # its curve is not quite the same
ROWS += [("constant_with_warmup", *ranks, policy) for ranks in ((2, 1), (1, 2)) for policy in ("override", "reset")]


@pytest.mark.parametrize(("kind", "then", "now", "policy"), ROWS, ids=str)
def test_lengths_that_are_multiplied_by_the_processes(
    worlds: Any, saved: Any, kind: str, then: int, now: int, policy: str
) -> None:
    """As many updates have gone by: the position is translated, and that is told."""
    section = {"resume": {"scheduler": policy}} if policy != "host" else {}
    found = _load(worlds, now, kind=kind, times=now, folder=saved(then, kind, then), section=section)
    begin = 0 if policy == "reset" else 4
    assert found["position"] == begin * now
    _same(found["rates"], rates(kind, begin, 4))
    assert [f"it goes on at {4 * now}" in line for line in found["told"]] == [True] * (policy != "reset")


@pytest.mark.parametrize("kind", ["linear", "CosineAnnealingLR", "SequentialLR"])
@pytest.mark.parametrize("deepspeed", [True, False], ids=["DeepSpeed", "DDP"])
def test_a_run_that_goes_back_to_its_checkpoint(worlds: Any, saved: Any, kind: str, deepspeed: bool) -> None:
    """The second load finds a schedule that has moved, and puts it where the first one did."""
    folder = saved(2, kind, 2, deepspeed=deepspeed)
    found = _load(worlds, 1, kind=kind, times=1, folder=folder, deepspeed=deepspeed, loads=2)
    assert found["position"] == 4 and ["it goes on at 4" in line for line in found["told"]] == [True]
    _same(found["rates"], rates(kind, 4, 4))


@pytest.mark.parametrize("kind", ["linear", "CosineAnnealingLR"])
@pytest.mark.parametrize("policy", ["host", "override"])
def test_lengths_in_batches(worlds: Any, saved: Any, tmp_path: Path, kind: str, policy: str) -> None:
    """A script that takes them from the length of its data loader: the count goes on, as accelerate means it."""
    section = {"resume": {"scheduler": policy}} if policy != "host" else {}
    found = _load(worlds, 1, kind=kind, times=2, folder=saved(2, kind, 2), section=section)
    assert found["position"] == 8 and "counts batches" in found["told"][0]
    rows = worlds[1].run("position_jobs.run", kind=kind, times=2, folder=str(tmp_path), steps=12)
    _same(found["rates"], rows[0]["rates"][8:])


def test_a_new_rate_with_the_flag_and_without(worlds: Any, saved: Any) -> None:
    """The position is found by the saved rates whatever this run's are."""
    folder = saved(2, "cosine", 2)
    for policy, lr in (("host", LR), ("override", 3 * LR)):
        section = {"resume": {"scheduler": policy}}
        found = _load(worlds, 1, kind="cosine", times=1, folder=folder, section=section, lr=3 * LR)
        assert found["position"] == 4
        _same(found["rates"], rates("cosine", 4, 4, lr))


@pytest.mark.parametrize("policy", ["checkpoint", "strict"])
def test_the_checkpoints_schedule(worlds: Any, saved: Any, tmp_path: Path, policy: str) -> None:
    """Lengths in the ratio of the processes give the saved curve; under "strict" they differ, and are refused."""
    given = {"kind": "CosineAnnealingLR", "folder": saved(2, "CosineAnnealingLR", 2)}
    found = _load(worlds, 1, times=1, section={"resume": {"scheduler": policy}}, **given)
    if policy == "strict":
        assert found["raised"].startswith("ScheduleMismatch"), found
    else:
        _same(found["rates"], rates("CosineAnnealingLR", 4, 4))
    other = {"resume": {"scheduler": policy}, "accelerate": {"position": "updates"}}
    found = _load(worlds, 1, times=3, section=other, **given)
    error = "UnsupportedLayout" if policy == "checkpoint" else "ScheduleMismatch"
    assert found["raised"].startswith(error), found["raised"]
    flag = re.search(r"(?:use|used with) (--override\S+?)[\s)]", found["raised"])
    assert flag is not None, found["raised"]
    (asked,) = (one for one in FLAGS if flag[1] in one.names)
    found = _load(worlds, 1, times=3, section={**other, "resume": {asked.key: asked.value}}, **given)
    assert found["position"] == 4
    ((uninterrupted),) = worlds[1].run("position_jobs.run", kind=given["kind"], times=3, folder=str(tmp_path), steps=8)
    _same(found["rates"], uninterrupted["rates"][4:])


def _section(text: str) -> dict[str, Any]:
    """The JSON that a message says to write."""
    found = re.search(r"write (\{.*\}) in", text)
    assert found is not None, text
    held: dict[str, Any] = json.loads(found[1])
    return held


def test_the_checkpoints_schedule_of_other_lengths_goes_on_by_batches(worlds: Any, saved: Any, tmp_path: Path) -> None:
    """The other line of the error that refuses "checkpoint": the schedule that was saved, at the saved position."""
    given = {"kind": "CosineAnnealingLR", "folder": saved(2, "CosineAnnealingLR", 2), "times": 3}
    asked = {"resume": {"scheduler": "checkpoint"}, "accelerate": {"position": "updates"}}
    section = _section(_load(worlds, 1, section=asked, **given)["raised"])["ds_reshard"]
    found = _load(worlds, 1, section={**asked, **section}, **given)
    assert (found["position"], found["raised"]) == (8, "")
    (whole,) = worlds[1].run("position_jobs.run", kind=given["kind"], times=2, folder=str(tmp_path), steps=12)
    _same(found["rates"], whole["rates"][8:])


@pytest.mark.parametrize("deepspeed", [True, False], ids=["DeepSpeed", "DDP"])
def test_a_schedule_that_had_taken_steps_is_refused_and_each_line_mends_it(
    worlds: Any, saved: Any, tmp_path: Path, deepspeed: bool
) -> None:
    """Its beginning, from which the position would be found, is gone: load before, or go on by batches."""
    kind, folder = "MultiStepLR", saved(2, "MultiStepLR", 2, deepspeed=deepspeed)
    given = {"kind": kind, "folder": folder, "deepspeed": deepspeed, "times": 1}
    asked = {"section": {"accelerate": {"position": "updates"}}} if deepspeed else {"settings": UPDATES}
    refused = _load(worlds, 1, before=2, **given, **asked)["raised"]
    assert refused.startswith("UnsupportedLayout") and "load before the first step, or write" in refused, refused
    found = _load(worlds, 1, **given, **asked)
    assert found["position"] == 4
    _same(found["rates"], rates(kind, 4, 4))
    section = _section(refused)
    line = {"section": section["ds_reshard"]} if deepspeed else {"settings": json.dumps(section)}
    found = _load(worlds, 1, before=2, **given, **line)
    assert (found["position"], found["raised"]) == (8, "")


@pytest.mark.parametrize("unit", ["updates", "batches"])
@pytest.mark.parametrize("deepspeed", [True, False], ids=["DeepSpeed", "DDP"])
def test_what_cannot_be_found_out_is_told_with_the_line_that_says_it(
    worlds: Any, saved: Any, unit: str, deepspeed: bool
) -> None:
    """A curve that is flat there: accelerate's way and a warning; each line of it, followed, is silent and right."""
    given = {"kind": "late", "folder": saved(2, "late", 2, deepspeed=deepspeed), "deepspeed": deepspeed, "steps": 6}
    found = _load(worlds, 1, times=1, **given)
    (line,) = found["told"]
    assert found["position"] == 8 and "that is another update (4 would be the saved one)" in line
    place = "DeepSpeed JSON" if deepspeed else "DS_RESHARD_SETTINGS"
    assert f'"accelerate": {{"position": "{unit}"}}' in line and place in line
    section = {"accelerate": {"position": unit}}
    asked = {"section": section} if deepspeed else {"settings": str(section).replace("'", '"')}
    found = _load(worlds, 1, times=1, **given, **asked)
    assert not any("that is another update" in line for line in found["told"])
    _same(found["rates"], rates("late", 4 if unit == "updates" else 8, 6))


@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2)])
def test_without_deepspeed_and_without_a_record(worlds: Any, saved: Any, then: int, now: int) -> None:
    """DDP, as FSDP, writes no record: the files of the processes tell how many there were."""
    folder = saved(then, "linear", then, deepspeed=False, hooks=False)
    found = _load(worlds, now, kind="linear", times=now, folder=folder, deepspeed=False)
    assert found["position"] == 4 * now
    _same(found["rates"], rates("linear", 4, 4))


def test_a_schedule_without_a_shape_is_told_nothing(worlds: Any, saved: Any) -> None:
    found = _load(worlds, 1, kind="constant", times=1, folder=saved(2, "constant", 2))
    _same(found["rates"], [LR] * 4)
    assert not any("that is another update" in line for line in found["told"])


@pytest.mark.parametrize("kind", ["cosine", "CosineAnnealingLR"])
def test_either_clock_of_a_scheduler_on_a_placeholder(worlds: Any, kind: str) -> None:
    """Lengths that may have been multiplied are told with both clocks; each, followed, is silent and right."""
    seen, told = worlds[2].run("position_jobs.placeholder", kind=kind, times=2, clock=None)[0]
    (line,) = [one for one in told if "stepped once an update by the engine" in one]
    assert '"accelerate": {"clock": "accelerate"}' in line and '"accelerate": {"clock": "engine"}' in line
    slow, told = worlds[2].run("position_jobs.placeholder", kind=kind, times=2, clock="engine")[0]
    assert slow == seen and not told, "which is what the script asked for if it counts updates"
    right, told = worlds[2].run("position_jobs.placeholder", kind=kind, times=2, clock="accelerate")[0]
    assert not told
    _same(right, rates(kind, 0, 6))


def test_lengths_that_are_no_multiples_are_not_told(worlds: Any) -> None:
    for rank in worlds[3].run("position_jobs.placeholder", kind="linear", times=1, clock=None, accumulation=1):
        assert rank[1] == []
        _same(rank[0], rates("linear", 0, 6))


@pytest.mark.parametrize(("then", "now"), [(4, 2), (2, 4)])
@pytest.mark.parametrize("policy", ["host", "override", "checkpoint"])
def test_a_count_of_micro_batches_is_told_where_an_update_has_others(
    worlds: Any, tmp_path: Path, then: int, now: int, policy: str
) -> None:
    """With the line that mends it, which is followed; of the same number of micro batches nothing is told."""
    job, asked = "position_jobs.by_micro_batch", {"folder": str(tmp_path), "load": True, "policy": policy}
    worlds[1].run(job, accumulation=then, folder=str(tmp_path))
    ((_, told),) = worlds[1].run(job, accumulation=now, **asked)
    wanted = f"counts micro batches, {then} for each of 4 updates, and an update of this run has {now}"
    assert told and all(wanted in line and f"last_epoch {4 * now}" in line for line in told), told
    if policy == "host":
        ((after, _),) = worlds[1].run(job, accumulation=now, moved=4 * now, **asked)
        assert after == rates("MultiStepLR", 4, 4)
        ((after, told),) = worlds[1].run(job, accumulation=then, **asked)
        assert (after, told) == (rates("MultiStepLR", 4, 4), [])


@pytest.mark.parametrize(("then", "now"), [(4, 2), (2, 4), (2, 1)])
def test_a_count_of_micro_batches_is_told_without_deepspeed(worlds: Any, tmp_path: Path, then: int, now: int) -> None:
    """Adam has counted the updates; with the line that mends it, which is followed."""
    job, asked = "position_jobs.by_micro_batch", {"folder": str(tmp_path), "load": True, "deepspeed": False}
    worlds[1].run(job, accumulation=then, folder=str(tmp_path), deepspeed=False)
    ((_, (line,)),) = worlds[1].run(job, accumulation=now, **asked)
    assert f"counts micro batches, {then} for each of 4 updates, and an update of this run has {now}" in line
    moved = re.search(r"but with last_epoch (\d+)", line)
    assert moved is not None, line
    ((after, _),) = worlds[1].run(job, accumulation=now, moved=int(moved[1]), **asked)
    assert after == rates("MultiStepLR", 4, 4)
    ((after, told),) = worlds[1].run(job, accumulation=then, **asked)
    assert (after, told) == (rates("MultiStepLR", 4, 4), [])
