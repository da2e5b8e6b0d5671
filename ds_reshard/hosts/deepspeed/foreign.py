"""A folder of another format as a load of DeepSpeed takes it: its content, under the names of this run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import AnyCheckpoint
from ds_reshard.formats.zero.content import optimizer_faults
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.target import Saving
from ds_reshard.model.checkpoint import Checkpoint, Shards
from ds_reshard.model.content import MASTER, WEIGHT, Content
from ds_reshard.model.index import Extent, Index
from ds_reshard.model.layout import Layout
from ds_reshard.model.records import TensorRecord
from ds_reshard.operations.name_map import read_name_map
from ds_reshard.operations.proof import unproved
from ds_reshard.operations.source import Found, find_listing, open_checkpoint

logger = logging.getLogger("ds_reshard")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCheckpoint(AnyCheckpoint):
    """A checkpoint of another format, which rank 0 tells, with its `optimizer` or without; no file is DeepSpeed's."""

    optimizer: bool

    def open(self) -> Shards:
        """This rank's view of the files, under the names of this run."""
        source = open_checkpoint(find_listing(self.listing.folder, None), whole=False, optimizer=self.optimizer)
        return Shards(index=Index(self.layout, _Source(source)), compare=source.opened.compare)


_MASTER_FAMILY = "masters\0"
"""What begins the names of families whose bytes are read as masters beside the weights that they are."""


class _Source(NamedTuple):
    """The shards of a checkpoint, each also as the masters in it."""

    checkpoint: Checkpoint

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        found = self.checkpoint.index.open(family.removeprefix(_MASTER_FAMILY), shard)
        raise_faults(self.checkpoint.index.faults, subject=f"loading {self.checkpoint.folder}")
        return found


def layout_of(content: Content, source: Layout) -> Layout:
    """Where a content's tensors lie. A weight that is its own master is two of the same bytes, in two families."""
    placements, shards = {}, dict(source.shards)
    for key, held in content.tensors.items():
        place, family = source[held.origin], source[held.origin].family
        if key.kind == MASTER and held.origin.kind == WEIGHT:
            family = f"{_MASTER_FAMILY}{family}"
            shards[family] = shards[place.family]
        tiles = tuple(tile._replace(key=key, family=family) for tile in place.tiles)
        placements[key] = place._replace(key=key, family=family, tiles=tiles)
    return Layout(placements, shards)


def read_foreign(found: Found, *, optimizer: bool, names: str | Mapping[str, object] | None) -> ForeignCheckpoint:
    """A folder of another format; every reason why no run of DeepSpeed goes on from it, in one error."""
    source = open_checkpoint(found, whole=False, optimizer=optimizer)
    content, renamed = source.content(), read_name_map(names) if names is not None else None
    faults = list(renamed.faults(content)) if renamed is not None else []
    content = renamed.applied(content) if renamed is not None else content
    faults += [*content.faults, *optimizer_faults(content), *_resume_faults(content)] if optimizer else []
    faults += unproved(source, None if optimizer else ()) if not faults else []
    raise_faults([*source.index.faults, *faults], subject=f"loading {found.folder}")
    for note in content.notes:
        logger.warning("%s: %s", found.folder, note)
    listing = Listing(folder=content.folder, nbytes=source.files)
    layout, facts = layout_of(content, source.layout), content.facts
    facts = facts and replace(facts, groups=Saving(content=content).groups)
    return ForeignCheckpoint(listing=listing, model=model_of(content), layout=layout, facts=facts, optimizer=optimizer)


def model_of(content: Content) -> ModelStates:
    """What a model file of DeepSpeed would say of the same state; its tensors lie in no file."""
    saving, trains = Saving(content=content), content.facts is not None
    weights = content.weights
    groups = [{name: weights[name].shape for name in one.members if name in weights} for one in saving.groups]
    return ModelStates(
        path=content.folder,
        entries={**saving.entries, "module": dict(content.records)},  # extra states are read from there
        module={name: one for name, one in saving.module(None).items() if isinstance(one, TensorRecord)},
        objects={},
        buffer_names=content.buffers,
        param_shapes=tuple(groups) if trains else None,
        frozen_shapes={name: shape for name, (shape, _) in saving.frozen.items()} if trains else {},
        frozen_fragments={},
        shared=dict(content.tied),
        dp=saving.dp,
        version=saving.version,
    )


def _resume_faults(content: Content) -> Iterator[Fault]:
    """What a run that goes on with the optimizer wants to be told."""
    if content.facts is None:
        mend = "pass --no-load-optim, or load_optimizer_states=False, for the weights alone"
        yield UnsupportedLayout.fault(content.folder, "holds no optimizer", mend=mend)
    elif content.steps is None and not any("step" in states for states in content.facts.scalars.values()):
        what = "tells nowhere how many steps were made, and DeepSpeed counts on from there"
        mend = 'say it beside plain PyTorch\'s files, trainer_state.json with {"global_step": N}; or pass '
        mend += "--no-load-optim, or load_optimizer_states=False, for the weights alone"
        yield UnsupportedLayout.fault(content.folder, what, mend=mend)
