"""Saves of scripts that ask for `verify_after_save`: by torch.distributed.checkpoint, accelerate and managers.

A save is damaged where another process or a disk would damage it: after its last write, before it returns.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import Model
from dcp_jobs import accelerates, fsdp2
from fsdp_jobs import build
from fsdp_manager_jobs import OPTIONS, _cut, _file, _flat_save, _fsdp2, _schedule, _swapped, train
from logs import heard, refusal
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import ds_reshard
from ds_reshard.containers.dcp_directory import read_directory
from ds_reshard.containers.torch_zip import open_archive

Damage = Callable[[str], object]


def _as_another_rank(folder: str) -> None:
    """One rank's file as the other one's: of the same save, so that every checksum holds."""
    shutil.copy(f"{folder}/__0_0.distcp", f"{folder}/__1_0.distcp")


def _flip(folder: str) -> None:
    """One bit of a tensor that rank 1 has written."""
    chunks = [chunk for tensor in read_directory(folder).tensors.values() for chunk in tensor.chunks]
    places = [chunk.place for chunk in chunks if 0 not in chunk.size]
    place = next(one for one in places if one is not None and one.path.endswith("__1_0.distcp"))
    with open_archive(place.path, part=(place.byte_offset, place.nbytes)) as archive:
        held: Any = archive.load()
    data = bytearray(Path(place.path).read_bytes())
    data[held.byte_offset] ^= 1
    Path(place.path).write_bytes(data)


OTHER = "another model"


DCP_DAMAGES: dict[str, Damage] = {
    "none": lambda folder: None,
    "truncated": lambda folder: os.truncate(f"{folder}/__1_0.distcp", 900),
    "missing": lambda folder: os.remove(f"{folder}/__1_0.distcp"),
    "no directory": lambda folder: os.remove(f"{folder}/.metadata"),
    "another rank's": _as_another_rank,
    "a bit": _flip,
    "another save's directory": lambda folder: shutil.copy(f"{Path(folder).parent}/{OTHER}/.metadata", folder),
}
FILE_DAMAGES: dict[str, Damage] = {
    "none": lambda folder: None,
    "truncated": _cut,
    "missing": lambda folder: os.remove(f"{folder}/optim_world_size_2_rank_1.pt"),
    "no schedule": lambda folder: os.truncate(f"{folder}/extra_state_world_size_2_rank_1.pt", 400),
    "foreign": lambda folder: shutil.copy(
        f"{folder}/optim_world_size_2_rank_1.pt", f"{folder}/optim_world_size_3_rank_1.pt"
    ),
    "swapped": _swapped,
}


def _damaging(damage: Damage) -> Any:
    """torch's writer, whose last act on the coordinator is followed by damage."""
    finish = dcp.FileSystemWriter.finish

    def damaging(self: Any, metadata: Any, results: Any) -> None:
        finish(self, metadata, results)
        damage(str(self.path))

    return mock.patch.object(dcp.FileSystemWriter, "finish", damaging)


def _state() -> dict[str, Any]:
    """What a trainer saves: FSDP2's, a tensor that lies by columns, a view, one without elements, and plain values."""
    model, optimizer = _fsdp2(0)
    train(model, optimizer, _schedule(optimizer), range(2))
    weights, states = get_state_dict(model, optimizer)
    grid = torch.arange(12.0).reshape(3, 4)
    more = {"columns": grid.t(), "view": grid[1:, 1:], "empty": torch.empty(0, 3), "number": torch.tensor(7)}
    return {"model": weights, "optimizer": states, "more": more, "epoch": 3, "complex": torch.ones(2) * 1j}


