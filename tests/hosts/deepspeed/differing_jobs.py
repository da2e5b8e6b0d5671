"""A load in which ranks differ: in what they see under one path, as with node-local storage, or in what they ask."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
from cases import Model, Run, ds_config
from jobs import Net, build, contents, same

import ds_reshard


def load(run: Run, model: Model, nodes: list[str], arguments: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What the load raised, whether it changed the engine, and what the engine holds after it."""
    engine = build(run, model, seed=99)
    own = (arguments or [{}] * len(nodes))[torch.distributed.get_rank()]
    return _load(engine, nodes, lambda: contents(engine), **own)


def load_of_versions(run: Run, model: Model, folder: str, who: int) -> dict[str, Any]:
    """A load in which one rank has another version installed."""
    from ds_reshard.operations import ranks

    engine, number = build(run, model, seed=99), torch.distributed.get_rank()
    with mock.patch.object(ranks, "VERSION", "0.0.9" if number == who else "0.1.0"):
        return _load(engine, [os.getcwd()] * (number + 1), lambda: contents(engine), load_dir=folder)


def load_grid(grid: Any, nodes: list[str]) -> dict[str, Any]:
    import grid_jobs

    def counters(engine: Any) -> dict[str, Any]:
        return {"counters": (engine.global_steps, engine.global_samples, engine.skipped_steps)}

    def run() -> dict[str, Any]:
        engine = grid_jobs.build(grid)
        return _load(engine, nodes, lambda: counters(engine))

    return grid_jobs.alone(run)()  # type: ignore[no-any-return]


def _load(engine: Any, nodes: list[str], held: Any, **arguments: Any) -> dict[str, Any]:
    home, before = os.getcwd(), held()
    os.chdir(nodes[torch.distributed.get_rank()])
    told: dict[str, Any] = {"error": None, "text": "", "path": None}
    try:
        with ds_reshard.install("deepspeed"):
            told["path"], _ = engine.load_checkpoint(**{"load_dir": "ckpt", **arguments})
    except ds_reshard.ReshardError as error:
        told.update(error=type(error).__name__, text=str(error))
    finally:
        os.chdir(home)
    after = held()
    unchanged = same(before, after) if "pieces" in before else before == after
    return {**told, "held": after, "unchanged": unchanged}


def load_without_optimizer(run: Run, model: Model, nodes: list[str]) -> dict[str, Any]:
    """The same of an engine that DeepSpeed alone loads, of stage 3 without an optimizer: which tag it is to load.

    DeepSpeed 0.19.8 cannot load it to its end: `DeepSpeedZeRoOffload` lacks what `load_checkpoint` calls.
    """
    import deepspeed

    config = {key: value for key, value in ds_config(run).items() if key != "gradient_clipping"}
    engine = deepspeed.initialize(model=Net(model), config=config, dist_init_required=False)[0]
    tags: list[object] = []
    engine._load_checkpoint = lambda load_dir, tag, **asked: tags.append(tag) or (None, None)
    return _load(engine, nodes, lambda: {"tags": [*tags]})
