"""`ds_reshard.diagnose` on JSON and objects alone: nothing is prepared, nothing changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DummyOptim, DummyScheduler
from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, OneCycleLR, ReduceLROnPlateau

import ds_reshard
from ds_reshard.hosts.accelerate import HOOKS

AUTO = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}}
STEPS = ("steps-per-process", "told")
LOWEST = ("two-at-the-lowest", "told")


@pytest.fixture(autouse=True)
def hooks() -> Iterator[None]:
    with ds_reshard.install("accelerate"):
        yield


@pytest.fixture
def net() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


def _found(
    config: dict[str, Any], optimizer: Any = None, scheduler: Any = None, **beside: Any
) -> list[tuple[str, str]]:
    before = copy.deepcopy(config)
    findings = ds_reshard.diagnose(config, optimizer, scheduler, **beside)
    assert config == before, "a diagnosis changes nothing"
    assert all(finding.what and finding.mend and finding.where for finding in findings)
    return [(finding.rule, finding.outcome) for finding in findings]


def test_a_plain_script_has_no_findings(net: torch.nn.Module) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    assert _found({}, optimizer) == []
    assert _found({"optimizer": AUTO}, DummyOptim(net.parameters(), lr=0.1, weight_decay=0.0)) == []


def test_a_generator_is_not_consumed(net: torch.nn.Module) -> None:
    """A DummyOptim that was made without the hooks still holds what it was given."""
    ds_reshard.uninstall("accelerate")
    optimizer = DummyOptim(net.parameters(), lr=0.1)
    assert _found({"optimizer": AUTO}, optimizer) == [("default-taken", "told")]
    assert len(list(optimizer.params)) == 2


def test_without_the_hooks_what_differs_from_a_default_counts_as_given(net: torch.nn.Module) -> None:
    ds_reshard.uninstall("accelerate")
    fixed = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.9, 0.95]}}}
    assert _found(fixed, DummyOptim(list(net.parameters()))) == []
    assert _found(fixed, DummyOptim(list(net.parameters()), lr=0.2)) == [("contradiction", "refused")]
    assert _found(fixed, DummyOptim(list(net.parameters()), betas=(0.9, 0.95))) == []
    assert _found(fixed, DummyOptim(list(net.parameters()), betas=(0.9, 0.99))) == [("contradiction", "refused")]


def test_a_metric_that_is_none(net: torch.nn.Module) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    config = {"scheduler": {"type": "ReduceLROnPlateau", "params": {}}}
    assert ("plateau-metric", "refused") in _found(config, optimizer)
    assert _found({}, optimizer, ReduceLROnPlateau(optimizer)) == [STEPS]


def test_a_placeholder_that_was_made_before_the_accelerator(net: torch.nn.Module) -> None:
    """A scheduler goes by its rates and cycles its betas, whatever else is found, and whether it is prepared or not."""
    fixed = {"optimizer": {"type": "AdamW", "params": {"lr": 5e-4, "betas": [0.9, 0.95]}}}
    early = ("early-placeholder", "refused")
    forwarded = DummyOptim(net.parameters(), eps=1e-6)
    assert _found(fixed, forwarded, LambdaLR(forwarded, float)) == [
        ("scheduler-on-placeholder", "mended"),
        ("not-forwarded", "mended"),
        early,
    ]
    left_out = DummyOptim(net.parameters())
    LambdaLR(left_out, float)
    assert _found(fixed, left_out) == [("scheduler-left-out", "told"), early]
    cycled = DummyOptim(net.parameters(), lr=5e-4)
    scheduler = OneCycleLR(cycled, max_lr=0.2, total_steps=10)
    assert _found(fixed, cycled, scheduler) == [("scheduler-on-placeholder", "mended"), early]
    assert early not in _found(
        {"optimizer": {**AUTO, "params": {"lr": 5e-4, "betas": [0.9, 0.999]}}}, cycled, scheduler
    )


def test_a_rate_that_is_written_into_the_groups_is_not_the_scheduler_of_the_jsons(net: torch.nn.Module) -> None:
    config = {"optimizer": AUTO, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}
    optimizer = DummyOptim(net.parameters(), lr=0.1, weight_decay=0.0)
    assert _found(config, optimizer, DummyScheduler(optimizer)) == [LOWEST]
    optimizer.param_groups[0]["lr"] = 0.01
    assert _found({"optimizer": AUTO}, optimizer) == []
    assert _found(config, optimizer, DummyScheduler(optimizer)) == [("rate-written", "refused"), LOWEST]


def test_a_scheduler_that_is_left_out_is_told(net: torch.nn.Module) -> None:
    optimizer = DummyOptim(net.parameters(), lr=0.1, weight_decay=0.0)
    scheduler = LambdaLR(optimizer, lambda step: 0.5)
    assert _found({"optimizer": AUTO}, optimizer) == [("scheduler-left-out", "told")]
    assert _found({"optimizer": AUTO}, optimizer, scheduler) == [("scheduler-on-placeholder", "mended")]


def test_a_placeholder_that_is_older_than_the_json(net: torch.nn.Module) -> None:
    """Made before the Accelerator, it cannot know the JSON's rate; the scheduler would go by another."""
    optimizer = DummyOptim(net.parameters())
    scheduler = LambdaLR(optimizer, lambda step: 0.5)
    fixed = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    assert _found(fixed, optimizer, scheduler)[-1] == ("early-placeholder", "refused")
    told = DummyOptim(net.parameters(), lr=0.1)
    assert _found(fixed, told, LambdaLR(told, lambda step: 0.5)) == [("scheduler-on-placeholder", "mended")]


