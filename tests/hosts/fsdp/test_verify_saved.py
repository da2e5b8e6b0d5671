"""`verify_saved` after a save of EasyR1: nothing to say of a good one, the same error on every rank of any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from gathered import assert_moments, same_bits

import ds_reshard
from ds_reshard.execution.fingerprint import fingerprint_of
from ds_reshard.operations import convert, fingerprint

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SAID = {
    "truncated": ("CheckpointDamaged", "optim_world_size_2_rank_0.pt"),
    "missing": ("CheckpointDamaged", "extra_state_world_size_2_rank_1.pt: is missing"),
    "foreign": ("CheckpointDamaged", "several world sizes (expected one, found 2, 3)"),
    "swapped": ("FingerprintMismatch", "lm_head.weight[exp_avg] is not what the ranks hold"),
}


def test_what_is_wrong_is_said_on_every_rank(tmp_path: Path) -> None:
    """A frozen tower, bf16, a shard of each parameter on two ranks; a save that the ranks have trained on since."""
    case = {"orig": True, "frozen": True, "dtype": "bfloat16", "damages": ["none", *SAID]}
    told = fresh.run("fsdp_manager_jobs.verified", 2, folder=str(tmp_path), **case)
    assert all(isinstance(one, dict) for one in told), told
    assert told[0] == told[1]
    assert told[0]["none"] == told[0]["files alone"] == ""
    for damage, (kind, text) in SAID.items():
        assert told[0][damage].startswith(kind) and text in told[0][damage], told[0][damage]
    assert told[0]["a later step"].startswith("FingerprintMismatch") and "[step]" in told[0]["a later step"]


@pytest.mark.parametrize(
    ("orig", "size", "tied"),
    [(False, 3, False), (True, 3, True), (False, 2, True), (False, 1, False), (True, 1, False)],
)
def test_a_good_save_passes(tmp_path: Path, orig: bool, size: int, tied: bool) -> None:
    """Flat parameters or original ones, cut where three ranks cut them, or whole under one rank; tied weights."""
    case = {"orig": orig, "frozen": False, "dtype": "float32", "damages": ["none"], "tied": tied}
    for told in fresh.run("fsdp_manager_jobs.verified", size, folder=str(tmp_path), **case):
        assert isinstance(told, dict), told
        assert told["none"] == told["files alone"] == ""
        assert "embed.weight[exp_avg] is not what the ranks hold" in told["a later step"]


@pytest.mark.parametrize("kind", ["checkpointed", "compiled", "ignored"])
def test_a_good_save_of_what_more_than_fsdp_wraps_passes(tmp_path: Path, kind: str) -> None:
    """Activation checkpointing and torch.compile add to names, which is not saved; FSDP1 ignores a module."""
    for good, changed in fresh.run("fsdp_manager_jobs.covered", 2, folder=str(tmp_path), kind=kind):
        assert good == ""
        assert changed.count(" is not what the ranks hold") == 1 and "norm.weight[weight] is not what" in changed


@pytest.mark.parametrize("fsdp2", [False, True])
def test_groups_of_ranks_that_hold_the_same_shards(tmp_path: Path, fsdp2: bool) -> None:
    """HSDP: what is read is what the ranks held, each replica is compared; three groups load what two have saved."""
    folder, out = tmp_path / "folder", tmp_path / "out"
    folder.mkdir()
    told = fresh.run("fsdp_manager_jobs.hsdp", 4, folder=str(folder), fsdp2=fsdp2)
    assert [one["said"] for one in told] == [""] * 4, told
    expected = told[0]["held"]
    assert_moments(expected)
    held = {at: str(fingerprint_of(tensor.contiguous())) for at, tensor in expected.items() if tensor.dim()}
    assert {(one.name, one.kind): one.fingerprint for one in fingerprint(str(folder)).tensors} == held
    convert(str(folder), str(out), to="fsdp", dp=6)
    assert {(one.name, one.kind): one.fingerprint for one in fingerprint(str(out)).tensors} == held
    convert(str(out), str(tmp_path / "back"), to="fsdp", dp=4)
    for rank in range(4):
        paths = [at / f"optim_world_size_4_rank_{rank}.pt" for at in (folder, tmp_path / "back")]
        assert _parts(paths[0]) == _parts(paths[1])
    if not fsdp2:
        _assert_loaded(tmp_path, told[0])
        _assert_flat(tmp_path, held)
    for dp in (2, 5):
        with pytest.raises(ds_reshard.UnsupportedLayout, match=f"{dp} are no number of them"):
            convert(str(folder), str(tmp_path / "refused"), to="fsdp", dp=dp)
    path = folder / "optim_world_size_4_rank_3.pt"
    saved = torch.load(path, weights_only=False)
    saved["state"]["lm_head.weight"]["exp_avg"]._local_tensor += 1
    torch.save(saved, path)
    with pytest.raises(ds_reshard.CheckpointDamaged, match="is another than rank 1's, which holds the same shard"):
        fingerprint(str(folder))


def _parts(path: Path) -> dict[tuple[str, str], object]:
    """What a rank's file holds of each DTensor, and where it lies: mesh, groups, coordinates and bytes."""
    saved, told = torch.load(path, weights_only=False)["state"], {}
    for name, states in saved.items():
        for kind, value in states.items():
            if value.dim():
                mesh = value._spec.mesh
                lies = (mesh._layout, mesh._dim_group_names, mesh._coordinate_on_dim, mesh._rank, mesh.mesh.tolist())
                told[name, kind] = (lies, value.placements, str(fingerprint_of(value._local_tensor.contiguous())))
    return told


