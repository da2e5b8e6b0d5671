"""What the index of every format must say: where each element of each tensor lies, once, inside its file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ds_reshard.containers.crc import crc32
from ds_reshard.errors import ReshardError
from ds_reshard.execution.buffers import element_type
from ds_reshard.model.index import Fragment, Index, Record
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.region import Box, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint on disk: how it is opened, and what it holds.

    `truth` has every logical tensor of the checkpoint, in the type in which it was saved.
    """

    open: Callable[[], Index]
    truth: Mapping[TensorKey, torch.Tensor]


class FormatSuite:
    """Subclass it and write `make`; more than one shard, padding and an empty tensor make it tell the most."""

    def make(self, folder: str) -> SavedCheckpoint:
        """Write a checkpoint below the empty folder `folder`."""
        raise NotImplementedError

    def test_every_tensor_is_placed(self) -> None:
        """The layout has exactly the tensors that were saved, with their shapes and element types."""
        with self._saved() as saved:
            layout = saved.open().layout
            found = {key: (place.shape, place.dtype) for key, place in layout.placements.items()}
            assert found == {key: (tuple(t.shape), element_type(t.dtype)) for key, t in saved.truth.items()}

    def test_opening_opens_no_shard(self) -> None:
        """Shards are opened when their bytes are wanted, and then only those that have some."""
        with self._saved() as saved:
            index = saved.open()
            assert index.opened == ()
            for key, tensor in saved.truth.items():
                fragments = list(_locate(index, key))
                assert bool(fragments) == bool(tensor.numel())
            placements = [part for key in saved.truth for part in index.layout[key].parts]
            holders = {(p.family, piece.shard) for p in placements for piece in p.cut.pieces(0, p.numel)}
            assert set(index.opened) == holders

    def test_fragments_tile_every_tensor(self) -> None:
        """The fragments of a tensor follow each other from its first element to its last: no hole, no overlap."""
        with self._saved() as saved:
            index = saved.open()
            for key, tensor in saved.truth.items():
                spans = sorted((at, at + fragment.extent.numel) for at, fragment in _locate(index, key))
                edges = [0, *(stop for _, stop in spans)]
                assert [start for start, _ in spans] == edges[:-1], f"{key}: fragments lie at {spans}"
                assert edges[-1] == tensor.numel(), f"{key}: {edges[-1]} of {tensor.numel()} elements are placed"
            assert index.faults == []

    def test_extents_lie_in_their_files(self) -> None:
        """An extent lies inside its record, and the record inside its file."""
        with self._saved() as saved:
            index = saved.open()
            for key in saved.truth:
                for _, fragment in _locate(index, key):
                    extent, record = fragment.extent, fragment.extent.record
                    assert record.byte_offset <= extent.byte_offset, f"{key}: begins before its record"
                    stop = record.byte_offset + record.nbytes
                    assert extent.byte_offset + extent.nbytes <= stop, f"{key}: ends behind its record"
                    assert 0 <= stop <= os.path.getsize(record.path), f"{key}: its record leaves the file"

    def test_records_have_the_checksum_of_their_bytes(self) -> None:
        """A record that declares a crc32 has it."""
        with self._saved() as saved:
            index = saved.open()
            records = {fragment.extent.record for key in saved.truth for _, fragment in _locate(index, key)}
            for record in records:
                found = crc32(_read(record.path, record.byte_offset, record.nbytes))
                assert record.crc32 in (None, found), f"{record.path}: {record} has crc32 {found:08x}"

    def test_reading_every_fragment_gives_what_was_saved(self) -> None:
        """The elements of all fragments are, bit for bit, those of the tensor that was saved."""
        with self._saved() as saved:
            index = saved.open()
            for key, tensor in saved.truth.items():
                assert _elements(index, key, _whole(tensor)) == _raw(tensor), f"{key} differs"

    def test_parts_are_found_as_the_whole_is(self) -> None:
        """Half of a tensor, and a box inside it, are read from their own fragments alone."""
        with self._saved() as saved:
            index = saved.open()
            for key, tensor in saved.truth.items():
                whole = Box.whole(tuple(tensor.shape))
                half = Region(box=whole, start=tensor.numel() // 3, stop=tensor.numel() - tensor.numel() // 4)
                assert _elements(index, key, half) == _raw(tensor.reshape(-1)[half.start : half.stop]), f"{key}: a span"
                box = Box(offset=tuple(n // 3 for n in tensor.shape), size=tuple(n - n // 3 for n in tensor.shape))
                inner = tensor[tuple(slice(n // 3, None) for n in tensor.shape)]
                region = Region(box=box, start=0, stop=box.numel)
                assert _elements(index, key, region) == _raw(inner), f"{key}: a box"

    def test_a_truncated_file_is_a_fault(self) -> None:
        """Half of any file is refused: when the checkpoint is opened, or as a fault of the index."""
        with self._saved() as saved:
            for path in sorted({record.path for record in _records(saved)}):
                whole = _read(path, 0, os.path.getsize(path))
                os.truncate(path, len(whole) // 2)
                assert _complains(saved), f"half of {path} passes for a whole checkpoint"
                with open(path, "wb") as file:
                    file.write(whole)
            assert not _complains(saved)

    @contextmanager
    def _saved(self) -> Iterator[SavedCheckpoint]:
        with tempfile.TemporaryDirectory() as folder:
            yield self.make(folder)


def _whole(tensor: torch.Tensor) -> Region:
    return Region(box=Box.whole(tuple(tensor.shape)), start=0, stop=tensor.numel())


def _locate(index: Index, key: TensorKey) -> Iterator[tuple[int, Fragment]]:
    box = Box.whole(index.layout[key].shape)
    return index.locate(key, Region(box=box, start=0, stop=box.numel))


def _elements(index: Index, key: TensorKey, region: Region) -> bytes:
    """The bytes of a region's elements, gathered from its fragments."""
    size = index.layout[key].dtype.itemsize
    data = bytearray(region.numel * size)
    for at, fragment in index.locate(key, region):
        extent = fragment.extent
        data[at * size : at * size + extent.nbytes] = _read(extent.path, extent.byte_offset, extent.nbytes)
    return bytes(data)


def _records(saved: SavedCheckpoint) -> set[Record]:
    index = saved.open()
    return {fragment.extent.record for key in saved.truth for _, fragment in _locate(index, key)}


def _complains(saved: SavedCheckpoint) -> bool:
    """Whether opening the checkpoint, and every shard of it that has bytes, finds a fault."""
    try:
        index = saved.open()
        for key in saved.truth:
            for _ in _locate(index, key):
                pass
    except ReshardError:
        return True
    return bool(index.faults)


def _read(path: str, byte_offset: int, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(byte_offset)
        return file.read(nbytes)


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
