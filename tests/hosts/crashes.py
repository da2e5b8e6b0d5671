"""Conversions that end at the k-th call that changes a file or a folder, or that the system refuses there.

    python tests/hosts/crashes.py SOURCE FOLDER FORMAT DP STRIDE THREADS

STRIDE 1 is every call, 5 every fifth. With several threads calls come in another order each time.

Prints one line of JSON: how many calls there are, and what went wrong at which.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ds_reshard.errors import ReshardError
from ds_reshard.execution import disk
from ds_reshard.operations import Options, convert

CALLS = ("write_new", "create", "write_at", "sync", "rename", "make_folder", "remove")
REFUSALS = ("ENOSPC", "EIO", "EACCES")


class Counted:
    """Counts the calls, and ends the process, or refuses, at number `at`."""

    def __init__(self, at: int | None, kind: str) -> None:
        self.at, self.kind, self.count = at, kind, 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count != self.at:
                return function(*args, **kwargs)
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            code = getattr(errno, self.kind)
            with disk._named(str(args[0]), "refused"):
                raise OSError(code, os.strerror(code))

        return called


@contextmanager
def counted(at: int | None, kind: str = "kill") -> Iterator[Counted]:
    watch = Counted(at, kind)
    originals = {name: getattr(disk, name) for name in CALLS}
    for name, function in originals.items():
        setattr(disk, name, watch.wrap(function))
    try:
        yield watch
    finally:
        for name, function in originals.items():
            setattr(disk, name, function)


class Case:
    """One conversion, into `out` of any folder."""

    def __init__(self, source: str, to: str, dp: int | None, threads: int) -> None:
        self.source, self.to, self.dp, self.threads = source, to, dp, threads

    def run(self, folder: Path, **options: Any) -> None:
        convert(
            self.source, str(folder / "out"), to=self.to, dp=self.dp, options=Options(threads=self.threads, **options)
        )

    def in_child(self, folder: Path, at: int | None, kind: str = "kill", **options: Any) -> str:
        """What became of it in a process of its own: "done", "killed", or the error's class and text."""
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                with counted(at, kind):
                    self.run(folder, **options)
                said = "done"
            except ReshardError as error:
                said = f"{type(error).__name__}: {error}"
            except BaseException as error:
                said = f"unnamed {type(error).__name__}: {error}"
            os.write(write, said.encode()[:4000])
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            told = pipe.read().decode()
        os.waitpid(child, 0)
        return told or "killed"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def fresh(folder: Path, copy_of: Path | None = None) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    if copy_of is not None:
        shutil.copytree(copy_of, folder)
    else:
        folder.mkdir(parents=True)
    return folder


def main(source: str, place: str, to: str, dp: str, stride: str, threads: str) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda fd: None  # the system lives on, and has all that a process wrote which it kills
    case, base, wrong = Case(source, to, int(dp) or None, int(threads)), Path(place), []
    with counted(None) as watch:
        case.run(fresh(base / "whole"))
    expected, old = contents(base / "whole"), {"out/mine": b"before"}
    for at in range(1, watch.count + 1, int(stride)):
        kind = REFUSALS[at // 2 % len(REFUSALS)] if at % 2 else "kill"
        for force in (False, True):
            folder = fresh(base / "crashed")
            if force:
                (folder / "out").mkdir()
                (folder / "out" / "mine").write_bytes(b"before")
            said = case.in_child(folder, at, kind, force=force)
            found = {name: data for name, data in contents(folder).items() if name.startswith("out/")}
            allowed = [expected, {}] + ([old] if force else [])
            if found not in allowed:
                wrong.append((at, kind, force, "OUT is there in part", sorted(found)))
            if said.startswith("unnamed"):
                wrong.append((at, kind, force, said, ""))
            resume = bool((at // 2 + force) % 2)  # at each call both, and each with and without an old OUT
            again = fresh(base / "again", copy_of=folder)
            told = case.in_child(again, None, resume=resume, force=force)
            is_there = found == expected and not force and "is there already" in told
            if contents(again) != expected and not (is_there and found == expected):
                wrong.append((at, kind, force, f"resume={resume} ends otherwise: {told}", sorted(contents(again))))
    print(json.dumps({"calls": watch.count, "wrong": wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
