"""A run that accelerate owns: its scheduler is not known to the DeepSpeed engine, and is loaded after it."""

from __future__ import annotations

from typing import Any

import jobs
import logs
import torch
from cases import GLOBAL_BATCH
from late_jobs import new_accelerator, new_net


def _prepare(stage: int, lr: float, slope: float, policy: dict[str, Any], seed: int) -> tuple[Any, Any, Any, Any]:
    world = torch.distributed.get_world_size()
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "ds_reshard": {"resume": policy},
    }
    accelerator, net = new_accelerator(config), new_net(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + slope * step))
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    return accelerator, model, optimizer, scheduler


def _train(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, first: int, steps: int) -> list[float]:
    rank, dp = torch.distributed.get_rank(), torch.distributed.get_world_size()
    seen = []
    for step in range(first, first + steps):
        seen.append(float(model.optimizer.optimizer.param_groups[0]["lr"]))
        accelerator.backward(model(*jobs.batch(step, rank, dp)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return seen


def save(stage: int, lr: float, slope: float, folder: str, steps: int) -> list[float]:
    made = _prepare(stage, lr, slope, {}, 7)
    rates = _train(*made, 0, steps)
    made[0].save_state(folder)
    return rates + _train(*made, steps, 3)


def resume(stage: int, lr: float, slope: float, folder: str, policy: dict[str, Any]) -> dict[str, Any]:
    import ds_reshard

    made = _prepare(stage, lr, slope, policy, 99)
    with ds_reshard.install("deepspeed"), logs.first_update() as told:
        made[0].load_state(folder)
    state = made[3].scheduler.state_dict()
    kept = torch.cat([s["exp_avg"].view(-1) for s in made[1].optimizer.optimizer.state.values()]).abs().sum()
    report = ds_reshard.last_report()
    warnings = list(report.warnings) if report is not None else []
    rates = _train(*made, 50, 3)
    return {"rates": rates, "state": sorted(state), "moments": float(kept), "warnings": warnings, "told": told}
