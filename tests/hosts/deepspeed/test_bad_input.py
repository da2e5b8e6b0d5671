"""Broken checkpoints: one named error, the same on every rank, never a hang, and an honest engine afterwards."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Model, Run
from damaged_files import cut, duplicate, duplicate_without_name, flip, remove
from gathered import assert_same
from saves import Saves

pytestmark = pytest.mark.distributed

MODEL = Model(groups=2)
TAG = "global_step3"


def optim(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def rename(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: (folder / old).rename(folder / new) and None


def legacy(name: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        content = torch.load(folder / name, weights_only=False)
        torch.save(content, folder / name, _use_new_zipfile_serialization=False)

    return run


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch evil",)


def evil(name: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        content = torch.load(folder / name, weights_only=False)
        content["extra"] = Evil()
        torch.save(content, folder / name)

    return run


def no_scheduler(folder: Path) -> None:
    content = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    content["lr_scheduler"] = None
    torch.save(content, folder / "mp_rank_00_model_states.pt")


def touch(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(b"x") and None


STRUCTURAL = {
    "last shard missing": (Run(2, 4), remove(optim(3)), "CheckpointDamaged", "ranks 3 are missing"),
    "first shard missing": (Run(1, 2), remove(optim(0)), "CheckpointDamaged", "ranks 0 are missing"),
    "two shards missing": (Run(2, 4), remove(optim(1), optim(2)), "CheckpointDamaged", "ranks 1, 2 are missing"),
    "both files of stage 3's last rank missing": (
        Run(3, 3),
        remove(optim(2), "zero_pp_rank_2_mp_rank_00_model_states.pt"),
        "CheckpointDamaged",
        "ranks 2 are",
    ),
    "model file missing": (Run(2, 2), remove("mp_rank_00_model_states.pt"), "CheckpointNotFound", "no DeepSpeed model"),
    "empty shard": (Run(2, 2), cut(optim(1), 0), "CheckpointDamaged", "is empty"),
    "half a shard": (Run(2, 2), cut(optim(1), 0.5), "CheckpointDamaged", optim(1)),
    "one byte short": (Run(3, 2), cut(optim(1), 1), "CheckpointDamaged", optim(1)),
    "half a model file": (Run(2, 2), cut("mp_rank_00_model_states.pt", 0.5), "CheckpointDamaged", "model_states"),
    "flipped bit in a pickle": (Run(2, 2), flip(optim(1), "data.pkl"), "ChecksumMismatch", optim(1)),
    "shard copied over another": (Run(2, 2), duplicate(optim(0), optim(1)), "CheckpointDamaged", "under another name"),
    "nameless shard copied over another": (
        Run(3, 2),
        duplicate_without_name(optim(0), optim(1)),
        "CheckpointDamaged",
        "same bytes",
    ),
    "legacy file": (Run(2, 2), legacy(optim(1)), "CheckpointDamaged", "legacy"),
    "pickle that calls os.system": (Run(2, 2), evil("mp_rank_00_model_states.pt"), "UnsafePickle", "system"),
    "no scheduler state": (Run(2, 2), no_scheduler, "ModelMismatch", "load_lr_scheduler_states=False"),
    "tensor-parallel files": (
        Run(2, 2),
        touch("mp_rank_01_model_states.pt"),
        "CheckpointDamaged",
        "files of another grid",
    ),
    "pipeline files": (Run(2, 2), touch("layer_03-model_00-model_states.pt"), "CheckpointDamaged", "layer_03"),
    "expert files": (
        Run(2, 2),
        touch("layer_0_expert_1_mp_rank_00_model_states.pt"),
        "CheckpointDamaged",
        "files of experts that were not in the run",
    ),
    "files of two stages": (
        Run(2, 2),
        touch("zero_pp_rank_0_mp_rank_00_model_states.pt"),
        "CheckpointDamaged",
        "two checkpoints",
    ),
}


def broken(saves: Saves, run: Run, damage: Callable[[Path], None], into: Path) -> Path:
    folder, _ = saves(run, MODEL)
    shutil.copytree(folder, into)
    damage(into / TAG)
    return into


def _paths() -> list[tuple[str, bool]]:
    """Each case under another layout, and under the same one."""
    return [(case, same) for case in STRUCTURAL for same in (False, True)]


@pytest.mark.acts
@pytest.mark.parametrize(("case", "same_layout"), _paths(), ids=lambda v: {True: "same", False: "other"}.get(v, v))
def test_structural_faults_leave_the_engine_unchanged(
    worlds: Any, saves: Saves, tmp_path: Path, case: str, same_layout: bool
) -> None:
    """Found before a byte moves, on every path; every rank raises the same text, which says what to do."""
    run, damage, error, text = STRUCTURAL[case]
    target = run if same_layout else Run(1, 3)
    folder = broken(saves, run, damage, tmp_path / "broken")
    refused = worlds[target.dp].run("load_refused", run=target, model=MODEL, folder=str(folder))
    assert {r["error"] for r in refused} == {error}, refused[0]["text"]
    assert len({r["text"] for r in refused}) == 1
    assert text in refused[0]["text"] and "To mend: " in refused[0]["text"]
    assert all(r["unchanged"] for r in refused)
    assert not any(r["step"] == "EngineUnusable" for r in refused)
    assert not Path("evil").exists(), "the pickle was executed"


COPYING = {
    "flipped bit in a master": (Run(2, 2), flip(optim(1), "data/"), "ChecksumMismatch"),
    "flipped bit in a moment": (Run(1, 2), flip(optim(0), "data/4"), "ChecksumMismatch"),
    "flipped bit at stage 3": (Run(3, 2), flip(optim(1), "data/"), "ChecksumMismatch"),
    "flipped bit in the weights": (Run(2, 2), flip("mp_rank_00_model_states.pt", "data/"), "ChecksumMismatch"),
}


@pytest.mark.parametrize("case", COPYING)
def test_faults_that_show_while_copying_make_the_engine_refuse_work(
    worlds: Any, saves: Saves, tmp_path: Path, case: str
) -> None:
    """The same error on every rank; no step and no save until a load succeeds."""
    run, damage, error = COPYING[case]
    folder = broken(saves, run, damage, tmp_path / "broken")
    good, saved = saves(run, MODEL)
    results = worlds[3].run("load_bad_then_good", run=Run(1, 3), model=MODEL, bad=str(folder), good=str(good))
    assert {r["error"] for r in results} == {error}, results[0]["text"]
    assert len({r["text"] for r in results}) == 1
    assert {(r["step"], r["save"]) for r in results} == {("EngineUnusable", "EngineUnusable")}
    assert_same(saved, [r["after"] for r in results])
    assert {r["step_after"] for r in results} == {"done"}


def test_any_flipped_byte_that_is_read_is_noticed(worlds: Any, saves: Saves, tmp_path: Path) -> None:
    """Every record of every shard, padding included: one flipped bit each, none passes."""
    run = Run(2, 2)
    for name in (optim(0), optim(1)):
        folder, _ = saves(run, MODEL)
        with zipfile.ZipFile(folder / TAG / name) as archive:
            records = [
                i.filename.partition("/")[2] for i in archive.infolist() if i.file_size and "data/" in i.filename
            ]
        for record in records:
            if record.startswith("."):
                continue
            copy = broken(saves, run, flip(name, f"/{record}"), tmp_path / f"{name}-{record.replace('/', '_')}")
            refused = worlds[3].run("load_refused", run=Run(3, 3), model=MODEL, folder=str(copy))
            assert {r["error"] for r in refused} == {"ChecksumMismatch"}, (name, record, refused[0]["text"])


def _mixed(worlds: Any, tmp_path: Path, run: Run, other: dict[str, Any], names: tuple[str, ...]) -> Path:
    one, two = tmp_path / "one", tmp_path / "two"
    worlds[run.dp].run("save", run=run, model=MODEL, folder=str(one), tag="t")
    worlds[run.dp].run("save", run=run, folder=str(two), tag="t", **{"model": MODEL, **other})
    for name in names:
        shutil.copyfile(two / "t" / name, one / "t" / name)
    return one


MIXED = {
    "steps": (Run(2, 2), {"steps": 4}, (optim(1),), "step of partition"),
    "steps at stage 3": (Run(3, 2), {"steps": 4}, (optim(1),), "step of partition"),
    "model files of two steps": (
        Run(3, 2),
        {"steps": 4},
        ("zero_pp_rank_1_mp_rank_00_model_states.pt",),
        "global_steps",
    ),
    "optimizer and model of two runs": (
        Run(2, 2),
        {"model": Model(groups=2, seed=8)},
        ("mp_rank_00_model_states.pt",),
        "do not belong together",
    ),
    "optimizer shards of two runs": (
        Run(1, 2),
        {"model": Model(groups=2, seed=8)},
        (optim(1),),
        "do not belong together",
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_shards_of_two_saves_are_told_apart(worlds: Any, tmp_path: Path, case: str) -> None:
    """By step and hyper-parameters; below stage 3 also by the masters' cast against the weights."""
    run, other, names, text = MIXED[case]
    folder = _mixed(worlds, tmp_path, run, other, names)
    refused = worlds[3].run("load_refused", run=Run(1, 3), model=MODEL, folder=str(folder))
    assert {r["error"] for r in refused} == {"CheckpointDamaged"}
    assert len({r["text"] for r in refused}) == 1 and text in refused[0]["text"]
    late = "do not belong" in text
    assert all(r["unchanged"] is not late or late for r in refused)
    assert {r["step"] for r in refused} == ({"EngineUnusable"} if late else {refused[0]["step"]})


