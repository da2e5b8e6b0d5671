"""Folders of torch.distributed.checkpoint into which several have saved, or whose save did not end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ds_reshard.dcp
from ds_reshard.errors import CheckpointDamaged
from ds_reshard.operations import convert, diff, inspect, verify

pytestmark = pytest.mark.slow


def test_files_that_an_earlier_save_of_more_ranks_has_left_are_no_damage(tmp_path: Path) -> None:
    """torch writes over the folder and removes nothing: `.metadata` names the files of the last save alone."""
    dcp.save({"model": {"more": torch.arange(999.0)}}, checkpoint_id=str(tmp_path / "earlier"))
    folder = tmp_path / "saved"
    dcp.save({"model": {"w": torch.arange(3.0)}}, checkpoint_id=str(folder))
    (folder / "__2_0.distcp").touch()  # of a rank that has nothing to save
    (folder / "__1_0.distcp").write_bytes(2 * (tmp_path / "earlier" / "__0_0.distcp").read_bytes())
    told = verify(str(folder), deep=True)
    assert told.clean and any("not looked at: .metadata, __1_0.distcp, __2_0.distcp" in note for note in told.notes)
    done = convert(str(folder), str(tmp_path / "out"), to="dcp", dp=1)
    assert "left out, as nothing here reads them: __1_0.distcp" in done.notes
    assert diff(str(folder), str(tmp_path / "out")).equal


@pytest.mark.parametrize("mixed", [True, False])
def test_a_folder_of_which_a_save_has_overwritten_some_files_says_so(tmp_path: Path, mixed: bool) -> None:
    """The directory is the earlier save's, and fits. Steps tell where each file has its own."""
    for step in (3.0, 6.0):
        state = {f"w{number}": {"step": torch.tensor(step), "exp_avg": torch.ones(2)} for number in range(4)}
        if not mixed:
            state["w0"]["step"] = torch.tensor(1.0)
        writer = dcp.FileSystemWriter(tmp_path / f"{step:.0f}", thread_count=2)
        weights = {name: torch.ones(2) for name in state}
        dcp.save({"model": weights, "optimizer": {"state": state}}, storage_writer=writer)
    assert not inspect(str(tmp_path / "3")).notes
    shutil.copy(tmp_path / "6" / "__0_1.distcp", tmp_path / "3")
    notes = inspect(str(tmp_path / "3")).notes
    told = "may be of two saves, of which the later did not end, and left the earlier one's .metadata: "
    assert notes == ((f"{told}step 3.0 in __0_0.distcp, step 6.0 in __0_1.distcp",) if mixed else ())


def test_a_directory_for_each_rank_is_no_save_that_did_not_end(tmp_path: Path) -> None:
    """`use_collectives=False`; where there is no directory at all, the save did not end."""
    folder = tmp_path / "step-2"
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=str(folder), use_collectives=False)
    finally:
        dist.destroy_process_group()
    with pytest.raises(ds_reshard.UnsupportedLayout, match=r"for each rank .*save it with use_collectives=True"):
        inspect(str(folder))
    (folder / "__0.metadata").unlink()
    with pytest.raises(ds_reshard.CheckpointNotFound, match="the save did not end"):
        inspect(str(folder))


def test_a_state_that_is_a_dict_and_was_flattened_is_refused(tmp_path: Path) -> None:
    """As bitsandbytes' quantised states: torch makes them states of a parameter that nobody has."""
    state = {"state.w.quantised.absmax": torch.ones(1), "state.w.step": torch.tensor(3.0), "param_groups.w.lr": 0.1}
    dcp.save({"model": {"w": torch.ones(3)}, "optimizer": state}, checkpoint_id=str(tmp_path / "saved"))
    with pytest.raises(ds_reshard.UnsupportedLayout, match=r"w\.quantised: has states, and is in no param group"):
        convert(str(tmp_path / "saved"), str(tmp_path / "out"), to="pytorch")


@pytest.mark.parametrize(
    "ended, cut", [("pytorch_model_fsdp_0", "optimizer_0"), ("optimizer_0", "pytorch_model_fsdp_0")]
)
def test_a_save_of_accelerate_that_ended_in_one_of_its_folders_is_refused(tmp_path: Path, ended: str, cut: str) -> None:
    """The one that is whole is no checkpoint of weights without an optimizer: it was called left out, and converted."""
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=str(tmp_path / "saved" / ended))
    (tmp_path / "saved" / cut).mkdir()
    (tmp_path / "saved" / cut / "__0_0.distcp").write_bytes(b"half")
    for to in ("accelerate", "pytorch", *["safetensors"] * (cut != "optimizer_0")):
        with pytest.raises(ds_reshard.CheckpointNotFound, match=rf"{cut}: has no \.metadata.*{ended} alone"):
            convert(str(tmp_path / "saved"), str(tmp_path / "out"), to=to, dp=2 if to == "accelerate" else None)
    with pytest.raises((ds_reshard.CheckpointNotFound, CheckpointException), match="the save did not end"):
        reader = ds_reshard.dcp.Reader(tmp_path / "saved")
        assert cut == "optimizer_0"
        dcp.load({"optimizer": {"state": {"w": {"step": torch.ones(())}}}}, storage_reader=reader, no_dist=True)
    convert(str(tmp_path / "saved" / ended), str(tmp_path / "out"), to="safetensors")
    if cut == "optimizer_0":  # which decides nothing for the weights alone
        convert(str(tmp_path / "saved"), str(tmp_path / "alone"), to="safetensors")
        assert (tmp_path / "alone" / "model.safetensors").read_bytes() == (
            tmp_path / "out" / "model.safetensors"
        ).read_bytes()


def test_tensors_whose_names_end_as_that_of_zeros(tmp_path: Path) -> None:
    """AWQ and GPTQ name their zero points `qzeros`: a directory has a family by the name of each tensor."""
    held = {"model": {"layers.0.qzeros": torch.arange(8), "zeros": torch.ones(3)}}
    dcp.save(held, checkpoint_id=tmp_path / "saved", no_dist=True)
    convert(str(tmp_path / "saved"), str(tmp_path / "out"), to="torch")
    read = torch.load(tmp_path / "out" / "weight.pt", weights_only=True)
    assert {name: one.tolist() for name, one in read.items()} == {"layers.0.qzeros": [*range(8)], "zeros": [1.0] * 3}


def test_a_parameter_without_the_step_of_the_others_is_damage(tmp_path: Path) -> None:
    """Those of another group, or without states, as a parameter that got no gradient, may lack it."""
    weights = {name: torch.ones(3) for name in ("a", "b", "c", "d")}
    states = {name: {"exp_avg": torch.ones(3), "step": torch.tensor(4.0)} for name in ("a", "b", "c")}
    groups = [{"params": ["a", "b", "d"], "lr": 0.1}, {"params": ["c"], "lr": 0.2}]
    del states["c"]["step"]
    tree = {"model": weights, "optimizer": {"state": states, "param_groups": groups}}
    dcp.save(tree, checkpoint_id=tmp_path / "sound", no_dist=True)
    assert inspect(str(tmp_path / "sound")).faults == ()
    del states["b"]["step"]
    dcp.save(tree, checkpoint_id=tmp_path / "damaged", no_dist=True)
    with pytest.raises(CheckpointDamaged, match="b lacks the step that others of its param group have"):
        convert(str(tmp_path / "damaged"), str(tmp_path / "out"), to="zero1", dp=1)