class Homemade(LambdaLR):
    """A scheduler of the user's own: which of its lists are of a value a group, nobody knows."""


@pytest.mark.parametrize(("kind", "outcome"), [(LambdaLR, "mended"), (Homemade, "refused")])
def test_a_group_without_parameters(net: torch.nn.Module, kind: type[LambdaLR], outcome: str) -> None:
    optimizer = torch.optim.AdamW([{"params": list(net.parameters())}, {"params": []}])
    assert _found({}, optimizer, kind(optimizer, lambda step: 1.0)) == [("empty-group", outcome), STEPS]


@pytest.mark.parametrize(("maximum", "outcome"), [(0.01, "refused"), ("auto", "mended"), ([0.1, 0.01], None)], ids=str)
def test_rates_of_groups_beside_the_jsons_scheduler(net: torch.nn.Module, maximum: Any, outcome: str | None) -> None:
    config = {"optimizer": AUTO, "scheduler": {"type": "WarmupLR", "params": {**WARMUP["params"]}}}
    config["scheduler"]["params"]["warmup_max_lr"] = maximum
    optimizer = DummyOptim([{"params": [net.weight], "lr": 0.1}, {"params": [net.bias]}], lr=0.01, weight_decay=0)
    found = _found(config, optimizer, DummyScheduler(optimizer))
    assert found == [*([("rates-erased", outcome)] if outcome else []), LOWEST]


def test_a_clock_for_a_scheduler_of_the_json(net: torch.nn.Module) -> None:
    config = {"scheduler": WARMUP, "ds_reshard": {"accelerate": {"clock": "accelerate"}}}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    assert ("json-scheduler-clock", "refused") in _found(config, optimizer, DummyScheduler(optimizer))


@pytest.mark.parametrize("section", [5, {"clok": "engine"}, {"clock": "sun"}, {"clock": 1}], ids=str)
def test_a_clock_that_is_none_is_an_error(section: Any) -> None:
    with pytest.raises(ds_reshard.ConfigError, match=r"ds_reshard\.accelerate(.|\n)*To mend: write"):
        ds_reshard.diagnose({"scheduler": WARMUP, "ds_reshard": {"accelerate": section}})


