"""A checkpoint of a format that has no facts of its own beside what every format has: torch's, EasyR1's and verl's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ds_reshard.model.facts import OptimizerFacts
from ds_reshard.model.index import Extent
from ds_reshard.model.layout import Layout


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
