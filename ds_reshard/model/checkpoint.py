"""The interface of every format: a `Checkpoint` that it opens, and a `Format` that describes the format itself.

Operations and hosts use nothing else of a format. `SavedCheckpoint` implements the interface for formats without
further facts of their own (torch's, EasyR1's, verl's), whose weights are the masters of the optimizer.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Protocol

from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, error_of, raise_faults
from ds_reshard.model.content import MASTER, SCHEDULER, WEIGHT, Content, Path, TensorSource, schedule_of
from ds_reshard.model.facts import GroupFacts, OptimizerFacts
from ds_reshard.model.index import Extent, Index, Record
from ds_reshard.model.layout import Holder, Layout, TensorKey
from ds_reshard.model.records import ElementType, TensorRecord, new_tensor
from ds_reshard.model.region import Box, Region
from ds_reshard.model.reports import Inspection
from ds_reshard.model.target import ConversionRequest, Target


class Listing(Protocol):
    """The files of one checkpoint: their sizes by path relative to `folder`; `tag` is the folder's name."""

    @property
    def folder(self) -> str: ...
    @property
    def tag(self) -> str: ...
    @property
    def nbytes(self) -> Mapping[str, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The shards of a checkpoint, opened when first used; `compare` returns faults if they come from several saves."""

    index: Index
    compare: Callable[[], Sequence[Fault]] = tuple


class Checkpoint(ABC):
    """A checkpoint of any format: the layout of its tensors, their shards, and all other values that a resume needs.

    `facts` are the optimizer's param groups and counters, None if none were saved. `ranks` is the number of processes
    that saved it; `tp`, `pp` and `ep` are the sizes of tensor, pipeline and expert parallelism; each is None if no file
    tells. `files` are the sizes of the files that a conversion may read, by path relative to `folder`; `shard_names`
    are the files that every plan lists. `shared` maps the further names of tied parameters to the name that is saved,
    `buffer_names` are the weights that are not parameters. `extra_tensors` belong neither to the model nor to the
    optimizer; they come with the keys that lead to them. `objects` are all values that are not tensors. `notes` tell
    the user what the layout lacks. `masters_are_cast` is true if the framework saves each weight as the cast of its
    fp32 master and the files give no better proof of which parameter a state belongs to: weights and masters are then
    compared before states are used, and `mismatch_mend` is the advice if they differ. `compare_scalar_states` makes
    ranks compare the scalar states that an optimizer may keep per rank; callers that use no states set it to False
    (steps are always compared).

    `module` has the model's entries as saved, `scaling` the optimizer's values for loss scaling, `rates` the values
    that a scheduler keeps per parameter, `optimizer` a note if the optimizer cannot be compared, `unnamed_optimizer`
    the saved state of an optimizer that names no parameters.
    """

    framework: ClassVar[str]
    folder: str
    layout: Layout
    facts: OptimizerFacts | None
    ranks: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    masters_are_cast = False
    compare_scalar_states = True
    mismatch_mend = ""
    files: Mapping[str, int]
    shard_names: Sequence[str] = ()
    shared: Mapping[str, str] = {}
    buffer_names: frozenset[str] = frozenset()
    extra_tensors: Mapping[str, Path] = {}
    objects: Mapping[Path, object] = {}
    notes: Sequence[str] = ()
    module: Mapping[str, object] = {}
    scaling: Mapping[str, object] = {}
    rates: Mapping[str, Mapping[str, object]] = {}
    optimizer = ""
    unnamed_optimizer: object = None

    @abstractmethod
    def shards(self) -> Shards:
        """Return the shards, none of them opened yet."""

    @abstractmethod
    def content(self) -> Content:
        """Return everything that another format can store. Raises UnsupportedLayout with every reason if it cannot."""

    def target(self, asked: ConversionRequest, like: Checkpoint | None) -> Target | None:
        """Return the target if the request is for this checkpoint's own format, which keeps more; None otherwise."""
        return None

    @cached_property
    def opened(self) -> Shards:
        """The shards that all methods of this checkpoint share."""
        return self.shards()

    @property
    def index(self) -> Index:
        return self.opened.index

    @property
    def dp(self) -> int:
        """The data-parallel size of the saving run; 1 if no file tells."""
        return self.ranks or 1

    def open_all(self) -> None:
        """Open and compare all shards. Of tensors only small replicas are read.

        Raises the same error as a load if files are missing, damaged or from several saves.
        """
        for family in {placement.family for placement in self.layout.placements.values()}:
            for shard in range(self.layout.shards[family]):
                self.index.open(family, shard)
        self.raise_shard_faults()

    def open_first(self) -> None:  # noqa: B027  (most formats compare none)
        """Open the shards that later shards are compared with."""

    def open_for(self, family: str, shard: int) -> None:  # noqa: B027  (most formats have none)
        """Open the files that belong to a shard of the target and that no plan reads."""

    def raise_shard_faults(self) -> None:
        """Raise the faults of the shards opened so far, including differences between them."""
        raise_faults([*self.index.faults, *self.opened.compare()], subject=f"checkpoint {self.folder}")

    def non_contiguous_weights(self) -> Mapping[str, TensorRecord]:
        """Return the weights that are not row-major in their file; no layout has them."""
        return {}

    def unnamed_tensors(self) -> Iterator[tuple[TensorKey, TensorRecord]]:
        """Yield the tensors without a parameter's name (no layout has them), under names that say where they are."""
        yield from ()

    def stored_as_master_only(self, key: TensorKey) -> bool:
        """True if only the fp32 master of this weight is saved."""
        return False

    def weight_faults(self, key: TensorKey) -> Iterator[Fault]:
        """Yield a fault if the framework saved a weight in another form than it had in training (quantized, say)."""
        yield from ()

    def master(self, name: str) -> TensorKey | None:
        """Return the key of a parameter's fp32 master, None if there is none."""
        key = TensorKey(name=self.shared.get(name, name), kind="fp32")
        return key if key in self.layout else None

    def master_proof_faults(self) -> Iterable[Fault]:
        """Return faults if comparing weights with masters cannot prove which parameter a state belongs to."""
        return ()

    def mismatch_mend_for(self, name: str) -> str:
        """Return the advice for a parameter whose weight is not the cast of its master."""
        return self.mismatch_mend

    def repair(self) -> Checkpoint:
        """Return the checkpoint without the known fault of its framework; raises UnsupportedLayout if it has none."""
        mend = "leave out --repair"
        fault = UnsupportedLayout.fault(self.folder, "has no fault that is known how to be repaired", mend=mend)
        raise error_of([fault], subject=f"repairing {self.folder}")

    def replicas(self) -> Mapping[Holder, Index]:
        """Return an index of the replicas of each holder: tensors that several ranks saved."""
        return {holder: self.index.with_layout(layout) for holder, layout in self.layout.replicas().items()}

    def replica_fault(
        self, key: TensorKey, holder: Holder, found: str, untrained: Callable[[TensorKey], bool]
    ) -> Fault | None:
        """Return the fault of a replica that differs from the first, None if it may; `untrained` reads if all are 0."""
        what = "is not the same on each rank that holds a copy of it"
        return CheckpointDamaged.fault(str(key), what, "the same bits", found, mend=self.mismatch_mend)

    def independent_parts(self) -> Iterator[Mapping[str, Sequence[TensorKey]]]:
        """Yield maps from the names of model parts to their tensors; no two parts of a map train to equal values."""
        yield from ()

    def shards_of(self, name: str) -> Sequence[tuple[tuple[int, ...], Sequence[tuple[Box, int]]]]:
        """Return each rank's shard of a tensor: its shape, and its boxes of the tensor with their offsets in it."""
        return ()

    def values(self) -> Mapping[str, Mapping[str, object]]:
        """Return the values that `diff` compares between checkpoints of one framework, by owner, then by dotted key."""
        return {"": {".".join(map(str, path)): value for path, value in self.objects.items()}}

    def extra(self) -> Mapping[object, object] | None:
        """Return the values of the ranks' own extra files that are equal on all ranks; None if the format has none."""
        return None

    def groups(self) -> tuple[GroupFacts, ...]:
        """Return the param groups as `diff` compares them: without values that follow from the layout."""
        return self.facts.groups if self.facts is not None else ()

    def uncompared_notes(self, name: str) -> Iterator[str]:
        """Yield a note for each thing that `diff` does not compare; `name` is the checkpoint's name in the notes."""
        yield from ()

    def replica_notes(self) -> Iterator[str]:
        """Yield a note on values that ranks have saved otherwise than the one whose are read."""
        yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyReport:
    """The faults of a checkpoint: `faults` keep it from being opened, `further` do not."""

    faults: Sequence[Fault] = ()
    further: Sequence[Fault] = ()


Writer = Callable[[Content, ConversionRequest, "Checkpoint | None", Sequence[Fault]], Target]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format: a folder of `formats/`, and one line in the table of `operations/formats.py`.

    `list` returns the files of a folder of this format, None for any other folder, and raises OSError. `open` opens
    them; `open_weights` skips the optimizer's files unless only they hold the weights. `describe` makes the answer of
    `inspect`, if the format knows more than a Checkpoint tells; `survey` collects faults. `writes` maps names of `--to`
    to functions that make a target from any content; they raise the faults they are given together with their own.
    `sized` are the names that take a data-parallel size. `in_parts` is true if a part of a conversion needs only its
    own shards. `latest` maps the names of files that name the last checkpoint to functions from their text to a folder.
    """

    name: str
    list: Callable[[str], Listing | None]
    open: Callable[[Listing], Checkpoint]
    open_weights: Callable[[Listing], Checkpoint] | None = None
    describe: Callable[[Listing], Inspection] | None = None
    survey: Callable[[Listing], SurveyReport] = lambda listing: SurveyReport()
    writes: Mapping[str, Writer] = field(default_factory=dict)
    sized: frozenset[str] = frozenset()
    in_parts: bool = False
    latest: Mapping[str, Callable[[str], str]] = field(default_factory=dict)


_RUNNING = ("running_mean", "running_var")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState(ABC):
    """The state of an opened checkpoint without further facts, and the source of its shards.

    The fields are those of `Checkpoint`; `left_out` are notes on files that `content()` does not include. The weights
    of trained parameters are the optimizer's masters.
    """

    folder: str
    layout: Layout
    facts: OptimizerFacts | None
    objects: Mapping[Path, object] = field(default_factory=dict)
    extra_tensors: Mapping[str, Path] = field(default_factory=dict)
    ranks: int | None = None
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @abstractmethod
    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        """Open one shard, and return where its tensors lie, by the names of their buffers in the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file of a `SavedListing`; `role` as in `inspect`."""

    nbytes: int
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedListing:
    """The files of one checkpoint, by path relative to its folder; `format` and `writer` are for people.

    `archives` returns the byte ranges of archives of torch.save in each file; other files are one as a whole, or none.
    """

    format: str
    writer: str
    folder: str
    files: Mapping[str, SavedFile]
    archives: Callable[[], Mapping[str, tuple[tuple[int, int], ...]]] = dict

    @property
    def tag(self) -> str:
        return os.path.basename(os.path.abspath(self.folder))

    @property
    def nbytes(self) -> Mapping[str, int]:
        return {name: file.nbytes for name, file in self.files.items()}


class SavedCheckpoint(Checkpoint):
    """A checkpoint made of a `SavedState`."""

    framework = "torch"

    def __init__(self, state: SavedState, files: Mapping[str, int]) -> None:
        self.state = state
        self.folder, self.layout, self.facts, self.ranks = state.folder, state.layout, state.facts, state.ranks
        self.extra_tensors, self.objects, self.notes, self.files = (
            state.extra_tensors,
            state.objects,
            state.notes,
            files,
        )

    def shards(self) -> Shards:
        return Shards(index=Index(self.layout, self.state))

    def uncompared_notes(self, name: str) -> Iterator[str]:
        yield from (f"{name}: {note}" for note in (*self.notes, *self.state.left_out))

    def stored_as_master_only(self, key: TensorKey) -> bool:
        return key.kind == WEIGHT and self.master(key.name) is not None

    def master(self, name: str) -> TensorKey | None:
        keys = [TensorKey(name=name, kind=kind) for kind in (MASTER, WEIGHT)]
        candidates = (key for key in keys if key in self.layout and self.layout[key].dtype is ElementType.FLOAT32)
        return next(candidates, None)

    def content(self) -> Content:
        """Return all that another format can store; a weight is tied if it shares its bytes with a trained one."""
        layout, facts = self.layout, self.facts
        scalars = facts.scalars if facts is not None else {}
        tied = dict(self._tied())
        tensors: dict[TensorKey, TensorSource] = {}
        for key, placement in layout.placements.items():
            if key.kind == WEIGHT and key.name in tied:
                continue
            source = tensors[key] = TensorSource(shape=placement.shape, dtype=placement.dtype, origin=key)
            trained = len(layout.kinds(key.name)) > 1 or key.name in scalars
            own_master = key.kind == WEIGHT and trained and placement.dtype is ElementType.FLOAT32
            if own_master and key.name not in self.extra_tensors:
                tensors[TensorKey(name=key.name, kind=MASTER)] = source
        weights = {
            key.name: source
            for key, source in tensors.items()
            if key.kind == WEIGHT and key.name not in self.extra_tensors
        }
        buffers = frozenset(_buffers(weights)) - self._optimizer_names()
        mend = "--to safetensors for the weights"
        content = Content(
            folder=self.folder,
            ranks=self.ranks,
            tensors=tensors,
            facts=facts,
            tied=tied,
            buffers=buffers,
            extra_tensors=self.extra_tensors,
            records=dict(self._whole()),
            objects=self.objects,
            faults=tuple(UnsupportedLayout.fault(self.folder, note, mend=mend) for note in self.notes),
            notes=(*self.notes, *self._alike({*tied, *buffers}), *self.left_out()),
        )
        groups = len(facts.groups) if facts is not None else 0
        return replace(content, schedule=schedule_of(content.entries.get(SCHEDULER), groups))

    def left_out(self) -> tuple[str, ...]:
        """Return notes on what `content()` leaves out."""
        return self.state.left_out

    def _whole(self) -> Iterator[tuple[str, TensorRecord]]:
        """Yield weights without states that lie in one piece of a file, as the tensors that torch would have saved."""
        for key, placement in self.layout.placements.items():
            if key.kind == WEIGHT and len(self.layout.kinds(key.name)) == 1:
                extents = _extents(self.index, key)
                if len(extents) == 1 and extents[0].record.nbytes == placement.numel * placement.dtype.itemsize:
                    record = extents[0].record
                    empty = new_tensor(str(record.byte_offset), placement.shape, placement.dtype)
                    storage = replace(
                        empty.storage, path=record.path, byte_offset=record.byte_offset, crc32=record.crc32
                    )
                    yield key.name, replace(empty, storage=storage)

    def _optimized(self) -> tuple[list[TensorKey], list[TensorKey]]:
        """Return the trained weights that may be tied, as another weight has their shape, and all untrained weights."""
        named = self._optimizer_names()
        trained: list[TensorKey] = []
        untrained: list[TensorKey] = []
        for key in self.layout.placements:
            if key.kind == WEIGHT and key.name not in self.extra_tensors:
                (trained if key.name in named else untrained).append(key)
        shapes = {self.layout[key].shape for key in untrained}
        return [key for key in trained if self.layout[key].shape in shapes], untrained

    def _optimizer_names(self) -> set[str]:
        """Return the parameters that the optimizer names: in its groups or states."""
        facts = self.facts or OptimizerFacts(groups=())
        states = (key.name for key in self.layout.placements if key.kind != WEIGHT)
        return {*facts.scalars, *states, *(name for group in facts.groups for name in group.members)}

    def _tied(self) -> Iterator[tuple[str, str]]:
        """Yield untrained weights that lie in the same bytes of a file as a trained one, with the trained one's name.

        Equal values in different places prove nothing: two layers of ones are two parameters.
        """
        trained, untrained = self._optimized()
        owners: dict[object, str] = {}
        for key in trained:
            owners.setdefault(self._bytes(key), key.name)
        for key in untrained:
            if (location := self._bytes(key)) in owners:
                yield key.name, owners[location]

    def _bytes(self, key: TensorKey) -> object:
        """Return a value that is equal for two tensors if they lie in the same bytes; unique for an empty tensor."""
        placement, extents = self.layout[key], _extents(self.index, key)
        where = tuple((extent.path, extent.byte_offset, extent.numel) for extent in extents)
        return (placement.shape, placement.dtype, where) if where else key

    def _alike(self, known_ties: Container[str]) -> Iterator[str]:
        """Yield a note if untrained weights equal trained ones: `get_state_dict` may have saved one tensor twice."""
        trained, untrained = self._optimized()
        owners: dict[object, str] = {}
        for key in trained:
            owners.setdefault(checksums(self.index, key), key.name)
        sums = {key.name: checksums(self.index, key) for key in untrained if key.name not in known_ties}
        pairs = [f"{name} and {owners[checksum]}" for name, checksum in sums.items() if checksum in owners]
        if pairs:
            yield (
                "equal bytes, no proof that they are tied: written as two weights; nothing is lost: "
                f"{', '.join(pairs[:8])}{', ...' if len(pairs) > 8 else ''}"
            )


def _extents(index: Index, key: TensorKey) -> list[Extent]:
    """Return where the parts of a tensor lie in files."""
    box = Box.whole(index.layout[key].shape)
    return [extent for _, extent in index.locate(key, Region(box=box, start=0, stop=box.numel))]


def records_of(index: Index) -> set[Record]:
    """Return the records in which the tensors of the index's layout lie."""
    wanted = ((key, Box.whole(one.shape)) for key, one in index.layout.placements.items())
    regions = ((key, Region(box=box, start=0, stop=box.numel)) for key, box in wanted)
    return {extent.record for key, region in regions for _, extent, _ in index.runs(key, region)}


def checksums(index: Index, key: TensorKey) -> object:
    """Return a value that is equal for two tensors if their checksums prove equal bytes; it is unique if none do."""
    placement, extents = index.layout[key], _extents(index, key)
    transposed = any(part.axes for part in placement.parts)
    unknown = any(extent.record.crc32 is None or extent.nbytes != extent.record.nbytes for extent in extents)
    if not extents or unknown or transposed:
        return index.layout, key  # of a replica the layout is another
    return placement.shape, placement.dtype, tuple((extent.numel, extent.record.crc32) for extent in extents)


def _buffers(weights: Mapping[str, TensorSource]) -> Iterator[str]:
    """Yield the entries that no optimizer could train (integers), and running statistics of normalisation layers."""
    for name, source in weights.items():
        layer, _, leaf = name.rpartition(".")
        counted = f"{layer}.num_batches_tracked" in weights
        if not source.dtype.label.startswith(("float", "bfloat", "complex")) or (counted and leaf in _RUNNING):
            yield name
