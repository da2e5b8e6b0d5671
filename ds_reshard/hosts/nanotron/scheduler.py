"""The seams of nanotron's schedule: the rates of an uninterrupted run, at any topology.

nanotron builds the scheduler after it has loaded the optimizer, whose groups then have the rate of the moment where the
initial one is looked for (helpers.py), and makes a step after loading (serialize/optimizer.py, commit 2411b02). The
trainer passes the ZeRO stage's number as `is_zero`, which is not `True`: every data-parallel rank of ZeRO-1 then writes
the one file without a data-parallel rank in its name (`lr_scheduler_filename`, the same file).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple, Protocol, cast

from ds_reshard.errors import (
    ConfigError,
    Fault,
    ParamGroupMismatch,
    ScheduleMismatch,
    UnsupportedLayout,
    damaged,
    error_of,
    fail,
    raise_faults,
)
from ds_reshard.formats.nanotron.names import CONFIG, NanotronListing, state_name
from ds_reshard.formats.nanotron.optimizer_file import SavedScheduler, read_scheduler
from ds_reshard.hooks import Call
from ds_reshard.hosts.nanotron.live import Optimizer, ParallelContext, is_zero, live_of, place_of
from ds_reshard.hosts.nanotron.load import (
    Group,
    Load,
    Memory,
    current,
    other_batch,
    recall,
    refuse_contradiction,
    remember,
    same_policy,
)
from ds_reshard.hosts.nanotron.source import Source, folder_of, lacks_schedule, no_schedule, source_of
from ds_reshard.model.content import BASE, LAST
from ds_reshard.operations.pickles import one_line_for_all
from ds_reshard.operations.ranks import agree, gather, run_on_all
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.report import because
from ds_reshard.resume.schedulers import set_groups

_NEEDED = ("lr_scheduler", "parallel_context", "root_folder")
_NAMED = "name every argument: f(lr_scheduler=..., is_zero=..., parallel_context=..., root_folder=...)"
_ARGUMENTS = "optimizer.learning_rate_scheduler"
_STEPS = "tokens.train_steps"
_FIELDS = (
    "learning_rate",
    "lr_warmup_steps",
    "lr_warmup_style",
    "lr_decay_steps",
    "lr_decay_style",
    "lr_decay_starting_step",
    "min_decay_lr",
)
"""`LRSchedulerArgs` of config/config.py."""
_Lambda = Callable[[int], float]


class Scheduler(Protocol):
    """torch's `LambdaLR`, with one `functools.partial` of nanotron a param group."""

    optimizer: object
    base_lrs: list[float]
    lr_lambdas: list[_Lambda]
    last_epoch: int
    _step_count: int
    _last_lr: list[float]


def save(call: Call) -> object:
    """nanotron's `save`, once configuration and optimizer agree and each file has one writer. Collective, as `save`."""
    import torch.distributed as dist

    optimizer = cast(Optimizer, call["optimizer"])
    context = cast(ParallelContext, call["parallel_context"])
    remember(optimizer)
    stage = getattr(getattr(call["config"], "optimizer", None), "zero_stage", None)
    faults = check_is_zero(stage, is_zero(optimizer), where="optimizer.zero_stage")
    file = ""
    if call.arguments.get("should_save_lr_scheduler", True) and dist.get_rank(context.dp_cp_pg) == 0:
        from nanotron.serialize.optimizer import lr_scheduler_filename

        file = os.path.join(str(call["root_folder"]), "lr_scheduler", lr_scheduler_filename(context, False))
    files = gather(file, context.world_pg)
    for one in sorted({file for file in files if file and files.count(file) > 1}):
        ranks = ", ".join(str(rank) for rank, file in enumerate(files) if file == one)
        faults.append(
            UnsupportedLayout.fault(
                one,
                "would be written by several ranks at the same time",
                "one writer",
                f"ranks {ranks}",
                mend="give each rank a place of its own in the parallel context",
            )
        )
    agree(faults, context.world_pg, subject=f"saving {call['root_folder']}")
    return call()


