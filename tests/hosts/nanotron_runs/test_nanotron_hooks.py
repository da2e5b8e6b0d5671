"""nanotron with the hooks: a synthetic stand-in for it, and synthetic checkpoints; `make test-nanotron` has real ones.

The stand-in (tests/hosts/nanotron_stand_in) has nanotron's names and signatures, and its faults: it opens the file of
its own topology alone, takes the decayed rate for the initial one, and passes the stage's number as `is_zero`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from logs import uses

sys.path.insert(0, str(Path(__file__).parents[2] / "formats"))
from nanotron_builder import MODEL, PEAK, STEP, Run, values, write

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SOURCES = {
    "dp 3": Run(dp=3),
    "dp 2 tp 2": Run(dp=2, tp=2),
    "pp 2 dp 2": Run(pp=2, dp=2),
    "tp 2, ZeRO-0": Run(tp=2, zero=0),
    "one rank": Run(),
    "pp 2 tp 2": Run(pp=2, tp=2),
}
LIVE = {
    "dp 1": Run(),
    "ZeRO-0": Run(zero=0),
    "dp 2": Run(dp=2),
    "tp 2": Run(tp=2),
    "tp 2, ZeRO-0": Run(tp=2, zero=0),
    "dp 2, ZeRO-0": Run(dp=2, zero=0),
    "pp 2": Run(pp=2),
    "dp 4": Run(dp=4),
    "pp 2 tp 2": Run(pp=2, tp=2),
}
SCHEDULE = """\
  learning_rate_scheduler:
    learning_rate: 0.0003
    lr_decay_starting_step: null
    lr_decay_steps: null
    lr_decay_style: cosine
    lr_warmup_steps: 2
    lr_warmup_style: linear
    min_decay_lr: 3.0e-05
