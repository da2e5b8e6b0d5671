"""What the ranks of a nanotron run tell each other, so that all of them act and fail alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from ds_reshard.errors import Fault, ReshardError, as_faults, raise_faults
from ds_reshard.resume.policy import ResumePolicy, policy_differences

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def gather(value: T, world: ProcessGroup) -> list[T]:
    """Every rank's value, in rank order, on every rank. Collective."""
    import torch.distributed as dist

    if world.size() == 1:
        return [value]
    values: list[T] = [value] * world.size()
    dist.all_gather_object(values, value, group=world)
    return values


def attempt(work: Callable[[], T]) -> tuple[T | None, list[Fault], Exception | None]:
    """One rank's share of the work; what it raises comes back as faults, never past a collective."""
    try:
        return work(), [], None
    except Exception as error:
        return None, as_faults(error, where="nanotron"), error


def agree(faults: Iterable[Fault], world: ProcessGroup, *, subject: str, cause: Exception | None = None) -> None:
    """Raise the same error on every rank when any rank has a fault. Collective."""
    try:
        raise_faults([fault for of_rank in gather(list(faults), world) for fault in of_rank], subject=subject)
    except ReshardError as error:
        raise error from cause


def same_policy(policy: ResumePolicy, world: ProcessGroup, *, subject: str) -> None:
    """Refuse what ranks were not asked for alike: they would part ways. Collective."""
    raise_faults(policy_differences(gather(policy, world)), subject=subject)


def together(work: Callable[[], T], world: ProcessGroup, *, subject: str) -> T:
    """What `work` gives on this rank, once it has succeeded on all; else its faults on every rank. Collective."""
    value, faults, cause = attempt(work)
    agree(faults, world, subject=subject, cause=cause)
    return value  # type: ignore[return-value]