def save_lr_scheduler(call: Call) -> object:
    """Save once for all data-parallel ranks, who have one schedule, under the name that nanotron's trainer asks for.

    `is_zero` may be left out where the optimizer is known. Raises ConfigError for missing or shifted arguments.
    """
    _, _, derived = _optimizer_of(call.arguments, subject="save_lr_scheduler")
    raise_faults(check_is_zero(call.arguments.get("is_zero"), derived), subject="save_lr_scheduler")
    return call(is_zero=False)


def _optimizer_of(
    arguments: Mapping[str, object], *, subject: str
) -> tuple[Memory | None, Optimizer | None, bool | None]:
    """The optimizer of the scheduler that was passed, where it is known, and whether that is ZeRO's.

    Raises ConfigError for each argument that was not passed; `is_zero` may be left out where it is derived.
    """
    memory = recall(getattr(arguments.get("lr_scheduler"), "optimizer", None))
    outer = cast(Optimizer, memory.outer) if memory is not None else None
    derived = is_zero(outer) if outer is not None else None
    needed = (*_NEEDED, *(("is_zero",) if derived is None else ()))
    missing = [
        ConfigError.fault(name, "is not passed", ", ".join(needed), "none", mend=_NAMED)
        for name in needed
        if name not in arguments
    ]
    raise_faults(missing, subject=subject)
    return memory, outer, derived


def check_is_zero(given: object, derived: bool | None, *, where: str = "is_zero") -> list[Fault]:
    """A fault where what was passed is no switch or stage, or not what the optimizer is."""
    if given is None and derived is not None:
        return []
    if not isinstance(given, int):  # a bool is one
        what = "is neither a switch nor a ZeRO stage: an argument was left out before it"
        return [ConfigError.fault(where, what, "True, False or the stage", type(given).__name__, mend=_NAMED)]
    if derived is None or bool(given) == derived:
        return []
    kind = "ZeroDistributedOptimizer" if derived else "an optimizer that is not cut over data-parallel ranks"
    expected, mend = f"{int(derived)}, for {kind}", f"optimizer.zero_stage: {int(derived)}"
    return [ConfigError.fault(where, "is not what the optimizer is", expected, str(given), mend=mend)]


def build(call: Call) -> object:
    """Build the scheduler on the rates that this run gave its groups, also after an optimizer was loaded."""
    refuse_contradiction(current())
    outer = call["optimizer"]
    memory = remember(outer)
    if memory.decayed:
        for group, run in zip(outer.get_base_optimizer().param_groups, memory.run, strict=True):
            group["lr"] = base_rate(run)
            group.pop("initial_lr", None)
        memory.decayed = False
    memory.schedule = (call["lr_scheduler_args"], cast(int, call["total_training_steps"]))
    built = call()
    memory.lambdas = tuple(cast(Scheduler, built).lr_lambdas)
    return built


def base_rate(run: Group) -> object:
    """The rate that a group was built with; a scheduler that was built before has noted it and changed `lr`."""
    return run.get("initial_lr", run["lr"])


