"""A folder of another format, as a load of DeepSpeed needs it: its content under the names of this run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ds_reshard.errors import Fault, UnsupportedLayout, raise_faults
from ds_reshard.formats.zero.checkpoint import AnyCheckpoint
from ds_reshard.formats.zero.content import optimizer_faults
from ds_reshard.formats.zero.door import OpenedZero
from ds_reshard.formats.zero.model_states import ModelStates
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.target import Saving
from ds_reshard.model.checkpoint import Checkpoint, Shards
from ds_reshard.model.content import MASTER, WEIGHT, Content
from ds_reshard.model.index import Extent, Index
from ds_reshard.model.layout import Layout
from ds_reshard.model.records import TensorRecord
from ds_reshard.operations.name_map import NameMap
from ds_reshard.operations.proof import unproved
from ds_reshard.operations.shape_map import Coming, ShapeMap
from ds_reshard.operations.source import Found, find_listing, open_checkpoint

logger = logging.getLogger("ds_reshard")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCheckpoint(AnyCheckpoint):
    """A checkpoint of another format, with or without its `optimizer`; rank 0 makes it and broadcasts it.

    `saved_stage` is the ZeRO stage if DeepSpeed saved the folder, otherwise the name of the format.
    """

    optimizer: bool
    saved_stage: int | str

    @property
    def displayed_stage(self) -> int | str:
        return self.saved_stage

    def open(self) -> Shards:
        """Open the files on this rank; tensors have the names of this run."""
        source = open_checkpoint(find_listing(self.listing.folder, None), whole=False, optimizer=self.optimizer)
        return Shards(index=Index(self.layout, _Source(source)), compare=source.opened.compare)


_MASTER_FAMILY = "masters\0"
"""The prefix of families whose weights are also read as masters."""


class _Source(NamedTuple):
    """The shards of a checkpoint, each under its family's name and under that of its masters."""

    checkpoint: Checkpoint

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        extents = self.checkpoint.index.open(family.removeprefix(_MASTER_FAMILY), shard)
        raise_faults(self.checkpoint.index.faults, subject=f"loading {self.checkpoint.folder}")
        return extents


def layout_of(content: Content, source: Layout) -> Layout:
    """Return the layout of a content. A weight that is its own master is placed twice, in two families.

    One that is saved as its master alone has no place of its own.
    """
    placements, shards = {}, dict(source.shards)
    for key, tensor in content.tensors.items():
        if key.kind == WEIGHT and tensor.origin.kind == MASTER:
            continue
        placement = source[tensor.origin]
        prefix = _MASTER_FAMILY if key.kind == MASTER and tensor.origin.kind == WEIGHT else ""
        shards |= {f"{prefix}{part.family}": shards[part.family] for part in placement.parts}
        tiles = tuple(tile._replace(key=key, family=f"{prefix}{tile.family}") for tile in placement.tiles)
        placements[key] = placement._replace(key=key, family=f"{prefix}{placement.family}", tiles=tiles)
    return Layout(placements, shards)


def read_foreign(
    found: Found, *, optimizer: bool, names: NameMap | ShapeMap | None, run: Coming
) -> ForeignCheckpoint | None:
    """Open a folder under the names of this run; None for DeepSpeed's own folder if it has these names already.

    Raises one error with every reason why no DeepSpeed run can resume from it.
    """
    source = open_checkpoint(found, whole=False, optimizer=optimizer)
    own, saved_names = isinstance(found.listing, Listing), {key.name for key in source.layout.placements}
    if own and all(name in run.names for name in saved_names - source.extra_tensors.keys()):
        return None
    content, places, faults = source.content(), source.layout, list[Fault]()
    if names is not None:
        content, places, found_faults, _ = names.apply(content, places, run)
        faults += found_faults
    faults += [*content.faults, *optimizer_faults(content), *_resume_faults(content)] if optimizer else []
    faults += unproved(source, None if optimizer else ()) if not faults else []
    raise_faults([*source.index.faults, *faults], subject=f"loading {found.folder}")
    for note in content.notes:
        logger.warning("%s: %s", found.folder, note)
    listing = Listing(folder=content.folder, nbytes=source.files)
    layout, facts = layout_of(content, places), content.facts
    facts = facts and replace(facts, groups=Saving(content=content).groups)
    stage = source.zero.displayed_stage if isinstance(source, OpenedZero) else found.format.name
    return ForeignCheckpoint(
        listing=listing, model=model_of(content), layout=layout, facts=facts, optimizer=optimizer, saved_stage=stage
    )


def model_of(content: Content) -> ModelStates:
    """Return the model states that a DeepSpeed model file would have; the tensors have no file."""
    saving, has_optimizer = Saving(content=content), content.facts is not None
    weights = content.weights
    groups = [{name: weights[name].shape for name in group.members if name in weights} for group in saving.groups]
    return ModelStates(
        path=content.folder,
        entries={**saving.entries, "module": dict(content.records)},  # extra states are read from there
        module={name: value for name, value in saving.module(None).items() if isinstance(value, TensorRecord)},
        objects={},
        buffer_names=content.buffers,
        param_shapes=tuple(groups) if has_optimizer else None,
        frozen_shapes={name: shape for name, (shape, _) in saving.frozen.items()} if has_optimizer else {},
        frozen_fragments={},
        shared=dict(content.tied),
        dp=saving.dp,
        version=saving.version,
    )


def _resume_faults(content: Content) -> Iterator[Fault]:
    """Yield a fault if the content lacks what a load with optimizer states needs."""
    if content.facts is None:
        mend = "pass --no-load-optim, or load_optimizer_states=False, for the weights alone"
        yield UnsupportedLayout.fault(content.folder, "holds no optimizer", mend=mend)
    elif content.steps is None and not any("step" in states for states in content.facts.scalars.values()):
        what = "does not tell how many steps were made, and DeepSpeed counts on from there"
        mend = 'add trainer_state.json with {"global_step": N} to the files of plain PyTorch; or pass '
        mend += "--no-load-optim, or load_optimizer_states=False, for the weights alone"
        yield UnsupportedLayout.fault(content.folder, what, mend=mend)
