"""Other ways to name a checkpoint and to write a command line: the first step still uses what was asked for."""

from __future__ import annotations

import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from releases import WITH_TRAINING
from saved_worlds import DISTRIBUTED, FLAGS, GATED, TP
from stages import FORMATS, OVERRIDE, POSITION, SAVED, curve, same_state, used

import ds_reshard.operations as tools
from ds_reshard.cli.main import main
from ds_reshard.errors import UnsupportedLayout
from ds_reshard.hosts.megatron.topology import find_saved
from ds_reshard.hosts.megatron.training import announced_format_faults, format_faults
from ds_reshard.resume.policy import ResumePolicy

EVERYTHING = ("master", "exp_avg", "exp_avg_sq")
NEW = [curve(POSITION, 3e-5, 2e-5)] * 2
pytestmark = pytest.mark.slow
RELEASES = pytest.mark.parametrize("release", WITH_TRAINING)


def _earlier(stages: Any, release: str, options: str) -> Path:
    """A folder whose tracker names iteration 9, which has other states, and that holds iteration 5 as well."""
    copy: Path = stages.folder() / "copy"
    shutil.copytree(stages.first(release, options).folder, copy)
    shutil.copytree(copy / "iter_0000005", copy / "iter_0000009")
    (copy / "latest_checkpointed_iteration.txt").write_text("9", encoding="utf-8")
    return copy


@RELEASES
@pytest.mark.parametrize("kind", ["torch-bf16", "dist-sharded"])
def test_an_iteration_by_name(stages: Any, release: str, kind: str) -> None:
    """`--ckpt-step`, from a folder that is another than that of `--save`."""
    options, saved = f"{FORMATS[kind]} --ckpt-step 5", FORMATS[kind]
    flags = f"{OVERRIDE} --save {stages.folder()} --save-interval 100"
    resumed = stages.second(release, flags, options=options, folder=_earlier(stages, release, saved))[0]
    assert (used(resumed, "lr"), resumed["iteration"]) == (NEW, SAVED)
    assert same_state(stages.first(release, saved).ranks[0], resumed, EVERYTHING) == []


@RELEASES
def test_moments_are_of_the_iteration_that_is_named(stages: Any, release: str) -> None:
    """Megatron itself takes them, and the iteration, of what the tracker names: here it says 9 and reads those of 9."""
    saved = FORMATS["torch-sharded"]
    folder, options = _earlier(stages, release, saved), f"{saved} --ckpt-step 5"
    alone = stages.second(
        release,
        options=options,
        folder=folder,
        hooks=False,
        lr="3e-4",
        min_lr="3e-5",
        train_iters="12",
        flags="--use-checkpoint-opt_param-scheduler",
    )[0]
    assert alone["iteration"] == 9
    resumed = stages.second(release, OVERRIDE, options=options, folder=folder)[0]
    assert (used(resumed, "lr"), resumed["iteration"]) == (NEW, SAVED)
    assert same_state(stages.first(release, saved).ranks[0], resumed, EVERYTHING) == []


@RELEASES
@pytest.mark.parametrize("kind", ["torch-bf16", "dist-sharded"])
def test_an_iteration_beside_a_release(stages: Any, release: str, kind: str) -> None:
    """Megatron loads the release that the tracker names, whatever step was asked for; the line mends it.

    The step is loaded where Megatron does not load it.
    """
    folder, options = _earlier(stages, release, FORMATS[kind]), f"{FORMATS[kind]} --ckpt-step 5"
    (folder / "iter_0000009").rename(folder / "release")
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text("release", encoding="utf-8")
    assert stages.second(release, OVERRIDE, options=options, folder=folder)[0]["iteration"] == SAVED
    flags = "--no-load-optim --load-main-params-from-ckpt"  # which is left to Megatron
    told = stages.untouched(release, flags, options=options, saved=FORMATS[kind], folder=folder)
    assert told["refused"] == "ConfigError" and told["changed"] == []
    assert f"write 5 into {tracker}" in told["message"]
    tracker.write_text("5", encoding="utf-8")
    assert stages.second(release, OVERRIDE, options=FORMATS[kind], folder=folder)[0]["iteration"] == SAVED


@RELEASES
@pytest.mark.parametrize(("told", "flags"), [("", ""), ("", " --ckpt-step 5"), ("iter_0000005", ""), ("11", "")])
def test_a_tracker_that_names_no_checkpoint(stages: Any, release: str, told: str, flags: str) -> None:
    """As a save that was killed leaves it: Megatron itself ends by `sys.exit()`, as a run that went well."""
    folder = _earlier(stages, release, FORMATS["dist-sharded"])
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text(told, encoding="utf-8")
    said = stages.untouched(release, options=FORMATS["dist-sharded"] + flags, folder=folder)
    assert said["refused"] == "CheckpointDamaged" and said["changed"] == []
    assert str(tracker) in said["message"] and "that are there into it: 5, 9" in said["message"]


