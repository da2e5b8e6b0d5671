"""An index says what is missing: a buffer that a shard lacks, elements that lie in no file, a record that changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import ChecksumMismatch
from ds_reshard.execution.buffers import read_tensor
from ds_reshard.model.index import Extent, Index, Record
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey
from ds_reshard.model.records import ElementType, TensorRecord
from ds_reshard.model.region import Box, Region

KEY, FP32 = TensorKey(name="w", kind="weight"), ElementType.FLOAT32


class _Shard:
    """Every shard has eight elements of the buffers that are named."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def buffers(self, family: str, shard: int) -> dict[str, Extent]:
        record = Record(path="file", byte_offset=0, nbytes=32, crc32=None)
        return {name: Extent(record, 0, FP32, 8) for name in self._names}


def _placement(boxes: list[tuple[int, int]]) -> Placement:
    """A tensor of eight elements, of which each box has so many from an offset on."""

    def of(box: Box, shard: int, tiles: tuple[Placement, ...] = ()) -> Placement:
        cut = Cut(chunk=8, first=shard)
        return Placement(key=KEY, shape=(8,), dtype=FP32, family="model", buffer="b", cut=cut, box=box, tiles=tiles)

    tiles = tuple(of(Box(offset=(at,), size=(size,)), shard) for shard, (at, size) in enumerate(boxes))
    return of(Box.whole((8,)), 0, tiles)


def _located(index: Index) -> int:
    wanted = Region(box=Box.whole((8,)), start=0, stop=8)
    return sum(extent.numel for _, extent in index.locate(KEY, wanted))


def test_a_buffer_that_a_shard_lacks_is_told_once() -> None:
    """Whatever is asked for, the shard is damaged, and nothing is located there."""
    index = Index(Layout({KEY: _placement([(0, 4), (4, 4)])}, {"model": 2}), _Shard("another"))
    assert _located(index) == 0 and _located(index) == 0
    assert [fault.what for fault in index.faults] == ["holds no buffer 'b'"] * 2  # of two shards


@pytest.mark.parametrize("boxes", [[(0, 4), (5, 3)], [(0, 5), (4, 4)], [(0, 3), (4, 4)]])
def test_elements_in_no_file_or_in_two_are_told(boxes: list[tuple[int, int]]) -> None:
    """Boxes that leave a hole, or overlap, are no cover of the tensor."""
    index = Index(Layout({KEY: _placement(boxes)}, {"model": 2}), _Shard("b"))
    _located(index)
    assert f"{sum(size for _, size in boxes)} of 8 wanted elements" in [fault.found for fault in index.faults] or [
        fault.found for fault in index.faults if "overlap" in fault.found
    ]


@pytest.mark.parametrize("part", [slice(None), slice(2, 5)])
def test_a_tensor_is_read_only_of_a_record_that_is_as_it_was(tmp_path: Path, part: slice) -> None:
    """A view of some of a storage is checked by all of it: a changed byte outside of the view is a mismatch."""
    path = tmp_path / "t.pt"
    torch.save(torch.arange(64, dtype=torch.float32)[part], path)
    with open_archive(path) as archive:
        record = archive.load()
    assert isinstance(record, TensorRecord)
    assert torch.equal(read_tensor(record), torch.arange(64, dtype=torch.float32)[part])
    data = bytearray(path.read_bytes())
    data[record.storage.byte_offset + record.storage.nbytes - 1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ChecksumMismatch):
        read_tensor(record)


def test_of_tiles_that_lie_together_only_the_pieces_that_are_wanted_are_looked_at() -> None:
    """A tensor that a map has stacked of 8 experts, each cut over 100 shards."""
    key = TensorKey("weight", "fp32")
    shape = (8, 10, 10)
    whole = Placement(key, shape, ElementType.FLOAT32, "optim", "fp32", Cut(chunk=1), Box.whole(shape))
    tiles = tuple(
        whole._replace(box=Box.along(shape, 0, expert, 1), cut=Cut(chunk=1, origin=expert)) for expert in range(8)
    )
    index = Index(Layout({key: whole._replace(tiles=tiles)}, {"optim": 100}), _Shard())
    wanted = Region(box=Box.whole(shape), start=295, stop=304)
    found = [(part.box.offset[0], piece.shard) for part, piece in index.pieces(index.layout[key], wanted)]
    assert found == [(2, shard) for shard in range(95, 100)] + [(3, shard) for shard in range(4)]
    inside = Region(box=Box(offset=(3, 2, 0), size=(1, 5, 10)), start=7, stop=9)
    assert [piece.shard for _, piece in index.pieces(index.layout[key], inside)] == [27, 28]


def test_a_run_may_want_more_rows_than_the_tensor_has() -> None:
    """A vocabulary that is padded further: no element of the rows behind it is located."""
    key = TensorKey("weight", "fp32")
    whole = Placement(key, (4, 2), ElementType.FLOAT32, "optim", "fp32", Cut(chunk=8), Box.whole((4, 2)))
    index = Index(Layout({key: whole}, {"optim": 1}), _Shard("fp32"))
    found = [run for _, _, run in index.runs(key, Region(box=Box.whole((6, 2)), start=2, stop=12))]
    assert [(run.first_offset, run.second_offset, run.numel) for run in found] == [(0, 2, 6)]
