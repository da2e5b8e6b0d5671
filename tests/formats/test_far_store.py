"""What is asked of a store that answers late: few requests, many of them at a time, little that nobody wants."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import far_store
import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from far_store import Far
from nanotron_builder import Run
from nanotron_builder import write as write_nanotron
from safetensors.torch import save_file
from zero_builder import Built, write

from ds_reshard.cli.main import main
from ds_reshard.containers import remote
from ds_reshard.containers.ranges import AT_ONCE, Ranges, ReadAhead
from ds_reshard.dcp import Reader
from ds_reshard.errors import ReadFailed, ReshardError
from ds_reshard.execution.threads import ThreadExecutor
from ds_reshard.operations import convert, diff, fingerprint, inspect, verify

SHARDS = 192


@pytest.fixture(autouse=True)
def _begin() -> Iterator[None]:
    far_store.begin()
    yield
    far_store.begin()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small ones, and a model file with many tensors, as large as its beginning and its end are not all of it."""
    shapes = tuple((f"layers.{i}.weight", (SHARDS, 2 + i)) for i in range(60))
    built = Built(groups=(shapes,), frozen=(), tied=(), states=("exp_avg",), dp=SHARDS, seed=5)
    return write(built, tmp_path_factory.mktemp("far") / "saved")


def test_many_shards_are_not_opened_one_after_another(shards: Path) -> None:
    """Each by one request, being small; the model file by two, however many tensors it holds; two listings."""
    found = inspect(f"far://{shards}")
    assert found.faults == () and found.dp == SHARDS
    assert far_store.of_files("list") == {"saved": 1, "global_step3": 1}
    asked = far_store.of_files()
    assert asked.pop("mp_rank_00_model_states.pt") == 2
    assert len(asked) == SHARDS + 1 and set(asked.values()) == {1}
    assert far_store.waves() < SHARDS / 3  # and less where the machine is idle


def test_a_load_asks_ahead_for_what_lies_beside_what_it_opens_and_for_nothing_else(shards: Path) -> None:
    """A rank that opens every second of the files: those between are asked for too, once, and none far behind."""
    wanted = [f"far://{shards}/global_step3/bf16_zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in range(0, 80, 2)]
    remote.forget(f"far://{shards}")
    for url in wanted:
        remote.Object(url).read(0, 100)
    while any(one.name == "ds-reshard-ahead" for one in threading.enumerate()):
        time.sleep(0.01)
    asked = far_store.of_files()
    assert set(asked.values()) == {1} and len(asked) == 96  # three blocks of 32
    assert far_store.waves() < len(wanted) / 2


@pytest.mark.parametrize(("eager", "expected"), [(False, [64, 0, 32, 0]), (True, [96, 0, 32, 0])])
def test_what_is_asked_ahead(eager: bool, expected: list[int]) -> None:
    """The block of a place, and the next one of what is all opened; of each block once."""
    seen: list[object] = []
    ahead = ReadAhead(seen.append)
    ahead.expect(range(4 * AT_ONCE), eager=eager)
    asked = []
    for places in ((0, AT_ONCE), (AT_ONCE + 1,), (2 * AT_ONCE,), (2, 2 * AT_ONCE + 1)):
        before = len(seen)
        for place in places:
            ahead.opened(place)
        while any(one.name == "ds-reshard-ahead" for one in threading.enumerate()):
            time.sleep(0.01)
        asked.append(len(seen) - before)
    assert asked == expected and len(set(seen)) == len(seen)


def test_what_is_expected_while_other_places_are_forgotten() -> None:
    ahead, threads = ReadAhead(lambda place: None), list[threading.Thread]()
    ahead.expect(range(10))

    def whether(place: object) -> bool:
        if not threads:
            threads.append(threading.Thread(target=ahead.expect, args=(range(100, 200),)))
            threads[0].start()
            threads[0].join(0.2)
        return place in range(5)

    ahead.forget(whether)
    threads[0].join()
    assert [place for place in range(200) if ahead.knows(place)] == [*range(5, 10), *range(100, 200)]


def test_a_folder_is_listed_while_another_is_forgotten(shards: Path, tmp_path: Path) -> None:
    threads = list[threading.Thread]()

    class Watched(str):
        """The URL of a folder that was listed; when it is compared another thread lists many."""

        def startswith(self, *given: Any) -> bool:
            if not threads:
                threads.append(threading.Thread(target=lists))
                threads[0].start()
                threads[0].join(0.2)
            return super().startswith(*given)

    def lists() -> None:
        for number in range(20):
            with remote._LOCK:
                pass
            remote._LISTED.setdefault(f"far://{tmp_path}/{number}", {})
        remote.listing(f"far://{shards}")

    remote._LISTED[Watched("far://somewhere/else")] = {}
    remote.forget("far://somewhere")
    threads[0].join()
    assert "far://somewhere/else" not in remote._LISTED
    assert f"far://{shards}" in remote._LISTED


def test_what_fails_ahead_is_told_whoever_opens_it() -> None:
    seen: list[object] = []

    def warm(place: object) -> None:
        seen.append(place)
        raise OSError(5, "the store has gone")

    ahead = ReadAhead(warm)
    ahead.expect(["a", "b"], eager=True)
    ahead.opened("a")
    while len(seen) < 2:
        pass
    assert sorted(map(str, seen)) == ["a", "b"]


def test_a_range_is_fetched_once_whoever_asks(shards: Path) -> None:
    """Eight threads at a time; the request that fails may be that of the thread that reads ahead: it tells nobody."""
    url = f"far://{shards}/global_step3/mp_rank_00_model_states.pt"
    tries = itertools.count()

    def fails(number: int) -> None:
        if next(tries) == 0:
            raise OSError(5, "at first")

    Far.before = fails
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(remote.Object(url).read, 0, 100) for _ in range(8)]
    wanted = (shards / "global_step3" / "mp_rank_00_model_states.pt").read_bytes()[:100]
    failed = [one for one in done if one.exception() is not None]
    assert len(failed) <= 1
    assert all(one.result() == wanted for one in done if one not in failed)
    assert far_store.of_files()["mp_rank_00_model_states.pt"] <= 3