def saves(folder: str) -> dict[str, Any]:
    """What this rank is told of saves of each damage, in one folder's subfolders, and of other ways to save."""
    state, told = _state(), dict[str, Any]()
    dcp.save({"other": torch.zeros(3)}, checkpoint_id=f"{folder}/{OTHER}")
    with heard() as lines, ds_reshard.install("fsdp", verify_after_save=True):
        for name, damage in DCP_DAMAGES.items():
            with _damaging(damage):
                told[name] = refusal(lambda name=name: dcp.save(state, checkpoint_id=f"{folder}/{name}"))  # type: ignore[misc]
        group = dist.new_group(backend="gloo")
        with _damaging(_flip):
            at = f"{folder}/thread"
            told["thread"] = refusal(lambda: dcp.async_save(state, checkpoint_id=at, process_group=group).result())
        kind = AsyncCheckpointerType.PROCESS
        told["process"] = refusal(lambda: dcp.async_save(state, checkpoint_id=at, async_checkpointer_type=kind))
        told["accelerate"] = refusal(lambda: accelerates("", Model(), out=f"{folder}/accelerate"))
        with _damaging(_flip):
            told["accelerate, a bit"] = refusal(lambda: accelerates("", Model(), out=f"{folder}/accelerate.bit"))
        told["lines before"] = list(lines)
        writer = dcp.FileSystemWriter(
            f"{folder}/safetensors", serialization_format=dcp.filesystem.SerializationFormat.SAFETENSORS
        )
        told["safetensors"] = refusal(lambda: dcp.save({"model": state["model"]}, storage_writer=writer))
        told["lines"] = lines[len(told["lines before"]) :]
        ds_reshard.install("fsdp", verify_after_save=False)
        with _damaging(_flip):
            told["not asked"] = refusal(lambda: dcp.save(state, checkpoint_id=f"{folder}/not asked"))
    return told


class _Codes(torch.optim.SGD):
    """Keeps codes of each rank's own piece as a plain tensor, as optimizers with quantised states may. Synthetic."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                local = param.grad.to_local()
                self.state[param] = {"step": torch.tensor(1.0), "codes": (local * 100).round().to(torch.int8)}


class _Counting(torch.nn.Module):
    """A parameter, and a buffer and an extra state that are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, bias=False)
        self.register_buffer("count", torch.tensor(float(dist.get_rank())))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(values)
        return out

    def get_extra_state(self) -> list[int]:
        return [1, dist.get_rank()]

    def set_extra_state(self, state: Any) -> None:
        pass


def _quantised() -> dict[str, Any]:
    """FSDP2's state dicts of such a model and such an optimizer."""
    torch.manual_seed(0)
    model = _Counting()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = _Codes(model.parameters(), lr=0.1)
    model(torch.arange(16.0).reshape(4, 4)).pow(2).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}


class _Own(torch.Tensor):
    """A tensor of a class of its own."""


def _differing(rank: int, size: int) -> dict[str, Any]:
    """What ranks may give under one name, of which one is written: the last rank's differs from the others'."""
    last = int(rank == size - 1)
    whole, grid = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))
    values = torch.zeros(3) + last
    return {
        "plain": values,
        "sign of zero": torch.tensor([-0.0 if last else 0.0]),
        "type": values.to(torch.int8 if last else torch.float32) * 0,
        "shape": torch.zeros(3 + last),
        "subclass": values.as_subclass(_Own),
        "replicated": DTensor.from_local(values, whole, [Replicate()]),
        "shards of groups": DTensor.from_local(values, grid, [Replicate(), Shard(0)]),
        "number": last,
        "bytes": bytes(1 + last),
        "inside": {1: ("text", values)},
        "columns inside": (torch.arange(9.0).reshape(3, 3).t() if last else torch.arange(9.0).reshape(3, 3),),
    }


