"""The seam of `build_train_valid_test_data_loaders`: data from its start at an iteration that is kept.

Rung 3 of the ladder (a module function that `training.py` looks up when it calls it). Megatron takes an
iteration above 0 with no consumed samples for a checkpoint from before it counted them, and counts iteration x
batch size instead (training.py, 0.18.2 and 0.19.2), so setting the samples to 0 is not enough.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from ds_reshard.hosts.megatron.arguments import policy_of


def build_data_loaders(original: Callable[[], object], arguments: Namespace) -> object:
    """Megatron's data loaders, from the data's start where that was asked for and the load has set it so."""
    iteration = arguments.iteration
    if iteration == 0 or arguments.consumed_train_samples != 0 or policy_of(arguments).dataloader != "reset":
        return original()
    arguments.iteration = 0
    try:
        return original()
    finally:
        arguments.iteration = iteration