def load_lr_scheduler(call: Call) -> None:
    """Put the scheduler where the saved one was; collective, and nothing has changed where it raises.

    The rates of a param group are found by the names of its members, whatever the topology of the files is.
    """
    memory, outer, derived = _optimizer_of(call.arguments, subject="load_lr_scheduler")
    load, folder = current(), folder_of(call["root_folder"])
    scheduler = cast(Scheduler, call["lr_scheduler"])
    context = cast(ParallelContext, call["parallel_context"])
    load.where, policy, world = folder, load.policy, context.world_pg
    same_policy(policy, world, subject=f"loading {folder}")

    source = source_of(load, folder, world)

    def look() -> SavedRates | None:
        found = check_is_zero(call.arguments.get("is_zero"), derived)
        raise_faults([*found, *other_batch(load, context.dp_pg.size(), source.batch)], subject="load_lr_scheduler")
        if not hasattr(scheduler, "lr_lambdas"):
            raise error_of([_no_lambdas(scheduler)], subject="load_lr_scheduler")
        if policy.schedule_is_this_runs and not policy.keeps_position:
            return None
        groups: Sequence[Sequence[str]] | None = None
        if not policy.schedule_is_this_runs:
            groups = live_of(outer, context).groups if outer is not None else [()] * len(scheduler.base_lrs)
        own = [state_name("lr_scheduler", *place_of(context, zero=zero)) for zero in (False, True)]
        with one_line_for_all(source.folder):
            return read_rates(source, policy, groups, own)

    saved = run_on_all(look, world, subject=f"loading {folder}")
    run = list(scheduler.base_lrs)
    if memory is not None:
        run = [float(cast(float, base_rate(group))) for group in memory.run]

    def choose() -> tuple[list[float], list[_Lambda]]:
        """Return the base rates and the lambdas that the policy selects.

        By default, as in nanotron, the rates are the saved ones and the lambdas are this run's.
        """
        bases = list(run if saved is None or policy.schedule_is_this_runs else saved.bases)
        lambdas = scheduler.lr_lambdas if memory is None or memory.lambdas is None else list(memory.lambdas)
        if saved is not None and policy.scheduler == "checkpoint":
            lambdas = _lambdas_of(saved_arguments(saved), bases)
        lambdas = [_based(one, base) for one, base in zip(lambdas, bases, strict=True)]
        if policy.scheduler == "strict" and saved is not None:
            raise_faults(_differences(run, lambdas, memory, saved), subject="resuming the schedule")
        return bases, lambdas

    bases, lambdas = run_on_all(choose, world, subject=f"loading {folder}")
    _put(scheduler, bases, lambdas, saved.position if saved is not None and policy.keeps_position else 0)
    report_schedule(load, scheduler, saved, run)


def _based(one: _Lambda, base: float) -> _Lambda:
    """nanotron's lambda divides by the initial rate that it was made with, which must be the base rate."""
    if isinstance(one, functools.partial) and "initial_lr" in one.keywords:
        return functools.partial(one.func, *one.args, **{**one.keywords, "initial_lr": base})
    return one


def _lambdas_of(saved: tuple[object, int], bases: Sequence[float]) -> list[_Lambda]:
    """What nanotron's own builder makes of the saved configuration."""
    import torch
    from nanotron.helpers import lr_scheduler_builder

    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": base} for base in bases]
    base = torch.optim.SGD(groups, lr=1.0)
    built: Scheduler = lr_scheduler_builder(SimpleNamespace(get_base_optimizer=lambda: base), *saved)
    return list(built.lr_lambdas)


def _put(scheduler: Scheduler, bases: list[float], lambdas: list[_Lambda], position: int) -> None:
    rates = [base * one(position) for base, one in zip(bases, lambdas, strict=True)]
    scheduler.base_lrs, scheduler.lr_lambdas = bases, lambdas
    scheduler.last_epoch, scheduler._step_count, scheduler._last_lr = position, position + 1, rates
    groups = scheduler.optimizer.param_groups  # type: ignore[attr-defined]
    values = [{"lr": rate, "initial_lr": base} for rate, base in zip(rates, bases, strict=True)]
    set_groups(groups, values, ("lr", "initial_lr"))


def _differences(
    run: Sequence[float], lambdas: Sequence[_Lambda], memory: Memory | None, saved: SavedRates
) -> list[Fault]:
    """What differs between the saved schedule and this run's: base rates, what shapes it, and the rate it has now."""
    rates = enumerate(zip(saved.bases, run, strict=True))
    pairs: list[tuple[str, object, object]] = [
        (f"group {number}: initial learning rate", then, now) for number, (then, now) in rates
    ]
    if memory is not None and memory.schedule is not None and CONFIG in saved.source.listing.nbytes:
        (shape, steps), (own, own_steps) = saved_arguments(saved), memory.schedule
        pairs += [(name, getattr(shape, name), getattr(own, name, None)) for name in _FIELDS]
        if getattr(shape, "lr_decay_steps", None) is None:
            pairs.append(("train_steps", steps, own_steps))
    found = [pair for pair in pairs if pair[1] != pair[2]]
    last = [base * one(saved.position) for base, one in zip(run, lambdas, strict=True)]
    if not found and last != saved.last:
        found = [(f"learning rate at step {saved.position}", saved.last, last)]
    what = "differs from the checkpoint's"
    mend = "give the saved values, or --override-opt-param-scheduler to go on with this run's"
    return [ScheduleMismatch.fault(where, what, str(then), str(now), mend=mend) for where, then, now in found]


