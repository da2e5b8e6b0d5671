"""What this host touches of Megatron's live objects, as types; and the load that is going on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from ds_reshard.hooks import Call
from ds_reshard.model.context_value import context_value
from ds_reshard.resume.megatron import Schedule
from ds_reshard.resume.policy import ResumePolicy

if TYPE_CHECKING:
    from ds_reshard.hosts.megatron.direct import Taken

Group = dict[str, object]
"""A param group, live or saved: `params` and the values that the optimizer and the scheduler read."""

State = Mapping[str, object]


class TorchOptimizer(Protocol):
    """The optimizer that steps: `torch.optim.Optimizer` or a fused one."""

    param_groups: list[Group]
    state: MutableMapping[object, dict[str, object]]


class Optimizer(Protocol):
    """`MegatronOptimizer` (core/optimizer/optimizer.py): wraps one torch optimizer, or chains others."""

    optimizer: TorchOptimizer | None
    config: object

    def init_state_fn(self, optimizer: object, config: object) -> None: ...

    @property
    def param_groups(self) -> list[Group]: ...

    def reload_model_params(self) -> None: ...

    def load_state_dict(self, state_dict: object) -> None: ...


class Scheduler(Protocol):
    """`OptimizerParamScheduler` (core/optimizer_param_scheduler.py); steps are samples in `megatron.training`."""

    optimizer: Optimizer
    num_steps: int
    override_opt_param_scheduler: bool
    use_checkpoint_opt_param_scheduler: bool

    def get_lr(self, param_group: Group) -> float: ...

    def get_wd(self, param_group: Group) -> float: ...

    def step(self, increment: int) -> None: ...

    def load_state_dict(self, state_dict: State) -> None: ...


def leaves(optimizer: object) -> tuple[Optimizer, ...]:
    """The optimizers that wrap a torch optimizer each, in the order in which `ChainedOptimizer` saves them.

    One that has no parameters on this rank has none inside and is left out.
    """
    return tuple(part for part, _ in with_saved(optimizer, None))


def live_groups(optimizer: Optimizer) -> list[Group]:
    assert optimizer.optimizer is not None, "leaves() leaves out what has no torch optimizer"
    return optimizer.optimizer.param_groups


def with_saved(optimizer: object, state: object) -> Iterator[tuple[Optimizer, object]]:
    """Each of the `leaves` with its saved state, None where that is not there.

    A chain of one saves as if it were not chained; others save a list (`torch`) or a dict by index (`torch_dist`)
    (`ChainedOptimizer.state_dict` and `sharded_state_dict`, core/optimizer/optimizer.py, 0.16.1 to 0.19.2).
    """
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        if getattr(optimizer, "optimizer", None) is not None:
            yield cast(Optimizer, optimizer), state
    elif len(chained) == 1:
        yield from with_saved(chained[0], state)
    else:
        listed = state if isinstance(state, (list, tuple)) and len(state) == len(chained) else None
        keyed = state if isinstance(state, Mapping) else {}
        for index, one in enumerate(chained):
            yield from with_saved(one, listed[index] if listed is not None else keyed.get(index))


def as_number(value: object) -> object:
    """A learning rate may be a tensor (0.18, for CUDA graphs): as a plain number."""
    item = getattr(value, "item", None)
    return item() if callable(item) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a checkpoint says of the run that wrote it; `schedule` is None where nothing is taken from it."""

    release: bool
    iteration: int | None
    arguments: object | None
    schedule: Schedule | None
    scheduler_state: object | None


@dataclass(slots=True, kw_only=True)
class Load:
    """One call of `load_checkpoint`, or of a part's `load_state_dict` in a loop of the user's own.

    `found` is None until a checkpoint has been read, and stays so where there is none. `own_loop` says that Megatron's
    training did not make the call, so that nothing comes after it. `optimizer` and `scheduler` are what the load goes
    into, `where` how messages name the checkpoint. `read_in_place` says that states go by the name of their parameter,
    as in `torch_dist` checkpoints, and are read into the live ones. `another_model` says that it reads the weights of
    `--pretrained-checkpoint`, to which the policy was not meant to apply: it is then `finetune` alone. `matched` are
    the optimizers whose saved groups have been looked at, with these in live order. `before` has the counters from
    before the load, by the names of their rows, `random` the random states that Megatron has read. `groups` are saved
    param groups that lie among the tensors, which Megatron reads with them, and so too late. `models` are the chunks of
    the model, `scanned` the folder whose pickles have passed. `taken` is set where Megatron does not load the tensors,
    `unread` says why it does.
    """

    policy: ResumePolicy
    optimizer: object | None
    scheduler: object | None
    where: str = "checkpoint"
    own_loop: bool = False
    read_in_place: bool = False
    found: Found | None = None
    another_model: bool = False
    before: Mapping[str, int] = field(default_factory=dict)
    random: object = None
    matched: list[tuple[Optimizer, list[Group]]] = field(default_factory=list)
    scanned: str = ""
    taken: Taken | None = None
    unread: str = ""
    groups: list[Group] = field(default_factory=list)
    models: object | None = None
    warnings: list[str] = field(default_factory=list)


_CURRENT: ContextVar[Load | None] = ContextVar("ds_reshard_megatron_load", default=None)
_BUILDING: ContextVar[bool] = ContextVar("ds_reshard_megatron_building", default=False)


def current() -> Load | None:
    """The load of Megatron's training that is going on in this thread, if one is."""
    return _CURRENT.get()


def in_force(load: Load) -> AbstractContextManager[None]:
    """While inside, `current()` is this load."""
    return context_value(_CURRENT, load)


def build_state(call: Call) -> object:
    """While this runs, an optimizer may load its own state to allocate it: that is not a resume."""
    with context_value(_BUILDING, True):
        return call()


def is_building() -> bool:
    return _BUILDING.get()