@pytest.mark.parametrize("kind", ["dist-sharded", "torch-bf16"])
def test_an_iteration_that_is_not_there(stages: Any, kind: str) -> None:
    """Of `--ckpt-step`, of a tracker that names a release, and beside `--pretrained-checkpoint`: a name and a line."""
    folder, options = _earlier(stages, "0.19.2", FORMATS[kind]), FORMATS[kind]
    told = stages.untouched("0.19.2", options=f"{options} --ckpt-step 7", folder=folder)
    assert (told["refused"], told["changed"]) == ("ConfigError", [])
    assert "give --ckpt-step 9, or another of 5, 9" in told["message"]
    first = f"--pretrained-checkpoint {folder / 'iter_0000005'}"
    told = stages.untouched("0.19.2", options=f"{options} {first}", folder=stages.folder() / "none")
    assert (told["refused"], told["changed"]) == ("CheckpointNotFound", [])
    assert f"give --pretrained-checkpoint {folder} --ckpt-step 5" in told["message"]
    (folder / "latest_checkpointed_iteration.txt").write_text("release", encoding="utf-8")
    told = stages.untouched("0.19.2", options=options, folder=folder)
    assert (told["refused"], told["changed"]) == ("CheckpointDamaged", [])
    assert "that are there into it: 5, 9" in told["message"]


@RELEASES
def test_a_format_that_is_detected(stages: Any, release: str) -> None:
    """`--auto-detect-ckpt-format`: what is on disk counts, not `--ckpt-format`."""
    saved, options = FORMATS["torch-bf16"], f"{FORMATS['dist-bf16']} --auto-detect-ckpt-format"
    resumed = stages.second(release, OVERRIDE, saved=saved, options=options)[0]
    assert used(resumed, "lr") == NEW
    assert same_state(stages.first(release, saved).ranks[0], resumed, EVERYTHING) == []


@RELEASES
def test_arguments_of_the_checkpoint(stages: Any, release: str) -> None:
    """`--use-checkpoint-args` takes the model's; the schedule is this run's."""
    resumed = stages.second(release, f"{OVERRIDE} --use-checkpoint-args", weight_decay="0.2", clip_grad="0.5")[0]
    assert (used(resumed, "lr"), used(resumed, "weight_decay"), resumed["clips"][0]) == (NEW, [0.2, 0.0], 0.5)


@RELEASES
def test_a_batch_size_that_grows(stages: Any, release: str) -> None:
    """The position counts samples, whatever the batches were."""
    flags = f"{OVERRIDE} --rampup-batch-size 2 2 40"
    resumed = stages.second(release, flags, train_samples="60", **_by_samples())[0]
    assert used(resumed, "lr") == pytest.approx([curve(POSITION, 3e-5, 2e-5, 160)] * 2)
    assert same_state(stages.first(release).ranks[0], resumed, EVERYTHING) == []


def _by_samples() -> dict[str, str]:
    return {"train_iters": "", "lr_decay_iters": "", "lr_decay_samples": "160"}


@RELEASES
def test_an_abbreviation_is_no_flag(stages: Any, release: str) -> None:
    """Megatron's parser takes none, so that none is half understood."""
    told = stages.refused(release, "--override-opt_param-sched")
    assert told["error"] == "SystemExit"


@pytest.mark.parametrize("name", ["torch_dcp", "fsdp_dtensor"])
def test_a_format_in_which_nothing_can_be_chosen_is_named(name: str, tmp_path: Path) -> None:
    """Before anything is read, and only where a checkpoint is; the defaults are Megatron's own."""
    asked = [
        ResumePolicy(scheduler="override"),
        ResumePolicy(scheduler="checkpoint"),
        ResumePolicy(scheduler="strict"),
        ResumePolicy(scheduler="reset"),
        ResumePolicy(optimizer="masters"),
        ResumePolicy(hyperparameters=("betas",)),
    ]
    if name == "torch_dcp":
        asked += [ResumePolicy(optimizer="skip"), ResumePolicy(finetune=True)]
    arguments = Namespace(load=str(tmp_path), ckpt_format=name)
    assert announced_format_faults(asked[0], arguments) == []
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5", encoding="utf-8")
    for policy in asked:
        (fault,) = announced_format_faults(policy, arguments)
        assert (fault.error, fault.found) == ("UnsupportedLayout", name) and f"of format {name}," in fault.what
    for policy in (ResumePolicy(), ResumePolicy(rng=False), ResumePolicy(report="x.json")):
        assert announced_format_faults(policy, arguments) == []
    assert format_faults("x", "legacy", asked[0]) == format_faults("x", "global", asked[0]) == []


PLACES = {
    "an iteration": lambda folder: folder / "iter_0000005",
    "a rank of an iteration": lambda folder: folder / "iter_0000005" / "mp_rank_00",
    "a link to an iteration": lambda folder: _linked(folder),
    "no tracker": lambda folder: _without_tracker(folder, folder),
    "an iteration, no tracker": lambda folder: _without_tracker(folder, folder / "iter_0000005"),
    "another iteration": lambda folder: _later(folder),
    "the folder above": lambda folder: folder.parent,
}


