"""Every combination of DeepSpeed JSON, optimizer and scheduler: with the hooks, and what accelerate does without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from prepare_jobs import ADAMW, AUTO, FIXED, LR, WARMUP

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FALLING = [LR / (1 + step) for step in range(4)]
CONSTANT = [LR] * 4
HALVES = [LR / (1 + 2 * step) for step in range(4)]  # two steps an update, as accelerate does with two processes
WARMED = [0.0, 0.0, 2.5e-4, 3.962406251802891e-04]


@dataclass(frozen=True, kw_only=True)
class Row:
    """`on` and `off` are a list of rates, or the name of an error and a part of its text."""

    optimizer: str
    scheduler: str
    json: Any = None
    schedule: Any = None
    on: Any
    off: Any
    scheduled: bool = True
    apart: bool = False

    def __str__(self) -> str:
        names = {id(ADAMW): "auto", id(FIXED): "fixed", id(AUTO): "auto", id(WARMUP): "fixed", id(None): "no"}
        how = f"{names.get(id(self.json), 'own')}-{names.get(id(self.schedule), 'own')}"
        return f"{how}-{self.optimizer}-{self.scheduler}{'-apart' * self.apart}{'' if self.scheduled else '-unstepped'}"


REFUSED = "PrepareError"
NO_OPTIMIZER = ("AssertionError", "zero stage 1 requires an optimizer")
WITHOUT_HOOKS_UNBUILT = ("AttributeError", "'DummyOptim' object has no attribute 'param_groups'")

ROWS = [
    Row(optimizer="none", scheduler="callable", on=(REFUSED, "no optimizer that it could drive"), off=NO_OPTIMIZER),
    Row(optimizer="real", scheduler="torch", on=HALVES, off=HALVES),
    Row(optimizer="real", scheduler="dummy", on=(REFUSED, "which has none"), off=("ValueError", "Either specify")),
    Row(optimizer="real", scheduler="callable", on=FALLING, off=("AttributeError", "no attribute 'step'")),
    Row(optimizer="real", scheduler="callable", scheduled=False, on=FALLING, off=CONSTANT),
    Row(optimizer="real", scheduler="deepspeed", on=WARMED, off=WARMED),
    Row(optimizer="dummy", scheduler="none", on=(REFUSED, "JSON, which has none"), off=("ValueError", "DummyOptim")),
    Row(
        optimizer="real",
        scheduler="none",
        json=ADAMW,
        on=(REFUSED, "in the script and in the DeepSpeed JSON"),
        off=("ValueError", "an optimizer in the config file and in the code"),
    ),
    Row(
        optimizer="real",
        scheduler="torch",
        schedule=AUTO,
        on=(REFUSED, "in the script and in the DeepSpeed JSON"),
        off=("ValueError", "a scheduler in the config file and in the code"),
    ),
    Row(
        optimizer="real",
        scheduler="deepspeed",
        schedule=WARMUP,
        on=(REFUSED, "in the script and in the DeepSpeed JSON"),
        off=("ValueError", "a scheduler in the config file and in the code"),
    ),
    Row(optimizer="dummy", scheduler="torch", json=ADAMW, on=FALLING, off=WITHOUT_HOOKS_UNBUILT),
    Row(optimizer="dummy", scheduler="deepspeed", json=ADAMW, on=WARMED, off=("TypeError", "DummyOptim")),
    Row(
        optimizer="dummy empty group",
        scheduler="callable",
        json=ADAMW,
        on=[[rate, rate / 10] for rate in FALLING],
        off=[[rate, rate / 10] for rate in FALLING],
    ),
    Row(optimizer="dummy", scheduler="dummy", json=ADAMW, on=(REFUSED, "has none"), off=("ValueError", "Either")),
    Row(optimizer="dummy", scheduler="callable", json=ADAMW, on=FALLING, off=FALLING),
    Row(
        optimizer="dummy",
        scheduler="none",
        json=ADAMW,
        schedule=AUTO,
        on=(REFUSED, "a DummyScheduler alone fills"),
        off=("ValueError", "not found in kwargs"),
    ),
    Row(
        optimizer="dummy",
        scheduler="callable",
        json=ADAMW,
        schedule=AUTO,
        on=(REFUSED, "the JSON's is ignored"),
        off=("ValueError", "not found in kwargs"),
    ),
    Row(
        optimizer="dummy",
        scheduler="callable",
        json=ADAMW,
        schedule=WARMUP,
        on=(REFUSED, "the JSON's is ignored"),
        off=FALLING,
    ),
    Row(optimizer="real", scheduler="callable", schedule=WARMUP, on=(REFUSED, "the callable is ignored"), off=WARMED),
    Row(optimizer="real", scheduler="none", schedule=WARMUP, on=WARMED, off=WARMED),
    Row(
        optimizer="none",
        scheduler="foreign",
        json=FIXED,
        on=(REFUSED, "an optimizer that is not in this prepare"),
        off=[5e-4] * 4,
    ),
    Row(
        optimizer="none",
        scheduler="callable",
        json=FIXED,
        on=[5e-4 / (1 + step) for step in range(4)],
        off=("AttributeError", "no attribute 'step'"),
    ),
    Row(optimizer="dummy without lr", scheduler="dummy", json=FIXED, schedule=WARMUP, on=WARMED, off=WARMED),
    # Values.
    Row(
        optimizer="dummy",
        scheduler="none",
        json=FIXED,
        on=(REFUSED, "the DeepSpeed JSON says lr 0.0005"),
        off=[5e-4] * 4,
    ),
    Row(
        optimizer="dummy",
        scheduler="none",
        json={"type": "AdamW", "params": {"torch_adam": True}},
        on=CONSTANT,
        off=[1e-3] * 4,
    ),
    Row(
        optimizer="dummy betas",
        scheduler="none",
        json={"type": "AdamW", "params": {**ADAMW["params"], "eps": 1e-8}},
        on=(REFUSED, "the DeepSpeed JSON says eps 1e-08"),
        off=CONSTANT,
    ),
    Row(
        optimizer="dummy betas",
        scheduler="none",
        json={"type": "AdamW", "params": {**ADAMW["params"], "betas": "auto"}},
        on=CONSTANT,
        off=("ValueError", "`optimizer.params.betas` not found in kwargs"),
    ),
    Row(
        optimizer="dummy",
        scheduler="none",
        json={"type": "AdamW", "params": {**ADAMW["params"], "betas": "auto"}},
        on=(REFUSED, "nothing says what it is to be"),
        off=("ValueError", "not found in kwargs"),
    ),
    Row(
        optimizer="dummy",
        scheduler="dummy",
        json=ADAMW,
        schedule=WARMUP,
        on=(REFUSED, "0.0005 replaces the rates [0.01]"),
        off=WARMED,
    ),
    Row(
        optimizer="dummy groups",
        scheduler="dummy",
        json=ADAMW,
        schedule={"type": "WarmupLR", "params": {**AUTO["params"], "warmup_type": "linear"}},
        on=[[LR * k / 4, LR * k / 40] for k in (0, 0, 1, 2)],
        off=[[LR * k / 4] * 2 for k in (0, 0, 1, 2)],
    ),
    Row(
        optimizer="real",
        scheduler="none",
        schedule={"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 0}},
        on=[0, 0, LR, LR],
        off=("ValueError", "must be a positive integer"),
    ),
    Row(optimizer="dummy", scheduler="dummy cold", json=ADAMW, schedule=AUTO, on=[0, 0, LR, LR], off=[0, 0, LR, LR]),
    # Objects.
    Row(
        optimizer="two dummies", scheduler="none", json=ADAMW, on=(REFUSED, "2 optimizers in one prepare"), off=CONSTANT
    ),
    Row(
        optimizer="dummy",
        scheduler="two torch",
        json=ADAMW,
        on=(REFUSED, "2 schedulers in one prepare"),
        off=WITHOUT_HOOKS_UNBUILT,
    ),
    Row(
        optimizer="dummy without lr",
        scheduler="callable",
        json=FIXED,
        apart=True,
        on=(REFUSED, "without the model"),
        off=("AttributeError", "no attribute 'step'"),
    ),
    Row(
        optimizer="consumed",
        scheduler="none",
        json=ADAMW,
        on=(REFUSED, "holds no parameter"),
        off=("ValueError", "optimizer got an empty parameter list"),
    ),
    Row(
        optimizer="of another model",
        scheduler="none",
        on=(REFUSED, "of its parameters are not the model's"),
        off=("KeyError", "Parameter containing"),
    ),
    Row(
        optimizer="real empty group",
        scheduler="torch",
        on=[[rate, rate / 10] for rate in HALVES],
        off=("ValueError", "zip() argument 2 is longer than argument 1"),
    ),
    Row(
        optimizer="dummy",
        scheduler="plateau callable",
        json=ADAMW,
        scheduled=False,
        on=CONSTANT,
        off=[LR, LR, LR / 2, LR / 4],
    ),
]


@pytest.mark.parametrize("hooks", ["on", "off"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_row(worlds: Any, row: Row, hooks: str) -> None:
    """With the hooks: as asked, or a PrepareError on every rank. Without: what accelerate 1.15.0 does."""
    told = worlds[2].run(
        "prepare_jobs.row",
        optimizer=row.optimizer,
        scheduler=row.scheduler,
        json_optimizer=row.json,
        json_scheduler=row.schedule,
        hooks=hooks == "on",
        scheduled=row.scheduled,
        apart=row.apart,
    )
    expected = getattr(row, hooks)
    if isinstance(expected, tuple):
        assert [(rank["raised"], expected[1] in rank["text"]) for rank in told] == [(expected[0], True)] * 2, told[0]
    if isinstance(expected, tuple) and hooks == "on":
        assert told[0]["text"] == told[1]["text"] and "To mend: " in told[0]["text"]
        assert row.optimizer == "consumed" or "refused" in [outcome for _, outcome in told[0]["diagnosed"]]
    if isinstance(expected, tuple):
        return
    assert told[0]["raised"] is None, told[0]
    assert (told[0]["untrained"] > 0) == (row.optimizer == "two dummies"), "accelerate trains the last one's parameters"
    assert hooks == "off" or "refused" not in [outcome for _, outcome in told[0]["diagnosed"]]
    if row.optimizer.startswith("dummy"):
        assert told[0]["untested"] is False, "zero_allow_untested_optimizer is the user's"
    wanted = [rates if isinstance(rates, list) else [rates] for rates in expected]
    assert [r[: len(w)] for r, w in zip(told[0]["rates"], wanted, strict=True)] == [pytest.approx(w) for w in wanted]


def _diagnosed(worlds: Any, row: Row, hooks: bool = False) -> dict[str, Any]:
    told: list[dict[str, Any]] = worlds[2].run(
        "prepare_jobs.row",
        optimizer=row.optimizer,
        scheduler=row.scheduler,
        json_optimizer=row.json,
        json_scheduler=row.schedule,
        hooks=hooks,
        scheduled=row.scheduled,
    )
    return told[0]


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        (Row(optimizer="none", scheduler="none", json=FIXED, schedule=WARMUP, on=0, off=0), "json-scheduler-unseen"),
        (Row(optimizer="dummy without lr", scheduler="none", json=ADAMW, on=0, off=0), "default-taken"),
        (
            Row(
                optimizer="dummy",
                scheduler="dummy",
                json=ADAMW,
                on=0,
                off=0,
                schedule={"type": "WarmupDecayLR", "params": {**AUTO["params"], "total_num_steps": "auto"}},
            ),
            "warmup-undivided",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_left_as_it_is_is_told(worlds: Any, row: Row, rule: str) -> None:
    """What accelerate does by itself and nobody asked against is left alone, and found by `diagnose`."""
    told = _diagnosed(worlds, row, hooks=True)
    assert (rule, "told") in told["diagnosed"] and told["raised"] is None
    assert told["rates"] == _diagnosed(worlds, row)["rates"]


def test_the_order_of_arguments_does_not_matter(worlds: Any) -> None:
    told = worlds[2].run(
        "prepare_jobs.row", optimizer="dummy", scheduler="torch", json_optimizer=ADAMW, hooks=True, backwards=True
    )[0]
    assert [rates[0] for rates in told["rates"]] == pytest.approx(FALLING)


@pytest.mark.parametrize("hooks", [True, False])
def test_two_models_in_one_prepare_are_refused(worlds: Any, hooks: bool) -> None:
    """By accelerate itself, before anything is made."""
    assert worlds[2].run("prepare_jobs.two_models", hooks=hooks) == ["AssertionError"] * 2


def test_betas_and_eps_of_a_dummy_optim_are_the_optimizers(worlds: Any) -> None:
    """accelerate drops them; where the JSON has none, they hold."""
    row = Row(optimizer="dummy betas", scheduler="none", json=ADAMW, on=0, off=0)
    asked = {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    assert _diagnosed(worlds, row, hooks=True)["group"] == asked
    assert _diagnosed(worlds, row)["group"] == {**asked, "betas": (0.9, 0.999), "eps": 1e-8}


def test_a_second_prepare_has_its_own_rate(worlds: Any) -> None:
    """ "auto" is the user's each time; accelerate leaves the first one's rate in the JSON."""
    assert worlds[2].run("prepare_jobs.twice", hooks=True)[0]["rates"] == [1e-3, 1e-5]
    assert worlds[2].run("prepare_jobs.twice", hooks=False)[0]["rates"] == [1e-3, 1e-3]


def test_backward_of_an_accelerator_that_trains_two_models_is_refused(worlds: Any) -> None:
    """accelerate's goes to the first one's engine, whatever the loss is of; the engines' own methods train both."""
    for told in worlds[2].run("prepare_jobs.twice", hooks=True):
        assert told["moved"] == [True, True] and told["found"] == ["second-engine"]
        assert all("model.backward(loss)" in text for text in told["refused"]) and len(told["refused"]) == 2


