"""Saves that Megatron-LM gets wrong, or stops at, made right while it saves.

Rung 2 of the ladder (a method on a class). `get_parameter_state_dp_zero` gathers flat states without the padding that
ends each bucket; `sharded_param_state_fully_reshardable` slices them at places that count it: what lies behind a padded
bucket is saved shifted, its last elements as zeros (core/optimizer/distrib_optimizer.py, 0.15.0 to 0.19.2; mended after
them by PR 5077). Here the padding is put back in between. Nothing is done in releases that were not seen to be wrong.

`sharded_param_state_dp_reshardable` fills each bucket up with padding, which may go beyond the end of the tensor that
is saved: torch's planner stops at "out of bounds chunk". It is cut there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast

from packaging.version import Version

from ds_reshard.hooks import Call

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


def save_states(call: Call) -> object:
    """Megatron's own method, given flat states in which each parameter lies where its buffer has it."""
    import megatron.core

    optimizer: _Distributed = call["self"]
    gather = getattr(optimizer, _GATHER)
    if Version(megatron.core.__version__) > _LAST_WRONG or not any(map(_is_stripped, optimizer.buffers)):
        return call()

    def padded(*args: object, empty_data: bool = False, **kwargs: object) -> object:
        state = gather(*args, empty_data=empty_data, **kwargs)
        if state is None or empty_data:
            return state
        return {**state, **{number: _padded(buffer, state[number]) for number, buffer in enumerate(optimizer.buffers)}}

    setattr(optimizer, _GATHER, padded)
    try:
        return call()
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


class _Sharded(Protocol):
    """`ShardedTensor` (core/dist_checkpointing/mapping.py), of one dimension here."""

    data: torch.Tensor
    global_shape: tuple[int]
    global_offset: tuple[int]


def save_buckets(call: Call) -> object:
    """The sharded state of buckets, padding cut where the tensor ends that it is saved in."""
    state = call()
    for entry in _entries(state):
        if getattr(entry.get("padding"), "obj", False) is not True:
            continue
        for kind, held in entry.items():
            if kind != "padding" and hasattr(held, "global_offset"):
                entry[kind] = _within(cast(_Sharded, held))
    return state


def _entries(state: object) -> Iterator[dict[str, object]]:
    """What is saved of each parameter and each padding, by kind."""
    for held in state.values() if isinstance(state, dict) else ():
        for buckets in held.values() if isinstance(held, dict) else ():
            yield from (entry for bucket in buckets for entry in bucket)


def _within(held: _Sharded) -> object:
    room = held.global_shape[0] - held.global_offset[0]
    if held.data.numel() <= room:
        return held
    return replace(held, data=held.data[:room], local_shape=(room,))  # type: ignore[type-var]
