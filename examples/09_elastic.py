"""A node is lost, and comes back: the run goes on with the ranks that are there, from its newest whole checkpoint.

python examples/09_elastic.py  # one node of two ranks, which nobody kills
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d \
    --rdzv-endpoint HOST:29400 examples/09_elastic.py CHECKPOINTS  # on each of two machines
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import deepspeed
import torch

import ds_reshard.auto

BATCH, STEPS = 8, 50
CONFIG = {
    "train_batch_size": BATCH,  # without gradient_accumulation_steps, which follows the number of ranks
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


def load_newest(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """The newest checkpoint that is whole: a node may go while it saves."""
    tags = sorted(folder.glob("global_step*"), key=lambda path: int(path.name.removeprefix("global_step")))
    for path in reversed(tags):
        try:
            engine.load_checkpoint(str(folder), tag=path.name)
            return
        except (ds_reshard.CheckpointDamaged, ds_reshard.CheckpointNotFound):
            continue  # the same on every rank, and the engine is as it was


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    ranks, rank, micro = engine.dp_world_size, engine.global_rank, engine.gradient_accumulation_steps()
    load_newest(engine, folder)
    if rank == 0:
        print(f"at step {engine.global_steps} with dp {ranks}: {micro} micro batches an update", flush=True)
    while engine.global_steps < STEPS:
        batch = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(engine.global_steps))
        for sample in range(rank, BATCH, ranks):
            mine = batch[sample : sample + 1].to(engine.device)
            engine.backward(torch.nn.functional.mse_loss(engine(mine), mine.sum(1, keepdim=True)))
            engine.step()
        if engine.global_steps % 5 == 0:
            engine.save_checkpoint(str(folder))


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs a compiler, and these ranks do not need it
    if "RANK" in os.environ:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
            subprocess.run([*torchrun, __file__, folder], check=True, env={**os.environ, **quiet})
