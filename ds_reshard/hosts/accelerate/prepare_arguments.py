"""What a script gives to `accelerator.prepare`, as plain facts; and `ds_reshard.prepare`, which gives it in order.

Objects are recognised by the names of their classes: neither torch nor accelerate is imported for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ds_reshard import hooks
from ds_reshard.errors import ConfigError, Fault, PrepareError, raise_faults
from ds_reshard.hosts.accelerate import HOOKS
from ds_reshard.resume.schedulers import PLACE, clock_faults, clock_in, innermost

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import DummyOptim
    from torch.nn import Module

logger = logging.getLogger("ds_reshard")

NONE, DUMMY, REAL, CALLABLE, TORCH = "none", "dummy", "real", "callable", "torch"
DEFAULT_LR, DEFAULT_WEIGHT_DECAY = 1e-3, 0
_DEEPSPEED = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
_SUBJECT = "ds_reshard.prepare"

Group = Mapping[str, object]


def _is(thing: object, name: str, *, module: str = "") -> bool:
    return any(cls.__name__ == name and cls.__module__.startswith(module) for cls in type(thing).__mro__)


def _is_greedy(thing: object) -> bool:
    """The one of transformers that is no torch scheduler: accelerate returns it as it is, and saves nothing of it."""
    return _is(thing, "GreedyLR", module="transformers")


def is_module(thing: object) -> bool:
    return _is(thing, "Module", module="torch.nn")


def is_optimizer(thing: object) -> bool:
    return _is(thing, "DummyOptim") or _is(thing, "Optimizer", module="torch.optim")


def is_scheduler(thing: object) -> bool:
    """What is prepared as one: not what accelerate has made of one before."""
    return (
        any(_is(thing, name) for name in ("DummyScheduler", *_DEEPSPEED))
        or any(_is(thing, name, module="torch.optim") for name in ("LRScheduler", "_LRScheduler"))
        or _is_greedy(thing)
    )


def trains(engine: object) -> bool:
    """Whether DeepSpeed has made an optimizer for an engine."""
    return getattr(engine, "basic_optimizer", None) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOptimizer:
    """`kind` is none, dummy (a `DummyOptim`) or real (a torch optimizer).

    `arguments` are those of a `DummyOptim` that the user gave; `groups` what each param group says itself, `begun` its
    values before any scheduler (empty where there are no groups yet), `sizes` how many parameters it has, None for
    a generator that must not be consumed here. `scheduled` says that a scheduler was built on a `DummyOptim`, `written`
    what it and the script have changed in each param group since, `edited` that their parameters are others.
    `frozen` says of each group whether it has parameters, and none that requires a gradient.
    """

    kind: str = NONE
    thing: object = None
    arguments: Group = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    begun: tuple[Group, ...] = ()
    sizes: tuple[int | None, ...] = ()
    prepared: bool = False
    scheduled: bool = False
    written: tuple[Group, ...] = ()
    edited: bool = False
    frozen: tuple[bool, ...] = ()


def given_optimizer(thing: object) -> GivenOptimizer:
    if thing is None:
        return GivenOptimizer()
    dummy, said = _is(thing, "DummyOptim"), _groups_as_given(thing)
    live: Sequence[Group] = getattr(thing, "own_param_groups", ()) if dummy else said
    begun: tuple[Group, ...] = tuple(getattr(thing, "begun_with", ())) if dummy else ()
    given = [[*map(id, _members(group))] for group in said]
    return GivenOptimizer(
        kind=DUMMY if dummy else REAL,
        thing=thing,
        arguments=_arguments(thing) if dummy else {},
        groups=tuple(map(without_params, said)),
        begun=begun,
        sizes=tuple(_size(group["params"]) for group in said),
        prepared=getattr(thing, "real", None) is not None if dummy else _is(thing, "AcceleratedOptimizer"),
        scheduled=dummy and any("initial_lr" in group for group in live),
        written=tuple(
            {name: group[name] for name, value in began.items() if name in group and bool(group[name] != value)}
            for group, began in zip(live, begun, strict=False)
        ),
        edited=dummy and bool(live) and [[*map(id, _members(group))] for group in live] != given,
        frozen=tuple(map(_is_frozen, live)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenScheduler:
    """A scheduler, or None for none."""

    thing: object = None

    @property
    def kind(self) -> str:
        """None, dummy (a `DummyScheduler`), callable (one that has `lr_scheduler_callable`), or torch: all others."""
        if self.thing is None:
            return NONE
        if not _is(self.thing, "DummyScheduler"):
            return TORCH
        return CALLABLE if getattr(self.thing, "lr_scheduler_callable", None) is not None else DUMMY

    @property
    def over(self) -> object:
        """The innermost optimizer that it was built on."""
        return innermost(getattr(self.thing, "optimizer", None))

    @property
    def unknown(self) -> bool:
        """Whether accelerate does not know it for a scheduler."""
        return _is_greedy(self.thing)

    @property
    def of_deepspeed(self) -> bool:
        """Whether it is an object of DeepSpeed's own, which its engine steps."""
        return any(_is(self.thing, name) for name in _DEEPSPEED)


