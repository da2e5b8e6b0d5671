"""Files by URL, listed, read in ranges and written through any file system of fsspec: object stores, hubs, memory.

What a folder lists is kept until `forget` is called for it, and so are the small ranges that were read of its files:
a checkpoint of many shards is opened with one listing, and with few requests a file. What is written, and what is said
of files that are being written, is asked for each time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import os
import posixpath
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from ds_reshard.containers.ranges import AT_ONCE, Ranges, ReadAhead
from ds_reshard.errors import ConfigError, raise_faults, without_secrets

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL = re.compile(r"((?:[a-z][a-z0-9+.-]*::)*[a-z][a-z0-9+.-]*)://(.*)", re.DOTALL | re.IGNORECASE)
_ONE_SLASH = re.compile(r"(?:s3a?|gs|gcs|az|abfss?|hf):/[^/]")
_HOST = re.compile(r"[^:]*(?::[0-9]*)?")
_END_NBYTES, _PART_NBYTES = 32 << 10, 2 << 10
"""Of a beginning and an end, of a file or of an archive inside one, so much is read at once: its directory is there."""
_SMALL_NBYTES, _WHOLE_NBYTES = 256 << 10, 64 << 10
"""Ranges that have no more are kept; a file that has no more is read at once."""
_KEPT_NBYTES = 64 << 20
Part = tuple[int, int]
"""An archive inside a file: its offset, and its bytes."""


def is_url(path: str) -> bool:
    """Whether it is meant as one, also as none that is read here, or as what pathlib.Path makes of one: s3:/BUCKET."""
    return ("://" in path and _URL.match(path) is not None) or _ONE_SLASH.match(path) is not None


def without_end(path: str) -> str:
    """A URL without slashes at its end, which would be in the names of its files; any other path as it is."""
    bare = path.rstrip("/")
    return bare if is_url(bare) else path


class Status(NamedTuple):
    """What a store says of a name: the bytes of a file, None of a folder; `version` tells a file from a later one."""

    nbytes: int | None
    version: int = 0


def status(url: str) -> Status | None:
    """None where nothing has the name. Raises OSError."""
    url = url.rstrip("/")
    parent, name = posixpath.split(url)
    if _is_known(parent):
        return listing(parent).get(name)
    if listing(url):
        return Status(None)
    store, path = _store(url)
    with _os_errors(), contextlib.suppress(FileNotFoundError):
        return _status(store.info(path))
    return None


def listing(url: str) -> dict[str, Status]:
    """What lies in a folder, sorted by name; nothing where there is no folder. Raises OSError."""
    url = url.rstrip("/")
    known = _LISTED.get(url)
    if known is not None:
        return known
    if _is_known(posixpath.dirname(url)) and status(url) is None:
        return {}
    found = _listed(url)
    with _LOCK:
        return _LISTED.setdefault(url, found)


def _listed(url: str) -> dict[str, Status]:
    """The same, asked for."""
    store, path = _store(url)
    found: list[dict[str, object]] = []
    with _os_errors(), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        keeps_listings = hasattr(store, "dircache") and store.protocol != "memory"
        found = store.ls(path, detail=True, **({"refresh": True} if keeps_listings else {}))
        found = [one for listed in found if (one := _followed(store, listed)) is not None]
    names = {posixpath.basename(str(one["name"]).rstrip("/")): one for one in found}
    itself = store._strip_protocol(path).rstrip("/")
    kept = {name: _status(one) for name, one in names.items() if str(one["name"]).rstrip("/") != itself}
    return dict(sorted((name, one) for name, one in kept.items() if name))


_TYPES = ("file", "directory")


def _followed(store: AbstractFileSystem, listed: dict[str, object]) -> dict[str, object] | None:
    """What is listed; of a link, listed as one by file:// and sftp://, what it leads to, None where that is nothing."""
    if listed.get("type") in _TYPES:
        return listed
    with contextlib.suppress(FileNotFoundError):
        return {**store.info(str(listed["name"])), "name": listed["name"]}
    return None


