"""The accelerator that optimizer and scheduler are prepared with: what only it knows of who counts what."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ds_reshard.hosts.accelerate.finding import Finding, refused, told
from ds_reshard.hosts.accelerate.given import CALLABLE, DUMMY, NONE, TORCH, GivenOptimizer, GivenScheduler
from ds_reshard.resume.clock import ACCELERATE, ENGINE, clock_in

BACKWARD = "make a new Accelerator for each model, or call model.backward(loss) and model.step() of the engine itself"
_CLOCK = '"ds_reshard": {"accelerate": {"clock": "%s"}} in the DeepSpeed JSON'
# At position 0 they are where they were before it (`_get_gamma` in deepspeed/runtime/lr_schedules.py, 0.19.8).
_LATE = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAccelerator:
    """`processes` is how many accelerate counts, None where no accelerator is known; `world` how many there are.

    `by_script` says that the script alone steps schedulers; `engines` counts those that train already, and
    `modules` are the models of all that it has.
    """

    processes: int | None = None
    world: int | None = None
    split_batches: bool = False
    by_script: bool = False
    accumulation: int = 1
    engines: int = 0
    modules: tuple[object, ...] = ()


def given_accelerator(thing: object) -> GivenAccelerator:
    if thing is None:
        return GivenAccelerator()
    distributed = sys.modules.get("torch.distributed")
    begun = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return GivenAccelerator(
        processes=thing.num_processes,  # type: ignore[attr-defined]
        world=distributed.get_world_size() if begun and distributed is not None else 1,
        split_batches=thing.split_batches,  # type: ignore[attr-defined]
        by_script=not thing.step_scheduler_with_optimizer,  # type: ignore[attr-defined]
        accumulation=thing.gradient_accumulation_steps,  # type: ignore[attr-defined]
        engines=sum(map(trains, thing._models)),  # type: ignore[attr-defined]
        modules=tuple(getattr(engine, "module", None) for engine in thing._models),  # type: ignore[attr-defined]
    )


def trains(engine: object) -> bool:
    """Whether DeepSpeed has made an optimizer for an engine."""
    return getattr(engine, "basic_optimizer", None) is not None


def counted(
    config: Mapping[str, object], optimizer: GivenOptimizer, scheduler: GivenScheduler, accelerator: GivenAccelerator
) -> Iterator[Finding]:
    """Processes, micro-batches, engines and the steps of a schedule: who counts, and up to what."""
    if accelerator.processes != accelerator.world:
        yield refused(
            "alone",
            "accelerator.num_processes",
            f"is {accelerator.processes}, and {accelerator.world} processes train: batch sizes, schedules and "
            "checkpoints are wrong",
            'Accelerator(..., kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])',
        )
    if accelerator.engines and optimizer.kind != NONE:
        yield told(
            "second-engine",
            "accelerator.prepare",
            "is called a second time: accelerator.backward goes to the engine of the first alone, and this model is "
            "not trained by it; with the hooks it is an error",
            BACKWARD,
        )
    said = config.get("gradient_accumulation_steps")
    if isinstance(said, int) and accelerator.accumulation not in (1, said):
        yield told(
            "two-accumulations",
            "gradient_accumulation_steps",
            f"is {accelerator.accumulation} in the Accelerator and {said} in the DeepSpeed JSON, which wins",
            'write "auto" into the JSON, or leave it out of Accelerator(...)',
        )
    if clock_in(config) is not None and scheduler.kind == NONE and optimizer.kind != NONE and "scheduler" not in config:
        yield told(
            "clock-unused",
            "ds_reshard.accelerate.clock",
            "holds for a scheduler in this prepare, and there is none: one that is made later is stepped as without it",
            "pass the scheduler to the same accelerator.prepare(...), or leave the clock out",
        )
    yield from _stepped(config, optimizer, scheduler, accelerator)
    yield from _late(config, scheduler)


def _stepped(
    config: Mapping[str, object], optimizer: GivenOptimizer, scheduler: GivenScheduler, accelerator: GivenAccelerator
) -> Iterator[Finding]:
    """Who steps the schedule, where another path would step it otherwise."""
    clock, in_json = clock_in(config), "scheduler" in config
    if not _by_engine(config, optimizer, scheduler, accelerator):
        alone = accelerator.processes == 1 or accelerator.split_batches or accelerator.by_script
        if scheduler.kind == TORCH and clock is None and not alone and not scheduler.unknown:
            yield told(
                "steps-per-process",
                "scheduler",
                f"takes {accelerator.processes or 'num_processes'} steps an update, one for each process, and one with "
                "split_batches; a DummyOptim's takes one",
                f"count its steps so, or write {_CLOCK % ENGINE} for one step an update",
            )
        return
    if scheduler.kind == CALLABLE and clock is None:
        yield told(
            "engine-steps",
            "lr_scheduler_callable",
            "what it makes is stepped by the engine once an update, whether the script steps it or not; one whose step "
            "wants a metric is fed the batch size, and with the hooks the metric of scheduler.step(metric)",
            f"count its steps in updates, or write {_CLOCK % ACCELERATE}",
        )
    if accelerator.by_script and (in_json or scheduler.kind != NONE):
        yield told(
            "steps-by-engine",
            "Accelerator(step_scheduler_with_optimizer=False)",
            "has no effect on this scheduler: the engine steps it once an update",
            "build the scheduler in the script, in place of the JSON's" if in_json else f"write {_CLOCK % ACCELERATE}",
        )


def is_the_scripts(optimizer: GivenOptimizer, scheduler: GivenScheduler) -> bool:
    """Whether a scheduler is one that the script built, and not the engine's: DeepSpeed's own, on a real optimizer."""
    return scheduler.kind == TORCH and (optimizer.kind == DUMMY or not scheduler.of_deepspeed)


def _by_engine(
    config: Mapping[str, object], optimizer: GivenOptimizer, scheduler: GivenScheduler, accelerator: GivenAccelerator
) -> bool:
    clock = clock_in(config)
    if "scheduler" in config or clock is not None or scheduler.kind != TORCH:
        return clock != ACCELERATE
    if is_the_scripts(optimizer, scheduler):
        return optimizer.kind == DUMMY and not accelerator.by_script
    return True


def _late(config: Mapping[str, object], scheduler: GivenScheduler) -> Iterator[Finding]:
    section = config.get("scheduler")
    name = str(section.get("type")) if isinstance(section, Mapping) else type(scheduler.thing).__name__
    if name in _LATE and (isinstance(section, Mapping) or scheduler.of_deepspeed):
        yield told(
            "two-at-the-lowest",
            name,
            "its first two updates are at the lowest rate, 0 unless it is given",
            "get_scheduler of transformers, built in the script, has one such update; or leave it so",
        )
