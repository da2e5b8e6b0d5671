"""What both trainings of the Llama share: sizes, steps, batches, and how ranks are started."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

LAYERS, HIDDEN, INNER, HEADS, GROUPS, VOCABULARY, LENGTH = 2, 64, 128, 4, 2, 256, 32
BATCH, RATE, DECAY = 12, 1e-3, 0.01
STEPS, LEAVES, RETURNS = 60, 20, 40
"""Steps of the whole run; the steps after which the run leaves Megatron-LM and comes back."""


def rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Bytes of a module of the standard library, and for each the one that follows it, LENGTH at a time."""
    text = torch.tensor(list(inspect.getsource(inspect).encode()))
    return [(row[:-1], row[1:]) for row in text.unfold(0, LENGTH + 1, LENGTH)]


def on_ranks(ranks: int, train: Callable[[], None]) -> None:
    """Do as torchrun does, with forks of this process: the imports take longer than the training."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="llama",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        start_method="fork",
    )
    elastic_launch(config, train)()
