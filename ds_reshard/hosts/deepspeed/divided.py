"""Which parts of whole tensors this rank has: of what tensor-parallel ranks divide anew, and of AutoEP's experts.

AutoTP says it in `module.universal_checkpoint_info` (module_inject/layers.py, 0.19.8), as it saves it; a model of an
`mpu` may, and rules of the user's say it of both sides. AutoEP says it of each parameter (`ds_autoep_uc_meta`,
module_inject/auto_ep_layer.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.formats.zero.autoep import expert_parts
from ds_reshard.formats.zero.checkpoint import Row, ZeroCheckpoint
from ds_reshard.formats.zero.model_states import section
from ds_reshard.formats.zero.patterns import Patterns
from ds_reshard.formats.zero.tensor_parallel import (
    Evidence,
    affine_maps,
    divided,
    divisions,
    uncovered,
    unknown_faults,
    vocabularies,
)
from ds_reshard.hosts.deepspeed.grid import LiveGrid
from ds_reshard.hosts.deepspeed.live import param_shape
from ds_reshard.model.region import Part, Shape
from ds_reshard.model.rules import Rule
from ds_reshard.operations.ranks import rank

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


logger = logging.getLogger("ds_reshard")


class Share(NamedTuple):
    """What this rank has of a whole tensor: all of it, or parts of it that lie in its own."""

    shape: Shape
    parts: tuple[Part, ...]
    whole: bool = False


def run_shares(
    engine: DeepSpeedEngine, grid: LiveGrid, checkpoint: ZeroCheckpoint
) -> tuple[dict[str, Share], list[Fault]]:
    """What this rank has of the parameters that others share with it: none where the checkpoint has the same parts."""
    if not checkpoint.rows or grid.row.size == 1:
        return {**dict(_of_experts(engine)), **_padded(engine, grid, checkpoint)}, []
    info = _info(engine)
    local = {name: param_shape(param) for name, param in engine.module.named_parameters()}
    maps = affine_maps(info)
    mapped = Patterns(maps)
    sizes = {name: _sizes(parameter) for name, parameter in engine.module.named_parameters()}
    shards = {
        name: _shards([maps[one] for one in mapped.of(name)], shape, sizes[name], grid) for name, shape in local.items()
    }
    row, rules = grid.row, [rule._replace(owner=None) for rule in grid.row.rules]
    found, unknown = divisions(shards, Evidence(info, divides_itself(engine), row.whole, row.live), rules)
    faults = unknown_faults(unknown, "this run")
    for name, division in found.items():
        faults += uncovered(name, division, shards[name])
        held = sum(part.box.numel for part in division.ranks[grid.row.rank])
        if held != prod(local[name]) and not division.vocabulary:
            what = "has elements in this run that are no part of it, which would be left as they are"
            mend = "resume with the tensor-parallel size that was saved, or with one"
            fault = UnsupportedLayout.fault(
                f"parameter {name}", what, f"{held} elements", f"{prod(local[name])}", mend=mend
            )
            faults.append(fault)
    first = {id(param): name for name, param in engine.module.named_parameters()}
    every = {name: first[id(param)] for name, param in engine.module.named_parameters(remove_duplicate=False)}
    own = {name: Share(one.shape, one.ranks[grid.row.rank], one.replicated) for name, one in found.items()}
    return {name: own[owner] for name, owner in every.items() if owner in own}, faults


def _padded(engine: DeepSpeedEngine, grid: LiveGrid, checkpoint: ZeroCheckpoint) -> dict[str, Share]:
    """Vocabularies of which a run without tensor parallelism has more rows: those behind the saved ones are padding.

    As the run's own patterns or rules say, by whose size the saved one must be. A run that says nothing has no more
    rows than the saving run had with its padding: others may be words of its own, of which no file has anything.
    """
    model, saved = checkpoint.model, {name: one for name, one in checkpoint.divided.items() if one.vocabulary}
    shapes = {**{name: one.shape for name, one in model.module.items()}, **model.frozen_shapes, **model.trainable}
    shapes |= {name: one.shape for name, one in saved.items()}
    held = {name: param_shape(param) for name, param in engine.module.named_parameters(remove_duplicate=False)}
    more = {name: [own] for name, own in held.items() if own[:1] > shapes.get(name, own)[:1]}
    said = vocabularies(model, more, grid.row.rules, info=_info(engine)) if more else {}
    for name in more.keys() & saved.keys() - said.keys():
        own, size, room = held[name], saved[name].shape[0], sum(shard[0] for shard in saved[name].shards)
        if own[1:] == saved[name].shape[1:] and own[0] <= room:
            said[name] = divided(own, 0, [own[:1]], "saved", vocabulary=size)
            if not rank():
                logger.warning("%s: its rows behind the saved vocabulary of %d are padding, and zeros", name, size)
    return {name: Share(one.shape, one.ranks[0]) for name, one in said.items()}


def more_rows(checkpoint: ZeroCheckpoint, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The vocabularies of which `shapes` have more rows than were saved, and how many were."""
    saved = {name: one.shape for name, one in checkpoint.divided.items() if one.vocabulary and name in shapes}
    return {
        name: shape[0]
        for name, shape in saved.items()
        if shapes[name][1:] == shape[1:] and shapes[name][:1] > shape[:1]
    }