"""


def size(run: Run) -> int:
    return run.dp * run.tp * run.pp


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], str]:
    """A folder of each source, with masters and without."""
    folder = tmp_path_factory.mktemp("nanotron")
    return {
        (name, masters): str(write(Run(**{**vars_of(run), "masters": masters}), folder / f"{name} {masters}"))
        for name, run in SOURCES.items()
        for masters in (True, False)
    }


def vars_of(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in ("dp", "tp", "pp", "zero")}


@pytest.fixture(scope="module")
def rates_of(worlds: Any) -> Callable[..., list[float]]:
    """The rates of a run that nothing interrupts, under a schedule."""
    known: dict[str, list[float]] = {}

    def made(schedule: dict[str, Any]) -> list[float]:
        if repr(schedule) not in known:
            (known[repr(schedule)],) = worlds[1].run("nanotron_jobs.uninterrupted", run=Run(), schedule=schedule)
        return known[repr(schedule)]

    return made


@pytest.fixture
def saved(tmp_path: Path, rates_of: Callable[..., list[float]]) -> Callable[..., str]:
    """A checkpoint after STEP steps, with the rates of a schedule; config.yaml has that of SCHEDULE."""

    def make(run: Run, name: str = "saved", schedule: dict[str, Any] | None = None) -> str:
        folder, rates = write(run, tmp_path / name), rates_of(schedule or {})
        for path in (folder / str(STEP) / "lr_scheduler").iterdir():
            state = torch.load(path)
            torch.save({**state, "_last_lr": [rates[STEP]] * len(state["_last_lr"])}, path)
        for path in (folder / str(STEP) / "optimizer").glob("*.pt"):
            state = torch.load(path)
            torch.save(
                {**state, "param_groups": [{**group, "lr": rates[STEP]} for group in state["param_groups"]]}, path
            )
        config = folder / str(STEP) / "config.yaml"
        text = config.read_text().replace("  learning_rate_scheduler:\n    learning_rate: 0.0003\n", SCHEDULE)
        config.write_text(text + "  train_steps: 20\n")
        return str(folder)

    return make


@pytest.mark.parametrize("masters", [True, False], ids=["masters", "fp32"])
@pytest.mark.parametrize("live", LIVE)
def test_states_of_any_topology_are_loaded_to_the_bit(
    live: str, masters: bool, sources: dict[tuple[str, bool], str], worlds: Any
) -> None:
    """Moments, steps and fp32 masters of each rank are its part of what was saved, whatever the sizes were."""
    run = Run(**{**vars_of(LIVE[live]), "masters": masters})
    folders = [sources[name, masters] for name in SOURCES]
    found = worlds[size(run)].run("nanotron_jobs.load", run=run, folders=folders)
    wrong = {
        name: of_rank
        for number, name in enumerate(SOURCES)
        for of_rank in ([ranks[number] for ranks in found],)
        if any(of_rank)
    }
    assert wrong == {}


def test_every_finding_is_told_at_once_and_nothing_changes(tmp_path: Path, worlds: Any) -> None:
    """Names, shapes, totals and masters, on both ranks, also those that one rank alone sees."""
    other = (
        *(param for param in MODEL if param.name != "norm.pp_block.weight" and "odd" not in param.name),
        type(MODEL[0])("blocks.1.pp_block.odd.weight", (5, 4), (1,)),
        type(MODEL[0])("late.weight", (4,), (1,)),
    )
    folder = str(write(Run(dp=2, model=other), tmp_path / "other"))
    found = worlds[2].run("nanotron_jobs.load", run=Run(pp=2, masters=False), folders=[folder])
    assert found[0] == found[1]
    (lines,) = found[0]
    assert lines[0] == "ModelMismatch" and lines[-1] == "changed: False"
    for text in (
        "fp32 masters: are on one side only",
        "blocks.1.pp_block.odd.weight: has another shape (expected [5, 3], found [5, 4])",
        "norm.pp_block.weight: is trained by this run but not by the saved one",
        "late.weight: was trained by the saved run but not by this one",
    ):
        assert any(text in line for line in lines), text


def test_states_of_another_element_type_are_refused(tmp_path: Path, worlds: Any) -> None:
    """nanotron would round them to the type of the parameter without a word."""
    run = Run(masters=False)
    held = {key: tensor.bfloat16() if key[1] != "weight" else tensor for key, tensor in values(run).items()}
    folder = str(write(run, tmp_path / "rounded", held))
    found = worlds[2].run("nanotron_jobs.load", run=Run(dp=2, masters=False), folders=[folder])
    assert found[0] == found[1]
    assert (
        "exp_avg of norm.pp_block.weight: is of another element type (expected bfloat16, found float32)" in found[0][0]
    )


@pytest.mark.parametrize("run", [Run(dp=2), Run(tp=2)], ids=["same", "another"])
def test_a_missing_file_is_refused_on_every_rank(run: Run, tmp_path: Path, worlds: Any) -> None:
    folder = write(Run(dp=2), tmp_path / "torn")
    next((folder / str(STEP) / "optimizer").glob("*dp-1-of-2*")).unlink()
    found = worlds[2].run("nanotron_jobs.load", run=run, folders=[str(folder)])
    assert found[0] == found[1] and found[0][0][0] == "CheckpointDamaged" and found[0][0][-1] == "changed: False"


def test_a_model_of_another_order_is_loaded_by_name(tmp_path: Path, worlds: Any) -> None:
    """nanotron itself loads by number: at the same topology it would give one parameter the moments of another."""
    folder = str(write(Run(model=tuple(reversed(MODEL))), tmp_path / "reversed"))
    run = Run()
    expected = values(Run(model=tuple(reversed(MODEL))))
    (found,) = worlds[1].run("nanotron_jobs.resume", run=run, folder=folder)
    for name, master in found["masters"].items():
        assert torch.equal(master.reshape(-1), expected[name, "fp32"].reshape(-1)), name


LINEAR, WARMING, FLAT = {"lr_decay_style": "linear"}, {"lr_warmup_steps": 10}, {"lr_decay_steps": 7}
INTERRUPTED: dict[str, tuple[Run, str, dict[str, Any]]] = {
    "cosine, dp 2": (Run(dp=2), "dp 2", {}),
    "cosine, dp 2 to one rank": (Run(dp=2), "dp 1", {}),
    "cosine, dp 2 to tp 2, ZeRO-0": (Run(dp=2), "tp 2, ZeRO-0", {}),
    "cosine, pp 2 tp 2 to dp 4": (Run(pp=2, tp=2), "dp 4", {}),
    "linear, pp 2": (Run(pp=2), "pp 2", LINEAR),
    "linear, pp 2, ZeRO-0 to dp 2": (Run(pp=2, zero=0), "dp 2", LINEAR),
    "linear, tp 2 to dp 2, ZeRO-0": (Run(tp=2), "dp 2, ZeRO-0", LINEAR),
    "in warm-up, tp 2, ZeRO-0": (Run(tp=2, zero=0), "tp 2, ZeRO-0", WARMING),
    "in warm-up, pp 2 to tp 2": (Run(pp=2), "tp 2", WARMING),
    "until the least rate, dp 2, ZeRO-0": (Run(dp=2, zero=0), "dp 2, ZeRO-0", FLAT),
    "until the least rate, tp 2, ZeRO-0 to pp 2": (Run(tp=2, zero=0), "pp 2", {**FLAT, **LINEAR}),
    "one scheduler of 2024, dp 2": (Run(dp=2, version="1.2", old_scheduler=True), "dp 2", {}),
    "one scheduler of 2024, pp 2 to dp 2": (Run(pp=2, version="1.2", old_scheduler=True), "dp 2", LINEAR),
}


@pytest.mark.parametrize("case", INTERRUPTED, ids=INTERRUPTED)
def test_rates_go_on_as_if_nothing_had_interrupted_them(
    case: str, saved: Callable[..., str], rates_of: Callable[..., list[float]], worlds: Any
) -> None:
    """No step too many, and the initial rate is not the decayed one; at the same topology and at another."""
    source, live, schedule = INTERRUPTED[case]
    run, rates = LIVE[live], rates_of(schedule)
    folder = saved(source, schedule=schedule)
    for found in worlds[size(run)].run("nanotron_jobs.resume", run=run, folder=folder, schedule=schedule):
        assert found["differences"] == []
        assert found["rates"] == rates[STEP:]
        assert {group["initial_lr"] for group in found["groups"]} == {PEAK}
    if case.startswith("in warm-up"):
        assert rates[STEP:11] == sorted(set(rates[STEP:11]))
    if case.startswith("until"):
        assert {round(rate, 12) for rate in rates[9:]} == {3e-5}


@pytest.mark.parametrize(
    ("policy", "changed", "expected"),
    [
        ({}, {"learning_rate": 6e-4}, "shape of this run, rate of the checkpoint"),
        ({"scheduler": "override"}, {"learning_rate": 6e-4}, "this run's"),
        ({"scheduler": "checkpoint"}, {"learning_rate": 6e-4, "min_decay_lr": 0.0}, "the checkpoint's"),
        ({"scheduler": "strict"}, {}, "the checkpoint's"),
        ({"scheduler": "reset"}, {"learning_rate": 6e-4}, "from 0"),
        ({"optimizer": "skip"}, {}, "from 0"),
    ],
)
def test_the_schedule_is_the_one_that_was_asked_for(
    policy: dict[str, str], changed: dict[str, float], expected: str, saved: Callable[..., str], worlds: Any
) -> None:
    run = Run()
    decay = 0.01 if policy.get("scheduler") == "strict" else 0.5
    (found,) = worlds[1].run(
        "nanotron_jobs.resume", run=run, folder=saved(Run(dp=2)), policy=policy, schedule=changed, decay=decay
    )
    of_run = changed if expected in ("this run's", "from 0") else {}
    (straight,) = worlds[1].run("nanotron_jobs.uninterrupted", run=run, schedule=of_run)
    assert found["rates"] == straight[0 if expected == "from 0" else STEP :]
    assert found["moments"] == (policy.get("optimizer") != "skip")
    assert [uses(line, found["rates"][:1]) for line in found["told"]] == [True] * bool(policy), found["told"]
    assert found["applied"] == bool(policy)
    row = found["report"]["group 0 initial lr"]
    assert row.this_run == changed.get("learning_rate", PEAK) and row.used == found["groups"][0]["initial_lr"]
    assert any("initial learning rate is" in warning for warning in found["warnings"]) == (not policy)


def test_a_strict_schedule_names_what_differs(saved: Callable[..., str], worlds: Any) -> None:
    with pytest.raises(Exception, match="resuming the schedule") as raised:
        worlds[2].run(
            "nanotron_jobs.resume",
            run=Run(dp=2),
            folder=saved(Run(tp=2)),
            policy={"scheduler": "strict"},
            schedule={"min_decay_lr": 1e-5, "lr_warmup_steps": 3},
            decay=0.01,
        )
    told = [str(error) for error in raised.value.errors]  # type: ignore[attr-defined]
    assert told[0] == told[1]
    assert "min_decay_lr: differs" in told[0] and "lr_warmup_steps: differs" in told[0]
    with pytest.raises(Exception, match=r"weight_decay of norm.* differs from the checkpoint's"):
        worlds[1].run("nanotron_jobs.resume", run=Run(), folder=saved(Run(), "2"), policy={"scheduler": "strict"})


@pytest.mark.parametrize(
    ("policy", "betas", "decay"),
    [
        ({}, (0.9, 0.95), 0.01),
        ({"scheduler": "override"}, (0.9, 0.95), 0.5),
        ({"hyperparameters": ["betas"]}, (0.8, 0.9), 0.01),
        ({"optimizer": "masters"}, (0.9, 0.95), 0.01),
        ({"optimizer": "skip"}, (0.8, 0.9), 0.5),
        ({"finetune": True}, (0.8, 0.9), 0.5),
    ],
)
def test_states_and_hyperparameters_are_those_that_were_asked_for(
    policy: dict[str, Any], betas: tuple[float, float], decay: float, saved: Callable[..., str], worlds: Any
) -> None:
    """At the same topology and at another; masters that are not loaded are the weights'."""
    for number, source in enumerate((Run(dp=2), Run(tp=2))):
        run, name = Run(dp=2), f"saved {number}"
        expected = values(Run())
        for rank, found in enumerate(
            worlds[2].run("nanotron_jobs.resume", run=run, folder=saved(source, name), policy=policy)
        ):
            skipped = policy.get("optimizer") == "skip" or "finetune" in policy
            assert found["moments"] == (not skipped and policy.get("optimizer") != "masters"), rank
            assert {(tuple(group["betas"]), group["weight_decay"]) for group in found["groups"]} == {(betas, decay)}
            name_of = "norm.pp_block.weight"
            part = slice(0, 4) if rank == 0 else slice(4, 7)
            assert torch.equal(found["masters"][name_of], expected[name_of, "fp32"][part]) == (not skipped)
            if rank == 0:
                told = [found["report"][row].used for row in ("fp32 masters", "moments and step")]
                moments = "from the checkpoint" if found["moments"] else "zero"
                assert told == ["from the loaded weights" if skipped else "from the checkpoint", moments]


