"""What cannot be read, written or loaded by URL, each named: an S3 server here (moto), with s3fs as its client."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases import Model, Run
from saves import Saves
from store_proxy import SECRET, Store, store_here

from ds_reshard.cli.main import main
from ds_reshard.containers import remote
from ds_reshard.operations import convert, inspect

sys.path.insert(0, str(Path(__file__).parents[2] / "formats"))
from zero_builder import Built, write

pytestmark = pytest.mark.distributed

SHAPES = tuple((f"p{i}", (7, i + 1)) for i in range(9))


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    pytest.importorskip("s3fs", reason="the test extra has s3fs and moto")
    with store_here() as made:
        yield made


@pytest.fixture(scope="module")
def shards(store: Store, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A synthetic checkpoint of 8 shards, here and there."""
    folder = tmp_path_factory.mktemp("shards") / "saved"
    write(Built(groups=(SHAPES,), frozen=(), tied=(), states=("exp_avg",), dp=8, seed=5), folder)
    return folder, store.put(folder, "shards")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://", "names no bucket"),
        ("s3:///bucket/shards", "names no bucket"),
        ("S3://bucket/shards", "write s3://"),
        ("simplecache::s3://bucket/shards", "is a chain of file systems"),
        ("s3://bucket/none", "does not exist"),
        ("s3://no-bucket/run", "does not exist"),
        (f"s3://key:{SECRET}@bucket/run", "holds credentials"),
        (f"S3://key:{SECRET}/more@bucket/run", "holds credentials"),
        (f"s3://bucket/run?X-Amz-Signature={SECRET}", "holds credentials"),
        ("unknown://bucket/run", "does not know"),
        ("gs://bucket/run", "pip install gcsfs"),
        ("s3://bucket/shards/latest", "is a file"),
    ],
)
def test_what_cannot_be_read_is_named_without_secrets(
    shards: tuple[Path, str], url: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("inspect", "fingerprint"):
        assert main([command, url]) != 0
        said = capsys.readouterr()
        assert says in said.err, said.err
        assert SECRET not in said.err + said.out


@pytest.mark.parametrize("tool", ["inspect", "verify", "fingerprint", "convert"])
@pytest.mark.parametrize(("file", "says"), [("optim", "is empty"), ("model", "empty"), ("latest", "names no tag")])
def test_an_empty_object_is_named(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], tool: str, file: str, says: str
) -> None:
    """A shard, the file of the model, the one that names the tag; nothing is converted."""
    built = Built(groups=(SHAPES,), frozen=(), tied=(), states=("exp_avg",), dp=2, seed=5)
    write(built, tmp_path / "first")
    url = store.put(tmp_path / "first", "empty")
    name = next(path for path in reversed(store.files.find("bucket/empty")) if file in path)
    store.files.pipe(name, b"")
    more = ["s3://bucket/of-empty", "--to", "zero3", "--processes", "1"] if tool == "convert" else []
    assert main([tool, url, *more]) == (1 if tool in ("inspect", "verify") and file != "latest" else 2)
    told = capsys.readouterr()
    at = f"{url}: has a file 'latest' that" if file == "latest" else f"s3://{name}: "
    assert re.search(f"{at}.*{says}", told.out + told.err), told
    assert not store.files.find("bucket/of-empty") and not store.files.find("bucket/of-empty.ds-reshard")


@pytest.mark.parametrize(
    ("out", "says", "mend"),
    [
        ("unknown://bucket/out", "does not know", "correct the part before ://"),
        ("gs://bucket/out", "needs a package", "pip install gcsfs"),
        (f"s3://key:{SECRET}@bucket/out", "holds credentials", "settings or environment"),
        ("s3:///bucket/shards", "names no bucket", "s3://BUCKET/FOLDER"),
        ("s3://no-bucket/out", "bucket does not exist", "create the bucket, or correct its name"),
        ("s3://bucket/shards/latest", "latest: is a file", "a URL where no file is"),
        ("s3://bucket/shards/latest/deep/out", "latest: is a file", "a URL where no file is"),
        ("s3://bucket/shards/global_step3/mp_rank_00_model_states.pt", "is a file", "a URL where no file is"),
        ("s3://bucket/shards/global_step3", "is there already", "name another URL"),
    ],
)
def test_where_no_output_can_be_is_named_and_nothing_is_written(
    store: Store,
    tmp_path: Path,
    shards: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    out: str,
    says: str,
    mend: str,
) -> None:
    (tmp_path / "spool").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spool"))
    before = store.files.find("/bucket"), len(store.proxy.commands)
    assert main(["convert", str(shards[0]), out, "--to", "zero3", "--dp", "2", "--processes", "1"]) == 2
    told = capsys.readouterr().err
    assert says in told and mend in told and "--resume" not in told, told
    assert SECRET not in told
    sent = [one for one in store.proxy.commands[before[1] :] if one.startswith("PUT") and "/no-bucket" not in one]
    assert sent == [] and store.files.find("/bucket") == before[0]
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_folder_that_a_console_has_made_takes_an_output(store: Store, shards: tuple[Path, str]) -> None:
    """An object of no bytes whose name ends with a slash: it is no file that would be replaced."""
    store.files.call_s3("put_object", Bucket="bucket", Key="made/", Body=b"")
    assert main(["convert", str(shards[0]), "s3://bucket/made", "--to", "zero3", "--dp", "2", "--processes", "1"]) == 0
    assert inspect("s3://bucket/made").faults == ()


