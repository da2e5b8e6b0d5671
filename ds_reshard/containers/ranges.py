"""Small ranges of files that are far away: kept, fetched once whoever asks, and before they are asked for.

A store answers late, not slowly. So a file that is opened is taken for one of many: those beside it are fetched too.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence

AT_ONCE = 32
"""Requests under way at a time."""


File = Hashable
Key = tuple[File, int, int]
"""A file, as it was, and the bytes [start, stop) of it."""


class Ranges:
    """Ranges of files, those that were not asked for longest given up first."""

    def __init__(self, nbytes: int) -> None:
        self._most_nbytes = nbytes
        self.after_fork()
        self.clear()

    def clear(self) -> None:
        with self._lock:
            self._kept: OrderedDict[Key, bytes] = OrderedDict()
            self._of_file: dict[File, list[tuple[int, int]]] = {}
            self._nbytes = 0

    def forget(self, whether: Callable[[File], bool]) -> None:
        """Give up what is kept of such files."""
        with self._lock:
            for file in [file for file in self._of_file if whether(file)]:
                for span in self._of_file.pop(file):
                    self._nbytes -= len(self._kept.pop((file, *span)))

    def after_fork(self) -> None:
        """Nothing is coming in a copy of the process: the threads that fetch are not in it."""
        self._coming: dict[Key, threading.Event] = {}
        self._lock = threading.Lock()

    def get(self, key: Key, fetch: Callable[[], bytes]) -> bytes:
        """What is kept, or is being fetched by another thread; else what `fetch` gives, and raises."""
        while True:
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
                coming = self._coming.get(key)
                if coming is None:
                    self._coming[key] = threading.Event()
                    break
            coming.wait()  # and look again: it may have failed
        data = None
        try:
            data = fetch()
        finally:
            with self._lock:
                if data is not None:
                    self._keep(key, data)
                self._coming.pop(key).set()
        return data

    def find(self, file: File, start: int, stop: int) -> bytes | None:
        """The bytes [start, stop) of a file where what is kept of it covers them."""
        parts: list[bytes] = []
        with self._lock:
            kept = self._of_file.get(file, ())
            while start < stop:
                at = bisect_right(kept, (start, sys.maxsize)) - 1
                if at < 0 or kept[at][1] <= start:
                    return None
                first, last = kept[at]
                parts.append(self._kept[file, first, last][start - first : stop - first])
                start = last
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _keep(self, key: Key, data: bytes) -> None:
        self._kept[key] = data
        insort(self._of_file.setdefault(key[0], []), key[1:])
        self._nbytes += len(data)
        while self._nbytes > self._most_nbytes:
            (file, *span), given_up = self._kept.popitem(last=False)
            self._of_file[file].remove((span[0], span[1]))
            self._nbytes -= len(given_up)


class ReadAhead:
    """Fetch places ahead by calling `warm`: a block if one of its places is opened, if `eager` the next, too."""

    def __init__(self, warm: Callable[[Hashable], None]) -> None:
        self._warm = warm
        self._blocks: dict[Hashable, list[list[Hashable]]] = {}
        self.after_fork()

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def knows(self, place: Hashable) -> bool:
        return place in self._blocks

    def expect(self, places: Sequence[Hashable], *, eager: bool = False) -> None:
        """Make blocks of places, which are opened in this order if any are; with `eager` all of them are."""
        blocks = [list(places[at : at + AT_ONCE]) for at in range(0, len(places), AT_ONCE)]
        fetched = ((block, blocks[number : number + 1 + eager]) for number, block in enumerate(blocks))
        with self._lock:
            self._blocks.update((place, several) for block, several in fetched for place in list(block))

    def forget(self, whether: Callable[[Hashable], bool]) -> None:
        with self._lock:
            for place in [place for place in self._blocks if whether(place)]:
                del self._blocks[place]

    def opened(self, place: Hashable) -> None:
        """Fetch the places of its block that were not fetched before, in threads that end with them."""
        with self._lock:
            fresh = [one for block in self._blocks.get(place, ()) for one in block]
            for block in self._blocks.get(place, ()):
                block.clear()
        left = iter(fresh)  # next() of a list's iterator is atomic: each thread takes the next place
        for _ in fresh[:AT_ONCE]:
            threading.Thread(target=self._fetch, args=(left,), name="ds-reshard-ahead", daemon=True).start()

    def _fetch(self, places: Iterator[Hashable]) -> None:
        for place in places:
            with contextlib.suppress(Exception):  # whoever opens it is told
                self._warm(place)
