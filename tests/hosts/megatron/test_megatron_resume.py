"""`megatron.training.pretrain` resumed with each resume flag: what the first optimizer step used.

Values are read where the optimizer steps, in the torch optimizer inside; nothing here asks a getter.
"""

from __future__ import annotations

from typing import Any

import pytest
from logs import uses
from releases import TRAINED
from stages import CHECKPOINT, FORMATS, OVERRIDE, POSITION, SAVED, curve, row, same_state, used

MOMENTS = ("exp_avg", "exp_avg_sq")
EVERYTHING = ("master", *MOMENTS)
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("release", TRAINED)]


@pytest.mark.parametrize("options", FORMATS.values(), ids=list(FORMATS))
def test_a_new_learning_rate_takes_effect_at_the_first_step_and_moments_stay(
    stages: Any, release: str, options: str
) -> None:
    """Report S2: 3e-4/3e-5 resumed at 3e-5/2e-5; the new curve from the first step, every state bit for bit."""
    saved = stages.first(release, options).ranks[0]
    resumed = stages.second(release, OVERRIDE, options=options)[0]
    for step in range(3):
        position = POSITION + 4 * step
        assert used(resumed, "lr", step) == pytest.approx([curve(position, 3e-5, 2e-5)] * 2, rel=1e-12)
    assert same_state(saved, resumed, EVERYTHING) == []
    assert used(resumed, "step") == [SAVED, SAVED]
    assert (resumed["samples"][:4], resumed["iteration"]) == ([20, 21, 22, 23], SAVED)
    (line,), applied = resumed["told"], resumed["applied"]
    assert applied, "python -m ds_reshard.run would end with an error"
    assert line.startswith("--override-opt-param-scheduler applied to ") and uses(line, used(resumed, "lr")), line
    assert row(resumed, "group 0 max_lr") == {
        "name": "group 0 max_lr",
        "checkpoint": 3e-4,
        "this_run": 3e-5,
        "used": 3e-5,
        "because": "--override-opt-param-scheduler",
    }


def test_the_defect_is_there_without_the_hooks(stages: Any, release: str) -> None:
    """What report S2 is about: the old learning rate silently in 0.18.2, an error about keys in 0.19.2."""
    if release == "0.18.2":
        assert used(stages.second(release, OVERRIDE, hooks=False)[0], "lr") == [curve(POSITION, 3e-4, 3e-5)] * 2
    else:
        told = stages.refused(release, OVERRIDE, hooks=False)
        assert told["error"] == "ValueError" and "Could not find parameter group" in told["message"]


def test_on_two_ranks_with_sharded_states(stages: Any, release: str) -> None:
    """Data-parallel size 2 with the distributed optimizer: each rank's shards are its own, the curve is the new one."""
    options = FORMATS["dist-sharded"]
    saved = stages.first(release, options, ranks=2)
    for rank, resumed in enumerate(stages.second(release, OVERRIDE, options=options, ranks=2)):
        assert used(resumed, "lr") == pytest.approx([curve(POSITION, 3e-5, 2e-5)] * 2, rel=1e-12)
        assert same_state(saved.ranks[rank], resumed, EVERYTHING) == []


@pytest.mark.parametrize(
    "flags", ["", "--strict-opt-param-scheduler", CHECKPOINT], ids=["host", "strict", "checkpoint"]
)
@pytest.mark.parametrize("options", [FORMATS["torch-fp32"], FORMATS["dist-sharded"]], ids=["torch", "dist"])
def test_a_run_that_changes_nothing_goes_on_as_if_never_interrupted(
    stages: Any, release: str, options: str, flags: str
) -> None:
    """The steps that are left use the values of one whole run, and end in its states, bit for bit."""
    options = f"{options} --train-iters 8"
    whole = stages.whole(release, options)
    saved = f"{options} --exit-interval {SAVED}"
    resumed = stages.second(release, flags, options=options, saved=saved, lr="3e-4", min_lr="3e-5")[0]
    assert len(resumed["steps"]) == 3 and resumed["steps"] == whole["steps"][SAVED:]
    assert resumed["samples"] == whole["samples"][POSITION:]
    assert same_state(whole, {"first": resumed["last"]}, EVERYTHING) == []


