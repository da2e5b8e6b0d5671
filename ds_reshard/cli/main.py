"""The arguments of `ds-reshard`, what each subcommand calls, and the exit status.

0: nothing to report; 1: something was found (a refused hook, a fault in a checkpoint, a curve that the files
cannot tell); 2: wrong usage, or what was named cannot be read.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import NoReturn

import ds_reshard
from ds_reshard import __version__
from ds_reshard.cli import doctor, lr_command, render
from ds_reshard.cli.arguments import READING, Command, number, reading, show, switch, text
from ds_reshard.cli.conversion import CONVERT, PLAN
from ds_reshard.cli.launch import INTERRUPTED, launched, together
from ds_reshard.cli.lr_command import draw
from ds_reshard.cli.preflight_command import PREFLIGHT
from ds_reshard.cli.render import bar, complain
from ds_reshard.cli.verification import DIFF, VERIFY
from ds_reshard.containers.pickle_rules import PickleRules, in_force, trust_faults
from ds_reshard.errors import ReshardError, is_short, raise_faults, without_secrets
from ds_reshard.hosts import installed
from ds_reshard.hosts.accelerate.diagnostic import diagnose
from ds_reshard.model.rules import use_rules
from ds_reshard.operations import coming_run, fingerprint, inspect, names, read_config, read_rules

OK, FINDING, UNUSABLE = 0, 1, 2


class _Parser(argparse.ArgumentParser):
    """One that repeats no secret of what it does not know; so do its subcommands."""

    def error(self, message: str) -> NoReturn:
        super().error(without_secrets(message))


def build_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="ds-reshard",
        description="Resume a checkpoint under another topology, bit for bit.",
        epilog="exit status: 0 nothing found, 1 something found, 2 wrong usage or unreadable",
    )
    parser.add_argument("--version", action="version", version=f"ds-reshard {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


def _steps(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps, from 1 to 10,000,000")
    return int(text)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of one subcommand; what follows `--` is the coming run's own command line, kept as it is."""
    at = words.index("--") if list(words[:1]) in (["lr"], ["preflight"]) and "--" in words else len(words)
    arguments = build_parser().parse_args(words[:at])
    arguments.flags = list(words[at + 1 :]) if at < len(words) else None
    return arguments


