"""What the worker processes do with an engine that a load cannot serve, or must serve late."""

from __future__ import annotations

import functools

from cases import Model, Run
from jobs import build


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
    try:
        Seam("ds_reshard.hosts.deepspeed.load:load_checkpoint")(original)(engine, folder)
    except ds_reshard.ReshardError as error:
        return type(error).__name__, str(error)
    return "original", ""


def load_after_decoupled_save(run: Run, model: Model, folder: str) -> list[str]:
    import ds_reshard

    engine = build(run, model, seed=99)
    order: list[str] = []
    engine.checkpoint_engine.is_decoupled = lambda: True
    engine._commit_decoupled_checkpoint = lambda: order.append("commit")
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
    return [*order, "load"]
