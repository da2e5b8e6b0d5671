"""On each rank: runs in which Megatron has neither Transformer Engine nor Apex, and steps by torch's own AdamW."""

from __future__ import annotations

from typing import Any

import format_jobs
import load_jobs
import torch


def _fall_back() -> None:
    """What Megatron imports where there is no fused Adam (core/optimizer/__init__.py, distrib_optimizer.py, 0.19.2)."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = torch.optim.AdamW
    optimizer.USING_PYTORCH_OPTIMIZER = True
    distrib_optimizer.Adam = torch.optim.Adam
    distrib_optimizer.HAVE_APEX_OR_TE = False
    distrib_optimizer.USING_APEX_OPTIMIZER = False


def save(arguments: str, saves: list[dict[str, Any]], hooks: bool = False) -> dict[str, Any]:
    _fall_back()
    return format_jobs.save(arguments, saves, hooks)


def load(arguments: str, again: str = "") -> dict[str, Any]:
    """A load, and what is saved of it in the folder `again`: the step that is read there, and not a stale one."""
    _fall_back()
    if not again:
        return load_jobs.load(arguments)
    made = []
    setup = format_jobs._setup

    def kept(given: str) -> Any:
        made.append(setup(given))
        return made[0]

    load_jobs._setup = kept
    told = load_jobs.load(arguments)
    from megatron.training import checkpointing, get_args

    (models, optimizer, scheduler), args = made[0], get_args()
    for one in optimizer.chained_optimizers:
        for state in one.optimizer.state.values():
            state["step"] += 1
    args.save, args.ckpt_format, args.use_dist_ckpt = again, "torch_dist", True
    checkpointing.save_checkpoint(args.iteration + 1, models, optimizer, scheduler, 0, checkpointing_context={})
    return told


def refused(arguments: str) -> dict[str, Any]:
    _fall_back()
    return load_jobs.refused(arguments)


def foresee(arguments: str, folder: str) -> dict[str, Any]:
    import foresee_jobs

    _fall_back()
    return foresee_jobs.foresee(arguments, folder, world=1)


def change(path: str, steps: list[float]) -> dict[str, Any]:
    """Save a file again with these steps, one for each state in turn; with none it tells no step."""
    held = torch.load(path, weights_only=False)
    states = held["optimizer"]["optimizer"]["state"]
    states.pop("common_step", None)
    for number, state in enumerate(one for one in states.values() if "step" in one):
        state["step"] = torch.tensor(steps[number % len(steps)])
    torch.save(held, path)
    return {}
