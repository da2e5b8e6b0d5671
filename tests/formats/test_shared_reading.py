"""`verify`, `fingerprint` and `diff` by several processes, and by the ranks of torchrun: what one process says."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import impatient, in_ranks, launched
from hypothesis import given
from hypothesis import strategies as st
from ports import free_port
from zero_builder import Built, write

from ds_reshard.cli.main import main
from ds_reshard.errors import ReadFailed
from ds_reshard.execution import threads
from ds_reshard.operations import Reading, diff, fingerprint, runner, verify

SHAPES = tuple((f"p{i}", (7, i + 1)) for i in range(9))
COPIES = Reading(threads=3, memory_nbytes=256 << 20, processes=3)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Synthetic: a checkpoint, another of the same shapes, and one with a byte changed. Little calls for copies."""
    monkeypatch.setattr(runner, "LEAST_NBYTES", 1)
    for name, seed in (("saved", 5), ("other", 6)):
        write(Built(groups=(SHAPES,), frozen=(), tied=(), states=("exp_avg",), dp=4, seed=seed), tmp_path / name)
    shutil.copytree(tmp_path / "saved", tmp_path / "harmed")
    path = min((tmp_path / "harmed").rglob("*pp_rank_2_*optim_states.pt"))
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 4
    path.write_bytes(whole)
    return tmp_path


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.fixture(autouse=True)
def leaves_no_process_behind() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


@given(st.lists(st.integers(0, 1 << 40), max_size=40), st.integers(1, 9))
def test_each_item_is_dealt_to_one_share_and_none_has_much_more(sizes: list[int], shared: int) -> None:
    dealt = [runner.dealt(sizes, (number, shared)) for number in range(shared)]
    assert sorted(item for own in dealt for item in own) == list(range(len(sizes)))
    loads = [sum(sizes[item] for item in own) for own in dealt]
    assert max(loads) - min(loads) <= max(sizes, default=0)


