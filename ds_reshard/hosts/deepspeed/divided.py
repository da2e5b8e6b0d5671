"""Which parts of whole tensors this run's tensor-parallel rank has, where the checkpoint's sizes are others.

AutoTP says it in `module.universal_checkpoint_info` (module_inject/layers.py, 0.19.8), as it saves it; a model of an
`mpu` may, and rules of the user's say it of both sides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.rows import uncovered, unknown_fault
from ds_reshard.formats.zero.tensor_parallel import Division, divisions
from ds_reshard.hosts.deepspeed.grid import LiveGrid
from ds_reshard.hosts.deepspeed.live import Shape, param_shape

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def run_divisions(
    engine: DeepSpeedEngine, grid: LiveGrid, checkpoint: ZeroCheckpoint
) -> tuple[dict[str, Division], list[Fault]]:
    """How this run divides each parameter; nothing where it has one tensor-parallel rank, or as many as were saved."""
    if not checkpoint.rows or grid.row.size == 1:
        return {}, []
    info = getattr(engine.module, "universal_checkpoint_info", None)
    info = info if isinstance(info, dict) else {}
    own = {name: param_shape(param) for name, param in engine.module.named_parameters()}
    shards = {name: _shards(name, shape, info, grid) for name, shape in own.items()}
    found, unknown = divisions(shards, info, [rule._replace(owner=None) for rule in grid.row.rules])
    faults = [unknown_fault(name, misfit, "this run") for name, misfit in unknown.items()]
    for name, division in found.items():
        faults += uncovered(name, division, shards[name])
        held = sum(part.box.numel for part in division.ranks[grid.row.rank])
        if held != prod(own[name]) and not division.vocabulary:
            what = "has elements in this run that are no part of it, which would be left as they are"
            mend = "resume with the tensor-parallel size that was saved, or with one"
            fault = UnsupportedLayout.fault(
                f"parameter {name}", what, f"{held} elements", f"{prod(own[name])}", mend=mend
            )
            faults.append(fault)
    first = {id(param): name for name, param in engine.module.named_parameters()}
    every = {name: first[id(param)] for name, param in engine.module.named_parameters(remove_duplicate=False)}
    return {name: found[owner] for name, owner in every.items() if owner in found}, faults


def _shards(name: str, own: Shape, info: Mapping[str, object], grid: LiveGrid) -> list[Shape]:
    """The shapes of all ranks' shards: as the affine map says, else alike.

    Where they are not, the whole is not as long as this rank takes it for, and the load is refused.
    """
    shapes = [own] * grid.row.size
    maps = info.get("affine_map")
    params = maps.get("params") if isinstance(maps, Mapping) else None
    for pattern, entry in params.items() if isinstance(params, Mapping) else ():
        if re.fullmatch(pattern, name):
            of_ranks = entry["ranks"]
            said = [of_ranks.get(rank, of_ranks.get(str(rank))) for rank in range(grid.row.size)]
            shapes = [tuple(one["shard_shape"]) for one in said if one is not None]
            if grid.row.rank < len(shapes):
                shapes[grid.row.rank] = own
    return shapes
