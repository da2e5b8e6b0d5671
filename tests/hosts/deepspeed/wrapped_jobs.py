"""Engines whose module stands in a wrapper when it saves, in another one when it loads."""

from __future__ import annotations

from typing import Any

import jobs
import torch
from cases import Run, ds_config
from logs import heard


class _Adapter(torch.nn.Module):
    """Names as PEFT gives them (synthetic): a frozen weight, and what an adapter of this name trains.

    One that is "old" has the frozen weight in the layer itself, as releases before `base_layer`.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        adapter, _, old = name.partition(" ")
        self.layers = torch.nn.ModuleList()
        for _ in range(2):
            base = torch.nn.Linear(6, 6).requires_grad_(False)
            layer = base if old else torch.nn.Module()
            if not old:
                layer.base_layer = base
            layer.lora_A = torch.nn.ModuleDict({adapter: torch.nn.Linear(6, 2, bias=False)})
            layer.lora_B = torch.nn.ModuleDict({adapter: torch.nn.Linear(2, 6, bias=False)})
            self.layers.append(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            (down,), (up,) = layer.lora_A.values(), layer.lora_B.values()
            x = getattr(layer, "base_layer", layer)(x) + up(down(x))
        return x.float().square().sum()


class _Holder(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


class _Two(torch.nn.Module):
    """One half has a name that a run gives it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.add_module(name, torch.nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x).float().square().sum() for part in self.children()]).sum()


def network(wrapper: str) -> Any:
    torch._dynamo.config.disable = True  # the names are torch.compile's, and nothing is compiled
    kind, _, name = wrapper.partition(" ")
    net: Any = {"adapter": _Adapter, "two": _Two}.get(kind, lambda _: _Two("second"))(name)
    if kind == "compiled":
        net = torch.compile(net, backend="eager")
    if kind == "half":
        net.second = torch.compile(net.second, backend="eager")
    if kind == "headed":  # trains a head alone, over a base that others have trained
        net.requires_grad_(False).add_module("head", torch.nn.Linear(6, 6))
    if kind == "held":
        net = _Holder(net)
    if kind == "buffered":
        net.register_buffer(name, torch.ones(3))
    if kind == "frozen":
        net.get_submodule(name).requires_grad_(False)
    if kind == "longer":  # trains a head with all the rest
        net.add_module("head", torch.nn.Linear(6, 6))
    return net


def _build(run: Run, wrapper: str, seed: int) -> Any:
    import deepspeed

    jobs.forget()
    torch.manual_seed(seed)
    net = network(wrapper)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=ds_config(run), dist_init_required=False)
    return engine


def _weights(engine: Any) -> dict[str, Any]:
    """Weights by the place of each parameter."""
    from deepspeed.runtime.zero import GatheredParameters

    found = {}
    for number, parameter in enumerate(engine.module.parameters()):
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[f"{number} weight"] = parameter.detach().clone()
    return found


def _held(engine: Any) -> dict[str, Any]:
    """Weights, masters and moments by the place of each parameter."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", lambda: None)()
    found = _weights(engine)
    for number, parameter in enumerate(engine.module.parameters()):
        if parameter.requires_grad and engine.zero_optimization_stage():
            found[f"{number} fp32"] = safe_get_full_fp32_param(parameter).clone()
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{number} {kind}"] = safe_get_full_optimizer_state(parameter, kind).clone()
    return found


def save(run: Run, wrapper: str, folder: str) -> dict[str, Any]:
    engine = _build(run, wrapper, 7)
    for step in range(2):
        torch.manual_seed(step)
        engine.backward(engine(torch.randn(1, 6).bfloat16()))
        engine.step()
    engine.save_checkpoint(folder)
    return _held(engine)


def load(run: Run, wrapper: str, folder: str, names: Any, again: str = "", **arguments: Any) -> dict[str, Any]:
    """What the engine holds after a load, after a save and a load `again`; or the error.

    `names` is a map of names or the path of one, or a list of each rank's own.
    """
    import ds_reshard

    names = names[torch.distributed.get_rank()] if isinstance(names, list) else names
    run = Run(run.stage, run.dp, run.dtype, run.options, {**run.config, "ds_reshard": {"names": names}})
    engine = _build(run, wrapper, 99)
    try:
        with heard() as lines, ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder, **arguments)
            if again:
                engine.save_checkpoint(again)
                engine.load_checkpoint(again)
    except ds_reshard.ReshardError as error:
        return {"error": type(error).__name__, "text": str(error)}
    held = _held(engine) if not arguments else _weights(engine)
    return {"held": held, "lines": [str(line) for line in lines]}


_TOPS = {"model": ("model", "optimizer"), "app": ("app", "optim"), "net": ("net", "optim"), "": ("", "")}


def _state(net: Any, optimizer: Any, top: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    weights, states = _TOPS[top]
    if not weights:
        return dict(net.state_dict())
    of_run = {weights if top != "app" else "model": net.state_dict(), states: get_optimizer_state_dict(net, optimizer)}
    return {top: of_run} if top == "app" else of_run


def directory(
    wrapper: str, folder: str, top: str, load: bool = False, loose: bool = False, reader: str = ""
) -> dict[str, Any]:
    """A folder of torch.distributed.checkpoint, saved, or loaded by torch's reader or the one that `reader` names."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    import ds_reshard
    import ds_reshard.dcp

    torch.manual_seed(99 if load else 7)
    net = network(wrapper)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    net(torch.randn(1, 6)).backward()
    optimizer.step()
    state = _state(net, optimizer, top)
    if not load:
        dcp.save(state, checkpoint_id=folder)
        return {"weights": [one.detach().clone() for one in net.parameters()]}
    how = {"storage_reader": eval(reader)} if reader else {"checkpoint_id": folder}
    try:
        with heard() as lines, ds_reshard.install("fsdp"):
            dcp.load(state, planner=DefaultLoadPlanner(allow_partial_load=loose), **how)
    except ds_reshard.ReshardError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"weights": [one.detach().clone() for one in net.parameters()], "lines": [str(line) for line in lines]}
