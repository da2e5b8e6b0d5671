"""The order of SimpleTuner: optimizer, scheduler, prepare, resume; prints the rate that each update used."""

import os
import tempfile

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, InitProcessGroupKwargs

import ds_reshard

ASKED = 1e-5


def config(**scheduler) -> dict:
    adam = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
    return {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}, "optimizer": adam, **scheduler}


def cosine(optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def train(config: dict, build=DummyScheduler, folder: str = "", resume: bool = False) -> str:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    plugin, gloo = DeepSpeedPlugin(hf_ds_config=config), InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[gloo])
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = DummyOptim([{"params": list(model.parameters()), "lr": ASKED}])
    model, scheduler, optimizer = accelerator.prepare(model, build(optimizer), optimizer)
    used: list[float] = []
    model.basic_optimizer.register_step_pre_hook(lambda adam, *_: used.append(adam.param_groups[0]["lr"]))
    if resume:
        accelerator.load_state(folder)
    for _ in range(5):
        accelerator.backward(model(torch.randn(8, 16)).square().mean())
        optimizer.step()
        scheduler.step()
    if folder:
        accelerator.save_state(folder)
    return ", ".join(f"{rate:.2e}" for rate in used)


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs a compiler, and one rank does not need it
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    auto = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
    warmup = {"scheduler": {"type": "WarmupLR", "params": auto}}
    print(f"asked for {ASKED:.2e}, without the hooks: {train(config(**warmup))}", flush=True)
    with ds_reshard.install("accelerate"), tempfile.TemporaryDirectory() as folder:
        print(f"asked for {ASKED:.2e}, with the hooks: {train(config(**warmup))}", flush=True)
        print(f"cosine on a DummyOptim: {train(config(), cosine, folder)}", flush=True)
        print(f"resumed: {train(config(), cosine, folder, resume=True)}", flush=True)
