"""`dcp.load` through `ds_reshard.dcp.Reader`: into FSDP2, and into plain tensors."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import Model
from devices import DEVICE
from jobs import Net, _groups, batch
from logs import heard, refusal
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.5
    from torch.distributed._composable.fsdp import fully_shard


def _whole(value: Any) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().to("cpu", copy=True)


def fsdp2(model: Model, turned: bool) -> tuple[Any, Any]:
    """The same model under FSDP2 over every rank; `turned` has the param groups the other way round."""
    torch.manual_seed(99)
    net = Net(model)
    fully_shard(net, mesh=init_device_mesh(DEVICE, (dist.get_world_size(),)))
    groups = _groups(net, model)
    return net, torch.optim.AdamW(groups[::-1] if turned else groups)


def load(
    folder: str,
    model: Model,
    flat: bool = False,
    turned: bool = False,
    out: str | None = None,
    torchs: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """What FSDP2 holds after the load: weights, states, param groups by their members, and the bytes read.

    With `out` it is saved there by torch; with `torchs`, it is torch's own reader that loads.
    """
    import ds_reshard.dcp

    net, optimizer = fsdp2(model, turned)
    choice = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(net, optimizer, options=choice)
    ours = None if torchs else ds_reshard.dcp.Reader(folder, group=dist.group.WORLD, **options)
    wanted = {"model": weights, "optimizer": states}
    own = [tuple(group["params"]) for group in states.get("param_groups", [])]
    dcp.load(wanted, storage_reader=ours or dcp.FileSystemReader(folder))
    asked = _group_values(wanted["optimizer"])
    set_state_dict(
        net, optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"], options=choice
    )
    if out is not None:
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=out)
    return {**_held(net, optimizer), "bytes": ours.bytes_read if ours else 0, "own": own, "asked": asked}


def recipe(text: str, folder: str, model: Model) -> dict[str, Any]:
    """What FSDP2 holds once the code of a page has run, which loads `checkpoints`."""
    net, optimizer = fsdp2(model, turned=False)
    exec(text.replace('"checkpoints"', repr(folder)), {"model": net, "optimizer": optimizer})
    return _held(net, optimizer)


def _held(net: Any, optimizer: Any) -> dict[str, Any]:
    names = {id(param): name for name, param in net.named_parameters()}
    held = {
        (names[id(param)], kind): _whole(value)
        for param, state in optimizer.state.items()
        for kind, value in state.items()
    }
    groups = [
        (tuple(sorted(names[id(p)] for p in group["params"])), {k: v for k, v in group.items() if k != "params"})
        for group in optimizer.param_groups
    ]
    found = {name: _whole(value) for name, value in net.state_dict().items()}
    return {"weights": found, "states": held, "groups": groups}


def _group_values(states: dict[str, Any]) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """What a nested state dict holds of each param group, in order: its members, and its values."""
    return [
        (tuple(group["params"]), {name: value for name, value in group.items() if name != "params"})
        for group in states.get("param_groups", [])
    ]


def missing(folder: str, model: Model, ours: bool, partial: bool) -> tuple[str, bool, dict[str, torch.Tensor]]:
    """A load that asks for keys that no checkpoint has, others on each rank: its error, if nothing changed, and all.

    With `ours` by the LoadPlanner of ds_reshard; `partial` loads what there is.
    """
    import ds_reshard.dcp

    net, _ = fsdp2(model, False)
    rank = dist.get_rank()
    weights = {**net.state_dict(), **{f"{name}{rank}": torch.full((3,), 7.0) for name in ("more", "most")[: rank + 1]}}
    before = {name: _whole(value) for name, value in net.state_dict().items()}
    planner = (ds_reshard.dcp.LoadPlanner if ours else dcp.DefaultLoadPlanner)(allow_partial_load=partial)
    told = ""
    try:
        reader = ds_reshard.dcp.Reader(folder, group=dist.group.WORLD)
        dcp.load({"model": weights}, storage_reader=reader, planner=planner)
    except CheckpointException as error:
        told = str(error)
    after = {name: _whole(value) for name, value in net.state_dict().items()}
    held = after | {name: value for name, value in weights.items() if name not in after}
    return told, all(torch.equal(before[name], after[name]) for name in before), held


def opened(folders: list[str], names: tuple[str | None, ...] = (None, None)) -> str:
    """The text with which a Reader is refused of which each rank is given a folder and a map; "" where it is not."""
    import ds_reshard.dcp

    number, group = dist.get_rank(), dist.group.WORLD
    return refusal(lambda: ds_reshard.dcp.Reader(folders[number], names=names[number], group=group))


def loaded_by_torch(nodes: list[str]) -> tuple[str, list[float]]:
    """The text with which torch's own load of `ckpt` on each rank's node is refused, and what it has filled."""
    import ds_reshard

    held = {"model": {"weight": torch.zeros(3)}}
    with contextlib.chdir(nodes[dist.get_rank()]), ds_reshard.install("fsdp"):
        told = refusal(lambda: dcp.load(held, checkpoint_id="ckpt"))
    return told, held["model"]["weight"].tolist()


def resume(folder: str, model: Model, first: int, steps: int, out: str) -> list[float]:
    """Losses of FSDP2 after torch's own load of a folder, over the batches that follow; then saves by torch."""
    net, optimizer = fsdp2(model, False)
    weights, states = get_state_dict(net, optimizer)
    wanted = {"model": weights, "optimizer": states}
    dcp.load(wanted, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])
    rank, size, losses = dist.get_rank(), dist.get_world_size(), []
    for step in range(first, first + steps):
        loss = net(*batch(step, rank, size))
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / size)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=out)
    return losses


