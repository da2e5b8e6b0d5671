"""`convert` by the ranks of a launcher: what one process writes, and what becomes of it when one of them ends early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from forked import impatient, in_ranks, launched
from ports import free_port
from store_proxy import store_here
from zero_builder import Built, write

from ds_reshard.cli import launch
from ds_reshard.cli.main import main
from ds_reshard.containers import remote
from ds_reshard.errors import ConfigError, RankLost
from ds_reshard.execution import disk
from ds_reshard.operations import Options, conversion, convert, runner, store_workspace
from ds_reshard.operations.workspace import Workspace

SHAPES = tuple((f"p{i}", (7, i + 1)) for i in range(9))
DP = 9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Synthetic, and beside it what one process makes of it."""
    folder = tmp_path_factory.mktemp("ranks")
    write(Built(groups=(SHAPES,), frozen=(), tied=(), states=("exp_avg",), dp=4, seed=5), folder / "saved")
    convert(str(folder / "saved"), str(folder / "alone"), to="zero3", dp=DP)
    return folder / "saved"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_ranks_write_what_one_process_writes_and_say_it_once(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], launcher: str
) -> None:
    """What the launchers set, by hand: there is no Slurm here. Each rank has about as many bytes."""
    port = str(free_port())

    def rank(number: int) -> int:
        launched(port, number, 4)
        if launcher == "srun":
            for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"):
                del os.environ[name]
            os.environ.update(SLURM_STEP_ID="0", SLURM_PROCID=str(number), SLURM_STEP_NUM_TASKS="4")
        return main(["convert", str(checkpoint), str(tmp_path / "out"), "--to", "zero3", "--dp", str(DP), "--json"])

    assert in_ranks(4, rank) == [0] * 4
    said = json.loads(capfd.readouterr().out)
    assert files(tmp_path / "out") == files(checkpoint.parent / "alone")
    written = said["written_by_rank"]
    assert sum(written) == said["bytes_written"] and min(written) > 0
    assert max(written) - min(written) <= said["bytes_written"] / DP


CHANGES = ("create", "write_new", "write_at", "sync", "write_whole", "rename", "make_folder", "remove", "lock")
SENT = ("put", "send", "remove_below")


def counted(at: int, names: Sequence[str]) -> list[str]:
    """Each call of these by which this process changes files, as it is made; the process is killed at that one."""
    made: list[str] = []

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            made.append(name)
            if len(made) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **named)

        return call

    for name in names:
        setattr(disk, name, wrapped(name, getattr(disk, name)))
    return made


def converted(
    place: Path, checkpoint: Path, size: int, *, resume: bool, killed: int = -1, at: int = -1, out: str = ""
) -> list[int]:
    """The ranks' statuses: 3 where a rank is told that another is lost. Without a URL as `out` into a folder."""
    store = place / os.urandom(4).hex()

    def rank(number: int) -> int:
        if number == killed:
            counted(at, SENT if out else CHANGES)
        group = dist.FileStore(str(store), size)
        dist.init_process_group("gloo", store=group, rank=number, world_size=size, timeout=timedelta(seconds=60))
        options = Options(threads=1, ranks=True, resume=resume)
        try:
            convert(str(checkpoint), out or str(place / "out"), to="zero3", dp=DP, options=options)
        except RankLost:
            return 3
        return 0

    return in_ranks(size, rank)


def test_killed_at_ten_places_three_ranks_go_on_and_write_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    """Of four one is killed, each in turn: at its first change, and later; the others end with a named error."""
    for killed, at in [(0, 1), (0, 5), (0, 12), (0, 21), (1, 1), (1, 9), (2, 2), (2, 12), (3, 4), (3, 13)]:
        place = tmp_path / f"{killed}-{at}"
        place.mkdir()
        expected = [-signal.SIGKILL if number == killed else 3 for number in range(4)]
        assert converted(place, checkpoint, 4, resume=False, killed=killed, at=at) == expected, (killed, at)
        assert not (place / "out").exists()
        assert converted(place, checkpoint, 3, resume=True) == [0] * 3
        assert files(place / "out") == files(checkpoint.parent / "alone"), (killed, at)
        assert not (place / "out.ds-reshard").exists()


