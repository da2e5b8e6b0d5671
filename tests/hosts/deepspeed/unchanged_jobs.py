"""A load of an unchanged layout beside DeepSpeed's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from cases import Model, Run
from jobs import build, train
from loading_modules import Curious

import ds_reshard
from ds_reshard.hosts.deepspeed import load as host


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield all values of a state by their paths, tensors with their type and shape; objects by their attributes."""
    if isinstance(value, torch.Tensor):
        yield path, f"{value.dtype} {tuple(value.shape)} {value.detach().cpu().flatten().tolist()}"
    elif isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _leaves(one, f"{path}.{number}")
    elif type(value).__module__.startswith("deepspeed") and hasattr(value, "__dict__"):
        yield from _leaves(vars(value), path)
    else:
        yield path, repr(value)


def _state(engine: Any) -> dict[str, str]:
    """All that an engine would save, and its counters."""
    counters = ("global_steps", "global_samples", "micro_steps", "skipped_steps", "loaded_checkpoint_dp_world_size")
    state = {"counters": {name: getattr(engine, name) for name in counters}}
    state["optimizer"] = engine.optimizer.state_dict() if engine.optimizer is not None else None
    state["scheduler"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
    state["module"] = engine.module.state_dict()
    if isinstance(engine.module, Curious):
        state["curious"] = engine.module.told()
    return dict(_leaves(state))


@contextmanager
def _cleared() -> Iterator[None]:
    """New memory is zero, so that padding is equal in all engines; and fp16 runs on every CPU, as torch does."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partition_parameters

    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("memory_format", None)
        return torch.zeros(*args, **kwargs)

    with (
        mock.patch.object(torch, "empty", zeros),
        mock.patch.object(partition_parameters, "_orig_torch_empty", zeros),
        mock.patch.object(get_accelerator(), "is_fp16_supported", lambda: True),
    ):
        yield


@_cleared()
def compare(run: Run, model: Model, folder: str, steps: int, stepped: int, arguments: dict[str, Any]) -> Any:
    """Load by DeepSpeed without hooks, and with them: what differs then and two updates later, and who has loaded.

    The run that loads has taken `stepped` updates of its own before.
    """
    engine = build(run, model, seed=5)
    train(engine, 0, steps)
    engine.save_checkpoint(folder, client_state={"note": [1, {"a": torch.arange(3)}]})
    torch.distributed.barrier()
    states, loaders = [], []
    direct, own = host._load_directly, type(engine)._load_checkpoint
    for hooks in (False, True):
        engine = build(run, model, seed=9)
        train(engine, 50, stepped)
        with ds_reshard.install("deepspeed") if hooks else nullcontext():
            host._load_directly = lambda *a, **k: loaders.append("ds_reshard") or direct(*a, **k)
            type(engine)._load_checkpoint = lambda *a, **k: loaders.append("DeepSpeed") or own(*a, **k)
            try:
                path, client = engine.load_checkpoint(folder, **arguments)
            finally:
                host._load_directly, type(engine)._load_checkpoint = direct, own
        client.pop("optimizer", None)
        states.append(_state(engine) | dict(_leaves(client, "client")) | {"path": path})
        train(engine, 70, 2)
        states[-1] |= {f"later {key}": value for key, value in _state(engine).items()}
    theirs, ours = states
    differ = {
        key: (theirs.get(key), ours.get(key)) for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)
    }
    return differ, loaders
