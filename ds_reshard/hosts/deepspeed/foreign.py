"""A checkpoint of another format as a load of DeepSpeed asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.target import Saving
from ds_reshard.model.content import MASTER, WEIGHT, Content
from ds_reshard.model.layout import Layout
from ds_reshard.model.records import TensorRecord

SAME_BYTES = "masters\0"


def read_as_zero(content: Content, layout: Layout, files: Mapping[str, int]) -> ZeroCheckpoint:
    """The content as a ZeRO checkpoint whose tensors lie where those of the source do, in its `layout` and `files`.

    A weight that is its own master is two tensors of the same bytes: the master's family is the weight's, with
    SAME_BYTES before its name.
    """
    placements, shards = {}, dict(layout.shards)
    for key, held in content.tensors.items():
        place = layout[held.origin]
        family = place.family
        if key.kind == MASTER and held.origin.kind == WEIGHT:
            family = f"{SAME_BYTES}{place.family}"
            shards[family] = shards[place.family]
        tiles = tuple(tile._replace(key=key, family=family) for tile in place.tiles)
        placements[key] = place._replace(key=key, family=family, tiles=tiles)
    saving, facts = Saving(content=content), content.facts
    groups = [{name: saving.trained[name] for name in group.members} for group in saving.groups]
    module = {name: value for name, value in saving.module(None).items() if isinstance(value, TensorRecord)}
    model = ModelStates(
        path=content.folder,
        module=module,
        objects={},
        buffer_names=content.buffers,
        shared=dict(content.tied),
        entries=saving.entries,
        param_shapes=tuple(groups) if facts is not None else None,
        frozen_shapes={name: shape for name, (shape, _) in saving.frozen.items()} if facts is not None else {},
        frozen_fragments={},
        dp=saving.dp,
        version=saving.version,
    )
    return ZeroCheckpoint(
        listing=Listing(folder=content.folder, nbytes=files),
        model=model,
        optim=None,
        facts=facts and replace(facts, groups=saving.groups),
        layout=Layout(placements, shards),
        foreign=True,
    )