def test_a_model_that_differs_is_listed_whole(worlds: Any, saves: Saves) -> None:
    """Missing, unexpected and reshaped parameters, all names and shapes at once."""
    folder, _ = saves(Run(2, 2), MODEL)
    refused = worlds[3].run(
        "load_refused", run=Run(3, 3), model=Model(groups=2, frozen=True, tied=True), folder=str(folder)
    )
    assert {r["error"] for r in refused} == {"ModelMismatch"}
    for text in ("tower.weight is missing", "tower.bias is missing", "head.weight"):
        assert text in refused[0]["text"].replace("parameter ", "").replace(": ", " "), refused[0]["text"]
    assert all(r["unchanged"] for r in refused)


def test_a_frozen_parameter_that_was_trained_is_refused(worlds: Any, tmp_path: Path) -> None:
    """The sets of trainable parameters must match, unless the optimizer is not loaded."""
    model = Model(frozen=True)
    worlds[2].run("save", run=Run(2, 2), model=model, folder=str(tmp_path))
    refused = worlds[3].run("load_refused", run=Run(1, 3), model=model, folder=str(tmp_path), thaw=True)
    assert {r["error"] for r in refused} == {"ModelMismatch"} and all(r["unchanged"] for r in refused)
    assert "tower.weight: is trained by this run but not by the saved one" in refused[0]["text"]
    assert "load_optimizer_states=False" in refused[0]["text"]


