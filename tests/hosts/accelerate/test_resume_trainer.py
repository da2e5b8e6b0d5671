"""Hugging Face's Trainer under a policy that is given from the start: what it saved itself is no resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from logs import heard

from ds_reshard.hosts import transformers as host

pytestmark = pytest.mark.distributed


def test_the_folder_that_true_means_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `resume_from_checkpoint=True` the last checkpoint by its number; none where there is none."""
    trainer: Any = SimpleNamespace(args=SimpleNamespace(output_dir=str(tmp_path)), is_world_process_zero=lambda: True)
    assert host._folder(trainer, True) is host._folder(trainer, None) is host._folder(trainer, False) is None
    for number in (2, 10, 9):
        (tmp_path / f"checkpoint-{number}").mkdir()
    folder = str(tmp_path / "checkpoint-10")
    assert host._folder(trainer, True) == folder
    for step in ("refuse_unsafe_checkpoint", "refuse_policy"):
        monkeypatch.setattr(host, step, lambda *_: None)
    monkeypatch.setattr(host, "_config", lambda _: {"ds_reshard": {"resume": {"finetune": True}}})
    call: Any = _Call({"self": trainer, "resume_from_checkpoint": True})
    with heard() as told:
        host.train(call)
    assert len(told) == 1 and f"trainer_state.json of {folder} " in told[0]


class _Call(dict[str, Any]):
    """A call of `Trainer.train`, as its seam gets it."""

    arguments: ClassVar[dict[str, Any]] = {}

    def __call__(self) -> None:
        pass


@pytest.mark.parametrize("own_scheduler", [True, False], ids=["the Trainer's scheduler", "the engine's scheduler"])
def test_the_best_checkpoint_of_the_run_is_loaded_at_its_end(worlds: Any, tmp_path: Path, own_scheduler: bool) -> None:
    """`load_best_model_at_end` after training; and a resume takes the new rate at the saved position."""
    first = worlds[1].run("trainer_jobs.best_at_end", folder=str(tmp_path / "1"), own_scheduler=own_scheduler)[0]
    assert first["error"] is None, first["error"]
    assert Path(first["best"]).name == "checkpoint-6" and first["own"] == 1
    second = worlds[1].run(
        "trainer_jobs.best_at_end",
        folder=str(tmp_path / "2"),
        own_scheduler=own_scheduler,
        resume_from=str(tmp_path / "1" / "checkpoint-2"),
        lr=0.5,
    )[0]
    assert second["error"] is None, second["error"]
    assert second["own"] == 0, "what another run has saved is a resume"
    assert second["rates"][2:] == pytest.approx([50 * rate for rate in first["rates"][6:]])
    assert second["rates"][0] == pytest.approx(50 * first["rates"][4])


@pytest.mark.parametrize("policy", [{"scheduler": "override"}, {"optimizer": "skip"}, {"finetune": True}], ids=str)
def test_the_best_checkpoint_of_the_run_before_is_loaded_at_the_end(
    worlds: Any, tmp_path: Path, policy: dict[str, Any]
) -> None:
    """The Trainer remembers it through a resume that finds no better one: to load it is no resume either."""
    given = {"own_scheduler": True, "rising": True, "beside": ("transformers",)}
    first = worlds[2].run("trainer_jobs.best_at_end", folder=str(tmp_path / "1"), **given)[0]
    best = str(tmp_path / "1" / "checkpoint-2")
    assert first["error"] is None and first["best"] == best
    second = worlds[1].run(
        "trainer_jobs.best_at_end",
        folder=str(tmp_path / "2"),
        resume_from=str(tmp_path / "1" / "checkpoint-4"),
        policy=policy,
        **given,
    )[0]
    assert second["error"] is None, second["error"]
    assert second["best"] == best and second["rates"], "it trained on"
    for name, value in first["weights"].items():
        assert torch.equal(second["weights"][name], value), name


def test_a_count_of_updates_of_other_samples_is_told(worlds: Any, tmp_path: Path) -> None:
    """By the files of another number of processes: the Trainer passes over as many updates of this run's batches."""
    worlds[2].run("unsafe_jobs.trainer_save", folder=str(tmp_path))
    asked = {"folder": str(tmp_path / "again"), "wanted": str(tmp_path / "checkpoint-2")}
    (told,) = worlds[1].run("unsafe_jobs.trainer_data", accumulation=1, **asked)
    assert len(told) == 1 and "counts 2 updates of 4 samples, and an update of this run has 2" in told[0]
    assert "goes on at sample 4 of its data, and not at 8" in told[0] and "x processes = 4)" in told[0]
    assert worlds[1].run("unsafe_jobs.trainer_data", accumulation=2, **asked) == [[]]
    first, second = worlds[2].run("unsafe_jobs.trainer_data", accumulation=2, **asked)
    assert "an update of this run has 8: the Trainer goes on at sample 16" in first[0] and second == []
    assert worlds[2].run("unsafe_jobs.trainer_data", accumulation=1, **asked) == [[], []]


def test_a_batch_that_processes_split_is_that_of_all(worlds: Any, tmp_path: Path) -> None:
    """With split_batches the number of processes changes no update, and without it in one run of the two, it does."""
    for split in (False, True):
        worlds[2].run("unsafe_jobs.trainer_save", folder=str(tmp_path / str(split)), split=split)
    again = {"folder": str(tmp_path / "again"), "accumulation": 1}
    divided = {"wanted": str(tmp_path / "True" / "checkpoint-2"), **again}
    for processes in (1, 2):
        assert worlds[processes].run("unsafe_jobs.trainer_data", split=True, **divided) == [[]] * processes
    told = [
        worlds[2].run("unsafe_jobs.trainer_data", split=False, **divided)[0],
        worlds[2].run("unsafe_jobs.trainer_data", split=True, wanted=str(tmp_path / "False" / "checkpoint-2"), **again)[
            0
        ],
    ]
    for (line,), (then, now) in zip(told, ((2, 4), (4, 2)), strict=True):
        assert f"counts 2 updates of {then} samples, and an update of this run has {now}" in line
