"""What this rank holds of a model and its optimizer under FSDP1 or FSDP2: parts of tensors, under the names of a save.

Nothing is gathered: the parts stay where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_reshard.model.layout import TensorKey
from ds_reshard.model.region import Box, Region

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.fsdp._optim_utils import FSDPParamInfo
    from torch.nn import Module
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements of a tensor, in the order of `region`."""

    key: TensorKey
    shape: tuple[int, ...]
    region: Region
    values: Tensor


def parts_of(model: Module, optimizer: Optimizer | None) -> Iterator[Part]:
    """This rank's parts of every parameter and of every state that is of its parameter's shape.

    Of what several ranks hold alike the first rank's part alone.
    """
    from torch.distributed.fsdp._optim_utils import _get_fqn_to_fsdp_param_info

    infos = _get_fqn_to_fsdp_param_info(model)
    for name, info in infos.items():
        if _is_first_replica(info):
            yield from _flat_parts(name, info, optimizer)
    if infos:
        return
    for name, param in model.named_parameters():
        region = _local_region(param)
        if region is not None:
            yield from _held(name, tuple(param.shape), region, param, optimizer, param, slice(None))


def steps_of(model: Module, optimizer: Optimizer | None) -> Iterator[tuple[str, str, bytes]]:
    """The states that are one number, of the parameters of which this rank has a state: name, kind and bytes."""
    import torch

    from ds_reshard.execution.buffers import memory_of

    for name, param in _params(model):
        states = optimizer.state.get(param, {}) if optimizer is not None else {}
        for kind, value in states.items():
            if isinstance(value, torch.Tensor) and not value.dim() and param.dim():
                yield name, kind, bytes(memory_of(value.detach().cpu().reshape(1)))


def second_names(model: Module) -> frozenset[str]:
    """The names of buffers, and all names of parameters: of a tied one, the first alone is compared."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    named = [*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)]
    handles = [
        (prefix, module._handle)
        for prefix, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    ]
    tied = [
        ".".join(part for part in (prefix, info.module_name, info.param_name) if part)
        for prefix, handle in handles
        if handle is not None
        for info in handle.flat_param._shared_param_infos
    ]
    return frozenset(clean_tensor_name(name) for name in (*tied, *(name for name, _ in named)))


def _params(model: Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and the tensor under which the optimizer keeps its state."""
    from torch.distributed.fsdp._optim_utils import _get_fqn_to_fsdp_param_info

    infos = _get_fqn_to_fsdp_param_info(model)
    for name, info in infos.items():
        flat = info.handle.flat_param
        yield name, flat if flat._params is None else flat._params[info.param_indices[name]]
    if not infos:
        yield from model.named_parameters()


def _flat_parts(name: str, info: FSDPParamInfo, optimizer: Optimizer | None) -> Iterator[Part]:
    """Of one parameter of FSDP1: a span of it, inside the rank's span of the flat parameter of its unit."""
    flat = info.handle.flat_param
    number = info.param_indices[name]
    shape = tuple(flat._shapes[number])
    whole = Box.whole(shape)
    start, stop, offset = 0, whole.numel, info.handle._get_flat_param_offsets()[number][0]
    if info.handle.uses_sharded_strategy:
        shard = flat._shard_param_infos[number]
        if not shard.in_shard:
            return
        assert shard.intra_param_start_idx is not None and shard.numel_in_shard is not None
        assert shard.offset_in_shard is not None
        start, offset = shard.intra_param_start_idx, shard.offset_in_shard
        stop = start + shard.numel_in_shard
    region = Region(box=whole, start=start, stop=stop)
    if flat._params is not None:
        own = flat._params[number]
        yield from _held(name, shape, region, own, optimizer, own, slice(None))
    else:
        yield from _held(name, shape, region, flat, optimizer, flat, slice(offset, offset + stop - start))


def _held(
    name: str,
    shape: tuple[int, ...],
    region: Region,
    weight: Tensor,
    optimizer: Optimizer | None,
    param: Tensor,
    inside: slice,
) -> Iterator[Part]:
    """The weight and the states of one parameter; `inside` is where it lies in tensors of several."""
    import torch

    states = optimizer.state.get(param, {}) if optimizer is not None else {}
    for kind, value in [("weight", weight), *states.items()]:
        if isinstance(value, torch.Tensor) and (value.dim() or not shape):
            values = _local(value).detach().reshape(-1)[inside]
            yield Part(key=TensorKey(name=name, kind=kind), shape=shape, region=region, values=values)


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_first_replica(info: FSDPParamInfo) -> bool:
    """Whether no rank before this one holds the same elements of a unit of FSDP1."""
    import torch.distributed as dist

    if not info.handle.uses_sharded_strategy:
        return dist.get_rank() == 0
    replicas = getattr(info.state, "_inter_node_pg", None)  # of HYBRID_SHARD alone
    return replicas is None or dist.get_rank(replicas) == 0


def _local_region(param: Tensor) -> Region | None:
    """What this rank holds of a parameter of FSDP2; None where a rank before it holds the same."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(param, DTensor):
        if dist.is_initialized() and dist.get_rank():
            return None
        box = Box.whole(tuple(param.shape))
    else:
        coordinates = param.device_mesh.get_coordinate() or ()
        if any(at for at, placed in zip(coordinates, param.placements, strict=True) if placed.is_replicate()):
            return None
        size, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        box = Box(offset=tuple(offset), size=tuple(size))
    return Region(box=box, start=0, stop=box.numel)
