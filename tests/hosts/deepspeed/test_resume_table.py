"""The table of docs/resume.md: each cell of `optimizer` and `scheduler`, and every other key of the policy."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from cases import Run
from gathered import gathered, same_bits
from resume_jobs import Setup
from resumed import STEPS, rates, resume, same_tensors, uninterrupted

pytestmark = pytest.mark.distributed

SCHEDULES = {
    "WarmupDecayLR": (
        Setup(
            json=True,
            groups=1,
            scheduler=("WarmupDecayLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "total_num_steps": 20}),
        ),
        ("WarmupDecayLR", {"warmup_max_lr": 0.5, "warmup_num_steps": 3, "total_num_steps": 30}),
    ),
    "CosineAnnealingLR": (Setup(scheduler=("CosineAnnealingLR", {"T_max": 40})), ("CosineAnnealingLR", {"T_max": 60})),
}
RUNS = (Run(1, 1), Run(3, 2))
CELLS = [
    (optimizer, scheduler)
    for optimizer in ("load", "skip", "masters")
    for scheduler in ("host", "override", "checkpoint", "strict", "reset")
]


def _rows() -> list[tuple[str, Run, str, str]]:
    """Every cell with either schedule; the layouts take turns, so that each meets each value of the others.

    Where a cell is another on another layout, both are there.
    """
    rows = [
        (kind, RUNS[(at + at // 5 + number) % 2], *cell)
        for number, kind in enumerate(SCHEDULES)
        for at, cell in enumerate(CELLS)
    ]
    strict = [(kind, run, "skip", "strict") for kind in SCHEDULES for run in RUNS]
    return rows + [row for row in strict if row not in rows]


def _pair(kind: str, run: Run) -> tuple[Setup, Setup]:
    saved, schedule = SCHEDULES[kind]
    saved = saved.but(run=run)
    return saved, saved.but(lr=0.5, weight_decay=0.7, scheduler=schedule)


def test_every_pair_of_values_occurs() -> None:
    found = [(kind, str(run), *cell) for kind, run, *cell in _rows()]
    for one, other in combinations(range(4), 2):
        pairs = {(row[one], row[other]) for row in found}
        assert len(pairs) == len({row[one] for row in found}) * len({row[other] for row in found}), (one, other)
    assert {row[2:] for row in found} == set(CELLS)


@pytest.mark.parametrize(("kind", "run", "optimizer", "scheduler"), _rows(), ids=str)
def test_each_cell_of_optimizer_and_scheduler(
    worlds: Any, kept: Any, kind: str, run: Run, optimizer: str, scheduler: str
) -> None:
    old, new = _pair(kind, run)
    folder, saved = kept(old)
    setup = old if scheduler == "strict" else new
    loaded = resume(worlds, setup.but(policy={"optimizer": optimizer, "scheduler": scheduler}), folder)
    if (optimizer, scheduler, run.stage) == ("skip", "strict", 1):
        assert loaded[0]["error"] == "UnsupportedLayout" and "cannot be compared" in loaded[0]["text"]
        return
    assert loaded[0]["error"] is None, loaded[0].get("text")
    _check_tensors(saved, loaded, optimizer)
    got = rates(loaded[0]["rates"], ("lr",))
    fresh = rates(uninterrupted(worlds, setup, 0), ("lr",))
    there = rates(saved[0]["rates"], ("lr",))
    if scheduler == "override":
        expected = rates(uninterrupted(worlds, new), ("lr",))
    elif scheduler == "checkpoint":
        expected = there
    elif scheduler == "reset" or optimizer == "skip":
        expected = fresh
    elif scheduler == "strict" or kind == "CosineAnnealingLR":
        expected = there
    else:  # DeepSpeed's own schedulers: the checkpoint's rate once, then this run's schedule
        expected = [there[0], *rates(uninterrupted(worlds, new), ("lr",))[1:]]
    assert got == expected
    assert loaded[0]["counters"][0] == STEPS


def _check_tensors(saved: Any, loaded: Any, optimizer: str) -> None:
    if optimizer == "load":
        same_tensors(saved, loaded)
        return
    got = gathered(loaded)
    for (name, kind), values in got.items():
        if kind != "fp32":
            assert not values.any(), f"{name} {kind} is not fresh"
    if optimizer == "masters":
        same_tensors(saved, loaded, ("fp32",))
    for name, weight in saved[0]["weights"].items():
        assert same_bits(weight, loaded[0]["weights"][name])
        if optimizer == "skip":
            assert same_bits(got[name, "fp32"], weight.float().view(-1))
    assert all(scalar != 5.0 for (_, kind), scalar in loaded[0]["scalars"].items() if kind == "step")


@pytest.mark.parametrize("run", (Run(0, 1), Run(2, 2), Run(3, 2)), ids=str)
def test_hyper_parameters_named_come_from_this_run_and_no_others(worlds: Any, kept: Any, run: Run) -> None:
    saved_as = Setup(run=run, scheduler=("CosineAnnealingLR", {"T_max": 40}))
    folder, saved = kept(saved_as)
    new = saved_as.but(betas=(0.5, 0.6), eps=1e-3, weight_decay=0.7, clip=0.25)
    loaded = resume(worlds, new.but(policy={"hyperparameters": ["betas", "clip_grad"]}), folder)
    assert loaded[0]["error"] is None, loaded[0].get("text")
    for step, before in zip(loaded[0]["rates"], saved[0]["rates"], strict=True):
        for group, old in zip(step, before, strict=True):
            assert group["betas"] == (0.5, 0.6) and group["clip"] == 0.25
            assert group["eps"] == old["eps"] and group["weight_decay"] == old["weight_decay"]
            assert group["lr"] == old["lr"]
    same_tensors(saved, loaded)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_finetune_takes_weights_alone_and_starts_at_iteration_zero(worlds: Any, kept: Any, run: Run) -> None:
    old, new = _pair("CosineAnnealingLR", run)
    folder, saved = kept(old)
    loaded = resume(worlds, new, folder, flags=["--finetune"])
    assert loaded[0]["error"] is None, loaded[0].get("text")
    _check_tensors(saved, loaded, "skip")
    assert loaded[0]["counters"] == (0, 0)
    assert rates(loaded[0]["rates"]) == rates(uninterrupted(worlds, new, 0))


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_reset_iteration_keeps_moments_and_the_optimizers_own_step(worlds: Any, kept: Any, run: Run) -> None:
    old, new = _pair("CosineAnnealingLR", run)
    folder, saved = kept(old)
    loaded = resume(worlds, new, folder, flags=["--reset-iteration", "--override-opt_param-scheduler"])
    assert loaded[0]["error"] is None, loaded[0].get("text")
    same_tensors(saved, loaded)
    assert loaded[0]["scalars"] == saved[0]["scalars"]
    assert loaded[0]["counters"] == (0, 0)
    assert rates(loaded[0]["rates"]) == rates(uninterrupted(worlds, new, 0))
    assert any("overwrite" in warning for warning in loaded[0]["report"]["warnings"])
    kept_position = resume(worlds, new.but(policy={"iteration": "reset", "scheduler": "checkpoint"}), folder)
    assert rates(kept_position[0]["rates"]) == rates(saved[0]["rates"])


def test_skipping_the_optimizer_opens_none_of_its_files(worlds: Any, kept: Any) -> None:
    """People pass --no-load-optim when the optimizer's files are gone or broken."""
    old, new = _pair("CosineAnnealingLR", Run(2, 2))
    folder, saved = worlds_copy(kept(old))
    for path in folder.rglob("*optim_states.pt"):
        path.write_bytes(b"broken") if "rank_0" in path.name else path.unlink()
    for target in (Run(2, 2), Run(1, 1), Run(3, 2)):
        loaded = resume(worlds, new.but(run=target), folder, flags=["--no-load-optim"])
        assert loaded[0]["error"] is None, loaded[0].get("text")
        _check_tensors(saved, loaded, "skip")


