"""Every call on files of every conversion fails once, in each way that it can: OUT is whole or absent, and said why.

    python tests/torture                    all of it
    python tests/torture --every 97         a sample
    python tests/torture WORK               of one work, with a line for each step
    python tests/torture WORK STEP FAULT    one step, as a finding prints it

A process of its own has each fault. After it:

* the source is as it was;
* OUT is absent, or equal to the bytes of a run without faults;
* an error has a class of the package, and a run without one has made the right bytes;
* no temporary file, thread or open file is left beside the workspace;
* the next run, with --resume and without by turns, ends in the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS / name) for name in ("torture", "formats", "hosts", "hosts/megatron")]

import host_folders  # noqa: E402, F401
import saved_worlds  # noqa: E402
import torch  # noqa: E402
from calls import DEATH, FAULTS, Calls, Step, ended, files, left_open  # noqa: E402
from forks import Release  # noqa: E402
from nanotron_builder import MODEL, Run, again, write  # noqa: E402
from on_ranks import Tried, options  # noqa: E402
from releases import home  # noqa: E402
from worlds import World  # noqa: E402

from ds_reshard.operations import Options, convert  # noqa: E402

RUN = Run(dp=2, tp=2, model=MODEL[:6:2])
SIZES = {"zero1": 3, "zero2": 2, "zero3": 2, "bf16": 2, "dcp": 3, "accelerate": 2, "fsdp": 3}
OLD = {"mine": b"before"}


class Conversion(NamedTuple):
    """From one format to another; with `force` over an OUT that is there, or going on behind one that was killed."""

    source: str
    to: str
    force: bool = False
    resume: bool = False

    def run(self, place: Path, **options: Any) -> None:
        more: dict[str, Any] = {"dp": SIZES[self.to]} if self.to in SIZES else {}
        if self.to == "nanotron":
            more["like"] = str(place / "like")
        options = {"force": self.force, "resume": self.resume, **options}
        convert(str(place / "in"), str(place / "out"), to=self.to, options=Options(threads=1, **options), **more)


WORKS = {
    "zero3": Conversion("nanotron", "zero3"),
    "universal": Conversion("zero3", "universal"),
    "zero1": Conversion("universal", "zero1"),
    "bf16": Conversion("zero1", "bf16"),
    "dcp": Conversion("bf16", "dcp"),
    "accelerate": Conversion("dcp", "accelerate"),
    "pytorch": Conversion("accelerate", "pytorch"),
    "zero2": Conversion("pytorch", "zero2"),
    "nanotron": Conversion("zero3", "nanotron"),
    "safetensors": Conversion("zero1", "safetensors"),
    "torch": Conversion("zero2", "torch"),
    "fsdp": Conversion("verl", "fsdp"),
    "megatron": Conversion("megatron-lm", "megatron"),
    "megatron-torch": Conversion("megatron", "megatron-torch"),
    "forced": Conversion("zero3", "zero2", force=True),
    "resumed": Conversion("zero2", "zero3", resume=True),
}
"""Each format as a target, once, and as a source."""


def _has_no_checksum(path: str) -> bool:
    """Whether it is of a source, and nothing in it tells that a bit has flipped: texts, and safetensors."""
    return path.startswith(("in/", "like/")) and path.endswith((".json", ".yaml", ".safetensors"))


class Work:
    """One conversion, and how it goes without a fault."""

    def __init__(self, conversion: Conversion, source: Path, place: Path) -> None:
        self.conversion, self.place, self.begun, whole = conversion, place, place / "begun", place / "whole"
        for folder in (self.begun, whole):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, self.begun / "in")
        if conversion.to == "nanotron":
            write(again(RUN, seed=5), self.begun / "like")
        if conversion.force:
            (self.begun / "out").mkdir()
            (self.begun / "out" / "mine").write_bytes(OLD["mine"])
        if conversion.resume:
            self._in_child(self.begun, self._middle(), DEATH)
        shutil.copytree(self.begun, whole)
        calls = Calls(str(whole))
        with calls.watched():
            conversion.run(whole)
        self.steps, self.source, self.expected = calls.steps, files(self.begun / "in"), files(whole / "out")

    def _middle(self) -> Step:
        """A call in the middle: the first half of the files are finished."""
        whole = self.place / "whole"
        shutil.copytree(self.begun, whole)
        calls = Calls(str(whole))
        with calls.watched():
            self.conversion.run(whole)
        shutil.rmtree(whole)
        noted = [step for step in calls.steps if step.kind == "rename" and "/done/" in step.path]
        return noted[len(noted) // 2]

    def befallen(self, step: Step, fault: str, resume: bool) -> list[str]:
        """What is wrong after this fault."""
        case = self.place / "case"
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(self.begun, case)
        said, wrong = self._in_child(case, step, fault)
        if (fault == DEATH) != (said == "death") or said.startswith("unnamed"):
            wrong.append(f"it ended so: {said}")
        if fault == "flipped" and _has_no_checksum(step.path):
            return wrong if files(case / "in") == self.source else [*wrong, "the source has changed"]
        out = self._out(case, fault)
        whole = out == self.expected
        if out not in ({}, self.expected, *([OLD] if self.conversion.force else [])) or (said == "done" and not whole):
            wrong.append(f"OUT is there in part or wrong, and it said {said}")
        if fault == "replaced":
            for name in ("in", "like"):
                shutil.rmtree(case / name, ignore_errors=True)
                if (self.begun / name).exists():
                    shutil.copytree(self.begun / name, case / name)
        elif files(case / "in") != self.source:
            wrong.append("the source has changed")
        if left := {path.name for path in case.iterdir()} - {"in", "out", "like", "out.ds-reshard"}:
            wrong.append(f"left behind: {sorted(left)}")
        then = ended(lambda: self.conversion.run(case, resume=resume))
        if fault in ("replaced", "old", "late") and "or of files that have changed since" in then:
            then = ended(lambda: self.conversion.run(case, resume=False))
        if self._out(case, fault) != self.expected or not (then == "done" or (whole and "is there already" in then)):
            wrong.append(f"the next run (resume={resume}) ends otherwise: {then}")
        if (case / "out.ds-reshard").exists() and not whole:
            wrong.append("the next run leaves its workspace")
        return wrong

    def _out(self, case: Path, fault: str) -> dict[str, bytes]:
        """What is in OUT. Its manifest lists what was seen of the source: a name that nobody reads may be late."""
        found = files(case / "out")
        if fault == "late" and "ds_reshard.json" in found:
            found["ds_reshard.json"] = self.expected["ds_reshard.json"]
        return found

    def _in_child(self, case: Path, step: Step, fault: str) -> tuple[str, list[str]]:
        """What a process of its own says that this befalls, and what it leaves."""
        answer = self.place / "answer.json"
        answer.unlink(missing_ok=True)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return tuple(json.loads(answer.read_text())) if answer.exists() else ("death", [])
        calls = Calls(str(case), step, fault)
        with calls.watched():
            said = ended(lambda: self.conversion.run(case))
        wrong = [] if calls.befallen else ["the step was not reached: steps are not the same in each run"]
        if threading.active_count() > 1:
            wrong.append(f"threads are left: {[thread.name for thread in threading.enumerate()]}")
        if left := left_open(str(case)):
            wrong.append(f"files are left open: {left}")
        answer.write_text(json.dumps([said, wrong]))
        os._exit(0)


def saved(place: Path) -> dict[str, Path]:
    """What is converted first: a synthetic run of nanotron, and folders that FSDP2 ranks and Megatron-LM have saved."""
    world, release = World(2), saved_worlds.WORLDS["gated fp32"].release
    folders = {name: place / name for name in ("verl", "megatron-lm", "release")}
    for folder in folders.values():
        folder.mkdir()
    world.run("fsdp_manager_jobs.verl_save", folder=str(folders["verl"]), dtype="float32")
    world.close()
    megatron = Release(release, home(release), folders["release"])
    folders["megatron-lm"] = saved_worlds.saved_by({release: megatron}, folders["megatron-lm"])("gated fp32", "plain")
    megatron.close()
    return {"nanotron": write(RUN, place / "nanotron"), **folders}


def sources(place: Path) -> dict[str, Path]:
    """A source in each format."""
    made = saved(place)
    for conversion in WORKS.values():
        if conversion.to not in made:
            folder = place / f"to-{conversion.to}"
            folder.mkdir()
            os.symlink(made[conversion.source], folder / "in")
            conversion.run(folder)
            made[conversion.to] = folder / "out"
    return made


def main() -> int:
    given = options(None, __doc__, nargs="*", metavar="WORK STEP FAULT")
    torch.set_num_threads(1)
    os.fsync = lambda fd: None  # the system lives on, and has all that a process wrote which it kills
    tried = Tried(given.every)
    with tempfile.TemporaryDirectory() as folder:
        made = sources(Path(folder))
        for name, conversion in WORKS.items():
            if given.only and given.only[0] != name:
                continue
            work = Work(conversion, made[conversion.source], Path(folder) / "work")
            for step in work.steps:
                for fault in FAULTS[step.kind]:
                    called = f"{step.kind}:{step.path}:{step.number}"
                    if not tried.takes() or (len(given.only) > 1 and given.only[1:] != [called, fault]):
                        continue
                    wrong = work.befallen(step, fault, resume=bool(tried.turn // given.every % 2))
                    tried.counts(f"{name} {step.kind}", (name, called, fault), wrong)
            print(f"{name}: {len(work.steps)} calls", flush=True)
    return tried.end()


if __name__ == "__main__":
    sys.exit(main())
