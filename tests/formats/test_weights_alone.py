"""Weights alone, of a checkpoint whose optimizer's files are damaged, missing or nameless: a table of format and fault.

Those files decide nothing then, but for ZeRO stage 3 and FSDP's kind, where they are the only ones that hold weights.
"""

from __future__ import annotations

import functools
import io
import pickle
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from nanotron_builder import Run, write
from safetensors.torch import load_file
from test_fsdp_files import saved
from torch.distributed.checkpoint.api import CheckpointException

from ds_reshard.containers.dcp_directory import read_directory
from ds_reshard.dcp import LoadPlanner, Reader
from ds_reshard.errors import ReshardError
from ds_reshard.execution.buffers import torch_dtype
from ds_reshard.operations import convert, plan
from ds_reshard.operations.source import find_listing, open_checkpoint

pytestmark = pytest.mark.slow

FILES = {
    # of the optimizer alone
    "zero1": "*/*optim_states.pt",
    "zero2": "*/*optim_states.pt",
    "bf16": "*/*optim_states.pt",
    "zero3": "*/*optim_states.pt",
    "universal": "*/zero/*/*.pt",
    "pytorch": "optimizer.pt",
    "accelerate": "optimizer_0/*",
    "nanotron": "*/optimizer/*.pt",
    "fsdp": "optim_*.pt",
}
SIZES = {"zero1": 2, "zero2": 3, "zero3": 2, "bf16": 2, "dcp": 2, "accelerate": 2}


def _each(change: Callable[[Path], object]) -> Callable[[list[Path]], None]:
    return lambda files: [change(file) for file in files] and None


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _saved(value: object) -> bytes:
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()


_NOTHING = _saved({})
FAULTS: dict[str, Callable[[list[Path]], None]] = {
    "all are missing": _each(Path.unlink),
    "one is missing": lambda files: files[-1].unlink(),
    "cut": lambda files: _cut(files[0]),
    "of another kind": _each(lambda file: file.write_bytes(b"no file of torch")),
    "empty": _each(lambda file: file.write_bytes(b"")),
    "says nothing": _each(lambda file: file.write_bytes(pickle.dumps({}) if file.name == ".metadata" else _NOTHING)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def folder(kind: str) -> Path:
        at = tmp_path_factory.mktemp(kind)
        if kind == "fsdp":
            return saved(at / kind)
        source = write(Run(dp=2), at / "nanotron")
        if kind != "nanotron":
            convert(str(source), str(at / kind), to=kind, dp=SIZES.get(kind))
        return at / kind

    return folder


def _weights(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    convert(str(folder), str(out), to="safetensors")
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", FILES)
def test_what_is_wrong_with_the_optimizer_decides_no_weights(
    folders: Callable[[str], Path], tmp_path: Path, kind: str, fault: str
) -> None:
    folder, sound = tmp_path / "saved", folders(kind)
    shutil.copytree(sound, folder)
    FAULTS[fault](sorted(folder.glob(FILES[kind])))
    if kind == "zero3":  # the partitions of masters are the weights
        with pytest.raises(ReshardError) as refused:
            open_checkpoint(find_listing(str(folder), None), optimizer=False)
        assert not any("no-load-optim" in one.mend for one in refused.value.faults), "which would end here again"
        with pytest.raises(ReshardError):
            convert(str(folder), str(tmp_path / "out"), to="safetensors")
        return
    expected, found = _weights(sound, tmp_path / "expected"), _weights(folder, tmp_path / "out")
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], one) for name, one in found.items())
    plan(str(folder), to="safetensors")
    if list(folder.glob(FILES[kind])) or kind not in ("pytorch", "fsdp"):  # else it is a checkpoint of weights
        with pytest.raises(ReshardError):
            convert(str(folder), str(tmp_path / "whole"), to="pytorch")


def test_chunks_of_states_decide_no_weights_where_both_lie_in_one_file(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """torch.distributed.checkpoint has one directory for both."""
    folder = tmp_path / "saved"
    shutil.copytree(folders("dcp"), folder)
    directory = read_directory(str(folder))
    for key in (*directory.tensors, *directory.objects):
        tensor = directory.tensors.get(key)
        places = [chunk.place for chunk in tensor.chunks] if tensor is not None else [directory.objects[key]]
        for place in places if key.startswith("optim") else ():
            assert place is not None
            with open(place.path, "r+b") as file:
                file.seek(place.byte_offset)
                file.write(b"\xff" * place.nbytes)
    expected, found = _weights(folders("dcp"), tmp_path / "expected"), _weights(folder, tmp_path / "out")
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], one) for name, one in found.items())
    with pytest.raises(ReshardError):
        convert(str(folder), str(tmp_path / "whole"), to="pytorch")


def _asked(sound: Path) -> dict[str, torch.Tensor]:
    """Empty tensors for the weights of a folder, in the type of the weights: masters are the optimizer's."""
    source = open_checkpoint(find_listing(str(sound), None))
    keys = {key.name: placement for key, placement in source.layout.placements.items() if key.kind == "weight"}
    return {name: torch.full(one.shape, 7.0, dtype=torch_dtype(one.dtype)) for name, one in keys.items()}


def _read(folder: Path, wanted: object, planner: dcp.DefaultLoadPlanner) -> None:
    dcp.load(wanted, storage_reader=Reader(str(folder)), planner=planner)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", [kind for kind in FILES if kind != "zero3"])
def test_a_reader_of_torch_reads_the_model_alone_and_tells_who_asks_for_more(
    folders: Callable[[str], Path], tmp_path: Path, kind: str, fault: str
) -> None:
    folder, sound = tmp_path / "saved", folders(kind)
    shutil.copytree(sound, folder)
    FAULTS[fault](sorted(folder.glob(FILES[kind])))
    expected, found = ({"model": _asked(sound)} for _ in range(2))
    _read(sound, expected, LoadPlanner())
    _read(folder, found, dcp.DefaultLoadPlanner())
    assert all(torch.equal(one, expected["model"][name]) for name, one in found["model"].items())
    if not list(folder.glob(FILES[kind])) and kind in ("pytorch", "fsdp"):  # it is a checkpoint of weights
        return
    if (kind, fault) == ("universal", "one is missing"):  # the file of a master: moments have files of their own
        return
    kinds = {
        name: {kind: torch.zeros(one.shape) for kind in ("exp_avg", "exp_avg_sq")}
        for name, one in _asked(sound).items()
    }
    for state, planner, partial in product((kinds, {}), (LoadPlanner, dcp.DefaultLoadPlanner), (False, True)):
        wanted = {"model": _asked(sound), "optimizer": {"state": state, "param_groups": [{"params": list(kinds)}]}}
        with pytest.raises(CheckpointException) as raised:
            _read(folder, wanted, planner(allow_partial_load=partial))
        (error,) = raised.value.failures.values()
        assert isinstance(error[0], ReshardError), error


def test_masters_of_an_optimizer_that_cannot_be_read_are_not_made_of_weights(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(folders("bf16"), folder)
    FAULTS["cut"](sorted(folder.glob(FILES["bf16"])))
    with pytest.raises(CheckpointException) as raised:
        _read(folder, {"model": {name: one.float() for name, one in _asked(folders("bf16")).items()}}, LoadPlanner())
    (error,) = raised.value.failures.values()
    assert "of a type that was not saved" in str(error[0]) and "optim_states.pt" in str(error[0])
