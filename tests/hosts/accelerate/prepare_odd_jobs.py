"""Scripts that do something odd around `prepare`: what becomes of their rates, their parameters and their resume."""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import jobs
import torch
from late_jobs import LR, Late, new_accelerator, new_net, prepared, train
from logs import heard, refusal
from prepare_jobs import _train, falling
from torch.optim.lr_scheduler import LambdaLR, StepLR

WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 4}}


def _config(**more: Any) -> dict[str, Any]:
    adam = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
    return {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "optimizer": adam,
        **more,
    }


def _dummy(params: Any, lr: float = LR) -> Any:
    from accelerate.utils import DummyOptim

    return DummyOptim(list(params), lr=lr, weight_decay=0.0)


def saved_by_the_script(folder: str, clock: str | None) -> str:
    """Five updates, of which the script stepped the schedule after the last; loaded where something else steps it."""
    import ds_reshard

    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"):
        run = prepared(Late(), step_scheduler_with_optimizer=False)
        train([*run[:3], SimpleNamespace(step=lambda: None)], Late(), 0, 5)
        run[3].step()
        run[0].save_state(folder)
        again = prepared(Late(clock=clock), seed=99)
        return refusal(lambda: again[0].load_state(folder)) or str(again[5].last_epoch)


def deepspeeds_own(hooks: bool, stepped: bool) -> list[list[float]]:
    """A WarmupLR of DeepSpeed on a real optimizer, with `step_scheduler_with_optimizer=False`."""
    from deepspeed.runtime.lr_schedules import WarmupLR

    import ds_reshard

    config = _config()
    del config["optimizer"]
    with ds_reshard.install("accelerate") if hooks else nullcontext():
        accelerator, net = new_accelerator(config, step_scheduler_with_optimizer=False), new_net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
        things = accelerator.prepare(net, optimizer, WarmupLR(optimizer, 0.0, LR, 3))
        return _train(accelerator, list(things), 4, stepped)


def made(kind: str) -> str:
    """What an `lr_scheduler_callable` may give back."""
    from accelerate.utils import DummyScheduler

    import ds_reshard

    with ds_reshard.install("accelerate"):
        accelerator, net = new_accelerator(_config()), new_net()
        optimizer, other = _dummy(net.parameters()), torch.optim.AdamW(new_net().parameters(), lr=LR)
        function = {
            "nothing": lambda real: None,
            "another optimizer's": lambda real: LambdaLR(other, falling),
            "a dummy": lambda real: DummyScheduler(real),
            "an optimizer": lambda real: torch.optim.AdamW(real.param_groups),
            "the placeholder's": lambda real: LambdaLR(optimizer, falling),
        }[kind]
        scheduler = DummyScheduler(optimizer, lr_scheduler_callable=function)
        return refusal(lambda: accelerator.prepare(net, optimizer, scheduler))


def greedy(folder: str, real: bool, policy: dict[str, Any] | None = None) -> dict[str, Any]:
    """The scheduler of transformers that is no torch scheduler: four updates, saved, loaded, four more.

    `policy` is the resume policy of the load.
    """
    from transformers import get_scheduler

    import ds_reshard

    config, told = _config(), {}
    if real:
        del config["optimizer"]
    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"):
        for resumes in (False, True):
            if resumes and policy:
                config["ds_reshard"] = {"resume": policy}
            accelerator, net = new_accelerator(config), new_net()
            optimizer = torch.optim.AdamW(net.parameters(), lr=LR) if real else _dummy(net.parameters())
            specific = {"patience": 0, "factor": 0.5, "min_lr": 1e-6}
            scheduler = get_scheduler("greedy", optimizer, scheduler_specific_kwargs=specific)
            found = ds_reshard.diagnose(config, optimizer, scheduler, model=net, accelerator=accelerator)
            engine, optimizer, stepped = accelerator.prepare(net, optimizer, scheduler)
            if resumes and (refused := refusal(lambda loads=accelerator.load_state: loads(folder))):
                return {"raised": refused}
            used = SimpleNamespace(step=lambda stepped=stepped: stepped.step(5.0))
            rates = _train(accelerator, [engine, optimizer, used], 4, True)
            if not resumes:
                accelerator.save_state(folder)
            told["resumed" if resumes else "rates"] = [rate for (rate,) in rates]
            told |= {"steps": scheduler.last_epoch, "found": [finding.rule for finding in found]}
    return told


def twice(stage: int, originals: bool) -> str:
    """A model and its torch optimizer are prepared, and then again: as they were, or as they came back."""
    import ds_reshard

    config = _config(zero_optimization={"stage": stage})
    del config["optimizer"]
    with ds_reshard.install("accelerate"):
        accelerator, net = new_accelerator(config), new_net()
        things = net, torch.optim.AdamW(net.parameters(), lr=LR)
        ready = accelerator.prepare(*things)
        return refusal(lambda: accelerator.prepare(*(things if originals else ready)))


