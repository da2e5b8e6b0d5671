"""Save at ZeRO-1, go on at ZeRO-3, then at ZeRO-2: only the DeepSpeed config changes.

python examples/02_change_stage.py                                     # all three, in a temporary folder
torchrun --nproc-per-node 2 examples/02_change_stage.py CHECKPOINTS 1  # or one after the other: then 3, then 2
"""

import os
import subprocess
import sys
import tempfile

import deepspeed
import torch

import ds_reshard.auto  # noqa: F401  (this line is all that changes)

CONFIG = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}


def main(folder: str, stage: int) -> None:
    torch.manual_seed(stage)  # other weights in every run, so that the loaded ones are seen to come from the file
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def loss_of(step: int) -> torch.Tensor:
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * engine.global_rank + step))
        batch = batch.to(engine.device, torch.bfloat16)
        return torch.nn.functional.mse_loss(engine(batch).float(), batch.float().sum(1, keepdim=True))

    path, state = engine.load_checkpoint(folder)  # None, None where there is no checkpoint yet
    if path is not None:
        loss = float(loss_of(engine.global_steps))
        if engine.global_rank == 0:
            print(f"ZeRO-{stage} goes on: loss {loss:.6f}, and {state['loss']:.6f} when it was saved", flush=True)
    for step in range(engine.global_steps, engine.global_steps + 10):
        engine.backward(loss_of(step))
        engine.step()
    loss = float(loss_of(engine.global_steps))
    engine.save_checkpoint(folder, client_state={"loss": loss})
    if engine.global_rank == 0:
        print(f"ZeRO-{stage} saved step {engine.global_steps}, loss {loss:.6f}", flush=True)


def launch(folder: str, stage: int) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run([*torchrun, __file__, folder, str(stage)], check=True, env={**os.environ, **quiet})


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs a compiler, and these ranks do not need it
    if "RANK" in os.environ:
        main(sys.argv[1], int(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            for stage in (1, 3, 2):
                launch(folder, stage)