TOOLS: dict[str, Callable[[Path, Reading], Any]] = {
    "verify": lambda base, reading: verify(str(base / "harmed"), reading=reading).to_json(),
    "verify --deep": lambda base, reading: verify(str(base / "saved"), deep=True, reading=reading).to_json(),
    "fingerprint": lambda base, reading: fingerprint(str(base / "harmed"), reading=reading).to_json(),
    "diff": lambda base, reading: diff(str(base / "saved"), str(base / "other"), reading=reading).to_json(),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_copies_say_what_one_process_says(folders: Path, tool: str) -> None:
    alone, shared = TOOLS[tool](folders, Reading(threads=1)), TOOLS[tool](folders, COPIES)
    for said in (alone, shared):
        said.pop("seconds", None)
    assert alone == shared


def test_progress_is_of_all_copies(folders: Path) -> None:
    told: list[tuple[int, int]] = []
    verify(str(folders / "saved"), reading=COPIES, progress=lambda done, total: told.append((done, total)))
    assert told and told[-1][0] == told[-1][1] and [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_copy_that_is_killed_is_a_named_error(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(threads.ThreadExecutor, "execute", killed)
    with pytest.raises(ReadFailed, match=r"signal 9.*its part not read.*--processes"):
        fingerprint(str(folders / "saved"), reading=COPIES)


def _ranks(python: str, words: list[str], sizes: list[int], **environment: str) -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of torchrun on so many nodes, all of them this machine; each starts so many ranks."""
    several = ["--nnodes", str(len(sizes)), "--master-port", str(free_port()), "--node-rank"]
    places = [["--standalone"]] if len(sizes) == 1 else [[*several, str(node)] for node in range(len(sizes))]
    launch = [python, "-m", "torch.distributed.run"]
    # and what the shell may have of a run before, or Kubernetes of the node
    known = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0"}
    agents = [
        subprocess.Popen(
            [*launch, *place, "--monitor-interval", "2", "--nproc-per-node", str(size), *words],
            env={**os.environ, **known, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place, size in zip(places, sizes, strict=True)
    ]
    said = [agent.communicate(timeout=200) for agent in agents]
    return [(agent.returncode, *texts) for agent, texts in zip(agents, said, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["verify --deep", "fingerprint", "diff"])
def test_two_agents_of_two_ranks_say_once_what_one_process_says(
    folders: Path, tool: str, interpreter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words_of(tool, folders), "--json"]
    status = main(words)
    alone = json.loads(capsys.readouterr().out)
    (first, out, err), (second, nothing, more) = _ranks(interpreter, ["-m", "ds_reshard", *words], [2, 2])
    shared = json.loads(out)
    for said in (alone, shared):
        said.pop("seconds", None)
    assert shared == alone and not nothing
    assert (first, second) == (status, status), (err, more)


FAILS = """
import os, sys, time
from ds_reshard.cli.main import main
from ds_reshard.errors import ReadFailed
from ds_reshard.execution import threads
from ds_reshard.operations import fingerprints
execute, rank = threads.ThreadExecutor.execute, os.environ["RANK"]
def fails(self, *given):
    if rank == "1" and sys.argv[1] == "raises":
        raise OSError(5, "the disk of rank 1")
    if rank == "1":
        os._exit(9)
    return execute(self, *given)
threads.ThreadExecutor.execute = fails
if rank == "1" and sys.argv[1] == "before":
    def lost(source):
        raise ReadFailed("the folder of rank 1")
    fingerprints.prove = lost
sys.exit(main(["fingerprint", sys.argv[2]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [("raises", "the disk of rank 1"), ("before", "the folder of rank 1"), ("dies", "RankLost|a rank has ended")],
)
def test_a_rank_that_fails_ends_the_others_with_its_error(folders: Path, how: str, said: str, interpreter: str) -> None:
    """At once, and where it is known to all it is said once."""
    script = folders / "fails.py"
    script.write_text(FAILS)
    ((status, out, err),) = _ranks(interpreter, [str(script), how, str(folders / "saved")], [3])
    assert status != 0 and not out
    lines = [line for line in err.splitlines() if re.search(said, line)]
    assert len(lines) == 1 if how != "dies" else lines, err


CHILD = """
import os, subprocess, sys
if os.environ["RANK"] == "0":
    sys.exit(subprocess.run([sys.executable, "-m", "ds_reshard", "verify", sys.argv[1], "--json"]).returncode)
"""


@pytest.mark.slow
def test_a_tool_that_one_rank_starts_works_alone(folders: Path) -> None:
    """What torchrun says of ranks is in the environment of their children, too: none of them waits for others.

    What a parent's environment says is looked at: that of a fork of `interpreter` is of a process that is no rank.
    """
    script = folders / "child.py"
    script.write_text(CHILD)
    ((status, out, err),) = _ranks(sys.executable, [str(script), str(folders / "saved")], [2])
    assert status == 0 and json.loads(out)["faults"] == [], err


def words_of(tool: str, folders: Path) -> list[str]:
    return [*tool.split(), str(folders / "saved"), *([str(folders / "other")] if tool == "diff" else [])]


@pytest.mark.parametrize("tool", ["verify", "verify --deep", "fingerprint", "diff"])
def test_ranks_of_srun_say_once_what_one_process_says(
    folders: Path, tool: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """What srun sets, by hand: there is no Slurm here."""
    words, port = [*words_of(tool, folders), "--json"], str(free_port())
    status = main(words)
    alone = json.loads(capfd.readouterr().out)

    def rank(number: int) -> int:
        told = {"STEP_ID": "0", "PROCID": str(number), "STEP_NUM_TASKS": "3"}
        os.environ.update({f"SLURM_{name}": value for name, value in told.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        return main(words)

    assert in_ranks(3, rank) == [status] * 3
    shared = json.loads(capfd.readouterr().out)
    for said in (alone, shared):
        said.pop("seconds", None)
    assert shared == alone


@pytest.mark.parametrize("tool", ["verify --deep", "fingerprint", "diff"])
def test_a_rank_that_hangs_ends_the_others_within_the_timeout(
    folders: Path, tool: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped where it reads, it answers no more; those that wait for its part hear of it, and tell nothing."""
    impatient(monkeypatch)
    port, execute = str(free_port()), threads.ThreadExecutor.execute

    def rank(number: int) -> int:
        launched(port, number, 3)

        def stops(executor: threads.ThreadExecutor, *given: Any, **named: Any) -> Any:
            if number == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            return execute(executor, *given, **named)

        threads.ThreadExecutor.execute = stops  # type: ignore[method-assign]
        return main(words_of(tool, folders))

    assert in_ranks(3, rank) == [2, -signal.SIGKILL, 2]
    said = capfd.readouterr()
    assert "a rank has ended, or has not answered" in said.err and not said.out


def test_ranks_of_srun_are_told_how_they_meet(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What srun sets, by hand: there is no Slurm here."""
    for name, value in (("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2")):
        monkeypatch.setenv(name, value)
    assert main(["verify", str(folders / "saved")]) == 2
    assert "export MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29500" in capsys.readouterr().err
