"""Runs whose scheduler is built on a DummyOptim before `prepare`, and the same run in plain PyTorch.

Rates are read where the torch optimizer steps: what a getter says afterwards is not what an update used.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import jobs
import torch
from cases import GLOBAL_BATCH, Model
from devices import BACKEND
from logs import heard
from torch.optim import lr_scheduler as lrs

LR, BETAS = 0.01, (0.9, 0.95)
STEPS = 5


def _hf(name: str, **kwargs: Any) -> Callable[[Any], Any]:
    def make(optimizer: Any) -> Any:
        from transformers import get_scheduler

        given = {"num_warmup_steps": 3, "num_training_steps": 12, **kwargs}
        return get_scheduler(name, optimizer, **given)

    return make


def _advanced(scheduler: Any) -> Any:
    for _ in range(3):
        scheduler.step()
    return scheduler


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda s: 1 / (1 + 0.1 * s)),
    "lambdas": lambda o: lrs.LambdaLR(
        o, [lambda s: 1 / (1 + 0.1 * s), *[lambda s: 3.0] * (len(o.param_groups) - 2), lambda s: 0.9**s]
    ),
    "advanced": lambda o: _advanced(lrs.StepLR(o, 2, 0.5)),
    "StepLR": lambda o: lrs.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 9, eta_min=1e-4),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, max_lr=[0.02, 0.001], total_steps=40),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=3), lrs.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.1, total_iters=3), lrs.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "linear": _hf("linear"),
    "cosine": _hf("cosine"),
    "polynomial": _hf("polynomial", scheduler_specific_kwargs={"power": 2.0}),
    "constant_with_warmup": _hf("constant_with_warmup"),
    "inverse_sqrt": _hf("inverse_sqrt"),
    "warmup_stable_decay": _hf(
        "warmup_stable_decay", scheduler_specific_kwargs={"num_decay_steps": 4, "num_stable_steps": 3}
    ),
}
# What a metric-driven scheduler is told after each update: it worsens, so that the rate falls.
METRICS = [1.0, 2.0, 0.5, 0.6, 0.7, 0.8, 0.4, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4]


@dataclass(frozen=True, kw_only=True)
class Late:
    """One run. `clock` None is the default; `early` builds the scheduler before prepare, else accelerate's own way."""

    scheduler: str = "LambdaLR"
    stage: int = 1
    dtype: str = "fp32"
    accumulation: int = 1
    groups: int = 2
    clock: str | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.scheduler}-zero{self.stage}-{self.dtype}-x{self.accumulation}" + (
            f"-{self.clock}" * bool(self.clock)
        )

    def but(self, **changes: Any) -> Late:
        return replace(self, **changes)


def deepspeed_config(late: Late) -> dict[str, Any]:
    world = torch.distributed.get_world_size()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world // late.accumulation,
        "gradient_accumulation_steps": late.accumulation,
        "gradient_clipping": 0.0,  # accelerate makes it 1.0 where it is left out
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "betas": list(BETAS), "torch_adam": True},
        },
        "zero_optimization": {"stage": late.stage},
        "steps_per_print": 10**9,
    }
    if late.stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 20
    if late.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if late.clock:
        config["ds_reshard"] = {"accelerate": {"clock": late.clock}}
    return {**config, **late.config}


def _let_old_releases_run() -> None:
    """accelerate 1.0 has transformers keep a config for its models, and transformers 5 refuses that below 1.1."""
    import accelerate
    import transformers.integrations.deepspeed as integration
    from packaging.version import Version

    if Version(accelerate.__version__) < Version("1.1"):
        integration.HfDeepSpeedConfig.__init__ = lambda self, config: None


def new_accelerator(config: dict[str, Any], backend: bool | str = True, **kwargs: Any) -> Any:
    """An accelerator of this world with this JSON, whatever the process had before; it is given its backend, or not.

    "before": the process has its backend before.
    """
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

    jobs.forget()
    jobs.forget_accelerate()
    _let_old_releases_run()
    plugin = DeepSpeedPlugin(hf_ds_config=config)  # cpu=True would leave DeepSpeed out; no backend, one process
    if backend == "before":
        PartialState(backend=BACKEND)
    handlers = [InitProcessGroupKwargs(backend=BACKEND)] if backend is True else []
    return Accelerator(deepspeed_plugin=plugin, kwargs_handlers=handlers, **kwargs)


def new_net(seed: int = 7) -> Any:
    torch.manual_seed(seed)
    return jobs.Net(Model())


