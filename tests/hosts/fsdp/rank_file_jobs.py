"""Saves and loads by accelerate's own functions with `use_dcp=False`: a file for each rank; every element by a rule."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

WHOLE = StateDictOptions(full_state_dict=True)
STEP = 7.0


class Net(torch.nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, buffers of each rank, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.up = torch.nn.Linear(6, 10)
        self.out = torch.nn.Linear(10, 2)
        self.embed.weight.requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.up(self.norm(self.embed(words))))  # type: ignore[no-any-return]


def rule(name: str, kind: str, shape: Any) -> torch.Tensor:
    """Every element of a tensor, another for each name, kind and place; above 0, as second moments are."""
    first = zlib.crc32(f"{name} {kind}".encode()) % 4096
    return (torch.arange(torch.Size(shape).numel()) + first).reshape(shape).float() / 64


def expected() -> dict[tuple[str, str], torch.Tensor]:
    """What every rank's run holds: weights, moments and buffers, whole."""
    net = Net()
    held = {(name, "weight"): rule(name, "weight", one.shape) for name, one in net.named_parameters()}
    for name, one in net.named_parameters():
        if one.requires_grad:
            held |= {(name, kind): rule(name, kind, one.shape) for kind in ("exp_avg", "exp_avg_sq")}
            held[name, "step"] = torch.tensor(STEP)
    return held


def _mesh(kind: str) -> Any:
    """None, the default; or shards on two ranks and their copies, as accelerate's ParallelismConfig makes them."""
    if kind != "hsdp":
        return init_device_mesh("cpu", (dist.get_world_size(),)) if kind == "mesh" else None
    from accelerate import ParallelismConfig

    config = ParallelismConfig(dp_replicate_size=dist.get_world_size() // 2, dp_shard_size=2)
    return config.build_device_mesh("cpu")[tuple(config.fsdp_dim_names)]


def _run(version: int, mesh: str) -> tuple[Any, Any]:
    net: Any = Net()
    if version == 1:
        net = FullyShardedDataParallel(
            net, device_id=torch.device("cpu"), device_mesh=_mesh(mesh), use_orig_params=True
        )
    else:
        made = _mesh(mesh)
        fully_shard(net.up, mesh=made)
        fully_shard(net, mesh=made)
    trained = [(name, one) for name, one in net.named_parameters() if one.requires_grad]
    groups = [
        {"params": [one for name, one in trained if ("weight" in name) == heavy], "weight_decay": 0.1 * heavy}
        for heavy in (True, False)
    ]
    return net, torch.optim.AdamW(groups, lr=0.0)


def _accelerates(version: int) -> tuple[Any, Any]:
    """The plugin, and of an Accelerator what the functions ask: accelerate itself has FSDP for devices alone."""
    from accelerate.state import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    PartialState._reset_state()
    PartialState(cpu=True)  # which the functions log through
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT")
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    return plugin, SimpleNamespace(
        num_processes=dist.get_world_size(),
        process_index=dist.get_rank(),
        is_fsdp2=version == 2,
        is_main_process=not dist.get_rank(),
        wait_for_everyone=dist.barrier,
    )


def save(
    folder: str,
    version: int = 2,
    mesh: str = "",
    number: int = 0,
    optimizer: bool = True,
    step: float = STEP,
    verified: bool = False,
) -> None:
    """Fill a run by the rule, and save it; of another `step` with the values of another."""
    from accelerate.utils import fsdp_utils

    plugin, accelerator = _accelerates(version)
    net, adam = _run(version, mesh)
    net(torch.tensor([1, 2, 3])).sum().backward()
    adam.step()
    for group in adam.param_groups:
        group["lr"] = 0.25
    held = {at: tensor + (step - STEP) for at, tensor in expected().items()}
    weights, states = get_state_dict(net, adam, options=WHOLE)
    weights = {name: held.get((name, "weight"), value) for name, value in weights.items()}
    states["state"] = {
        name: {kind: held[name, kind].clone() for kind in ("step", "exp_avg", "exp_avg_sq")}
        for name in sorted({name for name, kind in held if kind == "step"})
    }
    set_state_dict(net, adam, model_state_dict=weights, optim_state_dict=states, options=WHOLE)
    fsdp_utils.save_fsdp_model(plugin, accelerator, net, folder, number, use_dcp=False)
    if optimizer:
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, adam, net, folder, number, use_dcp=False)
    if verified:
        import ds_reshard

        dist.barrier()
        ds_reshard.verify_saved(folder, model=net, optimizer=adam)


def load(folder: str, version: int = 2, mesh: str = "", hooks: bool = False) -> list[str]:
    """Load into a run of other values; the names of what is then not as the rule has it."""
    from accelerate.utils import fsdp_utils

    import ds_reshard

    if hooks:
        ds_reshard.install("accelerate")

    plugin, accelerator = _accelerates(version)
    net, adam = _run(version, mesh)
    fsdp_utils.load_fsdp_model(plugin, accelerator, net, folder, use_dcp=False)
    fsdp_utils.load_fsdp_optimizer(plugin, accelerator, adam, net, folder, use_dcp=False)
    weights = get_model_state_dict(net, options=WHOLE)
    states: Any = get_optimizer_state_dict(net, adam, options=WHOLE)
    found = {(name, "weight"): value for name, value in weights.items()}
    found |= {(name, kind): one for name, kinds in states["state"].items() for kind, one in kinds.items()}
    return [str(key) for key, tensor in expected().items() if key not in found or not torch.equal(found[key], tensor)]
