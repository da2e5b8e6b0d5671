"""A `DummyOptim` while the hooks are on: a torch optimizer that has no engine yet."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from accelerate.utils import DummyOptim
from jobs import forget_accelerate
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import ds_reshard


@pytest.fixture(autouse=True)
def hooks() -> Iterator[None]:
    with ds_reshard.install("accelerate"):
        yield


@pytest.fixture
def net() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


def test_it_is_a_dummy_optim_and_a_torch_optimizer(net: torch.nn.Module) -> None:
    """A generator is read once; groups, defaults and `params` are there."""
    made = DummyOptim(net.parameters(), lr=0.1, weight_decay=0.2)
    assert isinstance(made, DummyOptim) and isinstance(made, torch.optim.Optimizer)
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in made.param_groups] == [(2, 0.1, 0.2)]
    assert len(made.params) == 2 and made.defaults["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("method", ["step", "state_dict", "load_state_dict"])
def test_what_needs_an_optimizer_is_an_error_before_prepare(net: torch.nn.Module, method: str) -> None:
    made = DummyOptim(net.parameters(), lr=0.1)
    with pytest.raises(ds_reshard.PrepareError, match=rf"DummyOptim.{method}: called before prepare.*(\n.*)*To mend: "):
        getattr(made, method)(*([{}] if method == "load_state_dict" else []))


def test_zero_grad_before_prepare_is_that_of_any_optimizer(net: torch.nn.Module) -> None:
    made = DummyOptim(net.parameters(), lr=0.1)
    net(torch.ones(3)).sum().backward()
    made.zero_grad()
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_group_that_is_added_is_prepared_too(net: torch.nn.Module) -> None:
    made = DummyOptim([net.weight], lr=0.1)
    made.add_param_group({"params": net.bias, "lr": 0.5})
    assert [group["lr"] for group in made.param_groups] == [0.1, 0.5]
    assert made.params[1] == {"params": [net.bias], "lr": 0.5}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_it_can_be_copied(net: torch.nn.Module, copied: object) -> None:
    """With the scheduler's mark on its `step`, which is not part of the copy."""
    made = DummyOptim(net.parameters(), lr=0.1)
    LambdaLR(made, lambda step: 0.5)
    other = copied(made)  # type: ignore[operator]
    assert type(other) is type(made) and other.param_groups[0]["lr"] == 0.05 and other.given == {"lr": 0.1}


def test_momentum_is_cycled_where_the_optimizer_has_betas(net: torch.nn.Module) -> None:
    made = DummyOptim(net.parameters(), lr=0.1)
    OneCycleLR(made, max_lr=0.2, total_steps=10)
    assert made.param_groups[0]["betas"] == (0.95, 0.999)


def test_a_consumed_generator_is_refused(net: torch.nn.Module) -> None:
    consumed = net.parameters()
    list(consumed)
    with pytest.raises(ds_reshard.PrepareError, match="gives them once"):
        DummyOptim(consumed, lr=0.1)


def test_a_subclass_stays_what_it_is(net: torch.nn.Module) -> None:
    class Mine(DummyOptim):
        pass

    assert type(Mine(net.parameters())) is Mine


def test_without_deepspeed_it_is_refused(net: torch.nn.Module) -> None:
    """accelerate alone gives it back as it is, and every later use fails in another way."""
    from accelerate import Accelerator

    forget_accelerate()
    try:
        with pytest.raises(ds_reshard.PrepareError, match=r"without DeepSpeed use torch\.optim\.AdamW"):
            Accelerator(cpu=True).prepare(net, DummyOptim(net.parameters(), lr=0.1))
    finally:
        forget_accelerate()


def test_removal_restores_every_attribute() -> None:
    """The objects of accelerate after uninstall are those of before."""
    from accelerate import Accelerator

    ds_reshard.uninstall("accelerate")
    before = dict(vars(DummyOptim)), dict(vars(Accelerator))
    with ds_reshard.install("accelerate"):
        during = dict(vars(DummyOptim)), dict(vars(Accelerator))
    after = dict(vars(DummyOptim)), dict(vars(Accelerator))
    changed = [
        {name for name in one if one[name] is not other[name]} for one, other in zip(before, during, strict=True)
    ]
    assert all(changed)
    assert all(one[name] is other[name] for one, other in zip(before, after, strict=True) for name in one)
    assert [set(one) for one in before] == [set(one) for one in after]
    assert type(DummyOptim([torch.nn.Parameter(torch.ones(1))])) is DummyOptim
