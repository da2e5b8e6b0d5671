"""Hugging Face's Trainer: train on 2 ranks at ZeRO-2, go on with 1 at ZeRO-3 and a new learning rate.

python examples/08_trainer.py  # both runs, in a temporary folder; or one after the other:
torchrun --nproc-per-node 2 examples/08_trainer.py OUTPUT_DIR --stage 2 --steps 4 --lr 1e-3
torchrun --nproc-per-node 1 examples/08_trainer.py OUTPUT_DIR --stage 3 --steps 6 --lr 1e-4 \
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
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import ds_reshard.auto  # this line and add_arguments below are all that is added


class Rates(TrainerCallback):
    def on_step_end(self, args, state, control, optimizer, **_) -> None:
        if state.is_world_process_zero:
            print(f"update {state.global_step}: learning rate {optimizer.param_groups[0]['lr']:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in {"folder": str, "--stage": int, "--steps": int, "--lr": float}.items():
        parser.add_argument(name, type=kind)
    ds_reshard.add_arguments(parser)  # --override-opt-param-scheduler and its like
    given = parser.parse_args()
    adam = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": given.stage},
        "optimizer": {"type": "AdamW", "params": adam},
    }
    schedule = {"max_steps": given.steps, "learning_rate": given.lr, "lr_scheduler_type": "constant"}
    plain = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "ddp_backend": "gloo"}
    each = {"per_device_train_batch_size": 8 // int(os.environ["WORLD_SIZE"]), "save_steps": 4}
    arguments = TrainingArguments(given.folder, deepspeed=config, **each, **schedule, **plain)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    text = torch.tensor(list(inspect.getsource(argparse).encode())).split(32)[:-1]  # of the standard library
    data = [{"input_ids": part, "labels": part} for part in text]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Rates()])
    os.makedirs(given.folder, exist_ok=True)  # of a first run's other ranks, which may be earlier than the Trainer
    trainer.train(resume_from_checkpoint=get_last_checkpoint(given.folder))


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
            launch(2, folder, "--stage=2", "--steps=4", "--lr=1e-3")
            launch(1, folder, "--stage=3", "--steps=6", "--lr=1e-4", "--override-opt-param-scheduler")
