"""`ds-reshard verify`: its arguments, and its findings as a table."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ds_reshard.cli.arguments import add_device, add_reading, add_trust, reading
from ds_reshard.cli.comparison import render_difference
from ds_reshard.cli.render import bar, printable, size
from ds_reshard.errors import ConfigError
from ds_reshard.model.reports import Verification, pickle_line
from ds_reshard.operations import scan_pickles, verify


def add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "verify", help="read a checkpoint whole and list everything that is wrong with it; status 1 for any finding"
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", help="the folder that was given to save_checkpoint; with --pickles any folder"
    )
    parser.add_argument("--tag", help="the tag to look at (default: the one that 'latest' names)")
    parser.add_argument("--deep", action="store_true", help="look at the values of the tensors, too")
    parser.add_argument("--against", metavar="OTHER", help="a checkpoint that it shall be equal to, of any layout")
    parser.add_argument(
        "--pickles", action="store_true", help="only search all pickles below CKPT for what acts when they are loaded"
    )
    add_reading(parser)
    add_device(parser)
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.pickles:
        return _run_pickles(arguments)
    with bar("read") as progress:
        found = verify(
            arguments.checkpoint,
            tag=arguments.tag,
            deep=arguments.deep,
            against=arguments.against,
            reading=reading(arguments),
            progress=progress,
        )
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        render_verification(found, Console())
    return 0 if found.clean else 1


def _run_pickles(arguments: argparse.Namespace) -> int:
    """What is in the pickles alone; status 1 for any finding."""
    if arguments.deep or arguments.against is not None or arguments.tag is not None:
        raise ConfigError("--pickles looks at pickles alone: leave out --deep, --against and --tag")
    found = scan_pickles(arguments.checkpoint)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        console = Console()
        for fault in found.faults:
            console.print(Text(printable(f"{fault.where}: {fault.what}"), style="red"), soft_wrap=True)
        for mend in dict.fromkeys(fault.mend for fault in found.faults if fault.mend):
            console.print(Text(f"to mend: {printable(mend)}"), soft_wrap=True)
        files = f"{found.files} file{'s' if found.files != 1 else ''}"
        line = f"{printable(found.folder)}: {files}; {pickle_line(found.pickles, found.unread, found.faults)}"
        console.print(Text(line, style="bold red" if found.faults else "green"), soft_wrap=True)
    return 1 if found.faults else 0


def render_verification(found: Verification, console: Console) -> None:
    """One row a finding, what mends them, what is no fault, and a line that says what was read."""
    if found.faults:
        table = Table(title="Findings", title_justify="left", show_lines=True)
        for heading in ("where", "what", "expected", "found"):
            table.add_column(heading, overflow="fold")
        for fault in found.faults:
            where = fault.where.removeprefix(f"{found.folder}/")
            table.add_row(*(Text(printable(text)) for text in (where, fault.what, fault.expected, fault.found)))
        console.print(table)
        for mend in dict.fromkeys(fault.mend for fault in found.faults if fault.mend):
            console.print(Text(f"to mend: {printable(mend)}"), soft_wrap=True)
    for note in found.notes:
        console.print(Text(printable(note), style="dim"), soft_wrap=True)
    if found.difference is not None:
        render_difference(found.difference, console)
    looked = f", the values of {found.tensors} tensors" if found.tensors else ""
    count = len(found.faults)
    result = f"{count} finding{'s' if count != 1 else ''}" if count else "nothing found"
    rate = f" at {size(round(found.bytes_read / found.seconds))}/s" if found.seconds else ""
    line = f"{printable(found.folder)}: {result} in {found.files} files, {found.records} checksums{looked}; "
    console.print(
        Text(f"{line}{size(found.bytes_read)} read{rate}", style="bold red" if count else "green"), soft_wrap=True
    )
    console.print(Text(pickle_line(found.pickles, found.pickles_unread, found.faults)), soft_wrap=True)
