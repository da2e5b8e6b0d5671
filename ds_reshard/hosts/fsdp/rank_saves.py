"""The seam of the checkpoint managers of EasyR1 and verl: what all ranks have saved is verified before they go on."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from ds_reshard.errors import UnsupportedLayout
from ds_reshard.hosts.fsdp.order import save_units
from ds_reshard.hosts.fsdp.saved import verify_saved
from ds_reshard.operations.ranks import gather

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

logger = logging.getLogger("ds_reshard")


def verify_save(arguments: Mapping[str, object]) -> None:
    """Verify what a call of `FSDPCheckpointManager.save_checkpoint` has saved, given its arguments; collective.

    The folder is its first argument, `path` of EasyR1 and `local_path` of verl, None for no save
    (verl/utils/checkpoint/fsdp_checkpoint_manager.py of EasyR1 1537764 and of verl 0.9.1).
    """
    manager, folder, *_ = arguments.values()
    if folder is None:
        return
    if not getattr(manager, "should_save_model", True):
        logger.warning("verify_after_save: %s is not verified: its manager saves no model", folder)
        return
    optimizer = getattr(manager, "optimizer", None)
    if arguments.get("save_model_only") or not getattr(manager, "should_save_optimizer", True):
        optimizer = None
    path, model = os.fspath(cast("str", folder)), cast("Module", manager.model)  # type: ignore[attr-defined]
    if getattr(manager, "should_save_lora_only", False):
        verify_saved(path)
        logger.warning("verify_after_save: %s holds a part of the model: its values are not compared", path)
        return
    try:
        verify_saved(path, model=model, optimizer=cast("Optimizer | None", optimizer))
    except UnsupportedLayout:
        if optimizer is None:
            raise
        if reason := _without_units(path, model, cast("Optimizer", optimizer)):
            verify_saved(path, model=model)
            logger.warning("verify_after_save: the optimizer's files in %s are not compared: %s", path, reason)
            return
        verify_saved(path, model=model, optimizer=cast("Optimizer", optimizer))


def _without_units(path: str, model: Module, optimizer: Optimizer) -> str:
    """Note what flat parameters are made of, where the model has some; else why not. Collective."""
    import torch.distributed as dist

    reason = ""
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            save_units(path, model, optimizer)
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            reason = str(error) or type(error).__name__
    return max(gather(reason, None)) if dist.is_initialized() else reason
