"""The one door: what any format opens, and what it tells of itself. No operation and no host knows more of a format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

from ds_reshard.errors import Fault, raise_faults
from ds_reshard.model.content import Content, Path
from ds_reshard.model.facts import OptimizerFacts
from ds_reshard.model.index import Index
from ds_reshard.model.inspection import Inspection
from ds_reshard.model.layout import Layout, TensorKey
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.target import Asked, Target


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
    `notes` say what is in no layout, or stands for more than it is.

    `module` is the model's entries as they were saved, `scaling` values of the optimizer that some layouts have,
    `rates` what a scheduler keeps of each parameter, `optimizer` a word on whether the optimizer can be compared.
    """

    framework: ClassVar[str]
    folder: str
    layout: Layout
    facts: OptimizerFacts | None
    ranks: int | None = None
    files: Mapping[str, int]
    shard_names: Sequence[str] = ()
    shared: Mapping[str, str] = {}
    buffer_names: frozenset[str] = frozenset()
    beside: Mapping[str, Path] = {}
    objects: Mapping[Path, object] = {}
    notes: Sequence[str] = ()
    module: Mapping[str, object] = {}
    scaling: Mapping[str, object] = {}
    rates: Mapping[str, Mapping[str, object]] = {}
    optimizer = ""

    @abstractmethod
    def shards(self) -> Shards:
        """The shards, to be opened anew."""

    @abstractmethod
    def content(self) -> Content:
        """All of it, for any format. Raises UnsupportedLayout, with every reason, for what no content can hold."""

    def target(self, asked: Asked, like: Checkpoint | None) -> Target | None:
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
        self.refuse()

    def open_first(self) -> None:  # noqa: B027  (most formats compare none)
        """Open the shards with which those that are opened later are compared."""

    def open_for(self, family: str, shard: int) -> None:  # noqa: B027  (most formats have none)
        """Open what belongs to a shard that is written, and is read by no plan."""

    def refuse(self) -> None:
        """Raise what is wrong with the shards that were opened, or with them together."""
        raise_faults([*self.index.faults, *self.opened.compare()], subject=f"checkpoint {self.folder}")

    def strided(self) -> Mapping[str, TensorRecord]:
        """Weights that are not row-major in their file, and so in no layout."""
        return {}

    def unnamed(self) -> Iterator[tuple[TensorKey, TensorRecord]]:
        """Tensors that name no parameter, and so are in no layout, under names that say where they are."""
        yield from ()

    def unstored(self, key: TensorKey) -> bool:
        """Whether a weight is kept as its master alone."""
        return False

    def master(self, name: str) -> TensorKey | None:
        """The tensor that holds a parameter's fp32 master, None where there is none."""
        key = TensorKey(name=self.shared.get(name, name), kind="fp32")
        return key if key in self.layout else None

    def values(self) -> Mapping[str, Mapping[str, object]]:
        """The values beside the tensors as `diff` compares them within a framework, by the name of what holds them."""
        return {"": {".".join(map(str, path)): value for path, value in self.objects.items()}}

    def uncompared(self, name: str) -> Iterator[str]:
        """What `diff` does not compare, of a checkpoint that it calls `name`."""
        yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """A checkpoint as far as it can be opened: what keeps it from being opened whole, and what is wrong besides."""

    faults: Sequence[Fault] = ()
    further: Sequence[Fault] = ()


Opener = Callable[[Listing, bool], Checkpoint]
Writer = Callable[[Content, Asked, "Checkpoint | None", Sequence[Fault]], Target]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format: a folder of `formats/`, and one line in the table of `operations/formats.py`.

    `list` gives the files of a folder that is of this format, None for any other, and raises OSError. `open` opens them
    (without scalar states of ranks other than steps where its second argument is False). `describe` says all that they
    tell, given a function that counts the bytes read, where a format knows more than a Checkpoint does; `survey`
    collects what is wrong. `writes` has, by the name that `--to` takes, what makes a target of any content; it raises
    the faults that it is given with its own. `sized` are those that take a data-parallel size.
    `in_parts` is true where a part of a conversion needs only its shards.
    """

    name: str
    list: Callable[[str], Listing | None]
    open: Opener
    describe: Callable[[Listing, Callable[[], int | None]], Inspection] | None = None
    survey: Callable[[Listing], Surveyed] = lambda listing: Surveyed()
    writes: Mapping[str, Writer] = field(default_factory=dict)
    sized: frozenset[str] = frozenset()
    in_parts: bool = False