def freed(folder: str) -> dict[str, Any]:
    """One accelerator, freed between runs; the second has no scheduler, the others are made by `ds_reshard.prepare`."""
    import ds_reshard

    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"):
        accelerator, net = new_accelerator(_config()), new_net()
        optimizer = _dummy(net.parameters())
        accelerator.prepare(net, optimizer, LambdaLR(optimizer, falling))
        accelerator.free_memory()
        net = new_net()
        accelerator.prepare(net, _dummy(net.parameters()))
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        told: dict[str, Any] = {"record": "ds_reshard_clock.json" in os.listdir(folder), "raised": []}
        for free in (True, True, False):
            if free:
                accelerator.free_memory()
            call = lambda: ds_reshard.prepare(accelerator, model=new_net(), optimizer=_dummy)  # noqa: E731
            told["raised"].append(refusal(call))
    return told


def after_a_failure() -> list[list[float]]:
    """DeepSpeed fails once, and the script tries again at another rate."""
    import deepspeed

    import ds_reshard

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with ds_reshard.install("accelerate"):
        accelerator, net = new_accelerator(_config()), new_net()
        initialize, deepspeed.initialize = deepspeed.initialize, fail
        try:
            accelerator.prepare(net, _dummy(net.parameters()))
        except MemoryError:
            pass
        finally:
            deepspeed.initialize = initialize
        return _train(accelerator, list(accelerator.prepare(net, _dummy(net.parameters(), LR / 10))), 1, False)


def explicit(kind: str) -> str:
    """`ds_reshard.prepare` given what it does not take."""
    from accelerate import Accelerator

    import ds_reshard

    accelerator = new_accelerator(_config())
    given = {"model": new_net(), "optimizer": _dummy}
    if kind == "no accelerator":
        accelerator = None
    elif kind == "not for DeepSpeed":
        jobs.forget_accelerate()
        accelerator = Accelerator(cpu=True)
    given |= {
        "no model": {"model": None},
        "loaders by name": {"dataloader": {"train": torch.utils.data.DataLoader([1, 2])}},
        "a generator of loaders": {"dataloader": (torch.utils.data.DataLoader([1, 2]) for _ in range(2))},
        "another model's, made before the hooks": {"optimizer": _dummy(new_net(3).parameters())},
    }.get(kind, {})
    with ds_reshard.install("accelerate"):
        return refusal(lambda: ds_reshard.prepare(accelerator, **given))


def built_after(folder: str, registered: bool) -> list[str]:
    """A scheduler that is built on the prepared optimizer; what is logged when the state is saved."""
    import ds_reshard

    with heard() as told, ds_reshard.install("accelerate"):
        accelerator, net = new_accelerator(_config()), new_net()
        _, optimizer = accelerator.prepare(net, _dummy(net.parameters()))
        scheduler = LambdaLR(optimizer, falling)
        if registered:
            accelerator.register_for_checkpointing(scheduler)
        accelerator.save_state(folder)
    return told


def another_kind(folder: str, to_torch: bool) -> str:
    """A schedule of the JSON is saved and one of torch loaded, on the engine's clock, or the other way round."""
    from accelerate.utils import DummyScheduler

    import ds_reshard

    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"):
        for of_torch in (not to_torch, to_torch):
            accelerator, net = new_accelerator(_config(**({} if of_torch else {"scheduler": WARMUP}))), new_net()
            optimizer = _dummy(net.parameters())
            scheduler = StepLR(optimizer, 2) if of_torch else DummyScheduler(optimizer)
            things = accelerator.prepare(net, optimizer, scheduler)
            if of_torch == to_torch:
                return refusal(lambda accelerator=accelerator: accelerator.load_state(folder))
            _train(accelerator, list(things), 3, True)
            accelerator.save_state(folder)
    raise AssertionError


def two_engines(folder: str, saved: str, loaded: str) -> str:
    """Two models with a schedule each in one accelerator, saved on one clock and loaded on another."""
    import ds_reshard

    with ds_reshard.install("accelerate"), ds_reshard.install("deepspeed"):
        for clock in (saved, loaded):
            accelerator = new_accelerator(_config(ds_reshard={"accelerate": {"clock": clock}}))
            for _ in range(2):
                net = new_net()
                optimizer = _dummy(net.parameters())
                accelerator.prepare(net, optimizer, LambdaLR(optimizer, falling))
            if clock == saved:
                accelerator.save_state(folder)
        return refusal(lambda: accelerator.load_state(folder))
