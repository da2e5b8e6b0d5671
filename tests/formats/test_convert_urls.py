"""`convert` into a URL: the bytes of a local output, whole for readers or refused, whatever interrupts it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from nanotron_builder import Run as Nanotron
from nanotron_builder import write as write_nanotron
from safetensors.torch import save_file
from zero_builder import Built, write

from ds_reshard.cli.main import main
from ds_reshard.containers import remote
from ds_reshard.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, ReadFailed, ReshardError, WriteFailed
from ds_reshard.execution import disk
from ds_reshard.operations import Options, conversion, convert, diff, inspect, store_workspace, verify

SHAPES = tuple((f"p{i}", (7, i + 1)) for i in range(9))
OUT = "memory://bucket/out"
SIZED = {"zero3": 3, "dcp": 2, "accelerate": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("urls")
    return write(Built(groups=(SHAPES,), frozen=(), tied=(), states=("exp_avg",), dp=4, seed=5), folder / "saved")


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MemoryFileSystem]:
    """An empty store; and no spool is left of what a test does."""
    monkeypatch.setattr(store_workspace, "_BEAT_S", 0.05)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    made: MemoryFileSystem = fsspec.filesystem("memory")
    made.store.clear()
    made.pseudo_dirs[:] = [""]
    yield made
    assert not any((tmp_path / "tmp").iterdir())


def stored(bucket: MemoryFileSystem, below: str = "/bucket/out/") -> dict[str, bytes]:
    return {name.removeprefix(below): bucket.cat(name) for name in bucket.find(below)}


def local(checkpoint: Path, place: Path, to: str) -> dict[str, bytes]:
    convert(str(checkpoint), str(place), to=to, dp=SIZED.get(to))
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize("to", ["zero3", "universal", "dcp", "accelerate", "safetensors", "torch", "pytorch"])
def test_the_bytes_are_those_of_a_local_output(
    checkpoint: Path, tmp_path: Path, bucket: MemoryFileSystem, to: str
) -> None:
    """And from there, of that output, by URL again; nothing else is left in the store."""
    assert convert(str(checkpoint), OUT, to=to, dp=SIZED.get(to)).complete
    expected = local(checkpoint, tmp_path / "out", to)
    assert stored(bucket) == expected and all(name.startswith("/bucket/out/") for name in bucket.find("/"))
    if to == "zero3":
        convert(OUT, "memory://bucket/again", to="zero2", dp=4)
        assert diff("memory://bucket/again", str(checkpoint)).equal


def test_a_folder_of_many_small_files(tmp_path: Path, bucket: MemoryFileSystem) -> None:
    """nanotron's: a file for each parameter, and texts without which it finds none."""
    source = str(write_nanotron(Nanotron(dp=2), tmp_path / "saved"))
    for out in (OUT, str(tmp_path / "out")):
        convert(source, out, to="nanotron", tp=2, dp=1)
    here = {str(one.relative_to(tmp_path / "out")): one for one in (tmp_path / "out").rglob("*") if one.is_file()}
    assert stored(bucket) == {name: one.read_bytes() for name, one in here.items()}


