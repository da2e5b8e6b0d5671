"""Folders of torch.distributed.checkpoint, and accelerate's, as the door knows them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ds_reshard.containers import folders
from ds_reshard.containers.dcp_directory import METADATA
from ds_reshard.errors import Fault, raise_faults
from ds_reshard.formats.dcp.checkpoint import is_dcp, list_dcp, open_dcp
from ds_reshard.formats.dcp.entries import ACCELERATE
from ds_reshard.formats.dcp.target import dcp_target
from ds_reshard.model.checkpoint import Checkpoint, Format, SavedCheckpoint
from ds_reshard.model.content import Content
from ds_reshard.model.target import Asked, Target


class OpenedDcp(SavedCheckpoint):
    def left_out(self) -> tuple[str, ...]:
        """accelerate's further models, its scheduler, and what `save_state` and a Trainer put there."""
        known = {METADATA, "ds_reshard.json", *(os.path.dirname(name) for name in self.files)}
        names = [name for name in folders.names(self.folder) if name not in known and not name.endswith(".distcp")]
        return (f"left out, as nothing here reads them: {', '.join(names)}",) if names else ()

    def uncompared(self, name: str) -> Iterator[str]:
        yield from super().uncompared(name)
        yield from (f"{name}: {told}" for told in self.left_out())


def _write(content: Content, asked: Asked, like: Checkpoint | None, faults: Sequence[Fault]) -> Target:
    raise_faults([*faults, *content.faults], subject=f"converting {content.folder} to {asked.to}")
    files = (content.ranks or 1) if asked.dp is None else asked.dp
    made = dcp_target(content, files, folders=ACCELERATE if asked.to == "accelerate" else None)
    return replace(made, notes=(*made.notes, *content.notes))


_WRITES = ("dcp", "accelerate")
DCP = Format(
    name="torch.distributed.checkpoint",
    list=lambda folder: list_dcp(folder) if is_dcp(folder) else None,
    open=lambda listing: OpenedDcp(open_dcp(listing.folder), listing.nbytes),
    writes=dict.fromkeys(_WRITES, _write),
    sized=frozenset(_WRITES),
)
