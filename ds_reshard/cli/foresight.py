"""`ds-reshard plan`: its arguments, and what a conversion would do, as a table."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_reshard.cli.arguments import add_reading, add_target, add_trust, reading, shard, target
from ds_reshard.cli.plan_page import page
from ds_reshard.cli.render import printable, size
from ds_reshard.errors import WriteFailed
from ds_reshard.model.conversion_plan import ConversionPlan
from ds_reshard.operations import plan

_ROWS = 20


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="what convert would read and write, by whom; reads no tensor")
    parser.add_argument("checkpoint", metavar="SRC", help="the folder that was given to save_checkpoint")
    add_target(parser)
    parser.add_argument(
        "--bandwidth",
        type=_bandwidth,
        metavar="GBPS",
        default=1.0,
        help="gigabytes a second that the disk reads or writes (default: %(default)s)",
    )
    add_reading(parser)
    parser.add_argument(
        "--shard",
        type=shard,
        metavar="I/N",
        default=(0, 1),
        help="plan part I of N, counted from 0, as convert would write it; opens that part's files alone",
    )
    parser.add_argument("--html", metavar="FILE", help="draw which source file feeds which target rank")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust(parser)
    parser.set_defaults(run=run)


def _bandwidth(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of gigabytes a second")
    return value


def run(arguments: argparse.Namespace) -> int:
    made = plan(
        arguments.checkpoint,
        bandwidth=arguments.bandwidth * 1e9,
        reading=reading(arguments),
        shard=arguments.shard,
        **target(arguments),
    )
    if arguments.html is not None:
        _write(arguments.html, page(made))
    if arguments.json:
        print(json.dumps(made.to_json(), indent=2))
    else:
        render_plan(made, Console())
    return 0


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise WriteFailed(f"{path}: cannot be written: {error.strerror or error}; name another file: --html") from None


def render_plan(made: ConversionPlan, console: Console) -> None:
    """One row a target rank (the first 20), and a line that sums up."""
    number, shards = made.shard
    part = f": part {number} of {shards}" if shards > 1 else ""
    table = Table(title=f"From {printable(made.folder)} to {made.to}, dp {made.dp}{part}", title_justify="left")
    for heading in ("target", "files", "written", "source files", "read"):
        table.add_column(heading, overflow="fold", justify="left" if heading in ("target", "files") else "right")
    for unit in made.units[:_ROWS]:
        files = unit.files[0] + (f" and {len(unit.files) - 1} more" if len(unit.files) > 1 else "")
        numbers = (size(unit.bytes_written), str(len(unit.reads)), size(unit.bytes_read))
        table.add_row(unit.name, Text(printable(files)), *numbers)
    console.print(table)
    if len(made.units) > _ROWS:
        console.print(Text(f"and {len(made.units) - _ROWS} more: --json shows them", style="dim"))
    console.print(
        Text(
            f"{size(made.bytes_read)} read, {size(made.bytes_written)} written, buffers of {size(made.buffer_nbytes)}; "
            f"{made.seconds:.3g} s at {made.bandwidth / 1e9:g} GB/s"
            + (f"; planned from {size(made.metadata_nbytes)}" if made.metadata_nbytes is not None else "")
        ),
        soft_wrap=True,
    )