class Puts:
    """What is sent to the store, in order; the call numbered `ends` fails, and all after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends: int = -1) -> None:
        self.urls: list[str] = []
        self._lock = threading.Lock()
        for name in ("put", "send", "remove"):
            monkeypatch.setattr(remote, name, self._wrapped(getattr(remote, name), ends))

    def _wrapped(self, function: Callable[..., Any], ends: int) -> Callable[..., Any]:
        def call(url: Any, *given: Any, **named: Any) -> Any:
            urls = [url] if isinstance(url, str) else list(url)
            with self._lock:
                self.urls += urls if "/locks/" not in "".join(urls) else []
                if 0 <= ends < len(self.urls):
                    raise OSError(5, "the store has gone")
            return function(url if isinstance(url, str) else urls, *given, **named)

        return call


@pytest.mark.parametrize(("to", "last"), [("zero3", "out/latest"), ("dcp", r"out/\.metadata")])
def test_readers_are_told_where_all_is_there(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, to: str, last: str
) -> None:
    """First the mark; then files; what other readers look for; and the mark goes."""
    puts = Puts(monkeypatch)
    convert(str(checkpoint), OUT, to=to, dp=2, options=Options(threads=2))
    urls = [url for url in puts.urls if url.startswith(f"{OUT}/")]
    assert urls[0] == urls[-1] and urls[0].endswith(remote.UNFINISHED)
    named = max(number for number, url in enumerate(urls) if re.search(f"{last}$", url))
    assert not any(re.search(r"\.(pt|distcp)$", url) for url in urls[named:])


def test_what_is_interrupted_is_refused_by_readers_and_gone_on_with(
    checkpoint: Path, tmp_path: Path, bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its writes in turn: OUT and its tag are no checkpoint, and the next run's bytes are right."""
    expected = local(checkpoint, tmp_path / "out", "zero3")
    with monkeypatch.context() as patch:
        puts = Puts(patch)
        convert(str(checkpoint), OUT, to="zero3", dp=3)
    for ends in range(len(puts.urls)):
        bucket.store.clear()
        with monkeypatch.context() as patch:
            Puts(patch, ends)
            try:
                convert(str(checkpoint), OUT, to="zero3", dp=3)
            except ReshardError as error:
                assert isinstance(error, WriteFailed) and "the store has gone" in str(error)
        whole = stored(bucket) == expected
        for path in (OUT, f"{OUT}/global_step3"):
            if not whole:
                with pytest.raises((CheckpointDamaged, CheckpointNotFound)):
                    inspect(path)
        convert(str(checkpoint), OUT, to="zero3", dp=3, options=Options(resume=ends % 2 == 0))
        assert stored(bucket) == expected, ends
        assert inspect(OUT).faults == ()
        assert not [name for name in bucket.find("/") if not name.startswith("/bucket/out/")]


@pytest.mark.parametrize("ends", [0, None], ids=["interrupted", "finished"])
def test_a_source_that_has_changed_since_is_not_gone_on_with(
    tmp_path: Path, bucket: MemoryFileSystem, ends: int | None
) -> None:
    """A save of the same size at the same URL; safetensors has no checksums: nothing else would tell."""
    for name in ("first", "second"):
        values = {f"w{number}": torch.full((100, 100), float(len(name) + number)) for number in range(20)}
        save_file(values, tmp_path / f"{name}.safetensors")
    out, options = str(tmp_path / "out"), Options(threads=1, processes=1)

    def progress(done: int, total: int) -> None:
        if ends is not None and done > total // 2:
            raise KeyboardInterrupt

    bucket.put(str(tmp_path / "first.safetensors"), "/bucket/run/model.safetensors")
    with pytest.raises(KeyboardInterrupt) if ends is not None else contextlib.nullcontext():
        convert("memory://bucket/run", out, to="dcp", dp=8, options=options, progress=progress)
    bucket.put(str(tmp_path / "second.safetensors"), "/bucket/run/model.safetensors")
    says = "of files that have changed since" if ends is not None else "is there already"
    with pytest.raises(ConfigError, match=says):
        convert("memory://bucket/run", out, to="dcp", dp=8, options=replace(options, resume=True))


def test_what_is_interrupted_while_it_is_begun_anew_is_gone_on_with(
    checkpoint: Path, tmp_path: Path, bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what an earlier one left any part may have been removed: what is known of a file goes before the file does."""
    expected = local(checkpoint, tmp_path / "out", "zero3")
    removed = remote.remove
    for ends in range(9):  # three notes, three files, the mark, two names of the conversion
        bucket.store.clear()
        convert(str(checkpoint), OUT, to="zero3", dp=3, options=Options(shard=(0, 2)))
        left = ends

        def few(urls: Any) -> None:
            nonlocal left
            for url in sorted(urls):
                if left == 0:
                    raise OSError(5, "the store has gone")
                left -= 1
                removed([url])

        with monkeypatch.context() as patch:
            patch.setattr(remote, "remove", few)
            with pytest.raises(WriteFailed, match="the store has gone"):
                convert(str(checkpoint), OUT, to="zero3", dp=3)
        for path in (OUT, f"{OUT}/global_step3"):
            with pytest.raises((CheckpointDamaged, CheckpointNotFound)):
                inspect(path)
        convert(str(checkpoint), OUT, to="zero3", dp=3, options=Options(resume=True))
        assert stored(bucket) == expected, ends


def test_a_note_that_cannot_be_read_costs_its_files_anew(
    checkpoint: Path, tmp_path: Path, bucket: MemoryFileSystem
) -> None:
    convert(str(checkpoint), OUT, to="zero3", dp=3, options=Options(shard=(0, 2)))
    bucket.pipe("/bucket/out.ds-reshard/done/optim-0.json", b"half a no")
    assert convert(str(checkpoint), OUT, to="zero3", dp=3, options=Options(resume=True)).complete
    assert stored(bucket) == local(checkpoint, tmp_path / "out", "zero3")


def test_a_mark_that_does_not_go_is_named(
    checkpoint: Path, tmp_path: Path, bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the store says that it is not there: who reads OUT would be refused."""
    removes = MemoryFileSystem.rm_file

    def stays(store: MemoryFileSystem, path: str) -> None:
        if path.endswith(remote.UNFINISHED):
            raise FileNotFoundError(path)
        removes(store, path)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "rm_file", stays)
        with pytest.raises(WriteFailed, match="is there still"):
            convert(str(checkpoint), OUT, to="zero3", dp=3)
    assert convert(str(checkpoint), OUT, to="zero3", dp=3, options=Options(resume=True)).complete
    assert stored(bucket) == local(checkpoint, tmp_path / "out", "zero3")


