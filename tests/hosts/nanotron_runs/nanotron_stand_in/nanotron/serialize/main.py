"""Synthetic: what saves everything, of a model that is whole on each rank, and where the trainer looks.

Without a model it saves the scheduler alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from nanotron.optim import ZeroDistributedOptimizer
from nanotron.serialize.optimizer import optimizer_filename, save_lr_scheduler


def parse_ckpt_path(config: Any, parallel_context: Any) -> Path | None:
    folder = config.checkpoints.resume_checkpoint_path
    if folder is None:
        return None
    if (folder / "latest.txt").exists():
        return folder / (folder / "latest.txt").read_text()
    return folder if (folder / "model_config.json").exists() else None


def save(
    config: Any,
    model: Any,
    optimizer: Any,
    lr_scheduler: Any,
    parallel_context: Any,
    training_metadata: Any,
    root_folder: Path,
    should_save_lr_scheduler: bool = True,
) -> None:
    if model is not None:
        for name, tensor in model.state_dict().items() if dist.get_rank(parallel_context.dp_pg) == 0 else ():
            *folders, leaf = name.split(".")
            at = root_folder.joinpath("model", *folders)
            at.mkdir(parents=True, exist_ok=True)
            save_file({"data": tensor}, at / f"model_{leaf}.safetensors")
        zero, folder = optimizer.inherit_from(ZeroDistributedOptimizer), root_folder / "optimizer"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(optimizer.state_dict(), folder / optimizer_filename(parallel_context, is_zero=zero))
    if should_save_lr_scheduler:
        save_lr_scheduler(
            lr_scheduler=lr_scheduler,
            is_zero=config.optimizer.zero_stage,
            parallel_context=parallel_context,
            root_folder=root_folder,
        )
