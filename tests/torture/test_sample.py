"""A sample of `make torture`: of its cases, each so manieth."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from calls import Step
from on_ranks import Tried

pytestmark = pytest.mark.slow


def test_a_conversion_that_fails_leaves_all_or_nothing() -> None:
    """In a process of its own, of which each case is a fork."""
    command = [sys.executable, str(Path(__file__).with_name("__main__.py")), "--every", "499"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["tried"] > 40 and said["wrong"] == 0


def test_nothing_tried_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """A command that chooses no case, or finds none, does not end well."""
    tried = Tried(1)
    assert tried.end() == 1 and json.loads(capsys.readouterr().out)["tried"] == 0
    tried.counts("write", (), ())
    assert tried.end() == 0


WORKS: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("__main__.py")), run_name="conversions")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run in each format."""
    made: dict[str, Path] = WORKS["sources"](tmp_path_factory.mktemp("sources"))
    return made


@pytest.mark.parametrize("name", [name for name, conversion in WORKS["WORKS"].items() if not conversion.resume])
def test_all_of_an_output_is_on_the_disk_before_it_takes_its_name(
    name: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    """After a power cut: bytes and names are synced in the workspace, then it is renamed, then the name is synced."""
    conversion = WORKS["WORKS"][name]
    work = WORKS["Work"](conversion, saved[conversion.source], tmp_path)
    taken = [number for number, step in enumerate(work.steps) if (step.kind, step.path) == ("rename", "out")]
    seen, unsynced = synced(work.steps[: taken[-1]])
    out = "out.ds-reshard/out"
    assert {f"{out}/{file}" for file in work.expected} <= seen
    assert [path for path in sorted(unsynced) if f"{path}/".startswith(f"{out}/")] == []
    assert Step("fsync", ".", 1) in work.steps[taken[-1] :]


PART = "out.ds-reshard/CHANCE.part"


def synced(steps: list[Step]) -> tuple[set[str], set[str]]:
    """The names that were given, and of them the files and folders that have changed since they were last synced."""
    seen, unsynced = set[str](), set[str]()
    for kind, path, _ in steps:
        if kind == "fsync":
            unsynced.discard(path)
        elif kind in ("write", "truncate"):
            unsynced.add(path)
        elif kind in ("create", "mkdir", "rename"):
            seen.add(path)
            unsynced.add(os.path.dirname(path))
            if kind == "create":
                unsynced.add(path)
            if kind == "rename":
                (unsynced.add if PART in unsynced else unsynced.discard)(path)
                unsynced.discard(PART)
    return seen, unsynced


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("script", "every", "least"), [("loads", 397, 20), ("verified_saves", 83, 20), ("ranks", 29, 2), ("stores", 149, 6)]
)
def test_a_load_or_a_verified_save_that_fails_leaves_all_or_nothing(
    script: str, every: int, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks, and the clients of a store, are forks of the server of this session."""
    status = importlib.import_module(script).main(["--every", str(every)])
    text = capsys.readouterr().out
    assert status == 0, text[-3000:]
    said = json.loads(text.splitlines()[-1])
    assert said["tried"] > least and said["wrong"] == 0
