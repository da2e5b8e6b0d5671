"""Loops of one's own on `megatron.core`: the same promises, from the parts' own `load_state_dict`.

All on 0.16.1, which has nothing but core; what differs between releases also on the newest.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from core_loops import KINDS
from forks import Failed
from releases import ROOT, NotFetched, home
from stages import POSITION, SAVED, curve, row, same_state, used

pytestmark = pytest.mark.slow
EVERYTHING = ("master", "exp_avg", "exp_avg_sq")
OVERRIDE = "--override-opt-param-scheduler"
CHECKPOINT = "--use-checkpoint-opt-param-scheduler"
NEW = {"lr": 3e-5, "min_lr": 2e-5}
BOTH = pytest.mark.parametrize("release", ["0.16.1", "0.19.2"])
FILES = pytest.mark.parametrize("sharded_files", [False, True], ids=["torch", "dist"])


class Loops:
    """Saves and loads of small loops, each kind of save made once."""

    def __init__(self, releases: Any, scratch: Path) -> None:
        self._releases = releases
        self._scratch = scratch
        self._saved: dict[str, tuple[str, dict[str, Any]]] = {}

    def saved(self, release: str, kind: str, **how: Any) -> tuple[str, dict[str, Any]]:
        key = repr((release, kind, sorted(how.items())))
        if key not in self._saved:
            folder = str(self._scratch / f"saved{len(self._saved)}")
            told = self._releases[release].run(
                "core_loops:loop", kind=kind, steps=SAVED, save=folder, hooks=False, **how
            )
            self._saved[key] = folder, told[0]
        return self._saved[key]

    def load(self, release: str, kind: str, folder: str, **how: Any) -> dict[str, Any]:
        told: dict[str, Any] = self._releases[release].run(
            "core_loops:loop", kind=kind, **{"steps": 2, **how}, load=folder
        )[0]
        return told

    def refused(self, release: str, kind: str, folder: str, **how: Any) -> dict[str, Any]:
        try:
            self.load(release, kind, folder, **how)
        except Failed as error:
            return error.ranks[0]
        raise AssertionError("loaded")


@pytest.fixture(scope="module")
def loops(releases: Any, tmp_path_factory: pytest.TempPathFactory) -> Loops:
    return Loops(releases, tmp_path_factory.mktemp("loops"))


@FILES
@pytest.mark.parametrize(("release", "chained"), [("0.16.1", False), ("0.16.1", True), ("0.19.2", False)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_learning_rate_in_a_loop_of_ones_own(
    loops: Loops, release: str, kind: str, chained: bool, sharded_files: bool
) -> None:
    """The new curve at the first step of each optimizer, in the chain too; every state bit for bit."""
    how = {"chained": chained, "sharded_files": sharded_files}
    folder, saved = loops.saved(release, kind, **how)
    resumed = loops.load(release, kind, folder, flags=OVERRIDE, **NEW, **how)
    for step in range(2 if chained else 1):
        assert used(resumed, "lr", step) == pytest.approx([curve(POSITION, 3e-5, 2e-5)] * 2, rel=1e-12)
    assert same_state(saved, resumed, EVERYTHING) == []
    assert resumed["position"] == POSITION + 8


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_loading_makes_no_difference(loops: Loops, kind: str) -> None:
    """The scheduler first or the optimizer first: the same first step, under each schedule."""
    folder, _ = loops.saved("0.16.1", kind)
    for flags, rate in ((OVERRIDE, curve(POSITION, 3e-5, 2e-5)), (CHECKPOINT, curve(POSITION, 3e-4, 3e-5))):
        for order in (("optimizer", "scheduler"), ("scheduler", "optimizer")):
            resumed = loops.load("0.16.1", kind, folder, flags=flags, order=order, **NEW)
            assert used(resumed, "lr") == pytest.approx([rate] * 2), (flags, order)


@BOTH
def test_loading_twice_is_loading_once(loops: Loops, release: str) -> None:
    """The position is set, not added to; this run's own values are still known the second time."""
    folder, saved = loops.saved(release, "fp32")
    for flags, rate in ((OVERRIDE, curve(POSITION, 3e-5, 2e-5)), (CHECKPOINT, curve(POSITION, 3e-4, 3e-5))):
        resumed = loops.load(release, "fp32", folder, flags=flags, times=2, **NEW)
        assert resumed["position"] == POSITION + 8
        assert used(resumed, "lr") == pytest.approx([rate] * 2)
        assert same_state(saved, resumed, EVERYTHING) == []