def worlds_copy(made: Any) -> Any:
    import shutil

    folder, saved = made
    other = Path(f"{folder}-copy")
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(folder, other)
    return other, saved


@pytest.mark.parametrize("kind", SCHEDULES)
def test_loading_twice_is_loading_once(worlds: Any, kept: Any, kind: str) -> None:
    old, new = _pair(kind, Run(1, 1))
    folder, saved = kept(old)
    new = new.but(policy={"scheduler": "override"})
    loaded = resume(worlds, new, folder, twice=True)
    assert rates(loaded[0]["rates"]) == rates(uninterrupted(worlds, new))
    same_tensors(saved, loaded)


def test_the_report_says_what_was_used_and_because_of_what(worlds: Any, kept: Any, tmp_path: Path) -> None:
    old, new = _pair("CosineAnnealingLR", Run(2, 2))
    folder, _ = kept(old)
    path = tmp_path / "report.json"
    flags = ["--override-opt-param-scheduler", "--override-optim-hparams", "betas", "--resume-report", str(path)]
    loaded = resume(worlds, new.but(betas=(0.5, 0.6)), folder, flags=flags)
    report = json.loads(path.read_text())
    assert report == json.loads(json.dumps(loaded[0]["report"]))
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["iteration"]["used"] == STEPS and rows["schedule position"]["used"] == STEPS
    decay = rows["group 0: weight_decay"]
    assert (decay["checkpoint"], decay["this_run"], decay["used"]) == (0.1, 0.7, 0.7)
    assert decay["because"] == "--override-opt-param-scheduler"
    assert rows["group 0: betas"]["used"] == [0.5, 0.6]
    assert rows["group 0: betas"]["because"] == "--override-optim-hparams"
    assert rows["stage and dp"]["checkpoint"] == [2, 2]
    assert rows["global batch size"]["checkpoint"] == rows["global batch size"]["used"]


