"""A folder of another format as a load of DeepSpeed reads it, without an engine: every tensor, under any names."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch
from nanotron_builder import STEP, Run, values, write

from ds_reshard.formats.zero.flat import whole_placement
from ds_reshard.hosts.deepspeed.find_checkpoint import Found, look
from ds_reshard.hosts.deepspeed.foreign import ForeignCheckpoint
from ds_reshard.hosts.deepspeed.load_targets import RUN, Wants
from ds_reshard.model.index import Index
from ds_reshard.model.layout import TensorKey
from ds_reshard.model.region import Box, Region

RUNS = [Run(dp=2, tp=2), Run(dp=2, pp=2, masters=False)]


def looked(folder: Path, names: str | None = None) -> Found:
    return look(str(folder), None, optimizer=True, universal=False, names=names)


def held(index: Index, key: TensorKey) -> bytes:
    """The bytes of a tensor, from wherever its pieces lie."""
    place = index.layout[key]
    whole = Region(box=Box.whole(place.shape), start=0, stop=prod(place.shape))
    data = bytearray(place.numel * place.dtype.itemsize)
    for at, extent in index.locate(key, whole):
        begin = at * place.dtype.itemsize
        with open(extent.path, "rb") as file:
            file.seek(extent.byte_offset)
            data[begin : begin + extent.nbytes] = file.read(extent.nbytes)
    return bytes(data)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("run", RUNS, ids=["masters", "fp32"])
@pytest.mark.parametrize("renamed", [False, True])
def test_every_tensor_is_found(run: Run, renamed: bool, tmp_path: Path) -> None:
    """Weights, masters and moments; a weight that is its own master is both."""
    truth = values(run)
    new = {name: f"model.{name}" if renamed else name for name, _ in truth}
    names = tmp_path / "map.json"
    names.write_text(json.dumps(new))
    found = looked(write(run, tmp_path / "saved"), str(names) if renamed else None)
    assert found.faults == () and isinstance(found.checkpoint, ForeignCheckpoint) and found.tag == str(STEP)
    index = found.checkpoint.open().index
    masters = {(name, "fp32"): one for (name, kind), one in truth.items() if kind == "weight" and not run.masters}
    expected = {(new[name], kind): one for (name, kind), one in {**truth, **masters}.items()}
    assert {(key.name, key.kind) for key in index.layout.placements} == set(expected)
    for key in index.layout.placements:
        assert held(index, key) == bits(expected[key.name, key.kind]), key
    assert index.faults == []


def test_shards_of_several_saves_are_told(tmp_path: Path) -> None:
    """What a rank opens is compared as the tools compare it."""
    folder = write(Run(dp=2), tmp_path / "saved")
    path = sorted((folder / str(STEP) / "optimizer").glob("*.pt"))[1]
    saved = torch.load(path)
    for state in saved["state"].values():
        state["step"] += 1
    torch.save(saved, path)
    checkpoint = looked(folder).checkpoint
    assert isinstance(checkpoint, ForeignCheckpoint)
    shards = checkpoint.open()
    for family, count in checkpoint.layout.shards.items():
        for shard in range(count):
            shards.index.open(family, shard)
    assert shards.index.faults == []
    said = [fault.line() for fault in shards.compare()]
    assert said and all("step" in line and path.name in line for line in said), said


def test_a_shard_that_is_damaged_is_told_where_it_lies(tmp_path: Path) -> None:
    """By its file, and not as a buffer that is missing."""
    folder = write(Run(dp=2), tmp_path / "saved")
    path = sorted((folder / str(STEP) / "optimizer").glob("*.pt"))[1]
    checkpoint = looked(folder).checkpoint
    path.write_bytes(path.read_bytes()[:-100])
    assert isinstance(checkpoint, ForeignCheckpoint)
    shards = checkpoint.open()
    for family, count in checkpoint.layout.shards.items():
        for shard in range(count):
            shards.index.open(family, shard)
    assert [fault.error for fault in shards.index.faults] == ["CheckpointDamaged"] * len(shards.index.faults) != []
    assert any(path.name in fault.where for fault in shards.index.faults)


def test_a_map_that_is_wrong_is_told_with_all_that_is_wrong(tmp_path: Path) -> None:
    names = tmp_path / "map.json"
    names.write_text(json.dumps({name: name for name, _ in list(values(Run()))[4:]} | {"ghost": "nobody"}))
    found = looked(write(Run(), tmp_path / "saved"), str(names))
    said = " ".join(fault.line() for fault in found.faults)
    assert found.checkpoint is None
    assert "ghost: is in the map, and the source has no such" in said and "is in the source and not in the map" in said


def test_a_failure_before_the_tag_is_known_names_no_tag(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    found = looked(tmp_path)
    assert found.faults and found.tag == ""


def test_nothing_is_wanted_after_a_plan_was_made(tmp_path: Path) -> None:
    """The plan would be of what was wanted before."""
    found = looked(write(RUNS[1], tmp_path / "saved"))
    assert found.checkpoint is not None
    wants = Wants(checkpoint=found.checkpoint)
    key = next(key for key in found.checkpoint.layout.placements if key.kind == "weight")
    shape, dtype = found.checkpoint.layout[key].shape, found.checkpoint.layout[key].dtype
    wants.existing(whole_placement("first", "weight", shape, dtype, family=RUN, buffer="first"), key, prod(shape))
    assert list(wants.layout(1).placements) == [TensorKey("first", "weight")]
    later = whole_placement("later", "weight", shape, dtype, family=RUN, buffer="later")
    with pytest.raises(AssertionError, match="a plan has been made"):
        wants.existing(later, key, prod(shape))
    with pytest.raises(AssertionError, match="a plan has been made"):
        wants.take_buffers([], found.checkpoint.model)
