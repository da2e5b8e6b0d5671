"""What several ranks want whole: read by each, or read once and passed on.

One file of `--mib` MiB in the page cache, and ranks on this machine that fill 16 buffers each from it, interleaved.
Once as it is; and once with every read call held to `--rate` MB/s for each rank, whoever has read the bytes before, as
a file system that keeps nothing in a node's memory would (a stand-in: there is no network file system here).
Run: python -m benchmarks.share [--mib N] [--runs N] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import processes
from benchmarks.report import commit, keep, machine, spread

CONTESTANTS = ("off", "node")
BUFFERS = 16
THREADS, MEMORY_NBYTES = 4, 64 << 20


class Held:
    """`os.preadv` of one process at so many bytes a second, all threads together."""

    def __init__(self, rate: float) -> None:
        self._rate, self._preadv, self._lock = rate, os.preadv, threading.Lock()

    def __call__(self, fd: int, views: Any, byte_offset: int) -> int:
        with self._lock:
            got = self._preadv(fd, views, byte_offset)
            time.sleep(got / self._rate)
        return got


def fill(rank: int, world: int, *, rendezvous: str, path: str, mib: int, runs: int, rate: float) -> Any:
    """Seconds and bytes read of each contestant's runs, after one that is not counted. Collective."""
    import torch
    import torch.distributed as dist

    from ds_reshard.execution.buffers import TensorTarget
    from ds_reshard.execution.checksums import verify
    from ds_reshard.execution.sharing import SharingExecutor
    from ds_reshard.execution.threads import ThreadExecutor
    from ds_reshard.hosts.deepspeed.share import GlooGroup
    from ds_reshard.model.codec import ElementType
    from ds_reshard.model.index import Record
    from ds_reshard.planning.plan import Copy, Plan

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    record, part, dtype = Record(path, 0, mib << 20, None), (mib << 20) // 2 // BUFFERS, ElementType.BFLOAT16
    names = [str(n) for n in range(BUFFERS)]
    plan = Plan(copies=tuple(Copy(record, 2 * n * part, part, dtype, name, 0, dtype) for n, name in enumerate(names)))
    targets = {name: TensorTarget(torch.ones(part, dtype=torch.bfloat16)) for name in names}
    limits: Any = {"threads": THREADS, "memory_nbytes": MEMORY_NBYTES, "checksum": True}
    found: dict[str, list[Any]] = {name: [] for name in CONTESTANTS}
    with mock.patch.object(os, "preadv", Held(rate) if rate else os.preadv):
        for number in range(runs + 1):
            for name in CONTESTANTS:
                dist.barrier()
                started = time.perf_counter()
                inner = ThreadExecutor(**limits)
                if name == "off":
                    outcome = inner.execute(plan, targets)
                else:
                    group = GlooGroup(dist.new_group(list(range(world)), backend="gloo"))
                    outcome = SharingExecutor(inner, group, alike=names, **limits).execute(plan, targets)
                    group.close()
                seconds = time.perf_counter() - started
                assert not outcome.faults and not verify(outcome)
                if number:
                    found[name].append((seconds, outcome.bytes_read))
    dist.barrier()
    return found


def measured(path: Path, *, mib: int, runs: int, rate: float, world: int) -> dict[str, Any]:
    """One case: the slowest rank's seconds, and what all ranks read together."""
    ranks = processes.run(fill, world=world, path=str(path), mib=mib, runs=runs, rate=rate)
    made: dict[str, Any] = {"ranks": world, "rate_mb_s": rate / 1e6 or None}
    for name in CONTESTANTS:
        rounds = list(zip(*(rank[name] for rank in ranks), strict=True))
        made[name] = {
            "seconds": spread([max(seconds for seconds, _ in of_ranks) for of_ranks in rounds]),
            "read_nbytes": sum(nbytes for _, nbytes in rounds[-1]),
        }
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.share", description=__doc__)
    parser.add_argument("--mib", type=int, default=128, help="what every rank wants (default 128)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=200.0, help="MB/s of a rank of the slow case (default 200)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    processes.start()
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "weights")
        path.write_bytes(os.urandom(1 << 20) * given.mib)
        for rate in (0.0, given.rate * 1e6):
            for world in given.ranks:
                cases.append(measured(path, mib=given.mib, runs=given.runs, rate=rate, world=world))
                print(json.dumps(cases[-1]), flush=True)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    made = {"made": now, "commit": commit(), "machine": machine(), "mib": given.mib, "cases": cases}
    keep(made, "share", given.output)


if __name__ == "__main__":
    main()
