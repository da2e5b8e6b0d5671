"""Layout: the rule that places every logical tensor; complete, small, and checked when it is made."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from ds_reshard.model.gc_pause import gc_disabled
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Axis, Box, Part, Region


class TensorKey(NamedTuple):
    """One logical tensor: a parameter (or buffer) name and a kind.

    The kind is `weight`, `fp32`, or the name of an optimizer state such as `exp_avg`. `copy` numbers the equal tensors
    that a target writes several times, as replicated tensors are written once per tensor-parallel rank.
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
    """How a box is cut over shards; all fields but `first`, `wide` and `step` count elements.

    Element x lies in shard (x + phase) // chunk + first, at (x + phase) % chunk + origin of that shard's buffer.
    A ZeRO-1/2 partition of a flat group has `phase` = the parameter's offset in the group and `chunk` =
    the partition size; a ZeRO-3 partition has `chunk` = ceil(numel / dp) and `origin` = its offset in
    the sub-group; a whole tensor has one chunk. If `wide` is set, the first `wide` shards hold `chunk` elements each
    and the others `chunk - 1`. The shards are numbered `first`, `first + step`, `first + 2 * step` and so on; a step
    above 1 occurs for expert parameters, which every ep-th rank holds.
    """

    chunk: int
    phase: int = 0
    origin: int = 0
    first: int = 0
    wide: int | None = None
    step: int = 1

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces of elements [start, stop), in order; the cost is their number."""
        begin = start
        while begin < stop:
            shard, inside, chunk = self._place(begin + self.phase)
            end = min(stop, begin + chunk - inside)
            yield Piece(shard * self.step + self.first, begin, end, inside + self.origin)
            begin = end

    def piece(self, shard: int, numel: int) -> Piece | None:
        """Return the piece that `shard` holds of a box of `numel` elements, None if it holds none."""
        number, remainder = divmod(shard - self.first, self.step)
        if number < 0 or remainder:
            return None
        begin = number * self.chunk - self.phase
        end = begin + self.chunk
        if self.wide is not None:
            begin, end = begin - max(0, number - self.wide), end - max(0, number + 1 - self.wide)
        start, stop = max(0, begin), min(numel, end)
        return Piece(shard, start, stop, start - begin + self.origin) if start < stop else None

    def _place(self, element: int) -> tuple[int, int, int]:
        """Return the number of an element's shard, its offset there, and how many elements the shard holds."""
        if self.wide is None or element < self.wide * self.chunk:
            return (*divmod(element, self.chunk), self.chunk)
        number, inside = divmod(element - self.wide * self.chunk, self.chunk - 1)
        return number + self.wide, inside, self.chunk - 1


class Holder(NamedTuple):
    """The holder of a replica: its index among the pipeline stages that have the tensor, and its tp rank."""

    stage: int = 0
    rank: int = 0


class Replica(NamedTuple):
    """A second copy of a tensor, which should hold the same values."""

    holder: Holder
    placement: Placement


