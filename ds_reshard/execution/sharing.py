"""The executor of ranks that pass on to each other what all of them want."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from ds_reshard.execution.chunks import Chunk, chunks
from ds_reshard.execution.passing import SAID_NBYTES, Exchange, Passing, Slot
from ds_reshard.execution.ports import Executor, Outcome, Saw, Target
from ds_reshard.planning.plan import Plan

_LARGEST_NBYTES = 4 << 20
_SMALLEST_NBYTES = 4096


def capacity_nbytes(size: int, memory_nbytes: int) -> int:
    """Bytes of a chunk where `size` ranks keep within `memory_nbytes`; 0 where chunks would be too small.

    Everyone's chunks twice, as gloo gathers into memory of its own first, and two of this rank.
    """
    share = memory_nbytes // (2 * size + 2) // SAID_NBYTES * SAID_NBYTES - SAID_NBYTES
    return min(_LARGEST_NBYTES, share) if share >= _SMALLEST_NBYTES else 0


class SharingExecutor:
    """Passes on the copies into the buffers `alike`, which every rank has in its plan; `inner` does all others.

    Every rank of the exchange must execute a plan that reads the same bytes in the same order into buffers that are
    `alike`. Memory for what is passed on stays within `memory_nbytes`; it is taken here, before the first collective.
    ValueError where it has no room for a chunk of each rank (`capacity_nbytes`).
    """

    def __init__(
        self,
        inner: Executor,
        exchange: Exchange,
        *,
        alike: Collection[str],
        threads: int,
        memory_nbytes: int,
        checksum: bool,
        saw: Saw | None = None,
    ) -> None:
        self.inner, self.exchange = inner, exchange
        self.alike = frozenset(alike)
        self.threads, self.checksum, self.saw = threads, checksum, saw
        self.capacity_nbytes = capacity_nbytes(exchange.size, memory_nbytes)
        if not self.capacity_nbytes:
            raise ValueError(f"{exchange.size} ranks have no room for their chunks in {memory_nbytes} bytes")
        shape = (exchange.size + 2, self.capacity_nbytes + SAID_NBYTES)
        self._slots = [Slot(row) for row in torch.zeros(shape, dtype=torch.uint8, device="cpu")]

    def execute(self, plan: Plan, targets: Mapping[str, Target]) -> Outcome:
        """Once: the memory for what is passed on is given back before `inner` takes its own."""
        shared = [copy for copy in plan.copies if copy.buffer in self.alike and copy.numel]
        outcome = self._pass_on(list(chunks(shared, self.capacity_nbytes)), targets)
        others = tuple(copy for copy in plan.copies if copy.buffer not in self.alike)
        outcome.add(self.inner.execute(replace(plan, copies=others), targets))
        return outcome

    def _pass_on(self, work: Sequence[Chunk], targets: Mapping[str, Target]) -> Outcome:
        slots, self._slots = self._slots, []
        passing = Passing(self.exchange, slots, threads=self.threads, checksum=self.checksum, saw=self.saw)
        passing.run(work, targets)
        return passing.outcome
