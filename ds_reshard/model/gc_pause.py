"""Turn the garbage collector off while many objects are made; it would scan them again and again."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pause:
    """Keeps the collector off while any thread is inside a block; afterwards it is as before the first one began."""

    def __init__(self) -> None:
        self._inside: dict[object, int] = {}
        self._enabled = True
        self._lock = threading.RLock()  # a finalizer that runs in between may read a pickle, too

    def begin(self, token: object) -> None:
        with self._lock:
            if not self._inside:
                self._enabled = gc.isenabled()
            self._inside[token] = threading.get_ident()
            gc.disable()

    def end(self, token: object) -> None:
        with self._lock:
            if self._inside.pop(token, None) is not None:
                self._restore()

    def forked(self) -> None:
        """In a forked process, keep only the blocks of the forking thread: it is the only thread left."""
        self._lock = threading.RLock()
        current = threading.get_ident()
        if self._inside:
            self._inside = {token: thread for token, thread in self._inside.items() if thread == current}
            self._restore()

    def _restore(self) -> None:
        if not self._inside and self._enabled:
            gc.enable()


_PAUSE = _Pause()
os.register_at_fork(after_in_child=_PAUSE.forked)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector in the block: it makes no garbage, and each collection scans all objects."""
    token = object()
    try:
        _PAUSE.begin(token)
        yield
    finally:
        _PAUSE.end(token)
