"""Folders of torch.distributed.checkpoint, and accelerate's, as the door knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_reshard.errors import Fault, raise_faults
from ds_reshard.formats.dcp.checkpoint import list_dcp, open_dcp
from ds_reshard.formats.dcp.entries import ACCELERATE
from ds_reshard.formats.dcp.target import dcp_target
from ds_reshard.model.checkpoint import Checkpoint, Format, SavedCheckpoint
from ds_reshard.model.content import Content
from ds_reshard.model.target import ConversionRequest, Target


def _write(content: Content, asked: ConversionRequest, like: Checkpoint | None, faults: Sequence[Fault]) -> Target:
    raise_faults([*faults, *content.faults], subject=f"converting {content.folder} to {asked.to}")
    files = (content.ranks or 1) if asked.dp is None else asked.dp
    made = dcp_target(content, files, folders=ACCELERATE if asked.to == "accelerate" else None)
    return replace(made, notes=(*made.notes, *content.notes))


_WRITES = ("dcp", "accelerate")
DCP = Format(
    name="torch.distributed.checkpoint",
    list=list_dcp,
    open=lambda listing: SavedCheckpoint(open_dcp(listing.folder), listing.nbytes),
    open_weights=lambda listing: SavedCheckpoint(open_dcp(listing.folder, optimizer=False), listing.nbytes),
    writes=dict.fromkeys(_WRITES, _write),
    sized=frozenset(_WRITES),
)
