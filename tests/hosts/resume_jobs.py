"""Jobs of the resume-policy tests: what each optimizer step used, and what a load left behind.

Rates are read where the optimizer steps, by wrapping the torch optimizer's own `step`: what a getter says, or
what stands in a group at another moment, is not what was used.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import runpy
import sys
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import jobs
import logs
import torch
from cases import Run, ds_config

from ds_reshard.resume.schedulers import innermost


@dataclass(frozen=True)
class Setup:
    """A run as far as its learning rates go. `scheduler` is (kind, parameters); `json` builds it and the optimizer
    from the DeepSpeed JSON, otherwise the script does. The second group has `lr / 10` and no weight decay; with
    `exchanged` it comes first."""

    run: Run = field(default_factory=lambda: Run(1, 1))
    lr: float = 0.01
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    scheduler: tuple[str, dict[str, Any]] | None = None
    json: bool = False
    groups: int = 2
    policy: dict[str, Any] = field(default_factory=dict)
    tensor_lr: bool = False
    exchanged: bool = False
    verify: str = ""
    unchanged: str = "direct"

    def but(self, **changes: Any) -> Setup:
        return replace(self, **changes)


def make(setup: Setup, seed: int = 7) -> Any:
    import deepspeed

    jobs.forget()
    torch.manual_seed(seed)
    net = jobs.Net(jobs.Model())
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    both = [
        {"params": [p for _, p in named if p.dim() > 1], "lr": setup.lr, "weight_decay": setup.weight_decay},
        {"params": [p for _, p in named if p.dim() <= 1], "lr": setup.lr / 10, "weight_decay": 0.0},
    ]
    for group in both if setup.tensor_lr else ():
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    groups = both if setup.groups == 2 else [{**both[0], "params": [p for _, p in named]}]
    groups = groups[::-1] if setup.exchanged else groups
    config, given = config_of(setup), dict[str, Any]()
    if setup.json:
        if setup.scheduler is not None and "scheduler" not in config:
            given["lr_scheduler"] = lambda optimizer: client_scheduler(optimizer, *setup.scheduler)
        given["model_parameters"] = groups
    else:
        given["optimizer"] = torch.optim.AdamW(groups, betas=setup.betas, eps=setup.eps)
        if setup.scheduler is not None:
            given["lr_scheduler"] = client_scheduler(given["optimizer"], *setup.scheduler)
    engine, *_ = deepspeed.initialize(model=net, config=config, dist_init_required=False, **given)
    jobs._STATE["engine"] = engine
    return engine


def config_of(setup: Setup) -> dict[str, Any]:
    """The DeepSpeed JSON of a setup."""
    config = ds_config(setup.run)
    config["gradient_clipping"] = setup.clip
    if setup.policy:
        config["ds_reshard"] = {**config.get("ds_reshard", {}), "resume": setup.policy}
    if setup.verify:
        config["ds_reshard"] = {**config.get("ds_reshard", {}), "reshard": {"verify": setup.verify}}
    if setup.unchanged != "direct":
        section = config.setdefault("ds_reshard", {})
        section["reshard"] = {**section.get("reshard", {}), "unchanged": setup.unchanged}
    if setup.json:
        params = {"lr": setup.lr, "weight_decay": setup.weight_decay, "betas": list(setup.betas), "eps": setup.eps}
        config.setdefault("optimizer", {"type": "AdamW", "params": {**params, "torch_adam": True}})
        if setup.scheduler is not None and setup.scheduler[0] not in ("CosineAnnealingLR",):
            config["scheduler"] = {"type": setup.scheduler[0], "params": setup.scheduler[1]}
    return config


class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """With a metric that never gets better, as the engine steps its scheduler with none."""

    def step(self, metrics: Any = 1.0, epoch: Any = None) -> None:
        super().step(metrics)


def client_scheduler(optimizer: Any, kind: str, params: dict[str, Any]) -> Any:
    from torch.optim import lr_scheduler

    if kind == "Plateau":
        return Plateau(optimizer, **params)
    if kind == "ChainedScheduler":
        parts = [lr_scheduler.ExponentialLR(optimizer, gamma=gamma) for gamma in params["gammas"]]
        return lr_scheduler.ChainedScheduler(parts)
    if kind == "client WarmupLR":
        from deepspeed.runtime.lr_schedules import WarmupLR

        return WarmupLR(optimizer, **params)
    if kind == "LambdaLR":
        return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + params["slope"] * step))
    if kind == "SequentialLR":
        parts = [
            lr_scheduler.LinearLR(optimizer, start_factor=params["start"], total_iters=3),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=params["T_max"]),
        ]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])
    return getattr(lr_scheduler, kind)(optimizer, **params)


def used(engine: Any, first: int, steps: int) -> list[list[dict[str, Any]]]:
    """Train, and say for each step what each param group held when the optimizer stepped, and the clipping."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    seen: list[list[dict[str, Any]]] = []
    original = inner.step

    def step(*args: Any, **kwargs: Any) -> Any:
        values = [{k: _plain(v) for k, v in group.items() if k in _WATCHED} for group in inner.param_groups]
        if len(seen) and engine.global_steps == noted[-1]:
            # Stage 3 steps once a sub-group, with all groups; stages 1 and 2 with one group each time.
            seen[-1] += [{**v, "clip": _clip(engine)} for v in values] if engine.zero_optimization_stage() < 3 else []
            return original(*args, **kwargs)
        noted.append(engine.global_steps)
        seen.append([{**v, "clip": _clip(engine)} for v in values])
        return original(*args, **kwargs)

    noted: list[int] = []
    inner.step = step
    try:
        jobs.train(engine, first, steps)
    finally:
        inner.step = original
    return seen


