"""What `convert` writes, loaded by DeepSpeed itself, without hooks: every tensor, number and loss as it was saved."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from gathered import assert_same
from grid_cases import forget_json
from saves import Saves
from test_matrix import MODELS, OPTIONS

from ds_reshard.containers.crc import crc32
from ds_reshard.operations import Options, convert, fingerprint

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STAGES: tuple[int | str, ...] = (1, 2, 3, "bf16")
FORMATS = {1: "zero1", 2: "zero2", 3: "zero3", "bf16": "bf16"}


def _rows() -> list[tuple[Run, Run, Model]]:
    rows = []
    for i, (source, target) in enumerate(product(STAGES, STAGES)):
        dp, other = (4, 1, 3, 2)[i % 4], (2, 3, 1, 4, 3)[i % 5]
        dtype = "bf16" if "bf16" in (source, target) or i % 3 else "fp32"
        model = MODELS[i % len(MODELS)]
        if "bf16" in (source, target) and model.optimizer == "adagrad":  # DeepSpeed itself fails at the first step
            model = MODELS[2]
        if 3 in (source, target) and source != target and dp == other:
            other = other % 4 + 1  # one model file has rank 0's buffers alone
        options = {"sub_group_size": 60} if target == 3 and i % 2 else {}
        saved_options = OPTIONS[source][i % len(OPTIONS[source])]
        rows.append((Run(source, dp, dtype, saved_options), Run(target, other, dtype, options), model))
    return rows


def _name(row: tuple[Run, Run, Model]) -> str:
    return f"{row[0]}-to-{row[1]}-{row[2].optimizer}-{row[2].groups}g"


@pytest.mark.parametrize("row", _rows(), ids=_name)
def test_deepspeed_itself_loads_what_was_converted(worlds: Any, saves: Saves, tmp_path: Path, row: Any) -> None:
    source, target, model = row
    folder, saved = saves(source, model)
    out = tmp_path / "out"
    done = convert(
        str(folder),
        str(out),
        to=FORMATS[target.stage],
        dp=target.dp,
        sub_group_size=target.options.get("sub_group_size", 10**9) if target.stage == 3 else None,
    )
    assert done.complete
    loaded = worlds[target.dp].run("load", run=target, model=model, folder=str(out), more=2, hooks=False)
    assert_same(saved, loaded)
    assert loaded[0]["client"]["note"] == "kept"
    if not model.batchnorm:  # BatchNorm's loss depends on how many rows a rank sees
        direct = worlds[target.dp].run("load", run=target, model=model, folder=str(folder), more=2)
        assert loaded[0]["later"] == direct[0]["later"]


@pytest.mark.parametrize("renamed", [False, True], ids=["one name", "two names"])
@pytest.mark.parametrize(("source", "target"), [(Run(2, 2), Run(3, 1)), (Run(3, 2), Run(2, 1)), (Run(1, 2), Run(2, 2))])
def test_frozen_parameters_that_were_left_out(
    worlds: Any, tmp_path: Path, source: Run, target: Run, renamed: bool
) -> None:
    """`exclude_frozen_parameters`, as the Trainer saves with PEFT: what lists any of them must list all of them."""
    model = Model(frozen=True, renamed=renamed)
    given: dict[str, Any] = {"save_options": {"exclude_frozen_parameters": True}}
    saved = worlds[2].run("save", run=source, model=model, folder=str(tmp_path / "saved"), **given)
    out = _converted(str(tmp_path / "saved"), tmp_path / "out", FORMATS[target.stage], target.dp)
    given = {"hooks": False, "arguments": {"load_module_strict": False}}
    loaded = worlds[target.dp].run("load", run=target, model=model, folder=str(out), **given)
    for rank in (*saved, *loaded):
        rank["weights"] = {name: rank["weights"][name] for name in rank["weights"] if name.startswith("first")}
    assert_same(saved, loaded)
    for to, name in (("safetensors", "plain"), ("dcp", "dcp")):
        assert convert(str(tmp_path / "saved"), str(tmp_path / name), to=to).complete


UNIVERSAL = (
    (Run(2, 4, options={"round_robin_gradients": True}), Run(1, 3), Model(groups=2, tied=True)),
    (Run(3, 2, options={"sub_group_size": 60}), Run(2, 1), Model(groups=2)),
    (Run("bf16", 2), Run(3, 3), Model()),
    (Run(1, 1), Run("bf16", 2), Model(groups=2)),
    (Run(3, 3), Run(3, 2), Model(tied=True)),
    (Run(1, 2, "fp32"), Run(2, 4, "fp32"), Model(optimizer="sgd")),
    (Run(2, 2), Run(1, 3), Model(optimizer="amsgrad")),
)


@pytest.mark.parametrize(("source", "target", "model"), UNIVERSAL, ids=str)
def test_deepspeed_itself_loads_a_universal_checkpoint(
    worlds: Any, saves: Saves, tmp_path: Path, source: Run, target: Run, model: Model
) -> None:
    """At every stage; also of what ds_to_universal scrambles, drops or does not convert."""
    folder, saved = saves(source, model)
    out = _converted(str(folder), tmp_path / "out", "universal", None)
    run = replace(target, config={"checkpoint": {"load_universal": True}})
    loaded = worlds[target.dp].run("load", run=run, model=model, folder=str(out), more=2, hooks=False)
    assert_same(saved, loaded)
    direct = worlds[target.dp].run("load", run=target, model=model, folder=str(folder), more=2)
    assert loaded[0]["later"] == direct[0]["later"]


WITHOUT_JSON = (
    (Run(2, 2, options={"round_robin_gradients": True}), Run(1, 3), Model(groups=2)),
    (Run(1, 3, "fp32", options={"round_robin_gradients": True}), Run(3, 2, "fp32"), Model()),
    (Run(2, 2), Run(1, 2), Model(groups=2)),
    (Run("bf16", 2), Run("bf16", 3), Model()),
    (Run(3, 2), Run("bf16", 2), Model(groups=2)),
)


@pytest.mark.parametrize(("source", "target", "model"), WITHOUT_JSON, ids=str)
def test_what_was_saved_without_the_json(
    worlds: Any, saves: Saves, tmp_path: Path, source: Run, target: Run, model: Model
) -> None:
    """As older DeepSpeed (0.16.4) saves it that is given the path of its JSON."""
    folder, saved = saves(source, model)
    forgotten = shutil.copytree(folder, tmp_path / "forgotten")
    for folder in forgotten.glob("*/"):
        forget_json(folder)
    out = _converted(str(forgotten), tmp_path / "out", FORMATS[target.stage], target.dp)
    assert_same(saved, worlds[target.dp].run("load", run=target, model=model, folder=str(out), hooks=False))


def test_plain_pytorch_numbers_its_states_as_the_param_groups_do(saves: Saves, tmp_path: Path) -> None:
    """Not as flat buffers that were dealt out in turn: torch takes states by their numbers."""
    orders = []
    for options in ({}, {"round_robin_gradients": True}):
        folder, _ = saves(Run(2, 2, options=options), Model(groups=2))
        convert(str(folder), str(tmp_path / f"out{len(orders)}"), to="pytorch")
        (file,) = (tmp_path / f"out{len(orders)}").rglob("optimizer.pt")
        orders.append([group["param_names"] for group in torch.load(file, weights_only=True)["param_groups"]])
    assert orders[0] == orders[1]


OF_DEEPSPEED = (
    (Run(1, 2), Run(3, 3), Model(groups=2)),
    (Run(2, 3), Run(1, 2), Model(groups=2, tied=True)),
    (Run(3, 2, options={"sub_group_size": 60}), Run(2, 4), Model(groups=2)),
)


@pytest.mark.parametrize(("source", "target", "model"), OF_DEEPSPEED, ids=str)
def test_of_what_ds_to_universal_has_made(
    worlds: Any, universals: Any, tmp_path: Path, source: Run, target: Run, model: Model
) -> None:
    folder, saved = universals(source, model)
    out = _converted(str(folder), tmp_path / "out", FORMATS[target.stage], target.dp)
    assert_same(saved, worlds[target.dp].run("load", run=target, model=model, folder=str(out), hooks=False))


def test_the_files_are_those_of_the_run_that_was_converted_back(saves: Saves, tmp_path: Path) -> None:
    """From each format through every other and back: the first conversion's bytes, but for what only stage 3 keeps."""
    folder, _ = saves(Run(2, 2), Model(groups=2, frozen=True, tied=True))
    names = ("zero1", "zero2", "zero3", "bf16")
    whole = _converted(str(folder), tmp_path / "universal", "universal", None)
    assert _files(_converted(str(whole), tmp_path / "universal-again", "universal", None)) == _files(whole)
    first = {name: _converted(str(folder), tmp_path / name, name, 2) for name in names}
    for one, other in product(names, names):
        assert _files(_converted(str(whole), tmp_path / f"universal-{one}-{other}", one, 2)) == _files(first[one])
        between = _converted(str(first[one]), tmp_path / f"{one}-{other}", other, 3)
        back = _converted(str(between), tmp_path / f"{one}-{other}-{one}", one, 2)
        assert _files(back) == _files(first[one]), (one, other)
        assert _files(_converted(str(between), tmp_path / f"{one}-{other}-c", "zero2", 4)) == _files(
            _converted(str(first[one]), tmp_path / f"{one}-{other}-d", "zero2", 4)
        )