@pytest.mark.parametrize("source", [Run(dp=2), Run(tp=2)], ids=["unchanged", "resharded"])
@pytest.mark.parametrize(
    ("policy", "masters", "moments"),
    [
        ({}, "equal to the weights", "from the checkpoint"),  # of zeros, at a step that is none
        ({"optimizer": "masters"}, "equal to the weights", "zero"),
        ({"optimizer": "skip"}, "from the loaded weights", "zero"),
    ],
)
def test_rows_of_what_is_alike_are_looked_at(
    policy: dict[str, Any], masters: str, moments: str, source: Run, tmp_path: Path, worlds: Any
) -> None:
    """Masters that are no finer than the weights of the run, and moments of zero."""
    held, of_run = values(Run()), values(Run(seed=9))
    held |= {key: torch.zeros_like(one) for key, one in held.items() if key[1].startswith("exp_avg")}
    held |= {(name, "fp32"): of_run[name, "weight"].float() for name, _ in held}
    folder = str(write(source, tmp_path / "saved", held))
    report = worlds[2].run("nanotron_jobs.resume", run=Run(dp=2), folder=folder, policy=policy)[0]["report"]
    assert [report[name].used for name in ("fp32 masters", "moments and step")] == [masters, moments]


def test_rows_of_a_load_that_changed_nothing_say_so(tmp_path: Path, worlds: Any) -> None:
    """They are measured beside what was read of the checkpoint, also where other states than zero were there before."""
    folder = str(write(Run(tp=2), tmp_path / "saved"))
    for keeps, used in ((False, "from the checkpoint"), (True, "as before this load")):
        told, _ = worlds[2].run("nanotron_jobs.load_after_updates", run=Run(dp=2), folder=folder, keeps=keeps)
        assert told == (used, used)


