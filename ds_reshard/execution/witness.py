"""What was read, and what now lies in memory, as fingerprints that are found in two ways.

Bytes that are read count at the place that the source's layout gives them in the file; bytes in memory count at the
place that the target's layout gives them there. A plan, an executor or a framework that puts bytes elsewhere, loses or
changes some, makes the two differ.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple, TypeVar

import torch

from ds_reshard.execution.buffers import torch_dtype
from ds_reshard.execution.fingerprint import Fingerprints
from ds_reshard.model.index import Index
from ds_reshard.model.layout import Layout, Placement, TensorKey
from ds_reshard.model.region import Box, Region, Run, overlap
from ds_reshard.planning.match import wanted_pieces
from ds_reshard.planning.plan import Copy

_Bytes = TypeVar("_Bytes", memoryview, torch.Tensor)


class _Span(NamedTuple):
    """Bytes [start, stop) of a file: elements of `key` from number `element` on.

    They are wanted among `room` elements of a buffer, from number `element_offset` on.
    """

    start: int
    stop: int
    key: TensorKey
    element: int
    element_offset: int
    room: int

    def holds(self, element_offset: int) -> bool:
        return 0 <= element_offset - self.element_offset < self.room


class _Spans:
    """The spans of one file that are wanted in one buffer; tied tensors share bytes, so spans may overlap."""

    def __init__(self, spans: list[_Span]) -> None:
        self._spans = sorted(spans, key=lambda span: span.start)
        self._reach = list(accumulate((span.stop for span in self._spans), max))

    def over(self, start: int, stop: int) -> Iterator[_Span]:
        for at in range(bisect_right(self._reach, start), len(self._spans)):
            span = self._spans[at]
            if span.start >= stop:
                return
            if span.stop > start:
                yield span


class Witness:
    """Sums what a rank reads, by target tensor, in the target's type: bytes that are cast count as they are cast.

    `wants` maps target tensors to source tensors, as for `plan_rank`; `sums` has the fingerprints of the parts that
    were seen. `saw` may be called from any thread.
    """

    def __init__(self, source: Index, target: Layout, rank: int, wants: Mapping[TensorKey, TensorKey]) -> None:
        self.sums = Fingerprints()
        found: dict[tuple[str, str], list[_Span]] = {}
        for placement, piece in wanted_pieces(target, rank, wants):
            origin, region = source.layout[wants[placement.key]], placement.region(piece)
            for path, span in _source_spans(source, origin, placement.key, region, piece.element_offset):
                found.setdefault((path, placement.buffer), []).append(span)
        self._spans = {place: _Spans(spans) for place, spans in found.items()}

    def saw(self, copies: Sequence[Copy], views: Sequence[memoryview]) -> None:
        """Count the bytes of copies, as they were read."""
        self.sums.add_all(
            (key, position, _cast(copy, part))
            for copy, data in zip(copies, views, strict=True)
            for key, position, part in self._parts(copy, data)
        )

    def saw_there(self, copies: Sequence[Copy], tensors: Sequence[torch.Tensor]) -> None:
        """The same of copies whose bytes are tensors on a device, by operations of that device."""
        for copy, data in zip(copies, tensors, strict=True):
            for key, position, part in self._parts(copy, data):
                self.sums.add(key, position, part.view(torch_dtype(copy.dtype)).to(torch_dtype(copy.target_dtype)))

    def _parts(self, copy: Copy, data: _Bytes) -> Iterator[tuple[TensorKey, int, _Bytes]]:
        """The tensors that a copy holds bytes of, with their position in the tensor and themselves."""
        spans = self._spans.get((copy.path, copy.buffer))
        begin, itemsize = copy.byte_offset, copy.dtype.itemsize
        stop = begin + copy.numel * itemsize
        for span in spans.over(begin, stop) if spans is not None else ():
            first, last = max(span.start, begin), min(span.stop, stop)
            if (first - span.start) % itemsize or (first - begin) % itemsize:
                continue  # between two elements of the tensor: nothing that it holds
            if not span.holds(copy.element_offset + (first - begin) // itemsize):
                continue
            part = data[first - begin : last - begin]
            position = (span.element + (first - span.start) // itemsize) * copy.target_dtype.itemsize
            yield span.key, position, part


def held(layout: Layout, rank: int, buffers: Mapping[str, torch.Tensor]) -> Fingerprints:
    """The fingerprints of a rank's parts as its buffers hold them now; a buffer that is not there holds nothing."""
    sums = Fingerprints()
    for key, placement in layout.placements.items():
        flat = buffers.get(placement.buffer)
        if flat is None:
            continue
        for region, element_offset in placement.regions(rank):
            part = flat.detach().reshape(-1)[element_offset : element_offset + region.numel]
            sums.add_region(key, placement.shape, region, part)
    return sums


def _source_spans(
    source: Index, origin: Placement, key: TensorKey, wanted: Region, wanted_offset: int
) -> Iterator[tuple[str, _Span]]:
    """Where the files hold elements of `wanted`, a region of the target `key` at `wanted_offset` of its buffer."""
    whole = Region(box=Box.whole(origin.shape), start=0, stop=prod(origin.shape))
    room = wanted.numel
    for part, piece in source.pieces(origin, wanted):
        extent = source.open(origin.family, piece.shard).get(origin.buffer)
        if extent is None:
            continue
        if part.box == whole.box:
            runs: Iterable[Run] = (Run(0, piece.start, piece.stop - piece.start),)
        else:
            runs = overlap(part.region(piece), whole)
        itemsize = extent.dtype.itemsize
        for first, element, numel in runs:
            start = extent.byte_offset + (piece.element_offset + first) * itemsize
            yield extent.path, _Span(start, start + numel * itemsize, key, element, wanted_offset, room)


def _cast(copy: Copy, data: memoryview) -> memoryview:
    if copy.dtype is copy.target_dtype:
        return data
    cast = torch.frombuffer(data, dtype=torch_dtype(copy.dtype)).to(torch_dtype(copy.target_dtype))
    return cast.view(torch.uint8).numpy().data