def _converted(source: str, out: Path, to: str, dp: int | None) -> Path:
    assert convert(source, str(out), to=to, dp=dp).complete
    return out


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("global_step*/**/*.pt")}


@pytest.mark.parametrize("to", ["zero1", "zero3"])
def test_the_manifest_says_what_source_and_output_hold(saves: Saves, tmp_path: Path, to: str) -> None:
    """The fingerprints of the manifest are those of both, and the files are as it lists them."""
    folder, _ = saves(Run(2, 3), Model(groups=2, frozen=True, tied=True))
    out = _converted(str(folder), tmp_path / "out", to, 2)
    manifest = json.loads((out / "ds_reshard.json").read_text())
    said = {(one["name"], one["kind"]): one["fingerprint"] for one in manifest["tensors"]}
    for place in (folder, out):
        held = {(one.name, one.kind): one.fingerprint for one in fingerprint(str(place)).tensors}
        assert {key: held[key] for key in said if key in held} == {key: said[key] for key in said if key in held}
        assert len(held.keys() & said.keys()) > 20
    files = {str(path.relative_to(out)) for path in out.rglob("*.pt")}
    assert files == set(manifest["files"])
    for name, known in manifest["files"].items():
        data = (out / name).read_bytes()
        assert (len(data), f"{crc32(data):08x}") == (known["nbytes"], known["crc32"])


