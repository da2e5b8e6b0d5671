"""Match what a rank wants with what an index has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from ds_reshard.model.index import Extent, Index, Record
from ds_reshard.model.layout import Layout, Piece, Placement, TensorKey
from ds_reshard.planning.coalesce import coalesce
from ds_reshard.planning.plan import Check, Copy, Fill, Plan


def plan_rank(
    source: Index,
    target: Layout,
    rank: int,
    wants: Mapping[TensorKey, TensorKey],
    *,
    sizes: Mapping[str, int],
    gaps: Gaps | None = None,
) -> Plan:
    """The plan that fills `rank`'s buffers of the target layout.

    `wants` maps each target tensor to the source tensor that it is read from; a source tensor serves
    one target tensor. `sizes` gives the elements of each fresh buffer of this rank: what no tensor covers
    there is zeroed. `gaps` is kept between the plans of several ranks for the same wants. Shards are opened through
    `source`, whose `faults` the caller looks at afterwards. Cost is linear in the tensors of the shards that this rank
    touches.
    """
    copies: list[Copy] = []
    covered: dict[str, list[tuple[int, int]]] = {buffer: [] for buffer in sizes}
    touched: dict[Record, set[_Shard]] = {}
    for placement, piece in wanted_pieces(target, rank, wants):
        source_key = wants[placement.key]
        family = source.layout[source_key].family
        if placement.buffer in covered:
            covered[placement.buffer].append((piece.element_offset, piece.stop - piece.start))
        for at, fragment in source.locate(source_key, placement.region(piece)):
            record, byte_offset, dtype, numel = fragment.extent
            touched.setdefault(record, set()).add((family, fragment.shard))
            copies.append(
                Copy(
                    record=record,
                    byte_offset=byte_offset,
                    numel=numel,
                    dtype=dtype,
                    buffer=placement.buffer,
                    element_offset=piece.element_offset + at,
                    target_dtype=placement.dtype,
                )
            )
    fills = [fill for buffer, numel in sizes.items() for fill in _uncovered(buffer, numel, covered[buffer])]
    checks = (gaps or Gaps(source, target, wants)).read_by(rank, touched)
    return Plan(copies=coalesce(copies), fills=tuple(fills), checks=tuple(checks))


def wanted_pieces(target: Layout, rank: int, wants: Mapping[TensorKey, TensorKey]) -> Iterator[tuple[Placement, Piece]]:
    """What `rank` holds of the target tensors in `wants`, buffer by buffer."""
    for family, buffer in dict.fromkeys((target[key].family, target[key].buffer) for key in wants):
        for placement, piece in target.pieces(family, buffer, rank):
            if placement.key in wants:
                yield placement, piece


def _uncovered(buffer: str, numel: int, spans: Iterable[tuple[int, int]]) -> Iterable[Fill]:
    at = 0
    for offset, length in sorted(spans):
        if offset > at:
            yield Fill(buffer=buffer, element_offset=at, numel=offset - at)
        at = max(at, offset + length)
    if at < numel:
        yield Fill(buffer=buffer, element_offset=at, numel=numel - at)


_Shard = tuple[str, int]
"""A shard of a family."""

_Use = tuple[int, int, Placement, Piece]
"""Bytes [begin, end) of a file that hold a wanted piece of a tensor of the source."""


class _Gap(NamedTuple):
    """Bytes that are in no wanted tensor; every rank that touches the record reads them where `reader` is None."""

    reader: int | None
    check: Check


class Gaps:
    """Bytes of the source's records that are in no wanted tensor, each with the target rank that reads it.

    A gap (padding, a tensor that nobody asked for) is read for its record's checksum, by the rank that owns the wanted
    element before it, or after it at the record's start, so that over all ranks each byte is read once. Where the
    neighbour is replicated, every rank reads the record whole, gaps too. What is found is kept for the next plan.
    """

    def __init__(self, source: Index, target: Layout, wants: Mapping[TensorKey, TensorKey]) -> None:
        self._source = source
        self._target = target
        self._wanted_by = {source_key: target_key for target_key, source_key in wants.items()}
        self._found: dict[tuple[Record, frozenset[_Shard]], list[_Gap]] = {}

    def read_by(self, rank: int, touched: Mapping[Record, Iterable[_Shard]]) -> list[Check]:
        """The gaps that `rank` reads of the records it touches, each given with the shards that hold it."""
        holders = {(record, frozenset(shards)) for record, shards in touched.items()}
        uses: dict[Record, list[_Use]] = {record: [] for record, shards in holders - self._found.keys()}
        for family, shard in sorted({at for record, shards in holders if record in uses for at in shards}):
            self._add(family, shard, uses)
        for record, shards in holders:
            if record in uses:
                self._found[record, shards] = list(self._gaps(record, sorted(uses[record], key=itemgetter(0, 1))))
        found = (gap for held in holders for gap in self._found[held])
        return sorted(
            (gap.check for gap in found if gap.reader in (None, rank)),
            key=lambda check: (check.record.path, check.byte_offset),
        )

    def _add(self, family: str, shard: int, uses: Mapping[Record, list[_Use]]) -> None:
        """Add the wanted bytes of one shard to those of the records in `uses`."""
        for buffer, extent in self._source.open(family, shard).items():
            found, itemsize = uses.get(extent.record), extent.dtype.itemsize
            if found is None:
                continue
            for origin, piece in self._source.layout.pieces(family, buffer, shard):
                if origin.key in self._wanted_by:
                    begin = extent.byte_offset + piece.element_offset * itemsize
                    found.append((begin, begin + (piece.stop - piece.start) * itemsize, origin, piece))

    def _gaps(self, record: Record, uses: Sequence[_Use]) -> Iterator[_Gap]:
        at, stop = record.byte_offset, record.byte_offset + record.nbytes
        reader = self._reader(uses[0], first=True) if uses and uses[0][0] > at else None
        for number, (begin, end, _, _) in enumerate(uses):
            if begin > at:
                yield _Gap(reader, Check(record=record, byte_offset=at, nbytes=begin - at))
            if end > at:
                at = end
                follows = uses[number + 1][0] if number + 1 < len(uses) else stop
                reader = self._reader(uses[number], first=False) if follows > at else None
        if at < stop:
            yield _Gap(reader, Check(record=record, byte_offset=at, nbytes=stop - at))

    def _reader(self, use: _Use, *, first: bool) -> int | None:
        """The target rank that reads the first or last element of a use; None when every rank does.

        Where the boxes differ, or there are several, ownership is not arithmetic: rank 0 stands in (it may then read
        a gap that another rank reads as well; the combined checksum notices, and the record is read again whole).
        """
        _, _, origin, piece = use
        wanted = self._target[self._wanted_by[origin.key]]
        if wanted.replicated:
            return None
        if wanted.box != origin.box or wanted.tiles:
            return 0
        element = piece.start if first else piece.stop - 1
        return next(iter(wanted.cut.pieces(element, element + 1))).shard


def extents_overlap(extents: Mapping[str, Extent]) -> list[tuple[str, str]]:
    """Pairs of buffers of one shard whose bytes overlap; a well-formed shard has none."""
    spans = sorted((e.path, e.byte_offset, e.byte_offset + e.nbytes, name) for name, e in extents.items() if e.numel)
    found = []
    for before, after in pairwise(spans):
        if before[0] == after[0] and before[2] > after[1]:
            found.append((before[3], after[3]))
    return found
