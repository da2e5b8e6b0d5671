"""Plans of tensors that are cut along inner axes: one entry for each meeting of two blocks, moved bit for bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from test_plan import FP32, raw

from ds_reshard.containers.crc import crc32
from ds_reshard.execution.buffers import TensorTarget
from ds_reshard.execution.files import StagingExecutor
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.index import Extent, Index, Record
from ds_reshard.model.layout import Layout, TensorKey, chunked_placement
from ds_reshard.model.region import Box
from ds_reshard.planning.plan import Planner


def by_blocks(shape, axis, ranks):
    """A tensor that is cut along one axis into as many blocks as there are ranks, each whole in its own shard."""
    edges = [shape[axis] * rank // ranks for rank in range(ranks + 1)]
    boxes = []
    for start, stop in pairwise(edges):
        offset, size = [0] * len(shape), list(shape)
        offset[axis], size[axis] = start, stop - start
        boxes.append(Box(offset=tuple(offset), size=tuple(size)))
    key = TensorKey(name="w", kind="fp32")
    return chunked_placement(key, shape, FP32, boxes, family="f", buffer="fp32/0"), boxes


def block_of(tensor, box):
    return tensor[tuple(slice(at, at + size) for at, size in zip(box.offset, box.size, strict=True))]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("saved", "coming"), [((1, 3), (1, 2)), ((2, 4), (1, 1)), ((1, 5), (2, 2)), ((0, 2), (2, 3))])
def test_a_tensor_cut_along_another_axis_goes_where_it_belongs(tmp_path, saved, coming, staged):
    """From blocks of one axis to those of another, in one entry for each pair of ranks; into memory and into files."""
    shape = (4, 9, 10)
    truth = {TensorKey(name="w", kind="fp32"): torch.randn(shape)}
    (source, saved_boxes), (target, boxes) = by_blocks(shape, *saved), by_blocks(shape, *coming)
    layout = Layout({source.key: source}, {"f": saved[1]})
    blocks = [block_of(truth[source.key], box) for box in saved_boxes]
    extents = []
    for rank, block in enumerate(blocks):
        data = raw(block)
        (tmp_path / str(rank)).write_bytes(data)
        record = Record(path=str(tmp_path / str(rank)), byte_offset=0, nbytes=len(data), crc32=crc32(data))
        extents.append({"fp32/0": Extent(record=record, byte_offset=0, dtype=FP32, numel=block.numel())})

    class Blocks:
        def buffers(self, family, shard):
            return extents[shard]

    planner = Planner(Index(layout, Blocks()), Layout({target.key: target}, {"f": coming[1]}), {target.key: target.key})
    for rank, box in enumerate(boxes):
        made = torch.full((box.numel,), 77.0)
        plan = planner.plan(rank, sizes={"fp32/0": box.numel})
        assert len(plan.copies) <= saved[1] and plan.nbytes == 4 * box.numel and plan.fills == ()
        if staged:
            into = InMemory(made)
            executor = StagingExecutor(threads=1, memory_nbytes=256, saw=lambda copies, views: None)
            assert executor.execute(plan, {"fp32/0": into}).faults == []
        else:
            executor = ThreadExecutor(threads=1, memory_nbytes=1, checksum=True)
            assert executor.execute(plan, {"fp32/0": TensorTarget(made)}).faults == []
        assert raw(made) == raw(block_of(truth[target.key], box))


class InMemory:
    """A target without memory to look at, as a file is one."""

    def __init__(self, tensor):
        self._into = TensorTarget(tensor)
        self.dtype, self.zero, self.scatter = self._into.dtype, self._into.zero, self._into.scatter

    def view(self, element_offset, numel, dtype):
        return None

    def store(self, element_offset, data, dtype):
        self._into.store(element_offset, data, dtype)