def parts(scheduler: object) -> Iterator[object]:
    """A scheduler and every scheduler that it holds (`SequentialLR`, `ChainedScheduler`, third-party wrappers)."""
    seen: set[int] = set()
    waiting = [scheduler]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        for value in vars(one).values():
            held = value if isinstance(value, (list, tuple)) else (value,)
            known = [part for part in held if all(hasattr(part, name) for name in ("optimizer", "step", "__dict__"))]
            waiting += [part for part in known if not is_optimizer(part)]


def parameters_of(optimizer: object) -> list[object]:
    """What an optimizer holds, also a `DummyOptim` that is no torch optimizer; nothing of a generator."""
    groups = getattr(optimizer, "param_groups", None) or _groups_as_given(optimizer)
    return [parameter for group in groups for parameter in _members(group)]


def without_params(group: Group) -> dict[str, object]:
    """The values of a param group."""
    return {name: value for name, value in group.items() if name != "params"}


def _groups_as_given(optimizer: object) -> Sequence[Group]:
    """A `DummyOptim` has what it was made with, in groups or not; any other optimizer has its param groups."""
    if not _is(optimizer, "DummyOptim"):
        groups: Sequence[Group] = getattr(optimizer, "param_groups", ())
        return groups
    params = getattr(optimizer, "params", ())
    in_groups = isinstance(params, (list, tuple)) and params and isinstance(params[0], Mapping)
    return params if in_groups else [{"params": params}]


def _arguments(dummy: DummyOptim) -> Group:
    """What the user gave; one that was made without the hooks does not tell a default from the same value given."""
    given = getattr(dummy, "given", None)
    if given is not None:
        return dict(given)
    defaults = {"lr": DEFAULT_LR, "weight_decay": DEFAULT_WEIGHT_DECAY}
    changed = {name: getattr(dummy, name) for name, default in defaults.items() if getattr(dummy, name) != default}
    return {**getattr(dummy, "kwargs", {}), **changed}


def _members(group: Group) -> list[object]:
    """A group's parameters, also of pairs with their names; none of a generator, which must not be consumed here."""
    params = group["params"]
    listed = params if isinstance(params, (list, tuple)) else ()
    return [parameter[1] if isinstance(parameter, tuple) else parameter for parameter in listed]


def _is_frozen(group: Group) -> bool:
    params = _members(group)
    return bool(params) and not any(getattr(one, "requires_grad", True) for one in params)


