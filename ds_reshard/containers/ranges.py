"""Small ranges of files that are far away: kept, fetched once whoever asks, and ahead of who reads on and on.

A store answers late, not slowly. So what is opened behind its neighbour is taken for one of many: those behind it are
fetched before they are asked for, two at first, then twice as many each time.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from queue import Empty, Queue

AT_ONCE = 32
"""Requests under way at a time."""
_AHEAD, _EAGERLY = 16, 64
_IDLE_S = 1.0


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


class _Sequence:
    """Places in the order in which they are opened, each or each so manieth; `eager` where all are known to be."""

    def __init__(self, places: Sequence[Hashable], *, eager: bool) -> None:
        self.places = places
        self._eager = eager
        self._asked: set[int] = set()
        self._last, self._stride, self._run = 0, 0, 0

    def behind(self, at: int) -> list[Hashable]:
        """What to fetch now that the place of that number is opened: itself, the rest of it, and what is expected."""
        stride, ahead = at - self._last, _EAGERLY
        if self._eager:
            stride = 1
        elif stride:
            self._run = self._run + 1 if stride == self._stride else 0
            self._last, self._stride = at, stride
            ahead = min(_AHEAD, 2**self._run) if self._run else 0
        else:
            stride, ahead = 1, 0
        wanted = [at, *range(at + stride, at + stride * (ahead + 1), stride)]
        fresh = [number for number in wanted if 0 <= number < len(self.places) and number not in self._asked]
        self._asked.update(fresh)
        return [self.places[number] for number in fresh]


class ReadAhead:
    """Fetches places by `warm`, in threads that end when nothing is to be done."""

    def __init__(self, warm: Callable[[Hashable], None]) -> None:
        self._warm = warm
        self._places: dict[Hashable, tuple[_Sequence, int]] = {}
        self.after_fork()

    def after_fork(self) -> None:
        self._waiting: Queue[Hashable] = Queue()  # a SimpleQueue may wait on when its time is over, in CPython 3.11
        self._threads = 0
        self._lock = threading.Lock()

    def knows(self, place: Hashable) -> bool:
        return place in self._places

    def expect(self, places: Sequence[Hashable], *, eager: bool = False) -> None:
        """Take these for what is opened one behind the other; with `eager` all of them are."""
        sequence = _Sequence(places, eager=eager)
        with self._lock:
            self._places.update((place, (sequence, at)) for at, place in enumerate(places))

    def forget(self, whether: Callable[[Hashable], bool]) -> None:
        with self._lock:
            for place in [place for place in self._places if whether(place)]:
                del self._places[place]

    def opened(self, place: Hashable) -> None:
        """Fetch what is expected behind it."""
        found = self._places.get(place)
        if found is None:
            return
        with self._lock:
            behind = found[0].behind(found[1])
            for one in behind:
                self._waiting.put(one)
            fresh = min(len(behind), AT_ONCE - self._threads)
            self._threads += fresh
        for _ in range(fresh):
            threading.Thread(target=self._run, name="ds-reshard-ahead", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                place = self._waiting.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if self._waiting.empty():
                        self._threads -= 1
                        return
                continue
            with contextlib.suppress(Exception):  # whoever opens it is told
                self._warm(place)
