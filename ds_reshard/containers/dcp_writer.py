"""Files of torch.distributed.checkpoint to be written: archives one after another, and the directory of all.

Classes and attributes are those of torch/distributed/checkpoint/metadata.py and `_StorageInfo` of filesystem.py (2.13),
whose FileSystemReader unpickles the directory; here they are named, and never imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ds_reshard.containers.pickle_writer import write_pickle
from ds_reshard.containers.torch_zip_writer import ArchivePlan, Member, plan_archive
from ds_reshard.errors import InternalError
from ds_reshard.model.codec import ElementType
from ds_reshard.model.records import GlobalName, ObjectRecord, SizeRecord, StorageRecord

_METADATA = "torch.distributed.checkpoint.metadata"
_FORMAT = "1.0.0"  # CURRENT_DCP_VERSION of filesystem.py
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivesPlan:
    """A file of several archives; a storage's key is the archive's number and its key there."""

    archives: tuple[ArchivePlan, ...]

    @property
    def starts(self) -> list[int]:
        """Where each archive begins."""
        found = [0]
        for archive in self.archives:
            found.append(found[-1] + archive.nbytes)
        return found[:-1]

    @property
    def nbytes(self) -> int:
        return sum(archive.nbytes for archive in self.archives)

    @property
    def storages(self) -> dict[str, StorageRecord]:
        return {
            f"{number}/{key}": storage
            for number, archive in enumerate(self.archives)
            for key, storage in archive.storages.items()
        }

    @property
    def places(self) -> dict[str, Member]:
        return {
            f"{number}/{key}": replace(member, byte_offset=start + member.byte_offset)
            for number, (start, archive) in enumerate(zip(self.starts, self.archives, strict=True))
            for key, member in archive.places.items()
        }

    def parts(self, checksums: Mapping[str, int]) -> Iterator[tuple[int, bytes]]:
        """All bytes but those of the storages, each with its offset; `checksums` are the storages' crc32 by key."""
        for number, (start, archive) in enumerate(zip(self.starts, self.archives, strict=True)):
            own = {key: checksums[f"{number}/{key}"] for key in archive.storages}
            for at, data in archive.parts(own):
                yield start + at, data


def plan_archives(values: Sequence[object]) -> ArchivesPlan:
    """Where everything lies in a file that holds each value as an archive of its own."""
    return ArchivesPlan(archives=tuple(plan_archive("archive", value) for value in values))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedArchive:
    """An archive of a file: of the box of a tensor that begins at `offset`, or of an object (None)."""

    file: str
    byte_offset: int
    nbytes: int
    offset: Shape | None = None
    size: Shape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key of the directory: a tensor of this shape and type, or an object, where `dtype` is None.

    `path` are the keys of the nested state dict.
    """

    path: tuple[object, ...]
    archives: tuple[PlacedArchive, ...]
    shape: Shape = ()
    dtype: ElementType | None = None

    @property
    def key(self) -> str:
        return ".".join(map(str, self.path))


def write_directory(entries: Sequence[Entry]) -> bytes:
    """The `.metadata` of files that hold these entries."""
    storage: dict[object, object] = {}
    for entry in entries:
        for number, archive in enumerate(entry.archives):
            index: dict[str, object] = {"fqn": entry.key, "offset": None, "index": None}
            if archive.offset is not None:
                index |= {"offset": SizeRecord(archive.offset), "index": number}
            storage[_made("MetadataIndex", index)] = _made(
                "_StorageInfo",
                {"relative_path": archive.file, "offset": archive.byte_offset, "length": archive.nbytes},
                module="torch.distributed.checkpoint.filesystem",
            )
    top = {
        "state_dict_metadata": {entry.key: _told(entry) for entry in entries},
        "planner_data": {entry.key: entry.path for entry in entries},
        "storage_data": storage,
        "storage_meta": None,
        "version": _FORMAT,
    }
    return write_pickle(_made("Metadata", top), _no_storage)


def _told(entry: Entry) -> ObjectRecord:
    if entry.dtype is None:
        return _made("BytesStorageMetadata", None)
    layout = ObjectRecord(
        callable=GlobalName(module="torch.serialization", name="_get_layout"), args=("torch.strided",)
    )
    memory_format = ObjectRecord(callable=GlobalName(module=_METADATA, name="_MEM_FORMAT_ENCODING"), args=(0,))
    dtype = GlobalName(module="torch", name=entry.dtype.label)
    chunks = [
        _made("ChunkStorageMetadata", {"offsets": SizeRecord(one.offset or ()), "sizes": SizeRecord(one.size or ())})
        for one in entry.archives
    ]
    properties = _made("TensorProperties", (dtype, layout, False, memory_format, False))
    told = {"properties": properties, "size": SizeRecord(entry.shape), "chunks": chunks}
    return _made("TensorStorageMetadata", told)


def _made(name: str, state: object, module: str = _METADATA) -> ObjectRecord:
    """An instance as pickle makes one: by __new__, then its state."""
    made = GlobalName(module=module, name=name)
    return ObjectRecord(callable=made, by_new=True, state=state, has_state=state is not None)


def _no_storage(storage: StorageRecord) -> str:
    raise InternalError(f"a directory holds no tensor, and {storage.key} is one")
