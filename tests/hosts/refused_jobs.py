"""What the worker processes do with an engine that a load cannot serve, or must serve late."""

from __future__ import annotations

import functools
from typing import Any

import torch
from cases import Model, Run
from jobs import build, train
from logs import heard


def load_with_feature(run: Run, model: Model, folder: str, switch: str) -> tuple[str, str]:
    """Switch a feature on in a real engine and load; the error's class and text, or "original"."""
    import ds_reshard
    from ds_reshard.hooks import Seam

    engine = build(run, model, seed=99)
    optimizer = engine.optimizer
    if switch in ("mp_world_size", "has_moe_layers"):
        setattr(engine, switch, 2 if switch == "mp_world_size" else True)
    elif switch == "nvme":
        optimizer.swap_optimizer = True
    elif switch == "zenflow":
        optimizer.zenflow = True
    else:
        optimizer.__class__ = type(switch, (type(optimizer),), {})
    original = functools.wraps(type(engine).load_checkpoint)(lambda *args, **kwargs: ("original", ""))
    with heard() as lines:
        try:
            Seam("ds_reshard.hosts.deepspeed.load:load_checkpoint")(original)(engine, folder)
        except ds_reshard.ReshardError as error:
            return type(error).__name__, str(error)
    return "original", " ".join(lines)


def _quantize(engine: Any) -> None:
    """As `quantize_nontrainable_params` (runtime/zero/stage3.py, 0.19.8), whose kernel needs a GPU: synthetic."""
    for param in engine.module.parameters():
        if not param.requires_grad:
            part = param.ds_tensor
            scale = part.abs().max().float() / 127
            small = (part.float() / scale).round().to(torch.int8)
            for name in ("ds_numel", "status", "final_location"):
                setattr(small, name, getattr(part, name))
            small.ds_quant_scale = scale
            param.ds_tensor = small


def save_quantized(run: Run, model: Model, folder: str) -> None:
    engine = build(run, model)
    train(engine, 0, 1)
    _quantize(engine)
    engine.save_checkpoint(folder)


def load_quantized(run: Run, model: Model, folder: str, quantize: bool) -> str:
    """What the load raises."""
    import ds_reshard

    engine = build(run, model, seed=99)
    if quantize:
        _quantize(engine)
    try:
        with ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder)
    except ds_reshard.ReshardError as error:
        return str(error)
    return ""


def load_after_decoupled_save(run: Run, model: Model, folder: str) -> list[str]:
    import ds_reshard

    engine = build(run, model, seed=99)
    order: list[str] = []
    engine.checkpoint_engine.is_decoupled = lambda: True
    engine._commit_decoupled_checkpoint = lambda: order.append("commit")
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
    return [*order, "load"]