def param_groups(net: Any, groups: int = 2, lr: float = LR) -> list[dict[str, Any]]:
    named = [p for p in net.parameters() if p.requires_grad]
    if groups == 1:
        return [{"params": named}]
    both = [
        {"params": [p for p in named if p.dim() > 1]},
        {"params": [p for p in named if p.dim() <= 1], "lr": lr / 10, "weight_decay": 0.0},
    ]
    return both if groups == 2 else [both[0], {"params": [], "lr": 0.5}, both[1]]


def prepared(late: Late, seed: int = 7, lr: float = LR, **options: Any) -> Any:
    """Accelerator, engine, optimizer, scheduler, and the script's own handles: optimizer, scheduler."""
    from accelerate.utils import DummyOptim

    accelerator = new_accelerator(deepspeed_config(late), gradient_accumulation_steps=late.accumulation, **options)
    net = new_net(seed)
    optimizer = DummyOptim(param_groups(net, late.groups, lr), lr=lr, weight_decay=0.1)
    scheduler = SCHEDULERS[late.scheduler](optimizer)
    return (accelerator, *accelerator.prepare(net, optimizer, scheduler), optimizer, scheduler)


def share(step: int, micro: int, late: Late) -> tuple[torch.Tensor, torch.Tensor]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tokens, labels = jobs.batch(step, 0, 1)
    size = GLOBAL_BATCH // world // late.accumulation
    first = (micro * world + rank) * size
    return tokens[first : first + size], labels[first : first + size]


