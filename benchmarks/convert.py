"""`make bench`, second part: `ds-reshard convert` beside `ds_to_universal` and `cp` of the same bytes.

Each contestant reads one checkpoint that is in the page cache and writes a new folder, by turns, in a fresh process
whose imports are done, on a machine whose free memory is backed. `cp` is timed as it is, and with its files brought to
the disk, which `convert` always does; the last contestant is a synced `cp` of what convert wrote as universal: as many
files as that. Outputs are emptied after each round, and removed at the end, and `ds_to_universal` keeps its temporary
files: for minutes after many files were removed ext4 without a journal takes several times as long to make one
(`recently_deleted`, fs/ext4/ialloc.c).
The checkpoint of 64 ranks is made by `convert` from one that DeepSpeed saved with 4: DeepSpeed's own 64 processes need
more memory than a small machine has.
Prints a table; `--output FOLDER` writes JSON there too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import contest, engines, processes, report
from benchmarks.gpt import Shape
from benchmarks.load import SCRATCH, warm
from benchmarks.memory import forget_peak, free_nbytes, resident, take_back

if TYPE_CHECKING:
    from rich.table import Table

SAVED_DP, OTHER_DP, WORKERS = 4, 3, 2
_BACKED_NBYTES = 4 << 30
COPY, SYNCED, UPSTREAM, UNIVERSAL, OTHER = "cp", "cp, synced", "ds_to_universal", "to universal", "to another dp"
SAME_FILES = "cp of universal, synced"
CONTESTANTS = (COPY, SYNCED, UPSTREAM, UNIVERSAL, OTHER, SAME_FILES)
SHAPES = {200: Shape(width=656, layers=16), 1000: Shape(width=288, layers=83)}
"""By number of tensors, about: 14 bytes for each of 86M parameters are 1.2 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One checkpoint: its ZeRO stage, about how many tensors, and for how many ranks it was saved."""

    stage: int
    tensors: int
    dp: int

    @property
    def name(self) -> str:
        return f"ZeRO-{self.stage}, {self.tensors} tensors, dp {self.dp}"


CASES = tuple(Case(stage=stage, tensors=tensors, dp=dp) for tensors, dp in ((200, 4), (1000, 64)) for stage in (2, 3))


def main() -> None:
    from rich.console import Console

    parser = report.parser("convert", __doc__)
    parser.add_argument("--tensors", type=int, choices=sorted(SHAPES), action="append", help="default: all")
    parser.add_argument("--stage", type=int, choices=(2, 3), action="append", help="default: both")
    parser.add_argument("--without", choices=CONTESTANTS, action="append", default=[], help="leave one out")
    given = parser.parse_args()
    console = Console(width=max(Console().width, report.WIDTH))
    processes.start()
    runs: list[dict[str, Any]] = []
    without = {*given.without, *([SAME_FILES] if UNIVERSAL in given.without else [])}
    contestants = [name for name in CONTESTANTS if name not in without]
    left = [SCRATCH / "convert-source", SCRATCH / "convert-out"]
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        for case in CASES:
            if case.tensors in (given.tensors or SHAPES) and case.stage in (given.stage or (2, 3)):
                for run in _case(case, given.runs, contestants):
                    runs.append(run)
                    console.print(f"{case.name}: {run['contestant']:<24} {run['seconds']:8.3f} s", highlight=False)
    finally:
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
    versions = report.versions("torch", "deepspeed", "isal", "numpy")
    made = {"repeats": given.runs, "versions": versions, "runs": runs}
    console.print(table(made))
    report.keep(made, "convert", given.output)


def _case(case: Case, repeats: int, contestants: list[str]) -> Iterator[dict[str, Any]]:
    folder = SCRATCH / "convert-source" / case.name
    _save(case, folder)
    for number in range(repeats):
        outputs = {name: SCRATCH / "convert-out" / f"{case.name}, {number}, {name}" for name in contestants}
        for name, out in outputs.items():
            source = outputs[UNIVERSAL] if name == SAME_FILES else folder
            out.parent.mkdir(parents=True, exist_ok=True)
            warm(source)
            os.sync()
            take_back(min(_BACKED_NBYTES, free_nbytes()))
            (run,) = processes.run(_contest, world=1, name=name, source=str(source), out=str(out), stage=case.stage)
            yield {"case": asdict(case), "contestant": name, "round": number, **run}
        for path in (path for out in outputs.values() for path in out.rglob("*") if path.is_file()):
            os.truncate(path, 0)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        os.truncate(path, 0)


def _save(case: Case, folder: Path) -> None:
    saved = folder if case.dp == SAVED_DP else folder.with_name(f"{case.name}, saved")
    saved.mkdir(parents=True)
    processes.run(engines.save, world=SAVED_DP, shape=SHAPES[case.tensors], stage=case.stage, folder=str(saved))
    if saved != folder:
        processes.run(_convert, world=1, source=str(saved), out=str(folder), to=f"zero{case.stage}", dp=case.dp)


def _contest(rank: int, world: int, *, rendezvous: str, name: str, source: str, out: str, stage: int) -> dict[str, Any]:
    """Seconds of one contestant, bytes of its output, and by how much it grew."""
    import ds_reshard.operations.conversion  # noqa: F401

    forget_peak()
    before = resident()["anonymous"]
    cpu = time.process_time()
    if name == UPSTREAM:
        seconds = contest.convert(
            0, 1, rendezvous="", folder=source, output=out, stage=stage, workers=WORKERS, keep=True
        )
    else:
        started = time.perf_counter()
        if name in (COPY, SYNCED, SAME_FILES):
            subprocess.run(["cp", "-r", source, out], check=True)
            if name != COPY:
                subprocess.run(["sync", *(str(path) for path in Path(out).rglob("*"))], check=True)
        else:
            to, dp = ("universal", None) if name == UNIVERSAL else (f"zero{stage}", OTHER_DP)
            _convert(0, 1, rendezvous="", source=source, out=out, to=to, dp=dp)
        seconds = time.perf_counter() - started
    after = resident()
    return {
        "seconds": seconds,
        "cpu_s": time.process_time() - cpu,
        "grown_nbytes": after["peak"] - after["file"] - before,
        "written_nbytes": sum(path.stat().st_size for path in Path(out).rglob("*") if path.is_file()),
    }


def _convert(rank: int, world: int, *, rendezvous: str, source: str, out: str, to: str, dp: int | None) -> None:
    from ds_reshard.operations import Options, convert

    convert(source, out, to=to, dp=dp, options=Options(processes=os.cpu_count() or 1))


def table(made: dict[str, Any]) -> Table:
    """Medians and spreads of seconds, and of the ratios to `cp` and of `ds_to_universal` within one round."""
    rows = report.empty_table(
        "convert, page cache warm",
        "",
        "",
        "seconds",
        "over cp",
        "over cp, synced",
        "over cp of universal, synced",
        "ds_to_universal over it",
        "MB written",
        "memory, MiB",
    )
    for case in dict.fromkeys(tuple(sorted(run["case"].items())) for run in made["runs"]):
        here = [run for run in made["runs"] if run["case"] == dict(case)]
        taken = {name: [run["seconds"] for run in here if run["contestant"] == name] for name in CONTESTANTS}
        for name in (name for name in CONTESTANTS if taken[name]):
            mine = [run for run in here if run["contestant"] == name]
            ratios = [_ratios(taken[name], taken[other]) for other in (COPY, SYNCED, SAME_FILES)]
            grown = median(run["grown_nbytes"] for run in mine) / 2**20 if name in (UNIVERSAL, OTHER) else None
            rows.add_row(
                Case(**dict(case)).name,
                name,
                report.of(report.spread(taken[name])),
                *ratios,
                _ratios(taken[UPSTREAM], taken[name]),
                f"{median(run['written_nbytes'] for run in mine) / 1e6:.0f}",
                "" if grown is None else f"{grown:.0f}",
            )
        rows.add_section()
    return rows


def _ratios(above: list[float], below: list[float]) -> str:
    if not above or not below or above is below:
        return ""
    return report.of(report.spread([a / b for a, b in zip(above, below, strict=True)]))


if __name__ == "__main__":
    main()
