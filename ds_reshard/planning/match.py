"""Match what a rank wants with what an index has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

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
) -> Plan:
    """The plan that fills `rank`'s buffers of the target layout.

    `wants` maps each target tensor to the source tensor that it is read from; a source tensor serves
    one target tensor. `sizes` gives the elements of each fresh buffer of this rank: what no tensor covers
    there is zeroed. Shards are opened through `source`, whose `faults` the caller looks at afterwards. Cost is
    linear in the tensors of the shards that this rank touches.
    """
    copies: list[Copy] = []
    covered: dict[str, list[tuple[int, int]]] = {buffer: [] for buffer in sizes}
    touched: dict[Record, tuple[str, int]] = {}
    for placement, piece in wanted_pieces(target, rank, wants):
        source_key = wants[placement.key]
        if placement.buffer in covered:
            covered[placement.buffer].append((piece.element_offset, piece.stop - piece.start))
        for at, fragment in source.locate(source_key, placement.region(piece)):
            touched.setdefault(fragment.extent.record, (source.layout[source_key].family, fragment.shard))
            copies.append(
                Copy(
                    record=fragment.extent.record,
                    byte_offset=fragment.extent.byte_offset,
                    numel=fragment.extent.numel,
                    dtype=fragment.extent.dtype,
                    buffer=placement.buffer,
                    element_offset=piece.element_offset + at,
                    target_dtype=placement.dtype,
                )
            )
    fills = [fill for buffer, numel in sizes.items() for fill in _uncovered(buffer, numel, covered[buffer])]
    checks = _unwanted(source, target, rank, wants, touched)
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


@dataclass(slots=True)
class _Use:
    """The wanted bytes of one record: parallel lists of spans and of the target ranks at their edges."""

    spans: list[tuple[int, int, int | None, int | None]] = field(default_factory=list)


def _unwanted(
    source: Index,
    target: Layout,
    rank: int,
    wants: Mapping[TensorKey, TensorKey],
    touched: Mapping[Record, tuple[str, int]],
) -> list[Check]:
    """The gaps of the touched records that this rank reads for their checksums.

    A gap (padding, a tensor that nobody asked for) is read by the rank that owns the wanted element
    before it, or after it at the record's start, so that over all ranks each byte is read once. Where
    the neighbour is replicated, every rank reads the record whole, gaps too.
    """
    wanted_by = {source_key: target_key for target_key, source_key in wants.items()}
    uses: dict[Record, _Use] = {record: _Use() for record in touched}
    for family, shard in dict.fromkeys(touched.values()):
        for buffer, extent in source.open(family, shard).items():
            if extent.record not in uses:
                continue
            for origin, piece in source.layout.pieces(family, buffer, shard):
                if origin.key not in wanted_by:
                    continue
                wanted = target[wanted_by[origin.key]]
                begin = extent.byte_offset + piece.element_offset * extent.dtype.itemsize
                end = begin + (piece.stop - piece.start) * extent.dtype.itemsize
                first, last = _owner(wanted, origin, piece.start), _owner(wanted, origin, piece.stop - 1)
                uses[extent.record].spans.append((begin, end, first, last))
    checks: list[Check] = []
    for record, use in uses.items():
        checks.extend(_gaps(record, use, rank))
    return sorted(checks, key=lambda check: (check.record.path, check.byte_offset))


def _shard_of(placement: Placement, element: int) -> int:
    return next(iter(placement.cut.pieces(element, element + 1))).shard


def _owner(wanted: Placement, origin: Placement, element: int) -> int | None:
    """The target rank that reads `element`; None when every rank does.

    Where the boxes differ, or there are several, ownership is not arithmetic: rank 0 stands in (it may then read a gap
    that another rank reads as well; the combined checksum notices, and the record is read again whole).
    """
    if wanted.replicated:
        return None
    return _shard_of(wanted, element) if wanted.box == origin.box and not wanted.tiles else 0


def _gaps(record: Record, use: _Use, rank: int) -> Iterable[Check]:
    spans = sorted(use.spans, key=lambda span: span[:2])
    at, reader = record.byte_offset, spans[0][2] if spans else None
    for begin, end, _, last in spans:
        if begin > at and reader in (None, rank):
            yield Check(record=record, byte_offset=at, nbytes=begin - at)
        if end > at:
            at, reader = end, last
    stop = record.byte_offset + record.nbytes
    if at < stop and reader in (None, rank):
        yield Check(record=record, byte_offset=at, nbytes=stop - at)


def extents_overlap(extents: Mapping[str, Extent]) -> list[tuple[str, str]]:
    """Pairs of buffers of one shard whose bytes overlap; a well-formed shard has none."""
    spans = sorted((e.path, e.byte_offset, e.byte_offset + e.nbytes, name) for name, e in extents.items() if e.numel)
    found = []
    for before, after in pairwise(spans):
        if before[0] == after[0] and before[2] > after[1]:
            found.append((before[3], after[3]))
    return found