def _no_lambdas(scheduler: object) -> Fault:
    return UnsupportedLayout.fault(
        "load_lr_scheduler",
        "is given a scheduler that nanotron does not build",
        "torch's LambdaLR, of lr_scheduler_builder",
        type(scheduler).__name__,
        mend="nanotron.helpers.lr_scheduler_builder(optimizer, lr_scheduler_args, total_training_steps)",
    )


class SavedRates(NamedTuple):
    """Of each param group of this run the base rate and the last one; `position` counts the steps.

    Where the position alone is wanted, there are no rates.
    """

    source: Source
    position: int
    rates: Sequence[tuple[float, float]] = ()

    @property
    def bases(self) -> list[float]:
        return [base for base, _ in self.rates]

    @property
    def last(self) -> list[float]:
        return [last for _, last in self.rates]


def read_rates(
    source: Source, policy: ResumePolicy, groups: Sequence[Sequence[str]] | None, own: Sequence[str]
) -> SavedRates:
    """The rates of this run's groups, by the names of their members; without groups, the position alone.

    Where no file of nanotron tells the members, they are those of this rank's own file, whose possible names are `own`,
    or of any where all rates are one. Raises CheckpointDamaged where no scheduler was saved or its files differ,
    ParamGroupMismatch where the members of a group had several rates.
    """
    if source.foreign:
        if lacks_schedule(source, policy):
            raise error_of([no_schedule(source)], subject=f"loading {source.folder}")
        assert source.position is not None
        return SavedRates(source, source.position, _of_groups(source, groups or ()))
    listing, metadata = source.listing, source.metadata
    first = _first_file(listing)
    if groups is None:
        return SavedRates(source, _position(read_scheduler(listing.path(first), None)))
    cp = metadata.cp if metadata is not None else 1
    if listing.topology is None or listing.topology.exp != 1 or cp > 1 or not all(groups):
        mine = next((name for name in own if name in listing.nbytes), None)
        return _by_number(source, read_scheduler(listing.path(mine or first), None), len(groups), alone=mine is None)
    assert source.own is not None
    schedulers = source.own.schedulers
    for saved in schedulers:
        if saved.counters != schedulers[0].counters:
            what = f"is at another position than {schedulers[0].path}"
            raise fail(saved.path, what, str(schedulers[0].counters), str(saved.counters))
        _floats(saved, BASE)
        _floats(saved, LAST)
    return SavedRates(source, _position(schedulers[0]), _of_groups(source, groups))


def _of_groups(source: Source, groups: Sequence[Sequence[str]]) -> list[tuple[float, float]]:
    """The base rate and the last one of each group; CheckpointDamaged for none, ParamGroupMismatch for several."""
    found: list[tuple[float, float]] = []
    faults: list[Fault] = []
    for names in groups:
        held, shown = source.rates(names), ", ".join(names[:4])
        if not held:
            faults.append(damaged(shown, "has no saved learning rate", "one", "none"))
        elif len(held) > 1:
            what = "are in one param group, and had several learning rates"
            mend = "build the param groups as the saving run did, or --override-opt-param-scheduler"
            faults.append(ParamGroupMismatch.fault(shown, what, "one", str(sorted(map(str, held))), mend=mend))
        found += held
    raise_faults(faults, subject=f"checkpoint {source.folder}")
    return found


def _by_number(source: Source, one: SavedScheduler, number: int, *, alone: bool) -> SavedRates:
    """The rates of one file by the order of its groups; `alone`, it is not this rank's own."""
    bases, last = _floats(one, BASE), _floats(one, LAST)
    if len(set(bases)) == 1 and len(set(last)) == 1:
        bases, last = bases[:1] * number, last[:1] * number
    if len(bases) != number or (alone and len(set(bases)) > 1):
        what = "does not tell the rates of this run's param groups"
        raise fail(one.path, what, f"{number} groups of this rank", f"{len(bases)}")
    return SavedRates(source, _position(one), list(zip(bases, last, strict=True)))