@pytest.mark.parametrize("named", [False, True], ids=["latest", "tag"])
@pytest.mark.parametrize(
    ("url", "error", "says"),
    [
        ("unknown://bucket/run", "ConfigError", "does not know"),
        ("gs://bucket/run", "ConfigError", "pip install gcsfs"),
        ("s3://", "ConfigError", "names no bucket"),
        ("s3:/bucket/run", "ConfigError", "two slashes"),
        (Path("s3://bucket/run"), "ConfigError", "two slashes"),
        (f"s3://key:{SECRET}@bucket/run", "ConfigError", "holds credentials"),
        (f"S3://key:{SECRET}@bucket/run", "ConfigError", "holds credentials"),
        (f"simplecache::s3://key:{SECRET}@bucket/run", "ConfigError", "is a chain of file systems"),
        (f"s3://bucket/run?X-Amz-Signature={SECRET}", "ConfigError", "holds credentials"),
        ("s3://no-bucket/run", "CheckpointNotFound", "does not exist|has no tag"),
        ("s3://bucket/none", "CheckpointNotFound", "does not exist|has no tag"),
        ("s3://bucket/shards/latest", "CheckpointNotFound", "is a file|has no tag"),
        ("s3://bucket/shards/global_step3", "CheckpointNotFound", "holds no file 'latest'|has no tag"),
    ],
)
def test_a_load_of_what_is_no_folder_ends_on_every_rank(
    worlds: Any, store: Store, shards: tuple[Path, str], url: str, error: str, says: str, named: bool
) -> None:
    _refused(worlds, store, url, error, says, tag="global_step3" if named else None)


@pytest.mark.parametrize(
    ("harm", "error", "says"),
    [
        ("no permission to list", "ReadFailed", "The store refuses it"),
        ("no permission to read", "ReadFailed", "The store refuses it"),
        ("an empty shard", "CheckpointDamaged", "rank_1_.*empty"),
        ("an empty model", "CheckpointDamaged", "model_states.pt.*empty"),
        ("an empty latest", "CheckpointNotFound", "names no tag"),
        ("a latest of this disk", "CheckpointNotFound", "half there and half elsewhere"),
        (f"a latest of s3://key:{SECRET}@bucket", "CheckpointNotFound", "half there and half elsewhere"),
        (f"a latest of s3:/key:{SECRET}@bucket", "CheckpointNotFound", "half there and half elsewhere"),
        ("a late shard", "CheckpointDamaged", "rank_1_|ranks 1.*try again: a store may list a new file late"),
    ],
)
def test_a_load_of_what_is_odd_there_ends_on_every_rank(
    worlds: Any, saves: Saves, store: Store, harm: str, error: str, says: str
) -> None:
    folder, _ = saves(Run(2, 4), Model())
    url = store.put(folder, "odd")
    shard = next(name for name in store.files.find("bucket/odd") if "rank_1_" in name)
    if harm.startswith("an empty"):
        word = harm.removeprefix("an empty ").replace("shard", "rank_1_")
        store.files.pipe_file(next(name for name in store.files.find("bucket/odd") if word in name), b"")
    elif harm.startswith("a latest"):
        to = harm.removeprefix("a latest of ").replace("this disk", f"{folder}")
        store.files.pipe_file("bucket/odd/latest", f"{to}/global_step3".encode())
    elif harm == "a late shard":
        store.proxy.tells = partial(_without, shard.rpartition("/")[2])
    else:
        kind = harm.rpartition(" ")[2]
        store.proxy.refuses = lambda command, path: (
            "AccessDenied" if ("list-type" in path if kind == "list" else shard in path) else None
        )
    try:
        _refused(worlds, store, url, error, says)
    finally:
        store.proxy.refuses, store.proxy.tells = lambda command, path: None, lambda path, data: data


