"""DeepSpeed engines as a training script builds them, and the checkpoints that they save."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from benchmarks.gpt import Shape, build

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

GLOBAL_BATCH = 4
LEARNING_RATE = 1e-3


def join(rendezvous: str, rank: int, world: int) -> None:
    """Make this process rank `rank` of a gloo world that meets at the file `rendezvous`. Collective.

    DeepSpeed's shared-memory op is compiled under a lock that hangs several processes: it is left out.
    """
    import deepspeed
    import deepspeed.ops
    import torch

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    deepspeed.init_distributed("gloo", verbose=False)


def engine(
    shape: Shape, *, stage: int, world: int, filled: bool, config: dict[str, Any] | None = None
) -> DeepSpeedEngine:
    """An engine that has not trained yet. Collective.

    `config` is added to the DeepSpeed configuration.
    """
    import deepspeed
    import torch

    model = build(shape, filled=filled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    full: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **(config or {}),
    }
    made, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=full, dist_init_required=False)
    return made


def save(rank: int, world: int, *, rendezvous: str, shape: Shape, stage: int, folder: str) -> None:
    """Give an engine the optimizer state of one step, and save it. Collective.

    The step has a learning rate of zero and made-up gradients, another for every rank: masters stay what the
    weights are, moments come to be, and no gradient of 270M parameters has to be computed or reduced.
    """
    import torch

    join(rendezvous, rank, world)
    made = engine(shape, stage=stage, world=world, filled=True)
    optimizer = made.optimizer
    masters = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
    for group in optimizer.optimizer.param_groups:
        group["lr"] = 0.0
    for number, master in enumerate(masters):
        master.grad = master.detach() * 0.1 + 1e-3 * (1 + rank)
        optimizer._optimizer_step(number)
        master.grad = None
    for group in optimizer.optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    made.global_steps = 1
    made.save_checkpoint(folder)
    torch.distributed.barrier()
