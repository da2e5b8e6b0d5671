"""`verify_saved` after a save of EasyR1: nothing to say of a good one, the same error on every rank of any other."""

from __future__ import annotations

from pathlib import Path

import fresh
import pytest
import torch

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


@pytest.mark.parametrize("fsdp2", [False, True])
def test_groups_of_ranks_that_hold_the_same_shards(tmp_path: Path, fsdp2: bool) -> None:
    """HSDP: what is read is what the ranks held, each replica is compared, and another size is refused."""
    folder = tmp_path / "folder"
    folder.mkdir()
    told = fresh.run("fsdp_manager_jobs.hsdp", 4, folder=str(folder), fsdp2=fsdp2)
    assert [one["said"] for one in told] == [""] * 4, told
    held = {at: str(fingerprint_of(tensor.contiguous())) for at, tensor in told[0]["held"].items() if tensor.dim()}
    assert {(one.name, one.kind): one.fingerprint for one in fingerprint(str(folder)).tensors} == held
    with pytest.raises(ds_reshard.UnsupportedLayout, match="HSDP"):
        convert(str(folder), str(tmp_path / "out"), to="fsdp", dp=2)
    path = folder / "optim_world_size_4_rank_3.pt"
    saved = torch.load(path, weights_only=False)
    saved["state"]["lm_head.weight"]["exp_avg"]._local_tensor += 1
    torch.save(saved, path)
    with pytest.raises(ds_reshard.CheckpointDamaged, match="is another than rank 1's, which holds the same shard"):
        fingerprint(str(folder))


def test_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    """Also where no process group is there."""
    with pytest.raises(ds_reshard.CheckpointNotFound):
        ds_reshard.verify_saved(tmp_path)
