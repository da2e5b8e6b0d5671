"""A checkpoint of a format that has no facts of its own beside what every format has: torch's, EasyR1's and verl's.

Its weights are the masters of its optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol
from zlib import crc32

from ds_reshard.errors import UnsupportedLayout
from ds_reshard.model.checkpoint import Checkpoint, Format, Shards, Writer
from ds_reshard.model.codec import ElementType
from ds_reshard.model.content import MASTER, SCHEDULER, WEIGHT, Content, Held, schedule_of
from ds_reshard.model.facts import OptimizerFacts
from ds_reshard.model.index import Extent, Index
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.model.records import TensorRecord, new_tensor
from ds_reshard.model.region import Box, Region

_RUNNING = ("running_mean", "running_var")
_ZEROS = memoryview(bytes(1 << 20))


class SavedState(Protocol):
    """What a format tells when it is opened, and the source of its shards.

    `beside` are the tensors that are neither the model's nor the optimizer's, by their names in the layout, with the
    keys that lead to them; `objects` are the values beside the tensors and the optimizer, by the keys that lead to
    them. `ranks` is the number of processes that saved it, None where no file tells; `notes` say what is in no layout.
    Weights of an optimizer's parameters are its masters.
    """

    @property
    def folder(self) -> str: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def facts(self) -> OptimizerFacts | None: ...
    @property
    def objects(self) -> Mapping[tuple[object, ...], object]: ...
    @property
    def beside(self) -> Mapping[str, tuple[object, ...]]: ...
    @property
    def ranks(self) -> int | None: ...
    @property
    def notes(self) -> Sequence[str]: ...
    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file of such a checkpoint; `role` as in `inspect`."""

    nbytes: int
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedListing:
    """The files of one such checkpoint, by their paths below its folder; `format` and `writer` are for people.

    `archives` reads which parts of them are files of torch.save; a file that is not there is one as a whole, or none.
    """

    format: str
    writer: str
    folder: str
    tag: str
    files: Mapping[str, SavedFile]
    archives: Callable[[], Mapping[str, tuple[tuple[int, int], ...]]] = dict

    @property
    def nbytes(self) -> Mapping[str, int]:
        return {name: file.nbytes for name, file in self.files.items()}


