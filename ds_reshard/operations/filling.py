"""Live tensors filled straight from files, every byte verified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ds_reshard.execution.buffers import TensorTarget
from ds_reshard.execution.cuda import choose
from ds_reshard.execution.interfaces import Outcome
from ds_reshard.operations.options import THREADS
from ds_reshard.operations.progress import showing
from ds_reshard.operations.ranks import read_together
from ds_reshard.planning.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

MEMORY_NBYTES = 64 << 20


def fill(
    plan: Plan, tensors: Mapping[str, Tensor], group: ProcessGroup | None = None, *, replica: int, subject: str
) -> None:
    """Fill tensors; what is read of a record by several ranks is verified together. Collective: all raise or none.

    `replica` is the same for ranks that read different parts of one copy.
    """
    targets = {buffer: TensorTarget(tensor) for buffer, tensor in tensors.items()}

    def execute() -> tuple[None, Outcome]:
        executor = choose("auto", targets, threads=THREADS, memory_nbytes=MEMORY_NBYTES, checksum=True)
        return None, progress.execute(executor, plan, targets)

    with showing(subject) as progress:
        read_together(execute, group, replica=replica, shared=lambda: True, subject=subject)
