"""Checkpoints by URL: an S3 server on this machine (moto), with s3fs as its client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases import Model, Run
from gathered import assert_same
from saves import Saves
from store_proxy import FAULTS, SECRET, Request, Store, store_here

from ds_reshard.cli.main import main
from ds_reshard.containers import remote
from ds_reshard.errors import ReshardError
from ds_reshard.operations import Options, convert, inspect

sys.path.insert(0, str(Path(__file__).parents[2] / "formats"))
from high_water import memory_taken
from sparse_checkpoint import gpt_shapes, write_checkpoint
from zero_builder import Built, write

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    pytest.importorskip("s3fs", reason="the test extra has s3fs and moto")
    with store_here() as made:
        yield made


SHAPES, SHARDS = tuple((f"p{i}", (7, i + 1)) for i in range(9)), 64
CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
RATES = {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 4}


@pytest.fixture(scope="module")
def shards(store: Store, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A synthetic checkpoint of 64 shards, here and there."""
    folder = tmp_path_factory.mktemp("shards") / "saved"
    built = Built(groups=(SHAPES,), frozen=(), tied=(), states=("exp_avg", "exp_avg_sq"), dp=SHARDS, seed=5)
    write(built, folder)
    return folder, store.put(folder, "shards")


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["inspect"], 0),
        (["verify"], 0),
        (["verify", "--deep"], 0),
        (["verify", "--pickles"], 0),
        (["fingerprint"], 0),
        (["diff", "FOLDER"], 0),
        (["plan", "--to", "zero3", "--dp", "3"], 0),
        (["preflight", "--world", "4", "--config", "CONFIG"], 0),
        (["preflight", "--world", "4", "--config", "SCHEDULED"], 1),  # no state of a scheduler was saved
        (["lr", "--config", "SCHEDULED"], 1),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_every_tool_says_what_it_says_of_local_files(
    shards: tuple[Path, str], tmp_path: Path, command: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, url = shards
    given = {"FOLDER": str(folder), "CONFIG": str(tmp_path / "ds.json"), "SCHEDULED": str(tmp_path / "rates.json")}
    Path(given["CONFIG"]).write_text(json.dumps(CONFIG))
    Path(given["SCHEDULED"]).write_text(json.dumps({**CONFIG, "scheduler": {"type": "WarmupLR", "params": RATES}}))
    said = []
    for path in (str(folder), url):
        assert main([command[0], path, *(given.get(word, word) for word in command[1:]), "--json"]) == status
        said.append(json.loads(capsys.readouterr().out.replace(path, "PATH").replace(str(folder), "PATH")))
    for one in said:
        for key in ("bytes_read", "metadata_nbytes", "seconds"):
            one.pop(key, None)
    assert said[0] == said[1]


def test_what_is_converted_from_a_store_is_what_is_converted_from_the_disk(
    shards: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, url = shards
    for path, out in ((str(folder), "here"), (url, "there")):
        assert main(["convert", path, str(tmp_path / out), "--to", "zero3", "--dp", "3"]) == 0
    files = [path.relative_to(tmp_path / "here") for path in (tmp_path / "here").rglob("*.pt")]
    assert files
    for name in files:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
    capsys.readouterr()
    assert main(["diff", url, str(tmp_path / "there")]) == 0


COPIES = """
import sys
from ds_reshard.cli.main import main
from ds_reshard.operations import conversion, runner
conversion._LEAST_NBYTES = runner.LEAST_NBYTES = 1
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("tool", ["verify --deep", "convert"])
def test_copies_of_a_process_each_ask_the_store(
    store: Store, shards: tuple[Path, str], tmp_path: Path, interpreter: str, tool: str
) -> None:
    """A client's own thread, which a copy of the process has not, is nothing that it waits for."""
    url = shards[1]
    more = [str(tmp_path / "out"), "--to", "zero3", "--dp", "3"] if tool == "convert" else []
    words = [*tool.split(), url, *more, "--processes", "2"]
    environment = {**os.environ, **store.environment, "OMP_NUM_THREADS": "1"}
    command = [interpreter, "-c", COPIES, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    if tool == "convert":
        assert main(["diff", url, str(tmp_path / "out")]) == 0


def test_a_checkpoint_of_many_shards_is_opened_with_few_requests(store: Store, shards: tuple[Path, str]) -> None:
    """Two listings, of the folder and of its tag, and a range a file, these being small."""
    _, url = shards
    remote.release()
    before = len(store.proxy.commands)
    found = inspect(url)
    assert found.faults == () and found.dp == SHARDS
    commands = store.proxy.commands[before:]
    listings = [command for command in commands if "list-type" in command or command.startswith("HEAD")]
    assert len(listings) == 2, listings
    assert len(commands) - len(listings) == len(found.files) + 1  # and the one that names the tag


@pytest.mark.parametrize(("source", "target"), [(Run(2, 4), Run(3, 2)), (Run(2, 2), Run(2, 2)), (Run(3, 2), Run(1, 3))])
def test_a_load_by_url_is_the_load_of_the_local_folder(
    worlds: Any, saves: Saves, store: Store, source: Run, target: Run
) -> None:
    """Under another layout and under the same: DeepSpeed itself reads no URL."""
    folder, saved = saves(source, Model())
    url = store.put(folder, f"run-{folder.name}")
    loaded = worlds[target.dp].run(
        "remote_jobs.load", environment=store.environment, run=target, model=Model(), folder=url
    )
    assert_same(saved, loaded)


@pytest.mark.parametrize("target", [Run(3, 2), Run(1, 2)])
def test_a_rank_fetches_what_it_owns(worlds: Any, store: Store, tmp_path: Path, target: Run) -> None:
    """And at most a twentieth more: beginnings and ends of files."""
    worlds[4].run("remote_jobs.wide", run=Run(2, 4), folder=str(tmp_path / "wide"))
    url = store.put(tmp_path / "wide", f"wide-{target.stage}")
    for fetched, owned in worlds[2].run("remote_jobs.wide", run=target, url=url, environment=store.environment):
        assert owned > 10 << 20 and 0.7 * owned < fetched < 1.05 * owned


def test_what_changes_in_a_store_is_seen_by_the_next_load(store: Store, tmp_path: Path) -> None:
    built = Built(groups=(SHAPES,), frozen=(), tied=(), states=("exp_avg",), dp=2, seed=5)
    write(built, tmp_path / "first")
    url = store.put(tmp_path / "first", "changing")
    assert inspect(url).states != ()
    name = next(path for path in store.files.find("bucket/changing") if "optim" in path)
    store.files.rm(name)
    assert any("missing" in fault.what for fault in inspect(url).faults)


@pytest.mark.parametrize("fault", ["throttle", "cut"])
def test_a_store_that_is_busy_or_hangs_up_is_asked_again(store: Store, tmp_path: Path, fault: str) -> None:
    """503 SlowDown, and connections that end half-way: the store's own package tries again, each time after longer."""
    built = Built(groups=(SHAPES,), frozen=(), tied=(), states=("exp_avg",), dp=2, seed=5)
    write(built, tmp_path / "first")
    url = store.put(tmp_path / "first", fault)
    setattr(store.proxy, fault, {"GET": 3})
    remote.release()
    assert main(["diff", url, str(tmp_path / "first")]) == 0
    assert getattr(store.proxy, fault) == {"GET": 0}


@pytest.mark.parametrize("fault", ["throttle", "cut"])
def test_requests_of_each_kind_are_made_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Twice each, while a conversion is sent in parts behind one that was killed."""
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 0)
    monkeypatch.setattr(remote, "PART_NBYTES", 1500)
    built = Built(groups=(SHAPES,), frozen=(), tied=(), states=("exp_avg",), dp=2, seed=5)
    write(built, tmp_path / "first")
    out = f"s3://bucket/out-{fault}"
    convert(str(tmp_path / "first"), str(tmp_path / "here"), to="zero3", dp=2)
    convert(str(tmp_path / "first"), out, to="zero3", dp=2, options=Options(shard=(0, 2)))
    for _ in range(2):
        store.files.call_s3("create_multipart_upload", Bucket="bucket", Key=f"out-{fault}/half")
    left = dict.fromkeys(FAULTS, 2)
    monkeypatch.setattr(asyncio, "sleep", partial(_hurried, asyncio.sleep))
    monkeypatch.setattr(store.proxy, fault, left)
    convert(str(tmp_path / "first"), out, to="zero3", dp=2, options=Options(resume=True))
    assert left == dict.fromkeys(FAULTS, 0)
    here = {str(one.relative_to(tmp_path / "here")): one for one in (tmp_path / "here").rglob("*") if one.is_file()}
    assert store.contents(f"out-{fault}") == {name: one.read_bytes() for name, one in here.items()}
    assert not store.contents(f"out-{fault}.ds-reshard")
    assert "Uploads" not in store.files.call_s3("list_multipart_uploads", Bucket="bucket")


async def _hurried(sleep: Any, seconds: float, *more: Any) -> None:
    await sleep(seconds / 100, *more)


@pytest.mark.parametrize("fault", ["throttle", "cut"])
def test_a_load_asks_again(
    worlds: Any, saves: Saves, store: Store, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    folder, saved = saves(Run(2, 4), Model())
    url = store.put(folder, f"load-{fault}")
    left = {"GET": 3, "LIST": 1}
    monkeypatch.setattr(store.proxy, fault, left)
    loaded = worlds[2].run("remote_jobs.load", environment=store.environment, run=Run(3, 2), model=Model(), folder=url)
    assert left == {"GET": 0, "LIST": 0}
    assert_same(saved, loaded)


def test_what_asking_again_does_not_mend_is_asked_once(store: Store, tmp_path: Path) -> None:
    """A file that is gone by the time it is read: each of its ranges is refused once."""
    built = Built(groups=(SHAPES,), frozen=(), tied=(), states=("exp_avg",), dp=2, seed=5)
    write(built, tmp_path / "first")
    url = store.put(tmp_path / "first", "gone")
    name = next(path for path in store.files.find("bucket/gone") if "rank_1" in path)
    remote.forget(url)
    file = remote.Object(f"s3://{name}")
    store.files.rm_file(name)
    before = len(store.proxy.commands)
    with pytest.raises(FileNotFoundError):
        file.fetch(0, 10)
    assert [command.partition("?")[0] for command in store.proxy.commands[before:]] == [f"GET /{name}"]


def test_a_file_that_changes_during_a_load_ends_it_on_every_rank(worlds: Any, saves: Saves, store: Store) -> None:
    """By its ETag, though each of its bytes was read before and is right: the files are of two saves by then."""
    run = Run(2, 2)
    folder, _ = saves(Run(2, 4), Model())
    url = store.put(folder, "changes")
    names = sorted(path for path in store.files.find("bucket/changes") if path.endswith(".pt"))
    first, last = names[0], names[-1]
    content = store.files.cat(first)
    seen: set[str] = set()

    def replaces(path: str) -> None:
        seen.add(path.partition("?")[0])
        if f"/{first}" in seen and path.startswith(f"/{last}"):
            store.proxy.before = None
            store.files.pipe_file(
                first, content.replace(b"ZZZZ", b"YYYY", 1)
            )  # what torch pads with, which nobody reads

    store.proxy.before = replaces
    try:
        told = worlds[run.dp].run(
            "remote_jobs.load_refused", environment=store.environment, run=run, model=Model(), folder=url
        )
    finally:
        store.proxy.before = None
    assert {one["error"] for one in told} == {"CheckpointDamaged"}, told
    assert len({one["text"] for one in told}) == 1
    assert f"s3://{first}: has changed while it was read" in told[0]["text"]


def test_a_store_that_never_answers_is_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    built = Built(groups=(SHAPES,), frozen=(), tied=(), states=("exp_avg",), dp=2, seed=5)
    write(built, tmp_path / "first")
    url = store.put(tmp_path / "first", "busy")
    remote.release()
    store.proxy.throttle = {"GET": 1 << 20}
    try:
        assert main(["fingerprint", url]) == 2
    finally:
        store.proxy.throttle = {}
    said = capsys.readouterr().err
    assert "cannot be read" in said and url in said
    assert SECRET not in said


def test_an_object_that_is_replaced_while_it_is_read_is_noticed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though its size is the same; nothing is written."""
    for name, seed in (("first", 5), ("second", 6)):
        built = Built(groups=(SHAPES,), frozen=(), tied=(), states=("exp_avg",), dp=2, seed=seed)
        write(built, tmp_path / name)
    url = store.put(tmp_path / "first", "replaced")
    plain, done = remote.Object.fetch, []

    def fetch(self: remote.Object, start: int, stop: int) -> bytes:
        if not done and sys._getframe(1).f_code.co_name == "read_into":
            done.append(True)
            store.put(tmp_path / "second", "replaced")
        return plain(self, start, stop)

    monkeypatch.setattr(remote.Object, "fetch", fetch)
    assert main(["convert", url, str(tmp_path / "out"), "--to", "zero3", "--dp", "3", "--processes", "1"]) == 2
    assert done
    assert "has changed while it was read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["here", "there"])
def test_what_is_converted_into_a_store_is_what_is_converted_here(
    store: Store, shards: tuple[Path, str], tmp_path: Path, source: str
) -> None:
    """From the disk and from the store, by one request a file; the file that names the tag is the last one."""
    path, out = str(shards[source == "there"]), f"out-{source}"
    assert main(["convert", path, str(tmp_path / "here"), "--to", "zero3", "--dp", "3"]) == 0
    before = len(store.proxy.commands)
    assert main(["convert", path, f"s3://bucket/{out}", "--to", "zero3", "--dp", "3", "--processes", "1"]) == 0
    written = [command.partition("?")[0] for command in store.proxy.commands[before:] if command.startswith("PUT")]
    assert [one for one in written if f"/{out}/" in one][-1] == f"PUT /bucket/{out}/latest"
    expected = {str(one.relative_to(tmp_path / "here")): one for one in (tmp_path / "here").rglob("*") if one.is_file()}
    assert {name.removeprefix(f"bucket/{out}/") for name in store.files.find(f"bucket/{out}")} == set(expected)
    for name, one in expected.items():
        assert store.files.cat(f"bucket/{out}/{name}") == one.read_bytes(), name
        assert written.count(f"PUT /bucket/{out}/{name}") == 1
    assert not store.files.find(f"bucket/{out}.ds-reshard")


TOOLS = [
    ["inspect", "IN"],
    ["verify", "IN", "--deep"],
    ["verify", "--pickles", "IN"],
    ["fingerprint", "IN"],
    ["diff", "IN", "IN"],
    ["plan", "IN", "--to", "zero3", "--dp", "3"],
    ["preflight", "IN", "--world", "4", "--config", "CONFIG"],
    ["lr", "IN", "--config", "CONFIG"],
    ["convert", "IN", "OUT", "--to", "zero3", "--dp", "3", "--processes", "1"],
]


TELLING = [
    f"s3://key:{SECRET}@bucket/shards",
    f"s3://key:more/{SECRET}@bucket/shards",
    f"s3://bucket/shards?X-Amz-Signature={SECRET}",
    f"S3://key:{SECRET}@bucket/shards",
    f"simplecache::s3://key:{SECRET}@bucket/shards",
    f"s3:/key:{SECRET}@bucket/shards",
    f"s3:///key:{SECRET}@bucket/shards",
]
"""URLs with a secret, and what was meant as such."""


@pytest.mark.parametrize("words", TOOLS, ids=lambda words: " ".join(words[:2]))
def test_no_tool_tells_a_secret(
    store: Store,
    shards: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    words: list[str],
) -> None:
    """Neither where all goes well, nor where a URL has credentials, nor of an endpoint with some that is not there.

    Be it the source, the output, the tag, given or in the file that names it, the checkpoint to be like, or an argument
    too many. In what is printed, as text and as JSON, in logs, in tracebacks, and in what is written.
    """
    import s3fs

    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}))
    caplog.set_level(logging.DEBUG, logger="ds_reshard")
    remote.release()
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    given = {"CONFIG": str(config), "OUT": f"s3://bucket/told-{words[0]}"}
    tracebacks = []

    def run(source: str, *more: str, out: str = given["OUT"]) -> None:
        told = {**given, "IN": source, "OUT": out}
        with contextlib.suppress(SystemExit):  # an argument that this tool has not
            main([told.get(word, word) for word in [*words, *more]])

    run(shards[1])
    run(shards[1], "--json")
    for url in TELLING:
        store.files.pipe_file("bucket/names/latest", url.encode())
        run(url)
        run(url, "--json")
        run("s3://bucket/names")
        run(shards[1], "--tag", url)
        run(shards[1], "--like", url)
        run(shards[1], "an argument too many", url)
        if "OUT" in words:
            run(shards[1], out=url)
        with pytest.raises(ReshardError) as raised:
            inspect(url)
        tracebacks += traceback.format_exception(raised.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:{SECRET}@127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        assert main([{**given, "IN": shards[1]}.get(word, word) for word in words]) != 0
        with pytest.raises(ReshardError) as raised:
            convert(shards[1], "s3://bucket/none", to="zero3")
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
    told = capfd.readouterr()
    written = [store.files.cat(name) for name in store.files.find("bucket") if "/told-" in name]
    tracebacks += traceback.format_exception(raised.value)
    assert SECRET not in told.out + told.err + caplog.text + "".join(tracebacks)
    assert not any(SECRET.encode() in content for content in written)
    assert "s3://bucket/shards" in told.err + told.out


def test_a_conversion_fetches_each_byte_once_and_sends_it_in_parts(store: Store, tmp_path: Path) -> None:
    """Beside at most the beginnings and the ends of files, where their directories lie; nothing is left half sent."""
    shapes = tuple((f"p{i}", (500, 1000)) for i in range(4))
    built = Built(groups=(shapes,), frozen=(), tied=(), states=("exp_avg", "exp_avg_sq"), dp=2, seed=5)
    write(built, tmp_path / "large")
    url = store.put(tmp_path / "large", "large")
    files = [path.stat().st_size for path in (tmp_path / "large").rglob("*.pt")]
    before, asked = remote.fetched()[1], len(store.proxy.commands)
    half = store.files.call_s3("create_multipart_upload", Bucket="bucket", Key="large-out/global_step3/half")
    words = ["convert", url, "s3://bucket/large-out", "--to", "zero3", "--dp", "1", "--processes", "1"]
    store.proxy.begin(Request("", "ABORT", "/bucket/large-out/global_step3/half", 1), "unheard")  # so it is asked again
    assert main(words) == 0
    assert store.proxy.befallen
    assert remote.fetched()[1] - before <= 1.02 * sum(files) + len(files) * 3 * remote._END_NBYTES
    assert any("partNumber=3" in command for command in store.proxy.commands[asked:])
    left = store.files.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", [])
    assert half["UploadId"] not in [one["UploadId"] for one in left]
    assert main(["diff", "s3://bucket/large-out", str(tmp_path / "large")]) == 0


@pytest.mark.slow
def test_a_conversion_far_away_keeps_to_its_memory(store: Store, tmp_path: Path) -> None:
    """Synthetic: one file of 100 MiB into another, in what test_convert_memory.py gives it where both are here.

    Above a process that has asked the store once: the modules and connections of s3fs are no part of it.
    """
    saved = tmp_path / "saved"
    write_checkpoint(saved, gpt_shapes(layers=1, width=704, vocabulary=4000), dp=1)
    assert max(file.stat().st_size for file in (saved / "global_step1000").iterdir()) > 100 << 20
    url, code = store.put(saved, "held"), "from ds_reshard.cli.main import main\nassert main(sys.argv[2:]) == 0"
    words = [url, "s3://bucket/held-out", "--to", "zero3", "--dp", "1", "--memory", "16", "--threads", "2"]
    taken = memory_taken(code, "convert", *words) - memory_taken(code, "inspect", url)
    assert taken < 64 << 20, taken / (1 << 20)
