"""Loads between precisions, fp16 among them: what scales the loss afterwards, and what the engine holds."""

from __future__ import annotations

from typing import Any

import jobs
from cases import Model, Run

_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}},
    "fp16 static": {"fp16": {"enabled": True, "loss_scale": 128.0}},
}


def _engine(stage: int, precision: str, dp: int, seed: int, settings: dict[str, Any] | None = None) -> Any:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch can, on any CPU; DeepSpeed asks for fast units
    config = {**_PRECISIONS[precision], "ds_reshard": settings or {}}
    return jobs.build(Run(stage, dp, dtype="none", config=config), Model(), seed=seed)


def _scaling(engine: Any) -> tuple[Any, ...]:
    """Scale and kind of the scaler; at stage 0 they are in a config of the optimizer."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is not None:
        return scaler.cur_scale, type(scaler).__name__, engine.optimizer.dynamic_loss_scale
    config = getattr(engine.optimizer, "loss_scale_config", None)
    return (config.cur_scale, config.dynamic_loss_scale) if config is not None else ()


def _counted(engine: Any) -> list[object]:
    """What a dynamic scale counts with."""
    optimizer = engine.optimizer
    scaler = getattr(optimizer, "loss_scaler", getattr(optimizer, "loss_scale_config", None))
    return [getattr(scaler, name, None) for name in ("cur_iter", "last_overflow_iter", "scale_factor", "scale_window")]


def load(
    saved: tuple[int, str], loaded: tuple[int, str], folder: str, ranks: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Save after four steps, which double a dynamic scale, and load at another stage or precision."""
    import ds_reshard

    engine = _engine(*saved, ranks, seed=7)
    jobs.train(engine, 0, 4)
    held, scale, counted = jobs.contents(engine), _scaling(engine), _counted(engine)
    engine.save_checkpoint(folder)
    engine = _engine(*loaded, ranks, seed=99, settings=settings)
    own = _scaling(engine)
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
    now = jobs.contents(engine), _scaling(engine), _counted(engine)
    jobs.train(engine, 4, 1)
    return {"saved": (held, scale, counted), "own": own, "now": now}


def save(saved: tuple[int, str], folder: str, ranks: int) -> None:
    engine = _engine(*saved, ranks, seed=7)
    jobs.train(engine, 0, 2)
    engine.save_checkpoint(folder)


def load_hooked(**asked: Any) -> tuple[Any, Any]:
    import ds_reshard

    with ds_reshard.install("deepspeed"):
        return load_alone(**asked)


def load_alone(loaded: tuple[int, str], folder: str, ranks: int) -> tuple[Any, Any]:
    """What scales the loss before and after a load."""
    engine = _engine(*loaded, ranks, seed=99)
    own = _scaling(engine)
    engine.load_checkpoint(folder)
    now = _scaling(engine)
    jobs.train(engine, 2, 1)
    return own, now
