"""Every request to an object store fails once, in each way that it can: of conversions, and of a load of two ranks.

    python tests/torture/stores.py                      all of it
    python tests/torture/stores.py --every 37           a sample
    python tests/torture/stores.py WORK                 of one work
    python tests/torture/stores.py WORK REQUEST FAULT   one request, as a finding prints it

The store is an S3 server of this process, with a proxy before it (tests/hosts/store_proxy.py), its client s3fs, which
asks again as often as ever but waits shorter. Each conversion is a process of its own. After it:

* the source is as it was, here or there;
* OUT is equal to the bytes of a run without faults, or whoever reads it is told that it is no checkpoint;
* an error has a class of the package; there is none where asking again once is enough;
* no temporary file, thread or open file is left, but by one that was killed;
* the next run, with --resume and without by turns, ends in the same bytes, and leaves nothing, here or there.

A load ends as `loads.py` says; it goes well where asking again is enough, and so does the next.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("formats", "hosts"))]

import host_folders  # noqa: E402, F401
from calls import ended, files  # noqa: E402
from loads import KINDS, MODEL, made  # noqa: E402
from loads import wrong as wrong_of_ranks  # noqa: E402
from on_ranks import Tried, options  # noqa: E402
from store_proxy import DEATH, FAULTS, Request, Store, flipped, in_a_hurry, reach, store_here  # noqa: E402
from worlds import World, server  # noqa: E402
from zero_builder import Built, write  # noqa: E402

from ds_reshard.containers import remote  # noqa: E402
from ds_reshard.errors import CheckpointDamaged, CheckpointNotFound, ReshardError  # noqa: E402
from ds_reshard.operations import Options, convert, inspect, store_workspace  # noqa: E402

SHAPES = tuple((f"p{i}", (7, i + 1)) for i in range(5))
TAG = "global_step3"
PART_NBYTES = 1500
"""Of the files that are sent, so that each has several; what was sent before had none, its ETag being that of a put."""


class Conversion(NamedTuple):
    """Of a source that is here or there; behind one that was killed, with `resume` or from its beginning."""

    source: str = "here"
    resume: bool | None = None


WORKS = {
    "here to s3": Conversion(),
    "s3 to s3": Conversion("there"),
    "resumed": Conversion(resume=True),
    "begun anew": Conversion(resume=False),
}
LOAD = "load of two ranks"


class Job(NamedTuple):
    """What a client does: it looks at OUT first, where it is told to."""

    source: str
    resume: bool
    folder: str
    environment: dict[str, str]
    looks: bool = False
    part_nbytes: int = PART_NBYTES


OUT = "s3://bucket/out"


def _client(job: Job) -> tuple[list[str], str, list[str]]:
    """As what OUT and its tag are read, what a conversion says that becomes of it, and what it leaves."""
    reach({**job.environment, "AWS_SDK_UA_APP_ID": "client"})
    in_a_hurry()
    remote.PART_NBYTES, store_workspace._STILL_BEATS, tempfile.tempdir = job.part_nbytes, 0, job.folder
    seen = [_seen(path) for path in (OUT, f"{OUT}/{TAG}") if job.looks]
    options = Options(threads=1, resume=job.resume)
    said = ended(lambda: convert(job.source, OUT, to="zero3", dp=1, options=options))
    threads, until = _threads(), time.monotonic() + 5
    while any(name.startswith("ds-reshard-ahead") for name in threads) and time.monotonic() < until:
        time.sleep(0.01)  # they end when nothing is to be done
        threads = _threads()
    open_files = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    left = [f"thread {name}" for name in threads]
    left += [f"open file {name}" for name in open_files if name.startswith(job.folder)]
    return seen, said, left + [f"file {name}" for name in os.listdir(job.folder)]


def _threads() -> list[str]:
    """All but those of the store's package."""
    names = [one.name for one in threading.enumerate()]
    return [name for name in names if name not in ("MainThread", "fsspecIO") and not name.startswith("asyncio")]


def _seen(path: str) -> str:
    try:
        return "damaged" if inspect(path).faults else "read"
    except (CheckpointDamaged, CheckpointNotFound):
        return "damaged"
    except ReshardError as error:
        return f"{type(error).__name__}: {error}"


def _serve(pipe: Connection) -> None:
    """Each job in a fork of this process, of which no thread is: first its number, then what it answers."""
    import s3fs  # noqa: F401

    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            try:
                with open(theirs, "w") as file:
                    json.dump(_client(job), file)
            finally:
                os._exit(0)
        os.close(theirs)
        pipe.send(child)
        with open(ours) as file:
            told = file.read()
        os.waitpid(child, 0)
        pipe.send(json.loads(told) if told else ([], DEATH, []))


