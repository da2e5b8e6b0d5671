"""Layout: the rule by which a format places every logical tensor; complete, small, valid by construction."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box, Part, Region


class TensorKey(NamedTuple):
    """One logical tensor: a parameter (or buffer) name and a kind.

    The kind is `weight`, `fp32`, or the name of an optimizer state such as `exp_avg`. `copy` tells apart the equal
    tensors that a target writes more than once, as each tensor-parallel rank has those that are not cut.
    """

    name: str
    kind: str
    copy: int = 0

    def __str__(self) -> str:
        return f"{self.name}[{self.kind}]"


class Piece(NamedTuple):
    """Elements [start, stop) of a placement's box, at `element_offset` of the buffer of shard `shard`."""

    shard: int
    start: int
    stop: int
    element_offset: int


class Cut(NamedTuple):
    """How a box is cut over shards, all counted in elements.

    Element x lies in shard (x + phase) // chunk + first, at (x + phase) % chunk + origin of that shard's buffer.
    A ZeRO-1/2 partition of a flat group has `phase` = the parameter's offset in the group and `chunk` =
    the partition size; a ZeRO-3 partition has `chunk` = ceil(numel / dp) and `origin` = its offset in
    the sub-group; a whole tensor has one chunk. With `wide`, only so many shards hold `chunk` elements, and those
    behind them one less. With `step`, the shards are first, first + step and so on, as ranks with the same experts are.
    """

    chunk: int
    phase: int = 0
    origin: int = 0
    first: int = 0
    wide: int | None = None
    step: int = 1

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The pieces of elements [start, stop), in order; cost is their number."""
        at = start
        while at < stop:
            shard, inside, chunk = self._place(at + self.phase)
            end = min(stop, at + chunk - inside)
            yield Piece(shard * self.step + self.first, at, end, inside + self.origin)
            at = end

    def piece(self, shard: int, numel: int) -> Piece | None:
        """The piece of `shard` of a box of `numel` elements, None when it holds none."""
        number, beside = divmod(shard - self.first, self.step)
        if number < 0 or beside:
            return None
        begin = number * self.chunk - self.phase
        end = begin + self.chunk
        if self.wide is not None:
            begin, end = begin - max(0, number - self.wide), end - max(0, number + 1 - self.wide)
        start, stop = max(0, begin), min(numel, end)
        return Piece(shard, start, stop, start - begin + self.origin) if start < stop else None

    def _place(self, element: int) -> tuple[int, int, int]:
        """The number of an element's shard, its place there, and how many that shard holds."""
        if self.wide is None or element < self.wide * self.chunk:
            return (*divmod(element, self.chunk), self.chunk)
        number, inside = divmod(element - self.wide * self.chunk, self.chunk - 1)
        return number + self.wide, inside, self.chunk - 1


class Holder(NamedTuple):
    """Who holds a replica: which of the pipeline stages that have the tensor, and which of the ranks, both from 0."""

    stage: int = 0
    rank: int = 0


class Replica(NamedTuple):
    """Another place of a tensor, which holds the same values."""

    holder: Holder
    placement: Placement


class Placement(NamedTuple):
    """Where one logical tensor lies.

    `family` names a set of shards (the optimizer files, the model files, the ranks of a run), `buffer`
    a flat buffer that each shard of the family has; `box` is the part of the tensor that this family
    holds. `replicated` means that every shard holds the box whole (pieces are then those of shard 0).

    A tensor that lies in several boxes (tensor parallelism) has them as `tiles`, each a placement of the same tensor
    in the same buffer, which together cover it; `box` is then all of it, and `cut` says nothing.

    `replicas` of a saved tensor are read to be compared with it, and no plan reads them.
    """

    key: TensorKey
    shape: tuple[int, ...]
    dtype: ElementType
    family: str
    buffer: str
    cut: Cut
    box: Box
    replicated: bool = False
    tiles: tuple[Placement, ...] = ()
    replicas: tuple[Replica, ...] = ()

    @property
    def numel(self) -> int:
        return self.box.numel

    @property
    def parts(self) -> tuple[Placement, ...]:
        """The placements of its boxes: the tiles, or itself."""
        return self.tiles or (self,)

    def piece(self, shard: int) -> Piece | None:
        """What `shard` holds of this tensor's one box."""
        return self.cut.piece(0 if self.replicated else shard, self.box.numel)

    def regions(self, shard: int) -> Iterator[tuple[Region, int]]:
        """What `shard` holds of this tensor, box by box, with the element offset of each in its buffer."""
        for part in self.parts:
            piece = part.piece(shard)
            if piece is not None:
                yield part.region(piece), piece.element_offset

    def region(self, piece: Piece) -> Region:
        return Region(box=self.box, start=piece.start, stop=piece.stop)


