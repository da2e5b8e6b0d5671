"""What the report of a load says is what the load has left, also in a run that has stepped since its first load."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_loops import KINDS
from format_jobs import ITERATION, SAMPLES_SEEN, STEP
from releases import TRAINED
from saved_worlds import DISTRIBUTED, FLAGS, GATED
from test_megatron_core import Loops

pytestmark = pytest.mark.slow
SHARDED, BF16, FP32 = DISTRIBUTED + GATED, f"--bf16 {GATED}", GATED
FORMS = {SHARDED: ("model_space", "buckets", "torch"), BF16: ("plain", "torch"), FP32: ("plain", "torch")}
Folder = Callable[[str, str, str], Path]


@pytest.fixture(scope="module")
def loops(releases: Any, tmp_path_factory: pytest.TempPathFactory) -> Loops:
    return Loops(releases, tmp_path_factory.mktemp("loops"))


@pytest.fixture(scope="module")
def folders(releases: Any, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made: dict[tuple[str, str], Path] = {}

    def folder(release: str, arguments: str, form: str) -> Path:
        if (release, arguments) not in made:
            made[release, arguments] = out = tmp_path_factory.mktemp("saved")
            saves = [{"save": str(out / one), **FLAGS[one]} for one in FORMS[arguments]]
            releases[release].run("format_jobs:save", arguments=arguments, saves=saves)
        return made[release, arguments] / form

    return folder


def _rolled(releases: Any, release: str, arguments: str) -> list[dict[str, Any]]:
    (told,) = releases[release].run("load_jobs:rolled", arguments=arguments)
    first, second = told["told"]
    told_before = second["rows"]["position (samples)"]["this_run"], second["rows"]["iteration"]["this_run"]
    assert told_before == (first["counters"][2] + 12, first["counters"][0] + 3)
    return [first, second]


WITHOUT = [  # the optimizer, the form, and the flags
    (SHARDED, "model_space", "--no-load-optim"),
    (SHARDED, "buckets", "--finetune"),
    (SHARDED, "torch", "--no-load-optim"),
    (SHARDED, "buckets", "--load-masters-only"),
    (BF16, "plain", "--no-load-optim --override-opt-param-scheduler"),
    (BF16, "torch", "--finetune"),
    (BF16, "plain", "--no-load-optim --use-checkpoint-opt-param-scheduler"),
    (BF16, "torch", "--load-masters-only"),
    (FP32, "plain", "--no-load-optim"),
    (FP32, "torch", "--finetune"),
]


@pytest.mark.parametrize(("arguments", "form", "flags"), WITHOUT)
@pytest.mark.parametrize("release", TRAINED)
def test_a_load_without_moments_into_a_run_that_has_stepped(
    folders: Folder, releases: Any, release: str, arguments: str, form: str, flags: str
) -> None:
    """The second load leaves what the first did: moments and steps of zero, the page's position, counters and rates."""
    load = f"{arguments} --load {folders(release, arguments, form)} {flags}"
    told = _rolled(releases, release, load)
    for one in told:
        assert one["moments"] <= {False} and one["steps"] == [0] and "weight" not in one["wrong"]
        masters = "masters" in flags
        assert one["cast"] is (not masters or arguments is FP32)
        finetune, keeps = "--finetune" in flags, masters or "scheduler" in flags
        samples = 0 if finetune else SAMPLES_SEEN
        assert one["counters"] == [0 if finetune else ITERATION, samples, SAMPLES_SEEN if keeps else 0]
        rows = {name: row["used"] for name, row in one["rows"].items()}
        assert (rows["moments and step"], rows["data"]) == ("zero", f"sample {samples}")
        assert rows["fp32 masters"] == ("from the checkpoint" if masters else "from the loaded weights")
        assert [rows[name] for name in ("iteration", "consumed samples", "position (samples)")] == one["counters"]
    assert told[0]["rates"] == told[1]["rates"]


@pytest.mark.parametrize(("arguments", "form"), [(SHARDED, "model_space"), (SHARDED, "torch"), (BF16, "torch")])
def test_a_load_with_everything_into_a_run_that_has_stepped(
    folders: Folder, releases: Any, arguments: str, form: str
) -> None:
    load = f"{arguments} --load {folders('0.19.2', arguments, form)}"
    for one in _rolled(releases, "0.19.2", load):
        assert (one["wrong"], one["steps"]) == ([], [STEP])
        assert one["counters"] == [ITERATION, SAMPLES_SEEN, SAMPLES_SEEN]
        names = ("fp32 masters", "moments and step", "random states")
        assert {one["rows"][name]["used"] for name in names} == {"from the checkpoint"}