def _open_standard_streams() -> None:
    """Where one is closed (2>&-): else a file of a checkpoint has its number, and what C code prints goes into it."""
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the least number that is free


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; an error of ours is its message on stderr and exit status 2, never a traceback.

    So is one of the machine, which is short of something; and behind the traceback of a bug the status is the same.
    """
    _open_standard_streams()
    arguments = parse(sys.argv[1:] if argv is None else argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        trust = getattr(arguments, "trust", [])
        raise_faults(trust_faults("--trust", trust), subject="the command line")
        rules = read_rules(arguments.rules) if getattr(arguments, "rules", None) is not None else ()
        with in_force(PickleRules(trust)), use_rules(rules):
            shared = getattr(arguments, "shared", False) and getattr(arguments, "shard", None) is None
            return together(lambda: run(arguments)) if shared else run(arguments)
    except ReshardError as error:
        if launched().tells or not error.agreed:
            complain(str(error))
        return UNUSABLE
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except Exception as error:
        known = is_short(error) or isinstance(error, OSError)
        complain(_short_of(error) if known else traceback.format_exc().rstrip())
        return UNUSABLE


def _short_of(error: Exception) -> str:
    """What the machine refused to a tool before it knew of any file, and what mends it."""
    what = without_secrets(str(error)).partition("\n")[0]
    if is_short(error):
        limits = "see its limits (ulimit -a), or run it with fewer --processes and --threads, or less --memory"
        return f"this process: no memory, or no thread, is left: {what}; {limits}"
    return f"this process: {what}; see its limits (ulimit -a), its folder and TMPDIR, or run it with --processes 1"


def _hooks(arguments: argparse.Namespace) -> int:
    if arguments.path:
        print(os.path.join(os.path.dirname(os.path.abspath(ds_reshard.__file__)), "startup"))
        return OK
    statuses = installed()
    if os.environ.get("DS_RESHARD_DISABLE", "") not in ("", "0"):
        why = "DS_RESHARD_DISABLE is set: import ds_reshard.auto does nothing"
        statuses = tuple(replace(s, state="disabled", reason=why) if s.state == "available" else s for s in statuses)
    told = {"hooks": [asdict(status) for status in statuses]}
    show(arguments, lambda: told, lambda console: render.render_hooks(statuses, console, every_patch=arguments.all))
    return FINDING if any(status.state == "refused" for status in statuses) else OK


def _inspect(arguments: argparse.Namespace) -> int:
    inspection = inspect(arguments.checkpoint, tag=arguments.tag)
    show(
        arguments,
        inspection.to_json,
        lambda console: render.render_inspection(inspection, console, every_row=arguments.all),
    )
    return FINDING if inspection.faults else OK


def _names(arguments: argparse.Namespace) -> int:
    """Status 1 if no map fits."""
    found = names(arguments.checkpoint, tag=arguments.tag, names=arguments.names)
    show(arguments, found.to_json, lambda console: render.render_naming(found, console))
    return OK if any(not one.faults for one in found.maps) else FINDING


def _fingerprint(arguments: argparse.Namespace) -> int:
    with bar("read") as progress:
        found = fingerprint(
            arguments.checkpoint,
            tag=arguments.tag,
            names=arguments.names,
            reading=reading(arguments),
            progress=progress,
        )
    show(arguments, found.to_json, lambda console: render.render_fingerprints(found, console))
    return FINDING if found.faults else OK


def _lr(arguments: argparse.Namespace) -> int:
    """Status 1 where a curve cannot be drawn: what it would be is not in the files."""
    coming = coming_run(
        arguments.checkpoint,
        arguments.config,
        flags=arguments.flags,
        tag=arguments.tag,
        steps=arguments.steps,
        version=doctor.version_of("deepspeed"),
    )
    if arguments.png is not None:
        draw(coming, arguments.png)
    show(arguments, coming.to_json, lambda console: lr_command.put_rates(coming, console))
    return FINDING if any(curve.unknown is not None for curve in coming.curves) else OK


def _doctor(arguments: argparse.Namespace) -> int:
    """Status 1 for a version outside its range, or a JSON that no optimizer and no scheduler can go with."""
    found = doctor.frameworks()
    findings = diagnose(read_config(arguments.config)) if arguments.config is not None else ()
    show(arguments, lambda: doctor.to_json(found, findings), lambda console: doctor.render(found, findings, console))
    return FINDING if doctor.wrong(found, findings) else OK


COMMANDS = (
    Command(
        "hooks",
        _hooks,
        "what is patched of each framework, and what not and why",
        "--all",
        "",
        {
            "--all": switch("list every patch"),
            "--path": switch("print the folder which, on PYTHONPATH, puts the hooks on in every process"),
        },
    ),
    Command(
        "inspect",
        _inspect,
        "show what a checkpoint holds, or every fault found in it",
        "checkpoints",
        "checkpoint --tag --rules --trust",
        {"--all": switch("list every parameter and file")},
    ),
    Command(
        "names",
        _names,
        "which map of names fits a checkpoint, or why one does not",
        "checkpoints --names llama-megatron",
        "checkpoint --tag --names --trust",
    ),
    Command(
        "fingerprint",
        _fingerprint,
        "64 bits of every tensor, the same under every layout",
        "checkpoints",
        f"checkpoint --tag --names {READING} --device --rules --trust",
        shared=True,
    ),
    Command(
        "lr",
        _lr,
        "draw the learning rate of the coming run before it is started",
        "checkpoints --config ds_config.json; or, of Megatron-LM, checkpoints -- --lr 3e-5 ...",
        "--tag --config --trust",
        {
            "checkpoint": text("CKPT", "the folder that was given to save_checkpoint, or to --save"),
            "--steps": number("how many steps (default: to the schedule's end)", type=_steps),
            "--png": text("FILE", "write a picture"),
        },
        usage="%(prog)s CKPT (--config FILE | [OPTION ...] -- MEGATRON-FLAG ...) [OPTION ...]",
    ),
    CONVERT,
    VERIFY,
    DIFF,
    PLAN,
    PREFLIGHT,
    Command(
        "doctor",
        _doctor,
        "installed frameworks against the tested ones, and what a JSON does",
        "--config ds_config.json",
        "",
        {"--config": text("FILE", "a DeepSpeed JSON, as it is used with accelerate")},
    ),
)
