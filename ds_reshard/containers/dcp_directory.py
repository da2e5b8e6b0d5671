"""The `.metadata` of torch.distributed.checkpoint: which tensors a folder has, in which boxes, where each box lies.

A pickle of `Metadata` (torch/distributed/checkpoint/metadata.py and `_StorageInfo` of filesystem.py, 2.13), read here
as inert values, and written. Each box, and each object, is an archive of torch.save of its own inside a file.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import prod

from ds_reshard.containers import folders
from ds_reshard.containers.pickle_reader import read_pickle
from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.remote import expect, is_url
from ds_reshard.containers.torch_zip import TorchArchive, open_archive
from ds_reshard.containers.torch_zip_writer import ArchivePlan, Member, plan_archive, write_pickle
from ds_reshard.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    Fault,
    InternalError,
    ReshardError,
    UnsupportedLayout,
    error_of,
    raise_faults,
)
from ds_reshard.model.checkpoint import SavedFile, SavedListing
from ds_reshard.model.index import Extent, extent_of
from ds_reshard.model.records import ElementType, GlobalName, ObjectRecord, SizeRecord, StorageRecord, TensorRecord
from ds_reshard.model.region import Shape

METADATA = ".metadata"
COMMON, BACKEND = "common.pt", "metadata.json"  # what Megatron-LM keeps beside it
BUFFER = "chunk"
MEND = "restore the folder from a copy, or save it again"
_ROW_MAJOR = "load it with torch, make its tensors contiguous(), weights and states, and save it again"
_OF_RANK = re.compile(r"__[0-9]+\.metadata")
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An archive inside a file; `transformed` where it was compressed or otherwise changed when it was written."""

    path: str
    byte_offset: int
    nbytes: int
    transformed: bool

    def open(self) -> TorchArchive:
        """As `open_archive`; UnsupportedLayout where it was transformed."""
        if self.transformed:
            what = f"the {self.nbytes} bytes at {self.byte_offset} were compressed or otherwise changed when written"
            mend = "load it with torch, and save it with torch.distributed.checkpoint.save as it is by default"
            fault = UnsupportedLayout.fault(self.path, what, mend=mend)
            raise_faults([fault], subject="reading a checkpoint")
        return open_archive(self.path, part=(self.byte_offset, self.nbytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor; `place` is None if the directory has none for it, or if it is a `record` of no archive."""

    offset: Shape
    size: Shape
    place: Place | None
    record: TensorRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One tensor: its shape, the name of its element type, and its boxes."""

    shape: Shape
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def filled(self) -> list[Chunk]:
        """The chunks that have elements: a rank beyond the end of a short tensor saves one that has none."""
        return [chunk for chunk in self.chunks if prod(chunk.size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """All of it by key; `paths` are the keys of the nested state dict that was saved, where they are told.

    `contradictions` are faults of what torch itself has written; other writers may leave parts out. `values` are values
    that lie in no archive of their own.
    """

    path: str
    tensors: Mapping[str, SavedTensor]
    objects: Mapping[str, Place]
    paths: Mapping[str, tuple[object, ...]]
    contradictions: tuple[Fault, ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)

    @property
    def places(self) -> Iterator[Place]:
        """Where everything lies."""
        yield from self.objects.values()
        for tensor in self.tensors.values():
            yield from (chunk.place for chunk in tensor.chunks if chunk.place is not None)

    def faults(self, *, saved_again: str) -> Iterator[Fault]:
        """Contradictions, and tensors of types and chunks that cannot be read; `saved_again` mends those of others."""
        yield from self.contradictions
        for key, tensor in self.tensors.items():
            axes = len(tensor.shape)
            if not ElementType.is_named(tensor.dtype):
                yield UnsupportedLayout.fault(self.path, f"{key} is of type {tensor.dtype}", mend=saved_again)
            for chunk in tensor.filled:
                if chunk.place is None and chunk.record is None:
                    what = f"{key}: nothing says where its chunk at {list(chunk.offset)} lies"
                    yield damaged(self.path, what, "a file", "none")
                elif chunk.place is not None and chunk.place.transformed:
                    what = f"{key} was compressed when it was written"
                    yield UnsupportedLayout.fault(self.path, what, mend=saved_again)
                if not len(chunk.offset) == len(chunk.size) == axes:
                    what = f"{key}: a chunk has another number of dimensions"
                    yield damaged(self.path, what, f"{axes}", f"{len(chunk.size)}")


def damaged(where: str, what: str, expected: str, found: str) -> Fault:
    return CheckpointDamaged.fault(where, what, expected, found, mend=MEND)


def backend_of(folder: str) -> str | None:
    """What metadata.json says that wrote a folder (megatron/core/dist_checkpointing/core.py, 0.16.1 to 0.19.2)."""
    try:
        told = folders.read_json(os.path.join(folder, BACKEND), 1 << 20)
    except (CheckpointNotFound, CheckpointDamaged, ValueError):
        return None
    held = told.get("sharded_backend") if isinstance(told, dict) else None
    return None if held is None else str(held)


def is_megatrons(folder: str) -> bool:
    """Whether Megatron-LM says beside the directory that it is its own, or keeps there what all ranks share."""
    if not folders.is_file(os.path.join(folder, METADATA)):
        return False
    return folders.is_file(os.path.join(folder, COMMON)) or backend_of(folder) is not None


def is_megatron_fsdp(folder: str) -> bool:
    """Whether Megatron-FSDP saved a folder with its optimizer: no file says it but keys of param groups (0.19.2)."""
    path = os.path.join(folder, METADATA)
    if not folders.is_file(path) or is_megatrons(folder):
        return False
    with PositionedFile(path) as file:
        return b"optimizer.param_to_group_meta." in file.read(0, file.nbytes)


def list_directory(
    folder: str, parts: Sequence[str], read: Callable[[str], Directory], *, format: str, writer: str
) -> SavedListing:
    """The files of a folder whose directories lie in `parts` of it, and which `read` reads together."""
    files = {}
    for part in parts:
        for name, nbytes in folders.files(os.path.join(folder, part)).items():
            role = "shards" if name.endswith(".distcp") else "other"
            files[os.path.join(part, name)] = SavedFile(nbytes=nbytes, role=role)

    def archives() -> dict[str, tuple[Span, ...]]:
        """Those inside each file, as far as the directories can be read; opening the folder says what is wrong.

        Of directories below it that are not in `parts`, too, as of accelerate's further models. A file of shards that
        no directory names has none: an earlier save of more ranks has left it.
        """
        found: dict[str, set[Span]] = {}
        for directory in (partial(read, folder), *(partial(read_directory, below) for below in _others(folder, parts))):
            try:
                for place in directory().places:
                    found.setdefault(os.path.relpath(place.path, folder), set()).add((place.byte_offset, place.nbytes))
            except ReshardError:
                continue
        for name in (name for name, file in files.items() if found and file.role == "shards"):
            found.setdefault(name, set())
        return {name: tuple(sorted(spans)) for name, spans in found.items()}

    return SavedListing(format=format, writer=writer, folder=folder, files=files, archives=archives)


def _others(folder: str, parts: Sequence[str]) -> list[str]:
    """The folders below one that have a directory, and are none of its parts."""
    below = [os.path.join(folder, name) for name, nbytes in folders.entries(folder).items() if nbytes is None]
    own = {os.path.join(folder, part) for part in parts}
    return [one for one in below if one not in own and folders.is_file(os.path.join(one, METADATA))]


def directories(folder: str) -> list[str]:
    """The names of a folder's directories: `.metadata`, or one of each rank (state_dict_loader.py, torch 2.13)."""
    return sorted(name for name in folders.names(folder) if name == METADATA or _OF_RANK.fullmatch(name))


def read_directory(folder: str, name: str = METADATA) -> Directory:
    """Read a folder's `.metadata`; no tensor's bytes are read.

    Raises CheckpointNotFound, ReadFailed, UnsafePickle where it names code, and CheckpointDamaged for anything else
    than a directory of torch.distributed.checkpoint.
    """
    path = os.path.join(folder, name)
    with PositionedFile(path) as file:
        held = read_pickle(file.read(0, file.nbytes), where=path, persistent=_refuse)
    top = _state(held)
    said, storage = top.get("state_dict_metadata"), top.get("storage_data")
    if not isinstance(said, dict) or not isinstance(storage, dict):
        raise CheckpointDamaged(f"{path}: is not a directory of torch.distributed.checkpoint")
    places = dict(_places(folder, path, storage))
    tensors = {str(key): _tensor(path, str(key), _state(told), places) for key, told in said.items() if _state(told)}
    objects = {key: place for (key, offset), place in places.items() if offset is None}
    if is_url(folder):
        expect(sorted((place.path, (place.byte_offset, place.nbytes)) for place in places.values()))
    planned = top.get("planner_data")
    paths = {
        str(key): names
        for key, names in (planned.items() if isinstance(planned, dict) else ())
        if isinstance(names, tuple) and names
    }
    wrong = tuple(_contradictions(path, set(map(str, said)), tensors, places, paths if planned else None))
    return Directory(path=path, tensors=tensors, objects=objects, paths=paths, contradictions=wrong)


def _contradictions(
    path: str,
    said: set[str],
    tensors: Mapping[str, SavedTensor],
    places: Mapping[tuple[str, Shape | None], Place],
    paths: Mapping[str, tuple[object, ...]] | None,
) -> Iterator[Fault]:
    """Keys that one part of the directory has and another lacks, or that are not their path with points between.

    torch writes each to all parts, but for paths (`flatten_state_dict`, torch/distributed/checkpoint/_nested_dict.py).
    """
    lacking = {
        "nothing says where it lies": {key for key in said - tensors.keys() if (key, None) not in places},
        "it lies somewhere, and nothing says what it is": {key for key, _ in places} - said,
    }
    if paths is not None:
        lacking["it has no path in the state dict"] = said - paths.keys()
        lacking["it has a path in the state dict, and nothing says what it is"] = paths.keys() - said
        lacking["its path in the state dict is another"] = {key for key, names in paths.items() if not _is(key, names)}
    for what, keys in lacking.items():
        if keys:
            some = ", ".join(sorted(keys)[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
            expected = "each key in all parts of the directory"
            yield damaged(path, f"contradicts itself: {some}: {what}", expected, f"{len(keys)} that are not")


def _is(key: str, names: tuple[object, ...]) -> bool:
    return all(isinstance(name, str | int) for name in names) and key == ".".join(map(str, names))


def _places(
    folder: str, path: str, storage: Mapping[object, object]
) -> Iterator[tuple[tuple[str, Shape | None], Place]]:
    files: dict[str, str] = {}
    for index, told in storage.items():
        one, other = _state(index), _state(told)
        name, file_name = one.get("fqn"), other.get("relative_path")
        start, nbytes = other.get("offset"), other.get("length")
        if not isinstance(name, str) or not isinstance(file_name, str) or "/" in file_name:
            raise CheckpointDamaged(f"{path}: {name}: {file_name!r} is not the name of a file of the checkpoint")
        if file_name not in files:
            files[file_name] = os.path.join(folder, file_name)
        if type(start) is not int or type(nbytes) is not int or min(start, nbytes) < 0:
            raise CheckpointDamaged(f"{path}: {name}: offset {start!r} and length {nbytes!r} are no numbers of bytes")
        offset = one.get("offset")
        transformed = bool(other.get("transform_descriptors"))
        place = Place(path=files[file_name], byte_offset=start, nbytes=nbytes, transformed=transformed)
        yield (name, None if offset is None else _sizes(path, name, offset)), place


def _tensor(
    path: str, key: str, told: Mapping[object, object], places: Mapping[tuple[str, Shape | None], Place]
) -> SavedTensor:
    properties = told.get("properties")
    kept = properties.state if isinstance(properties, ObjectRecord) else None
    dtype = kept[0] if isinstance(kept, tuple) and kept else None
    chunks = told.get("chunks")
    if not isinstance(dtype, GlobalName) or not isinstance(chunks, list):
        raise CheckpointDamaged(f"{path}: {key} has no element type, or no list of chunks")
    boxes: list[Chunk] = []
    for chunk in map(_state, chunks):
        offset, size = _sizes(path, key, chunk.get("offsets")), _sizes(path, key, chunk.get("sizes"))
        boxes.append(Chunk(offset=offset, size=size, place=places.get((key, offset))))
    return SavedTensor(shape=_sizes(path, key, told.get("size")), dtype=dtype.name, chunks=tuple(boxes))


def _sizes(path: str, key: str, value: object) -> Shape:
    if isinstance(value, tuple) and _INTEGERS.issuperset(map(type, value)) and min(value, default=0) >= 0:
        return tuple(value)
    raise CheckpointDamaged(f"{path}: {key}: {value!r} is no shape")


_INTEGERS = frozenset({int})


def _state(record: object) -> Mapping[object, object]:
    return record.state if isinstance(record, ObjectRecord) and isinstance(record.state, dict) else {}


def _refuse(identity: object) -> object:
    raise ValueError("names an object outside the file")


# -- archives that are alike -------------------------------------------------------------------------------------------

_CRC32 = struct.Struct("<I")
_IN_HEADER, _IN_ENTRY = 14, 16  # where a checksum stands: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.7 and 4.3.12
_IDENTITY = ".data/serialization_id"  # caffe2/serialize/inline_container.cc, kSerializationIdRecordName, torch 2.13
_FRAME_NBYTES = 64 << 10


class AlikeArchives:
    """Opens archives of one tensor, many in one file: of those that are framed alike, one is parsed.

    torch.distributed.checkpoint saves every chunk as an archive of its own. Chunks of one shape and type are the same
    bytes, but for the tensor's bytes, their checksum, and the id that torch makes of checksums.
    """

    def __init__(self) -> None:
        self._frames: dict[tuple[object, int], _Frame] = {}

    def buffers(self, key: str, dtype: str, chunk: Chunk) -> Mapping[str, Extent]:
        """The one buffer of a chunk, opened and checked against the directory."""
        if chunk.record is not None:
            return {BUFFER: extent_of(chunk.record)}
        place = chunk.place
        assert place is not None, "a chunk without a place is refused when the folder is opened"
        held = self.load(place.path, (place.byte_offset, place.nbytes), (dtype, chunk.size))
        expected, at = f"{dtype} {list(chunk.size)}", f"{key}: the chunk at {list(chunk.offset)}"
        found, strides = type(held).__name__, ""
        if isinstance(held, TensorRecord):
            if (held.dtype.label, held.shape) == (dtype, chunk.size) and held.contiguous:
                return {BUFFER: extent_of(held)}
            found, strides = f"{held.dtype.label} {list(held.shape)}", f"strides {list(held.stride)}"
        fault = damaged(place.path, f"{at} is not what the directory says", expected, found)
        if found == expected:
            what = f"{at} does not lie row-major, as of a channels_last model"
            fault = UnsupportedLayout.fault(place.path, what, found=strides, mend=_ROW_MAJOR)
        raise error_of([fault], subject=f"checkpoint {os.path.dirname(place.path)}")

    def load(self, path: str, part: Span, kind: object) -> object:
        """What `TorchArchive.load` gives for a part of a file, and raises; archives of one `kind` may be alike."""
        frame = self._frames.get((kind, part[1]))
        tensor = frame.tensor(path, part) if frame is not None else None
        if tensor is not None:
            return tensor
        with open_archive(path, part=part) as archive:
            held = archive.load()
            frame = _frame(archive, held, path, part)
        if frame is not None:
            self._frames.setdefault((kind, part[1]), frame)
        return held


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """All of an archive but the bytes [start, stop), which are those of its one tensor: `outside`.

    The spans `same` of it are the same in all archives that are alike; `checksums` are where the header and the
    directory tell those of the members that differ, the tensor's first. A header may leave it out.
    """

    held: TensorRecord
    start: int
    stop: int
    outside: bytes
    same: tuple[Span, ...]
    checksums: tuple[tuple[int, int], ...]

    def tensor(self, path: str, part: Span) -> TensorRecord | None:
        """The tensor of another archive of the same size; None where that is not like this one."""
        outside = _outside(path, part, self.start, self.stop)
        for start, stop in self.same:
            if outside[start:stop] != self.outside[start:stop]:
                return None
        told = [(_CRC32.unpack_from(outside, a)[0], _CRC32.unpack_from(outside, b)[0]) for a, b in self.checksums]
        if any(in_header not in (0, crc) for in_header, crc in told):
            return None
        held, storage = self.held, self.held.storage
        placed = replace(storage, path=path, byte_offset=part[0] + self.start, crc32=told[0][1])
        return replace(held, storage=placed)


def _outside(path: str, part: Span, start: int, stop: int) -> bytes:
    """The bytes of a part of a file before `start` and from `stop` on."""
    with PositionedFile(path, part) as file:
        return file.read(0, start) + file.read(stop, part[1] - stop)


def _frame(archive: TorchArchive, held: object, path: str, part: Span) -> _Frame | None:
    """The frame of an archive; None where it holds anything but one tensor with a checksum, or is of a large frame."""
    stored = [member for name, member in archive.members.items() if name.startswith("data/")]
    if not isinstance(held, TensorRecord) or len(stored) != 1 or stored[0].crc32 is None:
        return None
    if held.dtype.itemsize == 1:
        return None  # bytes may be a pickle, which `load` looks for in each
    data = stored[0]
    members = sorted(archive.members.values(), key=lambda member: member.header_offset)
    directory = min(member.entry_offset for member in members)
    begin = {member.name: member.byte_offset - part[0] for member in members}
    end = {a.name: b.header_offset for a, b in pairwise(members)} | {members[-1].name: directory}
    varied = [data, *(member for member in members if member.name == _IDENTITY)]
    start, stop = begin[data.name], end[data.name]
    if part[1] - (stop - start) > _FRAME_NBYTES:
        return None

    def at(offset: int) -> int:
        return offset if offset < stop else offset - (stop - start)

    checksums = tuple((at(one.header_offset + _IN_HEADER), at(one.entry_offset + _IN_ENTRY)) for one in varied)
    spans = [(place, place + _CRC32.size) for places in checksums for place in places]
    spans += [(at(begin[one.name]), at(end[one.name])) for one in varied[1:]]
    outside = _outside(path, part, start, stop)
    edges = [0, *(edge for span in sorted(spans) for edge in span), len(outside)]
    return _Frame(
        held=held,
        start=start,
        stop=stop,
        outside=outside,
        checksums=checksums,
        same=tuple(zip(edges[::2], edges[1::2], strict=True)),
    )


# -- files to be written -----------------------------------------------------------------------------------------------

# Classes and attributes are those that torch's FileSystemReader unpickles (torch 2.13); they are named, never imported.
_METADATA = "torch.distributed.checkpoint.metadata"
_FORMAT = "1.0.0"  # CURRENT_DCP_VERSION of filesystem.py


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
    get_layout = GlobalName(module="torch.serialization", name="_get_layout")
    layout = ObjectRecord(callable=get_layout, args=("torch.strided",))
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