def tree(url: str) -> dict[str, Status]:
    """Each file below a folder, by its path from there; of its folders one listing tells all. Raises OSError."""
    url = url.rstrip("/")
    known = _TREES.get(url)
    if known is None:
        flat = listing(url)
        if all(one.nbytes is not None for one in flat.values()):
            return flat
        known = below(url)
        folders: dict[str, dict[str, Status]] = {"": {}}
        for path, one in known.items():
            *above, name = path.split("/")
            for depth in range(len(above)):
                folders.setdefault("/".join(above[:depth]), {})[above[depth]] = Status(None)
            folders.setdefault("/".join(above), {})[name] = one
        with _LOCK:
            for path, inside in folders.items():
                _LISTED[f"{url}/{path}".rstrip("/")] = dict(sorted(inside.items()))
            _TREES[url] = known
    return known


def _is_known(folder: str) -> bool:
    """Whether the folder was listed, or one that it lies in."""
    while "://" in folder and not folder.endswith("/"):
        if folder in _LISTED:
            return True
        folder = posixpath.dirname(folder)
    return False


def forget(url: str) -> None:
    """Ask anew for what lies in a folder and below it."""
    url = url.rstrip("/")
    with _LOCK:  # threads that open files list folders meanwhile
        for listed in (_LISTED, _TREES):
            for one in list(listed):
                if one == url or one.startswith(f"{url}/") or url.startswith(f"{one}/"):
                    del listed[one]

    def lies_there(place: object) -> bool:
        return isinstance(place, tuple) and str(place[0]).startswith(f"{url}/")

    _AHEAD.forget(lies_there)
    _RANGES.forget(lies_there)  # not every store tells a file from a later one


class Object:
    """A file of a store, or an archive inside one, read in ranges; positions are those of the file."""

    def __init__(self, url: str, part: Part | None = None) -> None:
        found = listing(posixpath.dirname(url)).get(posixpath.basename(url)) or status(url)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
        if found.nbytes is None:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), url)
        self.nbytes = found.nbytes
        self._place: _Place = (url, part)
        self._begin, self._stop = (0, self.nbytes) if part is None else (part[0], min(self.nbytes, sum(part)))
        self._version = found.version
        self._store, self._path = _store(url)
        # Its files read 5 MiB behind each range, too: fsspec 2026.9 spec.py, AbstractFileSystem.cat_file
        self._unbuffered = {"cache_type": "none"} if self._store.protocol == "hf" else {}

    def read(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop), fewer where the file ends before; small ranges are kept. Raises OSError."""
        stop = min(stop, self.nbytes)
        if start >= stop:
            return b""
        for first, last in self._windows():
            if first <= start and stop <= last:
                _AHEAD.opened(self._known())
                return self._kept(first, last)[start - first : stop - first]
        return self._kept(start, stop) if stop - start <= _SMALL_NBYTES else self.fetch(start, stop)

    def warm(self) -> None:
        """Fetch the end and the beginning, which whoever opens it reads first. Raises OSError."""
        for first, last in reversed(self._windows()):
            self._kept(first, last)

    def fetch(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop), asked for where they are not kept. Raises OSError."""
        kept = _RANGES.find((self._place[0], self._version), start, min(stop, self.nbytes))
        if kept is not None:
            return kept
        last = stop >= self.nbytes  # one byte more is asked for: a file that has grown since it was listed has it
        with _os_errors():
            data = bytes(self._store.cat_file(self._path, start=start, end=stop + last, **self._unbuffered))
        with _LOCK:
            _COUNTED["requests"] += 1
            _COUNTED["nbytes"] += len(data)
        asked = max(0, min(stop, self.nbytes) - start)
        if last and start + len(data) == self.nbytes + 1:
            raise OSError(errno.EIO, f"it has grown since it was listed, when it had {self.nbytes} bytes; try again")
        if len(data) != asked:  # of one that knows no ranges all of it
            raise OSError(errno.EIO, f"its store gives {len(data)} bytes of [{start}, {stop}), which are {asked}")
        return data

    def _windows(self) -> list[tuple[int, int]]:
        """What is read at once: the beginning and the end, or all of it."""
        if self.nbytes <= _WHOLE_NBYTES:
            return [(0, self.nbytes)]
        if self._stop - self._begin <= _WHOLE_NBYTES:
            return [(self._begin, self._stop)]
        end = _END_NBYTES if self._place[1] is None else _PART_NBYTES
        return [(self._begin, self._begin + end), (self._stop - end, self._stop)]

    def _known(self) -> _Place:
        """Return the place. If it is a file, expect the files beside it whose names differ in numbers alone."""
        (folder, name), part = posixpath.split(self._place[0]), self._place[1]
        if part is None and not _AHEAD.knows(self._place) and (beside := _LISTED.get(folder)):
            alike = (one for one, told in beside.items() if _kind(one) == _kind(name) and told.nbytes)
            _AHEAD.expect([(f"{folder}/{one}", None) for one in sorted(alike, key=natural)])
        return self._place

    def _kept(self, start: int, stop: int) -> bytes:
        return _RANGES.get(((self._place[0], self._version), start, stop), lambda: self.fetch(start, stop))


