"""What the ranks of a nanotron run tell each other, so that all of them act and fail alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ds_reshard.errors import raise_faults
from ds_reshard.operations.ranks import agree, attempt, gather
from ds_reshard.resume.policy import ResumePolicy, policy_differences

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def same_policy(policy: ResumePolicy, world: ProcessGroup, *, subject: str) -> None:
    """Refuse what ranks were not asked for alike: they would part ways. Collective."""
    raise_faults(policy_differences(gather(policy, world)), subject=subject)


def together(work: Callable[[], T], world: ProcessGroup, *, subject: str) -> T:
    """What `work` gives on this rank, once it has succeeded on all; else its faults on every rank. Collective."""
    value, faults, cause = attempt(work)
    agree(faults, world, subject=subject, cause=cause)
    return value  # type: ignore[return-value]
