"""Schedules as functions of the position are DeepSpeed's own and Megatron's, to the last bit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_reshard.resume.megatron import learning_rate, weight_decay
from ds_reshard.resume.schedule import Schedule, constant, read_section, schedules_of
from ds_reshard.resume.schedulers import configuration, last_position, saved_configuration

RATE = st.floats(1e-8, 10.0)
RATIO = st.floats(0.0, 1.0)
STEPS = st.integers(1, 200)
TYPE = st.sampled_from(["log", "linear"])
PARAMS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "WarmupLR": st.fixed_dictionaries(
        {}, optional={"warmup_min_lr": RATE, "warmup_max_lr": RATE, "warmup_num_steps": STEPS, "warmup_type": TYPE}
    ),
    "WarmupDecayLR": st.fixed_dictionaries(
        {"total_num_steps": st.integers(1, 300)},
        optional={"warmup_min_lr": RATE, "warmup_max_lr": RATE, "warmup_num_steps": STEPS, "warmup_type": TYPE},
    ),
    "WarmupCosineLR": st.fixed_dictionaries(
        {"total_num_steps": st.integers(1, 300)},
        optional={"warmup_min_ratio": RATIO, "cos_min_ratio": RATIO, "warmup_num_steps": STEPS, "warmup_type": TYPE},
    ),
    "OneCycle": st.fixed_dictionaries(
        {"cycle_min_lr": RATE, "cycle_max_lr": RATE},
        optional={
            "cycle_first_step_size": st.integers(1, 90),
            "cycle_second_step_size": st.integers(0, 90),
            "cycle_first_stair_count": st.integers(0, 7),
            "cycle_second_stair_count": st.integers(0, 7),
            "decay_step_size": st.integers(0, 30),
            "decay_lr_rate": st.floats(0.0, 3.0),
        },
    ),
    "LRRangeTest": st.fixed_dictionaries(
        {},
        optional={
            "lr_range_test_min_lr": RATE,
            "lr_range_test_step_size": STEPS,
            "lr_range_test_step_rate": st.floats(0.0, 5.0),
            "lr_range_test_staircase": st.booleans(),
        },
    ),
}


def _theirs(kind: str, params: dict[str, Any], lrs: list[float]) -> Callable[[int], list[float]]:
    """What DeepSpeed's own class has written into its param groups after as many steps."""
    import deepspeed.runtime.lr_schedules as real

    def rates(position: int) -> list[float]:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
        optimizer = torch.optim.AdamW(groups)
        scheduler = getattr(real, kind)(optimizer, **params)
        if position:
            scheduler.step(position - 1)
        return [group["lr"] for group in optimizer.param_groups]

    return rates


def _ours(kind: str, params: dict[str, Any], lrs: list[float]) -> tuple[Schedule, ...]:
    section = read_section({"scheduler": {"type": kind, "params": params}}, where="ds_config.json")
    return schedules_of(section, lrs, len(lrs))


@pytest.mark.parametrize("kind", PARAMS)
@settings(max_examples=60)
@given(data=st.data(), lrs=st.lists(RATE, min_size=1, max_size=3))
def test_a_schedule_is_deepspeeds_own_to_the_last_bit(kind: str, data: st.DataObject, lrs: list[float]) -> None:
    """Every parameter that the JSON takes, defaults included, at the beginning, at the ends and in between."""
    params = data.draw(PARAMS[kind])
    ours, theirs = _ours(kind, params, lrs), _theirs(kind, params, lrs)
    for position in {0, 1, 2, 3, *data.draw(st.lists(st.integers(0, 700), max_size=12)), 10_000}:
        assert [schedule.rate(position) for schedule in ours] == theirs(position), (params, position)


