"""The training run: what any user of DeepSpeed writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from gpt_demo.layouts import GLOBAL_BATCH, Layout, Schedule
from gpt_demo.model import GPT
from gpt_demo.text import Text


def build(layout: Layout, schedule: Schedule, *, seed: int) -> Any:
    """A DeepSpeed engine in bf16 with AdamW, two param groups and a learning-rate schedule."""
    torch.manual_seed(seed)
    model = GPT()
    decayed = [param for param in model.parameters() if param.dim() > 1]
    plain = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.rate)
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // layout.ranks,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": layout.stage, "stage3_param_persistence_threshold": 40_000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000_000,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, dist_init_required=False
    )
    return engine


def train(engine: Any, text: Text, last: int, tell: Callable[[int, float], None]) -> list[float]:
    """Train from the engine's own step up to `last`; the loss of each step over the global batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(engine.global_steps, last):
        loss = engine(text.batch(step, GLOBAL_BATCH, rank=rank, ranks=ranks))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
        tell(step + 1, losses[-1])
    return losses


def timed(work: Callable[[], object]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started
