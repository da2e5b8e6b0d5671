"""What the checkpoint managers of EasyR1 and verl do, call by call, to a small model with a frozen tower.

`save_checkpoint`, `load_checkpoint`, `get_rng_state` and `load_rng_state` of EasyR1 and of verl
(verl/utils/checkpoint/fsdp_checkpoint_manager.py and checkpoint_manager.py), without what needs a GPU.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from devices import DEVICE, device
from fsdp_jobs import VLM, WORDS, Block, _hooks, build, cast, contents, touch, whole
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

OPTIONS = StateDictOptions(cpu_offload=True)


def _file(folder: str, family: str) -> str:
    return f"{folder}/{family}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"


def _schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def train(model: Any, optimizer: Any, scheduler: Any, steps: range) -> list[float]:
    """The losses of these steps, on batches that all ranks share: they do not depend on the number of ranks."""
    losses = []
    dtype = next(model.parameters()).dtype
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        words = torch.randint(0, WORDS, (2, 5), generator=generator).to(DEVICE)
        picture = torch.randn(2, 3, 12, generator=generator).to(DEVICE, dtype)
        loss = model(words, picture).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def _states(model: Any, optimizer: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Weights and states, whole, as this process gathers them."""
    weights, states = get_state_dict(model, optimizer, options=OPTIONS)
    held = {(name, "weight"): whole(value).clone() for name, value in weights.items()}
    return held | {(name, kind): one for name, kinds in contents(states).items() for kind, one in kinds.items()}


def easyr1_save(folder: str, dtype: str, mixed: bool) -> dict[str, Any]:
    """Two steps and a save; what was held then, and the losses of two steps more."""
    model, optimizer = build(True, frozen=True, every=True, dtype=getattr(torch, dtype))
    scheduler = _schedule(optimizer)
    train(model, optimizer, scheduler, range(2))
    if mixed:
        cast(model, optimizer, torch.bfloat16, ("exp_avg",), "lm_head")
    touch(optimizer)
    _save(folder, model, optimizer, scheduler)
    with _hooks(True):
        held = _states(model, optimizer)
    if mixed:
        cast(model, optimizer, getattr(torch, dtype), ("exp_avg",), "lm_head")
    drawn = torch.rand(2).tolist()
    return {"held": held, "losses": train(model, optimizer, scheduler, range(2, 4)), "drawn": drawn}


