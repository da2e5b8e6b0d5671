"""The parameters of a nanotron checkpoint, from the headers of its weight files: shapes, and how each is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ds_reshard.containers.safetensors import read_header
from ds_reshard.errors import Fault, ReshardError, damaged, fail, faults_of
from ds_reshard.formats.nanotron.names import NanotronListing
from ds_reshard.formats.nanotron.slices import SlicesPair, Tile, parse_pairs, parse_shape, tiles_of
from ds_reshard.model.layout import Cut, Placement, TensorKey, check_cover
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Box

Shape = tuple[int, ...]
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
    tiles: tuple[tuple[Tile, ...], ...] = ()

    @property
    def sharded(self) -> bool:
        return bool(self.pairs)

    @property
    def whole_tile(self) -> Tile:
        return Tile(box=Box.whole(self.shape), element_offset=0)

    def tiles_at(self, tp: int) -> Sequence[Tile]:
        """The boxes that a tensor-parallel rank holds: all of a parameter that is not sharded."""
        return self.tiles[tp] if self.sharded else (self.whole_tile,)

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
    key = TensorKey(name=parameter.name, kind=kind, copy=copy)
    tiles = tuple(
        Placement(
            key=key,
            shape=parameter.shape,
            dtype=dtype,
            family=family,
            buffer=buffer,
            box=tile.box,
            cut=Cut(chunk=cut.chunk, wide=cut.wide, first=cut.first, phase=tile.element_offset),
        )
        for tp, cut in cuts.items()
        for tile in parameter.tiles_at(tp)
    )
    if len(tiles) == 1:
        return tiles[0]
    return Placement(
        key=key,
        shape=parameter.shape,
        dtype=dtype,
        family=family,
        buffer=buffer,
        box=Box.whole(parameter.shape),
        cut=Cut(chunk=max(1, prod(parameter.shape))),
        tiles=tiles,
    )


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
    tiles: list[tuple[Tile, ...]] = []
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
