"""A checkpoint of any format, opened for a tool: its index, its facts, and what its format alone has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_reshard.containers.pickle_rules import UNSAFE
from ds_reshard.errors import Fault, ReadFailed, raise_faults
from ds_reshard.formats.dcp.checkpoint import is_dcp, list_dcp, open_dcp
from ds_reshard.formats.fsdp.checkpoint import open_fsdp
from ds_reshard.formats.fsdp.files import is_fsdp, list_fsdp
from ds_reshard.formats.nanotron.checkpoint import NanotronCheckpoint
from ds_reshard.formats.nanotron.checkpoint import open_checkpoint as open_nanotron
from ds_reshard.formats.nanotron.names import NanotronListing
from ds_reshard.formats.nanotron.shards import NanotronShards
from ds_reshard.formats.zero.checkpoint import MODEL, OPTIM, ZeroCheckpoint, open_checkpoint
from ds_reshard.formats.zero.crosscheck import compare_prints, compare_signatures
from ds_reshard.formats.zero.names import Listing
from ds_reshard.formats.zero.shards import ZeroShards
from ds_reshard.model.codec import ElementType
from ds_reshard.model.facts import OptimizerFacts
from ds_reshard.model.index import Index
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.saved import SavedListing, SavedState
from ds_reshard.operations.pickles import scan_files, walk

Found = Listing | NanotronListing | SavedListing
"""The files of one checkpoint, of the format that their names are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFormat:
    """A format whose checkpoints are folders that tell of themselves: how one is known, listed and opened."""

    known: Callable[[str], bool]
    files: Callable[[str], SavedListing]
    open: Callable[[str], SavedState]


SAVED_FORMATS = (
    SavedFormat(known=is_dcp, files=list_dcp, open=open_dcp),
    SavedFormat(known=is_fsdp, files=list_fsdp, open=open_fsdp),
)


def list_saved(folder: str) -> SavedListing | None:
    """The files of a folder of one of `SAVED_FORMATS`, None where it is of none; raises ReadFailed."""
    try:
        return next((one.files(folder) for one in SAVED_FORMATS if one.known(folder)), None)
    except OSError as error:
        raise ReadFailed(f"{folder}: cannot be listed: {error}") from error


