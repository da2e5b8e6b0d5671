"""Saves of sharding type `fully_reshardable` that Megatron-LM gets wrong, made right while it saves.

Rung 2 of the ladder (a method on a class). `get_parameter_state_dp_zero` gathers flat states without the padding that
ends each bucket; `sharded_param_state_fully_reshardable` slices them at places that count it: what lies behind a padded
bucket is saved shifted, its last elements as zeros (core/optimizer/distrib_optimizer.py, 0.15.0 to 0.19.2; mended after
them by PR 5077). Here the padding is put back in between. Nothing is done in releases that were not seen to be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from packaging.version import Version

if TYPE_CHECKING:
    import torch

_GATHER = "get_parameter_state_dp_zero"
_LAST_WRONG = Version("0.19.2")


class _Bucket(Protocol):
    """`_ParamAndGradBucket` (core/distributed/param_and_grad_buffer.py)."""

    offset: int
    numel_unpadded: int


class _Buffer(Protocol):
    """`_ParamAndGradBuffer`."""

    numel: int
    buckets: Sequence[_Bucket]


class _Distributed(Protocol):
    buffers: Sequence[_Buffer]


def save_states(optimizer: _Distributed, original: Callable[[], object]) -> object:
    """Megatron's own method, given flat states in which each parameter lies where its buffer has it."""
    import megatron.core

    gather = getattr(optimizer, _GATHER)
    if Version(megatron.core.__version__) > _LAST_WRONG or not any(map(_is_stripped, optimizer.buffers)):
        return original()

    def padded(*args: object, empty_data: bool = False, **kwargs: object) -> object:
        state = gather(*args, empty_data=empty_data, **kwargs)
        if state is None or empty_data:
            return state
        return {**state, **{number: _padded(buffer, state[number]) for number, buffer in enumerate(optimizer.buffers)}}

    setattr(optimizer, _GATHER, padded)
    try:
        return original()
    finally:
        delattr(optimizer, _GATHER)


def _is_stripped(buffer: _Buffer) -> bool:
    """Whether padding lies between its buckets."""
    ends = [bucket.offset + bucket.numel_unpadded for bucket in buffer.buckets]
    return any(end != bucket.offset for end, bucket in zip(ends, buffer.buckets[1:], strict=False))


def _padded(buffer: _Buffer, state: Mapping[object, object]) -> dict[object, dict[str, object]]:
    """The flat states of a buffer, by its types, with the padding."""
    made: dict[object, dict[str, object]] = {}
    for types, held in state.items():
        tensors = dict(cast("Mapping[str, object]", held))
        for kind, flat in tensors.items():
            if hasattr(flat, "new_zeros"):
                tensors[kind] = _spread(buffer, cast("torch.Tensor", flat))
        made[types] = tensors
    return made


def _spread(buffer: _Buffer, flat: torch.Tensor) -> torch.Tensor:
    whole, at = flat.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        whole[bucket.offset : bucket.offset + bucket.numel_unpadded] = flat[at : at + bucket.numel_unpadded]
        at += bucket.numel_unpadded
    return whole
