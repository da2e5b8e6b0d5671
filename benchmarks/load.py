"""`make bench`: how long `load_checkpoint` takes, beside DeepSpeed's own and beside universal checkpoints."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import contest, engines, processes
from benchmarks.contest import CONDITIONS, CONVERTED, DEEPSPEED, DIRECT, UNCHANGED, UNIVERSAL, Contestant
from benchmarks.gpt import Shape

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = ROOT / ".bench"
LOADED_DP = 2
STAGES = (1, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run: parameters of the model, interleaved rounds, ZeRO stages, and whether to convert as well."""

    params: int
    repeats: int
    stages: tuple[int, ...]
    universal: bool
    output: Path | None


def parse(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--params", type=float, default=270e6, help="parameters of the model (default 270e6)")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved rounds for each condition (default 5)")
    parser.add_argument("--stage", type=int, choices=STAGES, action="append", help="a ZeRO stage; default: 1 and 3")
    parser.add_argument("--no-universal", action="store_true", help="leave ds_to_universal out: it takes minutes")
    parser.add_argument("--quick", action="store_true", help="20M parameters, one round; a trial, not saved")
    parser.add_argument("--output", type=Path, help="folder for the results (default: benchmarks/results)")
    given = parser.parse_args(arguments)
    output = given.output or (None if given.quick else ROOT / "benchmarks" / "results")
    return Options(
        params=20_000_000 if given.quick else int(given.params),
        repeats=1 if given.quick else given.repeats,
        stages=tuple(given.stage or STAGES),
        universal=not given.no_universal,
        output=output,
    )


def main() -> None:
    from rich.console import Console

    from benchmarks import report

    options, started = parse(), time.monotonic()
    console = Console(width=max(Console().width, report.WIDTH))
    processes.start()
    shape = Shape.of(options.params)
    runs: list[dict[str, Any]] = []
    for stage in options.stages:
        for run in _stage(stage, shape, options, console):
            runs.append(run)
            console.print(report.line(run), highlight=False)
    results = report.results(runs, shape=shape, options=options, seconds=time.monotonic() - started)
    for table in report.tables(results):
        console.print(table)
    if options.output is not None:
        report.write(results, options.output)


def _stage(stage: int, shape: Shape, options: Options, console: Any) -> Iterator[dict[str, Any]]:
    """All runs of one ZeRO stage; its checkpoints are made first and removed afterwards."""
    folders = {dp: SCRATCH / f"zero{stage}-dp{dp}" for dp in (2, 4)}
    universal = SCRATCH / f"zero{stage}-universal"
    try:
        for dp, folder in folders.items():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            console.print(f"saving at ZeRO-{stage}, dp={dp}", highlight=False)
            processes.run(engines.save, world=dp, shape=shape, stage=stage, folder=str(folder))
        for number in range(options.repeats):
            for condition in CONDITIONS:
                for contestant in (DEEPSPEED, DIRECT, UNCHANGED):
                    yield _load(contestant, folders[contestant.saved_dp], stage, shape, condition, number)
        shutil.rmtree(folders[2])
        if options.universal:
            yield from _universal(stage, shape, folders[4], universal, options.repeats)
    finally:
        for folder in (*folders.values(), universal):
            shutil.rmtree(folder, ignore_errors=True)


def _load(
    contestant: Contestant, folder: Path, stage: int, shape: Shape, condition: str, number: int
) -> dict[str, Any]:
    """One load; done again, at most twice, when more than a hundredth of what it read was not in the page cache."""
    dropped = 0
    while True:
        warm(folder)
        ranks = processes.run(
            contest.load,
            world=LOADED_DP,
            contestant=contestant,
            shape=shape,
            stage=stage,
            folder=str(folder),
            condition=condition,
            round_number=number,
        )
        if dropped == 2 or all(rank["disk_read_nbytes"] <= rank["read_nbytes"] // 100 for rank in ranks):
            break
        dropped += 1
    return {
        "contestant": contestant.name,
        "stage": stage,
        "condition": condition,
        "round": number,
        "cold_runs_dropped": dropped,
        "seconds": max(rank["seconds"] for rank in ranks),
        "cpu_s": max(rank["user_s"] + rank["system_s"] for rank in ranks),
        "ranks": ranks,
    }


def _universal(stage: int, shape: Shape, folder: Path, output: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """Convert once, as many workers as ranks load; then load the result, DeepSpeed and ds_reshard by turns.

    Of DeepSpeed's runs `seconds` are those of converting and loading together, `loading_s` and `cpu_s` of loading.
    """
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    warm(folder)
    (converting,) = processes.run(
        contest.convert, world=1, folder=str(folder), output=str(output), stage=stage, workers=LOADED_DP
    )
    for number in range(repeats):
        for condition in ("fresh", "touched"):
            run = _load(UNIVERSAL, output, stage, shape, condition, number)
            loading = run["seconds"]
            yield {**run, "converting_s": converting, "loading_s": loading, "seconds": converting + loading}
            yield _load(CONVERTED, output, stage, shape, condition, number)


def warm(folder: Path) -> None:
    """Read every file below the folder, so that loads find it in the page cache."""
    memory = memoryview(bytearray(4 << 20))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(memory):
                pass


if __name__ == "__main__":
    main()
