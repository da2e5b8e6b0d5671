"""The memory that a load finds: fresh, or touched before; and what the kernel says of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# malloc.h of glibc
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def touch(nbytes: int) -> None:
    """Leave this process with `nbytes` of free memory that has been written to before, for malloc to give out.

    Allocations of any size then come from the heap, and freed memory stays with the process (mallopt(3):
    M_MMAP_MAX=0, M_TRIM_THRESHOLD=-1). Page faults during the load that follows show whether it worked.
    With `nbytes` of 0 nothing is changed: large allocations are mapped anew, and given back when freed.
    """
    import torch

    if not nbytes:
        return

    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    block = torch.empty(nbytes, dtype=torch.uint8)
    block.fill_(1)
    del block


def free_nbytes() -> int:
    """Memory that nothing uses, not even the page cache."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemFree:"))


def take_back(nbytes: int) -> None:
    """Have the kernel's free memory backed by real memory, then return it: this process must fault it in again.

    A virtual machine may have lent its free pages to the host (free page reporting, in blocks of 2 MiB, some
    seconds after they were freed). What fetching them back costs is no part of a load on a machine in use, differs
    tenfold from run to run, and hits large pages alone.
    """
    if not nbytes:
        return
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, nbytes, mmap.PAGESIZE):
        memory[at] = 1
    memory.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What the kernel has counted for this process so far."""

    minor_faults: int
    user_s: float
    system_s: float
    read_nbytes: int
    disk_read_nbytes: int
    written_nbytes: int

    @classmethod
    def now(cls) -> Counters:
        """`read_nbytes` counts every read call (rchar), sockets' too; `disk_read_nbytes` what missed the page cache;
        `written_nbytes` what was made dirty for a disk."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return cls(
            minor_faults=usage.ru_minflt,
            user_s=usage.ru_utime,
            system_s=usage.ru_stime,
            read_nbytes=int(io["rchar"]),
            disk_read_nbytes=int(io["read_bytes"]),
            written_nbytes=int(io["write_bytes"]),
        )

    def since(self, before: Counters) -> Counters:
        return Counters(**{name: getattr(self, name) - getattr(before, name) for name in self.__slots__})


def resident() -> dict[str, int]:
    """Bytes in memory of this process: anonymous, of files, and the peak of all since `forget_peak`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        name: int(lines[key].split()[0]) << 10
        for name, key in (("anonymous", "RssAnon"), ("file", "RssFile"), ("peak", "VmHWM"))
    }


def forget_peak() -> None:
    """Start VmHWM anew (proc(5), clear_refs, 5)."""
    Path("/proc/self/clear_refs").write_text("5")


@dataclass(slots=True, kw_only=True)
class Opened:
    """Paths that Python opened: those below the checkpoint's folder, and any at all for writing."""

    read: set[str]
    written: set[str]


@contextmanager
def opened(folder: str) -> Iterator[Opened]:
    """What this process opens inside the block; the kernel's own files and devices are no files here."""
    seen = Opened(read=set(), written=set())
    listening = True

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event != "open" or not listening:
            return
        path, mode, flags = arguments
        name = os.fsdecode(path) if isinstance(path, (str, bytes)) else ""
        writes = set(str(mode)) & set("wax+") if mode else int(str(flags)) & (os.O_WRONLY | os.O_RDWR)
        if name.startswith(folder):
            seen.read.add(name)
        if writes and name and not name.startswith(("/proc/", "/dev/")):
            seen.written.add(name)

    sys.addaudithook(hear)  # there is no way to take it off
    yield seen
    listening = False
