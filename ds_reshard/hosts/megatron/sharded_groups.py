"""The param groups that a `torch_dist` checkpoint keeps among its tensors, read before any tensor is.

`DistributedOptimizer.sharded_state_dict` (core/optimizer/distrib_optimizer.py, 0.16.1 to 0.19.2) makes a sharded
object of them for every sharding type but `fully_reshardable`; Megatron reads it together with the tensors, so that
an error about groups would come when weights have been replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from ds_reshard.containers.dcp_directory import Place, read_directory
from ds_reshard.errors import CheckpointNotFound, ReshardError, UnsafePickle
from ds_reshard.formats.megatron.files import read_object
from ds_reshard.formats.megatron.groups import saved_groups
from ds_reshard.hosts.megatron.live import Group

Read = Callable[[str], list[Group] | None]


def with_sharded_groups(optimizer: object, state: object, folder: str) -> object:
    """The saved state of an optimizer with the groups that lie among the tensors put where they would come to be.

    Every rank calls it with its own optimizer, and reads a few kilobytes. What cannot be read stays as it is.
    """
    places: dict[str, Place] | None = None

    def read(key: str) -> list[Group] | None:
        nonlocal places
        if places is None:
            places = _places(folder)
        return _read(places[key]) if key in places else None

    return _filled(optimizer, state, read, "")


def _filled(optimizer: object, state: object, read: Read, prefix: str) -> object:
    """`ChainedOptimizer` prefixes the key with the place in the chain, unless it is a chain of one."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None and len(chained) == 1:
        return _filled(chained[0], state, read, prefix)
    if chained is not None:
        held = state if isinstance(state, Mapping) else {}
        return {
            index: _filled(one, held.get(index), read, f"{prefix}chained_{index}.") for index, one in enumerate(chained)
        }
    number = getattr(optimizer, "data_parallel_group_idx", None)
    if number is None or getattr(optimizer, "optimizer", None) is None or saved_groups(state) is not None:
        return state
    groups = read(f"{prefix}optimizer.distributed.dp_group_idx_{number}.optimizer/shard_0_1")
    held = state if isinstance(state, Mapping) else {}
    return state if groups is None else {**held, "optimizer": {"param_groups": groups}}


def _places(folder: str) -> dict[str, Place]:
    """Where every object of a checkpoint lies, by its name."""
    try:
        return dict(read_directory(folder).objects)
    except CheckpointNotFound:  # on a store that is no file system, which Megatron reads through a library of its own
        return {}


def _read(place: Place) -> list[Group] | None:
    """Groups without what is no plain value: a learning rate may have been saved as a tensor.

    None where the file is not as it should be, which Megatron's own reading will say.
    """
    try:
        groups = saved_groups(read_object(place))
    except UnsafePickle:
        raise
    except ReshardError:
        return None
    if groups is None:
        return None
    return [{name: value for name, value in group.items() if _is_plain(value)} for group in groups]


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in cast("list[object]", value))
    return value is None or isinstance(value, (bool, int, float, str))
