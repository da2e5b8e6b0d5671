"""accelerate: train on 2 ranks at ZeRO-2, go on with 1 at ZeRO-3 and a new learning rate.

python examples/10_accelerate.py  # both runs, in a temporary folder; or one after the other:
torchrun --nproc-per-node 2 examples/10_accelerate.py FOLDER --stage 2 --steps 4 --lr 1e-3
torchrun --nproc-per-node 1 examples/10_accelerate.py FOLDER --stage 3 --steps 6 --lr 1e-4 \
    --override-opt-param-scheduler
"""

import argparse
import inspect
import os
import subprocess
import sys
import tempfile

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, InitProcessGroupKwargs
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

import ds_reshard.auto  # this line and add_arguments below are all that is added


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in {"folder": str, "--stage": int, "--steps": int, "--lr": float}.items():
        parser.add_argument(name, type=kind)
    ds_reshard.add_arguments(parser)  # --override-opt-param-scheduler and its like
    given = parser.parse_args()
    adam = {"type": "AdamW", "params": {"lr": given.lr, "torch_adam": True}}
    batch = 8 // int(os.environ["WORLD_SIZE"])
    config = {"train_micro_batch_size_per_gpu": batch, "zero_optimization": {"stage": given.stage}, "optimizer": adam}
    gloo = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), kwargs_handlers=[gloo])
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    text = torch.tensor(list(inspect.getsource(argparse).encode()))  # of the standard library
    loader = DataLoader(text[: len(text) // 32 * 32].view(-1, 32), batch_size=batch)
    optimizer = DummyOptim(model.parameters(), lr=given.lr)
    scheduler = get_scheduler("constant", optimizer)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if os.path.isdir(given.folder):
        accelerator.load_state(given.folder)
    for step, batch in enumerate(loader, model.global_steps + 1):
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        accelerator.print(f"update {step}: learning rate {optimizer.param_groups[0]['lr']:.6f}", flush=True)
        optimizer.step()
        scheduler.step()
        if step == given.steps:
            break
    accelerator.save_state(given.folder)


def launch(ranks: int, *arguments: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run([*torchrun, __file__, *arguments], check=True, env={**os.environ, **quiet})


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs a compiler, and these ranks do not need it
    if "RANK" in os.environ:
        main()
    else:
        with tempfile.TemporaryDirectory() as folder:
            launch(2, f"{folder}/run", "--stage=2", "--steps=4", "--lr=1e-3")
            launch(1, f"{folder}/run", "--stage=3", "--steps=6", "--lr=1e-4", "--override-opt-param-scheduler")