def test_what_is_no_hyperparameter_is_refused(saved: Callable[..., str], worlds: Any) -> None:
    with pytest.raises(Exception, match="is not a hyper-parameter of this run"):
        worlds[1].run("nanotron_jobs.resume", run=Run(), folder=saved(Run()), policy={"hyperparameters": ["momentum"]})


@pytest.mark.parametrize(
    ("policy", "step", "samples"),
    [
        ({}, STEP, 8 * STEP),
        ({"iteration": "reset"}, 0, 0),
        ({"dataloader": "reset"}, STEP, 0),
        ({"finetune": True}, 0, 0),
    ],
)
def test_counters_are_those_that_were_asked_for(
    policy: dict[str, Any], step: int, samples: int, saved: Callable[..., str], worlds: Any
) -> None:
    (found,) = worlds[1].run("nanotron_jobs.resume", run=Run(), folder=saved(Run()), policy=policy)
    metadata = found["metadata"]
    assert (metadata["last_train_step"], metadata["consumed_train_samples"]) == (step, samples)
    assert metadata["data_stages"][0]["consumed_train_samples"] == samples
    assert found["report"]["iteration"].used == step


@pytest.mark.parametrize(
    "policy", [{"hyperparameters": ["global_batch_size"]}, {"scheduler": "override"}, {"optimizer": "skip"}]
)
def test_another_global_batch_size_that_was_asked_for_is_told(
    policy: dict[str, Any], saved: Callable[..., str], worlds: Any
) -> None:
    """config.yaml of the checkpoint has what makes it up; the report says the key as it was given."""
    (found,) = worlds[1].run("nanotron_jobs.resume", run=Run(), folder=saved(Run(dp=2)), accumulation=4, policy=policy)
    row = found["report"]["global batch size"]
    ((key, value),) = policy.items()
    assert (row.checkpoint, row.used, row.because) == (8, 4, f'"{key}": {json.dumps(value)}')
    assert any("global batch size is 4, and was 8" in warning for warning in found["warnings"])


