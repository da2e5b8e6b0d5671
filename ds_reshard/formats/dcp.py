"""A folder of torch.distributed.checkpoint as a layout and an index: FSDP2, accelerate's sharded FSDP, torchtitan."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ds_reshard.containers.dcp_directory import METADATA, Chunk, Directory, SavedTensor, read_directory
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import Fault, raise_faults
from ds_reshard.model.codec import ElementType
from ds_reshard.model.index import Extent, extent_of
from ds_reshard.model.layout import Layout, Placement, TensorKey, chunked
from ds_reshard.model.records import TensorRecord
from ds_reshard.model.region import Box

BUFFER = "chunk"
_MODELS = ("model", "module", "state_dict")
_MEND = "restore the folder from a copy, or save it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpCheckpoint:
    """What the directory tells; a family of shards is one key, and a shard one of its chunks."""

    folder: str
    directory: Directory
    layout: Layout

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]:
        """The one buffer of a chunk, opened and checked against the directory."""
        tensor = self.directory.tensors[family]
        chunk = _chunks(tensor)[shard]
        place = chunk.place
        assert place is not None, "a chunk without a place is refused when the folder is opened"
        with open_archive(place.path, part=(place.byte_offset, place.nbytes)) as archive:
            held = archive.load()
        expected = f"{tensor.dtype} {list(chunk.size)}"
        if not isinstance(held, TensorRecord) or (held.dtype.label, held.shape) != (tensor.dtype, chunk.size):
            found = f"{held.dtype.label} {list(held.shape)}" if isinstance(held, TensorRecord) else type(held).__name__
            what = f"{family}: the chunk at {list(chunk.offset)} is not what the directory says"
            raise_faults([_damaged(place.path, what, expected, found)], subject=f"checkpoint {self.folder}")
            raise AssertionError
        if not held.contiguous:
            what = f"{family}: the chunk at {list(chunk.offset)} does not lie row-major"
            raise_faults([_damaged(place.path, what, expected, f"strides {held.stride}")], subject="reading tensors")
        return {BUFFER: extent_of(held, place.path, place.byte_offset)}


def is_dcp(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, METADATA))


def open_dcp(folder: str) -> DcpCheckpoint:
    """Read the directory; raises every structural fault: chunks that overlap, leave a hole or have no file.

    And what `read_directory` raises; UnsupportedLayout for chunks that were compressed and for unknown types.
    """
    directory = read_directory(folder)
    faults: list[Fault] = []
    placements: dict[TensorKey, Placement] = {}
    shards: dict[str, int] = {}
    for family, tensor in directory.tensors.items():
        found = list(_faults(directory, family, tensor))
        faults += found
        if found:
            continue
        key = tensor_key(directory.paths.get(family, (family,)))
        boxes = tuple(Box(offset=chunk.offset, size=chunk.size) for chunk in _chunks(tensor))
        shards[family] = len(boxes)
        if key in placements:
            faults.append(_damaged(directory.path, f"{family} and another key name {key}", "one", "two"))
        dtype = ElementType.named(tensor.dtype)
        try:
            placements[key] = chunked(key, tensor.shape, dtype, boxes, family=family, buffer=BUFFER)
        except ValueError as error:
            what = f"{family}: declares impossible chunks: {error}"
            faults.append(_damaged(directory.path, what, "each element once", "another cover"))
    raise_faults(faults, subject=f"checkpoint {folder}")
    return DcpCheckpoint(folder=folder, directory=directory, layout=Layout(placements, shards))


def tensor_key(path: tuple[object, ...]) -> TensorKey:
    """The logical tensor that a nested state dict's path means.

    `get_state_dict` nests states as (..., "state", W, KIND), flattens them to (..., "state.W.KIND"), and names weights
    by the name of the parameter below the model's.
    """
    names = [str(name) for name in path]
    if len(names) >= 3 and names[-3] == "state":
        return TensorKey(name=names[-2], kind=names[-1])
    if names[-1].startswith("state.") and names[-1].count(".") >= 2:
        name, _, kind = names[-1].removeprefix("state.").rpartition(".")
        return TensorKey(name=name, kind=kind)
    inner = names[1:] if len(names) > 1 and names[0] in _MODELS else names
    return TensorKey(name=".".join(inner), kind="weight")


def _chunks(tensor: SavedTensor) -> list[Chunk]:
    """The chunks that have elements: a rank beyond the end of a short tensor saves one that has none."""
    return [chunk for chunk in tensor.chunks if prod(chunk.size)]


def _faults(directory: Directory, key: str, tensor: SavedTensor) -> Iterator[Fault]:
    try:
        ElementType.named(tensor.dtype)
    except KeyError:
        yield _unsupported(directory.path, f"{key} is of type {tensor.dtype}")
    for chunk in _chunks(tensor):
        if chunk.place is None:
            yield _damaged(directory.path, f"{key}: nothing says where its chunk at {list(chunk.offset)} lies",
                           "a file", "none")  # fmt: skip
        elif chunk.place.transformed:
            yield _unsupported(directory.path, f"{key} was compressed when it was written")
        if not len(chunk.offset) == len(chunk.size) == len(tensor.shape):
            yield _damaged(directory.path, f"{key}: a chunk has another number of dimensions",
                           f"{len(tensor.shape)}", f"{len(chunk.size)}")  # fmt: skip


def _damaged(where: str, what: str, expected: str, found: str) -> Fault:
    return Fault(
        error="CheckpointDamaged", where=where, what=what, expected=expected, found=found, mend=_MEND,
    )  # fmt: skip


def _unsupported(where: str, what: str) -> Fault:
    mend = "load it with torch, and save it with torch.distributed.checkpoint.save as it is by default"
    return Fault(error="UnsupportedLayout", where=where, what=what, mend=mend)