_WATCHED = ("lr", "weight_decay", "betas", "eps")


def _plain(value: Any) -> Any:
    return tuple(float(v) for v in value) if isinstance(value, (tuple, list)) else float(value)


def _clip(engine: Any) -> float:
    return float(getattr(engine.optimizer, "clip_grad", None) or engine.gradient_clipping())


def save(setup: Setup, folder: str, steps: int) -> dict[str, Any]:
    engine = make(setup)
    jobs.train(engine, 0, steps)
    held = jobs.contents(engine)
    engine.save_checkpoint(folder)
    held["rates"] = used(engine, steps, 3)
    return held


def uninterrupted(setup: Setup, steps: int, more: int = 3) -> list[list[dict[str, Any]]]:
    """What the steps after the first `steps` of a fresh run of this configuration use."""
    return used(make(setup), 0, steps + more)[steps:]


def _spoil(method: str, optimizer: Any) -> None:
    for states in optimizer.state.values():
        for kind in ("exp_avg", "exp_avg_sq"):
            getattr(states[kind], method)()


def resume(
    setup: Setup,
    folder: str,
    more: int = 3,
    flags: list[str] | None = None,
    arguments: dict[str, Any] | None = None,
    twice: bool = False,
    save_to: str | None = None,
    weights_after: bool = False,
    dead_proxy: bool = False,
    stepped: int = 0,
    spoil: str = "",
) -> dict[str, Any]:
    """Load under the setup's policy and the flags; what is held then, and what the next steps use.

    A run that has `stepped` has asked for a checkpoint before, and found none. The name of a tensor's method, as
    `zero_`, spoils the last rank's moments by it as soon as its optimizer has taken them.
    """
    import ds_reshard
    from ds_reshard.resume import policy_sources

    engine = make(setup, seed=99)
    dead = weakref.proxy(torch.nn.Linear(1, 1)) if dead_proxy and torch.distributed.get_rank() == 0 else None
    if stepped:
        with ds_reshard.install("deepspeed"):
            assert engine.load_checkpoint(f"{folder}/nothing") == (None, None)
        jobs.train(engine, 50, stepped)
    before = jobs.contents(engine)
    policy_sources.forget()
    if spoil and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        innermost(engine.optimizer).register_load_state_dict_post_hook(functools.partial(_spoil, spoil))
    try:
        if flags is not None:
            _parse(flags)
        with ds_reshard.install("deepspeed"), logs.first_update() as told:
            for _ in range(1 + twice):
                engine.load_checkpoint(folder, **(arguments or {}))
        applied = policy_sources.applied()
    except ds_reshard.ReshardError as error:
        after = jobs.contents(engine)
        unchanged = jobs.same(before, after) and before["scheduler"] == after["scheduler"]
        return {"error": type(error).__name__, "text": str(error), "unchanged": unchanged}
    finally:
        policy_sources.forget()
        if flags is not None:  # with which the hooks of every framework were put on
            ds_reshard.uninstall()
    held = jobs.contents(engine)
    report = ds_reshard.last_report()
    held["report"] = report.to_json() if report is not None and torch.distributed.get_rank() == 0 else None
    held["error"], held["told"], held["applied"] = None, told, applied
    held["counters"] = (engine.global_steps, engine.global_samples)
    held["rates"] = used(engine, 100, more)
    held["weights_after"] = jobs.weights(engine) if weights_after else None
    if save_to is not None:
        engine.save_checkpoint(save_to)
    del dead
    return held


def script(path: str, arguments: list[str]) -> dict[str, Any] | None:
    """A training script run on this rank as python does it, without hooks; what the first rank SAID."""
    sys.argv = [path, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    said = [line.partition("SAID")[2] for line in printed.getvalue().splitlines() if "SAID" in line]
    return json.loads(said[-1]) if said else None


def _parse(flags: list[str]) -> None:
    import argparse

    import ds_reshard

    ds_reshard.add_arguments(argparse.ArgumentParser()).parse_args(flags)


logging.getLogger("ds_reshard").setLevel(logging.ERROR)
