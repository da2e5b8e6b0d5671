"""The arguments of `ds-reshard`, what each subcommand calls, and the exit status.

0: nothing to report; 1: something was found (a refused hook, a fault in a checkpoint); 2: wrong usage, or
what was named cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.console import Console

from ds_reshard import __version__
from ds_reshard.cli import render
from ds_reshard.errors import ReshardError
from ds_reshard.hosts import installed
from ds_reshard.operations import inspect

OK, FINDING, UNUSABLE = 0, 1, 2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-reshard",
        description="Resume a checkpoint under another topology, bit for bit.",
        epilog="exit status: 0 nothing found, 1 something found, 2 wrong usage or unreadable",
    )
    parser.add_argument("--version", action="version", version=f"ds-reshard {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    hooks = commands.add_parser("hooks", help="list each patch of each framework with its state")
    hooks.add_argument("--json", action="store_true", help="print JSON")
    hooks.set_defaults(run=_hooks)

    look = commands.add_parser("inspect", help="show what a checkpoint holds, or every fault found in it")
    look.add_argument("checkpoint", metavar="CKPT", help="the folder that was given to save_checkpoint")
    look.add_argument("--tag", help="the tag to look at (default: the one that 'latest' names)")
    look.add_argument("--json", action="store_true", help="print JSON")
    look.add_argument("--all", action="store_true", help="list every parameter and file")
    look.set_defaults(run=_inspect)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; an error of ours is its message on stderr and exit status 2, never a traceback."""
    arguments = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except ReshardError as error:
        print(f"ds-reshard: {error}", file=sys.stderr)
        return UNUSABLE


def _hooks(arguments: argparse.Namespace) -> int:
    statuses = installed()
    if arguments.json:
        print(json.dumps({"hooks": [asdict(status) for status in statuses]}, indent=2))
    else:
        render.render_hooks(statuses, Console())
    return FINDING if any(status.state == "refused" for status in statuses) else OK


def _inspect(arguments: argparse.Namespace) -> int:
    inspection = inspect(arguments.checkpoint, tag=arguments.tag)
    if arguments.json:
        print(json.dumps(inspection.to_json(), indent=2))
    else:
        render.render_inspection(inspection, Console(), every_row=arguments.all)
    return FINDING if inspection.faults else OK