@BOTH
def test_weight_decay_is_right_at_once(loops: Loops, release: str) -> None:
    """The first step decays as the checkpoint's schedule says, not as this run's does."""
    folder, _ = loops.saved(release, "fp32")
    resumed = loops.load(release, "fp32", folder, flags=CHECKPOINT, weight_decay=0.3, **NEW)
    assert sorted(used(resumed, "weight_decay")) == [0.0, 0.01]
    resumed = loops.load(release, "fp32", folder, flags=OVERRIDE, weight_decay=0.3, **NEW)
    assert sorted(used(resumed, "weight_decay")) == [0.0, 0.3]


@BOTH
@pytest.mark.parametrize("kind", ["fp32", "sharded"])
def test_a_scheduler_built_to_override_asks_for_it(loops: Loops, release: str, kind: str) -> None:
    """`override_opt_param_scheduler=True` means it without any flag; with a flag that says otherwise it is an error."""
    folder, saved = loops.saved(release, kind)
    for order in (("optimizer", "scheduler"), ("scheduler", "optimizer")):
        resumed = loops.load(release, kind, folder, built="override", order=order, **NEW)
        assert used(resumed, "lr") == pytest.approx([curve(POSITION, 3e-5, 2e-5)] * 2), order
        assert same_state(saved, resumed, EVERYTHING) == []
        told = loops.refused(release, kind, folder, built="override", flags=CHECKPOINT, order=order, **NEW)
        assert told["error"] == "ConfigError" and "override_opt_param_scheduler=True" in told["message"]


@BOTH
@pytest.mark.parametrize("kind", ["fp32", "sharded"])
def test_a_scheduler_built_to_use_the_checkpoint_asks_for_it(loops: Loops, release: str, kind: str) -> None:
    """`use_checkpoint_opt_param_scheduler=True` in so many words: the old curve, on every release, in either order."""
    folder, saved = loops.saved(release, kind)
    for order in (("optimizer", "scheduler"), ("scheduler", "optimizer")):
        resumed = loops.load(release, kind, folder, built="use_checkpoint", order=order, **NEW)
        assert used(resumed, "lr") == pytest.approx([curve(POSITION, 3e-4, 3e-5)] * 2), order
        assert same_state(saved, resumed, EVERYTHING) == []


def test_megatrons_default_asks_for_nothing(loops: Loops) -> None:
    """The constructor's own `use_checkpoint_opt_param_scheduler=True` is no word of the user's: 0.19.2 refuses."""
    folder, _ = loops.saved("0.19.2", "fp32")
    told = loops.refused("0.19.2", "fp32", folder, built="default", **NEW)
    assert told["error"] == "ScheduleMismatch" and "param group 0: max_lr" in told["message"]


def test_an_optimizer_alone_keeps_its_saved_rates(loops: Loops) -> None:
    """A scheduler that was built and is not loaded knows no position, so it writes no rates."""
    folder, saved = loops.saved("0.16.1", "fp32")
    resumed = loops.load("0.16.1", "fp32", folder, order=("optimizer",), built="use_checkpoint")
    assert used(resumed, "lr") == [group["lr"] for group in saved["groups"]]