def test_a_fetch_that_fails_fails_one_of_those_who_wait_for_it() -> None:
    ranges, tries = Ranges(1000), itertools.count()

    def fetch() -> bytes:
        time.sleep(0.05)  # the others wait by then
        if next(tries) == 0:
            raise OSError(5, "at first")
        return b"data"

    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(ranges.get, ("file", 0, 4), fetch) for _ in range(8)]
    failed = [one for one in done if one.exception() is not None]
    assert len(failed) == 1
    assert all(one.result() == b"data" for one in done if one not in failed)
    assert next(tries) == 2


def test_a_chunk_of_a_folder_of_torchs_costs_two_requests_and_its_bytes(tmp_path: Path) -> None:
    """Of torch's own: its archive is not parsed by six reads; what is fetched beside the tensors are their frames."""
    tensors = {f"layer{i}.weight": torch.full((64 + i, 1024), float(i)) for i in range(24)}
    dcp.save({"model": tensors}, checkpoint_id=str(tmp_path / "saved"))
    far_store.begin()
    loaded = {name: torch.zeros_like(one) for name, one in tensors.items()}
    dcp.load({"model": loaded}, storage_reader=Reader(f"far://{tmp_path}/saved"))
    assert all(torch.equal(loaded[name], one) for name, one in tensors.items())
    small = [one for one in Far.requests if one.kind == "range" and one.name.endswith(".distcp") and one.nbytes < 4096]
    assert len(small) <= 2 * len(tensors) + 2
    nbytes = sum(one.nbytes for one in Far.requests)
    assert nbytes <= 1.05 * sum(one.numel() * 4 for one in tensors.values())
    assert far_store.waves() < len(tensors)


def test_a_small_chunk_is_read_at_once(tmp_path: Path) -> None:
    """Its bytes are among those that opening it has fetched, and are not fetched again."""
    tensors = {f"layer{i}.bias": torch.full((2000,), float(i)) for i in range(12)}
    dcp.save({"model": tensors}, checkpoint_id=str(tmp_path / "saved"))
    loaded = {name: torch.zeros_like(one) for name, one in tensors.items()}
    far_store.begin()
    dcp.load({"model": loaded}, storage_reader=Reader(f"far://{tmp_path}/saved"))
    assert all(torch.equal(loaded[name], one) for name, one in tensors.items())
    assert far_store.of_files()["__0_0.distcp"] <= len(tensors) + 2


def test_many_small_files_are_opened_side_by_side(tmp_path: Path) -> None:
    """Of nanotron a file for each parameter, of a universal checkpoint one for each state."""
    folder = write_nanotron(Run(dp=2), tmp_path / "nanotron")
    convert(str(folder), str(tmp_path / "universal"), to="universal")
    for name in ("nanotron", "universal"):
        far_store.begin()
        assert diff(f"far://{tmp_path}/{name}", str(tmp_path / name)).equal
        asked = far_store.of_files()
        assert sum(far_store.of_files("list").values()) <= 5
        assert far_store.waves() < 10 + sum(asked.values()) / 4, (name, far_store.waves(), asked)


@pytest.mark.parametrize(
    ("gaps", "near"),
    [([], 16 << 10), ([100 << 10], 100 << 10), ([200 << 10, 100 << 10], 200 << 10), ([200 << 10] * 4, 16 << 10)],
)
def test_of_what_lies_between_little_is_read_along(gaps: list[int], near: int) -> None:
    """Of 10 MiB that are wanted 3 %: gaps that are as wide as each other all, or none."""
    executor = ThreadExecutor(threads=1, memory_nbytes=8 << 20, checksum=True)
    assert executor._near(numpy.array(gaps, dtype=numpy.int64), 10 << 20) == near