class Clients:
    """Does jobs, one at a time; `child` is the number of its process."""

    def __init__(self) -> None:
        self._pipe, theirs = server().Pipe()
        self._process = server().Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.child = 0

    def does(self, job: Job) -> tuple[list[str], str, list[str]]:
        self._pipe.send(job)
        self.child = self._pipe.recv()
        seen, said, left = self._pipe.recv()
        return seen, said, left

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)


class Work:
    """One conversion, and how it goes without a fault."""

    def __init__(self, name: str, store: Store, clients: Clients, place: Path, killed: dict[str, bytes]) -> None:
        """`killed` is what was found in the store for another work, or empty as yet."""
        self.conversion, self._store, self._clients = WORKS[name], store, clients
        self._source, self._folder = place / "saved", place / "tmp"
        self._folder.mkdir(exist_ok=True)
        self._begun = {f"in/{name}": data for name, data in files(self._source).items()}
        if self.conversion.resume is not None:
            killed.update(killed or self._killed())
            self._begun |= killed
        self._renew()
        store.proxy.begin()
        seen, said, left = clients.does(self._job())
        assert (said, left) == ("done", []), (seen, said, left)
        self.requests = self._new(store.proxy.requests)
        self._expected = store.contents("out")

    def _new(self, requests: list[Request]) -> list[Request]:
        """Those that are not made alike by the first of the works: of the source, or before the first file is sent."""
        if self.conversion.source == "there":
            return [one for one in requests if one.path.startswith("/bucket/in/")]
        if self.conversion.resume is False:
            return requests[: [one.kind for one in requests].index("BEGIN")]
        return requests

    def _job(self, **more: Any) -> Job:
        source = str(self._source) if self.conversion.source == "here" else "s3://bucket/in"
        given = {"resume": bool(self.conversion.resume), "environment": self._store.environment, **more}
        return Job(source, folder=str(self._folder), **given)

    def _killed(self) -> dict[str, bytes]:
        """What is in the store where a client has died, with half of its files sent."""
        self._renew()
        self._store.proxy.begin()
        assert self._clients.does(self._job(part_nbytes=5 << 20))[1] == "done"
        noted = [one for one in self._store.proxy.requests if one.kind == "PUT" and "/done/" in one.path]
        self._renew()
        self._store.proxy.begin(noted[len(noted) // 2], DEATH)
        assert self._clients.does(self._job(part_nbytes=5 << 20))[1] == DEATH
        self._store.proxy.begin()
        shutil.rmtree(self._folder)
        self._folder.mkdir()
        names = ("out", "out.ds-reshard")
        return {f"{name}/{path}": data for name in names for path, data in self._store.contents(name).items()}

    def _renew(self) -> None:
        files = self._store.files
        if there := files.find("bucket"):
            files.rm(there)
        for name, data in self._begun.items():
            files.pipe_file(f"bucket/{name}", data)
        if any(name.startswith("out/") for name in self._begun):  # of a file that was being sent
            files.call_s3("create_multipart_upload", Bucket="bucket", Key=f"out/{TAG}/half")

    def befallen(self, request: Request, fault: str, resume: bool) -> list[str]:
        """What is wrong after this fault."""
        self._renew()
        proxy = self._store.proxy
        proxy.begin(request, fault)
        said, wrong = self._clients.does(self._job())[1:]
        befallen = proxy.befallen
        proxy.begin()
        if not befallen:
            wrong.append("the request was not made: they are not the same in each run")
        if said.startswith("unnamed") or (fault == DEATH) != (said == DEATH):
            wrong.append(f"it ended so: {said}")
        again = fault in ("busy", "cut") or (fault == "unheard" and request.kind != "END")
        if again and said != "done":
            wrong.append(f"it was not asked again: {said}")
        wrong = [f"left behind: {one}" if one.startswith(("file", "thread", "open")) else one for one in wrong]
        whole = self._store.contents("out") == self._expected
        if said == "done" and not whole:
            wrong.append("OUT is wrong, and it said done")
        if fault == "replaced" and "/done/" not in request.path:
            self._put_back(request)
        if self._is_changed():
            wrong.append("the source has changed")
        return wrong + self._next(whole, resume, fault)

    def _next(self, whole: bool, resume: bool, fault: str) -> list[str]:
        """What is wrong of the next run."""
        wrong = []
        seen, then, left = self._clients.does(self._job(resume=resume, looks=True))
        if seen != ["read" if whole else "damaged"] * 2:
            wrong.append(f"OUT and its tag are {seen}, and whole is {whole}")
        if fault in ("replaced", "404") and "run it again without --resume" in then:  # as it says; 404 was not true
            _, then, left = self._clients.does(self._job(resume=False))
        if self._store.contents("out") != self._expected or not (
            then == "done" or (whole and "is there already" in then)
        ):
            wrong.append(f"the next run (resume={resume}) ends otherwise: {then}")
        files = self._store.files
        uploads = files.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", [])
        left += [f"upload of {one['Key']}" for one in uploads]
        for one in uploads:
            files.call_s3("abort_multipart_upload", Bucket="bucket", Key=one["Key"], UploadId=one["UploadId"])
        left += [name for name in files.find("bucket") if not name.startswith(("bucket/in/", "bucket/out/"))]
        return wrong + [f"the next run leaves: {one}" for one in left]

    def _is_changed(self) -> bool:
        here = {f"in/{name}": data for name, data in files(self._source).items()}
        there = {f"in/{name}": data for name, data in self._store.contents("in").items()}
        source = {name: data for name, data in self._begun.items() if name.startswith("in/")}
        return here != source or there != source

    def _put_back(self, request: Request) -> None:
        """What took the place of a file, but of a note, which is not relied on."""
        path, content = self._store.proxy.replaced
        assert path == request.path.partition("#")[0].lstrip("/")
        if self._store.files.exists(path) and self._store.files.cat_file(path) == flipped(content):
            self._store.files.pipe_file(path, content)


class Load:
    """A load by two ranks of DeepSpeed, and how it goes without a fault."""

    def __init__(self, store: Store, place: Path) -> None:
        saved, to, self._run = KINDS["zero2 to zero3"]
        self._store, self._world = store, World(2)
        good, self._other = (made(self._world, str(place / "load"), saved, to, seed) for seed in (7, 8))
        self._files = files(Path(good))
        self._url = store.put(Path(good), "load")
        arguments = {"run": self._run, "model": MODEL, "url": self._url}
        self._world.run("load_jobs.begin_by_url", environment=store.environment, **arguments)
        store.proxy.begin()
        self._ask(again=False)
        self.requests = [one for one in store.proxy.requests if one.who]

    def _ask(self, again: bool) -> list[tuple[str, str, str]]:
        told = self._world.run("load_jobs.befallen_by_url", url=self._url, other=self._other, again=again)
        return [tuple(one) for one in told]

    def befallen(self, request: Request, fault: str, resume: bool) -> list[str]:
        """What is wrong after this fault."""
        proxy = self._store.proxy
        proxy.begin(request, fault)
        told = self._ask(again=False)
        befallen = proxy.befallen
        proxy.begin()
        wrong = [] if befallen else ["the request was not made: they are not the same in each run"]
        wrong += filter(None, [wrong_of_ranks(told)])
        if fault in ("busy", "cut") and {one[0] for one in told} != {"done"}:
            wrong.append(f"it was not asked again: {told[0][0]}")
        if fault == "replaced":
            self._store.files.pipe_file(*proxy.replaced)
        if self._store.contents("load") != self._files:
            wrong.append("the source has changed")
        again = self._ask(again=True)
        if {one[:2] for one in again} != {("done", "right")}:
            wrong.append(f"the next load ends otherwise: {again}")
        return wrong

    def close(self) -> None:
        self._world.close()


def main(words: list[str]) -> int:
    given = options(words, __doc__, nargs="*", metavar="WORK REQUEST FAULT")
    tried, killed = Tried(given.every), dict[str, bytes]()
    clients = Clients()
    with tempfile.TemporaryDirectory() as folder, store_here() as store:
        import moto.s3.models

        least, moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = moto.s3.models.S3_UPLOAD_PART_MIN_SIZE, 0
        _wire(store, clients)
        place = Path(folder)
        write(Built(groups=(SHAPES,), frozen=(), tied=(), states=("exp_avg",), dp=2, seed=5), place / "saved")
        for name in (*WORKS, LOAD):
            if given.only and given.only[0] != name:
                continue
            work = Load(store, place) if name == LOAD else Work(name, store, clients, place, killed)
            for request in sorted(set(work.requests)):
                called = ":".join(map(str, request))
                for fault in FAULTS[request.kind]:
                    if name == LOAD and fault == DEATH:
                        continue
                    if not tried.takes() or (len(given.only) > 1 and given.only[1:] != [called, fault]):
                        continue
                    wrong = work.befallen(request, fault, resume=bool(tried.turn // given.every % 2))
                    tried.counts(f"{name}: {request.kind}", (name, called, fault), wrong)
            print(f"{name}: {len(work.requests)} requests", flush=True)
            work.close() if isinstance(work, Load) else None
        moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = least
    clients.close()
    return tried.end()


def _wire(store: Store, clients: Clients) -> None:
    """What the proxy does to a client, and to a file that another takes the place of."""

    def replaces(path: str) -> None:
        store.proxy.replaced = path.lstrip("/"), store.files.cat_file(path.lstrip("/"))
        store.files.pipe_file(path.lstrip("/"), flipped(store.proxy.replaced[1]))

    def kills() -> None:
        os.kill(clients.child, 9)

    store.proxy.replaces, store.proxy.kills = replaces, kills


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
