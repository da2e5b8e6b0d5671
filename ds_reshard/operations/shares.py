"""Reading that the ranks of a launcher, or copies of this process, share: each does a part, and hears of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from heapq import heapify, heapreplace
from typing import TypeVar

from ds_reshard.errors import ReadFailed, ReshardError
from ds_reshard.operations.heartbeat import heartbeat
from ds_reshard.operations.options import Progress, Reading
from ds_reshard.operations.processes import Parts, in_copies
from ds_reshard.operations.ranks import attempt, gather, raise_caused, rank, world_size

T = TypeVar("T")
Share = tuple[int, int]
"""A part, counted from 0, and the number of parts."""
_LEAST_NBYTES = 256 << 20  # to read, for a process of its own
_COPY_NBYTES = 16 << 20  # of buffers, that one needs


def dealt(nbytes: Sequence[int], share: Share) -> list[int]:
    """The numbers of the items in a share, in order: the largest first, each to the share that has least by then."""
    number, shares = share
    if shares == 1:
        return list(range(len(nbytes)))
    loads = [(0, one) for one in range(shares)]
    heapify(loads)
    own = []
    for item in sorted(range(len(nbytes)), key=lambda item: -nbytes[item]):
        load, least = loads[0]
        heapreplace(loads, (load + nbytes[item], least))
        own += [item] if least == number else []
    return sorted(own)


def in_shares(
    work: Callable[[Share, Reading, Progress | None], T],
    reading: Reading,
    *,
    nbytes: int,
    progress: Progress | None,
    subject: str,
) -> list[T]:
    """What `work` gives for each share, in order, on every rank. Collective with `reading.ranks`.

    Else `reading.processes` copies of this process do it, which share its threads and memory; fewer where there are few
    `nbytes`. `work` is given its share, how it is to read, and what is to be told of progress. What one raises all do.
    """
    if reading.ranks and world_size() > 1:
        beat, share = heartbeat(), (rank(), world_size())
        with beat.showing(progress) if beat is not None else nullcontext():
            note = beat.note if beat is not None else progress
            return in_ranks(lambda: work(share, reading, note), subject=subject)
    copies = min(reading.processes, nbytes // _LEAST_NBYTES, reading.memory_nbytes // _COPY_NBYTES)
    if copies < 2 or reading.device == "cuda":
        return [work((0, 1), reading, progress)]
    own = replace(reading, threads=max(1, reading.threads // copies), memory_nbytes=reading.memory_nbytes // copies)
    numbers = Parts(range(copies), copied=True)
    done: dict[int, T] = {}
    read = [0] * copies

    def copy(tell: Callable[[tuple[int, int, T | None]], None]) -> None:
        for number in numbers.left():
            tell((number, -1, work((number, copies), own, partial(_so_far, tell, number))))

    def hear(said: tuple[int, int, T | None]) -> None:
        number, so_far, given = said
        if so_far < 0:
            done[number] = given  # type: ignore[assignment]
            return
        read[number] = so_far
        if progress is not None:
            progress(sum(read), nbytes)

    mend = "run again; where memory was short, with fewer --processes or less --memory"
    in_copies(copies, copy, hear, lost=ReadFailed, what="its part not read", mend=mend)
    return [done[number] for number in range(copies)]


def in_ranks(work: Callable[[], T], *, subject: str) -> list[T]:
    """What `work` gives on each rank, in order, on every rank; what one raises all do. Collective."""
    value, faults, cause = attempt(work)
    told = gather((value, faults))
    try:
        raise_caused([fault for _, of_rank in told for fault in of_rank], subject=subject, cause=cause)
    except ReshardError as error:
        error.agreed = True
        raise
    return [one for one, _ in told]  # type: ignore[misc]


def _so_far(tell: Callable[[tuple[int, int, T | None]], None], number: int, nbytes: int, _: int) -> None:
    tell((number, nbytes, None))
