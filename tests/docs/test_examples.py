"""The examples run as they stand and say what they promise; the demo can say no; the documents leave nothing out."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

import ds_reshard
from ds_reshard.hosts.deepspeed.settings import parse_settings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))
TIMEOUT_S = 240

# Every line of each example's standard output, as a pattern; equal groups must match equal text.
PRINTED = {
    "00_core.py": (
        r"(rank [01]: 6 x 1, 2 copies from 2 files\n){2}"
        r"rank 2: 6 x 2, 2 copies from 2 files\n"
        r"equal to the matrix that was saved: True\n"
    ),
    "01_change_ranks.py": (
        r"4 ranks saved step 20\n"
        r"2 ranks go on at step 20 of a run of 4 ranks\n"
        r"2 ranks saved step 40\n"
    ),
    "02_change_stage.py": (
        r"ZeRO-1 saved step 10, loss (?P<first>\d+\.\d{6})\n"
        r"ZeRO-3 goes on: loss (?P=first), and (?P=first) when it was saved\n"
        r"ZeRO-3 saved step 20, loss (?P<second>\d+\.\d{6})\n"
        r"ZeRO-2 goes on: loss (?P=second), and (?P=second) when it was saved\n"
        r"ZeRO-2 saved step 30, loss \d+\.\d{6}\n"
    ),
    "03_new_learning_rate.py": (
        r"saved after 20 updates, the last at 0.009111\n"
        r"no flag: 0.009000, 0.000889, 0.000878, as foretold, moments bit-identical\n"
        r"override: 0.000900, 0.000889, 0.000878, as foretold, moments bit-identical\n"
    ),
    "04_megatron_learning_rate.py": (
        r"skipped: .*; pip install megatron-core\n|"
        r"saved at step 20, learning rate 2\.460e-04\n"
        r"goes on at step 20, learning rate 2\.800e-05, moments kept: True\n"
    ),
    "05_scheduler_before_prepare.py": (
        r"asked for 1\.00e-05, without the hooks: 0\.00e\+00, 0\.00e\+00, 5\.00e-04, 1\.00e-03, 1\.00e-03\n"
        r"asked for 1\.00e-05, with the hooks: 0\.00e\+00, 0\.00e\+00, 5\.00e-06, 1\.00e-05, 1\.00e-05\n"
        r"cosine on a DummyOptim: 1\.00e-05, 9\.76e-06, 9\.05e-06, 7\.94e-06, 6\.55e-06\n"
        r"resumed: 5\.00e-06, 3\.45e-06, 2\.06e-06, 9\.55e-07, 2\.45e-07\n"
    ),
    "06_nanotron_topology.py": (
        r"step 7: tp 1, dp 3, ZeRO-1, faults: 0\n"
        r"rank 1 has elements 11 to 21 of moments and masters: True\n"
        r"tensors that differ: 0\n"
    ),
    # With nanotron, which needs a GPU, it is run by tests/hosts/nanotron_runs/test_nanotron_example.py on a stand-in.
    "07_nanotron_resume.py": r"skipped: No module named 'nanotron'; pip install git\+https://.*\n",
    "08_trainer.py": (
        r"(update [1-4]: learning rate 0\.001000\n){4}\{'train_runtime'.*\}\n"
        r"(update [56]: learning rate 0\.000100\n){2}\{'train_runtime'.*\}\n"
    ),
    # With a node that is lost, it is run by tests/hosts/deepspeed/test_elastic.py.
    "09_elastic.py": r"at step 0 with dp 2: 4 micro batches an update\n",
    "10_accelerate.py": r"(update [1-4]: learning rate 0\.001000\n){4}(update [56]: learning rate 0\.000100\n){2}",
}


def test_every_example_has_an_outcome() -> None:
    """The examples that are there are those that are run below, and there are some."""
    assert [path.name for path in EXAMPLES] == sorted(PRINTED)
    assert EXAMPLES


def _run(path: Path, python: str) -> tuple[int, str, str]:
    """Exit status, output and errors of an example; after the time limit its whole process group is killed."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [python, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, output, errors


