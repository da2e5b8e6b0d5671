"""The seams of `lr_scheduler_builder` and `load_lr_scheduler`: the rates of an uninterrupted run, at any topology.

nanotron builds the scheduler after it has loaded the optimizer, whose groups then have the rate of the moment where
the initial one is looked for (helpers.py), and makes a step after loading (serialize/optimizer.py, commit 2411b02).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

from ds_reshard.errors import Fault, ScheduleMismatch, UnsupportedLayout, raise_faults
from ds_reshard.formats.nanotron.metadata import read_metadata
from ds_reshard.formats.nanotron.names import read_listing, state_name
from ds_reshard.hosts.nanotron import report
from ds_reshard.hosts.nanotron.agree import same_policy, together
from ds_reshard.hosts.nanotron.batch import other_batch
from ds_reshard.hosts.nanotron.current import Group, Memory, current, recall, refuse_contradiction, remember
from ds_reshard.hosts.nanotron.is_zero import check_is_zero, missing
from ds_reshard.hosts.nanotron.live import Optimizer, ParallelContext, is_zero, live_of, place_of
from ds_reshard.hosts.nanotron.saved_schedule import SavedRates, read_position, read_rates, saved_arguments
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.schedulers import set_groups

FIELDS = (
    "learning_rate",
    "lr_warmup_steps",
    "lr_warmup_style",
    "lr_decay_steps",
    "lr_decay_style",
    "lr_decay_starting_step",
    "min_decay_lr",
)
"""`LRSchedulerArgs` of config/config.py."""


class Scheduler(Protocol):
    """torch's `LambdaLR`, with one `functools.partial` of nanotron a param group."""

    optimizer: object
    base_lrs: list[float]
    lr_lambdas: list[Callable[[int], float]]
    last_epoch: int
    _step_count: int
    _last_lr: list[float]


def build(arguments: Mapping[str, object], original: Callable[[], object]) -> object:
    """Build the scheduler on the rates that this run gave its groups, also after an optimizer was loaded."""
    load = current()
    refuse_contradiction(load)
    outer = arguments["optimizer"]
    memory = remember(outer)
    if memory.decayed:
        for group, run in zip(outer.get_base_optimizer().param_groups, memory.run, strict=True):  # type: ignore[attr-defined]
            group["lr"] = base_rate(run)
            group.pop("initial_lr", None)
        memory.decayed = False
    memory.schedule = (arguments["lr_scheduler_args"], cast(int, arguments["total_training_steps"]))
    built = original()
    memory.lambdas = tuple(cast(Scheduler, built).lr_lambdas)
    return built


def base_rate(run: Group) -> object:
    """The rate that a group was built with; a scheduler that was built before has noted it and changed `lr`."""
    return run.get("initial_lr", run["lr"])


def load_lr_scheduler(arguments: Mapping[str, object]) -> None:
    """Put the scheduler where the saved one was; collective, and nothing has changed where it raises.

    The rates of a param group are found by the names of its members, whatever the topology of the files is.
    """
    memory = recall(getattr(arguments.get("lr_scheduler"), "optimizer", None))
    outer = cast("Optimizer | None", memory.outer if memory is not None else None)
    derived = is_zero(outer) if outer is not None else None
    raise_faults(missing(arguments, derived), subject="load_lr_scheduler")
    load, folder = current(), str(arguments["root_folder"])
    scheduler = cast(Scheduler, arguments["lr_scheduler"])
    context = cast(ParallelContext, arguments["parallel_context"])
    load.where, policy, world = folder, load.policy, context.world_pg
    same_policy(policy, world, subject=f"loading {folder}")

    def look() -> SavedRates | None:
        metadata, _ = read_metadata(read_listing(folder))
        found = [*check_is_zero(arguments.get("is_zero"), derived), *other_batch(load, context.dp_pg.size(), metadata)]
        raise_faults(found, subject="load_lr_scheduler")
        if not hasattr(scheduler, "lr_lambdas"):
            raise_faults([_no_lambdas(scheduler)], subject="load_lr_scheduler")
        if policy.schedule_is_this_runs:
            return read_position(folder) if policy.keeps_position else None
        groups = live_of(outer, context).groups if outer is not None else [()] * len(scheduler.base_lrs)
        places = [place_of(context, zero=zero) for zero in (False, True)]
        return read_rates(folder, groups, [state_name("lr_scheduler", *place) for place in places])

    saved = together(look, world, subject=f"loading {folder}")
    run = (
        [float(cast(float, base_rate(group))) for group in memory.run]
        if memory is not None
        else list(scheduler.base_lrs)
    )

    def choose() -> tuple[list[float], list[Callable[[int], float]], int]:
        lambdas = memory.lambdas if memory is not None and memory.lambdas is not None else scheduler.lr_lambdas
        bases, lambdas = _schedule(run, lambdas, saved, policy, folder)
        position = saved.position if saved is not None and policy.keeps_position else 0
        if policy.scheduler == "strict" and saved is not None:
            raise_faults(_differences(run, lambdas, memory, saved, folder), subject="resuming the schedule")
        return bases, lambdas, position

    bases, lambdas, position = together(choose, world, subject=f"loading {folder}")
    _put(scheduler, bases, lambdas, position)
    report.schedule(load, scheduler, saved, run)