def test_a_tag_that_does_not_exist(worlds: Any, saves: Saves) -> None:
    """The tags that do exist are listed."""
    folder, _ = saves(Run(2, 2), MODEL)
    refused = worlds[2].run("load_refused", run=Run(3, 2), model=MODEL, folder=str(folder), tag="global_step9")
    assert {r["error"] for r in refused} == {"CheckpointNotFound"}
    assert f"'{TAG}'" in refused[0]["text"] and "global_step9" in refused[0]["text"]
    assert all(r["unchanged"] for r in refused)


def test_a_latest_tag_that_does_not_exist(worlds: Any, saves: Saves, tmp_path: Path) -> None:
    """As where somebody has removed the last folder: to pass no tag does not mend it."""
    folder = Path(shutil.copytree(saves(Run(2, 2), MODEL)[0], tmp_path / "ckpt"))
    (folder / "latest").write_text("global_step9")
    refused = worlds[2].run("load_refused", run=Run(3, 2), model=MODEL, folder=str(folder))
    assert {r["error"] for r in refused} == {"CheckpointNotFound"}
    assert "has no tag 'global_step9', which is said to be the latest" in refused[0]["text"]
    assert "one of the tags that exist, or restore that folder" in refused[0]["text"]


@pytest.mark.parametrize("fault", ("unreadable", "another folder", "crash"))
def test_a_fault_on_one_rank_is_every_ranks_fault(worlds: Any, saves: Saves, fault: str) -> None:
    """An I/O error, another view of the folder, or a bug of ours on rank 1 of 3: all raise the same."""
    folder, _ = saves(Run(2, 2), MODEL)
    refused = worlds[3].run("load_refused", run=Run(1, 3), model=MODEL, folder=str(folder), fault=fault)
    expected = {"unreadable": "ReadFailed", "another folder": "CheckpointDamaged", "crash": "InternalError"}[fault]
    assert {r["error"] for r in refused} == {expected}
    assert len({r["text"] for r in refused}) == 1
    if fault != "unreadable":
        assert "rank 1" in refused[0]["text"] and all(r["unchanged"] for r in refused)