@pytest.mark.distributed
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_its_outcome(path: Path, interpreter: str) -> None:
    """Run by plain python, each example launches its ranks and prints exactly what it is about."""
    status, output, errors = _run(path, interpreter)
    assert status == 0, f"{path.name} ended with {status}:\n{output}{errors}"
    # DeepSpeed logs to standard output as well; its lines begin with a date in brackets.
    lines = [line for line in output.splitlines(keepends=True) if not line.startswith("[")]
    assert re.fullmatch(PRINTED[path.name], "".join(lines)), f"{path.name} printed:\n{output}"


@pytest.fixture
def demo_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.mark.distributed
@pytest.mark.usefixtures("demo_path")
def test_the_demo_names_the_rank_that_fails(tmp_path: Path) -> None:
    """A rank that raises ends the demo with the end of its log, and no process is left."""
    from gpt_demo.ranks import RankFailed, run_ranks

    before = multiprocessing.active_children()
    with pytest.raises(RankFailed, match=r"(?s)rank [01] ended with status 1; .*no attribute 'no_such_job'"):
        run_ranks("no_such_job", 2, tmp_path / "run", lambda step, loss: None)
    assert set(multiprocessing.active_children()) <= set(before)


def _held(folder: Path, name: str, **changes: object) -> object:
    """One rank's contents, written and joined as the demo does it; `changes` replace kinds or facts."""
    from gpt_demo.comparison import KINDS, Joined
    from gpt_demo.layouts import Contents

    pieces = {("w", kind): (0, torch.zeros(3)) for kind in KINDS}
    pieces |= {("w", kind): (0, value) for kind, value in changes.items() if isinstance(value, torch.Tensor)}
    contents = Contents(pieces=pieces, facts={"counters": changes.get("counters", 1)})
    torch.save(contents, folder / name)
    return Joined([folder / name])


@pytest.mark.usefixtures("demo_path")
@pytest.mark.parametrize(
    ("changes", "equal"),
    [
        ({}, True),
        ({"exp_avg": torch.tensor([0.0, -0.0, 0.0])}, False),
        ({"fp32": torch.tensor([0.0, 0.0, 1e-45])}, False),
        ({"weight": torch.zeros(3, dtype=torch.bfloat16)}, False),
        ({"momentum": torch.zeros(3)}, False),
        ({"counters": 2}, False),
    ],
    ids=["same", "sign-of-a-zero", "lowest-bit", "another-type", "one-more-state", "another-counter"],
)
def test_the_demo_sees_the_smallest_difference(tmp_path: Path, changes: dict[str, object], equal: bool) -> None:
    """One bit, one type, one state or one counter is enough for the demo to say that not everything is equal."""
    from gpt_demo.comparison import compare

    assert compare(_held(tmp_path, "saved"), _held(tmp_path, "resumed", **changes)).equal is equal


def test_every_error_is_documented() -> None:
    """Each exported error has a row in the table of docs/errors.md, and a section with an example text."""
    exported = {getattr(ds_reshard, name) for name in ds_reshard.__all__ if name != "__version__"}
    errors = {
        kind.__name__
        for kind in exported
        if isinstance(kind, type) and issubclass(kind, ds_reshard.ReshardError) and kind is not ds_reshard.ReshardError
    }
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[`(\w+)`\]", text, flags=re.MULTILINE)) == errors
    assert set(re.findall(r"^## (\w+)\n\n```text\n", text, flags=re.MULTILINE)) == errors


def test_the_documented_settings_are_the_defaults() -> None:
    """The first block of docs/settings.md names every setting with its default; its table has a row for each."""
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    block = re.search(r"```json\n(.*?)```", text, flags=re.DOTALL)
    assert block
    section = json.loads(block.group(1))["ds_reshard"]
    section["reshard"]["threads"] = parse_settings({}).threads  # the number of cores, at most 4
    assert section.pop("resume") == {}  # the same as none: its keys have a page of their own
    assert parse_settings({"ds_reshard": section}) == parse_settings({})
    keys = {
        "enabled",
        "resume",
        "trust",
        "names",
        "progress",
        "events",
        "timeout_s",
        "accelerate.clock",
        "accelerate.position",
        *(f"reshard.{key}" for key in section["reshard"]),
    }
    assert set(re.findall(r"^\| `([\w.]+)` \|", text, flags=re.MULTILINE)) == keys
    fields = {field.name for field in dataclasses.fields(parse_settings({}))}
    assert {key.rpartition(".")[2] for key in keys} == fields | {"position"}  # of hosts.accelerate alone