_Place = tuple[str, Part | None]


def expect(places: Iterable[tuple[str, Part | None]], *, eager: bool = False) -> None:
    """Take files, or archives inside some, for what is opened one behind the other; with `eager` all of them are."""
    listed = list(places)
    _AHEAD.expect(listed, eager=eager)
    if eager and listed:
        _AHEAD.opened(listed[0])


CHANGED, _CAME = "has changed while it was read", "appeared while the files beside it were read"


def changed(urls: Iterable[str]) -> dict[str, str]:
    """Return what is wrong with each file that has changed since it was listed, and with each new file of its kind.

    Names of one kind differ in numbers alone. Costs a listing for each folder. Raises OSError.
    """
    found, left = dict[str, str](), set(urls)
    while left:
        one = min(left)
        with _LOCK:
            roots = [root for root in _TREES if one.startswith(f"{root}/")]
        root = min(roots, key=len) if roots else one.rpartition("/")[0]
        before, now = (_TREES[root], below(root)) if roots else (_LISTED.get(root, {}), _listed(root))
        names = {url.removeprefix(f"{root}/") for url in left if url.startswith(f"{root}/")}
        names = names if roots else {name for name in names if "/" not in name}
        kinds = {_kind(name) for name in names if before}
        found |= {f"{root}/{name}": CHANGED for name in sorted(names & before.keys()) if now.get(name) != before[name]}
        new = sorted(now.keys() - before.keys() - names)
        found |= {f"{root}/{name}": _CAME for name in new if _kind(name) in kinds}
        left -= {f"{root}/{name}" for name in names}
    return found


def _kind(name: str) -> str:
    """Return a file's name without its numbers, in which alone files of one kind differ."""
    return re.sub("[0-9]+", "", name)


def fetched() -> tuple[int, int]:
    """Requests for ranges that this process has made so far, and the bytes that came."""
    return _COUNTED["requests"], _COUNTED["nbytes"]


def release() -> None:
    """Give up the ranges that are kept."""
    _RANGES.clear()


