"""A checkpoint that is opened whole, for tools that read all of it."""

from __future__ import annotations

from collections.abc import Mapping

from ds_reshard.errors import Fault, raise_faults
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.nanotron.checkpoint import open_checkpoint as open_nanotron
from ds_reshard.formats.nanotron.names import NanotronListing
from ds_reshard.formats.nanotron.shards import NanotronShards
from ds_reshard.formats.zero.checkpoint import ZeroCheckpoint, open_checkpoint
from ds_reshard.formats.zero.crosscheck import compare_prints, compare_signatures
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.model.facts import OptimizerFacts
from ds_reshard.model.index import Index
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.records import TensorRecord

Found = Listing | NanotronListing
"""The files of one checkpoint, of the format that their names are of."""


class Source:
    """Every shard is opened and compared with the others; no tensor's bytes are read but of small replicas.

    `zero` or `nanotron` is the checkpoint, by its format. `states=False` passes over scalar states of a ZeRO
    checkpoint other than the step, which an optimizer may keep per rank. Raises what a load raises for files that are
    missing, damaged or of several saves.
    """

    def __init__(self, found: Found, *, states: bool = True) -> None:
        self.folder = found.folder
        self.zero: ZeroCheckpoint | None = None
        self.nanotron: NanotronCheckpoint | None = None
        mixed = self._open_nanotron(found) if isinstance(found, NanotronListing) else self._open_zero(found, states)
        raise_faults([*self.index.faults, *mixed], subject=f"checkpoint {found.folder}")

    def _open_zero(self, listing: Listing, states: bool) -> list[Fault]:
        self.zero = open_checkpoint(listing, optimizer=True)
        shards = ZeroShards(checkpoint=self.zero)
        self.index = _opened(Index(self.zero.layout, shards))
        mixed = compare_signatures(shards.signatures, listing.folder, states=states)
        return [*mixed, *compare_prints(shards.prints, listing.folder)]

    def _open_nanotron(self, listing: NanotronListing) -> list[Fault]:
        self.nanotron = open_nanotron(listing)
        shards = NanotronShards(checkpoint=self.nanotron)
        self.index = _opened(Index(self.nanotron.layout, shards))
        return [] if self.index.faults else list(shards.compare())

    @property
    def facts(self) -> OptimizerFacts | None:
        return self.zero.facts if self.zero is not None else self.nanotron.facts if self.nanotron is not None else None

    @property
    def dp(self) -> int:
        """The data-parallel size of the saving run."""
        return self.zero.dp if self.zero is not None else self.nanotron.metadata.dp if self.nanotron is not None else 1

    @property
    def shards(self) -> list[str]:
        """The names of a ZeRO checkpoint's shards, in the order of their ranks."""
        if self.zero is None:
            return []
        listing = self.zero.listing
        return [files[rank] for files in (listing.model, listing.optim) for rank in sorted(files)]

    @property
    def files(self) -> Mapping[str, int]:
        """The files that a conversion may read, by their paths below the folder; in bytes."""
        if self.nanotron is not None:
            return self.nanotron.listing.nbytes
        assert self.zero is not None
        listing, universal = self.zero.listing, self.zero.universal
        names = (*self.shards, *(universal.nbytes if universal is not None else ()))
        return {name: listing.nbytes[name] for name in names}

    @property
    def shared(self) -> Mapping[str, str]:
        """The names of tied parameters that are saved under another one."""
        return self.zero.model.shared if self.zero is not None else {}

    @property
    def buffer_names(self) -> frozenset[str]:
        return self.zero.model.buffer_names if self.zero is not None else frozenset()

    def strided(self) -> dict[str, TensorRecord]:
        """Entries of the module that are not row-major in their file, and so in no layout."""
        module = self.zero.model.module if self.zero is not None else {}
        return {name: tensor for name, tensor in module.items() if tensor.numel and not tensor.contiguous}

    def unstored(self, key: TensorKey) -> bool:
        """Whether a weight is kept as its master alone (ZeRO 3)."""
        if self.zero is None or key.kind != "weight" or not self.zero.listing.partitioned_model:
            return False
        return self.shared.get(key.name, key.name) in self.zero.model.trainable


def _opened(index: Index) -> Index:
    for family in {placement.family for placement in index.layout.placements.values()}:
        for shard in range(index.layout.shards[family]):
            index.open(family, shard)
    return index
