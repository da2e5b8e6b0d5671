"""What `accelerator.prepare` does with one combination of JSON, optimizer and scheduler, hooks on or off."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import jobs
import torch
from late_jobs import LR, new_accelerator, new_net, param_groups, weights
from logs import heard

WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-4, "warmup_num_steps": 4}}
AUTO = {"type": "WarmupLR", "params": dict.fromkeys(WARMUP["params"], "auto")}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
FIXED = {"type": "AdamW", "params": {"lr": 5e-4, "weight_decay": 0.1, "torch_adam": True}}


def falling(step: int) -> float:
    return 1 / (1 + step)


class OwnMetric:
    """A scheduler of nobody's class whose step wants a metric, as `GreedyLR` of transformers: above 1 it halves."""

    best = None

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.last_epoch = optimizer, 0

    def step(self, metrics: float, epoch: int | None = None) -> None:
        self.best = metrics
        self.last_epoch += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5 if metrics > 1 else 1.0


def _config(micro: int = 6, stage: int = 1, **more: Any) -> dict[str, Any]:
    base = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 1}
    return {**base, "zero_optimization": {"stage": stage}, **more}


UNTESTED = {"zero_allow_untested_optimizer": True}


def _accelerated(hooks: bool) -> Any:
    import ds_reshard

    return ds_reshard.install("accelerate") if hooks else nullcontext()


def make_optimizer(kind: str, net: Any) -> Any:
    from accelerate.utils import DummyOptim

    whole, both = list(net.parameters()), param_groups(net)
    if kind == "consumed":
        generator = net.parameters()
        list(generator)
        return DummyOptim(generator, lr=LR)
    return {
        "none": lambda: None,
        "real": lambda: torch.optim.AdamW(whole, lr=LR),
        "real groups": lambda: torch.optim.AdamW(both, lr=LR),
        "real empty group": lambda: torch.optim.AdamW(param_groups(net, 3), lr=LR),
        "dummy": lambda: DummyOptim(whole, lr=LR),
        "dummy without lr": lambda: DummyOptim(whole),
        "dummy empty group": lambda: DummyOptim(param_groups(net, 3), lr=LR),
        "dummy groups": lambda: DummyOptim(both, lr=LR),
        "dummy betas": lambda: DummyOptim(whole, lr=LR, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6),
        "two dummies": lambda: [DummyOptim(group["params"], lr=LR) for group in both],
        "of another model": lambda: torch.optim.AdamW(new_net().parameters(), lr=LR),
    }[kind]()


def make_scheduler(kind: str, optimizer: Any, net: Any) -> Any:
    from accelerate.utils import DummyScheduler
    from deepspeed.runtime.lr_schedules import WarmupLR
    from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

    def build(real: Any) -> Any:
        return LambdaLR(real, falling)

    return {
        "none": lambda: None,
        "torch": lambda: build(optimizer),
        "two torch": lambda: [build(optimizer), build(optimizer)],
        "deepspeed": lambda: WarmupLR(optimizer, **WARMUP["params"]),
        "foreign": lambda: build(torch.optim.AdamW(list(net.parameters()), lr=LR)),
        "dummy": lambda: DummyScheduler(optimizer, total_num_steps=20, warmup_num_steps=4),
        "dummy cold": lambda: DummyScheduler(optimizer, total_num_steps=20),
        "callable": lambda: DummyScheduler(optimizer, lr_scheduler_callable=build),
        "plateau callable": lambda: DummyScheduler(
            optimizer, lr_scheduler_callable=lambda real: ReduceLROnPlateau(real, factor=0.5, patience=0)
        ),
        "own metric callable": lambda: DummyScheduler(optimizer, lr_scheduler_callable=OwnMetric),
    }[kind]()


