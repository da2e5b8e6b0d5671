"""What scales the loss after a load: the checkpoint's in fp16, this run's where either side has another precision."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gathered import gathered, same_bits

from ds_reshard.hosts.deepspeed.settings import Settings
from ds_reshard.operations import convert

pytestmark = pytest.mark.distributed


def test_the_loss_scaler_of_this_run_replaces_the_loaded_one() -> None:
    """DeepSpeed's load replaces the scaler object wholesale (`load_state_dict`, runtime/zero/stage_1_and_2.py)."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from ds_reshard.hosts.deepspeed.resume import apply, run_values
    from ds_reshard.resume.policy import ResumePolicy
    from ds_reshard.resume.scheduler_policy import SavedValues

    class Engine(SimpleNamespace):
        __hash__ = object.__hash__  # type: ignore[assignment]

    def scaler(scale: float) -> Any:
        made = DynamicLossScaler(
            init_scale=scale,
            scale_window=10,
            min_scale=1.0,
            delayed_shift=1,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=False,
            dtype=None,
        )
        return made

    optimizer = SimpleNamespace(param_groups=[], loss_scaler=scaler(2.0**12), clip_grad=0.5)
    engine: Any = Engine(
        optimizer=optimizer, lr_scheduler=None, client_lr_scheduler=None, global_steps=0, training_dataloader=None
    )
    run_values(engine)
    optimizer.loss_scaler, optimizer.clip_grad = scaler(2.0**20), 1.0
    saved = SavedValues(where="", stage=1, dp=1)
    apply(engine, saved, ResumePolicy(hyperparameters=("clip_grad",)))
    assert optimizer.loss_scaler.cur_scale == 2.0**20 and optimizer.clip_grad == 0.5
    apply(engine, saved, ResumePolicy(hyperparameters=("loss_scale",)))
    assert optimizer.loss_scaler.cur_scale == 2.0**12
    assert type(optimizer.loss_scaler) is DynamicLossScaler