def test_random_states_are_restored_where_the_ranks_are_the_same(saved: Callable[..., str], worlds: Any) -> None:
    run, folder = Run(dp=2), saved(Run(dp=2))
    worlds[2].run("nanotron_jobs.random_states", run=run, folder=folder)
    for rank, found in enumerate(worlds[2].run("nanotron_jobs.resume", run=run, folder=folder)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 + rank)
            assert torch.equal(found["random"], torch.random.get_rng_state()), rank
        if rank == 0:
            assert found["report"]["random states"].used == "from the checkpoint"
    other, _ = worlds[2].run("nanotron_jobs.resume_unrestored", run=run, folder=folder)
    assert other["report"]["random states"].used == "of this run"
    (other,) = worlds[1].run("nanotron_jobs.resume", run=Run(), folder=folder)
    assert other["report"]["random states"].used == "of this run"
    assert any("random states are of this run" in warning for warning in other["warnings"])
    (told,) = worlds[1].run("nanotron_jobs.load_random", run=Run(), folder=folder)
    assert told.startswith("CheckpointNotFound") and "--no-load-rng" in told
    (kept, _) = worlds[2].run("nanotron_jobs.resume", run=run, folder=folder, policy={"rng": False})
    assert kept["report"]["random states"].because == '"rng": false'
    assert kept["told"] and kept["told"][0].endswith("random states of this run")


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.acts
def test_random_states_that_would_run_something_are_refused(
    saved: Callable[..., str], tmp_path: Path, worlds: Any
) -> None:
    folder = saved(Run())
    place = Path(folder) / str(STEP) / "random"
    place.mkdir()
    torch.save({"tp_synced": Hostile(tmp_path / "was run")}, place / "tp-0-of-1_dp-0-of-1_pp-0-of-1.pt")
    (told,) = worlds[1].run("nanotron_jobs.load_random", run=Run(), folder=folder)
    assert told.startswith(("UnsafePickle", "TrustRequired")) and not (tmp_path / "was run").exists()


