"""The load that is going on: what was asked of it, and what it has met so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from ds_reshard.hosts.megatron.live import Group
from ds_reshard.resume.megatron_schedule import Schedule
from ds_reshard.resume.policy import ResumePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a checkpoint says of the run that wrote it; `groups` by leaf optimizer, None where not readable yet."""

    name: str
    release: bool
    iteration: int | None
    arguments: object | None
    schedule: Schedule | None
    scheduler_state: object | None
    groups: Sequence[list[Group] | None]


@dataclass(slots=True, kw_only=True)
class Load:
    """One call of `load_checkpoint`, or of a part's `load_state_dict` in a loop of the user's own.

    `found` is None until a checkpoint has been read, and stays so where there is none. `own_loop` says that
    Megatron's training did not make the call, so that nothing comes after it. `optimizer` and `scheduler` are
    what the load goes into, `where` how messages name the checkpoint. `read_in_place` says that states go by the
    name of their parameter, as in `torch_dist` checkpoints, and are read into the live ones. `another_model` says
    that it reads the weights of `--pretrained-checkpoint`, to which the policy was not meant to apply: it is then
    `finetune` alone. `scanned` is the folder whose pickles have passed.
    """

    policy: ResumePolicy
    optimizer: object | None
    scheduler: object | None
    where: str = "checkpoint"
    own_loop: bool = False
    read_in_place: bool = False
    found: Found | None = None
    another_model: bool = False
    scanned: str = ""
    warnings: list[str] = field(default_factory=list)


_CURRENT: ContextVar[Load | None] = ContextVar("ds_reshard_megatron_load", default=None)
_BUILDING: ContextVar[bool] = ContextVar("ds_reshard_megatron_building", default=False)


def current() -> Load | None:
    """The load of Megatron's training that is going on in this thread, if one is."""
    return _CURRENT.get()


@contextmanager
def in_force(load: Load) -> Iterator[None]:
    """While inside, `current()` is this load."""
    token = _CURRENT.set(load)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def building() -> Iterator[None]:
    """While inside, an optimizer may load its own state to allocate it: that is not a resume."""
    token = _BUILDING.set(True)
    try:
        yield
    finally:
        _BUILDING.reset(token)


def is_building() -> bool:
    return _BUILDING.get()
