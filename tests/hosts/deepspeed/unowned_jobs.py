"""Runs whose scheduler belongs to the script: the engine is built without it, and does not load its state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from logs import heard, refusal
from resume_jobs import Setup, client_scheduler, make, used


class Scripts(torch.optim.lr_scheduler.ExponentialLR):
    """A scheduler whose state holds more than the script's superclass knows."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.gamma = state_dict["gamma"]


def build(engine: Any, kind: str, params: dict[str, Any]) -> Any:
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if kind == "ChainedScheduler":
        first = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=params["start"], total_iters=4)
        return torch.optim.lr_scheduler.ChainedScheduler(
            [first, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=params["gamma"])]
        )
    if kind == "warmup, then OneCycleLR":
        first = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=params["start"], total_iters=3)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, params["max_lr"], total_steps=20)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, cycle], milestones=[3])
    if kind == "Scripts":
        return Scripts(optimizer, **params)
    if kind == "SWALR":
        return torch.optim.swa_utils.SWALR(optimizer, **params)
    if kind in ("WarmupLR", "OneCycle"):
        from deepspeed.runtime import lr_schedules

        return getattr(lr_schedules, kind)(optimizer, **params)
    return client_scheduler(optimizer, kind, params)


def _train(engine: Any, scheduler: Any, first: int, steps: int) -> list[Any]:
    rows = []
    for step in range(first, first + steps):
        rows += used(engine, step, 1)
        scheduler.step(*((1.0,) if type(scheduler).__name__ == "ReduceLROnPlateau" else ()))
    return rows


def save(setup: Setup, kind: str, params: dict[str, Any], folder: str, steps: int) -> list[Any]:
    """Train, save both, and what each of all steps used, three after the save included."""
    engine = make(setup)
    scheduler = build(engine, kind, params)
    rows = _train(engine, scheduler, 0, steps)
    engine.save_checkpoint(folder)
    if torch.distributed.get_rank() == 0:
        torch.save(scheduler.state_dict(), Path(folder, "scheduler.pt"))
    torch.distributed.barrier()
    return rows + _train(engine, scheduler, steps, 3)


def resume(
    setup: Setup, kind: str, params: dict[str, Any], folder: str, order: str, later: bool = False, asks: bool = True
) -> dict[str, Any]:
    """Resume with the scheduler's state given before, after, or twice; or with a scheduler built `late`.

    `asks`: whether the engine is asked for the state of a scheduler, of which it has none.

    `later`: give it, once the run has trained, a state of its own again, and train on.
    """
    import ds_reshard

    engine = make(setup, seed=99)
    state = torch.load(Path(folder, "scheduler.pt"), weights_only=False)
    try:
        with ds_reshard.install("deepspeed"):
            scheduler = build(engine, kind, params) if order != "late" else None
            if order in ("before", "twice"):
                scheduler.load_state_dict(copy.deepcopy(state))
            engine.load_checkpoint(folder, load_lr_scheduler_states=asks)
            scheduler = scheduler or build(engine, kind, params)
            before = (copy.deepcopy(scheduler.state_dict()), [float(g["lr"]) for g in scheduler.optimizer.param_groups])
            for _ in range({"before": 0, "thrice": 2}.get(order, 1)):
                scheduler.load_state_dict(copy.deepcopy(state))
            report = ds_reshard.last_report()
            rows = _train(engine, scheduler, 100, 3)
            if later:
                kept = copy.deepcopy(scheduler.state_dict())
                expected = _train(engine, scheduler, 103, 2)
                scheduler.load_state_dict(kept)
                for group, lr in zip(scheduler.optimizer.param_groups, kept["_last_lr"], strict=True):
                    group["lr"] = lr
                return {"again": _train(engine, scheduler, 105, 2), "expected": expected}
    except ds_reshard.ReshardError as error:
        unchanged = (
            scheduler is None
            or engine.global_steps == 0
            or before == (scheduler.state_dict(), [float(g["lr"]) for g in scheduler.optimizer.param_groups])
        )
        return {"error": type(error).__name__, "text": str(error), "unchanged": unchanged}
    shown = report.to_json() if report is not None and torch.distributed.get_rank() == 0 else None
    return {"error": None, "rates": rows, "report": shown}


def two(setup: Setup, folder: str) -> str:
    """Two schedulers on one optimizer, stepped in turn, are given their states; the error."""
    import ds_reshard

    engine = make(setup, seed=99)
    schedulers = [build(engine, "LinearLR", {"start_factor": 0.5}), build(engine, "ExponentialLR", {"gamma": 0.9})]
    states = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
        pairs = zip(schedulers, states, strict=True)
        return refusal(lambda: [scheduler.load_state_dict(state) for scheduler, state in pairs])


