"""`dcp.load` through `ds_reshard.dcp.Reader` into DTensors on meshes of every kind, and on one that is wrong."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from devices import DEVICE
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import ds_reshard.dcp


def _loaded(folder: str, wanted: dict[str, Any], planner: dcp.LoadPlanner | None = None) -> None:
    reader = ds_reshard.dcp.Reader(folder, model="", group=dist.group.WORLD)
    dcp.load(wanted, storage_reader=reader, planner=planner or ds_reshard.dcp.LoadPlanner())


def filled(folder: str, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """The tensor, whole, as DTensors on four ranks hold it: in groups, cut both ways, and on two of the ranks."""
    both = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("outer", "inner"))
    part = DeviceMesh(DEVICE, [1, 3])
    cases: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "replicated shards": (both, [Replicate(), Shard(0)]),
        "cut both ways": (both, [Shard(0), Shard(1)]),
        "cut twice": (both, [Shard(0), Shard(0)]),
        "two of four ranks": (part, [Shard(0)]),
    }
    told = {}
    for case, (mesh, placements) in cases.items():
        tensor = distribute_tensor(torch.zeros(shape), mesh, placements)
        _loaded(folder, {name: tensor})
        told[case] = tensor.full_tensor().cpu() if mesh.get_coordinate() is not None else None
    return told


def contradicts(folder: str, name: str, shape: tuple[int, ...], rows: int, torchs_planner: bool = False) -> str:
    """What a load says of a DTensor of which rank 1 holds other rows than its mesh says; whether it was touched."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    tensor = distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])
    if dist.get_rank() == 1:
        tensor._local_tensor = torch.zeros(rows, *shape[1:], device=DEVICE)
    assert isinstance(tensor, DTensor)
    planner = dcp.DefaultLoadPlanner() if torchs_planner else None
    try:
        _loaded(folder, {name: tensor}, planner)
    except CheckpointException as error:
        return f"{error} touched {bool(tensor.to_local().any())}"
    return "nothing"


def breaks(folder: str, name: str, shape: tuple[int, ...], broken: str) -> str:
    """What a load says of which one step raises on rank 1."""
    from ds_reshard.hosts.dcp.reader import Filling

    tensor = distribute_tensor(torch.zeros(shape), init_device_mesh(DEVICE, (dist.get_world_size(),)), [Shard(0)])
    step = mock.patch.object(Filling, broken, side_effect=KeyError("surprise"))
    try:
        with step if dist.get_rank() == 1 else nullcontext():
            _loaded(folder, {name: tensor})
    except CheckpointException as error:
        return str(error)
    return "nothing"
