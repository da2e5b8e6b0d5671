"""Conversions that end at the k-th call that changes a file or a folder, or that the system refuses there.

    python tests/hosts/crashes.py SOURCE FOLDER FORMAT DP STRIDE THREADS

STRIDE 1 is every call, 5 every fifth. What a process that is killed leaves is what lies there when the call comes: with
one thread, and those that bring files to the disk, that is copied at every call of one conversion. Several, whose calls
come in another order each time, are killed.

Prints one line of JSON: how many calls there are, and what went wrong at which.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
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
    """Counts the calls, and ends the process, or refuses, at number `at`.

    `seen` is told each number before, and nothing is called meanwhile: files are brought to the disk by threads.
    """

    def __init__(self, at: int | None, kind: str, seen: Callable[[int], None] | None) -> None:
        self.at, self.kind, self.count, self.seen = at, kind, 0, seen
        self.lock = threading.RLock()

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with self.lock:
                self.count = number = self.count + 1
                if self.seen is not None:
                    self.seen(number)
                    return function(*args, **kwargs)
            if number != self.at:
                return function(*args, **kwargs)
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            code = getattr(errno, self.kind)
            with disk._named(str(args[0]), "refused"):
                raise OSError(code, os.strerror(code))

        return called


@contextmanager
def counted(at: int | None, kind: str = "kill", seen: Callable[[int], None] | None = None) -> Iterator[Counted]:
    watch = Counted(at, kind, seen)
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

    def told(self, folder: Path, at: int | None, kind: str = "kill", **options: Any) -> str:
        """What became of it: "done", or the error's class and text."""
        try:
            with counted(at, kind):
                self.run(folder, **options)
        except ReshardError as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:
            return f"unnamed {type(error).__name__}: {error}"
        return "done"

    def killed(self, folder: Path, at: int, **options: Any) -> str:
        """The same of a process of its own, which is killed."""
        child = os.fork()
        if not child:
            self.told(folder, at, **options)
            os._exit(0)
        os.waitpid(child, 0)
        return "killed"

    def copied(self, folder: Path, copies: Path, wanted: range, **options: Any) -> None:
        """Copies of the folder as each of these calls finds it, by its number."""

        def copy(count: int) -> None:
            if count in wanted:
                shutil.copytree(folder, copies / str(count))

        with counted(None, seen=copy):
            self.run(folder, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def fresh(folder: Path, copy_of: Path | None = None) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    if copy_of is not None:
        shutil.copytree(copy_of, folder)
    else:
        folder.mkdir(parents=True)
    return folder


def begun(folder: Path, old: bool) -> Path:
    """A fresh folder, with an OUT of another run in it or without."""
    fresh(folder)
    if old:
        (folder / "out").mkdir()
        (folder / "out" / "mine").write_bytes(b"before")
    return folder


def main(source: str, place: str, to: str, dp: str, stride: str, threads: str) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda fd: None  # the system lives on, and has all that a process wrote which it kills
    case, base, wrong = Case(source, to, int(dp) or None, int(threads)), Path(place), []
    with counted(None) as watch:
        case.run(fresh(base / "whole"))
    expected, old = contents(base / "whole"), {"out/mine": b"before"}
    calls = range(1, watch.count + 1, int(stride))
    for force in (False, True):
        copies = fresh(base / "copies")
        if case.threads == 1:
            case.copied(begun(base / "crashed", force), copies, calls, force=force)
        for at in calls:
            kind = REFUSALS[at // 2 % len(REFUSALS)] if at % 2 else "kill"
            folder = begun(base / "crashed", force)
            if kind != "kill":
                said = case.told(folder, at, kind, force=force)
            elif case.threads == 1:
                said = "killed"
                fresh(folder, copy_of=copies / str(at))
            else:
                said = case.killed(folder, at, force=force)
            found = {name: data for name, data in contents(folder).items() if name.startswith("out/")}
            allowed = [expected, {}] + ([old] if force else [])
            if found not in allowed:
                wrong.append((at, kind, force, "OUT is there in part", sorted(found)))
            if said.startswith("unnamed"):
                wrong.append((at, kind, force, said, ""))
            resume = bool((at // 2 + force) % 2)  # at each call both, and each with and without an old OUT
            again = fresh(base / "again", copy_of=folder)
            told = case.told(again, None, resume=resume, force=force)
            is_there = found == expected and not force and "is there already" in told
            if contents(again) != expected and not (is_there and found == expected):
                wrong.append((at, kind, force, f"resume={resume} ends otherwise: {told}", sorted(contents(again))))
    print(json.dumps({"calls": watch.count, "wrong": wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
