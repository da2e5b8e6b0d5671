"""A scheduler built on a DummyOptim before `prepare` gives the rates, and the weights, of plain PyTorch."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from late_jobs import LR, SCHEDULERS, STEPS, Late

pytestmark = pytest.mark.distributed

NAMES = [name for name in SCHEDULERS if name not in ("lambdas", "advanced")]


def _row(scheduler: int, stage: int) -> tuple[Late, int]:
    late = Late(
        scheduler=NAMES[scheduler],
        stage=stage,
        dtype=("fp32", "bf16")[(stage + scheduler // 3) % 2],
        accumulation=(1, 2)[(stage // 2 + scheduler) % 2],
    )
    return late, (scheduler + stage) % 3 + 1


# Every scheduler at every stage; ranks, dtype and accumulation so that each pair of values of any two occurs.
ROWS = [_row(scheduler, stage) for scheduler in range(len(NAMES)) for stage in range(4)]


def test_every_pair_of_values_occurs() -> None:
    """Pairwise coverage of scheduler, stage, dtype, accumulation and ranks."""
    found = [(late.scheduler, late.stage, late.dtype, late.accumulation, ranks) for late, ranks in ROWS]
    for one, other in combinations(range(5), 2):
        pairs = {(row[one], row[other]) for row in found}
        assert len(pairs) == len({row[one] for row in found}) * len({row[other] for row in found}), (one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("late", "ranks"), ROWS, ids=[f"{late}-{ranks}ranks" for late, ranks in ROWS])
def test_equals_plain_pytorch(worlds: Any, tmp_path: Path, late: Late, ranks: int) -> None:
    """Rates of each update, uninterrupted and after load_state; fp32 weights; the same scheduler object drives."""
    _check(worlds[ranks].run("late_jobs.whole", late=late, folder=str(tmp_path)), late)


@pytest.mark.parametrize("late", [Late(), Late(scheduler="SequentialLR", stage=3, dtype="bf16")], ids=str)
def test_on_the_clock_of_accelerate(worlds: Any, tmp_path: Path, late: Late) -> None:
    """Stepped once for each process at each update, as accelerate does it."""
    late = late.but(clock="accelerate")
    _check(worlds[2].run("late_jobs.whole", late=late, folder=str(tmp_path)), late)


def test_a_group_without_parameters_keeps_each_function_with_its_group(worlds: Any, tmp_path: Path) -> None:
    """DeepSpeed takes the empty group out; the last function stays that of the last group."""
    late = Late(scheduler="lambdas", groups=3)
    _check(worlds[2].run("late_jobs.whole", late=late, folder=str(tmp_path)), late)


def test_a_script_that_steps_the_schedule_by_itself(worlds: Any) -> None:
    """`step_scheduler_with_optimizer=False`: neither the engine nor the number of processes steps it."""
    rates = worlds[2].run("late_jobs.by_script", late=Late())[0]
    assert [rate for rate, _ in rates] == pytest.approx([LR, LR, LR / 1.1, LR / 1.1])


@pytest.mark.parametrize(("saved", "now"), [(False, True), (True, False), (False, False), (True, True)])
def test_a_position_that_counts_other_steps_is_told(worlds: Any, tmp_path: Path, saved: bool, now: bool) -> None:
    """A script's own, of which no file tells how many an update had, or those that accelerate makes."""
    late = Late(clock="accelerate")
    (said, *others) = worlds[2].run("late_jobs.by_another", late=late, folder=str(tmp_path), saved=saved, now=now)
    assert [len(said), *map(len, others)] == [int(saved is not now), 0]
    sides = ["the script (step_scheduler_with_optimizer=False)", "accelerate"]
    assert all(f"stepped by {sides[saved]}, and this run's is by {sides[now]}" in line for line in said)


def test_what_had_taken_steps_before_prepare_goes_on_from_there(worlds: Any, tmp_path: Path) -> None:
    late = Late(scheduler="advanced")
    _check(worlds[2].run("late_jobs.whole", late=late, folder=str(tmp_path)), late)


def _check(told: list[dict[str, Any]], late: Late) -> None:
    for rank in told:
        assert rank["same"] == [True, True], "the script's scheduler lives on, its optimizer shows the live groups"
        _equal(rank["rates"], rank["expected"])
        _equal(rank["resumed"], rank["expected"][STEPS:])
        assert rank["resumed_off"] == 0
        if late.dtype == "fp32":
            assert rank["off"] < 1e-6
    assert len({rate for (rate, *_) in told[0]["expected"]}) > 2, "a schedule that does not move proves nothing"


def _equal(found: list[list[float]], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-12, abs=0)
