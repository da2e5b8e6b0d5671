"""What a running optimizer of nanotron holds on this rank: names, and which part of each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol, cast

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.formats.nanotron.names import Rank, Topology
from ds_reshard.formats.nanotron.parameters import SlicesPair, tiles_of
from ds_reshard.hosts.nanotron.load import Group, remember
from ds_reshard.model.region import Box, Part, Region, Shape, regions_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer as TorchOptimizer


class ParallelContext(Protocol):
    """`ParallelContext` of parallel/context.py, commit 2411b02."""

    world_pg: ProcessGroup
    pp_pg: ProcessGroup
    tp_pg: ProcessGroup
    dp_pg: ProcessGroup
    cp_pg: ProcessGroup
    dp_cp_pg: ProcessGroup
    expert_parallel_size: int


class Optimizer(Protocol):
    """`BaseOptimizer` of optim/base.py; the three that wrap another call it `optimizer`."""

    id_to_name: dict[int, str]

    def get_base_optimizer(self) -> TorchOptimizer: ...

    def inherit_from(self, cls: type) -> bool: ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state_dict: dict[str, object], map_location: object = None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePart:
    """Elements [start, stop) of this rank's tensor-parallel shard of a parameter: a weight, or what is trained of it.

    `number` counts the model's parameters on this rank, or the optimizer's; `tensor` is the one that is filled or
    stepped.
    """

    name: str
    number: int
    shape: Shape
    tiles: tuple[Part, ...]
    start: int
    stop: int
    tensor: Tensor

    def regions(self) -> Iterator[tuple[Region, int]]:
        """Its parts in the coordinates of the whole parameter, each with its first element's place in `tensor`."""
        return regions_of(self.shape, self.tiles, self.start, self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """An optimizer on this rank; `groups` has the names of each param group, also of members of which it has no part,
    and `run` the values that this run gave it.

    `replica` is the same for ranks that hold different parts of one copy of the states.
    """

    optimizer: Optimizer
    topology: Topology
    rank: Rank
    dp: int
    replica: int
    world: ProcessGroup
    held: Mapping[str, LivePart]
    groups: tuple[tuple[str, ...], ...]
    run: tuple[Group, ...]
    accumulator: object | None

    @property
    def base(self) -> TorchOptimizer:
        return self.optimizer.get_base_optimizer()


def experts_of(size: int) -> list[Fault]:
    """A fault for a run whose ranks hold other parameters under one name."""
    if size == 1:
        return []
    what = "has expert parallelism: ranks hold different experts under one name, and nanotron's files distinguish them"
    mend = "resume it with nanotron alone, at the topology that saved it; or --no-load-optim"
    return [
        UnsupportedLayout.fault(
            "this run", f"{what} by that rank alone", "expert_parallel_size 1", str(size), mend=mend
        )
    ]


def is_zero(optimizer: Optimizer) -> bool:
    """Whether states are cut over the data-parallel ranks: as `save_optimizer` derives it."""
    from nanotron.optim import ZeroDistributedOptimizer

    return bool(optimizer.inherit_from(ZeroDistributedOptimizer))


def place_of(context: ParallelContext, *, zero: bool) -> tuple[Topology, Rank]:
    """The sizes, and this rank's place in them, as the names of its optimizer's files say them."""
    import torch.distributed as dist

    topology = Topology(
        pp=context.pp_pg.size(),
        tp=context.tp_pg.size(),
        dp=context.dp_pg.size() if zero else None,
        exp=context.expert_parallel_size,
    )
    dp = dist.get_rank(context.dp_pg) if zero else 0
    return topology, Rank(pp=dist.get_rank(context.pp_pg), tp=dist.get_rank(context.tp_pg), dp=dp)


def live_of(optimizer: Optimizer, context: ParallelContext) -> Live:
    """Look at an optimizer; nothing is changed."""
    import torch.distributed as dist

    zero = is_zero(optimizer)
    topology, rank = place_of(context, zero=zero)
    whole, groups = _parameters(optimizer)
    return Live(
        optimizer=optimizer,
        topology=topology,
        rank=rank,
        dp=context.dp_pg.size(),
        world=context.world_pg,
        replica=dist.get_rank(context.cp_pg if zero else context.dp_cp_pg),
        held=dict(_held(optimizer, whole)),
        groups=groups,
        run=remember(optimizer).run,
        accumulator=_accumulator(optimizer),
    )


def _wrappers(optimizer: object) -> Iterator[object]:
    """The optimizers of nanotron around the torch optimizer, outermost first."""
    import torch

    while not isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]