@pytest.mark.parametrize("universal", [False, True])
def test_what_deepspeed_would_load_itself_is_refused(worlds: Any, saves: Saves, store: Store, universal: bool) -> None:
    """Of a kind that is left to it: it would look for the folder on the disk, find nothing, and begin anew."""
    folder, _ = saves(Run(3, 2), Model())
    run = Run(3, 2, config={"checkpoint": {"load_universal": universal}})
    given = {"run": run, "model": Model(), "folder": store.put(folder, "left"), "switch": "MiCS_Optimizer"}
    told = worlds[2].run("remote_jobs.load_with_feature", environment=store.environment, **given)
    assert {error for error, _ in told} == {"UnsupportedLayout"}, told
    assert len(set(told)) == 1 and "DeepSpeed itself loads, which reads no URL" in told[0][1]


def _refused(worlds: Any, store: Store, url: str, error: str, says: str, **given: Any) -> None:
    """The same error on each of two ranks, without a secret, and the engine as it was."""
    told = worlds[2].run(
        "remote_jobs.load_refused", environment=store.environment, run=Run(3, 2), model=Model(), folder=url, **given
    )
    assert {one["error"] for one in told} == {error}, told
    assert len({one["text"] for one in told}) == 1, told
    assert re.search(says, told[0]["text"], re.DOTALL), told[0]["text"]
    assert SECRET not in repr(told)
    assert all(one["unchanged"] and one["step"] != "EngineUnusable" for one in told), told


@pytest.mark.parametrize("code", ["AccessDenied", "RequestTimeTooSkewed", "InvalidAccessKeyId"])
@pytest.mark.parametrize("what", ["GET", "LIST", "PUT"])
def test_what_the_store_refuses_is_named(
    store: Store, shards: tuple[Path, str], capsys: pytest.CaptureFixture[str], code: str, what: str
) -> None:
    """No permission, clocks that differ, another's key: to list, to read, to write; without a secret."""
    url, out = shards[1], f"s3://bucket/refused-{code}"
    refused: list[str] = []

    def refuses(command: str, path: str) -> str | None:
        kind = "LIST" if "list-type" in path else command
        asked = kind == what and (kind != "GET" or path.startswith("/bucket/shards/global"))
        refused.extend([path] * asked)
        return code if asked else None

    remote.release()
    store.proxy.refuses = refuses
    try:
        words = (
            ["convert", url, out, "--to", "zero3", "--dp", "2", "--processes", "1"] if what == "PUT" else ["inspect"]
        )
        assert main([*words, url] if what != "PUT" else words) != 0
    finally:
        store.proxy.refuses = lambda command, path: None
    said = capsys.readouterr()
    assert "The store refuses it" in said.err + said.out and "s3://bucket/" in said.err + said.out
    assert SECRET not in said.err + said.out
    assert refused and max(Counter(refused).values()) <= 4  # each tool opens some files more than once


def test_a_shard_that_a_listing_misses_is_named_with_the_advice_to_try_again(
    store: Store, shards: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of DeepSpeed's, and of a file that a directory of torch.distributed.checkpoint names."""
    convert(shards[1], "s3://bucket/late", to="dcp", dp=2)
    for url, name in ((shards[1], "zero_pp_rank_7_"), ("s3://bucket/late", "__1_0.distcp")):
        store.proxy.tells = partial(_without, name)
        try:
            assert main(["fingerprint", url]) != 0
        finally:
            store.proxy.tells = lambda path, data: data
        said = capsys.readouterr().err
        assert "try again: a store may list a new file late" in said, said
        assert "data-parallel ranks 7 are missing" in said or "__1_0.distcp" in said
        assert main(["fingerprint", url]) == 0
        capsys.readouterr()


def _without(name: str, path: str, data: bytes) -> bytes:
    """A listing without the entries of that name."""
    if "list-type" not in path:
        return data
    return re.sub(rb"<Contents>(?:(?!</Contents>).)*%s.*?</Contents>" % name.encode(), b"", data, flags=re.DOTALL)


def test_a_folder_that_is_half_here_is_refused(
    store: Store, shards: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tag, given or of `latest`, that leads from the store to this machine's disk, or from that to the store."""
    folder, url = shards
    here, there = f"{folder}/global_step3", f"{url}/global_step3"
    store.files.pipe_file("bucket/half/latest", here.encode())
    (tmp_path / "latest").write_text(there)
    for words in ([url, "--tag", here], [str(folder), "--tag", there], ["s3://bucket/half"], [str(tmp_path)]):
        assert main(["inspect", *words]) == 2
        assert "half there and half elsewhere" in capsys.readouterr().err
