"""The parameters of a nanotron checkpoint, from the headers of its weight files: shapes, and how each is cut.

Which part a tensor-parallel shard holds say nanotron's SlicesPairs, here as boxes in storage order.

The texts are those of `SlicesPair.__str__` and `TensorMetadata.to_str_dict` (parallel/parameters.py,
serialize/metadata.py, commit 2411b02): pair;pair, local#global, one slice a dimension with | between, start,stop,step
with None for what is not said. With numpy 2 sizes read "np.int64(16)".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ds_reshard.containers.safetensors import read_header
from ds_reshard.errors import Fault, ReshardError, damaged, fail, faults_of
from ds_reshard.formats.nanotron.names import NanotronListing
from ds_reshard.model.layout import Cut, Placement, TensorKey, check_cover, placement_of_parts
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Box, Part, Shape, parts_of

Slice = tuple[int | None, int | None]
_NUMPY = re.compile(r"np\.int\d*\((\d+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesPair:
    """Elements of a shard and of the whole parameter that are the same; (None, None) is a whole dimension."""

    local: tuple[Slice, ...]
    whole: tuple[Slice, ...]

    def __str__(self) -> str:
        return "#".join("|".join(f"{start},{stop},None" for start, stop in side) for side in (self.local, self.whole))


def parse_shape(text: str) -> Shape:
    """A shape as nanotron writes it; ValueError for anything else."""
    plain = _NUMPY.sub(r"\1", text).strip()
    if not (plain.startswith("(") and plain.endswith(")")):
        raise ValueError(f"{text!r} is no shape")
    return tuple(int(size) for size in plain[1:-1].split(",") if size.strip())


def parse_pairs(text: str) -> tuple[SlicesPair, ...]:
    """`local_global_slices_pairs`; ValueError where it is not of that grammar, or has a step."""
    pairs = []
    for pair in _NUMPY.sub(r"\1", text).split(";"):
        local, whole = (tuple(map(_slice, side.split("|"))) for side in pair.split("#"))
        if len(local) != len(whole):
            raise ValueError(f"{pair!r} has sides of different dimensions")
        pairs.append(SlicesPair(local=local, whole=whole))
    return tuple(pairs)


def _slice(text: str) -> Slice:
    start, stop, step = (None if word == "None" else int(word) for word in text.split(","))
    if step not in (None, 1):
        raise ValueError(f"{text!r} has a step")
    return start, stop


def tiles_of(pairs: Sequence[SlicesPair], local: Shape, whole: Shape) -> list[Part]:
    """The boxes that a shard of shape `local` holds of a parameter of shape `whole`, in the order of its storage.

    Raises ValueError unless the pairs cover the shard, each element once, and lie inside the parameter.
    """
    tiles: list[Part] = []
    for pair in pairs if prod(local) else ():
        inner, outer = _box(pair.local, local), _box(pair.whole, whole)
        if inner.size != outer.size:
            raise ValueError(f"{pair} pairs {inner.size} with {outer.size} elements")
        tiles += parts_of(outer, inner, local)
    tiles.sort(key=lambda tile: tile.element_offset)
    at = 0
    for tile in tiles:
        if tile.element_offset != at:
            raise ValueError(f"element {at} of the shard is in no pair, or in two")
        at += tile.box.numel
    if at != prod(local):
        raise ValueError(f"element {at} of the shard is in no pair")
    return tiles


def _box(slices: Sequence[Slice], shape: Shape) -> Box:
    if len(slices) != len(shape):
        raise ValueError(f"{len(slices)} slices, for a tensor of shape {list(shape)}")
    edges = [(start or 0, stop if stop is not None else n) for (start, stop), n in zip(slices, shape, strict=True)]
    if any(not 0 <= start <= stop <= n for (start, stop), n in zip(edges, shape, strict=True)):
        raise ValueError(f"slices {edges} leave a tensor of shape {list(shape)}")
    return Box(offset=tuple(start for start, _ in edges), size=tuple(stop - start for start, stop in edges))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a parameter is cut at any tensor-parallel size: along `axis`, inside each of its `chunks`.

    `plain` where nanotron was given no contiguous chunks: local slices then say nothing.
    """

    axis: int
    chunks: tuple[int, ...]
    plain: bool

    def pairs(self, ndim: int, rank: int, size: int) -> tuple[SlicesPair, ...]:
        """What `create_sharded_parameter_from_config` (parallel/sharded_parameters.py) gives a rank.

        Raises ValueError where a chunk cannot be cut into equal parts.
        """
        found, at = [], 0
        for chunk in self.chunks:
            if chunk % size:
                raise ValueError(f"{chunk} elements along dimension {self.axis} are no multiple of {size}")
            part = chunk // size
            local: Slice = (None, None) if self.plain else (at // size, at // size + part)
            whole: Slice = (at + rank * part, at + (rank + 1) * part)
            found.append(
                SlicesPair(
                    local=tuple(local if axis == self.axis else (None, None) for axis in range(ndim)),
                    whole=tuple(whole if axis == self.axis else (None, None) for axis in range(ndim)),
                )
            )
            at += chunk
        return tuple(found)

    def local_shape(self, shape: Shape, size: int) -> Shape:
        return tuple(n // size if axis == self.axis else n for axis, n in enumerate(shape))


def split_of(ranks: Sequence[Sequence[SlicesPair]], shape: Shape) -> Split | None:
    """The rule behind the pairs of all ranks, None where they are of another rule than nanotron's own."""
    axes = {axis for pairs in ranks for pair in pairs for axis, of in enumerate(pair.whole) if of != (None, None)}
    if len(axes) != 1 or len({len(pairs) for pairs in ranks}) != 1:
        return None
    (axis,) = axes
    chunks = tuple(
        sum((pairs[number].whole[axis][1] or 0) - (pairs[number].whole[axis][0] or 0) for pairs in ranks)
        for number in range(len(ranks[0]))
    )
    plain = all(of == (None, None) for pairs in ranks for pair in pairs for of in pair.local)
    split = Split(axis=axis, chunks=chunks, plain=plain)
    try:
        same = all(split.pairs(len(shape), rank, len(ranks)) == tuple(pairs) for rank, pairs in enumerate(ranks))
    except ValueError:
        return None
    return split if same and sum(chunks) == shape[axis] else None


def dp_cut(numel: int, dp: int) -> tuple[int, int]:
    """(elements of the first ranks, how many ranks those are): all others hold one less.

    `_partition_parameters` of optim/zero.py: ceil(numel / dp), and one less for the last ranks.
    """
    chunk = max(1, -(-numel // dp))
    return chunk, dp - (chunk * dp - numel)


DATA = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter; `files` has its weight by tensor-parallel rank (0 alone where it is not sharded).

    `pairs` are the slices of each rank's shard, empty where it is not sharded.
    """

    name: str
    shape: Shape
    dtype: ElementType
    files: Mapping[int, TensorRecord]
    pairs: tuple[tuple[SlicesPair, ...], ...] = ()
    tiles: tuple[tuple[Part, ...], ...] = ()

    @property
    def sharded(self) -> bool:
        return bool(self.pairs)

    def tiles_at(self, tp: int) -> Sequence[Part]:
        """The boxes that a tensor-parallel rank holds: all of a parameter that is not sharded."""
        return self.tiles[tp] if self.sharded else (Part(Box.whole(self.shape), 0),)

    def local_numel(self, tp: int) -> int:
        return self.files[tp if self.sharded else 0].numel

    def local_shape(self, tp: int) -> Shape:
        return self.files[tp if self.sharded else 0].shape

    @property
    def family(self) -> str:
        """Its weight's files, one a tensor-parallel rank."""
        return f"model/{self.name}"

    def weight(self) -> Placement:
        cuts = {tp: Cut(chunk=max(1, self.local_numel(tp)), first=tp) for tp in self.files}
        return place(self, "weight", self.dtype, self.family, DATA, cuts)


def place(
    parameter: Parameter,
    kind: str,
    dtype: ElementType,
    family: str,
    buffer: str,
    cuts: Mapping[int, Cut],
    *,
    copy: int = 0,
) -> Placement:
    """A tensor of the parameter's shape, whose shard of each tensor-parallel rank is cut as `cuts` says."""
    key, shape = TensorKey(name=parameter.name, kind=kind, copy=copy), parameter.shape
    whole = Placement(key, shape, dtype, family, buffer, Cut(chunk=max(1, prod(shape))), Box.whole(shape))
    return placement_of_parts(whole, ((cut, parameter.tiles_at(tp)) for tp, cut in cuts.items()))


def read_parameters(listing: NanotronListing, tp: int) -> tuple[dict[str, Parameter], list[Fault]]:
    """Every parameter that has weight files; a fault for each that is not whole or not as it says."""
    found: dict[str, Parameter] = {}
    faults: list[Fault] = []
    for name, files in listing.weights.items():
        try:
            if None in files:
                tensor, _ = _tensor(listing.path(files[None]))
                found[name] = Parameter(name=name, shape=tensor.shape, dtype=tensor.dtype, files={0: tensor})
            else:
                found[name] = _sharded(listing, name, {rank or 0: file for rank, file in files.items()}, tp)
        except ReshardError as error:
            faults += faults_of(error)
    if not listing.weights:
        faults.append(damaged(f"{listing.folder}/model", "holds no weights", "a file of each parameter", "none"))
    return found, faults


def _tensor(path: str) -> tuple[TensorRecord, Mapping[str, str]]:
    header = read_header(path)
    tensor = header.tensors.get(DATA)
    if tensor is None:
        raise fail(path, "holds no weight", f"a tensor {DATA!r}", ", ".join(header.tensors) or "none")
    return tensor, header.metadata


def _sharded(listing: NanotronListing, name: str, files: Mapping[int, str], tp: int) -> Parameter:
    folder, absent = f"{listing.folder}/model", [rank for rank in range(tp) if rank not in files]
    if absent or len(files) != tp:
        what = f"parameter {name} has not the files of all tensor-parallel ranks"
        raise fail(folder, what, f"ranks 0 to {tp - 1}", f"ranks {sorted(files)}")
    tensors, ranks, shapes = {}, [], set()
    tiles: list[tuple[Part, ...]] = []
    for rank in range(tp):
        path = listing.path(files[rank])
        tensor, said = _tensor(path)
        try:
            shape = parse_shape(said["unsharded_shape"])
            pairs = parse_pairs(said["local_global_slices_pairs"])
            tiles.append(tuple(tiles_of(pairs, tensor.shape, shape)))
        except (KeyError, ValueError) as error:
            raise fail(
                path, f"does not say which part it holds: {error}", "unsharded_shape and slices", "others"
            ) from None
        tensors[rank] = tensor
        ranks.append(pairs)
        shapes.add((shape, tensor.dtype.label))
    if len(shapes) > 1:
        raise fail(folder, f"shards of {name} are of several saves", "one shape and type", str(sorted(shapes)))
    shape, _ = next(iter(shapes))
    starts = [held[0].box.offset for held in tiles if held]
    if starts != sorted(starts):
        raise fail(
            folder,
            f"shards of {name} are under each other's names",
            "parts in the order of the ranks",
            f"parts that begin at {', '.join(str(list(start)) for start in starts)}",
        )
    try:
        check_cover([tile.box for held in tiles for tile in held], shape)
    except ValueError as error:
        raise fail(
            folder, f"shards of {name} do not make up the parameter: {error}", str(list(shape)), "others"
        ) from None
    return Parameter(
        name=name, shape=shape, dtype=tensors[0].dtype, files=tensors, pairs=tuple(ranks), tiles=tuple(tiles)
    )
