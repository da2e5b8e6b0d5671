"""Index: which bytes of which file hold a part of a logical tensor. Shards are opened on first use."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from ds_reshard.errors import CheckpointDamaged, Fault, ReshardError, faults_of
from ds_reshard.model.layout import Layout, Piece, Placement, TensorKey, Tiles, check_cover
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Box, Region, Run, box_region, overlap


class Record(NamedTuple):
    """A run of bytes with one checksum: a record of a torch zip file."""

    path: str
    byte_offset: int
    nbytes: int
    crc32: int | None


class Extent(NamedTuple):
    """`numel` row-major elements of `dtype` at `byte_offset` of the file, inside `record`."""

    record: Record
    byte_offset: int
    dtype: ElementType
    numel: int

    @property
    def path(self) -> str:
        return self.record.path

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def part(self, element_offset: int, numel: int) -> Extent:
        """Return `numel` of the elements, from `element_offset` on."""
        return Extent(self.record, self.byte_offset + element_offset * self.dtype.itemsize, self.dtype, numel)


def extent_of(tensor: TensorRecord) -> Extent:
    """Return where the bytes of a row-major tensor lie, inside their record of an archive."""
    storage = tensor.storage
    record = Record(path=storage.path, byte_offset=storage.byte_offset, nbytes=storage.nbytes, crc32=storage.crc32)
    return Extent(record=record, byte_offset=tensor.byte_offset, dtype=tensor.dtype, numel=tensor.numel)


ZEROS = "\0zeros"
"""The end of the name of a family of zeros, which no file of the checkpoint holds: padding that a map adds.