def train(run: Any, late: Late, first: int, steps: int) -> list[list[float]]:
    """Train as scripts do; the rate of each param group at each update."""
    accelerator, engine, optimizer, scheduler, *_ = run
    seen: list[list[float]] = []

    def note(stepping: Any, *_: Any) -> None:
        seen[-1] += [float(group["lr"]) for group in stepping.param_groups]

    hook = engine.basic_optimizer.register_step_pre_hook(note)
    for step in range(first, first + steps):
        seen.append([])
        for micro in range(late.accumulation):
            with accelerator.accumulate(engine):
                accelerator.backward(engine(*share(step, micro, late)))
                optimizer.step()
                scheduler.step(*([METRICS[step]] if late.scheduler == "ReduceLROnPlateau" else []))
                optimizer.zero_grad()
    hook.remove()
    # ZeRO-1 and 2 step each param group by itself, ZeRO-3 all of them for each of its sub-groups.
    groups = len(engine.basic_optimizer.param_groups)
    assert all(rates and rates == rates[:groups] * (len(rates) // groups) for rates in seen), seen
    return [rates[:groups] for rates in seen]


def weights(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}


def plain(late: Late, steps: int, multiple: int = 1) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """The run in PyTorch alone: rates of each update, and the weights after the last. `multiple` steps an update."""
    net = new_net()
    groups = [group for group in param_groups(net, late.groups) if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=0.1, betas=BETAS)
    scheduler = SCHEDULERS[late.scheduler](optimizer)
    rates = []
    for step in range(steps):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        net(*jobs.batch(step, 0, 1)).backward()
        optimizer.step()
        for _ in range(multiple):
            scheduler.step(*([METRICS[step]] if late.scheduler == "ReduceLROnPlateau" else []))
        optimizer.zero_grad()
    return rates, {name: p.detach().clone() for name, p in net.named_parameters()}


def whole(late: Late, folder: str) -> dict[str, Any]:
    """Train, save, go on; then load into a new engine and go on there. Everything beside plain PyTorch."""
    import ds_reshard

    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"):
        run = prepared(late)
        rates = train(run, late, 0, STEPS)
        run[0].save_state(folder)
        rates += train(run, late, STEPS, 3)
        held = weights(run[1])
        same = [run[3].scheduler is run[5], run[4].param_groups == run[1].basic_optimizer.param_groups]
        again = prepared(late, seed=99)
        again[0].load_state(folder)
        resumed = train(again, late, STEPS, 3)
        resumed_held = weights(again[1])
    world = torch.distributed.get_world_size()
    expected, truth = plain(late, STEPS + 3, world if late.clock == "accelerate" else 1)
    return {
        "rates": rates,
        "resumed": resumed,
        "expected": expected,
        "same": same,
        "off": max(float((held[name] - truth[name]).abs().max()) for name in truth),
        "resumed_off": max(float((resumed_held[name] - held[name]).abs().max()) for name in held),
    }


def save_only(late: Late, folder: str, hooks: bool = True, micro_steps: int = 0, registered: bool = False) -> None:
    """Train and save; `micro_steps` is what accelerate counts in the end, where it is to be odd."""
    import ds_reshard

    with ds_reshard.install("accelerate"):
        run = prepared(late)
    if registered:
        run[0].register_for_checkpointing(run[3])
    with ds_reshard.install("accelerate") if hooks else nullcontext():
        train(run, late, 0, STEPS)
        run[0].step = micro_steps or run[0].step
        run[0].save_state(folder)


def resume(
    late: Late,
    folder: str,
    policy: dict[str, Any] | None = None,
    scale: float = 1.0,
    registered: bool = False,
    hooks: bool = True,
) -> dict[str, Any]:
    """Load what another world or clock has saved and go on; the rates, and whether each micro-batch ended an update.

    `registered` has the scheduler saved twice; `hooks` are those of DeepSpeed.
    """
    import ds_reshard

    if policy:
        section = {"resume": policy, **({"accelerate": {"clock": late.clock}} if late.clock else {})}
        late = late.but(config={"ds_reshard": section})
    run = None
    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed") if hooks else nullcontext():
        try:
            run = prepared(late, seed=99, lr=LR * scale)
            if registered:
                run[0].register_for_checkpointing(run[3])
            run[0].load_state(folder)
        except ds_reshard.ReshardError as error:
            updates = run[1].global_steps if run is not None else 0
            return {"raised": type(error).__name__, "text": str(error), "updates": updates}
        moments = [s["exp_avg"].abs().sum() for s in run[1].basic_optimizer.state.values() if "exp_avg" in s]
        step = run[0].step
        ends = []
        for _ in range(4):
            run[0]._do_sync()
            ends.append(run[0].sync_gradients)
        run[0].step = step
        rates = train(run, late, STEPS, 3)
    return {"raised": None, "rates": rates, "step": step, "ends": ends, "moments": float(sum(moments))}


def finetuned(late: Late, folder: str) -> dict[str, Any]:
    """Whether what accelerate restores beside the engine is this run's, after a load of weights alone."""
    import numpy

    import ds_reshard

    section = {"ds_reshard": {"resume": {"finetune": True}}}
    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"):
        run = prepared(late.but(config=section), seed=99)
        own = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        run[0].load_state(folder)
        now = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        row = ds_reshard.last_report()["rng"] if torch.distributed.get_rank() == 0 else None
    return {
        "states": [torch.equal(own[0], now[0]), own[1] == now[1], own[2] == now[2]],
        "step": run[0].step,
        "loaders": len(run[0]._dataloaders),
        "row": (row.used, row.because) if row is not None else None,
    }


class Progress:
    """What a script registers, to be saved and loaded with all the rest."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def registered_objects(late: Late, folder: str, policies: list[dict[str, Any]]) -> list[tuple[int, list[str]]]:
    """What a counter that the script has registered, beside the scheduler, says after each load, and what is told."""
    import ds_reshard

    found = []
    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"):
        run = prepared(late)
        run[0].register_for_checkpointing(Progress(7), run[3])
        train(run, late, 0, 2)
        run[0].save_state(folder)
        for policy in policies:
            again, progress = prepared(late.but(config={"ds_reshard": {"resume": policy}}), seed=99), Progress(0)
            again[0].register_for_checkpointing(progress, again[3])
            with heard() as told:
                again[0].load_state(folder)
            found.append((progress.steps, [text for text in told if "has registered" in text]))
    return found


def counted_data(
    late: Late, folder: str, saved: dict[str, Any] | None = None, policy: dict[str, Any] | None = None, **loading: bool
) -> dict[str, Any]:
    """Save what a data loader has counted, or what a run is told, and its data loader given, that loads it.

    The loader is accelerate's; what torchdata has below it is a synthetic stand-in, which keeps what it is given.
    `loading` is how accelerate has it read.
    """
    from accelerate.utils import DataLoaderConfiguration

    import ds_reshard

    given: list[Any] = []
    late = late.but(config={"ds_reshard": {"resume": policy or {}}})
    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"):
        run = prepared(late, dataloader_config=DataLoaderConfiguration(**loading))
        data = torch.utils.data.TensorDataset(torch.arange(64.0))
        loader = run[0].prepare(torch.utils.data.DataLoader(data, batch_size=2 * GLOBAL_BATCH))
        if saved is not None:
            run[0].save_state(folder)
            if run[0].is_main_process:
                torch.save(saved, f"{folder}/dl_state_dict.bin")
            return {}
        loader.use_stateful_dataloader = True
        loader.base_dataloader.load_state_dict = given.append
        try:
            with heard() as told:
                run[0].load_state(folder)
        except ds_reshard.ReshardError as error:
            return {"raised": type(error).__name__, "text": str(error), "updates": run[1].global_steps}
    return {"raised": None, "given": given, "told": [text for text in told if "samples" in text]}


def two_engines(saved: str, loaded: str, folder: str, policy: dict[str, Any] | None = None) -> list[list[float]]:
    """The rates of an engine beside another that makes two updates for each of its own: uninterrupted, and resumed."""
    import ds_reshard

    def build(clock: str, resumed: dict[str, Any] | None = None) -> Any:
        world = torch.distributed.get_world_size()
        accelerator = new_accelerator(
            {
                "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": 1},
                "zero_allow_untested_optimizer": True,
                "ds_reshard": {"accelerate": {"clock": clock}, "resume": resumed or {}},
            }
        )
        one, other = new_net(1), new_net(2)
        optimizer = torch.optim.AdamW(one.parameters(), lr=LR)
        first = accelerator.prepare(one, optimizer, lrs.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step)))
        second = accelerator.prepare(other, torch.optim.AdamW(other.parameters(), lr=LR))
        return accelerator, first[0], second[0], first[2]

    def rates(run: Any, first: int, steps: int) -> list[float]:
        _, one, other, scheduler = run
        rank, world, found = torch.distributed.get_rank(), torch.distributed.get_world_size(), []
        for step in range(first, first + steps):
            for engine in (other, other, one):
                engine.backward(engine(*jobs.batch(step, rank, world)))
                engine.step()
            found.append(float(one.basic_optimizer.param_groups[0]["lr"]))
            scheduler.step()
        return found

    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"):
        run = build(saved)
        rates(run, 0, STEPS)
        run[0].save_state(folder)
        again = build(loaded, policy)
        again[0].load_state(folder)
        resumed = rates(again, STEPS, 3)  # before the next Accelerator, for which the process groups of these end
        return [rates(build(loaded), 0, STEPS + 3)[STEPS:], resumed]


def begun_anew(late: Late, first: str, second: str, policy: dict[str, Any]) -> None:
    """A run that begins the schedule of `first` anew, trains two updates, and saves as `second`."""
    import ds_reshard

    section = {"resume": policy, "accelerate": {"clock": late.clock}}
    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"):
        run = prepared(late.but(config={"ds_reshard": section}))
        run[0].load_state(first)
        train(run, late, STEPS, 2)
        run[0].save_state(second)


def by_script(late: Late) -> list[list[float]]:
    """A script that steps its scheduler after the second update, and then no more."""
    import ds_reshard

    with ds_reshard.install("accelerate"):
        run = prepared(late, step_scheduler_with_optimizer=False)
        unstepped = [*run[:3], SimpleNamespace(step=lambda: None)]
        rates = train(unstepped, late, 0, 2)
        run[3].step()
        return rates + train(unstepped, late, 2, 2)


def by_another(late: Late, folder: str, saved: bool, now: bool) -> list[str]:
    """What is said if the saving run, and this one, step the schedule with the optimizer or leave it to the script."""
    import ds_reshard

    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"):
        run = prepared(late, step_scheduler_with_optimizer=saved)
        train(run, late, 0, 2)
        run[0].save_state(folder)
        again = prepared(late, step_scheduler_with_optimizer=now)
        with heard() as told:
            again[0].load_state(folder)
    return [line for line in told if "may be of another update" in line]


def by_number(late: Late, folder: str, clock: str) -> list[list[float]]:
    """Save twice into folders that accelerate names; load without naming one, on another clock."""
    from accelerate.utils import ProjectConfiguration

    import ds_reshard

    def options() -> dict[str, Any]:
        return {"project_config": ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)}

    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"):
        run = prepared(late, **options())
        for first in (0, 2):
            train(run, late, first, 2)
            run[0].save_state()
        again = prepared(late.but(clock=clock), seed=99, **options())
        again[0].load_state()
        return train(again, late, 4, 2)


def wanted(late: Late, positions: list[int], scale: float = 1.0) -> list[list[float]]:
    """The rates of a schedule at its positions, by PyTorch."""
    return [_rates_at(late, position, scale) for position in positions]


def _rates_at(late: Late, position: int, scale: float) -> list[float]:
    groups = param_groups(new_net(), late.groups, LR * scale)
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=LR * scale)
    scheduler = SCHEDULERS[late.scheduler](optimizer)
    for _ in range(position):
        optimizer.step()
        scheduler.step()
    return [float(group["lr"]) for group in optimizer.param_groups]