@pytest.mark.parametrize("told", ["ETag", "generation", "blob_id", "sha", "LastModified", "mtime", "modificationTime"])
def test_a_store_tells_a_file_from_a_later_one(told: str) -> None:
    """By what S3, Google's store, hubs, a local disk and HDFS say of a file."""
    first, again, later = (remote._status({"size": 1, told: value}) for value in ("1", "1", "2"))
    assert first == again != later


def test_what_was_read_before_is_not_believed_where_a_store_tells_nothing(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that names the tag has as many bytes as before: a process that looks twice would load the older one."""
    monkeypatch.setattr(remote, "_VERSIONS", ())
    run = shutil.copytree(shards, tmp_path / "run")
    assert inspect(f"far://{run}").tag == "global_step3"
    (run / "global_step3").rename(run / "global_step4")
    (run / "latest").write_text("global_step4")
    assert inspect(f"far://{run}").tag == "global_step4"


@pytest.mark.parametrize("answers", ["all of the file", "less"])
def test_a_store_that_answers_with_another_range_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: str
) -> None:
    """As a plain web server does, which knows no ranges: of safetensors no checksum would tell."""
    folder = tmp_path / "saved"
    folder.mkdir()
    save_file({"weight": torch.arange(90_000.0), "other": torch.ones(7)}, folder / "model.safetensors")
    assert convert(str(folder), str(tmp_path / "here"), to="safetensors").complete
    ranges = Far.cat_file

    def answered(store: Far, path: str, start: int, end: int) -> bytes:
        given = ranges(store, path) if answers == "all of the file" else ranges(store, path, start, end)
        return given if answers == "all of the file" or end - start < 100_000 else given[: len(given) // 2]

    monkeypatch.setattr(Far, "cat_file", answered)
    with pytest.raises(ReadFailed, match=r"its store gives \d+ bytes of \[\d+, \d+\), which are \d+"):
        convert(f"far://{folder}", str(tmp_path / "out"), to="safetensors")
    assert not (tmp_path / "out").exists()


def test_a_file_that_has_grown_since_it_was_listed_is_named(shards: Path, tmp_path: Path) -> None:
    """As many bytes as were listed of it would name another tag, which is there: global_step3, of global_step31."""
    run = shutil.copytree(shards, tmp_path / "run")
    shutil.copytree(run / "global_step3", run / "global_step31")
    Far.before = lambda number: (run / "latest").write_text("global_step31")
    with pytest.raises(ReadFailed, match="has grown since it was listed, when it had 12 bytes; try again"):
        inspect(f"far://{run}")
    assert inspect(f"far://{run}").tag == "global_step31"


def test_a_store_that_tells_no_sizes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As one that lists the links of a web page."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text("global_step3")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert main(["inspect", f"http://127.0.0.1:{server.server_address[1]}/run"]) == 2
        server.shutdown()
    assert "does not say how many bytes a file has" in capsys.readouterr().err


@pytest.mark.parametrize("tool", [verify, fingerprint], ids=lambda tool: tool.__name__)
@pytest.mark.parametrize("change", ["replaced", "removed", "added"])
def test_what_changes_while_it_is_read_is_named(tmp_path: Path, tool: object, change: str) -> None:
    """Half-way, though all checksums are right: a file of the same run takes its name, it goes, or one more comes."""
    for name, seed in (("one", 5), ("other", 6)):
        shapes = (("weight", (64, 3000)),)
        write(Built(groups=(shapes,), frozen=(), tied=(), states=("exp_avg",), dp=2, seed=seed), tmp_path / name)
    step = tmp_path / "one" / "global_step3"
    path, shard = step / "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    ranges: list[int] = []

    def changes(number: int) -> None:
        ranges.append(number)
        if len(ranges) == 9 and change == "replaced":
            (tmp_path / "other" / "global_step3" / path.name).rename(path)
        elif len(ranges) == 9 and change == "removed":
            (step / shard).unlink()
        elif len(ranges) == 9:
            shutil.copy(step / shard, step / shard.replace("_1_", "_2_"))

    far_store.begin()
    Far.before = changes
    try:
        found = tool(f"far://{tmp_path}/one")  # type: ignore[operator]
        faults = found.faults
    except ReshardError as error:
        faults = error.faults
    said = {(fault.where.rpartition("/")[2], fault.what) for fault in faults}
    expected = {
        "replaced": (path.name, "has changed while it was read"),
        "removed": (shard, "has changed while it was read"),
        "added": (shard.replace("_1_", "_2_"), "appeared while the files beside it were read"),
    }
    assert expected[change] in said, said
