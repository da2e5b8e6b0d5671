"""The one door: what any format opens, and what it tells of itself. No operation and no host knows more of a format.

`SavedCheckpoint` is a format that has no facts of its own beside what every format has (torch's, EasyR1's, verl's): its
weights are the masters of its optimizer.
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
from ds_reshard.model.index import Extent, Index
from ds_reshard.model.layout import Holder, Layout, TensorKey
from ds_reshard.model.records import ElementType, TensorRecord, new_tensor
from ds_reshard.model.region import Box, Region
from ds_reshard.model.reports import Inspection
from ds_reshard.model.target import ConversionRequest, Target


class Listing(Protocol):
    """The files of one checkpoint, in bytes by their paths below its folder; `tag` is the folder's own name."""

    @property
    def folder(self) -> str: ...
    @property
    def tag(self) -> str: ...
    @property
    def nbytes(self) -> Mapping[str, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The shards of a checkpoint, opened when they are wanted; `compare` tells which of those are of other saves."""

    index: Index
    compare: Callable[[], Sequence[Fault]] = tuple


class Checkpoint(ABC):
    """A checkpoint of any format: the layout of its tensors, their shards, and beside them all that a resume needs.

    `facts` are param groups and counters of the optimizer, None where none was saved. `ranks` is the number of
    processes that saved it, None where no file tells. `files` are those that a conversion may read, in bytes by their
    paths below `folder`; `shard_names` are the names of those that every plan lists. `shared` are the names of tied
    parameters that are saved under another one, `buffer_names` the weights that are no parameters. `beside` are tensors
    that are neither the model's nor the optimizer's, with the keys that lead to them; `objects` are values beside both.
    `notes` say what is in no layout, or stands for more than it is. `tp`, `pp` and `ep` are the sizes of tensor,
    pipeline and expert parallelism, None where no file tells. `masters_are_cast` is true where a framework saves
    each weight as the cast of its fp32 master, and where the files do not say more surely which parameter a state
    is of: that is then looked at before states are used, and `unproved_mend` says what to do where it is not so.
    `states_alike` is whether what each rank's optimizer may keep for itself is compared, steps apart, as who uses
    states needs it: whoever does not sets it to False.

    `module` is the model's entries as they were saved, `scaling` values of the optimizer that some layouts have,
    `rates` what a scheduler keeps of each parameter, `optimizer` a word on whether the optimizer can be compared,
    `nameless` one that names no parameter, as it was saved.
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
        """The shards, to be opened anew."""

    @abstractmethod
    def content(self) -> Content:
        """All of it, for any format. Raises UnsupportedLayout, with every reason, for what no content can hold."""

    def target(self, asked: ConversionRequest, like: Checkpoint | None) -> Target | None:
        """What its own format makes of it, with all that it alone knows; None for another format."""
        return None

    @cached_property
    def opened(self) -> Shards:
        """The shards that one tool works with."""
        return self.shards()

    @property
    def index(self) -> Index:
        return self.opened.index

    @property
    def dp(self) -> int:
        """The data-parallel size of the saving run; where no file tells, 1."""
        return self.ranks or 1

    def open_all(self) -> None:
        """Open every shard, and compare it with the others; no tensor's bytes are read but of small replicas.

        Raises what a load raises for files that are missing, damaged or of several saves.
        """
        for family in {placement.family for placement in self.layout.placements.values()}:
            for shard in range(self.layout.shards[family]):
                self.index.open(family, shard)
        self.raise_shard_faults()

    def open_first(self) -> None:  # noqa: B027  (most formats compare none)
        """Open the shards with which those that are opened later are compared."""

    def open_for(self, family: str, shard: int) -> None:  # noqa: B027  (most formats have none)
        """Open what belongs to a shard that is written, and is read by no plan."""

    def raise_shard_faults(self) -> None:
        """Raise what is wrong with the shards that were opened, or with them together."""
        raise_faults([*self.index.faults, *self.opened.compare()], subject=f"checkpoint {self.folder}")

    def non_contiguous_weights(self) -> Mapping[str, TensorRecord]:
        """Weights that are not row-major in their file, and so in no layout."""
        return {}

    def unnamed_tensors(self) -> Iterator[tuple[TensorKey, TensorRecord]]:
        """Tensors that name no parameter, and so are in no layout, under names that say where they are."""
        yield from ()

    def stored_as_master_only(self, key: TensorKey) -> bool:
        """Whether a weight is kept as its master alone."""
        return False

    def weight_faults(self, key: TensorKey) -> Iterator[Fault]:
        """What is wrong with values that were saved as the run itself did not have them."""
        yield from ()

    def master(self, name: str) -> TensorKey | None:
        """The tensor that holds a parameter's fp32 master, None where there is none."""
        key = TensorKey(name=self.shared.get(name, name), kind="fp32")
        return key if key in self.layout else None

    def master_proof_faults(self) -> Iterable[Fault]:
        """Where masters that are the casts of their weights would not prove what they are of."""
        return ()

    def mismatch_mend_for(self, name: str) -> str:
        """What to do where a parameter's weight is not the cast of its master."""
        return self.mismatch_mend

    def repair(self) -> Checkpoint:
        """The same without a fault that its framework makes. Raises UnsupportedLayout where no such is known."""
        mend = "leave out --repair"
        fault = UnsupportedLayout.fault(self.folder, "has no fault that is known how to be repaired", mend=mend)
        raise error_of([fault], subject=f"repairing {self.folder}")

    def replicas(self) -> Mapping[Holder, Index]:
        """The replicas of tensors that several ranks have saved, by their holders."""
        return {holder: self.index.with_layout(layout) for holder, layout in self.layout.replicas().items()}

    def replica_fault(
        self, key: TensorKey, holder: Holder, found: str, untrained: Callable[[TensorKey], bool]
    ) -> Fault | None:
        """The fault of a replica with other values than the first; `untrained` reads whether one is all zeros."""
        what = "is not the same on each rank that holds a copy of it"
        return CheckpointDamaged.fault(str(key), what, "the same bits", found, mend=self.mismatch_mend)

    def independent_parts(self) -> Iterator[Mapping[str, Sequence[TensorKey]]]:
        """Parts of the model by their names, with their tensors, no two of which a run trains to the same values."""
        yield from ()

    def shards_of(self, name: str) -> Sequence[tuple[tuple[int, ...], Sequence[tuple[Box, int]]]]:
        """The shapes of the parts of a tensor that ranks had, and in each the boxes of it, with their first element."""
        return ()

    def values(self) -> Mapping[str, Mapping[str, object]]:
        """The values beside the tensors as `diff` compares them within a framework, by the name of what holds them."""
        return {"": {".".join(map(str, path)): value for path, value in self.objects.items()}}

    def extra(self) -> Mapping[object, object] | None:
        """What ranks keep in files of their own beside it, alike on all of them; None where the format has none."""
        return None

    def groups(self) -> tuple[GroupFacts, ...]:
        """The param groups as `diff` compares them: without values that follow from the layout."""
        return self.facts.groups if self.facts is not None else ()

    def uncompared_notes(self, name: str) -> Iterator[str]:
        """What `diff` does not compare, of a checkpoint that it calls `name`."""
        yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyReport:
    """A checkpoint as far as it can be opened: what keeps it from being opened whole, and what is wrong besides."""

    faults: Sequence[Fault] = ()
    further: Sequence[Fault] = ()


Writer = Callable[[Content, ConversionRequest, "Checkpoint | None", Sequence[Fault]], Target]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format: a folder of `formats/`, and one line in the table of `operations/formats.py`.

    `list` gives the files of a folder that is of this format, None for any other, and raises OSError. `open` opens
    them, and `open_weights` without the optimizer, whose files it does not read unless they alone hold the weights.
    `describe` says all that they tell, where a format knows more than a Checkpoint does; `survey` collects what is
    wrong. `writes` has, by the name that `--to` takes, what makes a target of any content; it raises the faults that it
    is given with its own. `sized` are those that take a data-parallel size. `in_parts` is true where a part of a
    conversion needs only its shards. `latest` are the files that name the last of several checkpoints, each with the
    folder that is meant by what it says.
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
    """What a format tells when it is opened, and the source of its shards.

    `beside` are the tensors that are neither the model's nor the optimizer's, by their names in the layout, with the
    keys that lead to them; `objects` are the values beside the tensors and the optimizer, by the keys that lead to
    them. `ranks` is the number of processes that saved it, None where no file tells; `notes` say what is in no layout,
    `left_out` which files are in no content. Weights of an optimizer's parameters are its masters.
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
        """The tensors of one shard, by the names of their buffers in the layout."""


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
    files: Mapping[str, SavedFile]
    archives: Callable[[], Mapping[str, tuple[tuple[int, int], ...]]] = dict

    @property
    def tag(self) -> str:
        return os.path.basename(os.path.abspath(self.folder))

    @property
    def nbytes(self) -> Mapping[str, int]:
        return {name: file.nbytes for name, file in self.files.items()}


class SavedCheckpoint(Checkpoint):
    """Such a checkpoint, opened."""

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
        found = (key for key in keys if key in self.layout and self.layout[key].dtype is ElementType.FLOAT32)
        return next(found, None)

    def content(self) -> Content:
        """All of it; weights are tied where they are one storage under two names, one of them the optimizer's."""
        layout, facts = self.layout, self.facts
        scalars = facts.scalars if facts is not None else {}
        tied = dict(self._tied())
        tensors: dict[TensorKey, TensorSource] = {}
        for key, place in layout.placements.items():
            if key.kind == WEIGHT and key.name in tied:
                continue
            held = tensors[key] = TensorSource(shape=place.shape, dtype=place.dtype, origin=key)
            trained = len(layout.kinds(key.name)) > 1 or key.name in scalars
            if (
                key.kind == WEIGHT
                and trained
                and place.dtype is ElementType.FLOAT32
                and key.name not in self.extra_tensors
            ):
                tensors[TensorKey(name=key.name, kind=MASTER)] = held
        weights = {
            key.name: held for key, held in tensors.items() if key.kind == WEIGHT and key.name not in self.extra_tensors
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
        """What is in no content."""
        return self.state.left_out

    def _whole(self) -> Iterator[tuple[str, TensorRecord]]:
        """Weights without states that lie in one piece, as what torch would have saved of each."""
        for key, placement in self.layout.placements.items():
            if key.kind == WEIGHT and len(self.layout.kinds(key.name)) == 1:
                extents = _extents(self.index, key)
                if len(extents) == 1 and extents[0].record.nbytes == placement.numel * placement.dtype.itemsize:
                    record = extents[0].record
                    made = new_tensor(str(record.byte_offset), placement.shape, placement.dtype)
                    place = replace(made.storage, path=record.path, byte_offset=record.byte_offset, crc32=record.crc32)
                    yield key.name, replace(made, storage=place)

    def _optimized(self) -> tuple[list[TensorKey], list[TensorKey]]:
        """The weights that the optimizer has, in a param group or with states, of a shape of the others; and those."""
        known = self._optimizer_names()
        ours: list[TensorKey] = []
        others: list[TensorKey] = []
        for key in self.layout.placements:
            if key.kind == WEIGHT and key.name not in self.extra_tensors:
                (ours if key.name in known else others).append(key)
        shapes = {self.layout[key].shape for key in others}
        return [key for key in ours if self.layout[key].shape in shapes], others

    def _optimizer_names(self) -> set[str]:
        """The names of parameters that the optimizer tells."""
        facts = self.facts or OptimizerFacts(groups=())
        states = (key.name for key in self.layout.placements if key.kind != WEIGHT)
        return {*facts.scalars, *states, *(name for group in facts.groups for name in group.members)}

    def _tied(self) -> Iterator[tuple[str, str]]:
        """Weights that the optimizer has not, and that lie in the very bytes of one that it has.

        Equal bytes are no proof of it: two layers of ones are two parameters.
        """
        ours, others = self._optimized()
        owners: dict[object, str] = {}
        for key in ours:
            owners.setdefault(self._bytes(key), key.name)
        for key in others:
            if (place := self._bytes(key)) in owners:
                yield key.name, owners[place]

    def _bytes(self, key: TensorKey) -> object:
        """Where a tensor lies; one without elements is like no other."""
        placement, extents = self.layout[key], _extents(self.index, key)
        where = tuple((one.path, one.byte_offset, one.numel) for one in extents)
        return (placement.shape, placement.dtype, where) if where else key

    def _alike(self, apart: Container[str]) -> Iterator[str]:
        """A note on weights that `get_state_dict` may have saved under each of their names, and nothing proves it."""
        ours, others = self._optimized()
        owners: dict[object, str] = {}
        for key in ours:
            owners.setdefault(checksums(self.index, key), key.name)
        sums = {key.name: checksums(self.index, key) for key in others if key.name not in apart}
        found = [f"{name} and {owners[told]}" for name, told in sums.items() if told in owners]
        if found:
            yield (
                "equal bytes, no proof that they are tied: written as two weights; nothing is lost: "
                f"{', '.join(found[:8])}{', ...' if len(found) > 8 else ''}"
            )


def _extents(index: Index, key: TensorKey) -> list[Extent]:
    """Where the parts of a tensor lie."""
    box = Box.whole(index.layout[key].shape)
    return [extent for _, extent in index.locate(key, Region(box=box, start=0, stop=box.numel))]


def checksums(index: Index, key: TensorKey) -> object:
    """Equal for two tensors if checksums tell that their bytes are equal; if they do not, unlike any other's."""
    placement, extents = index.layout[key], _extents(index, key)
    if not extents or any(one.record.crc32 is None or one.nbytes != one.record.nbytes for one in extents):
        return index.layout, key  # of a replica the layout is another
    return placement.shape, placement.dtype, tuple((one.numel, one.record.crc32) for one in extents)


def _buffers(weights: Mapping[str, TensorSource]) -> Iterator[str]:
    """Entries that no optimizer could train, and the statistics of torch's normalisation layers beside them."""
    for name, held in weights.items():
        layer, _, leaf = name.rpartition(".")
        counted = f"{layer}.num_batches_tracked" in weights
        if not held.dtype.label.startswith(("float", "bfloat", "complex")) or (counted and leaf in _RUNNING):
            yield name