def _loaded(
    worlds: Any, folder: Path, saved: tuple[int, str], loaded: tuple[int, str], settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What both sides say of the scale, where masters and moments are equal to the bit."""
    given = {"saved": saved, "loaded": loaded, "folder": str(folder), "ranks": 2, "settings": settings or {}}
    told = worlds[2].run("scale_jobs.load", **given)
    truth, now = (gathered([one[when][0] for one in told]) for when in ("saved", "now"))
    wrong = [key for key in truth if not same_bits(truth[key], now[key])]
    assert truth and not wrong
    counted = told[0]["saved"][2], told[0]["now"][2]
    return {"saved": told[0]["saved"][1], "own": told[0]["own"], "now": told[0]["now"][1], "counted": counted}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, "fp32"), (2, "fp16")),
        ((3, "fp32"), (3, "fp16")),
        ((2, "fp16"), (2, "fp32")),
        ((0, "bf16"), (0, "fp16")),
        ((0, "fp16"), (0, "bf16")),
        ((2, "bf16"), (2, "fp16 static")),
        ((2, "fp16 static"), (2, "bf16")),
        ((1, "fp16 static"), (2, "fp32")),
    ],
    ids=str,
)
def test_another_precision_scales_as_this_run_says(
    worlds: Any, tmp_path: Path, saved: tuple[int, str], loaded: tuple[int, str]
) -> None:
    """Every precision has a scaler, of scale 1 where it needs none: DeepSpeed's own load switches scaling on or off.

    So its own load takes none of another, though it is asked for and nothing else differs.
    """
    scales = _loaded(worlds, tmp_path, saved, loaded, {"reshard": {"unchanged": "deepspeed"}})
    assert scales["now"] == scales["own"] != scales["saved"]


@pytest.mark.parametrize("loaded", [(2, "fp16"), (3, "fp16"), (1, "fp16")], ids=str)
def test_fp16_goes_on_with_the_scale_that_was_saved(worlds: Any, tmp_path: Path, loaded: tuple[int, str]) -> None:
    scales = _loaded(worlds, tmp_path, (2, "fp16"), loaded)
    assert scales["now"] == scales["saved"] != scales["own"]


@pytest.mark.parametrize("kind", ["fp16", "fp16 static"])
@pytest.mark.parametrize("stages", [(0, 0), (0, 1), (0, 2), (0, 3), (2, 0), (3, 0)], ids=str)
def test_between_stage_0_and_the_others_too(worlds: Any, tmp_path: Path, stages: tuple[int, int], kind: str) -> None:
    """Stage 0 keeps it elsewhere: scale, count and last overflow, by which the next doubling comes in time."""
    scales = _loaded(worlds, tmp_path, (stages[0], kind), (stages[1], kind))
    assert scales["now"][0] == scales["saved"][0]
    assert kind == "fp16 static" or scales["counted"][0] == scales["counted"][1]
    assert (scales["own"][0] == scales["saved"][0]) is (kind == "fp16 static")


def test_a_deepspeed_that_keeps_it_in_the_optimizer_itself() -> None:
    """`FP16_Optimizer` of DeepSpeed before 0.18 counts in attributes of its own (synthetic)."""
    from ds_reshard.hosts.deepspeed.engine import _scaler
    from ds_reshard.hosts.deepspeed.entries import OptimizerValues, loss_scaling
    from ds_reshard.hosts.deepspeed.move import _adopt_stage0

    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    inner = torch.optim.SGD([weight], lr=0.1)
    own = {"dynamic_loss_scale": True, "cur_scale": 65536.0, "cur_iter": 0, "last_overflow_iter": -1}
    wrapper = type("FP16_Optimizer", (SimpleNamespace,), {"__module__": "deepspeed.runtime.fp16.fused_optimizer"})
    engine: Any = SimpleNamespace(optimizer=wrapper(optimizer=inner, **own))
    run: Any = SimpleNamespace(fp16=True, optimizer=SimpleNamespace(stage=0, scaler=_scaler(engine.optimizer)))
    saved = {"dynamic_loss_scale": True, "cur_scale": 512.0, "cur_iter": 9, "last_overflow_iter": 4}
    model = SimpleNamespace(in_fp16=True)
    checkpoint: Any = SimpleNamespace(optimizer_entries=saved, stage=0, model=model)
    request: Any = SimpleNamespace(replaced=frozenset())
    extras = loss_scaling(run, checkpoint, Settings(), request)
    values = OptimizerValues(groups={}, scalars={}, extras=extras, step=None)
    _adopt_stage0(engine, values, {"state": {}, "param_groups": [{"lr": 0.1}]})
    assert {name: getattr(engine.optimizer, name) for name in saved} == saved


@pytest.mark.parametrize("stages", [(0, 2), (2, 0)], ids=str)
def test_another_kind_of_scale_keeps_this_runs(worlds: Any, tmp_path: Path, stages: tuple[int, int]) -> None:
    scales = _loaded(worlds, tmp_path, (stages[0], "fp16 static"), (stages[1], "fp16"))
    assert scales["now"] == scales["own"]


@pytest.mark.parametrize("stages", [(0, 2), (2, 0), (0, 0)], ids=str)
def test_the_scale_of_this_run_where_it_is_asked_for(worlds: Any, tmp_path: Path, stages: tuple[int, int]) -> None:
    own = {"resume": {"hyperparameters": ["loss_scale"]}}
    scales = _loaded(worlds, tmp_path, (stages[0], "fp16"), (stages[1], "fp16"), own)
    assert scales["now"] == scales["own"] and scales["now"][0] != scales["saved"][0]


@pytest.mark.parametrize("through", ["dcp", "pytorch"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_tells_no_scale_is_converted_into_none(worlds: Any, tmp_path: Path, stage: int, through: str) -> None:
    """DeepSpeed took over a scale of 1, and fp16 went on unscaled; stage 3 stops without one, and a note says so."""
    first, other, last = (str(tmp_path / name) for name in ("first", "other", "last"))
    worlds[2].run("scale_jobs.save", saved=(2, "fp16"), folder=first, ranks=2)
    convert(first, other, to=through, dp=1 if through == "dcp" else None)
    notes = convert(other, last, to=f"zero{stage}", dp=2).notes
    assert any("continues unscaled" in note for note in notes) is (stage == 3)
    for own, now in worlds[2].run("scale_jobs.load_alone", loaded=(stage, "fp16"), folder=last, ranks=2):
        assert now == (own if stage < 3 else (1.0, "LossScaler", False))
    for told in worlds[2].run("scale_jobs.load_hooked", loaded=(stage, "fp16"), folder=last, ranks=2):
        assert told[0] == told[1]
