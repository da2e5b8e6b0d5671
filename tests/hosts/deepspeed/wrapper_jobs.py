"""Optimizers of a script's own around torch's, and what DeepSpeed clips gradients to, saved and loaded."""

from __future__ import annotations

from typing import Any

import torch
from cases import Model, Run, ds_config
from jobs import Net, build, forget, train


class Wrapper(torch.optim.Optimizer):
    """Keeps an optimizer inside, its groups and states with it, and counts the state dicts that it was given."""

    def __init__(self, inner: torch.optim.Optimizer, own_form: bool = False) -> None:
        self.optimizer, self.own_form, self.loads = inner, own_form, 0
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        return {"inside": state, "loads": self.loads} if self.own_form else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self.optimizer.load_state_dict(state["inside"] if self.own_form else state)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state


def load_wrapped(run: Run, folder: str, own_form: bool = False, layout_saved: str = "") -> dict[str, Any]:
    """How often the wrapper was given a state, whether it shares its groups then, and how far a rate of 0 moves."""
    import deepspeed

    import ds_reshard

    forget()
    net = Net(Model())
    wrapper = Wrapper(torch.optim.AdamW(net.parameters(), lr=0.5), own_form)
    engine, *_ = deepspeed.initialize(model=net, optimizer=wrapper, config=ds_config(run), dist_init_required=False)
    if layout_saved:
        train(engine, 0, 1)
        engine.save_checkpoint(layout_saved)
    with ds_reshard.install("deepspeed"):
        try:
            engine.load_checkpoint(folder, load_lr_scheduler_states=False)
        except ds_reshard.ReshardError as error:
            return {"error": type(error).__name__, "text": str(error), "loads": wrapper.loads}
    before = [p.detach().clone() for p in net.parameters()]
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    train(engine, 3, 1)
    moved = max(float((p.detach() - old).abs().max()) for p, old in zip(net.parameters(), before, strict=True))
    return {
        "loads": wrapper.loads,
        "shared": wrapper.param_groups is wrapper.optimizer.param_groups,
        "moved": moved,
        "states": sorted({kind for state in wrapper.state.values() for kind in state}),
    }


def save(run: Run, model: Model, folder: str) -> None:
    engine = build(run, model)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)


def clipped_to(run: Run, model: Model, folder: str, settings: dict[str, Any] | None = None) -> float:
    """What gradients are clipped to after a load."""
    import ds_reshard

    run = Run(run.stage, run.dp, run.dtype, run.options, {**run.config, "ds_reshard": settings or {}})
    engine = build(run, model, seed=99)
    with ds_reshard.install("deepspeed"):
        engine.load_checkpoint(folder)
    return float(engine.optimizer.clip_grad)
