"""What a store far away does: a proxy in front of one on this machine that is late, throttles and cuts connections.

And an S3 server (moto) behind it, with a bucket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from zlib import crc32

_ERROR = "<?xml version='1.0'?><Error><Code>{0}</Code><Message>The store refuses it: {0}.</Message></Error>"
_XML = [("Content-Type", "application/xml")]
_WHO = re.compile(r"\bapp/(\S+)")


class Request(NamedTuple):
    """One that is asked for: the `number`-th of its kind by a client of that path, told alike in each run.

    `who` is what the client calls itself, by AWS_SDK_UA_APP_ID; a path has its range or its part behind it.
    """

    who: str
    kind: str
    path: str
    number: int


_RETRIED, _REFUSED = ("busy", "cut"), ("busy for good", "403", "404")
DEATH = "death"
FAULTS = {
    "GET": (*_RETRIED, *_REFUSED, "short", "flipped", "replaced"),
    "HEAD": (*_RETRIED, *_REFUSED),
    "LIST": (*_RETRIED, *_REFUSED, "short", "late"),
    "UPLOADS": (*_RETRIED, *_REFUSED, "short"),
    "PUT": (*_RETRIED, *_REFUSED, "flipped", "unheard", DEATH),
    "BEGIN": (*_RETRIED, *_REFUSED, "unheard", DEATH),
    "PART": (*_RETRIED, *_REFUSED, "flipped", "unheard", DEATH),
    "END": (*_RETRIED, *_REFUSED, "unheard", DEATH),
    "ABORT": (*_RETRIED, *_REFUSED, "unheard", DEATH),
    "DELETE": (*_RETRIED, *_REFUSED, "unheard", DEATH),
}
"""What may befall a request of each kind.