def natural(name: str) -> list[str | int]:
    """An order in which 10 comes behind 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


_LISTED: dict[str, dict[str, Status]] = {}
_TREES: dict[str, dict[str, Status]] = {}
_COUNTED = {"requests": 0, "nbytes": 0}
_LOCK = threading.Lock()
_RANGES = Ranges(_KEPT_NBYTES)
_AHEAD = ReadAhead(lambda place: Object(*place).warm())  # type: ignore[misc]
os.register_at_fork(after_in_child=_RANGES.after_fork)
os.register_at_fork(after_in_child=_AHEAD.after_fork)


def _store(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL, and the path there. Raises ConfigError for a URL that is not to be used."""
    match = _URL.match(url)
    scheme, rest = (match[1], match[2]) if match is not None else (url.partition(":")[0], "")
    host, what, mend = rest.split("/")[0], "", ""
    if _ONE_SLASH.match(url):
        what, mend = "has one slash where a URL has two slashes", f"give it as a text, not as a Path: {scheme}://..."
    elif not rest.strip("/") or (not host and scheme in _PACKAGES):  # s3fs writes to s3:///a/b as to s3://a/b
        what, mend = "names no bucket", f"give the URL of a folder: {scheme}://BUCKET/FOLDER"
    elif "::" in url:
        what, mend = "is a chain of file systems", "give the URL of the one that holds the files, alone"
    elif "@" in host or ("@" in rest and not _HOST.fullmatch(host)) or "?" in rest:
        what, mend = "holds credentials or a query", "give them as the file system's own settings or environment say"
    elif scheme != scheme.lower():
        what, mend = "has capitals before ://", f"write {scheme.lower()}://"
    if what:  # nothing of a URL that may hold a secret in a form that nobody foresaw
        raise_faults([ConfigError.fault(f"{scheme}://...", what, mend=mend)], subject="reading a URL")
    try:
        from fsspec import get_filesystem_class
        from fsspec.core import url_to_fs

        try:
            get_filesystem_class(scheme)
        except ValueError as error:
            what = f"is of a kind that fsspec does not know: {error}"
            mend = _PACKAGES.get(scheme, "correct the part before ://")
            raise_faults([ConfigError.fault(url, what, mend=mend)], subject="reading a URL")
        store, path = url_to_fs(url, **({} if scheme == "memory" else {"use_listings_cache": False}))
    except ImportError as error:
        alone = str(error.name).partition(".")[0] == "fsspec"
        mend = _PACKAGES[""] if alone else _PACKAGES.get(scheme, "install the package that it names")
        what = f"needs a package that is not installed: {error}"
        raise_faults([ConfigError.fault(url, what, mend=mend)], subject="reading a URL")
    except (OSError, ValueError, TypeError) as error:
        raise _as_os_error(error) from None
    return store, str(path)


_PACKAGES = {
    "": "pip install 'ds_reshard[remote]', and the package of the store",
    "s3": "pip install s3fs",
    "s3a": "pip install s3fs",
    "gs": "pip install gcsfs",
    "gcs": "pip install gcsfs",
    "az": "pip install adlfs",
    "abfs": "pip install adlfs",
    "abfss": "pip install adlfs",
    "hf": "pip install huggingface_hub",
}


def _status(told: dict[str, object]) -> Status:
    if told.get("type") == "directory":
        return Status(None)
    seen = next((told[key] for key in _VERSIONS if told.get(key)), "")
    seen = str(seen.timestamp() if isinstance(seen, datetime) else seen)
    version = int.from_bytes(hashlib.blake2b(seen.encode(), digest_size=7).digest(), "big")
    if told.get("size") is None:
        raise OSError(errno.EIO, "its store does not say how many bytes a file has; copy the folder to a disk")
    return Status(int(str(told["size"])), version)


_VERSIONS = ("ETag", "etag", "generation", "blob_id", "sha", "LastModified", "mtime", "modificationTime", "created")
"""What a file system may tell of a file that another of its name has otherwise; the surest first."""


def _as_os_error(error: Exception) -> OSError:
    """Whatever a file system raises, as an error of the system; URLs in its text lose credentials and queries."""
    text = without_secrets(getattr(error, "strerror", None) or str(error))
    if not isinstance(error, OSError):
        return OSError(errno.EIO, f"{type(error).__name__}: {text}")
    kind = next(kind for kind in _CODES if isinstance(error, kind))
    return kind(error.errno or _CODES[kind], text)


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _as_os_error(error) from None


_CODES = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    OSError: errno.EIO,
}


# -- writing -----------------------------------------------------------------------------------------------------------

UNFINISHED = "ds_reshard.unfinished"
"""Lies in a folder by URL while it is written: what else is there is a part."""
PART_NBYTES = 5 << 20
"""A large file is sent in parts of so many bytes, the least that S3 takes, or larger ones where these were too many."""


