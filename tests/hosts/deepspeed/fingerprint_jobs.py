"""Jobs about fingerprints: a state that is saved again under another layout, and loads that prove themselves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import jobs
import torch
from cases import Model, Run


def save_as(run: Run, model: Model, folder: str, to: str) -> dict[str, Any]:
    """Load a checkpoint and save it, untrained, under this run's layout."""
    import ds_reshard

    engine = jobs.build(run, model, seed=99)
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
    engine.save_checkpoint(to)
    return jobs.contents(engine)


def load_proved(run: Run, model: Model, folder: str, harm: str = "", **arguments: Any) -> dict[str, Any]:
    """Load with `"verify": "fingerprint"`, after `harm` was arranged on the last rank: what was proved, or raised."""
    import ds_reshard
    from ds_reshard.hosts.deepspeed import load as host

    section = {"ds_reshard": {"reshard": {"verify": "fingerprint"}}}
    run = Run(run.stage, run.dp, run.dtype, run.options, {**run.config, **section})
    engine = jobs.build(run, model, seed=99)
    moved: list[Any] = []
    move = host.move
    told: dict[str, Any] = {"error": None, "proved": {}}
    with mock.patch.object(host, "move", lambda *args: moved.append(move(*args)) or moved[-1]), arranged(harm):
        try:
            with ds_reshard.install("deepspeed"):
                engine.load_checkpoint(folder, **arguments)
        except ds_reshard.ReshardError as error:
            told.update(error=type(error).__name__, text=str(error), where=sorted(f.where for f in error.faults))
            told["step"] = jobs.outcome(engine.step)
            return told
    if moved:
        proof = moved[0].proof
        told["bytes_read"] = moved[0].bytes_read
        told["proved"] = {(key.name, key.kind): str(number) for key, number in proof.tensors.items()}
        told["unproved"] = proof.unproved
    report = ds_reshard.last_report()
    told["row"] = report["fingerprints"].used if report is not None and torch.distributed.get_rank() == 0 else None
    told["contents"] = jobs.contents(engine)
    return told


def arranged(harm: str) -> contextlib.AbstractContextManager[Any]:
    """On the last rank alone: memory that changes after the read, or a plan that puts bytes elsewhere."""
    from ds_reshard.hosts.deepspeed import move, prepare

    if not harm or torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
        return contextlib.nullcontext()
    if harm in PLANS:
        plan_rank = prepare.plan_rank
        return mock.patch.object(
            prepare, "plan_rank", lambda *args, **named: _planned(plan_rank(*args, **named), PLANS[harm])
        )
    prove = move.prove

    def proved(engine: Any, *others: Any, **named: Any) -> Any:
        with torch.no_grad():
            MEMORY[harm](engine)
        return prove(engine, *others, **named)

    return mock.patch.object(move, "prove", proved)


def _planned(plan: Any, harm: Callable[[list[Any]], list[Any]]) -> Any:
    return dataclasses.replace(plan, copies=tuple(harm(list(plan.copies))))


def _moments_exchanged(copies: list[Any]) -> list[Any]:
    other = {"exp_avg/0": "exp_avg_sq/0", "exp_avg_sq/0": "exp_avg/0"}
    return [copy._replace(buffer=other.get(copy.buffer, copy.buffer)) for copy in copies]


def _halves_exchanged(copies: list[Any]) -> list[Any]:
    """The first long copy of a moment puts its second half before its first."""
    number = next(n for n, copy in enumerate(copies) if copy.buffer == "exp_avg/0" and copy.numel > 4)
    copy = copies.pop(number)
    half = copy.numel // 2
    rest = copy.byte_offset + half * copy.dtype.itemsize
    first = copy._replace(numel=half, element_offset=copy.element_offset + copy.numel - half)
    return [*copies, first, copy._replace(numel=copy.numel - half, byte_offset=rest)]


def _last_copy_lost(copies: list[Any]) -> list[Any]:
    """Of zeros or not: bytes that are never read are seen by their number."""
    return [copy for copy in copies if copy.buffer != "exp_avg/0"]


PLANS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "moments exchanged by the plan": _moments_exchanged,
    "halves exchanged by the plan": _halves_exchanged,
    "copies lost by the plan": _last_copy_lost,
}


def _flat(engine: Any) -> torch.Tensor:
    from ds_reshard.hosts.deepspeed.engine import masters_of

    return masters_of(engine)[0]


def _state(engine: Any, kind: str) -> torch.Tensor:
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    state: torch.Tensor = inner.state[_flat(engine)][kind]
    return state


def _swap(values: torch.Tensor) -> None:
    """The first with one near it: farther on lies stage 3's padding, which holds anything and is no tensor's."""
    other = int((values != values[0]).nonzero()[0])
    values[[0, other]] = values[[other, 0]]


def _exchange(engine: Any) -> None:
    state = engine.optimizer.optimizer.state[_flat(engine)]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def _negate_largest(values: torch.Tensor) -> None:
    values[values.abs().argmax()] *= -1


def _flip_a_weight(engine: Any) -> None:
    weight = engine.module.first.weight
    words = (weight.ds_tensor if hasattr(weight, "ds_tensor") else weight.detach()).view(-1).view(torch.int16)
    words[0] ^= 1


MEMORY: dict[str, Callable[[Any], Any]] = {
    "one sign": lambda engine: _negate_largest(_state(engine, "exp_avg")),
    "two elements swapped": lambda engine: _swap(_flat(engine)),
    "a range zeroed": lambda engine: _state(engine, "exp_avg_sq")[:3].zero_(),
    "shifted": lambda engine: _state(engine, "exp_avg").copy_(_state(engine, "exp_avg").roll(1)),
    "states exchanged": _exchange,
    "one bit of a weight": _flip_a_weight,
}
