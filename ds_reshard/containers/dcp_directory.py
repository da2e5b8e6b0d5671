"""The `.metadata` of torch.distributed.checkpoint: which tensors a folder has, in which boxes, where each box lies.

A pickle of `Metadata` (torch/distributed/checkpoint/metadata.py and `_StorageInfo` of filesystem.py, 2.13), read here
as inert values. Each box, and each object, is an archive of torch.save of its own inside a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ds_reshard.containers.pickle_reader import read_pickle
from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.torch_zip import TorchArchive, open_archive
from ds_reshard.errors import CheckpointDamaged, Fault, UnsupportedLayout, raise_faults
from ds_reshard.model.records import GlobalName, ObjectRecord

METADATA = ".metadata"
_OF_RANK = re.compile(r"__[0-9]+\.metadata")
Shape = tuple[int, ...]


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
    """A box of a tensor; `place` is None where the directory has none for it."""

    offset: Shape
    size: Shape
    place: Place | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One tensor: its shape, the name of its element type, and its boxes."""

    shape: Shape
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """All of it by key; `paths` are the keys of the nested state dict that was saved, where they are told.

    `contradictions` are faults of what torch itself has written; other writers may leave parts out.
    """

    path: str
    tensors: Mapping[str, SavedTensor]
    objects: Mapping[str, Place]
    paths: Mapping[str, tuple[object, ...]]
    contradictions: tuple[Fault, ...] = ()


def directories(folder: str) -> list[str]:
    """The names of a folder's directories: `.metadata`, or one of each rank (state_dict_loader.py, torch 2.13)."""
    return sorted(name for name in os.listdir(folder) if name == METADATA or _OF_RANK.fullmatch(name))


def read_directory(folder: str, name: str = METADATA) -> Directory:
    """Read a folder's `.metadata`; no tensor's bytes are read.

    Raises CheckpointNotFound, ReadFailed, UnsafePickle where it names code, and CheckpointDamaged for anything else
    than a directory of torch.distributed.checkpoint.
    """
    path = os.path.join(folder, name)
    file = PositionedFile(path)
    try:
        held = read_pickle(file.read(0, file.nbytes), where=path, persistent=_refuse)
    finally:
        file.close()
    top = _state(held)
    said, storage = top.get("state_dict_metadata"), top.get("storage_data")
    if not isinstance(said, dict) or not isinstance(storage, dict):
        raise CheckpointDamaged(f"{path}: is not a directory of torch.distributed.checkpoint")
    places = dict(_places(folder, path, storage))
    tensors = {str(key): _tensor(path, str(key), _state(told), places) for key, told in said.items() if _state(told)}
    objects = {key: place for (key, offset), place in places.items() if offset is None}
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
            yield CheckpointDamaged.fault(
                path,
                f"contradicts itself: {some}: {what}",
                "each key in all parts of the directory",
                f"{len(keys)} that are not",
                mend="restore the folder from a copy, or save it again",
            )


def _is(key: str, names: tuple[object, ...]) -> bool:
    return all(isinstance(name, str | int) for name in names) and key == ".".join(map(str, names))


def _places(
    folder: str, path: str, storage: Mapping[object, object]
) -> Iterator[tuple[tuple[str, Shape | None], Place]]:
    for index, told in storage.items():
        one, other = _state(index), _state(told)
        name, file_name = one.get("fqn"), other.get("relative_path")
        start, nbytes = other.get("offset"), other.get("length")
        if not isinstance(name, str) or not isinstance(file_name, str) or os.path.basename(file_name) != file_name:
            raise CheckpointDamaged(f"{path}: {name}: {file_name!r} is not the name of a file of the checkpoint")
        if type(start) is not int or type(nbytes) is not int or min(start, nbytes) < 0:
            raise CheckpointDamaged(f"{path}: {name}: offset {start!r} and length {nbytes!r} are no numbers of bytes")
        offset = one.get("offset")
        place = Place(
            path=os.path.join(folder, file_name),
            byte_offset=start,
            nbytes=nbytes,
            transformed=bool(other.get("transform_descriptors")),
        )
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
    boxes = [
        (_sizes(path, key, _state(chunk).get("offsets")), _sizes(path, key, _state(chunk).get("sizes")))
        for chunk in chunks
    ]
    return SavedTensor(
        shape=_sizes(path, key, told.get("size")),
        dtype=dtype.name,
        chunks=tuple(Chunk(offset=offset, size=size, place=places.get((key, offset))) for offset, size in boxes),
    )


def _sizes(path: str, key: str, value: object) -> Shape:
    if isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value):
        return tuple(value)
    raise CheckpointDamaged(f"{path}: {key}: {value!r} is no shape")


def _state(record: object) -> Mapping[object, object]:
    return record.state if isinstance(record, ObjectRecord) and isinstance(record.state, dict) else {}


def _refuse(identity: object) -> object:
    raise ValueError("names an object outside the file")
