"""The seam of `Accelerator._prepare_deepspeed`: refused, mended or left as it is, by the rules of `diagnose`.

Rung 2 of the ladder. accelerate's published extension point, `DummyScheduler(lr_scheduler_callable=...)`, takes a
function, and not a scheduler that is there; `Accelerator.prepare` is passed by where TRL calls
`_prepare_deepspeed(model)` itself. The method has had one signature from 0.34 to 1.15.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_reshard.errors import Fault, raise_faults
from ds_reshard.hosts.accelerate import config as json
from ds_reshard.hosts.accelerate.bind import adopt, called, carry, drop_groups
from ds_reshard.hosts.accelerate.finding import REFUSED
from ds_reshard.hosts.accelerate.given import (
    CALLABLE,
    DUMMY,
    NONE,
    TORCH,
    GivenOptimizer,
    GivenScheduler,
    given_optimizer,
    is_module,
    is_optimizer,
    is_scheduler,
)
from ds_reshard.hosts.accelerate.metric import SchedulerOfAMetric
from ds_reshard.hosts.accelerate.placeholder import LateOptimizer
from ds_reshard.hosts.accelerate.rules import examine
from ds_reshard.hosts.accelerate.running import is_the_scripts
from ds_reshard.hosts.accelerate.several import trains_alone
from ds_reshard.hosts.accelerate.tracked import track
from ds_reshard.operations.ranks import of_all
from ds_reshard.resume.clock import ACCELERATE, ENGINE, clock_in

if TYPE_CHECKING:
    from accelerate import Accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch.optim import Optimizer

logger = logging.getLogger("ds_reshard")

Original = Callable[..., tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call's arguments, sorted; `clock` is what the JSON says, None where it says nothing."""

    args: tuple[object, ...]
    optimizer: GivenOptimizer
    scheduler: GivenScheduler
    clock: str | None

    @property
    def takes_scheduler(self) -> bool:
        """Whether the scheduler is attached here, and not by accelerate."""
        if self.scheduler.kind == TORCH:
            return self.optimizer.kind == DUMMY or self.clock is not None or self.scheduler.unknown
        return self.scheduler.kind == CALLABLE

    @property
    def late(self) -> LateOptimizer | None:
        return self.optimizer.thing if isinstance(self.optimizer.thing, LateOptimizer) else None


def prepare_deepspeed(accelerator: Accelerator, original: Original, args: tuple[object, ...]) -> tuple[object, ...]:
    """Prepare as accelerate does, with the scheduler that was given driving the optimizer that DeepSpeed makes.

    Collective: every rank calls it with the same arguments, and every rank raises the same PrepareError, before the
    engine is built. Without optimizer and scheduler, or with what is prepared already, accelerate's own method runs.
    """
    optimizers, schedulers = [x for x in args if is_optimizer(x)], [x for x in args if is_scheduler(x)]
    models = [x for x in args if is_module(x)]
    for plain in optimizers:
        # A DummyOptim made before the hooks were on: accelerate reads its generator once, and so must the rules.
        if isinstance(getattr(plain, "params", None), Iterator):
            plain.params = list(plain.params)  # type: ignore[attr-defined]
    fresh = any(not given_optimizer(optimizer).prepared for optimizer in optimizers)
    if not schedulers and not (fresh or (models and optimizers)):
        return original(*args)
    plugin = accelerator.state.deepspeed_plugin
    json.restore(plugin)
    config = plugin.deepspeed_config
    found = examine(config, optimizers, schedulers, models, accelerator)
    _raise_together(finding.fault() for finding in found.findings if finding.outcome == REFUSED)
    for finding in found.findings if accelerator.is_main_process else ():
        logger.info("accelerate: %s: %s", finding.outcome, finding)
    by_script = not accelerator.step_scheduler_with_optimizer and is_the_scripts(found.optimizer, found.scheduler)
    asked = Asked(
        args=args,
        optimizer=found.optimizer,
        scheduler=found.scheduler,
        clock=clock_in(config) or (ACCELERATE if by_script else None),
    )
    before = json.values(config)
    json.fill(config, found.fills)
    try:
        return _prepared(accelerator, original, asked)
    finally:
        json.remember(plugin, before)


def _prepared(accelerator: Accelerator, original: Original, asked: Asked) -> tuple[object, ...]:
    given = asked.scheduler.thing
    sizes = asked.optimizer.sizes
    kept = [number for number, size in enumerate(sizes) if size != 0]
    result = list(original(*(_sent(thing, asked) for thing in asked.args)))
    engine: DeepSpeedEngine = accelerator._models[-1]
    trains_alone(accelerator, engine)
    real: Optimizer = engine.basic_optimizer
    late = asked.late
    if late is not None:
        carry(late, real, scheduled=asked.scheduler.over is late and asked.scheduler.kind == TORCH)
        late.bind(real)
    if asked.scheduler.kind == TORCH:
        drop_groups(given, kept, len(sizes))
        adopt(given, real)
    if asked.takes_scheduler:
        made = given if asked.scheduler.kind == TORCH else called(given.lr_scheduler_callable, real)  # type: ignore[attr-defined]
        wrapper = _attach(accelerator, engine, made, asked.clock or ENGINE)
        result = [wrapper if thing is given else prepared for thing, prepared in zip(asked.args, result, strict=True)]
    elif asked.scheduler.kind != NONE:
        _track_own(accelerator, engine)
    return tuple(result)


def _sent(thing: object, asked: Asked) -> object:
    """What accelerate is given in place of an argument."""
    if isinstance(thing, LateOptimizer):
        return thing.plain()
    return None if thing is asked.scheduler.thing and asked.takes_scheduler else thing


def _attach(accelerator: Accelerator, engine: DeepSpeedEngine, scheduler: object, clock: str) -> object:
    """Give a scheduler to the engine, or to accelerate, to be stepped and saved there.

    One that wants a metric is stepped by the script alone, with that metric, at most once an update.
    """
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DeepSpeedSchedulerWrapper

    optimizer, by_script = accelerator._optimizers[-1], _wants_metric(scheduler)
    if clock == ENGINE and not by_script:
        engine.lr_scheduler = scheduler
        wrapper = DeepSpeedSchedulerWrapper(scheduler, optimizer)
    else:
        wrapper = (SchedulerOfAMetric if by_script else AcceleratedScheduler)(
            scheduler,
            optimizer,
            step_with_optimizer=accelerator.step_scheduler_with_optimizer,
            split_batches=accelerator.split_batches or clock == ENGINE,
        )
    accelerator._schedulers.append(wrapper)
    track(accelerator, wrapper, clock=ACCELERATE if by_script else clock, by_script=by_script)
    return wrapper


def _wants_metric(scheduler: object) -> bool:
    """Whether `step` takes what an engine does not have: DeepSpeed feeds it the batch size, of any class.

    `_take_model_step` in deepspeed/runtime/engine.py, 0.19.8.
    """
    parameters = inspect.signature(scheduler.step).parameters.values()  # type: ignore[attr-defined]
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _track_own(accelerator: Accelerator, engine: DeepSpeedEngine) -> None:
    """A scheduler that accelerate has attached as it always does."""
    wrapper = accelerator._schedulers[-1]
    clock = ENGINE if engine.lr_scheduler is wrapper.scheduler else ACCELERATE
    track(accelerator, wrapper, clock=clock, by_script=_wants_metric(wrapper.scheduler))


def _raise_together(faults: Iterable[Fault]) -> None:
    """Raise the same error on every rank when any rank has a fault. Collective."""
    raise_faults(of_all(faults), subject="accelerator.prepare")
