"""Cut copies so that each fits a bounded buffer, and say how large the buffers are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ds_reshard.planning.plan import Check, Copy

_WINDOW_NBYTES = 8 << 20


def window_nbytes(memory_nbytes: int) -> int:
    """How much of a file is put together in memory at once: at most half of what there is, the other half reads."""
    return max(4096, min(_WINDOW_NBYTES, memory_nbytes // 2))


def cut_copies(copies: Iterable[Copy], chunk_nbytes: int) -> Iterator[Copy]:
    """The same copies in pieces of at most `chunk_nbytes` bytes of source (at least one element)."""
    for copy in copies:
        if 0 < copy.nbytes <= chunk_nbytes:
            yield copy
            continue
        step = max(1, chunk_nbytes // copy.dtype.itemsize)
        for at in range(0, copy.numel, step):
            yield copy._replace(
                byte_offset=copy.byte_offset + at * copy.dtype.itemsize,
                element_offset=copy.element_offset + at,
                numel=min(step, copy.numel - at),
            )


def cut_checks(checks: Iterable[Check], chunk_nbytes: int) -> Iterator[Check]:
    """The same checks in pieces of at most `chunk_nbytes` bytes."""
    for check in checks:
        for at in range(0, check.nbytes, chunk_nbytes):
            yield check._replace(byte_offset=check.byte_offset + at, nbytes=min(chunk_nbytes, check.nbytes - at))