def row(
    optimizer: str,
    scheduler: str,
    json_optimizer: Any = None,
    json_scheduler: Any = None,
    *,
    hooks: bool,
    steps: int = 4,
    scheduled: bool = True,
    apart: bool = False,
    clock: str | None = None,
    direct: bool = False,
    backend: bool | str = True,
    backwards: bool = False,
) -> dict[str, Any]:
    """The rates that each update used, or what was raised and where; `scheduled` says the script steps it."""
    import ds_reshard

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": jobs.GLOBAL_BATCH // torch.distributed.get_world_size(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": False,
        "steps_per_print": 10**9,
    }
    if json_optimizer is not None:
        config["optimizer"] = _copy(json_optimizer)
    if json_scheduler is not None:
        config["scheduler"] = _copy(json_scheduler)
    if clock is not None:
        config["ds_reshard"] = {"accelerate": {"clock": clock}}
    told: dict[str, Any] = {"raised": None, "text": "", "at": "", "rates": []}
    with _accelerated(hooks):
        at = "build"
        try:
            accelerator = new_accelerator(config, backend=backend)
            net = new_net()
            made = make_optimizer(optimizer, net)
            scheme = make_scheduler(scheduler, made, net)
            at = "diagnose"
            found = ds_reshard.diagnose(config, made, scheme, model=[] if apart else net, accelerator=accelerator)
            told["diagnosed"] = [(finding.rule, finding.outcome) for finding in found]
            at = "prepare"
            things = [net, *_listed(made), *_listed(scheme)]
            if apart:
                prepared = [*map(accelerator.prepare, things[1:]), accelerator.prepare(net)]
                prepared = [prepared[-1], *prepared[:-1]]
            elif backwards:
                prepared = list(reversed(accelerator.prepare(*reversed(things))))
            elif direct:
                prepared = list(accelerator._prepare_deepspeed(*things))
            else:
                prepared = list(accelerator.prepare(*things)) if len(things) > 1 else [accelerator.prepare(net)]
            at = "train"
            told["types"] = [type(thing).__name__ for thing in prepared[1:]]
            told["untested"] = config.get("zero_allow_untested_optimizer")
            before = weights(prepared[0])
            told["rates"] = _train(accelerator, prepared, steps, scheduled and scheme is not None)
            after = weights(prepared[0])
            told["untrained"] = sum(bool(torch.equal(before[name], after[name])) for name in before)
            told["group"] = {
                name: value
                for name, value in prepared[0].basic_optimizer.param_groups[0].items()
                if name in ("betas", "eps", "weight_decay")
            }
        except Exception as error:
            told |= {"raised": type(error).__name__, "text": str(error), "at": at}
    return told


def twice(hooks: bool) -> dict[str, Any]:
    """Two prepares on one accelerator with `"auto"` in the JSON: the rate of each engine; a step of each by itself."""
    from accelerate.utils import DummyOptim

    import ds_reshard

    config = _config(1, optimizer=_copy(ADAMW))
    with _accelerated(hooks):
        accelerator = new_accelerator(config)
        engines, found = [], []
        for rate in (1e-3, 1e-5):
            net = new_net()
            optimizer = DummyOptim(list(net.parameters()), lr=rate, weight_decay=0.0)
            found += ds_reshard.diagnose(config, optimizer, model=net, accelerator=accelerator)
            engines.append(accelerator.prepare(net, optimizer)[0])
        refused = []
        calls = lambda: accelerator.backward(_loss(engines[1])), lambda: accelerator.clip_grad_norm_([], 1.0)
        for call in calls if hooks else ():
            try:
                call()
            except ds_reshard.PrepareError as error:
                refused.append(str(error))
        moved = []
        for engine in engines:
            before = weights(engine)
            engine.backward(_loss(engine))
            engine.step()
            moved.append(_moved(engine, before))
        accelerator.free_memory()
    rates = [engine.basic_optimizer.param_groups[0]["lr"] for engine in engines]
    return {"rates": rates, "refused": refused, "moved": moved, "found": [finding.rule for finding in found]}


def two_models(hooks: bool) -> str:
    """Two models in one prepare: the name of the error."""
    with _accelerated(hooks):
        accelerator, net = new_accelerator(_config(**UNTESTED)), new_net()
        try:
            accelerator.prepare(net, new_net(), torch.optim.AdamW(net.parameters(), lr=LR))
        except Exception as error:
            return type(error).__name__
    return "none"


def reference_first(hooks: bool) -> dict[str, Any]:
    """A model without optimizer is prepared before the one that trains: where does `accelerator.backward` go?"""
    with _accelerated(hooks):
        accelerator, net = new_accelerator(_config(1, 3, **UNTESTED)), new_net()
        accelerator.prepare(new_net())
        engine, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=LR))
        before = weights(engine)
        try:
            accelerator.backward(_loss(engine))
        except Exception as error:
            return {"raised": type(error).__name__}
        return {"raised": None, "moved": _moved(engine, before)}


def plateau(kind: str) -> dict[str, Any]:
    """A metric-driven scheduler from a callable, stepped by the script."""
    from accelerate.utils import DummyOptim

    with _accelerated(True):
        accelerator, net = new_accelerator(_config(optimizer=_copy(ADAMW))), new_net()
        optimizer = DummyOptim(list(net.parameters()), lr=LR)
        scheduler = make_scheduler(kind, optimizer, net)
        engine, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
        rates = []
        for step, metric in enumerate((1.0, 2.0, 0.5, 3.0)):
            accelerator.backward(_loss(engine, step))
            scheduler.step(metric)
            rates.append(optimizer.param_groups[0]["lr"])
    return {"rates": rates, "metric": scheduler.scheduler.best}


def _copy(section: dict[str, Any]) -> dict[str, Any]:
    return {**section, "params": dict(section["params"])}