def _info(engine: DeepSpeedEngine) -> Mapping[str, object]:
    """What the model of this run says of how its ranks divide parameters."""
    info = getattr(engine.module, "universal_checkpoint_info", None)
    info = info() if callable(info) else info  # a method of Megatron-DeepSpeed's models
    return info if isinstance(info, dict) else {}


def divides_itself(engine: DeepSpeedEngine) -> bool:
    """Whether DeepSpeed has divided the parameters of this run (AutoTP)."""
    size = section(engine._config._param_dict, "tensor_parallel").get("autotp_size")
    return isinstance(size, int) and size > 1


def told_by_parameters(engine: DeepSpeedEngine, row: Row) -> Row:
    """The row with what this run's parameters tell of how they are divided: shapes of whole ones, and attributes.

    Of one rank all are whole; of AutoTP what bears no mark is (`_set_param_uc_meta`, module_inject/layers.py). Megatron
    sets attributes; a `partition_stride` of 1 is found on SwiGLU's two halves too, and tells nothing of dimension 0.
    """
    whole: dict[str, Shape] = {}
    live: dict[str, Rule | None] = {}
    marked = divides_itself(engine)
    for name, parameter in engine.module.named_parameters():
        said = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None) or {}
        if row.size == 1 or marked:
            shape = said.get("logical_shape")
            whole[name] = tuple(shape) if shape is not None else param_shape(parameter)
        dim, cut = getattr(parameter, "partition_dim", None), getattr(parameter, "tensor_model_parallel", None)
        if isinstance(dim, int) and isinstance(cut, bool):
            stride = getattr(parameter, "partition_stride", 1)
            one = Rule(name, replicated=True) if not cut else Rule(name, dim=dim, parts=stride)
            live[name] = one if not cut or dim or stride > 1 else None
    held = {name: param_shape(parameter) for name, parameter in engine.module.named_parameters()}
    return row._replace(whole=whole, live=live, maps=affine_maps(_info(engine)) if row.size > 1 else {}, held=held)


def _of_experts(engine: DeepSpeedEngine) -> Iterator[tuple[str, Share]]:
    """AutoEP's parameters, each of which has all experts of its layer that this rank has."""
    for name, parameter in engine.module.named_parameters():
        said = getattr(parameter, "ds_autoep_uc_meta", None)
        if said is None:
            continue
        shape = tuple(said["logical_shape"])
        yield name, Share(shape, expert_parts(shape, enumerate(said["local_experts"])))


def _sizes(parameter: object) -> Mapping[int, Sequence[int]]:
    """Along a dimension, the sizes of the ranks' shards, where AutoTP says them of what it gives no affine map of.

    Of embeddings (`_slice_embedding`, module_inject/auto_tp.py, 0.19.8).
    """
    said = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None) or {}
    dim, sizes = said.get("partition_dim"), said.get("partition_sizes")
    return {dim: sizes} if isinstance(dim, int) and isinstance(sizes, (list, tuple)) else {}


def _shards(mapped: Sequence[object], own: Shape, sizes: Mapping[int, Sequence[int]], grid: LiveGrid) -> list[Shape]:
    """The shapes of all ranks' shards: as the affine map or AutoTP's own sizes say, else alike.

    Where they are not, the whole is not as long as this rank takes it for, and the load is refused.
    """
    shapes = [own] * grid.row.size
    for dim, of_ranks in sizes.items():
        shapes = [(*own[:dim], size, *own[dim + 1 :]) for size in of_ranks]
    for entry in mapped:
        of_ranks = entry["ranks"] if isinstance(entry, Mapping) else {}
        said = [of_ranks.get(rank, of_ranks.get(str(rank))) for rank in range(grid.row.size)]
        shapes = [tuple(one["shard_shape"]) for one in said if one is not None]
        if grid.row.rank < len(shapes):
            shapes[grid.row.rank] = own
    return shapes