@pytest.mark.parametrize("kind", PARAMS)
def test_walking_through_a_schedule_is_the_same_as_jumping(kind: str) -> None:
    """Stepped one by one, as training does, DeepSpeed's class passes the same rates."""
    import deepspeed.runtime.lr_schedules as real

    params: dict[str, Any] = {
        "WarmupLR": {"warmup_num_steps": 7},
        "WarmupDecayLR": {"warmup_num_steps": 7, "total_num_steps": 31, "warmup_type": "linear"},
        "WarmupCosineLR": {"warmup_num_steps": 7, "total_num_steps": 31},
        "OneCycle": {
            "cycle_min_lr": 0.1,
            "cycle_max_lr": 0.7,
            "cycle_first_step_size": 9,
            "cycle_first_stair_count": 4,
            "cycle_second_step_size": 13,
            "decay_step_size": 3,
            "decay_lr_rate": 0.3,
        },
        "LRRangeTest": {"lr_range_test_step_size": 5, "lr_range_test_staircase": True},
    }[kind]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.25)
    scheduler = getattr(real, kind)(optimizer, **params)
    (ours,) = _ours(kind, params, [0.25])
    walked = []
    for _ in range(60):
        walked.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert [ours.rate(position) for position in range(60)] == walked


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("WarmupLR", "warmup_max_lr"),
        ("WarmupDecayLR", "warmup_min_lr"),
        ("OneCycle", "cycle_max_lr"),
        ("LRRangeTest", "lr_range_test_min_lr"),
    ],
)
def test_a_list_gives_each_param_group_its_own(kind: str, name: str) -> None:
    """Where DeepSpeed takes a list, so do we."""
    params = {name: [0.1, 0.3]}
    params |= {"total_num_steps": 50} if kind == "WarmupDecayLR" else {}
    params |= {"cycle_min_lr": 0.01} if kind == "OneCycle" else {}
    ours, theirs = _ours(kind, params, [1.0, 2.0]), _theirs(kind, params, [1.0, 2.0])
    for position in (0, 1, 5, 40, 3000):
        assert [schedule.rate(position) for schedule in ours] == theirs(position)


@pytest.mark.parametrize("kind", PARAMS)
@settings(max_examples=40)
@given(data=st.data(), more=st.integers(0, 500))
def test_from_its_end_a_schedule_stays(kind: str, data: st.DataObject, more: int) -> None:
    """`end` is what the drawing goes to: nothing happens after it."""
    (ours,) = _ours(kind, data.draw(PARAMS[kind]), [0.5])
    if ours.end is not None:
        assert ours.rate(ours.end + more) == ours.rate(ours.end)


def test_without_a_scheduler_the_rate_is_constant() -> None:
    """No section: no scheduler, whatever the position."""
    assert read_section({}, where="c") is None
    assert [constant(0.3).rate(position) for position in (0, 1, 10**9)] == [0.3] * 3


# max 1, min 0.2, warm-up 10, decay 110; by hand from the formulas.
BY_HAND = [
    ("constant", None, {0: 0.0, 5: 0.5, 10: 1.0, 60: 1.0, 10**6: 1.0}),
    ("linear", None, {0: 0.0, 10: 1.0, 35: 0.8, 60: 0.6, 110: 0.2, 111: 0.2}),
    ("cosine", None, {10: 1.0, 60: 0.6, 35: 0.6 + 0.4 * math.sqrt(0.5), 110: 0.2, 500: 0.2}),
    ("inverse-square-root", None, {10: 1.0, 40: 0.5, 90: 1 / 3, 110: 1 / math.sqrt(11), 111: 0.2}),
    ("WSD", "linear", {10: 1.0, 70: 1.0, 80: 0.8, 90: 0.6, 110: 0.2}),
    ("WSD", "cosine", {70: 1.0, 90: 0.6, 110: 0.2}),
    ("WSD", "exponential", {70: 1.0, 90: 0.2 + 0.8 * (math.sqrt(2) - 1), 110: 0.2}),
    ("WSD", "minus_sqrt", {70: 1.0, 80: 0.6, 110: 0.2}),
]


@pytest.mark.parametrize(("style", "wsd", "table"), BY_HAND)
def test_megatrons_styles_have_the_values_of_their_formulas(
    style: str, wsd: str | None, table: dict[int, float]
) -> None:
    made = learning_rate(
        max_lr=1.0, min_lr=0.2, warmup=10, decay=110, style=style, wsd_decay=40, wsd_style=wsd or "linear"
    )
    assert {n: made.rate(n) for n in table} == pytest.approx(table, rel=1e-12)


@pytest.mark.parametrize(
    ("style", "table"),
    [("linear", {0: 0.1, 50: 0.2, 100: 0.3, 101: 0.3}), ("cosine", {0: 0.1, 50: 0.2, 100: 0.3, 999: 0.3})],
)
def test_megatrons_weight_decay_has_the_values_of_its_formula(style: str, table: dict[int, float]) -> None:
    made = weight_decay(start=0.1, stop=0.3, increase=100, style=style)
    assert {n: made(n) for n in table} == pytest.approx(table, rel=1e-12)