def _easyr1_load(folder: str, model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """The calls of EasyR1's manager; its extra state."""
    model_state_dict = torch.load(_file(folder, "model"), weights_only=False)
    optim_state_dict = torch.load(_file(folder, "optim"), weights_only=False)
    extra_state_dict: dict[str, Any] = torch.load(_file(folder, "extra_state"), weights_only=False)
    set_state_dict(
        model=model,
        optimizers=optimizer,
        model_state_dict=model_state_dict,
        optim_state_dict=optim_state_dict,
        options=OPTIONS,
    )
    scheduler.load_state_dict(extra_state_dict["lr_scheduler"])
    return extra_state_dict


def easyr1_load(folder: str, dtype: str) -> dict[str, Any]:
    """A load into a model of other weights; what is held then, and the losses of two steps."""
    model, optimizer = build(True, frozen=True, every=True, dtype=getattr(torch, dtype), seed=1)
    scheduler = _schedule(optimizer)
    with _hooks(True):
        extra_state_dict = _easyr1_load(folder, model, optimizer, scheduler)
        if "rng" in extra_state_dict:
            _set_rng(extra_state_dict["rng"])
        drawn = torch.rand(2).tolist()
        held = _states(model, optimizer)
    return {"held": held, "losses": train(model, optimizer, scheduler, range(2, 4)), "drawn": drawn}


def _fsdp2(seed: int, mesh: Any = None, dtype: str = "float32", tied: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = VLM().to(DEVICE, getattr(torch, dtype))
    if tied:
        model.lm_head.weight = model.embed.weight
    model.visual.requires_grad_(False)
    mesh = mesh or init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def verl_save(folder: str, dtype: str, tied: bool = False) -> dict[str, Any]:
    """The same with FSDP2, as verl saves it: states by number."""
    model, optimizer = _fsdp2(0, dtype=dtype, tied=tied)
    scheduler = _schedule(optimizer)
    train(model, optimizer, scheduler, range(2))
    touch(optimizer)
    torch.save(model.state_dict(), _file(folder, "model"))
    torch.save(optimizer.state_dict(), _file(folder, "optim"))
    torch.save({"lr_scheduler": scheduler.state_dict(), "rng": _rng()}, _file(folder, "extra_state"))
    said = _said(folder, model=model, optimizer=optimizer)
    held = _states(model, optimizer)
    return {"held": held, "losses": train(model, optimizer, scheduler, range(2, 4)), "said": said}


def verl_load(folder: str, dtype: str, tied: bool = False) -> dict[str, Any]:
    model, optimizer = _fsdp2(1, dtype=dtype, tied=tied)
    scheduler = _schedule(optimizer)
    model.load_state_dict(torch.load(_file(folder, "model"), weights_only=False))
    optimizer.load_state_dict(torch.load(_file(folder, "optim"), weights_only=False))
    scheduler.load_state_dict(torch.load(_file(folder, "extra_state"), weights_only=False)["lr_scheduler"])
    said = _said(folder, model=model, optimizer=optimizer)
    held = _states(model, optimizer)
    return {"held": held, "losses": train(model, optimizer, scheduler, range(2, 4)), "said": said}


def _flat_save(folder: str, model: Any, optimizer: Any, scheduler: Any) -> None:
    """verl's calls for FSDP1."""
    settings = (ShardedStateDictConfig(offload_to_cpu=False), ShardedOptimStateDictConfig(offload_to_cpu=False))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *settings):
        torch.save(model.state_dict(), _file(folder, "model"))
        torch.save(optimizer.state_dict(), _file(folder, "optim"))
        torch.save({"lr_scheduler": scheduler.state_dict(), "rng": _rng()}, _file(folder, "extra_state"))


def flat_save(folder: str, orig: bool, mixed: bool) -> dict[str, Any]:
    """verl with FSDP1: states of flat parameters, by number; a frozen tower where the parameters are the original."""
    import ds_reshard

    model, optimizer = build(orig, frozen=orig, every=True)
    scheduler = _schedule(optimizer)
    train(model, optimizer, scheduler, range(2))
    if mixed:
        cast(model, optimizer, torch.bfloat16, ("exp_avg",), "lm_head")
    _flat_save(folder, model, optimizer, scheduler)
    before = _said(folder, model=model, optimizer=optimizer)
    dist.barrier()
    ds_reshard.save_units(folder, model, optimizer)
    said = _said(folder, model=model, optimizer=optimizer)
    with _hooks(True):
        held = _states(model, optimizer)
    if mixed:
        cast(model, optimizer, torch.float32, ("exp_avg",), "lm_head")
    return {"held": held, "losses": train(model, optimizer, scheduler, range(2, 4)), "before": before, "said": said}


def flat_load(folder: str, orig: bool) -> dict[str, Any]:
    """verl's load of them into a model of other weights."""
    model, optimizer = build(orig, frozen=orig, every=True, seed=1)
    scheduler = _schedule(optimizer)
    settings = (ShardedStateDictConfig(offload_to_cpu=False), ShardedOptimStateDictConfig(offload_to_cpu=False))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *settings):
        model.load_state_dict(torch.load(_file(folder, "model"), weights_only=False))
        optimizer.load_state_dict(torch.load(_file(folder, "optim"), weights_only=False))
        scheduler.load_state_dict(torch.load(_file(folder, "extra_state"), weights_only=False)["lr_scheduler"])
    with _hooks(True):
        held = _states(model, optimizer)
    return {"held": held, "losses": train(model, optimizer, scheduler, range(2, 4))}


def _hsdp(fsdp2: bool, seed: int) -> tuple[Any, Any]:
    """Groups of two ranks that hold the same shards, as EasyR1 and verl make them of `fsdp_size=2`."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size() // 2, 2), mesh_dim_names=("ddp", "fsdp"))
    if fsdp2:
        return _fsdp2(seed, mesh)
    torch.manual_seed(seed)
    model = FullyShardedDataParallel(
        VLM(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=device(),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def hsdp(folder: str, fsdp2: bool) -> dict[str, Any]:
    """EasyR1's save of HSDP, and the losses of two steps more; of FSDP1 verl's save, too, into `folder`.flat."""
    import ds_reshard

    model, optimizer = _hsdp(fsdp2, 0)
    scheduler = _schedule(optimizer)
    train(model, optimizer, scheduler, range(2))
    _save(folder, model, optimizer, scheduler)
    if not fsdp2:
        ds_reshard.save_units(f"{folder}.flat", model, optimizer)
        _flat_save(f"{folder}.flat", model, optimizer, scheduler)
    said = _said(folder, model=model, optimizer=optimizer)
    with _hooks(True):
        held = _states(model, optimizer)
    return {"held": held, "said": said, "losses": train(model, optimizer, scheduler, range(2, 4))}


def hsdp_load(folder: str, fsdp2: bool, dcp_folder: str) -> dict[str, Any]:
    """EasyR1's load of it, and torch's of a folder of its own, into other weights; what is held after each."""
    model, optimizer = _hsdp(fsdp2, 1)
    scheduler = _schedule(optimizer)
    with _hooks(True):
        weights, states = get_state_dict(model, optimizer)
        wanted = {"model": weights, "optimizer": states}
        dcp.load(wanted, checkpoint_id=dcp_folder)
        set_state_dict(model, optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])
        first = _states(model, optimizer)
    model, optimizer = _hsdp(fsdp2, 2)
    scheduler = _schedule(optimizer)
    with _hooks(True):
        _easyr1_load(folder, model, optimizer, scheduler)
        held = _states(model, optimizer)
    said = _said(folder, model=model, optimizer=optimizer)
    return {"dcp": first, "held": held, "said": said, "losses": train(model, optimizer, scheduler, range(2, 4))}


def _swapped(folder: str) -> None:
    """The moments of one rank under each other's name, as a reused buffer would leave them; every checksum holds."""
    path = f"{folder}/optim_world_size_{dist.get_world_size()}_rank_0.pt"
    saved = torch.load(path, weights_only=False)
    states = saved["state"]["lm_head.weight"]
    states["exp_avg"], states["exp_avg_sq"] = states["exp_avg_sq"], states["exp_avg"]
    torch.save(saved, path)


