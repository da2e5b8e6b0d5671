"""`ds_reshard.prepare`: model, optimizer and scheduler made and prepared in the one order that is right."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_reshard import hooks
from ds_reshard.errors import ConfigError, Fault, PrepareError, raise_faults
from ds_reshard.hosts.accelerate import HOOKS
from ds_reshard.hosts.accelerate.given import is_module, is_optimizer, is_scheduler
from ds_reshard.hosts.accelerate.running import trains
from ds_reshard.resume.clock import PLACE, clock_faults, clock_in

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.nn import Module

logger = logging.getLogger("ds_reshard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What accelerate gave back; None, or an empty tuple, for what was not given."""

    model: object
    optimizer: object
    scheduler: object
    dataloader: object


def prepare(
    accelerator: Accelerator,
    *,
    model: Module,
    optimizer: object = None,
    scheduler: object = None,
    dataloader: object = None,
    clock: str | None = None,
) -> Prepared:
    """Prepare everything in one call of `accelerator.prepare`: model, then optimizer, then scheduler.

    `optimizer` is a torch optimizer, a `DummyOptim`, or a function of the trainable parameters that gives one; None
    is the JSON's. `scheduler` is any scheduler on that optimizer, or a function of an optimizer: it is given the real
    one. `dataloader` is one or a list. `clock` is "engine" or "accelerate" (docs/init_order.md). Puts the hooks
    of accelerate on. Collective; raises PrepareError on every rank before the engine is built, ConfigError for a clock.
    """
    hooks.install(HOOKS)
    _refuse(accelerator, model, optimizer, scheduler, dataloader)
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    _set_clock(config, clock)
    logger.info("prepare: model %s", type(model).__name__)
    made = _made_optimizer(config, model, optimizer)
    logger.info("prepare: optimizer %s", "none" if made is None else type(made).__name__)
    scheme = _made_scheduler(made, scheduler)
    logger.info("prepare: scheduler %s", "none" if scheme is None else type(scheme).__name__)
    loaders = tuple(dataloader) if isinstance(dataloader, Sequence) else (dataloader,)
    things = (model, made, scheme, *loaders)
    engine, ready, driven, *fed = accelerator.prepare(*things)
    logger.info(
        "prepare: DeepSpeed trains with %s, at the rates %s",
        type(engine.basic_optimizer).__name__,
        [group["lr"] for group in engine.basic_optimizer.param_groups],
    )
    return Prepared(
        model=engine,
        optimizer=ready,
        scheduler=driven,
        dataloader=tuple(fed) if isinstance(dataloader, Sequence) else fed[0],
    )


def _refuse(accelerator: Accelerator, model: object, optimizer: object, scheduler: object, loader: object) -> None:
    faults = []
    if getattr(getattr(accelerator, "state", None), "deepspeed_plugin", None) is None:
        what, mend = (
            "is not one for DeepSpeed",
            "Accelerator(deepspeed_plugin=DeepSpeedPlugin(...)), or accelerator.prepare",
        )
        faults.append(_fault("accelerator", what, mend))
    if any(map(trains, getattr(accelerator, "_models", ()))):
        what = "has prepared a model already: accelerator.backward goes to the first one's engine alone"
        faults.append(_fault("accelerator", what, "make a new Accelerator for each model"))
    if not is_module(model):
        faults.append(_fault("model", f"is a {type(model).__name__}, no torch.nn.Module", "model=torch.nn.Module(...)"))
    if isinstance(loader, (Mapping, Iterator)):
        what = f"is a {type(loader).__name__}, which accelerate gives back as it is: every rank would read all of it"
        faults.append(_fault("dataloader", what, "dataloader=[DataLoader(...), ...]"))
    for name, thing, known in (("optimizer", optimizer, is_optimizer), ("scheduler", scheduler, is_scheduler)):
        if thing is not None and not known(thing) and not callable(thing):
            what = f"is a {type(thing).__name__}, neither {name} nor function"
            faults.append(_fault(name, what, f"{name}=lambda {'params' if name == 'optimizer' else 'optimizer'}: ..."))
    raise_faults(faults, subject="ds_reshard.prepare")


def _set_clock(config: dict[str, object], clock: str | None) -> None:
    if clock is None:
        return
    raise_faults(clock_faults({"clock": clock}), subject="ds_reshard.prepare")
    said = clock_in(config)
    if said not in (None, clock):
        fault = ConfigError.fault(
            f"{PLACE}.clock",
            "is given in two places and differs",
            f"{said!r} (DeepSpeed JSON)",
            f"{clock!r} (ds_reshard.prepare)",
            mend="give it in one place",
        )
        raise_faults([fault], subject="ds_reshard.prepare")
    section = config.get("ds_reshard")
    config["ds_reshard"] = {**(section if isinstance(section, Mapping) else {}), "accelerate": {"clock": clock}}


def _made_optimizer(config: Mapping[str, object], model: Module, optimizer: object) -> object:
    from accelerate.utils import DummyOptim

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None:
        return DummyOptim(trainable) if "optimizer" in config else None
    if is_optimizer(optimizer) or not callable(optimizer):
        return optimizer
    made: object = optimizer(trainable)
    if not is_optimizer(made):
        fault = _fault(
            "optimizer", f"the function gave a {type(made).__name__}", "optimizer=lambda params: AdamW(params, lr=...)"
        )
        raise_faults([fault], subject="ds_reshard.prepare")
    return made


def _made_scheduler(optimizer: object, scheduler: object) -> object:
    """A function becomes a `DummyScheduler`, which is called with the real optimizer."""
    from accelerate.utils import DummyScheduler

    if scheduler is None or is_scheduler(scheduler):
        return scheduler
    return DummyScheduler(optimizer, lr_scheduler_callable=scheduler)


def _fault(where: str, what: str, mend: str) -> Fault:
    return PrepareError.fault(where, what, mend=mend)
