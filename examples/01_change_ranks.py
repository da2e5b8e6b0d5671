"""Save on 4 ranks, go on with 2: only the number of processes changes.

python examples/01_change_ranks.py                                   # both runs, in a temporary folder
torchrun --nproc-per-node 4 examples/01_change_ranks.py CHECKPOINTS  # or one after the other
torchrun --nproc-per-node 2 examples/01_change_ranks.py CHECKPOINTS
"""

import os
import subprocess
import sys
import tempfile

import deepspeed
import torch

import ds_reshard.auto  # noqa: F401  (this line is all that changes)

BATCH = 12  # of all ranks together; DeepSpeed divides it
CONFIG = {
    "train_batch_size": BATCH,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


def main(folder: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    ranks, rank = engine.dp_world_size, engine.global_rank

    path, state = engine.load_checkpoint(folder)  # None, None where there is no checkpoint yet
    if rank == 0 and path is not None:
        print(f"{ranks} ranks go on at step {engine.global_steps} of a run of {state['ranks']} ranks", flush=True)

    for step in range(engine.global_steps, engine.global_steps + 20):
        batch = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
        mine = batch.chunk(ranks)[rank].to(engine.device, torch.bfloat16)
        loss = torch.nn.functional.mse_loss(engine(mine), mine.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, client_state={"ranks": ranks})
    if rank == 0:
        print(f"{ranks} ranks saved step {engine.global_steps}", flush=True)


def launch(ranks: int, folder: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run([*torchrun, __file__, folder], check=True, env={**os.environ, **quiet})


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs a compiler, and these ranks do not need it
    if "RANK" in os.environ:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            launch(4, folder)
            launch(2, folder)