@pytest.mark.parametrize("kind", KINDS)
def test_masters_alone_and_nothing(loops: Loops, kind: str) -> None:
    """`--load-masters-only` and `--no-load-optim` in a loop that calls `load_state_dict` all the same."""
    folder, saved = loops.saved("0.16.1", kind)
    masters = loops.load("0.16.1", kind, folder, flags=f"--load-masters-only {OVERRIDE}", **NEW)
    assert same_state(saved, masters, ("master",)) == []
    assert all(float(one[name].abs().max()) == 0 for one in masters["first"][0] for name in EVERYTHING[1:])
    assert used(masters, "lr") == pytest.approx([curve(POSITION, 3e-5, 2e-5)] * 2)
    nothing = loops.load("0.16.1", kind, folder, flags="--no-load-optim", **NEW)
    assert all(not one["exp_avg"].any() if "exp_avg" in one else True for one in nothing["first"][0])
    assert used(nothing, "lr") == pytest.approx([curve(0, 3e-5, 2e-5)] * 2)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_groups_with_bounds_of_their_own_keep_them(loops: Loops, release: str, kind: str) -> None:
    """As with muP or a decoupled learning rate: alike in all but max_lr, and each keeps its own, old or new."""
    groups = {"*first.weight": 1e-3}
    folder, saved = loops.saved(release, kind, groups=groups)
    same = loops.load(release, kind, folder, groups=groups)
    assert used(same, "max_lr") == [group["max_lr"] for group in saved["groups"]]
    assert sorted(used(same, "lr")) == pytest.approx(
        sorted([curve(POSITION, 3e-4, 3e-5)] * 2 + [curve(POSITION, 1e-3, 1e-4)])
    )
    new = loops.load(release, kind, folder, groups={"*first.weight": 2e-4}, flags=OVERRIDE, **NEW)
    assert sorted(used(new, "lr")) == pytest.approx(
        sorted([curve(POSITION, 3e-5, 2e-5)] * 2 + [curve(POSITION, 2e-4, 2e-5)])
    )
    assert same_state(saved, new, EVERYTHING) == []
    old = loops.load(release, kind, folder, groups={"*first.weight": 2e-4}, flags=CHECKPOINT, **NEW)
    assert used(old, "max_lr") == [group["max_lr"] for group in saved["groups"]]


@BOTH
@pytest.mark.parametrize("kind", ["fp32", "float16"])
def test_groups_whose_order_has_changed_take_their_own_states(loops: Loops, release: str, kind: str) -> None:
    """Megatron sorts groups by their values, so new values may change the order: states and masters follow."""
    folder, saved = loops.saved(release, kind, groups={"*first.weight": 1e-3, "*second.weight": 2e-3})
    new = loops.load(
        release, kind, folder, groups={"*first.weight": 5e-3, "*second.weight": 2e-3}, flags=OVERRIDE, **NEW
    )
    assert saved["sizes"] == new["sizes"] == [1, 1, 1, 3]
    before = {tuple(one["master"].shape): one for one in saved["last"][0] if one["master"].ndim > 1}
    for one in (one for one in new["first"][0] if one["master"].ndim > 1):
        assert all(one[name].equal(before[tuple(one["master"].shape)][name]) for name in EVERYTHING)
    assert used(new, "max_lr") == [3e-5, 2e-3, 5e-3, 3e-5]


OWN = {"*first.weight": 1e-3, "*third.weight": 2e-3}
BY_NAME = pytest.mark.parametrize(("kind", "sharded_files"), [("fp32", True), ("float16", True), ("sharded", False)])


@BY_NAME
@BOTH
def test_groups_that_only_bounds_tell_apart(loops: Loops, release: str, kind: str, sharded_files: bool) -> None:
    """States go by parameter: the override gives each group its own new bound; to keep the old ones is a guess."""
    how = {"sharded_files": sharded_files}
    folder, saved = loops.saved(release, kind, groups=OWN, **how)
    new = {"*first.weight": 5e-3, "*third.weight": 3e-3}
    resumed = loops.load(release, kind, folder, groups=new, flags=OVERRIDE, **NEW, **how)
    assert used(resumed, "max_lr") == [3e-5, 3e-3, 5e-3, 3e-5]
    assert used(resumed, "lr") == pytest.approx(
        [curve(POSITION, high, 2e-5 if high == 3e-5 else high / 10) for high in used(resumed, "max_lr")]
    )
    assert row(resumed, "group 1 max_lr")["checkpoint"] is None
    for flags in (CHECKPOINT, "--strict-opt-param-scheduler", ""):
        told = loops.refused(release, kind, folder, groups=new, flags=flags, **how)
        assert told["error"] == "ParamGroupMismatch" and "without a guess" in told["message"]
    same = loops.load(release, kind, folder, groups=OWN, **how)
    assert used(same, "max_lr") == [3e-4, 1e-3, 2e-3, 3e-4]
    assert same_state(saved, same, EVERYTHING) == []


@BOTH
@pytest.mark.parametrize("kind", ["fp32", "float16"])
def test_moments_do_not_follow_exchanged_learning_rates(loops: Loops, release: str, kind: str) -> None:
    """Two groups of one shape have exchanged their bounds: in these files nothing says which was which."""
    folder, _ = loops.saved(release, kind, groups={"*second.bias": 1e-3, "*third.bias": 2e-3})
    for new in ({"*second.bias": 2e-3, "*third.bias": 1e-3}, {"*second.bias": 5e-3, "*third.bias": 4e-3}):
        told = loops.refused(release, kind, folder, groups=new, flags=OVERRIDE, **NEW)
        assert told["error"] == "ParamGroupMismatch" and "shapes of their parameters" in told["message"]


