"""Rows of the report of a load into Megatron-LM: whose masters and moments are, by what lies in the optimizers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ds_reshard.hosts.megatron.group_values import changed_moments, note_loaded
from ds_reshard.hosts.megatron.report import measured


def _part(*, apart: bool, finer: float, moment: float, loaded: bool) -> SimpleNamespace:
    """An optimizer of 16-bit weights with masters apart, or of fp32 weights that it steps itself."""
    weight = torch.arange(4.0).to(torch.bfloat16 if apart else torch.float32)
    master = weight.float() + finer if apart else weight
    state = {master: {"exp_avg": torch.full((4,), moment)}}
    groups = {"float16_groups": [[weight]], "fp32_from_float16_groups": [[master]], "fp32_from_fp32_groups": [[]]}
    inner = SimpleNamespace(param_groups=[{"params": [master]}], state=state)
    part = SimpleNamespace(optimizer=inner, param_groups=inner.param_groups, **(groups if apart else {}))
    note_loaded(part, loaded)
    return part


@pytest.mark.parametrize(
    ("apart", "finer", "moment", "loaded", "masters", "moments"),
    [
        (True, 1e-3, 1.0, True, "from the checkpoint", "from the checkpoint"),
        (True, 0.0, 0.0, True, "equal to the weights", "zero"),
        (True, 0.0, 1.0, False, "from the loaded weights", "as before this load"),
        (True, 1e-3, 0.0, False, "as before this load", "zero"),
        (False, 0.0, 0.0, True, "from the checkpoint", "zero"),  # the weights themselves
        (False, 0.0, 0.0, False, "from the loaded weights", "zero"),
    ],
)
def test_rows_are_looked_at(apart, finer, moment, loaded, masters, moments):
    part = _part(apart=apart, finer=finer, moment=moment, loaded=loaded)
    left = measured(SimpleNamespace(optimizer=part, random=None))
    assert (left.masters, left.moments) == (masters, moments)


def test_a_rank_without_parameters_says_so():
    left = measured(SimpleNamespace(optimizer=None, random=None))
    assert (left.masters, left.moments) == ("none on this rank", "none on this rank")


@pytest.mark.parametrize(
    ("to", "said"), [(2.0, "not those of the checkpoint"), (0.0, "zero"), (1.0, "from the checkpoint")]
)
def test_moments_that_have_changed_since_are_not_the_checkpoints(to, said):
    part = _part(apart=True, finer=1e-3, moment=1.0, loaded=True)
    (state,) = part.optimizer.state.values()
    state["exp_avg"].fill_(to)
    assert measured(SimpleNamespace(optimizer=part, random=None)).moments == said
    assert changed_moments(part) == ([] if to == 1.0 else ["exp_avg"])
