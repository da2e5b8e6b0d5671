"""`make bench`: a checkpoint of 64 shards in an object store that is 30 ms away: `inspect`, and a load into two ranks.

And `inspect` of one of 4,096 shards.

The store is moto's S3 server on this machine, s3fs its client; a proxy between them adds 30 ms to each request, and
sends all answers together by so many bytes a second. So what bandwidth alone needs is known: the bytes that the ranks
fetched, by that rate. What the machine makes of it is told by a bare loop, by turns: as many processes that fetch as
many bytes with s3fs, in 16 threads each, by 2 MiB. Prints each run; `--output FOLDER` writes JSON there too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import engines, processes, report
from benchmarks.gpt import Shape
from benchmarks.load import ROOT, SCRATCH

SHARDS, MANY, RANKS, STAGE = 64, 4096, 2, 2
LATENCY_S, NBYTES_PER_S, CHUNK = 0.03, 40e6, 2 << 20
SHAPE = Shape(width=512, layers=6)
ACCOUNT = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
SERVE = """
import sys, time
sys.path.insert(0, "tests/hosts")
from moto.server import ThreadedMotoServer
from store_proxy import Proxy
import logging
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
near, far = (Proxy(*server.get_host_and_port()) for _ in range(2))
far.latency_s, far.nbytes_per_s = float(sys.argv[1]), float(sys.argv[2])
print(near.address, far.address, flush=True)
sys.stdin.read()
"""


def main() -> None:
    given = report.parser("remote", __doc__, runs=3).parse_args()
    folder = SCRATCH / "remote"
    shutil.rmtree(folder, ignore_errors=True)
    processes.start()
    runs: list[dict[str, Any]] = []
    try:
        processes.run(engines.save, world=4, shape=SHAPE, stage=STAGE, folder=str(folder / "saved"))
        for name, shards in (("shards", SHARDS), ("many", MANY)):
            command = [sys.executable, "-m", "ds_reshard", "convert", str(folder / "saved"), str(folder / name)]
            command += ["--to", f"zero{STAGE}", "--dp", str(shards)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with store(folder, "shards", "many") as far:
            for number in range(given.runs):
                (looked,) = processes.run(look, world=1, environment=far, url="s3://bucket/shards", dp=SHARDS)
                if not runs:
                    (of_many,) = processes.run(look, world=1, environment=far, url="s3://bucket/many", dp=MANY)
                ranks = processes.run(load, world=RANKS, environment=far, shape=SHAPE, url="s3://bucket/shards")
                bare = processes.run(fetch, world=RANKS, environment=far, place="bucket/shards")
                here = processes.run(load, world=RANKS, environment={}, shape=SHAPE, url=str(folder / "shards"))
                alone = sum(rank["fetched_nbytes"] for rank in ranks) / NBYTES_PER_S
                run = {"round": number, "inspect": looked, "ranks": ranks, "bare": bare, "here": here}
                run["bandwidth_s"] = alone
                runs.append(run)
                print(json.dumps({**run, "seconds": max(rank["seconds"] for rank in ranks)}), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    made = {"summary": summary(runs, of_many), "runs": runs}
    print(json.dumps(made["summary"], indent=1))
    report.keep(made, "remote", given.output)


@contextmanager
def store(folder: Path, *names: str) -> Iterator[dict[str, str]]:
    """The store with copies of folders in its bucket: what a client needs to find it far away."""
    command = [sys.executable, "-c", SERVE, str(LATENCY_S), str(NBYTES_PER_S)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        near, far = server.stdout.readline().split()
        put = "import s3fs, sys; files = s3fs.S3FileSystem(); files.mkdir('bucket'); "
        put += "[files.put(f'{sys.argv[1]}/{one}/', f'bucket/{one}/', recursive=True) for one in sys.argv[2:]]"
        environment = {**os.environ, **ACCOUNT, "AWS_ENDPOINT_URL": near}
        subprocess.run([sys.executable, "-c", put, str(folder), *names], env=environment, check=True)
        yield {**ACCOUNT, "AWS_ENDPOINT_URL": far}
        server.communicate()


def look(rank: int, world: int, *, rendezvous: str, environment: dict[str, str], url: str, dp: int) -> dict[str, Any]:
    """`inspect`, imports not counted."""
    from ds_reshard.containers.remote import fetched
    from ds_reshard.operations import inspect

    os.environ.update(environment)
    started = time.perf_counter()
    found = inspect(url)
    seconds = time.perf_counter() - started
    assert found.dp == dp and not found.faults
    requests, nbytes = fetched()
    return {"seconds": seconds, "requests": requests, "fetched_nbytes": nbytes}


def load(
    rank: int, world: int, *, rendezvous: str, environment: dict[str, str], shape: Shape, url: str
) -> dict[str, Any]:
    """`engine.load_checkpoint` of one rank: seconds, what it fetched, and what it owns afterwards."""
    import torch

    import ds_reshard
    from ds_reshard.containers.remote import fetched

    os.environ.update(environment)
    engines.join(rendezvous, rank, world)
    made = engines.engine(shape, stage=STAGE, world=world, filled=False)
    ds_reshard.install("deepspeed")
    torch.distributed.barrier()
    started, cpu = time.perf_counter(), time.process_time()
    made.load_checkpoint(url)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    weights = sum(one.numel() * one.element_size() for one in made.module.parameters())
    states = [one for held in made.optimizer.optimizer.state.values() for one in held.values() if torch.is_tensor(one)]
    masters = made.optimizer.single_partition_of_fp32_groups
    owned = weights + sum(one.numel() * one.element_size() for one in (*states, *masters))
    torch.distributed.barrier()
    requests, nbytes = fetched()
    told = {"requests": requests, "fetched_nbytes": nbytes, "owned_nbytes": owned}
    return {"seconds": seconds, "cpu_s": cpu_s, **told}


def fetch(rank: int, world: int, *, rendezvous: str, environment: dict[str, str], place: str) -> dict[str, Any]:
    """The model file, and a share of the shards, as bytes that nobody keeps."""
    import torch

    os.environ.update(environment)
    import s3fs

    files = s3fs.S3FileSystem()
    sizes = {name: files.size(name) for name in sorted(files.find(place)) if name.endswith(".pt")}
    shards = [name for name in sizes if "optim" in name]
    wanted = [name for name in sizes if "optim" not in name] + shards[rank::world]
    ranges = [(name, at, min(sizes[name], at + CHUNK)) for name in wanted for at in range(0, sizes[name], CHUNK)]
    engines.join(rendezvous, rank, world)
    torch.distributed.barrier()
    started, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(16) as pool:
        nbytes = sum(pool.map(lambda one: len(files.cat_file(one[0], start=one[1], end=one[2])), ranges))
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    return {"seconds": seconds, "cpu_s": cpu_s, "requests": len(ranges), "fetched_nbytes": nbytes}


def summary(runs: list[dict[str, Any]], of_many: dict[str, Any]) -> dict[str, Any]:
    """What the runs come to; `over bandwidth` is the slower rank's time by that which the bytes of both need."""
    over = [max(rank["seconds"] for rank in run["ranks"]) / run["bandwidth_s"] for run in runs]
    bare = [
        max(rank["seconds"] for rank in run["ranks"]) / max(rank["seconds"] for rank in run["bare"]) for run in runs
    ]
    owned = [rank["fetched_nbytes"] / rank["owned_nbytes"] for run in runs for rank in run["ranks"]]
    return {
        "inspect": report.spread([run["inspect"]["seconds"] for run in runs]),
        "requests of inspect": median([run["inspect"]["requests"] for run in runs]),
        f"inspect of {MANY:,} shards": of_many,
        "load": report.spread([max(rank["seconds"] for rank in run["ranks"]) for run in runs]),
        "load over bandwidth": report.spread(over),
        "load over a bare loop": report.spread(bare),
        "load from the disk": report.spread([max(rank["seconds"] for rank in run["here"]) for run in runs]),
        "fetched over owned": max(owned),
    }


if __name__ == "__main__":
    main()
