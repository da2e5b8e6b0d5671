"""The memory that a piece of work takes at most, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

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
