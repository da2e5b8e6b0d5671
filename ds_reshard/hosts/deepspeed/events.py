"""What stage 3 does around a load."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist
    from deepspeed.runtime.engine import DeepSpeedEngine


def event(engine: DeepSpeedEngine, when: str) -> None:
    """ZeRO-3's own work around a load: partition all parameters before, gather the persistent ones after."""
    optimizer = engine.optimizer
    if optimizer is not None and hasattr(optimizer, f"checkpoint_event_{when}"):
        getattr(optimizer, f"checkpoint_event_{when}")()
        _complete_gathers(optimizer.dp_process_group)


def _complete_gathers(group: dist.ProcessGroup) -> None:
    """Wait until what was gathered has arrived. Collective.

    DeepSpeed up to 0.16 waits for the last of several gathers alone (`_allgather_params_coalesced`,
    runtime/zero/partition_parameters.py), which on gloo leaves the others on their way; gloo's barrier waits for
    all work before it.
    """
    import torch.distributed as dist

    if dist.get_backend(group) == "gloo":
        dist.barrier(group=group)
