"""What nanotron passes over without a word: weights of its own checkpoint that do not fit, and paths of none."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "formats"))
from nanotron_builder import MODEL, STEP, Param, Run, write

from ds_reshard.operations import convert

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

WHOLE = tuple(replace(one, split=None, chunks=None) for one in MODEL)
LESS, LAST = WHOLE[:-2], ("blocks.1.pp_block.odd.weight", "norm.pp_block.weight")
Model = tuple[Param, ...]


def _sized(size: int) -> Model:
    return (*WHOLE[:-1], replace(WHOLE[-1], shape=(size,)))


def _named(prefix: str) -> Model:
    return tuple(replace(one, name=f"{prefix}{one.name}") for one in WHOLE)


UNFIT: dict[str, tuple[Model, Model, str]] = {
    "lacking": (LESS, WHOLE, f"{LAST[1]}: is missing from the checkpoint"),
    "one element for all": (_sized(1), WHOLE, f"{LAST[1]}: has another shape (expected [7], found [1])"),
    "another shape": (_sized(9), WHOLE, f"{LAST[1]}: has another shape (expected [7], found [9])"),
    "compiled": (_named("_orig_mod."), WHOLE, f"{LAST[1]}: is missing from the checkpoint"),
}
FLAGS: dict[str, dict[str, Any]] = {
    "all": {},
    "no optimizer": {"policy": {"optimizer": "skip"}},
    "finetune": {"policy": {"finetune": True}},
    "switches off": {"checkpoints": {"load_optimizer": False, "load_lr_scheduler": False}},
}


@pytest.mark.parametrize("axis", ["dp", "pp"])
@pytest.mark.parametrize("flags", FLAGS)
def test_weights_that_do_not_fit_are_refused_on_every_rank(flags: str, axis: str, tmp_path: Path, worlds: Any) -> None:
    """Before anything changes; nanotron raises on the ranks that train them alone, and the others wait for ever."""
    for case, (saved, live, said) in UNFIT.items():
        folder = write(Run(model=saved, **{axis: 2}), tmp_path / case) / str(STEP)
        run = Run(model=live, **{axis: 2})
        one, other = worlds[2].run("nanotron_jobs.other", run=run, folder=str(folder), **FLAGS[flags])
        assert one == other and (one["error"], one["unchanged"]) == ("ModelMismatch", True), case
        assert said in one["text"], case


@pytest.mark.parametrize("flags", [flags for flags in FLAGS if flags != "all"])
def test_weights_that_only_the_checkpoint_has_are_named(flags: str, tmp_path: Path, worlds: Any) -> None:
    """With the optimizer they are refused, as it was trained with them."""
    folder, run = write(Run(model=WHOLE, pp=2), tmp_path / "saved") / str(STEP), Run(model=LESS, pp=2)
    found, _ = worlds[2].run("nanotron_jobs.other", run=run, folder=str(folder), **FLAGS[flags])
    told = f"{folder} has 2 weights that this run's model has not, and they are left out: {', '.join(LAST)}"
    assert found["weights"] == [] and told in found["warnings"]


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_the_line_of_another_format_renames_what_wrappers_have_renamed(
    prefix: str, tmp_path: Path, worlds: Any
) -> None:
    """Written to the file as it says, its map loads weights and states to the bit."""
    convert(str(write(Run(model=_named(prefix)), tmp_path / "saved")), str(tmp_path / "zero"), to="zero2", dp=2)
    given = {"run": Run(dp=2, model=WHOLE), "folder": str(tmp_path / "zero")}
    refused, _ = worlds[2].run("nanotron_jobs.other", **given)
    written = re.search(r"write (\{.*\}) to map\.json, and set DS_RESHARD_SETTINGS", refused["text"])
    assert refused["unchanged"] and written is not None, refused["text"]
    (tmp_path / "map.json").write_text(written[1])
    for found in worlds[2].run("nanotron_jobs.other", **given, names=str(tmp_path / "map.json")):
        assert (found.get("weights"), found.get("states")) == ([], []), found


def _run(folder: Path) -> Path:
    saved = write(Run(model=WHOLE), folder / "runs" / "a")
    (saved / "latest.txt").write_text(str(STEP))
    return saved


def _pointing(text: str | None) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        saved = _run(folder)
        (saved / "latest.txt").unlink() if text is None else (saved / "latest.txt").write_text(text)
        return saved

    return made


def _deepspeed(folder: Path) -> Path:
    convert(str(_run(folder)), str(folder / "zero"), to="zero2", dp=1)
    (folder / "zero" / "latest").unlink()
    return folder / "zero"


# A path of no checkpoint, a part of what is said, and the path that the line names, below the folder of the test.
PATHS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "above the runs": (lambda folder: _run(folder).parent, "contains folders of checkpoints", "runs/a"),
    "above those": (lambda folder: _run(folder).parent.parent, "contains folders of checkpoints", "runs/a"),
    "no latest.txt": (_pointing(None), "has no latest.txt", "runs/a/7"),
    "another step in latest.txt": (_pointing("99"), "names no step that is there", "runs/a/7"),
    "no step in latest.txt": (_pointing(""), "names no step that is there", "runs/a/7"),
    "no number in latest.txt": (_pointing("seven"), "names no step that is there", "runs/a/7"),
    "another step": (lambda folder: _run(folder) / "8", "does not exist beside other steps", "runs/a/7"),
    "the weights of a step": (lambda folder: _run(folder) / "7" / "model", "is a part of a checkpoint", "runs/a/7"),
    "a file of a step": (lambda folder: _run(folder) / "7" / "config.yaml", "is a part of a checkpoint", "runs/a/7"),
    "latest.txt itself": (lambda folder: _run(folder) / "latest.txt", "is a file", "runs/a"),
    "DeepSpeed's without latest": (_deepspeed, "has no latest.txt", "zero/global_step7"),
}


@pytest.mark.parametrize("case", PATHS)
def test_a_path_of_no_checkpoint_beside_one_is_refused(case: str, tmp_path: Path, worlds: Any) -> None:
    """nanotron begins anew; the path that the line names is loaded."""
    made, said, named = PATHS[case]
    given, run = made(tmp_path), Run(model=WHOLE)
    (found,) = worlds[1].run("nanotron_jobs.other", run=run, folder=str(given))
    assert (found["error"], found["unchanged"]) == ("CheckpointNotFound", True)
    line = f"checkpoints.resume_checkpoint_path: {tmp_path / named}; or leave it out, to begin anew"
    assert said in found["text"] and line in found["text"]
    (found,) = worlds[1].run("nanotron_jobs.other", run=run, folder=str(tmp_path / named))
    assert (found.get("weights"), found.get("states")) == ([], []), found


@pytest.mark.parametrize("there", ["absent", "empty", "a base model"])
def test_a_path_without_a_trace_of_a_checkpoint_begins_anew(there: str, tmp_path: Path, worlds: Any) -> None:
    """As in nanotron, where `resume_checkpoint_path` is the folder that the first start will make."""
    folder = tmp_path / "checkpoints"
    if there != "absent":
        folder.mkdir()
    if there == "a base model":
        convert(str(write(Run(model=WHOLE), tmp_path / "saved")), str(folder / "base"), to="safetensors")
    (found,) = worlds[1].run("nanotron_jobs.other", run=Run(model=WHOLE), folder=str(folder))
    assert (found["states"], found["metadata"]["last_train_step"]) == (None, 0)
