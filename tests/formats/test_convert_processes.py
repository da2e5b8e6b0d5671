"""`convert --processes`: copies of the process that share the files, and what becomes of them when one ends early."""

from __future__ import annotations

import gc
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lifetimes import alive
from zero_builder import Built, write

from ds_reshard.cli.main import main
from ds_reshard.containers.torch_zip import open_archive
from ds_reshard.errors import ChecksumMismatch, DeviceFailed, InternalError, ReadFailed, WriteFailed
from ds_reshard.operations import Options, conversion, convert
from ds_reshard.operations.runner import Parts, in_copies

SHAPES = tuple((f"p{i}", (7, i + 1)) for i in range(9))


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Synthetic; small, so what calls for copies is made smaller."""
    monkeypatch.setattr(conversion, "_LEAST_NBYTES", 1)
    write(Built(groups=(SHAPES,), frozen=(), tied=(), states=("exp_avg",), dp=4, seed=5), tmp_path / "saved")
    return tmp_path / "saved"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split() if alive(int(pid))}


@pytest.fixture(autouse=True)
def leaves_no_process_behind() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


@pytest.mark.parametrize("to", ["zero3", "universal", "safetensors"])
def test_copies_write_what_one_process_writes(checkpoint: Path, tmp_path: Path, to: str) -> None:
    """The same files to the byte, the same counts, and progress that ends at all of it."""
    told: list[tuple[int, int]] = []
    dp = {"dp": 3} if to == "zero3" else {}
    alone = convert(str(checkpoint), str(tmp_path / "alone"), to=to, options=Options(threads=2), **dp)
    shared = convert(
        str(checkpoint),
        str(tmp_path / "shared"),
        to=to,
        options=Options(threads=2, processes=3),
        progress=lambda done, total: told.append((done, total)),
        **dp,
    )
    assert files(tmp_path / "alone") == files(tmp_path / "shared")
    assert (alone.files, alone.bytes_read, alone.bytes_written) == (
        shared.files,
        shared.bytes_read,
        shared.bytes_written,
    )
    assert told and told[-1][0] == shared.bytes_written


def test_the_command_takes_their_number(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(checkpoint), str(out), "--to", "zero1", "--dp", "2", "--processes", "2"]) == 0
    assert "files" in capsys.readouterr().out and out.is_dir()


@pytest.mark.parametrize("harm", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(3)])
def test_a_copy_that_ends_is_a_named_error_and_the_rest_is_resumed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: object
) -> None:
    """No output, no process left; `--resume` goes on, with another number of copies, and the files are the same."""
    write_unit, parent, out = conversion._Work._write, os.getpid(), tmp_path / "out"

    def ends(work: conversion._Work, unit: object, at_once: int) -> None:
        write_unit(work, unit, at_once)  # type: ignore[arg-type]
        if os.getpid() != parent:
            harm()  # type: ignore[operator]

    monkeypatch.setattr(conversion._Work, "_write", ends)
    with pytest.raises(WriteFailed, match=r"process \d+: (was ended by signal 9|ended with status 3).*--resume"):
        convert(str(checkpoint), str(out), to="zero3", dp=5, options=Options(threads=2, processes=2))
    assert not out.exists()
    monkeypatch.setattr(conversion._Work, "_write", write_unit)
    convert(str(checkpoint), str(out), to="zero3", dp=5, options=Options(threads=2, processes=3, resume=True))
    convert(str(checkpoint), str(tmp_path / "alone"), to="zero3", dp=5, options=Options(threads=1))
    assert files(out) == files(tmp_path / "alone")


def test_what_a_copy_finds_is_raised_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    """A flipped byte: the same error as of one process."""
    (file,) = checkpoint.rglob("*zero_pp_rank_2_mp_rank_00_optim_states.pt")
    with open_archive(str(file)) as archive:
        at = archive.members["data/0"].byte_offset
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    for number in (1, 2):
        with pytest.raises(ChecksumMismatch, match=file.name):
            convert(
                str(checkpoint), str(tmp_path / "out"), to="zero3", dp=2, options=Options(threads=1, processes=number)
            )
    assert not (tmp_path / "out").exists()


def test_a_bug_in_a_copy_is_an_error_of_ours() -> None:
    def fails(number: int, tell: object) -> None:
        raise ValueError("no such thing")

    with pytest.raises(InternalError, match="ValueError: no such thing"):
        in_copies(2, fails, print)


def test_a_copy_without_memory_is_no_bug() -> None:
    def fails(number: int, tell: object) -> None:
        raise MemoryError("Unable to allocate 2.00 MiB")

    with pytest.raises(DeviceFailed, match=r"process \d+: no memory is left on the host: Unable(.|\n)*--processes"):
        in_copies(2, fails, print)


def test_a_copy_that_the_system_refuses_something_is_no_bug() -> None:
    def fails(number: int, tell: object) -> None:
        os.listdir("/proc/self/no such folder")

    with pytest.raises(ReadFailed, match=r"refuses what it needs: No such file.*no such folder(.|\n)*ulimit -a"):
        in_copies(2, fails, print)


def test_what_the_application_has_frozen_stays_so() -> None:
    """Copies keep the pages that they share by freezing what they begin with; nothing is frozen, or thawed, here."""
    told: list[int] = []
    before = gc.get_freeze_count()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        in_copies(2, lambda _, tell: tell(gc.get_freeze_count()), told.append)  # type: ignore[arg-type]
        assert gc.get_freeze_count() > 0.9 * frozen > 9000
        assert min(told) > 0.9 * frozen
    finally:
        gc.unfreeze()
    in_copies(2, lambda _, tell: tell(gc.get_freeze_count()), told.append)  # type: ignore[arg-type]
    assert gc.get_freeze_count() == 0 and min(told) > 0.9 * frozen
    if before:
        gc.freeze()


def test_each_part_is_given_out_once() -> None:
    parts, taken = Parts(range(200), copied=True), []

    def takes(number: int, tell: object) -> None:
        for part in parts.left():
            tell(part)  # type: ignore[operator]

    in_copies(3, takes, taken.append)
    assert sorted(taken) == list(range(200))


def test_a_copy_that_ends_while_it_tells_is_named() -> None:
    """Killed, as where memory is short, with half of what it had to say in the pipe."""

    def works(number: int, tell: object) -> None:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        pipe = tell.__self__  # type: ignore[attr-defined]
        os.write(pipe.fileno(), struct.pack("!i", 1 << 20) + bytes(10))
        time.sleep(30)

    with pytest.raises(WriteFailed, match=r"process \d+: was ended by signal 9 .*--resume"):
        in_copies(2, works, print)


@pytest.mark.parametrize("tells", [True, False])
def test_copies_end_with_the_process_that_made_them(interpreter: str, tells: bool) -> None:
    """Ended by a signal that it cannot catch, it leaves none behind that works on, also where none has much to say."""
    code = (
        "import os, time\n"
        "from ds_reshard.operations.runner import in_copies\n"
        "def works(number, tell):\n"
        "    tell(os.getpid())\n"
        "    while True:\n"
        "        time.sleep(0.05)\n"
        f"        {tells} and tell(None)\n"
        "in_copies(2, works, lambda said: said and print(said, flush=True))\n"
    )
    with subprocess.Popen([interpreter, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
    left = pids
    for _ in range(200):
        left = [pid for pid in left if alive(pid)]
        if not left:
            return
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"processes {left} work on")


COPIES = """
import resource, sys
from ds_reshard.cli.main import main
from ds_reshard.operations import conversion, runner
conversion._LEAST_NBYTES = runner.LEAST_NBYTES = 1
import multiprocessing.popen_fork, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("tool", ["verify --deep", "fingerprint", "convert"])
def test_a_process_that_is_short_of_something_is_no_finding(
    checkpoint: Path, tmp_path: Path, interpreter: str, tool: str
) -> None:
    """Of files that may be open at a time: status 1 would say that the checkpoint has a fault."""
    more = [str(tmp_path / "out"), "--to", "zero3", "--dp", "3"] if tool == "convert" else []
    command = [interpreter, "-c", COPIES, *tool.split(), str(checkpoint), *more, "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "Too many open files; see its limits" in done.stderr and not (tmp_path / "out").exists()


SHORT = """
import resource, sys
from pathlib import Path
from ds_reshard.cli.main import main
from ds_reshard.operations import comparison, conversion, fingerprints, runner, verification
import ds_reshard.execution.cuda, torch
conversion._LEAST_NBYTES = runner.LEAST_NBYTES = 1
nbytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (nbytes + (2 << 20), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("tool", "copies"), [("verify --deep", "1"), ("fingerprint", "2"), ("convert", "1")])
def test_a_process_that_can_start_no_thread_is_no_bug(
    checkpoint: Path, tmp_path: Path, interpreter: str, tool: str, copies: str
) -> None:
    """There is no room for its stack, under a limit on memory; in this process, or in a copy of it."""
    more = [str(tmp_path / "out"), "--to", "zero3", "--dp", "3"] if tool == "convert" else []
    command = [interpreter, "-c", SHORT, *tool.split(), str(checkpoint), *more, "--processes", copies]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "report this" not in done.stderr, done.stderr
    short = ("can't start new thread", "no memory is left on the host")  # which of both it comes upon first
    assert any(words in done.stderr for words in short) and "--threads" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


def test_a_bug_is_no_finding(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*given: object, **named: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr("ds_reshard.cli.main.inspect", fails)
    assert main(["inspect", str(checkpoint)]) == 2
    assert "ValueError: no such thing" in capsys.readouterr().err


def test_what_was_finished_of_damage_is_not_gone_on_behind(checkpoint: Path, tmp_path: Path) -> None:
    """A bit that was read wrong, of a record that several files of the output share, shows when all are written."""
    options = Options(threads=1)
    convert(str(checkpoint), str(tmp_path / "alone"), to="zero3", dp=3, options=options)
    path = next(checkpoint.rglob("*pp_rank_1_*optim_states.pt"))
    with open_archive(str(path)) as archive:
        member = archive.members["data/1"]
    whole, status = path.read_bytes(), path.stat()
    at = member.byte_offset + member.nbytes // 2
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ChecksumMismatch):
        convert(str(checkpoint), str(tmp_path / "out"), to="zero3", dp=3, options=options)
    path.write_bytes(whole)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    convert(str(checkpoint), str(tmp_path / "out"), to="zero3", dp=3, options=Options(threads=1, resume=True))
    assert files(tmp_path / "out") == files(tmp_path / "alone")


@pytest.mark.parametrize("told", [[], ["--json"]], ids=["text", "json"])
def test_who_hears_of_a_conversion_changes_nothing_of_it(checkpoint: Path, tmp_path: Path, told: list[str]) -> None:
    """`| head` closes the pipe: the output is there, and so the status says; letters without a code are spelled."""
    out = tmp_path / "öut"
    command = [sys.executable, "-m", "ds_reshard", "convert", str(checkpoint), str(out), "--to", "zero3", *told]
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, "") and (out / "ds_reshard.json").is_file()
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    again = subprocess.run(
        [*command, "--force"], env=ascii_only, capture_output=True, encoding="ascii", timeout=120, check=False
    )
    assert (again.returncode, again.stderr) == (0, "") and "/\\xf6ut" in again.stdout.replace("\\u00f6", "\\xf6")


PRINTS = """
import contextlib, os, sys
from ds_reshard.cli.main import main
def prints(own):
    def call(*given):
        for number in (1, 2):
            with contextlib.suppress(OSError):
                os.write(number, b"[W] a warning of C code")
        return own(*given)
    return call
os.pwrite, os.writev = prints(os.pwrite), prints(os.writev)
sys.exit(main(sys.argv[1:]))
"""


def test_what_is_printed_goes_into_no_file(checkpoint: Path, tmp_path: Path) -> None:
    """stdout and stderr are closed, as by what starts a job in the background: a file would be given their numbers."""
    convert(str(checkpoint), str(tmp_path / "alone"), to="zero3", dp=3, options=Options(threads=1))
    words = [str(checkpoint), str(tmp_path / "out"), "--to", "zero3", "--dp", "3", "--threads", "1", "--processes", "1"]
    closed = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", PRINTS, "convert", *words]
    assert subprocess.run(closed, timeout=120, check=False).returncode == 0
    assert files(tmp_path / "out") == files(tmp_path / "alone")


@pytest.mark.parametrize("stderr", ["closed", "full", "read by nobody"])
def test_who_hears_of_an_error_changes_no_status(checkpoint: Path, stderr: str) -> None:
    """A checkpoint that is whole, one that is not there, and a bug."""
    reads, writes = os.pipe()
    os.close(reads)
    bug = "import sys; from ds_reshard.cli import main; main.inspect = None; sys.exit(main.main(sys.argv[1:]))"
    for call, expected in (
        (["-m", "ds_reshard", "verify", str(checkpoint)], 0),
        (["-m", "ds_reshard", "verify", f"{checkpoint}-none"], 2),
        (["-c", bug, "inspect", str(checkpoint)], 2),
    ):
        where = {"closed": "2>&-", "full": "2>/dev/full", "read by nobody": ""}[stderr]
        command = ["sh", "-c", f'exec "$@" {where}', "sh", sys.executable, *call]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writes, text=True, timeout=120, check=False)
        assert (done.returncode, "nothing found" in done.stdout) == (expected, not expected), call
    os.close(writes)


def test_a_name_in_an_error_does_not_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names in an error may be of a folder from anybody; its lines stay lines."""
    assert main(["inspect", str(tmp_path / "\x1b[2Jnone")]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said and "\\x1b[2Jnone: does not exist" in said and said.endswith("\n")