@pytest.mark.parametrize(("killed", "at"), [(0, 11), (2, 2)])
def test_killed_on_the_way_to_a_store_three_ranks_go_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: int, at: int
) -> None:
    """An S3 server: what its bucket holds then is what one process writes into a folder."""
    pytest.importorskip("s3fs", reason="the test extra has s3fs and moto")
    monkeypatch.setattr(store_workspace, "_STILL_BEATS", 0)  # else it is waited for the one that was killed
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with store_here() as store:
        ranks = partial(converted, tmp_path, checkpoint, out="s3://bucket/out")
        expected = [-signal.SIGKILL if number == killed else 3 for number in range(4)]
        assert ranks(4, resume=False, killed=killed, at=at) == expected
        assert remote.UNFINISHED in str(store.contents("out").keys())
        assert ranks(3, resume=True) == [0] * 3
        assert store.contents("out") == files(checkpoint.parent / "alone")
        assert not store.contents("out.ds-reshard") and not os.listdir(tmp_path / "tmp")
        assert "Uploads" not in store.files.call_s3("list_multipart_uploads", Bucket="bucket")


def test_what_ranks_have_finished_is_not_done_again(checkpoint: Path, tmp_path: Path) -> None:
    """After a start by torchrun's --max-restarts, too, whose command is the one of before."""
    assert converted(tmp_path, checkpoint, 3, resume=False, killed=2, at=17) == [3, 3, -signal.SIGKILL]
    done = tmp_path / "out.ds-reshard" / "done"
    before = {path.name: path.stat().st_mtime_ns for path in done.iterdir()}
    assert before
    port, seen = str(free_port()), conversion._Work.begin

    def rank(number: int) -> int:
        launched(port, number, 2, TORCHELASTIC_RESTART_COUNT="1")

        def begin(work: conversion._Work, stack: Any) -> Any:
            begun = seen(work, stack)
            assert number or len(begun.left) == len(work._sizes) - len(before)
            return begun

        conversion._Work.begin = begin  # type: ignore[method-assign]
        return main(["convert", str(checkpoint), str(tmp_path / "out"), "--to", "zero3", "--dp", str(DP)])

    assert in_ranks(2, rank) == [0, 0]
    assert files(tmp_path / "out") == files(checkpoint.parent / "alone")


@pytest.mark.parametrize(
    ("sent", "status", "told"),
    [(signal.SIGSTOP, -signal.SIGKILL, ""), (signal.SIGINT, 130, "ds-reshard: interrupted")],
    ids=["it hangs", "it is interrupted"],
)
def test_a_rank_that_answers_no_more_ends_the_others_within_the_timeout(
    checkpoint: Path, tmp_path: Path, capfd: Any, monkeypatch: Any, sent: signal.Signals, status: int, told: str
) -> None:
    """Those that wait for it hear of it, though it has not ended; one that is interrupted does not wait for them."""
    impatient(monkeypatch)
    port, write_unit = str(free_port()), conversion._Work._write

    def rank(number: int) -> int:
        launched(port, number, 3)

        def stops(work: conversion._Work, *given: Any) -> None:
            write_unit(work, *given)
            if number == 1:
                os.kill(os.getpid(), sent)
                time.sleep(1)

        conversion._Work._write = stops  # type: ignore[method-assign]
        return main(["convert", str(checkpoint), str(tmp_path / "out"), "--to", "zero3", "--dp", str(DP)])

    assert in_ranks(3, rank) == [2, status, 2]
    said = capfd.readouterr().err
    assert told in said and "a rank has ended, or has not answered" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("there", [[0], [1], [0, 2]])
