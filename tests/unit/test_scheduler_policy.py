"""What a resume policy makes of a script's schedulers, of any class."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, StepLR

from ds_reshard.hosts.deepspeed.resume import SchedulerMap, take_model_step
from ds_reshard.resume.policy import ResumePolicy
from ds_reshard.resume.scheduler_policy import SavedValues, ScheduleResume
from ds_reshard.resume.schedulers import Beginning

GROUP = {"lr": 0.1, "weight_decay": 0.0}


class Minimal(LRScheduler):
    """A scheduler of torch whose state is its position alone."""

    def __init__(self, optimizer: Any, warm: object) -> None:
        self.warm = warm
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return list(self.base_lrs)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}


class Whole(Minimal):
    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "base_lrs": self.base_lrs, "warm": self.warm}


class Counter:
    """A scheduler of an unknown kind."""

    def __init__(self, optimizer: Any, values: object) -> None:
        self.optimizer, self.count, self.values = optimizer, 0, values

    def step(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}


@dataclasses.dataclass
class Data:
    """Equal to each other, and without a hash."""

    gamma: float = 0.5


def _optimizer() -> Any:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def _faults(scheduler: Any, state: dict[str, Any], *, external: bool = False) -> list[str]:
    saved = SavedValues(where="saved", groups={0: GROUP}, scheduler=state)
    policy, begun = ResumePolicy(scheduler="strict"), Beginning(scheduler)
    resume = ScheduleResume(
        policy=policy, scheduler=scheduler, beginning=begun, own_groups=[GROUP], saved=saved, external=external
    )
    return [fault.where for fault in resume.faults()]


@pytest.mark.parametrize("external", [False, True])
def test_strict_passes_no_value_that_the_saved_state_has_not(external: bool) -> None:
    scheduler = Minimal(_optimizer(), 50)
    assert "scheduler: warm" in _faults(scheduler, {"last_epoch": 4}, external=external)
    whole = Whole(_optimizer(), 50)
    assert not _faults(whole, {**whole.state_dict(), "last_epoch": 4}, external=external)


def test_strict_compares_an_iterator_without_taking_from_it() -> None:
    endless = itertools.cycle([0.1, 0.2])
    assert "scheduler: values" in _faults(Counter(SimpleNamespace(param_groups=[GROUP]), endless), {"count": 0})
    assert next(endless) == 0.1


@pytest.mark.parametrize(("theirs", "same"), [({1: (2.0, 3)}, True), ({1: [2, 3]}, True), ({"1": [2.0, 3]}, False)])
def test_strict_compares_values_as_python_does(theirs: object, same: bool) -> None:
    scheduler = Whole(_optimizer(), {1: [2.0, 3]})
    assert _faults(scheduler, {**scheduler.state_dict(), "warm": theirs}) == ([] if same else ["scheduler: warm"])


def test_strict_compares_tensors() -> None:
    scheduler = Whole(_optimizer(), [torch.tensor([1.0, 2.0])])
    for saved, same in (([1.0, 2.0], True), ([1.0, 3.0], False)):
        found = _faults(scheduler, {**scheduler.state_dict(), "warm": [torch.tensor(saved)]})
        assert found == ([] if same else ["scheduler: warm"])


@pytest.mark.parametrize("known", [{0: GROUP}, {0: GROUP, 1: GROUP}])
def test_checkpoint_without_the_optimizer_takes_all_param_groups_or_none(known: dict[int, Any]) -> None:
    """A param group whose members were saved with different values has none of the checkpoint's."""
    scheduler = StepLR(_optimizer(), 3)
    state = {**scheduler.state_dict(), "last_epoch": 4}
    resume = ScheduleResume(
        policy=ResumePolicy(scheduler="checkpoint", optimizer="skip"),
        scheduler=scheduler,
        beginning=Beginning(scheduler),
        own_groups=[GROUP, GROUP],
        saved=SavedValues(where="saved", groups=known, scheduler=state),
    )
    faults = [(fault.error, fault.where) for fault in resume.faults()]
    assert faults == ([] if len(known) == 2 else [("ParamGroupMismatch", "param group 1")])


def test_what_is_noted_of_schedulers_is_by_identity_and_as_long_as_they_live() -> None:
    noted: SchedulerMap[int] = SchedulerMap()
    one, other = Data(), Data()
    noted[one], noted[other] = 1, 2
    assert list(noted.values()) == [1, 2] and noted.pop(one) == 1 and one not in noted
    noted[one] = 3
    assert [id(key) for key in noted] == [id(other), id(one)]
    del other
    gc.collect()
    assert list(noted.values()) == [3] and len(noted) == 1


class Call(dict[str, Any]):
    """An update as DeepSpeed makes it."""

    def __call__(self) -> None:
        try:
            self["self"].lr_scheduler.step()
        except TypeError:
            self["self"].lr_scheduler.step(8)


class Steady:
    """A scheduler without attributes that can be set."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps: list[object] = []

    def step(self, epoch: object = None) -> None:
        self.steps.append(epoch)
        if len(self.steps) > 1:
            raise TypeError("of its own")


class Snapshot(StepLR):
    """Keeps its own state as it steps."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        self.kept = dict(vars(self))


def test_an_update_leaves_the_scheduler_as_it_is() -> None:
    steady = Steady()
    engine = SimpleNamespace(lr_scheduler=steady, global_steps=1)
    take_model_step(Call(self=engine))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="of its own"):
        take_model_step(Call(self=engine))  # type: ignore[arg-type]
    assert steady.steps == [None, None] and engine.lr_scheduler is steady

    optimizer = _optimizer()
    snapshot = Snapshot(optimizer, 3)
    optimizer.step()
    take_model_step(Call(self=SimpleNamespace(lr_scheduler=snapshot, global_steps=1)))  # type: ignore[arg-type]
    assert "step" not in snapshot.kept
