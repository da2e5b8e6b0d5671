"""Samples of what an optimizer was given, compared with what it holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ds_reshard.execution.states import sampled_loads


def _trained() -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    params = [torch.randn(5, 3, requires_grad=True), torch.randn(20_001, requires_grad=True)]
    optimizer = torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}])
    for _ in range(2):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return optimizer, params


def test_what_an_optimizer_was_given_and_holds_is_alike():
    (saved, _), (optimizer, params) = _trained(), _trained()
    state = saved.state_dict()
    state["state"][1]["exp_avg"][0] = torch.nan
    with sampled_loads(SimpleNamespace(optimizer=optimizer)) as samples:
        assert not samples
        optimizer.load_state_dict(state)
        assert samples and samples.differing() == []
        optimizer.state[params[0]]["exp_avg_sq"].mul_(2)
        assert samples.differing() == ["exp_avg_sq"]
        del optimizer.state[params[1]]["exp_avg"]
        assert samples.differing() == ["exp_avg", "exp_avg_sq"]
    assert not samples


@pytest.mark.parametrize("change", [torch.Tensor.zero_, torch.Tensor.normal_])
def test_a_change_of_any_one_parameter_is_seen(change):
    saved, _ = _trained()
    for at in range(2):
        optimizer, params = _trained()
        with sampled_loads(optimizer) as samples:
            optimizer.load_state_dict(saved.state_dict())
            change(optimizer.state[params[at]]["exp_avg"])
            assert samples.differing() == ["exp_avg"]


def test_a_state_in_a_narrower_type_is_the_same_and_one_that_was_moved_away_does_not_count():
    (saved, _), (optimizer, params) = _trained(), _trained()
    with sampled_loads(optimizer) as samples:
        optimizer.load_state_dict(saved.state_dict())
        states = optimizer.state[params[1]]
        states["exp_avg"] = states["exp_avg"].bfloat16()
        states["exp_avg_sq"] = torch.empty(0)
        assert samples.differing() == []
        states["exp_avg"].add_(1)
        assert samples.differing() == ["exp_avg"]


def test_what_is_no_torch_optimizer_is_given_nothing():
    with sampled_loads(SimpleNamespace(state={})) as samples:
        assert not samples and samples.differing() == []
