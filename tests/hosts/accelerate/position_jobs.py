"""Runs whose scheduler accelerate steps once for each process, saved and resumed by other numbers of processes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jobs
import torch
from devices import BACKEND
from late_jobs import new_accelerator, new_net
from logs import heard
from torch.optim import lr_scheduler as lrs

LR, TOTAL = 0.01, 20


def _transformers(name: str) -> Callable[[Any, int], Any]:
    def make(optimizer: Any, times: int) -> Any:
        from transformers import get_scheduler

        return get_scheduler(name, optimizer, num_warmup_steps=10 * times, num_training_steps=TOTAL * times)

    return make


# Each with its lengths multiplied by a number of processes, as a script that means updates writes it.
KINDS: dict[str, Callable[[Any, int], Any]] = {
    **{name: _transformers(name) for name in ("constant", "constant_with_warmup", "linear", "cosine")},
    "LinearLR": lambda o, n: lrs.LinearLR(o, 0.1, total_iters=10 * n),
    "CosineAnnealingLR": lambda o, n: lrs.CosineAnnealingLR(o, TOTAL * n, eta_min=1e-4),
    "MultiStepLR": lambda o, n: lrs.MultiStepLR(o, [2 * n, 6 * n], 0.5),
    "OneCycleLR": lambda o, n: lrs.OneCycleLR(o, LR, total_steps=TOTAL * n),
    "SequentialLR": lambda o, n: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=6 * n), lrs.CosineAnnealingLR(o, TOTAL * n)], milestones=[6 * n]
    ),
    # which is flat where the tests save it, and falls afterwards
    "late": lambda o, n: lrs.LambdaLR(o, lambda step: 1.0 if step < 9 * n else 0.1),
}


def _prepared(kind: str, times: int, lr: float, section: dict[str, Any], deepspeed: bool, before: int) -> Any:
    world = torch.distributed.get_world_size()
    net = new_net()
    if deepspeed:
        config = {
            "train_micro_batch_size_per_gpu": jobs.GLOBAL_BATCH // world,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 1},
            "ds_reshard": section,
        }
        accelerator = new_accelerator(config)
    else:
        accelerator = _alone()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    scheduler = KINDS[kind](optimizer, times)
    for _ in range(before):
        optimizer.step()
        scheduler.step()
    return (accelerator, *accelerator.prepare(net, optimizer, scheduler))


def _alone(**given: Any) -> Any:
    """An Accelerator without DeepSpeed."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    jobs.forget_accelerate()
    return Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=BACKEND)], **given)


def run(
    kind: str,
    times: int,
    folder: str,
    load: bool = False,
    steps: int = 4,
    lr: float = LR,
    section: dict[str, Any] | None = None,
    settings: str | None = None,
    deepspeed: bool = True,
    hooks: bool = True,
    before: int = 0,
    loads: int = 1,
) -> dict[str, Any]:
    """Train and save, or load and train: the rates of the updates, the position, and what was told of it.

    The schedule takes `before` steps before it is prepared; after each of the `loads` but the last it trains as well.
    """
    import ds_reshard
    from ds_reshard.hosts.fsdp.settings import ask_settings

    raised = ""
    with ExitStack() as stack:
        for host in (("accelerate", "deepspeed") if deepspeed else ("accelerate",)) if hooks else ():
            stack.enter_context(ds_reshard.install(host))
        if settings is not None:
            ask_settings(settings, place="DS_RESHARD_SETTINGS")
            stack.callback(ask_settings, '{"accelerate": {"position": null}}', place="DS_RESHARD_SETTINGS")
        accelerator, model, optimizer, scheduler = _prepared(kind, times, lr, section or {}, deepspeed, before)
        told = stack.enter_context(heard(logging.INFO))
        try:
            for number in range(loads if load else 0):
                if number:
                    _train(accelerator, model, optimizer, scheduler, steps)
                    told.clear()
                accelerator.load_state(folder)
            begun = scheduler.scheduler.last_epoch
            rates = _train(accelerator, model, optimizer, scheduler, steps)
            if not load:
                accelerator.save_state(folder)
        except ds_reshard.ReshardError as error:
            raised, begun, rates = f"{type(error).__name__}: {error}", -1, []
    lines = [line for line in told if "position" in line and "goes on at" in line]
    return {"position": begun, "rates": rates, "told": lines, "raised": raised}


