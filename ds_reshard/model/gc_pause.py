"""Making many objects at once without the garbage collector, which would walk them over and over."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pause:
    """The collector is off while any thread is inside, and afterwards as it was before the first of them."""

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
        """Of the threads that are inside, a new process has that alone which made it."""
        self._lock = threading.RLock()
        alone = threading.get_ident()
        if self._inside:
            self._inside = {token: thread for token, thread in self._inside.items() if thread == alone}
            self._restore()

    def _restore(self) -> None:
        if not self._inside and self._enabled:
            gc.enable()


_PAUSE = _Pause()
os.register_at_fork(after_in_child=_PAUSE.forked)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Without garbage collections: what is made here is none, and each would walk all objects of the framework too."""
    token = object()
    try:
        _PAUSE.begin(token)
        yield
    finally:
        _PAUSE.end(token)
