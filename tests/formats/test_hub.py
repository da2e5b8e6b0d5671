"""Checkpoints at hf://: a hub on this machine, huggingface_hub as its client, which keeps listings and reads ahead."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from zero_builder import Built, write

from ds_reshard.containers import remote
from ds_reshard.errors import CheckpointDamaged
from ds_reshard.operations import convert, diff, fingerprint

constants = pytest.importorskip("huggingface_hub.constants", reason="the test extra has huggingface_hub")
URL = "hf://user/repo/run"


class Hub:
    """One repository; `before` is called with the path of each range that is asked for, before it is."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.nbytes_sent = 0
        self.before: Callable[[str], None] = lambda path: None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                path, query = unquote(parts.path), parse_qs(parts.query)
                tree = re.fullmatch(r"/api/models/user/repo/tree/main(?:/(.*))?", path)
                blob = re.fullmatch(r"/user/repo/resolve/main/(.*)", path)
                if tree:
                    told = hub.tree(tree[1] or "", query.get("recursive", ["false"])[0].lower() == "true")
                    self._answer(200 if told else 404, json.dumps(told).encode(), "" if told else "EntryNotFound")
                elif blob and blob[1] in hub.files:
                    hub.before(blob[1])
                    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
                    assert asked is not None
                    data = hub.files[blob[1]][int(asked[1]) : int(asked[2]) + 1]
                    hub.nbytes_sent += len(data)
                    self._answer(206, data)
                elif path == "/api/models/user/repo/revision/main" or path == "/api/models/user/repo":
                    self._answer(200, json.dumps({"id": "user/repo", "sha": "0" * 40}).encode())
                else:
                    self._answer(404, b"{}", "RepoNotFound")

            def _answer(self, status: int, data: bytes, error: str = "") -> None:
                self.send_response(status)
                self.send_header("X-Error-Code", error)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def tree(self, folder: str, recursive: bool) -> list[dict[str, object]]:
        found: dict[str, dict[str, object]] = {}
        for path, data in self.files.items():
            if path.startswith(f"{folder}/"):
                above = path.removeprefix(f"{folder}/").split("/")[:-1]
                for depth in range(1, len(above) + 1):
                    name = "/".join([folder, *above[:depth]])
                    found |= {name: {"type": "directory", "oid": "0", "path": name}} if recursive or depth == 1 else {}
                if recursive or not above:
                    oid = hashlib.sha1(data).hexdigest()
                    found[path] = {"type": "file", "oid": oid, "size": len(data), "path": path}
        return list(found.values())

    def put(self, folder: Path, name: str = "run") -> None:
        files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.files |= {f"{name}/{path}": data for path, data in files.items()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    there = f"http://127.0.0.1:{made.server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", there)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", there + "/{repo_id}/resolve/{revision}/{filename}")
    remote.release()
    yield made
    remote.forget(URL)
    made.server.shutdown()
    made.server.server_close()


def saved(place: Path, seed: int, width: int) -> Path:
    shapes = tuple((f"p{number}", (64, width + number)) for number in range(6))
    return write(Built(groups=(shapes,), states=("exp_avg",), dp=2, seed=seed), place)


def test_nothing_is_fetched_that_nobody_wants(hub: Hub, tmp_path: Path) -> None:
    """The client's own files would read 5 MiB behind each range of 2 MiB."""
    folder = saved(tmp_path / "saved", seed=5, width=2000)
    hub.put(folder)
    assert convert(URL, str(tmp_path / "out"), to="zero3", dp=3).complete
    assert diff(str(tmp_path / "out"), str(folder)).equal
    assert hub.nbytes_sent < 1.05 * sum(map(len, hub.files.values()))


@pytest.mark.parametrize("tool", ["convert", "fingerprint"])
def test_a_file_in_a_folder_below_that_changes_is_named(hub: Hub, tmp_path: Path, tool: str) -> None:
    """Each file is read at once, all checksums are right: some parameters would be of one save, some of another."""
    for name, seed in (("first", 5), ("second", 6)):
        convert(str(saved(tmp_path / f"zero {name}", seed, width=30)), str(tmp_path / name), to="universal")
    hub.put(tmp_path / "first")
    asked: list[str] = []

    def another_save(path: str) -> None:
        asked.extend([path] * ("/zero/" in path))
        if len(asked) == 6:
            hub.put(tmp_path / "second" / "global_step3" / "zero", "run/global_step3/zero")

    hub.before = another_save
    what = r"zero/p\d/\w+.pt: has changed while it was read"
    if tool == "convert":
        with pytest.raises(CheckpointDamaged, match=what):
            convert(URL, str(tmp_path / "out"), to="zero3", dp=3)
        assert not (tmp_path / "out").exists()
    else:
        assert re.search(what, "\n".join(f"{fault.where}: {fault.what}" for fault in fingerprint(URL).faults))