def test_where_the_patches_do_not_fit_a_clock_is_an_error() -> None:
    """It would be dropped; without one accelerate's own method runs."""

    def accelerator(config: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=config)))

    (patch,) = HOOKS.instead
    method = patch.wrapper(lambda self, *args: args)
    with pytest.raises(ds_reshard.HookError, match=f"accelerate=={HOOKS.tested[-1]}"):
        method(accelerator({"ds_reshard": {"accelerate": {"clock": "engine"}}}), 1)
    assert method(accelerator({}), 1) == (1,)


def test_a_scheduler_that_cycles_momentum_needs_the_jsons_optimizer(net: torch.nn.Module) -> None:
    """A placeholder has betas where no JSON says otherwise."""
    OneCycleLR(DummyOptim(net.parameters(), lr=0.1), max_lr=0.2, total_steps=9)


def _accelerator(**changed: Any) -> SimpleNamespace:
    """What `diagnose` looks at; `test_prepare_matrix.py` has the real one."""
    usual = {
        "num_processes": 1,
        "split_batches": False,
        "step_scheduler_with_optimizer": True,
        "gradient_accumulation_steps": 1,
        "_models": [],
    }
    return SimpleNamespace(**{**usual, **changed})


def test_who_steps_a_scheduler_and_how_often(net: torch.nn.Module) -> None:
    real, dummy = torch.optim.AdamW(net.parameters()), DummyOptim(net.parameters(), lr=0.1, weight_decay=0.0)
    built, late = LambdaLR(real, float), LambdaLR(dummy, float)
    made = DummyScheduler(real, lr_scheduler_callable=lambda optimizer: LambdaLR(optimizer, float))
    called, void = ("engine-steps", "told"), ("steps-by-engine", "told")
    placed = ("scheduler-on-placeholder", "mended")
    assert _found({}, real, built) == [STEPS]
    assert _found({}, real, built, accelerator=_accelerator()) == []
    assert _found({}, real, built, accelerator=_accelerator(split_batches=True)) == []
    by_engine, by_accelerate = ({"ds_reshard": {"accelerate": {"clock": c}}} for c in ("engine", "accelerate"))
    assert _found(by_engine, real, built) == _found(by_accelerate, real, built) == []
    assert _found({}, real, made) == [("dropped-callable", "mended"), called]
    assert _found(by_accelerate, real, made) == [("dropped-callable", "mended")]
    by_script = _accelerator(step_scheduler_with_optimizer=False)
    assert _found({}, real, built, accelerator=by_script) == []
    assert _found({"optimizer": AUTO}, dummy, late, accelerator=by_script) == [placed]
    assert _found(by_engine, real, built, accelerator=by_script) == [void]
    assert _found({}, real, made, accelerator=by_script)[1:] == [called, void]
    assert _found({"scheduler": WARMUP}, real, accelerator=by_script)[-2:] == [void, LOWEST]
    assert _found({}, real, WarmupLR(real), accelerator=by_script) == [void, LOWEST]