class SavedCheckpoint(Checkpoint):
    """Such a checkpoint, opened."""

    framework = "torch"

    def __init__(self, state: SavedState, files: Mapping[str, int]) -> None:
        self.state = state
        self.folder, self.layout, self.facts, self.ranks = state.folder, state.layout, state.facts, state.ranks
        self.beside, self.objects, self.notes, self.files = state.beside, state.objects, state.notes, files

    def shards(self) -> Shards:
        return Shards(index=Index(self.layout, self.state))

    def unstored(self, key: TensorKey) -> bool:
        return key.kind == WEIGHT and self.master(key.name) is not None

    def master(self, name: str) -> TensorKey | None:
        keys = [TensorKey(name=name, kind=kind) for kind in (MASTER, WEIGHT)]
        found = (key for key in keys if key in self.layout and self.layout[key].dtype is ElementType.FLOAT32)
        return next(found, None)

    def content(self) -> Content:
        """All of it; equal weights without states are tied ones."""
        layout, facts = self.layout, self.facts
        scalars = facts.scalars if facts is not None else {}
        tied = dict(self._tied())
        tensors: dict[TensorKey, Held] = {}
        for key, place in layout.placements.items():
            if key.kind == WEIGHT and key.name in tied:
                continue
            held = tensors[key] = Held(shape=place.shape, dtype=place.dtype, origin=key)
            trained = len(layout.kinds(key.name)) > 1 or key.name in scalars
            if key.kind == WEIGHT and trained and place.dtype is ElementType.FLOAT32 and key.name not in self.beside:
                tensors[TensorKey(name=key.name, kind=MASTER)] = held
        weights = {
            key.name: held for key, held in tensors.items() if key.kind == WEIGHT and key.name not in self.beside
        }
        mend = "--to safetensors for the weights"
        content = Content(
            folder=self.folder,
            ranks=self.ranks,
            tensors=tensors,
            facts=facts,
            tied=tied,
            buffers=frozenset(_buffers(weights)),
            beside=self.beside,
            records=dict(self._whole()),
            objects=self.objects,
            faults=tuple(UnsupportedLayout.fault(self.folder, note, mend=mend) for note in self.notes),
            notes=self.left_out(),
        )
        groups = len(facts.groups) if facts is not None else 0
        return replace(content, schedule=schedule_of(content.entries.get(SCHEDULER), groups))

    def left_out(self) -> tuple[str, ...]:
        """Files that are in no content."""
        return ()

    def _extents(self, key: TensorKey) -> list[Extent]:
        shape = self.layout[key].shape
        region = Region(box=Box.whole(shape), start=0, stop=prod(shape))
        return [fragment.extent for _, fragment in self.index.locate(key, region)]

    def _whole(self) -> Iterator[tuple[str, TensorRecord]]:
        """Weights without states that lie in one piece, as what torch would have saved of each."""
        for key, placement in self.layout.placements.items():
            if key.kind == WEIGHT and len(self.layout.kinds(key.name)) == 1:
                extents = self._extents(key)
                if len(extents) == 1 and extents[0].record.nbytes == placement.numel * placement.dtype.itemsize:
                    record = extents[0].record
                    made = new_tensor(str(record.byte_offset), placement.shape, placement.dtype)
                    place = replace(made.storage, path=record.path, byte_offset=record.byte_offset, crc32=record.crc32)
                    yield key.name, replace(made, storage=place)

    def _tied(self) -> Iterator[tuple[str, str]]:
        """Weights without states whose bytes are those of a trained one, by the checksums in their files.

        `get_state_dict` saves tied weights under each of their names. Zeros are no sign of it.
        """
        owners: dict[object, str] = {}
        left: list[TensorKey] = []
        for key in self.layout.placements:
            if key.kind == WEIGHT and len(self.layout.kinds(key.name)) > 1:
                owners.setdefault(self._sums(key), key.name)
            elif key.kind == WEIGHT:
                left.append(key)
        for key in left:
            sums = self._sums(key)
            if sums in owners and not all(crc == _of_zeros(nbytes) for _, nbytes, crc in sums[1]):
                yield key.name, owners[sums]

    def _sums(self, key: TensorKey) -> tuple[object, tuple[tuple[int, int, int | None], ...]]:
        """Shape, type and the records of a tensor with their checksums; a record without one is like no other."""
        placement, extents = self.layout[key], self._extents(key)
        alone = key if not extents or any(extent.record.crc32 is None for extent in extents) else None
        records = dict.fromkeys((one.numel, one.record.nbytes, one.record.crc32) for one in extents)
        return (placement.shape, placement.dtype, alone), tuple(records)


def _buffers(weights: Mapping[str, Held]) -> Iterator[str]:
    """Entries that no optimizer could train, and the statistics of torch's normalisation layers beside them."""
    for name, held in weights.items():
        layer, _, leaf = name.rpartition(".")
        counted = f"{layer}.num_batches_tracked" in weights
        if not held.dtype.label.startswith(("float", "bfloat", "complex")) or (counted and leaf in _RUNNING):
            yield name


def _of_zeros(nbytes: int) -> int:
    found = 0
    for at in range(0, nbytes, len(_ZEROS)):
        found = crc32(_ZEROS[: nbytes - at], found)
    return found


def folder_format(
    name: str,
    known: Callable[[str], bool],
    files: Callable[[str], SavedListing],
    state: Callable[[str], SavedState],
    *,
    opened: type[SavedCheckpoint] = SavedCheckpoint,
    writes: Mapping[str, Writer],
    sized: frozenset[str] = frozenset(),
) -> Format:
    """The format of such folders: how one is known, listed and opened, and what it writes."""
    return Format(
        name=name,
        list=lambda folder: files(folder) if known(folder) else None,
        open=lambda listing, states: opened(state(listing.folder), listing.nbytes),
        writes=writes,
        sized=sized,
    )