def _moved(engine: Any, before: dict[str, Any]) -> bool:
    after = weights(engine)
    return any(not torch.equal(before[name], after[name]) for name in before)


def _listed(thing: Any) -> list[Any]:
    return thing if isinstance(thing, list) else [] if thing is None else [thing]


def _loss(engine: Any, step: int = 0) -> Any:
    return engine(*jobs.batch(step, torch.distributed.get_rank(), torch.distributed.get_world_size()))


def _train(accelerator: Any, prepared: list[Any], steps: int, scheduled: bool) -> list[list[float]]:
    engine, scheduler = prepared[0], prepared[-1]
    seen: list[list[float]] = []
    hook = engine.basic_optimizer.register_step_pre_hook(
        lambda stepping, *_: seen[-1].extend(float(group["lr"]) for group in stepping.param_groups)
    )
    for step in range(steps):
        seen.append([])
        accelerator.backward(_loss(engine, step))
        if scheduled:
            scheduler.step()
    hook.remove()
    return seen


def explicit(kind: str, clock: str | None = None, said: str | None = None) -> dict[str, Any]:
    """`ds_reshard.prepare` with functions, objects, or what it refuses; rates, log lines and named fields."""
    from accelerate.utils import DummyOptim

    import ds_reshard

    config = _config(stage=2)
    if kind not in ("real", "no function"):
        config["optimizer"] = _copy(ADAMW)
    if said is not None:
        config["ds_reshard"] = {"accelerate": {"clock": said}}
    accelerator, net = new_accelerator(config), new_net()
    placeholder = None
    scheduler: Any = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, falling)  # noqa: E731
    optimizer: Any = {
        "real": lambda params: torch.optim.AdamW(params, lr=LR),
        "no function": 5,
        "wrong": lambda params: torch.nn.Linear(1, 1),
    }.get(kind, lambda params: DummyOptim(params, lr=LR))
    try:
        with heard(logging.INFO) as lines, ds_reshard.install("accelerate"):
            if kind == "objects":
                optimizer = placeholder = DummyOptim(net.parameters(), lr=LR)
                scheduler = scheduler(placeholder)
            given = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "clock": clock}
            made = ds_reshard.prepare(accelerator, **given, dataloader=[torch.utils.data.DataLoader([1, 2])])
            if kind == "twice":
                ds_reshard.prepare(accelerator, **given)
            things = [made.model, made.optimizer, made.scheduler]
            rates = _train(accelerator, things, 3, True)
        return {"rates": rates, "lines": lines, "loaders": len(made.dataloader), "raised": None}
    except ds_reshard.ReshardError as error:
        return {"raised": type(error).__name__, "text": str(error)}


def again() -> dict[str, Any]:
    """What accelerate has prepared is handed to it again, alone; then a placeholder that was prepared."""
    from accelerate.utils import DummyOptim

    import ds_reshard

    with ds_reshard.install("accelerate"):
        accelerator, net = new_accelerator(_config(optimizer=_copy(ADAMW))), new_net()
        placeholder = DummyOptim(list(net.parameters()), lr=LR)
        scheduler = make_scheduler("torch", placeholder, net)
        placeholder.register_step_post_hook(lambda *_: called.append(1))
        called: list[int] = []
        prepared = accelerator.prepare(net, placeholder, scheduler)
        _train(accelerator, list(prepared), 2, True)
        placeholder.step()
        placeholder.zero_grad()
        told = {"called": bool(called), "state": len(placeholder.state_dict()["param_groups"])}
        told["same"] = accelerator.prepare(prepared[2]) is prepared[2]
        for use in (lambda: placeholder.add_param_group({"params": []}), lambda: accelerator.prepare(net, placeholder)):
            try:
                use()
            except ds_reshard.PrepareError as error:
                told.setdefault("refused", []).append(str(error).splitlines()[1].strip().split(":")[0])
    return told


def failing(hooks: bool) -> dict[str, Any]:
    """A schedule whose own function gives None after two updates, in an engine of DeepSpeed alone."""
    import deepspeed
    from torch.optim.lr_scheduler import LambdaLR

    import ds_reshard

    net = new_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    scheduler = LambdaLR(optimizer, lambda step: None if step == 2 else 1 / (1 + step))
    given = {"model": net, "optimizer": optimizer, "lr_scheduler": scheduler, "config": _config(**UNTESTED)}
    with ds_reshard.install("deepspeed") if hooks else nullcontext():
        engine = deepspeed.initialize(**given)[0]
        raised = []
        for step in range(3):
            engine.backward(_loss(engine, step))
            try:
                engine.step()
            except Exception as error:
                raised.append((step, type(error).__name__))
    return {"raised": raised, "position": scheduler.last_epoch, "kept": engine.lr_scheduler is scheduler}
