"""Modules that load more than tensors, or by versions, or in a `load_state_dict` of their own; saved and loaded."""

from __future__ import annotations

from typing import Any

import torch
from cases import Run, ds_config
from jobs import forget, train


class Counting(torch.nn.Module):
    """Saves a number, and by hooks a dict with a tensor in it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.cached = count, torch.full((2,), float(count))
        self._register_state_dict_hook(lambda module, state, prefix, _: module._keep(state, prefix))
        self._register_load_state_dict_pre_hook(self._take)

    def _keep(self, state: Any, prefix: str) -> None:
        state[prefix + "cache"] = {"of": self.cached}

    def _take(self, state: Any, prefix: str, *_: Any) -> None:
        self.cached = state.pop(prefix + "cache")["of"]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "count"] = self.count

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.count = state.pop(prefix + "count")
        super()._load_from_state_dict(state, prefix, *rest)


class Versioned(torch.nn.Module):
    """In its first version its variance was saved with something added, and its two buffers the other way round."""

    _version = 2

    def __init__(self, version: int) -> None:
        super().__init__()
        self._version = version
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))

    def _load_from_state_dict(self, state: Any, prefix: str, told: Any, *rest: Any) -> None:
        if told.get("version", 1) < 2:
            mean, variance = prefix + "mean", prefix + "variance"
            state[mean], state[variance] = state[variance], state[mean].sub_(0.25)
        super()._load_from_state_dict(state, prefix, told, *rest)


class Whole(torch.nn.Module):
    """Has both, a weight, an extra state, and a `load_state_dict` that computes something of the weight and of that."""

    def __init__(self, count: int, version: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.counting, self.versioned = Counting(count), Versioned(version)
        self.scale, self.norm = float(count), -1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]

    def load_state_dict(self, *given: Any, **options: Any) -> Any:
        answer = super().load_state_dict(*given, **options)
        self.norm = self.scale * float(self.linear.weight.detach().float().norm())
        return answer

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = tokens.to(self.linear.weight.dtype)[:, None].repeat(1, 3)
        return self.linear(rows).float().square().mean()


def _engine(run: Run, net: torch.nn.Module) -> Any:
    import deepspeed

    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=ds_config(run), dist_init_required=False)[0]


def _told(engine: Any) -> dict[str, Any]:
    import deepspeed

    net = engine.module
    with deepspeed.zero.GatheredParameters([net.linear.weight]):
        norm = float(net.linear.weight.detach().float().norm())
    return {
        "count": net.counting.count,
        "cached": net.counting.cached.tolist(),
        "mean": net.versioned.mean.tolist(),
        "variance": net.versioned.variance.tolist(),
        "scale": net.scale,
        "norm": net.norm,
        "weights": norm,
    }


def without_versions(file: Any) -> None:
    """Take what torch says of modules out of a model file, as a writer of plain dicts does."""
    saved = torch.load(file, weights_only=False)
    torch.save({**saved, "module": dict(saved["module"])}, file)


def save(run: Run, folder: str, version: int = 2) -> dict[str, Any]:
    forget()
    torch.manual_seed(5)
    engine = _engine(run, Whole(7, version))
    engine.module.versioned.variance.fill_(3.0)
    if version == 1:
        engine.module.versioned.mean.fill_(3.25)
        engine.module.versioned.variance.fill_(0.0)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    return _told(engine)


def load(run: Run, folder: str, **arguments: Any) -> dict[str, Any]:
    import ds_reshard

    forget()
    torch.manual_seed(6)
    engine = _engine(run, Whole(0, 2))
    before = _told(engine)
    with ds_reshard.install("deepspeed"):
        try:
            engine.load_checkpoint(folder, **arguments)
        except ds_reshard.ReshardError as error:
            return {"error": type(error).__name__, "text": str(error), "unchanged": _told(engine) == before}
    return _told(engine)


class Renamed(torch.nn.Module):
    """A weight, and a buffer that it looks for under its old name, too."""

    def __init__(self, name: str, value: float) -> None:
        super().__init__()
        self.name = name
        self.linear = torch.nn.Linear(3, 2)
        self.register_buffer(name, torch.full((2,), value))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "old" in state:
            state[prefix + self.name] = state.pop(prefix + "old")
        super()._load_from_state_dict(state, prefix, *rest)

    forward = Whole.forward


def save_renamed(run: Run, folder: str, name: str) -> None:
    forget()
    engine = _engine(run, Renamed(name, 2.0))
    train(engine, 0, 1)
    engine.save_checkpoint(folder)


def load_renamed(run: Run, folder: str, name: str) -> list[float]:
    import ds_reshard

    forget()
    engine = _engine(run, Renamed(name, 0.0))
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder, load_module_strict=False)
    return getattr(engine.module, name).tolist()


class Layer(torch.nn.Linear):
    """A layer of a pipeline with a `load_state_dict` of its own."""

    seen = 0.0

    def load_state_dict(self, *given: Any, **options: Any) -> Any:
        answer = super().load_state_dict(*given, **options)
        self.seen = float(self.weight.detach().float().sum())
        return answer


def piped(run: Run, folder: str, save: bool) -> list[tuple[float, float]]:
    """What each layer of a pipeline of one stage has seen of its weight in its load, and the weight's sum."""
    from deepspeed.pipe import PipelineModule

    import ds_reshard

    forget()
    torch.manual_seed(5 if save else 6)
    layers = [Layer(3, 3), Layer(3, 3)]
    engine = _engine(run, PipelineModule(layers, num_stages=1, loss_fn=torch.nn.functional.mse_loss))
    if save:
        engine.save_checkpoint(folder)
        return [(float(one.weight.detach().float().sum()),) * 2 for one in layers]
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
    return [(one.seen, float(one.weight.detach().float().sum())) for one in layers]
