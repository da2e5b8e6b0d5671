"""The core alone: a matrix in two numpy files, each with half of its elements, becomes three of its columns.

A layout says where every element lies, a plan which bytes go where, an executor moves them.
"""

import tempfile
from pathlib import Path

import numpy
import torch

from ds_reshard.errors import raise_faults
from ds_reshard.execution.buffers import TensorTarget
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.model.index import Extent, Index, Record
from ds_reshard.model.layout import Cut, Layout, Placement, TensorKey, chunked_placement
from ds_reshard.model.records import ElementType
from ds_reshard.model.region import Box
from ds_reshard.planning.plan import Planner

KEY, SHAPE, FLOAT = TensorKey("matrix", "weight"), (6, 4), ElementType.FLOAT32
HALF = 12  # elements
# Saved: one row of 24 elements, cut into two.
SAVED = Layout({KEY: Placement(KEY, SHAPE, FLOAT, "files", "half", Cut(chunk=HALF), Box.whole(SHAPE))}, {"files": 2})

# Wanted: a box of columns for each of three ranks: the first, the second, and the last two.
COLUMNS = [Box.along(SHAPE, 1, first, count) for first, count in ((0, 1), (1, 1), (2, 2))]
WANTED = Layout({KEY: chunked_placement(KEY, SHAPE, FLOAT, COLUMNS, family="ranks", buffer="columns")}, {"ranks": 3})


class Files:
    """Opens the saved files: where the buffer of each begins, and how many elements it has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def buffers(self, family: str, shard: int) -> dict[str, Extent]:
        path = str(self.folder / f"half{shard}.npy")
        start = numpy.load(path, mmap_mode="r").offset
        record = Record(path=path, byte_offset=start, nbytes=HALF * FLOAT.itemsize, crc32=None)
        return {"half": Extent(record, start, FLOAT, HALF)}


def main(folder: Path) -> None:
    matrix = numpy.random.default_rng(0).random(SHAPE, dtype=numpy.float32)
    for shard, half in enumerate(matrix.reshape(2, HALF)):
        numpy.save(folder / f"half{shard}.npy", half)

    index = Index(SAVED, Files(folder))
    planner, executor = (
        Planner(index, WANTED, {KEY: KEY}),
        ThreadExecutor(threads=1, memory_nbytes=1 << 20, checksum=False),
    )
    for rank, box in enumerate(COLUMNS):
        plan = planner.plan(rank, sizes={})
        raise_faults(index.faults, subject="opening the files")  # before the first byte is moved
        made = torch.empty(box.numel)
        outcome = executor.execute(plan, {"columns": TensorTarget(made)})
        raise_faults(outcome.faults, subject="reading the files")
        numpy.save(folder / f"columns{rank}.npy", made.numpy().reshape(box.size))
        print(f"rank {rank}: {box.size[0]} x {box.size[1]}, {len(plan.copies)} copies from {len(plan.files)} files")

    columns = [numpy.load(folder / f"columns{rank}.npy") for rank in range(3)]
    print(f"equal to the matrix that was saved: {numpy.array_equal(numpy.hstack(columns), matrix)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