def test_parts_by_several_processes_are_the_whole(saves: Saves, tmp_path: Path) -> None:
    """In any order; the last one gives the output its name, and each byte is read once."""
    folder, _ = saves(Run(2, 3), Model(groups=2))
    whole = _converted(str(folder), tmp_path / "whole", "zero3", 4)
    out, read = tmp_path / "out", 0
    for number in (2, 0, 1):
        assert not out.exists()
        done = convert(str(folder), str(out), to="zero3", dp=4, options=Options(shard=(number, 3)))
        assert done.complete is (number == 1)
        read += done.bytes_read
    assert _files(out) == _files(whole)
    assert convert(str(folder), str(out), to="zero3", dp=4, options=Options(shard=(0, 3))).complete
    assert read == convert(str(folder), str(tmp_path / "again"), to="zero3", dp=4).bytes_read


def test_a_single_rank_checkpoint_of_a_conversion_with_the_hooks(worlds: Any, saves: Saves, tmp_path: Path) -> None:
    """The hooks take it like any other, at another size again."""
    model = Model(groups=2)
    folder, saved = saves(Run(3, 2), model)
    out = _converted(str(folder), tmp_path / "out", "zero2", 1)
    run = replace(Run(3, 3), options={"sub_group_size": 20})
    assert_same(saved, worlds[3].run("load", run=run, model=model, folder=str(out)))