def _train(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    seen = []
    for step in range(steps):
        seen.append(float(scheduler.scheduler.optimizer.param_groups[0]["lr"]))
        accelerator.backward(model(*jobs.batch(step, rank, world)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return seen


def by_micro_batch(
    accumulation: int,
    folder: str,
    load: bool = False,
    policy: str = "host",
    moved: int | None = None,
    deepspeed: bool = True,
) -> tuple[list[float], list[str]]:
    """The script itself steps the schedule, with each micro batch; at the position `moved` where one is given.

    The rates of four updates, and what was told of the position.
    """
    import ds_reshard

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1},
        "ds_reshard": {"resume": {"scheduler": policy}},
    }
    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"), heard() as told:
        of_script = {"gradient_accumulation_steps": accumulation, "step_scheduler_with_optimizer": False}
        accelerator, net = new_accelerator(config, **of_script) if deepspeed else _alone(**of_script), new_net()
        kind = torch.optim.SGD if deepspeed else torch.optim.Adam  # whose count tells the updates, where no file does
        optimizer = kind(net.parameters(), lr=LR)
        model, optimizer, scheduler = accelerator.prepare(net, optimizer, KINDS["MultiStepLR"](optimizer, accumulation))
        built = copy.deepcopy(scheduler.scheduler.state_dict())
        if load:
            accelerator.load_state(folder)
        if moved is not None:
            scheduler.scheduler.load_state_dict({**built, "last_epoch": moved})
        seen = []
        for micro in range(4 * accumulation):
            with accelerator.accumulate(model):
                accelerator.backward(model(*jobs.batch(micro, 0, 2)))
                if accelerator.sync_gradients:
                    seen.append(float(scheduler.scheduler.optimizer.param_groups[0]["lr"]))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if not load:
            accelerator.save_state(folder)
    return seen, [str(line) for line in told if "counts micro batches" in str(line)]


def rates(kind: str, first: int, count: int, lr: float = LR) -> list[float]:
    """The rates of these updates of the schedule, as a run of one process has them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)
    scheduler, found = KINDS[kind](optimizer, 1), []
    for _ in range(first + count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found[first:]


def placeholder(kind: str, times: int, clock: str | None, accumulation: int = 2) -> tuple[list[float], list[str]]:
    """SimpleTuner's order: a DummyOptim, a scheduler on it, one prepare with the loader; `step` with an argument.

    The rates of six updates, and what was told at prepare.
    """
    from accelerate.utils import DummyOptim
    from late_jobs import Late, deepspeed_config

    import ds_reshard

    late = Late(clock=clock, accumulation=accumulation, groups=1)
    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"), heard() as told:
        accelerator = new_accelerator(deepspeed_config(late), gradient_accumulation_steps=accumulation)
        net = new_net()
        optimizer = DummyOptim(list(net.parameters()), lr=LR, weight_decay=0.1)
        scheduler = KINDS[kind](optimizer, times)
        loader = torch.utils.data.DataLoader(torch.arange(64), batch_size=2)
        model, scheduler, optimizer, loader = accelerator.prepare(net, scheduler, optimizer, loader)
        said, seen = list(told), []
        hook = model.basic_optimizer.register_step_pre_hook(lambda o, *_: seen.append(float(o.param_groups[0]["lr"])))
        for micro in range(6 * accumulation):
            with accelerator.accumulate(model):
                accelerator.backward(model(*jobs.batch(micro, 0, 2)))
                optimizer.step()
                scheduler.step(**({} if clock == "accelerate" else {"step": micro}))
                optimizer.zero_grad()
        hook.remove()
    return seen, said
