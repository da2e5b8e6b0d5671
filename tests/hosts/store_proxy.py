"""What a store far away does: a proxy in front of one on this machine that is late, throttles and cuts connections.

And an S3 server (moto) behind it, with a bucket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"

_REFUSED = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>The store refuses it: %s.</Message></Error>"


class Proxy:
    """Forwards to `host`:`port`; each answer comes `latency_s` later, all of them together by `nbytes_per_s`.

    What `refuses` gives for a command and a path is the code of an error that it answers with; `tells` may change what
    is answered. `before` is called with the path of each range that is asked for, before it is. Of the ranges that are
    asked for while `throttle` or `cut` is set, so many are answered with 503, or half.
    """

    def __init__(self, host: str, port: int) -> None:
        self.latency_s, self.nbytes_per_s, self._free_at = 0.0, 0.0, 0.0
        self.commands: list[str] = []
        self.before: Callable[[str], None] | None = None
        self.refuses: Callable[[str, str], str | None] = lambda command, path: None
        self.tells: Callable[[str, bytes], bytes] = lambda path, data: data
        self.throttle = self.cut = self.requests = 0
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _forward(self) -> None:
                time.sleep(proxy.latency_s)
                proxy.commands.append(f"{self.command} {self.path}")
                ranged = self.command == "GET" and "Range" in self.headers
                if ranged and proxy.before is not None:
                    proxy.before(self.path)
                if code := proxy.refuses(self.command, self.path):
                    self.rfile.read(int(self.headers.get("Content-Length", 0)))
                    self._answer(403, [("Content-Type", "application/xml")], _REFUSED % (code.encode(), code.encode()))
                    return
                throttled, cut = proxy._misbehave() if ranged else (False, False)
                if throttled:
                    self._answer(503, [("Content-Type", "application/xml")], _SLOW_DOWN)
                    return
                given = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                there = HTTPConnection(host, port)
                there.request(self.command, self.path, given or None, dict(self.headers))
                answer = there.getresponse()
                data = answer.read()
                data = proxy.tells(self.path, data) if self.command == "GET" else data
                self._answer(answer.status, answer.getheaders(), data, cut=cut)
                there.close()

            def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, *, cut: bool = False) -> None:
                self.send_response(status)
                kept = {
                    name: value for name, value in headers if name.lower() not in ("transfer-encoding", "connection")
                }
                if self.command != "HEAD":
                    kept = {name: value for name, value in kept.items() if name.lower() != "content-length"}
                    kept["Content-Length"] = str(len(data))
                for name, value in kept.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    proxy._take_turn(len(data))
                    self.wfile.write(data[: len(data) // 2] if cut else data)
                if cut:
                    self.close_connection = True

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take_turn(self, nbytes: int) -> None:
        """Wait as long as all answers so far take, and this one."""
        if self.nbytes_per_s:
            with self._lock:
                self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.nbytes_per_s
                wait = self._free_at - time.monotonic()
            time.sleep(max(0.0, wait))

    def _misbehave(self) -> tuple[bool, bool]:
        with self._lock:
            self.requests += 1
            throttled, cut = self.throttle > 0, self.throttle <= 0 < self.cut
            self.throttle -= throttled
            self.cut -= cut
        return throttled, cut


SECRET = "not-to-be-shown"


class Store:
    """A bucket, filled from local folders; `environment` is what a client needs to find it."""

    def __init__(self, proxy: Proxy) -> None:
        import s3fs

        self.proxy = proxy
        self.environment = {
            "AWS_ENDPOINT_URL": proxy.address,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        os.environ.update(self.environment)
        self.files = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
        self.files.mkdir("bucket")

    def put(self, folder: Path, name: str) -> str:
        self.files.put(f"{folder}/", f"bucket/{name}/", recursive=True)
        return f"s3://bucket/{name}"


@contextlib.contextmanager
def store_here() -> Iterator[Store]:
    """A server of this process, and a proxy; the environment names it meanwhile."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    before = dict(os.environ)
    try:
        proxy = Proxy(*server.get_host_and_port())
        yield Store(proxy)
        proxy.close()
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.stop()
