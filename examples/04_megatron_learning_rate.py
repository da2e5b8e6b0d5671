"""Resume Megatron-LM at a new learning rate: it takes effect at the first step, and Adam's moments stay.

A loop of one's own on megatron.core. A script on megatron.training needs only the import and the flag.
"""

import argparse
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import ds_reshard
import ds_reshard.auto  # before or after Megatron is imported

try:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
except ImportError as error:
    print(f"skipped: {error}; pip install megatron-core")
    sys.exit(0)


class OnCpu(TorchFunctionMode):  # Megatron makes a scalar on the GPU, which may not be there
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"device": "cpu"} if "device" in (kwargs or {}) else {})})


def build(lr: float, min_lr: float) -> tuple[Any, Any]:
    group = {"params": [torch.nn.Parameter(torch.ones(8, 4))], "max_lr": lr, "min_lr": min_lr, "wd_mult": 1.0}
    group |= {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    with OnCpu():
        optimizer = FP32Optimizer(torch.optim.AdamW([group]), OptimizerConfig(lr=lr, clip_grad=0.0), lambda *_: None)
    decay = {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": 100, "wd_incr_style": "constant"}
    curve = {"lr_warmup_steps": 0, "lr_decay_steps": 100, "lr_decay_style": "linear"}
    return optimizer, OptimizerParamScheduler(optimizer, init_lr=0.0, max_lr=lr, min_lr=min_lr, **curve, **decay)


def main() -> None:
    ds_reshard.add_arguments(argparse.ArgumentParser()).parse_args(["--override-opt-param-scheduler"])
    optimizer, scheduler = build(3e-4, 3e-5)
    for _ in range(20):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(8, 4)
        optimizer.step()
        scheduler.step(1)
    states, schedule = optimizer.state_dict(), scheduler.state_dict()
    print(f"saved at step 20, learning rate {optimizer.param_groups[0]['lr']:.3e}")
    optimizer, scheduler = build(3e-5, 2e-5)
    optimizer.load_state_dict(states)
    scheduler.load_state_dict(schedule)
    same = next(iter(optimizer.optimizer.state.values()))["exp_avg"].equal(states["state"][0]["exp_avg"])
    rate = optimizer.param_groups[0]["lr"]
    print(f"goes on at step {scheduler.num_steps}, learning rate {rate:.3e}, moments kept: {same}")


if __name__ == "__main__":
    main()