No tensor's name has a NUL, so no family of a format ends like this. A buffer's name is its offset in `ZERO_FILE`.
"""
ZERO_FILE = "/dev/zero"
"""It has zeros at every offset, so zeros are read, and proved to be in their places, as all other bytes are."""


class ShardSource(Protocol):
    """Opens one shard of a family and returns where its buffers lie.

    It checks every extent that it returns (inside its file, of the layout's size), and raises a ReshardError that
    names the file.
    """

    def buffers(self, family: str, shard: int) -> Mapping[str, Extent]: ...


class Index:
    """A layout and the shards of it that have been opened so far.

    A shard is opened on first use, once for all threads. A shard that cannot be opened or lacks a buffer adds its
    faults to `faults` and yields nothing; so do elements that lie in no file, or in several. The caller raises all
    faults before it moves a byte.
    """

    def __init__(self, layout: Layout, source: ShardSource) -> None:
        self.layout = layout
        self.faults: list[Fault] = []
        self.source = source
        self._opened: dict[tuple[str, int], Mapping[str, Extent]] = {}
        self._failed: set[tuple[str, int]] = set()
        self._tiles: dict[TensorKey, Tiles] = {}
        self._opening = threading.Lock()

    def with_layout(self, layout: Layout) -> Index:
        """Return an index of another layout of the same shards; opened shards and faults are shared with it."""
        other = Index(layout, self.source)
        other.faults, other._opened = self.faults, self._opened
        other._failed, other._opening = self._failed, self._opening
        return other

    def open(self, family: str, shard: int) -> Mapping[str, Extent]:
        """Return the buffers of a shard, opened on first use; empty if the shard is faulty."""
        if family.endswith(ZEROS):
            tiles = {buffer: self.layout.in_buffer(family, buffer)[0] for buffer in self.layout.buffers(family)}
            return {buffer: _zeros(tile.dtype, tile.cut.chunk, int(buffer)) for buffer, tile in tiles.items()}
        shard_key = (family, shard)
        if shard_key in self._opened:
            return self._opened[shard_key]
        with self._opening:
            if shard_key not in self._opened:
                try:
                    self._opened[shard_key] = self.source.buffers(family, shard)
                except ReshardError as error:
                    self.faults.extend(faults_of(error))
                    self._opened[shard_key] = {}
                    self._failed.add(shard_key)
            return self._opened[shard_key]

    def extent(self, placement: Placement, shard: int) -> Extent | None:
        """Return the buffer of a placement in a shard; a shard that was opened but lacks it adds a fault."""
        extent = self.open(placement.family, shard).get(placement.buffer)
        if extent is None and (placement.family, shard) not in self._failed:
            fault = CheckpointDamaged.fault(
                f"{placement.family} shard {shard}",
                f"holds no buffer {placement.buffer!r}",
                f"{placement.key} in it",
                "nothing",
                mend="restore the file from a copy, or load another tag",
            )
            if fault not in self.faults:
                self.faults.append(fault)
        return extent

    @property
    def opened(self) -> tuple[tuple[str, int], ...]:
        """The (family, shard) pairs opened so far."""
        return tuple(self._opened)

    def pieces(self, placement: Placement, wanted: Region) -> Iterator[tuple[Placement, Piece]]:
        """Yield the pieces that together cover `wanted`, each with its part (tile) of the placement."""
        parts: Sequence[Placement] = placement.parts
        if len(parts) > 1:
            if placement.key not in self._tiles:
                self._tiles[placement.key] = Tiles(placement.tiles)
                try:
                    check_cover([tile.box for tile in placement.tiles], placement.shape)
                except ValueError as error:
                    self._uncovered(placement, str(error))
            parts = self._tiles[placement.key].candidates(wanted)
        for part in parts:
            start, stop = 0, part.numel
            first = _first_in(wanted.box, part)
            if first is not None:
                start, stop = max(0, wanted.start - first), min(part.numel, wanted.stop - first)
            for piece in part.cut.pieces(start, stop):
                yield part, piece

    def runs(self, key: TensorKey, wanted: Region) -> Iterator[tuple[tuple[str, int], Extent, Run]]:
        """Yield the runs of elements of `wanted`, each with its (family, shard) and the extent of its whole buffer.

        A run counts elements from the beginning of `wanted` and of the buffer. Runs in faulty shards are left out.
        """
        placement, located = self.layout[key], 0
        for part, piece in self.pieces(placement, wanted):
            runs: Iterable[Run]
            first = _first_in(wanted.box, part)
            if first is not None:
                runs = (Run(first + piece.start - wanted.start, 0, piece.stop - piece.start),)
            else:
                runs = list(overlap(wanted, part.region(piece)))
            located += sum(run.total for run in runs)
            extent = self.extent(part, piece.shard) if runs else None
            if extent is not None:
                for run in runs:
                    offset = run.second_offset + piece.element_offset
                    yield (part.family, piece.shard), extent, run._replace(second_offset=offset)
        if located != wanted.numel:
            self._uncovered(placement, f"{located} of {wanted.numel} wanted elements")

    def locate(self, key: TensorKey, wanted: Region) -> Iterator[tuple[int, Extent]]:
        """Yield the bytes that hold elements of `wanted`, each with the offset of its first element in `wanted`."""
        for _, extent, run in self.runs(key, wanted):
            for one in run.each():
                yield one.first_offset, extent.part(one.second_offset, one.numel)

    def _uncovered(self, placement: Placement, found: str) -> None:
        """Add the fault of a tensor whose elements do not lie in exactly one file each."""
        fault = CheckpointDamaged.fault(
            placement.family,
            f"{placement.key}: some of its elements lie in no file, or in two",
            "each element in one file",
            found,
            mend="restore the checkpoint from a copy; if it is complete, report this with its `ds-reshard inspect`",
        )
        if fault not in self.faults:
            self.faults.append(fault)


def _zeros(dtype: ElementType, numel: int, byte_offset: int) -> Extent:
    return Extent(Record(ZERO_FILE, byte_offset, numel * dtype.itemsize, None), byte_offset, dtype, numel)


def _first_in(box: Box, part: Placement) -> int | None:
    """Return the position in `box` of the first element of a part, negative if that element lies before the box.

    None unless both are contiguous in the whole tensor: otherwise they may share several runs.
    """
    if part.axes:
        return None
    if part.box == box:
        return 0
    if any(at + size > end for at, size, end in zip(box.offset, box.size, part.shape, strict=True)):
        return None  # a run's vocabulary may be padded further
    own, other = (box_region(part.shape, one) for one in (part.box, box))
    return own.start - other.start if own.box == other.box else None


def extents_overlap(extents: Mapping[str, Extent]) -> list[tuple[str, str]]:
    """Return the pairs of buffers of one shard whose bytes overlap; a well-formed shard has none."""
    spans = sorted((e.path, e.byte_offset, e.byte_offset + e.nbytes, name) for name, e in extents.items() if e.numel)
    pairs = []
    for before, after in pairwise(spans):
        if before[0] == after[0] and before[2] > after[1]:
            pairs.append((before[3], after[3]))
    return pairs
