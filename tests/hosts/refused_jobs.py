"""What the worker processes do with an engine that a load cannot serve, or must serve late."""

from __future__ import annotations

from cases import Model, Run
from jobs import build


def load_with_feature(run: Run, model: Model, folder: str, switch: str) -> tuple[str, str]:
    """Switch a feature on in a real engine and load; the error's class and text, or "original"."""
    import ds_reshard
    from ds_reshard.hosts.deepspeed import load as host

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
    arguments = {
        "load_dir": folder,
        "tag": None,
        "load_module_strict": True,
        "load_optimizer_states": True,
        "load_lr_scheduler_states": True,
        "load_module_only": False,
        "custom_load_fn": None,
    }
    try:
        host.load_checkpoint(engine, lambda tag: ("original", ""), **arguments)
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
