"""A module that takes part in saving and loading in every way that torch offers, and the jobs that use it."""

from __future__ import annotations

from typing import Any

import torch
from cases import Run, ds_config
from jobs import train
from logs import heard


class Curious(torch.nn.Module):
    """Takes part in saving and loading in every way that torch offers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.register_buffer("my_extra_state", torch.randn(3))
        self.register_buffer("base", torch.randn(3))
        self.register_buffer("derived", torch.zeros(3), persistent=False)
        self.count = 0
        self.hidden = torch.randn(2)
        self.register_load_state_dict_post_hook(lambda module, keys: module._derive())

    def _derive(self) -> None:
        self.derived.copy_(2 * self.base)

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "hidden_doubled"] = 2 * self.hidden

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        hidden = state.pop(prefix + "hidden_doubled", None)
        if hidden is not None:
            self.hidden = hidden / 2
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = tokens.to(self.linear.weight.dtype)[:, None].repeat(1, 3)
        return self.linear(rows).float().square().mean()

    def told(self) -> dict[str, Any]:
        return {
            "extra": self.count,
            "hidden": self.hidden.tolist(),
            "base": self.base.float().tolist(),
            "named": self.my_extra_state.float().tolist(),
            "derived": self.derived.float().tolist(),
        }


def _curious(run: Run, seed: int) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    net = Curious()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=ds_config(run), dist_init_required=False)
    return engine


def save_curious(run: Run, folder: str) -> dict[str, Any]:
    engine = _curious(run, seed=5)
    engine.module.count = 41
    engine.module._derive()
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    return engine.module.told()


def load_curious(run: Run, folder: str) -> dict[str, Any]:
    import ds_reshard

    engine = _curious(run, seed=6)
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
    return engine.module.told()


class Counting(torch.nn.Module):
    """Its extra state is a tensor, as Transformer Engine's."""

    def __init__(self, count: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.count = count

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.count])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = float(state)


def load_counting(run: Run, folder: str) -> float:
    """The count that a module has after a load without the optimizer."""
    import deepspeed

    import ds_reshard

    net = Counting(0.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=ds_config(run), dist_init_required=False)
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder, load_optimizer_states=False)
    return net.count


class Pair(torch.nn.Module):
    """Two weights of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(4, 3))
        self.second = torch.nn.Parameter(torch.zeros(4, 3))


def load_pair(run: Run, folder: str, names: dict[str, Any], turned: bool) -> dict[str, Any]:
    """The weights after a load without the optimizer, or why it was refused; `turned`: the second lies by columns."""
    import deepspeed

    import ds_reshard

    net = Pair()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    config = {**ds_config(run), "ds_reshard": {"names": names}}
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)
    if turned:
        net.second.data = net.second.data.T.contiguous().T
    told = ""
    with ds_reshard.install("deepspeed"):
        try:
            engine.load_checkpoint(folder, load_optimizer_states=False)
        except ds_reshard.ReshardError as error:
            told = str(error)
    return {"told": told, **{name: weight.detach().clone() for name, weight in net.named_parameters()}}


class Scaled(torch.nn.Module):
    """A frozen weight whose scales are written into the state dict and not loaded, as of bitsandbytes' Linear4bit.

    Of the two, one is a tensor that it keeps and the other is made anew (`QuantState.as_dict(packed=True)`, 0.49).
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        codes = torch.arange(6, dtype=torch.uint8).view(2, 3)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.absmax = torch.full((2,), scale)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.absmax
        destination[prefix + "weight.packed"] = (self.absmax * 8).to(torch.uint8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ (self.weight.to(rows.dtype) * self.absmax.to(rows.dtype)[:, None]).T


class Scaled8(Scaled):
    """The same as of Linear8bitLt: its loader takes the scales, and a format where the weight is there (0.50)."""

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self._register_load_state_dict_pre_hook(self._take_format)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        torch.nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        destination[prefix + "absmax"] = self.absmax
        destination[prefix + "weight_format"] = torch.tensor(0, dtype=torch.uint8)

    @staticmethod
    def _take_format(state_dict: Any, prefix: str, *_: Any) -> None:
        if prefix + "weight" in state_dict:
            assert state_dict.pop(prefix + "weight_format") == 0

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *more)
        *_, unexpected, _ = more
        if prefix + "absmax" in unexpected:
            self.absmax.copy_(state_dict[prefix + "absmax"])
            unexpected.remove(prefix + "absmax")


class Adapted(torch.nn.Module):
    """That weight, and what is trained beside it."""

    def __init__(self, scale: float, eight: bool = False) -> None:
        super().__init__()
        self.base = Scaled8(scale) if eight else Scaled(scale)
        self.adapter = torch.nn.Linear(3, 2)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = tokens.to(self.adapter.weight.dtype)[:, None].repeat(1, 3)
        return (self.base(rows) + self.adapter(rows)).float().square().mean()


def _adapted(run: Run, seed: int, scale: float, eight: bool = False) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    net = Adapted(scale, eight)
    optimizer = torch.optim.AdamW(net.adapter.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=ds_config(run), dist_init_required=False)
    return engine


def _held(engine: Any) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param

    masters = {
        name: safe_get_full_fp32_param(param).tolist() for name, param in engine.module.adapter.named_parameters()
    }
    return {**masters, "absmax": engine.module.base.absmax.tolist()}


def save_adapted(run: Run, folder: str, exclude: bool, eight: bool = False) -> dict[str, Any]:
    engine = _adapted(run, seed=5, scale=2.0, eight=eight)
    train(engine, 0, 2)
    engine.save_checkpoint(folder, exclude_frozen_parameters=exclude)
    return _held(engine)


def load_adapted(run: Run, folder: str, scale: float, strict: bool, eight: bool = False) -> dict[str, Any]:
    """What the engine holds then, and what rank 0 warned of; or the error, and whether the engine is as it was."""
    import ds_reshard

    engine = _adapted(run, seed=6, scale=scale, eight=eight)
    before = _held(engine)
    with heard() as said, ds_reshard.install("deepspeed"):
        try:
            engine.load_checkpoint(folder, load_module_strict=strict)
        except ds_reshard.ReshardError as error:
            return {"error": type(error).__name__, "text": str(error), "unchanged": _held(engine) == before}
    warned = [line for line in said if "frozen weights" in line]
    return {**_held(engine), **({"warned": warned} if warned else {})}
