"""`ds-reshard verify`: its arguments, and its findings as a table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ds_reshard.cli.arguments import (
    FOLDER,
    add_checkpoint,
    add_command,
    add_device,
    add_json,
    add_reading,
    add_trust,
    reading,
    show,
)
from ds_reshard.cli.comparison import render_difference
from ds_reshard.cli.render import bar, line, printable, size, table
from ds_reshard.errors import ConfigError, Fault, mends_of
from ds_reshard.model.reports import PickleScan, Verification, pickle_line
from ds_reshard.operations import scan_pickles, verify


def add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "verify",
        help="read a checkpoint whole and list everything that is wrong with it; status 1 for any finding",
        example="checkpoints --deep",
    )
    add_checkpoint(parser, help=f"{FOLDER}; with --pickles any folder")
    parser.add_argument("--deep", action="store_true", help="look at the values of the tensors, too")
    parser.add_argument("--against", metavar="OTHER", help="a checkpoint that it shall be equal to, of any layout")
    parser.add_argument(
        "--pickles", action="store_true", help="only search all pickles below CKPT for what acts when they are loaded"
    )
    add_reading(parser)
    add_device(parser)
    add_trust(parser)
    add_json(parser, run, shared=True)


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
    show(arguments, found.to_json, lambda console: render_verification(found, console))
    return 0 if found.clean else 1


def _run_pickles(arguments: argparse.Namespace) -> int:
    """What is in the pickles alone; status 1 for any finding."""
    if arguments.deep or arguments.against is not None or arguments.tag is not None:
        raise ConfigError("--pickles looks at pickles alone: leave out --deep, --against and --tag")
    found = scan_pickles(arguments.checkpoint)
    show(arguments, found.to_json, lambda console: _render_pickles(found, console))
    return 1 if found.faults else 0


def _render_pickles(found: PickleScan, console: Console) -> None:
    for fault in found.faults:
        line(console, f"{fault.where}: {fault.what}", "red")
    _mends(found.faults, console)
    files = f"{found.files} file{'s' if found.files != 1 else ''}"
    told = f"{found.folder}: {files}; {pickle_line(found.pickles, found.unread, found.faults)}"
    line(console, told, "bold red" if found.faults else "green")


def _mends(faults: Sequence[Fault], console: Console) -> None:
    for mend in filter(None, dict.fromkeys(mends_of(faults))):
        line(console, f"to mend: {mend}")


def render_verification(found: Verification, console: Console) -> None:
    """One row a finding, what mends them, what is no fault, and a line that says what was read."""
    if found.faults and not console.is_terminal:
        for fault in found.faults:
            line(console, fault.line())
    elif found.faults:
        made = table("Findings", "where", "what", "expected", "found", show_lines=True)
        for fault in found.faults:
            where = fault.where.removeprefix(f"{found.folder}/")
            made.add_row(*(Text(printable(text)) for text in (where, fault.what, fault.expected, fault.found)))
        console.print(made)
    _mends(found.faults, console)
    for note in found.notes:
        line(console, note, "dim")
    if found.difference is not None:
        render_difference(found.difference, console)
    looked = f", the values of {found.tensors} tensors" if found.tensors else ""
    count = len(found.faults)
    result = f"{count} finding{'s' if count != 1 else ''}" if count else "nothing found"
    rate = f" at {size(round(found.bytes_read / found.seconds))}/s" if found.seconds else ""
    told = f"{found.folder}: {result} in {found.files} files, {found.records} checksums{looked}; "
    line(console, f"{told}{size(found.bytes_read)} read{rate}", "bold red" if count else "green")
    line(console, pickle_line(found.pickles, found.pickles_unread, found.faults))