def test_backward_goes_to_the_engine_that_trains(worlds: Any) -> None:
    """Also where a reference model was prepared before; accelerate's goes to that one."""
    assert worlds[2].run("prepare_jobs.reference_first", hooks=True)[0] == {"raised": None, "moved": True}
    assert worlds[2].run("prepare_jobs.reference_first", hooks=False)[0]["raised"] is not None


@pytest.mark.parametrize(("kind", "last"), [("plateau callable", 0.5), ("own metric callable", 3.0)])
def test_a_callable_that_makes_a_scheduler_of_a_metric_gets_the_metric(worlds: Any, kind: str, last: float) -> None:
    """Not the batch size: the script steps it, once an update."""
    told = worlds[2].run("prepare_jobs.plateau", kind=kind)[0]
    assert told == {"rates": [LR, LR / 2, LR / 2, LR / 4], "metric": last}


@pytest.mark.parametrize(("clock", "expected"), [(None, HALVES), ("engine", FALLING), ("accelerate", HALVES)])
def test_the_clock_of_a_scheduler_on_a_real_optimizer(worlds: Any, clock: str | None, expected: list[float]) -> None:
    """accelerate's own, unless the JSON says which."""
    told = worlds[2].run("prepare_jobs.row", optimizer="real", scheduler="torch", hooks=True, clock=clock)[0]
    assert [rates[0] for rates in told["rates"]] == pytest.approx(expected)


