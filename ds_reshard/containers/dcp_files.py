"""A folder of torch.distributed.checkpoint that is to be written: files of archives, and the directory that names them.

Tensors are cut by rows over the files, as FSDP2 of so many ranks saves them; every other value lies in the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from ds_reshard.containers.dcp_directory import METADATA, Entry, PlacedArchive, write_directory
from ds_reshard.containers.torch_zip_writer import plan_archive
from ds_reshard.model.content import Path, TensorSource
from ds_reshard.model.layout import Placement, TensorKey, chunked_placement
from ds_reshard.model.records import TensorRecord, new_tensor
from ds_reshard.model.region import Box
from ds_reshard.model.target import TargetFile, Unit


@dataclass(frozen=True, kw_only=True)
class DirectoryFiles(ABC):
    """One directory and its files, in `folder`.

    A format says which tensors and values these are, and under which keys they are told.
    """

    files: int
    folder: str = ""

    @property
    @abstractmethod
    def held(self) -> Mapping[TensorKey, TensorSource]:
        """Each tensor that is written."""

    @property
    @abstractmethod
    def objects(self) -> Mapping[Path, object]:
        """Every value that lies in the first file, as torch.save is given it: small tensors, too."""

    @property
    def data(self) -> Mapping[str, bytes]:
        """The bytes of buffers that no tensor fills."""
        return {}

    @abstractmethod
    def tensor_entries(self, key: TensorKey, archives: tuple[PlacedArchive, ...]) -> Iterator[Entry]:
        """A tensor under each of its keys; parts of one key, from several tensors, are put together."""

    @abstractmethod
    def object_entries(self, path: Path, archive: PlacedArchive) -> Iterator[Entry]:
        """A value under each of its keys."""

    def told(self, key: TensorKey, box: Box) -> Box:
        """A box of a tensor as the directory has it."""
        return box

    @property
    def shards(self) -> dict[str, int]:
        """The families of the files and of the directory."""
        return {self.family: self.files, f"{self.folder}directory": 1}

    @property
    def family(self) -> str:
        return f"{self.folder}shards"

    def units(self) -> Iterator[Unit]:
        for rank in range(self.files):
            if rank and not any(True for _ in self.chunks(rank)):
                continue  # more files than rows: torch writes none for a rank that holds nothing
            data = self.data if not rank else {}
            name = self._below(_file(rank))
            file = TargetFile(name=name, tree=partial(self._values, rank), container="archives", data=data)
            yield Unit(family=self.family, shard=rank, files=(file,))
        directory = TargetFile(name=self._below(METADATA), tree=self.directory, container="plain")
        yield Unit(family=f"{self.folder}directory", shard=0, files=(directory, *self.beside()))

    def beside(self) -> tuple[TargetFile, ...]:
        """What lies beside the directory."""
        return ()

    def _below(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name

    @cached_property
    def wants(self) -> dict[TensorKey, TensorKey]:
        """Each tensor with the source's."""
        return {key: self.held[key._replace(copy=0)].origin for key in self.placements}

    @cached_property
    def placements(self) -> dict[TensorKey, Placement]:
        made = {}
        for key, held in self.held.items():
            boxes = [Box.whole(())]  # a scalar lies in the first file
            if held.shape:
                boxes = [Box.chunk(held.shape, 0, rank, self.files) for rank in range(self.files)]
            made[key] = chunked_placement(key, held.shape, held.dtype, boxes, family=self.family, buffer=str(key))
        return made

    def chunks(self, rank: int) -> Iterator[tuple[TensorKey, Box, str]]:
        """What one file holds, in its order, and in which buffers; tensors without elements are in the first file."""
        yield from self._chunks[rank]

    @cached_property
    def _chunks(self) -> list[list[tuple[TensorKey, Box, str]]]:
        """The chunks of each file, found in one pass over all parts of all tensors."""
        found: list[list[tuple[TensorKey, Box, str]]] = [[] for _ in range(self.files)]
        for key, placement in self.placements.items():
            for part in placement.parts:
                rank = part.cut.first
                if part.numel or not (placement.numel or rank):
                    found[rank].append((key._replace(copy=0), part.box, placement.buffer))
        return found

    def _values(self, rank: int) -> list[object]:
        """What each archive of one file holds."""
        tensors = [
            new_tensor(buffer, self.told(key, box).size, self.held[key].dtype) for key, box, buffer in self.chunks(rank)
        ]
        return [*tensors, *(self.objects.values() if not rank else ())]

    def directory(self) -> bytes:
        """The directory: where each chunk and each object lies, under every name that it has."""
        chunks: dict[TensorKey, list[PlacedArchive]] = {key: [] for key in self.held}
        single: dict[Path, PlacedArchive] = {}
        known_nbytes: dict[TensorRecord, int] = {}
        for rank in range(self.files):
            placed, at = [], 0
            for value in self._values(rank):
                nbytes = _archive_nbytes(value, known_nbytes)
                placed.append(PlacedArchive(file=_file(rank), byte_offset=at, nbytes=nbytes))
                at += nbytes
            boxes = list(self.chunks(rank))
            for (key, box, _), archive in zip(boxes, placed, strict=False):
                told = self.told(key, box)
                chunks[key].append(replace(archive, offset=told.offset, size=told.size))
            if not rank:
                single = dict(zip(self.objects, placed[len(boxes) :], strict=True))
        entries: dict[Path, Entry] = {}
        for key, archives in chunks.items():
            for entry in self.tensor_entries(key, tuple(archives)):
                known = entries.get(entry.path, entry)
                others = known.archives if known is not entry else ()
                entries[entry.path] = replace(entry, archives=(*others, *entry.archives))
        for path, archive in single.items():
            entries |= {entry.path: entry for entry in self.object_entries(path, archive)}
        return write_directory(list(entries.values()))


def _archive_nbytes(value: object, known: dict[TensorRecord, int]) -> int:
    """The size of an archive. Those of tensors of one shape and type are of one size, which is found once."""
    if not isinstance(value, TensorRecord):
        return plan_archive("archive", value).nbytes
    unnamed = replace(value, storage=replace(value.storage, path="", key="", byte_offset=0, crc32=None))
    if unnamed not in known:
        known[unnamed] = plan_archive("archive", value).nbytes
    return known[unnamed]


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"