def _size(params: object) -> int | None:
    if isinstance(params, (list, tuple)):
        return len(params)
    return 1 if hasattr(params, "grad_fn") else None


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
    from accelerate.utils import DummyScheduler

    hooks.install(HOOKS)
    raise_faults(_wrong_arguments(accelerator, model, optimizer, scheduler, dataloader), subject=_SUBJECT)
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    if clock is not None:
        _set_clock(config, clock)
    made = _made_optimizer(config, model, optimizer)
    if scheduler is not None and not is_scheduler(scheduler):  # a function, called with the real optimizer
        scheduler = DummyScheduler(made, lr_scheduler_callable=scheduler)
    for name, thing in {"model": model, "optimizer": made, "scheduler": scheduler}.items():
        logger.info("prepare: %s %s", name, "none" if thing is None else type(thing).__name__)
    loaders = dataloader if isinstance(dataloader, Sequence) else [dataloader]
    engine, ready, driven, *fed = accelerator.prepare(model, made, scheduler, *loaders)
    logger.info(
        "prepare: DeepSpeed trains with %s, at the rates %s",
        type(engine.basic_optimizer).__name__,
        [group["lr"] for group in engine.basic_optimizer.param_groups],
    )
    return Prepared(
        model=engine, optimizer=ready, scheduler=driven, dataloader=tuple(fed) if loaders is dataloader else fed[0]
    )


def _wrong_arguments(
    accelerator: Accelerator, model: object, optimizer: object, scheduler: object, loader: object
) -> Iterator[Fault]:
    if getattr(getattr(accelerator, "state", None), "deepspeed_plugin", None) is None:
        mend = "Accelerator(deepspeed_plugin=DeepSpeedPlugin(...)), or accelerator.prepare"
        yield PrepareError.fault("accelerator", "is not one for DeepSpeed", mend=mend)
    if any(map(trains, getattr(accelerator, "_models", ()))):
        what = "has prepared a model already: accelerator.backward goes to the first one's engine alone"
        yield PrepareError.fault("accelerator", what, mend="make a new Accelerator for each model")
    if not is_module(model):
        what = f"is a {type(model).__name__}, no torch.nn.Module"
        yield PrepareError.fault("model", what, mend="model=torch.nn.Module(...)")
    if isinstance(loader, (Mapping, Iterator)):
        what = f"is a {type(loader).__name__}, which accelerate gives back as it is: every rank would read all of it"
        yield PrepareError.fault("dataloader", what, mend="dataloader=[DataLoader(...), ...]")
    for name, thing, known in (("optimizer", optimizer, is_optimizer), ("scheduler", scheduler, is_scheduler)):
        if thing is not None and not known(thing) and not callable(thing):
            what = f"is a {type(thing).__name__}, neither {name} nor function"
            mend = f"{name}=lambda {'params' if name == 'optimizer' else 'optimizer'}: ..."
            yield PrepareError.fault(name, what, mend=mend)


def _set_clock(config: dict[str, object], clock: str) -> None:
    faults, said = list(clock_faults({"clock": clock})), clock_in(config)
    if not faults and said not in (None, clock):
        what, both = "is given in two places and differs", (f"{said!r} (DeepSpeed JSON)", f"{clock!r} ({_SUBJECT})")
        faults = [ConfigError.fault(f"{PLACE}.clock", what, *both, mend="give it in one place")]
    raise_faults(faults, subject=_SUBJECT)
    section = config.get("ds_reshard")
    own = section if isinstance(section, Mapping) else {}
    config["ds_reshard"] = {**own, "accelerate": {**own.get("accelerate", {}), "clock": clock}}


def _made_optimizer(config: Mapping[str, object], model: Module, optimizer: object) -> object:
    from accelerate.utils import DummyOptim

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None:
        return DummyOptim(trainable) if "optimizer" in config else None
    if is_optimizer(optimizer):
        return optimizer
    made: object = optimizer(trainable)  # type: ignore[operator]
    if not is_optimizer(made):
        what = f"the function gave a {type(made).__name__}"
        mend = "optimizer=lambda params: AdamW(params, lr=...)"
        raise_faults([PrepareError.fault("optimizer", what, mend=mend)], subject=_SUBJECT)
    return made