def _linked(folder: Path) -> Path:
    (folder.parent / "link").symlink_to(folder / "iter_0000005")
    return folder.parent / "link"


def _without_tracker(folder: Path, given: Path) -> Path:
    (folder / "latest_checkpointed_iteration.txt").unlink()
    return given


def _later(folder: Path) -> Path:
    shutil.copytree(folder / "iter_0000005", folder / "iter_0000009")
    (folder / "latest_checkpointed_iteration.txt").write_text("9", encoding="utf-8")
    return folder / "iter_0000005"


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *(("torch-bf16", place) for place in PLACES),
        *(("dist-sharded", place) for place in PLACES if "rank" not in place),
    ],
)
def test_a_checkpoint_that_megatron_would_pass_over(stages: Any, kind: str, place: str) -> None:
    """It begins anew and goes on from random weights: refused, and the line of the error loads it."""
    saved = stages.first("0.19.2", FORMATS[kind])
    folder = Path(shutil.copytree(saved.folder, stages.folder() / "copy"))
    given = PLACES[place](folder)
    for flags in ("", OVERRIDE):
        told = stages.untouched("0.19.2", flags, options=FORMATS[kind], folder=given)
        assert (told["refused"], told["changed"]) == ("CheckpointNotFound", [])
        assert "Megatron-LM would begin anew" in told["message"] and str(folder) in told["message"]
    wrote = re.search(r"write (\d+) into (\S+),", told["message"])
    if wrote is not None:
        Path(wrote[2]).write_text(wrote[1], encoding="utf-8")
    line = re.search(r"give (--load) ([^\s;]+)(;.*| --ckpt-step \d+)?$", told["message"], re.MULTILINE)
    assert line is not None and Path(line[2]) == folder
    step = (line[3] or "").partition(";")[0]
    assert step == (" --ckpt-step 5" if place == "another iteration" else "")
    resumed = stages.second("0.19.2", f"{OVERRIDE}{step}", options=FORMATS[kind], folder=folder)[0]
    assert same_state(saved.ranks[0], resumed, EVERYTHING) == []


def test_a_checkpoint_of_another_framework_is_no_beginning(stages: Any) -> None:
    """Of DeepSpeed: the line converts it. A folder that holds none, and one that is not there, begin a run."""
    source = stages.first("0.19.2", FORMATS["dist-sharded"])
    place, options = stages.folder(), FORMATS["dist-sharded"]
    tools.convert(str(source.folder), str(place / "zero2"), to="zero2", dp=2)
    told = stages.untouched("0.19.2", options=options, folder=place / "zero2")
    line = re.search(r"ds-reshard (convert \S+) DIR (--to megatron), and give --load DIR", told["message"])
    assert told["refused"] == "CheckpointNotFound" and line is not None
    assert main([*line[1].split(), str(place / "out"), *line[2].split()]) == 0
    resumed = stages.second("0.19.2", OVERRIDE, options=options, folder=place / "out")[0]
    assert same_state(source.ranks[0], resumed, EVERYTHING) == []
    for folder in (stages.folder(), place / "nothing"):
        assert stages.second("0.19.2", options=options, folder=folder)[0]["report"] is None


def test_a_folder_without_a_checkpoint_is_megatrons_to_begin_in(tmp_path: Path) -> None:
    """Empty, or with files of other tools; a save of ranks that nothing here reads is refused all the same."""
    arguments = Namespace(load=str(tmp_path))
    assert find_saved(arguments) is None
    for name in ("tensorboard", "checkpoint-5", "checkpoint-final"):
        (tmp_path / name).mkdir()
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert find_saved(arguments) is None
    (tmp_path / "pytorch_model_fsdp_rank0.bin").write_bytes(b"")
    with pytest.raises(UnsupportedLayout, match="has a file for each rank, as accelerate saves FSDP"):
        find_saved(arguments)


def test_a_part_that_is_not_supported_is_no_damage(stages: Any) -> None:
    """Offsets of softmax, cut over tensor-parallel ranks: the flat buffers that hold them are of no other size."""
    folder, arguments = stages.folder(), f"{DISTRIBUTED}{GATED}{TP}--softmax-type learnable"
    saves = [{"save": str(folder / one), **FLAGS[one]} for one in ("torch", "model_space")]
    stages.run("0.19.2", "format_jobs:save", ranks=2, arguments=arguments, saves=saves)
    with pytest.raises(UnsupportedLayout) as refused:
        tools.convert(str(folder / "torch"), str(folder / "out"), to="safetensors")
    for faults in (
        *(look(str(folder / "torch")).faults for look in (tools.inspect, tools.verify)),
        refused.value.faults,
    ):
        assert {fault.error for fault in faults} == {"UnsupportedLayout"}
        assert {fault.mend for fault in faults} == {"save it with --ckpt-format torch_dist"}
    assert tools.inspect(str(folder / "model_space")).faults == ()