def _assert_loaded(folder: Path, saved: dict[str, Any]) -> None:
    """Three groups of two ranks hold what two groups have saved, by EasyR1's load and by torch's of its own folder."""
    convert(str(folder / "folder"), str(folder / "dcp"), to="dcp", dp=2)
    case = {"folder": str(folder / "out"), "dcp_folder": str(folder / "dcp"), "fsdp2": False}
    for one in fresh.run("fsdp_manager_jobs.hsdp_load", 6, **case):
        assert isinstance(one, dict) and one["said"] == "", one
        assert one["held"].keys() == one["dcp"].keys() == saved["held"].keys()
        for at, tensor in saved["held"].items():
            assert same_bits(one["held"][at], tensor) and same_bits(one["dcp"][at], tensor), at
        assert one["losses"] == pytest.approx(saved["losses"], rel=1e-4)


def _assert_flat(folder: Path, held: dict[tuple[str, str], str]) -> None:
    """verl's files of the same: for three groups, and for two again, where each rank's file is the one it was."""
    source, out, back = (str(folder / name) for name in ("folder.flat", "flat.out", "flat.back"))
    convert(source, out, to="fsdp", dp=6)
    convert(out, back, to="fsdp", dp=4)
    for at in (source, out):
        assert {(one.name, one.kind): one.fingerprint for one in fingerprint(at).tensors} == held
    for rank in range(4):
        one, other = (torch.load(f"{at}/optim_world_size_4_rank_{rank}.pt") for at in (source, back))
        assert one["param_groups"] == other["param_groups"] and one["state"].keys() == other["state"].keys()
        for number, states in one["state"].items():
            assert all(same_bits(value, other["state"][number][kind]) for kind, value in states.items())
    path = f"{source}/optim_world_size_4_rank_3.pt"
    saved = torch.load(path)
    next(iter(saved["state"].values()))["exp_avg"].add_(1)
    torch.save(saved, path)
    with pytest.raises(ds_reshard.CheckpointDamaged, match="is another than rank 1's, which holds the same shard"):
        fingerprint(source)


def test_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    """Also where no process group is there."""
    with pytest.raises(ds_reshard.CheckpointNotFound):
        ds_reshard.verify_saved(tmp_path)
