"""Schedulers on the engine's optimizer that the engine does not know.

Hugging Face's Trainer and accelerate keep such schedulers themselves, and load their state after
`engine.load_checkpoint` (transformers/trainer.py, `_load_optimizer_and_scheduler`; accelerate/checkpointing.py,
`load_accelerator_state`): what a policy decided would be undone there. So the next state that such a scheduler is
given is taken by the policy: the position from the state, the schedule from this run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch.optim.lr_scheduler import LRScheduler

Taker = Callable[["LRScheduler", Mapping[str, object]], None]


def unowned(engine: DeepSpeedEngine) -> list[LRScheduler]:
    """The torch schedulers whose optimizer is the engine's, but for the engine's own and those inside another."""
    from torch.optim.lr_scheduler import LRScheduler

    base = _innermost(engine.optimizer)
    if base is None:
        return []
    found = [
        thing for thing in gc.get_objects()
        if issubclass(type(thing), LRScheduler) and _innermost(getattr(thing, "optimizer", None)) is base
    ]  # fmt: skip
    inside = {id(engine.lr_scheduler)}
    for thing in (*found, engine.lr_scheduler):
        inside |= {id(part) for part in getattr(thing, "_schedulers", ())}
    return [thing for thing in found if id(thing) not in inside]


def _innermost(optimizer: object) -> object:
    """The torch optimizer below any number of wrappers, which all call what they wrap `optimizer`."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def take_next_state(scheduler: LRScheduler, taker: Taker) -> None:
    """Give the state that `scheduler` is next asked to load to `taker` instead.

    Its class is replaced until then: an attribute of the object would be part of its `state_dict`.
    """
    cls = type(scheduler)
    if getattr(cls, "_ds_reshard_taken", False):
        leave(scheduler)
        cls = type(scheduler)

    def load_state_dict(self: LRScheduler, state_dict: Mapping[str, object]) -> None:
        self.__class__ = cls
        taker(self, state_dict)

    def reduce(self: LRScheduler, protocol: int) -> object:
        self.__class__ = cls
        return cls.__reduce_ex__(self, protocol)

    names = {
        "load_state_dict": load_state_dict, "__reduce_ex__": reduce, "_ds_reshard_taken": True,
        "__module__": cls.__module__,
    }  # fmt: skip
    scheduler.__class__ = type(cls.__name__, (cls,), {**names, "__qualname__": cls.__qualname__})


def leave(scheduler: LRScheduler) -> None:
    """Undo `take_next_state`, where it has not come to its end."""
    if getattr(type(scheduler), "_ds_reshard_taken", False):
        scheduler.__class__ = type(scheduler).__mro__[1]
