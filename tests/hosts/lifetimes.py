"""Processes that tests start end with pytest, whichever way it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_HUGE_NBYTES, _MADV_COLLAPSE = 1 << 21, 25  # madvise(2), of Linux 6.1


class Cost(NamedTuple):
    """What a process takes up; `memory_mib` is its resident memory, shared pages included."""

    threads: int
    files: int
    memory_mib: int


def cost() -> Cost:
    """The cost of this process."""
    threads, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Cost(threads, files, pages * os.sysconf("SC_PAGE_SIZE") >> 20)


def die_with_parent() -> None:
    """Have the kernel kill this process when the process that forked it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def to_huge_pages() -> None:
    """Put this process's memory into huge pages: a fork copies an entry for each page, and frees it when it ends."""
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, device, *_ = line.split()
        if (access, device) == ("rw-p", "00:00"):
            begin, end = (int(address, 16) for address in span.split("-"))
            for at in range(-(-begin // _HUGE_NBYTES) * _HUGE_NBYTES, end - _HUGE_NBYTES + 1, _HUGE_NBYTES):
                advise(ctypes.c_void_p(at), ctypes.c_size_t(_HUGE_NBYTES), _MADV_COLLAPSE)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that `end_descendants` finds it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> list[int]:
    """The living processes below this one."""
    found, unseen = [], [os.getpid()]
    while unseen:
        for task in Path(f"/proc/{unseen.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                children = [int(pid) for pid in task.read_text().split()]
                found += children
                unseen += children
    return [pid for pid in found if alive(pid)]


def end_descendants() -> list[str]:
    """Kill every process below this one until none is left; returns the command lines of those that were alive."""
    living = descendants()
    commands = [_command(pid) for pid in living]
    while living:
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in living:
            with contextlib.suppress(ChildProcessError):  # another process waits for it
                os.waitpid(pid, 0)
        living = descendants()
    return commands


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return f"process {pid}"


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may still be there until its parent has heard of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def identity() -> int:
    """A job: the number of its process."""
    return os.getpid()


_TAKEN: list[object] = []


def take(what: str, number: int) -> None:
    """A job that leaves so many threads behind, open files, or MiB of memory."""
    if what == "memory_mib":
        _TAKEN.append(b"1" * (number << 20))
    for _ in range(number if what != "memory_mib" else 0):
        if what == "threads":
            threading.Thread(target=time.sleep, args=[600], daemon=True).start()
        else:
            os.open(os.devnull, os.O_RDONLY)


def spin() -> None:
    """A job that never ends."""
    while True:
        pass