def _lying_otherwise(rank: int) -> dict[str, Any]:
    """Equal tensors inside objects, which each rank's storages hold in another way."""
    grid, ones = torch.arange(6.0).reshape(2, 3), torch.ones(2)
    parts = {"a": torch.zeros(1), "b": torch.ones(3)}
    return {
        "view": (torch.cat([ones, torch.full((1 + rank,), float(rank))])[:2],),
        "columns": (grid if rank else grid.t().contiguous().t(),),
        "order": ({name: parts[name] for name in (reversed(parts) if rank else parts)},),
        "shared": (ones, ones if rank else ones.clone()),
        "device": (torch.device("cpu", rank),),
    }


class _OfTheFirst(dcp.DefaultSavePlanner):
    """Plans objects on the first rank alone, as torch's own planner did (default_planner.py, 2.1)."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        tensors = [item for item in plan.items if item.tensor_data is not None or self.is_coordinator]
        self.plan = replace(plan, items=tensors)
        return self.plan


def unequal(folder: str) -> dict[str, str]:
    """What this rank is told of saves of each value that ranks do not hold alike, and of one that they do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with ds_reshard.install("fsdp", verify_after_save=True):

        def saved(state: dict[str, Any], at: str, **options: Any) -> str:
            return refusal(lambda: dcp.save(state, checkpoint_id=f"{folder}/{at}", **options))

        differing = _differing(rank, size)
        told = {name: saved({name: value}, name) for name, value in differing.items()}
        objects = {"number": differing["number"], "alike": 5, "whole": torch.ones(2)}
        told["planned by the first"] = saved(objects, "planned", planner=_OfTheFirst())
        told["of FSDP2"] = saved(_quantised(), "of FSDP2")
        # In another order of its members on each rank, as hashes of texts are; pickles of equal values then differ.
        names = sorted((f"n{number}" for number in range(50)), reverse=bool(rank % 2))
        equal: dict[str, Any] = {"dict": {1: dict.fromkeys(names, 0)}, "names": (names[0][:1],), "set": set(names)}
        equal |= _lying_otherwise(rank)
        some = {"of this rank": 1} if rank == 1 else {}
        told["equal"] = saved({**_differing(0, size), **equal, **some}, "equal")
        group, at = dist.new_group(backend="gloo"), f"{folder}/thread"
        state = {"plain": differing["plain"]}
        told["thread"] = refusal(lambda: dcp.async_save(state, checkpoint_id=at, process_group=group).result())
        for time in ("first", "again"):
            told[f"kept plan, {time}"] = saved(state, time, planner=dcp.DefaultSavePlanner(enable_plan_caching=True))

        def counted(*given: Any) -> Any:
            net, optimizer = fsdp2(*given)
            net.register_buffer("count", torch.tensor(rank))
            return net, optimizer

        with mock.patch("dcp_jobs.fsdp2", counted):
            told["accelerate"] = refusal(lambda: accelerates("", Model(), out=f"{folder}/accelerate"))
    return told


def made_alike(folder: str, way: str) -> dict[str, Any]:
    """What each rank is told of a save of codes of its own, and what it loads once it has saved them in another way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    codes, told = torch.arange(4, dtype=torch.int8) + 10 * rank, {}
    mesh = init_device_mesh("cpu", (size,))
    with ds_reshard.install("fsdp", verify_after_save=True):
        told["refused"] = refusal(lambda: dcp.save({"codes": codes}, checkpoint_id=f"{folder}/refused"))
        if way == "equal on all ranks":
            dist.all_reduce(codes)
        key = f"codes.{rank}" if way == "under its own key" else "codes"
        state: dict[str, Any] = {key: codes}
        if way == "as a DTensor":
            state = {key: DTensor.from_local(codes, mesh, [Shard(0)])}
        told["again"] = refusal(lambda: dcp.save(state, checkpoint_id=f"{folder}/{way}"))
        empty = {name: torch.zeros_like(value) for name, value in state.items()}
        told["load"] = refusal(lambda: dcp.load(empty, checkpoint_id=f"{folder}/{way}"))
    loaded = getattr(empty[key], "to_local", lambda: empty[key])()
    return {**told, "same": torch.equal(loaded, codes)}


SYNTHETIC = """
class FSDPCheckpointManager:
    def __init__(self, model, optimizer, lr_scheduler, save, damage):
        self.model, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler
        self._save, self._damage = save, damage

    def save_checkpoint(self, {arguments}):
        self._save({folder}, self.model, self.optimizer, self.lr_scheduler)
        self._damage({folder})

    def load_checkpoint(self, {folder}=None):
        pass
