"""Which parts of whole tensors this rank has: of what tensor-parallel ranks divide anew, and of AutoEP's experts.

Rules of the user's say it of both sides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod

from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
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
from ds_reshard.hosts.deepspeed.engine import Run
from ds_reshard.hosts.deepspeed.grid import LiveGrid
from ds_reshard.model.live_run import Share
from ds_reshard.model.region import Shape
from ds_reshard.operations.ranks import rank

logger = logging.getLogger("ds_reshard")


def run_shares(run: Run, checkpoint: ZeroCheckpoint) -> tuple[dict[str, Share], list[Fault]]:
    """What this rank has of the parameters that others share with it: none where the checkpoint has the same parts."""
    if not checkpoint.rows or run.grid.row.size == 1:
        return {**run.shares, **_padded(run, checkpoint)}, []
    grid, local = run.grid, run.module.shapes()
    maps = affine_maps(run.info)
    mapped = Patterns(maps)
    shards = {
        name: _shards([maps[one] for one in mapped.of(name)], shape, run.shard_sizes.get(name, {}), grid)
        for name, shape in local.items()
    }
    row, rules = grid.row, [rule._replace(owner=None) for rule in grid.row.rules]
    found, unknown = divisions(shards, Evidence(run.info, run.autotp, row.whole, row.live), rules)
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
    own = {name: Share(one.shape, one.ranks[grid.row.rank], one.replicated) for name, one in found.items()}
    return {
        name: own[owner] for owner, one in run.module.parameters().items() if owner in own for name in one.names
    }, faults


def _padded(run: Run, checkpoint: ZeroCheckpoint) -> dict[str, Share]:
    """Vocabularies of which a run without tensor parallelism has more rows: those behind the saved ones are padding.

    As the run's own patterns or rules say, by whose size the saved one must be. A run that says nothing has no more
    rows than the saving run had with its padding: others may be words of its own, of which no file has anything.
    """
    model, saved = checkpoint.model, {name: one for name, one in checkpoint.divided.items() if one.vocabulary}
    shapes = {**{name: one.shape for name, one in model.module.items()}, **model.frozen_shapes, **model.trainable}
    shapes |= {name: one.shape for name, one in saved.items()}
    held = {name: one.shape for one in run.module.tensors for name in one.names}
    more = {name: [own] for name, own in held.items() if own[:1] > shapes.get(name, own)[:1]}
    said = vocabularies(model, more, run.grid.row.rules, info=run.info) if more else {}
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
