"""`ds-reshard plan`: its arguments, and what a conversion would do, as a table."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.text import Text

from ds_reshard.cli.arguments import (
    add_checkpoint,
    add_command,
    add_json,
    add_reading,
    add_target,
    add_trust,
    bandwidth,
    reading,
    shard,
    show,
    target,
)
from ds_reshard.cli.render import line, printable, put, size, table
from ds_reshard.model.reports import ConversionPlan
from ds_reshard.model.target import RunSizes
from ds_reshard.operations import plan


def _sized(sizes: RunSizes) -> str:
    """The sizes of a run, without those that are 1 but for dp."""
    return ", ".join(f"{axis} {size}" for axis, size in sizes._asdict().items() if size > 1 or axis == "dp")


_ROWS = 20


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "plan",
        help="what convert would read and write, by whom; reads no tensor",
        example="checkpoints --to zero3 --dp 8",
    )
    add_checkpoint(parser, "SRC")
    add_target(parser)
    parser.add_argument(
        "--bandwidth",
        type=bandwidth,
        metavar="GBPS",
        default=1.0,
        help="gigabytes a second that the disk reads or writes (default: %(default)s)",
    )
    add_reading(parser, processes=False)
    parser.add_argument(
        "--shard",
        type=shard,
        metavar="I/N",
        default=(0, 1),
        help="plan part I of N, counted from 0, as convert would write it; opens that part's files alone",
    )
    add_trust(parser)
    add_json(parser, run)


def run(arguments: argparse.Namespace) -> int:
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
