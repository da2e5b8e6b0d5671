"""Saves by torch_checkpointing 0.1.1, of a wheel that is unpacked beside `.venv`; every element by a rule."""

from __future__ import annotations

import sys
import zlib
from typing import Any

import torch
import torch.distributed as dist

PACKAGE = "torch-checkpointing 0.1.1"
STEP = 7.0
MODEL = {"0.weight": (10, 7), "0.bias": (10,), "2.weight": (5, 10), "2.bias": (5,)}


def rule(name: str, shape: Any) -> torch.Tensor:
    """Every element of a weight, another for each name and place."""
    first = zlib.crc32(name.encode()) % 4096
    return (torch.arange(torch.Size(shape).numel()) + first).reshape(shape).float() / 64


def states_of(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The moments of a weight: of each element, and so of each part, whatever mesh it lies on."""
    return {"exp_avg": weight * 0.5 + 1, "exp_avg_sq": weight * 0.25 + 3}


def expected() -> dict[tuple[str, str], torch.Tensor]:
    """Weights and moments, whole."""
    held = {(name, "weight"): rule(name, shape) for name, shape in MODEL.items()}
    return held | {(name, kind): one for (name, _), value in held.items() for kind, one in states_of(value).items()}


def _on_cpu() -> None:
    """The package gathers its metadata in CUDA tensors whatever the backend is: those of the CPU stand in."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    for name in ("tensor", "empty", "zeros"):
        made = getattr(torch, name)

        def on_cpu(*args: Any, _made: Any = made, **given: Any) -> Any:
            return _made(*args, **given | ({"device": "cpu"} if "cuda" in str(given.get("device")) else {}))

        setattr(torch, name, on_cpu)
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _run(tp: int) -> tuple[Any, Any]:
    """A model of the weights by the rule, and the package's manager of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    _on_cpu()
    model = torch.nn.Sequential(torch.nn.Linear(7, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(rule(name, weight.shape))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    items = {name: ItemSpec(resharder=DefaultResharder(), required=False) for name in ("model", "optimizer")}
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    config = CheckpointManager.Config(items=items, save=SyncCheckpointSaverConfig(), storage_config=storage)
    return model, CheckpointManager(config)


def load(folder: str, path: str, tp: int = 1) -> list[str]:
    """Load the weights by the package; the names of those that are then not as the rule has them."""
    sys.path.insert(0, path)
    model, manager = _run(tp)
    for weight in model.parameters():
        weight.data.zero_()
    manager.load(folder, into={"model": model.state_dict()})
    manager.close()
    whole = {name: weight.full_tensor() for name, weight in model.named_parameters()}
    return [name for name, shape in MODEL.items() if not torch.equal(whole[name], rule(name, shape))]


def save(folder: str, path: str, tp: int = 1, numbers: bool = False, rates: bool = False) -> None:
    """Save a run; `numbers` saves `optimizer.state_dict()`, which names no parameter; `rates` are tensors."""
    sys.path.insert(0, path)
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, manager = _run(tp)
    named = list(model.named_parameters())
    groups = [
        {"params": [one for name, one in named if ("weight" in name) == heavy], "weight_decay": 0.1 * heavy}
        for heavy in (True, False)
    ]
    adam = torch.optim.AdamW(groups, lr=torch.tensor(0.0) if rates else 0.0)
    model(torch.ones(6, 7)).sum().backward()
    adam.step()
    for weight in model.parameters():
        local, state = weight.to_local(), adam.state[weight]
        state["step"].fill_(STEP)
        for kind, value in states_of(local).items():
            state[kind].to_local().copy_(value.detach())
    states = adam.state_dict() if numbers else get_optimizer_state_dict(model, adam)
    manager.save(folder, {"model": model.state_dict(), "optimizer": states, "step": 2})
    manager.close()
