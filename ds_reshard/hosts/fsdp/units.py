"""What this rank holds of the optimizer state of each FSDP unit, told in plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

Key = int | str
States = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A state of one parameter: its element type, and its shape where it is not that of the shard."""

    dtype: str
    odd_shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What a rank holds of a parameter of which it has elements; of a flat parameter, `names` are its members."""

    frozen: bool
    states: Mapping[str, Held]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One flat parameter of FSDP1 that is sharded, so that its state is gathered.

    `name` is the same on every rank, that of its first parameter; `keys` are the keys in the optimizer's state dict of
    its parameters, by name; with `use_orig_params=False` the one key is that of the flat parameter, under `name`.
    """

    name: str
    keys: Mapping[str, Key | None]
    frozen: frozenset[str]
    shards: Mapping[str, Shard]


def units_of(
    model: Module, parameters: Mapping[Key, Parameter], state: Mapping[Key, States], *, use_orig_params: bool
) -> list[Unit]:
    """The units of a model whose state torch gathers, in the order of their names; the same units on every rank.

    A unit on one rank, or of NO_SHARD, is handed out as it is (`_gather_all_orig_param_state` and
    `_communicate_optim_state`, torch/distributed/fsdp/_optim_utils.py, 2.13).
    """
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp._common_utils import _get_param_to_fqns
    from torch.distributed.fsdp._optim_utils import _get_fqn_to_fsdp_param_info

    names = _get_param_to_fqns(model)
    keys: dict[str, Key] = {names[param][0]: key for key, param in parameters.items() if param in names}
    infos = {id(info): info for info in _get_fqn_to_fsdp_param_info(model).values()}
    units = []
    for info in infos.values():
        if info.state.world_size == 1 or info.state.sharding_strategy == ShardingStrategy.NO_SHARD:
            continue
        members = tuple(info.param_indices)
        flat = info.handle.flat_param
        if use_orig_params:
            frozen = frozenset(n for n, i in info.param_indices.items() if not info.param_requires_grad[i])
            sizes = {n: flat._shard_param_infos[i].numel_in_shard or 0 for n, i in info.param_indices.items()}
        else:
            frozen = frozenset() if flat.requires_grad else frozenset(members[:1])
            sizes = {members[0]: flat._sharded_size.numel()}
        shards = {
            name: Shard(
                frozen=name in frozen,
                states=_held(state.get(keys.get(name, -1), {}), numel),
                names=(name,) if use_orig_params else members,
            )
            for name, numel in sizes.items()
            if numel
        }
        units.append(Unit(name=members[0], keys={name: keys.get(name) for name in sizes}, frozen=frozen, shards=shards))
    return sorted(units, key=lambda unit: unit.name)


def parameters_of(optimizer: Optimizer, model: Module, state_dict: Mapping[str, object]) -> Mapping[Key, Parameter]:
    """The parameter of each key of an optimizer's state dict: numbered in order, or named by a NamedOptimizer."""
    from torch.distributed.fsdp import _optim_utils as torchs
    from torch.distributed.fsdp._common_utils import _get_param_to_fqns

    found: Mapping[Key, Parameter] = torchs._get_param_key_to_param(
        optimizer,
        model,
        torchs._is_named_optimizer(dict(state_dict)),
        _get_param_to_fqns(model),
        torchs._get_flat_param_to_fqn(model),
    )
    return found


def on_cpu(model: Module) -> bool:
    """Whether every FSDP unit of a model computes on the CPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    modules = FullyShardedDataParallel.fsdp_modules(model)
    return all(module.compute_device is not None and module.compute_device.type == "cpu" for module in modules)


def tensors(states: States) -> Iterator[tuple[str, Tensor]]:
    """The states that torch gathers: tensors of one dimension or more; others are taken from each rank as they are."""
    import torch

    for name, value in states.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            yield name, value


def _held(states: States, numel: int) -> Mapping[str, Held]:
    return {
        name: Held(
            dtype=str(tensor.dtype).removeprefix("torch."),
            odd_shape=None if _local(tensor).numel() == numel else tuple(tensor.shape),
        )
        for name, tensor in tensors(states)
    }


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that tensor parallelism has divided."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
