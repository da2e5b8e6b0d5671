"""diff, fingerprint and Reader between Megatron-LM and transformers: each folder is taken for its conversion."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saved_worlds import Saved
from test_megatron_shape_maps import WORLDS, values

from ds_reshard.dcp import LoadPlanner, Reader
from ds_reshard.operations import convert, diff, fingerprint

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("form", ["model_space", "buckets", "torch"])
@pytest.mark.parametrize("world", WORLDS)
def test_either_folder_is_taken_for_the_other(saved: Saved, tmp_path: Path, world: str, form: str) -> None:
    """diff, fingerprint and Reader, from either side; a changed moment is named."""
    names, _ = WORLDS[world]
    source, zero = saved(world, form), tmp_path / "zero"
    convert(str(source), str(zero), to="zero3", dp=3, names=names)
    for one, other in ((source, zero), (zero, source)):
        told = diff(str(one), str(other), names=names)
        assert told.equal, (told.differing[:4], told.values[:4], told.faults)
        assert any("random states are left out" in note for note in told.notes), told.notes
    prints = [fingerprint(str(source), names=names), fingerprint(str(zero))]
    assert not prints[0].faults
    found, expected = ({(one.name, one.kind): one.fingerprint for one in side.tensors} for side in prints)
    assert len(expected) > 60 and expected.items() <= found.items()
    held = values(zero)
    key = next(name for name, _ in held if re.search(r"\.1\..*(k_proj|c_attn)\.weight", name))
    state = {kind: torch.empty(held[key, kind].shape) for kind in ("exp_avg", "exp_avg_sq")}
    wanted = {"optimizer": {"state": {key: state}}, "model": {key: torch.empty(held[key, "fp32"].shape)}}
    dcp.load(wanted, storage_reader=Reader(source, names=names), planner=LoadPlanner(), no_dist=True)
    assert all(torch.equal(value, held[key, kind]) for kind, value in state.items())
    assert torch.equal(wanted["model"][key], held[key, "fp32"])
    changed = tmp_path / "changed"
    shutil.copytree(zero, changed)
    path = next(changed.rglob("*zero_pp_rank_1_*optim_states.pt"))
    states = torch.load(path, weights_only=False)
    moments = states["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["exp_avg"]
    moments[100] += 1
    torch.save(states, path)
    (one,) = diff(str(source), str(changed), names=names).differing
    assert one.kind == "exp_avg" and (one.name, "exp_avg") in held and one.differing == 1, one
