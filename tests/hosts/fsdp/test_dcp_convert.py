"""`convert --to dcp`: folders that stock torch.distributed.checkpoint loads, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from gathered import assert_same, gathered, same_bits
from saves import UNIVERSAL, Saves
from test_dcp_reader import EVERYTHING, TIED, assert_loaded

import ds_reshard
from ds_reshard.operations import convert, diff, fingerprint, inspect, verify

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROWS: list[tuple[Run, Model, int, int, dict[str, Any]]] = [
    (Run(2, 4), Model(groups=2), 3, 2, {"flat": True}),
    (Run(3, 2, "fp32", {"sub_group_size": 60}), EVERYTHING, 2, 3, {}),
    (Run(1, 2), TIED, 1, 2, {}),
]


@pytest.mark.parametrize(("run", "model", "files", "ranks", "how"), ROWS, ids=lambda value: str(value))
def test_torch_itself_loads_what_was_converted(
    worlds: Any, saves: Saves, tmp_path: Path, run: Run, model: Model, files: int, ranks: int, how: Any
) -> None:
    folder, saved = saves(run, model)
    out = tmp_path / "out"
    done = convert(str(folder), str(out), to="dcp", dp=files)
    assert done.complete and len(list(out.glob("*.distcp"))) == files
    loaded = worlds[ranks].run("dcp_jobs.load", folder=str(out), model=model, torchs=True, **how)
    assert_loaded(saved, loaded)
    assert verify(str(out), deep=True).clean and not inspect(str(out)).faults
    found = diff(str(folder), str(out))
    assert not found.differing and not found.values
    prints = {(one.name, one.kind): one.fingerprint for one in fingerprint(str(out)).tensors}
    manifest = json.loads((out / "ds_reshard.json").read_text())
    written = {(one["name"], one["kind"]): one["fingerprint"] for one in manifest["tensors"]}
    tied = {"head.weight"} if model.tied else set()  # told under its own name, and written once
    assert written == {key: found for key, found in prints.items() if key[0] not in tied}
    (out / "strange").write_bytes(b"")
    assert [fault.what for fault in verify(str(out)).faults] == ["is not in the manifest"]


def test_zero_to_fsdp2_to_zero_goes_on(worlds: Any, saves: Saves, tmp_path: Path) -> None:
    """ZeRO 2 on four ranks, FSDP2 on three, ZeRO 3 on two: the same tensors all the way, and the losses of one run."""
    run, model = Run(2, 4, "fp32"), Model(groups=2, scheduler=False)
    folder, saved = saves(run, model)
    convert(str(folder), str(tmp_path / "dcp"), to="dcp", dp=3)
    first = saved[0]["steps"][0]
    worlds[3].run(
        "dcp_jobs.resume", folder=str(tmp_path / "dcp"), model=model, first=first, steps=0, out=str(tmp_path / "saved")
    )
    for to, target in (("zero3", Run(3, 2, "fp32")), ("zero1", Run(1, 3, "fp32"))):
        out = tmp_path / to
        convert(str(tmp_path / "saved"), str(out), to=to, dp=target.dp)
        expected = _prints(str(folder), "fp32")
        assert expected and _prints(str(out), "fp32") == expected == _prints(str(tmp_path / "saved"), "weight")
        loaded = worlds[target.dp].run("load", run=target, model=model, folder=str(out), more=2, hooks=False)
        assert_same(saved, loaded)
        assert loaded[0]["later"] == pytest.approx(saved[0]["later"], abs=1e-5)


def test_each_framework_trains_on_where_the_other_stopped(worlds: Any, saves: Saves, tmp_path: Path) -> None:
    """A step under FSDP2, and one under DeepSpeed: the losses of the run that went on without a break."""
    run, model = Run(2, 4, "fp32"), Model(groups=2, scheduler=False)
    folder, saved = saves(run, model)
    convert(str(folder), str(tmp_path / "dcp"), to="dcp")
    first = saved[0]["steps"][0]
    losses = worlds[3].run(
        "dcp_jobs.resume", folder=str(tmp_path / "dcp"), model=model, first=first, steps=1, out=str(tmp_path / "saved")
    )
    convert(str(tmp_path / "saved"), str(tmp_path / "zero"), to="universal")
    target = Run(3, 2, "fp32", config=UNIVERSAL)
    loaded = worlds[2].run("load", run=target, model=model, folder=str(tmp_path / "zero"), more=1, hooks=False)
    assert [*losses[0], *loaded[0]["later"]] == pytest.approx(saved[0]["later"], abs=1e-4)
    assert loaded[0]["steps"][0] == first + 1


def _prints(folder: str, master: str) -> dict[tuple[str, str], str | None]:
    """The fingerprints of masters and states, the masters under one name."""
    tensors = fingerprint(folder).tensors
    return {
        (one.name, "master" if one.kind == master else one.kind): one.fingerprint
        for one in tensors
        if one.kind == master or one.kind != "weight"
    }


def test_what_accelerate_gathers_on_one_rank_is_converted(worlds: Any, tmp_path: Path) -> None:
    """FULL_STATE_DICT of FSDP2: a file of weights, and an optimizer that names its parameters, in two groups."""
    folder, model = tmp_path / "accelerate", Model(groups=2, scheduler=False)
    how = {"model": model, "kind": "FULL_STATE_DICT"}
    held = worlds[2].run("dcp_jobs.accelerates", folder="", out=str(folder), **how)[0]
    assert {path.name for path in folder.iterdir()} == {"pytorch_model_fsdp.bin", "optimizer.bin"}
    told = inspect(str(folder))
    assert not told.faults and len(told.groups) == 2 and verify(str(folder), deep=True).clean
    convert(str(folder), str(tmp_path / "zero"), to="zero2", dp=3)
    loaded = worlds[3].run("load", run=Run(2, 3, "fp32"), model=model, folder=str(tmp_path / "zero"), hooks=False)
    expected = {(n, "fp32" if kind == "weight" else kind): t for (n, kind), t in held.items() if kind != "step"}
    found = gathered(loaded)
    assert found.keys() == expected.keys()
    assert all(same_bits(found[key], tensor.view(-1)) for key, tensor in expected.items())
    for rank in worlds[3].run("load", run=Run(3, 3, "fp32"), model=model, folder=str(folder)):
        assert rank["steps"] == loaded[0]["steps"]


def test_a_file_for_each_rank_is_refused_by_name(tmp_path: Path) -> None:
    """As accelerate saves with LOCAL_STATE_DICT."""
    folder = tmp_path / "accelerate"
    folder.mkdir()
    torch.save({"weight": torch.ones(3)}, folder / "pytorch_model_fsdp_rank0.bin")
    with pytest.raises(ds_reshard.UnsupportedLayout, match="a file for each rank, as accelerate saves"):
        inspect(str(folder))


def test_accelerates_folders_both_ways(worlds: Any, saves: Saves, tmp_path: Path) -> None:
    """What accelerate's FSDP2 saved is converted to ZeRO; what ZeRO saved is loaded by accelerate."""
    model = Model(groups=2, scheduler=False)
    held = worlds[2].run("dcp_jobs.accelerates", folder="", model=model, out=str(tmp_path / "accelerate"))[0]
    told = inspect(str(tmp_path / "accelerate"))
    assert not told.faults and len(told.groups) == 2 and verify(str(tmp_path / "accelerate"), deep=True).clean
    convert(str(tmp_path / "accelerate"), str(tmp_path / "zero"), to="zero2", dp=3)
    target = Run(2, 3, "fp32")
    loaded = gathered(worlds[3].run("load", run=target, model=model, folder=str(tmp_path / "zero"), hooks=False))
    expected = {(n, "fp32" if kind == "weight" else kind): t for (n, kind), t in held.items() if kind != "step"}
    assert loaded.keys() == expected.keys()
    assert all(same_bits(loaded[key], tensor.view(-1)) for key, tensor in expected.items())

    convert(str(tmp_path / "zero"), str(tmp_path / "back"), to="accelerate", dp=2)
    for rank in worlds[3].run("dcp_jobs.accelerates", folder=str(tmp_path / "back"), model=model):
        assert rank.keys() == held.keys() and all(same_bits(rank[key], held[key]) for key in held)
