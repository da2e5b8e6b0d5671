"""A training script that builds its arguments, scheduler and load the way deepspeedai/Megatron-DeepSpeed does.

Synthetic: that fork (megatron/arguments.py, megatron/checkpointing.py) is not on the package registry. In its
DeepSpeed mode `--no-load-optim` and `--no-load-lr-state` are parsed and never used, and `load_checkpoint` is called
with its defaults. Prints what the first step after the load used, and whether moments were loaded.
"""

import argparse
import json
import os

import deepspeed
import deepspeed.ops
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class OptimizerParamScheduler:
    """Linear decay counted in samples, with the fork's names: `num_steps`, and `step(increment)`."""

    def __init__(self, optimizer, max_lr, decay):
        self.optimizer, self.max_lr, self.lr_decay_steps, self.num_steps = optimizer, max_lr, decay, 0
        self.step(0)

    def step(self, increment):
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.max_lr * (1 - self.num_steps / self.lr_decay_steps)

    def state_dict(self):
        return {"max_lr": self.max_lr, "lr_decay_steps": self.lr_decay_steps, "num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.max_lr, self.lr_decay_steps, self.num_steps = state["max_lr"], state["lr_decay_steps"], 0
        self.step(state["num_steps"])


def arguments():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--load")
    parser.add_argument("--save")
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--no-load-optim", action="store_true", default=None)
    parser.add_argument("--no-load-rng", action="store_true", default=None)
    parser.add_argument("--no-load-lr-state", action="store_true", help="dead in the fork")
    parser.add_argument("--finetune", action="store_true")
    parser.add_argument("--override-opt_param-scheduler", action="store_true")
    if os.environ.get("ADOPT"):
        import ds_reshard

        ds_reshard.add_arguments(parser)
    return parser.parse_args()


def main():
    args = arguments()
    torch.manual_seed(1)
    net = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = OptimizerParamScheduler(optimizer, args.lr, 400)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    inner = engine.optimizer.optimizer
    if args.load:
        engine.load_checkpoint(args.load, load_module_strict=True, tag=None)
    moments = sum(float(s["exp_avg"].abs().sum()) for s in inner.state.values() if "exp_avg" in s)
    said = {"lr": inner.param_groups[0]["lr"], "position": scheduler.num_steps, "moments": moments > 0}
    for _ in range(3):
        loss = engine(torch.ones(4, 6, dtype=torch.bfloat16)).float().square().sum()
        engine.backward(loss)
        engine.step(lr_kwargs={"increment": 4})
    if args.save:
        engine.save_checkpoint(args.save)
    if engine.global_rank == 0:
        print("SAID" + json.dumps(said), flush=True)
    torch.distributed.barrier()  # a rank that ends first makes gloo abort those that still wait for it
    torch.distributed.destroy_process_group()


main()
