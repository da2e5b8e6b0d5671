"""The arguments of `ds-reshard`, what each subcommand calls, and the exit status.

0: nothing to report; 1: something was found (a refused hook, a fault in a checkpoint, a curve that the files
cannot tell); 2: wrong usage, or
what was named cannot be read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata

from rich.console import Console

from ds_reshard import __version__
from ds_reshard.cli import doctor, lr_command, render
from ds_reshard.cli.arguments import add_device, add_reading, add_trust, reading
from ds_reshard.cli.comparison import add_diff
from ds_reshard.cli.conversion import add_convert
from ds_reshard.cli.lr_command import draw
from ds_reshard.cli.plan_command import add_plan
from ds_reshard.cli.render import bar
from ds_reshard.cli.verification import add_verify
from ds_reshard.containers.pickle_rules import PickleRules, in_force, trust_faults
from ds_reshard.errors import ReshardError, raise_faults
from ds_reshard.hosts import installed
from ds_reshard.hosts.accelerate.diagnostic import diagnose
from ds_reshard.operations import coming_run, fingerprint, inspect, read_config

OK, FINDING, UNUSABLE = 0, 1, 2
INTERRUPTED = 130  # as a shell says of a command that SIGINT ended


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
    add_trust(look)
    look.set_defaults(run=_inspect)

    prints = commands.add_parser("fingerprint", help="64 bits of every tensor, the same under every layout")
    prints.add_argument("checkpoint", metavar="CKPT", help="the folder that was given to save_checkpoint")
    prints.add_argument("--tag", help="the tag to look at (default: the one that 'latest' names)")
    add_reading(prints)
    add_device(prints)
    prints.add_argument("--json", action="store_true", help="print JSON")
    add_trust(prints)
    prints.set_defaults(run=_fingerprint)

    lr = commands.add_parser(
        "lr",
        help="draw the learning rate of the coming run before it is started",
        usage="%(prog)s CKPT (--config FILE | [OPTION ...] -- MEGATRON-FLAG ...) [OPTION ...]",
        epilog="for a checkpoint of Megatron-LM, everything after -- is the coming run's own command line",
    )
    lr.add_argument("checkpoint", metavar="CKPT", help="the folder that was given to save_checkpoint, or to --save")
    lr.add_argument("--config", metavar="FILE", help="the DeepSpeed JSON of the coming run")
    lr.add_argument("--tag", help="the tag that will be loaded (default: the one that 'latest' names)")
    lr.add_argument("--steps", type=_steps, metavar="N", help="how many steps (default: to the schedule's end)")
    lr.add_argument("--png", metavar="FILE", help="write a picture")
    lr.add_argument("--json", action="store_true", help="print JSON")
    add_trust(lr)
    lr.set_defaults(run=_lr)

    add_convert(commands)
    add_verify(commands)
    add_diff(commands)
    add_plan(commands)

    look_over = commands.add_parser("doctor", help="installed frameworks against the tested ones, and what a JSON does")
    look_over.add_argument("--config", metavar="FILE", help="a DeepSpeed JSON, as it is used with accelerate")
    look_over.add_argument("--json", action="store_true", help="print JSON")
    look_over.set_defaults(run=_doctor)
    return parser


def _steps(text: str) -> int:
    return _count(text, "steps", 10_000_000)


def _count(text: str, what: str, most: int) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what}, from 1 to {most:,}")
    return int(text)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of one subcommand; what follows `--` after `lr` is a command line of Megatron-LM, kept as it is."""
    at = words.index("--") if list(words[:1]) == ["lr"] and "--" in words else len(words)
    arguments = build_parser().parse_args(words[:at])
    arguments.flags = list(words[at + 1 :]) if at < len(words) else None
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; an error of ours is its message on stderr and exit status 2, never a traceback."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        trust = getattr(arguments, "trust", [])
        raise_faults(trust_faults("--trust", trust), subject="the command line")
        with in_force(PickleRules(trust)):
            return run(arguments)
    except ReshardError as error:
        print(f"ds-reshard: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print("ds-reshard: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has read enough (python.org, library/signal, "Note on SIGPIPE").
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


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


def _fingerprint(arguments: argparse.Namespace) -> int:
    with bar("read") as progress:
        found = fingerprint(arguments.checkpoint, tag=arguments.tag, reading=reading(arguments), progress=progress)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        render.render_fingerprints(found, Console())
    return FINDING if found.faults else OK


def _lr(arguments: argparse.Namespace) -> int:
    """Status 1 where a curve cannot be drawn: what it would be is not in the files."""
    coming = coming_run(
        arguments.checkpoint,
        arguments.config,
        flags=arguments.flags,
        tag=arguments.tag,
        steps=arguments.steps,
        version=_deepspeed_version(),
    )
    if arguments.png is not None:
        draw(coming, arguments.png)
    if arguments.json:
        print(json.dumps(coming.to_json(), indent=2))
    elif sys.stdout.isatty():
        lr_command.render_rates(coming, Console())
    else:
        sys.stdout.writelines(f"{line}\n" for line in lr_command.plain_rates(coming))
    return FINDING if any(curve.unknown is not None for curve in coming.curves) else OK


def _doctor(arguments: argparse.Namespace) -> int:
    """Status 1 for a version outside its range, or a JSON that no optimizer and no scheduler can go with."""
    found = doctor.frameworks()
    findings = diagnose(read_config(arguments.config)) if arguments.config is not None else ()
    if arguments.json:
        print(json.dumps(doctor.to_json(found, findings), indent=2))
    else:
        doctor.render(found, findings, Console())
    return FINDING if doctor.wrong(found, findings) else OK


def _deepspeed_version() -> str | None:
    """The DeepSpeed that is installed here, which is not imported."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None