@settings(max_examples=150)
@given(data=st.data())
def test_megatrons_schedule_is_its_own_to_the_last_bit(data: st.DataObject) -> None:
    """Against OptimizerParamScheduler where megatron.core is installed; the tables above hold everywhere."""
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler", reason="megatron.core is not installed")
    high = data.draw(st.floats(1e-6, 1.0))
    low, first = (data.draw(st.floats(0.0, high)) for _ in range(2))
    decay = data.draw(st.integers(2, 400))
    warmup, wsd = data.draw(st.integers(0, decay - 1)), data.draw(st.integers(1, decay))
    style = data.draw(st.sampled_from(["constant", "linear", "cosine", "inverse-square-root", "WSD"]))
    wsd_style = data.draw(st.sampled_from(["linear", "cosine", "exponential", "minus_sqrt"]))
    start = data.draw(st.floats(0.0, 1.0))
    wd_style = data.draw(st.sampled_from(["constant", "linear", "cosine"]))
    stop = start if wd_style == "constant" else data.draw(st.floats(start, 2.0))
    increase = data.draw(st.integers(1, 400))
    holder = type("Holder", (), {"param_groups": [{}]})()
    theirs = module.OptimizerParamScheduler(
        holder,
        first,
        high,
        low,
        warmup,
        decay,
        style,
        start,
        stop,
        increase,
        wd_style,
        use_checkpoint_opt_param_scheduler=False,
        wsd_decay_steps=wsd,
        lr_wsd_decay_style=wsd_style,
    )
    ours = learning_rate(
        init_lr=first,
        max_lr=high,
        min_lr=low,
        warmup=warmup,
        decay=decay,
        style=style,
        wsd_decay=wsd,
        wsd_style=wsd_style,
    )
    weight = weight_decay(start=start, stop=stop, increase=increase, style=wd_style)
    for position in (0, 1, warmup, warmup + 1, decay, decay + 1, data.draw(st.integers(0, 900))):
        theirs.num_steps = 0
        theirs.step(position)
        (group,) = holder.param_groups
        assert (group["lr"], group["weight_decay"]) == (ours.rate(position), weight(position))


def test_what_megatron_refuses_is_refused() -> None:
    for wrong in ({"style": "exponential"}, {"warmup": 9}, {"style": "WSD"}):
        with pytest.raises(ValueError):
            learning_rate(**{"max_lr": 1.0, "decay": 9, **wrong})  # type: ignore[arg-type]
    for also in ({"style": "constant"}, {"style": "linear"}, {"style": "cubic", "increase": 3}):
        with pytest.raises(ValueError):
            weight_decay(**{"start": 0.1, "stop": 0.2, **also})  # type: ignore[arg-type]


@pytest.mark.parametrize("milestone", [3, 9])
def test_the_last_position_of_a_schedule_is_where_torch_stops(milestone: int) -> None:
    """OneCycleLR raises behind its total_steps: by itself, in a chain, and in a sequence until the next one begins."""
    from torch.optim import lr_scheduler as lrs

    def one_cycle(optimizer: Any) -> Any:
        return lrs.OneCycleLR(optimizer, max_lr=0.1, total_steps=5, cycle_momentum=False)

    def step(optimizer: Any) -> Any:
        return lrs.StepLR(optimizer, 2)

    kinds: dict[str, Callable[[Any], Any]] = {
        "alone": one_cycle,
        "chained": lambda o: lrs.ChainedScheduler([step(o), one_cycle(o)], o),
        "first": lambda o: lrs.SequentialLR(o, [one_cycle(o), step(o)], [milestone]),
        "last": lambda o: lrs.SequentialLR(o, [step(o), one_cycle(o)], [milestone]),
        "none": step,
    }
    for name, kind in kinds.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        scheduler, taken = kind(optimizer), 0
        with contextlib.suppress(ValueError):
            for _ in range(30):
                optimizer.step()
                scheduler.step()
                taken += 1
        assert min(last_position(scheduler), 30) == taken, name


@pytest.mark.parametrize("name", ["verbose", "default_min_lr"])
def test_what_another_release_of_torch_keeps_in_a_scheduler_configures_nothing(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    saved = {**scheduler.state_dict(), name: False}
    assert set(saved_configuration(saved)) == set(configuration(scheduler))
