"""One function with two modules: parameters that are fused in one are apart in the other."""

from __future__ import annotations

from typing import Any

import jobs
import torch
from cases import Run, ds_config
from gathered import same_bits

MAP: dict[str, Any] = {
    "sides": ["fused", "apart"],
    "numbers": {"layers": 2, "e": 3, "g": 2, "q": 3, "d": 2, "f": 5, "h": 4, "x": 2, "v": 3, "pad": 2, "n": 2},
    "indices": {"l": "layers", "e": "e"},
    "entries": [
        {"fused": "layers.{l}.qkv : (g q+1+1 d) h", "apart": ["layers.{l}.q", "layers.{l}.k", "layers.{l}.v"]},
        {"fused": "layers.{l}.bias : (g q+1+1 d)", "apart": [f"layers.{{l}}.{name}_bias" for name in "qkv"]},
        {"fused": "layers.{l}.fc1 : f+f h", "apart": ["layers.{l}.gate", "layers.{l}.up"]},
        {"fused": "layers.{l}.fc2", "apart": "layers.{l}.down"},
        {"fused": "layers.{l}.norm_weight", "apart": "layers.{l}.scale"},
        {"fused": "layers.{l}.experts_in : e x+x h", "apart": [f"layers.{{l}}.experts_{{e}}_w{w}" for w in (1, 3)]},
        {"fused": "layers.{l}.experts_out : e h x", "apart": ["layers.{l}.experts_{e}_w2"]},
        {"fused": "layers.{l}.linear : (n 3 d) h", "apart": "layers.{l}.conv : h (3 n d)"},
        {"fused": "layers.{l}.table : v+pad h", "apart": ["layers.{l}.rows", None]},
    ],
}  # fmt: skip
APART = {
    **{"q": (12, 4), "k": (4, 4), "v": (4, 4), "q_bias": (12,), "k_bias": (4,), "v_bias": (4,)},
    **{"gate": (5, 4), "up": (5, 4), "down": (4, 5), "scale": (4,), "rows": (3, 4)},
    "conv": (4, 12),
    **{f"experts_{e}_w{w}": (4, 2) if w == 2 else (2, 4) for e in range(3) for w in (1, 2, 3)},
}
FUSED = {
    **{"qkv": (20, 4), "bias": (20,), "fc1": (10, 4), "fc2": (4, 5), "norm_weight": (4,), "table": (5, 4)},
    **{"linear": (12, 4), "experts_in": (3, 4, 4), "experts_out": (3, 4, 2)},
}


def apart(fused: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a layer that is fused as those of one that is not."""
    found = {"down": fused["fc2"], "scale": fused["norm_weight"], "rows": fused["table"][:3]}
    for name, rows in (("", fused["qkv"].reshape(2, 5, 2, 4)), ("_bias", fused["bias"].reshape(2, 5, 2))):
        tail = (4,) if not name else ()
        parts = rows[:, :3], rows[:, 3:4], rows[:, 4:]
        found |= {f"{one}{name}": part.reshape(-1, *tail) for one, part in zip("qkv", parts, strict=True)}
    found["conv"] = fused["linear"].reshape(2, 3, 2, 4).permute(3, 1, 0, 2).reshape(4, 12)
    found["gate"], found["up"] = fused["fc1"].reshape(2, 5, 4)
    for expert in range(3):
        found[f"experts_{expert}_w1"], found[f"experts_{expert}_w3"] = fused["experts_in"][expert].reshape(2, 2, 4)
        found[f"experts_{expert}_w2"] = fused["experts_out"][expert]
    return found


class _Layer(torch.nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        for name, shape in (FUSED if fused else APART).items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape) / 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = dict(self.named_parameters(recurse=False))
        one = apart(own) if self.fused else own
        linear = torch.nn.functional.linear
        q, k, v = (linear(x, one[name], one[f"{name}_bias"]) for name in "qkv")
        x = x + (torch.tanh(q).reshape(-1, 3, 4) * torch.tanh(k * v)[:, None]).sum(1) * one["scale"]
        x = x + torch.tanh(linear(x, one["rows"])).sum(-1, keepdim=True)
        x = x + linear(torch.tanh(linear(x, one["gate"])) * linear(x, one["up"]), one["down"])
        x = x + torch.tanh(x @ one["conv"]).reshape(-1, 3, 4).sum(1)
        for e in range(3):
            inner = torch.tanh(linear(x, one[f"experts_{e}_w1"])) * linear(x, one[f"experts_{e}_w3"])
            x = x + linear(inner, one[f"experts_{e}_w2"])
        return x


class _Net(torch.nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([_Layer(fused), _Layer(fused)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def _build(run: Run, fused: bool, seed: int, decay: bool) -> Any:
    import deepspeed

    jobs.forget()
    torch.manual_seed(seed)
    net = _Net(fused)
    params = [[p for p in net.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    groups = [{"params": params[0], "weight_decay": 0.1}, {"params": params[1], "weight_decay": 0.0}]
    groups = groups if decay else [{"params": list(net.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=ds_config(run), dist_init_required=False)
    return engine


def _train(engine: Any, first: int, steps: int) -> list[float]:
    rank, dp = jobs.place(engine)
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        batch = torch.randn(12, 4).chunk(dp)[rank].to(next(engine.module.parameters()).dtype)
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def save(run: Run, fused: bool, folder: str, decay: bool = True, more: int = 0) -> dict[str, Any]:
    engine = _build(run, fused, 7, decay)
    _train(engine, 0, 3)
    held = jobs.contents(engine)
    engine.save_checkpoint(folder)
    return {**held, "later": _train(engine, 3, more)}


def load(
    run: Run, fused: bool, folder: str, names: Any, decay: bool = True, again: str = "", more: int = 0, **arguments: Any
) -> dict[str, Any]:
    """What the engine holds after a load, and whether it is that after a save and a load `again`; or the error."""
    import ds_reshard

    run = Run(run.stage, run.dp, run.dtype, run.options, {**run.config, "ds_reshard": {"names": names}})
    engine = _build(run, fused, 99, decay)
    try:
        with ds_reshard.install("deepspeed"):
            engine.load_checkpoint(folder, **arguments)
            held = jobs.contents(engine)
            if again:
                engine.save_checkpoint(again)
                engine.load_checkpoint(again)
                assert jobs.same(held, jobs.contents(engine))
    except ds_reshard.ReshardError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {**held, "later": _train(engine, engine.global_steps, more)}


def as_apart(tensors: dict[tuple[str, str], torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
    """Flat tensors by (name, kind) of the fused module as those of the other."""
    found = {}
    layers: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for (name, kind), values in tensors.items():
        layer, _, leaf = name.rpartition(".")
        layers.setdefault((layer, kind), {})[leaf] = values.reshape(FUSED[leaf])
    for (layer, kind), held in layers.items():
        found |= {(f"{layer}.{name}", kind): values.reshape(-1) for name, values in apart(held).items()}
    return found


def assert_equal(one: dict[tuple[str, str], torch.Tensor], other: dict[tuple[str, str], torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    wrong = [key for key, values in one.items() if not same_bits(values, other[key])]
    assert not wrong, wrong