@pytest.mark.parametrize("options", [FORMATS["torch-fp32"], FORMATS["dist-sharded"]], ids=["torch", "dist"])
def test_raising_only_the_iterations_names_the_flag_to_add(stages: Any, release: str, options: str) -> None:
    """Without a flag a longer run is one readable error, not an assertion about a "class input value"."""
    told = stages.refused(release, options=options, lr="3e-4", min_lr="3e-5", train_iters="9")
    assert told["error"] == "ScheduleMismatch"
    assert [fault["where"] for fault in told["faults"]] == ["wd_incr_steps (from --train-iters, --train-samples)"]
    assert (told["faults"][0]["expected"], told["faults"][0]["found"]) == ("20 as in the checkpoint", "36 in this run")
    assert "--override-opt-param-scheduler" in told["message"] and "--use-checkpoint" in told["message"]


@pytest.mark.parametrize("options", [FORMATS["torch-fp32"], FORMATS["dist-sharded"]], ids=["torch", "dist"])
def test_the_checkpoints_schedule(stages: Any, release: str, options: str) -> None:
    """All of it, position, learning rate and weight decay, whatever this run gives; weight decay at once."""
    resumed = stages.second(release, CHECKPOINT, options=options, weight_decay="0.2")[0]
    assert used(resumed, "lr") == [curve(POSITION, 3e-4, 3e-5)] * 2
    assert used(resumed, "weight_decay") == [0.01, 0.0]
    assert used(resumed, "lr", 1) == pytest.approx([curve(POSITION + 4, 3e-4, 3e-5)] * 2)
    assert same_state(stages.first(release, options).ranks[0], resumed, EVERYTHING) == []


def test_this_runs_weight_decay_under_override(stages: Any, release: str) -> None:
    resumed = stages.second(release, OVERRIDE, weight_decay="0.2")[0]
    assert used(resumed, "weight_decay") == [0.2, 0.0]


def test_strict_refuses_every_difference_at_once(stages: Any, release: str) -> None:
    """Each value with both sides, and the flags that would accept either."""
    told = stages.refused(release, "--strict-opt-param-scheduler", weight_decay="0.2", lr_decay_style="cosine")
    assert told["error"] == "ScheduleMismatch"
    named = [fault["where"].partition(" ")[0] for fault in told["faults"]]
    assert sorted(named) == ["end_wd", "lr_decay_style", "max_lr", "min_lr", "start_wd", "wd_incr_steps"]
    assert "--override-opt-param-scheduler" in told["message"] and "--use-checkpoint" in told["message"]


def test_this_runs_schedule_from_its_beginning(stages: Any, release: str) -> None:
    """`--no-load-lr-state`: position 0, everything else of the optimizer as it was saved."""
    resumed = stages.second(release, "--no-load-lr-state")[0]
    assert [used(resumed, "lr", step)[0] for step in range(3)] == pytest.approx(
        [curve(4 * step, 3e-5, 2e-5) for step in range(3)]
    )
    assert same_state(stages.first(release).ranks[0], resumed, EVERYTHING) == []
    assert (resumed["iteration"], resumed["samples"][0]) == (SAVED, POSITION)


@pytest.mark.parametrize("options", [FORMATS["torch-bf16"], FORMATS["dist-sharded"]], ids=["torch", "dist"])
@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        ("", curve(0, 3e-5, 2e-5)),
        (OVERRIDE, curve(POSITION, 3e-5, 2e-5)),
        (CHECKPOINT, curve(POSITION, 3e-4, 3e-5)),
        ("--no-load-lr-state", curve(0, 3e-5, 2e-5)),
    ],
    ids=["alone", "override", "checkpoint", "reset"],
)
def test_a_skipped_optimizer(stages: Any, release: str, options: str, flags: str, rate: float) -> None:
    """Moments anew, masters from the loaded weights; the position is kept where a schedule was asked for."""
    resumed = stages.second(release, f"--no-load-optim {flags}", options=options)[0]
    assert used(resumed, "lr") == pytest.approx([rate] * 2, rel=1e-12)
    assert all(set(entry) == {"master"} for optimizer in resumed["first"] for entry in optimizer)
    assert resumed["iteration"] == SAVED
    weights = [weight.float().flatten() for weight in resumed["weights"].values()]
    masters = [entry["master"].flatten() for optimizer in resumed["first"] for entry in optimizer]
    assert sorted(float(w.sum()) for w in weights) == pytest.approx(sorted(float(m.sum()) for m in masters))


@pytest.mark.parametrize("options", list(FORMATS.values())[1:4], ids=list(FORMATS)[1:4])
def test_masters_without_moments(stages: Any, release: str, options: str) -> None:
    """`--load-masters-only`: masters bit for bit, moments and step zero; the schedule as its own flag says."""
    resumed = stages.second(release, f"--load-masters-only {OVERRIDE}", options=options)[0]
    assert same_state(stages.first(release, options).ranks[0], resumed, ("master",)) == []
    assert all(float(entry[name].abs().max()) == 0 for o in resumed["first"] for entry in o for name in MOMENTS)
    assert used(resumed, "step") == [0, 0]
    assert used(resumed, "lr") == pytest.approx([curve(POSITION, 3e-5, 2e-5)] * 2)


