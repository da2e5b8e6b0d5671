"""Folders of torch_checkpointing 0.1.1: `metadata.pkl`, and `ITEM_R.pt` of each item and rank.

`metadata.pkl` is a pickle of plain values: for each item with a resharder the whole shape, the mesh and the placements
of each tensor, by its path in the item's tree. The tensors lie in the ranks' files as DTensors, and so do all other
values, which no metadata has.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NoReturn

from ds_reshard.containers import folders
from ds_reshard.containers.dcp_directory import METADATA, Chunk, Directory, SavedTensor, damaged
from ds_reshard.containers.pickle_reader import read_pickle
from ds_reshard.containers.positioned import PositionedFile
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import Fault, UnsupportedLayout, error_of, raise_faults
from ds_reshard.formats.dcp.entries import MODELS, group_key, tensor_key
from ds_reshard.model.facts import ScalarTensor, canonical
from ds_reshard.model.records import ObjectRecord, TensorRecord
from ds_reshard.model.region import Shape

ITEMS = "metadata.pkl"
_TESTED, _METADATA_NBYTES = "2.0", 1 << 30
_NAME = re.compile(r"(.+)_(\d{1,9})\.pt")
_GROUPS = "param_groups"
_AGAIN = "load it with torch_checkpointing 0.1.1 on as many ranks, and save it with torch.distributed.checkpoint"
Tree = Mapping[object, object]
Path = tuple[object, ...]


def is_items(folder: str) -> bool:
    """True for a folder of torch_checkpointing, by the names of its files."""
    names = folders.names(folder)
    mine = ITEMS in names and METADATA not in names
    return mine and any(match[2] == "0" for match in map(_NAME.fullmatch, names) if match is not None)


def item_names(folder: str) -> list[str]:
    """The names of the files that `read_items` reads; none for a folder of another kind."""
    if not is_items(folder):
        return []
    top = _top(folder)
    items, size = _dict(folder, top.get("metadata")), top.get("world_size")
    ranks = range(size if type(size) is int else 0)
    matches = filter(None, map(_NAME.fullmatch, folders.names(folder)))
    return [ITEMS, *(match[0] for match in matches if match[1] in items and int(match[2]) in ranks)]


def read_items(folder: str) -> Directory:
    """Read the metadata and every rank's files of its items, whose tensors become chunks of one directory.

    Raises UnsupportedLayout for another version, unknown kinds of metadata, and states by number; CheckpointDamaged for
    ranks that disagree, and what reading a file raises.
    """
    top = _top(folder)
    where = os.path.join(folder, ITEMS)
    if (version := top.get("version")) != _TESTED:
        what = f"its version is not supported: only {_TESTED}, which torch_checkpointing 0.1.1 saves, is read"
        _refuse(UnsupportedLayout.fault(where, what, _TESTED, str(version), mend=_AGAIN))
    size, items = top.get("world_size"), _dict(folder, top.get("metadata"))
    if type(size) is not int or size < 1:
        _refuse(damaged(where, "does not say how many ranks saved", "a number", str(size)))
    if wrong := [str(item) for item in items if not isinstance(item, str) or item != os.path.basename(item)]:
        _refuse(damaged(where, "names an item that no file of the folder can have", "a file's name", repr(wrong[0])))
    read = _Items(folder=folder)
    weights: dict[str, Shape] = {}
    for item in sorted(items, key=lambda item: item not in MODELS):
        entry = _dict(folder, items[item])
        layout = _dict(folder, entry.get("rank_to_layout_info"))
        if len(layout) != size or set(layout) != set(range(size)):
            _refuse(damaged(where, f"{item} was not saved by all ranks", f"{size} ranks", ", ".join(map(str, layout))))
        if any(value is not None for value in layout.values()):
            what = f"{item} has files of a layout of its own (other names or kinds), which is not read here"
            _refuse(UnsupportedLayout.fault(where, what, mend=_AGAIN))
        read.add(str(item), _dict(folder, entry.get("nested_path_to_metadata")), size, weights)
    raise_faults(read.faults, subject=f"checkpoint {folder}")
    return Directory(path=where, tensors=read.tensors, objects={}, paths=read.paths, values=read.values)


def _top(folder: str) -> Tree:
    path = os.path.join(folder, ITEMS)
    with PositionedFile(path) as file:
        held = read_pickle(file.read(0, min(file.nbytes, _METADATA_NBYTES)), where=path, persistent=_no_storage)
    if not isinstance(held, dict) or not {"metadata", "world_size", "version"} <= held.keys():
        _refuse(damaged(path, "is no metadata of torch_checkpointing", "metadata, world_size, version", "others"))
    return held


def _no_storage(identity: object) -> object:
    raise ValueError("names an object outside the file")


def _dict(folder: str, value: object) -> Tree:
    if not isinstance(value, dict):
        found = type(value).__name__
        _refuse(damaged(os.path.join(folder, ITEMS), "is no metadata of torch_checkpointing", "a dict", found))
    return value


def _refuse(fault: Fault) -> NoReturn:
    raise error_of([fault], subject="reading a checkpoint")


@dataclass(slots=True, kw_only=True)
class _Items:
    """What the items hold, by keys of one state dict that has them all."""

    folder: str
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def add(self, item: str, told: Tree, size: int, weights: dict[str, Shape]) -> None:
        """Read an item's files; `weights` gets the shapes of a model's."""
        files = [os.path.join(self.folder, f"{item}_{rank}.pt") for rank in range(size)]
        trees: list[object] = []
        for file in files:
            with open_archive(file) as archive:
                trees.append(archive.load())
        tensors = {_keys(text): entries for text, entries in told.items()}
        if len(tensors) < len(told):
            where = os.path.join(self.folder, ITEMS)
            self.faults.append(damaged(where, f"describes a tensor of {item} twice", "once", "twice"))
        if any(type(name) is int for names in tensors for name in names if names[:1] == ("state",)):
            what = f"{item} has states by number (optimizer.state_dict()), and nothing names their parameters"
            mend = "save get_optimizer_state_dict(model, optimizer), or load it with torch_checkpointing"
            self.faults.append(UnsupportedLayout.fault(files[0], what, mend=mend))
            return
        for names, entries in tensors.items():
            if parts := list(self._parts(files, trees, names, entries)):
                self._add_tensor((item, *names), files, parts, weights)
        try:
            values = [{names: value for names, value in _leaves(tree) if names not in tensors} for tree in trees]
        except RecursionError:  # nothing else nests as deep
            _refuse(damaged(files[0], f"{item} contains itself, here or in another rank's file", "a tree", "a loop"))
        for file, others in zip(files, values, strict=True):
            if canonical(others) != canonical(values[0]):
                what = "its param groups, or other values that are no tensors, are not rank 0's: of another step or run"
                self.faults.append(damaged(file, what, "the same on all ranks", "others"))
        for names, value in values[0].items():
            if _local(value)[0] is not None and names[:1] != (_GROUPS,):
                what = f"{'.'.join(map(str, names))} is a tensor that {ITEMS} does not have"
                self.faults.append(damaged(files[0], what, "a description", "none"))
            else:
                self._put((item, *names), _read(files[0], value))

    def _put(self, path: Path, value: object) -> None:
        self.values[self._key(path)] = value

    def _key(self, path: Path) -> str:
        """Note a path, and return its text, which no other may have."""
        key = ".".join(map(str, path))
        if self.paths.setdefault(key, path) != path:
            what = f"{key} is the text of two paths, {self.paths[key]} and {path}"
            mend = "save them under names that differ, whatever is nested"
            self.faults.append(UnsupportedLayout.fault(os.path.join(self.folder, ITEMS), what, mend=mend))
        return key

    def _parts(
        self, files: Sequence[str], trees: Sequence[object], names: Path, entries: object
    ) -> Iterator[tuple[int, Shape, Shape, Shape, TensorRecord]]:
        """Each rank's part of a tensor: the rank, the whole shape, the part's offset and size, and its tensor."""
        name = ".".join(map(str, names))
        if not entries or not isinstance(entries, list):
            self.faults.append(damaged(files[0], f"{name} is described by nothing in {ITEMS}", "an entry", "none"))
        for entry in map(_attributes, entries if isinstance(entries, list) else ()):
            described = _attributes(entry.get("sharding_metadata"))
            if (kind := described.get("type")) != "DTensorShardingMetadata":
                what = f"{name} is described by {kind}: DTensorShardingMetadata is read"
                self.faults.append(UnsupportedLayout.fault(files[0], what, mend=_AGAIN))
                continue
            mesh, ranks = _Mesh.of(_attributes(described.get("data"))), _numbers(entry.get("ranks")) or ()
            if mesh is None or not ranks or not set(ranks) <= {*mesh.ranks} & {*range(len(trees))}:
                expected, found = "Shard, StridedShard, Replicate of its ranks", f"{described.get('data')}"
                self.faults.append(damaged(files[0], f"{name} has placements that are not known", expected, found))
                continue
            for rank in ranks:
                value: object = trees[rank]
                for depth, one in enumerate(names):
                    value = _nested(value, names[:depth]).get(one)
                (local, saved), place = _local(value), mesh.place(rank)
                offset, size = mesh.box(place)
                if local is None or (local.shape != size and (local.numel or prod(size))):
                    what = f"{name}: its part is not rank {rank}'s of the mesh that {ITEMS} says"
                    found = "no tensor" if local is None else str(list(local.shape))
                    self.faults.append(damaged(files[rank], what, str(list(size)), found))
                elif saved not in (None, place):
                    what = f"{name} was saved by another rank than the file's name says"
                    self.faults.append(damaged(files[rank], what, f"{place} of the mesh", str(saved)))
                elif not local.contiguous:
                    self.faults.append(UnsupportedLayout.fault(files[rank], f"{name} is not row-major", mend=_AGAIN))
                else:
                    yield rank, mesh.shape, offset, size, local

    def _add_tensor(
        self,
        path: Path,
        files: Sequence[str],
        parts: Sequence[tuple[int, Shape, Shape, Shape, TensorRecord]],
        weights: dict[str, Shape],
    ) -> None:
        """Add a tensor of its parts; those that several ranks hold must be equal."""
        kept: dict[tuple[Shape, Shape], tuple[int, TensorRecord]] = {}
        for rank, _, offset, size, local in parts:
            first, one = kept.setdefault((offset, size), (rank, local))
            if local.dtype != parts[0][-1].dtype:
                what = f"{'.'.join(map(str, path))} is of another type than rank {parts[0][0]}'s"
                self.faults.append(damaged(files[rank], what, parts[0][-1].dtype.label, local.dtype.label))
            elif (local.element_offset, local.storage.crc32) != (one.element_offset, one.storage.crc32):
                what = f"{'.'.join(map(str, path))} is another than rank {first}'s, which holds the same part"
                self.faults.append(
                    damaged(
                        files[rank], f"{what}: of another step or run, or each rank has its own", "the same", "others"
                    )
                )
        rank, shape, *_, local = parts[0]
        key = tensor_key(path)
        if path[0] in MODELS:
            weights[key.name] = shape
        elif shape == () and (group_key(path) is not None or key.kind == "step" or weights.get(key.name, ()) != ()):
            self._put(path, _read(files[rank], local))
            return
        family = self._key(path)
        chunks = [Chunk(offset=offset, size=size, place=None, record=one) for (offset, size), (_, one) in kept.items()]
        self.tensors[family] = SavedTensor(shape=shape, dtype=local.dtype.label, chunks=tuple(chunks))


def _keys(text: object) -> Path:
    """The keys of a path, which the metadata has as a JSON list."""
    try:
        keys = json.loads(str(text))
    except (ValueError, RecursionError):
        keys = None
    plain = isinstance(keys, list) and all(isinstance(key, str | int) for key in keys)
    return tuple(keys) if plain else (str(text),)


def _nested(value: object, path: Path) -> Tree:
    """What lies below a path, by its keys: that of a dict, or of the list of param groups; empty for anything else."""
    return dict(enumerate(value)) if path == (_GROUPS,) and isinstance(value, list) else _attributes(value)


def _leaves(tree: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """The values of an item by their paths; each of a param group is one."""
    nested = dict(enumerate(tree)) if path == (_GROUPS,) and isinstance(tree, list) else tree
    if not isinstance(nested, dict):
        yield path, tree
        return
    for name, value in nested.items():
        yield from _leaves(value, (*path, name))


def _read(path: str, value: object) -> object:
    """A value, that of a tensor of one element with its bytes."""
    if not isinstance(value, TensorRecord) or value.numel != 1:
        return value
    with open_archive(path) as archive:
        return ScalarTensor(dtype=value.dtype, shape=value.shape, data=archive.tensor_bytes(value))


def _local(value: object) -> tuple[TensorRecord | None, list[int] | None]:
    """The tensor that a rank holds of a DTensor, and its place on the mesh; or a plain tensor, and None."""
    place = None
    if isinstance(value, ObjectRecord) and str(value.callable) == "torch._tensor._rebuild_from_type_v2":
        state = value.args[3]
        inner = _attributes(state[1]) if isinstance(state, tuple) and len(state) == 2 else {}
        value = inner.get("_local_tensor")
        at = _attributes(_attributes(inner.get("_spec")).get("mesh")).get("_coordinate_on_dim")
        place = list(at) if isinstance(at, list | tuple) else None
    return value if isinstance(value, TensorRecord) else None, place


def _attributes(value: object) -> Tree:
    held = value.state if isinstance(value, ObjectRecord) else value
    return held if isinstance(held, dict) else {}


def _numbers(value: object) -> tuple[int, ...] | None:
    whole = isinstance(value, list | tuple) and all(type(one) is int and one >= 0 for one in value)
    return tuple(value) if whole and isinstance(value, list | tuple) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mesh:
    """How a tensor of this shape lies on a mesh; `dims` has for each of its dimensions the axis that it cuts, or None.

    The dimensions in `strided` cut after those to their right, as the other ones do in their order (`_StridedShard`,
    torch/distributed/tensor/placement_types.py, 2.13).
    """

    shape: Shape
    sizes: Shape
    ranks: tuple[int, ...]
    dims: tuple[int | None, ...]
    strided: tuple[int, ...]

    @classmethod
    def of(cls, data: Tree) -> _Mesh | None:
        """The mesh of a DTensorShardingMetadata; None if it is another, or of placements that are not known."""
        spec, placements = _attributes(data.get("mesh_spec")), data.get("placements")
        shape, sizes = _numbers(data.get("global_shape")), _numbers(spec.get("mesh_shape"))
        ranks = _numbers(spec.get("mesh_data"))
        told = [_attributes(one) for one in placements] if isinstance(placements, list | tuple) else []
        if shape is None or not sizes or ranks is None or len(ranks) != prod(sizes) or len(told) != len(sizes):
            return None
        dims: list[int | None] = []
        for one in told:
            dim = one.get("dim")
            if one.get("type") in ("Shard", "StridedShard") and type(dim) is int and 0 <= dim < len(shape):
                dims.append(dim)
            elif one.get("type") == "Replicate":
                dims.append(None)
            else:
                return None
        strided = tuple(d for d, one in enumerate(told) if one.get("type") == "StridedShard")
        for d in strided:
            if told[d].get("split_factor") != prod(sizes[e] for e in range(d + 1, len(sizes)) if dims[e] == dims[d]):
                return None
        return cls(shape=shape, sizes=sizes, ranks=ranks, dims=tuple(dims), strided=strided)

    def place(self, rank: int) -> list[int]:
        """Where a rank is on the mesh."""
        at, place = self.ranks.index(rank), list[int]()
        for size in reversed(self.sizes):
            place.insert(0, at % size)
            at //= size
        return place

    def box(self, place: Sequence[int]) -> tuple[Shape, Shape]:
        """Offset and size of what the rank at a place holds."""
        offset, extent = [0] * len(self.shape), list(self.shape)
        for d in [*(d for d in range(len(self.sizes)) if d not in self.strided), *reversed(self.strided)]:
            if (dim := self.dims[d]) is not None:
                chunk = -(-extent[dim] // self.sizes[d])
                start = min(place[d] * chunk, extent[dim])
                offset[dim], extent[dim] = offset[dim] + start, min(chunk, extent[dim] - start)
        return tuple(offset), tuple(extent)