@pytest.mark.parametrize(
    ("edit", "error", "said"),
    [
        ("other multiplier", "ParamGroupMismatch", "of another kind"),
        ("one group less", "ParamGroupMismatch", "another number"),
        ("another scheduler", "UnsupportedLayout", "base_lrs, last_epoch"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_matched_is_a_named_error(loops: Loops, kind: str, edit: str, error: str, said: str) -> None:
    folder, _ = loops.saved("0.16.1", kind)
    told = loops.refused("0.16.1", kind, folder, edit=edit, flags=OVERRIDE, **NEW)
    assert told["error"] == error and said in told["message"] and "To mend: " in told["message"]


def test_strict_compares_the_groups_too(loops: Loops) -> None:
    """A bound that only a group has is a difference like any other."""
    folder, _ = loops.saved("0.16.1", "fp32", groups={"*first.weight": 1e-3})
    told = loops.refused("0.16.1", "fp32", folder, groups={"*first.weight": 2e-3}, flags="--strict-opt-param-scheduler")
    assert told["error"] == "ScheduleMismatch" and "param group 1: max_lr" in told["message"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--override-optim-hparams lr", "belongs to the schedule"),
        ("--override-optim-hparams momentum", "is not a hyper-parameter of this run"),
        ("--override-optim-hparams loss_scale", "has no loss scale"),
        ("--finetune --load-masters-only", "contradict each other"),
        (f"{OVERRIDE} {CHECKPOINT}", "contradict each other"),
    ],
)
def test_flags_that_cannot_be_carried_out_are_refused(loops: Loops, flags: str, said: str) -> None:
    folder, _ = loops.saved("0.16.1", "fp32")
    told = loops.refused("0.16.1", "fp32", folder, flags=flags)
    assert told["error"] == "ConfigError" and said in told["message"]


def test_hyper_parameters_and_the_report(loops: Loops) -> None:
    """Named ones are this run's; the report of the last part says what every part has done."""
    folder, _ = loops.saved("0.16.1", "fp32")
    resumed = loops.load(
        "0.16.1", "fp32", folder, flags=f"{OVERRIDE} --override-optim-hparams betas", betas=(0.8, 0.9), **NEW
    )
    assert used(resumed, "betas") == [(0.8, 0.9)] * 2
    assert row(resumed, "group 0 betas") == {
        "name": "group 0 betas",
        "checkpoint": [0.9, 0.999],
        "this_run": [0.8, 0.9],
        "used": [0.8, 0.9],
        "because": "--override-optim-hparams",
    }
    assert row(resumed, "position (samples)")["used"] == POSITION


def test_the_loss_scale_is_the_checkpoints_unless_named(loops: Loops) -> None:
    """fp16 with dynamic scaling; the scaler's other state is this run's too where it is named."""
    folder, saved = loops.saved("0.16.1", "fp16", scale=256.0)
    kept = loops.load("0.16.1", "fp16", folder, scale=64.0, flags=OVERRIDE, **NEW)
    taken = loops.load(
        "0.16.1", "fp16", folder, scale=64.0, flags=f"{OVERRIDE} --override-optim-hparams loss_scale", **NEW
    )
    assert (saved["scales"][-1], kept["scales"][0], taken["scales"][0]) == (256.0, 256.0, 64.0)
    assert same_state(saved, taken, EVERYTHING) == []


def test_a_longer_run_without_a_flag_names_the_flag(loops: Loops) -> None:
    folder, _ = loops.saved("0.16.1", "fp32")
    told = loops.refused("0.16.1", "fp32", folder, train_steps=80)
    assert told["error"] == "ScheduleMismatch" and "add --override-opt-param-scheduler" in told["message"]


def test_the_example_runs(interpreter: str) -> None:
    """examples/03 prints the new curve's value where Megatron is, not the reason why it was skipped."""
    try:
        folder = home("0.16.1")
    except NotFetched as error:
        pytest.skip(str(error))
    path = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "NO_VCS_VERSION": "1"}
    script = str(ROOT / "examples" / "04_megatron_learning_rate.py")
    done = subprocess.run([interpreter, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "goes on at step 20, learning rate 2.800e-05, moments kept: True"
