"""What the ranks tell each other, so that all of them act and fail alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ds_reshard.errors import Fault, ReshardError, as_faults, raise_faults

T = TypeVar("T")


def rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def broadcast(value: T) -> T:
    """Rank 0's value, on every rank. Collective."""
    import torch.distributed as dist

    if world_size() == 1:
        return value
    box: list[object] = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def gather(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank. Collective."""
    import torch.distributed as dist

    if world_size() == 1:
        return [value]
    values: list[object] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def attempt(work: Callable[[], T]) -> tuple[T | None, list[Fault], Exception | None]:
    """Run one rank's share of the work; what it raises comes back as faults, never past a collective."""
    try:
        return work(), [], None
    except Exception as error:
        return None, as_faults(error, where=f"rank {rank()}"), error


def agree(faults: Iterable[Fault], *, subject: str, cause: Exception | None = None) -> None:
    """Raise the same error on every rank when any rank has a fault. Collective."""
    raise_caused([fault for of_rank in gather(list(faults)) for fault in of_rank], subject=subject, cause=cause)


def raise_caused(faults: Iterable[Fault], *, subject: str, cause: Exception | None) -> None:
    """Raise what all ranks know already, from this rank's own exception where it has one."""
    try:
        raise_faults(faults, subject=subject)
    except ReshardError as error:
        raise error from cause