def test_nothing_that_is_there_is_replaced(
    checkpoint: Path, bucket: MemoryFileSystem, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with --force, and what somebody puts there while a conversion is interrupted is not removed."""
    bucket.pipe("/bucket/out/mine", b"mine")
    words = ["convert", str(checkpoint), OUT, "--to", "zero3", "--dp", "3"]
    for more in ([], ["--force"], ["--resume"]):
        assert main([*words, *more]) == 2
        assert "is there already: mine" in capsys.readouterr().err
    assert stored(bucket) == {"mine": b"mine"}
    bucket.rm_file("/bucket/out/mine")
    convert(str(checkpoint), OUT, to="zero3", dp=3, options=Options(shard=(0, 2)))
    bucket.pipe("/bucket/out/mine", b"mine")
    assert main(words) == 2
    assert bucket.cat("/bucket/out/mine") == b"mine"


@pytest.mark.parametrize("url", [OUT, f"{OUT}/global_step3", f"{OUT}/global_step3//"])
def test_what_is_there_is_compared_with_its_manifest(checkpoint: Path, bucket: MemoryFileSystem, url: str) -> None:
    """It lies beside the tag. A URL that ends in a slash was looked at for ever."""
    convert(str(checkpoint), OUT, to="zero3", dp=3)
    assert verify(url).clean
    bucket.pipe("/bucket/out/global_step3/more.txt", b"more")
    assert [fault.what for fault in verify(url).faults] == ["is not in the manifest"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_no_conversion_made_is_not_cleared(
    checkpoint: Path, bucket: MemoryFileSystem, resume: bool
) -> None:
    """A checkpoint that has the name which the notes of this output have, and is its source."""
    bucket.put(f"{checkpoint}/", "/bucket/out.ds-reshard/", recursive=True)
    before = stored(bucket, "/bucket/")
    with pytest.raises(ConfigError, match=r"out\.ds-reshard: .*no conversion has put there: .*global_step3"):
        convert(f"{OUT}.ds-reshard", OUT, to="zero3", dp=3, options=Options(resume=resume))
    assert stored(bucket, "/bucket/") == before


@pytest.mark.parametrize("out", ["memory://bucket/saved", "memory://bucket/saved/out", "memory://bucket"])
def test_an_output_in_the_source_or_around_it_is_refused(checkpoint: Path, bucket: MemoryFileSystem, out: str) -> None:
    bucket.put(f"{checkpoint}/", "/bucket/saved/", recursive=True)
    with pytest.raises(ConfigError, match="lies in the source"):
        convert("memory://bucket/saved", out, to="zero3", dp=3)


@pytest.mark.parametrize("out", ["memory://bucket/there", "memory://bucket/there/deep/out"])
def test_an_output_that_is_a_file_or_below_one_is_refused(checkpoint: Path, bucket: MemoryFileSystem, out: str) -> None:
    """A store would take files below it; nothing is written."""
    bucket.pipe("/bucket/there", b"mine")
    with pytest.raises(ConfigError, match="memory://bucket/there: is a file"):
        convert(str(checkpoint), out, to="zero3", dp=3)
    assert bucket.find("/") == ["/bucket/there"]


def test_parts_go_on_in_any_order(checkpoint: Path, tmp_path: Path, bucket: MemoryFileSystem) -> None:
    for number in (2, 0, 1):
        done = convert(str(checkpoint), OUT, to="dcp", dp=2, options=Options(shard=(number, 3)))
    assert done.complete and stored(bucket) == local(checkpoint, tmp_path / "out", "dcp")


def workspace(conversion: object = "other") -> store_workspace.StoreWorkspace:
    return store_workspace.StoreWorkspace(OUT, {"of": conversion}, names=["a"], folder="")


def test_a_second_job_is_refused_while_the_first_lives(checkpoint: Path, bucket: MemoryFileSystem) -> None:
    """Its lock changes, by no clock: one that is still is of a job that has ended, and is taken."""
    with workspace().open(resume=False, part=(0, 1)):
        for part in ((0, 1), (1, 3)):
            with pytest.raises(ConfigError, match="another process works there"):
                convert(str(checkpoint), OUT, to="zero3", dp=3, options=Options(shard=part))
    bucket.pipe("/bucket/out.ds-reshard/locks/0-of-1", b"an hour ahead 3")
    assert convert(str(checkpoint), OUT, to="zero3", dp=3).complete


def test_a_store_that_knows_no_conditions_is_written_to(
    checkpoint: Path, bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As S3's of some makers: a lock is then told by whether it changes, alone."""
    pipe = MemoryFileSystem.pipe_file

    def unconditional(store: MemoryFileSystem, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        if mode == "create":
            raise NotImplementedError("If-None-Match")
        pipe(store, path, value, mode=mode, **more)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", unconditional)
    with workspace().open(resume=False, part=(0, 1)), pytest.raises(ConfigError, match="another process works there"):
        convert(str(checkpoint), OUT, to="zero3", dp=3)
    assert convert(str(checkpoint), OUT, to="zero3", dp=3).complete


def test_a_lock_is_nobody_elses_where_a_store_only_says_that_it_is_busy(
    bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As S3 answers the second of two that write one object at once (409 ConditionalRequestConflict)."""

    def busy(store: MemoryFileSystem, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        assert mode == "create"
        raise OSError(errno.EBUSY, "conflict")

    assert disk.put("memory://bucket/lock", b"first", new=True)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", busy)
    assert not disk.put("memory://bucket/lock", b"second", new=True)
    assert remote.read_anew("memory://bucket/lock") == b"first"
    assert disk.put("memory://bucket/lock", b"first", new=True)  # asked again, the answer to the first time being lost


def test_a_job_whose_lock_was_taken_over_writes_no_further(bucket: MemoryFileSystem, tmp_path: Path) -> None:
    """It did not answer for long, and another has begun."""
    mine = workspace()
    with mine.open(resume=False, part=(0, 1)):
        bucket.pipe("/bucket/out.ds-reshard/locks/0-of-1", b"another 0")
        assert mine._lost.wait(10)
        for work in (lambda: mine.keep({}), lambda: mine.note("a", {}), lambda: mine.commit({}, {})):
            with pytest.raises(WriteFailed, match="has taken it over"):
                work()
    assert bucket.cat("/bucket/out.ds-reshard/locks/0-of-1") == b"another 0"


def test_what_another_wrote_meanwhile_is_not_called_whole(bucket: MemoryFileSystem, tmp_path: Path) -> None:
    mine = workspace()
    with mine.open(resume=False, part=(0, 1)):
        Path(mine.path("a")).write_bytes(b"mine")
        mine.note("unit", mine.keep({"a": mine.path("a")}))
        bucket.pipe("/bucket/out/a", b"them")
        mine.notes(["unit"])
        with pytest.raises(WriteFailed, match="is not what was sent"):
            mine.commit({}, {})
    assert remote.UNFINISHED in stored(bucket)


@pytest.mark.parametrize("done", [False, True])
def test_files_that_a_killed_process_did_not_send_are_removed(checkpoint: Path, tmp_path: Path, done: bool) -> None:
    """From TMPDIR, by the next conversion, also where nothing is left to do; not those of one that lives."""
    convert(str(checkpoint), OUT, to="zero3", dp=3) if done else None
    code = (
        "import os, signal\nfrom ds_reshard.execution import disk\n"
        "with disk.spool() as folder:\n    print(folder, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    killed = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    if done:
        assert convert(str(checkpoint), OUT, to="zero3", dp=3, options=Options(resume=True)).files == 0
        assert not left.exists()
    with disk.spool() as mine, disk.spool() as other:
        assert not left.exists() and Path(mine).is_dir() and Path(other).is_dir()


@pytest.mark.parametrize("what", ["a link", "another user's"])
def test_a_spool_takes_nothing_for_left_that_is_not_its_users_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """Whoever may write to TMPDIR could have a folder elsewhere emptied by a link of that name."""
    kept, name = tmp_path / "kept", tmp_path / "shared" / "ds-reshard-spool-x"
    kept.mkdir()
    name.parent.mkdir()
    name.symlink_to(kept) if what == "a link" else name.mkdir()
    if what != "a link":
        monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    (name / "file").write_text("kept")
    monkeypatch.setattr("tempfile.tempdir", str(name.parent))
    with disk.spool():
        assert [one.name for one in name.iterdir()] == ["file"]
    assert [one.name for one in name.iterdir()] == ["file"]


@pytest.mark.parametrize("taken", ["removed", "held"])
def test_a_folder_that_another_process_takes_for_one_that_was_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, taken: str
) -> None:
    """Between its making and its lock another process that begins may remove it, or be about to: another is made."""
    made, make = list[str](), tempfile.mkdtemp

    def watched(**named: Any) -> str:
        made.append(make(**named))
        if len(made) == 1:
            held = disk.lock(os.path.join(made[0], "lock"))
            assert held is not None
            if taken == "removed":
                disk.remove(made[0])
                os.close(held)
        return made[-1]

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("tempfile.mkdtemp", watched)
    with disk.spool() as folder:
        assert folder == made[1] != made[0]
        assert disk.lock(os.path.join(folder, "lock")) is None
    assert not os.path.exists(folder) and len(made) == 2


def test_room_for_what_is_made_before_it_is_sent(
    checkpoint: Path, bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As many files are made ahead as TMPDIR holds, and none where it holds none."""
    monkeypatch.setattr("ds_reshard.containers.folders.free_nbytes", lambda _: 1000)
    with pytest.raises(ConfigError, match=r"(?s)has 1000 bytes free.*TMPDIR"):
        convert(str(checkpoint), OUT, to="zero3", dp=3)
    assert not bucket.find("/")
    monkeypatch.setattr("ds_reshard.containers.folders.free_nbytes", lambda _: 10_000)
    made: list[int] = []
    send = remote.send

    def counted(url: str, path: str) -> Any:
        made.append(len(list((tmp_path / "tmp").rglob("*.pt"))))
        return send(url, path)

    monkeypatch.setattr(remote, "send", counted)
    convert(str(checkpoint), OUT, to="zero3", dp=9, options=Options(threads=8, resume=True))
    assert 1 <= max(made) <= 10_000 // 2000


def test_a_failure_ends_what_waits_for_room(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TMPDIR holds one file and four threads write, the three that wait end too, and the failure is named."""
    waiting, in_vain = [0], list[str]()

    class Room(threading.Semaphore):
        """One that does not wait for ever."""

        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            if not blocking or timeout is not None:
                return super().acquire(blocking, timeout)
            waiting[0] += 1
            if not super().acquire(timeout=20):
                in_vain.append(threading.current_thread().name)
            return True

    def failing(*given: Any) -> Any:
        while waiting[0] < 4:
            time.sleep(0.01)
        raise ReadFailed("the disk has gone")

    monkeypatch.setattr("threading.Semaphore", Room)
    monkeypatch.setattr(store_workspace.StoreWorkspace, "room", lambda *_: 1)
    monkeypatch.setattr(conversion.StagingExecutor, "execute", failing)
    with pytest.raises(ReadFailed, match="the disk has gone"):
        convert(str(checkpoint), OUT, to="zero3", dp=8, options=Options(threads=4))
    assert in_vain == []


def test_an_interruption_sends_nothing_that_waits(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such files may be many, and large: those that are on their way are waited for, and no others."""
    sent, send, heard = list[str](), remote.send, threading.Event()

    def interrupt(number: int, frame: object) -> None:
        heard.set()
        raise KeyboardInterrupt

    def slowly(url: str, path: str) -> Any:
        sent.append(url)
        if len(sent) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            heard.wait(60)  # on a busy machine the main thread may be late
        time.sleep(0.3)
        return send(url, path)

    monkeypatch.setattr(remote, "send", slowly)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            convert(str(checkpoint), OUT, to="zero3", dp=9, options=Options(threads=4, memory_nbytes=20 << 20))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(sent) == 1
