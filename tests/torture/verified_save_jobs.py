"""What each rank does where a save is verified while calls on files fail, one rank at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from calls import Calls, Step, ended, left_open
from fsdp_manager_jobs import _file, _fsdp2, _schedule, train
from torch.distributed.checkpoint.state_dict import get_state_dict

import ds_reshard

_READS = ("open", "read", "stat", "list")
Save = Callable[[], object]


def _by_torch(folder: str) -> tuple[Save, Save]:
    """`torch.distributed.checkpoint.save`, which verifies before it returns."""
    model, optimizer = _fsdp2(0)
    train(model, optimizer, _schedule(optimizer), range(1))
    weights, states = get_state_dict(model, optimizer)
    name = next(iter(states["state"]))
    state = {"weight": weights[name], "states": states["state"][name], "number": torch.tensor(7), "epoch": 3}
    return (lambda: None), (lambda: dcp.save(state, checkpoint_id=folder))


def _by_manager(folder: str) -> tuple[Save, Save]:
    """The files of EasyR1's manager, verified with what the ranks hold."""
    model, optimizer = _fsdp2(0)
    train(model, optimizer, _schedule(optimizer), range(1))

    def save() -> None:
        weights, states = get_state_dict(model, optimizer)
        os.makedirs(folder, exist_ok=True)
        torch.save(weights, _file(folder, "model"))
        torch.save(states, _file(folder, "optim"))
        torch.save({"lr_scheduler": None}, _file(folder, "extra_state"))

    return save, (lambda: ds_reshard.verify_saved(folder, model=model, optimizer=optimizer))


def is_loss(on: int, step: Step, fault: str) -> bool:
    """Whether what rank `on` was to read is not.

    What a file's status says is not read from it. The `extra_state` of another rank is for that one to read; that of
    its own it has read whole before it looks again whether something in it acts, when the file may have ended.
    """
    if step.kind == "stat":
        return False
    if step.path.startswith("extra_state") and (
        f"_rank_{on}." not in step.path or (step.number, fault) == (2, "ended")
    ):
        return False
    return fault.startswith("E") or fault == "ended"


KINDS = {"torch.distributed.checkpoint": _by_torch, "checkpoint manager": _by_manager}


def verified(kind: str, folder: str, cases: list[tuple[int, Step, str]] | None) -> list[Any]:
    """For each case what a verified save ended in; without cases the calls by which this rank verifies."""
    rank = dist.get_rank()
    before, save = KINDS[kind](folder)

    def once(calls: Calls) -> str:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        before()
        with calls.watched():
            return ended(save)

    with ds_reshard.install("fsdp", verify_after_save=True):
        calls = Calls(folder)
        assert once(calls) == "done"
        if cases is None:
            last = max((at for at, step in enumerate(calls.steps) if step.kind not in _READS), default=-1)
            return calls.steps[last + 1 :]
        told = []
        for on, step, fault in cases:
            calls = Calls(folder, step if on == rank else None, fault)
            said = once(calls)
            if said == "done" and is_loss(on, step, fault):  # perhaps what is read again later
                calls = Calls(folder, step if on == rank else None, fault, lasts=True)
                said = once(calls)
            if on == rank and not calls.befallen:
                said = f"the step was not reached; {said}"
            told.append((said, f"left open: {left}" if (left := left_open(folder)) else ""))
        assert once(Calls(folder)) == "done"
    return told
