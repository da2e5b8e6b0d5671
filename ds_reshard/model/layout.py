"""Layout: the rule by which a format places every logical tensor; complete, small, valid by construction."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from ds_reshard.model.codec import ElementType
from ds_reshard.model.region import Box, Region, box_region


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class TensorKey:
    """One logical tensor: a parameter (or buffer) name and a kind.

    The kind is `weight`, `fp32`, or the name of an optimizer state such as `exp_avg`.
    """

    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name}[{self.kind}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [start, stop) of a placement's box, at `element_offset` of the buffer of shard `shard`."""

    shard: int
    start: int
    stop: int
    element_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a box is cut over shards, all counted in elements.

    Element x lies in shard (x + phase) // chunk, at (x + phase) % chunk + origin of that shard's buffer.
    A ZeRO-1/2 partition of a flat group has `phase` = the parameter's offset in the group and `chunk` =
    the partition size; a ZeRO-3 partition has `chunk` = ceil(numel / dp) and `origin` = its offset in
    the sub-group; a whole tensor has one chunk.
    """

    chunk: int
    phase: int = 0
    origin: int = 0

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The pieces of elements [start, stop), in order; cost is their number."""
        at = start
        while at < stop:
            shard, inside = divmod(at + self.phase, self.chunk)
            end = min(stop, at + self.chunk - inside)
            yield Piece(shard=shard, start=at, stop=end, element_offset=inside + self.origin)
            at = end

    def piece(self, shard: int, numel: int) -> Piece | None:
        """The piece of `shard` of a box of `numel` elements, None when it holds none."""
        start = max(0, shard * self.chunk - self.phase)
        stop = min(numel, (shard + 1) * self.chunk - self.phase)
        if start >= stop:
            return None
        offset = start + self.phase - shard * self.chunk + self.origin
        return Piece(shard=shard, start=start, stop=stop, element_offset=offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """How a tensor is cut into boxes: shard i holds all of `boxes[i]`, from the beginning of its buffer.

    A box may be empty. Elements of a piece count from the beginning of its own box.
    """

    boxes: tuple[Box, ...]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The pieces of all boxes: which elements of the tensor they are, their regions say."""
        for shard, box in enumerate(self.boxes):
            if box.numel:
                yield Piece(shard=shard, start=0, stop=box.numel, element_offset=0)

    def piece(self, shard: int, numel: int) -> Piece | None:
        """The piece of `shard`: all of its box."""
        numel = self.boxes[shard].numel
        return Piece(shard=shard, start=0, stop=numel, element_offset=0) if numel else None

    def check(self, shape: tuple[int, ...]) -> None:
        """ValueError unless each element of a tensor of this shape lies in one box."""
        for box in self.boxes:
            if any(at + size > end for at, size, end in zip(box.offset, box.size, shape, strict=True)):
                raise ValueError(f"a box at {box.offset} of size {box.size} leaves the tensor's shape {shape}")
        if sum(box.numel for box in self.boxes) != prod(shape):
            raise ValueError(f"boxes of {sum(box.numel for box in self.boxes)} elements for {prod(shape)}")
        axis = max(range(len(shape)), key=lambda axis: len({box.offset[axis] for box in self.boxes}), default=0)
        open_boxes: list[Box] = []
        for box in sorted(self.boxes, key=lambda box: box.offset[axis : axis + 1]):
            open_boxes = [one for one in open_boxes if one.offset[axis] + one.size[axis] > box.offset[axis]]
            for one in open_boxes:
                if one.meets(box):
                    raise ValueError(f"boxes at {one.offset} and {box.offset} overlap")
            open_boxes.append(box)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one logical tensor lies.

    `family` names a set of shards (the optimizer files, the model files, the ranks of a run), `buffer`
    a flat buffer that each shard of the family has; `box` is the part of the tensor that this family
    holds. `replicated` means that every shard holds the box whole (pieces are then those of shard 0).
    """

    key: TensorKey
    shape: tuple[int, ...]
    dtype: ElementType
    family: str
    buffer: str
    cut: Cut | Chunks
    box: Box
    replicated: bool = False

    @property
    def numel(self) -> int:
        return self.box.numel

    def piece(self, shard: int) -> Piece | None:
        """What `shard` holds of this tensor."""
        return self.cut.piece(0 if self.replicated else shard, self.numel)

    def region(self, piece: Piece) -> Region:
        if isinstance(self.cut, Chunks):
            return box_region(self.shape, self.cut.boxes[piece.shard])
        return Region(box=self.box, start=piece.start, stop=piece.stop)

    def shard_of(self, region: Region) -> int:
        """The shard that holds the first element of a region, which lies in one piece."""
        if isinstance(self.cut, Cut):
            return next(iter(self.cut.pieces(region.start, region.start + 1))).shard
        for piece in self.cut.pieces(0, self.numel):
            whole = self.region(piece)
            if whole.box == region.box and whole.start <= region.start < whole.stop:
                return piece.shard
        raise ValueError(f"{self.key}: no chunk holds {region}")


class Layout:
    """Every logical tensor's placement, and the number of shards of each family.

    Built once from the little that all shards share; the same on every rank. The constructor refuses
    (ValueError: a bug of the reader) tensors that overlap in a buffer or that do not fit their shards.
    """

    def __init__(self, placements: Mapping[TensorKey, Placement], shards: Mapping[str, int]) -> None:
        self.placements = dict(placements)
        self.shards = dict(shards)
        self._by_buffer: dict[tuple[str, str], list[Placement]] = {}
        self._kinds: dict[str, list[str]] = {}
        self._flat: dict[tuple[str, str], list[Placement]] = {}
        for key, placement in self.placements.items():
            self._by_buffer.setdefault((placement.family, placement.buffer), []).append(placement)
            self._kinds.setdefault(key.name, []).append(key.kind)
        for (family, buffer), members in self._by_buffer.items():
            self._check(family, buffer, members)

    def __getitem__(self, key: TensorKey) -> Placement:
        return self.placements[key]

    def __contains__(self, key: TensorKey) -> bool:
        return key in self.placements

    def kinds(self, name: str) -> list[str]:
        return self._kinds.get(name, [])

    def in_buffer(self, family: str, buffer: str) -> list[Placement]:
        """The placements of one buffer, in the order in which they were declared."""
        return self._by_buffer.get((family, buffer), [])

    def pieces(self, family: str, buffer: str, shard: int) -> Iterator[tuple[Placement, Piece]]:
        """The placements of one buffer that `shard` holds a piece of, with it.

        Cost is their number and, in a flat buffer, the logarithm of all that are in it.
        """
        members: Sequence[Placement] = self.in_buffer(family, buffer)
        ordered = self._flat.get((family, buffer))
        if ordered:
            chunk = _flat_cut(ordered[0]).chunk
            first = bisect_right(ordered, shard * chunk, key=_end)
            members = ordered[first : bisect_left(ordered, (shard + 1) * chunk, lo=first, key=_begin)]
        for placement in members:
            piece = placement.piece(shard)
            if piece is not None:
                yield placement, piece

    def buffers(self, family: str) -> list[str]:
        return [buffer for of, buffer in self._by_buffer if of == family]

    def _check(self, family: str, buffer: str, members: list[Placement]) -> None:
        for placement in members:
            if isinstance(placement.cut, Chunks):
                placement.cut.check(placement.shape)
                if len(members) > 1 or self.shards[family] != len(placement.cut.boxes):
                    raise ValueError(f"buffer {buffer}: {placement.key} does not have a box in each shard of its own")
                return
        cuts = [(p.cut, p.numel, str(p.key), p.replicated) for p in members if p.numel and isinstance(p.cut, Cut)]
        flat = all(cut.origin == 0 and cut.chunk == cuts[0][0].chunk for cut, _, _, _ in cuts)
        if flat and not any(replicated for _, _, _, replicated in cuts):
            self._flat[family, buffer] = sorted((p for p in members if p.numel), key=_begin)
        if not flat and any(cut.phase for cut, _, _, _ in cuts):
            raise ValueError(f"buffer {buffer}: flat and per-tensor cuts are mixed")
        spans = sorted(
            (cut.phase, cut.phase + numel, key) if flat else (cut.origin, cut.origin + min(cut.chunk, numel), key)
            for cut, numel, key, _ in cuts
        )
        for before, after in pairwise(spans):
            if before[1] > after[0]:
                raise ValueError(f"buffer {buffer}: {before[2]} and {after[2]} overlap")
        for cut, numel, key, replicated in cuts:
            if cut.phase + numel > cut.chunk * (1 if replicated else self.shards[family]):
                raise ValueError(f"buffer {buffer}: {key} does not fit {self.shards[family]} shards")


def _begin(placement: Placement) -> int:
    """Where a tensor begins in a flat buffer that all shards hold one after another."""
    return _flat_cut(placement).phase


def _end(placement: Placement) -> int:
    return _begin(placement) + placement.numel


def _flat_cut(placement: Placement) -> Cut:
    assert isinstance(placement.cut, Cut), "chunks have buffers of their own"
    return placement.cut
