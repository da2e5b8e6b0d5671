"""What a load of a universal checkpoint reads."""

from __future__ import annotations

from typing import Any

import torch
from cases import Model, Run
from jobs import build


def measured(run: Run, model: Model, folder: str) -> tuple[int, int, set[str]]:
    """Bytes that one rank's load read of tensors, bytes that the rank then holds, and the files that it read."""
    import ds_reshard
    from ds_reshard.hosts.deepspeed import load as host

    moved: list[Any] = []
    move = host.move
    host.move = lambda *arguments: moved.append(move(*arguments)) or moved[0]
    engine = build(run, model, seed=99)
    try:
        with ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder)
    finally:
        host.move = move
    optimizer = engine.optimizer
    if run.stage == 3:
        held = [*optimizer.fp32_partitioned_groups_flat, *optimizer.fp16_partitioned_groups_flat]
        held += [param.ds_tensor for param in engine.module.parameters() if not param.requires_grad]
    else:
        held = [*optimizer.single_partition_of_fp32_groups, *engine.module.state_dict().values()]
    held += [
        t for state in optimizer.optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()
    ]
    return moved[0].bytes_read, sum(t.numel() * t.element_size() for t in held), set(moved[0].files)
