"""What a script gave to `prepare`: optimizer and scheduler as plain facts, before anything is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ds_reshard.resume.schedulers import innermost

NONE, DUMMY, REAL, CALLABLE, TORCH = "none", "dummy", "real", "callable", "torch"
DEFAULT_LR, DEFAULT_WEIGHT_DECAY = 1e-3, 0
_DEEPSPEED = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
# The one of transformers that is no torch scheduler: accelerate returns it as it is, and saves nothing of it.
_UNKNOWN = "GreedyLR"


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
    arguments: Mapping[str, object] = field(default_factory=dict)
    groups: tuple[Mapping[str, object], ...] = ()
    begun: tuple[Mapping[str, object], ...] = ()
    sizes: tuple[int | None, ...] = ()
    prepared: bool = False
    scheduled: bool = False
    written: tuple[Mapping[str, object], ...] = ()
    edited: bool = False
    frozen: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenScheduler:
    """`kind` is none, dummy (a `DummyScheduler`), callable (one that has `lr_scheduler_callable`), or torch.

    DeepSpeed's own scheduler objects count as torch; `over` is the innermost optimizer that it was built on.
    """

    kind: str = NONE
    thing: object = None
    over: object = None
    warmup: object = None
    total: object = None

    @property
    def unknown(self) -> bool:
        """Whether accelerate does not know it for a scheduler."""
        return _is(self.thing, _UNKNOWN, module="transformers")

    @property
    def of_deepspeed(self) -> bool:
        """Whether it is an object of DeepSpeed's own, which its engine steps."""
        return any(_is(self.thing, name) for name in _DEEPSPEED)


def given_optimizer(thing: object) -> GivenOptimizer:
    if thing is None:
        return GivenOptimizer()
    if not _is(thing, "DummyOptim"):
        own: list[Mapping[str, object]] = thing.param_groups  # type: ignore[attr-defined]
        return GivenOptimizer(
            kind=REAL,
            thing=thing,
            groups=tuple(map(_without_params, own)),
            sizes=tuple(_size(group["params"]) for group in own),
            prepared=_is(thing, "AcceleratedOptimizer"),
            frozen=_frozen(own),
        )
    params = thing.params  # type: ignore[attr-defined]
    listed: Sequence[object] = params if isinstance(params, (list, tuple)) else ()
    in_groups = bool(listed) and isinstance(listed[0], Mapping)
    groups = tuple(_without_params(group) for group in listed) if in_groups else ({},)  # type: ignore[arg-type]
    sizes = tuple(_size(group["params"]) for group in listed) if in_groups else (_size(params),)  # type: ignore[index]
    begun: tuple[Mapping[str, object], ...] = tuple(getattr(thing, "begun_with", ()))
    live: Sequence[Mapping[str, object]] = getattr(thing, "own_groups", ())
    return GivenOptimizer(
        kind=DUMMY,
        thing=thing,
        arguments=_arguments(thing),
        groups=groups,
        sizes=sizes,
        begun=begun,
        prepared=getattr(thing, "real", None) is not None,
        scheduled=any("initial_lr" in group for group in live),
        written=tuple(
            {name: group[name] for name, value in began.items() if name in group and bool(group[name] != value)}
            for group, began in zip(live, begun, strict=False)
        ),
        frozen=_frozen(live),
        edited=bool(live) and _members(live) != _members(listed if in_groups else [{"params": listed}]),  # type: ignore[arg-type]
    )


def given_scheduler(thing: object) -> GivenScheduler:
    if thing is None:
        return GivenScheduler()
    over = innermost(getattr(thing, "optimizer", None))
    if _is(thing, "DummyScheduler"):
        made = thing.lr_scheduler_callable  # type: ignore[attr-defined]
        return GivenScheduler(
            kind=CALLABLE if made is not None else DUMMY,
            thing=thing,
            over=over,
            warmup=thing.warmup_num_steps,  # type: ignore[attr-defined]
            total=thing.total_num_steps,  # type: ignore[attr-defined]
        )
    return GivenScheduler(kind=TORCH, thing=thing, over=over)


def is_module(thing: object) -> bool:
    return _is(thing, "Module", module="torch.nn")


def is_optimizer(thing: object) -> bool:
    return _is(thing, "DummyOptim") or _is(thing, "Optimizer", module="torch.optim")


def is_scheduler(thing: object) -> bool:
    """What is prepared as one: not what accelerate has made of one before."""
    return (
        any(_is(thing, name) for name in ("DummyScheduler", *_DEEPSPEED))
        or _is(thing, "LRScheduler", module="torch.optim")
        or _is(thing, "_LRScheduler", module="torch.optim")
        or _is(thing, _UNKNOWN, module="transformers")
    )


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
            waiting += [
                part
                for part in held
                if hasattr(part, "optimizer")
                and hasattr(part, "step")
                and hasattr(part, "__dict__")
                and not is_optimizer(part)
            ]


def _arguments(dummy: object) -> Mapping[str, object]:
    """What the user gave; one that was made without the hooks does not tell a default from the same value given."""
    given = getattr(dummy, "given", None)
    if given is not None:
        return dict(given)
    found = dict(getattr(dummy, "kwargs", {}))
    for name, default in (("lr", DEFAULT_LR), ("weight_decay", DEFAULT_WEIGHT_DECAY)):
        value = getattr(dummy, name)
        if value != default:
            found[name] = value
    return found


def _is(thing: object, name: str, *, module: str = "") -> bool:
    return any(cls.__name__ == name and cls.__module__.startswith(module) for cls in type(thing).__mro__)


def parameters_of(optimizer: object) -> list[object]:
    """What an optimizer holds, also a `DummyOptim` that is no torch optimizer; nothing of a generator."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        params = getattr(optimizer, "params", ())
        groups = params if isinstance(params, (list, tuple)) else ()
        groups = groups if groups and isinstance(groups[0], Mapping) else [{"params": groups}]
    held = [group["params"] for group in groups]
    return [parameter for params in held if isinstance(params, (list, tuple)) for parameter in map(_unnamed, params)]


def _frozen(groups: Sequence[Mapping[str, object]]) -> tuple[bool, ...]:
    held: list[Sequence[object]] = [group["params"] for group in groups]  # type: ignore[misc]
    return tuple(bool(params) and not any(getattr(p, "requires_grad", True) for p in params) for params in held)


def _members(groups: Sequence[Mapping[str, object]]) -> list[list[int]]:
    return [[id(_unnamed(parameter)) for parameter in group["params"]] for group in groups]  # type: ignore[attr-defined]


def _unnamed(parameter: object) -> object:
    """A parameter, also of a pair with its name, as `model.named_parameters()` gives them."""
    return parameter[1] if isinstance(parameter, tuple) else parameter


def _size(params: object) -> int | None:
    if isinstance(params, (list, tuple)):
        return len(params)
    return 1 if hasattr(params, "grad_fn") else None


def _without_params(group: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in group.items() if name != "params"}
