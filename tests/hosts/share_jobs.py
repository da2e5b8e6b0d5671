"""Jobs about ranks that pass on to each other what all of them read."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from cases import Model, Run
from fingerprint_jobs import load_proved


def load_shared(run: Run, model: Model, folder: str, share: str, harm: str = "") -> dict[str, Any]:
    """`load_proved` with that setting of `share_reads`, while something goes wrong on the last rank alone.

    Chunks are of 512 bytes, so that every rank has several.
    """
    from ds_reshard.execution import passing, sharing
    from ds_reshard.hosts.deepspeed import share as host

    gather = host.GlooGroup.gather

    def unreadable(fd: int, view: memoryview, byte_offset: int) -> tuple[int, int]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def changed(self: Any, mine: torch.Tensor, everyone: Sequence[torch.Tensor]) -> None:
        gather(self, mine, everyone)
        everyone[0][3] ^= 1

    def left(self: Any, mine: torch.Tensor, everyone: Sequence[torch.Tensor]) -> None:
        raise RuntimeError("left in the middle")

    def refused(groups: Any) -> None:
        raise RuntimeError("no interface to listen on")

    def without_memory(*args: Any, **named: Any) -> None:
        raise MemoryError("no memory for a window")

    places = {
        "reading": (passing, "read_at", unreadable),
        "on the way": (host.GlooGroup, "gather", changed),
        "leaving": (host.GlooGroup, "gather", left),
        "memory": (host, "SharingExecutor", without_memory),
        "saying nothing": (passing.Passing, "_note", lambda self, fault: None),
    }
    harms = [harm] if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1 and harm else []
    if "saying nothing" in harms:
        harms.append("reading")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sharing, "_LARGEST_NBYTES", 512))
        if harm == "group":  # on all ranks: the making of groups is collective
            stack.enter_context(mock.patch.object(host, "_made", refused))
        for name in harms:
            if name in places:
                stack.enter_context(mock.patch.object(*places[name]))
        return load_proved(run, model, folder, share=share)


def load_apart(run: Run, model: Model, folder: str) -> dict[str, Any]:
    """The last rank has sharing off in its JSON, the others on."""
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    return load_shared(run, model, folder, "off" if last else "node")