def owned_again(setup: Setup, folder: str) -> list[Any]:
    """The engine's own scheduler is given the saved state once more by the script, after the load."""
    import ds_reshard

    engine = make(setup, seed=99)
    with ds_reshard.install("deepspeed"):
        _, client = engine.load_checkpoint(folder)
        engine.lr_scheduler.load_state_dict(client["lr_scheduler"])
        return used(engine, 100, 3)


def kept_alive(setup: Setup, folder: str) -> list[str]:
    """What is noted of an engine that could keep it, or its optimizer, alive: the types of what leads there."""
    import gc
    import types

    import ds_reshard
    from ds_reshard.hosts.deepspeed.resume import beginning_of, run_values

    engine = make(setup, seed=99)
    with ds_reshard.install("deepspeed"):
        scheduler = build(engine, "CosineAnnealingLR", {"T_max": 60})
        state = copy.deepcopy(scheduler.state_dict())
        scheduler.load_state_dict(state)
        engine.load_checkpoint(folder)
        scheduler.load_state_dict(state)
    unwanted = {id(engine), id(engine.optimizer), id(scheduler.optimizer), id(engine.module), id(scheduler)}
    found, seen = [], set()
    stack: list[Any] = [run_values(engine), beginning_of(scheduler)]
    while stack:
        thing = stack.pop()
        for item in gc.get_referents(thing):
            if id(item) in unwanted:
                found.append(type(thing).__name__)
            elif id(item) not in seen and not isinstance(item, (type, types.ModuleType, types.FunctionType)):
                seen.add(id(item))
                stack.append(item)
    return found


def uncopied(setup: Setup) -> list[int]:
    """A scheduler whose state cannot be copied, without any policy: positions before and after it is given one."""
    import threading

    import ds_reshard

    engine = make(setup)
    scheduler = build(engine, "ExponentialLR", {"gamma": 0.9})
    scheduler.lock = threading.Lock()
    found = [scheduler.last_epoch]
    with ds_reshard.install("deepspeed"):
        scheduler.load_state_dict({"last_epoch": 3})
    return [*found, scheduler.last_epoch]


class Unhashable(torch.optim.lr_scheduler.ExponentialLR):
    """A scheduler as a dataclass is: equal to others, and without a hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable) and self.gamma == other.gamma


def in_turn(setup: Setup, folder: str, positions: list[int]) -> list[tuple[int, int]]:
    """Two schedulers are given states in turn, of a save by four ranks: the position then, and how many warnings."""
    from dataclasses import replace

    import ds_reshard
    from ds_reshard.hosts.deepspeed.resume import run_values

    engine = make(setup, seed=99)
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    schedulers = [Unhashable(optimizer, gamma=0.9) for _ in range(2)]
    found = []
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
        last = run_values(engine).last
        assert last is not None and last.saved is not None
        last.saved = replace(last.saved, dp=4)
        for number, position in enumerate(positions):
            scheduler = schedulers[number % 2]
            with heard() as told:
                scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": position})
            found.append((scheduler.last_epoch, sum("counts batches" in text for text in told)))
    return found


def rank_policies(setup: Setup, folder: str, policies: list[dict[str, Any]]) -> str:
    """Load with a policy for each rank; the error."""
    import ds_reshard

    engine = make(setup.but(policy=policies[torch.distributed.get_rank()]), seed=99)
    with ds_reshard.install("deepspeed"):
        return refusal(lambda: engine.load_checkpoint(folder))


def universal(folder: str, tag: str, strict: bool = True) -> None:
    """Convert with DeepSpeed's own tool, on rank 0; `latest_universal` names the result."""
    from argparse import Namespace

    from deepspeed.checkpoint.ds_to_universal import main

    if torch.distributed.get_rank() == 0:
        main(
            Namespace(
                input_folder=str(Path(folder, tag)),
                output_folder=str(Path(folder, "universal")),
                strict=strict,
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                inject_missing_state=True,
            )
        )
        Path(folder, "latest_universal").write_text("universal")
    torch.distributed.barrier()


def own_saves(setup: Setup, folder: str) -> dict[str, Any]:
    """Save under a policy, train on, load that again; then as if somebody else had written the tag anew."""
    import ds_reshard

    engine = make(setup)
    with ds_reshard.install("deepspeed"):
        used(engine, 0, 2)
        engine.save_checkpoint(folder, tag="a")
        rates = used(engine, 2, 2)
        said: dict[str, Any] = {"rates": rates}
        for name, arguments in (("latest", {}), ("tag", {"tag": "a"})):
            engine.load_checkpoint(folder, **arguments)
            said[name] = used(engine, 2, 2)
        for path in Path(folder, "a").iterdir():
            path.touch()
        torch.distributed.barrier()
        try:
            engine.load_checkpoint(folder)
        except ds_reshard.ReshardError as error:
            said["error"] = str(error)
    return said
