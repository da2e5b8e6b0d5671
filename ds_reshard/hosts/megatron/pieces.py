"""What of a model and its optimizers lies on this rank: which boxes of which tensors, as Megatron itself tells.

Where a live parameter lies in the whole tensor is what the model's `sharded_state_dict` says of it: key, global shape
and offset, the axis of layers in front (core/dist_checkpointing/mapping.py, 0.18.2 and 0.19.2). A gated linear unit is
a factory that makes two of one parameter. What an optimizer holds of a parameter: a `DistributedOptimizer` a range of
its elements (`_get_model_param_range_map`), the plain ones all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from ds_reshard.errors import UnsupportedLayout
from ds_reshard.formats.megatron.torch_dist import STACKED
from ds_reshard.hosts.megatron.live import Optimizer, TorchOptimizer, leaves
from ds_reshard.model.content import MASTER
from ds_reshard.model.region import Box, Part, Region, regions_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a live tensor is of the model's: its name in a checkpoint, the whole's shape, boxes that follow each other.

    `padded` is true where the number of rows follows the tensor-parallel size: the vocabulary's.
    """

    name: str
    shape: tuple[int, ...]
    tiles: tuple[Part, ...]
    tensor: torch.Tensor
    padded: bool

    def regions(self, start: int, stop: int) -> Iterator[tuple[Region, int]]:
        """Elements [start, stop) of the live tensor as regions, each with its first element's place from `start`."""
        return regions_of(self.shape, self.tiles, start, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Elements [start, stop) of a live parameter, whose master and states an optimizer holds on this rank."""

    piece: Piece
    start: int
    stop: int
    part: Optimizer
    master: torch.Tensor

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Its master and states by kind, live: there once `allocate` has been called."""
        states = cast(TorchOptimizer, self.part.optimizer).state[self.master]
        held = {kind: value for kind, value in states.items() if len(getattr(value, "shape", ()))}
        return {MASTER: self.master, **cast("dict[str, torch.Tensor]", held)}


def pieces_of(models: object) -> list[Piece]:
    """Every tensor of a model's chunks that a checkpoint holds: parameters, and buffers that are saved.

    Raises UnsupportedLayout for one whose place is not told as boxes.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
    from megatron.core.utils import unwrap_model

    found = []
    for model in unwrap_model(models):
        if not _tells(model):
            raise unsupported(type(model).__name__, "does not say where its tensors lie (sharded_state_dict)")
        for one in _told(model):
            if isinstance(one, ShardedTensorFactory):
                found.append(_piece(one.data, list(nested_values({0: one.build()}))))
            elif isinstance(one, ShardedTensor):
                found.append(_piece(one.data, [one]))
            elif isinstance(one, ShardedObject) and not one.key.endswith("._extra_state"):  # scales of fp8
                raise unsupported(one.key, "is no tensor, and only tensors are filled here")
    return found


def _tells(model: object) -> bool:
    return hasattr(model, "sharded_state_dict") and not hasattr(model, "hide_loss_modules")  # as of ModelOpt


def _told(model: object) -> Iterator[object]:
    """What a model's `sharded_state_dict` says of each of its tensors."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    told = model.sharded_state_dict(metadata={"singleton_local_shards": False, "dp_cp_group": group})  # type: ignore[attr-defined]
    yield from nested_values(told)


def untold_tensors(models: object) -> dict[str, torch.Tensor]:
    """Return the tensors of the models' `state_dict` that `sharded_state_dict` does not tell; of ModelOpt's none.

    Megatron saves them in format `torch` alone.
    """
    from megatron.core.utils import unwrap_model

    found: dict[str, torch.Tensor] = {}
    for model in unwrap_model(models):
        if _tells(model):
            told = (cast("torch.Tensor | None", getattr(one, "data", None)) for one in _told(model))
            known = {one.data_ptr() for one in told if one is not None and hasattr(one, "data_ptr")}
            held = model.state_dict(keep_vars=True).items()
            tensors = {name: one for name, one in held if hasattr(one, "data_ptr") and one.numel()}
            found |= {name: one for name, one in tensors.items() if one.data_ptr() not in known}
    return {name: one for name, one in found.items() if not name.endswith("_extra_state")}


def has_frozen(models: object) -> bool:
    """Whether any parameter of the models is not trained."""
    from megatron.core.utils import unwrap_model

    return not all(one.requires_grad for model in unwrap_model(models) for one in model.parameters())


def unsupported(where: str, what: str) -> UnsupportedLayout:
    return UnsupportedLayout.of(where, what, mend="load it under the topology that saved it")


class _Told(Protocol):
    """`ShardedTensor`."""

    key: str
    data: torch.Tensor
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int
    allow_shape_mismatch: bool


def _piece(live: torch.Tensor, told: Sequence[_Told]) -> Piece:
    names, shapes, tiles = set[str](), set[tuple[int, ...]](), []
    for one in told:
        front = one.prepend_axis_num
        offset, size = tuple(one.global_offset), (1,) * front + tuple(one.local_shape)
        name, shape, stacked = one.key, tuple(one.global_shape), STACKED.fullmatch(one.key)
        if stacked is not None and front:
            name = f"{stacked[1]}{offset[0]}.{stacked[2]}"
            offset, size, shape = offset[1:], size[1:], shape[1:]
        names.add(name)
        shapes.add(shape)
        at = (one.data.data_ptr() - live.data_ptr()) // live.element_size()
        tiles.append(Part(Box(offset=offset, size=size), at))
    tiles.sort(key=lambda tile: tile.element_offset)
    ends = [0, *(tile.element_offset + tile.box.numel for tile in tiles)]
    whole = ends[:-1] == [tile.element_offset for tile in tiles] and ends[-1] == live.numel()
    if len(names) != 1 or len(shapes) != 1 or not whole or not all(one.data.is_contiguous() for one in told):
        raise unsupported(told[0].key, "where it lies in the whole tensor is not told as boxes that follow each other")
    padded = any(one.allow_shape_mismatch for one in told)
    return Piece(name=names.pop(), shape=shapes.pop(), tiles=tuple(tiles), tensor=live, padded=padded)


def shares_of(optimizer: object, pieces: Sequence[Piece]) -> list[Share]:
    """What the optimizers hold on this rank; UnsupportedLayout for a parameter that the model does not save."""
    known = {id(piece.tensor): piece for piece in pieces}
    found = []
    for part in leaves(optimizer):
        for param, master, start, stop in _held(part):
            piece = known.get(id(param))
            if piece is None:
                what = f"trains a parameter of shape {tuple(param.shape)} that the model does not save"
                raise unsupported(type(part).__name__, what)
            found.append(Share(piece=piece, start=start, stop=stop, part=part, master=master))
    return found


_Held = tuple["torch.Tensor", "torch.Tensor", int, int]


def _held(part: Optimizer) -> Iterator[_Held]:
    """Yield each parameter, its master, and the range [start, stop) of the parameter's elements that the master holds.

    The master is the tensor that the optimizer updates; it is the parameter itself if there is no copy.
    """
    groups = [
        cast("Sequence[torch.Tensor]", group["params"]) for group in cast(TorchOptimizer, part.optimizer).param_groups
    ]
    if isinstance(part, _Distributed):
        for param in part.model_param_gbuf_map:
            held, (group, order) = (
                part._get_model_param_range_map(param)["param"],
                part.model_param_group_index_map[param],
            )
            yield param, groups[group][order], held.start, held.end
    elif isinstance(part, _Float16):
        for lives, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from ((live, master, 0, live.numel()) for live, master in zip(lives, masters, strict=True))
        yield from ((live, live, 0, live.numel()) for lives in part.fp32_from_fp32_groups for live in lives)
    else:
        yield from ((live, live, 0, live.numel()) for lives in groups for live in lives)


_COMPARED_NUMEL = 1 << 20


def masters_are_weights(part: Optimizer) -> bool:
    """Whether each master on this rank is its weight to the bit, as after a load of weights alone.

    Of each the first elements are compared, as many as take little memory.
    """
    return all(
        bool((param.detach().view(-1)[start:stop][:_COMPARED_NUMEL].to(master.dtype) == _first(master)).all())
        for param, master, start, stop in _held(part)
        if param is not master
    )


_RELATIVE, _ABSOLUTE = 2**-6, 2**-20
"""How far a weight of 16 bits may be from its master, also one that was saved in the other type of 16 bits."""


def other_masters(part: Optimizer) -> list[torch.Tensor]:
    """Return the weights on this rank that are not their masters, rounded."""
    import torch

    found = []
    for param, master, start, stop in _held(part):
        if param.dtype != master.dtype:
            weight = param.detach().view(-1)[start:stop][:_COMPARED_NUMEL].to(master.dtype)
            if not torch.allclose(weight, _first(master), rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True):
                found.append(param)
    return found


def _first(master: torch.Tensor) -> torch.Tensor:
    return master.detach().view(-1)[:_COMPARED_NUMEL]


def has_finer_masters(part: Optimizer) -> bool:
    """Whether its masters are of another type than the weights: they may be finer."""
    return any(param.dtype != master.dtype for param, master, _, _ in _held(part))


class _Range(Protocol):
    start: int
    end: int


@runtime_checkable
class _Distributed(Protocol):
    """`DistributedOptimizer` (core/optimizer/distrib_optimizer.py)."""

    model_param_gbuf_map: Mapping[torch.Tensor, object]
    model_param_group_index_map: Mapping[torch.Tensor, tuple[int, int]]

    def _get_model_param_range_map(self, param: torch.Tensor) -> Mapping[str, _Range]: ...


@runtime_checkable
class _Float16(Protocol):
    """`Float16OptimizerWithFloat16Params` (core/optimizer/optimizer.py)."""

    float16_groups: Sequence[Sequence[torch.Tensor]]
    fp32_from_float16_groups: Sequence[Sequence[torch.Tensor]]
    fp32_from_fp32_groups: Sequence[Sequence[torch.Tensor]]


def is_distributed(part: object) -> bool:
    return isinstance(part, _Distributed)


def is_torch_adam(part: Optimizer) -> bool:
    """Whether it is a `DistributedOptimizer` around torch's own Adam, as without Apex and Transformer Engine."""
    import torch

    inner: object = part.optimizer
    return is_distributed(part) and isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def is_mixed(part: object) -> bool:
    """Whether it is no `FP32Optimizer`: it may have masters beside the parameters, and nests the inner state."""
    return isinstance(part, _Distributed | _Float16)


def allocate(part: Optimizer) -> None:
    """Make the states that a plain optimizer has not before its first step; a distributed one has made its own.

    torch's own Adam counts steps in each state alone, Apex's and Transformer Engine's in the param group.
    """
    import torch

    inner: object = part.optimizer
    if not is_distributed(part):
        part.init_state_fn(inner, part.config)
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        for group in inner.param_groups:
            step = float(cast("int | float", group.pop("step", 0)))  # there it would stay what it is now, and be saved
            for master in cast("Sequence[torch.Tensor]", group["params"]):
                inner.state[master]["step"] = torch.tensor(step)


def kinds_of(optimizer: object) -> frozenset[str] | None:
    """The states that these optimizers keep of each parameter beside its master; None where that is not known."""
    kinds = {"adam": {"exp_avg", "exp_avg_sq"}, "lion": {"exp_avg"}}
    names = {getattr(part.config, "optimizer", None) for part in leaves(optimizer)}
    found = [kinds[name] for name in names if name in kinds]
    return frozenset(found[0]) if len(found) == len(names) == 1 else None
