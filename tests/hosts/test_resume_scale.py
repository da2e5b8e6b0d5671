"""`loss_scale` of this run: at the level of DeepSpeed's own classes, as fp16 does not run on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.distributed


def test_the_loss_scaler_of_this_run_replaces_the_loaded_one() -> None:
    """DeepSpeed's load replaces the scaler object wholesale (`load_state_dict`, runtime/zero/stage_1_and_2.py)."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    from ds_reshard.hosts.deepspeed.resume_values import Saved, apply, own_values
    from ds_reshard.resume.policy import ResumePolicy

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
    engine: Any = Engine(optimizer=optimizer, lr_scheduler=None, global_steps=0, training_dataloader=None)
    own_values(engine)
    optimizer.loss_scaler, optimizer.clip_grad = scaler(2.0**20), 1.0
    saved = Saved(where="", stage=1, dp=1)
    apply(engine, saved, ResumePolicy(hyperparameters=("clip_grad",)))
    assert optimizer.loss_scaler.cur_scale == 2.0**20 and optimizer.clip_grad == 0.5
    apply(engine, saved, ResumePolicy(hyperparameters=("loss_scale",)))
    assert optimizer.loss_scaler.cur_scale == 2.0**12
    assert type(optimizer.loss_scaler) is DynamicLossScaler
