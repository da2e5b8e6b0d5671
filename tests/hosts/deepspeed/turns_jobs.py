"""Runs of ZeRO stage 0 whose optimizer lists parameters that it does not train, or has no states of."""

from __future__ import annotations

from typing import Any

import torch
from cases import Run, ds_config
from jobs import forget, train


class Pair(torch.nn.Module):
    """Two layers of one shape, of which a run may train one."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        self.turn(frozen)

    def turn(self, frozen: str) -> None:
        for name in "ab":
            getattr(self, name).weight.requires_grad_(name not in frozen)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = tokens.to(self.a.weight.dtype)[:, None].repeat(1, 4)
        return self.b(self.a(rows)).float().square().mean()


def _by_columns(net: Pair) -> None:
    net.a.weight.data = net.a.weight.data.T.contiguous().T


def _engine(run: Run, seed: int, frozen: str, *, apart: bool, turned: bool, trained_alone: bool) -> Any:
    """An engine whose optimizer lists both weights, in one group or `apart`; or, `trained_alone`, those it trains."""
    import deepspeed

    forget()
    torch.manual_seed(seed)
    net = Pair(frozen)
    weights = [one for one in net.parameters() if one.requires_grad or not trained_alone]
    groups = [{"params": [one]} for one in weights] if apart else weights
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=ds_config(run), dist_init_required=False)[0]
    if turned:
        _by_columns(net)
    return engine


def _moments(engine: Any) -> dict[str, Any]:
    """The first moment, or None, and the rate of each parameter that the optimizer has; above stage 0 of one rank."""
    optimizer, names = engine.optimizer, {param: name for name, param in engine.module.named_parameters()}
    found: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        if not engine.zero_optimization_stage():
            held = [(param, optimizer.state.get(param, {}).get("exp_avg")) for param in group["params"]]
        else:
            params, flat = optimizer.bit16_groups[number], optimizer.single_partition_of_fp32_groups[number]
            moments = optimizer.optimizer.state[flat].get("exp_avg")
            parts = [None if moments is None else moments[16 * n : 16 * n + 16] for n in range(len(params))]
            held = list(zip(params, parts, strict=True))
        for param, one in held if not hasattr(optimizer, "fp16_groups") else ():  # which steps on masters
            found[names[param]] = None if one is None else one.detach().clone().view(4, 4), group["lr"]
    return found


def save(
    run: Run,
    folder: str,
    frozen: str,
    then: str | None = None,
    apart: bool = False,
    turned: bool = False,
    trained_alone: bool = False,
) -> dict[str, Any]:
    """Train what is not frozen, and save; `then` is what is frozen at the save."""
    engine = _engine(run, 3, frozen, apart=apart, turned=turned, trained_alone=trained_alone)
    train(engine, 0, 3)
    if then is not None:
        engine.module.turn(then)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.005
    engine.save_checkpoint(folder)
    return _moments(engine)


def load(
    run: Run, folder: str, frozen: str, apart: bool = False, turned: bool = False, trained_alone: bool = False
) -> dict[str, Any]:
    import ds_reshard

    engine = _engine(run, 4, frozen, apart=apart, turned=turned, trained_alone=trained_alone)
    net = engine.module
    before = [one.detach().clone() for one in net.parameters()]
    with ds_reshard.install("deepspeed"):
        try:
            engine.load_checkpoint(folder)
        except ds_reshard.ReshardError as error:
            same = all(map(torch.equal, before, net.parameters()))
            return {"error": type(error).__name__, "text": str(error), "unchanged": same}
    return _moments(engine)


def rates(run: Run, folder: str) -> list[float]:
    """The rate of each param group after a load of what trained the first of two groups."""
    import ds_reshard

    engine = _engine(run, 4, "b", apart=True, turned=False, trained_alone=False)
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
    return [group["lr"] for group in engine.optimizer.param_groups]
