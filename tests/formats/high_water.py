"""The memory that a piece of work takes at most, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# VmHWM begins anew with the program; the ru_maxrss of a child begins with what its parent held (Linux fs/exec.c,
# exec_mmap), under which everything would fit.
_CHILD = """
import sys
import torch

def high_water():
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))

before = high_water()
exec(sys.argv[1])
print("took", high_water() - before)
"""


def memory_taken(code: str, *arguments: str, timeout_s: int = 250) -> int:
    """The most bytes that `code` held at once, above an interpreter that has imported torch.

    It finds `arguments` in `sys.argv[2:]`; whatever it raises fails the test.
    """
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, code, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.rpartition("took ")[2])


_ALONE = """
import sys
import torch

print(open("/proc/self/smaps_rollup").read(), flush=True)
print("begins", flush=True)
exec(sys.argv[1])
"""


def memory_taken_together(code: str, *arguments: str, timeout_s: int = 250) -> tuple[int, int]:
    """As `memory_taken`, of the process and of all that it starts, together; and how many they were at most.

    Anonymous memory and what is shared between them, which counts once (proc(5), Pss). It is looked at fifty
    times a second, so what is held for less than that may be missed.
    """
    command = [sys.executable, "-c", _ALONE, code, *arguments]
    most = number = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        before = _proportional("".join(iter(process.stdout.readline, "begins\n")))
        ends = time.monotonic() + timeout_s
        while process.poll() is None:
            if time.monotonic() > ends:
                process.kill()
            held = [_proportional(told) for told in _told(process.pid)]
            most, number = max(most, sum(held)), max(number, len(held))
            time.sleep(0.01)
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    return most - before, number


def _told(pid: int) -> Iterator[str]:
    """What the kernel says of the memory of a process and of those that it started; of one that has ended, nothing."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        yield Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return
    for child in children:
        yield from _told(int(child))


def _proportional(told: str) -> int:
    lines = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
    return sum(int(lines[name].split()[0]) << 10 for name in ("Pss_Anon", "Pss_Shmem") if name in lines)
