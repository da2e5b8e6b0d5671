"""Synthetic: the one function that saves everything, here the scheduler alone, and where the trainer looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanotron.serialize.optimizer import save_lr_scheduler


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
    if should_save_lr_scheduler:
        save_lr_scheduler(
            lr_scheduler=lr_scheduler,
            is_zero=config.optimizer.zero_stage,
            parallel_context=parallel_context,
            root_folder=root_folder,
        )