@pytest.mark.parametrize("form", ["model_space", "torch"])
@pytest.mark.parametrize("given", ["--load", "--pretrained-checkpoint"])
def test_weights_alone_are_said_to_be_alone(
    folders: Folder, releases: Any, given: str, form: str, tmp_path: Path
) -> None:
    """Of a release, and of a model to begin with: no moments are said to be the checkpoint's, and none stay."""
    folder = Path(shutil.copytree(folders("0.19.2", SHARDED, form), tmp_path / "copy"))
    if given == "--load":
        (folder / "latest_checkpointed_iteration.txt").write_text("release")
        next(folder.glob("iter_*")).rename(folder / "release")
    else:
        given = f"--load {tmp_path / 'none'} {given}"
    why = {"moments and step": "a release has none"} if given == "--load" else {}
    for one in _rolled(releases, "0.19.2", f"{SHARDED} {given} {folder} --ckpt-format {FLAGS[form]['ckpt_format']}"):
        assert one["moments"] <= {False}
        assert (one["steps"], one["cast"], one["counters"][2]) == ([0], True, 0)
        rows = {name: row["used"] for name, row in one["rows"].items()}
        assert (rows["moments and step"], rows["fp32 masters"]) == ("zero", "from the loaded weights")
        assert rows["random states"] == "of this run" and "weight" not in one["wrong"]
        for name in ("moments and step", "fp32 masters", "position (samples)"):
            assert one["rows"][name]["because"] == why.get("moments and step", "--pretrained-checkpoint")


@pytest.mark.parametrize("flags", ["--no-load-optim", "--finetune", "--load-masters-only"])
@pytest.mark.parametrize("sharded_files", [False, True], ids=["torch", "dist"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_of_ones_own_that_has_stepped(loops: Loops, kind: str, sharded_files: bool, flags: str) -> None:
    """Moments are zero, also where `dist_checkpointing.load` has read others into them; the last report says so."""
    folder, _ = loops.saved("0.19.2", kind, sharded_files=sharded_files)
    for order in (("optimizer", "scheduler"), ("scheduler", "optimizer")):
        how = {"flags": flags, "stepped": 3, "order": order, "sharded_files": sharded_files}
        told = loops.load("0.19.2", kind, folder, **how)
        first = told["first"][0]
        assert not any(bool(one[name].any()) for one in first for name in ("exp_avg", "exp_avg_sq") if name in one)
        assert {group.get("step", 0) for group in told["steps"][0]} == {0}
        rows = {row["name"]: row["used"] for row in told["report"]["rows"]}
        masters = "from the checkpoint" if "masters" in flags else "from the loaded weights"
        assert (rows["moments and step"], rows["fp32 masters"]) == ("zero", masters)


@pytest.mark.parametrize("sharded_files", [False, True], ids=["torch", "dist"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_of_ones_own_reports_what_it_has_loaded(loops: Loops, kind: str, sharded_files: bool) -> None:
    folder, _ = loops.saved("0.19.2", kind, sharded_files=sharded_files)
    for order in (("optimizer", "scheduler"), ("scheduler", "optimizer"), ("scheduler",)):
        told = loops.load("0.19.2", kind, folder, order=order, sharded_files=sharded_files)
        rows = {row["name"]: row["used"] for row in told["report"]["rows"]}
        alone = "as before this load" if sharded_files else "zero"  # read in place, before anything of ours was called
        assert rows["moments and step"] == (alone if len(order) == 1 else "from the checkpoint")


@pytest.mark.parametrize("spoil", ["zero_", "normal_"])
@pytest.mark.parametrize(
    ("arguments", "form"), [(SHARDED, "buckets"), (SHARDED, "torch"), (BF16, "plain"), (FP32, "torch")]
)
def test_moments_that_were_changed_before_the_report(
    folders: Folder, releases: Any, arguments: str, form: str, spoil: str
) -> None:
    """What was loaded is compared with what is there, whoever has loaded it: an error on every rank."""
    load = f"{arguments} --load {folders('0.19.2', arguments, form)}"
    for told in releases["0.19.2"].run("load_jobs:spoiled", arguments=load, spoil=spoil):
        assert told["refused"] == "FingerprintMismatch", told
        assert "exp_avg in the optimizer of rank 0 have changed since they were loaded" in told["message"]
