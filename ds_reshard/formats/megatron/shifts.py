"""What Megatron-LM saves shifted, put back where it belongs.

`sharded_param_state_fully_reshardable` cuts parameters out of a gathered buffer from which the padding at the end of
each bucket was taken, at places that count that padding (core/optimizer/distrib_optimizer.py, 0.15 to 0.19.2): behind
the first padded bucket each parameter gets what lies so many elements later, and the last ones zeros. So the first
elements of each bucket behind another are in no file, but for those that the shift has put into another parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ds_reshard.containers.dcp_directory import Chunk, Directory
from ds_reshard.errors import Fault, UnsupportedLayout
from ds_reshard.formats.megatron.buckets import Bucket, Slot, boxes_between
from ds_reshard.formats.megatron.flat_states import RESAVE, family_of, laid_out, unplaced, unsupported
from ds_reshard.model.content import MASTER, WEIGHT
from ds_reshard.model.layout import Placement, TensorKey, Tile
from ds_reshard.model.region import Box

Span = tuple[int, int]


@dataclass(slots=True, kw_only=True)
class Shifts:
    """Of each state of a shifted parameter its tiles in `chunks`, boxes that are in the files, and those that are lost.

    Lost masters are the weights', and have tiles.
    """

    tiles: dict[TensorKey, list[Tile]] = field(default_factory=dict)
    kept: dict[TensorKey, list[Box]] = field(default_factory=dict)
    lost: dict[TensorKey, list[Box]] = field(default_factory=dict)
    chunks: dict[str, list[tuple[str, Chunk]]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def notes(self) -> Iterator[str]:
        """What is otherwise than it was, by parameter."""
        for name in sorted({key.name for key in self.lost}):
            kinds = {key.kind: sum(box.numel for box in boxes) for key, boxes in self.lost.items() if key.name == name}
            moments = ", ".join(sorted(set(kinds) - {MASTER}))
            lost = f"{name}: {max(kinds.values())} elements are in no file"
            yield f"{lost}: those of {moments} are zero, those of its master its weight's"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Laid:
    """A slot in the buffer of its rank: where it is, and where it was cut out, both without padding of bucket ends."""

    slot: Slot
    at: int
    cut: int

    def parts(self, start: int, stop: int) -> Iterator[tuple[Box, Span, int]]:
        """Elements [start, stop) of the slot, box by box: the box, its elements, and the first of them in the slot."""
        begin = 0
        for box in self.slot.boxes:
            first, last = max(start, begin), min(stop, begin + box.numel)
            if first < last:
                yield box, (first - begin, last - begin), first
            begin += box.numel


def find_shifts(
    directory: Directory, arguments: Mapping[str, object], placements: Mapping[TensorKey, Placement], *, chained: bool
) -> Shifts:
    """What the rule makes of the saved arguments; nothing is read, and nothing proved."""
    found = Shifts(faults=list(unsupported(directory.path, arguments)))
    if found.faults:
        return found
    weights = {key: one for key, one in placements.items() if key.kind == WEIGHT}
    buffers, seen = list[list[_Laid]](), set[tuple[str, tuple[Box, ...]]]()
    for _, _, buckets in laid_out(arguments, weights, chained=chained):
        buffers.append([one for one in _laid(buckets) if (one.slot.name, one.slot.boxes) not in seen])
        seen.update((one.slot.name, one.slot.boxes) for one in buffers[-1])
    found.faults += unplaced(directory.path, weights, {name for name, _ in seen})
    shifted = {one.slot.name for laid in buffers for one in laid if one.at != one.cut}
    for kind in sorted({key.kind for key in placements if key.name in shifted} - {WEIGHT}):
        work = _Work(placements=placements, kind=kind, found=found, first=_numbered(directory, placements, kind, found))
        for laid in buffers:
            for one in laid:
                if one.slot.name in shifted:
                    work.find(one, laid)
    return found


def _numbered(
    directory: Directory, placements: Mapping[TensorKey, Placement], kind: str, found: Shifts
) -> dict[str, int]:
    """The number of the first shard of each key among those of all states of a kind, and of weights."""
    family, first = found.chunks.setdefault(family_of(kind), []), dict[str, int]()
    for key, placement in placements.items():
        if key.kind in (kind, WEIGHT) and placement.family not in first:
            first[placement.family] = len(family)
            family += [(placement.family, one) for one in directory.tensors[placement.family].filled]
    return first


def _laid(buckets: Sequence[Bucket]) -> list[_Laid]:
    starts = accumulate((bucket.unpadded for bucket in buckets), initial=0)
    cuts = accumulate((bucket.numel for bucket in buckets), initial=0)
    return [
        _Laid(slot=slot, at=start + at, cut=cut + at)
        for bucket, start, cut in zip(buckets, starts, cuts, strict=False)
        for at, slot in bucket.slots
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The search for the states of one kind; `first` is the number of the first shard of each key."""

    placements: Mapping[TensorKey, Placement]
    kind: str
    first: Mapping[str, int]
    found: Shifts

    def find(self, one: _Laid, laid: Sequence[_Laid]) -> None:
        """Put the tiles of a slot's state together: what was cut out as part of any slot; the rest is lost."""
        at, stop = one.at, one.at + one.slot.numel
        for other in sorted(laid, key=lambda other: other.cut):
            begin, end = max(at, other.cut), min(stop, other.cut + other.slot.numel)
            if begin < end:
                self._lose(one, at - one.at, begin - one.at)
                self._take(one, begin - one.at, other, begin - other.cut, end - begin, self.kind)
                self._note(self.found.kept, one, begin - one.at, end - one.at)
                at = end
        self._lose(one, at - one.at, one.slot.numel)

    def _lose(self, one: _Laid, start: int, stop: int) -> None:
        """Elements that are in no file; those of masters are the weights'."""
        if start >= stop:
            return
        self._note(self.found.lost, one, start, stop)
        if self.kind == MASTER:
            self._take(one, start, one, start, stop - start, WEIGHT)

    def _note(self, boxes: dict[TensorKey, list[Box]], one: _Laid, start: int, stop: int) -> None:
        held = boxes.setdefault(TensorKey(name=one.slot.name, kind=self.kind), [])
        for box, (begin, end), _ in one.parts(start, stop):
            held += [part for _, part in boxes_between(box, begin, end)]

    def _take(self, one: _Laid, start: int, other: _Laid, source: int, numel: int, kind: str) -> None:
        """Elements of one slot from `start` on are those of another, or of its weight, from `source` on."""
        held = self.placements[TensorKey(name=other.slot.name, kind=kind)]
        cuts = {part.box: part.cut for part in held.parts}
        tiles = self.found.tiles.setdefault(TensorKey(name=one.slot.name, kind=self.kind), [])
        for origin, (first, last), number in other.parts(source, source + numel):
            if origin not in cuts:
                what = f"{held.key}: is cut into other parts than its ranks hold"
                self.found.faults.append(UnsupportedLayout.fault(held.family, what, mend=RESAVE))
                continue
            cut, begin = cuts[origin], start + number - source
            for box, (low, high), at in one.parts(begin, begin + last - first):
                element = cut.origin + first + at - begin
                shard = self.first[held.family] + cut.first
                tiles += [(shard, element + inside - low, part) for inside, part in boxes_between(box, low, high)]
