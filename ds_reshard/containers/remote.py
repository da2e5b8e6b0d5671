"""Files by URL, listed and read in ranges through any file system of fsspec: object stores, hubs, memory.

What a folder lists is kept until `forget` is called for it, and so are the small ranges that were read of its files:
a checkpoint of many shards is opened with one listing, and with few requests a file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from ds_reshard.errors import ConfigError, raise_faults

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_END_NBYTES = 32 << 10
"""Of a file's beginning and end so much is read at once: there its directory and, if it is small, its pickle lie."""
_KEPT_NBYTES = 256 << 20
AT_ONCE = 32
"""Requests under way at a time: a store answers late, not slowly."""


def is_url(path: str) -> bool:
    return "://" in path and _URL.match(path) is not None


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
    try:
        return _status(store.info(path))
    except FileNotFoundError:
        return None
    except Exception as error:
        raise _as_os_error(error) from error


def listing(url: str) -> dict[str, Status]:
    """What lies in a folder, sorted by name; nothing where there is no folder. Raises OSError."""
    url = url.rstrip("/")
    if url not in _LISTED and _is_known(posixpath.dirname(url)) and status(url) is None:
        return {}
    if url not in _LISTED:
        store, path = _store(url)
        try:
            found = store.ls(path, detail=True, refresh=True) if _refreshes(store) else store.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            found = []
        except Exception as error:
            raise _as_os_error(error) from error
        names = {posixpath.basename(str(one["name"]).rstrip("/")): one for one in found}
        itself = store._strip_protocol(path).rstrip("/")
        kept = {name: _status(one) for name, one in names.items() if str(one["name"]).rstrip("/") != itself}
        _LISTED[url] = dict(sorted((name, one) for name, one in kept.items() if name))
    return _LISTED[url]


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
    for known in [one for one in _LISTED if one == url or one.startswith(f"{url}/") or url.startswith(f"{one}/")]:
        del _LISTED[known]


class Object:
    """A file of a store, read in ranges."""

    def __init__(self, url: str) -> None:
        found = status(url)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
        if found.nbytes is None:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), url)
        self.nbytes = found.nbytes
        self._version = found.version
        self._store, self._path = _store(url)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop), fewer where the file ends before; small ranges are kept. Raises OSError."""
        stop = min(stop, self.nbytes)
        if start >= stop:
            return b""
        for first, last in ((0, min(_END_NBYTES, self.nbytes)), (max(0, self.nbytes - _END_NBYTES), self.nbytes)):
            if first <= start and stop <= last:
                return self._kept(first, last)[start - first : stop - first]
        return self._kept(start, stop) if stop - start <= _END_NBYTES else self.fetch(start, stop)

    def fetch(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop), asked for. Raises OSError."""
        try:
            data = bytes(self._store.cat_file(self._path, start=start, end=stop))
        except Exception as error:
            raise _as_os_error(error) from error
        with _LOCK:
            _COUNTED["requests"] += 1
            _COUNTED["nbytes"] += len(data)
        return data

    def _kept(self, start: int, stop: int) -> bytes:
        key = (self._path, self._version, start, stop)
        with _LOCK:
            if key in _RANGES:
                _RANGES.move_to_end(key)
                return _RANGES[key]
        data = self.fetch(start, stop)
        with _LOCK:
            if key not in _RANGES:
                _RANGES[key] = data
                _COUNTED["kept"] += len(data)
            while _COUNTED["kept"] > _KEPT_NBYTES:
                _COUNTED["kept"] -= len(_RANGES.popitem(last=False)[1])
        return data


def fetched() -> tuple[int, int]:
    """Requests for ranges that this process has made so far, and the bytes that came."""
    return _COUNTED["requests"], _COUNTED["nbytes"]


_LISTED: dict[str, dict[str, Status]] = {}
_RANGES: OrderedDict[tuple[str, int, int, int], bytes] = OrderedDict()
_COUNTED = {"requests": 0, "nbytes": 0, "kept": 0}
_LOCK = threading.Lock()


def _store(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL, and the path there. Raises ConfigError for a URL that is not to be used."""
    match = _URL.match(url)
    assert match is not None
    scheme, rest = match[1], match[2]
    shown = f"{scheme}://{re.sub('.*@', '', rest.split('/')[0].split('?')[0])}/..."
    if "@" in rest.split("/")[0] or "?" in rest:
        what, mend = "holds credentials or a query", "give them as the file system's own settings or environment say"
        raise_faults([ConfigError.fault(shown, what, mend=mend)], subject="reading a URL")
    try:
        from fsspec.core import url_to_fs

        store, path = url_to_fs(url, **({} if scheme == "memory" else {"use_listings_cache": False}))
    except ImportError as error:
        what, mend = f"needs a package that is not installed: {error}", _PACKAGES.get(scheme, "pip install fsspec")
        raise_faults([ConfigError.fault(shown, what, mend=mend)], subject="reading a URL")
    except ValueError as error:
        what, mend = f"is of a kind that fsspec does not know: {error}", "correct the part before ://"
        raise_faults([ConfigError.fault(shown, what, mend=mend)], subject="reading a URL")
    return store, str(path)


_PACKAGES = {
    "s3": "pip install s3fs",
    "s3a": "pip install s3fs",
    "gs": "pip install gcsfs",
    "gcs": "pip install gcsfs",
    "az": "pip install adlfs",
    "abfs": "pip install adlfs",
    "hf": "pip install huggingface_hub",
}


def _refreshes(store: AbstractFileSystem) -> bool:
    """Whether it keeps listings of its own."""
    return hasattr(store, "dircache") and store.protocol != "memory"


def _status(told: dict[str, object]) -> Status:
    if told.get("type") == "directory":
        return Status(None)
    seen = [str(told[key]) for key in ("ETag", "etag", "generation", "LastModified", "mtime", "created") if key in told]
    version = int.from_bytes(hashlib.blake2b("\n".join(seen).encode(), digest_size=7).digest(), "big")
    return Status(int(str(told["size"])), version)


def _as_os_error(error: Exception) -> OSError:
    """Whatever a file system raises, as an error of the system; its text is not the user's secret."""
    if isinstance(error, OSError):
        return error
    return OSError(errno.EIO, f"{type(error).__name__}: {error}")