def read_anew(url: str) -> bytes | None:
    """All of a small file as it is now, None where there is none. Raises OSError."""
    store, path = _store(url)
    with _os_errors(), contextlib.suppress(FileNotFoundError):
        return bytes(store.cat_file(path))
    return None


def below(url: str) -> dict[str, Status]:
    """Each file below a folder as it is now, by its path from there. Raises OSError."""
    store, path = _store(url)
    found: dict[str, dict[str, object]] = {}
    with _os_errors(), contextlib.suppress(FileNotFoundError):
        found = store.find(path, detail=True, **({"refresh": True} if _takes(store, "find", "refresh") else {}))
    folder = f"{store._strip_protocol(path).rstrip('/')}/"
    if strange := [name for name in found if not f"{name}/".startswith(folder)]:
        raise OSError(errno.EIO, f"its store lists what does not lie there: {strange[0]}")
    files = {name: one for name, one in found.items() if name.startswith(folder) and not name.endswith("/")}
    told: dict[str, Status] = {}
    with _os_errors():
        for name, listed in files.items():
            one = _followed(store, listed)
            if one is not listed and one is not None and one.get("type") == "directory":
                what = "is a link to a folder, none of which is followed by URL: give the path of the checkpoint"
                raise OSError(errno.EIO, f"{name} {what}")
            told |= {name.removeprefix(folder): _status(one)} if one is not None else {}
    return told


def file_on_the_way(url: str) -> str | None:
    """The URL itself, or one that it lies below, that is a file: stores take more below it. Raises OSError."""
    at = url.rstrip("/")
    while True:
        store, path = _store(at)
        # Who may write a folder need not see those above.
        with _os_errors(), contextlib.suppress(FileNotFoundError, PermissionError):
            if _status(store.info(path)).nbytes is not None:
                return at
        at = posixpath.dirname(at)
        if not is_url(at):
            return None


def put(url: str, data: bytes, *, new: bool = False) -> None:
    """Write a small file at once. Raises OSError: with `new` FileExistsError over another, where the store can tell."""
    store, path = _store(url)
    if new and _takes(store, "pipe_file", "mode"):
        try:
            store.pipe_file(path, data, mode="create")
            return
        except Exception as error:  # perhaps of a store, or a client, that knows no conditions
            found = read_anew(url)
            if found == data:  # it was heard when it was asked first, and that answer was lost
                return
            if found is not None or isinstance(error, FileExistsError):  # or of one that was asked by two at once
                raise FileExistsError(errno.EEXIST, _as_os_error(error).strerror) from None
    with _os_errors():
        store.pipe_file(path, data)


def send(url: str, path: str) -> Status:
    """Write a file as a local one is, in parts, two of which are in memory at a time; what it is then. Raises OSError.

    It is there whole or not at all.
    """
    store, there = _store(url)
    sizes = {"chunksize": PART_NBYTES, "max_concurrency": 2, "overwrite": True}
    with _os_errors():
        store.put_file(path, there, **{name: one for name, one in sizes.items() if _takes(store, "put_file", name)})
        return _status(store.info(there))


def remove(urls: Iterable[str]) -> None:
    """Remove files, side by side; one that is not there is no error. Raises OSError."""

    def one(url: str) -> None:
        store, path = _store(url)
        with _os_errors(), contextlib.suppress(FileNotFoundError):
            store.rm_file(path)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, urls))


def abort(url: str) -> None:
    """Give up what was begun to be sent below a folder, and is kept unseen: by S3 for ever. Raises OSError."""
    store, path = _store(url)
    if not hasattr(store, "call_s3"):
        return
    bucket, key, _ = store.split_path(path)
    with _os_errors():
        for one in store.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/").get("Uploads", ()):
            with contextlib.suppress(FileNotFoundError):  # it has gone since, or the answer to a first try was lost
                store.call_s3("abort_multipart_upload", Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"])


def _takes(store: AbstractFileSystem, method: str, argument: str) -> bool:
    """Whether a method has an argument of that name; those that run on a loop pass all on to the one that does."""
    function = getattr(store, f"_{method}", None) or getattr(store, method)
    return argument in inspect.signature(function).parameters