"busy" is 503 SlowDown, once; "busy for good" is the same for it and each that is like it from then on. A connection is
"cut" half-way through the answer, or before the store has done anything; where a change is "unheard" it has. A body is
"short" though its length is said to be that; one that is sent "flipped" is refused where the client said its checksum,
as S3 does. Before a GET is answered another object takes the place, "replaced"; a listing is "late" without its last
name. Of "death" the client dies, by `kills`.
"""

_MISSING = {"LIST": "NoSuchBucket", "PART": "NoSuchUpload", "END": "NoSuchUpload", "ABORT": "NoSuchUpload"}


def _asked(command: str, target: str, headers: HTTPMessage) -> tuple[str, str]:
    """The kind and the path of a request."""
    parts = urlsplit(target)
    path, query = unquote(parts.path), parse_qs(parts.query, keep_blank_values=True)
    if command == "GET" and "list-type" in query:
        ends = "".join(query.get(name, [""])[0] for name in ("delimiter", "continuation-token"))
        return "LIST", f"{path}/{query.get('prefix', [''])[0]}{ends and '#' + ends}"
    if command == "GET" and "uploads" in query:
        return "UPLOADS", f"{path}/{query.get('prefix', [''])[0]}"
    if command == "GET":
        return "GET", "#".join([path, *filter(None, [headers.get("Range")])])
    if command == "PUT" and "partNumber" in query:
        return "PART", f"{path}#{query['partNumber'][0]}"
    if command == "POST":
        return ("BEGIN" if "uploads" in query else "END" if "uploadId" in query else "POST"), path
    return ("ABORT" if command == "DELETE" and "uploadId" in query else command), path


class Proxy:
    """Forwards to `host`:`port`; each answer comes `latency_s` later, all of them together by `nbytes_per_s`.

    What `refuses` gives for a command and a path is the code of an error that it answers with; `tells` may change what
    is answered. `before` is called with the path of each range that is asked for, before it is. Of the requests of a
    kind `throttle` and `cut` say how many are "busy" or "cut". `fault`, of `FAULTS`, befalls the request that is `at`;
    all are in `requests`.
    """

    def __init__(self, host: str, port: int) -> None:
        self.latency_s, self.nbytes_per_s, self._free_at = 0.0, 0.0, 0.0
        self.commands: list[str] = []
        self.before: Callable[[str], None] | None = None
        self.refuses: Callable[[str, str], str | None] = lambda command, path: None
        self.tells: Callable[[str, bytes], bytes] = lambda path, data: data
        self.throttle: dict[str, int] = {}
        self.cut: dict[str, int] = {}
        self.requests: list[Request] = []
        self.at: Request | None = None
        self.fault, self.befallen = "", False
        self.kills: Callable[[], None] = lambda: None
        self.replaces: Callable[[str], None] = lambda path: None
        self.replaced = "", b""
        self._there = host, port
        self._count: Counter[tuple[str, str, str]] = Counter()
        self._answering = 0
        self._lock = threading.Condition()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else a body waits 40 ms for the other side to hear of its head

            def _forward(self) -> None:
                proxy._count_answering(1)
                try:
                    self._answer_it()
                finally:
                    proxy._count_answering(-1)

            def _answer_it(self) -> None:
                time.sleep(proxy.latency_s)
                given = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy.commands.append(f"{self.command} {self.path}")
                if self.command == "GET" and "Range" in self.headers and proxy.before is not None:
                    proxy.before(self.path)
                if code := proxy.refuses(self.command, self.path):
                    self._refuse(403, code)
                    return
                kind, path = _asked(self.command, self.path, self.headers)
                fault = proxy._befalls(kind, path, self.headers)
                if fault in ("403", "404"):
                    self._refuse(int(fault), "AccessDenied" if fault == "403" else _MISSING.get(kind, "NoSuchKey"))
                elif fault.startswith("busy"):
                    self._refuse(503, "SlowDown")
                elif fault == DEATH or (fault == "cut" and (self.command != "GET")):
                    proxy.kills() if fault == DEATH else None
                    self.close_connection = True
                elif fault == "flipped" and given and proxy._is_refused(self.headers, flipped(given)):
                    self._refuse(400, "BadDigest")
                else:
                    self._answered(path, flipped(given) if fault == "flipped" else given, fault)

            def _answered(self, path: str, given: bytes, fault: str) -> None:
                if fault == "replaced":
                    proxy.replaces(path.partition("#")[0])
                there = HTTPConnection(*proxy._there)
                there.request(self.command, self.path, given or None, dict(self.headers))
                answer = there.getresponse()
                data = answer.read()
                there.close()
                if fault == "unheard":
                    self.close_connection = True
                    return
                if self.command == "GET":
                    data = proxy.tells(self.path, data)
                    data = {"short": _short, "flipped": flipped, "late": _late}.get(fault, bytes)(data)
                self._answer(answer.status, answer.getheaders(), data, cut=fault == "cut")

            def _refuse(self, status: int, code: str) -> None:
                self._answer(status, _XML, _ERROR.format(code).encode())

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
                    self.wfile.write(_short(data) if cut else data)
                if cut:
                    self.close_connection = True

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):  # a client that has died
                    super().handle()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def begin(self, at: Request | None = None, fault: str = "") -> None:
        """Number requests anew, once those of before are answered; this befalls one of them."""
        with self._lock:
            self._lock.wait_for(lambda: not self._answering)
            self.at, self.fault, self.befallen = at, fault, False
            self.requests, self._count = [], Counter()

    def _count_answering(self, more: int) -> None:
        with self._lock:
            self._answering += more
            self._lock.notify_all()

    def _take_turn(self, nbytes: int) -> None:
        """Wait as long as all answers so far take, and this one."""
        if self.nbytes_per_s:
            with self._lock:
                self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.nbytes_per_s
                wait = self._free_at - time.monotonic()
            time.sleep(max(0.0, wait))

    def _befalls(self, kind: str, path: str, headers: HTTPMessage) -> str:
        """What befalls a request, "" where nothing does."""
        found = _WHO.search(headers.get("User-Agent", ""))
        who = found[1] if found else ""
        with self._lock:
            self._count[who, kind, path] += 1
            request = Request(who, kind, path, self._count[who, kind, path])
            self.requests.append(request)
            self.befallen |= request == self.at
            if self.at is not None and request[:3] == self.at[:3]:
                later = self.fault == "busy for good" and request.number > self.at.number
                return self.fault if request == self.at or later else ""
            for left, named in ((self.throttle, "busy"), (self.cut, "cut")):
                if left.get(kind, 0) > 0:
                    left[kind] -= 1
                    return named
        return ""

    def _is_refused(self, headers: HTTPMessage, data: bytes) -> bool:
        """Whether S3 would refuse a body by the checksum that was said to be its."""
        said = headers.get("x-amz-checksum-crc32")
        return said is not None and b64encode(crc32(data).to_bytes(4, "big")).decode() != said


def _short(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    """With one bit that is another, in the middle."""
    at = len(data) // 2
    return data[:at] + bytes(byte ^ 16 for byte in data[at : at + 1]) + data[at + 1 :]


def _late(data: bytes) -> bytes:
    """A listing without its last entry."""
    head, mark, last = data.rpartition(b"<Contents>")
    return head + last.partition(b"</Contents>")[2] if mark else data


def in_a_hurry() -> None:
    """From now on the client of this process asks again as often as ever, after a hundredth of the time."""
    sleep = asyncio.sleep
    asyncio.sleep = lambda seconds, *more: sleep(seconds / 100, *more)  # type: ignore[assignment]


SECRET = "not-to-be-shown"


def reach(environment: dict[str, str]) -> None:
    """Let the clients of this process find a store: those that they are remembered by are of another."""
    import s3fs

    os.environ.update(environment)
    s3fs.S3FileSystem.clear_instance_cache()


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
        reach(self.environment)
        self.files = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
        self.files.mkdir("bucket")

    def put(self, folder: Path, name: str) -> str:
        self.files.put(f"{folder}/", f"bucket/{name}/", recursive=True)
        return f"s3://bucket/{name}"

    def contents(self, name: str) -> dict[str, bytes]:
        """Each file below a folder, by its path from there: as the server holds it, asked by no request."""
        keys = _held().buckets["bucket"].keys
        return {path.removeprefix(f"{name}/"): keys[path].value for path in sorted(keys) if path.startswith(f"{name}/")}


def _held() -> Any:
    """What servers of this process hold."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]


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
        _held().reset()