class Placement(NamedTuple):
    """Where one logical tensor lies.

    `family` names a set of shards (the optimizer files, the model files, the ranks of a run), `buffer`
    a flat buffer that each shard of the family has; `box` is the part of the tensor that this family
    holds. `replicated` means that every shard holds the whole box (its pieces are then those of shard 0).

    A tensor that lies in several boxes (tensor parallelism, or a map that joins tensors) has them as `tiles`:
    placements of the same tensor, each in a buffer of its family, which together cover it. `box` is then the whole
    tensor, and `cut` is not used; `family` and `buffer` are those of the first tile.

    `replicas` of a saved tensor are only read to be compared with it; no plan reads them.

    A box is row-major, or has the axes `axes`, the outermost first, if a map transposes a saved tensor.
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
    axes: tuple[Axis, ...] = ()

    @property
    def numel(self) -> int:
        return self.box.numel

    @property
    def parts(self) -> tuple[Placement, ...]:
        """The placements of its boxes: the tiles, or itself."""
        return self.tiles or (self,)

    def piece(self, shard: int) -> Piece | None:
        """Return the piece of the box that `shard` holds, None if it holds none; for a tensor without tiles."""
        return self.cut.piece(0 if self.replicated else shard, self.box.numel)

    def regions(self, shard: int) -> Iterator[tuple[Region, int]]:
        """Yield the regions of the tensor that `shard` holds, each with its element offset in the buffer."""
        for part in self.parts:
            piece = part.piece(shard)
            if piece is not None:
                yield part.region(piece), piece.element_offset

    def region(self, piece: Piece) -> Region:
        return Region(box=self.box, start=piece.start, stop=piece.stop, axes=self.axes)

    def renamed(self, key: TensorKey) -> Placement:
        """Return the placement of the same elements as the tensor `key`, without replicas."""
        return self._replace(key=key, tiles=tuple(tile._replace(key=key) for tile in self.tiles), replicas=())


def chunked_placement(
    key: TensorKey, shape: tuple[int, ...], dtype: ElementType, boxes: Sequence[Box], *, family: str, buffer: str
) -> Placement:
    """Return the placement of a tensor whose `boxes[i]` is the beginning of the buffer of shard i of the family.

    Raises ValueError unless each element lies in one box.
    """
    check_cover(boxes, shape)
    tiles = [(shard, 0, box) for shard, box in enumerate(boxes)]
    return tiled_placement(key, shape, dtype, tiles, family=family, buffer=buffer)


Tile = tuple[int, int, Box]
"""A box of a tensor, at an element of the buffer of a shard: (shard, element, box)."""


def tiled_placement(
    key: TensorKey, shape: tuple[int, ...], dtype: ElementType, tiles: Iterable[Tile], *, family: str, buffer: str
) -> Placement:
    """Return the placement of a tensor that lies in boxes, each as a whole in one shard of the family."""
    box = Box.whole(shape)
    whole = Placement(key, shape, dtype, family, buffer, Cut(chunk=max(1, box.numel)), box)
    cuts = ((Cut(chunk=max(1, box.numel), origin=origin, first=shard), box) for shard, origin, box in tiles)
    return whole._replace(tiles=tuple(whole._replace(cut=cut, box=box) for cut, box in cuts))


def placement_of_parts(whole: Placement, shards: Iterable[tuple[Cut, Iterable[Part]]]) -> Placement:
    """Return the placement of a tensor that lies in parts of shards; each `Cut` says how that shard is cut further."""
    tiles = tuple(
        whole._replace(box=part.box, cut=cut._replace(phase=cut.phase + part.element_offset))
        for cut, parts in shards
        for part in parts
    )
    return tiles[0] if len(tiles) == 1 else whole._replace(tiles=tiles)


class Tiles:
    """The tiles of a tensor (at least two), sorted along the axis that is cut most often.

    `candidates` finds the tiles that may overlap a region by bisection, without looking at all tiles.
    """

    def __init__(self, tiles: Sequence[Placement]) -> None:
        self._axis = max(range(len(tiles[0].shape)), key=lambda axis: len({tile.box.offset[axis] for tile in tiles}))
        self._tiles = sorted(tiles, key=lambda tile: tile.box.offset[self._axis])
        offsets = [tile.box.offset[self._axis] for tile in self._tiles]
        sizes = [tile.box.size[self._axis] for tile in self._tiles]
        self._begins, self._ends = offsets, list(accumulate(map(sum, zip(offsets, sizes, strict=True)), max))

    def candidates(self, wanted: Region) -> Sequence[Placement]:
        """Return the tiles that may have elements of a region."""
        begin, end = wanted.extent(self._axis)
        return self._tiles[bisect_right(self._ends, begin) : bisect_left(self._begins, end)]


def check_cover(boxes: Sequence[Box], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless each element of a tensor of this shape lies in exactly one box."""
    for box in boxes:
        if any(at + size > end for at, size, end in zip(box.offset, box.size, shape, strict=True)):
            raise ValueError(f"a box at {box.offset} of size {box.size} leaves the tensor's shape {shape}")
    if sum(box.numel for box in boxes) != prod(shape):
        raise ValueError(f"boxes of {sum(box.numel for box in boxes)} elements for {prod(shape)}")
    axis = max(range(len(shape)), key=lambda axis: len({box.offset[axis] for box in boxes}), default=0)
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset[axis : axis + 1]):
        open_boxes = [other for other in open_boxes if other.offset[axis] + other.size[axis] > box.offset[axis]]
        for other in open_boxes:
            if other.intersects(box):
                raise ValueError(f"boxes at {other.offset} and {box.offset} overlap")
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
            for part in placement.tiles or (placement,):
                buffer_key = part.family, part.buffer
                if buffer_key in by_buffer:
                    by_buffer[buffer_key].append(part)
                else:
                    by_buffer[buffer_key] = [part]
                    self._buffers.setdefault(part.family, []).append(part.buffer)
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
            for members_of_first in by_first.values():
                self._check(family, buffer, members_of_first)

    def __reduce__(self) -> tuple[Callable[..., Layout], tuple[object, ...]]:
        """Pickle as columns: many placements are then few objects, and the pickle is small."""
        rows = [(*placement.key, *placement[1:]) for placement in self.placements.values()]
        return _layout_of, (self.shards, *([row[column] for row in rows] for column in range(_COLUMNS)))

    def __getitem__(self, key: TensorKey) -> Placement:
        return self.placements[key]

    def __contains__(self, key: TensorKey) -> bool:
        return key in self.placements

    def replicas(self) -> dict[Holder, Layout]:
        """Return the layout of each holder's replicas."""
        by_holder: dict[Holder, dict[TensorKey, Placement]] = {}
        for key, placement in self.placements.items():
            for holder, replica in placement.replicas:
                by_holder.setdefault(holder, {})[key] = replica
        return {holder: Layout(placements, self.shards) for holder, placements in sorted(by_holder.items())}

    def kinds(self, name: str) -> list[str]:
        return list(dict.fromkeys(self._kinds.get(name, ())))

    def in_buffer(self, family: str, buffer: str) -> list[Placement]:
        """Return the placements of one buffer in the order of their declaration; tiles stand for their tensor."""
        return self._by_buffer.get((family, buffer), [])

    def pieces(self, family: str, buffer: str, shard: int) -> Iterator[tuple[Placement, Piece]]:
        """Yield the placements of one buffer that `shard` holds a piece of, each with its piece."""
        for placement in self.in_buffer(family, buffer):
            piece = placement.piece(shard)
            if piece is not None:
                yield placement, piece

    def buffers(self, family: str) -> list[str]:
        return self._buffers.get(family, [])

    def _check(self, family: str, buffer: str, members: list[Placement]) -> None:
        """Raise ValueError if members of a buffer that begin in the same shard overlap, or do not fit the shards."""
        filled = [member for member in members if member.numel]
        for before, after in pairwise(sorted(filled, key=_begin)):
            cut, after_cut = before.cut, after.cut
            if (cut.origin, cut.chunk) == (after_cut.origin, after_cut.chunk):
                disjoint = cut.phase + before.numel <= after_cut.phase
            else:
                disjoint = cut.origin + min(cut.chunk, cut.phase + before.numel) <= after_cut.origin
            if not disjoint:
                raise ValueError(f"buffer {buffer}: {before.key} and {after.key} overlap")
        self._check_fit(family, buffer, filled)

    def _check_fit(self, family: str, buffer: str, members: list[Placement]) -> None:
        """Raise ValueError if a member has more elements than its shards have room for."""
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
    """Return the layout of placements that are given as columns."""
    keys = list(map(TensorKey, names, kinds, copies))
    return Layout(dict(zip(keys, map(Placement._make, zip(keys, *columns, strict=True)), strict=True)), shards)


def _begin(placement: Placement) -> tuple[int, int]:
    """Return a sort key for boxes of one buffer: the offset in each shard, then the offset in the flat buffer."""
    return placement.cut.origin, placement.cut.phase
