"""`ds-reshard convert` and `ds-reshard plan`: their arguments, and what they say at the end."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from ds_reshard.cli.arguments import (
    FOLDER,
    READING,
    TARGET,
    Command,
    gigabytes,
    number,
    processes,
    reading,
    shard,
    show,
    switch,
    target,
    text,
)
from ds_reshard.cli.launch import restarted, sharing
from ds_reshard.cli.render import bar, line, printable, put, size, table
from ds_reshard.model.reports import ConversionPlan
from ds_reshard.model.target import RunSizes
from ds_reshard.operations import Conversion, Options, convert, plan

_ROWS = 20


def _convert(arguments: argparse.Namespace) -> int:
    ranks = sharing().size > 1
    options = Options(
        threads=arguments.threads,
        processes=processes(arguments, alone=not ranks and arguments.shard is None),
        memory_nbytes=arguments.memory << 20,
        shard=arguments.shard or (0, 1),
        resume=arguments.resume or restarted(),
        force=arguments.force,
        ranks=ranks,
    )
    with bar("written") as progress:
        done = convert(arguments.checkpoint, arguments.out, options=options, progress=progress, **target(arguments))
    show(arguments, lambda: asdict(done), lambda console: _render_conversion(done, console))
    return 0


def _render_conversion(done: Conversion, console: Console) -> None:
    """A line that says what was written, and one for each note."""
    left = "" if done.complete else "; the parts of other processes are still to be written"
    line(console, f"{done.out}: {done.files} files, {done.bytes_read} bytes read, {done.bytes_written} written{left}")
    for note in done.notes:
        line(console, f"note: {note}")


def _plan(arguments: argparse.Namespace) -> int:
    made = plan(
        arguments.checkpoint,
        bandwidth=arguments.bandwidth * 1e9,
        reading=reading(arguments),
        shard=arguments.shard,
        **target(arguments),
    )
    show(arguments, made.to_json, lambda console: render_plan(made, console))
    return 0


def render_plan(made: ConversionPlan, console: Console) -> None:
    """One row a target rank (the first 20), and a line that sums up."""
    number, shards = made.shard
    part = f": part {number} of {shards}" if shards > 1 else ""
    title = f"From {printable(made.folder)} ({_sized(made.saved)}) to {made.to}, {_sized(made.coming)}{part}"
    numbers = ("written", "source files", "read")
    rows = table(title, "target", "files", *numbers, right=numbers)
    for unit in made.units[:_ROWS]:
        files = unit.files[0] + (f" and {len(unit.files) - 1} more" if len(unit.files) > 1 else "")
        told = (size(unit.bytes_written), str(len(unit.reads)), size(unit.bytes_read))
        rows.add_row(unit.name, Text(printable(files)), *told)
    put(console, rows)
    if len(made.units) > _ROWS:
        console.print(Text(f"and {len(made.units) - _ROWS} more: --json shows them", style="dim"))
    line(
        console,
        f"{size(made.bytes_read)} read, {size(made.bytes_written)} written, buffers of {size(made.buffer_nbytes)}; "
        f"{made.seconds:.3g} s at {made.bandwidth / 1e9:g} GB/s"
        + (f"; planned from {size(made.metadata_nbytes)}" if made.metadata_nbytes is not None else ""),
    )


def _sized(sizes: RunSizes) -> str:
    """The sizes of a run, without those that are 1 but for dp."""
    return ", ".join(f"{axis} {size}" for axis, size in sizes._asdict().items() if size > 1 or axis == "dp")


CONVERT = Command(
    "convert",
    _convert,
    "write a checkpoint anew, for another ZeRO stage, size or format; DeepSpeed itself loads it",
    "checkpoints converted --to zero3 --dp 8",
    f"--tag {TARGET} --repair {READING} --rules --trust",
    {
        "checkpoint": text("SRC", FOLDER),
        "out": text("OUT", "the folder to make, or its URL: it is there when all of it is written"),
        "--shard": number("do part I of N, counted from 0; the last one finishes", type=shard, metavar="I/N"),
        "--resume": switch("go on with a conversion that was interrupted"),
        "--force": switch("replace OUT when all of the new one is written"),
    },
    shared=True,
)
PLAN = Command(
    "plan",
    _plan,
    "what convert would read and write, by whom; reads no tensor",
    "checkpoints --to zero3 --dp 8",
    f"--tag {TARGET} --threads --memory --rules --trust",
    {
        "checkpoint": text("SRC", FOLDER),
        "--bandwidth": gigabytes("gigabytes a second that the disk reads or writes (default: %(default)s)"),
        "--shard": number(
            "plan part I of N, counted from 0, as convert would write it; opens that part's files alone",
            type=shard,
            metavar="I/N",
            default=(0, 1),
        ),
    },
)