def accelerates(
    folder: str, model: Model, out: str | None = None, kind: str = "SHARDED_STATE_DICT"
) -> dict[tuple[str, str], torch.Tensor]:
    """Save two steps of FSDP2 by accelerate's own functions, or load what is there by them; what is held then, whole.

    `Accelerator` itself has FSDP for devices alone; these are what its save_state and load_state call.
    """
    from types import SimpleNamespace

    from accelerate.state import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils

    PartialState._reset_state()
    PartialState(cpu=True)  # which the functions log through
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    accelerator = SimpleNamespace(
        num_processes=dist.get_world_size(),
        process_index=dist.get_rank(),
        is_fsdp2=True,
        is_main_process=not dist.get_rank(),
        wait_for_everyone=dist.barrier,
    )
    net, optimizer = fsdp2(model, False)
    if out is not None:
        for step in range(2):
            net(*batch(step, dist.get_rank(), dist.get_world_size())).backward()
            optimizer.step()
            optimizer.zero_grad()
        fsdp_utils.save_fsdp_model(plugin, accelerator, net, out)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, net, out)
    else:
        fsdp_utils.load_fsdp_model(plugin, accelerator, net, folder)
        fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, net, folder)
    PartialState._reset_state()
    weights, states = get_state_dict(net, optimizer)
    held = {(name, "weight"): _whole(value) for name, value in weights.items()}
    return held | {(n, kind): _whole(value) for n, state in states["state"].items() for kind, value in state.items()}


def columns(folder: str) -> dict[str, torch.Tensor]:
    """Every parameter of `jobs.Net` as a DTensor that is sharded by its last dimension."""
    import ds_reshard.dcp

    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    wanted = {
        name: distribute_tensor(torch.zeros(param.shape), mesh, [Shard(param.dim() - 1)])
        for name, param in Net(Model()).named_parameters()
    }
    dcp.load({"model": wanted}, storage_reader=ds_reshard.dcp.Reader(folder, group=dist.group.WORLD))
    return {name: tensor.full_tensor() for name, tensor in wanted.items()}