def test_the_report_of_weights_alone_has_the_stage_that_was_saved(worlds: Any, kept: Any) -> None:
    """Stages 1 and 2 have the same model file: the optimizer's files, which tell, are not opened."""
    for stage in (1, 2):
        folder, _ = kept(Setup(run=Run(stage, 2)))
        loaded = resume(worlds, Setup(run=Run(1, 1)), folder, flags=["--no-load-optim"])
        rows = {row["name"]: row for row in loaded[0]["report"]["rows"]}
        assert tuple(rows["stage and dp"]["checkpoint"]) == (stage, 2)


REFUSED = {
    "plateau": (
        Setup(scheduler=("ReduceLROnPlateau", {})),
        ["--override-opt-param-scheduler"],
        {},
        "UnsupportedLayout",
        "metrics",
    ),
    "lr without override": (
        Setup(scheduler=("CosineAnnealingLR", {"T_max": 40})),
        ["--override-optim-hparams", "lr"],
        {},
        "ConfigError",
        "--override-opt-param-scheduler",
    ),
    "unknown hyper-parameter": (Setup(), ["--override-optim-hparams", "beta"], {}, "ConfigError", "betas"),
    "no scheduler in the checkpoint": (
        Setup(scheduler=("CosineAnnealingLR", {"T_max": 40})),
        ["--use-checkpoint-opt-param-scheduler"],
        {},
        "ConfigError",
        "has no scheduler",
    ),
    "two flags": (Setup(), ["--no-load-lr-state", "--override-opt-param-scheduler"], {}, "ConfigError", "contradict"),
    "flag and argument": (
        Setup(scheduler=("CosineAnnealingLR", {"T_max": 40})),
        ["--override-opt-param-scheduler"],
        {"load_lr_scheduler_states": False},
        "ConfigError",
        "contradicts",
    ),
    "finetune with masters": (Setup(), ["--finetune", "--load-masters-only"], {}, "ConfigError", "finetune"),
    "rng": (Setup(), ["--no-load-rng"], {}, "ConfigError", "random"),
    "data": (Setup(), ["--reset-dataloader"], {}, "ConfigError", "curriculum"),
    "checkpoint without its optimizer": (
        Setup(),
        ["--use-checkpoint-opt-param-scheduler"],
        {"load_optimizer_states": False},
        "ConfigError",
        "files",
    ),
    "masters without the optimizer": (
        Setup(),
        ["--load-masters-only"],
        {"load_optimizer_states": False},
        "ConfigError",
        "masters",
    ),
    "a structural hyper-parameter": (Setup(), ["--override-optim-hparams", "amsgrad"], {}, "ConfigError", "betas"),
    "json": (Setup(policy={"scheduler": "overide"}), [], {}, "ConfigError", "override"),
    "json key": (Setup(policy={"schedulers": "override"}), [], {}, "ConfigError", "scheduler"),
    "json and flag": (
        Setup(policy={"scheduler": "reset"}),
        ["--override-opt-param-scheduler"],
        {},
        "ConfigError",
        "DeepSpeed JSON",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name_and_changes_nothing(worlds: Any, kept: Any, case: str) -> None:
    setup, flags, arguments, error, words = REFUSED[case]
    run = Run(2, 2)
    folder, _ = kept(Setup(run=run))
    refused = resume(worlds, setup.but(run=run), folder, flags=flags, arguments=arguments)
    assert refused[0]["error"] == error, refused[0].get("text")
    assert words in refused[0]["text"] and "To mend" in refused[0]["text"]
    assert all(rank["unchanged"] and rank["text"] == refused[0]["text"] for rank in refused)
