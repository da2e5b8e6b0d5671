"""A checkpoint that is opened whole, for tools that read all of it."""

from __future__ import annotations

from ds_reshard.errors import raise_faults
from ds_reshard.formats.zero.checkpoint import open_checkpoint
from ds_reshard.formats.zero.crosscheck import compare_prints, compare_signatures
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.model.index import Index


class Source:
    """Every shard is opened and compared with the others; no tensor's bytes are read.

    `states=False` passes over scalar states other than the step, which an optimizer may keep per rank. Raises what
    a load raises for files that are missing, damaged or of several saves.
    """

    def __init__(self, listing: Listing, *, states: bool = True) -> None:
        self.checkpoint = open_checkpoint(listing, optimizer=True)
        shards = ZeroShards(checkpoint=self.checkpoint)
        self.index = Index(self.checkpoint.layout, shards)
        for family in {placement.family for placement in self.checkpoint.layout.placements.values()}:
            for shard in range(self.checkpoint.layout.shards[family]):
                self.index.open(family, shard)
        mixed = compare_signatures(shards.signatures, listing.folder, states=states)
        mixed += compare_prints(shards.prints, listing.folder)
        raise_faults([*self.index.faults, *mixed], subject=f"checkpoint {listing.folder}")
