"""Files of torch.save whose tensors are holes: real headers, directories and pickles, zeros that take no disk.

They are laid out as those that `convert` writes (`torch.load` reads them), with 64-bit sizes and offsets where the file
needs them; every tensor is zeros, with the checksum that zeros of that length have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from ds_reshard.containers.crc import repeated
from ds_reshard.containers.torch_zip_writer import plan_archive
from ds_reshard.execution.buffers import element_type
from ds_reshard.execution.files import _joined
from ds_reshard.model.records import TensorRecord, new_tensor

Shape = tuple[int, ...]
_NUMBERS = count()


def hole(shape: Shape, dtype: torch.dtype) -> TensorRecord:
    """A tensor of zeros, to be written as a hole."""
    return new_tensor(f"hole {next(_NUMBERS)}", shape, element_type(dtype))


@dataclass(frozen=True)
class SparseArchive:
    """A file that is to be written: what is not zeros in it, and its bytes; `stem` is its name without `.pt`."""

    stem: str
    parts: Sequence[tuple[int, bytes]]
    nbytes: int

    def renamed(self, stem: str) -> SparseArchive:
        """The same content under another name of the same length."""
        assert len(stem) == len(self.stem)
        old, new = f"{self.stem}/".encode(), f"{stem}/".encode()
        return SparseArchive(stem, [(at, data.replace(old, new)) for at, data in self.parts], self.nbytes)

    def write(self, folder: Path) -> None:
        with (folder / f"{self.stem}.pt").open("wb") as file:
            file.truncate(self.nbytes)
            for at, data in self.parts:
                file.seek(at)
                file.write(data)


def sparse_archive(stem: str, value: object) -> SparseArchive:
    """`value` as torch.save would write it, its holes as holes."""
    plan = plan_archive(stem, value)
    sums = {key: repeated(b"\0", storage.nbytes) for key, storage in plan.storages.items()}
    return SparseArchive(stem, list(_joined(plan.parts(sums))), plan.nbytes)


def write_sparse(path: Path, value: object) -> None:
    """Write `value` as torch.save would, its holes as holes."""
    sparse_archive(path.stem, value).write(path.parent)