def passed_on(folder: str, model: Model, out: str) -> dict[str, Any]:
    """What FSDP2 holds after a load of a folder of torch's own, through torch's reader and through ours."""
    import ds_reshard.dcp

    held = []
    for reader in (dcp.FileSystemReader(folder), ds_reshard.dcp.Reader(folder, group=dist.group.WORLD)):
        net, optimizer = fsdp2(model, False)
        weights, states = get_state_dict(net, optimizer)
        wanted: dict[str, Any] = {"model": weights, "optimizer": states, "train": {"step": 0, "seen": []}}
        dcp.load(wanted, storage_reader=reader)
        held.append(wanted)
    ours = held[1]
    dcp.save(ours, checkpoint_id=out)
    return {name: (_told(held[0][name]), _told(held[1][name])) for name in held[0]}


def _told(value: Any) -> Any:
    """A nested state dict with every tensor whole."""
    if isinstance(value, dict):
        return {key: _told(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_told(part) for part in value]
    return _whole(value) if isinstance(value, torch.Tensor) else value


def raised(folder: str, model: Model, **options: Any) -> str:
    """The text with which a load fails on this rank."""
    try:
        load(folder, model, **options)
    except CheckpointException as error:  # no Exception, so that it ends what catches those
        return f"{type(error).__name__}: {error}"
    return ""


def states_told(folder: str, names: list[list[str]]) -> str:
    """The text with which a load of the states of parameters ends, `names` having those that each rank asks for."""
    import ds_reshard.dcp

    reader = ds_reshard.dcp.Reader(folder, group=dist.group.WORLD)
    shapes = {key.name: place.shape for key, place in reader._source.layout.placements.items()}
    state = {name: {"exp_avg": torch.zeros(shapes[name])} for name in names[dist.get_rank()]}
    try:
        dcp.load({"optimizer": {"state": state}}, storage_reader=reader)
    except CheckpointException as error:
        return str(error)
    return ""


def save(folder: str, model: Model) -> dict[tuple[str, str], torch.Tensor]:
    """A folder of `dcp.save` from FSDP2 after two steps, with a few more DTensors; what it holds, whole."""
    net, optimizer = fsdp2(model, False)
    for step in range(2):
        net(*batch(step, dist.get_rank(), dist.get_world_size())).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(net, optimizer)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    torch.manual_seed(3)
    odd = {
        "columns": distribute_tensor(torch.randn(4, 11), mesh, [Shard(1)]),
        "inner": distribute_tensor(torch.randn(3, 5, 4).bfloat16(), mesh, [Shard(1)]),
        "short": distribute_tensor(torch.arange(2), mesh, [Shard(0)]),
        "same": distribute_tensor(torch.randn(3, 3), mesh, [Replicate()]),
    }
    train = {"step": 2, "seen": [1, 2, 3]}
    dcp.save({"model": weights, "optimizer": states, "odd": odd, "train": train}, checkpoint_id=folder)
    held = {(name, "weight"): _whole(value) for name, value in weights.items()}
    held |= {(f"odd.{name}", "weight"): _whole(value) for name, value in odd.items()}
    return held | {
        (name, kind): _whole(value) for name, state in states["state"].items() for kind, value in state.items()
    }


def stages_ask(folder: str, ours: bool) -> dict[str, list[str]]:
    """What is logged where each rank asks for states of parameters that it alone has: of all, and of one fewer."""
    import ds_reshard.dcp

    rank, told = dist.get_rank(), dict[str, list[str]]()
    names = ("a0", "a2") if rank == 0 else ("b1",)

    def stage(names: tuple[str, ...]) -> dict[str, Any]:
        state = {name: {"exp_avg": torch.full((2,), float(name[1]))} for name in names}
        return {"optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": list(names)}]}}

    dcp.save(stage(("a0", "a2", "b1")), checkpoint_id=folder)
    with ds_reshard.install("fsdp"):
        for what, of_rank in (("all", names), ("part", names[:1])):
            wanted, group = stage(of_rank), dist.group.WORLD
            with heard() as lines:
                reader = ds_reshard.dcp.Reader(folder, group=group) if ours else dcp.FileSystemReader(folder)
                dcp.load(wanted, storage_reader=reader)
            told[what] = list(lines)
            assert float(wanted["optimizer"]["state"][names[0]]["exp_avg"][0]) == float(names[0][1])
    return told