@pytest.mark.parametrize("run", [Run(dp=2), Run(dp=2, zero=0), Run(tp=2)], ids=["ZeRO-1", "ZeRO-0", "tp"])
def test_each_scheduler_file_has_one_writer(run: Run, tmp_path: Path, worlds: Any) -> None:
    """Under ZeRO-1 too, and under the name that nanotron without hooks asks for."""
    files = worlds[2].run("nanotron_jobs.save", run=run, out=str(tmp_path / "out"))[0]
    assert files == [f"lr_scheduler_pp-0-of-1_tp-{tp}-of-{run.tp}_exp-0-of-1.pt" for tp in range(run.tp)]


def test_a_configuration_of_another_stage_is_refused_before_saving(tmp_path: Path, worlds: Any) -> None:
    with pytest.raises(Exception, match=r"optimizer\.zero_stage: is not what the optimizer is"):
        worlds[2].run("nanotron_jobs.save", run=Run(dp=2), out=str(tmp_path / "out"), config={"zero_stage": 0})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("stage", "saved"),
        ("dropped by name", "saved"),
        ("dropped by position", "root_folder: is not passed"),
        ("wrong", "is_zero: is not what the optimizer is"),
    ],
)
def test_is_zero_is_derived_and_never_trusted(how: str, told: str, tmp_path: Path, worlds: Any) -> None:
    for found in worlds[2].run("nanotron_jobs.call_save", run=Run(dp=2), out=str(tmp_path), how=how):
        assert told in found


def test_a_schedule_that_is_asked_for_and_not_loaded_is_refused(saved: Callable[..., str], worlds: Any) -> None:
    with pytest.raises(Exception, match=r"checkpoints\.load_lr_scheduler: contradicts the resume policy"):
        worlds[1].run(
            "nanotron_jobs.resume",
            run=Run(),
            folder=saved(Run()),
            policy={"scheduler": "override"},
            checkpoints={"load_lr_scheduler": False},
        )


@pytest.mark.parametrize("schedule", [True, False])
def test_masters_that_are_asked_for_and_not_loaded_are_refused(
    schedule: bool, saved: Callable[..., str], worlds: Any
) -> None:
    """And without the flag the report says what the optimizer that nobody loads holds."""
    given = {"run": Run(), "folder": saved(Run())}
    switches = {"load_optimizer": False, "load_lr_scheduler": schedule}
    with pytest.raises(Exception, match=r"checkpoints\.load_optimizer: contradicts the resume policy"):
        worlds[1].run("nanotron_jobs.resume", **given, policy={"optimizer": "masters"}, checkpoints=switches)
    (found,) = worlds[1].run("nanotron_jobs.resume", **given, checkpoints=switches)
    rows = [found["report"][name] for name in ("fp32 masters", "moments and step")]
    assert [row.used for row in rows] == ["from the loaded weights", "zero"]
    assert {row.because for row in rows} == {"checkpoints.load_optimizer"}


def test_every_copy_of_a_name_is_patched(worlds: Any) -> None:
    """serialize/main.py, serialize/__init__.py and trainer.py bind names by `from ... import`."""
    (names,) = worlds[1].run("nanotron_jobs.copies")
    assert json.loads(names) == {"left": [], "restored": True}