"""
ARGUMENTS = {
    "EasyR1": "path: str, save_model_only: bool = False",
    "verl": "local_path: str, hdfs_path: str = None, global_step: int = 0, max_ckpt_to_keep=None",
}


def _manager(folder: str, kind: str) -> Any:
    """A synthetic class where both packages have theirs, with the arguments of theirs."""
    arguments = ARGUMENTS[kind]
    at = Path(folder, f"rank{dist.get_rank()}", "verl", "utils", "checkpoint")
    at.mkdir(parents=True)
    text = SYNTHETIC.format(arguments=arguments, folder=arguments.partition(":")[0])
    (at / "fsdp_checkpoint_manager.py").write_text(text)
    sys.path.insert(0, str(at.parents[2]))
    return importlib.import_module("verl.utils.checkpoint.fsdp_checkpoint_manager").FSDPCheckpointManager


def _easyr1s(folder: str, model: Any, optimizer: Any, scheduler: Any) -> None:
    """EasyR1's calls: states by names, gathered."""
    weights, states = get_state_dict(model, optimizer, options=OPTIONS)
    torch.save(weights, _file(folder, "model"))
    torch.save(states, _file(folder, "optim"))
    torch.save({"lr_scheduler": scheduler.state_dict()}, _file(folder, "extra_state"))


def _verls(folder: str, model: Any, optimizer: Any, scheduler: Any) -> None:
    """verl's calls: the optimizer's own state dict."""
    torch.save(model.state_dict(), _file(folder, "model"))
    torch.save(optimizer.state_dict(), _file(folder, "optim"))
    torch.save({"lr_scheduler": scheduler.state_dict()}, _file(folder, "extra_state"))


KINDS: dict[str, tuple[str, Callable[..., None], tuple[str, ...]]] = {
    "EasyR1": ("EasyR1", _easyr1s, tuple(FILE_DAMAGES)),
    "verl": ("verl", _verls, ("none", "truncated", "missing", "no schedule", "foreign")),
    "verl with FSDP1": ("verl", _flat_save, ("none", "missing", "no schedule")),
}


def managed(folder: str, kind: str) -> dict[str, Any]:
    """What this rank is told by the manager's `save_checkpoint` of each damage."""
    framework, save, damages = KINDS[kind]
    with ds_reshard.install("fsdp", verify_after_save=True):
        found = _manager(folder, framework)  # after the hooks: they wait for its import
        model, optimizer = _fsdp2(0) if kind == "verl" else build(kind == "EasyR1", frozen=kind == "EasyR1", every=True)
        scheduler = _schedule(optimizer)
        train(model, optimizer, scheduler, range(2))
        told = {}
        for name in damages:
            at = f"{folder}/{name}"

            def damage(path: str, name: str = name) -> None:
                dist.barrier()
                if dist.get_rank() == 0:
                    FILE_DAMAGES[name](path)
                dist.barrier()

            os.makedirs(at, exist_ok=True)
            manager = found(model, optimizer, scheduler, save, damage)
            told[name] = refusal(lambda at=at, manager=manager: manager.save_checkpoint(at))  # type: ignore[misc]
        return told


def managed_load(folder: str, scratch: str, kind: str) -> str:
    """What this rank is told by the `load_checkpoint` of a manager, a synthetic class that itself loads nothing."""
    with ds_reshard.install("fsdp"):
        manager = _manager(scratch, kind)(None, None, None, None, None)
        return refusal(lambda: manager.load_checkpoint(folder))