def _schedule(
    run: Sequence[float],
    lambdas: Sequence[Callable[[int], float]],
    saved: SavedRates | None,
    policy: ResumePolicy,
    folder: str,
) -> tuple[list[float], list[Callable[[int], float]]]:
    """The base rates and lambdas that the policy takes: nanotron itself takes the saved rates and this run's shape."""
    bases = list(run if saved is None or policy.schedule_is_this_runs else saved.bases)
    if saved is not None and policy.scheduler == "checkpoint":
        lambdas = _lambdas_of(saved_arguments(folder, FIELDS), bases)
    return bases, [_based(one, base) for one, base in zip(lambdas, bases, strict=True)]


def _based(one: Callable[[int], float], base: float) -> Callable[[int], float]:
    """nanotron's lambda divides by the initial rate that it was made with, which must be the base rate."""
    if isinstance(one, functools.partial) and "initial_lr" in one.keywords:
        return functools.partial(one.func, *one.args, **{**one.keywords, "initial_lr": base})
    return one


def _lambdas_of(saved: tuple[object, int], bases: Sequence[float]) -> list[Callable[[int], float]]:
    """What nanotron's own builder makes of the saved configuration."""
    import torch
    from nanotron.helpers import lr_scheduler_builder

    class Holder:
        def __init__(self) -> None:
            groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": base} for base in bases]
            self._base = torch.optim.SGD(groups, lr=1.0)

        def get_base_optimizer(self) -> torch.optim.Optimizer:
            return self._base

    built: Scheduler = lr_scheduler_builder(Holder(), saved[0], saved[1])
    return list(built.lr_lambdas)


def _put(scheduler: Scheduler, bases: list[float], lambdas: list[Callable[[int], float]], position: int) -> None:
    rates = [base * one(position) for base, one in zip(bases, lambdas, strict=True)]
    scheduler.base_lrs, scheduler.lr_lambdas = bases, lambdas
    scheduler.last_epoch, scheduler._step_count, scheduler._last_lr = position, position + 1, rates
    groups = scheduler.optimizer.param_groups  # type: ignore[attr-defined]
    values = [{"lr": rate, "initial_lr": base} for rate, base in zip(rates, bases, strict=True)]
    set_groups(groups, values, ("lr", "initial_lr"))


def _differences(
    run: Sequence[float],
    lambdas: Sequence[Callable[[int], float]],
    memory: Memory | None,
    saved: SavedRates,
    folder: str,
) -> list[Fault]:
    """What differs between the saved schedule and this run's: base rates, what shapes it, and the rate it has now."""
    found = [
        _mismatch(f"group {number}: initial learning rate", then, now)
        for number, (then, now) in enumerate(zip(saved.bases, run, strict=True))
        if then != now
    ]
    if memory is not None and memory.schedule is not None and saved.has_config:
        then, now = saved_arguments(folder, FIELDS), memory.schedule
        found += [
            _mismatch(name, getattr(then[0], name), getattr(now[0], name, None))
            for name in FIELDS
            if getattr(then[0], name) != getattr(now[0], name, None)
        ]
        if then[1] != now[1] and getattr(then[0], "lr_decay_steps", None) is None:
            found.append(_mismatch("train_steps", then[1], now[1]))
    rates = [base * one(saved.position) for base, one in zip(run, lambdas, strict=True)]
    if not found and rates != list(saved.last):
        found.append(_mismatch(f"learning rate at step {saved.position}", list(saved.last), rates))
    return found


def _mismatch(where: str, then: object, now: object) -> Fault:
    return ScheduleMismatch.fault(
        where,
        "differs from the checkpoint's",
        str(then),
        str(now),
        mend="give the saved values, or --override-opt-param-scheduler to go on with this run's",
    )


def _no_lambdas(scheduler: object) -> Fault:
    return UnsupportedLayout.fault(
        "load_lr_scheduler",
        "is given a scheduler that nanotron does not build",
        "torch's LambdaLR, of lr_scheduler_builder",
        type(scheduler).__name__,
        mend="nanotron.helpers.lr_scheduler_builder(optimizer, lr_scheduler_args, total_training_steps)",
    )