def open_saved(folder: str) -> SavedState:
    """The checkpoint in a folder of one of `SAVED_FORMATS`; raises what its format raises."""
    return next(one.open(folder) for one in SAVED_FORMATS if one.known(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The shards of a source, opened when they are wanted; `compare` tells which of the opened are of other saves.

    `zero` are those of a ZeRO checkpoint.
    """

    index: Index
    compare: Callable[[], Sequence[Fault]]
    zero: ZeroShards | None = None


class Source:
    """One of `zero`, `nanotron` and `saved` is the checkpoint, by its format.

    `states=False` passes over scalar states of a ZeRO checkpoint other than the step, which an optimizer may keep per
    rank. Every shard is opened and compared with the others, no tensor's bytes are read but of small replicas; with
    `whole=False` none is opened: `shards` gives them. Raises what a load raises for files that are missing, damaged or
    of several saves.
    """

    def __init__(self, found: Found, *, states: bool = True, whole: bool = True) -> None:
        self.folder = found.folder
        self.found = found
        self._states = states
        self.zero: ZeroCheckpoint | None = None
        self.nanotron: NanotronCheckpoint | None = None
        self.saved: SavedState | None = None
        if isinstance(found, NanotronListing):
            self.nanotron = open_nanotron(found)
        elif isinstance(found, SavedListing):
            self.saved = open_saved(found.folder)
        else:
            self.zero = open_checkpoint(found, optimizer=True)
        self._shards = self.shards()
        self.index = self._shards.index
        if whole:
            _open_all(self.index)
            for rank in self.zero.listing.model if self.zero is not None else ():
                self.open_model(rank)
            self.refuse()
            self._refuse_unsafe()

    @property
    def _opened(self) -> ZeroCheckpoint | NanotronCheckpoint | SavedState:
        opened = self.zero or self.nanotron or self.saved
        assert opened is not None
        return opened

    def shards(self) -> Shards:
        """The shards, none of them opened yet."""
        if self.zero is not None:
            return self._zero_shards(self.zero)
        if self.nanotron is not None:
            pieces = NanotronShards(checkpoint=self.nanotron)
            index = Index(self.layout, pieces)
            return Shards(index=index, compare=lambda: [] if index.faults else list(pieces.compare()))
        assert self.saved is not None
        return Shards(index=Index(self.layout, self.saved), compare=list)

    def _zero_shards(self, checkpoint: ZeroCheckpoint) -> Shards:
        pieces = ZeroShards(checkpoint=checkpoint)

        def compare() -> list[Fault]:
            mixed = compare_signatures(pieces.signatures, self.folder, states=self._states)
            return [*mixed, *compare_prints(pieces.prints, self.folder)]

        return Shards(index=Index(self.layout, pieces), compare=compare, zero=pieces)

    def open_first(self) -> None:
        """Open the first shards of a ZeRO checkpoint, with which those that are opened later are compared."""
        if self.zero is not None and self.zero.optim is not None:
            self.index.open(OPTIM, 0)
        self.open_model(0)

    def open_model(self, rank: int) -> None:
        """Open the model file of a saved rank to compare it: stage 3 has one for each, often without any tensor."""
        if self.zero is not None and self.zero.listing.partitioned_model and rank < self.zero.dp:
            self.index.open(MODEL, rank)

    def refuse(self) -> None:
        """Raise what is wrong with the shards of `index` that were opened, or with them together."""
        raise_faults([*self.index.faults, *self._shards.compare()], subject=f"checkpoint {self.folder}")

    def _refuse_unsafe(self) -> None:
        """Raise UnsafePickle where a file of the folder acts that is not read here: another loader may read it."""
        others = scan_files(walk(self.folder, []))
        raise_faults([fault for fault in others.faults if fault.error in UNSAFE], subject=f"checkpoint {self.folder}")

    @property
    def zero_shards(self) -> ZeroShards | None:
        """The files of a ZeRO checkpoint's ranks, as `index` opens them."""
        return self._shards.zero

    @property
    def layout(self) -> Layout:
        return self._opened.layout

    @property
    def facts(self) -> OptimizerFacts | None:
        return self._opened.facts

    @property
    def dp(self) -> int:
        """The data-parallel size of the saving run; where no file tells, 1."""
        if self.zero is not None:
            return self.zero.dp
        return self.nanotron.metadata.dp if self.nanotron is not None else (self.saved and self.saved.ranks) or 1

    @property
    def shard_names(self) -> list[str]:
        """The names of a ZeRO checkpoint's shards, in the order of their ranks."""
        if self.zero is None:
            return []
        listing = self.zero.listing
        return [files[rank] for files in (listing.model, listing.optim) for rank in sorted(files)]

    @property
    def files(self) -> Mapping[str, int]:
        """The files that a conversion may read, by their paths below the folder; in bytes."""
        if self.zero is None:
            return self.found.nbytes
        listing, universal = self.zero.listing, self.zero.universal
        names = (*self.shard_names, *(universal.nbytes if universal is not None else ()))
        return {name: listing.nbytes[name] for name in names}

    @property
    def notes(self) -> Iterator[str]:
        """What is in no layout, or stands for more than it is."""
        if self.saved is not None:
            yield from self.saved.notes
        elif self.zero is not None:
            yield from _zero_notes(self.zero)

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
        """Whether a weight is kept as its master alone: by ZeRO 3, and by FSDP."""
        if key.kind != "weight":
            return False
        if self.saved is not None:
            return self.master(key.name) is not None
        if self.zero is None or not self.zero.listing.partitioned_model:
            return False
        return self.shared.get(key.name, key.name) in self.zero.model.trainable

    def master(self, name: str) -> TensorKey | None:
        """The tensor that holds a parameter's fp32 master, None where there is none: of FSDP, the weight itself."""
        for kind in ("fp32", "weight") if self.saved is not None else ("fp32",):
            key = TensorKey(name=self.shared.get(name, name), kind=kind)
            if key in self.layout and self.layout[key].dtype is ElementType.FLOAT32:
                return key
        return None


def _open_all(index: Index) -> None:
    for family in {placement.family for placement in index.layout.placements.values()}:
        for shard in range(index.layout.shards[family]):
            index.open(family, shard)


def _zero_notes(checkpoint: ZeroCheckpoint) -> Iterator[str]:
    if checkpoint.stage == 0:
        yield "a ZeRO 0 checkpoint names no tensor of its optimizer: weights and buffers only"
    if checkpoint.listing.partitioned_model and checkpoint.model.buffer_names and checkpoint.dp > 1:
        yield "each rank of ZeRO 3 saves buffers of its own: those of the first rank are shown"
    for number, partition in enumerate(checkpoint.optim.partitions if checkpoint.optim else ()):
        for kind, shape in partition.unfollowed.items():
            yield f"{kind} of flat buffer {number} ({shape}) is not cut as the parameters are: left out"