def chunked_placement(
    key: TensorKey, shape: tuple[int, ...], dtype: ElementType, boxes: Sequence[Box], *, family: str, buffer: str
) -> Placement:
    """A tensor of which shard i of the family holds all of `boxes[i]`, from the beginning of its buffer.

    ValueError unless each element lies in one box.
    """
    check_cover(boxes, shape)
    tiles = [(shard, 0, box) for shard, box in enumerate(boxes)]
    return tiled_placement(key, shape, dtype, tiles, family=family, buffer=buffer)


Tile = tuple[int, int, Box]
"""A box of a tensor, at an element of the buffer of a shard: (shard, element, box)."""


def tiled_placement(
    key: TensorKey, shape: tuple[int, ...], dtype: ElementType, tiles: Iterable[Tile], *, family: str, buffer: str
) -> Placement:
    """A tensor that lies in boxes: each whole in a shard of the family, at an element of its buffer."""
    box = Box.whole(shape)
    whole = Placement(key, shape, dtype, family, buffer, Cut(chunk=max(1, box.numel)), box)
    cuts = ((Cut(chunk=max(1, box.numel), origin=origin, first=shard), box) for shard, origin, box in tiles)
    return whole._replace(tiles=tuple(whole._replace(cut=cut, box=box) for cut, box in cuts))


def placement_of_parts(whole: Placement, shards: Iterable[tuple[Cut, Iterable[Part]]]) -> Placement:
    """A tensor that lies in parts of shards, each shard cut as its `Cut` says; of one part that part's placement."""
    tiles = tuple(
        whole._replace(box=part.box, cut=cut._replace(phase=cut.phase + part.element_offset))
        for cut, parts in shards
        for part in parts
    )
    return tiles[0] if len(tiles) == 1 else whole._replace(tiles=tiles)


class Tiles:
    """The tiles of a tensor, two or more, in the order of the axis along which it is cut into most of them.

    Those that a region meets are then found without a look at all others; of tiles that are cut along that axis alone
    the cost is their number, and the logarithm of that of all.
    """

    def __init__(self, tiles: Sequence[Placement]) -> None:
        self._axis = max(range(len(tiles[0].shape)), key=lambda axis: len({tile.box.offset[axis] for tile in tiles}))
        self._tiles = sorted(tiles, key=lambda tile: tile.box.offset[self._axis])
        offsets = [tile.box.offset[self._axis] for tile in self._tiles]
        sizes = [tile.box.size[self._axis] for tile in self._tiles]
        self._begins, self._ends = offsets, list(accumulate(map(sum, zip(offsets, sizes, strict=True)), max))

    def candidates(self, wanted: Region) -> Sequence[Placement]:
        """The tiles that may have elements of a region."""
        begin, end = wanted.extent(self._axis)
        return self._tiles[bisect_right(self._ends, begin) : bisect_left(self._begins, end)]


def check_cover(boxes: Sequence[Box], shape: tuple[int, ...]) -> None:
    """ValueError unless each element of a tensor of this shape lies in one box."""
    for box in boxes:
        if any(at + size > end for at, size, end in zip(box.offset, box.size, shape, strict=True)):
            raise ValueError(f"a box at {box.offset} of size {box.size} leaves the tensor's shape {shape}")
    if sum(box.numel for box in boxes) != prod(shape):
        raise ValueError(f"boxes of {sum(box.numel for box in boxes)} elements for {prod(shape)}")
    axis = max(range(len(shape)), key=lambda axis: len({box.offset[axis] for box in boxes}), default=0)
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset[axis : axis + 1]):
        open_boxes = [one for one in open_boxes if one.offset[axis] + one.size[axis] > box.offset[axis]]
        for one in open_boxes:
            if one.intersects(box):
                raise ValueError(f"boxes at {one.offset} and {box.offset} overlap")
        open_boxes.append(box)


