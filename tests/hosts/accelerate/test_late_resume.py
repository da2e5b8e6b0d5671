"""`save_state` and `load_state`: the schedule goes on, whichever clock steps it and on however many ranks."""

from __future__ import annotations

import json
import re
import shutil
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from late_jobs import STEPS, Late, wanted

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def saves(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder that two ranks saved, each made once."""
    made: dict[str, Path] = {}

    def save(late: Late, hooks: bool = True) -> str:
        key = repr((late, hooks))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("late")
            worlds[2].run("late_jobs.save_only", late=late, folder=str(made[key]), hooks=hooks)
        return str(made[key])

    return save


def _positions(saved: str, loaded: str, ranks: int) -> list[int]:
    """Where the schedule stands at the three updates after the load.

    accelerate counts in steps of one rank: on its own clock the count goes on as it is, as accelerate loads it.
    """
    if loaded == "engine":
        return [STEPS + k for k in range(3)]
    begin = STEPS * 2 if saved == "accelerate" else STEPS * ranks
    return [begin + ranks * k for k in range(3)]


CLOCKS = ("engine", "accelerate")
LATE = (
    Late(),
    Late(scheduler="StepLR", stage=3),
    Late(scheduler="CosineAnnealingLR", stage=0),
    Late(scheduler="linear", stage=2, dtype="bf16", accumulation=2),
)
# Either clock to either on every number of ranks; the runs take turns, so that each meets each value of the others.
ROWS = [
    (LATE[(number + ranks) % 4], saved, loaded, ranks)
    for ranks in (1, 2, 3)
    for number, (saved, loaded) in enumerate(product(CLOCKS, CLOCKS))
]


def test_every_pair_of_values_occurs() -> None:
    for one, other in combinations(range(4), 2):
        pairs = {(str(row[one]), row[other]) for row in ROWS}
        assert len(pairs) == len({str(row[one]) for row in ROWS}) * len({row[other] for row in ROWS}), (one, other)


@pytest.mark.parametrize(("late", "saved", "loaded", "ranks"), ROWS, ids=str)
def test_another_clock_and_other_ranks(
    worlds: Any, saves: Any, late: Late, saved: str, loaded: str, ranks: int
) -> None:
    """Saved by two ranks; the number of updates is what the clocks have in common. The moments are there."""
    folder = saves(late.but(clock=saved))
    for rank in worlds[ranks].run("late_jobs.resume", late=late.but(clock=loaded), folder=folder):
        assert rank["raised"] is None, rank
        expected = wanted(late, _positions(saved, loaded, ranks))
        assert rank["rates"] == [pytest.approx(rates, rel=1e-12, abs=0) for rates in expected]
        assert rank["moments"] > 0


@pytest.mark.parametrize(("saved", "loaded"), [("engine", "accelerate"), ("accelerate", "engine")])
def test_a_checkpoint_without_a_record(worlds: Any, saves: Any, saved: str, loaded: str) -> None:
    """Saved without the hooks: the files tell the clock."""
    folder = saves(Late(clock=saved), hooks=False)
    assert not (Path(folder) / "ds_reshard_clock.json").exists()
    told = worlds[2].run("late_jobs.resume", late=Late(clock=loaded), folder=folder)[0]
    expected = wanted(Late(), _positions(saved, loaded, 2))
    assert told["rates"] == [pytest.approx(rates, rel=1e-12, abs=0) for rates in expected]


@pytest.mark.parametrize("record", ['{"clock": "sundial"}', "{", "[]"])
@pytest.mark.parametrize(("files", "clock"), [(("scheduler.bin",), "accelerate"), ((), "engine")])
def test_a_record_that_says_nothing_leaves_it_to_the_files(
    tmp_path: Path, record: str, files: tuple[str, ...], clock: str
) -> None:
    from ds_reshard.hosts.accelerate.state import _saved_clock

    (tmp_path / "ds_reshard_clock.json").write_text(record)
    for name in files:
        (tmp_path / name).touch()
    assert _saved_clock(str(tmp_path)) == (clock, 0, None)


@pytest.mark.parametrize("loaded", ["engine", "accelerate"])
@pytest.mark.parametrize("saved", ["engine", "accelerate"])
@pytest.mark.parametrize("scheduler", ["override", "reset"])
def test_the_resume_policy_holds(worlds: Any, saves: Any, saved: str, loaded: str, scheduler: str) -> None:
    """A tenth of the rate takes effect at the first update, at the position of the clock, or from the beginning."""
    folder = saves(Late(clock=saved))
    told = worlds[2].run(
        "late_jobs.resume", late=Late(clock=loaded), folder=folder, policy={"scheduler": scheduler}, scale=0.1
    )[0]
    assert told["raised"] is None, told
    positions = _positions(saved, loaded, 2)
    if scheduler == "reset":
        positions = [position - positions[0] for position in positions]
    expected = wanted(Late(), positions, scale=0.1)
    assert told["rates"] == [pytest.approx(rates, rel=1e-12, abs=0) for rates in expected]
    assert told["moments"] > 0


@pytest.mark.parametrize("loaded", ["engine", "accelerate"])
@pytest.mark.parametrize("scheduler", ["checkpoint", "strict"])
def test_a_schedule_as_it_was_saved_is_refused_on_another_clock(
    worlds: Any, saves: Any, loaded: str, scheduler: str
) -> None:
    """With the line that says the saved clock, which is followed: rates and position are those that were saved."""
    saved = "accelerate" if loaded == "engine" else "engine"
    late = Late(clock=saved, scheduler="CosineAnnealingLR")
    asked = {"folder": saves(late), "policy": {"scheduler": scheduler}}
    told = worlds[2].run("late_jobs.resume", late=late.but(clock=loaded), **asked)
    for rank in told:
        assert rank["raised"] == "UnsupportedLayout" and rank["text"] == told[0]["text"]
    line = re.search(r'write ("ds_reshard": \{.*\}) in the DeepSpeed JSON', told[0]["text"])
    assert line is not None, told[0]["text"]
    clock = json.loads(f"{{{line[1]}}}")["ds_reshard"]["accelerate"]["clock"]
    told = worlds[2].run("late_jobs.resume", late=late.but(clock=clock), **asked)
    expected = wanted(late, _positions(saved, clock, 2))
    assert [rank["raised"] for rank in told] == [None, None], told[0].get("text")
    assert told[0]["rates"] == [pytest.approx(rates, rel=1e-12, abs=0) for rates in expected] and told[0]["moments"] > 0


@pytest.mark.parametrize("loaded", ["engine", "accelerate"])
@pytest.mark.parametrize("policy", [None, {"scheduler": "override"}], ids=["host", "override"])
def test_a_scheduler_that_is_registered_too_takes_no_state_of_another_clock(
    worlds: Any, tmp_path: Path, loaded: str, policy: Any
) -> None:
    """accelerate gives it the other clock's position once more, after the engine has loaded."""
    saved = "accelerate" if loaded == "engine" else "engine"
    worlds[2].run("late_jobs.save_only", late=Late(clock=saved), folder=str(tmp_path), registered=True)
    given = {"late": Late(clock=loaded), "folder": str(tmp_path), "registered": True}
    told = worlds[2].run("late_jobs.resume", **given, policy=policy, scale=0.1)[0]
    expected = wanted(Late(), _positions(saved, loaded, 2), scale=0.1)
    assert told["rates"] == [pytest.approx(rates, rel=1e-12, abs=0) for rates in expected], told


def test_what_accelerate_reads_beside_the_engine_is_looked_for_before_that_loads(
    worlds: Any, saves: Any, tmp_path: Path
) -> None:
    """A scheduler's file, and as many files as objects are registered: of both it tells when the engine has loaded."""
    late = Late(clock="accelerate")
    folder = tmp_path / "saved"
    shutil.copytree(saves(late), folder)

    def refused(**given: Any) -> str:
        told = worlds[2].run("late_jobs.resume", late=late, folder=str(folder), **given)
        assert told[0] == told[1] and told[0]["raised"] == "CheckpointNotFound" and not told[0]["updates"], told
        return str(told[0]["text"])

    assert "expected 1 custom_checkpoint files, found 0" in refused(registered=True)
    (folder / "scheduler.bin").unlink()
    assert f"{folder}/scheduler.bin: there is no such file" in refused()
    assert "1 fault found" in refused() and "2 faults found" in refused(registered=True)


@pytest.mark.parametrize("loaded", ["engine", "accelerate"])
def test_steps_before_prepare_are_refused_on_another_clock(worlds: Any, saves: Any, loaded: str) -> None:
    """The number of updates does not tell where such a schedule stands."""
    late, saved = Late(scheduler="advanced"), "accelerate" if loaded == "engine" else "engine"
    for rank in worlds[2].run("late_jobs.resume", late=late.but(clock=loaded), folder=saves(late.but(clock=saved))):
        assert rank["raised"] == "UnsupportedLayout" and "had taken steps before prepare" in rank["text"]


@pytest.mark.parametrize("policy", [None, {"scheduler": "override"}], ids=["host", "override"])
@pytest.mark.parametrize("loaded", ["engine", "accelerate"])
@pytest.mark.parametrize("anew", [{"scheduler": "reset"}, {"optimizer": "skip"}], ids=str)
def test_a_schedule_that_a_resume_has_begun_anew(
    worlds: Any, saves: Any, tmp_path: Path, loaded: str, policy: Any, anew: dict[str, str]
) -> None:
    """It has taken two updates of the engine's seven, whichever clock goes on with it."""
    saved = "accelerate" if loaded == "engine" else "engine"
    first, second = saves(Late(clock=saved)), str(tmp_path)
    worlds[2].run("late_jobs.begun_anew", late=Late(clock=saved), first=first, second=second, policy=anew)
    told = worlds[2].run("late_jobs.resume", late=Late(clock=loaded), folder=second, policy=policy, scale=0.1)[0]
    if policy and loaded == "engine":
        assert told["raised"] == "UnsupportedLayout" and f"begun anew after {STEPS} updates" in told["text"]
        return
    positions = [2, 3, 4] if loaded == "engine" else [4, 6, 8]
    expected = wanted(Late(), positions, scale=0.1)
    assert told["rates"] == [pytest.approx(rates, rel=1e-12, abs=0) for rates in expected], told


@pytest.mark.parametrize("policy", [{"scheduler": "override"}, {"optimizer": "skip"}], ids=str)
@pytest.mark.parametrize("saved", ["engine", "accelerate"])
def test_a_policy_without_the_hooks_that_apply_it_is_refused(
    worlds: Any, saves: Any, saved: str, policy: dict[str, str]
) -> None:
    folder = saves(Late(clock=saved))
    for rank in worlds[2].run("late_jobs.resume", late=Late(), folder=folder, policy=policy, hooks=False):
        assert rank["raised"] == "HookError" and "import ds_reshard.auto" in rank["text"]


def test_the_latest_of_the_folders_that_accelerate_names(worlds: Any, tmp_path: Path) -> None:
    """The second save, after four updates, is what `load_state()` takes."""
    told = worlds[2].run("late_jobs.by_number", late=Late(), folder=str(tmp_path), clock="accelerate")
    expected = wanted(Late(), [8, 10])
    assert told == [[pytest.approx(rates, rel=1e-12, abs=0) for rates in expected]] * 2


@pytest.mark.parametrize(
    ("micro_steps", "accumulation", "step", "ends"),
    [(7, 2, 7, "x-x-"), (6, 4, 12, "---x"), (7, 4, 12, "---x"), (6, 1, 3, "xxxx")],
    ids=["same", "more", "within an update", "less"],
)
def test_new_ranks_accumulate_in_step(
    worlds: Any, tmp_path: Path, micro_steps: int, accumulation: int, step: int, ends: str
) -> None:
    """A rank for which no random state was saved ends its updates where the others do.

    Of updates of two micro-batches into those of another number a whole number of them has gone by.
    """
    late = Late(accumulation=2, stage=0)
    worlds[2].run("late_jobs.save_only", late=late, folder=str(tmp_path), micro_steps=micro_steps)
    told = worlds[3].run("late_jobs.resume", late=late.but(accumulation=accumulation), folder=str(tmp_path))
    assert [rank["step"] for rank in told] == [step] * 3
    assert [rank["ends"] for rank in told] == [[one == "x" for one in ends]] * 3


def test_new_ranks_accumulate_in_step_without_deepspeed(worlds: Any, tmp_path: Path) -> None:
    """FSDP2's ranks, of 2 to 3, waited for each other for ever; the seam is that of every accelerator."""
    folder = str(tmp_path / "saved")
    worlds[2].run("unsafe_jobs.accelerate_within_an_update", folder=folder, step=3)
    assert worlds[3].run("unsafe_jobs.accelerate_within_an_update", folder=folder) == [3] * 3
    torch.save({"_num_yielded": 3, "_iterator_finished": False}, f"{folder}/dl_state_dict.bin")
    assert [error for error, _ in worlds[2].run("unsafe_jobs.accelerate_counted_data", folder=folder)] == [""] * 2
    for error, text in worlds[3].run("unsafe_jobs.accelerate_counted_data", folder=folder):
        assert error == "UnsupportedLayout" and "dl_state_dict.bin: counts the batches" in text


def test_weights_alone_leave_accelerates_own_states_out(worlds: Any, saves: Any) -> None:
    """It restores random states and the place within an update beside the engine, and has no argument for them."""
    folder = saves(Late(accumulation=2))
    for rank, told in enumerate(worlds[2].run("late_jobs.finetuned", late=Late(accumulation=2), folder=folder)):
        assert (told["states"], told["step"]) == ([True] * 3, 0)
        assert told["row"] == (("this run", "--finetune") if rank == 0 else None)


def test_what_a_script_has_registered_counts_on_and_is_told(worlds: Any, tmp_path: Path) -> None:
    """Where the iteration begins anew, by whichever flag; a scheduler among it follows the policy."""
    policies: list[dict[str, Any]] = [{}, {"finetune": True}, {"iteration": "reset"}]
    told = worlds[2].run("late_jobs.registered_objects", late=Late(), folder=str(tmp_path), policies=policies)
    assert [steps for steps, _ in told[0]] == [7, 7, 7] and not any(lines for _, lines in told[1])
    flags = [[line.split(":")[0] for line in lines] for _, lines in told[0]]
    assert flags == [[], ['"finetune"'], ['"iteration"']]
    assert "(Progress)" in told[0][1][1][0], "and no scheduler"


def test_a_count_of_batches_is_that_of_as_many_processes(worlds: Any, tmp_path: Path) -> None:
    """With use_stateful_dataloader accelerate goes on by the count of one process, whatever the others have had.

    Those of the whole run are counted where batches are split, or one process reads for all; at the end of an epoch
    there is none. Batches of another size are told.
    """
    folder, late = str(tmp_path / "within"), Late(stage=0)
    state = {"_sampler_iter_yielded": 3, "_num_yielded": 3, "_iterator_finished": False}  # as torchdata 0.11 has it
    worlds[2].run("late_jobs.counted_data", late=late, folder=folder, saved=state)

    def load(ranks: int, folder: str = folder, late: Late = late, **kwargs: Any) -> Any:
        told = worlds[ranks].run("late_jobs.counted_data", late=late, folder=folder, **kwargs)
        assert all(rank["raised"] == told[0]["raised"] for rank in told), told
        return told[0]

    assert (load(2)["given"], load(2)["told"]) == ([state], [])
    for ranks in (1, 3):
        refused = load(ranks)
        assert refused["raised"] == "UnsupportedLayout" and refused["updates"] == 0, refused
        assert "dl_state_dict.bin: counts the batches" in refused["text"] and "2 processes" in refused["text"]
        assert load(ranks, policy={"finetune": True})["given"] == [], "which begins its data anew"
        assert load(ranks, split_batches=True)["given"] == load(ranks, dispatch_batches=True)["given"] == [state]
    smaller = load(2, late=late.but(accumulation=2))
    assert smaller["given"] == [state] and "dl_state_dict.bin counts batches" in smaller["told"][0]
    at_end = {**state, "_iterator_finished": True}
    worlds[2].run("late_jobs.counted_data", late=late, folder=str(tmp_path / "end"), saved=at_end)
    assert load(1, folder=str(tmp_path / "end"))["given"] == [at_end]


@pytest.mark.parametrize("policy", [None, {"scheduler": "override"}], ids=str)
@pytest.mark.parametrize(("saved", "loaded"), [("engine", "accelerate"), ("accelerate", "engine")])
def test_the_updates_of_the_engine_that_has_the_schedule_count(
    worlds: Any, tmp_path: Path, saved: str, loaded: str, policy: dict[str, Any] | None
) -> None:
    """A critic makes two updates for each of the generator: its engine was prepared last."""
    given = {"saved": saved, "loaded": loaded, "policy": policy, "folder": str(tmp_path / "state")}
    for whole, resumed in worlds[1].run("late_jobs.two_engines", **given):
        assert resumed == whole
