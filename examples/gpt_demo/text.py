"""Real text that is on every machine: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from gpt_demo.model import CONTEXT


class Text:
    """All bytes of the library's modules, in the order of their names, and the batches cut from them."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.bytes = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
        self.files = len(files)

    def batch(self, step: int, global_batch: int, *, rank: int, ranks: int) -> torch.Tensor:
        """This rank's share of a step's global batch; the batch depends on nothing but the step."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.bytes) - CONTEXT - 1, (global_batch,), generator=generator)
        share = starts[rank * global_batch // ranks : (rank + 1) * global_batch // ranks]
        return torch.stack([self.bytes[start : start + CONTEXT + 1] for start in share.tolist()]).long()