def test_prepare_deepspeed_called_by_itself(worlds: Any) -> None:
    """As TRL does: with a model alone it is accelerate's, with a scheduler on a DummyOptim it binds."""
    given = {"json_optimizer": ADAMW, "hooks": True, "direct": True}
    told = worlds[2].run("prepare_jobs.row", optimizer="dummy", scheduler="torch", **given)[0]
    assert [rates[0] for rates in told["rates"]] == pytest.approx(FALLING)
    told = worlds[2].run("prepare_jobs.row", optimizer="none", scheduler="none", **{**given, "json_optimizer": FIXED})[
        0
    ]
    assert [rates[0] for rates in told["rates"]] == pytest.approx([5e-4] * 4)


def test_an_accelerator_that_believes_it_is_alone_is_refused(worlds: Any) -> None:
    """Without a backend, accelerate on a host of CPUs counts one process on every rank.

    Where a stack builds the Accelerator, the line that is before it mends that.
    """
    given: dict[str, Any] = {"optimizer": "real", "scheduler": "none", "hooks": True}
    for told in worlds[2].run("prepare_jobs.row", **given, backend=False):
        assert told["raised"] == REFUSED and 'InitProcessGroupKwargs(backend="gloo")' in told["text"]
        assert 'accelerate.PartialState(backend="gloo")' in told["text"]
    for told in worlds[2].run("prepare_jobs.row", **given, backend="before"):
        assert told["raised"] is None


def test_after_prepare(worlds: Any) -> None:
    """Old handles are harmless and show what is real, their hooks are called; nothing is prepared twice."""
    assert worlds[2].run("prepare_jobs.again")[0] == {
        "called": True,
        "state": 1,
        "same": True,
        "refused": ["DummyOptim.add_param_group", "DummyOptim"],
    }


def test_an_error_inside_a_scheduler_is_raised(worlds: Any) -> None:
    """DeepSpeed takes any TypeError for a missing argument, and goes on at the position of its batch size."""
    on, off = (worlds[2].run("prepare_jobs.failing", hooks=hooks)[0] for hooks in (True, False))
    assert on == {"raised": [(1, "TypeError")], "position": 3, "kept": True}
    assert off["raised"] == [] and off["position"] == 13