def test_hyper_parameters_of_this_run_where_named(stages: Any, release: str) -> None:
    """betas and eps are the checkpoint's, as in Megatron, unless they are named; moments stay."""
    given = {"adam_beta1": "0.8", "adam_beta2": "0.99", "adam_eps": "1e-6"}
    kept = stages.second(release, OVERRIDE, **given)[0]
    taken = stages.second(release, f"{OVERRIDE} --override-optim-hparams betas,eps", **given)[0]
    assert (used(kept, "betas")[0], used(kept, "eps")[0]) == ((0.9, 0.999), 1e-8)
    assert (used(taken, "betas"), used(taken, "eps")) == ([(0.8, 0.99)] * 2, [1e-6] * 2)
    assert same_state(stages.first(release).ranks[0], taken, EVERYTHING) == []
    assert row(taken, "group 1 betas")["because"] == "--override-optim-hparams"


def test_weight_decay_of_this_run_with_the_checkpoints_learning_rate(stages: Any, release: str) -> None:
    flags = f"{CHECKPOINT} --override-optim-hparams weight_decay,clip_grad"
    resumed = stages.second(release, flags, weight_decay="0.2", clip_grad="0.5")[0]
    assert used(resumed, "weight_decay") == [0.2, 0.0]
    assert used(resumed, "lr") == [curve(POSITION, 3e-4, 3e-5)] * 2
    assert (resumed["clips"][0], row(resumed, "clip_grad")["used"]) == (0.5, 0.5)


def test_random_states(stages: Any, release: str) -> None:
    """They go on where they were saved, whatever this run's seed, unless `--no-load-rng`."""
    saved = stages.second(release, OVERRIDE)[0]["random"]
    assert stages.second(release, OVERRIDE, seed="99")[0]["random"] == saved
    resumed = stages.second(release, f"{OVERRIDE} --no-load-rng", seed="99")[0]
    assert resumed["random"] != saved
    assert row(resumed, "random states")["used"] == "of this run"


def test_finetune_takes_weights_alone(stages: Any, release: str) -> None:
    resumed = stages.second(release, "--finetune")[0]
    assert used(resumed, "lr") == [3e-5, 3e-5]
    assert all(set(entry) == {"master"} for optimizer in resumed["first"] for entry in optimizer)
    assert (resumed["iteration"], resumed["samples"][0]) == (0, 0)
    assert same_state(stages.first(release).ranks[0], resumed, ("master",)) == []


@pytest.mark.parametrize(
    ("flags", "rate"), [(OVERRIDE, curve(0, 3e-5, 2e-5)), (CHECKPOINT, curve(POSITION, 3e-4, 3e-5))]
)
def test_reset_iteration(stages: Any, release: str, flags: str, rate: float) -> None:
    """Iteration, samples and position 0, but for the checkpoint's own position where that was asked for."""
    resumed = stages.second(release, f"--reset-iteration {flags}", train_iters="2")[0]
    assert (resumed["iteration"], resumed["samples"]) == (0, list(range(8)))
    assert used(resumed, "lr") == pytest.approx([rate] * 2)
    assert used(resumed, "step") == [SAVED, SAVED]
    assert same_state(stages.first(release).ranks[0], resumed, EVERYTHING) == []
    assert any("will replace" in warning for warning in resumed["report"]["warnings"])


def test_reset_data_loader(stages: Any, release: str) -> None:
    """Data from its start; iteration and position go on. Megatron alone would count the samples anew."""
    resumed = stages.second(release, f"--reset-dataloader {OVERRIDE}")[0]
    assert resumed["samples"] == list(range(12))
    assert (resumed["iteration"], resumed["consumed_train_samples"]) == (SAVED, 12)
    assert used(resumed, "lr") == pytest.approx([curve(POSITION, 3e-5, 2e-5)] * 2)


def test_both_resets_without_a_change_of_schedule(stages: Any, release: str) -> None:
    resumed = stages.second(release, "--reset-iteration --reset-dataloader", lr="3e-4", min_lr="3e-5", train_iters="5")[
        0
    ]
    assert resumed["samples"] == list(range(20))
    assert used(resumed, "lr") == [3e-4, 3e-4]


def test_a_changed_batch_size_is_a_warning(stages: Any, release: str) -> None:
    resumed = stages.second(release, OVERRIDE, global_batch_size="8")[0]
    assert any("8" in warning and "4" in warning for warning in resumed["report"]["warnings"])
