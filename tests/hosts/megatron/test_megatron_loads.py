"""Loads that are not a plain resume: groups with bounds of their own, other models' weights, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
from releases import WITH_TRAINING
from stages import CHECKPOINT, FORMATS, OVERRIDE, POSITION, curve, row, same_state, used

from ds_reshard.hooks import Seam

EVERYTHING = ("master", "exp_avg", "exp_avg_sq")
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("release", WITH_TRAINING)]
KINDS = pytest.mark.parametrize("options", [FORMATS["torch-bf16"], FORMATS["dist-sharded"]], ids=["torch", "dist"])
DECOUPLED = "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4"
SAME = {"lr": "3e-4", "min_lr": "3e-5", "train_iters": "8"}


@KINDS
def test_a_decoupled_learning_rate_stays_its_own(stages: Any, release: str, options: str) -> None:
    """The groups of 1e-3 and of 3e-4 look alike to Megatron up to 0.18.2, and one's values go to both; not here."""
    options = f"{options} {DECOUPLED}"
    saved = stages.first(release, options).ranks[0]
    wanted = [group["max_lr"] for group in saved["steps"][-1]]
    assert sorted(set(wanted)) == [3e-4, 1e-3]
    resumed = stages.second(release, CHECKPOINT, saved=options, options=options, **SAME)
    assert used(resumed[0], "max_lr") == wanted
    assert used(resumed[0], "lr") == pytest.approx([curve(POSITION, high, high / 10) for high in wanted])
    assert same_state(saved, resumed[0], EVERYTHING) == []


@KINDS
def test_a_new_decoupled_learning_rate(stages: Any, release: str, options: str) -> None:
    saved = f"{options} {DECOUPLED}"
    new = f"{options} --decoupled-lr 4e-4 --decoupled-min-lr 4e-5"
    resumed = stages.second(release, OVERRIDE, saved=saved, options=new)[0]
    highest = [
        3e-5 if group["max_lr"] == 3e-4 else 4e-4 for group in stages.first(release, saved).ranks[0]["steps"][-1]
    ]
    assert used(resumed, "max_lr") == highest
    lowest = [2e-5 if high == 3e-5 else 4e-5 for high in highest]
    assert used(resumed, "lr") == pytest.approx([curve(POSITION, *pair) for pair in zip(highest, lowest, strict=True)])


@KINDS
def test_mup_keeps_its_scale(stages: Any, release: str, options: str) -> None:
    """Hidden matrices learn at lr / width: half of this run's, as they did at half of the saved run's."""
    options = f"{options} --use-mup --mup-base-hidden-size 8"
    saved = stages.first(release, options).ranks[0]
    before = [group["max_lr"] for group in saved["steps"][-1]]
    assert sorted(set(before)) == [1.5e-4, 3e-4]
    resumed = stages.second(release, OVERRIDE, saved=options, options=options)[0]
    assert used(resumed, "max_lr") == pytest.approx([high / 10 for high in before], rel=1e-12)
    assert used(resumed, "eps") == [group["eps"] for group in saved["steps"][-1]]
    assert same_state(saved, resumed, EVERYTHING) == []


def test_a_pretrained_model_leaves_the_policy_alone(stages: Any, release: str) -> None:
    """`--pretrained-checkpoint` brings in weights: whatever was asked of a resume waits for one."""
    first = stages.first(release)
    flags = f"--strict-opt-param-scheduler --pretrained-checkpoint {first.folder}"
    begun = stages.second(release, flags, folder=stages.folder())[0]
    assert (begun["iteration"], begun["samples"][0], used(begun, "lr")) == (0, 0, [3e-5, 3e-5])
    assert same_state(first.ranks[0], begun, ("master",)) == []
    assert row(begun, "iteration")["because"] == "--pretrained-checkpoint"


def test_nothing_to_load_is_a_warning(stages: Any, release: str) -> None:
    """The same command line starts the first run and resumes it later; the first says that it had nothing."""
    begun = stages.second(release, OVERRIDE, folder=stages.folder())[0]
    assert (begun["iteration"], used(begun, "lr")) == (0, [3e-5, 3e-5])
    assert "the resume flags had nothing to act on" in begun["log"]


def test_loads_of_other_models_are_megatrons_own(release: str) -> None:
    """A teacher, a reference or a dense model comes without optimizer, or from another argument than --load."""

    @Seam("ds_reshard.hosts.megatron.training:load_checkpoint")
    def load_checkpoint(ddp_model: object, optimizer: object, opt_param_scheduler: object, load_arg: str) -> object:
        return 3, 7

    for optimizer, load_arg in ((None, "load"), (object(), "export_kd_teacher_load")):
        assert load_checkpoint(None, optimizer, None, load_arg) == (3, 7), release


def test_a_policy_from_the_launcher(stages: Any, release: str) -> None:
    """What the launcher was given holds without a flag of Megatron's; given differently in both it is an error."""
    resumed = stages.second(release, asked_before={"scheduler": "override", "optimizer": "masters"})[0]
    assert used(resumed, "lr") == pytest.approx([curve(POSITION, 3e-5, 2e-5)] * 2)
    skipped = stages.second(release, asked_before={"optimizer": "skip"})[0]
    assert all(set(entry) == {"master"} for entry in skipped["first"][0])
    told = stages.refused(release, CHECKPOINT, asked_before={"scheduler": "override"})
    assert told["error"] == "ConfigError" and "the launcher" in told["message"] and "command line" in told["message"]


def test_a_rewound_iteration_and_a_reset_one(stages: Any, release: str) -> None:
    """0.19 has a flag of its own for the iteration: both at once is an error there, and unknown before."""
    flags = f"{OVERRIDE} --override-ckpt-iteration 3"
    if release == "0.18.2":
        assert stages.refused(release, flags)["error"] == "SystemExit"
        return
    for kind in (
        "torch-fp32",
        "torch-sharded",
    ):  # of the second Megatron itself keeps the iteration, and not the samples
        assert stages.second(release, flags, options=FORMATS[kind])[0]["iteration"] == 3
    assert stages.refused(release, f"{flags} --reset-iteration")["error"] == "ConfigError"
