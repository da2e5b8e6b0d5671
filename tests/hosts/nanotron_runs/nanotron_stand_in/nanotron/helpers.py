"""Synthetic: a scheduler whose lambdas divide by the rate that they find in the param groups."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LambdaLR


def lr_scheduler_builder(optimizer: Any, lr_scheduler_args: Any, total_training_steps: int) -> LambdaLR:
    warmup, least = lr_scheduler_args.lr_warmup_steps, lr_scheduler_args.min_decay_lr
    decay = lr_scheduler_args.lr_decay_steps or total_training_steps - warmup

    def factor(step: int, initial_lr: float) -> float:
        if step <= warmup:
            return step / max(warmup, 1)
        share = min(1.0, (step - warmup) / decay)
        left = 1 - share if lr_scheduler_args.lr_decay_style == "linear" else (1 + math.cos(math.pi * share)) / 2
        return (least + (initial_lr - least) * left) / initial_lr

    base = optimizer.get_base_optimizer()
    return LambdaLR(base, [partial(factor, initial_lr=group["lr"]) for group in base.param_groups])
