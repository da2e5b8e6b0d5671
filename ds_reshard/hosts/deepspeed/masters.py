"""Whether weights and fp32 masters that were read belong together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ds_reshard.errors import CheckpointDamaged, Fault
from ds_reshard.execution.deviation import same_bits
from ds_reshard.hosts.deepspeed.live import LiveOptimizer
from ds_reshard.hosts.deepspeed.prepare import Prepared

if TYPE_CHECKING:
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine

_COMPARED_NUMEL = 1 << 20


def masters_read(prepared: Prepared) -> bool:
    return any(key.kind == "fp32" for key in prepared.wants.placements)


def masters_against_weights(engine: DeepSpeedEngine, prepared: Prepared) -> Iterator[Fault]:
    """Whether the masters' cast is the weight, bit for bit, wherever both were read from files.

    It is so after every step of every run; where it is not, the files are of two runs or two steps.
    """
    live = prepared.live
    if live is None or prepared.values is None or not masters_read(prepared):
        return
    read = {key.name for key in prepared.wants.placements if key.kind == "weight"}
    for number, (buffer, weights) in enumerate(zip(live.buffers, _weights_beside(engine, live), strict=True)):
        if weights is None or not all(name in read for name in buffer.shapes):
            continue
        at = _first_difference(buffer.fp32.detach().view(-1), weights.detach().view(-1))
        if at is not None:
            yield CheckpointDamaged.fault(
                prepared.checkpoint.listing.folder,
                f"weights and fp32 masters of flat buffer {number} ({next(iter(buffer.shapes))}, ...) do not "
                "belong together: model and optimizer files are of different steps or runs",
                "the masters' cast in every weight",
                f"a difference at element {at} of the partition of rank {live.rank}",
                mend="restore all files of one save; if the weights were edited on purpose, load once with "
                '"reshard": {"verify": "off"}',
            )


def _weights_beside(engine: DeepSpeedEngine, live: LiveOptimizer) -> list[torch.Tensor | None]:
    """For each flat buffer the weights in the same order and cut, None where there is no such view."""
    optimizer = engine.optimizer
    if live.kind == "zero":
        return [parts[live.rank] for parts in optimizer.parallel_partitioned_bit16_groups]
    if live.kind == "bf16":
        return [parts[live.rank] for parts in optimizer.bf16_partitioned_groups]
    if live.kind == "zero3":
        return list(optimizer.fp16_partitioned_groups_flat)
    if live.kind == "fused":
        return list(optimizer.fp16_groups_flat)
    params = {name: param for param, name in engine.param_names.items()}
    return [params[next(iter(buffer.shapes))] if live.kind == "unfused" else None for buffer in live.buffers]


def _first_difference(masters: torch.Tensor, weights: torch.Tensor) -> int | None:
    for at in range(0, min(masters.numel(), weights.numel()), _COMPARED_NUMEL):
        part = weights[at : at + _COMPARED_NUMEL]
        cast = masters[at : at + _COMPARED_NUMEL].to(device=part.device, dtype=part.dtype)
        if same_bits(cast, part):
            continue
        same = (cast == part) | (cast.isnan() & part.isnan())
        if not bool(same.all()):
            return at + int((~same).nonzero()[0])
    return None