@pytest.mark.parametrize("agents", ["False", "True"])
def test_ranks_do_not_wait_for_one_that_never_starts(
    checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    there: list[int],
    agents: str,
) -> None:
    """As on a node without this package, of which srun tells the others nothing."""
    monkeypatch.setattr(launch, "_JOINING_S", 2.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(store.port if agents == "True" else free_port())

    def rank(number: int) -> int:
        launched(port, there[number], 3, TORCHELASTIC_USE_AGENT_STORE=agents)
        return main(["convert", str(checkpoint), str(tmp_path / "out"), "--to", "zero3", "--dp", str(DP)])

    assert in_ranks(len(there), rank) == [2] * len(there)
    if 0 in there:  # else there is no one that tells
        assert "a rank has ended, or has not answered" in capfd.readouterr().err


def test_what_one_rank_finds_ends_the_work_of_all_at_once(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk on one rank: the others begin no further file, and all say the same, once."""
    monkeypatch.setattr(runner, "BEAT_S", 0.05)
    port, write_unit = str(free_port()), conversion._Work._write

    def rank(number: int) -> int:
        launched(port, number, 2)
        written: list[object] = []

        def fails(work: conversion._Work, *given: Any) -> None:
            if number:
                with disk._named(str(tmp_path), "cannot be written"):
                    raise OSError(28, "No space left on device")
            work._stopping.wait(60)
            written.append(given)
            write_unit(work, *given)

        conversion._Work._write = fails  # type: ignore[method-assign]
        words = ["convert", str(checkpoint), str(tmp_path / "out"), "--to", "zero3", "--dp", str(DP), "--threads", "1"]
        status = main(words)
        assert number or len(written) == 1
        return status

    assert in_ranks(2, rank) == [2, 2]
    assert capfd.readouterr().err.count("No space left on device") == 1


@pytest.mark.parametrize("tool", ["convert", "verify"])
def test_progress_is_of_all_ranks(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    """Rank 0 is told what all of them have written; in a log it is a line, with rate and time."""
    monkeypatch.setattr(runner, "BEAT_S", 0.05)
    monkeypatch.setattr("ds_reshard.operations.progress.LOG_S", 0.0)
    port, log = str(free_port()), tmp_path / "log"

    def rank(number: int) -> int:
        launched(port, number, 2)
        sys.stderr = log.open("a")
        note = runner.Heartbeat.note

        def slowly(beat: runner.Heartbeat, done: int, total: int) -> None:
            note(beat, done, total)
            time.sleep(0.2)

        runner.Heartbeat.note = slowly  # type: ignore[method-assign]
        more = [str(tmp_path / "out"), "--to", "zero3", "--dp", str(DP)] if tool == "convert" else []
        return main([tool, str(checkpoint), *more])

    assert in_ranks(2, rank) == [0, 0]
    lines, done = log.read_text().splitlines(), "written, " if tool == "convert" else "read, "
    assert lines and all(done in line and line.endswith(("s left", "nothing yet")) for line in lines), lines


def test_progress_that_cannot_be_told_ends_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of rank 0's log is full: its heartbeat goes on, by which the other rank knows that it lives."""
    impatient(monkeypatch)
    monkeypatch.setattr("ds_reshard.operations.progress.LOG_S", 0.0)
    port, stderr = str(free_port()), sys.stderr

    def rank(number: int) -> int:
        launched(port, number, 2)
        note = runner.Heartbeat.note

        def slowly(beat: runner.Heartbeat, done: int, total: int) -> None:
            note(beat, done, total)
            time.sleep(2)

        runner.Heartbeat.note = slowly  # type: ignore[method-assign]
        if number == 0:
            sys.stderr = Path("/dev/full").open("w")  # noqa: SIM115
        try:
            return main(["convert", str(checkpoint), str(tmp_path / "out"), "--to", "zero3", "--dp", str(DP)])
        finally:
            sys.stderr = stderr

    assert in_ranks(2, rank) == [0, 0]


@pytest.mark.parametrize("part", [(0, 1), (1, 3), (0, 2)])
def test_a_second_job_is_refused_while_the_first_lives(checkpoint: Path, tmp_path: Path, part: tuple[int, int]) -> None:
    """Whatever parts it consists of; another part of the same job is not."""
    out = str(tmp_path / "out")
    options = Options(shard=(1, 3))
    convert(str(checkpoint), out, to="zero3", dp=DP, options=options)
    claimed = json.loads((tmp_path / "out.ds-reshard" / "conversion.json").read_text())
    with Workspace(out, claimed, force=False).open(resume=False, part=(1, 3)):
        with pytest.raises(ConfigError, match="another process works there"):
            convert(str(checkpoint), out, to="zero3", dp=DP, options=Options(shard=part))
        assert not convert(str(checkpoint), out, to="zero3", dp=DP, options=Options(shard=(0, 3))).complete
    assert convert(str(checkpoint), out, to="zero3", dp=DP, options=Options(shard=(2, 3))).complete
    assert files(tmp_path / "out") == files(checkpoint.parent / "alone")


DIES_ONCE = """
import os, signal, sys
from ds_reshard.cli.main import main
from ds_reshard.containers import remote
from ds_reshard.operations import conversion
keep = conversion._Work._keep
def dies(work, *given):
    keep(work, *given)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "3":
        os.kill(os.getpid(), signal.SIGKILL)
conversion._Work._keep = dies
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_torchrun_agents_start_again_and_go_on(checkpoint: Path, tmp_path: Path, interpreter: str) -> None:
    """Two nodes of two ranks, one of which is killed after its first file: --max-restarts does the rest."""
    script, port = tmp_path / "dies.py", str(free_port())
    script.write_text(DIES_ONCE)
    words = ["convert", str(checkpoint), str(tmp_path / "out"), "--to", "zero3", "--dp", str(DP)]
    launcher = [interpreter, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    agents = [
        subprocess.Popen(
            [*launcher, "--node-rank", str(node), str(script), *words],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node in range(2)
    ]
    assert [agent.wait(200) for agent in agents] == [0, 0]
    assert files(tmp_path / "out") == files(checkpoint.parent / "alone")
