"""The load that is going on, and what an optimizer was built with: what the seams of one run tell each other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from ds_reshard.errors import ConfigError, raise_faults
from ds_reshard.resume.asked import asked_policy
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.report import Row

Group = dict[str, object]
_MEMORY = "_ds_reshard_nanotron"


@dataclass(slots=True, kw_only=True)
class Load:
    """One start of nanotron's trainer, or one call in a loop of the user's own, where `trainer` is None."""

    policy: ResumePolicy
    trainer: object | None = None
    where: str = "checkpoint"
    rows: list[Row] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


_CURRENT: ContextVar[Load | None] = ContextVar("ds_reshard_nanotron_load", default=None)


def current() -> Load:
    """The start of the trainer that is going on in this thread, else a load of its own."""
    return _CURRENT.get() or Load(policy=asked_policy())


@contextmanager
def in_force(load: Load) -> Iterator[None]:
    """While inside, `current()` is this load."""
    token = _CURRENT.set(load)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@dataclass(slots=True, kw_only=True)
class Memory:
    """What is known of a torch optimizer inside nanotron's: it ends with the optimizer, and is in no checkpoint.

    `outer` is nanotron's own, `run` the values that this run gave each param group, `schedule` the arguments and the
    number of steps that its scheduler was built for, with `lambdas`. `decayed` says that a load has put the saved rate
    of that moment where nanotron's scheduler looks for the initial one.
    """

    outer: object
    run: tuple[Group, ...]
    lambdas: tuple[Callable[[int], float], ...] | None = None
    decayed: bool = False
    schedule: tuple[object, int] | None = None


def remember(outer: object) -> Memory:
    """The memory of an optimizer, begun with the values that its groups have now."""
    base = outer.get_base_optimizer()  # type: ignore[attr-defined]
    found = recall(base)
    if found is None:
        found = Memory(outer=outer, run=tuple(copy.deepcopy(list(values_of(base.param_groups)))))
        setattr(base, _MEMORY, found)
    return found


def recall(base: object) -> Memory | None:
    """The memory of a torch optimizer, None where no seam has met it."""
    found = getattr(base, _MEMORY, None)
    return found if isinstance(found, Memory) else None


def values_of(groups: Sequence[Mapping[str, object]]) -> Iterator[Group]:
    for group in groups:
        yield {name: value for name, value in group.items() if name != "params"}


def config_of(load: Load, path: str) -> object:
    """A value of the trainer's configuration by its dotted name, None where there is none."""
    value: object = getattr(load.trainer, "config", None)
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def refuse_contradiction(load: Load) -> None:
    """A schedule that was asked for and that the trainer is told not to load."""
    if load.trainer is None or getattr(load.trainer, "init_checkpoint_path", None) is None:
        return
    wanted = load.policy.scheduler in ("override", "checkpoint", "strict")
    if wanted and config_of(load, "checkpoints.load_lr_scheduler") is False:
        fault = ConfigError.fault(
            "checkpoints.load_lr_scheduler",
            "contradicts the resume policy",
            f"true, for scheduler {load.policy.scheduler!r}",
            "false",
            mend="checkpoints.load_lr_scheduler: true, or leave out the flag",
        )
        raise_faults([fault], subject="resume policy")