@pytest.mark.parametrize("kind", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_the_first_two_updates_with_deepspeeds_warm_ups(net: torch.nn.Module, kind: Any) -> None:
    """What `diagnose` says of them, by themselves."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = kind(optimizer, **({} if kind is WarmupLR else {"total_num_steps": 9}), warmup_num_steps=3)
    assert _found({}, optimizer, scheduler) == [LOWEST]
    used = []
    for _ in range(3):
        used.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert used[:2] == [0.0, 0.0] and used[2] > 0


def test_what_only_the_accelerator_knows(net: torch.nn.Module) -> None:
    optimizer = torch.optim.AdamW(net.parameters())
    accumulating = _accelerator(gradient_accumulation_steps=2)
    both = ("two-accumulations", "told")
    assert _found({"gradient_accumulation_steps": 4}, optimizer, accelerator=accumulating) == [both]
    for said in (2, "auto"):
        assert _found({"gradient_accumulation_steps": said}, optimizer, accelerator=accumulating) == []
    assert _found({"gradient_accumulation_steps": 4}, optimizer, accelerator=_accelerator()) == []
    assert _found({}, optimizer, accelerator=_accelerator(num_processes=3)) == [("alone", "refused")]
    trained = _accelerator(_models=[SimpleNamespace(basic_optimizer=optimizer)])
    assert _found({}, optimizer, accelerator=trained) == [("second-engine", "told")]
    assert _found({}, optimizer, accelerator=_accelerator(_models=[SimpleNamespace()])) == []


def test_what_the_model_tells(net: torch.nn.Module) -> None:
    optimizer, other = torch.optim.AdamW(net.parameters()), torch.nn.Linear(3, 2)
    assert _found({}, optimizer, model=net) == []
    assert _found({}, optimizer, model=other) == [("other-model", "refused")]
    assert _found({}, optimizer, model=[]) == [("apart", "refused")]
    assert _found({}, model=[net, other]) == [("two-models", "refused")]


def test_param_groups_that_came_after_the_scheduler(net: torch.nn.Module) -> None:
    late = DummyOptim([net.weight], lr=0.1, weight_decay=0.0)
    for optimizer in (late, torch.optim.AdamW([net.weight])):
        scheduler = ChainedScheduler([LambdaLR(optimizer, float)])
        optimizer.add_param_group({"params": [net.bias]})
        config = {"optimizer": AUTO} if optimizer is late else {}
        assert ("group-after-scheduler", "refused") in _found(config, optimizer, scheduler)


def test_a_callable_gets_no_group_without_parameters(net: torch.nn.Module) -> None:
    optimizer = DummyOptim([{"params": list(net.parameters())}, {"params": []}], lr=0.1, weight_decay=0.0)
    made = DummyScheduler(optimizer, lr_scheduler_callable=lambda real: LambdaLR(real, [float, float]))
    assert ("empty-group", "told") in _found({"optimizer": AUTO}, optimizer, made)


@pytest.mark.parametrize("change", ["append", "replace", "group"])
def test_parameters_that_are_written_into_a_placeholder(net: torch.nn.Module, change: str) -> None:
    """DeepSpeed makes its optimizer of what DummyOptim was given: they would never be trained, or always."""
    made = DummyOptim([net.weight], lr=0.1, weight_decay=0.0)
    assert _found({"optimizer": AUTO}, made) == []
    if change == "append":
        made.param_groups[0]["params"].append(net.bias)
    elif change == "replace":
        made.param_groups[0]["params"] = [net.bias]
    else:
        made.param_groups.append({**made.param_groups[0], "params": [net.bias]})
    assert _found({"optimizer": AUTO}, made) == [("params-written", "refused")]
    named = DummyOptim(net.named_parameters(), lr=0.1, weight_decay=0.0)
    named.add_param_group({"params": [("more", torch.nn.Parameter(torch.ones(1)))]})
    assert _found({"optimizer": AUTO}, named) == []


@pytest.mark.parametrize(("stage", "refused"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_param_group_that_is_frozen(net: torch.nn.Module, stage: int, refused: bool) -> None:
    net.bias.requires_grad_(False)
    config = {"optimizer": AUTO, "zero_optimization": {"stage": stage}}
    groups = [{"params": [net.weight]}, {"params": [net.bias]}]
    found = [("frozen-group", "refused")] * refused
    assert _found(config, DummyOptim(groups, lr=0.1, weight_decay=0.0)) == found
    assert _found({"zero_optimization": {"stage": stage}}, torch.optim.AdamW(groups)) == found
    assert _found(config, DummyOptim(net.parameters(), lr=0.1, weight_decay=0.0)) == []


def test_a_clock_and_no_scheduler(net: torch.nn.Module) -> None:
    """Built after prepare, a scheduler is stepped as without the clock."""
    optimizer = torch.optim.AdamW(net.parameters())
    for clock in ("engine", "accelerate"):
        config = {"ds_reshard": {"accelerate": {"clock": clock}}}
        assert _found(config, optimizer) == [("clock-unused", "told")]
        assert _found(config) == []