def _accumulator(optimizer: Optimizer) -> object | None:
    """What keeps the fp32 masters: `FP32GradientAccumulator`."""
    found = (getattr(wrapper, "gradient_accumulator", None) for wrapper in _wrappers(optimizer))
    return next((accumulator for accumulator in found if accumulator is not None), None)


def _parameters(optimizer: Optimizer) -> tuple[dict[str, Tensor], tuple[tuple[str, ...], ...]]:
    """The module's parameter of each name, and the names of each param group.

    ZeRO-1 keeps both for parameters of which this rank has no part (`zero_named_param_groups`, optim/zero.py).
    """
    named = (getattr(wrapper, "zero_named_param_groups", None) for wrapper in _wrappers(optimizer))
    zero = next((groups for groups in named if groups is not None), None)
    if zero is not None:
        pairs = [list(group["named_params"]) for group in zero]
        return dict(pair for group in pairs for pair in group), tuple(tuple(n for n, _ in group) for group in pairs)
    accumulator, names = _accumulator(optimizer), optimizer.id_to_name
    groups = optimizer.get_base_optimizer().param_groups
    found = {names[id(param)]: param for group in groups for param in group["params"]}
    if accumulator is not None:
        found = {name: accumulator.parameters[name]["half"] for name in found}  # type: ignore[attr-defined]
    return found, tuple(tuple(names[id(param)] for param in group["params"]) for group in groups)


def _held(optimizer: Optimizer, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, LivePart]]:
    import torch.distributed as dist

    zero = next((one for one in _wrappers(optimizer) if hasattr(one, "param_name_to_dp_rank_offsets")), None)
    tensors = [tensor for group in optimizer.get_base_optimizer().param_groups for tensor in group["params"]]
    for number, tensor in enumerate(tensors):
        name = optimizer.id_to_name[id(tensor)]
        start, stop = 0, whole[name].numel()
        if zero is not None:
            start, stop = map(int, zero.param_name_to_dp_rank_offsets[name][dist.get_rank(zero.dp_pg)])  # type: ignore[attr-defined]
        shape, tiles = tiles_of_parameter(name, whole[name])
        yield (
            name,
            LivePart(name=name, number=number, shape=shape, tiles=tiles, start=start, stop=stop, tensor=tensor),
        )


def tiles_of_parameter(name: str, param: Tensor) -> tuple[Shape, tuple[Part, ...]]:
    """The whole parameter's shape, and the boxes of it that this rank's shard holds."""
    local = tuple(param.shape)
    if not getattr(param, "is_sharded", False):
        return local, (Part(Box.whole(local), 0),) if prod(local) else ()
    info = param.get_sharded_info()  # type: ignore[attr-defined]
    shape = tuple(int(size) for size in info.unsharded_shape)
    try:
        pairs = [
            SlicesPair(local=_slices(pair.local_slices), whole=_slices(pair.global_slices))
            for pair in info.local_global_slices_pairs
        ]
        return shape, tuple(tiles_of(pairs, local, shape))
    except ValueError as error:
        raise UnsupportedLayout(
            f"{name}: is cut over tensor-parallel ranks in a way that is not known: {error}"
        ) from None


def _slices(slices: object) -> tuple[tuple[int | None, int | None], ...]:
    found = cast("tuple[slice, ...]", slices)
    if any(one.step not in (None, 1) for one in found):
        raise ValueError(f"{found} has a step")
    return tuple((_bound(one.start), _bound(one.stop)) for one in found)


def _bound(value: object) -> int | None:
    return None if value is None else int(value)  # type: ignore[call-overload]