class Layout:
    """Every logical tensor's placement, and the number of shards of each family.

    Built once from the little that all shards share; the same on every rank. The constructor refuses
    (ValueError: a bug of the reader) tensors that overlap in a buffer or that do not fit their shards.
    """

    def __init__(self, placements: Mapping[TensorKey, Placement], shards: Mapping[str, int]) -> None:
        self.placements = dict(placements)
        self.shards = dict(shards)
        self._by_buffer: dict[tuple[str, str], list[Placement]] = {}
        self._buffers: dict[str, list[str]] = {}
        self._kinds: dict[str, list[str]] = {}
        by_buffer, kinds = self._by_buffer, self._kinds
        for key, placement in self.placements.items():
            name, kind, _ = key
            place = placement.family, placement.buffer
            if place in by_buffer:
                by_buffer[place] += placement.tiles or (placement,)
            else:
                by_buffer[place] = list(placement.tiles or (placement,))
                self._buffers.setdefault(placement.family, []).append(placement.buffer)
            if name in kinds:
                kinds[name].append(kind)
            else:
                kinds[name] = [kind]
        for (family, buffer), members in by_buffer.items():
            if len(members) == 1:
                self._check_fit(family, buffer, members)
                continue
            by_first: dict[tuple[int, int], list[Placement]] = {}
            for member in members:
                by_first.setdefault((member.cut.first, member.cut.step), []).append(member)
            for together in by_first.values():
                self._check(family, buffer, together)

    def __reduce__(self) -> tuple[Callable[..., Layout], tuple[object, ...]]:
        """As columns: a pickle of many placements is then one of few objects, and small."""
        rows = [(*one.key, *one[1:]) for one in self.placements.values()]
        return _layout_of, (self.shards, *([row[at] for row in rows] for at in range(_COLUMNS)))

    def __getitem__(self, key: TensorKey) -> Placement:
        return self.placements[key]

    def __contains__(self, key: TensorKey) -> bool:
        return key in self.placements

    def replicas(self) -> dict[Holder, Layout]:
        """What each other holder has: a layout of the same tensors, in its places."""
        found: dict[Holder, dict[TensorKey, Placement]] = {}
        for key, placement in self.placements.items():
            for holder, replica in placement.replicas:
                found.setdefault(holder, {})[key] = replica
        return {holder: Layout(placements, self.shards) for holder, placements in sorted(found.items())}

    def kinds(self, name: str) -> list[str]:
        return list(dict.fromkeys(self._kinds.get(name, ())))

    def in_buffer(self, family: str, buffer: str) -> list[Placement]:
        """The placements of one buffer, those of tiles for the tensor, in the order in which they were declared."""
        return self._by_buffer.get((family, buffer), [])

    def pieces(self, family: str, buffer: str, shard: int) -> Iterator[tuple[Placement, Piece]]:
        """The placements of one buffer that `shard` holds a piece of, with it."""
        for placement in self.in_buffer(family, buffer):
            piece = placement.piece(shard)
            if piece is not None:
                yield placement, piece

    def buffers(self, family: str) -> list[str]:
        return self._buffers.get(family, [])

    def _check(self, family: str, buffer: str, members: list[Placement]) -> None:
        filled = [member for member in members if member.numel]
        for before, after in pairwise(sorted(filled, key=_begin)):
            cut, behind = before.cut, after.cut
            if (cut.origin, cut.chunk) == (behind.origin, behind.chunk):
                apart = cut.phase + before.numel <= behind.phase
            else:
                apart = cut.origin + min(cut.chunk, cut.phase + before.numel) <= behind.origin
            if not apart:
                raise ValueError(f"buffer {buffer}: {before.key} and {after.key} overlap")
        self._check_fit(family, buffer, filled)

    def _check_fit(self, family: str, buffer: str, members: list[Placement]) -> None:
        for member in members:
            cut, numel = member.cut, member.box.numel
            if not numel:
                continue
            count = 1 if member.replicated else -((cut.first - self.shards[family]) // cut.step)
            room = cut.chunk * count - (max(0, count - cut.wide) if cut.wide is not None else 0)
            if cut.phase + numel > room:
                raise ValueError(f"buffer {buffer}: {member.key} does not fit {self.shards[family]} shards")


_COLUMNS = len(TensorKey._fields) + len(Placement._fields) - 1


@gc_disabled()
def _layout_of(
    shards: Mapping[str, int],
    names: Sequence[str],
    kinds: Sequence[str],
    copies: Sequence[int],
    *columns: Sequence[object],
) -> Layout:
    """The layout of placements as columns."""
    keys = list(map(TensorKey, names, kinds, copies))
    return Layout(dict(zip(keys, map(Placement._make, zip(keys, *columns, strict=True)), strict=True)), shards)


def _begin(placement: Placement) -> tuple[int, int]:
    """Where a box begins: the first element of its tensor's buffer in each shard, and how far it is behind that.

    Of a flat buffer, whose shards hold one after another, the first is that of the buffer.
    """
    return placement.cut.origin, placement.cut.phase
