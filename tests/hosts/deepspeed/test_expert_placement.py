"""Experts of AutoEP as DeepSpeed's placement descriptors allow them: on several ranks, in any order, unevenly.

DeepSpeed's engine writes none of these yet. The folders are synthetic: real ones whose experts are dealt out anew, with
descriptors and maps that DeepSpeed's own functions make.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from grid_cases import Folders, Grid

from ds_reshard.errors import CheckpointDamaged
from ds_reshard.operations import convert, diff, inspect, verify

pytestmark = pytest.mark.distributed

Placement = Sequence[Sequence[int]]
TWICE = [[0, 1, 2], [1, 2, 3]]
EVERYWHERE = [[3, 2, 1, 0], [0, 1, 2, 3]]
UNEVEN = [[2], [3, 0, 1]]
OTHER_ORDER = [[2, 0], [3, 1]]


def autoep(ep: int, dp: int, stage: int | str = 1, dtype: str = "fp32") -> Grid:
    return Grid("autoep", ep=ep, dp=dp, stage=stage, dtype=dtype)


def dealt(folder: Path, grid: Grid, placement: Placement) -> None:
    """Deal out the experts of a saved folder anew: those of each place in the expert-parallel groups, in this order."""
    stage3, parts = grid.stage == 3, grid.dp // grid.ep
    models = sorted(folder.glob("*model_states.pt"))
    models = [path for path in models if "expert" not in path.name]
    ranked = [[rank for rank in range(grid.dp) if rank % grid.ep == place] for place in range(grid.ep)]
    head = torch.load(models[0], weights_only=False)
    (number,) = (n for n, group in enumerate(head["param_shapes"]) if any(".experts." in name for name in group))
    tails = {name: tuple(shape)[1:] for name, shape in head["param_shapes"][number].items()}
    optims = {rank: torch.load(path, weights_only=False) for rank in range(grid.dp) for path in [_optim(folder, rank)]}
    before = [list(one) for one in torch.arange(4).chunk(grid.ep)]
    for field in ("fp32", "exp_avg", "exp_avg_sq"):
        whole: dict[str, torch.Tensor] = {}
        for place, ranks in enumerate(ranked):
            flat = torch.cat([_held(optims[rank], number, field)[0] for rank in ranks])
            sizes = [len(before[place]) * torch.Size(tail).numel() for tail in tails.values()]
            for (name, tail), values in zip(tails.items(), flat[: sum(sizes)].split(sizes), strict=True):
                own = values.view(len(before[place]), *tail)
                whole[name] = torch.cat([whole[name], own]) if name in whole else own
        for place, ranks in enumerate(ranked):
            flat = torch.cat([one[list(placement[place])].flatten() for one in whole.values()])
            size = -(-flat.numel() // (2 * parts)) * 2
            for n, rank in enumerate(ranks):
                _, home, key = _held(optims[rank], number, field)
                home[key] = (flat if stage3 else flat[n * size : (n + 1) * size]).clone()
    for rank, content in optims.items():
        torch.save(content, _optim(folder, rank))
    for rank, path in enumerate(models):
        content = torch.load(path, weights_only=False)
        own = placement[rank % grid.ep]
        content["param_shapes"][number] = {name: torch.Size((len(own), *tail)) for name, tail in tails.items()}
        for layer in content["ds_autoep_layers"]:
            _describe(layer, placement)
        torch.save(content, path)


def _describe(layer: dict[str, Any], placement: Placement) -> None:
    from deepspeed.checkpoint.autoep_affine import autoep_placement_to_affine_map, make_autoep_placement_descriptor

    descriptor = make_autoep_placement_descriptor(4, placement)
    layer["expert_placement"] = descriptor
    params = layer["affine_maps"]["params"]
    for name, said in params.items():
        params[name] = autoep_placement_to_affine_map(descriptor, said["logical_shape"]).to_dict()


def _optim(folder: Path, rank: int) -> Path:
    (path,) = folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return path


def _held(content: dict[str, Any], number: int, kind: str) -> tuple[torch.Tensor, Any, Any]:
    """A flat buffer of a rank, and what holds it under which key."""
    said = content["optimizer_state_dict"]
    if "fp32_flat_groups" in said:
        states = said["optimizer_state_dict"]["state"]
        home, key = (said["fp32_flat_groups"], number) if kind == "fp32" else (states[number], kind)
    else:
        states = said["base_optimizer_state"]["state"]
        home, key = (said["single_partition_of_fp32_groups"], number) if kind == "fp32" else (states[number], kind)
    return home[key].detach(), home, key


@pytest.fixture
def placed(folders: Folders, tmp_path: Path) -> Any:
    def make(grid: Grid, placement: Placement) -> Path:
        folder = Path(shutil.copytree(folders(grid), tmp_path / "placed"))
        dealt(folder / "t", grid, placement)
        return folder

    return make


CASES = [
    (autoep(2, 2), TWICE, autoep(2, 2)),
    (autoep(2, 2), TWICE, autoep(1, 2, 3)),
    (autoep(2, 4), TWICE, autoep(2, 2, 3)),
    (autoep(2, 2, 3), TWICE, autoep(1, 2)),
    (autoep(2, 2), EVERYWHERE, autoep(2, 4)),
    (autoep(2, 2), UNEVEN, autoep(2, 2)),
    (autoep(2, 2, 3), UNEVEN, autoep(2, 2, 3)),
    (autoep(2, 2), OTHER_ORDER, autoep(2, 2)),
    (autoep(1, 2), [[1, 0, 3, 2]], autoep(1, 2)),
]


@pytest.mark.parametrize(("source", "placement", "target"), CASES, ids=str)
def test_experts_load_bit_equal_however_ranks_have_them(
    worlds: Any, placed: Any, source: Grid, placement: Placement, target: Grid
) -> None:
    """At the layout that was saved too: DeepSpeed itself takes experts for dealt out in order."""
    folder = placed(source, placement)
    loaded = worlds[target.ranks].run("grid_jobs.load", grid=target, folder=str(folder), saved_ep=source.ep)
    for rank in loaded:
        assert rank["wrong"] == {}, loaded
        assert (rank["steps"], rank["global_steps"], rank["note"]) == ([1.0], 1, 7)


@pytest.mark.parametrize("stage", [1, 3])
def test_tools_read_each_expert_once(folders: Folders, placed: Any, tmp_path: Path, stage: int) -> None:
    grid = autoep(2, 2, stage)
    folder = placed(grid, TWICE)
    assert not verify(str(folder), deep=True).faults and inspect(str(folder)).faults == ()
    for name, one in (("one", folder), ("other", folders(grid))):
        convert(str(one), str(tmp_path / name), to="dcp")
    found = diff(str(tmp_path / "one"), str(tmp_path / "other"))
    assert found.tensors and {one.state for one in found.tensors} == {"equal"}


def _copies_differ(folder: Path, stage: int) -> Iterator[str]:
    """The second copy of the last element of the first parameter, of an expert that both ranks have."""
    path = _optim(folder / "t", 1)
    content = torch.load(path, weights_only=False)
    values, home, key = _held(content, 1, "exp_avg")
    values[2 * 12 - 1] += 1
    home[key] = values
    torch.save(content, path)
    yield "model.layers.0.mlp.experts.w1[exp_avg]"
    yield "has experts on several expert-parallel ranks, whose copies differ"
    yield "1 "


@pytest.mark.parametrize("stage", [1, 3])
def test_copies_of_an_expert_that_differ_are_named(worlds: Any, placed: Any, tmp_path: Path, stage: int) -> None:
    folder = placed(autoep(2, 2, stage), TWICE)
    texts = list(_copies_differ(folder, stage))
    told = worlds[2].run("grid_jobs.refused", grid=autoep(1, 2), folder=str(folder))
    assert {name for name, _, _ in told} == {"CheckpointDamaged"}, told[0][1]
    assert len({said for _, said, _ in told}) == 1 and all(same for _, _, same in told)
    assert all(text in told[0][1] for text in texts), told[0][1]
    with pytest.raises(CheckpointDamaged, match="whose copies differ"):
        convert(str(folder), str(tmp_path / "out"), to="dcp")
    assert any(texts[1] in str(fault) for fault in verify(str(folder), deep=True).faults)


def test_a_damaged_byte_of_a_further_copy_is_seen(worlds: Any, placed: Any) -> None:
    """No rank has a use for it, and its checksum is that of a whole buffer."""
    folder = placed(autoep(2, 2), TWICE)
    path = _optim(folder / "t", 1)
    values = _held(torch.load(path, weights_only=False), 1, "exp_avg")[0]
    data = bytearray(path.read_bytes())
    at = data.index(values.numpy().tobytes())
    data[at + 12 * 4] ^= 1  # of expert 2, of which rank 0 has the first copy
    path.write_bytes(data)
    told = worlds[2].run("grid_jobs.refused", grid=autoep(1, 2), folder=str(folder))
    assert {name for name, _, _ in told} == {"CheckpointDamaged"}, told[0][1]


def test_inspect_names_a_missing_shard_of_experts(folders: Folders, tmp_path: Path) -> None:
    """At stage 3 no file of an expert says that there are experts: the model file alone does."""
    shutil.copytree(folders(autoep(2, 2, 3)), tmp_path / "saved")
    _optim(tmp_path / "saved" / "t", 1).unlink()
    (fault,) = inspect(str(tmp_path / "saved")).faults
    assert (fault.error, fault.what) == ("CheckpointDamaged", "optim_states files of data-parallel ranks 1 are missing")