def _cut(folder: str) -> None:
    path = f"{folder}/optim_world_size_{dist.get_world_size()}_rank_0.pt"
    os.truncate(path, os.path.getsize(path) // 2)


DAMAGES: dict[str, Callable[[str], object]] = {
    "none": lambda folder: None,
    "truncated": _cut,
    "missing": lambda folder: os.remove(f"{folder}/extra_state_world_size_2_rank_1.pt"),
    "foreign": lambda folder: shutil.copy(
        f"{folder}/model_world_size_2_rank_0.pt", f"{folder}/model_world_size_3_rank_0.pt"
    ),
    "swapped": _swapped,
}


def verified(
    folder: str, orig: bool, frozen: bool, dtype: str, damages: list[str], tied: bool = False
) -> dict[str, str]:
    """What `verify_saved` says on this rank of a save, and of copies that rank 0 has damaged; then of a later step."""
    model, optimizer = build(orig, frozen=frozen, every=True, dtype=getattr(torch, dtype), tied=tied)
    scheduler = _schedule(optimizer)
    train(model, optimizer, scheduler, range(2))
    if frozen:
        touch(optimizer)
    _save(folder, model, optimizer, scheduler)
    told = {}
    for damage in damages:
        copy = f"{folder}/{damage}"
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.copytree(folder, copy, ignore=lambda *_: damages)
            DAMAGES[damage](copy)
        dist.barrier()
        told[damage] = _said(copy, model=model, optimizer=optimizer)
    told["files alone"] = _said(folder)
    train(model, optimizer, scheduler, range(2, 3))
    told["a later step"] = _said(folder, model=model, optimizer=optimizer)
    return told


def _covered(kind: str) -> tuple[Any, Any]:
    """A model of which modules are wrapped by more than FSDP2, or of FSDP1 that leaves one out."""
    torch.manual_seed(0)
    model, mesh = VLM().to(DEVICE), init_device_mesh(DEVICE, (dist.get_world_size(),))
    if kind == "ignored":
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=device(),
            device_mesh=mesh,
            ignored_modules=[model.norm],
        )
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "checkpointed":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def covered(folder: str, kind: str) -> tuple[str, str]:
    """What `verify_saved` says of a save by `get_state_dict`, and once a parameter that FSDP1 ignores has changed."""
    model, optimizer = _covered(kind)
    scheduler = _schedule(optimizer)
    train(model, optimizer, scheduler, range(2))
    if kind == "compiled":
        model = torch.compile(model)
    _save(folder, model, optimizer, scheduler)
    said = _said(folder, model=model, optimizer=optimizer)
    with torch.no_grad():
        next(param for name, param in model.named_parameters() if name.endswith("norm.weight")).add_(1)
    return said, _said(folder, model=model, optimizer=optimizer)


def _said(folder: str, **live: Any) -> str:
    import ds_reshard

    try:
        ds_reshard.verify_saved(folder, **live)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _save(folder: str, model: Any, optimizer: Any, scheduler: Any) -> None:
    with _hooks(True):
        model_state_dict, optim_state_dict = get_state_dict(model, optimizer, options=OPTIONS)
    torch.save(model_state_dict, _file(folder, "model"))
    torch.save(optim_state_dict, _file(folder, "optim"))
    torch.save({"lr_scheduler": scheduler.state_dict(), "rng": _rng()}, _file(folder, "extra_state"))


def _rng() -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), "numpy": numpy.random.get_state(), "random": random.getstate()}


def _set_rng(rng_state: dict[str, Any]) -> None:
    torch.set_rng_state(rng_state["cpu"])
    numpy.random.set_state(rng_state["numpy"])
    random.setstate(rng_state["random"])