def _position(saved: SavedScheduler) -> int:
    position = saved.counters.get("last_epoch")
    if type(position) is not int or position < 0:
        raise fail(saved.path, "does not say how many steps it has made", "last_epoch, from 0 on", repr(position)[:80])
    return position


def _first_file(listing: NanotronListing) -> str:
    """The first of the scheduler's files. Raises what is wrong with them, CheckpointDamaged where there is none."""
    faults = [fault for fault in listing.faults if "/lr_scheduler" in fault.where]
    raise_faults(faults, subject=f"checkpoint {listing.folder}")
    if not listing.schedulers:
        raise fail(f"{listing.folder}/lr_scheduler", "holds no scheduler", "the file of each rank", "none")
    return next(iter(listing.schedulers.values()))


def saved_arguments(saved: SavedRates) -> tuple[object, int]:
    """The arguments and the number of steps that the saving run's scheduler was built for, from its config.yaml."""
    metadata = saved.source.metadata
    texts = metadata.config if metadata is not None else {}
    values = {name: _value(texts[f"{_ARGUMENTS}.{name}"]) for name in _FIELDS if f"{_ARGUMENTS}.{name}" in texts}
    steps = _value(texts.get(_STEPS, ""))
    missing = [name for name in _FIELDS if name not in values]
    if missing or not isinstance(steps, int):
        fault = UnsupportedLayout.fault(
            f"{saved.source.folder}/{CONFIG}",
            "does not say how the schedule was shaped, which is in no other file",
            f"{_ARGUMENTS} and {_STEPS}",
            f"no {', '.join(missing) or _STEPS}",
            mend="restore the config.yaml of that run, or leave out the flag that asks for the checkpoint's schedule",
        )
        raise error_of([fault], subject="resuming the schedule")
    return SimpleNamespace(**values), steps


def _value(text: str) -> object:
    """A scalar of YAML as nanotron writes it."""
    plain = text.strip("'\"")
    if plain in ("null", "~", ""):
        return None
    for kind in (int, float):
        try:
            return kind(plain)
        except ValueError:
            continue
    return plain


def _floats(saved: SavedScheduler, key: str) -> tuple[float, ...]:
    values = [row[key] for row in saved.groups]
    if not all(type(value) in (int, float) for value in values):
        raise fail(saved.path, f"has a {key} that is no list of rates", "numbers", str(values)[:80])
    return tuple(float(str(value)) for value in values)


def report_schedule(load: Load, scheduler: Scheduler, saved: SavedRates | None, before: Sequence[float]) -> None:
    """What became of the schedule; `before` are the base rates that this run built it with."""
    policy, why = load.policy, because(load.policy, "schedule")
    position = saved.position if saved is not None else None
    load.row("position", scheduler.last_epoch, because(policy, "position"), saved=position, run=0)
    if saved is not None and policy.keeps_position and saved.source.step not in (None, position):
        load.warnings.append(
            f"the scheduler was saved at step {position} and the checkpoint at iteration {saved.source.step}: the "
            f"learning rates go on from step {position} (without ds_reshard, nanotron adds a step at each resume)"
        )
    bases = saved.bases if saved is not None and saved.bases else [None] * len(before)
    for number, (base, run, used) in enumerate(zip(bases, before, scheduler.base_lrs, strict=True)):
        load.row(f"group {number} initial lr", used, why, saved=base, run=run)
        if run != used and policy.scheduler == "host":
            load.warnings.append(
                f"group {number}: the initial learning rate is {used}, the checkpoint's; this run's {run} is not used: "
                "add --override-opt-param-scheduler to use it"
            )
    last = saved.last if saved is not None and saved.last else [None] * len(before)
    groups = scheduler.optimizer.param_groups  # type: ignore[attr-defined]
    for number, (rate, group) in enumerate(zip(last, groups, strict=True)):
        load.row(f"group {number} lr", group["lr"], why, saved=rate)
    if load.trainer is None:
        load.publish()
