"""Which ranks want the same bytes, and the process group through which they pass them on."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from ds_reshard.execution.ports import Executor, Saw, Spared
from ds_reshard.execution.sharing import SharingExecutor, capacity_nbytes
from ds_reshard.hosts.deepspeed.agree import agree, attempt, gather, rank
from ds_reshard.hosts.deepspeed.prepare import Prepared
from ds_reshard.hosts.deepspeed.settings import Settings

if TYPE_CHECKING:
    import torch


class _Alike(NamedTuple):
    """What the ranks of one group have in common: where they are, how they share, and what they read."""

    node: str
    mode: str
    memory_nbytes: int
    digest: str


class GlooGroup:
    """Ranks that pass bytes on through host memory, in a process group of their own."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        import torch.distributed as dist

        self._group: torch.distributed.ProcessGroup | None = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, mine: torch.Tensor, everyone: Sequence[torch.Tensor]) -> None:
        import torch.distributed as dist

        dist.all_gather(list(everyone), mine, group=self._group)

    def close(self) -> None:
        """Leave: ranks that still wait for this one are told so by gloo, as nothing keeps the connections open."""
        import torch.distributed as dist

        group, self._group = self._group, None
        dist.destroy_process_group(group)


@contextmanager
def sharing(
    executor: Executor, prepared: Prepared, settings: Settings, *, saw: Saw | None, subject: str
) -> Iterator[Executor]:
    """The executor, or one that passes on what ranks want alike, where there are such ranks.

    Collective; a group that cannot be made is an error on every rank.
    """
    groups = _groups(gather(_alike(prepared, settings)))
    if not groups:
        yield executor
        return
    group: GlooGroup | None = None
    try:
        group, faults, cause = attempt(lambda: _made(groups))
        shared, more, failed = attempt(lambda: _shared(executor, group, prepared, settings, saw))
        agree(faults + more, subject=subject, cause=cause or failed)
        yield shared or executor
    finally:
        if group is not None:
            group.close()


def _alike(prepared: Prepared, settings: Settings) -> _Alike | None:
    if settings.share_reads == "off":
        return None
    buffers, digest, numel = _buffers(prepared), hashlib.sha256(), 0
    for copy in prepared.plan.copies:
        if copy.buffer in buffers and copy.numel:
            digest.update(f"{tuple(copy.record)} {copy.byte_offset} {copy.numel} {copy.dtype.label}\n".encode())
            numel += copy.numel
    if not numel:
        return None
    return _Alike(
        node=socket.gethostname() if settings.share_reads == "node" else "",
        mode=settings.share_reads,
        memory_nbytes=settings.memory_nbytes,
        digest=digest.hexdigest(),
    )


def _buffers(prepared: Prepared) -> frozenset[str]:
    """The buffers that every rank of the run has whole."""
    placements = prepared.wants.placements.values()
    return frozenset(placement.buffer for placement in placements if placement.replicated)


def _groups(told: Sequence[_Alike | None]) -> list[list[int]]:
    """The ranks of each group that is to share, in the order in which every rank makes them."""
    members: dict[_Alike, list[int]] = {}
    for number, alike in enumerate(told):
        if alike is not None:
            members.setdefault(alike, []).append(number)
    return [
        ranks for alike, ranks in members.items() if len(ranks) > 1 and capacity_nbytes(len(ranks), alike.memory_nbytes)
    ]


def _made(groups: Sequence[Sequence[int]]) -> GlooGroup | None:
    """Make all groups; this rank's. Collective.

    They are made by every rank, not by their members alone: torch names a group that its members make by themselves
    after its ranks and the number of groups that a rank knows, which ranks may count differently
    (`_hash_ranks_to_str`, torch/distributed/distributed_c10d.py, 2.13).
    """
    import torch.distributed as dist

    mine = None
    for ranks in groups:
        made = dist.new_group(list(ranks), backend="gloo", timeout=_timeout())
        if rank() in ranks:
            mine = GlooGroup(made)
    return mine


def _timeout() -> timedelta | None:
    """The time that the run gives its own collectives; None, which is torch's default, where torch does not tell."""
    import torch
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    for device in ("cpu", "cuda"):
        try:
            found = world._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
        if isinstance(found, timedelta):
            return found
    return None


def _shared(
    executor: Executor, group: GlooGroup | None, prepared: Prepared, settings: Settings, saw: Saw | None
) -> Executor | None:
    if group is None:
        return None
    return SharingExecutor(
        executor, group, alike=_buffers(prepared), threads=settings.threads, memory_nbytes=settings.memory_nbytes,
        checksum=settings.checksum, saw=saw,
    )  # fmt: skip


def told_of(settings: Settings, spared: Sequence[Spared]) -> str | None:
    """What the resume report says of sharing, from what each rank was spared; None where nobody asked for it."""
    total = sum(spared, Spared())
    if total.nbytes:
        return (
            f"{total.nbytes / 2**20:.1f} MiB, {total.read_calls} read calls and {total.files_opened} opens of files "
            f"spared by {len(spared)} ranks"
        )
    return "nothing that ranks want alike, or no room for it in memory_mib" if settings.share_reads != "off" else None
